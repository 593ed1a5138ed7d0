"""The random displacement field of an `Elastic` record: its noise, and the displacements of boxes and keypoints.

A field has two planes: the displacements along x and those along y. The n-th value of an image's noise belongs to plane
n // (H · W), row by row. Each Philox block, counted from 0 under the image's own key, yields four values in (-1, 1)
with 24 bits. Noise is smoothed along both axes by Gaussian weights with mirrored borders, and multiplied by half of
`alpha`. (torchvision divides by the image's width and height and measures in halves of these.) Backends compute
complete fields in float32; this module computes only the displacements of boxes and keypoints.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.transforms.program.ops import Elastic
from gpuload.transforms.program.windows import padded_indices

__all__ = ["displace", "gaussian", "kernel_size"]


def kernel_size(sigma: float) -> int:
    """Return the number of weights in a Gaussian kernel, an odd number."""
    return int(8 * sigma + 1) // 2 * 2 + 1


def gaussian(sigma: float, size: int) -> np.ndarray:
    """Return Gaussian weights, float64 (size,), whose sum is 1."""
    distances = np.arange(size) - size // 2
    weights = np.exp(-0.5 * (distances / sigma) ** 2)
    return weights / weights.sum()


def displace(record: Elastic, i: int, points: np.ndarray, to_pixels: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return points (…, 2), x and y, of image `i` of a record, after the deformation. Each point moves by the
    displacement of the pixel that `to_pixels` (np.ceil or np.trunc) selects for the point."""
    size_hw = record.sizes_hw[i]
    displaced_xy = points.reshape(-1, 2).astype(np.float64)
    pixels = np.clip(to_pixels(displaced_xy).astype(np.int64), 0, size_hw[::-1] - 1)
    key = Key(*record.keys[i].tolist())
    for plane in (0, 1):
        if record.sigma[plane]:
            size = kernel_size(record.sigma[plane])
            offsets = np.arange(size) - size // 2
            columns, rows = (
                padded_indices(pixels[:, axis, None] + offsets, int(size_hw[1 - axis]), "reflect") for axis in (0, 1)
            )
            across, down = (gaussian(sigma, size) for sigma in record.sigma)
            noise = _noise(key, plane, rows[:, :, None], columns[:, None, :], size_hw)
            amounts = np.einsum("nyx,y,x->n", noise, down, across)
        else:
            amounts = _noise(key, plane, pixels[:, 1], pixels[:, 0], size_hw)
        displaced_xy[:, plane] -= 0.5 * record.alpha[plane] * amounts
    return displaced_xy.reshape(points.shape)


def _noise(key: Key, plane: int, rows: np.ndarray, columns: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    """Return the noise of a plane at these rows and columns, float64."""
    height, width = size_hw.tolist()
    indices = plane * height * width + rows * width + columns
    counters = np.zeros((indices.size, 4), np.uint32)
    counters[:, 0] = (indices // 4).ravel()
    words = philox.philox4x32(counters, key)[np.arange(indices.size), (indices % 4).ravel()]
    return ((words >> np.uint32(8)).astype(np.float64) * 2.0**-23 - (1 - 2.0**-24)).reshape(indices.shape)
