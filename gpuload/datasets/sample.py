"""The types of a sample's leaves: images; *targets* (masks, boxes, keypoints), which are transformed together with
their image; and metadata.

A box is four numbers in pixels, measured from the top left corner of the image: ``"xyxy"`` is left, top, right, bottom;
``"xywh"`` is left, top, width, height; ``"cxcywh"`` is centre, width, height.

Datasets yield *samples*: trees of tuples, lists and dicts. Workers import this module, so it imports neither torch
nor Pillow.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

import numpy as np

from gpuload.checks import flag, integer, is_sequence, one_of, optional, pair
from gpuload.datasets.arrays import cast, is_integer, namespace
from gpuload.datasets.files import read_file
from gpuload.datasets.stores.opening import display_path, read_files, remote_options
from gpuload.rng.streams import DRAWS

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import StorageOptions

__all__ = [
    "FORMATS",
    "LEAVES",
    "META",
    "PIXELS",
    "BoxFormat",
    "Boxes",
    "Encoded",
    "Image",
    "Keypoints",
    "Mask",
    "MetaValue",
    "Mode",
    "Target",
    "as_meta",
    "explain_batch_form",
    "explain_deep_pixels",
    "explain_float_range",
    "format_name",
    "from_xyxy",
    "is_batch_form",
    "plain_meta",
    "read",
    "takes_meta",
    "to_xyxy",
    "with_values",
]

Mode = Literal["RGB", "L", "RGBA", "unchanged"]
MODES: Final = get_args(Mode)
PIXELS: Final = ("uint8", "uint16", "float32")  # the dtypes of images
BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
FORMATS: Final = get_args(BoxFormat)
# The names of formats in other libraries and files, with the translation.
OTHER_FORMATS: Final = {
    "coco": "which is 'xywh' here: left, top, width, height in pixels",
    "bbox": "but COCO's bbox is 'xywh' here: left, top, width, height in pixels",
    "pascal_voc": "which is 'xyxy' here: left, top, right, bottom in pixels",
    "yolo": "whose boxes lie in 0 … 1, but boxes are in pixels here: multiply the array by (width, height, width, "
    "height) of the image, and pass 'cxcywh'",
    "albumentations": "whose boxes lie in 0 … 1, but boxes are in pixels here: multiply the array by (width, height, "
    "width, height) of the image, and pass 'xyxy'",
}
# Pillow's modes with more than 8 bits. All have one channel: Pillow reduces colours to 8 bits. It never uses these
# modes for files with at most 8 bits per channel.
DEEP: Final[dict[str, str]] = {
    "I;16": "16 bits per pixel",
    "I;16L": "16 bits per pixel",
    "I;16B": "16 bits per pixel",
    "I;16N": "16 bits per pixel",
    "I": "32-bit integers",
    "F": "32-bit floats",
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image file's bytes, not yet decoded.

    Args:
        data: the complete file as `bytes`; other bytes-like objects are copied to `bytes`.
        mode: the channels to decode to: ``"RGB"`` (3), ``"L"`` (1), ``"RGBA"`` (4), or ``"unchanged"`` for the stored
            channels. With ``"unchanged"``, a PNG or TIFF with 16 bits per channel (grey, RGB or RGBA) is decoded to
            uint16, a TIFF of floats to float32.
        source: the origin of the bytes for error messages, usually a path.
        exif: whether the image is turned upright by its EXIF orientation, unless ``Decode(exif=…)`` says so for all
            images. None means that the dataset does not know, and is decoded as False.
        draws: the number of the image's random parameters, 0 … 32767: images and targets of a sample with the same
            number share their random parameters, and others are independent. None means 0.

    Raises:
        TypeError: `data` is not bytes-like; `exif` is not True, False or None; `draws` is not an integer or None.
        ValueError: `mode` is not one of the four, or `draws` is out of range.

    Example:
        >>> Encoded(b"abc", source="cat.jpg")
        Encoded(3 bytes, mode='RGB', source='cat.jpg')
    """

    data: bytes
    mode: Mode = "RGB"
    source: str | None = None
    exif: bool | None = None
    draws: int | None = None

    def __post_init__(self) -> None:
        _check_draws(self)
        if not isinstance(self.data, bytes):
            try:
                object.__setattr__(self, "data", bytes(memoryview(self.data)))
            except TypeError:
                raise TypeError(
                    f"Encoded() takes the bytes of an image file, got {type(self.data).__name__}; "
                    "to read a file, call gpuload.read(path)"
                ) from None
        one_of("Encoded(mode=…)", self.mode, MODES)
        if self.exif is not None:
            object.__setattr__(self, "exif", flag("Encoded(exif=…)", self.exif))

    def __repr__(self) -> str:
        exif = "" if self.exif is None else f", exif={self.exif}"
        draws = "" if self.draws is None else f", draws={self.draws}"
        return f"Encoded({len(self.data)} bytes, mode={self.mode!r}, source={self.source!r}{exif}{draws})"


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A decoded image, or a decoded video clip. All frames of a clip get the same random transform.

    Args:
        array: uint8, uint16 or float32, or anything that `numpy.asarray` converts to one of these; H×W for one channel,
            otherwise in the given `layout`. A clip has an additional first axis for its frames. Colour operations
            require uint8; all others work on any dtype and number of channels.
        layout: the axes of the image, or of each frame: ``"HWC"`` or ``"CHW"``. None means H×W×C; with more than 4
            channels, this requires the channel axis to be the shortest.
        draws: see `Encoded`.

    Raises:
        TypeError: the array has another dtype.
        ValueError: the array is empty or does not have 2 to 4 axes, or its shape contradicts the `layout`.

    Example:
        >>> Image(np.zeros((3, 20, 30), np.uint8), layout="CHW").hwc.shape
        (20, 30, 3)
        >>> Image(np.zeros((64, 64, 13), np.float32)).hwc.dtype
        dtype('float32')
    """

    array: Any
    layout: Literal["HWC", "CHW"] | None = None
    draws: int | None = None

    def __post_init__(self) -> None:
        _check_draws(self)
        optional(one_of, "Image(layout=…)", self.layout, choices=("HWC", "CHW"))
        array = _to_array("Image", self.array)
        if array.dtype != np.uint8:
            _refuse_file(
                "Image", self.array, "return gpuload.read(path), or gpuload.Encoded(bytes), without an Image around it"
            )
            array = _check_deep_pixels(array)
        if array.ndim == 2:
            array = array[:, :, None]
        elif array.ndim not in (3, 4):
            raise ValueError(f"an image must have 2 or 3 axes, or 4 as a clip, got shape {array.shape}")
        elif self.layout == "CHW":
            array = array.transpose(1, 2, 0) if array.ndim == 3 else array.transpose(0, 2, 3, 1)
        if array.size == 0:
            raise ValueError(
                f"an image must have pixels and channels, got H×W×C = {array.shape} with layout={self.layout!r}"
            )
        if array.shape[-1] > 4:
            _check_layout(array.shape[-3:], self.layout)
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "layout", "HWC")

    @property
    def hwc(self) -> np.ndarray:
        """The pixels, H×W×C; for a clip T×H×W×C."""
        return self.array


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """One value per pixel of an image, such as a class. The values move with the pixels, and are never interpolated.

    Args:
        array: H×W, or N×H×W (or N×1×H×W) for N masks of one image, such as one per instance: bool, integers or floats,
            or anything that `numpy.asarray` converts to them. It can also be an `Encoded` file whose stored values are
            the mask: palette indices, or grey values of 8 bits (uint8) or more (int32), never colours. For
            `gpuload.Augment`, N×M×H×W, M masks for each image of a batch.
        draws: the number of its image's random parameters, see `Encoded`; by default, that of an `Encoded` array.

    Attributes:
        array: the array, or the `Encoded`. Integer types that torch lacks are widened.

    Raises:
        TypeError: the array does not contain numbers.
        ValueError: the array does not have 2 to 4 axes, or has no pixels.

    Example:
        >>> Mask(np.zeros((20, 30), np.uint8)).array.shape
        (20, 30)
    """

    array: Any
    draws: int | None = None

    def __post_init__(self) -> None:
        _check_draws(self)
        if isinstance(self.array, Encoded):
            if self.draws is None:
                object.__setattr__(self, "draws", self.array.draws)
            return
        array = _to_numeric_array("Mask", self.array)
        if array.ndim not in (2, 3, 4):
            raise ValueError(_mask_shape_message(array))
        if 0 in array.shape[-2:]:
            raise ValueError(f"a mask must have pixels, got shape {array.shape}")
        object.__setattr__(self, "array", array)


class _Movable:
    __slots__ = ()

    def to(self, device: Any, non_blocking: bool = False) -> Self:
        """Return the coordinates as tensors on a device; frameworks call this method to move a batch."""
        torch: Any = importlib.import_module("torch")
        arrays = {name: getattr(self, name) for name in ("array", "valid")}
        moved = {
            name: torch.as_tensor(array).to(device, non_blocking=non_blocking)
            for name, array in arrays.items()
            if array is not None
        }
        return with_values(self, **moved)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes(_Movable):
    """Boxes in an image, in pixels from its top left corner; or the padded boxes of a batch.

    Args:
        array: (n, 4), floats or integers; n may be 0. A Loader returns boxes in the same dtype, except that lists of
            floats become float32, and integers of 8 and 16 bits become int32. The boxes of a batch are N×M×4, for N
            images with up to M boxes; a tensor on a device stays there, and its values are not checked.
        format: ``"xyxy"`` (left, top, right, bottom), ``"xywh"`` (left, top, width, height) or ``"cxcywh"`` (centre,
            width, height).
        canvas_hw: the height and width of the image that the boxes were drawn on, if known. A Loader warns if the
            decoded image has another size, for example because its EXIF tag rotates it.
        valid: for N×M×4 boxes, which of them are boxes and not padding: bool (N, M), or the number of boxes of each
            image, integers (N,). None means all.
        draws: the number of their image's random parameters, see `Encoded`.

    Attributes:
        valid: bool (N, M), or None.

    Raises:
        TypeError: the array does not contain numbers.
        ValueError: the array is neither (n, 4) nor N×M×4, or contains NaN or infinity; a box ends before it begins; the
            format is unknown; `canvas_hw` is not a height and a width; `valid` does not match the array.

    Example:
        >>> Boxes([[10, 20, 30, 5]], format="xywh").array
        array([[10, 20, 30,  5]])
        >>> Boxes(np.zeros((2, 3, 4)), valid=[1, 3]).valid
        array([[ True, False, False],
               [ True,  True,  True]])
    """

    array: Any
    format: BoxFormat = "xyxy"
    canvas_hw: tuple[int, int] | None = None
    valid: Any = None
    draws: int | None = None

    def __post_init__(self) -> None:
        _check_draws(self)
        object.__setattr__(self, "format", format_name("Boxes(format=…)", self.format))
        if self.canvas_hw is not None:
            canvas_hw = pair("Boxes(canvas_hw=…)", self.canvas_hw, form="(height, width)", entry=integer)
            object.__setattr__(self, "canvas_hw", canvas_hw)
        array = _to_numeric_array("Boxes", self.array)
        if array.ndim <= 2 and array.size == 0:
            array = array.reshape(0, 4)
        if array.ndim not in (2, 3) or array.shape[-1] != 4:
            remedy = "; write [box]" if array.shape == (4,) else ""
            if array.ndim == 2 and array.shape[1] > 4:
                remedy = "; write boxes[:, :4], and return the other columns as another field"
            batch_note = ", or N×M×4 for a batch" if array.ndim > 2 else ""
            raise ValueError(
                f"boxes must be an (n, 4) array, with one row for each box{batch_note}, got shape "
                f"{tuple(array.shape)}{remedy}"
            )
        valid = _valid_rows("Boxes", self.valid, array, array.ndim == 3)
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "valid", valid)
        if isinstance(array, np.ndarray):
            has_mask = isinstance(valid, np.ndarray)
            self._check_values(array[valid] if has_mask else array.reshape(-1, 4))

    def _check_values(self, array: np.ndarray) -> None:
        if not np.isfinite(array).all():
            row = int((~np.isfinite(array)).any(axis=1).argmax())
            raise ValueError(f"boxes must be finite numbers, but box {row} is {array[row].tolist()}")
        negative = array[:, 2:] < (array[:, :2] if self.format == "xyxy" else 0)
        if negative.any():
            row = int(negative.any(axis=1).argmax())
            defect = "ends before it begins" if self.format == "xyxy" else "has a negative width or height"
            raise ValueError(f"box {row} {defect}: {array[row].tolist()} as {self.format!r}; is the format right?")


@dataclass(frozen=True, slots=True, eq=False)
class Keypoints(_Movable):
    """Points in an image, as (x, y) in pixels; points that leave the image keep their coordinates outside it.

    Args:
        array: (…, 2), floats or integers. A Loader returns keypoints in the same dtype and shape, except that lists of
            floats become float32, and integers of 8 and 16 bits become int32. The keypoints of a batch, for
            `gpuload.Augment`, are N×…×2; a tensor can be on any device.
        pairs: if the last axis but one is a fixed list of K points, the pairs of indices (left, right) in this list,
            such as those of the eyes. Wherever the image is mirrored, the points of each pair are exchanged, and so are
            their entries in an array ``"visibility"`` next to the keypoints. With `pairs`, which may be empty, the
            keypoints of a batch are stacked, N×…×K×2. None means that the points have no fixed order.
        valid: for the keypoints of a batch, N×M×…×2, which of the M entries of each image are keypoints and not
            padding: bool (N, M), or the number of entries of each image, integers (N,).
        draws: the number of their image's random parameters, see `Encoded`.

    Attributes:
        pairs: a tuple of tuples, or None.
        valid: bool (N, M), or None.

    Raises:
        TypeError: the array does not contain numbers, or `pairs` not pairs of integers.
        ValueError: the array's last axis does not have length 2; an index in `pairs` is not an index of a point, or
            appears twice; `valid` does not match the array.

    Example:
        >>> Keypoints([[3.5, 4.0]]).array.dtype
        dtype('float32')
        >>> Keypoints(np.zeros((17, 2)), pairs=[[1, 2], [3, 4]]).pairs
        ((1, 2), (3, 4))
    """

    array: Any
    pairs: Sequence[tuple[int, int]] | None = None
    valid: Any = None
    draws: int | None = None

    def __post_init__(self) -> None:
        _check_draws(self)
        array = _to_numeric_array("Keypoints", self.array)
        if array.ndim == 1 and array.size == 0:
            array = array.reshape(0, 2)
        if array.ndim == 0 or array.shape[-1] != 2:
            remedy = ""
            if array.ndim and array.shape[-1] == 3:
                remedy = "; if the third number is a visibility, write points[..., :2], and return it as another field"
            elif array.ndim == 1 and array.size % 3 == 0:
                remedy = "; for a list of COCO, write numpy.reshape(points, (-1, 3))[:, :2]"
            raise ValueError(f"keypoints must be a (…, 2) array of x and y, got shape {tuple(array.shape)}{remedy}")
        if self.pairs is not None:
            object.__setattr__(self, "pairs", _check_pairs(self.pairs, array.shape))
        object.__setattr__(self, "valid", _valid_rows("Keypoints", self.valid, array, array.ndim > 2))
        object.__setattr__(self, "array", array)


Target = Mask | Boxes | Keypoints
LEAVES: Final = (Encoded, Image, Mask, Boxes, Keypoints)  # dataclasses that are leaves, not containers


def is_batch_form(target: Target) -> bool:
    """Return whether a target has the form of an entire batch: padded boxes or keypoints, keypoints on a device, or
    N×M×H×W masks."""
    if isinstance(target, Mask):
        return getattr(target.array, "ndim", 0) == 4 and target.array.shape[1] != 1
    if isinstance(target, Boxes):
        return target.array.ndim == 3
    return target.valid is not None or not getattr(target.array, "is_cpu", True)


def with_values(target: Any, **values: Any) -> Any:
    """Return a copy of boxes or keypoints with other values, which are not checked."""
    result = object.__new__(type(target))
    for attribute in fields(target):
        object.__setattr__(result, attribute.name, values.get(attribute.name, getattr(target, attribute.name)))
    return result


def explain_batch_form(target: Target) -> str:
    """Return the reason why a target in the form of a batch cannot be in a sample."""
    shape = tuple(target.array.shape)
    if isinstance(target, Mask):
        return _mask_shape_message(target.array)
    noun, form = ("boxes", "(n, 4)") if isinstance(target, Boxes) else ("keypoints", "(…, 2)")
    return (
        f"the {noun} of one image must be {form} on the CPU, got {noun} of a batch, {shape}, which are for "
        f"gpuload.Augment; return the {noun} of each image in its own sample, and pass Loader(boxes='padded') to get "
        "them padded"
    )


def _mask_shape_message(array: Any) -> str:
    return f"a mask must be H×W, or N×H×W for the N masks of an image, got shape {tuple(array.shape)}"


class MetaDict(dict[Any, Any]):
    """A dict of metadata that counts as one leaf of a sample. A batch has the dicts of its samples in a list."""


class MetaList(list[Any]):
    """A list of metadata that counts as one leaf."""


class MetaStr(str):
    """A str in metadata."""


class MetaInt(int):
    """An int in metadata."""


class MetaFloat(float):
    """A float in metadata."""


class MetaValue:
    """Metadata whose type cannot be subclassed, such as None. It equals the original value, and has the same truth
    value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == plain_meta(other))

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


