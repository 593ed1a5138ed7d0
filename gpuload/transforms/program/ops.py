"""The records of a program: a batch's random parameters, and everything that a backend needs to apply them.

Drawing a transform gives a record with the random parameters of each image. Resize, CenterCrop, RandomResizedCrop, Pad
and RandomZoomOut all become a `Box`, rotations become a `Warp`, and colour changes become `Ops`, whose order can differ
between images. A record applies to some images of a batch or to all images: a transform that contains other transforms
becomes several records, each with its own images. A `RecordOutline` describes in advance the records that a transform
will draw.

The first axis of each array corresponds to the images of the record. Sizes are int64 (n, 2): height, width. Boxes and
windows are int64 (n, 4): top, left, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Self

import numpy as np

from gpuload.transforms.program.windows import FILTERS, full_windows, padded_windows, source_windows, transpose_boxes

__all__ = [
    "CHANGES_PIXELS",
    "MOVES_PIXELS",
    "NOTHING",
    "OPS",
    "VALUES",
    "Box",
    "Call",
    "ChainMixture",
    "Clamp",
    "ClampPoints",
    "Combination",
    "Elastic",
    "Erase",
    "Flip",
    "Numbers",
    "Ops",
    "PartnerMix",
    "Paste",
    "Record",
    "RecordOutline",
    "Reformat",
    "Tidy",
    "TidyPoints",
    "Tile",
    "Turn",
    "Warp",
    "code",
    "filter_codes",
    "map_params",
]  # fmt: skip

# The operations that keep an image's size. An operation's code is its index here. Comments list the operation's values.
OPS: Final = (
    "brightness",  # factor
    "contrast",  # factor
    "saturation",  # factor
    "hue",  # rotation, in turns of the colour circle
    "sharpness",  # factor
    "solarize",  # threshold: pixel values at or above it are inverted
    "posterize",  # number of bits to keep
    "equalize",
    "autocontrast",
    "invert",
    "grayscale",
    "blur",  # kernel width, kernel height (odd), sigma x, sigma y, in pixels
    "noise",  # mean, sigma (for 0 … 255), key word 0, key word 1; 1 if values outside 0 … 255 wrap around
    "permute",  # the input channels for red, green and blue
    "warp",  # the eight coefficients of `Warp`; uses the record's filters and fill
    "identity",
    "solarize_add",  # threshold; amount added to pixel values below it
    "pillow_blur",  # radius in pixels, of Pillow's GaussianBlur, which consists of box blurs
    "jpeg",  # quality, 1 … 100
    "gamma",  # exponent
    "white_balance",  # factors of red and blue
    "illumination",  # intensity, centre y and x, sigma, in pixels
    "shadow",  # share of the light that remains; left, top, right, bottom of the vertices; their number; key words 0, 1
    "motion_blur",  # kernel width and height, which are equal; angle in degrees, direction, shift along x and y
    "clahe",  # tiles along x and y, clip limit
)
NOTHING: Final = -1  # the code that means no operation
VALUES: Final = 8  # the maximum number of values of an operation
NO_SIZES: Final = np.empty((0, 2), np.int64)  # `sizes_hw` until a record becomes part of a program
NO_GROUPS: Final = np.empty((0, 0), np.int64)  # `groups` until the batch is assembled


def code(name: str) -> int:
    return OPS.index(name)


def filter_codes(filters: np.ndarray | str, shape: int | tuple[int, ...]) -> np.ndarray:
    """Return the codes of a record's filters: the array itself, or an array of this shape for a single name."""
    return filters if isinstance(filters, np.ndarray) else np.full(shape, FILTERS.index(filters))


