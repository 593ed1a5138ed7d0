"""COCO: a folder of images with a file of annotations (`Coco`), and torchvision's datasets of them (`WrappedCoco`).

The main process reads and checks annotations once, without pycocotools or torchvision, and packs them as JSON in one
buffer; for COCO's own files that takes many seconds, so what comes of it is kept for the next time. Workers parse the
annotations of one image and make its target each time it is asked for; pycocotools is imported where the first polygon
becomes a mask. No torch.
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

from gpuload.datasets.base import ImageFileDataset, existing_folder, pack_labels
from gpuload.datasets.files import check_expanded, check_pixels
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Boxes, Encoded, Keypoints, Mask, Mode, as_meta, check_mode
from gpuload.datasets.scan import Lazy, Paths
from gpuload.datasets.stores.opening import is_url, open_stream, remote_for, scope_of
from gpuload.datasets.stores.store import existing_file, stamp
from gpuload.errors import one_line

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["Coco", "CocoTargets", "WrappedCoco", "chosen"]

INDEX: Final = 3  # which form an index has; one of another form is built again
FIELDS: Final = {"masks": "segmentation", "keypoints": "keypoints"}  # what may be chosen, and its name in the file
FARTHEST: Final = 1 << 20  # pixels; pycocotools' memory grows with the length of an edge
NUMBERS: Final = (int, float, np.integer, np.floating)
LARGEST: Final = float(np.finfo(np.float32).max)
JSON: Final = frozenset({str, int, float, bool, type(None)})
CORNERS: Final = 6  # numbers of the smallest polygon, x and y of three points
WHOLE: Final = "a whole number that fits into 64 bits"
BOX: Final = "left, top, width and height, neither of them negative"
# How a user chooses targets.
OF_WRAP: Final = "gpuload.wrap(dataset, annotations={!r})"
OF_COCO: Final = "gpuload.Coco(…, targets={!r})"


class _CocoImages(ImageFileDataset):
    """Images with a target each, made when it is asked for."""

    if TYPE_CHECKING:
        targets: Any

    def _with(self, number: int, image: Encoded) -> tuple[Encoded, Any]:
        target = self.targets[number]
        if (transform := getattr(self, "target_transform", None)) is not None:
            return image, transform(target)
        return image, as_meta(target) if type(target) is list else target


class Coco(_CocoImages):
    """Images with boxes, labels, masks and keypoints, from COCO's JSON.

    Yields ``(Encoded, target)``, the target as `gpuload.wrap` makes it of torchvision's CocoDetection: a dict with
    ``"boxes"``, ``"labels"``, ``"image_id"``, and what else the annotations have. Images come in the order of their
    ids, annotations of one in the file's order; images without annotations have targets too, with no objects. Masks of
    polygons need pycocotools when they are made.

    Args:
        images: the folder of images.
        annotations: the JSON file.
        targets: which of ``"masks"`` and ``"keypoints"`` to make, default those that the annotations have; ``()`` for
            neither; ``"raw"``: the list of annotations as the file has it.
        crowds: False leaves out annotations of crowds (``iscrowd``).
        mode: what the pixels become, see `Encoded`.
        storage_options: of a folder or file at a URL, what fsspec takes, or a `Remote`.

    Attributes:
        ids: the id of each image in the file.
        paths: the full path of each image: a sequence that makes each str when it is asked for.
        targets: the target of each image: a sequence that makes each when it is asked for.
        categories: the name of each category, by its id.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the file is not COCO's format; a file name leads out of the folder; a box is missing or has a
            negative size. The message names the image or annotation.

    Warns:
        UserWarning: annotations belong to no image or category, or have polygons of fewer than three points, which
            are left out of their masks.

    While reading, FileNotFoundError names an image that is listed but not there, ValueError a bad polygon, DecodeError
    masks that are larger than `Decode` allows.
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
        from gpuload.datasets.stores.cached import cached  # slow to import, and not needed by workers

        if not isinstance(crowds, bool):
            raise TypeError(f"crowds must be True or False, got {crowds!r}")
        names = chosen(targets, "targets")
        self.mode: Mode = check_mode(mode)
        remote = remote_for([images, annotations], storage_options)
        root = existing_folder(images)
        self._remote = remote if is_url(root) else None
        self.annotations = existing_file(annotations, "COCO's annotations, a JSON file", streams=True)
        selection = (root, names, crowds)
        arrays = cached(
            self.annotations,
            [INDEX, *stamp(self.annotations, remote), *scope_of(remote), *selection],
            lambda: _index(self.annotations, *selection, remote),
        )
        short = json.loads(arrays["short"].tobytes())
        self.ids = arrays["ids"]
        self.paths = Paths(root, arrays["paths"], arrays["path_offsets"])
        self.categories: dict[int, str] = dict(short["categories"])
        for remark in short["remarks"]:
            warnings.warn(remark, stacklevel=3)
        self.targets = JsonLists(Paths("", arrays["lists"], arrays["list_offsets"]))
        if names != "raw":
            sizes = arrays["sizes_hw"].reshape(-1, 2)
            parts = short["names"], short["points"], short["more"]
            self.targets = CocoTargets(self.ids, sizes, self.targets, *parts, OF_COCO)

    def __getitem__(self, index: SupportsIndex) -> tuple[Encoded, Any]:
        try:
            return super().__getitem__(index)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT,
                f"image {self.ids[self._from_start(index)]} of {self.annotations!r} is not in the folder; copy it "
                "there, or leave it out of the file",
                error.filename,
            ) from None

    def __repr__(self) -> str:
        return f"Coco({self.root!r}: {len(self)} images)"