_META: Final[dict[type, Any]] = {dict: MetaDict, list: MetaList, str: MetaStr, int: MetaInt, float: MetaFloat}
_PLAIN: Final = {cls: base for base, cls in _META.items()}
META: Final = frozenset({*_PLAIN, MetaValue})


def as_meta(value: object) -> Any:
    """Return a value, such as a sample's JSON, as a leaf, so that a batch has the samples' values in a list. The leaf
    equals the value, and is an instance of a subclass of the value's type if that type can be subclassed.

    Example:
        >>> as_meta({"caption": None}), as_meta(None) == None
        ({'caption': None}, True)
    """
    return _META.get(type(value), MetaValue)(value)


def plain_meta(value: Any) -> Any:
    """Return the original value of an `as_meta` or `MetaValue` leaf; any other value unchanged."""
    if type(value) is MetaValue:
        return value.value
    base = _PLAIN.get(type(value))
    return value if base is None else base(value)


def takes_meta(collate_fn: object) -> bool:
    """Return whether a `collate_fn` expects metadata leaves, as gpuload's functions do; others expect plain objects."""
    return getattr(getattr(collate_fn, "func", collate_fn), "takes_meta", False) is True


def _check_draws(leaf: Encoded | Image | Target) -> None:
    if leaf.draws is not None:
        name = f"{type(leaf).__name__}(draws=…)"
        object.__setattr__(leaf, "draws", integer(name, leaf.draws, minimum=0, maximum=len(DRAWS) - 1))


