"""Checks that boxes match their sample: which leaves have one entry per box, and whether the image sizes agree.

The checks run when a sample is read, in workers or, with ``num_workers=0``, in the main process, so a mismatch is an
error of that sample. This module does not import torch, and holds no state.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gpuload.datasets.sample import LEAVES, Boxes, Encoded, Keypoints, Mask, Target, to_xyxy
from gpuload.datasets.tree import LEAF, Structure, describe_leaf, find_sibling, flatten, is_tensor
from gpuload.decode import Decoder
from gpuload.decode.header import is_transposed, read_header
from gpuload.decode.options import Decode
from gpuload.errors import visible
from gpuload.transforms.base import Transform
from gpuload.transforms.chain import Chain
from gpuload.transforms.program.ops import Reformat

__all__ = [
    "WARNING_PREFIX",
    "box_droppers",
    "check_visibility",
    "explain_format_conflict",
    "explain_target_conflict",
    "find_fields",
    "format_size",
    "leaf_transforms",
    "mask_mismatch",
    "size_warning",
    "unit_warning",
]

WARNING_PREFIX: Final = "the boxes of "  # the beginning of each `size_warning`
LabelsGetter = Callable[[Any], Any] | str | None
NOTHING: Final = "no labels were found"
COCO: Final = ("area", "iscrowd", "visibility")  # COCO's names for values per object, in addition to labels


def box_droppers(chain: Chain) -> list[Any]:
    """Return the transforms of a chain that drop boxes, in written order."""
    droppers = {id(transform): transform for transform in leaf_transforms(chain) if transform.drops_boxes}
    return list(droppers.values())


def explain_target_conflict(chain: Chain) -> str | None:
    """Return the reason why a chain cannot be applied to samples with targets; None if it can."""
    for transform in leaf_transforms(chain):
        name = type(transform).__name__
        if transform.image_only:
            return (
                f"{name} moves only the pixels of the image, so masks, boxes or keypoints would not match; "
                f"remove {name}, or return no targets"
            )
        if transform.drops_points and chain.views is not None and getattr(transform, "labels_getter", None) is not None:
            return (
                f"{name} drops different keypoints in each view of a MultiView, so their labels would differ too; "
                f"remove {name} or the MultiView, or set labels_getter=None"
            )
        if transform.is_mixing:
            return f"{name} mixes images, but masks, boxes and keypoints cannot be mixed; remove {name}"
    if chain.views is not None and (droppers := box_droppers(chain)):
        return (
            f"{type(droppers[0]).__name__} drops different boxes in each view of a MultiView, so their labels would "
            f"differ too; remove {type(droppers[0]).__name__} or the MultiView"
        )
    return None


def explain_format_conflict(chain: Chain) -> str | None:
    """Return the reason why the boxes of a batch may not have one format after a chain; None if they have."""
    for transform in (transform for line in chain.lines for transform in line.transforms):
        if transform.children and any(outline.kind is Reformat for outline in transform.outline):
            return (
                "ConvertBoundingBoxFormat inside another transform may convert the boxes of only some images, but all "
                "boxes of a batch have one format; put it outside"
            )
    return None


def check_visibility(structure: Structure, leaves: Sequence[object], targets: Mapping[int, Target]) -> None:
    """Raise a ValueError if the visibility next to keypoints with pairs, whose entries are exchanged with the points,
    does not match the keypoints."""
    exchanges: dict[int, Any] = {}
    for leaf, target in targets.items():
        if isinstance(target, Keypoints) and target.pairs:
            sibling = find_sibling(structure, leaf, "visibility")
            expected = target.array.shape[:-1]
            if sibling is not None and (sibling[1] != LEAF or _shape(leaves[sibling[0]])[: len(expected)] != expected):
                actual = describe_leaf(leaves[sibling[0]]) if sibling[1] == LEAF else f"a {sibling[1][0]}"
                raise ValueError(
                    f"the visibility next to Keypoints(pairs=…) of shape {target.array.shape} must be an array or "
                    f"tensor of shape {expected}, so that its entries are exchanged with the points, got {actual}"
                )
            exchange = target.pairs, target.draws or 0
            if sibling is not None and exchanges.setdefault(sibling[0], exchange) != exchange:
                raise ValueError(
                    "the visibility next to two Keypoints with different pairs= or draws= cannot be exchanged with "
                    "both; put each Keypoints into a separate dict with its visibility"
                )


def find_fields(
    sample: object, leaves: Sequence[object], targets: Mapping[int, Target], chain: Chain, draws: int = 0
) -> tuple[int, ...]:
    """Return the indices of the leaves with one entry per box, if a transform of the chain drops boxes
    (`box_droppers`), followed by the leaves with one entry per keypoint, as ~leaf, if a transform drops keypoints. Only
    the boxes and keypoints with these `draws` are considered.

    Args:
        sample: the dataset's original sample.
        leaves: all leaves of the sample.
        targets: the leaves that are targets, keyed by leaf index.
        chain: the transforms of the loader.
        draws: the `draws` of the images to which the boxes and keypoints belong.

    Raises:
        TypeError, ValueError: a transform needs boxes or keypoints, and these or their labels are missing or do not
            match.
    """
    droppers = box_droppers(chain)
    point_droppers = [transform for transform in leaf_transforms(chain) if transform.drops_points]
    others = {leaf: target for leaf, target in targets.items() if (target.draws or 0) != draws}
    if len(others) == len(targets) > 0 and not (chain.reads_boxes or chain.is_combining):
        return ()  # there is nothing to drop
    targets = {leaf: target for leaf, target in targets.items() if leaf not in others}
    scope = Scope(sample, leaves, targets, others, f" with draws={draws}" if draws or others else "")
    box_fields = _box_fields(scope, droppers, chain.reads_boxes) if droppers or chain.reads_boxes else ()
    point_fields = _point_fields(scope, set(box_fields), point_droppers) if point_droppers else ()
    return box_fields + point_fields


class Scope(NamedTuple):
    """The images of a sample that share random parameters: the sample and its leaves, the targets of these images, the
    other targets of the sample, and words for the images in messages (empty if the sample has only these images)."""

    sample: Any
    leaves: Sequence[Any]
    targets: Mapping[int, Target]
    others: Mapping[int, Target]
    note: str


def _point_fields(scope: Scope, box_fields: set[int], point_droppers: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the leaves with one entry per keypoint, as ~leaf."""
    name = "SanitizeKeyPoints"
    search = _FieldSearch(scope, Keypoints, name)
    if search.target.array.ndim < 2:
        raise ValueError(
            f"{name} needs keypoints of shape (N, …, 2), got one point of shape {search.target.array.shape}; "
            "add an axis"
        )
    keypoints: Any = search.target
    if keypoints.pairs is not None and keypoints.array.ndim == 2:
        raise ValueError(
            f"{name} drops single points of keypoints of shape {keypoints.array.shape}, but pairs= gives each "
            "point a fixed index; pass keypoints of shape (n, K, 2), whose groups are dropped, or leave out one of the "
            "two"
        )
    point_fields: set[int] = set()
    for transform in point_droppers:
        point_fields |= search.find_named_leaves(transform.labels_getter, name)
    if shared := box_fields & (point_fields | {search.leaf}):
        raise ValueError(
            f"{name} drops entries of value {min(shared)} of the sample (counted from 0, depth first), but this value "
            "also has one entry per box and would no longer match the boxes; return it from only one labels_getter=, "
            "or remove one of the transforms"
        )
    return tuple(sorted(~leaf for leaf in point_fields - {search.leaf}))


