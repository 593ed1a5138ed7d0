"""How Kornia moves pixels: flips, crops, pads and projective maps of batches, with parameters of ours.

Levels are uint8 N×C×H×W. Flips and crops only move them; a map samples them as floats and cuts the result, as Pillow
does. Runs on any device, in the process of the stage.

A map is given to `remap` as places: `warp_affine` and `warp_perspective` take a matrix and invert it, and work in
floats where Pillow finds the nearest pixel in 16.16 fixed point, so that 7 pixels of 10,000 would be others; and what
they fill with is blended with the image along its border, up to 124 levels from Pillow, which cuts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from kornia.geometry.transform import crop_by_indices, hflip, remap, vflip
from torch.nn.functional import pad

from gpuload.stage.reference.batched import dense
from gpuload.stage.reference.gather import Source, crop
from gpuload.stage.reference.warp import mapped_places, nearest_places
from gpuload.stage.upload import upload
from gpuload.transforms.program.ops import Box

__all__ = ["cropped", "flipped", "sampled", "warped"]

FLIPS: Final = (vflip, hflip)
# How torch calls the ways to pad that it has, which Kornia's crops pad with.
MODES: Final = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}
GUARD: Final = 1e-9  # a sum of products in float64 may lie below the whole number that it is meant to be


def flipped(levels: torch.Tensor, which: np.ndarray, axis: int) -> torch.Tensor:
    """Images of which some, bool (N,), are mirrored: 0 upside down, 1 left to right."""
    if which.all():
        return FLIPS[axis](levels)
    result = levels.clone()
    index = upload(np.flatnonzero(which), levels.device)
    result[index] = FLIPS[axis](levels[index])
    return result


def cropped(source: Source, record: Box, corners: np.ndarray, size_hw: tuple[int, int]) -> torch.Tensor:
    """Boxes of one size that may reach beyond the image, N×C×H×W; `corners` as for the reference's `gather.crop`.

    Images that come in one size are padded and cropped together. What torch has no padding for is gathered as the
    reference does it: symmetric, and reflections that begin anew within the padding.
    """
    frames_hw, mode, fill = record.sizes_hw, record.padding_mode or "constant", record.fill
    given, size = np.stack([source.heights, source.widths], axis=1), np.array(size_hw)
    starts = corners[:, :2] - corners[:, 2:]
    before, behind = np.maximum(-starts, 0), np.maximum(starts + size - given, 0)
    # Padding goes on where the image ends, which must be where the part of it ends that there is.
    ends = ((before == 0) | (corners[:, 2:] == 0)) & ((behind == 0) | (corners[:, 2:] + given == frames_hw))
    once = mode != "reflect" or (np.maximum(before, behind).max(axis=0) < given.min(axis=0)).all()
    if (before.any() or behind.any()) and not (mode in MODES and once and ends.all()):
        return crop(source, corners, size_hw, frames_hw, mode, fill)
    sizes, which = np.unique(given, axis=0, return_inverse=True)
    results = None
    for number in range(len(sizes)):
        rows = np.flatnonzero(which.ravel() == number)
        some = source if len(sizes) == 1 else source.take(rows)
        found = _padded_crop(dense(some), starts[rows], size_hw, mode, fill)
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
    """Boxes at these places, top and left, of images of one size."""
    lengths, size = np.array(levels.shape[2:]), np.array(size_hw)
    before = np.maximum(-starts, 0).max(axis=0)
    behind = np.maximum(starts + size - lengths, 0).max(axis=0)
    margins = [int(margin) for margin in (before[1], behind[1], before[0], behind[0])]
    if any(margins):
        levels = _padded(levels, margins, mode, fill)
    top, left = (starts + before).T
    bottom, right = top + size_hw[0] - 1, left + size_hw[1] - 1
    boxes_xy = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    # The boxes stay with the host, where Kornia cuts by them.
    return crop_by_indices(levels, torch.from_numpy(boxes_xy), size=size_hw).contiguous()


def _padded(levels: torch.Tensor, margins: list[int], mode: str, fill: Sequence[float]) -> torch.Tensor:
    if mode != "constant":
        # torch pads no bytes in these ways.
        return pad(levels.to(torch.float32), margins, mode=MODES[mode]).to(torch.uint8)
    if len(fill) == 1:
        return pad(levels, margins, value=fill[0])
    channels = [pad(levels[:, [channel]], margins, value=value) for channel, value in enumerate(fill)]
    return torch.cat(channels, dim=1)


def sampled(images: torch.Tensor, y: torch.Tensor, x: torch.Tensor, interpolation: str) -> torch.Tensor:
    """Images N×C×H×W of floats at places (N, H', W'), in pixels from the centre of the first; those outside are on the
    border. Gradients flow through it."""
    return remap(images, x, y, mode=interpolation, padding_mode="border", align_corners=True)


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
        y, x = nearest_places(levels, coefficients, size_hw, corners)
        numbers, dtype = levels.to(torch.float32), torch.float32
        shift = 0.0
    else:
        y, x = mapped_places(levels, coefficients, size_hw, corners)
        # In float32 a place is off by some 3e-5 of a pixel, which cuts one number in 100 to the level below.
        numbers, dtype = levels.to(torch.float64), torch.float64
        shift = 0.5
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    # What lies outside may be infinite, or no number.
    y, x = (torch.where(inside, place - shift, 0).to(dtype).view(n, *size_hw) for place in (y, x))
    found = torch.floor(sampled(numbers, y, x, interpolation) + GUARD).to(torch.uint8)
    outside = upload(np.asarray(fill, np.uint8).reshape(-1, 1, 1), levels.device)
    return torch.where(inside.view(n, 1, *size_hw), found, outside)
