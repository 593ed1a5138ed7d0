"""The arithmetic of colour transforms for one image on the CPU, tuned: the same meaning as `gpuload.backends.color`.

What costs on a processor is the number of passes over the planes of an image and whether they stay in its cache, so
everything works in place on float32 C×H×W, with three planes of scratch memory that are kept. numpy and torch look at
the same memory, and each is used where it is faster (224×224, one core: a difference of planes 11 µs in numpy, 19 µs
in torch; clamping three planes 75 and 22 µs; torch's comparisons and `where` 90 and 60 µs, so there are none here).

Used by the process that runs the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gpuload.backends.color import GUARD, LUMA, TINY

__all__ = ["Floats", "SingleColor"]


class Floats:
    """Levels of one image as float32 C×H×W, seen by numpy and by torch."""

    __slots__ = ("array", "tensor")

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.tensor = torch.empty(channels, height, width, dtype=torch.float32, device="cpu")
        self.array = self.tensor.numpy()


class SingleColor:
    """Adjusts one image after the other.

    Attributes:
        adjust: by the name of the adjustment, a function that changes levels by a factor, in place.
    """

    def __init__(self) -> None:
        self.adjust: dict[str, Callable[[Floats, float], None]] = {
            "brightness": self._brightness,
            "contrast": self._contrast,
            "saturation": self._saturation,
            "hue": self._hue,
        }
        self._luma = torch.tensor([LUMA], dtype=torch.float32, device="cpu")
        self._planes = Floats(3, 0, 0)

    def _scratch(self, levels: Floats) -> Floats:
        """Three planes of the size of an image."""
        _, height, width = levels.array.shape
        if self._planes.array.shape[1:] != (height, width):
            self._planes = Floats(3, height, width)
            self._zeros = np.zeros((height, width), np.float32)
            self._ones = np.ones((height, width), np.float32)
        return self._planes

    def _brightness(self, levels: Floats, factor: float) -> None:
        np.multiply(levels.array, factor, out=levels.array)
        _to_levels(levels, factor)

    def _contrast(self, levels: Floats, factor: float) -> None:
        channels, height, width = levels.array.shape
        # As in `color.contrast`; the luma of every pixel, of which Pillow takes the mean, costs three times as much.
        sums = levels.tensor.sum(dim=2).numpy().sum(axis=1, dtype=np.float64).tolist()
        grey = sums[0] if channels == 1 else sum(weight * total for weight, total in zip(LUMA, sums, strict=True))
        mean = int(grey / (height * width) + 0.5)
        np.multiply(levels.array, factor, out=levels.array)
        np.add(levels.array, mean * (1 - float(np.float32(factor))) + GUARD, out=levels.array)
        _to_levels(levels, factor)

    def grayscale(self, levels: Floats) -> None:
        """Luma in all channels."""
        if len(levels.array) > 1:
            levels.tensor.copy_(self._grey(levels).tensor[:1].expand_as(levels.tensor))

    def _grey(self, levels: Floats) -> Floats:
        """The luma of three channels, in the first plane of the scratch memory."""
        scratch = self._scratch(levels)
        torch.mm(self._luma, levels.tensor.view(3, -1), out=scratch.tensor[0].view(1, -1))
        np.floor(np.add(scratch.array[0], 0.5, out=scratch.array[0]), out=scratch.array[0])
        return scratch

    def _saturation(self, levels: Floats, factor: float) -> None:
        if len(levels.array) == 1:
            return
        torch.lerp(self._grey(levels).tensor[0], levels.tensor, factor, out=levels.tensor)
        _to_levels(levels, factor)

    def _hue(self, levels: Floats, factor: float) -> None:
        if len(levels.array) == 1:
            return
        red, green, blue = levels.array
        value, chroma, turns = self._scratch(levels).array
        zeros, ones = self._zeros, self._ones
        least = chroma
        np.maximum(np.maximum(red, green, out=value), blue, out=value)
        np.minimum(np.minimum(red, green, out=least), blue, out=least)
        # With R, G, B in 0 … 1 between the least and the greatest channel, the hue is 1 + G + B - R sixths of the
        # circle where G ≥ B, and 5 - (G + B - R) elsewhere: 3 minus a distance with the sign of G - B.
        np.add(green, blue, out=turns)
        np.subtract(turns, red, out=turns)
        np.subtract(turns, least, out=turns)
        np.subtract(green, blue, out=green)
        np.subtract(value, least, out=chroma)
        np.add(chroma, TINY, out=red)
        np.divide(turns, red, out=turns)
        np.subtract(2.0, turns, out=turns)
        np.copysign(turns, green, out=turns)
        np.multiply(turns, -255 / 6, out=turns)
        np.add(turns, 255 / 2, out=turns)
        np.floor(turns, out=turns)
        _turn(turns, int(factor * 255) % 256, red, zeros, ones)
        # What the channels lack at most: the saturation, rounded down to whole numbers as Pillow's is, of the value.
        np.multiply(chroma, 255.0, out=chroma)
        np.add(value, TINY, out=red)
        np.divide(chroma, red, out=chroma)
        np.floor(chroma, out=chroma)
        np.multiply(chroma, value, out=chroma)
        np.multiply(chroma, 1 / 255, out=chroma)
        np.subtract(value, chroma, out=value)
        np.add(value, 0.5, out=value)
        for channel, centre, inverted in ((red, 3.0, False), (green, 2.0, True), (blue, 4.0, True)):
            np.subtract(turns, centre, out=channel)
            np.abs(channel, out=channel)
            if inverted:
                np.subtract(2.0, channel, out=channel)
            else:
                np.subtract(channel, 1.0, out=channel)
            np.maximum(channel, zeros, out=channel)
            np.minimum(channel, ones, out=channel)
            np.multiply(channel, chroma, out=channel)
            np.add(channel, value, out=channel)
        levels.tensor.floor_()


def _turn(turns: np.ndarray, shift: int, room: np.ndarray, zeros: np.ndarray, ones: np.ndarray) -> None:
    """Add a shift to hues in 0 … 255, which wrap at 256, and bring them to 0 … 6."""
    np.add(turns, shift, out=turns)
    np.subtract(turns, 255.0, out=room)
    np.maximum(room, zeros, out=room)
    np.minimum(room, ones, out=room)  # 1 where the hue is 256 or more
    np.multiply(room, 256.0, out=room)
    np.subtract(turns, room, out=turns)
    np.multiply(turns, 6 / 255, out=turns)


def _to_levels(levels: Floats, factor: float) -> None:
    if factor > 1:
        levels.tensor.clamp_(0, 255)
    levels.tensor.floor_()
