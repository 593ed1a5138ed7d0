"""Operations that look at the pixels around each, on batches: blur and sharpness.

Levels are float32 N×C×H×W, whole numbers in 0 … 255. All sums are exact in the floats that hold them, so they may be
made in any order, and bits depend neither on the batch nor on the device: weights of a blur are whole multiples of
2**-16, its first pass needs the 24 bits of float32, the second 40 of float64's 53.

Runs on any device, in the process of the stage.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch

from gpuload.backends.upload import upload
from gpuload.transforms.resampling import padded_places

__all__ = ["WEIGHT_UNIT", "blur", "blur_weights", "mirrored", "sharpness", "smooth"]

WEIGHT_UNIT: Final = 1 << 16


@lru_cache(maxsize=512)
def blur_weights(width: int, sigma: float) -> np.ndarray:
    """The weights of a Gaussian kernel, in units of 1 / `WEIGHT_UNIT`: float64 (n,), n odd, at most `width`; those at
    the ends that would be 0 are left out. They sum up to `WEIGHT_UNIT`."""
    places = np.arange(width) - width // 2
    density = np.exp(-0.5 * (places / sigma) ** 2)
    weights = np.rint(density / density.sum() * WEIGHT_UNIT)
    weights[width // 2] += WEIGHT_UNIT - weights.sum()
    found = np.flatnonzero(weights)
    weights = weights[found[0] : found[-1] + 1]
    weights.flags.writeable = False
    return weights


@lru_cache(maxsize=64)
def mirrored(length: int, radius: int) -> np.ndarray:
    """Which pixels stand at -radius … length + radius - 1, mirrored at the last pixels as often as needed."""
    return padded_places(np.arange(-radius, length + radius), length, "reflect")


def blur(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """A Gaussian blur, rows and columns, with mirrored borders: `gaussian_blur2d` of Kornia, which is torchvision's."""
    rows = _blurred(levels, 3, [blur_weights(int(row[0]), row[2]) for row in values.tolist()])
    both = _blurred(rows.to(torch.float64), 2, [blur_weights(int(row[1]), row[3]) for row in values.tolist()])
    return both.round_().to(levels.dtype)


def _blurred(levels: torch.Tensor, axis: int, kernels: list[np.ndarray]) -> torch.Tensor:
    """Along one axis, each image with a kernel of its own."""
    radius = max(len(kernel) for kernel in kernels) // 2
    weights = np.stack([np.pad(kernel, radius - len(kernel) // 2) for kernel in kernels]) / WEIGHT_UNIT
    taps = upload(weights, levels.device).to(levels.dtype)[:, :, None, None, None]
    length = levels.shape[axis]
    padded = levels.index_select(axis, upload(mirrored(length, radius), levels.device))
    total = padded.narrow(axis, radius, length) * taps[:, radius]
    for far in range(1, radius + 1):
        pair = padded.narrow(axis, radius - far, length) + padded.narrow(axis, radius + far, length)
        total += pair.mul_(taps[:, radius + far])
    return total


def sharpness(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Blend with a smoothed image: Pillow's `ImageEnhance.Sharpness`, with its arithmetic in float32."""
    smoothed = smooth(levels)
    factor = upload(values[:, :1].astype(np.float32), levels.device)[:, :, None, None]
    return levels.sub_(smoothed).mul_(factor).add_(smoothed).clamp_(0, 255).floor_()


def smooth(levels: torch.Tensor) -> torch.Tensor:
    """Pillow's `ImageFilter.SMOOTH`: the 3×3 pixels around each, the middle one five times; borders stay."""
    height, width = levels.shape[2:]
    if height < 3 or width < 3:
        return levels.clone()
    rows = levels[..., :-2] + levels[..., 1:-1] + levels[..., 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    total += 4 * levels[:, :, 1:-1, 1:-1]
    # A thirteenth of a whole number is never near a half, so that float32 rounds it as Pillow does.
    smoothed = levels.clone()
    smoothed[:, :, 1:-1, 1:-1] = total.add_(6.5).div_(13).floor_()
    return smoothed
