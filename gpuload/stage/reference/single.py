"""The reference on the CPU: a chain applied to one image after the other.

An image is taken through all its transforms while it is in the cache, and its result is written once, into the memory
of the batch: 224×224 RGB is 150 KB as levels and 600 KB as float32, a whole batch 38 MB.

Runs in the process of the stage; keeps scratch memory from image to image, so a runner must not be shared between
threads. The result for an image does not depend on its batch.
"""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.resample import contiguous
from gpuload.stage.reference.steps import Step, Steps
from gpuload.transforms.program.draws import Program

__all__ = ["SingleRunner"]

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class SingleRunner:
    """Applies programs to batches, image by image.

    Args:
        finish: the end of the chain.
    """

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._scale, self._bias = (constant.numpy() for constant in finish.constants(torch.device("cpu")))
        self._steps = Steps()
        self._canvas = Canvas()

    def levels(
        self, images: RaggedImages, program: Program, windows_tlhw: tuple[np.ndarray, ...], outputs: Outputs
    ) -> None:
        """Apply the records that work on levels, and finish; arguments as for `gpuload.stage.backend.Levels`."""
        canvas = self._canvas
        canvas.pixels, canvas.flat = images.pixels, images.pixels.numpy()
        ways = self._steps.of(program, windows_tlhw, canvas.flat.dtype)
        write = self._writer(outputs)
        windows = windows_tlhw[0].copy()
        windows[:, :2] -= images.regions_tlhw[:, :2]
        try:
            for row, (offset, shape, window) in enumerate(
                zip(images.offsets.tolist(), images.shapes.tolist(), windows.tolist(), strict=True)
            ):
                canvas.begin(offset, shape, *window)
                for index, step in ways[row]:
                    step(index, canvas)
                write(row, canvas)
        finally:
            canvas.pixels, canvas.flat = _NOTHING, _NOTHING.numpy()  # let go of the ring

    def _writer(self, outputs: Outputs) -> Step:
        """A function that finishes the image on a canvas and writes it to the batch."""
        scale, bias, affine = self._scale, self._bias, not self._finish.is_identity
        if outputs[0].dtype in (torch.float16, torch.bfloat16):

            def write(row: int, canvas: Canvas) -> None:
                floats = canvas.floats()
                if affine:
                    np.add(np.multiply(floats.array, scale, out=floats.array), bias, out=floats.array)
                outputs[row].copy_(floats.tensor)

            return write
        if isinstance(outputs, torch.Tensor) and not outputs.is_contiguous():
            return self._writer_channels_last(outputs.numpy().transpose(0, 2, 3, 1))
        arrays = outputs.numpy() if isinstance(outputs, torch.Tensor) else [output.numpy() for output in outputs]

        def write_array(row: int, canvas: Canvas) -> None:
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
        scale, bias = (np.tile(np.broadcast_to(some.ravel(), channels), width) for some in (self._scale, self._bias))

        def write(row: int, canvas: Canvas) -> None:
            image = canvas.floats().array.transpose(1, 2, 0) if canvas.is_float else contiguous(canvas.image())
            np.copyto(arrays[row], image, casting="unsafe")
            if not self._finish.is_identity:
                np.add(np.multiply(rows[row], scale, out=rows[row]), bias, out=rows[row])

        return write
