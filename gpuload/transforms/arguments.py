"""Checks of transforms' arguments, which run once, when a transform is created.

Each check takes the argument's name for error messages, such as ``"Resize(size=…)"``, and the user's value, and returns
the value as plain Python objects: numbers, tuples, strings. Objects of torch, torchvision and Pillow (dtypes, modes)
are recognised by their attributes and become strings, so none of these libraries is imported and pickled declarations
are small.
"""

from __future__ import annotations

import enum
import math
import numbers
import operator
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

__all__ = [
    "MASK_DTYPES",
    "RESAMPLING",
    "Dtype",
    "Fill",
    "Interpolation",
    "antialias_flag",
    "depends_on_epoch",
    "dtype_name",
    "fill_values",
    "finite_number",
    "flag",
    "format_argument",
    "fraction",
    "integer",
    "interpolation_name",
    "interval",
    "is_module",
    "is_sequence",
    "is_torchvision_transform",
    "label_getter",
    "name_of",
    "probability",
    "refuse_albumentations",
    "size_pair",
]

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Dtype = Literal["uint8", "float16", "bfloat16", "float32"]

DEFAULT_INTERPOLATIONS: Final = ("nearest", "bilinear", "bicubic")
RESAMPLING: Final = (*DEFAULT_INTERPOLATIONS, "lanczos", "random")  # "random" draws bilinear or bicubic, as in timm
DTYPES: Final = ("uint8", "float16", "bfloat16", "float32")
MASK_DTYPES: Final = ("uint8", "int16", "int32", "int64", "bool", "float32")
PILLOW_FILTERS: Final = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def is_sequence(value: Any) -> bool:
    """Return whether a value is a list, a tuple, an array or another sequence, but not a string."""
    if getattr(value, "ndim", 1) == 0:  # a scalar array or tensor
        return False
    return isinstance(value, list | tuple | np.ndarray) or (
        hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | dict)
    )


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


def refuse_albumentations(name: str, entry: Any) -> None:
    """Raise a TypeError, with the remedy, for a transform or chain of albumentations, or a class of them, including
    subclasses that a user defines."""
    cls = entry if isinstance(entry, type) else type(entry)
    if any(base.__module__.partition(".")[0] == "albumentations" for base in cls.__mro__):
        from gpuload.transforms.names import albumentations_remedy  # imported only when an error is raised

        raise TypeError(
            f"{name} is albumentations' {cls.__name__}, which takes a single image, a NumPy array; "
            f"{albumentations_remedy(cls.__name__)}"
        )


def integer(name: str, value: Any, *, minimum: int | None) -> int:
    """Return the value as an int; raise a ValueError if the value is less than `minimum`, unless `minimum` is None."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def finite_number(name: str, value: Any, *, allows_negative: bool = True, positive: bool = False) -> float:
    """Return the value as a float; raise a ValueError if it is not finite, is negative and `allows_negative` is False,
    or is not greater than 0 and `positive` is True."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # an array or a tensor without axes
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real | np.number):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    if number < 0 and not allows_negative:
        raise ValueError(f"{name} must not be negative, got {number:g}")
    if positive and number <= 0:
        raise ValueError(f"{name} must be greater than 0, got {number}")
    return number


def fraction(name: str, value: Any) -> float:
    """Return the value as a float; raise a ValueError if it is not in 0 … 1."""
    number = finite_number(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must lie in 0 … 1, got {number:g}")
    return number


def probability(name: str, value: Any) -> float:
    """Return the value as a float; raise a ValueError if it is not in 0 … 1."""
    number = finite_number(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} is a probability and must lie in 0 … 1, got {number}")
    return number


def interval(name: str, value: Any, *, positive: bool = False) -> tuple[float, float]:
    """Return the value as (low, high); raise a ValueError unless low ≤ high, and low > 0 if `positive`."""
    if not is_sequence(value) or len(value) != 2:
        raise TypeError(f"{name} must be a pair (low, high), got {value!r}")
    low, high = finite_number(name, value[0]), finite_number(name, value[1])
    if low > high:
        raise ValueError(f"{name} must be (low, high) with low ≤ high, got ({low}, {high})")
    if positive and low <= 0:
        raise ValueError(f"{name} must be greater than 0, got ({low}, {high})")
    return low, high


def size_pair(name: str, value: Any) -> tuple[int, int]:
    """Return (height, width); a single number means a square."""
    if is_sequence(value):
        if len(value) not in (1, 2):
            raise ValueError(f"{name} must be an integer or (height, width), got {len(value)} values: {value!r}")
        return integer(name, value[0], minimum=1), integer(name, value[-1], minimum=1)
    side = integer(name, value, minimum=1)
    return side, side


def label_getter(name: str, value: Any, *, target: str, allows_none: bool = False) -> Any:
    """Check a `labels_getter`, which must be ``"default"``, a function, or None if `allows_none`, and return it."""
    if value != "default" and not callable(value) and not (allows_none and value is None):
        raise ValueError(
            f"{name} must be 'default', {'None, ' if allows_none else ''}or a function that takes a sample and returns "
            f"the fields of its {target}, such as lambda s: s[1]['labels']; got {value!r}"
        )
    return value


def depends_on_epoch(value: Any) -> bool:
    """Return whether a value is the result of `by_epoch`."""
    return hasattr(type(value), "at_epoch")


def format_argument(value: Any) -> str:
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


def fill_values(name: str, value: Any, *, uint8: bool = False) -> tuple[float, ...] | Fill:
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


def _check_mask_value(name: str, value: Any) -> float:
    """Return the value, which can be NaN or infinity. Integers become ints, since floats would round large integers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | np.number):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return int(number) if number.is_integer() else number


def _check_pixel_values(name: str, value: Any, uint8: bool) -> tuple[float, ...]:
    values = tuple(value) if is_sequence(value) else (0 if value is None else value,)
    pixel_values = tuple(
        int(number) if number.is_integer() else number for number in (finite_number(name, x) for x in values)
    )
    if not pixel_values:
        raise ValueError(f"{name} must be a number, or a sequence with one number per channel, got {value!r}")
    if uint8 and not all(0 <= number <= 255 and number == int(number) for number in pixel_values):
        raise ValueError(f"{name} must be integers in 0 … 255, the pixel values of a uint8 image, got {value!r}")
    return pixel_values


def interpolation_name(name: str, value: Any, *, allowed: Sequence[str] = DEFAULT_INTERPOLATIONS) -> Any:
    """Return the name of a filter, from a string, torchvision's InterpolationMode or Pillow's Resampling."""
    filter_name: Any = value
    if isinstance(value, enum.Enum) and isinstance(value.value, str):
        filter_name = value.value
    elif isinstance(value, int) and not isinstance(value, bool):
        filter_name = PILLOW_FILTERS.get(value)
    if filter_name == "nearest-exact":  # equal to nearest for Pillow images, which gpuload matches
        filter_name = "nearest"
    if not isinstance(filter_name, str) or filter_name not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return filter_name


def antialias_flag(name: str, value: Any) -> bool:
    """Return whether to use antialiasing; None means True, as for Pillow images in torchvision."""
    if value not in (True, False, None):
        raise TypeError(f"{name} must be True, False or None, got {value!r}")
    return value is not False


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