def _check_deep_pixels(array: np.ndarray) -> np.ndarray:
    """Check and return the pixels of an image that is not uint8, in the machine's byte order."""
    if array.dtype.name not in PIXELS:
        raise TypeError(
            f"an image must be uint8, uint16 or float32, got {array.dtype} of shape {array.shape}; convert it, for "
            "example with array.astype('float32')"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _check_layout(shape: tuple[int, ...], layout: str | None) -> None:
    """Refuse an image of more than 4 channels whose shape suggests that it has another layout."""
    height, width, channels = shape
    # The number of channels, and the length of a spatial axis, if the array had the other layout.
    other_channels, other_axis = (height, width) if layout != "CHW" else (width, height)
    if other_channels <= 4 < other_axis or (layout is None and channels >= min(height, width)):
        raise ValueError(
            f"got H×W×C = {shape} with layout={layout!r}, an image of {channels} channels; its shape suggests another "
            "layout: pass layout='CHW' for a C×H×W array, layout='HWC' for H×W×C"
        )


def _to_array(name: str, value: object) -> np.ndarray:
    """Convert the user's value to an array; raise a TypeError, with a remedy, for None and bfloat16 tensors."""
    if value is None:
        remedy = "for an image without any, write []"
        if name in ("Image", "Mask"):
            read = "gpuload.read(path)" if name == "Image" else "gpuload.Mask(gpuload.read(path))"
            remedy = f"cv2.imread returns None for a file that it cannot read; check the path, or return {read}"
        raise TypeError(f"{name}() takes an array, got None; {remedy}")
    try:
        return np.asarray(value)
    except TypeError:
        if str(getattr(value, "dtype", None)) == "torch.bfloat16":
            raise TypeError(f"{name}() got a bfloat16 tensor, which NumPy lacks; write tensor.float()") from None
        raise


def _to_numeric_array(name: str, value: Any) -> np.ndarray:
    """Convert the user's numbers to an array of a dtype that torch also has. Masks, and boxes or keypoints of a batch,
    that are on a device, for `gpuload.Augment`, stay tensors."""
    if getattr(value, "is_cpu", True) is False:
        if name == "Mask":
            return value
        if value.dim() > 2 and (value.is_floating_point() or is_integer(value)):
            return cast(value, "int32") if is_integer(value) and value.element_size() < 4 else value
        form = "N×M×4" if name == "Boxes" else "N×M×…×2"
        raise ValueError(
            f"{name}() takes the numbers of one image on the CPU, got {value.dtype} of shape {tuple(value.shape)} on "
            f"{value.device}; on a device, pass all images of the batch together, {form} with valid=…, such as "
            f"{name}(torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), valid=[*map(len, tensors)])"
        )
    array = _to_array(name, value)
    if isinstance(value, list | tuple) and array.dtype == np.float64:
        array = array.astype(np.float32)  # like torch.tensor
    kind = array.dtype.kind
    if kind not in "biuf" and name == "Mask":
        _refuse_file(
            name, value, "for a mask in a file, write Mask(gpuload.read(path)) or Mask(gpuload.Encoded(bytes))"
        )
    if kind not in "biuf" or (kind == "b" and name != "Mask"):
        raise TypeError(f"{name}() takes an array of numbers, got {array.dtype} of shape {array.shape}")
    if kind in "iu" and array.dtype.itemsize < 4 and name != "Mask":
        return array.astype(np.int32)  # coordinates would overflow 8 bits
    if kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64)
    if kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _valid_rows(name: str, valid: Any, array: Any, is_batch: bool) -> Any:
    """Return which rows of a batch are valid, bool (N, M), of a mask or of the lengths; None if `valid` is None."""
    if valid is None:
        return None
    if not is_batch:
        form = "boxes N×M×4" if name == "Boxes" else "keypoints N×M×…×2"
        raise ValueError(f"{name}(valid=…) is for the {form} of a batch, got shape {tuple(array.shape)}; leave it out")
    shape, is_tensor = tuple(array.shape[:2]), hasattr(valid, "is_cpu")
    rows = valid if is_tensor else np.asarray(valid)
    if is_integer(rows) and tuple(rows.shape) == shape[:1]:
        if getattr(rows, "is_cpu", True) and ((rows < 0) | (rows > shape[1])).any():
            raise ValueError(
                f"{name}(valid=…) has the number of rows of each image, 0 … {shape[1]}, got {rows.tolist()}"
            )
        index = namespace(rows).arange(shape[1], device=rows.device) if is_tensor else np.arange(shape[1])
        rows = index < rows[:, None]
    if not str(rows.dtype).endswith("bool") or tuple(rows.shape) != shape:
        raise ValueError(
            f"{name}(valid=…) must be bool of shape {shape}, or {shape[0]} integers, the number of rows of each image, "
            f"for an array of shape {tuple(array.shape)}; got {str(rows.dtype).removeprefix('torch.')} of shape "
            f"{tuple(rows.shape)}"
        )
    return rows


