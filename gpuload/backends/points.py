"""Operations that map each level by itself, on batches: solarize, posterize, equalize and others, as Pillow's.

Levels are float32 N×C×H×W, whole numbers in 0 … 255. What is not linear goes through tables of 256 entries, worked out
from counts of whole numbers, so that an image's result has the same bits in any batch. Runs on any device, in the
process of the stage.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from gpuload.backends.color import luma
from gpuload.backends.upload import upload

__all__ = [
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
    """How far the levels lie apart of which so many bits are kept."""
    return 1 << (8 - int(bits))


def invert(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Pillow's `ImageOps.invert`."""
    return levels.neg_().add_(255)


def solarize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Invert levels from a threshold on: Pillow's `ImageOps.solarize`."""
    threshold = _constant(np.ceil(values[:, 0]), levels)  # before it is rounded to float32: 34 + 1e-14 is not 34
    return torch.where(levels < threshold, levels, 255 - levels)


def solarize_add(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Raise levels below a threshold, to 255 at most: timm's, a table by Pillow's `Image.point`."""
    threshold, added = _constant(values[:, 0], levels), _constant(values[:, 1], levels)
    return torch.where(levels < threshold, (levels + added).clamp_(max=255), levels)


def posterize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Keep the upper bits: Pillow's `ImageOps.posterize`; of 0 bits nothing is left."""
    step = _constant(np.array([posterize_step(bits) for bits in values[:, 0].tolist()]), levels)
    return levels.div_(step).floor_().mul_(step)


def grayscale(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Luma in all channels: Pillow's `convert("L")`."""
    return luma(levels).expand_as(levels)


def permute(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Channels in another order. There is but one order of one channel."""
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
    n, channels = levels.shape[:2]
    places = levels.flatten(2).to(torch.int64)
    counts = torch.zeros(n, channels, LEVELS, dtype=torch.int64, device=levels.device)
    counts.scatter_add_(2, places, torch.ones_like(places))
    return _look_up(levels, equalize_table(counts))


def stretch_table(least: torch.Tensor, greatest: torch.Tensor) -> torch.Tensor:
    """What becomes of each level, float64 (…, 256), where these are the ends of the levels, float64 (…)."""
    ramp = torch.arange(LEVELS, dtype=torch.float64, device=least.device)
    span = greatest - least
    scale = torch.full_like(span, 255) / span.clamp(min=1)  # a number over a tensor is a product with its reciprocal
    offset = -least * scale
    # Cut off behind the decimal point, in the order of Pillow's operations: the numbers are float64 there too.
    product = ramp * scale[..., None]
    stretched = (product + offset[..., None]).trunc_().clamp_(0, 255)
    return torch.where((span > 0)[..., None], stretched, ramp)


def equalize_table(counts: torch.Tensor) -> torch.Tensor:
    """What becomes of each level, float64 (…, 256), where so many pixels have it, int64 (…, 256)."""
    ramp = torch.arange(LEVELS, device=counts.device)
    last = torch.where(counts > 0, ramp, 0).amax(dim=-1, keepdim=True)
    step = (counts.sum(dim=-1, keepdim=True) - counts.gather(-1, last)) // 255
    before = counts.cumsum(dim=-1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table, ramp).to(torch.float64)


def _look_up(levels: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Each channel through its table, N×C×256."""
    places = levels.flatten(2).to(torch.int64)
    return tables.to(levels.dtype).gather(2, places).view_as(levels)


def _constant(numbers: np.ndarray, levels: torch.Tensor) -> torch.Tensor:
    """One number for each image."""
    return upload(numbers.astype(np.float32)[:, None, None, None], levels.device)
