"""Projective warps, as in Pillow's `Image.transform`, and elastic deformation, for one image on the CPU and for batches
on any device.

On the CPU, Pillow itself applies projective maps (224×224 RGB takes 0.1, 0.9 and 2.0 ms with nearest, bilinear and
bicubic; numpy takes several times as long). For batches, tensor operations do the same arithmetic. Results
are bit-identical if Pillow was built without fused multiply-adds, as it is for x86-64:

- The centre of each pixel of the result, (x + ½, y + ½), is mapped to a point of the image, computed in float64. If the
  point is outside the image, the pixel gets the fill. Filter taps outside the image use the border pixels. Filtered
  levels are truncated, not rounded.
- The nearest pixel is found in one of three ways: by adding up steps along each axis for a map that only scales and
  shifts; in 16.16 fixed point for other affine maps with coordinates below 2**15; and in float64, as described above,
  for all other maps.

Images that are not uint8 are converted to Pillow's floats, and rounded afterwards if they are uint16.

In an elastic deformation (`deform`), each pixel shows the input at a smooth random displacement. The noise is defined
in `gpuload.transforms.program.fields` and is the same on every device. It is smoothed by sums over taps in a fixed
order, so an image's field does not depend on its batch. torch's `grid_sample` samples the image, with borders as in
torchvision: pixels outside get the fill, and a filtered pixel next to the border is mixed with the fill.

No state is kept between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import grid_sample

from gpuload.stage.device import upload
from gpuload.stage.noise import philox_words
from gpuload.stage.ragged import rows_by_key
from gpuload.stage.reference.blur import mirrored_indices
from gpuload.stage.reference.resample import round_to_dtype
from gpuload.transforms.program.fields import gaussian, kernel_size
from gpuload.transforms.program.ops import Elastic
from gpuload.transforms.program.windows import nearest_methods, scaled_pixels

__all__ = ["deform", "warp_batch", "warp_image"]

FILTERS: Final = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def warp_image(
    image: np.ndarray,
    coefficients: Sequence[float],
    size_hw: tuple[int, int],
    interpolation: str,
    fill: float | Sequence[float],
) -> np.ndarray:
    """Warp an image by a map.

    Args:
        image: H×W×C.
        coefficients: the eight coefficients of `gpuload.transforms.program.ops.Warp`.
        size_hw: the size of the result.
        interpolation: the filter.
        fill: the level outside the image, for all channels or for each channel.

    Returns:
        An H'×W'×C array of the image's dtype, in new memory.
    """
    channels, is_uint8 = image.shape[2], image.dtype == np.uint8
    levels = np.broadcast_to(np.asarray(fill, image.dtype), channels)
    if channels == 3 and is_uint8:
        return _transform(image, coefficients, size_hw, interpolation, tuple(levels.tolist()))
    if interpolation != "nearest" or (channels == 1 and is_uint8):
        # Channels are warped one by one, because Pillow treats the last of two or four channels as alpha.
        pixels = image.astype(np.uint8 if is_uint8 else np.float32, copy=False)
        planes = [
            _transform(pixels[:, :, channel], coefficients, size_hw, interpolation, level)
            for channel, level in enumerate(levels.tolist())
        ]
        return round_to_dtype(np.stack(planes, axis=2), image.dtype)
    height, width = image.shape[:2]
    pixel_indices = np.arange(height * width, dtype=np.int32).reshape(height, width)
    indices = _transform(pixel_indices, coefficients, size_hw, interpolation, -1)
    result = image.reshape(height * width, channels)[indices]
    result[indices < 0] = levels
    return result


def _transform(
    image: np.ndarray,
    coefficients: Sequence[float],
    size_hw: tuple[int, int],
    interpolation: str,
    fill: float | tuple[float, ...],
) -> np.ndarray:
    is_affine = coefficients[6] == coefficients[7] == 0
    result = Image.fromarray(image).transform(
        (size_hw[1], size_hw[0]),
        Image.Transform.AFFINE if is_affine else Image.Transform.PERSPECTIVE,
        coefficients[:6] if is_affine else coefficients,
        FILTERS[interpolation],
        fillcolor=fill,
    )
    return np.array(result)  # a copy, because Pillow's memory must not be written to


def warp_batch(
    levels: torch.Tensor,
    coefficients: np.ndarray,
    size_hw: tuple[int, int],
    interpolation: str,
    fill: float | Sequence[float],
    *,
    corners: np.ndarray | None = None,
) -> torch.Tensor:
    """Warp images of the same size, each by its own map.

    Args:
        levels: N×C×H×W uint8; or float32, whose results are not rounded.
        coefficients: float64 (N, 8), on the host.
        size_hw: the size of the results, or of their windows.
        interpolation, fill: as for `warp_image`.
        corners: int64 (N, 2), the top and left of the windows in the results; None means (0, 0).

    Returns:
        An N×C×H'×W' tensor of the same dtype.
    """
    n, channels, height, width = levels.shape
    if corners is None:
        corners = np.zeros((n, 2), np.int64)
    flat = levels.reshape(n, channels, height * width)
    fill_dtype = np.uint8 if levels.dtype == torch.uint8 else np.float32
    fill_levels = upload(np.asarray(fill, fill_dtype).reshape(-1, 1), levels.device)
    if interpolation == "nearest":
        y, x = nearest_pixels(levels, coefficients, size_hw, corners)
        is_inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        values = _take_pixels(flat, torch.where(is_inside, y * width + x, 0))
    else:
        y, x = mapped_points(levels, coefficients, size_hw, corners)
        is_inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        sample = _sample_bilinear if interpolation == "bilinear" else _sample_bicubic
        # Points outside the image can be infinite or NaN, so they are replaced. A plain 0.5 is not copied from the
        # host.
        values = sample(flat, torch.where(is_inside, y, 0.5), torch.where(is_inside, x, 0.5), height, width)
    return torch.where(is_inside[:, None], values, fill_levels).view(n, channels, *size_hw)


def mapped_points(
    levels: torch.Tensor, coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the points to which pixel centres are mapped, y and x, float64 (N, H'·W')."""
    a, b, c, d, e, f, g, h = upload(np.ascontiguousarray(coefficients.T), levels.device)[:, :, None, None]
    centres = [upload(corners[:, axis, None] + (np.arange(size_hw[axis]) + 0.5), levels.device) for axis in (0, 1)]
    y, x = centres[0][:, :, None], centres[1][:, None, :]
    scale = g * x + h * y + 1
    return ((d * x + e * y + f) / scale).flatten(1), ((a * x + b * y + c) / scale).flatten(1)


