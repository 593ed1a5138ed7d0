"""Pillow's operations on single pixels: solarize, posterize, equalize and others.

Batches are float32 N×C×H×W, whole numbers in 0 … 255, on any device. What is not linear goes through tables of 256
entries, computed from counts of whole numbers, so an image's result has the same bits in any batch.

`POINTS` are the same for one image on the CPU, tuned, with the same results. They work on the uint8 levels H×W×C, a
quarter of the memory of floats. Comparisons and masks of bytes take many bytes an instruction (224×224×3: 10 µs each);
numpy's look-up turns bytes into 64-bit indices first, so tables go through `bytes.translate` (20 µs a plane, a third of
numpy's time).

Runs in the process of the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.color import luma

__all__ = [
    "POINTS",
    "autocontrast",
    "equalize",
    "equalize_table",
    "grayscale",
    "invert",
    "permute",
    "posterize",
    "posterize_step",
    "solarize",
    "solarize_add",
    "stretch_table",
]

LEVELS: Final = 256


def posterize_step(bits: float) -> int:
    """The distance of neighbouring levels if this many bits are kept."""
    return 1 << (8 - int(bits))


def invert(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Pillow's `ImageOps.invert`."""
    return levels.neg_().add_(255)


def solarize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Invert levels from a threshold on: Pillow's `ImageOps.solarize`."""
    threshold = _constant(np.ceil(values[:, 0]), levels)  # `ceil` in float64: 34 + 1e-14 is not 34
    return torch.where(levels < threshold, levels, 255 - levels)


def solarize_add(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Raise levels below a threshold, to 255 at most: timm's, by Pillow's `Image.point`."""
    threshold, added = _constant(values[:, 0], levels), _constant(values[:, 1], levels)
    return torch.where(levels < threshold, (levels + added).clamp_(max=255), levels)


def posterize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Keep the upper bits: Pillow's `ImageOps.posterize`; with 0 bits all levels are 0."""
    step = _constant(np.array([posterize_step(bits) for bits in values[:, 0].tolist()]), levels)
    return levels.div_(step).floor_().mul_(step)


def grayscale(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Luma in all channels: Pillow's `convert("L")`."""
    return luma(levels).expand_as(levels)


def permute(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Channels in another order; a single channel stays."""
    if levels.shape[1] == 1:
        return levels
    channels = upload(values[:, :3].astype(np.int64), levels.device)
    return levels.gather(1, channels[:, :, None, None].expand_as(levels))


def autocontrast(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Stretch each channel to 0 … 255: Pillow's `ImageOps.autocontrast`."""
    least, greatest = torch.aminmax(levels.flatten(2), dim=2)
    return _look_up(levels, stretch_table(least.to(torch.float64), greatest.to(torch.float64)))


def equalize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Spread the levels of each channel evenly: Pillow's `ImageOps.equalize`."""
    indices = levels.flatten(2).to(torch.int64)
    counts = indices.new_zeros(*levels.shape[:2], LEVELS)
    counts.scatter_add_(2, indices, torch.ones_like(indices))
    return _look_up(levels, equalize_table(counts))


def stretch_table(least: torch.Tensor, greatest: torch.Tensor) -> torch.Tensor:
    """The new level of each level, float64 (…, 256), from the least and the greatest, float64 (…)."""
    ramp = torch.arange(LEVELS, dtype=torch.float64, device=least.device)
    span = greatest - least
    scale = torch.full_like(span, 255) / span.clamp(min=1)  # torch would multiply a plain number by a reciprocal
    offset = -least * scale
    # Truncated, in the order of Pillow's operations, which are in float64 too.
    product = ramp * scale[..., None]
    stretched = (product + offset[..., None]).trunc_().clamp_(0, 255)
    return torch.where((span > 0)[..., None], stretched, ramp)


def equalize_table(counts: torch.Tensor) -> torch.Tensor:
    """The new level of each level, float64 (…, 256), from the numbers of pixels with it, int64 (…, 256)."""
    ramp = torch.arange(LEVELS, device=counts.device)
    last = torch.where(counts > 0, ramp, 0).amax(dim=-1, keepdim=True)
    step = (counts.sum(dim=-1, keepdim=True) - counts.gather(-1, last)) // 255
    before = counts.cumsum(dim=-1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table, ramp).to(torch.float64)


def _look_up(levels: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Each channel through its table, N×C×256."""
    return tables.to(levels.dtype).gather(2, levels.flatten(2).to(torch.int64)).view_as(levels)


def _constant(numbers: np.ndarray, levels: torch.Tensor) -> torch.Tensor:
    """One number for each image."""
    return upload(numbers.astype(np.float32)[:, None, None, None], levels.device)


def _invert(canvas: Canvas, values: Sequence[float]) -> None:
    canvas.set(np.bitwise_not(canvas.image()))


def _posterize(canvas: Canvas, values: Sequence[float]) -> None:
    canvas.set(np.bitwise_and(canvas.image(), np.uint8(LEVELS - posterize_step(values[0]) & 255)))


def _solarize(canvas: Canvas, values: Sequence[float]) -> None:
    image = canvas.image()
    least = int(np.ceil(values[0]))  # the first level that is inverted
    if least > 255:
        return
    above = np.greater_equal(image, max(least, 0)).view(np.uint8)
    canvas.set(np.bitwise_xor(image, np.negative(above, out=above)))  # 255 where it was 1


def _autocontrast(canvas: Canvas, values: Sequence[float]) -> None:
    planes = _planes(canvas)
    flat = planes.reshape(len(planes), -1)
    ends = np.array([flat.min(axis=1), flat.max(axis=1)], np.float64)
    canvas.set(_look_up_planes(planes, stretch_table(*torch.from_numpy(ends))))


def _equalize(canvas: Canvas, values: Sequence[float]) -> None:
    planes = _planes(canvas)
    counts = [torch.bincount(torch.from_numpy(plane.reshape(-1)), minlength=LEVELS) for plane in planes]
    canvas.set(_look_up_planes(planes, equalize_table(torch.stack(counts))))


def _permute(canvas: Canvas, values: Sequence[float]) -> None:
    levels = canvas.floats()
    if len(levels.array) > 1:
        levels.tensor.copy_(levels.tensor[[int(value) for value in values[:3]]])


def _planes(canvas: Canvas) -> np.ndarray:
    """A copy of the levels, C×H×W."""
    return canvas.image().transpose(2, 0, 1).copy()


def _look_up_planes(planes: np.ndarray, tables: torch.Tensor) -> np.ndarray:
    """Each plane through its table of C × 256, in place; returned as H×W×C."""
    for plane, table in zip(planes, tables.to(torch.uint8).numpy(), strict=True):
        plane[:] = np.frombuffer(plane.tobytes().translate(table.tobytes()), np.uint8).reshape(plane.shape)
    return planes.transpose(1, 2, 0)


POINTS: Final[dict[str, Callable[[Canvas, Sequence[float]], None]]] = {
    "invert": _invert,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "permute": _permute,
}
