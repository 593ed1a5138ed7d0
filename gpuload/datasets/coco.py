"""COCO: a folder of images with an annotation file (`Coco`), and torchvision's datasets of this format (`WrappedCoco`).

The main process reads and checks the annotations once, without pycocotools or torchvision, and packs them as JSON into
one buffer. This takes many seconds for the official COCO files, so the resulting index is cached on disk. Workers parse
the annotations of an image and build its target on each access; pycocotools is imported when the first polygon is
turned into a mask. No torch.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex

import numpy as np

from gpuload.checks import flag, one_of, strings
from gpuload.datasets.base import ImageFileDataset, existing_folder, pack_labels
from gpuload.datasets.files import check_expanded, check_pixels
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import MODES, Boxes, Encoded, Keypoints, Mask, Mode, as_meta
from gpuload.datasets.scan import LazySequence, Paths
from gpuload.datasets.stores.opening import is_url, open_stream, remote_options, scope_of
from gpuload.datasets.stores.store import existing_file, stamp
from gpuload.errors import short_repr

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["Coco", "CocoTargets", "WrappedCoco", "check_selection"]

INDEX_VERSION: Final = 3  # version of the index format; an index of another version is rebuilt
FIELDS: Final = {"masks": "segmentation", "keypoints": "keypoints"}  # optional targets, and their fields in the file
MAX_COORDINATE: Final = 1 << 20  # pixels; pycocotools' memory usage grows with the length of an edge
NUMBER_TYPES: Final = (int, float, np.integer, np.floating)
MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
JSON_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
MIN_POLYGON_NUMBERS: Final = 6  # numbers in the smallest polygon: x and y of three points
INTEGER_64: Final = "an integer that fits into 64 bits"
VALID_BOX: Final = "left, top, width and height, with no negative size"
# The call by which a user selects targets, for error messages.
WRAP_CALL: Final = "gpuload.wrap(dataset, annotations={!r})"
COCO_CALL: Final = "gpuload.Coco(…, targets={!r})"


class _CocoImages(ImageFileDataset):
    """Images with targets, which are built on access."""

    if TYPE_CHECKING:
        targets: Any

    def _make_sample(self, index: int, image: Encoded) -> tuple[Encoded, Any]:
        target = self.targets[index]
        if (transform := getattr(self, "target_transform", None)) is not None:
            return image, transform(target)
        return image, as_meta(target) if type(target) is list else target


class Coco(_CocoImages):
    """Images with boxes, labels, masks and keypoints, from COCO's JSON.

    Yields ``(Encoded, target)``. The target is the same as for a wrapped CocoDetection (`gpuload.wrap`): a dict with
    ``"boxes"``, ``"labels"``, ``"image_id"``, and the optional fields that the annotations have. Images are sorted by
    id; the annotations of an image keep the file's order. An image without annotations has a target with no objects.
    Turning polygons into masks requires pycocotools.

    Args:
        images: the folder of images.
        annotations: the JSON file.
        targets: the optional targets to build: ``"masks"``, ``"keypoints"`` or both; by default, all that the
            annotations have. ``()`` selects neither; ``"raw"`` keeps the list of annotations unchanged.
        crowds: False skips crowd annotations (``iscrowd``).
        mode: the channels to decode to, see `Encoded`.
        storage_options: for a folder or file at a URL: options for fsspec, or a `Remote`.

    Attributes:
        ids: the id of each image in the file.
        paths: the full path of each image, in a sequence that builds each str on access.
        targets: the target of each image, in a sequence that builds each target on access.
        categories: the category names, keyed by id.

    Raises:
        FileNotFoundError: the folder or the file does not exist.
        ValueError: the file is not in COCO's format; a file name points outside the folder; a box is missing or has a
            negative size. The message names the image or annotation.

    Warns:
        UserWarning: annotations belong to no image or category, have no polygons, or have polygons of fewer than three
            points, which the masks ignore.

    While reading, FileNotFoundError names an image that is in the file but does not exist, ValueError names an invalid
    polygon, and DecodeError names masks that are larger than `Decode` allows.
    """

    @dataset_arguments
    def __init__(
        self,
        images: str | os.PathLike[str],
        annotations: str | os.PathLike[str],
        *,
        targets: Literal["raw"] | Collection[str] | None = None,
        crowds: bool = True,
        mode: Mode = "RGB",
        storage_options: StorageOptions = None,
    ) -> None:
        from gpuload.datasets.stores.cached import load_or_build  # slow to import, and not needed by workers

        crowds, names = flag("crowds", crowds), check_selection(targets, "targets")
        self.mode: Mode = one_of("mode", mode, MODES)
        remote = remote_options([images, annotations], storage_options)
        root = existing_folder(images)
        self._remote = remote if is_url(root) else None
        self.annotations = existing_file(annotations, "COCO's annotations, a JSON file", allow_streams=True)
        selection = (root, names, crowds)
        arrays = load_or_build(
            self.annotations,
            [INDEX_VERSION, *stamp(self.annotations, remote), *scope_of(remote), *selection],
            lambda: _build_index(self.annotations, *selection, remote),
        )
        header = json.loads(arrays["short"].tobytes())
        self.ids = arrays["ids"]
        self.paths = Paths(root, arrays["paths"], arrays["path_offsets"])
        self.categories: dict[int, str] = dict(header["categories"])
        for warning in header["remarks"]:
            warnings.warn(warning, stacklevel=3)
        self.targets = JsonLists(Paths("", arrays["lists"], arrays["list_offsets"]))
        if names != "raw":
            sizes = arrays["sizes_hw"].reshape(-1, 2)
            options = header["names"], header["points"], header["more"]
            self.targets = CocoTargets(self.ids, sizes, self.targets, *options, COCO_CALL)

    def __getitem__(self, index: SupportsIndex) -> tuple[Encoded, Any]:
        try:
            return super().__getitem__(index)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT,
                f"image {self.ids[self._normalize_index(index)]} of {self.annotations!r} is not in the folder; copy it "
                "there, or remove its entry from the annotation file",
                error.filename,
            ) from None

    def __repr__(self) -> str:
        return f"Coco({self.root!r}: {len(self)} images)"


class WrappedCoco(_CocoImages):
    """A CocoDetection wrapped by `gpuload.datasets.wrap.wrap`, or a CocoCaptions, whose targets are lists of captions.

    Attributes:
        ids: the id of each image in the annotation file.
        paths: the absolute path of each image, in a sequence that builds each str on access.
        targets: the target of each image, in a sequence that builds each target on access.
        target_transform: the function that is applied to each target, or None.
    """

    def __init__(self, dataset: Any, mode: Mode, annotations: Any, crowds: bool) -> None:
        self.mode = mode
        self.ids = pack_labels(dataset.ids)
        images = [dataset.coco.imgs[key] for key in dataset.ids]
        self.paths = Paths.pack_absolute(
            os.path.abspath(dataset.root), [_image_path(image, dataset.root) for image in images]
        )
        self.target_transform: Callable[[Any], Any] | None = getattr(dataset.transforms, "target_transform", None)
        self._name = type(dataset).__name__
        source = f"{self._name}({self.root!r})"
        all_annotations, images_by_id = dataset.coco.anns.values(), dataset.coco.imgs
        unmatched = [
            annotation for annotation in all_annotations if not _is_known_id(annotation.get("image_id"), images_by_id)
        ]
        user_warnings = [_unmatched_warning(unmatched, len(all_annotations), "image_id", images_by_id, source)]
        targets = [dataset._load_target(key) for key in dataset.ids]
        if not crowds:
            targets = [[item for item in objects if not item.get("iscrowd")] for objects in targets]
        if annotations == "raw" or (annotations is None and self.target_transform is not None):
            self.targets = _pack_if_json(targets)
        elif self.target_transform is None:
            categories = dataset.coco.cats.values()
            self.targets, target_warnings = _build_targets(
                targets, self.ids, images, categories, annotations, source, WRAP_CALL
            )
            self.targets.lists = _pack_if_json(self.targets.lists)
            user_warnings += target_warnings
        else:
            raise TypeError(
                f"annotations={annotations!r} converts the annotations to targets, but the dataset's target_transform "
                "expects the raw annotations; remove one of the two"
            )
        for warning in filter(None, user_warnings):
            warnings.warn(warning, stacklevel=4)  # where the user calls `wrap`

    def __repr__(self) -> str:
        return f"wrap({self._name}({self.root!r}): {len(self)} images)"


def _build_index(path: str, root: str, names: Any, crowds: bool, remote: Remote | None) -> dict[str, np.ndarray]:
    """Read and check an annotation file. Return its content as arrays for the cached index; short lists and names are
    stored as JSON."""
    images, annotations, categories = _read_annotations(path, remote)
    images.sort(key=lambda image: image["id"])
    by_image: dict[int, list[Any]] = {image["id"]: [] for image in images}
    if len(by_image) < len(images):
        duplicate = next(a["id"] for a, b in pairwise(images) if a["id"] == b["id"])
        raise ValueError(f"{path!r} lists two images with the id {duplicate!r}; ids must be unique")
    unmatched = []
    for annotation in annotations:
        if not _is_known_id(annotation.get("image_id"), by_image):
            unmatched.append(annotation)
        elif crowds or not annotation.get("iscrowd"):
            by_image[annotation["image_id"]].append(annotation)
    user_warnings = [_unmatched_warning(unmatched, len(annotations), "image_id", by_image, repr(path))]
    # A URL is not a path, but the part after "://" is checked as if it were.
    folder = root if not is_url(root) else "/" + root.partition("://")[2]
    paths = Paths.pack_absolute(folder, [_image_path(image, folder) for image in images])
    header: dict[str, Any] = {"categories": [(category["id"], category["name"]) for category in categories]}
    ids, lists = list(by_image), list(by_image.values())
    arrays = {"ids": np.array(ids, np.int64), "paths": paths.data, "path_offsets": paths.offsets}
    if names != "raw":
        targets, target_warnings = _build_targets(lists, ids, images, categories, names, repr(path), COCO_CALL)
        lists, user_warnings = targets.lists, [*user_warnings, *target_warnings]
        header |= {"names": targets.names, "points": targets.keypoint_count, "more": targets.extra_fields}
        arrays["sizes_hw"] = targets.sizes_hw.ravel()
    header["remarks"] = list(filter(None, user_warnings))
    packed = _pack_json(lists)
    arrays |= {"lists": packed.data, "list_offsets": packed.offsets}
    return {**arrays, "short": np.frombuffer(json.dumps(header).encode(), np.uint8)}


def _read_annotations(path: str, remote: Remote | None) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the images, annotations and categories in a file.

    Raises:
        ValueError: the file is not JSON, or is not in COCO's format.
    """
    try:
        with open_stream(path, remote) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path!r} is truncated, or is not JSON: {error}") from error
    lists = [content.get(name) for name in ("images", "annotations")] if isinstance(content, dict) else [None]
    if not all(isinstance(entries, list) for entries in lists):
        raise ValueError(
            f"{path!r} does not have lists of images and annotations; expected COCO's format, as in "
            "instances_val2017.json"
        )
    for image in content["images"]:
        if (
            not isinstance(image, dict)
            or type(image.get("id")) is not int
            or not _is_int64(image["id"])  # more than 64 bits
            or not isinstance(image.get("file_name"), str)
        ):
            raise ValueError(f"an image in {path!r} lacks an integer id or a file_name: {repr(image)[:200]}")
    names: dict[Any, Any] = {}
    for kind in ("annotations", "categories"):
        for entry in content.get(kind) or ():
            is_valid = isinstance(entry, dict) and (
                kind == "annotations" or (isinstance(entry.get("id"), int | str) and "name" in entry)
            )
            if not is_valid:
                raise ValueError(f"one of the {kind} in {path!r} is not in COCO's format: {repr(entry)[:200]}")
            if kind == "categories" and (name := names.setdefault(entry["id"], entry["name"])) != entry["name"]:
                raise ValueError(
                    f"{path!r} has two categories with the id {entry['id']!r}, {name!r} and {entry['name']!r}; ids "
                    "must be unique"
                )
    return content["images"], content["annotations"], content.get("categories") or []


