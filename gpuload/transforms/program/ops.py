"""The records of a program: what was drawn for a batch, and all that a backend must know to apply it.

A transform is torchvision's word for one of these with certain distributions: Resize, CenterCrop, RandomResizedCrop,
Pad and RandomZoomOut all become a `Box`, rotations a `Warp`, changes of colour `Ops`, whose order is data. A record is
for some rows of a batch, or for all: a transform that holds others becomes several records, each with rows of its own.
An `Outline` says beforehand which records a transform makes.

The first axis of all arrays is the record's rows. Sizes are int64 (n, 2), height and width; boxes and windows int64
(n, 4), top, left, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Self

import numpy as np

from gpuload.transforms.program.windows import FILTERS, full_windows, padded_windows, source_windows, transposed_boxes

__all__ = [
    "CHANGES_PIXELS", "MOVES_PIXELS", "NOTHING", "OPS", "VALUES", "Box", "Call", "Clamp", "ClampPoints", "Elastic",
    "Erase", "Flip", "Gather", "Mix", "Mixture", "Numbers", "Ops", "Outline", "Record", "Reformat", "Tidy",
    "TidyPoints", "Turn", "Warp", "code", "filter_codes", "in_params",
]  # fmt: skip

# The operations that leave an image's size as it is; a code is an index here. The comments say what values each has.
OPS: Final = (
    "brightness",  # factor
    "contrast",  # factor
    "saturation",  # factor
    "hue",  # turns of the colour circle
    "sharpness",  # factor
    "solarize",  # threshold: levels from it on are inverted
    "posterize",  # bits that are kept
    "equalize",
    "autocontrast",
    "invert",
    "grayscale",
    "blur",  # kernel width, kernel height (odd), sigma x, sigma y, in pixels
    "noise",  # mean, sigma (in levels), key word 0, key word 1; 1 if what leaves 0 … 255 wraps around
    "permute",  # the channels that become red, green and blue
    "warp",  # the eight coefficients of `Warp`; uses the record's filters and fill
    "identity",
    "solarize_add",  # threshold; what is added to levels below it
    "pillow_blur",  # radius in pixels, of Pillow's GaussianBlur, which is made of box blurs
    "jpeg",  # quality, 1 … 100
)
NOTHING: Final = -1  # the code of no operation
VALUES: Final = 8  # the most values that an operation has
NO_SIZES: Final = np.empty((0, 2), np.int64)  # until a record is placed in a program


def code(name: str) -> int:
    return OPS.index(name)


def filter_codes(filters: np.ndarray | str, shape: int | tuple[int, ...]) -> np.ndarray:
    """The codes of a record's filters; a single name is repeated."""
    return filters if isinstance(filters, np.ndarray) else np.full(shape, FILTERS.index(filters))


@dataclass(eq=False, repr=False, kw_only=True)
class Record:
    """A step of a program.

    Attributes:
        rows: int64 (n,), the rows of the batch that it is for, ascending; None means all.
        sizes_hw: the sizes of its input images.
        step: the number, in its line, of the transform that drew it.
        name: the name of that transform, for messages.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ()  # what `Loader.replay` shows

    rows: np.ndarray | None = None
    sizes_hw: np.ndarray = field(default_factory=lambda: NO_SIZES)
    step: int = 0
    name: str = ""

    @property
    def after_hw(self) -> np.ndarray:
        """The sizes of the results."""
        return self.sizes_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        """The part of each input that these parts of the results depend on."""
        return windows_tlhw

    def resized(self, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of all images of the batch after the record, from those before it."""
        if self.rows is None:
            return self.after_hw
        if self.after_hw is not self.sizes_hw:
            sizes_hw = sizes_hw.copy()
            sizes_hw[self.rows] = self.after_hw
        return sizes_hw

    def take(self, entries: np.ndarray, rows: np.ndarray | None) -> Self:
        """Return the record with some entries of its arrays; `rows` are their row numbers in the remaining batch."""
        changes: dict[str, Any] = {"rows": rows}
        for name in (known.name for known in fields(self) if known.name != "rows"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                changes[name] = value[entries]
        return replace(self, **changes)


class OfWholeImages(Record):
    """A record each pixel of whose results may depend on the whole image."""

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw)


