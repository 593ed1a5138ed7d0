"""What a dataset yields: samples, which are pytrees whose leaves may be images.

A *sample* is a nested tuple, list or dict. This module owns the types of its leaves and the walk over its
structure. It is imported by workers, so it imports neither torch nor Pillow; leaves of those libraries are
recognised by their attributes. Nothing here holds state.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

__all__ = ["Encoded", "Image", "Mode", "read"]

Mode = Literal["RGB", "L", "RGBA", "unchanged"]
MODES: Final = ("RGB", "L", "RGBA", "unchanged")


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image file's bytes, not yet decoded.

    Args:
        data: the whole file, as `bytes` (other bytes-like objects are copied into one).
        mode: what the pixels become: ``"RGB"`` (3 channels), ``"L"`` (1), ``"RGBA"`` (4), or ``"unchanged"``
            (as many as are stored).
        source: where the bytes came from, for error messages; a path usually.

    Raises:
        TypeError: `data` is not bytes-like.
        ValueError: `mode` is not one of the four.

    Example:
        >>> Encoded(b"abc", source="cat.jpg")
        Encoded(3 bytes, mode='RGB', source='cat.jpg')
    """

    data: bytes
    mode: Mode = "RGB"
    source: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            try:
                object.__setattr__(self, "data", bytes(memoryview(self.data)))
            except TypeError:
                raise TypeError(
                    f"Encoded() takes the bytes of an image file, got {type(self.data).__name__}; "
                    "to read a file write gpuload.read(path)"
                ) from None
        if self.mode not in MODES:
            raise ValueError(f"Encoded(mode=…) must be one of {', '.join(map(repr, MODES))}, got {self.mode!r}")

    def __repr__(self) -> str:
        return f"Encoded({len(self.data)} bytes, mode={self.mode!r}, source={self.source!r})"


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image that is already decoded.

    Args:
        array: uint8, of shape H×W×C (or H×W for one channel) with ``layout="HWC"``, C×H×W with ``layout="CHW"``;
            anything that `numpy.asarray` takes.
        layout: which of the two.

    Raises:
        TypeError: the array is not uint8.
        ValueError: the array has not 2 or 3 axes, is empty, or has not 1 to 4 channels.

    Example:
        >>> Image(np.zeros((3, 20, 30), np.uint8), layout="CHW").hwc.shape
        (20, 30, 3)
    """

    array: Any
    layout: Literal["HWC", "CHW"] = "HWC"

    def __post_init__(self) -> None:
        if self.layout not in ("HWC", "CHW"):
            raise ValueError(f"Image(layout=…) must be 'HWC' or 'CHW', got {self.layout!r}")
        array = np.asarray(self.array)
        if array.dtype != np.uint8:
            raise TypeError(f"an image must be uint8, got {array.dtype} of shape {array.shape}; scale it to 0 … 255")
        if array.ndim == 2:
            array = array[:, :, None]
        elif array.ndim == 3 and self.layout == "CHW":
            array = array.transpose(1, 2, 0)
        elif array.ndim != 3:
            raise ValueError(f"an image must have 2 or 3 axes, got shape {array.shape}")
        if array.size == 0 or not 1 <= array.shape[2] <= 4:
            raise ValueError(
                f"an image must have pixels and 1 to 4 channels, got H×W×C = {array.shape} with layout={self.layout!r}"
            )
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "layout", "HWC")

    @property
    def hwc(self) -> np.ndarray:
        """The pixels, uint8, H×W×C."""
        return self.array


def read(path: str | os.PathLike[str]) -> Encoded:
    """Read an image file without decoding it.

    Works as torchvision's ``ImageFolder(root, loader=gpuload.read)``: the dataset then yields bytes, and gpuload
    decodes only the region that the first crop needs.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        return Encoded(file.readall(), "RGB", os.fspath(path))
