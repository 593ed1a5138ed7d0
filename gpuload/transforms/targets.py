"""Transforms for the boxes and keypoints of a sample: a crop that keeps some boxes, and those that tidy up.

Names, arguments, defaults and meaning are torchvision's. When a box is left out, so are its belongings: its label and
what else `labels_getter` gives, and its instance mask (`gpuload.workers.box_fields`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.datasets.sample import format_name
from gpuload.transforms.arguments import finite, is_sequence, label_getter, whole
from gpuload.transforms.base import EVERYWHERE, Padding, Transform, Uniforms, argument, declaration
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
# torchvision goes on for ever. With its seven options, one of which always ends the search, a sample whose boxes can
# never be kept gets to the end of this many rounds once in 5 million times.
ROUNDS: Final = 100
NUMBERS: Final = 4  # of a trial: two for the size, two for the corner


@declaration
class RandomIoUCrop(Padding):
    """Cut out a part of the image that overlaps at least one of the sample's boxes by a drawn amount, as SSD does.

    An overlap is drawn from `sampler_options`; one of 1 or more leaves the image as it is. Otherwise up to `trials`
    crops are drawn, until one has an allowed aspect ratio, contains the centre of a box, and overlaps one of the boxes
    whose centre it contains by at least that amount (intersection over union). If none does, another overlap is drawn.
    Boxes whose centres are outside are left out, with their belongings: the fields that the chain's
    `SanitizeBoundingBoxes` name, else labels, if found, and instance masks. (torchvision shrinks such boxes to nothing,
    and leaves them to SanitizeBoundingBoxes.)

    A sample without boxes stays as it is.

    Args:
        min_scale, max_scale: bounds of the height and the width, as fractions of the image's.
        min_aspect_ratio, max_aspect_ratio: bounds of width / height.
        sampler_options: overlaps; None for 0, 0.1, 0.3, 0.5, 0.7, 0.9 and 1.
        trials: how many crops are tried for each drawn overlap.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    crops: ClassVar[bool] = True
    reads_boxes: ClassVar[bool] = True
    drops_boxes: ClassVar[bool] = True

    min_scale: float = argument(finite, default=0.3)
    max_scale: float = argument(finite, default=1.0)
    min_aspect_ratio: float = argument(finite, default=0.5)
    max_aspect_ratio: float = argument(finite, default=2.0)
    sampler_options: Sequence[float] | None = None
    trials: int = argument(whole, default=40, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "RandomIoUCrop"
        for low, high in (("min_scale", "max_scale"), ("min_aspect_ratio", "max_aspect_ratio")):
            minimum, most = getattr(self, low), getattr(self, high)
            if not 0 < minimum <= most:
                raise ValueError(f"{name} needs 0 < {low} ≤ {high}, got {minimum:g} and {most:g}")
        options = OPTIONS if self.sampler_options is None else self.sampler_options
        if not is_sequence(options) or not len(options):
            raise TypeError(f"{name}(sampler_options=…) must be a list of overlaps in 0 … 1, got {options!r}")
        options = tuple(finite(f"{name}(sampler_options=…)", option) for option in options)
        object.__setattr__(self, "sampler_options", options)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        if uniforms.boxes is None:
            raise ValueError("RandomIoUCrop draws from the boxes of a sample, and was given none; yield gpuload.Boxes")
        boxes = uniforms.boxes
        regions = np.concatenate([np.zeros_like(sizes_hw), sizes_hw], axis=1)
        kept_boxes = np.ones((len(boxes), max([1, *map(len, boxes)])), np.bool_)
        left = np.array([row for row, array in enumerate(boxes) if len(array)], np.int64)
        each = 1 + NUMBERS * self.trials
        for number in range(ROUNDS):
            if not len(left):
                break
            numbers = uniforms.take(left)((number + 1) * each)[:, number * each :]
            done = np.zeros(len(left), np.bool_)
            for at, row in enumerate(left.tolist()):
                done[at] = self._round(numbers[at], sizes_hw[row], boxes[row], regions[row], kept_boxes[row])
            left = left[~done]
        return self.box(regions[:, :2], regions[:, 2:].copy(), kept_boxes)

    def _round(
        self, numbers: np.ndarray, size_hw: np.ndarray, boxes: np.ndarray, region: np.ndarray, kept_boxes: np.ndarray
    ) -> bool:
        """Run one drawn overlap with all its trials at once; write to `region` and `kept_boxes`; return whether it was
        the last."""
        options = self.sampler_options
        assert options is not None
        overlap = options[int(numbers[0] * len(options))]
        if overlap >= 1:
            return True
        height, width = size_hw.tolist()
        shape = numbers[1:].reshape(self.trials, NUMBERS)
        scale = self.min_scale + (self.max_scale - self.min_scale) * shape[:, :2]
        new_width, new_height = (width * scale[:, 0]).astype(np.int64), (height * scale[:, 1]).astype(np.int64)
        left = ((width - new_width) * shape[:, 2]).astype(np.int64)
        top = ((height - new_height) * shape[:, 3]).astype(np.int64)
        ratio = new_width / np.maximum(new_height, 1)
        good = (new_width > 0) & (new_height > 0)
        good &= (self.min_aspect_ratio <= ratio) & (ratio <= self.max_aspect_ratio)
        crops = np.stack([left, top, left + new_width, top + new_height], axis=1)
        centres = (boxes[:, :2] + boxes[:, 2:]) * 0.5
        inside = np.all((crops[:, None, :2] < centres) & (centres < crops[:, None, 2:]), axis=2)  # trials × boxes
        # -1 where no centre is inside, which is less than any overlap.
        good &= np.where(inside, _overlaps(crops, boxes), -1.0).max(axis=1) >= max(overlap, 0.0)
        if not good.any():
            return False
        first = int(good.argmax())
        region[:] = top[first], left[first], new_height[first], new_width[first]
        kept_boxes[: len(boxes)] = inside[first]
        return True

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None


def _overlaps(crops: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Intersection over union of crops (m, 4) and boxes (n, 4), float64 (m, n)."""
    start = np.maximum(crops[:, None, :2], boxes[:, :2])
    end = np.minimum(crops[:, None, 2:], boxes[:, 2:])
    both = np.maximum(end - start, 0).prod(axis=2)
    areas = (crops[:, 2:] - crops[:, :2]).prod(axis=1)[:, None] + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    union = areas - both
    return np.divide(both, union, out=np.zeros(both.shape), where=union > 0)


def _size(name: str, value: Any) -> float:
    number = finite(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number:g}")
    return number


@declaration
class SanitizeBoundingBoxes(Transform):
    """Leave out boxes that are too small or reach beyond the image, and their belongings.

    Args:
        min_size: the least width and height of a box, in pixels.
        min_area: the least area of a box, in square pixels.
        labels_getter: what belongs to the boxes besides instance masks (N×H×W for N boxes, in the container that holds
            the boxes). ``"default"``: keypoints (N×K×2), ``"area"``, ``"iscrowd"`` and ``"visibility"`` beside the
            boxes, with an entry for each; and labels, where torchvision looks for them: in a sample that is a dict, or
            the dict at index 1 of a sample that is a tuple or list, the key ``"labels"`` (upper or lower case), else
            the first key with ``"label"`` in it; or the entry at index 1, if it is an array or tensor. A function:
            takes the sample as the dataset yields it, and returns such a leaf, or a tuple or list of them. None:
            nothing.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    drops_boxes: ClassVar[bool] = True
    record: ClassVar[type[Record]] = Tidy

    min_size: float = argument(_size, default=1.0)
    min_area: float = argument(_size, default=1.0)
    # Not compared: it does not decide which boxes are kept, and a function is another object in each process.
    labels_getter: Callable[[Any], Any] | str | None = argument(
        label_getter, default="default", compare=False, of="boxes", none=True
    )

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Tidy:
        return Tidy(self.min_size, self.min_area)


@declaration
class ClampBoundingBoxes(Transform):
    """Cut boxes to their image.

    Args:
        clamping_mode: ``"auto"``, ``"hard"`` or ``"soft"``, all the same for boxes that are not rotated; None leaves
            boxes as they are.

    Raises:
        ValueError: it is none of these.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    clamping_mode: str | None = "auto"

    def __post_init__(self) -> None:
        if self.clamping_mode not in ("auto", "hard", "soft", None):
            raise ValueError(
                "ClampBoundingBoxes(clamping_mode=…) must be 'auto', 'hard', 'soft' or None, "
                f"got {self.clamping_mode!r}"
            )

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Clamp | None:
        return None if self.clamping_mode is None else Clamp()

    @property
    def record(self) -> type[Record] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.clamping_mode is None else Clamp


@declaration
class ConvertBoundingBoxFormat(Transform):
    """Convert boxes to a format, whatever they came in.

    Args:
        format: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``, in any case, or torchvision's BoundingBoxFormat.

    Raises:
        ValueError: it is none of these.

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
    """Move keypoints that are outside their image to its nearest pixel: x to 0 … width - 1, y to 0 … height - 1."""

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record]] = ClampPoints

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> ClampPoints:
        return ClampPoints()


@declaration
class SanitizeKeyPoints(Transform):
    """Leave out keypoints outside their image, and what belongs to them. Of groups of keypoints, (N, …, 2), those of
    which one is outside are left out as a whole.

    A sample must have one leaf of `Keypoints`.

    Args:
        labels_getter: what belongs to the keypoints, with an entry for each (for each group). None means nothing.
            ``"default"``, and a function: as for `SanitizeBoundingBoxes`.

    Raises:
        ValueError: the argument is invalid.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    drops_points: ClassVar[bool] = True
    record: ClassVar[type[Record]] = TidyPoints

    # Not compared: it does not decide which keypoints are kept, and a function is another object in each process.
    labels_getter: Callable[[Any], Any] | str | None = argument(
        label_getter, default=None, compare=False, of="keypoints", none=True
    )

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> TidyPoints:
        return TidyPoints()
