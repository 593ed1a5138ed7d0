"""COCO's annotations: kept as JSON in one buffer, and made into targets each time they are asked for.

The main process chooses and checks them, workers parse them and make the targets. No torch; pycocotools is imported
where the first polygon becomes a mask.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import numpy as np

from gpuload.datasets.sample import Boxes, Keypoints, Mask
from gpuload.errors import one_line

__all__ = [
    "CocoTargets",
    "JsonLists",
    "as_lists",
    "chosen",
    "image_path",
    "is_in",
    "unknown_categories",
    "unmatched",
    "whole",
]

FIELDS: Final = {"masks": "segmentation", "keypoints": "keypoints"}  # what may be chosen, and its name in the file
JSON: Final = frozenset({str, int, float, bool, type(None)})
FARTHEST: Final = 1 << 20  # pixels; pycocotools' memory grows with the length of an edge
NUMBERS: Final = (int, float, np.integer, np.floating)
LARGEST: Final = float(np.finfo(np.float32).max)
HOW: Final = "gpuload.wrap(dataset, annotations={!r})"  # how a user chooses


class CocoTargets(Sequence[Any]):
    """The target of each image, a dict; see `gpuload.datasets.wrap.wrap`. Also those of `gpuload.datasets.stores.coco`.

    Args:
        annotations: of each image, as the file has them.
        ids: of each image.
        images: the file's entry for each image.
        names: which of masks and keypoints; None: those that the annotations have.
        how: what a user writes to choose other names, for messages.

    Raises:
        ValueError: an annotation or image lacks something, or a box has a negative size; the message names it, and
            says what to do.
    """

    def __init__(
        self,
        annotations: Sequence[Any],
        ids: Sequence[Any],
        images: Iterable[Any],
        names: Collection[str] | None,
        *,
        how: str = HOW,
    ) -> None:
        self.how = how
        every = [annotation for own in annotations for annotation in own]
        had = [name for name, field in FIELDS.items() if any(annotation.get(field) for annotation in every)]
        self.names = had if names is None else [name for name in FIELDS if name in names]
        for field in ("bbox", "category_id"):
            _check(every, field, self._raw())
        _check_boxes(every, self._raw())
        _check_whole(every, "category_id", self._raw())
        if "masks" in self.names:
            _check(every, "segmentation", self._without("masks"))
        self.ids = ids
        self.sizes_hw = np.array([self._size(image) for image in images], np.int32).reshape(-1, 2)
        self.points = self._count_points(every) if "keypoints" in self.names else 0
        # A file may lack these two for all objects or for some (or have null there): then no target has them.
        self.more = [name for name in ("area", "iscrowd") if all(one.get(name) is not None for one in every)]
        if "area" in self.more:
            _check_area(every, self._raw())
        if "iscrowd" in self.more:
            _check_whole(every, "iscrowd", self._raw())
        kept = ("id", "bbox", "category_id", *self.more, *(FIELDS[name] for name in self.names))
        self.lists = as_lists([{name: it[name] for name in kept if name in it} for it in own] for own in annotations)

    @classmethod
    def again(cls, **parts: Any) -> CocoTargets:
        """Those with these attributes, which were checked when they were made."""
        targets = cls.__new__(cls)
        vars(targets).update(parts)
        return targets

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
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
            masks = np.zeros((len(objects), height, width), np.uint8)
            for mask, one in zip(masks, objects, strict=True):
                mask[...] = _mask(one, height, width, self.how)
            target["masks"] = Mask(masks)
        if "keypoints" in self.names:
            nothing = [0] * (3 * self.points)  # COCO's own way to say that none is labelled
            points = np.array([one.get("keypoints") or nothing for one in objects], np.float32)
            points = points.reshape(-1, self.points, 3)
            target["keypoints"] = Keypoints(np.ascontiguousarray(points[..., :2]))
            target["visibility"] = points[..., 2].astype(np.int64)
        return target

    def _without(self, name: str) -> str:
        """How to leave one of the names out."""
        others = tuple(other for other in self.names if other != name)
        return f"leave {name} out, with {self.how.format(others)}"

    def _raw(self) -> str:
        """How to have no targets made."""
        return f"keep the annotations as they are, with {self.how.format('raw')}"

    def _size(self, image: Any) -> tuple[int, int]:
        """What the file says of an image's height and width; 0, 0 if it says nothing."""
        size = image.get("height"), image.get("width")
        if not all(type(length) is int and 0 < length < 1 << 31 for length in size):
            if "masks" not in self.names:
                return 0, 0
            raise ValueError(
                f"the COCO image {image['id']!r} has the height {size[0]!r} and the width {size[1]!r}, but its masks "
                f"need both; {self._without('masks')}"
            )
        return size

    def _count_points(self, annotations: Iterable[Any]) -> int:
        """How many keypoints each object has, those aside that have none."""
        annotations = [annotation for annotation in annotations if annotation.get("keypoints")]
        for annotation in annotations:
            if not _are_numbers(own := annotation["keypoints"]):
                raise ValueError(
                    f"the COCO annotation {annotation.get('id')!r} has the keypoints {_short(own)}, expected a list of "
                    f"numbers; {self._without('keypoints')}, or {self._raw()}"
                )
        counts = {len(annotation["keypoints"]): annotation for annotation in annotations}
        if len(counts) > 1 or any(count % 3 for count in counts):
            found = " and ".join(f"{n} numbers (annotation {one.get('id')!r})" for n, one in list(counts.items())[:2])
            raise ValueError(
                f"keypoints of COCO must be x, y and visibility of as many points for each object, got {found}; "
                f"{self._without('keypoints')}, or {self._raw()}"
            )
        return next(iter(counts), 0) // 3