class WrappedCoco(_CocoImages):
    """A CocoDetection wrapped by `gpuload.datasets.wrap.wrap`; of CocoCaptions, with a list of captions.

    Attributes:
        ids: the id of each image in the annotation file.
        paths: the absolute path of each image: a sequence that makes each str when it is asked for.
        targets: the target of each image: a sequence that makes each when it is asked for.
        target_transform: what is applied to a target before it is yielded, or None.
    """

    def __init__(self, dataset: Any, mode: Mode, annotations: Any, crowds: bool) -> None:
        self.mode = mode
        self.ids = pack_labels(dataset.ids)
        images = [dataset.coco.imgs[key] for key in dataset.ids]
        self.paths = Paths.below(os.path.abspath(dataset.root), [_path(image, dataset.root) for image in images])
        self.target_transform: Callable[[Any], Any] | None = getattr(dataset.transforms, "target_transform", None)
        self._name = type(dataset).__name__
        source = f"{self._name}({self.root!r})"
        every, known = dataset.coco.anns.values(), dataset.coco.imgs
        unmatched = [annotation for annotation in every if not _is_in(annotation.get("image_id"), known)]
        remarks = [_unmatched(unmatched, len(every), "image_id", known, source)]
        targets = [dataset._load_target(key) for key in dataset.ids]
        if not crowds:
            targets = [[one for one in objects if not one.get("iscrowd")] for objects in targets]
        if annotations == "raw" or (annotations is None and self.target_transform is not None):
            self.targets = _if_json(targets)
        elif self.target_transform is None:
            categories = dataset.coco.cats.values()
            self.targets, more = _checked(targets, self.ids, images, categories, annotations, source, OF_WRAP)
            self.targets.lists = _if_json(self.targets.lists)
            remarks += more
        else:
            raise TypeError(
                f"annotations={annotations!r} makes targets of the annotations, but the dataset's target_transform "
                "takes them as they are; leave one of the two out"
            )
        for remark in filter(None, remarks):
            warnings.warn(remark, stacklevel=4)  # where the user calls `wrap`

    def __repr__(self) -> str:
        return f"wrap({self._name}({self.root!r}): {len(self)} images)"