@dataclass(eq=False, repr=False, kw_only=True)
class Record:
    """The random parameters of one transform for images of a batch.

    Attributes:
        rows: int64 (n,), the batch indices of the images that the record applies to, ascending; None means all.
        sizes_hw: the sizes of the input images.
        step: the index, in the line of transforms, of the transform that drew the record.
        name: the name of that transform, for messages.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ()  # the fields that `Loader.replay` shows

    rows: np.ndarray | None = None
    sizes_hw: np.ndarray = field(default_factory=lambda: NO_SIZES)
    step: int = 0
    name: str = ""

    @property
    def output_hw(self) -> np.ndarray:
        """The sizes of the results."""
        return self.sizes_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        """Return, for each image, the window of the input that this window of the result depends on."""
        return windows_tlhw

    def sizes_after(self, sizes_hw: np.ndarray) -> np.ndarray:
        """Return the sizes of all images in the batch after the record, given their sizes before it."""
        if self.rows is None:
            return self.output_hw
        if self.output_hw is not self.sizes_hw:
            sizes_hw = sizes_hw.copy()
            sizes_hw[self.rows] = self.output_hw
        return sizes_hw

    def take(self, entries: np.ndarray, rows: np.ndarray | None) -> Self:
        """Return a record with these entries of the arrays; `rows` are the new batch indices of the entries."""
        changes: dict[str, Any] = {"rows": rows}
        for name in (field_.name for field_ in fields(self) if field_.name != "rows"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                changes[name] = value[entries]
        return replace(self, **changes)


class WholeImageRecord(Record):
    """A record in which each pixel of a result can depend on the entire image."""

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw)


@dataclass(eq=False, repr=False)
class Box(Record):
    """A crop. With a `padding_mode`, the box can extend beyond the image and is not resampled. Without a
    `padding_mode`, the box is inside the image and is resampled to `size_hw` unless it already has that size.

    Attributes:
        box_tlhw: the boxes.
        size_hw: the sizes of the results.
        filters: int64 (n,), codes of `FILTERS`; or one name for all images.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``; None means the box is resampled.
        fill: the pixel values for ``"constant"``: one for all channels, or one per channel.
        mask_fill: the fill for masks: any number.
        clips_boxes: whether to clip bounding boxes even if the crop is the entire image.
        kept_boxes: bool (n, maximum number of bounding boxes per sample): the bounding boxes to keep; None means all.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("box_tlhw", "size_hw", "filters", "kept_boxes")

    box_tlhw: np.ndarray
    size_hw: np.ndarray
    filters: np.ndarray | str = "bilinear"
    padding_mode: str | None = None
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0
    clips_boxes: bool = True
    kept_boxes: np.ndarray | None = None

    @property
    def output_hw(self) -> np.ndarray:
        return self.size_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        if self.padding_mode is not None:
            return padded_windows(self.box_tlhw, windows_tlhw, self.sizes_hw, self.padding_mode)
        if (windows_tlhw[:, 2:] == self.size_hw).all():  # the windows are the complete results
            return self.box_tlhw
        codes = filter_codes(self.filters, len(windows_tlhw))
        source = source_windows(windows_tlhw, self.size_hw, self.box_tlhw[:, 2:], codes)
        source[:, :2] += self.box_tlhw[:, :2]
        return source


@dataclass(eq=False, repr=False)
class Flip(Record):
    """The mirroring of images.

    Attributes:
        flipped: bool (n,), the images to mirror.
        axis: 0 mirrors vertically (upside down), 1 horizontally (left to right).
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("flipped",)

    flipped: np.ndarray
    axis: int = 1

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return _mirror_windows(windows_tlhw, self.sizes_hw, self.flipped, self.axis)


def _mirror_windows(windows_tlhw: np.ndarray, sizes_hw: np.ndarray, flipped: np.ndarray, axis: int) -> np.ndarray:
    windows = windows_tlhw.copy()
    opposite = sizes_hw[:, axis] - windows[:, axis] - windows[:, axis + 2]
    windows[:, axis] = np.where(flipped, opposite, windows[:, axis])
    return windows


@dataclass(eq=False, repr=False)
class Turn(Record):
    """A transposition followed by mirroring, which together make a rotation by a multiple of 90°.

    Attributes:
        transposed: bool (n,), the images whose rows and columns are swapped.
        flipped: bool (n, 2), the images that are then mirrored vertically and horizontally.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("transposed", "flipped")

    transposed: np.ndarray
    flipped: np.ndarray

    @property
    def output_hw(self) -> np.ndarray:
        return np.where(self.transposed[:, None], self.sizes_hw[:, ::-1], self.sizes_hw)

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        for axis in (0, 1):
            windows_tlhw = _mirror_windows(windows_tlhw, self.output_hw, self.flipped[:, axis], axis)
        return transpose_boxes(windows_tlhw, self.transposed)


