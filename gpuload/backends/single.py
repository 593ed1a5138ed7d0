"""The reference on the CPU: a chain applied to one image after the other.

An image is taken through all its transforms while it lies in the cache, and its result is written once, into the memory
of the batch: 224×224 RGB is 150 KB as levels and 600 KB as float32, where a whole batch has 38 MB. Levels are numpy
arrays H×W×C, so that crops and flips are views and cost nothing; colour works on a float32 scratch C×H×W.

Runs in the process of the stage; keeps scratch memory from image to image, so a runner is not to be shared between
threads. The result for an image does not depend on the batch that it is in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gpuload import transforms as T
from gpuload.backends.color_single import Floats, SingleColor
from gpuload.backends.finish import Finish
from gpuload.backends.ragged import RaggedImages
from gpuload.backends.resample import Resampler, contiguous, planes, planes_at
from gpuload.transforms.resampling import padded_places

__all__ = ["SingleRunner"]

Outputs = torch.Tensor | Sequence[torch.Tensor]


class _Canvas:
    """One image on its way: where it lies in the memory of the batch's sources, or its levels as uint8 H×W×C, or as
    floats; whichever was made last."""

    def __init__(self) -> None:
        self.pixels = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.flat = self.pixels.numpy()
        self._start: tuple[int, int, int, int, int] | None = None
        self._image: np.ndarray | None = None
        self._floats: Floats | None = None
        self._scratch = Floats(1, 0, 0)

    def begin(self, offset: int, shape: list[int], top: int, left: int, height: int, width: int) -> None:
        """Begin with a window of the image of a shape that lies at an offset in `flat`."""
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
        """The levels as the kernels of torch want them."""
        if self._start is not None:
            return planes_at(self.pixels, *self._start[:4])
        return planes(self.image())

    def floats(self) -> Floats:
        """The levels as floats, to be worked on in place."""
        if self._floats is None:
            height, width, channels = self.image().shape
            if self._scratch.array.shape != (channels, height, width):
                self._scratch = Floats(channels, height, width)
            np.copyto(self._scratch.array, self.image().transpose(2, 0, 1))
            self._floats, self._image, self._start = self._scratch, None, None
        return self._floats

    @property
    def is_float(self) -> bool:
        """Whether the levels are floats at present."""
        return self._floats is not None


# What is done to the canvas for the image of a row.
Step = Callable[[int, _Canvas], None]


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class SingleRunner:
    """Applies a chain to batches, image by image.

    Args:
        finish: the end of the chain.
    """

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._scale, self._bias = (constant.numpy() for constant in finish.constants(torch.device("cpu")))
        self._resamplers: dict[int, Resampler] = defaultdict(Resampler)
        self._color = SingleColor()
        self._canvas = _Canvas()

    def __call__(self, images: RaggedImages, draws: T.Draws, outputs: Outputs) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W."""
        canvas = self._canvas
        canvas.pixels, canvas.flat = images.pixels, images.pixels.numpy()
        steps = [step for index in range(len(draws.transforms)) if (step := self._step(draws, index)) is not None]
        write = self._writer(outputs)
        windows = draws.windows_tlhw[0].copy()
        windows[:, :2] -= images.regions_tlhw[:, :2]
        for row, (offset, shape, window) in enumerate(
            zip(images.offsets.tolist(), images.shapes.tolist(), windows.tolist(), strict=True)
        ):
            canvas.begin(offset, shape, *window)
            for step in steps:
                step(row, canvas)
            write(row, canvas)
        canvas.pixels, canvas.flat = _NOTHING, _NOTHING.numpy()  # the ring is not held on to

    def _writer(self, outputs: Outputs) -> Step:
        """The end of the chain, into the memory of the batch."""
        scale, bias, affine = self._scale, self._bias, not self._finish.is_identity
        if outputs[0].dtype not in (torch.uint8, torch.float32):

            def write(row: int, canvas: _Canvas) -> None:
                floats = canvas.floats()
                if affine:
                    np.add(np.multiply(floats.array, scale, out=floats.array), bias, out=floats.array)
                outputs[row].copy_(floats.tensor)

            return write
        if isinstance(outputs, torch.Tensor) and not outputs.is_contiguous():
            return self._writer_channels_last(outputs.numpy().transpose(0, 2, 3, 1))
        arrays = outputs.numpy() if isinstance(outputs, torch.Tensor) else [output.numpy() for output in outputs]

        def write_array(row: int, canvas: _Canvas) -> None:
            array = arrays[row]
            if canvas.is_float:
                floats = canvas.floats().array
                if affine:
                    np.add(np.multiply(floats, scale, out=floats), bias, out=array)
                else:
                    np.copyto(array, floats, casting="unsafe")
                return
            np.copyto(array, canvas.image().transpose(2, 0, 1))
            if affine:
                np.add(np.multiply(array, scale, out=array), bias, out=array)

        return write_array

    def _writer_channels_last(self, arrays: np.ndarray) -> Step:
        """The same for N×H×W×C. The constants are repeated along a row: a loop over three channels takes ten times as
        long as one over a row."""
        n, height, width, channels = arrays.shape
        rows = arrays.reshape(n, height, width * channels)
        scale, bias = (
            np.tile(np.broadcast_to(constant.ravel(), channels), width) for constant in (self._scale, self._bias)
        )

        def write(row: int, canvas: _Canvas) -> None:
            image = canvas.floats().array.transpose(1, 2, 0) if canvas.is_float else contiguous(canvas.image())
            np.copyto(arrays[row], image, casting="unsafe")
            if not self._finish.is_identity:
                np.add(np.multiply(rows[row], scale, out=rows[row]), bias, out=rows[row])

        return write

    def _step(self, draws: T.Draws, index: int) -> Step | None:
        """What transform `index` does; None where it is part of the chain's end."""
        transform, params = draws.transforms[index], draws[index]
        before, after = draws.windows_tlhw[index], draws.windows_tlhw[index + 1]
        if isinstance(transform, T.RandomHorizontalFlip):
            return _flip(params.flipped, (slice(None), slice(None, None, -1)))
        if isinstance(transform, T.RandomVerticalFlip):
            return _flip(params.flipped, (slice(None, None, -1),))
        if isinstance(transform, T.CenterCrop | T.RandomCrop):
            return _crop(transform, params, draws.sizes_hw[index], before, after)
        if isinstance(transform, T.Resize | T.RandomResizedCrop):
            return _resize(params, before, after, transform.interpolation, self._resamplers[index])
        if isinstance(transform, T.ColorJitter):
            return _jitter(self._color, transform.adjustments, params, before, after)
        return None