@dataclass(eq=False, repr=False)
class CocoTargets(LazySequence[Any]):
    """The targets of all images, each a dict; see `gpuload.datasets.wrap.wrap`."""

    _entry_noun = "targets"
    ids: Any  # one per image
    sizes_hw: np.ndarray  # the image sizes in the file; 0, 0 if an image has none
    lists: Sequence[Any]  # for each image, the annotations of its objects, with only the fields that targets need
    names: list[str]  # the optional targets to build: masks, keypoints
    keypoint_count: int  # keypoints per object
    extra_fields: list[str]  # area and iscrowd, if all annotations have them
    selection_call: str  # the call with which a user selects other targets, for messages

    def __len__(self) -> int:
        return len(self.lists)

    def _build_entry(self, index: int) -> dict[str, Any]:
        objects, image_id = self.lists[index], self.ids[index]
        boxes = np.array([annotation["bbox"] for annotation in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        height, width = self.sizes_hw[index].tolist()
        target: dict[str, Any] = {
            "image_id": int(image_id) if isinstance(image_id, np.integer) else image_id,
            "boxes": Boxes(boxes, canvas_hw=(height, width) if height else None),
            "labels": np.array([annotation["category_id"] for annotation in objects], np.int64),
        }
        for name, dtype in (("area", np.float32), ("iscrowd", np.int64)):
            if name in self.extra_fields:
                target[name] = np.array([annotation[name] for annotation in objects], dtype)
        if "masks" in self.names:
            target["masks"] = Mask(self._decode_masks(objects, target["image_id"], height, width))
        if "keypoints" in self.names:
            unlabeled = [0] * (3 * self.keypoint_count)  # COCO's values for points without a label
            points = np.array([annotation.get("keypoints") or unlabeled for annotation in objects], np.float32)
            points = points.reshape(-1, self.keypoint_count, 3)
            target["keypoints"] = Keypoints(np.ascontiguousarray(points[..., :2]))
            target["visibility"] = points[..., 2].astype(np.int64)
        return target

    def _decode_masks(self, objects: Sequence[Any], image_id: Any, height: int, width: int) -> np.ndarray:
        """Return the n×H×W masks of an image. The height and width come from a file, so check them first."""
        name, remedy = (
            f"the COCO image {image_id!r}",
            f", or {_omit_remedy('masks', self.names, self.selection_call)}",
        )
        check_pixels(height, width, f"{name}, by the size in its annotation file,", remedy)
        check_expanded(len(objects) * height * width, f"the array of the {len(objects)} masks of {name}", remedy)
        masks = np.zeros((len(objects), height, width), np.uint8)
        for mask, annotation in zip(masks, objects, strict=True):
            mask[...] = _decode_mask(annotation, height, width, self.selection_call)
        return masks


def _build_targets(
    annotations: Sequence[list[Any]],
    ids: Sequence[Any],
    images: Sequence[Any],
    categories: Iterable[Any],
    names: Collection[str] | None,
    source: str,
    selection_call: str,
) -> tuple[CocoTargets, list[str]]:
    """Return the targets of all images, with `lists` that are not packed yet, and warnings for the user.

    `annotations` has one list per image. `names` are the optional targets to build; None means all that the annotations
    have. `source` is the file's name in messages; for `selection_call`, see `CocoTargets`.

    Raises:
        ValueError: a field of an annotation or image is missing or invalid; the message names it.
    """
    all_annotations = list(chain.from_iterable(annotations))
    available = [name for name, field in FIELDS.items() if any(annotation.get(field) for annotation in all_annotations)]
    names = available if names is None else [name for name in FIELDS if name in names]
    raw_remedy = f"keep the annotations unchanged, with {selection_call.format('raw')}"
    _check_field(all_annotations, "bbox", _is_box, VALID_BOX, f"fix the file, or {raw_remedy}")
    _check_field(all_annotations, "category_id", _is_int64, INTEGER_64, raw_remedy)
    user_warnings, keypoint_count = [], 0
    if labels := {label: None for category in categories if (label := _as_int64(category.get("id"))) is not None}:
        unmatched = [annotation for annotation in all_annotations if _as_int64(annotation["category_id"]) not in labels]
        user_warnings.append(_unmatched_warning(unmatched, len(all_annotations), "category_id", labels, source))
    if "masks" in names:
        not_empty = [annotation for annotation in all_annotations if annotation.get("segmentation") != []]
        _check_present(not_empty, "segmentation", _omit_remedy("masks", names, selection_call))
        user_warnings.append(_small_polygon_warning(all_annotations, source))
    if "keypoints" in names:
        keypoint_count = _count_points(
            all_annotations, f"{_omit_remedy('keypoints', names, selection_call)}, or {raw_remedy}"
        )
    sizes_hw = np.array([_image_size(image, names, selection_call) for image in images], np.int32).reshape(-1, 2)
    # The targets have each of these fields only if all annotations have a value for it other than null.
    extra_fields = [
        name for name in ("area", "iscrowd") if all(annotation.get(name) is not None for annotation in all_annotations)
    ]
    for field, is_valid, expected in (("area", _is_number, "a number"), ("iscrowd", _is_int64, INTEGER_64)):
        if field in extra_fields:
            _check_field(all_annotations, field, is_valid, expected, raw_remedy)
    required_fields = ("id", "bbox", "category_id", *extra_fields, *(FIELDS[name] for name in names))
    lists = [
        [{name: annotation[name] for name in required_fields if name in annotation} for annotation in objects]
        for objects in annotations
    ]
    return CocoTargets(ids, sizes_hw, lists, names, keypoint_count, extra_fields, selection_call), user_warnings


def _omit_remedy(name: str, names: list[str], selection_call: str) -> str:
    """Return a remedy for a message: how to omit a target."""
    return f"omit {name}, with {selection_call.format(tuple(other for other in names if other != name))}"


def _image_size(image: Any, names: list[str], selection_call: str) -> tuple[int, int]:
    """Return the height and width of an image according to the file; 0, 0 if the file does not have them."""
    size = image.get("height"), image.get("width")
    if all(type(length) is int and 0 < length < 1 << 31 for length in size):
        return size
    if "masks" not in names:
        return 0, 0
    raise ValueError(
        f"the COCO image {image['id']!r} has height {size[0]!r} and width {size[1]!r}, but its masks need both; "
        f"{_omit_remedy('masks', names, selection_call)}"
    )


def _count_points(annotations: Collection[Any], remedy: str) -> int:
    """Return the number of keypoints per object. Objects without keypoints are ignored.

    Raises:
        ValueError: keypoints are not triples of numbers, or their number differs between objects.
    """
    annotations = [annotation for annotation in annotations if annotation.get("keypoints")]
    _check_field(annotations, "keypoints", _are_numbers, "a list of numbers", remedy)
    counts = {len(annotation["keypoints"]): annotation for annotation in annotations}
    if len(counts) > 1 or any(count % 3 for count in counts):
        example = " and ".join(f"{n} numbers (annotation {item.get('id')!r})" for n, item in list(counts.items())[:2])
        raise ValueError(
            "COCO keypoints must be x, y and visibility per point, with the same number of points for each object, got "
            f"{example}; {remedy}"
        )
    return next(iter(counts), 0) // 3


def check_selection(annotations: object, argument_name: str = "annotations") -> Any:
    """Check and return the argument `annotations` of `wrap`; `argument_name` is its name in messages."""
    if annotations is None or annotations == "raw":
        return annotations
    names = strings(f"{argument_name}, unless it is 'raw',", annotations)
    if unknown := [name for name in names if name not in FIELDS]:
        raise ValueError(
            f"{argument_name} must be None, 'raw', or some of 'masks' and 'keypoints', as in ('masks',), got "
            f"{unknown[0]!r}; targets always have boxes and labels"
        )
    return names


def _check_field(
    annotations: Collection[Any], field: str, is_valid: Callable[[Any], bool], expected: str, remedy: str
) -> None:
    _check_present(annotations, field, remedy)
    for annotation in annotations:
        if not is_valid(value := annotation[field]):
            raise ValueError(f"{_describe(annotation)} has {field} {short_repr(value)}, expected {expected}; {remedy}")


def _check_present(annotations: Iterable[Any], field: str, remedy: str) -> None:
    for annotation in annotations:
        if annotation.get(field) in (None, [], ""):
            raise ValueError(f"{_describe(annotation)} has no {field}; {remedy}")


def _describe(annotation: Any) -> str:
    return f"the COCO annotation {annotation.get('id')!r} of image {short_repr(annotation.get('image_id'))}"


def _is_int64(value: object) -> bool:
    return _as_int64(value) is not None


def _as_int64(value: Any) -> int | None:
    """Return a value as an integer of at most 64 bits, even if it is written as text or as 3.0; None for any other
    value."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    is_exact = -(1 << 63) <= number < 1 << 63 and (isinstance(value, str) or number == value)
    return number if is_exact else None


def _is_number(value: Any) -> bool:
    """Return whether a value is a number within float32's range."""
    return isinstance(value, NUMBER_TYPES) and bool(abs(value) <= MAX_FLOAT32)


def _is_list(values: Any) -> bool:
    return isinstance(values, list | tuple | np.ndarray) and all(isinstance(value, NUMBER_TYPES) for value in values)


def _are_numbers(values: Any) -> bool:
    return _is_list(values) and all(map(_is_number, values))


def _is_box(value: Any) -> bool:
    return _are_numbers(value) and len(value) == 4 and value[2] >= 0 and value[3] >= 0


def _unmatched_warning(unmatched: list[Any], count: int, field: str, ids: Collection[Any], source: str) -> str:
    """Return a warning about the `unmatched` annotations, out of `count`, which refer to an id that is not among `ids`;
    "" if there are none.

    Raises:
        ValueError: all annotations refer to unknown ids.
    """
    if not unmatched:
        return ""
    kinds = {"image_id": "images", "category_id": "categories"}[field]
    examples = ", ".join([short_repr(key) for key in list(ids)[:3]] + ["…"] * (len(ids) > 3))
    detail = (
        f"annotation {short_repr(unmatched[0].get('id'))} has {field} {short_repr(unmatched[0].get(field))}, but "
        f"{f'the ids of {kinds} are {examples}' if ids else f'there are no {kinds}'}. Correct the {field}, or remove "
        "such annotations from the file"
    )
    if len(unmatched) == count:
        raise ValueError(f"none of the {count:,} annotations in {source} belongs to one of its {kinds}: {detail}")
    suffix = ", and are ignored" if field == "image_id" else ""
    return (
        f"{len(unmatched):,} of the {count:,} annotations in {source} belong to none of its {kinds}{suffix}: {detail}"
    )


def _is_known_id(value: object, ids: Collection[Any]) -> bool:
    return isinstance(value, Hashable) and value in ids  # the file's value may be a list


def _small_polygon_warning(annotations: Collection[Any], source: str) -> str:
    """Return a warning if there are no polygons, or polygons of fewer than three points, else ""."""
    with_polygons = [annotation for annotation in annotations if isinstance(annotation["segmentation"], list)]
    affected = [
        item
        for item in with_polygons
        if not item["segmentation"] or len(_valid_polygons(item["segmentation"])) < len(item["segmentation"])
    ]
    if not affected:
        return ""
    empty_count = sum(not _valid_polygons(annotation["segmentation"]) for annotation in affected)
    return (
        f"{len(affected):,} of the {len(annotations):,} annotations in {source} have no polygons, or polygons of "
        f"fewer than three points, which have no area and are ignored; {empty_count:,} of them have no other polygon, "
        f"so their masks are empty. The first is annotation {short_repr(affected[0].get('id'))}. Correct the polygons, "
        "or remove them from the file"
    )


def _valid_polygons(segmentation: list[Any]) -> list[Any]:
    """Return the polygons with at least three points, and invalid entries, which are reported elsewhere."""
    return [item for item in segmentation if not isinstance(item, list | tuple) or len(item) >= MIN_POLYGON_NUMBERS]


def _image_path(image: Any, root: str | os.PathLike[str]) -> str:
    """Return the path of an image. The file name comes from untrusted data, so raise ValueError if the path is outside
    the root."""
    name = f"the COCO image {image['id']!r} has the file name {image['file_name']!r}"
    try:
        is_usable = b"\0" not in os.fsencode(image["file_name"])
    except UnicodeEncodeError:  # half of a surrogate pair
        is_usable = False
    if not is_usable:
        raise ValueError(f"{name}, which no file can have; correct the annotation file")
    path = os.path.abspath(os.path.join(root, image["file_name"]))
    if not path.startswith(os.path.join(os.path.abspath(root), "")):
        raise ValueError(f"{name}, which points outside {os.fspath(root)!r}; pass a folder that contains all images")
    return path


def _decode_mask(annotation: Any, height: int, width: int, selection_call: str) -> np.ndarray:
    """Return the uint8 H×W mask of an object, from polygons or from run lengths (RLE), which can be packed as text.

    Run lengths are decoded here: if there are too few, pycocotools' `decode` returns uninitialized memory.
    """
    segmentation, name = annotation["segmentation"], f"the COCO annotation {annotation.get('id')!r}"
    if isinstance(segmentation, list):
        if not (segmentation := _valid_polygons(segmentation)):
            return np.zeros((height, width), np.uint8)
        for polygon in segmentation:
            if not _is_list(polygon):
                raise ValueError(
                    f"{name} has the polygon {short_repr(polygon)}; expected a list of polygons, each a list of "
                    f"numbers below {MAX_COORDINATE}"
                )
            if len(polygon) % 2:
                raise ValueError(
                    f"{name} has a polygon of {len(polygon)} numbers; expected x and y of at least three points"
                )
            if not all(abs(number) < MAX_COORDINATE for number in polygon):
                raise ValueError(f"{name} has a polygon that extends beyond {MAX_COORDINATE} pixels, or contains NaN")
        try:
            from pycocotools import mask as coco
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "building masks from COCO's polygons needs pycocotools, which is not installed: pip install "
                f"pycocotools, or omit masks, with {selection_call.format(())}"
            ) from error
        segmentation = coco.merge(coco.frPyObjects(segmentation, height, width))
    try:
        runs, size = segmentation["counts"], list(segmentation["size"])
        lengths = np.array(runs, np.int64) if isinstance(runs, list) else _unpack_runs(runs)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(
            f"{name} has the segmentation {short_repr(segmentation)}; expected polygons, or run lengths with counts "
            f"and size: {error}"
        ) from error
    if size != [height, width] or (lengths < 0).any() or lengths.sum() != height * width:
        raise ValueError(
            f"{name} has run lengths for {lengths.sum()} pixels and size {size}, "
            f"but its image has {height} × {width} = {height * width} pixels"
        )
    return np.repeat(np.arange(len(lengths), dtype=np.uint8) % 2, lengths).reshape(width, height).T


def _unpack_runs(text: str | bytes) -> np.ndarray:
    """Unpack run lengths from COCO's text.

    Each character holds six bits: its code minus 48. The lower five bits belong to a number, whose lowest bits come
    first; the sixth is set if the number continues in the next character. A number's highest bit is its sign. From the
    fourth number on, the text stores the difference from the second-to-last number.
    """
    values = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(~values & 32)
    if not len(ends) or (values < 0).any() or (values > 63).any() or ends[-1] != len(values) - 1:
        raise ValueError("COCO's packed run lengths are invalid")
    starts = np.concatenate([[0], ends[:-1] + 1])
    shifts = 5 * (np.arange(len(values)) - np.repeat(starts, ends - starts + 1))
    numbers = np.add.reduceat((values & 31) << np.minimum(shifts, 40), starts)
    numbers -= (values[ends] >> 4 & 1) << np.minimum(shifts[ends] + 5, 45)
    for first in (1, 2):
        numbers[first::2] = np.cumsum(numbers[first::2])
    return numbers


class JsonLists(LazySequence[Any]):
    """Values as JSON texts in one buffer, each parsed on access."""

    _entry_noun = "targets"

    def __init__(self, texts: Paths) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def _build_entry(self, index: int) -> Any:
        return json.loads(self.texts[index])


def _pack_json(values: Iterable[object]) -> Paths:
    return Paths.pack_relative("", [json.dumps(value, separators=(",", ":")).encode() for value in values])


def _pack_if_json(values: list[Any]) -> Sequence[Any]:
    """Pack values as JSON if that preserves them; otherwise return them unchanged, since the user may have added other
    objects."""
    return JsonLists(_pack_json(values)) if _is_json(values) else values


def _is_json(values: Collection[Any]) -> bool:
    """Return whether JSON preserves these values and their types."""
    types = set(map(type, values))
    if types <= JSON_SCALARS:
        return True
    if not types <= JSON_SCALARS | {list, dict}:
        return False
    are_lists_json = all(_is_json(value) for value in values if type(value) is list)
    dicts = [value for value in values if type(value) is dict]
    return are_lists_json and all(set(map(type, value)) <= {str} and _is_json(value.values()) for value in dicts)