@dataclass(eq=False, repr=False)
class Warp(WholeImageRecord):
    """A projective map from results to inputs, as in Pillow's `Image.transform(size, PERSPECTIVE, …)`.

    Attributes:
        coefficients: float64 (n, 8), a … h: output pixel (x, y), with its centre at (X, Y) = (x + ½, y + ½), shows the
            input at ((a X + b Y + c) / w, (d X + e Y + f) / w) with w = g X + h Y + 1.
        size_hw: the sizes of the results.
        warped: bool (n,), the images to warp; all others are unchanged.
        filters, fill, mask_fill: as for `Box`; pixels outside the input get the fill.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("coefficients", "size_hw", "warped", "filters")

    coefficients: np.ndarray
    size_hw: np.ndarray
    warped: np.ndarray
    filters: np.ndarray | str = "nearest"
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0

    @property
    def output_hw(self) -> np.ndarray:
        return self.size_hw


@dataclass(eq=False, repr=False)
class Elastic(WholeImageRecord):
    """An elastic deformation: each pixel shows the input at a smooth random displacement; see `program.fields`.

    Attributes:
        keys: uint64 (n, 2), the words of the random key for each image's noise.
        alpha: along x and y, the strength in pixels; noise in -1 … 1 is multiplied by half of the strength.
        sigma: along x and y, the sigma of the smoothing in pixels; (0, 0) means no smoothing.
        filters: the name of the filter, ``"nearest"`` or ``"bilinear"``.
        fill, mask_fill: as for `Box`; pixels outside the input get the fill.
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
    """Operations applied to each image one after the other, in an order that can differ between images.

    Attributes:
        codes: int64 (n, depth), codes of `OPS`, or `NOTHING`.
        values: float64 (n, depth, `VALUES`), the values of each operation.
        filters: for warps, int64 (n, depth), codes of `FILTERS`; or one name for all.
        fill: for warps, the pixel values outside the image: one for all channels, or one per channel.
        channels: the number of equal grey channels in the results; None means the channels do not change.
        needs_full_image: whether each pixel of a result can depend on the entire image.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("codes", "values", "filters")

    codes: np.ndarray
    values: np.ndarray
    filters: np.ndarray | str = "nearest"
    fill: tuple[float, ...] = (0,)
    channels: int | None = None
    needs_full_image: bool = True

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw) if self.needs_full_image else windows_tlhw


@dataclass(eq=False, repr=False)
class ChainMixture(WholeImageRecord):
    """A mixture of each image with the results of several chains of operations (AugMix).

    Attributes:
        codes: int64 (n, width, depth), as in `Ops`; width is the number of chains.
        values: float64 (n, width, depth, `VALUES`), as in `Ops`.
        weights: float64 (n, 1 + width), the weight of the image itself, then the weight of each chain's result.
        filters: for warps, int64 (n, width, depth), codes of `FILTERS`; or one name for all.
        fill: for warps, as in `Ops`.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("codes", "values", "weights")

    codes: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    filters: np.ndarray | str = "bilinear"
    fill: tuple[float, ...] = (0,)

    def chain(self, index: int) -> Ops:
        codes, values = self.codes[:, index], self.values[:, index]
        filters = self.filters[:, index] if isinstance(self.filters, np.ndarray) else self.filters
        return Ops(codes, values, filters, self.fill, rows=self.rows, sizes_hw=self.sizes_hw)