def _box_fields(scope: Scope, droppers: Sequence[Any], reads_boxes: bool) -> tuple[int, ...]:
    targets = scope.targets
    name = type(droppers[0]).__name__ if droppers else "a transform"
    combiners = [transform for transform in droppers if transform.group_size > 1]
    if combiners and not targets:
        raise ValueError(
            f"{type(combiners[0]).__name__} combines images of several samples and their boxes or masks, but "
            f"this sample has no boxes, masks or keypoints{scope.note}; add gpuload.Boxes, gpuload.Mask or "
            "gpuload.Keypoints to it"
        )
    has_boxes = any(isinstance(target, Boxes) for target in targets.values())
    if not has_boxes and all(type(transform).__name__ == "Mosaic" for transform in droppers) and not reads_boxes:
        return ()
    search = _FieldSearch(scope, Boxes, name)
    if not droppers:
        return ()
    box_fields, point_leaves = search.find_siblings()
    # Each transform that drops boxes also drops the matching entries of the leaves that any getter returns. Otherwise,
    # these leaves would no longer match the boxes.
    getters = [
        transform.labels_getter
        for transform in droppers
        if hasattr(transform, "labels_getter") and not (transform in combiners and transform.labels_getter == "default")
    ]
    for getter in getters:
        box_fields |= search.find_named_leaves(getter, "SanitizeBoundingBoxes")
    if not getters:
        box_fields |= search.guess_labels()
    uses_defaults = all(getter == "default" for getter in getters)
    if uses_defaults:
        box_fields |= point_leaves | search.find_coco_fields()
    elif point_leaves - box_fields and None not in getters:
        raise ValueError(
            f"{name} drops boxes, and the keypoints next to them have one entry for each of the {search.count} boxes, "
            "but labels_getter= does not return them; return them too or, if they belong to the image, put them "
            "outside the dict that holds the boxes"
        )
    if combiners:
        if uses_defaults:
            search.check_siblings(box_fields, type(combiners[0]).__name__)
        mask_leaves = [leaf for leaf in box_fields if isinstance(targets.get(leaf), Mask)]
        if len(mask_leaves) != 1 and any(type(transform).__name__ == "CopyPaste" for transform in combiners):
            raise ValueError(
                "CopyPaste needs samples with one N×H×W gpuload.Mask next to the boxes, with a mask for each of the "
                f"{search.count} boxes, but this sample has {len(mask_leaves)}; return one such gpuload.Mask"
            )
    return tuple(sorted(box_fields))


