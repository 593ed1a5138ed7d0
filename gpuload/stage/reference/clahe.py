"""CLAHE: contrast limited adaptive histogram equalization, for batches on any device.

As in Albumentations 2.0.8, it is OpenCV's `createCLAHE` (modules/imgproc/src/clahe.cpp), applied to L of an image in
CIELAB with 8 bits per channel, or to the levels of a grey image. Counts are integers, and float32 is used only for
products and sums, so an image's result depends neither on its batch nor on the device. (On CUDA, torch multiplies by
the reciprocal of a divisor, which rounds unless the divisor is a power of two.) The conversion to CIELAB is OpenCV's,
in fixed point: its numbers are integers below 2**24, which float32 holds exactly. The conversion back is not, and can
differ from OpenCV's by a level.

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
# OpenCV's fixed point: linear values in units of 1 / LINEAR, factors in units of 1 / FACTOR, roots of 1 / ROOT.
LINEAR, FACTOR, ROOT = 255 * 8, 1 << 12, 1 << 15
# From the cube roots x, y, z to L · 2.55 = 2.55 (116 y - 16), a = 500 (x - y), b = 200 (y - z), and back.
TO_LAB: Final = np.array([[0, 296, 0], [500, -500, 0], [0, 200, -200]])
FROM_LAB: Final = np.array([[1 / 2.55 / 116, 1 / 500, 0], [1 / 2.55 / 116, 0, 0], [1 / 2.55 / 116, 0, -1 / 200]])
ENCODED: Final = 1 << 14  # the length of the table that rounds linear values to levels; OpenCV's has 2**12 entries


def clahe(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Equalize the lightness of N×C×H×W levels; the columns of `values` are the tiles along x and y, and the limit."""
    if levels.shape[1] == 1:
        return _equalize_tiles(levels[:, 0], values)[:, None]
    lab = _to_lab(levels)
    lab[:, 0] = _equalize_tiles(lab[:, 0], values)
    return _to_rgb(lab)


def _decode(encoded: np.ndarray) -> np.ndarray:
    """Return the linear values of sRGB values in 0 … 1."""
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def _multiply(matrix: np.ndarray, images: torch.Tensor) -> torch.Tensor:
    """Multiply the colour of each pixel by a 3×3 matrix; unlike in `torch.matmul`, the order of sums is known."""
    red, green, blue = images.unbind(1)
    return torch.stack([red * row[0] + green * row[1] + blue * row[2] for row in matrix.tolist()], 1)


def _to_lab(levels: torch.Tensor) -> torch.Tensor:
    """Convert RGB levels to the levels of L · 2.55, a + 128 and b + 128, in OpenCV's fixed point."""
    units = np.arange(1.5 * LINEAR) / LINEAR
    roots = np.rint(np.where(units > DARK, np.cbrt(units), units * SLOPE + OFFSET) * ROOT)
    decoded = np.rint(_decode(np.arange(LEVELS) / 255) * LINEAR)
    offsets = np.array([-((16 * 255 * ROOT + 50) // 100), 128 * ROOT, 128 * ROOT]) + ROOT / 2
    tables = upload_arrays([array.astype(np.float32) for array in (roots, decoded, offsets)], levels.device)
    linear = tables[1].take(levels.long())
    xyz = _multiply(np.rint(TO_XYZ * FACTOR), linear).add_(FACTOR / 2).div_(FACTOR)
    lab = _multiply(TO_LAB, tables[0].take(xyz.long()))
    return lab.add_(tables[2][:, None, None]).div_(ROOT).floor_()


def _to_rgb(lab: torch.Tensor) -> torch.Tensor:
    """Convert the levels of CIELAB back to RGB levels, float32 N×3×H×W."""
    bounds = _decode((np.arange(LEVELS - 1) + 0.5) / 255)
    encoded = np.searchsorted(bounds, np.arange(ENCODED) / (ENCODED - 1)).astype(np.float32)
    offsets = np.array([OFFSET - 128 / 500, OFFSET, OFFSET + 128 / 200], np.float32)
    offsets, encoded = upload_arrays([offsets, encoded], lab.device)
    roots = _multiply(FROM_LAB, lab).add_(offsets[:, None, None])
    xyz = torch.where(roots > DARK ** (1 / 3), roots * roots * roots, (roots - OFFSET) * (1 / SLOPE))
    linear = _multiply(np.linalg.inv(TO_XYZ) * (ENCODED - 1), xyz)
    return encoded.take(linear.round_().clamp_(0, ENCODED - 1).long())


def _equalize_tiles(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Map N×H×W levels by the tables of the nearest tiles, interpolated between the tiles' centres."""
    sides, grid_yx = np.array(levels.shape[1:]), values[0, 1::-1].astype(np.int64)
    # If a side is not a multiple of its number of tiles, OpenCV extends both sides to the next greater multiple.
    padded = sides + (grid_yx - sides % grid_yx) * (sides % grid_yx).any()
    axes = [padded_indices(np.arange(padded[axis]), sides[axis], "reflect") for axis in range(2)]
    for length, tile, tiles in zip(sides, padded // grid_yx, grid_yx, strict=True):
        position = np.arange(length, dtype=np.float32) * np.float32(1 / tile) - np.float32(0.5)
        first = np.floor(position).astype(np.int64)
        axes += [np.maximum(first, 0), np.minimum(first + 1, tiles - 1), position - first.astype(np.float32)]
    rows, columns, above, below, down, left, right, across = upload_arrays(axes, levels.device)
    count, (tiles_y, tiles_x), (tile_h, tile_w) = len(levels), grid_yx.tolist(), (padded // grid_yx).tolist()
    levels = levels.long()
    tiles = levels.index_select(1, rows).index_select(2, columns).view(count, tiles_y, tile_h, tiles_x, tile_w)
    tiles = tiles.transpose(2, 3).flatten(3)
    counts = tiles.new_zeros(count, tiles_y, tiles_x, LEVELS).scatter_add_(3, tiles, torch.ones_like(tiles))
    tables = _tables(counts, values[:, 2], tile_h * tile_w)
    # The number of each pixel's entry in its image's first table.
    entries = levels + torch.arange(0, tables.numel(), tables[0].numel(), device=levels.device)[:, None, None]

    def look_up(tile_ys: torch.Tensor, tile_xs: torch.Tensor) -> torch.Tensor:
        return tables.take(entries + (tile_ys[:, None] * tiles_x + tile_xs) * LEVELS)

    upper, lower = (look_up(ys, left) * (1 - across) + look_up(ys, right) * across for ys in (above, below))
    down = down[:, None]
    return (upper * (1 - down) + lower * down).round_()


def _tables(counts: torch.Tensor, limits: np.ndarray, area: int) -> torch.Tensor:
    """Return the new level for each level of each tile, float32, from the counts of levels, int64 N×Y×X×256."""
    most = np.maximum((limits * area / LEVELS).astype(np.int64), 1)
    clipped = counts.minimum(upload(most, counts.device)[:, None, None, None])
    excess = (counts - clipped).sum(-1, keepdim=True)
    residue = excess % LEVELS
    step = (LEVELS // residue.clamp(min=1)).clamp(min=1)
    ramp = torch.arange(LEVELS, device=counts.device)
    extra = (ramp % step == 0) & (ramp // step < residue)
    sums = (clipped + excess // LEVELS + extra).cumsum(-1)
    return (sums.to(torch.float32) * float(np.float32(255) / np.float32(area))).round_().clamp_(0, 255)