def _index(path: str, root: str, names: Any, crowds: bool, remote: Remote | None) -> dict[str, np.ndarray]:
    """Return what a file says, checked, in arrays; what is short as JSON."""
    listed, objects, categories = _parts(path, remote)
    listed.sort(key=lambda image: image["id"])
    by_image: dict[int, list[Any]] = {image["id"]: [] for image in listed}
    if len(by_image) < len(listed):
        twice = next(a["id"] for a, b in pairwise(listed) if a["id"] == b["id"])
        raise ValueError(f"{path!r} lists two images with the id {twice!r}; an id names one image")
    unmatched = []
    for one in objects:
        if not _is_in(one.get("image_id"), by_image):
            unmatched.append(one)
        elif crowds or not one.get("iscrowd"):
            by_image[one["image_id"]].append(one)
    remarks = [_unmatched(unmatched, len(objects), "image_id", by_image, repr(path))]
    # A URL is no path, but what goes on after it is checked like one.
    folder = root if not is_url(root) else "/" + root.partition("://")[2]
    paths = Paths.below(folder, [_path(image, folder) for image in listed])
    short: dict[str, Any] = {"categories": [(one["id"], one["name"]) for one in categories]}
    ids, lists = list(by_image), list(by_image.values())
    arrays = {"ids": np.array(ids, np.int64), "paths": paths.data, "path_offsets": paths.offsets}
    if names != "raw":
        targets, more = _checked(lists, ids, listed, categories, names, repr(path), OF_COCO)
        lists, remarks = targets.lists, [*remarks, *more]
        short |= {"names": targets.names, "points": targets.points, "more": targets.more}
        arrays["sizes_hw"] = targets.sizes_hw.ravel()
    short["remarks"] = list(filter(None, remarks))
    packed = _as_json(lists)
    arrays |= {"lists": packed.data, "list_offsets": packed.offsets}
    return {**arrays, "short": np.frombuffer(json.dumps(short).encode(), np.uint8)}


def _parts(path: str, remote: Remote | None) -> tuple[list[Any], list[Any], list[Any]]:
    """Return images, annotations and categories of a file."""
    try:
        with open_stream(path, remote) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path!r} is no JSON, or is cut off: {error}") from error
    lists = [content.get(name) for name in ("images", "annotations")] if isinstance(content, dict) else [None]
    if not all(isinstance(entries, list) for entries in lists):
        raise ValueError(
            f"{path!r} has no lists of images and annotations; expected COCO's format, as in instances_val2017.json"
        )
    for image in content["images"]:
        if (
            not isinstance(image, dict)
            or type(image.get("id")) is not int
            or not _is_whole(image["id"])  # more than 64 bits
            or not isinstance(image.get("file_name"), str)
        ):
            raise ValueError(f"an image of {path!r} lacks an integer id or a file_name: {repr(image)[:200]}")
    names: dict[Any, Any] = {}
    for kind in ("annotations", "categories"):
        for entry in content.get(kind) or ():
            is_right = isinstance(entry, dict) and (
                kind == "annotations" or (isinstance(entry.get("id"), int | str) and "name" in entry)
            )
            if not is_right:
                raise ValueError(f"one of the {kind} of {path!r} is {repr(entry)[:200]}, which is not COCO's format")
            if kind == "categories" and (name := names.setdefault(entry["id"], entry["name"])) != entry["name"]:
                raise ValueError(
                    f"{path!r} has two categories with the id {entry['id']!r}, {name!r} and {entry['name']!r}; an id "
                    "names one category"
                )
    return content["images"], content["annotations"], content.get("categories") or []


