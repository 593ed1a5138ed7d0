"""The filters of resampling, as all backends and the decode plan must see them.

Pillow's definition (libImaging/Resample.c): output pixel i of n, made from a box of length m, has its centre at
(i + ½) · s with s = m / n; the filter is stretched by max(s, 1), reaches `support` times that to both sides, and is cut
at the borders of the *image* for a resize, of the *box* where a crop was cut out first. Pure functions, no torch.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["SUPPORT", "source_windows"]

SUPPORT: Final = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0}


def source_windows(
    windows_tlhw: np.ndarray, outputs_hw: np.ndarray, inputs_hw: np.ndarray, interpolation: str
) -> np.ndarray:
    """Which part of each image a part of its resized version is made from, the support of the filter included.

    Args:
        windows_tlhw: int64 (B, 4), in the resized images.
        outputs_hw: int64 (B, 2), the sizes of the resized images.
        inputs_hw: int64 (B, 2), the sizes of the images.
        interpolation: the filter.

    Returns:
        int64 (B, 4), within the images; at most a pixel more on each side than has any weight.
    """
    scale = inputs_hw / outputs_hw
    reach = np.where(scale == 1, 0.5, SUPPORT[interpolation] * np.maximum(scale, 1)) + 0.5
    first, last = windows_tlhw[:, :2], windows_tlhw[:, :2] + windows_tlhw[:, 2:] - 1
    start = np.clip(np.floor((first + 0.5) * scale - reach).astype(np.int64), 0, inputs_hw - 1)
    end = np.clip(np.ceil((last + 0.5) * scale + reach).astype(np.int64), start + 1, inputs_hw)
    return np.concatenate([start, end - start], axis=1)