def chosen(annotations: Any, called: str = "annotations") -> Any:
    """The argument `annotations` of `wrap`, or one `called` otherwise, checked."""
    if annotations is None or annotations == "raw":
        return annotations
    text = f"{called} must be None, 'raw', or some of 'masks' and 'keypoints', as in ('masks',)"
    if isinstance(annotations, str) or not isinstance(annotations, Collection):
        raise TypeError(f"{text}, got {annotations!r}")
    if unknown := [name for name in annotations if name not in FIELDS]:
        raise ValueError(f"{text}, got {unknown[0]!r}; boxes and labels are always there")
    return tuple(annotations)


def _check(annotations: Iterable[Any], field: str, remedy: str) -> None:
    for annotation in annotations:
        if annotation.get(field) in (None, [], ""):
            raise ValueError(f"the COCO annotation {annotation.get('id')!r} has no {field}; {remedy}")


def _check_boxes(annotations: Sequence[Any], remedy: str) -> None:
    try:
        boxes = np.array([annotation["bbox"] for annotation in annotations])
    except (ValueError, TypeError):  # of several lengths
        boxes = np.empty(0, object)
    plain = boxes.dtype.kind in "iuf" and boxes.shape[1:] == (4,)
    if plain and (np.abs(boxes) <= LARGEST).all() and (boxes[:, 2:] >= 0).all():
        return
    for annotation in annotations:
        box = annotation["bbox"]
        if not _are_numbers(box) or len(box) != 4 or not (box[2] >= 0 and box[3] >= 0):
            raise ValueError(
                f"the COCO annotation {annotation.get('id')!r} of image {annotation.get('image_id')!r} has the box "
                f"{_short(box)}, expected left, top, width and height, neither of them negative; mend the file, or "
                f"{remedy}"
            )


def _check_area(annotations: Iterable[Any], remedy: str) -> None:
    for annotation in annotations:
        if not _is_number(annotation["area"]):
            raise ValueError(
                f"the COCO annotation {annotation.get('id')!r} has the area {_short(annotation['area'])}, expected a "
                f"number; {remedy}"
            )


def _check_whole(annotations: Iterable[Any], field: str, remedy: str) -> None:
    for annotation in annotations:
        if whole(annotation[field]) is None:
            raise ValueError(
                f"the COCO annotation {annotation.get('id')!r} has the {field} {_short(annotation[field])}, expected a "
                f"whole number that fits into 64 bits; {remedy}"
            )


