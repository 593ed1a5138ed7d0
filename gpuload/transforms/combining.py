"""Mosaic and CopyPaste, the detection transforms that combine images of several samples.

The samples are neighbours in the epoch's order, as in MixUp: the partners of position p are p XOR 1, or p XOR 1, 2 and
3. Random parameters are drawn per sample, so the result does not depend on the number of ranks. Boxes with their
fields, masks and keypoints are transformed with the images (`gpuload.batches.combined_targets`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gpuload.checks import argument, interval, probability
from gpuload.transforms.arguments import fill_values, label_getter, size_pair
from gpuload.transforms.base import Transform, Uniforms, declaration, scale_to_range
from gpuload.transforms.program.ops import Paste, Record, Tile

__all__ = ["CopyPaste", "Mosaic"]


@declaration
class _Combiner(Transform):
    needs_full_image: ClassVar[bool] = True
    drops_boxes: ClassVar[bool] = True


@declaration
class Mosaic(_Combiner):
    """Combine four images into one image, in which they meet at a random centre, as in YOLO.

    The result has a fixed size. Each quadrant contains one image, with its inner corner at the centre. Parts beyond the
    result are cropped, and gaps are filled with `fill`. Images are not resized: for YOLO's mosaic of 640 pixels use
    ``Resize(None, max_size=640), Mosaic(1280), RandomAffine(…), CenterCrop(640)``.

    The images are those at positions 4k … 4k + 3 of the epoch's order (with a sampler or an iterable dataset: at
    indices 4k … 4k + 3 of a batch), in random order, so `batch_size` must be a multiple of 4. Each of the four samples
    gets a different mosaic. A missing neighbour (at the end of an epoch, or skipped) is replaced by the sample itself.

    Boxes with their fields, instance masks and keypoints of all four samples are moved, clipped to the visible part of
    their image, and concatenated; invisible boxes are removed. Semantic masks are combined like the images. All other
    fields, such as an ``image_id``, keep the values of the sample itself. A sample must have targets, because without
    them the labels of the three neighbours would be lost.

    A chain may contain only one `Mosaic`.

    Bochkovskiy, Wang and Liao, "YOLOv4: Optimal speed and accuracy of object detection", 2020.

    Args:
        size: the size of the result: an integer (a square), or (height, width), or `by_epoch` or `by_batch`.
        center_range: the range of the centre's position, as fractions of height and width.
        p: the probability of a mosaic; otherwise the image is unchanged.
        fill: the pixel value for gaps, in 0 … 255, or a sequence with one value per channel, or a dict of these by
            type.
        labels_getter: the fields that belong to the boxes. ``"default"`` selects labels, ``"area"``, ``"iscrowd"``,
            instance masks and `Keypoints` with an entry for each box. A function, as for `SanitizeBoundingBoxes`,
            selects the fields that it returns, and instance masks.

    Example:
        >>> Mosaic(640).output_size((480, 600))
        (640, 640)
    """

    record: ClassVar[type[Record]] = Tile
    group_size: ClassVar[int] = Tile.group_size

    size: int | tuple[int, int] = argument(size_pair, by_epoch=True)
    center_range: tuple[float, float] = argument(interval, default=(0.25, 0.75), by_epoch=True, minimum=0, maximum=1)
    p: float = argument(probability, default=1.0, by_epoch=True)
    fill: Any = argument(fill_values, default=0)
    labels_getter: Callable[[Any], Any] | str = argument(label_getter, default="default", compare=False)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Tile:
        numbers, size = uniforms(7), np.array(self.size, np.int64)
        is_mosaic = numbers[:, 0] < self.p
        centres = (scale_to_range(self.center_range, numbers[:, 1:3]) * size).astype(np.int64)
        order = np.argsort(numbers[:, 3:], axis=1, kind="stable")
        fill, mask_fill = self.outside
        sizes = np.where(is_mosaic[:, None], size, sizes_hw)
        return Tile(is_mosaic, sizes, order, centres, fill, mask_fill)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size if self.p == 1 and isinstance(self.size, tuple) else None


@declaration
class CopyPaste(_Combiner):
    """Paste instances of another image onto each image, with their masks, boxes and labels.

    At least one instance of the neighbour is pasted at the same coordinates, without blending; if the neighbour's image
    has a different size, it is resized first (bilinear; masks with nearest). Pasted instances occlude the image: masks
    lose the covered pixels, fully covered instances are removed along with their box and its fields, and the box of a
    partly covered instance shrinks to its visible pixels. Pasted instances come after the image's own instances. A
    semantic mask takes the neighbour's values where instances are pasted. ``"area"`` is not recomputed. Keypoints that
    do not belong to boxes, and all other fields, keep the values of the sample itself.

    Neighbours are the samples at positions 2k and 2k + 1 of the epoch's order (with a sampler or an iterable dataset:
    at indices 2k and 2k + 1 of a batch), so `batch_size` must be even; a sample without a neighbour is unchanged. A
    sample must have a single `Boxes` and, in the same container or nested in it, a single N×H×W `Mask` with one mask
    per box.

    Ghiasi et al., "Simple copy-paste is a strong data augmentation method for instance segmentation", CVPR 2021. As in
    torchvision's references (detection/transforms.py, `SimpleCopyPaste`), n draws with replacement select which of n
    instances to paste. torchvision's boxes end at the last pixel, gpuload's boxes at the far edge of that pixel.

    Args:
        p: the probability of pasting onto an image.
        labels_getter: as for `Mosaic`.
    """

    record: ClassVar[type[Record]] = Paste
    group_size: ClassVar[int] = Paste.group_size

    p: float = argument(probability, default=1.0, by_epoch=True)
    labels_getter: Callable[[Any], Any] | str = argument(label_getter, default="default", compare=False)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Paste:
        numbers = uniforms(3)
        return Paste(numbers[:, 0] < self.p, np.floor(numbers[:, 1:] * 2.0**32).astype(np.uint64))
