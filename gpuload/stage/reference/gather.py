"""The reference backend's resampling and cropping of batches, with tensor operations.

A `PixelSource` describes where the pixels of a batch are in one flat tensor: pixel (y, x) of channel c of image i is at
``base[i] + y · row_step[i] + x · column_step[i] + c · channel_step``. Ragged batches and dense tensors are thus handled
alike, and crops and flips only change offsets and steps on the host. Pixels move only when a result is gathered; loops
run over the taps of a filter, never over images. For uint8 images, the arithmetic is bit-identical to Pillow's fixed
point (along the rows, rounded to uint8, then along the columns). Other images become float32 when they are gathered,
and the arithmetic is that of `gpuload.stage.reference.resample`.

This module works on any device, and keeps no state between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.resample import normalize_weights
from gpuload.transforms.program.windows import PLAIN, PRECISION_BITS, filter_weights, nearest_indices, padded_indices

__all__ = ["PixelSource", "crop", "resize"]

PER_IMAGE: Final = ("base", "row_step", "column_step", "heights", "widths")


@dataclass(frozen=True, eq=False)
class PixelSource:
    """The locations of the pixels of n images. All arrays are int64 (n,), on the host."""

    pixels: torch.Tensor
    base: np.ndarray
    row_step: np.ndarray
    column_step: np.ndarray
    channel_step: int
    heights: np.ndarray
    widths: np.ndarray
    channels: int

    @classmethod
    def from_ragged(cls, images: RaggedImages, rows: np.ndarray, windows_tlhw: np.ndarray) -> PixelSource:
        """Return windows of some images of a batch."""
        assert images.steps is None
        heights, widths, channels = images.shapes[rows].T
        source = cls(
            images.pixels,
            images.offsets[rows],
            widths * channels,
            channels.copy(),
            1,
            heights,
            widths,
            int(channels[0]),
        )
        return source.cut(windows_tlhw - np.pad(images.regions_tlhw[rows, :2], ((0, 0), (0, 2))))

    @classmethod
    def from_dense(cls, levels: torch.Tensor) -> PixelSource:
        """Return the images of a contiguous N×C×H×W tensor."""
        n, channels, height, width = levels.shape
        ones = np.ones(n, np.int64)
        base = np.arange(n) * (channels * height * width)
        return cls(levels.view(-1), base, width * ones, ones, height * width, height * ones, width * ones, channels)

    def cut(self, tlhw: np.ndarray) -> PixelSource:
        """Cut a box out of each image; the image must contain the box."""
        base = self.base + tlhw[:, 0] * self.row_step + tlhw[:, 1] * self.column_step
        return replace(self, base=base, heights=tlhw[:, 2], widths=tlhw[:, 3])

    @classmethod
    def merge(cls, parts: Sequence[tuple[np.ndarray, PixelSource]]) -> PixelSource:
        """Merge the images of the parts. Each part consists of the indices of its images in the result, and the images.
        Pixels are copied unless all parts are in one tensor."""
        order, first = np.concatenate([rows for rows, _ in parts]), parts[0][1]
        sources = [source for _, source in parts]
        if all(source.pixels is first.pixels and source.channel_step == first.channel_step for source in sources):
            arrays = {name: np.concatenate([getattr(source, name) for source in sources]) for name in PER_IMAGE}
            return replace(first, **arrays).take(np.argsort(order))
        levels = [source.to_dense() for source in sources]
        result = levels[0].new_empty((len(order), *levels[0].shape[1:]))
        for (rows, _), part in zip(parts, levels, strict=True):
            result[upload(rows, result.device)] = part
        return cls.from_dense(result)

    def take(self, rows: np.ndarray) -> PixelSource:
        """Select images by their indices."""
        return replace(self, **{name: getattr(self, name)[rows] for name in PER_IMAGE})

    def flip(self, flipped: np.ndarray, *, horizontally: bool) -> PixelSource:
        """Mirror the images selected by `flipped`, bool (n,)."""
        step, length = (self.column_step, self.widths) if horizontally else (self.row_step, self.heights)
        base = np.where(flipped, self.base + (length - 1) * step, self.base)
        step = np.where(flipped, -step, step)
        return replace(self, base=base, **{"column_step" if horizontally else "row_step": step})

    def transpose(self, transposed: np.ndarray) -> PixelSource:
        """Swap rows and columns of the images selected by `transposed`, bool (n,)."""
        swapped_fields = {}
        for name, other_name in (("row_step", "column_step"), ("heights", "widths")):
            swapped_fields[name] = np.where(transposed, getattr(self, other_name), getattr(self, name))
            swapped_fields[other_name] = np.where(transposed, getattr(self, name), getattr(self, other_name))
        return replace(self, **swapped_fields)

    @cached_property
    def _steps(self) -> torch.Tensor:
        """`base`, `row_step` and `column_step` on the device, int64 (3, n), uploaded once for all taps."""
        return upload(np.stack([self.base, self.row_step, self.column_step]), self.pixels.device)

    def gather(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the pixels at rows (n, H) and columns (n, W), N×C×H×W."""
        device = self.pixels.device
        base, row_step, column_step = self._steps[:, :, None]
        column_offsets = base + columns * column_step
        row_offsets = rows * row_step
        channel_offsets = torch.arange(self.channels, device=device) * self.channel_step
        indices = (
            column_offsets[:, None, None, :] + row_offsets[:, None, :, None] + channel_offsets[None, :, None, None]
        )
        if self.pixels.dtype != torch.uint16:
            return self.pixels[indices]
        return self.pixels.view(torch.int16)[indices].to(torch.int32).bitwise_and_(0xFFFF).to(torch.float32)

    def to_dense(self) -> torch.Tensor:
        """Return all pixels of images of the same size, N×C×H×W: a view if they are contiguous, else a copy. The result
        must not be modified."""
        count, height, width = len(self.base), int(self.heights[0]), int(self.widths[0])
        length, first = self.channels * height * width, int(self.base[0])
        is_contiguous = (
            (self.channel_step == height * width or self.channels == 1)
            and (self.row_step == width).all()
            and (self.column_step == 1).all()
            and (self.heights == height).all()
            and (self.widths == width).all()
            and (self.base == first + np.arange(count) * length).all()
        )
        if not is_contiguous or self.pixels.dtype == torch.uint16:
            return self.gather(_indices(self.heights, self.pixels), _indices(self.widths, self.pixels))
        return self.pixels[first : first + count * length].view(count, self.channels, height, width)


