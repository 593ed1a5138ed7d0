"""A single image that is being transformed on the CPU, and its memory layouts.

Levels (pixel values) are an H×W×C numpy array, so crops and flips are views and cost nothing. Colour operations work on
a C×H×W float32 scratch array that holds integers. A canvas and its scratch memory live as long as its runner, and are
used by one thread of the stage's process.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["Canvas", "Floats", "make_contiguous", "view_as_batch"]


class Floats:
    """The levels of one image as C×H×W float32 memory that numpy and torch share."""

    __slots__ = ("array", "tensor")

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.tensor = torch.empty(channels, height, width, dtype=torch.float32, device="cpu")
        self.array = self.tensor.numpy()


class Canvas:
    """The current state of an image: H×W×C levels of the image's dtype, or C×H×W floats."""

    def __init__(self) -> None:
        self._image: np.ndarray | None = None
        self._floats: Floats | None = None
        self._scratch = Floats(1, 0, 0)

    def set(self, image: np.ndarray | None) -> None:
        """Replace the image with these levels, H×W×C; None drops the image."""
        self._image, self._floats = image, None

    def image(self) -> np.ndarray:
        """Return the levels as H×W×C."""
        if self._floats is not None:
            self.set(self._floats.array.astype(np.uint8).transpose(1, 2, 0))
        assert self._image is not None
        return self._image

    def floats(self) -> Floats:
        """Return the levels as floats, which the caller can change in place."""
        if self._floats is None:
            height, width, channels = self.image().shape
            if self._scratch.array.shape != (channels, height, width):
                self._scratch = Floats(channels, height, width)
            np.copyto(self._scratch.array, self.image().transpose(2, 0, 1))
            self._floats, self._image = self._scratch, None
        return self._floats

    @property
    def channels(self) -> int:
        return self.image().shape[2] if self._floats is None else len(self._floats.array)

    @property
    def is_float(self) -> bool:
        return self._floats is not None


def view_as_batch(image: np.ndarray) -> torch.Tensor:
    """Return an H×W×C array as a batch of one image, 1×C×H×W in channels-last memory; a view if the array is
    contiguous."""
    image = make_contiguous(image)
    height, width, channels = image.shape
    strides = (image.size, 1, width * channels, channels)
    return torch.from_numpy(image).as_strided((1, channels, height, width), strides)


def make_contiguous(image: np.ndarray) -> np.ndarray:
    """Return an H×W×C array in C order. torch copies mirrored arrays, because numpy takes ten times as long."""
    if len(image) == 1 and image.strides[0] < 0:  # contiguous to numpy, but not to torch
        image = image[::-1]
    if abs(image.strides[0]) < abs(image.strides[1]):  # transposed: without this loop, numpy takes seven times as long
        copy = np.empty(image.shape, image.dtype)
        for channel in range(image.shape[2]):
            copy[:, :, channel] = image[:, :, channel]
        return copy
    if image.strides[1] < 0:
        return torch.from_numpy(np.ascontiguousarray(image[:, ::-1])).flip(1).numpy()
    return np.ascontiguousarray(image)