@dataclass(eq=False, repr=False)
class Box(Record):
    """A box is cut out. With a `padding_mode` it may reach beyond the image, and is not resampled; without one it lies
    inside, and is resampled to `size_hw`, unless it already has that size.

    Attributes:
        box_tlhw: the boxes.
        size_hw: the sizes of the results.
        filters: int64 (n,), codes of `FILTERS`; or one name for all.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``; None means resampled.
        fill: levels for ``"constant"``: one, or one for each channel.
        mask_fill: the same for masks: any number.
        cuts: bounding boxes are cut to the box even where it is the whole image.
        kept_boxes: bool (n, most bounding boxes of a sample), which ones are kept; None means all.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("box_tlhw", "size_hw", "filters", "kept_boxes")

    box_tlhw: np.ndarray
    size_hw: np.ndarray
    filters: np.ndarray | str = "bilinear"
    padding_mode: str | None = None
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0
    cuts: bool = True
    kept_boxes: np.ndarray | None = None

    @property
    def after_hw(self) -> np.ndarray:
        return self.size_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        if self.padding_mode is not None:
            return padded_windows(self.box_tlhw, windows_tlhw, self.sizes_hw, self.padding_mode)
        if (windows_tlhw[:, 2:] == self.size_hw).all():  # the whole result
            return self.box_tlhw
        codes = filter_codes(self.filters, len(windows_tlhw))
        inner = source_windows(windows_tlhw, self.size_hw, self.box_tlhw[:, 2:], codes)
        inner[:, :2] += self.box_tlhw[:, :2]
        return inner


@dataclass(eq=False, repr=False)
class Flip(Record):
    """`flipped`: bool (n,), which images are mirrored; `axis`: 0 for upside down, 1 for left to right."""

    drawn_fields: ClassVar[tuple[str, ...]] = ("flipped",)

    flipped: np.ndarray
    axis: int = 1

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return _mirrored(windows_tlhw, self.sizes_hw, self.flipped, self.axis)


def _mirrored(windows_tlhw: np.ndarray, sizes_hw: np.ndarray, flipped: np.ndarray, axis: int) -> np.ndarray:
    windows = windows_tlhw.copy()
    opposite = sizes_hw[:, axis] - windows[:, axis] - windows[:, axis + 2]
    windows[:, axis] = np.where(flipped, opposite, windows[:, axis])
    return windows


@dataclass(eq=False, repr=False)
class Turn(Record):
    """Rows and columns are swapped, then images are mirrored, as a turn by 90° does both.

    Attributes:
        transposed: bool (n,), the rows and columns of which images are swapped.
        flipped: bool (n, 2), which are mirrored then, upside down and left to right.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("transposed", "flipped")

    transposed: np.ndarray
    flipped: np.ndarray

    @property
    def after_hw(self) -> np.ndarray:
        return np.where(self.transposed[:, None], self.sizes_hw[:, ::-1], self.sizes_hw)

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        for axis in (0, 1):
            windows_tlhw = _mirrored(windows_tlhw, self.after_hw, self.flipped[:, axis], axis)
        return transposed_boxes(windows_tlhw, self.transposed)


@dataclass(eq=False, repr=False)
class Warp(OfWholeImages):
    """A projective map, given backwards as Pillow's `Image.transform(size, PERSPECTIVE, …)` takes it.

    Attributes:
        coefficients: float64 (n, 8), a … h: the centre of output pixel (x, y), at (X, Y) = (x + ½, y + ½), shows the
            input at ((a X + b Y + c) / w, (d X + e Y + f) / w) with w = g X + h Y + 1.
        size_hw: the sizes of the results.
        warped: bool (n,), which images are changed at all.
        filters, fill, mask_fill: as for `Box`; the fill lies outside the image.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("coefficients", "size_hw", "warped", "filters")

    coefficients: np.ndarray
    size_hw: np.ndarray
    warped: np.ndarray
    filters: np.ndarray | str = "nearest"
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0

    @property
    def after_hw(self) -> np.ndarray:
        return self.size_hw


@dataclass(eq=False, repr=False)
class Elastic(OfWholeImages):
    """Each pixel shows what lies at a smooth random displacement from it; see `program.fields`.

    Attributes:
        keys: uint64 (n, 2), the words of the key of each image's noise.
        alpha: along x and y: noise in -1 … 1 is multiplied by half of it, in pixels.
        sigma: along x and y: of the noise's smoothing, in pixels; (0, 0): none.
        filters: the name of the filter, ``"nearest"`` or ``"bilinear"``.
        fill, mask_fill: as for `Box`; the fill lies outside the image.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("keys",)

    keys: np.ndarray
    alpha: tuple[float, float]
    sigma: tuple[float, float]
    filters: str = "bilinear"
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0