def crop(
    source: PixelSource,
    corners: np.ndarray,
    size_hw: tuple[int, int],
    frames_hw: np.ndarray,
    mode: str,
    fill: float | Sequence[float],
) -> torch.Tensor:
    """Crop boxes, which can reach beyond the images; return N×C×H×W.

    Args:
        source: windows of the images.
        corners: int64 (n, 4), the top and left of the box, then of the source, in the complete images.
        size_hw: the size of the boxes.
        frames_hw: int64 (n, 2), the sizes of the complete images.
        mode: the padding mode.
        fill: the level for ``"constant"``, for all channels or for each channel.
    """
    pixels = source.pixels
    axis_indices, is_inside_axis = [], []
    for axis in (0, 1):
        indices = corners[:, axis, None] + np.arange(size_hw[axis])
        padded = padded_indices(indices, frames_hw[:, axis, None], mode) - corners[:, axis + 2, None]
        axis_indices.append(upload(padded, pixels.device))
        is_inside_axis.append(upload((indices >= 0) & (indices < frames_hw[:, axis, None]), pixels.device))
    result = source.gather(axis_indices[0], axis_indices[1])
    if mode == "constant":
        is_inside = is_inside_axis[0][:, None, :, None] & is_inside_axis[1][:, None, None, :]
        fill_dtype = np.uint8 if result.dtype == torch.uint8 else np.float32
        levels = upload(np.array(fill, fill_dtype).reshape(-1, 1, 1), pixels.device)
        result = torch.where(is_inside, result, levels)
    return result