@dataclass(eq=False, repr=False)
class CocoTargets(Lazy[Any]):
    """The target of each image, a dict; see `gpuload.datasets.wrap.wrap`."""

    _entries = "targets"
    ids: Any  # of the images
    sizes_hw: np.ndarray  # by the file; 0, 0 where it says none
    lists: Sequence[Any]  # of each image, the fields of its objects' annotations that a target is made of
    names: list[str]  # which of masks and keypoints are made
    points: int  # how many keypoints each object has
    more: list[str]  # which of area and iscrowd there are
    how: str  # what a user writes to choose other names, for messages

    def __len__(self) -> int:
        return len(self.lists)

    def _entry(self, index: int) -> dict[str, Any]:
        objects, image_id = self.lists[index], self.ids[index]
        boxes = np.array([one["bbox"] for one in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        height, width = self.sizes_hw[index].tolist()
        target: dict[str, Any] = {
            "image_id": int(image_id) if isinstance(image_id, np.integer) else image_id,
            "boxes": Boxes(boxes, canvas_hw=(height, width) if height else None),
            "labels": np.array([one["category_id"] for one in objects], np.int64),
        }
        for name, dtype in (("area", np.float32), ("iscrowd", np.int64)):
            if name in self.more:
                target[name] = np.array([one[name] for one in objects], dtype)
        if "masks" in self.names:
            target["masks"] = Mask(self._masks(objects, target["image_id"], height, width))
        if "keypoints" in self.names:
            nothing = [0] * (3 * self.points)  # COCO's own way to say that none is labelled
            points = np.array([one.get("keypoints") or nothing for one in objects], np.float32)
            points = points.reshape(-1, self.points, 3)
            target["keypoints"] = Keypoints(np.ascontiguousarray(points[..., :2]))
            target["visibility"] = points[..., 2].astype(np.int64)
        return target

    def _masks(self, objects: Sequence[Any], image_id: Any, height: int, width: int) -> np.ndarray:
        """Return the masks of an image, n×H×W. Height and width are what a file says, so they are limited."""
        name, remedy = f"the COCO image {image_id!r}", f", or {_without('masks', self.names, self.how)}"
        check_pixels(height, width, f"{name}, by the size in its file of annotations,", remedy)
        check_expanded(len(objects) * height * width, f"the array of the {len(objects)} masks of {name}", remedy)
        masks = np.zeros((len(objects), height, width), np.uint8)
        for mask, one in zip(masks, objects, strict=True):
            mask[...] = _mask(one, height, width, self.how)
        return masks


def _checked(
    annotations: Sequence[list[Any]],
    ids: Sequence[Any],
    images: Sequence[Any],
    categories: Iterable[Any],
    names: Collection[str] | None,
    source: str,
    how: str,
) -> tuple[CocoTargets, list[str]]:
    """Return the targets of images, with `lists` that are not packed yet, and what to warn of.

    `annotations` are those of each image, `names` which of masks and keypoints to make (None means those that
    annotations have), `source` the file as messages name it, `how` as in `CocoTargets`.

    Raises:
        ValueError: an annotation or image lacks something, or holds something else; the message names it.
    """
    every = list(chain.from_iterable(annotations))
    had = [name for name, field in FIELDS.items() if any(annotation.get(field) for annotation in every)]
    names = had if names is None else [name for name in FIELDS if name in names]
    raw = f"keep the annotations as they are, with {how.format('raw')}"
    _check(every, "bbox", _is_box, BOX, f"fix the file, or {raw}")
    _check(every, "category_id", _is_whole, WHOLE, raw)
    remarks, points = [], 0
    if labels := {label: None for one in categories if (label := _whole(one.get("id"))) is not None}:
        unmatched = [annotation for annotation in every if _whole(annotation["category_id"]) not in labels]
        remarks.append(_unmatched(unmatched, len(every), "category_id", labels, source))
    if "masks" in names:
        _check_there(every, "segmentation", _without("masks", names, how))
        remarks.append(_small_polygons(every, source))
    if "keypoints" in names:
        points = _count_points(every, f"{_without('keypoints', names, how)}, or {raw}")
    sizes_hw = np.array([_size(image, names, how) for image in images], np.int32).reshape(-1, 2)
    # A file may lack these two for all objects or for some (or have null there): then no target has them.
    more = [name for name in ("area", "iscrowd") if all(one.get(name) is not None for one in every)]
    for field, is_right, expected in (("area", _is_number, "a number"), ("iscrowd", _is_whole, WHOLE)):
        if field in more:
            _check(every, field, is_right, expected, raw)
    needed = ("id", "bbox", "category_id", *more, *(FIELDS[name] for name in names))
    lists = [[{name: one[name] for name in needed if name in one} for one in objects] for objects in annotations]
    return CocoTargets(ids, sizes_hw, lists, names, points, more, how), remarks


def _without(name: str, names: list[str], how: str) -> str:
    """Return how to leave one of the names out."""
    return f"leave {name} out, with {how.format(tuple(other for other in names if other != name))}"


def _size(image: Any, names: list[str], how: str) -> tuple[int, int]:
    """Return what the file says of an image's height and width; 0, 0 if it says nothing."""
    size = image.get("height"), image.get("width")
    if all(type(length) is int and 0 < length < 1 << 31 for length in size):
        return size
    if "masks" not in names:
        return 0, 0
    raise ValueError(
        f"the COCO image {image['id']!r} has the height {size[0]!r} and the width {size[1]!r}, but its masks need "
        f"both; {_without('masks', names, how)}"
    )


def _count_points(annotations: Collection[Any], remedy: str) -> int:
    """Return how many keypoints each object has, those aside that have none."""
    annotations = [annotation for annotation in annotations if annotation.get("keypoints")]
    _check(annotations, "keypoints", _are_numbers, "a list of numbers", remedy)
    counts = {len(annotation["keypoints"]): annotation for annotation in annotations}
    if len(counts) > 1 or any(count % 3 for count in counts):
        two = " and ".join(f"{n} numbers (annotation {one.get('id')!r})" for n, one in list(counts.items())[:2])
        raise ValueError(
            f"keypoints of COCO must be x, y and visibility of as many points for each object, got {two}; {remedy}"
        )
    return next(iter(counts), 0) // 3


def chosen(annotations: Any, called: str = "annotations") -> Any:
    """Return the argument `annotations` of `wrap`, or one `called` otherwise, checked."""
    if annotations is None or annotations == "raw":
        return annotations
    text = f"{called} must be None, 'raw', or some of 'masks' and 'keypoints', as in ('masks',)"
    if isinstance(annotations, str) or not isinstance(annotations, Collection):
        raise TypeError(f"{text}, got {annotations!r}")
    if unknown := [name for name in annotations if name not in FIELDS]:
        raise ValueError(f"{text}, got {unknown[0]!r}; boxes and labels are always there")
    return tuple(annotations)


def _check(
    annotations: Collection[Any], field: str, is_right: Callable[[Any], bool], expected: str, remedy: str
) -> None:
    _check_there(annotations, field, remedy)
    for annotation in annotations:
        if not is_right(value := annotation[field]):
            raise ValueError(f"{_named(annotation)} has the {field} {_short(value)}, expected {expected}; {remedy}")


def _check_there(annotations: Iterable[Any], field: str, remedy: str) -> None:
    for annotation in annotations:
        if annotation.get(field) in (None, [], ""):
            raise ValueError(f"{_named(annotation)} has no {field}; {remedy}")


def _named(annotation: Any) -> str:
    return f"the COCO annotation {annotation.get('id')!r} of image {_short(annotation.get('image_id'))}"


def _is_whole(value: Any) -> bool:
    return _whole(value) is not None


def _whole(value: Any) -> int | None:
    """Return a whole number of at most 64 bits, also one that is written as text or as 3.0; None for others."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    is_whole = -(1 << 63) <= number < 1 << 63 and (isinstance(value, str) or number == value)
    return number if is_whole else None


def _is_number(value: Any) -> bool:
    """Return whether it is a number that float32 holds."""
    return isinstance(value, NUMBERS) and bool(abs(value) <= LARGEST)


def _is_list(values: Any) -> bool:
    return isinstance(values, list | tuple | np.ndarray) and all(isinstance(value, NUMBERS) for value in values)


def _are_numbers(values: Any) -> bool:
    return _is_list(values) and all(map(_is_number, values))


def _is_box(value: Any) -> bool:
    return _are_numbers(value) and len(value) == 4 and value[2] >= 0 and value[3] >= 0


def _short(value: Any) -> str:
    return one_line(repr(value), 100)


def _unmatched(strays: list[Any], count: int, field: str, ids: Collection[Any], source: str) -> str:
    """Return what to warn of if annotations (`strays`, of `count`) have an id in a field that is not among `ids`.

    Raises:
        ValueError: none of the annotations has an id that is there.
    """
    if not strays:
        return ""
    kinds = {"image_id": "images", "category_id": "categories"}[field]
    known = ", ".join([_short(one) for one in list(ids)[:3]] + ["…"] * (len(ids) > 3))
    first = (
        f"annotation {_short(strays[0].get('id'))} has the {field} {_short(strays[0].get(field))}, but "
        f"{f'the ids of {kinds} are {known}' if ids else f'there are no {kinds}'}. Write the id of one of the {kinds} "
        "there, or leave such annotations out of the file"
    )
    if len(strays) == count:
        raise ValueError(f"none of the {count:,} annotations of {source} belongs to one of its {kinds}: {first}")
    fate = ", and are left out" if field == "image_id" else ""
    return f"{len(strays):,} of the {count:,} annotations of {source} belong to none of its {kinds}{fate}: {first}"


def _is_in(value: Any, ids: Collection[Any]) -> bool:
    return isinstance(value, Hashable) and value in ids  # a file may have a list there


def _small_polygons(annotations: Collection[Any], source: str) -> str:
    """Return what to warn of if polygons have fewer than three points; else nothing."""
    lists = [annotation for annotation in annotations if isinstance(annotation["segmentation"], list)]
    small = [one for one in lists if len(_polygons(one["segmentation"])) < len(one["segmentation"])]
    if not small:
        return ""
    empty = sum(not _polygons(annotation["segmentation"]) for annotation in small)
    return (
        f"{len(small):,} of the {len(annotations):,} annotations of {source} have polygons of fewer than three points, "
        f"which cover nothing and are left out; {empty:,} of them have no other, and an empty mask: the first is "
        f"annotation {_short(small[0].get('id'))}. Correct the polygons, or leave such annotations out of the file"
    )


def _polygons(segmentation: list[Any]) -> list[Any]:
    """Return the polygons that may have an area, which is none of fewer than three points."""
    return [one for one in segmentation if not isinstance(one, list | tuple) or len(one) >= CORNERS]


def _path(image: Any, root: str | os.PathLike[str]) -> str:
    """Return the path of an image, whose name comes from a data file: ValueError if that leads out of the root."""
    name = f"the COCO image {image['id']!r} has the file name {image['file_name']!r}"
    try:
        is_usable = b"\0" not in os.fsencode(image["file_name"])
    except UnicodeEncodeError:  # half of a surrogate pair
        is_usable = False
    if not is_usable:
        raise ValueError(f"{name}, which no file can have; correct the file of annotations")
    path = os.path.abspath(os.path.join(root, image["file_name"]))
    if not path.startswith(os.path.join(os.path.abspath(root), "")):
        raise ValueError(
            f"{name}, which leads out of {os.fspath(root)!r}; give the dataset a root that holds all its images"
        )
    return path


def _mask(annotation: Any, height: int, width: int, how: str) -> np.ndarray:
    """Return the mask of an object, uint8 H×W: from polygons, or from run lengths (RLE), packed as text or not.

    Where run lengths are too few, pycocotools' own `decode` returns memory that nothing was written to.
    """
    segmentation, name = annotation["segmentation"], f"the COCO annotation {annotation.get('id')!r}"
    if isinstance(segmentation, list):
        if not (segmentation := _polygons(segmentation)):
            return np.zeros((height, width), np.uint8)
        for polygon in segmentation:
            if not _is_list(polygon):
                raise ValueError(
                    f"{name} has the polygon {_short(polygon)}, expected a list of numbers below {FARTHEST}, in a list "
                    "of such polygons"
                )
            if len(polygon) % 2:
                raise ValueError(
                    f"{name} has a polygon of {len(polygon)} numbers, but one is x and y of at least three points"
                )
            if not all(abs(number) < FARTHEST for number in polygon):
                raise ValueError(f"{name} has a polygon that reaches beyond {FARTHEST} pixels, or holds NaN")
        try:
            from pycocotools import mask as coco
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "masks of COCO's polygons need pycocotools, which is not installed: pip install pycocotools, or leave "
                f"masks out, with {how.format(())}"
            ) from error
        segmentation = coco.merge(coco.frPyObjects(segmentation, height, width))
    try:
        runs, size = segmentation["counts"], list(segmentation["size"])
        lengths = np.array(runs, np.int64) if isinstance(runs, list) else _unpacked(runs)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(
            f"{name} has the segmentation {_short(segmentation)}, expected polygons, or run lengths as counts and "
            f"size: {error}"
        ) from error
    if size != [height, width] or (lengths < 0).any() or lengths.sum() != height * width:
        raise ValueError(
            f"{name} has run lengths of {lengths.sum()} pixels with the size {size}, "
            f"but its image has {height} × {width} = {height * width}"
        )
    return np.repeat(np.arange(len(lengths), dtype=np.uint8) % 2, lengths).reshape(width, height).T


def _unpacked(text: str | bytes) -> np.ndarray:
    """Return run lengths from COCO's text.

    It has six bits a character, from 48 on. Five of these are of a number, lowest first; the sixth says that more
    follow; the highest of a number is its sign. From the fourth on, a number is a difference to the last but one.
    """
    values = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(~values & 32)
    if not len(ends) or (values < 0).any() or (values > 63).any() or ends[-1] != len(values) - 1:
        raise ValueError("run lengths of COCO are packed in a way that is not valid")
    starts = np.concatenate([[0], ends[:-1] + 1])
    shifts = 5 * (np.arange(len(values)) - np.repeat(starts, ends - starts + 1))
    numbers = np.add.reduceat((values & 31) << np.minimum(shifts, 40), starts)
    numbers -= (values[ends] >> 4 & 1) << np.minimum(shifts[ends] + 5, 45)
    for first in (1, 2):
        numbers[first::2] = np.cumsum(numbers[first::2])
    return numbers


class JsonLists(Lazy[Any]):
    """Values as JSON texts in one buffer, each parsed again when it is asked for."""

    _entries = "targets"

    def __init__(self, texts: Paths) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def _entry(self, number: int) -> Any:
        return json.loads(self.texts[number])


def _as_json(values: Iterable[Any]) -> Paths:
    return Paths.of("", [json.dumps(value, separators=(",", ":")).encode() for value in values])


def _if_json(values: list[Any]) -> Sequence[Any]:
    """Return values as JSON if that gives them back; else (the user put other things there) as they are."""
    return JsonLists(_as_json(values)) if _is_json(values) else values


def _is_json(values: Collection[Any]) -> bool:
    """Return whether JSON gives values back as they are, of the same types."""
    kinds = set(map(type, values))
    if kinds <= JSON:
        return True
    if not kinds <= JSON | {list, dict}:
        return False
    lists = all(_is_json(value) for value in values if type(value) is list)
    dicts = [value for value in values if type(value) is dict]
    return lists and all(set(map(type, value)) <= {str} and _is_json(value.values()) for value in dicts)