class _FieldSearch:
    """A search for the leaves of a sample that have one entry per box, or one entry per keypoint.

    Args:
        scope: the sample, and the targets to consider.
        target_type: `Boxes` or `Keypoints`, the type of the leaf whose entries the other leaves must match.
        name: the name of the transform that needs the leaf, for error messages.

    Attributes:
        leaf, target: the index of that leaf, and the leaf itself.
        count: the number of its entries.

    Raises:
        ValueError: the sample does not have exactly one leaf of this type.
    """

    def __init__(self, scope: Scope, target_type: type[Any], name: str) -> None:
        sample, leaves, targets, _, note = scope
        self._sample, self._leaves, self._targets, self._name = sample, leaves, targets, name
        self._noun, example = "boxes", "gpuload.Boxes(array, format)"
        if target_type is Keypoints:
            self._noun, example = "keypoints", "gpuload.Keypoints(array)"
        matches = [(leaf, target) for leaf, target in targets.items() if isinstance(target, target_type)]
        if len(matches) != 1:
            raise ValueError(
                f"{name} needs samples with one set of {self._noun}, {example}, but this sample has "
                f"{len(matches)}{note}"
            )
        [(self.leaf, self.target)] = matches
        self.count = len(self.target.array)
        self._container = _find_container(sample, leaves[self.leaf])
        self._entries = _list_entries(self._container) or []
        # The containers of the other images' boxes, which contain the labels of these boxes.
        foreign = [leaves[leaf] for leaf, target in scope.others.items() if isinstance(target, target_type)]
        self._foreign = [_find_container(sample, leaf) for leaf in foreign]

    def _is_foreign(self, name: str, label: object) -> bool:
        """Return whether a label belongs to the boxes of other images: those in the innermost container around it."""
        containers = [self._container, *self._foreign]
        ids = [set(map(id, _leaves_of(container))) for container in containers]
        around = [index for index in range(len(containers)) if id(label) in ids[index]]
        innermost = min(around, key=lambda index: len(ids[index]), default=None)
        if innermost is None or (not innermost and any(containers[i] is containers[0] for i in around[1:])):
            raise ValueError(
                f"{name}: the images of this sample have different draws=, and it is unclear to which of their "
                f"{self._noun} the labels of shape {_shape(label)} belong; put the {self._noun} of each number and "
                "their labels into a separate dict"
            )
        return innermost > 0

    def find_siblings(self) -> tuple[set[int], set[int]]:
        """Return the leaves with one entry per box in the container of the boxes, as two sets: one of the boxes
        themselves and masks, and one of keypoints."""
        container_ids = set(map(id, _leaves_of(self._container)))
        masks, points = {self.leaf}, set()
        for leaf, target in self._targets.items():
            # Masks and keypoints outside this container belong to the image, even if they happen to match in number.
            shape = _shape(target)
            if id(self._leaves[leaf]) in container_ids and len(shape) > 2 and shape[0] == self.count:
                (masks if isinstance(target, Mask) else points).add(leaf)
        return masks, points

    def find_coco_fields(self) -> set[int]:
        """Return the leaves next to the boxes that have a COCO name and one entry per box."""
        values = [value for key, value in self._entries if key in COCO and _shape(value)[:1] == (self.count,)]
        return {leaf for value in values if (leaf := self._find_leaf(value)) is not None}

    def find_named_leaves(self, getter: LabelsGetter, name: str) -> set[int]:
        """Return the leaves that the `labels_getter` of the transform called `name` returns."""
        if getter is None:
            return set()
        if not callable(getter):
            try:
                labels: Any = [_find_labels(self._container if self._foreign else self._sample)]
            except ValueError as error:
                raise ValueError(
                    f"{name}: {error}; give {name} a labels_getter= that returns the labels of the {self._noun}, "
                    "such as lambda sample: sample[1]['labels'], or labels_getter=None if there are none"
                ) from None
        else:
            labels = getter(self._sample)
        if labels is None:
            return set()
        fields = set()
        for label in labels if isinstance(labels, tuple | list) else [labels]:
            shape = _shape(label)
            if not shape:
                raise ValueError(self._labels_message(name, label))
            if self._foreign and self._is_foreign(name, label):
                continue
            if shape[0] != self.count:
                raise ValueError(
                    f"{name}: there are {self.count} {self._noun}, but their labels have shape {shape}; "
                    f"return {self.count} labels"
                )
            leaf = self._find_leaf(label)
            if leaf is None:
                raise ValueError(
                    f"{name}: labels_getter= must return arrays of the sample itself, got an array of shape {shape} "
                    "that is not in the sample; do not convert or copy them"
                )
            if isinstance(self._targets.get(leaf), Mask) and len(shape) != 3:
                raise ValueError(
                    f"{name}: masks that belong to the {self._noun} must have shape N×H×W, got shape {shape}; "
                    "do not return the mask of an entire image from labels_getter="
                )
            fields.add(leaf)
        return fields

    def guess_labels(self) -> set[int]:
        """Return the labels as a set with one leaf, found without a getter: next to the boxes, or where torchvision
        would find them. Return an empty set if there are none.

        Raises:
            ValueError: the labels are not an array, or it is unclear whether an array holds the labels.
        """
        candidates = [(key.lower(), value) for key, value in self._entries if isinstance(key, str)]
        candidates = [(key, value) for key, value in candidates if "label" in key]
        labels = [value for _, value in sorted(candidates, key=lambda entry: entry[0] != "labels")]
        with contextlib.suppress(ValueError):
            labels.append(_find_labels(self._container if self._foreign else self._sample))
        for label in labels:
            if self._foreign and self._is_foreign(self._name, label):
                continue
            if _shape(label)[:1] == (self.count,) and (leaf := self._find_leaf(label)) is not None:
                return {leaf}
        for label in labels:
            if isinstance(label, list | tuple) and len(label) == self.count:
                raise ValueError(self._labels_message(self._name, label))
        for key, value in self._entries:
            if self.count and _may_be_labels(value, self.count):
                raise ValueError(
                    f"{self._name} drops boxes, but {NOTHING}, and it is unclear whether {key!r}, of shape "
                    f"{_shape(value)}, next to the boxes belongs to them; put SanitizeBoundingBoxes(labels_getter=…) "
                    "after it, with a function that returns the labels of the boxes, such as lambda sample: sample[2], "
                    "or None if there are none"
                )
        return set()

    def check_siblings(self, fields: set[int], name: str) -> None:
        """Raise an error for values that may or may not belong to the boxes, which move to another sample. Samples with
        up to two boxes are not checked, since an ``image_id`` or ``orig_size`` can have one or two entries."""
        count = self.count
        for key, value in self._entries if count > 2 else []:
            if self._find_leaf(value) in fields or isinstance(value, Mask | Boxes | Keypoints):
                continue
            if _may_be_labels(value, count) or (isinstance(value, list | tuple) and len(value) == count):
                raise ValueError(
                    f"{name} moves boxes to other samples, and it is unclear whether {key!r}, with {count} entries for "
                    f"{count} boxes, belongs to them; give {name} a labels_getter= that returns all arrays or tensors "
                    "that belong to the boxes, such as lambda sample: (sample[1]['labels'], sample[1]['area'])"
                )

    def _find_leaf(self, value: object) -> int | None:
        matches = [leaf for leaf, candidate in enumerate(self._leaves) if candidate is value]
        if self._foreign:  # a value can be in the dicts of several images
            nearby = list(map(id, _leaves_of(self._container)))
            first_leaf = self.leaf - nearby.index(id(self._leaves[self.leaf]))
            matches.sort(key=lambda leaf: leaf not in range(first_leaf, first_leaf + len(nearby)))
        return next(iter(matches), None)

    def _labels_message(self, name: str, label: object) -> str:
        return (
            f"{name}: the labels of the {self._noun} must be arrays or tensors with one entry for each, got "
            f"{type(label).__name__}: {visible(str(label))[:60]}"
        )


