"""The reference on the CPU: a chain applied to one image after the other.

An image is taken through all its transforms while it lies in the cache, and its result is written once, into the memory
of the batch: 224×224 RGB is 150 KB as levels and 600 KB as float32, where a whole batch has 38 MB. Levels are numpy
arrays H×W×C, so that crops and flips are views and cost nothing; colour works on a float32 scratch C×H×W.

Runs in the process of the stage; keeps scratch memory from image to image, so a runner is not to be shared between
threads. The result for an image does not depend on the batch that it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gpuload.backends.color import ADJUST
from gpuload.backends.finish import Finish
from gpuload.backends.ragged import RaggedImages
from gpuload.backends.resample import Resampler
from gpuload.transforms import (
    CenterCrop,
    ColorJitter,
    Draws,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from gpuload.transforms.resampling import padded_places

__all__ = ["SingleRunner"]


class _Canvas:
    """One image on its way: levels as uint8 H×W×C, or as float32 1×C×H×W in scratch memory, whichever was made last."""

    def __init__(self) -> None:
        self.image: np.ndarray | None = None
        self.floats: torch.Tensor | None = None
        self._scratch = torch.empty(0)

    def as_image(self) -> np.ndarray:
        """The levels as H×W×C."""
        if self.image is None:
            assert self.floats is not None
            self.image, self.floats = self.floats[0].to(torch.uint8).permute(1, 2, 0).numpy(), None
        return self.image

    def as_floats(self) -> torch.Tensor:
        """The levels as 1×C×H×W, which may be worked on in place; the image is to be set before it is read again."""
        if self.floats is None:
            assert self.image is not None
            height, width, channels = self.image.shape
            if self._scratch.shape[1:] != (channels, height, width):
                self._scratch = torch.empty(1, channels, height, width)
            np.copyto(self._scratch.numpy()[0], self.image.transpose(2, 0, 1))
            self.image, self.floats = None, self._scratch
        return self.floats


# What is done to the canvas for the image of a row.
Step = Callable[[int, _Canvas], None]


class SingleRunner:
    """Applies a chain to batches, image by image.

    Args:
        finish: the end of the chain.
    """

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._scale, self._bias = finish.constants(torch.device("cpu"))
        self._resampler = Resampler()
        self._canvas = _Canvas()

    def __call__(self, images: RaggedImages, draws: Draws, outputs: Sequence[torch.Tensor]) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W."""
        flat = images.pixels.numpy()
        steps = [
            step for index in range(len(draws.transforms)) if (step := _step(draws, index, self._resampler)) is not None
        ]
        starts = (draws.windows_tlhw[0][:, :2] - images.regions_tlhw[:, :2]).tolist()
        windows, shapes, offsets = draws.windows_tlhw[0].tolist(), images.shapes.tolist(), images.offsets.tolist()
        canvas = self._canvas
        for row, output in enumerate(outputs):
            height, width, channels = shapes[row]
            offset, (top, left) = offsets[row], starts[row]
            region = flat[offset : offset + height * width * channels].reshape(height, width, channels)
            canvas.image = region[top : top + windows[row][2], left : left + windows[row][3]]
            canvas.floats = None
            for step in steps:
                step(row, canvas)
            self._write(canvas, output)

    def _write(self, canvas: _Canvas, output: torch.Tensor) -> None:
        """The end of the chain, into the memory of the batch."""
        if output.dtype == torch.uint8:
            np.copyto(output.numpy(), canvas.as_image().transpose(2, 0, 1))
            return
        if canvas.floats is None and output.dtype == torch.float32 and output.is_contiguous():
            np.copyto(output.numpy(), canvas.as_image().transpose(2, 0, 1))
            if not self._finish.is_identity:
                output.mul_(self._scale).add_(self._bias)
            return
        floats = canvas.as_floats()[0]
        if not self._finish.is_identity:
            floats.mul_(self._scale).add_(self._bias)
        output.copy_(floats)


def _step(draws: Draws, index: int, resampler: Resampler) -> Step | None:
    """What transform `index` does; None where it is part of the chain's end."""
    transform, params = draws.transforms[index], draws[index]
    before, after = draws.windows_tlhw[index], draws.windows_tlhw[index + 1]
    if isinstance(transform, RandomHorizontalFlip):
        return _flip(params.flipped, (slice(None), slice(None, None, -1)))
    if isinstance(transform, RandomVerticalFlip):
        return _flip(params.flipped, (slice(None, None, -1),))
    if isinstance(transform, CenterCrop | RandomCrop):
        return _crop(transform, params, draws.sizes_hw[index], before, after)
    if isinstance(transform, Resize | RandomResizedCrop):
        return _resize(params, before, after, transform.interpolation, resampler)
    if isinstance(transform, ColorJitter):
        return _jitter(transform.adjustments, params, before, after)
    return None


def _flip(flipped: np.ndarray, view: tuple[slice, ...]) -> Step:
    flags = flipped.tolist()

    def step(row: int, canvas: _Canvas) -> None:
        if flags[row]:
            canvas.image = canvas.as_image()[view]

    return step


def _crop(
    transform: CenterCrop | RandomCrop, params: Any, sizes_hw: np.ndarray, before: np.ndarray, after: np.ndarray
) -> Step | None:
    starts = params.box_tlhw[:, :2] + after[:, :2]
    outside = (starts != before[:, :2]).any(axis=1) | (after[:, 2:] != before[:, 2:]).any(axis=1)
    if not outside.any():
        return None  # the window that was decoded, or resampled, is the crop

    def step(row: int, canvas: _Canvas) -> None:
        if not outside[row]:
            return
        image, inside, at = canvas.as_image(), [], []
        for axis in (0, 1):
            length = int(sizes_hw[row, axis])
            wanted = starts[row, axis] + np.arange(after[row, axis + 2])
            at.append(padded_places(wanted, length, transform.padding_mode) - before[row, axis])
            inside.append((wanted >= 0) & (wanted < length))
        result = image[at[0][:, None], at[1]]
        if transform.padding_mode == "constant":
            result[~(inside[0][:, None] & inside[1])] = transform.fill
        canvas.image = result

    return step


def _resize(params: Any, before: np.ndarray, after: np.ndarray, interpolation: str, resampler: Resampler) -> Step:
    corners = (before[:, :2] - params.box_tlhw[:, :2]).tolist()
    boxes, sizes, windows = params.box_tlhw[:, 2:].tolist(), params.size_hw.tolist(), after.tolist()

    def step(row: int, canvas: _Canvas) -> None:
        box, size = tuple(boxes[row]), tuple(sizes[row])
        canvas.image = resampler(canvas.as_image(), corners[row], box, size, tuple(windows[row]), interpolation)

    return step


def _jitter(names: tuple[str, ...], params: Any, before: np.ndarray, after: np.ndarray) -> Step:
    order, factors = params.order.tolist(), params.factors.tolist()
    windows = None if np.array_equal(before, after) else after.tolist()

    def step(row: int, canvas: _Canvas) -> None:
        levels = canvas.as_floats()
        for column in order[row]:
            ADJUST[names[column]](levels, factors[row][column])
        if windows is not None:
            top, left, height, width = windows[row]
            canvas.image = canvas.as_image()[top : top + height, left : left + width]

    return step
