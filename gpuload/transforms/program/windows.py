"""The filters of resampling and the modes of padding, the same for all backends and the decode plan.

Pillow's definition (libImaging/Resample.c): output pixel i of n, made from a box of length m, has its centre at
(i + ½) · s with s = m / n; the filter is stretched by max(s, 1), reaches `support` times that to both sides, and is cut
at the borders of the *image* for a resize, of the *box* for a crop that is resized. *Plain* filters are torch's without
antialiasing (`torch.nn.functional.interpolate`): never stretched, and outside the box is its border. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

__all__ = [
    "FILTERS", "PLAIN", "PRECISION_BITS", "SMOOTHING", "SUPPORT", "boxes_within", "filter_names", "filter_weights",
    "full_windows", "nearest_indices", "nearest_ways", "padded_places", "padded_windows", "rare_filter",
    "scaled_pixels", "source_windows", "transposed_boxes",
]  # fmt: skip

# The code of a filter is its index here. Only resizing has those from lanczos on.
FILTERS: Final = ("nearest", "bilinear", "bicubic", "lanczos", "plain bilinear", "plain bicubic")
SUPPORT: Final[dict[str, float]] = dict(zip(FILTERS, (0.5, 1.0, 2.0, 3.0, 1.0, 2.0), strict=True))
PLAIN: Final = {"bilinear": "plain bilinear", "bicubic": "plain bicubic"}
_SUPPORTS: Final = np.array([*SUPPORT.values()])
_IS_PLAIN: Final = np.array([name in PLAIN.values() for name in FILTERS])
SMOOTHING: Final = ("bilinear", "bicubic", "lanczos")  # when an image becomes smaller
FIXED_LIMIT: Final = 32768.0  # nearest pixels of maps are not found in fixed point for coordinates beyond it
PRECISION_BITS: Final = 22  # of the fixed-point weights: 32 bits less 8 of a level and 2 for overflow


def full_windows(sizes_hw: np.ndarray) -> np.ndarray:
    """Windows that are whole images."""
    windows = np.zeros((len(sizes_hw), 4), np.int64)
    windows[:, 2:] = sizes_hw
    return windows


def transposed_boxes(boxes_tlhw: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Boxes, int64 (B, …, 4), of images, some of which, bool (B,), have their rows and columns swapped."""
    if not which.any():
        return boxes_tlhw
    which = which.reshape(-1, *[1] * (boxes_tlhw.ndim - 1))
    return np.where(which, boxes_tlhw[..., [1, 0, 3, 2]], boxes_tlhw)


def source_windows(
    windows_tlhw: np.ndarray, outputs_hw: np.ndarray, inputs_hw: np.ndarray, filters: np.ndarray
) -> np.ndarray:
    """Return the part of each image that a part of its resized version depends on, with the filter's support.

    Args:
        windows_tlhw: int64 (B, 4), in the resized images.
        outputs_hw: int64 (B, 2), the sizes of the resized images.
        inputs_hw: int64 (B, 2), the sizes of the images.
        filters: int64 (B,), codes of `FILTERS`.

    Returns:
        int64 (B, 4), within the images; at most one pixel too many on each side.
    """
    scale = inputs_hw / outputs_hw
    stretch = np.where(_IS_PLAIN[filters][:, None], 1, np.maximum(scale, 1))
    reach = np.where(scale == 1, 0.5, _SUPPORTS[filters][:, None] * stretch) + 0.5
    first, last = windows_tlhw[:, :2], windows_tlhw[:, :2] + windows_tlhw[:, 2:] - 1
    start = np.clip(np.floor((first + 0.5) * scale - reach).astype(np.int64), 0, inputs_hw - 1)
    end = np.clip(np.ceil((last + 0.5) * scale + reach).astype(np.int64), start + 1, inputs_hw)
    return np.concatenate([start, end - start], axis=1)


def nearest_indices(length: int, output: int, start: int, count: int) -> np.ndarray:
    """The input pixels that the output pixels from `start` on are copied from, along one axis.

    Adds up steps as Pillow does (Geometry.c, `ImagingScaleAffine`): where an output pixel's centre falls between two
    pixels, the rounding of the sum decides.
    """
    step = length / output
    centres = np.full(start + count, step)
    centres[0] = 0.5 * step
    return np.minimum(np.add.accumulate(centres)[start:].astype(np.int64), length - 1)