def resize(
    source: PixelSource,
    corners: np.ndarray,
    boxes_hw: np.ndarray,
    sizes_hw: np.ndarray,
    windows_tlhw: np.ndarray,
    interpolation: str,
) -> torch.Tensor:
    """Return windows of resized boxes, N×C×H×W; all windows must have the same size.

    Args:
        source: parts of the boxes.
        corners: int64 (n, 2), the top and left of these parts in the boxes.
        boxes_hw, sizes_hw: int64 (n, 2), the sizes of the boxes before and after resizing.
        windows_tlhw: int64 (n, 4), the requested parts of the results.
        interpolation: the filter.

    Returns:
        Levels; unrounded float32 for images that are not uint8.
    """
    device, uses_floats = source.pixels.device, source.pixels.dtype != torch.uint8
    height, width = windows_tlhw[0, 2:].tolist()
    if interpolation == "nearest":
        rows, columns = (
            [
                nearest_indices(box[axis], size[axis], window[axis], window[axis + 2]) - corner[axis]
                for box, size, window, corner in zip(boxes_hw, sizes_hw, windows_tlhw, corners, strict=True)
            ]
            for axis in (0, 1)
        )
        return source.gather(upload(np.stack(rows), device), upload(np.stack(columns), device))
    axes = []
    for axis, count in ((0, height), (1, width)):
        firsts, weights = filter_weights(
            boxes_hw[:, axis], sizes_hw[:, axis], windows_tlhw[:, axis], count, interpolation
        )
        weights = normalize_weights(weights) if uses_floats else weights
        axes.append((upload(firsts - corners[:, axis, None], device), upload(weights, device)))
    (first_row, row_weights), (first_column, column_weights) = axes
    last_row, last_column = (upload(lengths - 1, device)[:, None] for lengths in (source.heights, source.widths))
    rows = torch.minimum(_indices(source.heights, source.pixels), last_row)
    total: Any = None
    # Indices are clamped because taps with zero weight can be outside the windows.
    for tap in range(column_weights.shape[2]):
        levels = source.gather(rows, torch.minimum(first_column + tap, last_column).clamp_(min=0))
        total = _accumulate(total, levels, column_weights[:, None, None, :, tap])
    rounds = uses_floats or interpolation not in PLAIN.values()
    intermediate = _round_fixed_point(total) if rounds else total.bitwise_right_shift_(PRECISION_BITS)
    total = None
    for tap in range(row_weights.shape[2]):
        tap_rows = torch.minimum(first_row + tap, last_row).clamp_(min=0)
        tap_rows = tap_rows[:, None, :, None].expand(-1, source.channels, -1, width)
        total = _accumulate(total, intermediate.gather(2, tap_rows), row_weights[:, None, :, None, tap])
    return _round_fixed_point(total)


def _indices(lengths: np.ndarray, pixels: torch.Tensor) -> torch.Tensor:
    """Return 0, 1, 2 … up to the greatest length - 1, repeated for each image: (n, length)."""
    return torch.arange(int(lengths.max()), device=pixels.device).expand(len(lengths), -1)


def _accumulate(total: torch.Tensor | None, levels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if weights.is_floating_point():
        total = levels.new_zeros(()) if total is None else total
        return torch.where(weights != 0, levels * weights + total, total)
    product = levels.to(torch.int32).mul_(weights)
    return product.add_(1 << (PRECISION_BITS - 1)) if total is None else total.add_(product)


def _round_fixed_point(total: torch.Tensor) -> torch.Tensor:
    if total.is_floating_point():
        return total
    return total.bitwise_right_shift_(PRECISION_BITS).clamp_(0, 255).to(torch.uint8)