def whole(value: Any) -> int | None:
    """Return a whole number of at most 64 bits, also one that is written as text or as 3.0; None for others."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not -(1 << 63) <= number < 1 << 63 or (not isinstance(value, str) and number != value):
        return None
    return number


def _is_number(value: Any) -> bool:
    """Whether it is a number that float32 holds."""
    return isinstance(value, NUMBERS) and bool(abs(value) <= LARGEST)


def _is_list(values: Any) -> bool:
    return isinstance(values, list | tuple | np.ndarray) and all(isinstance(value, NUMBERS) for value in values)


def _are_numbers(values: Any) -> bool:
    return _is_list(values) and all(map(_is_number, values))


def _short(value: Any) -> str:
    return one_line(repr(value), 100)


def unmatched(
    annotations: Collection[Any],
    field: str,
    ids: Collection[Any],
    source: str,
    *,
    key: Callable[[Any], Any] = lambda value: value,
) -> str:
    """Return what to warn of if some annotations have an id in this field that nothing has; else nothing.

    Args:
        annotations: as the file has them.
        field: ``"image_id"`` or ``"category_id"``.
        ids: of the images or categories; `key` makes one of what an annotation has.
        source: the file, as the message names it.

    Raises:
        ValueError: none of the annotations has an id that is there.
    """
    strays = [annotation for annotation in annotations if not is_in(key(annotation.get(field)), ids)]
    if not strays:
        return ""
    count, kinds = len(annotations), {"image_id": "images", "category_id": "categories"}[field]
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


def unknown_categories(annotations: Collection[Any], categories: Iterable[Any], source: str) -> str:
    """Return what to warn of if some annotations have a category that is not there, as `unmatched` does; nothing if
    the file has no categories at all."""
    ids = {label: None for one in categories if (label := whole(one.get("id"))) is not None}
    return unmatched(annotations, "category_id", ids, source, key=whole) if ids else ""


def is_in(value: Any, ids: Collection[Any]) -> bool:
    """Whether there is this id, which a file may have as anything."""
    try:
        return value in ids
    except TypeError:  # a list, say
        return False


def image_path(file_name: str, key: Any, root: str | os.PathLike[str]) -> str:
    """Return the path of an image. Its name comes from a data file.

    Raises:
        ValueError: it is no name of a file, or leads out of the root.
    """
    try:
        usable = b"\0" not in os.fsencode(file_name)
    except UnicodeEncodeError:  # half of a surrogate pair
        usable = False
    if not usable:
        raise ValueError(
            f"the COCO image {key!r} has the file name {file_name!r}, which no file can have; correct the file of "
            "annotations"
        )
    path = os.path.abspath(os.path.join(root, file_name))
    if not path.startswith(os.path.join(os.path.abspath(root), "")):
        raise ValueError(
            f"the COCO image {key!r} has the file name {file_name!r}, which leads out of {os.fspath(root)!r}; "
            "give the dataset a root that holds all its images"
        )
    return path


def _mask(annotation: Any, height: int, width: int, how: str) -> np.ndarray:
    """The mask of an object, uint8 H×W: from polygons, or from run lengths (RLE), packed as text or not.

    Where run lengths are too few, pycocotools' own `decode` returns memory that nothing was written to.
    """
    given, name = annotation["segmentation"], f"the COCO annotation {annotation.get('id')!r}"
    if isinstance(given, list):
        for polygon in given:
            if not _is_list(polygon):
                raise ValueError(
                    f"{name} has the polygon {_short(polygon)}, expected a list of numbers below {FARTHEST}, in a list "
                    "of such polygons"
                )
            if len(polygon) < 6 or len(polygon) % 2:
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
        given = coco.merge(coco.frPyObjects(given, height, width))
    try:
        runs, size = given["counts"], list(given["size"])
        lengths = np.array(runs, np.int64) if isinstance(runs, list) else _unpacked(runs)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(
            f"{name} has the segmentation {_short(given)}, expected polygons, or run lengths as counts and size: "
            f"{error}"
        ) from error
    if size != [height, width] or (lengths < 0).any() or lengths.sum() != height * width:
        raise ValueError(
            f"{name} has run lengths of {lengths.sum()} pixels with the size {size}, "
            f"but its image has {height} × {width} = {height * width}"
        )
    return np.repeat(np.arange(len(lengths), dtype=np.uint8) % 2, lengths).reshape(width, height).T


def _unpacked(text: str | bytes) -> np.ndarray:
    """Run lengths from COCO's text: six bits a character, from 48 on. Five of these are of a number, lowest first; the
    sixth says that more follow; the highest of a number is its sign. From the fourth on, a number is a difference to
    the last but one."""
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


class JsonLists(Sequence[Any]):
    """Values in one buffer, each as JSON, parsed anew each time it is asked for."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray) -> None:
        self.data, self.offsets = data, offsets

    @classmethod
    def pack(cls, texts: Iterable[bytes]) -> JsonLists:
        texts = list(texts)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return cls(np.frombuffer(bytearray().join(texts), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i, n = operator.index(index), len(self)
        if not -n <= i < n:
            raise IndexError(f"index {i} is out of range: there are {n} targets")
        start, end = self.offsets[i % n : i % n + 2].tolist()
        return json.loads(self.data[start:end].tobytes())


def as_lists(targets: Iterable[Any]) -> Sequence[Any]:
    """Values as JSON if that gives them back as they are; else (the user put other things there) as a list."""
    targets = list(targets)
    if not _is_json(targets):
        return targets
    return JsonLists.pack(json.dumps(target, separators=(",", ":")).encode() for target in targets)


def _is_json(values: Collection[Any]) -> bool:
    """Whether JSON gives values back as they are. (Reading them back and comparing took 2.4 times as long.)"""
    kinds = set(map(type, values))
    if kinds <= JSON:
        return True
    if not kinds <= JSON | {list, dict}:
        return False
    lists = all(_is_json(value) for value in values if type(value) is list)
    dicts = [value for value in values if type(value) is dict]
    return lists and all(set(map(type, value)) <= {str} and _is_json(value.values()) for value in dicts)
