"""Resampling of uint8 images, one at a time on the CPU: torch's antialiasing kernels, within a level of Pillow's; for
filters that torch has no such kernel for, `gpuload.stage.reference.deep`.

torch has kernels for uint8 on the CPU (AVX2; Pillow's algorithm in 16-bit fixed point) that cost a third of Pillow's
time. Like Pillow up to version 12 they go along the rows first; newer versions begin with the cheaper axis, which
differs where bicubic overshoots 0 … 255 in between. The kernels always start at the image's first pixel. So for a part
of a result (the window of a crop after a resize) the source is put where it is in the whole image, next to pixels that
nothing depends on, and the result is computed up to the window's end with the scale given: it equals that part of the
whole result to the last bit.

Used by the process that runs the stage. A `Resampler` keeps scratch memory between calls and must not be shared between
threads; a result is valid until the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.reference.deep import resampled
from gpuload.transforms.program.windows import nearest_indices

__all__ = ["Resampler", "contiguous", "planes", "planes_at"]

# As called by torch.nn.functional.interpolate(antialias=True); through torch.ops a call takes 12 µs longer.
KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "bilinear": torch._C._nn._upsample_bilinear2d_aa,  # pyright: ignore[reportAttributeAccessIssue]
    "bicubic": torch._C._nn._upsample_bicubic2d_aa,  # pyright: ignore[reportAttributeAccessIssue]
}

Window = tuple[int, int, int, int]  # top, left, height, width


class Resampler:
    """Resizes images H×W×C."""

    def __init__(self) -> None:
        self._source = _Scratch()
        self._result = _Scratch()

    def whole(self, planes: torch.Tensor, size_hw: tuple[int, int], interpolation: str) -> np.ndarray:
        """A whole image, given as `planes` makes it, resized: H×W×C, scratch memory."""
        if interpolation not in KERNELS:
            image = planes[0].permute(1, 2, 0).numpy()
            return resampled(image, (0, 0), image.shape[:2], size_hw, (0, 0, *size_hw), interpolation)
        out = self._result.of((*size_hw, planes.shape[1]))
        KERNELS[interpolation](planes, size_hw, False, None, None, out=out.planes)
        return out.image

    def window(
        self,
        image: np.ndarray,
        corner: tuple[int, int],
        box_hw: tuple[int, int],
        size_hw: tuple[int, int],
        window: Window,
        interpolation: str,
    ) -> np.ndarray:
        """A window of a resized box.

        Args:
            image: h×w×C, a part of the box.
            corner: its top and left in the box.
            box_hw, size_hw: the size of the whole box before and after.
            window: the part of the result that is wanted.
            interpolation: the filter.

        Returns:
            H×W×C, a view of the image or of scratch memory.
        """
        (top, left), (height, width) = corner, window[2:]
        if box_hw == size_hw:
            start, first = window[0] - top, window[1] - left
            return image[start : start + height, first : first + width]
        if interpolation == "nearest":
            rows = nearest_indices(box_hw[0], size_hw[0], window[0], height) - top
            columns = nearest_indices(box_hw[1], size_hw[1], window[1], width) - left
            return image[rows].take(columns, axis=1)  # one index for both took five times as long
        if interpolation not in KERNELS:
            return resampled(image, corner, box_hw, size_hw, window, interpolation)
        if window == (0, 0, *size_hw):
            return self.whole(planes(image), size_hw, interpolation)
        ends, source_hw = [], []
        for axis in (0, 1):
            end, there = window[axis] + window[axis + 2], corner[axis] + image.shape[axis]
            if size_hw[axis] == box_hw[axis]:
                there = end  # equal lengths tell the kernel to leave out an axis that is not resized
            elif end == there:
                end += 1  # so here they must differ; there is one more pixel, or this would be the whole axis
            ends.append(end)
            source_hw.append(there)
        source = self._source.of((*source_hw, image.shape[2]))
        source.image[top:, left:] = image[: source_hw[0] - top, : source_hw[1] - left]
        out = self._result.of((*ends, image.shape[2]))
        scales = (size_hw[0] / box_hw[0], size_hw[1] / box_hw[1])
        KERNELS[interpolation](source.planes, ends, False, *scales, out=out.planes)
        return out.image[window[0] : window[0] + height, window[1] : window[1] + width]


class _Scratch:
    """Memory for an image of any size, shared by numpy and torch."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self.image = np.empty((0, 0, 0), np.uint8)

    def of(self, shape: tuple[int, int, int]) -> _Scratch:
        """This, for an image H×W×C."""
        if self.image.shape != shape:
            nbytes = prod(shape)
            if len(self._memory) < nbytes:
                self._memory = np.empty(nbytes, np.uint8)
            self.image = self._memory[:nbytes].reshape(shape)
            self.planes = planes(self.image)
        return self


def planes(image: np.ndarray) -> torch.Tensor:
    """An H×W×C array as a batch of one: 1×C×H×W in channels-last memory, without a copy if it is contiguous."""
    image = contiguous(image)
    return planes_at(torch.from_numpy(image), 0, *image.shape)


def contiguous(image: np.ndarray) -> np.ndarray:
    """An H×W×C array in C order; numpy takes ten times as long as torch to copy a mirrored one."""
    if len(image) == 1 and image.strides[0] < 0:  # contiguous for numpy, but not for torch
        image = image[::-1]
    if image.strides[1] < 0:
        return torch.from_numpy(np.ascontiguousarray(image[:, ::-1])).flip(1).numpy()
    return np.ascontiguousarray(image)


def planes_at(memory: torch.Tensor, offset: int, height: int, width: int, channels: int) -> torch.Tensor:
    """The same, for an H×W×C image that begins at an offset in a tensor's memory."""
    return memory.as_strided(
        (1, channels, height, width), (height * width * channels, 1, width * channels, channels), offset
    )
