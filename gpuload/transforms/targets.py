"""Transforms for the boxes and keypoints of a sample: a crop that depends on boxes, and clamping and sanitizing.

Names, arguments, defaults and semantics are torchvision's. When a box is removed, its fields are removed too: its
label, its entries in other fields that `labels_getter` returns, and its instance mask (`gpuload.workers.box_fields`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.checks import argument, finite_number, integer, numbers, one_of
from gpuload.datasets.sample import format_name
from gpuload.transforms.arguments import label_getter
from gpuload.transforms.base import EVERYWHERE, Padding, Transform, Uniforms, declaration
from gpuload.transforms.program.ops import Box, Clamp, ClampPoints, Record, Reformat, Tidy, TidyPoints

__all__ = [
    "ClampBoundingBoxes",
    "ClampKeyPoints",
    "ConvertBoundingBoxFormat",
    "RandomIoUCrop",
    "SanitizeBoundingBoxes",
    "SanitizeKeyPoints",
]

OPTIONS: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
# torchvision has no limit. One of its seven options always ends the search, so even if no crop is ever accepted, a
# sample needs more rounds than this only with a probability of 1 in 5 million.
ROUNDS: Final = 100
NUMBERS_PER_TRIAL: Final = 4  # two uniform numbers for the size, two for the corner


@declaration
class RandomIoUCrop(Padding):
    """Crop a part of the image that overlaps at least one of the sample's boxes by a random minimum, as in SSD.

    A minimum overlap (intersection over union) is drawn from `sampler_options`; 1 or more means that the image is not
    cropped. Otherwise up to `trials` crops are drawn, until a crop has an allowed aspect ratio, contains the centre of
    a box, and has at least the minimum overlap with one of the boxes whose centres it contains. If all trials fail,
    another minimum overlap is drawn. Boxes whose centres are outside the crop are removed, along with their
    fields: the fields selected by the chain's `SanitizeBoundingBoxes`, or by default labels (if found) and instance
    masks. (torchvision shrinks such boxes to nothing, and relies on SanitizeBoundingBoxes to remove them.)

    A sample without boxes is unchanged.

    Args:
        min_scale, max_scale: bounds of the crop's height and width, as fractions of the image's height and width.
        min_aspect_ratio, max_aspect_ratio: bounds of the crop's width / height.
        sampler_options: the overlaps to draw from; None means 0, 0.1, 0.3, 0.5, 0.7, 0.9 and 1.
        trials: the number of crops to try for each drawn overlap.
    """

    is_crop: ClassVar[bool] = True
    reads_boxes: ClassVar[bool] = True
    drops_boxes: ClassVar[bool] = True

    min_scale: float = argument(finite_number, default=0.3, by_epoch=True)
    max_scale: float = argument(finite_number, default=1.0, by_epoch=True)
    min_aspect_ratio: float = argument(finite_number, default=0.5, by_epoch=True)
    max_aspect_ratio: float = argument(finite_number, default=2.0, by_epoch=True)
    sampler_options: Sequence[float] | None = argument(numbers, default=None)
    trials: int = argument(integer, default=40, minimum=1)

    def __post_init__(self) -> None:
        if self.sampler_options is None:
            object.__setattr__(self, "sampler_options", OPTIONS)
        super().__post_init__()

    def check_arguments(self) -> None:
        for low, high in (("min_scale", "max_scale"), ("min_aspect_ratio", "max_aspect_ratio")):
            minimum, maximum = getattr(self, low), getattr(self, high)
            if not 0 < minimum <= maximum:
                raise ValueError(f"RandomIoUCrop needs 0 < {low} ≤ {high}, got {minimum:g} and {maximum:g}")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        if uniforms.boxes is None:
            raise ValueError(
                "RandomIoUCrop needs the boxes of a sample, but the sample has none; return gpuload.Boxes from "
                "the dataset"
            )
        boxes = uniforms.boxes
        regions = np.concatenate([np.zeros_like(sizes_hw), sizes_hw], axis=1)
        kept_boxes = np.ones((len(boxes), max([1, *map(len, boxes)])), np.bool_)
        remaining_rows = np.array([row for row, array in enumerate(boxes) if len(array)], np.int64)
        count = 1 + NUMBERS_PER_TRIAL * self.trials
        for round_index in range(ROUNDS):
            if not len(remaining_rows):
                break
            numbers = uniforms.take(remaining_rows)((round_index + 1) * count)[:, round_index * count :]
            is_done = np.zeros(len(remaining_rows), np.bool_)
            for index, row in enumerate(remaining_rows.tolist()):
                is_done[index] = self._run_round(
                    numbers[index], sizes_hw[row], boxes[row], regions[row], kept_boxes[row]
                )
            remaining_rows = remaining_rows[~is_done]
        return self.box_record(regions[:, :2], regions[:, 2:].copy(), kept_boxes)

    def _run_round(
        self, numbers: np.ndarray, size_hw: np.ndarray, boxes: np.ndarray, region: np.ndarray, kept_boxes: np.ndarray
    ) -> bool:
        """Draw a minimum overlap and its trials. Write the first accepted crop to `region` and `kept_boxes`. Return
        whether the search is over: a crop was accepted, or the image is not to be cropped."""
        options = self.sampler_options
        assert options is not None
        overlap = options[int(numbers[0] * len(options))]
        if overlap >= 1:
            return True
        height, width = size_hw.tolist()
        trials = numbers[1:].reshape(self.trials, NUMBERS_PER_TRIAL)
        scale = self.min_scale + (self.max_scale - self.min_scale) * trials[:, :2]
        new_width, new_height = (width * scale[:, 0]).astype(np.int64), (height * scale[:, 1]).astype(np.int64)
        left = ((width - new_width) * trials[:, 2]).astype(np.int64)
        top = ((height - new_height) * trials[:, 3]).astype(np.int64)
        ratio = new_width / np.maximum(new_height, 1)
        is_accepted = (new_width > 0) & (new_height > 0)
        is_accepted &= (self.min_aspect_ratio <= ratio) & (ratio <= self.max_aspect_ratio)
        crops = np.stack([left, top, left + new_width, top + new_height], axis=1)
        centres = (boxes[:, :2] + boxes[:, 2:]) * 0.5
        has_centre = np.all((crops[:, None, :2] < centres) & (centres < crops[:, None, 2:]), axis=2)  # trials × boxes
        # A crop that contains no box centre gets -1, which is less than any overlap.
        is_accepted &= np.where(has_centre, _overlaps(crops, boxes), -1.0).max(axis=1) >= max(overlap, 0.0)
        if not is_accepted.any():
            return False
        trial = int(is_accepted.argmax())
        region[:] = top[trial], left[trial], new_height[trial], new_width[trial]
        kept_boxes[: len(boxes)] = has_centre[trial]
        return True

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None


def _overlaps(crops: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the intersection over union of each crop (m, 4) with each box (n, 4), float64 (m, n)."""
    start = np.maximum(crops[:, None, :2], boxes[:, :2])
    end = np.minimum(crops[:, None, 2:], boxes[:, 2:])
    intersection = np.maximum(end - start, 0).prod(axis=2)
    areas = (crops[:, 2:] - crops[:, :2]).prod(axis=1)[:, None] + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    union = areas - intersection
    return np.divide(intersection, union, out=np.zeros(intersection.shape), where=union > 0)


