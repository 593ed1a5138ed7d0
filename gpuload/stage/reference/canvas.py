"""One image on its way through a chain on the CPU, and the forms of its memory.

Levels are a numpy array H×W×C, so crops and flips are views and cost nothing; colour works on a float32 scratch C×H×W
of whole numbers. A canvas lives as long as its runner, with its scratch memory; used by one thread of the stage's
process.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["Canvas", "Floats", "contiguous", "planes", "planes_at"]


class Floats:
    """Levels of one image as float32 C×H×W, shared by numpy and torch."""

    __slots__ = ("array", "tensor")

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.tensor = torch.empty(channels, height, width, dtype=torch.float32, device="cpu")
        self.array = self.tensor.numpy()


class Canvas:
    """One image in the form that was made last: an offset in the stage's input, levels as H×W×C of the image's dtype,
    or floats."""

    def __init__(self) -> None:
        self.pixels = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.flat = self.pixels.numpy()
        self._start: tuple[int, int, int, int, int] | None = None
        self._image: np.ndarray | None = None
        self._floats: Floats | None = None
        self._scratch = Floats(1, 0, 0)

    def begin(self, offset: int, shape: list[int], top: int, left: int, height: int, width: int) -> None:
        """Begin with a window of the image with this offset in `flat` and this shape."""
        step = shape[1] * shape[2]
        self._image = self._floats = None
        if width == shape[1]:
            self._start = (offset + top * step, height, width, shape[2], step)
        else:
            self._start = None
            whole = self.flat[offset : offset + shape[0] * step].reshape(shape)
            self._image = whole[top : top + height, left : left + width]

    def set(self, image: np.ndarray) -> None:
        """Go on with these levels, H×W×C."""
        self._image, self._floats, self._start = image, None, None

    def image(self) -> np.ndarray:
        """The levels as H×W×C."""
        if self._image is None:
            if self._floats is not None:
                self.set(self._floats.array.astype(np.uint8).transpose(1, 2, 0))
            elif self._start is not None:
                offset, height, width, channels, step = self._start
                self._image = self.flat[offset : offset + height * step].reshape(height, width, channels)
        assert self._image is not None
        return self._image

    def planes(self) -> torch.Tensor:
        """The levels for torch's kernels."""
        return planes(self.image()) if self._start is None else planes_at(self.pixels, *self._start[:4])

    def floats(self) -> Floats:
        """The levels as floats, to be changed in place."""
        if self._floats is None:
            height, width, channels = self.image().shape
            if self._scratch.array.shape != (channels, height, width):
                self._scratch = Floats(channels, height, width)
            np.copyto(self._scratch.array, self.image().transpose(2, 0, 1))
            self._floats, self._image, self._start = self._scratch, None, None
        return self._floats

    @property
    def channels(self) -> int:
        """How many the levels have."""
        return self.image().shape[2] if self._floats is None else len(self._floats.array)

    @property
    def is_float(self) -> bool:
        """Whether the levels are floats at present."""
        return self._floats is not None


def planes(image: np.ndarray) -> torch.Tensor:
    """An H×W×C array as a batch of one: 1×C×H×W in channels-last memory, without a copy if it is contiguous."""
    image = contiguous(image)
    return planes_at(torch.from_numpy(image), 0, *image.shape)


def contiguous(image: np.ndarray) -> np.ndarray:
    """An H×W×C array in C order; numpy takes ten times as long as torch to copy a mirrored one."""
    if len(image) == 1 and image.strides[0] < 0:  # contiguous for numpy, but not for torch
        image = image[::-1]
    if abs(image.strides[0]) < abs(image.strides[1]):  # transposed: numpy takes seven times as long at once
        copy = np.empty(image.shape, image.dtype)
        for channel in range(image.shape[2]):
            copy[:, :, channel] = image[:, :, channel]
        return copy
    if image.strides[1] < 0:
        return torch.from_numpy(np.ascontiguousarray(image[:, ::-1])).flip(1).numpy()
    return np.ascontiguousarray(image)


def planes_at(memory: torch.Tensor, offset: int, height: int, width: int, channels: int) -> torch.Tensor:
    """The same, for an H×W×C image that begins at an offset in a tensor's memory."""
    return memory.as_strided(
        (1, channels, height, width), (height * width * channels, 1, width * channels, channels), offset
    )
