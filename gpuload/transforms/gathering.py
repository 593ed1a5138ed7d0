"""Mosaic and CopyPaste: transforms for detection that put images of several samples together.

The samples are neighbours in the epoch's order, as MixUp's are: those at positions p XOR 1, or p XOR 1, 2 and 3. Each
sample has draws of its own, so the result is the same on any number of ranks. Boxes, their belongings, masks and
keypoints go with the images (`gpuload.batches.gathering`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gpuload.transforms.arguments import fill_values, interval, label_getter, probability, size_pair
from gpuload.transforms.base import Transform, Uniforms, argument, between, declaration
from gpuload.transforms.program.ops import Gather, Record

__all__ = ["CopyPaste", "Mosaic"]


@declaration
class _Gathering(Transform):
    """Base of both."""

    record: ClassVar[type[Record]] = Gather
    needs_whole: ClassVar[bool] = True
    drops_boxes: ClassVar[bool] = True


def _fractions(name: str, value: Any) -> tuple[float, float]:
    low, high = interval(name, value)
    if not 0 <= low <= high <= 1:
        raise ValueError(f"{name} is a range of fractions in 0 … 1, got ({low}, {high})")
    return low, high


@declaration
class Mosaic(_Gathering):
    """Show four images in one: they meet at a random centre, as in YOLO.

    The result has one size. Each quadrant shows one of the four images, its inner corner at the centre; what reaches
    beyond the result is cut off, and `fill` is where no image is. Nothing is resized: for YOLO's mosaic of 640 pixels
    write ``Resize(None, max_size=640), Mosaic(1280), RandomAffine(…), CenterCrop(640)``.

    The four are positions 4k … 4k + 3 of the epoch's order (with a sampler or an iterable dataset: rows 4k … 4k + 3 of
    a batch), in a random order, so `batch_size` must be a multiple of 4; each of them gets a mosaic of its own. A
    sample takes the place of a neighbour that is missing, at the end of an epoch or where one was skipped.

    Boxes, with their belongings, masks of instances, and keypoints of all four are moved, cut to what is seen of their
    image, and joined; boxes of which nothing is seen are left out. Masks of the whole image become a mosaic too. All
    other leaves, such as an ``image_id``, stay those of the sample itself. A sample must have targets, or the labels of
    three others would be lost.

    A chain has at most one.

    Bochkovskiy, Wang and Liao, "YOLOv4: Optimal speed and accuracy of object detection", 2020.

    Args:
        size: of the result: an integer (a square), or (height, width), or `by_epoch`.
        center_range: where the centre may lie, as a fraction of the height and of the width.
        p: the probability. Other images stay as they are.
        fill: the level where no image is, in 0 … 255, or one for each channel, or a dict of them by type.
        labels_getter: what belongs to the boxes. ``"default"``: beside the boxes, labels, ``"area"``, ``"iscrowd"``,
            masks of instances and `Keypoints` with an entry for each box. A function as for `SanitizeBoundingBoxes`:
            what it gives, and masks of instances.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> Mosaic(640).output_size((480, 600))
        (640, 640)
    """

    gathers: ClassVar[int] = 4

    size: int | tuple[int, int] = argument(size_pair)
    center_range: tuple[float, float] = argument(_fractions, default=(0.25, 0.75))
    p: float = argument(probability, default=1.0)
    fill: Any = argument(fill_values, default=0)
    labels_getter: Callable[[Any], Any] | str = argument(label_getter, default="default", compare=False, of="boxes")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Gather:
        numbers, size = uniforms(7), np.array(self.size, np.int64)
        gathered = numbers[:, 0] < self.p
        centres = (between(self.center_range, numbers[:, 1:3]) * size).astype(np.int64)
        order = np.argsort(numbers[:, 3:], axis=1, kind="stable")
        fill, mask_fill = self.outside
        sizes = np.where(gathered[:, None], size, sizes_hw)
        return Gather(gathered, sizes, order, centres, fill=fill, mask_fill=mask_fill)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size if self.p == 1 else None  # pyright: ignore[reportReturnType]


@declaration
class CopyPaste(_Gathering):
    """Paste instances of another image onto each image, with their masks, boxes and labels.

    Some instances of the neighbour, at least one, are pasted at their places, without blending; if its image has
    another size, it is resized first (bilinear; masks by the nearest pixel). They cover what lies below: masks lose
    those pixels, instances of which nothing is left are left out, with their box and its belongings, and a box of an
    instance that lost pixels becomes the smallest around the rest. The pasted instances come last. A mask of the whole
    image shows the neighbour's where something is pasted. ``"area"`` is not computed again. Keypoints that do not
    belong to boxes, and all other leaves, stay those of the sample itself.

    The neighbours are positions 2k and 2k + 1 of the epoch's order (with a sampler or an iterable dataset: rows 2k and
    2k + 1 of a batch), so `batch_size` must be even; onto a sample without a neighbour nothing is pasted. A sample must
    have one leaf of `Boxes` and, in the same container or deeper in it, one `Mask` N×H×W with a mask for each.

    Ghiasi et al., "Simple copy-paste is a strong data augmentation method for instance segmentation", CVPR 2021. As in
    torchvision's references (detection/transforms.py, `SimpleCopyPaste`) of n instances those are pasted that n draws
    with replacement hit; its boxes end at the last pixel, ours at its far edge.

    Args:
        p: the probability that something is pasted onto an image.
        labels_getter: as for `Mosaic`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    gathers: ClassVar[int] = 2

    p: float = argument(probability, default=1.0)
    labels_getter: Callable[[Any], Any] | str = argument(label_getter, default="default", compare=False, of="boxes")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Gather:
        numbers = uniforms(3)
        return Gather(numbers[:, 0] < self.p, keys=np.floor(numbers[:, 1:] * 2.0**32).astype(np.uint64))