@dataclass(eq=False, repr=False)
class Ops(Record):
    """Operations on each image, one after the other, in each image's own order.

    Attributes:
        codes: int64 (n, depth), of `OPS`, or `NOTHING`.
        values: float64 (n, depth, `VALUES`), what each operation needs.
        filters: of warps: int64 (n, depth), codes of `FILTERS`; or one name for all.
        fill: of warps: levels, one or one for each channel.
        channels: the number of equal grey channels in the results; None means channels stay as they are.
        whole: whether each pixel of a result may depend on the whole image.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("codes", "values", "filters")

    codes: np.ndarray
    values: np.ndarray
    filters: np.ndarray | str = "nearest"
    fill: tuple[float, ...] = (0,)
    channels: int | None = None
    whole: bool = True

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw) if self.whole else windows_tlhw


@dataclass(eq=False, repr=False)
class Mixture(OfWholeImages):
    """Several chains of operations on each image, whose results are mixed with it: AugMix.

    Attributes:
        codes: int64 (n, width, depth), and `values`: float64 (n, width, depth, `VALUES`), as in `Ops`.
        weights: float64 (n, 1 + width), the share of the image itself and of each chain.
        filters: of warps: int64 (n, width, depth), codes of `FILTERS`; or one name for all.
        fill: of warps, as in `Ops`.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("codes", "values", "weights")

    codes: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    filters: np.ndarray | str = "bilinear"
    fill: tuple[float, ...] = (0,)

    def chain(self, number: int) -> Ops:
        codes, values = self.codes[:, number], self.values[:, number]
        filters = self.filters[:, number] if isinstance(self.filters, np.ndarray) else self.filters
        return Ops(codes, values, filters, self.fill, rows=self.rows, sizes_hw=self.sizes_hw)


@dataclass(eq=False, repr=False)
class Erase(Record):
    """Boxes that are erased.

    Attributes:
        boxes_tlhw: int64 (n, most, 4), with height 0 where there is none.
        keys: uint64 (n, 2), the words of the key of the random numbers.
        kind: what is written: ``"const"``, ``"rand"`` (a random colour for each box) or ``"pixel"`` (for each pixel).
        numbers: for ``"const"``, one number or one for each channel: levels of uint8, or numbers of finished images.
        numbers_given: the numbers as the user wrote them.
        scaled: whether they were written for images that `ToDtype` scales to 0 … 1.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("boxes_tlhw", "keys")

    boxes_tlhw: np.ndarray
    keys: np.ndarray
    kind: str = "const"
    numbers: tuple[float, ...] = (0.0,)
    numbers_given: tuple[float, ...] = (0.0,)
    scaled: bool = False

    def levels(self, top: int | None) -> tuple[float, ...]:
        """The numbers for images that are not finished, and whose highest level is this; None means floats of any
        range."""
        if top == 255:
            return self.numbers
        unit = (top or 1) if self.scaled else 1
        return tuple(number if top is None else float(round(number * unit)) for number in self.numbers_given)


@dataclass(eq=False, repr=False)
class Mix(Record):
    """Each image is mixed with its partner (`gpuload.batches.mixing`). The partner's row is not drawn: whoever applies
    the record is told. A program has at most one such record, for all rows.

    Attributes:
        share: float64 (n,), of the image itself, also in the label; 1 where it is not mixed.
        box_tlhw: the box that is pasted from the partner (CutMix); of height 0 for MixUp, which blends.
        names: if several transforms drew it, the name of each image's; "" where it is not mixed.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("share", "box_tlhw")

    share: np.ndarray
    box_tlhw: np.ndarray
    names: np.ndarray | None = None