@dataclass(eq=False, repr=False)
class Erase(Record):
    """The erasing of boxes.

    Attributes:
        boxes_tlhw: int64 (n, maximum number of boxes, 4); entries with height 0 are not boxes.
        keys: uint64 (n, 2), the words of the random key.
        kind: the content: ``"const"``, ``"rand"`` (a random colour per box) or ``"pixel"`` (a random colour per pixel).
        numbers: for ``"const"``, one value, or one per channel: in 0 … 255, or in the units of the final type.
        user_values: the values that the user passed.
        scaled: whether the user's values refer to images that `ToDtype` scales to 0 … 1.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("boxes_tlhw", "keys")

    boxes_tlhw: np.ndarray
    keys: np.ndarray
    kind: str = "const"
    numbers: tuple[float, ...] = (0.0,)
    user_values: tuple[float, ...] = (0.0,)
    scaled: bool = False

    def values_for(self, top: int | None) -> tuple[float, ...]:
        """Return the values for images before their conversion to the final type. `top` is the maximum pixel value;
        None means float images of any range."""
        if top == 255:
            return self.numbers
        unit = (top or 1) if self.scaled else 1
        return tuple(number if top is None else float(round(number * unit)) for number in self.user_values)


@dataclass(eq=False, repr=False)
class PartnerMix(Record):
    """A mixture of each image with its partner (`gpuload.batches.mixing`). The partner's batch index is not part of the
    record, but is passed when the record is applied. A program has at most one `PartnerMix`, which applies to all
    images.

    Attributes:
        share: float64 (n,), the weight of the image itself and of its label; 1 for an image that is not mixed.
        box_tlhw: the box pasted from the partner (CutMix). For MixUp, which blends images, its height is 0.
        names: if several transforms drew the record, the name of each image's transform; "" for an image that is not
            mixed.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("share", "box_tlhw")

    share: np.ndarray
    box_tlhw: np.ndarray
    names: np.ndarray | None = None


@dataclass(eq=False, repr=False)
class Combination(WholeImageRecord):
    """A combination of each image with the images of its group. The record applies to all images.

    The group of the sample at position p consists of the samples at positions p XOR 1, p XOR 2, …. Their batch indices
    are set when the batch is assembled. No backend sees the record: the stage applies it between two runs, when all
    images of the batch have reached this step (`gpuload.stage.combined_images`).

    Attributes:
        group_size: the number of samples in a group.
        gathered: bool (n,), the images that are changed.
        groups: int64 (n, group_size), the batch indices of each sample's group: the index of the sample itself, of the
            sample at position p XOR 1, …; a missing sample is replaced by the sample itself. Set when the batch is
            assembled.
    """

    group_size: ClassVar[int]

    gathered: np.ndarray
    groups: np.ndarray = field(default_factory=lambda: NO_GROUPS, kw_only=True)


@dataclass(eq=False, repr=False)
class Tile(Combination):
    """A mosaic of four images, which meet at a centre: each quadrant shows one image, which has a corner at the centre
    and is cropped at the border of the result.

    Attributes:
        size_hw: the sizes of the results.
        order: int64 (n, 4), the members of the group shown at the top left, top right, bottom left and bottom right;
            k means the sample at position p XOR k.
        centre_yx: int64 (n, 2), the point in the result where the four images meet.
        fill: the pixel values outside all images: one for all channels, or one per channel.
        mask_fill: the fill for masks: any number.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("gathered", "order", "centre_yx")
    group_size: ClassVar[int] = 4

    size_hw: np.ndarray
    order: np.ndarray
    centre_yx: np.ndarray
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0

    @property
    def output_hw(self) -> np.ndarray:
        return self.size_hw

    def quadrants(self, windows_tlhw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the image that each quadrant of a mosaic shows, and its position.

        Args:
            windows_tlhw: int64 (n, 4), the requested windows of the results.

        Returns:
            (rows, corners, visible): the images' batch indices, int64 (n, 4); their top left corners in the result,
            int64 (n, 4, 2), which can be outside the result; and the visible parts in the result, int64 (n, 4, 4), with
            height or width 0 if the image is not visible.
        """
        rows = np.take_along_axis(self.groups, self.order, axis=1)
        sizes = self.sizes_hw[rows]
        is_beyond = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.bool_)  # quadrants below and right of the centre
        corners = np.where(is_beyond, self.centre_yx[:, None], self.centre_yx[:, None] - sizes)
        start = np.maximum(corners, windows_tlhw[:, None, :2])
        end = np.minimum(corners + sizes, (windows_tlhw[:, :2] + windows_tlhw[:, 2:])[:, None])
        return rows, corners, np.concatenate([start, np.maximum(end - start, 0)], axis=2)


@dataclass(eq=False, repr=False)
class Paste(Combination):
    """The pasting of instances of each image's partner, the sample at position p XOR 1, at their original positions.

    Attributes:
        keys: uint64 (n, 2), the words of the random key that selects instances.
        covered: a mask of each image's pixels that show its partner: an H×W bool tensor, or None for no pixels. Set
            when the batch is assembled.
    """

    drawn_fields: ClassVar[tuple[str, ...]] = ("gathered", "keys")
    group_size: ClassVar[int] = 2

    keys: np.ndarray
    covered: Sequence[Any] = ()