def _check_pairs(pairs: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    name = "Keypoints(pairs=…)"
    if not is_sequence(pairs):
        raise TypeError(f"{name} must be a list of pairs of indices, such as [(1, 2), (3, 4)], got {pairs!r}")
    checked = tuple(pair(name, entry, form="(left, right)", entry=integer) for entry in pairs)
    if len(shape) < 2:
        raise ValueError(f"{name} needs keypoints of shape (…, K, 2), got one point of shape {tuple(shape)}")
    indices = [index for entry in checked for index in entry]
    if wrong := [index for index in indices if not 0 <= index < shape[-2] or indices.count(index) > 1]:
        raise ValueError(
            f"{name} must have each index of 0 … {shape[-2] - 1} at most once, for keypoints of shape {tuple(shape)} "
            f"(…, K, 2), got the index {wrong[0]} in {list(checked)}"
            + ("; for an image without any, pass an array of shape (0, K, 2)" if 0 in shape else "")
        )
    return checked


def _refuse_file(name: str, value: object, remedy: str) -> None:
    """Raise TypeError if the value is a file or a path instead of an array."""
    if isinstance(value, str | bytes | os.PathLike | Encoded):
        kind = "bytes" if isinstance(value, bytes) else f"an {value!r}"
        got = f"the path {os.fspath(value)!r}" if isinstance(value, str | os.PathLike) else kind
        raise TypeError(f"{name}() takes an array of numbers, got {got}; {remedy}")


def read(path: str | os.PathLike[str], *, storage_options: StorageOptions = None, draws: int | None = None) -> Encoded:
    """Read an image file, or an image at a URL, without decoding it.

    Use it in torchvision's ``ImageFolder(root, loader=gpuload.read)``: the dataset then yields bytes, and gpuload
    decodes only the region that the first crop needs.

    Args:
        path: the path of the file, or a URL, which is read through fsspec.
        storage_options: for a URL: options for fsspec, or a `Remote`.
        draws: see `Encoded`.

    Raises:
        OSError: the file is missing, or is not a regular file (a folder, a FIFO, a device).
        DecodeError: the file has more bytes than the `Decode.max_bytes` of the loader that reads the sample, or more
            than 1 GiB outside a loader; or it has more than 16 MiB and does not start like an image.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(
            f"read() takes the path or URL of one image, got {path!r} ({type(path).__name__}); call it for each path, "
            "and leave out samples without a file"
        )
    if (remote := remote_options(path, storage_options)) is not None:
        data, source = read_files([os.fspath(path)], remote)[0], display_path(os.fspath(path))
    else:
        data, source = read_file(path), os.fspath(path)
    return Encoded(data, "RGB", source, draws=draws)


def format_name(name: str, value: Any) -> BoxFormat:
    """Return the name of a box format, which is passed as a string (in any case) or torchvision's BoundingBoxFormat."""
    box_format: Any = getattr(value, "value", value)
    box_format = box_format.lower() if isinstance(box_format, str) else box_format
    if box_format in ("xywhr", "cxcywhr", "xyxyxyxy"):
        raise ValueError(
            f"{name} is {value!r}, but rotated boxes are not supported; pass one of {', '.join(map(repr, FORMATS))}"
        )
    if isinstance(box_format, str) and box_format in OTHER_FORMATS:
        raise ValueError(f"{name} is {value!r}, {OTHER_FORMATS[box_format]}")
    return one_of(name, box_format, FORMATS)  # pyright: ignore[reportReturnType]


def to_xyxy(boxes: Any, box_format: str) -> Any:
    """Convert (…, 4) boxes to left, top, right, bottom. The result is int64 if the boxes and all edges are integers
    (in ``"cxcywh"``, half a width may not be an integer), else float64. Edges of float32 boxes are rounded to float32,
    as in torchvision: with more digits, a box that ends at the image's border would extend beyond the border."""
    are_integers = is_integer(boxes) and box_format != "cxcywh"
    is_float32 = str(boxes.dtype).endswith("float32")
    boxes = cast(boxes, "int64" if are_integers else "float32" if is_float32 else "float64")
    if box_format != "xyxy":
        start, extent = boxes[..., :2], boxes[..., 2:]
        start = start - extent / 2 if box_format == "cxcywh" else start
        boxes = namespace(boxes).concatenate([start, start + extent], -1)
    return boxes if are_integers else cast(boxes, "float64")


def from_xyxy(boxes: Any, box_format: str, dtype: Any) -> Any:
    """Convert (…, 4) boxes from left, top, right, bottom to `box_format` and a dtype."""
    if box_format != "xyxy":
        start, extent = boxes[..., :2], boxes[..., 2:] - boxes[..., :2]
        if box_format == "cxcywh":
            start = start + (extent // 2 if is_integer(boxes) else extent / 2)
        boxes = namespace(boxes).concatenate([start, extent], -1)
    return cast(boxes, dtype)


def explain_float_range(low: float, high: float) -> str:
    """Return what is wrong with a float image whose pixel values go from `low` to `high`, with the remedies."""
    if low != low:
        return (
            "contains NaN, but float images must be in 0 … 1; leave out such samples, or replace NaN with "
            "torch.nan_to_num()"
        )
    return (
        f"contains floats from {low:g} to {high:g}, but float images must be in 0 … 1; pass pixel values 0 … 255 as "
        "uint8, normalize with T.Normalize in the transforms instead of before, and clip the output of a filter that "
        "overshoots with .clamp(0, 1)"
    )


def explain_deep_pixels(name: str, mode: str, code: str = "gpuload.Image(array)") -> str | None:
    """Return an explanation with a remedy if an image of this Pillow mode has more than 8 bits per channel, else None.

    `name` is the image's name in the message; `code` is the user code that would preserve the pixel values.

    Example:
        >>> explain_deep_pixels("this PNG", "RGB")
        >>> explain_deep_pixels("this PNG", "I;16").partition(",")[0]
        "this PNG holds 16 bits per pixel (Pillow mode 'I;16')"
    """
    if mode not in DEEP:
        return None
    return (
        f"{name} holds {DEEP[mode]} (Pillow mode {mode!r}), which Pillow would clip to 8; to keep its values, "
        f"yield {code}, of uint16 or float32, or scale them to 0 … 255; if they are classes or depths, yield a "
        "gpuload.Mask"
    )