def _find_labels(sample: object) -> Any:
    """Return the labels of a sample, as torchvision's heuristic finds them (see `SanitizeBoundingBoxes`).

    Raises:
        ValueError: the sample has no labels where torchvision looks for them.
    """
    if isinstance(sample, tuple | list):
        if len(sample) < 2:
            raise ValueError(f"{NOTHING} in a tuple or list of one element")
        sample = sample[1]
    if isinstance(sample, np.ndarray) or (is_tensor(sample) and not _is_special(sample)):
        return sample
    if not isinstance(sample, Mapping):
        raise ValueError(f"{NOTHING}: they are expected in a dict, got {type(sample).__name__}")
    keys = [key for key in sample if isinstance(key, str) and "label" in key.lower()]
    if not keys:
        raise ValueError(f"{NOTHING} under {', '.join(map(repr, sample)) or 'no key'}")
    return sample[min(keys, key=lambda key: key.lower() != "labels")]


def size_warning(
    targets: Iterable[object], leaf: object, size_hw: tuple[int, int], source: str | None, decode: Decode
) -> str:
    """Return a warning for the user if boxes of an image were made for another image size; "" if not.

    Boxes carry the size of their image if the source has it (COCO's JSON, torchvision's `canvas_size`). The decoded
    image has another size if EXIF rotates it, or if the file was resized after the boxes were made; the boxes are then
    at the wrong positions.
    """
    canvas_sizes = (
        target.canvas_hw for target in targets if isinstance(target, Boxes) and target.canvas_hw is not None
    )
    canvas_hw = next((canvas_hw for canvas_hw in canvas_sizes if canvas_hw != size_hw), None)
    if canvas_hw is None:
        return ""
    return (
        f"{WARNING_PREFIX}{'a sample' if source is None else repr(source)} are for an image of "
        f"{format_size(canvas_hw)} (height × width), but it is decoded to {format_size(size_hw)}: "
        f"{_size_advice(canvas_hw, leaf, size_hw, decode)}"
    )


