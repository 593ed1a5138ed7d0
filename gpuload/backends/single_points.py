"""Operations that map each level by itself, on one image on the CPU, tuned: the same results as those of batches.

They work on the uint8 levels H×W×C, a quarter of the memory of floats. Comparisons and masks of bytes run at many bytes
an instruction (224×224×3: 10 µs each); numpy's look-up of bytes turns them into 64-bit places first, so tables go
through `bytes.translate` (20 µs a plane, a third of it). Used by the process of the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.backends.canvas import Canvas
from gpuload.backends.points import LEVELS, equalize_table, posterize_step, stretch_table

__all__ = ["POINTS"]


def _invert(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    canvas.set(np.bitwise_not(canvas.image()))


def _posterize(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    canvas.set(np.bitwise_and(canvas.image(), np.uint8(LEVELS - posterize_step(values[0]) & 255)))


def _solarize(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    image = canvas.image()
    least = int(np.ceil(values[0]))  # the first level that is inverted
    if least > 255:
        return
    above = np.greater_equal(image, max(least, 0)).view(np.uint8)
    canvas.set(np.bitwise_xor(image, np.negative(above, out=above)))  # 255 where it was 1


def _autocontrast(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    planes = _planes(canvas)
    flat = planes.reshape(len(planes), -1)
    ends = np.array([flat.min(axis=1), flat.max(axis=1)], np.float64)
    canvas.set(_look_up(planes, stretch_table(*torch.from_numpy(ends))))


def _equalize(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    planes = _planes(canvas)
    counts = [torch.bincount(torch.from_numpy(plane.reshape(-1)), minlength=LEVELS) for plane in planes]
    canvas.set(_look_up(planes, equalize_table(torch.stack(counts))))


def _permute(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    levels = canvas.floats()
    if len(levels.array) > 1:
        levels.tensor.copy_(levels.tensor[[int(value) for value in values[:3]]])


def _planes(canvas: Canvas) -> np.ndarray:
    """The levels as C×H×W, in memory of their own."""
    planes = np.empty(canvas.image().transpose(2, 0, 1).shape, np.uint8)
    np.copyto(planes, canvas.image().transpose(2, 0, 1))
    return planes


def _look_up(planes: np.ndarray, tables: torch.Tensor) -> np.ndarray:
    """Each plane through its table of C × 256, in place; seen as H×W×C."""
    for plane, table in zip(planes, tables.to(torch.uint8).numpy(), strict=True):
        plane[:] = np.frombuffer(plane.tobytes().translate(table.tobytes()), np.uint8).reshape(plane.shape)
    return planes.transpose(1, 2, 0)


POINTS: Final[dict[str, Callable[[Canvas, Sequence[float], Any], None]]] = {
    "invert": _invert,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "permute": _permute,
}