def nearest_pixels(
    levels: torch.Tensor, coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest pixels, y and x, int64 (N, H'·W'). Coordinates outside the image select the fill."""
    is_scaling, is_fixed = nearest_methods(coefficients, corners + np.array(size_hw))
    groups = rows_by_key(np.where(is_scaling, 0, np.where(is_fixed, 1, 2)).tolist())
    if len(groups) == 1:
        return NEAREST[min(groups)](levels, coefficients, size_hw, corners)
    pixels = torch.empty(2, len(coefficients), size_hw[0] * size_hw[1], dtype=torch.int64, device=levels.device)
    for method, rows in groups.items():
        index = upload(rows, levels.device)
        pixels[0, index], pixels[1, index] = NEAREST[method](levels, coefficients[rows], size_hw, corners[rows])
    return pixels[0], pixels[1]


def _nearest_scaled(
    levels: torch.Tensor, coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    y, x = (upload(numbers, levels.device) for numbers in scaled_pixels(coefficients, size_hw, corners))
    return y[:, :, None].expand(-1, -1, size_hw[1]).flatten(1), x[:, None, :].expand(-1, size_hw[0], -1).flatten(1)


def _nearest_fixed_point(
    levels: torch.Tensor, coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b, c, d, e, f, _, _ = coefficients.T
    pixels = []
    for column_step, row_step, start in ((d, e, f), (a, b, c)):
        numbers = np.stack([start + column_step * 0.5 + row_step * 0.5, column_step, row_step])
        start, column_step, row_step = np.floor(numbers * 65536 + 0.5).astype(np.int64)
        start = start + corners[:, 1] * column_step + corners[:, 0] * row_step
        rows = upload(start[:, None] + np.arange(size_hw[0]) * row_step[:, None], levels.device)
        columns = upload(np.arange(size_hw[1]) * column_step[:, None], levels.device)
        pixels.append((rows[:, :, None] + columns[:, None, :]).bitwise_right_shift_(16).flatten(1))
    return pixels[0], pixels[1]


def _nearest_float(
    levels: torch.Tensor, coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    y, x = mapped_points(levels, coefficients, size_hw, corners)
    return tuple(torch.where(v >= 0, v, -1.0).clamp_(max=2.0**31).to(torch.int64) for v in (y, x))  # pyright: ignore[reportReturnType]


NEAREST: Final = (_nearest_scaled, _nearest_fixed_point, _nearest_float)


def _take_pixels(flat: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the pixels (N, C, P) with indices (N, P) of images (N, C, H·W)."""
    return flat.gather(2, indices[:, None, :].expand(-1, flat.shape[1], -1))


def _take_floats(flat: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return pixels as floats for filtering: as in Pillow's C code, integers become float64; floats are unchanged."""
    pixels = _take_pixels(flat, indices)
    return pixels if pixels.is_floating_point() else pixels.double()


def _taps(points: torch.Tensor, length: int, first: int, count: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the indices of `count` pixels around points along one axis, starting at `first` relative to the pixel
    before each point; and the distance of each point from the pixel before it, (N, 1, P)."""
    points = points - 0.5
    before = points.floor()
    pixel = before.to(torch.int64)
    return [(pixel + (first + tap)).clamp_(0, length - 1) for tap in range(count)], (points - before)[:, None]


def _sample_bilinear(flat: torch.Tensor, y: torch.Tensor, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    rows, y_fraction = _taps(y, height, 0, 2)
    columns, x_fraction = _taps(x, width, 0, 2)
    lines = [_interpolate([_take_floats(flat, row * width + column) for column in columns], x_fraction) for row in rows]
    return _interpolate(lines, y_fraction).to(flat.dtype)


def _interpolate(taps: list[torch.Tensor], fraction: torch.Tensor) -> torch.Tensor:
    first, second = taps
    return first + (second - first) * fraction


def _sample_bicubic(flat: torch.Tensor, y: torch.Tensor, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    rows, y_fraction = _taps(y, height, -1, 4)
    columns, x_fraction = _taps(x, width, -1, 4)
    lines = [
        _interpolate_cubic([_take_floats(flat, row * width + column) for column in columns], x_fraction) for row in rows
    ]
    numbers = _interpolate_cubic(lines, y_fraction)
    return (numbers.clamp_(0, 255) if flat.dtype == torch.uint8 else numbers).to(flat.dtype)


def _interpolate_cubic(taps: list[torch.Tensor], fraction: torch.Tensor) -> torch.Tensor:
    """Apply Keys' cubic with a = -1, adding in Pillow's order, which affects the result."""
    v1, v2, v3, v4 = taps
    square = 2 * (v1 - v2) + v3 - v4
    cube = v2 - v1 - v3 + v4
    return v2 + fraction * ((v3 - v1) + fraction * (square + fraction * cube))


def deform(levels: torch.Tensor, record: Elastic, rows: np.ndarray) -> torch.Tensor:
    """Deform N×C×H×W images of any dtype by displacement fields; `rows` has each image's index in the record's rows."""
    n, channels, height, width = levels.shape
    fields = _make_fields(upload(record.keys[rows].astype(np.int64), levels.device), record, height, width)
    y_centres, x_centres = (
        (2 * torch.arange(length, device=levels.device, dtype=torch.float32) + 1) / length - 1
        for length in (height, width)
    )
    x = x_centres + fields[:, 0] * (record.alpha[0] / width)
    y = y_centres[:, None] + fields[:, 1] * (record.alpha[1] / height)
    coverage = torch.ones((n, 1, height, width), device=levels.device)
    numbers = torch.cat([levels.to(torch.float32), coverage], dim=1)
    interpolation = str(record.filters)
    deformed = grid_sample(numbers, torch.stack([x, y], dim=3), interpolation, "zeros", align_corners=False)
    deformed, coverage = deformed[:, :channels], deformed[:, channels:]
    fill = upload(np.array(record.fill, np.float32).reshape(-1, 1, 1), levels.device)
    deformed = (
        torch.where(coverage < 0.5, fill, deformed)
        if interpolation == "nearest"
        else (deformed - fill) * coverage + fill
    )
    if levels.dtype.is_floating_point:
        return deformed.to(levels.dtype)
    return deformed.round_().clamp_(0, torch.iinfo(levels.dtype).max).to(levels.dtype)


def _make_fields(keys: torch.Tensor, record: Elastic, height: int, width: int) -> torch.Tensor:
    """Return smoothed noise for images with these keys, (N, 2): an N×2×H×W float32 tensor."""
    count = 2 * height * width
    words = philox_words(keys, -(-count // 4)).flatten(1)[:, :count]
    noise = ((words >> 8).to(torch.float32) * 2.0**-23 - (1 - 2.0**-24)).view(-1, 2, height, width)
    planes = []
    for plane, numbers in enumerate(noise.unbind(1)):
        if record.sigma[plane]:
            size = kernel_size(record.sigma[plane])
            for axis, length in ((2, width), (1, height)):
                numbers = _smooth_axis(numbers, gaussian(record.sigma[2 - axis], size), axis, length)
        planes.append(numbers)
    return torch.stack(planes, dim=1)


def _smooth_axis(numbers: torch.Tensor, weights: np.ndarray, axis: int, length: int) -> torch.Tensor:
    """Compute weighted sums along an axis, with mirrored borders."""
    reach = len(weights) // 2
    padded = numbers.index_select(axis, upload(mirrored_indices(length, reach), numbers.device))
    total = padded.narrow(axis, 0, length) * float(np.float32(weights[0]))
    for tap, weight in enumerate(weights[1:].astype(np.float32).tolist(), 1):
        total.add_(padded.narrow(axis, tap, length) * weight)  # a fused multiply-add would round differently
    return total