@dataclass(eq=False, repr=False)
class Gather(OfWholeImages):
    """The images of a group are put into each image: Mosaic and CopyPaste. A program has the record for all rows.

    A sample's group are its neighbours at positions p XOR 1, p XOR 2, …; their rows are not drawn, but set once the
    batch is there (`gpuload.batches.gathering`). No backend sees the record: the stage applies it between two runs,
    when all images of the batch have come as far (`gpuload.stage.gathering`).

    With `keys`, and no `order` and `centre_yx` (CopyPaste), instances of the partner, at position p XOR 1, are pasted
    onto the image, at their places. Else (Mosaic) four images meet at a centre: each quadrant shows one, its corner at
    the centre, cut where the result ends.

    Attributes:
        gathered: bool (n,), which images are changed at all.
        size_hw: the sizes of the results; None means unchanged.
        order: int64 (n, 4), which of the group is shown top left, top right, bottom left and bottom right: the sample
            at position p XOR that number.
        centre_yx: int64 (n, 2), where they meet in the result.
        keys: uint64 (n, 2), the words of the key of the random numbers that choose instances.
        fill: levels where no image is: one, or one for each channel.
        mask_fill: the same for masks: any number.
        groups: int64 (n, 2 or 4), of each sample the rows of its group: its own, that at position p XOR 1, …; its own
            row again for those that are missing. Set once the batch is there.
        covered: of a paste, where each image shows its partner: a bool tensor H×W, or None for nowhere; set likewise.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("gathered", "order", "centre_yx", "keys")

    gathered: np.ndarray
    size_hw: np.ndarray | None = None
    order: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    centre_yx: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    keys: np.ndarray | None = None
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0
    groups: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    covered: Sequence[Any] = ()

    @property
    def after_hw(self) -> np.ndarray:
        return self.sizes_hw if self.size_hw is None else self.size_hw

    def quadrants(self, windows_tlhw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each quadrant of a mosaic, which image it shows and where.

        Args:
            windows_tlhw: int64 (n, 4), the parts of the results that are wanted.

        Returns:
            (rows, corners, shown): the rows of the images, int64 (n, 4); their top left corners in the result, int64
            (n, 4, 2), which may lie outside; and the parts of the result where they are seen, int64 (n, 4, 4), with
            height or width 0 where they are not.
        """
        rows = np.take_along_axis(self.groups, self.order, axis=1)
        sizes = self.sizes_hw[rows]
        after = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.bool_)  # quadrants below and right of the centre
        corners = np.where(after, self.centre_yx[:, None], self.centre_yx[:, None] - sizes)
        start = np.maximum(corners, windows_tlhw[:, None, :2])
        end = np.minimum(corners + sizes, (windows_tlhw[:, :2] + windows_tlhw[:, 2:])[:, None])
        return rows, corners, np.concatenate([start, np.maximum(end - start, 0)], axis=2)


@dataclass(eq=False, repr=False)
class Call(OfWholeImages):
    """The user's own transform is called with the images. No backend sees it: `gpuload.stage.segments` cuts a program
    there, and `gpuload.stage.user_code` calls it.

    Attributes:
        transform: a `gpuload.transforms.custom.Custom`.
        params: what it drew: an array (n, …), tuples and dicts of these, or None.
        seeds: int64 (n,), of torch's generators during the call.
    """

    transform: Any
    params: Any = None
    seeds: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def take(self, entries: np.ndarray, rows: np.ndarray | None) -> Self:
        return replace(super().take(entries, rows), params=in_params(self.params, lambda array: array[entries]))


def in_params(params: Any, change: Callable[[Any], Any]) -> Any:
    """The params of a `Call` with each array changed."""
    if params is None:
        return None
    if isinstance(params, dict):
        return {key: in_params(value, change) for key, value in params.items()}
    if isinstance(params, tuple):
        entries = [in_params(value, change) for value in params]
        return type(params)(*entries) if hasattr(params, "_fields") else tuple(entries)
    return change(params)


# The records below change numbers and boxes.
CHANGES_PIXELS: Final = (Box, Flip, Turn, Warp, Elastic, Ops, Mixture, Erase, Mix, Call)
MOVES_PIXELS: Final = (Box, Flip, Turn, Warp, Elastic)  # and operations named "warp"


@dataclass(eq=False, repr=False)
class Numbers(Record):
    """Levels become numbers. Applied when results are written, once for all such records.

    Attributes:
        dtype: of images, as in `ToDtype`; None means unchanged.
        scale: 0 … 255 becomes 0 … 1 first.
        mask_dtype: of masks; None means unchanged.
        mean, std: subtracted and divided by, one for each channel; empty: not normalised.
    """

    dtype: str | None = None
    scale: bool = False
    mask_dtype: str | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(eq=False, repr=False)
class Tidy(Record):
    """Bounding boxes are left out that are narrower or lower than `min_size`, smaller than `min_area`, or reach beyond
    the image."""

    min_size: float
    min_area: float


@dataclass(eq=False, repr=False)
class Clamp(Record):
    """Bounding boxes are cut to the image."""


@dataclass(eq=False, repr=False)
class ClampPoints(Record):
    """Keypoints are moved to the nearest pixel of the image, if they are outside."""


@dataclass(eq=False, repr=False)
class TidyPoints(Record):
    """Keypoints outside the image are left out; of groups (N, …, 2) those with one outside."""


@dataclass(eq=False, repr=False)
class Reformat(Record):
    """Bounding boxes are converted to a format."""

    format: str


@dataclass(eq=False, repr=False, kw_only=True)
class Outline:
    """Facts about a transform's records that are known before anything is drawn.

    Attributes:
        kind: their class.
        name: of the transform.
        operations: names of those that `Ops` or a `Mixture` may hold, sorted.
        filters: names of those that a `Box` or warps may use.
        padding_mode: of a `Box`.
        written: the `kind` of an `Erase`.
        numbers: a `Numbers` record itself.
    """

    kind: type[Record]
    name: str
    operations: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    padding_mode: str | None = None
    written: str = "const"
    numbers: Numbers | None = None
