"""Checks of transforms' arguments, which run once, when a transform is created.

Each check takes the argument's name for error messages, such as ``"Resize(size=…)"``, and the user's value, and returns
the value as plain Python objects: numbers, tuples, strings. Objects of torch, torchvision and Pillow (dtypes, modes)
are recognised by their attributes and become strings, so none of these libraries is imported and pickled declarations
are small.
"""

from __future__ import annotations

import enum
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from gpuload.checks import flag, function, integer, is_sequence, keyword_or, number, numbers, one_of, pair

__all__ = [
    "MASK_DTYPES",
    "RESAMPLING",
    "Dtype",
    "Fill",
    "Interpolation",
    "antialias_flag",
    "dtype_name",
    "fill_values",
    "format_argument",
    "interpolation_name",
    "is_module",
    "is_torchvision_transform",
    "label_getter",
    "name_of",
    "refuse_albumentations",
    "size_pair",
]

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Dtype = Literal["uint8", "float16", "bfloat16", "float32"]

DEFAULT_INTERPOLATIONS: Final = ("nearest", "bilinear", "bicubic")
RESAMPLING: Final = (*DEFAULT_INTERPOLATIONS, "lanczos", "random")  # "random" draws bilinear or bicubic, as in timm
DTYPES: Final = get_args(Dtype)
MASK_DTYPES: Final = ("uint8", "int16", "int32", "int64", "bool", "float32")
PILLOW_FILTERS: Final = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def is_module(entry: Any) -> bool:
    """Return whether an object is a torch module, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(entry, torch.nn.Module)


def is_torchvision_transform(entry: Any) -> bool:
    """Return whether an object is a torchvision transform, or a torch ``Sequential`` that contains only torchvision
    transforms. torchvision's v2 transforms are modules too, but must not be called with a batch like other modules,
    because they would draw the same parameters for all images."""
    cls = type(entry)
    if cls.__module__.startswith("torch.nn.modules.") and cls.__name__ == "Sequential":
        return len(entry) > 0 and all(map(is_torchvision_transform, entry))
    return f"{cls.__module__}.".startswith("torchvision.transforms.")


def name_of(entry: Any) -> str:
    """Return the name of a function or class. For other objects, return the package and class, such as ``"kornia's
    RandomAffine"``, or only the class if it is defined in ``__main__``."""
    if not isinstance(getattr(entry, "__name__", 0), str):
        entry = type(entry)
        package = entry.__module__.partition(".")[0]
        return entry.__name__ if package == "__main__" else f"{package}'s {entry.__name__}"
    return entry.__name__


def refuse_albumentations(name: str, entry: object) -> None:
    """Raise a TypeError, with the remedy, for a transform or chain of albumentations, or a class of them, including
    subclasses that a user defines."""
    cls = entry if isinstance(entry, type) else type(entry)
    if any(base.__module__.partition(".")[0] == "albumentations" for base in cls.__mro__):
        from gpuload.transforms.names import DATASET_REMEDY  # imported only when an error is raised

        raise TypeError(
            f"{name} is albumentations' {cls.__name__}, which takes a single image, a NumPy array; convert the chain "
            f"with gpuload.transforms.from_albumentations(…), or {DATASET_REMEDY}"
        )


def size_pair(name: str, value: Any, *, single: bool = True) -> tuple[int, int]:
    """Return (height, width); a single number, if allowed, means a square."""
    return pair(name, value, form="(height, width)", entry=integer, single=single, minimum=1)


label_getter: Final = partial(keyword_or, keyword="default", otherwise=function)


def format_argument(value: object) -> str:
    """Format an argument like `repr`, but with numbers rounded to six digits (1 - 0.8 is 0.19999999999999996)."""
    if type(value) is tuple:
        items = ", ".join(map(format_argument, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, float):
        short = f"{value:.6g}"
        if len(short) < len(repr(value)) and float(short) != value:
            return short
    return repr(value)


class Fill(NamedTuple):
    """The values that fill padding. `image` has one pixel value for all channels, or one per channel. `mask` is any
    number that the masks' dtype can hold, as an int if it is an integer."""

    image: tuple[float, ...]
    mask: float


def fill_values(name: str, value: object, *, uint8: bool = False) -> tuple[float, ...] | Fill:
    """Return the values that fill padding. `value` is one pixel value, a sequence with one value per channel, or a dict
    with the keys `Image` and `Mask` (or torchvision's classes of the same names). A type without a key gets the value
    for "others", or else the default of a defaultdict, or else 0. None means 0. If `uint8`, all values must be integers
    in 0 … 255; otherwise the stage checks later whether images can hold them."""
    if isinstance(value, Mapping):
        by_name = {key if isinstance(key, str) else getattr(key, "__name__", str(key)): key for key in value}
        unknown = sorted(set(by_name) - {"Image", "Mask", "Tensor", "others"})
        if unknown:
            raise TypeError(
                f"{name} is a dict, so its keys must be gpuload.Image, gpuload.Mask or 'others', got {unknown[0]}"
            )
        default_value = value.default_factory() if isinstance(value, defaultdict) and value.default_factory else 0
        default_value = value.get("others", default_value)
        image = value[by_name["Image"]] if "Image" in by_name else default_value
        # A default with one value per channel does not apply to masks.
        mask = value[by_name["Mask"]] if "Mask" in by_name else 0 if is_sequence(default_value) else default_value
        mask = 0 if mask is None else mask
        if is_sequence(mask):
            raise TypeError(f"{name} for masks must be one number, got {mask!r}")
        return Fill(_check_pixel_values(name, image, uint8), _check_mask_value(f"{name} for masks", mask))
    return _check_pixel_values(name, value, uint8)


def _check_mask_value(name: str, value: object) -> float:
    """Return the value, which can be NaN or infinity. Integers become ints, since floats would round large integers."""
    return _compact(number(name, value))


def _compact(value: float) -> float:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_pixel_values(name: str, value: Any, uint8: bool) -> tuple[float, ...]:
    pixel_values = tuple(map(_compact, numbers(name, 0 if value is None else value, single=True)))
    if uint8 and not all(0 <= number <= 255 and number == int(number) for number in pixel_values):
        raise ValueError(f"{name} must be integers in 0 … 255, the pixel values of a uint8 image, got {value!r}")
    return pixel_values


def interpolation_name(name: str, value: Any, *, allowed: Sequence[str] = DEFAULT_INTERPOLATIONS) -> Any:
    """Return the name of a filter, from a string, torchvision's InterpolationMode or Pillow's Resampling."""
    filter_name: Any = value
    if isinstance(value, enum.Enum) and isinstance(value.value, str):
        filter_name = value.value
    elif isinstance(value, int) and not isinstance(value, bool):
        filter_name = PILLOW_FILTERS.get(value, value)
    if filter_name == "nearest-exact":  # equal to nearest for Pillow images, which gpuload matches
        filter_name = "nearest"
    return one_of(name, filter_name, allowed)


def antialias_flag(name: str, value: Any) -> bool:
    """Return whether to use antialiasing; None means True, as for Pillow images in torchvision."""
    return value is None or flag(name, value)


def dtype_name(name: str, value: Any, allowed: Sequence[str] = DTYPES) -> Dtype:
    """Return the name of a dtype, from a string, a torch dtype or a numpy dtype."""
    if type(value).__module__ == "torch" or isinstance(value, str):
        dtype_text = str(value).removeprefix("torch.")
    else:
        try:
            dtype_text = np.dtype(value).name
        except TypeError:
            dtype_text = None
    if dtype_text not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return dtype_text  # pyright: ignore[reportReturnType]
