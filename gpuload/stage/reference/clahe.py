"""CLAHE: contrast limited adaptive histogram equalization, for batches on any device.

As in Albumentations 2.0.8, it is OpenCV's `createCLAHE` (modules/imgproc/src/clahe.cpp), applied to L of an image in
CIELAB with 8 bits per channel, or to the levels of a grey image. Counts are integers, and float32 is used only for
products and sums, so an image's result depends neither on its batch nor on the device. The conversion to CIELAB is
OpenCV's, in fixed point. The conversion back is not, and can differ from OpenCV's by a level.

This module runs in the stage's process, in one thread, and keeps no state.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload, upload_arrays
from gpuload.transforms.program.windows import padded_indices

__all__ = ["clahe"]

LEVELS: Final = 256
# The matrix from linear sRGB to XYZ, with rows divided by the white point D65, as in OpenCV.
TO_XYZ: Final = np.divide(
    [[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]],
    [[0.950456], [1.0], [1.088754]],
)
DARK, SLOPE, OFFSET = 0.008856, 7.787, 16 / 116  # below DARK, CIELAB's cube root is a line
# OpenCV's fixed point: linear values in units of 1 / LINEAR, factors of 2**-12, roots of 2**-15.
LINEAR: Final = 255 * 8
FACTOR_BITS, ROOT_BITS = 12, 15
ENCODED: Final = 1 << 14  # the length of the table that rounds linear values to levels; OpenCV's has 2**12 entries


def clahe(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Equalize the lightness of N×C×H×W levels; the columns of `values` are the tiles along x and y, and the limit."""
    if levels.shape[1] == 1:
        return _equalize_tiles(levels[:, 0], values)[:, None]
    lightness, green_red, blue_yellow = _to_lab(levels)
    return _to_rgb(_equalize_tiles(lightness, values), green_red, blue_yellow)


def _decode(encoded: np.ndarray) -> np.ndarray:
    """Return the linear values of sRGB values in 0 … 1."""
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def _to_lab(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert RGB levels to the levels of L · 2.55, a + 128 and b + 128, each int64 N×H×W, in OpenCV's fixed point."""
    units = np.arange(1.5 * LINEAR) / LINEAR
    roots = np.rint(np.where(units > DARK, np.cbrt(units), units * SLOPE + OFFSET) * (1 << ROOT_BITS)).astype(np.int64)
    decoded = np.rint(_decode(np.arange(LEVELS) / 255) * LINEAR).astype(np.int64)
    roots, decoded = upload_arrays([roots, decoded], levels.device)
    red, green, blue = decoded.take(levels.to(torch.int64)).unbind(1)

    def root(row: int) -> torch.Tensor:
        factors = np.rint(TO_XYZ[row] * (1 << FACTOR_BITS)).astype(np.int64).tolist()
        return roots.take(_descale(red * factors[0] + green * factors[1] + blue * factors[2], FACTOR_BITS))

    x, y, z = map(root, range(3))
    middle = 128 << ROOT_BITS
    lightness = _descale(y * 296 - (16 * 255 * (1 << ROOT_BITS) + 50) // 100, ROOT_BITS)
    return lightness, _descale((x - y) * 500 + middle, ROOT_BITS), _descale((y - z) * 200 + middle, ROOT_BITS)


def _descale(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    return (numbers + (1 << bits - 1)) >> bits


def _to_rgb(lightness: torch.Tensor, green_red: torch.Tensor, blue_yellow: torch.Tensor) -> torch.Tensor:
    """Convert the levels of CIELAB back to RGB levels, float32 N×3×H×W."""
    bounds = _decode((np.arange(LEVELS - 1) + 0.5) / 255)
    encoded = np.searchsorted(bounds, np.arange(ENCODED) / (ENCODED - 1)).astype(np.float32)
    y = (lightness / 2.55 + 16) / 116
    roots = torch.stack([y + (green_red - 128) / 500, y, y - (blue_yellow - 128) / 200], 1)
    xyz = torch.where(roots > DARK ** (1 / 3), roots * roots * roots, (roots - OFFSET) / SLOPE)
    x, y, z = xyz.unbind(1)
    rows = (np.linalg.inv(TO_XYZ) * (ENCODED - 1)).tolist()
    linear = torch.stack([x * row[0] + y * row[1] + z * row[2] for row in rows], 1)
    return upload(encoded, lightness.device).take(linear.round_().clamp_(0, ENCODED - 1).to(torch.int64))


def _equalize_tiles(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Map N×H×W levels by the tables of the nearest tiles, interpolated between the tiles' centres."""
    count, height, width = levels.shape
    grid_yx = values[0, 1::-1].astype(np.int64)
    sides = np.array([height, width])
    # If a side is not a multiple of its number of tiles, OpenCV extends both sides to the next greater multiple.
    padded = sides + (grid_yx - sides % grid_yx) * (sides % grid_yx).any()
    tile_h, tile_w = (padded // grid_yx).tolist()
    axes, weights = [], []
    for length, total, tile, tiles in zip(
        sides.tolist(), padded.tolist(), (tile_h, tile_w), grid_yx.tolist(), strict=True
    ):
        indices = padded_indices(np.arange(total), length, "reflect")
        position = np.arange(length, dtype=np.float32) * np.float32(1 / tile) - np.float32(0.5)
        first = np.floor(position).astype(np.int64)
        axes += [indices, np.arange(total) // tile, np.clip(first, 0, None), np.minimum(first + 1, tiles - 1)]
        weights.append(position - first.astype(np.float32))
    rows, tile_rows, above, below, columns, tile_columns, left, right = upload_arrays(axes, levels.device)
    down, across = (weight[None] for weight in upload_arrays(weights, levels.device))
    # The number of each pixel's entry in its image's first table.
    entries = (torch.arange(count, device=levels.device) * int(grid_yx.prod() * LEVELS))[:, None, None] + levels.long()
    extended = entries.index_select(1, rows).index_select(2, columns)
    places = (tile_rows[:, None] * int(grid_yx[1]) + tile_columns) * LEVELS
    counts = places.new_zeros(count * int(grid_yx.prod()) * LEVELS)
    counts.scatter_add_(0, (extended + places).flatten(), torch.ones_like(extended).flatten())
    tables = _tables(counts.view(count, -1, LEVELS), values[:, 2], tile_h * tile_w)

    def look_up(tile_ys: torch.Tensor, tile_xs: torch.Tensor) -> torch.Tensor:
        return tables.take(entries + (tile_ys[:, None] * int(grid_yx[1]) + tile_xs) * LEVELS)

    down = down[:, :, None]
    upper, lower = (look_up(ys, left) * (1 - across) + look_up(ys, right) * across for ys in (above, below))
    return (upper * (1 - down) + lower * down).round_()


def _tables(counts: torch.Tensor, limits: np.ndarray, area: int) -> torch.Tensor:
    """Return the new level for each level of each tile, float32, from the counts of levels, int64 (N, tiles, 256)."""
    most = np.maximum((limits * area / LEVELS).astype(np.int64), 1)
    clipped = counts.minimum(upload(most, counts.device)[:, None, None])
    excess = (counts - clipped).sum(-1, keepdim=True)
    residue = excess % LEVELS
    step = (LEVELS // residue.clamp(min=1)).clamp(min=1)
    ramp = torch.arange(LEVELS, device=counts.device)
    extra = (ramp % step == 0) & (ramp // step < residue)
    sums = (clipped + excess // LEVELS + extra).cumsum(-1)
    return (sums.to(torch.float32) * float(np.float32(255) / np.float32(area))).round_().clamp_(0, 255)
