"""Flips, crops, pads and projective maps of batches by Kornia, with our parameters.

Levels are uint8 N×C×H×W. Flips and crops only move them; a map samples them as floats and truncates the result, as
Pillow does. Runs on any device, in the process of the stage.

A map is given to `remap` as points. `warp_affine` and `warp_perspective` would take a matrix and invert it, and find
the nearest pixel in floats, where Pillow uses 16.16 fixed point: 7 pixels of 10,000 would differ. And they blend the
fill with the image along its border, up to 124 levels from Pillow, which does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from kornia.geometry.transform import crop_by_indices, hflip, remap, vflip
from torch.nn.functional import pad

from gpuload.stage.device import upload
from gpuload.stage.reference.gather import Source, crop
from gpuload.stage.reference.warp import mapped_points, nearest_pixels
from gpuload.transforms.program.ops import Box

__all__ = ["cropped", "flipped", "sampled", "warped"]

FLIPS: Final = (vflip, hflip)
# torch's names of the padding modes that it has.
MODES: Final = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}
GUARD: Final = 1e-9  # a sum of products in float64 may be below the whole number that it should be


def flipped(levels: torch.Tensor, which: np.ndarray, axis: int) -> torch.Tensor:
    """Images, some of them, bool (N,), mirrored: `axis` 0 upside down, 1 left to right."""
    if which.all():
        return FLIPS[axis](levels)
    result = levels.clone()
    index = upload(np.flatnonzero(which), levels.device)
    result[index] = FLIPS[axis](levels[index])
    return result


def cropped(source: Source, record: Box, corners: np.ndarray, size_hw: tuple[int, int]) -> torch.Tensor:
    """Boxes of one size that may reach beyond the image, N×C×H×W; `corners` as for the reference's `gather.crop`.

    Images of one size are padded and cropped together. What torch cannot pad is gathered as in the reference: symmetric
    padding, and reflections wider than the image.
    """
    frames_hw, mode, fill = record.sizes_hw, record.padding_mode or "constant", record.fill
    given, size = np.stack([source.heights, source.widths], axis=1), np.array(size_hw)
    starts = corners[:, :2] - corners[:, 2:]
    before, after = np.maximum(-starts, 0), np.maximum(starts + size - given, 0)
    # A side that is padded must be the image's own, not that of a part of it.
    ends = ((before == 0) | (corners[:, 2:] == 0)) & ((after == 0) | (corners[:, 2:] + given == frames_hw))
    once = mode != "reflect" or (np.maximum(before, after).max(axis=0) < given.min(axis=0)).all()
    if (before.any() or after.any()) and not (mode in MODES and once and ends.all()):
        return crop(source, corners, size_hw, frames_hw, mode, fill)
    sizes, which = np.unique(given, axis=0, return_inverse=True)
    results = None
    for number in range(len(sizes)):
        rows = np.flatnonzero(which.ravel() == number)
        some = source if len(sizes) == 1 else source.take(rows)
        found = _padded_crop(some.dense(), starts[rows], size_hw, mode, fill)
        if len(sizes) == 1:
            return found
        if results is None:
            results = found.new_empty(len(given), *found.shape[1:])
        results[upload(rows, found.device)] = found
    assert results is not None
    return results


def _padded_crop(
    levels: torch.Tensor, starts: np.ndarray, size_hw: tuple[int, int], mode: str, fill: Sequence[float]
) -> torch.Tensor:
    """Boxes from `starts` on, top and left, of images of one size."""
    before = np.maximum(-starts, 0).max(axis=0)
    after = np.maximum(starts + np.array(size_hw) - np.array(levels.shape[2:]), 0).max(axis=0)
    margins = [int(margin) for margin in (before[1], after[1], before[0], after[0])]
    if any(margins):
        levels = _padded(levels, margins, mode, fill)
    top, left = (starts + before).T
    bottom, right = top + size_hw[0] - 1, left + size_hw[1] - 1
    boxes_xy = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    # The boxes stay on the host, since Kornia reads them.
    return crop_by_indices(levels, torch.from_numpy(boxes_xy), size=size_hw).contiguous()


def _padded(levels: torch.Tensor, margins: list[int], mode: str, fill: Sequence[float]) -> torch.Tensor:
    if mode != "constant":
        # In these modes torch cannot pad bytes.
        return pad(levels.to(torch.float32), margins, mode=MODES[mode]).to(torch.uint8)
    if len(fill) == 1:
        return pad(levels, margins, value=fill[0])
    channels = [pad(levels[:, channel : channel + 1], margins, value=value) for channel, value in enumerate(fill)]
    return torch.cat(channels, dim=1)


def sampled(images: torch.Tensor, y: torch.Tensor, x: torch.Tensor, interpolation: str) -> torch.Tensor:
    """Floats of images N×C×H×W at points (N, H', W'), in pixels from the centre of the first; points outside are moved
    to the border. Gradients flow through it."""
    # As Kornia scales points to -1 … 1, which copies two numbers to the device, and waits for it.
    y, x = (points * (2 / max(1, length - 1)) - 1 for points, length in zip((y, x), images.shape[2:], strict=True))
    return remap(
        images, x, y, mode=interpolation, padding_mode="border", align_corners=True, normalized_coordinates=True
    )


def warped(
    levels: torch.Tensor,
    coefficients: np.ndarray,
    size_hw: tuple[int, int],
    interpolation: str,
    fill: Sequence[float],
    corners: np.ndarray | None = None,
) -> torch.Tensor:
    """Images through maps; arguments as for the reference's `warp_batch`, ``"nearest"`` or ``"bilinear"``."""
    n, _, height, width = levels.shape
    if corners is None:
        corners = np.zeros((n, 2), np.int64)
    if interpolation == "nearest":
        y, x = nearest_pixels(levels, coefficients, size_hw, corners)
        dtype, shift = torch.float32, 0.0
    else:
        y, x = mapped_points(levels, coefficients, size_hw, corners)
        # In float32 points are off by some 3e-5 of a pixel, which puts one number in 100 to the level below.
        dtype, shift = torch.float64, 0.5
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    # Points outside may be infinite or NaN.
    y, x = (torch.where(inside, points - shift, 0).to(dtype).view(n, *size_hw) for points in (y, x))
    found = torch.floor(sampled(levels.to(dtype), y, x, interpolation) + GUARD).to(torch.uint8)
    outside = upload(np.asarray(fill, np.uint8).reshape(-1, 1, 1), levels.device)
    return torch.where(inside.view(n, 1, *size_hw), found, outside)