def unit_warning(targets: Mapping[str, tuple[Any, tuple[int, int]]]) -> str:
    """Return a warning for the user if the boxes or keypoints of an image seem to have another unit than the image's
    pixels; "" if not.

    Args:
        targets: the boxes and keypoints of a sample, each with the height and width of the image, keyed by their
            location in the sample.
    """
    for location, (target, size_hw) in targets.items():
        values = target.array[np.isfinite(target.array)]
        noun, factors = "keypoints", "(width, height)"
        if isinstance(target, Boxes):
            noun, factors = "boxes", "(width, height, width, height)"
        has_fractions = values.dtype.kind == "f" and bool((values % 1).any())
        if has_fractions and min(size_hw) > 2 and values.min() >= 0 and values.max() <= 1:
            return (
                f"all {noun} of {location} lie in 0 … 1 ({values.min():.3g} … {values.max():.3g}), but {noun} are in "
                f"pixels, and the image has {format_size(size_hw)} (height × width): multiply by {factors}"
            )
        if isinstance(target, Boxes) and len(target.array):
            boxes = to_xyxy(target.array, target.format)
            centers = (boxes[:, :2] + boxes[:, 2:]) / 2
            is_outside = ((centers < 0) | (centers > size_hw[::-1])).any(axis=1)
            if is_outside.mean() > 0.5:
                box = [round(edge, 1) for edge in boxes[is_outside.argmax()].tolist()]
                return (
                    f"{is_outside.sum()} of {len(boxes)} boxes of {location} lie outside their image, which has "
                    f"{format_size(size_hw)} (height × width), such as {box} (left, top, right, bottom): if the image "
                    f"was resized, resize the boxes too; if not, check the format, which is {target.format!r}"
                )
    return ""


