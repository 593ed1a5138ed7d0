"""What belongs to a sample's targets: which image they lie in, and which leaves are left out with boxes.

Looked at where a sample is read, so that a sample that does not fit is that sample's error. Runs in workers, and with
``num_workers=0`` in the main process; imports no torch. Nothing here holds state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuload.batch import is_tensor
from gpuload.packing import Belongings
from gpuload.sample import Boxes, Keypoints, Mask, Target
from gpuload.transforms.base import Transform
from gpuload.transforms.boxes import SanitizeBoundingBoxes
from gpuload.transforms.chain import Chain

__all__ = ["check_transforms", "droppers", "find_belongings", "find_labels"]

NOTHING: Final = "there are no labels to be found"


def droppers(chain: Chain) -> list[Transform]:
    """The transforms of a chain that leave boxes out, in the order in which they are written."""
    found: dict[int, Transform] = {}
    for line in chain.lines:
        for transform in _all(line.transforms):
            if transform.drops_boxes and not transform.children:
                found[id(transform)] = transform
    return list(found.values())


def check_transforms(chain: Chain) -> str | None:
    """Why a chain cannot be applied to samples with targets; None where it can."""
    for line in chain.lines:
        for transform in _all(line.transforms):
            name = type(transform).__name__
            if transform.image_only and not transform.children:
                return (
                    f"{name} moves pixels of the image alone, and masks, boxes or keypoints could not follow; leave it "
                    "out, or yield no targets"
                )
            if transform.mixes and not transform.children:
                return f"{name} mixes images, which masks, boxes and keypoints cannot be; leave it out"
    if chain.views is not None and (found := droppers(chain)):
        return (
            f"{type(found[0]).__name__} leaves out boxes, in each view of a MultiView others, and what belongs to them "
            "would be another for each; leave one of the two out"
        )
    return None


def find_belongings(
    sample: Any, leaves: Sequence[Any], targets: Mapping[int, Target], masks: Sequence[tuple[str, int]], chain: Chain
) -> Belongings:
    """What belongs to the targets of a sample.

    Args:
        sample: as the dataset gave it.
        leaves: its leaves, and by their places its `targets`.
        masks: of each mask its dtype and how many axes it has.
        chain: what is applied.

    Raises:
        TypeError, ValueError: a transform looks at boxes, and they or their labels cannot be found or do not go
            together.
    """
    dropping = droppers(chain)
    if not dropping and not chain.reads_boxes:
        return Belongings(tuple(masks), ())
    boxes = [(place, target) for place, target in targets.items() if isinstance(target, Boxes)]
    name = type(dropping[0]).__name__ if dropping else "a transform"
    if len(boxes) != 1:
        raise ValueError(
            f"{name} takes samples with one leaf of boxes, gpuload.Boxes(array, format), but this one has {len(boxes)}"
        )
    count = len(boxes[0][1].array)
    own = tuple(
        place
        for place, target in targets.items()
        if isinstance(target, Mask) and getattr(target.array, "ndim", 2) == 3 and len(target.array) == count
    )
    fields = []
    for number, transform in enumerate(dropping):
        source = next((t for t in dropping[number:] if isinstance(t, SanitizeBoundingBoxes)), None)
        found = _named(sample, leaves, count, source, type(transform).__name__)
        fields.append(tuple(sorted({boxes[0][0], *own, *found})))
    return Belongings(tuple(masks), tuple(fields))


def find_labels(sample: Any) -> Any:
    """The labels of a sample, where torchvision's heuristic looks for them (see `SanitizeBoundingBoxes`).

    Raises:
        ValueError: there are none.
    """
    if isinstance(sample, tuple | list):
        if len(sample) < 2:
            raise ValueError(f"{NOTHING} in a sample of one part")
        sample = sample[1]
    if isinstance(sample, np.ndarray) or (is_tensor(sample) and not _is_special(sample)):
        return sample
    if not isinstance(sample, Mapping):
        raise ValueError(f"{NOTHING}: they are looked for in a dict, got {type(sample).__name__}")
    keys = [key for key in sample if isinstance(key, str)]
    exact = [key for key in keys if key.lower() == "labels"]
    near = [key for key in keys if "label" in key.lower()]
    if not exact + near:
        raise ValueError(f"{NOTHING} under {', '.join(map(repr, sample)) or 'no key'}")
    return sample[(exact + near)[0]]


def _named(
    sample: Any, leaves: Sequence[Any], count: int, source: SanitizeBoundingBoxes | None, name: str
) -> list[int]:
    """The leaves that a `labels_getter` gives; without one, the labels, where there are any."""
    getter = "default" if source is None else source.labels_getter
    if getter is None:
        return []
    if getter == "default":
        try:
            labels: Any = [find_labels(sample)]
        except ValueError as error:
            if source is None:
                return []
            raise ValueError(
                f"{name}: {error}; give SanitizeBoundingBoxes a labels_getter= that finds what belongs to the boxes, "
                "such as lambda sample: sample[1]['labels'], or labels_getter=None where there is nothing"
            ) from None
    else:
        labels = getter(sample)  # pyright: ignore[reportCallIssue]
    if labels is None:
        return []
    found = []
    for label in labels if isinstance(labels, tuple | list) else [labels]:
        shape = getattr(label.array if isinstance(label, Boxes | Keypoints | Mask) else label, "shape", None)
        if shape is None or not len(shape):
            if source is None and not isinstance(label, list | tuple):
                return []  # of the whole image
            raise ValueError(
                f"{name}: what belongs to the boxes must be arrays or tensors with a row for each, got "
                f"{type(label).__name__}: {str(label)[:60]}"
            )
        if shape[0] != count:
            if source is None:
                return []
            raise ValueError(f"{name}: there are {count} boxes, but what belongs to them has shape {tuple(shape)}")
        place = next((place for place, leaf in enumerate(leaves) if leaf is label), None)
        if place is None:
            raise ValueError(
                f"{name}: labels_getter= must give leaves of the sample itself, got an array of shape {tuple(shape)} "
                "that is none of them; do not convert or copy"
            )
        found.append(place)
    return found


def _all(transforms: Iterable[Transform]) -> Iterable[Transform]:
    for transform in transforms:
        yield transform
        yield from _all(transform.children)


def _is_special(leaf: Any) -> bool:
    return type(leaf).__module__.startswith("torchvision.")