@declaration
class SanitizeBoundingBoxes(Transform):
    """Remove boxes that are too small or extend beyond the image, along with their fields.

    Args:
        min_size: the minimum width and height of a box, in pixels.
        min_area: the minimum area of a box, in square pixels.
        labels_getter: the fields of the boxes, in addition to instance masks (N×H×W for N boxes, in the container of
            the boxes). ``"default"`` selects keypoints (N×K×2), ``"area"``, ``"iscrowd"`` and ``"visibility"`` with one
            entry per box in the container of the boxes, and labels. It finds labels as torchvision does: in a sample
            that is a dict, or in the dict at index 1 of a tuple or list, under the key ``"labels"`` (upper or lower
            case), or else under the first key that contains ``"label"``. Otherwise the entry at index 1 is used as the
            labels, if it is an array or tensor. A function takes the sample as the dataset returns it, and returns a
            field, or a tuple or list of fields. None selects no fields.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    drops_boxes: ClassVar[bool] = True
    record: ClassVar[type[Record]] = Tidy

    min_size: float = argument(finite_number, default=1.0, minimum=1)
    min_area: float = argument(finite_number, default=1.0, minimum=1)
    # Not compared, since it does not affect which boxes remain, and functions differ between processes.
    labels_getter: Callable[[Any], Any] | str | None = argument(
        label_getter, default="default", compare=False, optional=True
    )

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Tidy:
        return Tidy(self.min_size, self.min_area)


@declaration
class ClampBoundingBoxes(Transform):
    """Clip boxes to their image.

    Args:
        clamping_mode: ``"auto"``, ``"hard"`` or ``"soft"``, which are equivalent for boxes that are not rotated; None
            means that boxes are not changed.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    clamping_mode: str | None = argument(one_of, default="auto", optional=True, choices=("auto", "hard", "soft"))

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Clamp | None:
        return None if self.clamping_mode is None else Clamp()

    @property
    def record(self) -> type[Record] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.clamping_mode is None else Clamp


@declaration
class ConvertBoundingBoxFormat(Transform):
    """Convert boxes to another format.

    Args:
        format: the new format: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``, in upper or lower case, or torchvision's
            BoundingBoxFormat.

    Example:
        >>> ConvertBoundingBoxFormat("CXCYWH")
        ConvertBoundingBoxFormat(format='cxcywh')
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record]] = Reformat

    format: str = argument(format_name)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Reformat:
        return Reformat(self.format)


@declaration
class ClampKeyPoints(Transform):
    """Move keypoints outside their image to the image's nearest pixel: x to 0 … width - 1, y to 0 … height - 1."""

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record]] = ClampPoints

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> ClampPoints:
        return ClampPoints()


@declaration
class SanitizeKeyPoints(Transform):
    """Remove keypoints outside their image, along with their fields. If keypoints form groups, (N, …, 2), a group is
    removed if any of its keypoints is outside.

    A sample must have exactly one `Keypoints`.

    Args:
        labels_getter: the fields of the keypoints, with one entry per keypoint or group. None means no fields;
            ``"default"`` and functions are as for `SanitizeBoundingBoxes`.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    drops_points: ClassVar[bool] = True
    record: ClassVar[type[Record]] = TidyPoints

    # Not compared, since it does not affect which keypoints remain, and functions differ between processes.
    labels_getter: Callable[[Any], Any] | str | None = argument(label_getter, default=None, compare=False)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> TidyPoints:
        return TidyPoints()