def filter_weights(
    lengths: np.ndarray, outputs: np.ndarray, starts: np.ndarray, count: int, interpolation: str
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients for uint8 in Pillow's fixed point, along one axis of each of n images.

    Args:
        lengths: int64 (n,), of the inputs; the filter is cut at 0 and there, a plain one repeats what lies there.
        outputs: int64 (n,), lengths of the whole outputs.
        starts: int64 (n,), the first output pixel wanted.
        count: how many are wanted.
        interpolation: of `FILTERS`, but not ``"nearest"``.

    Returns:
        (firsts, weights): the first input pixel of each output pixel, int64 (n, count); the weights from that pixel on,
        int32 (n, count, taps), whose sum is about 2**22.
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
    weights = np.where(taps < (ends - firsts)[:, :, None], _filter(distance, interpolation), 0.0)
    weights /= weights.sum(axis=2, keepdims=True)
    return firsts, _fixed_point(weights)


def _plain_weights(centres: np.ndarray, lengths: np.ndarray, interpolation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return taps and weights of a plain filter: taps outside count for the pixel at the border."""
    reach = int(SUPPORT[interpolation])
    wanted = np.floor(centres - 0.5).astype(np.int64)[:, :, None] + np.arange(1 - reach, 1 + reach)
    weights = _filter(np.abs(wanted + 0.5 - centres[:, :, None]), interpolation)
    places = np.clip(wanted, 0, (lengths - 1)[:, None, None])
    firsts = places[:, :, 0]
    gathered = np.zeros_like(weights)
    for tap in range(2 * reach):
        at = (places[:, :, tap] - firsts)[:, :, None]
        np.put_along_axis(gathered, at, np.take_along_axis(gathered, at, 2) + weights[:, :, tap, None], 2)
    return firsts, _fixed_point(gathered)


def _fixed_point(weights: np.ndarray) -> np.ndarray:
    return np.trunc(weights * 2.0**PRECISION_BITS + np.copysign(0.5, weights)).astype(np.int32)


def _filter(distance: np.ndarray, interpolation: str) -> np.ndarray:
    if interpolation in ("bilinear", "plain bilinear"):
        return np.maximum(1 - distance, 0)
    if interpolation == "lanczos":
        return np.where(distance < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    a = -0.75 if interpolation == "plain bicubic" else -0.5  # Keys' cubic, as in torch, and in Pillow
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def filter_names(interpolation: str, *, antialias: bool = True) -> tuple[str, ...]:
    """The filters that arguments name: two for ``"random"``, as timm chooses."""
    names = ["bilinear", "bicubic"] if interpolation == "random" else [interpolation]
    return tuple(names if antialias else [PLAIN.get(name, name) for name in names])


def rare_filter(names: Iterable[str]) -> str | None:
    """The first of these filters that only the reference has, in a few words; None if there is none."""
    rare = next((name for name in names if FILTERS.index(name) >= FILTERS.index("lanczos")), None)
    return None if rare is None else f"{rare} resampling is torch's alone"


def padded_windows(boxes_tlhw: np.ndarray, windows_tlhw: np.ndarray, sizes_hw: np.ndarray, mode: str) -> np.ndarray:
    """Return the part of each image that a part of a box depends on, where the box may reach beyond the image.

    Args:
        boxes_tlhw: int64 (B, 4), in the images.
        windows_tlhw: int64 (B, 4), in the boxes.
        sizes_hw: int64 (B, 2), of the images.
        mode: the padding mode.

    Returns:
        int64 (B, 4), within the images, at least one pixel.
    """
    first = boxes_tlhw[:, :2] + windows_tlhw[:, :2]
    last = first + windows_tlhw[:, 2:]
    start = np.clip(first, 0, sizes_hw - 1)
    end = np.clip(last, start + 1, sizes_hw)
    if mode in ("reflect", "symmetric"):
        # A mirror can show any part of the image.
        outside = (first < 0) | (last > sizes_hw)
        start, end = np.where(outside, 0, start), np.where(outside, sizes_hw, end)
    return np.concatenate([start, end - start], axis=1)


def padded_places(indices: np.ndarray, length: np.ndarray | int, mode: str) -> np.ndarray:
    """The pixels of one axis that padding shows at indices inside and outside 0 … length - 1; for ``"constant"``, which
    shows none outside, the nearest ones."""
    if mode == "reflect":
        period = np.maximum(2 * (length - 1), 1)
        indices = indices % period
        indices = np.minimum(indices, period - indices)
    elif mode == "symmetric":
        indices = indices % (2 * length)
        indices = np.minimum(indices, 2 * length - 1 - indices)
    return np.clip(indices, 0, length - 1)


def boxes_within(boxes_tlhw: np.ndarray, windows_tlhw: np.ndarray) -> np.ndarray:
    """Boxes to erase, int64 (B, n, 4), relative to windows of the images and cut to them; the height or width of a box
    outside becomes 0."""
    start = np.maximum(boxes_tlhw[:, :, :2] - windows_tlhw[:, None, :2], 0)
    end = boxes_tlhw[:, :, :2] + boxes_tlhw[:, :, 2:] - windows_tlhw[:, None, :2]
    end = np.minimum(end, windows_tlhw[:, None, 2:])
    return np.concatenate([start, np.maximum(end - start, 0)], axis=2)


def nearest_ways(coefficients: np.ndarray, ends_hw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For which maps, float64 (N, 8), nearest pixels are found by adding up steps, and for which in fixed point, bool
    (N,); for the others in float64. `ends_hw`, int64 (N, 2): where the results end."""
    _, b, _, d, _, _, g, h = coefficients.T
    affine = (g == 0) & (h == 0)
    scaling = affine & (b == 0) & (d == 0)
    maps = coefficients[:, :6].reshape(-1, 2, 3, 1)
    corners_hw = np.zeros((len(maps), 2, 1, 2))  # along each axis, the first and the last
    corners_hw[:, :, 0, 1] = ends_hw
    across, down = maps[:, :, 0] * corners_hw[:, 1], maps[:, :, 1] * corners_hw[:, 0]
    shown = across[:, :, None] + down[..., None] + maps[:, :, 2, None]  # by all four corners
    return scaling, affine & ~scaling & (abs(shown) < FIXED_LIMIT).all(axis=(1, 2, 3))


def scaled_pixels(
    coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest pixels of maps that only scale and shift: rows int64 (N, H') and columns (N, W'); -1 before the
    image, and any number after it."""
    a, _, c, _, e, f, _, _ = coefficients.T
    pixels = []
    for step, first, corner, count in ((e, f, corners[:, 0], size_hw[0]), (a, c, corners[:, 1], size_hw[1])):
        # Sums always begin at the first pixel, as their rounding is part of the result; a window takes its own.
        steps = np.repeat(step[:, None], int(corner.max()) + count, axis=1)
        steps[:, 0] = first + step * 0.5
        sums = np.take_along_axis(np.add.accumulate(steps, axis=1), corner[:, None] + np.arange(count), axis=1)
        pixels.append(np.where(sums < 0, -1, np.minimum(sums, 2.0**31)).astype(np.int64))
    return pixels[0], pixels[1]