@dataclass(eq=False, repr=False)
class Call(WholeImageRecord):
    """A call of a user-defined transform with the images. No backend sees the record: `gpuload.stage.segments` splits
    programs at such records, and `gpuload.stage.user_code` calls the transform.

    Attributes:
        transform: a `gpuload.transforms.custom.Custom`.
        params: the parameters that the transform drew: an array of shape (n, …), tuples and dicts of such arrays, or
            None.
        seeds: int64 (n,), the seeds of torch's generators during the call.
    """

    transform: Any
    params: Any = None
    seeds: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def take(self, entries: np.ndarray, rows: np.ndarray | None) -> Self:
        return replace(super().take(entries, rows), params=map_params(self.params, lambda array: array[entries]))


def map_params(params: object, function: Callable[[Any], object]) -> Any:
    """Return the params of a `Call` with each array replaced by `function(array)`."""
    if params is None:
        return None
    if isinstance(params, dict):
        return {key: map_params(value, function) for key, value in params.items()}
    if isinstance(params, tuple):
        entries = [map_params(value, function) for value in params]
        return type(params)(*entries) if hasattr(params, "_fields") else tuple(entries)
    return function(params)


# The record classes defined below do not change pixels: they convert dtypes, or change boxes and keypoints.
CHANGES_PIXELS: Final = (Box, Flip, Turn, Warp, Elastic, Ops, ChainMixture, Erase, PartnerMix, Call)
MOVES_PIXELS: Final = (Box, Flip, Turn, Warp, Elastic)  # `Ops` that contain "warp" also move pixels


@dataclass(eq=False, repr=False)
class Numbers(Record):
    """A conversion from integer pixel values to the final type. All such records are
    applied when results are written.

    Attributes:
        dtype: the dtype of images, as in `ToDtype`; None means unchanged.
        scale: whether to scale 0 … 255 to 0 … 1 first.
        mask_dtype: the dtype of masks; None means unchanged.
        mean, std: the normalisation of each channel (subtract the mean, divide by the standard deviation); empty means
            no normalisation.
    """

    dtype: str | None = None
    scale: bool = False
    mask_dtype: str | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(eq=False, repr=False)
class Tidy(Record):
    """The removal of bounding boxes whose width or height is below `min_size`, whose area is below `min_area`, or that
    extend beyond the image."""

    min_size: float
    min_area: float


@dataclass(eq=False, repr=False)
class Clamp(Record):
    """The clipping of bounding boxes to the image."""


@dataclass(eq=False, repr=False)
class ClampPoints(Record):
    """The clamping of keypoints outside the image to the nearest pixel."""


@dataclass(eq=False, repr=False)
class TidyPoints(Record):
    """The removal of keypoints outside the image. If they are (N, …, 2), a group is removed if any of its points is
    outside."""


@dataclass(eq=False, repr=False)
class Reformat(Record):
    """The conversion of bounding boxes to a format."""

    format: str


@dataclass(eq=False, repr=False, kw_only=True)
class RecordOutline:
    """The properties of a transform's records that are known before the records are drawn.

    Attributes:
        kind: the class of the records.
        name: the name of the transform.
        operations: the sorted names of all operations that `Ops` or a `ChainMixture` can contain.
        depth: the number of operations for an image, in any order and with repetitions; None means each one once.
        is_optional: whether an image may lack a record, or any of its operations.
        filters: the names of all filters that a `Box` or warps can use.
        padding_mode: the padding mode of a `Box`.
        min_hw: a size that no result of a `Box` is smaller than.
        min_input_hw: the size from which on a `Box` with a padding mode stays inside the image; None means that it can
            extend beyond an image of any size.
        written: the `kind` of an `Erase`.
        numbers: the `Numbers` record itself.
    """

    kind: type[Record]
    name: str
    operations: tuple[str, ...] = ()
    depth: int | None = None
    is_optional: bool = False
    filters: tuple[str, ...] = ()
    padding_mode: str | None = None
    min_hw: tuple[int, int] = (1, 1)
    min_input_hw: tuple[int, int] | None = None
    written: str = "const"
    numbers: Numbers | None = None
