"""The records of a program: what was drawn for a batch, and all that a backend must know to apply it.

A transform is torchvision's word for one of these with certain distributions: Resize, CenterCrop, RandomResizedCrop,
Pad and RandomZoomOut all come to a `Box`, rotations to a `Warp`, everything that changes colours to `Ops`, in an order
that is data. A record is for some rows of a batch, or for all: a transform that holds others comes as several records,
each with rows of its own. An `Outline` says beforehand which records a transform makes.

Arrays have the record's rows as their first axis. Sizes are int64 (n, 2), height and width; boxes and windows int64
(n, 4), top, left, height, width. Imported by workers, so there is no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Self

import numpy as np

from gpuload.transforms.program.windows import FILTERS, full_windows, padded_windows, source_windows

__all__ = [
    "CHANGES_PIXELS",
    "NOTHING",
    "OPS",
    "VALUES",
    "Box",
    "Clamp",
    "Erase",
    "Flip",
    "Mix",
    "Mixture",
    "Numbers",
    "Ops",
    "Outline",
    "Record",
    "Reformat",
    "Tidy",
    "Warp",
    "code",
    "filter_codes",
]

# The operations that leave an image's size as it is; their codes are their places here. Behind each, its values.
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
    "noise",  # mean, sigma (in levels), key word 0, key word 1
    "permute",  # the three channels that stand at red, green and blue afterwards
    "warp",  # the eight coefficients of `Warp`; by the record's filters and fill
    "identity",
    "solarize_add",  # threshold, and what is added to levels below it
    "pillow_blur",  # radius, in pixels, of Pillow's GaussianBlur, which is made of box blurs
)
NOTHING: Final = -1  # the code of no operation
VALUES: Final = 8  # numbers that an operation has at most
NO_SIZES: Final = np.empty((0, 2), np.int64)  # until a record is placed in a program


def code(name: str) -> int:
    """The code of an operation."""
    return OPS.index(name)


def filter_codes(filters: np.ndarray | str, shape: int | tuple[int, ...]) -> np.ndarray:
    """The codes of a record's filters, one for each: a name stands for all."""
    return filters if isinstance(filters, np.ndarray) else np.full(shape, FILTERS.index(filters))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Record:
    """One step of a program.

    Attributes:
        rows: int64 (n,), the rows of the batch that it is for, ascending; None: all of them.
        sizes_hw: the sizes of the images that come to it.
        step: the number of the transform in its line that it comes from.
        name: what the transform that drew it is called, for messages.
    """

    told: ClassVar[tuple[str, ...]] = ()  # the fields that were drawn

    rows: np.ndarray | None = None
    sizes_hw: np.ndarray = field(default_factory=lambda: NO_SIZES)
    step: int = 0
    name: str = ""

    @property
    def after_hw(self) -> np.ndarray:
        """The sizes of the results."""
        return self.sizes_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        """The part of each input that these parts of the results are made from."""
        return windows_tlhw

    def resized(self, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of all images of the batch after it, from those before it."""
        if self.rows is None:
            return self.after_hw
        if self.after_hw is not self.sizes_hw:
            sizes_hw = sizes_hw.copy()
            sizes_hw[self.rows] = self.after_hw
        return sizes_hw

    def take(self, places: np.ndarray, rows: np.ndarray | None) -> Self:
        """Some of its rows, by their places in its arrays; `rows` are their numbers in the batch that is left."""
        changes: dict[str, Any] = {"rows": rows}
        for name in (known.name for known in fields(self) if known.name != "rows"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                changes[name] = value[places]
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, eq=False)
class Box(Record):
    """A box is cut out. With a `padding_mode` it may reach beyond the image, and nothing is resampled; without one it
    lies inside, and is resampled to a size. Where both sizes are equal, nothing is resampled.

    Attributes:
        box_tlhw: the boxes.
        size_hw: the sizes of the results.
        filters: int64 (n,), codes of `FILTERS`; or the name of the one that all have.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``; None: resampled.
        fill: levels for ``"constant"``: one, or one for each channel.
        mask_fill: the same for masks: any number.
        cuts: bounding boxes are cut to the box even where it is the whole image.
        kept: bool (n, most bounding boxes of a sample), those that are not left out; None: all.
    """

    told: ClassVar[tuple[str, ...]] = ("box_tlhw", "size_hw", "filters", "kept")

    box_tlhw: np.ndarray
    size_hw: np.ndarray
    filters: np.ndarray | str = "bilinear"
    padding_mode: str | None = None
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0
    cuts: bool = True
    kept: np.ndarray | None = None

    @property
    def pads(self) -> bool:
        """Whether it may reach beyond the image, and nothing is resampled."""
        return self.padding_mode is not None

    @property
    def after_hw(self) -> np.ndarray:
        return self.size_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        if self.padding_mode is not None:
            return padded_windows(self.box_tlhw, windows_tlhw, self.sizes_hw, self.padding_mode)
        if np.array_equal(windows_tlhw, full_windows(self.size_hw)):
            return self.box_tlhw
        codes = filter_codes(self.filters, len(windows_tlhw))
        inner = source_windows(windows_tlhw, self.size_hw, self.box_tlhw[:, 2:], codes)
        inner[:, :2] += self.box_tlhw[:, :2]
        return inner


@dataclass(frozen=True, slots=True, eq=False)
class Flip(Record):
    """`flipped`: bool (n,), which images are mirrored; `axis`: 0 rows (upside down), 1 columns."""

    told: ClassVar[tuple[str, ...]] = ("flipped",)

    flipped: np.ndarray
    axis: int = 1

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        windows, axis = windows_tlhw.copy(), self.axis
        opposite = self.sizes_hw[:, axis] - windows[:, axis] - windows[:, axis + 2]
        windows[:, axis] = np.where(self.flipped, opposite, windows[:, axis])
        return windows


@dataclass(frozen=True, slots=True, eq=False)
class Warp(Record):
    """A projective map, given backwards as Pillow's `Image.transform(size, PERSPECTIVE, …)` takes it.

    Attributes:
        coefficients: float64 (n, 8), a … h: the centre of output pixel (x, y), at (X, Y) = (x + ½, y + ½), shows the
            input at ((a X + b Y + c) / w, (d X + e Y + f) / w) with w = g X + h Y + 1.
        size_hw: the sizes of the results.
        warped: bool (n,): others stay as they are.
        filters, fill, mask_fill: as for `Box`; the fill is what lies outside the image.
    """

    told: ClassVar[tuple[str, ...]] = ("coefficients", "size_hw", "warped", "filters")

    coefficients: np.ndarray
    size_hw: np.ndarray
    warped: np.ndarray
    filters: np.ndarray | str = "nearest"
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0

    @property
    def after_hw(self) -> np.ndarray:
        return self.size_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw)


@dataclass(frozen=True, slots=True, eq=False)
class Ops(Record):
    """Operations on each image, one after the other, in an order of its own.

    Attributes:
        codes: int64 (n, depth), of `OPS`, or `NOTHING`.
        values: float64 (n, depth, `VALUES`), what each operation needs.
        filters: of warps: int64 (n, depth), codes of `FILTERS`, or the name of the one that all have.
        fill: of warps: levels, one or one for each channel.
        channels: how many the results have, of equal grey levels; None: as many as before.
        whole: whether each pixel of a result may depend on the whole image.
    """

    told: ClassVar[tuple[str, ...]] = ("codes", "values", "filters")

    codes: np.ndarray
    values: np.ndarray
    filters: np.ndarray | str = "nearest"
    fill: tuple[float, ...] = (0,)
    channels: int | None = None
    whole: bool = True

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw) if self.whole else windows_tlhw


@dataclass(frozen=True, slots=True, eq=False)
class Mixture(Record):
    """Several chains of operations on each image, whose results are mixed with it: AugMix.

    Attributes:
        codes: int64 (n, width, depth), and `values`: float64 (n, width, depth, `VALUES`), as in `Ops`.
        weights: float64 (n, 1 + width), the share of the image itself and of each chain.
        filters, fill: of warps, as in `Ops`; one name for all.
    """

    told: ClassVar[tuple[str, ...]] = ("codes", "values", "weights")

    codes: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    filters: str = "bilinear"
    fill: tuple[float, ...] = (0,)

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw)

    def chain(self, number: int) -> Ops:
        """One of the chains."""
        codes, values = self.codes[:, number], self.values[:, number]
        return Ops(codes, values, self.filters, self.fill, rows=self.rows, sizes_hw=self.sizes_hw)


@dataclass(frozen=True, slots=True, eq=False)
class Erase(Record):
    """Boxes that are erased.

    Attributes:
        boxes_tlhw: int64 (n, most, 4), of no height where there is none.
        keys: uint64 (n, 2), the words of the key that random numbers are made with.
        kind: what is written: ``"const"``, ``"rand"`` (one random colour for a box) or ``"pixel"`` (for each pixel).
        numbers: for ``"const"``, one number or one for each channel: levels, or numbers of finished images.
    """

    told: ClassVar[tuple[str, ...]] = ("boxes_tlhw", "keys")

    boxes_tlhw: np.ndarray
    keys: np.ndarray
    kind: str = "const"
    numbers: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, slots=True, eq=False)
class Mix(Record):
    """Each image is mixed with that of its partner, the sample at position p XOR 1; which row of a batch that is, if
    any, is not drawn, but told to what applies it. In a program it is one record for all rows.

    Attributes:
        share: float64 (n,), of the image itself, in its label too; 1 where it is not mixed.
        box_tlhw: what is pasted from the partner (CutMix); of no height for MixUp, which blends.
        names: where several transforms drew it: what that of each image is called; "" where it is not mixed.
    """

    told: ClassVar[tuple[str, ...]] = ("share", "box_tlhw")

    share: np.ndarray
    box_tlhw: np.ndarray
    names: np.ndarray | None = None


CHANGES_PIXELS: Final = (Box, Flip, Warp, Ops, Mixture, Erase, Mix)  # what follows is of numbers and bounding boxes


@dataclass(frozen=True, slots=True, eq=False)
class Numbers(Record):
    """Levels become numbers: what writes results does it, once for all of these.

    Attributes:
        dtype: of images, as `ToDtype` says it; None: it says nothing of images.
        scale: 0 … 255 becomes 0 … 1 first.
        mask_dtype: of masks; None: their own.
        mean, std: one for each channel, subtracted and divided by; empty where nothing is normalised.
    """

    dtype: str | None = None
    scale: bool = False
    mask_dtype: str | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Tidy(Record):
    """Bounding boxes that are narrower or lower than `min_size`, smaller than `min_area` or reach beyond the image are
    left out."""

    min_size: float
    min_area: float


@dataclass(frozen=True, slots=True, eq=False)
class Clamp(Record):
    """Bounding boxes are cut to the image."""


@dataclass(frozen=True, slots=True, eq=False)
class Reformat(Record):
    """Bounding boxes are given in a format."""

    format: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outline:
    """What is known of a transform's records before anything is drawn.

    Attributes:
        kind: their class.
        name: what the transform is called.
        operations: those that `Ops` or a `Mixture` may hold, sorted.
        filters: the names of those that a `Box` or warps may be sampled with.
        padding_mode: of a `Box`.
        affine: whether all maps of a `Warp` are.
        written: the `kind` of an `Erase`.
        numbers: the record itself, of `Numbers`.
    """

    kind: type[Record]
    name: str
    operations: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    padding_mode: str | None = None
    affine: bool = True
    written: str = "const"
    numbers: Numbers | None = None
