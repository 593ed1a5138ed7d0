"""Transforms that turn uint8 levels into floats: the end of nearly every chain. Nothing is drawn here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gpuload.transforms.arguments import dtype_name, finite, is_sequence
from gpuload.transforms.base import Transform

__all__ = ["Normalize", "ToDtype"]


@dataclass(frozen=True, repr=False)
class ToDtype(Transform):
    """Convert to a dtype.

    Args:
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"uint8"``, as a string or as torch's or numpy's object.
        scale: bring 0 … 255 to 0 … 1; otherwise the numbers stay as they are.

    Raises:
        TypeError, ValueError: an argument is not one of these.

    Example:
        >>> ToDtype(np.float32, scale=True)
        ToDtype(dtype='float32', scale=True)
    """

    works_on: ClassVar[tuple[str, ...]] = ("uint8",)

    dtype: str
    scale: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name("ToDtype(dtype=…)", self.dtype))
        if not isinstance(self.scale, bool):
            raise TypeError(f"ToDtype(scale=…) must be True or False, got {self.scale!r}")

    @property
    def makes(self) -> str | None:
        return None if self.dtype == "uint8" else "float"


@dataclass(frozen=True, repr=False)
class Normalize(Transform):
    """Subtract a mean and divide by a standard deviation, channel by channel.

    An image that is still uint8 is scaled to 0 … 1 first (torchvision refuses it).

    Args:
        mean, std: one number for each channel.
        inplace: taken for torchvision's sake; changes nothing.

    Raises:
        TypeError, ValueError: they are not sequences of finite numbers of one length, or a `std` is not positive.
    """

    works_on: ClassVar[tuple[str, ...]] = ("uint8", "float")

    mean: tuple[float, ...]
    std: tuple[float, ...]
    inplace: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value: Any = getattr(self, name)
            if isinstance(value, str) or not is_sequence(value):
                raise TypeError(
                    f"Normalize({name}=…) must be a sequence with one number for each channel, got {value!r}"
                )
            object.__setattr__(
                self, name, tuple(finite(f"Normalize({name}=…)[{i}]", number) for i, number in enumerate(value))
            )
        if len(self.mean) != len(self.std) or not 1 <= len(self.mean) <= 4:
            raise ValueError(
                f"Normalize needs one mean and one std for each of 1 to 4 channels, got {len(self.mean)} and "
                f"{len(self.std)}: mean={self.mean}, std={self.std}"
            )
        if not (np.array(self.std) > 0).all():
            raise ValueError(f"Normalize(std=…) must be greater than 0, got {self.std}")

    @property
    def makes(self) -> str | None:
        return "normalized"
