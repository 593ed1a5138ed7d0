"""The resampling filters and padding modes, shared by all backends and the decode plan.

The filters are defined as in Pillow (libImaging/Resample.c). The centre of output pixel i of n, computed from a box of
length m, is at (i + ½) · s with s = m / n. The filter is stretched by max(s, 1) and reaches `SUPPORT` times this factor
on both sides. A resize cuts the filter off at the borders of the *image*, a resized crop at the borders of the *box*.
*Plain* filters are torch's filters without antialiasing (`torch.nn.functional.interpolate`): they are never stretched,
and the border pixels of the box are repeated outside it. All functions are pure.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpuload.datasets.arrays import namespace

__all__ = [
    "FILTERS", "PLAIN", "PRECISION_BITS", "SMOOTHING", "SUPPORT", "clip_to_windows", "filter_names", "filter_weights",
    "full_windows", "nearest_indices", "nearest_methods", "padded_indices", "padded_windows", "scaled_pixels",
    "source_windows", "transpose_boxes",
]  # fmt: skip

# The code of a filter is its index here. "lanczos" and all filters after it are used only for resizing.
FILTERS: Final = ("nearest", "bilinear", "bicubic", "lanczos", "plain bilinear", "plain bicubic")
SUPPORT: Final[dict[str, float]] = dict(zip(FILTERS, (0.5, 1.0, 2.0, 3.0, 1.0, 2.0), strict=True))
PLAIN: Final = {"bilinear": "plain bilinear", "bicubic": "plain bicubic"}
_SUPPORTS: Final = np.array([*SUPPORT.values()])
_IS_PLAIN: Final = np.array([name in PLAIN.values() for name in FILTERS])
SMOOTHING: Final = ("bilinear", "bicubic", "lanczos")  # filters that antialias when an image becomes smaller
FIXED_LIMIT: Final = 32768.0  # fixed point is not used for nearest pixels of maps with coordinates beyond this limit
PRECISION_BITS: Final = 22  # fractional bits of fixed-point weights: 32 minus 8 for a pixel value and 2 for overflow


def full_windows(sizes_hw: np.ndarray) -> np.ndarray:
    """Return windows, int64 (B, 4), that cover entire images."""
    windows = np.zeros((len(sizes_hw), 4), np.int64)
    windows[:, 2:] = sizes_hw
    return windows


def transpose_boxes(boxes_tlhw: np.ndarray, transposed: np.ndarray) -> np.ndarray:
    """Return boxes, int64 (B, …, 4), with rows and columns swapped for the images where `transposed`, bool (B,), is
    True."""
    if not transposed.any():
        return boxes_tlhw
    transposed = transposed.reshape(-1, *[1] * (boxes_tlhw.ndim - 1))
    return np.where(transposed, boxes_tlhw[..., [1, 0, 3, 2]], boxes_tlhw)


def source_windows(
    windows_tlhw: np.ndarray, outputs_hw: np.ndarray, inputs_hw: np.ndarray, filters: np.ndarray
) -> np.ndarray:
    """Return, for each image, the input window that a window of the resized image depends on, including the filter's
    support.

    Args:
        windows_tlhw: int64 (B, 4), windows of the resized images.
        outputs_hw: int64 (B, 2), the sizes of the resized images.
        inputs_hw: int64 (B, 2), the sizes of the images before the resize.
        filters: int64 (B,), codes of `FILTERS`.

    Returns:
        int64 (B, 4), within the images; at most one pixel larger than necessary on each side.
    """
    scale = inputs_hw / outputs_hw
    stretch = np.where(_IS_PLAIN[filters][:, None], 1, np.maximum(scale, 1))
    reach = np.where(scale == 1, 0.5, _SUPPORTS[filters][:, None] * stretch) + 0.5
    first, last = windows_tlhw[:, :2], windows_tlhw[:, :2] + windows_tlhw[:, 2:] - 1
    start = np.clip(np.floor((first + 0.5) * scale - reach).astype(np.int64), 0, inputs_hw - 1)
    end = np.clip(np.ceil((last + 0.5) * scale + reach).astype(np.int64), start + 1, inputs_hw)
    return np.concatenate([start, end - start], axis=1)


def nearest_indices(length: int, output: int, start: int, count: int) -> np.ndarray:
    """Return, along one axis, the indices of the input pixels that are copied to `count` output pixels, starting at
    `start`.

    Steps are added up as in Pillow (Geometry.c, `ImagingScaleAffine`): if an output pixel's centre falls on the border
    between two input pixels, the rounding of the sum decides which one is chosen.
    """
    step = length / output
    centres = np.full(start + count, step)
    centres[0] = 0.5 * step
    return np.minimum(np.add.accumulate(centres)[start:].astype(np.int64), length - 1)


def filter_weights(
    lengths: np.ndarray, outputs: np.ndarray, starts: np.ndarray, count: int, interpolation: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return filter weights for uint8 images in Pillow's fixed point, along one axis of each of n images.

    Args:
        lengths: int64 (n,), the lengths of the inputs. Filters are cut off at both ends; plain filters repeat the
            border pixels there.
        outputs: int64 (n,), the lengths of the complete outputs.
        starts: int64 (n,), the index of the first requested output pixel.
        count: the number of requested output pixels.
        interpolation: a name in `FILTERS` except ``"nearest"``.

    Returns:
        (firsts, weights): the index of each output pixel's first input pixel, int64 (n, count), and the weights of this
        and the following input pixels, int32 (n, count, taps), whose sum is about 2**22.
    """
    scale = (lengths / outputs)[:, None]
    centres = (starts[:, None] + np.arange(count) + 0.5) * scale
    if interpolation in PLAIN.values():
        return _plain_weights(centres, lengths, interpolation)
    stretch = np.maximum(scale, 1)
    reach = SUPPORT[interpolation] * stretch
    firsts = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    ends = np.minimum((centres + reach + 0.5).astype(np.int64), lengths[:, None])
    taps = np.arange(int((ends - firsts).max()))
    distance = np.abs((taps + (firsts - centres + 0.5)[:, :, None]) / stretch[:, :, None])
    weights = np.where(taps < (ends - firsts)[:, :, None], _evaluate_filter(distance, interpolation), 0.0)
    weights /= weights.sum(axis=2, keepdims=True)
    return firsts, _to_fixed_point(weights)


