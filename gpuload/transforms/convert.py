"""Deterministic transforms: the conversion of integer pixel values to floats, at the end of nearly every chain, and the
selection of a clip's frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from gpuload.checks import argument, finite_number, flag, integer, numbers
from gpuload.datasets.arrays import cast, is_integer
from gpuload.transforms.arguments import MASK_DTYPES, dtype_name
from gpuload.transforms.base import (
    EVERYWHERE,
    ChainPosition,
    Transform,
    Uniforms,
    copy_for_finished_images,
    declaration,
)
from gpuload.transforms.program.ops import CHANGES_PIXELS, Numbers, RecordOutline

if TYPE_CHECKING:
    from gpuload.transforms.chain import Chain

__all__ = [
    "Normalize",
    "ToDtype",
    "UniformTemporalSubsample",
    "Window",
    "check_windows",
    "entry_conversion",
]

LEVELS_PER_UNIT: Final = 255.999  # torchvision's: 256 levels of equal width


def entry_conversion(chain: Chain) -> ToDtype | Window | None:
    """Return the transform whose `levels` convert images to uint8 before all other transforms: a `Window`, or a
    `ToDtype("uint8", scale=True)` that, in each view, comes before the first transform that changes pixels."""
    conversions = [_find_conversion(line.transforms) for line in chain.lines]
    return conversions[0] if all(conversions) else None


def _find_conversion(transforms: Iterable[Transform]) -> ToDtype | Window | None:
    for transform in transforms:
        if isinstance(transform, Window):
            return transform
        if isinstance(transform, ToDtype) and transform.dtype == "uint8" and transform.scale:
            return transform
        if any(issubclass(outline.kind, CHANGES_PIXELS) for outline in transform.outline) or transform.group_size > 1:
            return None
    return None


def check_windows(lines: Sequence[Sequence[Transform]]) -> None:
    """Refuse a `Window` that does not convert the images of all views; `lines` are the transforms of each view."""
    windows = [window for line in lines for window in _find_windows(line)]
    if windows and (windows != [_find_conversion(line) for line in lines] or len(set(windows)) > 1):
        raise ValueError(
            "transforms in an impossible order: Window converts intensities to 8 bits before all other transforms, so "
            "a chain can have only one, at its beginning; put Window first"
        )


def _find_windows(transforms: Iterable[Transform]) -> list[Transform]:
    return [
        window
        for transform in transforms
        for window in ([transform] if isinstance(transform, Window) else _find_windows(transform.children))
    ]


@declaration
class ToDtype(Transform):
    """Convert to a dtype.

    ``ToDtype("uint8", scale=True)`` before all transforms that change pixels converts floats in 0 … 1 and uint16 images
    with the values of torchvision, so that colour transforms can follow. Elsewhere, it requires uint8 images, which it
    does not change.

    Args:
        dtype: the dtype of images: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"uint8"``, as a string or as a
            torch or numpy dtype. Or a dict of dtypes by type, with the keys ``gpuload.Image``, ``gpuload.Mask`` (or
            torchvision's classes of the same names) and ``"others"``; types whose dtype is None are not converted.
            Masks can become ``"uint8"``, ``"int16"``, ``"int32"``, ``"int64"``, ``"bool"`` or ``"float32"``, and are
            never scaled.
        scale: whether to scale 0 … 255 (uint16 images: 0 … 65535) to 0 … 1; otherwise values are not changed. Values of
            float32 images are changed only by a conversion to uint8.
        mask_dtype: the dtype of masks, as an alternative to a dict.

    Example:
        >>> ToDtype(np.float32, scale=True)
        ToDtype(dtype='float32', scale=True)
        >>> ToDtype({"Image": "float32", "Mask": "int64", "others": None}, scale=True)
        ToDtype(dtype='float32', scale=True, mask_dtype='int64')
    """

    dtype: str | None
    scale: bool = argument(flag, default=False)
    mask_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype, mask_dtype = self.dtype, self.mask_dtype
        if isinstance(dtype, Mapping):
            if mask_dtype is not None:
                raise ValueError("ToDtype(mask_dtype=…) needs a single dtype for images; in a dict, use the key Mask")
            dtype, mask_dtype = _dtypes_by_type(dtype)
        elif dtype is None and mask_dtype is None:
            raise TypeError("ToDtype(dtype=None) does not convert images, so it needs mask_dtype=…")
        object.__setattr__(self, "dtype", None if dtype is None else dtype_name("ToDtype(dtype=…)", dtype))
        mask_dtype = None if mask_dtype is None else dtype_name("ToDtype(dtype=…) for masks", mask_dtype, MASK_DTYPES)
        object.__setattr__(self, "mask_dtype", mask_dtype)

    @property
    def works_on(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("uint8",) if self.dtype is not None else EVERYWHERE

    @property
    def output_state(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.dtype in (None, "uint8") else "float"

    def levels(self, pixels: Any) -> Any:
        """Return an array or tensor of any image dtype as uint8, as torchvision does: floats in 0 … 1 as ⌊255.999 x⌋,
        and uint16 without its lower 8 bits."""
        if not is_integer(pixels):
            return cast(cast(pixels, "float32") * LEVELS_PER_UNIT, "uint8")
        return pixels if str(pixels.dtype).endswith("uint8") else cast(cast(pixels, "int32") >> 8, "uint8")

    def draw(self, uniforms: Uniforms | None, sizes_hw: np.ndarray | None) -> Numbers:
        return Numbers(self.dtype, self.scale, self.mask_dtype)

    @property
    def outline(self) -> tuple[RecordOutline, ...]:
        return (RecordOutline(kind=Numbers, name=type(self).__name__, numbers=self.draw(None, None)),)


def _dtypes_by_type(dtypes: Mapping[Any, object]) -> tuple[Any, Any]:
    """Return the dtypes of images and of masks."""
    by_name = {key if isinstance(key, str) else getattr(key, "__name__", str(key)): key for key in dtypes}
    unknown = sorted(set(by_name) - {"Image", "Mask", "Tensor", "others"})
    if unknown and any(dtypes[by_name[name]] is not None for name in unknown):
        raise TypeError(
            f"ToDtype(dtype=…) is a dict, so its keys must be gpuload.Image, gpuload.Mask or 'others', got {unknown[0]}"
        )
    default_dtype = dtypes.get("others")
    image_dtype = next((dtypes[by_name[name]] for name in ("Image", "Tensor") if name in by_name), default_dtype)
    mask_dtype = dtypes[by_name["Mask"]] if "Mask" in by_name else default_dtype
    if image_dtype is None and mask_dtype is None:
        raise TypeError(f"ToDtype(dtype={dtypes!r}) converts neither images nor masks; pass a dtype for one of them")
    return image_dtype, mask_dtype


@declaration
class Window(Transform):
    """Map a range of intensities to 0 … 255, as radiology's window and level do (DICOM PS3.3, C.11.2.1.2.1).

    Intensities up to `center` - `width` / 2 become 0, those from `center` + `width` / 2 - 1 on 255, and those in
    between lie on a line, rounded to the nearest integer. The transform is the first one of a chain, and takes uint16
    and float32 images; after it, images are 8-bit images like others.

    Args:
        center: the middle of the range, in the unit of the images, such as Hounsfield units.
        width: the width of the range, greater than 1.

    Raises:
        TypeError, ValueError: an argument is not a number, or `width` is not greater than 1; or, in a chain, a
            transform that changes pixels comes before it.

    Example:
        >>> Window(center=40, width=400).levels(np.array([-160, 39.5, 239], np.float32))
        array([  0, 128, 255], dtype=uint8)
    """

    works_on: ClassVar[tuple[str, ...]] = ("uint8",)

    center: float = argument(finite_number)
    width: float = argument(finite_number, above=1)

    def levels(self, pixels: Any) -> Any:
        """Return the uint8 levels of a float32 or uint16 array or tensor."""
        shifted = cast(pixels, "float32") - (self.center - self.width / 2)
        return cast((shifted * (255 / (self.width - 1)) + 0.5).clip(0, 255), "uint8")


@declaration
class Normalize(Transform):
    """Subtract a mean and divide by a standard deviation, channel by channel.

    Images that are still uint8 or uint16 are scaled to 0 … 1 first (torchvision refuses them); float32 images are not.

    Args:
        mean, std: one number for each channel, or one for all channels.
        inplace: for compatibility with torchvision; has no effect.

    Raises:
        TypeError, ValueError: `mean` and `std` are not sequences of finite numbers of equal length, or a `std` is not
            positive; or, in a chain, they contain values above 2 where images are in 0 … 1, or only values in 0 … 1
            where images are in 0 … 255.
    """

    output_state: ClassVar[str | None] = "normalized"

    mean: tuple[float, ...] = argument(numbers)
    std: tuple[float, ...] = argument(numbers, above=0)
    inplace: bool = argument(flag, default=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"Normalize needs as many means as stds, for each channel or for all, got {len(self.mean)} and "
                f"{len(self.std)}: mean={self.mean}, std={self.std}"
            )

    def bind(self, position: ChainPosition) -> Transform:
        if position.after_custom:
            return copy_for_finished_images(self)
        largest, scaled = max(*map(abs, self.mean), *self.std), position.state == "uint8" or position.unit > 1
        if position.state != "normalized" and scaled and largest > 2:
            raise ValueError(
                f"{self!r} is for images in 0 … 255, but uint8 images are scaled to 0 … 1 before it; divide mean and "
                "std by 255, or put ToDtype('float32'), which does not scale, right before it"
            )
        if position.state == "float" and not scaled and largest <= 1 and max(self.std) < 1:
            raise ValueError(
                f"{self!r} is for images in 0 … 1, but a ToDtype without scale=True leaves 0 … 255; set scale=True, or "
                "remove the ToDtype, since Normalize scales uint8 images itself"
            )
        return self

    def draw(self, uniforms: Uniforms | None, sizes_hw: np.ndarray | None) -> Numbers:
        return Numbers(mean=self.mean, std=self.std)

    @property
    def outline(self) -> tuple[RecordOutline, ...]:
        return (RecordOutline(kind=Numbers, name=type(self).__name__, numbers=self.draw(None, None)),)


@declaration
class UniformTemporalSubsample(Transform):
    """Select evenly spaced frames of each clip, from the first to the last. If there are too few, some repeat.

    A clip is a T×H×W×C `Image`, or a list of images. The worker selects frames before all other transforms, regardless
    of this transform's position in the chain, and decodes only these. Masks and all other fields are not changed.

    Args:
        num_samples: the number of frames.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    num_samples: int = argument(integer, minimum=1)
