"""The Gaussian blur of one image on the CPU, tuned: the same bits as `neighbourhood.blur`, whose sums are exact.

Each pass is a product with a band of weights, cut into tiles of `TILE` columns, so that matrix multiplication does what
is not zero and little more (224×224×3 with 23×23 weights, one core: 0.2 ms for rows in float32, 0.45 ms for columns in
float64; adding up shifted images takes 3 ms). Used by the process of the stage, one thread.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from gpuload.backends.color_single import Floats
from gpuload.backends.neighbourhood import WEIGHT_UNIT, blur_weights, mirrored

__all__ = ["blur_image"]

TILE: Final = 32


def blur_image(levels: Floats, kernel_width: int, kernel_height: int, sigma_x: float, sigma_y: float) -> None:
    """Blur levels in place."""
    source = levels.tensor
    channels, height, width = source.shape
    across, down = blur_weights(kernel_width, sigma_x), blur_weights(kernel_height, sigma_y)
    if len(across) > 1:
        padded = _padded(source, 2, len(across) // 2, torch.float32).view(channels * height, -1)
        band = _band(across, torch.float32)
        rows = source.view(channels * height, width)
        for start in range(0, width, TILE):
            size = min(TILE, width - start)
            reach = size + len(across) - 1
            torch.mm(padded[:, start : start + reach], band[:reach, :size], out=rows[:, start : start + size])
    if len(down) > 1:
        padded = _padded(source, 1, len(down) // 2, torch.float64)
        band = _band(down, torch.float64).T.contiguous()
        room = torch.empty(min(TILE, height), width, dtype=torch.float64, device="cpu")
        for channel in range(channels):
            for start in range(0, height, TILE):
                size = min(TILE, height - start)
                reach = size + len(down) - 1
                torch.mm(band[:size, :reach], padded[channel, start : start + reach], out=room[:size])
                levels.tensor[channel, start : start + size].copy_(room[:size].round_())
    else:
        levels.tensor.round_()


def _padded(levels: torch.Tensor, axis: int, radius: int, dtype: torch.dtype) -> torch.Tensor:
    """The image, mirrored at both ends of an axis."""
    shape = list(levels.shape)
    length = shape[axis]
    shape[axis] = length + 2 * radius
    padded = torch.empty(shape, dtype=dtype, device="cpu")
    places = torch.from_numpy(mirrored(length, radius))
    padded.narrow(axis, radius, length).copy_(levels)
    padded.narrow(axis, 0, radius).copy_(levels.index_select(axis, places[:radius]))
    padded.narrow(axis, radius + length, radius).copy_(levels.index_select(axis, places[radius + length :]))
    return padded


def _band(weights: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """What a tile's columns take of the tile and its surroundings: (TILE + n - 1) × TILE."""
    band = torch.zeros(TILE + len(weights) - 1, TILE, dtype=dtype, device="cpu")
    diagonals = band.as_strided((TILE, len(weights)), (TILE + 1, TILE))
    diagonals.copy_(torch.from_numpy(weights / WEIGHT_UNIT))
    return band