def _plain_weights(centres: np.ndarray, lengths: np.ndarray, interpolation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the first taps and the weights of a plain filter. The weights of taps outside the image are added to the
    weight of the border pixel."""
    reach = int(SUPPORT[interpolation])
    taps = np.floor(centres - 0.5).astype(np.int64)[:, :, None] + np.arange(1 - reach, 1 + reach)
    weights = _evaluate_filter(np.abs(taps + 0.5 - centres[:, :, None]), interpolation)
    clipped_taps = np.clip(taps, 0, (lengths - 1)[:, None, None])
    firsts = clipped_taps[:, :, 0]
    merged = np.zeros_like(weights)
    for tap in range(2 * reach):
        offsets = (clipped_taps[:, :, tap] - firsts)[:, :, None]
        np.put_along_axis(merged, offsets, np.take_along_axis(merged, offsets, 2) + weights[:, :, tap, None], 2)
    return firsts, _to_fixed_point(merged)


def _to_fixed_point(weights: np.ndarray) -> np.ndarray:
    return np.trunc(weights * 2.0**PRECISION_BITS + np.copysign(0.5, weights)).astype(np.int32)


def _evaluate_filter(distance: np.ndarray, interpolation: str) -> np.ndarray:
    if interpolation in ("bilinear", "plain bilinear"):
        return np.maximum(1 - distance, 0)
    if interpolation == "lanczos":
        return np.where(distance < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    a = -0.75 if interpolation == "plain bicubic" else -0.5  # Keys' cubic, as in torch and in Pillow, respectively
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def filter_names(interpolation: str, *, antialias: bool = True) -> tuple[str, ...]:
    """Return the names of the filters that the arguments select; ``"random"`` selects two filters, as in timm."""
    names = ["bilinear", "bicubic"] if interpolation == "random" else [interpolation]
    return tuple(names if antialias else [PLAIN.get(name, name) for name in names])


def padded_windows(boxes_tlhw: np.ndarray, windows_tlhw: np.ndarray, sizes_hw: np.ndarray, mode: str) -> np.ndarray:
    """Return, for each image, the input window that a window of a padded box depends on.

    Args:
        boxes_tlhw: int64 (B, 4), the boxes, in image coordinates; boxes can extend beyond the images.
        windows_tlhw: int64 (B, 4), windows of the boxes.
        sizes_hw: int64 (B, 2), the sizes of the images.
        mode: the padding mode.

    Returns:
        int64 (B, 4), within the images, at least one pixel each.
    """
    first = boxes_tlhw[:, :2] + windows_tlhw[:, :2]
    last = first + windows_tlhw[:, 2:]
    start = np.clip(first, 0, sizes_hw - 1)
    end = np.clip(last, start + 1, sizes_hw)
    if mode in ("reflect", "symmetric"):
        # Mirrored padding can show any part of the image.
        is_outside = (first < 0) | (last > sizes_hw)
        start, end = np.where(is_outside, 0, start), np.where(is_outside, sizes_hw, end)
    return np.concatenate([start, end - start], axis=1)


def padded_indices(indices: Any, length: Any, mode: str) -> Any:
    """Map indices along one axis, an array or a tensor, which can be outside 0 … length - 1, to the indices of the
    pixels that padding repeats at these positions. With ``"constant"``, where padding has a fill instead, clamp the
    indices."""
    xp = namespace(indices)
    if mode == "reflect":
        period = xp.clip(2 * (length - 1), 1, None)
        indices = indices % period
        indices = xp.minimum(indices, period - indices)
    elif mode == "symmetric":
        indices = indices % (2 * length)
        indices = xp.minimum(indices, 2 * length - 1 - indices)
    return xp.minimum(xp.clip(indices, 0, None), length - 1)


def clip_to_windows(boxes_tlhw: np.ndarray, windows_tlhw: np.ndarray) -> np.ndarray:
    """Return boxes, int64 (B, n, 4), relative to windows of the images and clipped to these windows. A box outside its
    window gets height or width 0."""
    start = np.maximum(boxes_tlhw[:, :, :2] - windows_tlhw[:, None, :2], 0)
    end = boxes_tlhw[:, :, :2] + boxes_tlhw[:, :, 2:] - windows_tlhw[:, None, :2]
    end = np.minimum(end, windows_tlhw[:, None, 2:])
    return np.concatenate([start, np.maximum(end - start, 0)], axis=2)


def nearest_methods(coefficients: np.ndarray, ends_hw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two bool arrays (N,): for which maps nearest pixels are found by adding up steps, and for which maps in
    fixed point. All other maps use float64.

    Args:
        coefficients: float64 (N, 8), the maps.
        ends_hw: int64 (N, 2), the bottom and right borders of the results.
    """
    _, b, _, d, _, _, g, h = coefficients.T
    is_affine = (g == 0) & (h == 0)
    is_scaling = is_affine & (b == 0) & (d == 0)
    maps = coefficients[:, :6].reshape(-1, 2, 3, 1)
    corners_hw = np.zeros((len(maps), 2, 1, 2))  # the first and the last corner along each axis
    corners_hw[:, :, 0, 1] = ends_hw
    across, down = maps[:, :, 0] * corners_hw[:, 1], maps[:, :, 1] * corners_hw[:, 0]
    mapped = across[:, :, None] + down[..., None] + maps[:, :, 2, None]  # all four corners
    return is_scaling, is_affine & ~is_scaling & (abs(mapped) < FIXED_LIMIT).all(axis=(1, 2, 3))


def scaled_pixels(
    coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest pixels for maps that only scale and shift: row indices, int64 (N, H'), and column indices,
    int64 (N, W'). An index before the image's start is -1; an index after its end can have any value beyond the end."""
    a, _, c, _, e, f, _, _ = coefficients.T
    pixels = []
    for step, first, corner, count in ((e, f, corners[:, 0], size_hw[0]), (a, c, corners[:, 1], size_hw[1])):
        # Sums must start at the result's first pixel even for a window, because rounding accumulates along the way.
        steps = np.repeat(step[:, None], int(corner.max()) + count, axis=1)
        steps[:, 0] = first + step * 0.5
        sums = np.take_along_axis(np.add.accumulate(steps, axis=1), corner[:, None] + np.arange(count), axis=1)
        pixels.append(np.where(sums < 0, -1, np.minimum(sums, 2.0**31)).astype(np.int64))
    return pixels[0], pixels[1]