def _size_advice(expected_hw: tuple[int, int], leaf: Any, size_hw: tuple[int, int], decode: Decode) -> str:
    """Return the remedy if an image has another size than its targets expect; `leaf` is the dataset's image."""
    if expected_hw != size_hw[::-1]:
        return "scale the targets as the image was scaled, or return the image that they were made for"
    is_rotated = isinstance(leaf, Encoded) and is_transposed(read_header(leaf.data, decode, exif=True).orientation)
    if not is_rotated:
        return "height and width are swapped; rotate the image or the targets"
    if Decoder(decode).turns_upright(leaf):
        return (
            "its EXIF tag rotates it, but the targets are for the image as it is stored; use "
            "Loader(decode=gpuload.Decode(exif=False))"
        )
    return "its EXIF tag rotates it; use Loader(decode=gpuload.Decode(exif=True))"


def mask_mismatch(location: str, shape: Sequence[int], image: Any, decode: Decode) -> str | None:
    """Return the reason why the mask at `location` in its sample does not match its image; None if it matches. `image`
    is a `gpuload.workers.sample.Picture`."""
    size = image.height, image.width
    if tuple(shape[-2:]) == size:
        return None
    shape_text = " × ".join(map(str, shape))
    if len(shape) == 3 and tuple(shape[:2]) == size and shape[2] <= 4:
        return (
            f"the mask {location} has shape {shape_text}, and its image is {size[0]} × {size[1]}: the last axis looks "
            "like channels, but masks are H×W, or N×H×W for N masks of one image; return H×W, such as mask[..., 0]"
        )
    remedy = "return the mask of this image, at the size of the image"
    if tuple(shape[-2:]) == size[::-1]:
        remedy = _size_advice(size[::-1], image.leaf, size, decode)
    return (
        f"a mask must have the size of its image, {size[0]}×{size[1]} (height × width), but the mask {location} "
        f"has {shape[-2]}×{shape[-1]}; {remedy}"
    )


def _shape(leaf: object) -> tuple[int, ...]:
    """Return the shape of an array, a tensor or a target; () for anything else."""
    return tuple(getattr(leaf.array if isinstance(leaf, Boxes | Keypoints | Mask) else leaf, "shape", ()))


def _may_be_labels(leaf: Any, count: int) -> bool:
    if not isinstance(leaf, np.ndarray) and (not is_tensor(leaf) or _is_special(leaf)):
        return False
    shape = _shape(leaf)
    is_image = len(shape) == 3 and str(leaf.dtype).endswith("uint8")
    return len(shape) > 0 and shape[0] == count and not is_image


def _leaves_of(node: object) -> list[Any]:
    leaves: list[Any] = []
    flatten(node, leaves)
    return leaves


def _find_container(node: object, leaf: object) -> Any:
    """Return the innermost container of a leaf."""
    for _, child in _list_entries(node) or []:
        if child is leaf:
            return node
        if (container := _find_container(child, leaf)) is not None:
            return container
    return None


def _list_entries(node: Any) -> list[tuple[Any, Any]] | None:
    """Return a container's entries with their keys, names or indices; None if `tree.flatten` treats it as a leaf."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(node, tuple | list):
        return list(enumerate(node))
    if isinstance(node, Mapping):
        return list(node.items())
    if hasattr(type(node), "__dataclass_fields__") and not isinstance(node, LEAVES):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node) if field.init]
    return None


def leaf_transforms(chain: Chain) -> Iterator[Transform]:
    """Yield the transforms of a chain that contain no other transforms, in written order."""
    stack = [transform for line in chain.lines for transform in line.transforms][::-1]
    while stack:
        transform = stack.pop()
        if transform.children:
            stack += reversed(transform.children)
        else:
            yield transform


def _is_special(leaf: object) -> bool:
    return type(leaf).__module__.startswith("torchvision.")


def format_size(size_hw: tuple[int, int]) -> str:
    """Format a size for an error message."""
    return f"{size_hw[0]}×{size_hw[1]}"