def _flip(flipped: np.ndarray, view: tuple[slice, ...]) -> Step:
    flags = flipped.tolist()

    def step(row: int, canvas: _Canvas) -> None:
        if flags[row]:
            canvas.set(canvas.image()[view])

    return step


def _crop(
    transform: T.CenterCrop | T.RandomCrop, params: Any, sizes_hw: np.ndarray, before: np.ndarray, after: np.ndarray
) -> Step | None:
    starts = params.box_tlhw[:, :2] + after[:, :2]
    outside = (starts != before[:, :2]).any(axis=1) | (after[:, 2:] != before[:, 2:]).any(axis=1)
    if not outside.any():
        return None  # the window that was decoded, or resampled, is the crop

    def step(row: int, canvas: _Canvas) -> None:
        if not outside[row]:
            return
        image, inside, at = canvas.image(), [], []
        for axis in (0, 1):
            length = int(sizes_hw[row, axis])
            wanted = starts[row, axis] + np.arange(after[row, axis + 2])
            at.append(padded_places(wanted, length, transform.padding_mode) - before[row, axis])
            inside.append((wanted >= 0) & (wanted < length))
        result = image[at[0][:, None], at[1]]
        if transform.padding_mode == "constant":
            result[~(inside[0][:, None] & inside[1])] = transform.fill
        canvas.set(result)

    return step


def _resize(params: Any, before: np.ndarray, after: np.ndarray, interpolation: str, resampler: Resampler) -> Step:
    corners = (before[:, :2] - params.box_tlhw[:, :2]).tolist()
    boxes, sizes, windows = params.box_tlhw[:, 2:].tolist(), params.size_hw.tolist(), after.tolist()

    def step(row: int, canvas: _Canvas) -> None:
        box, size, window = boxes[row], sizes[row], windows[row]
        if window[:2] == [0, 0] and window[2:] == size != box and interpolation != "nearest":
            canvas.set(resampler.whole(canvas.planes(), (size[0], size[1]), interpolation))
            return
        result = resampler.window(
            canvas.image(), tuple(corners[row]), tuple(box), tuple(size), tuple(window), interpolation
        )
        canvas.set(result)

    return step


def _jitter(color: SingleColor, names: tuple[str, ...], params: Any, before: np.ndarray, after: np.ndarray) -> Step:
    order, factors = params.order.tolist(), params.factors.tolist()
    adjust = [color.adjust[name] for name in names]
    windows = None if np.array_equal(before, after) else after.tolist()

    def step(row: int, canvas: _Canvas) -> None:
        floats = canvas.floats()
        for column in order[row]:
            adjust[column](floats, factors[row][column])
        if windows is not None:
            top, left, height, width = windows[row]
            canvas.set(canvas.image()[top : top + height, left : left + width])

    return step
