"""The random displacement field of an `Elastic` record: its noise, and the displacements of boxes and keypoints.

A field has two planes: the displacements along x and those along y. The n-th value of an image's noise belongs to plane
n // (H · W), row by row. Each Philox block, counted from 0 under the image's own key, yields four values in (-1, 1)
with 24 bits. Noise is smoothed along both axes by Gaussian weights with mirrored borders, and multiplied by half of
`alpha`. (torchvision divides by the image's width and height and measures in halves of these.) Backends compute
complete fields in float32; this module computes only the displacements of boxes and keypoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuload.datasets.arrays import cast, namespace
from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.transforms.program.ops import Elastic

__all__ = ["displace", "displace_flat", "gaussian", "kernel_size"]


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
    size_hw, key = record.sizes_hw[i], Key(*record.keys[i].tolist())
    flat = points.reshape(-1, 2).astype(np.float64)

    def weigh(plane: int, rows: np.ndarray, columns: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
        noise = _noise(key, plane, rows, columns, size_hw)
        return np.einsum("nyx,y,x->n", noise, *weights) if weights else noise

    return displace_flat(record, flat, size_hw[None, ::-1], to_pixels, weigh, np.asarray).reshape(points.shape)


def displace_flat(
    record: Elastic,
    points: Any,
    sizes_xy: Any,
    to_pixels: Callable[[Any], Any],
    weigh: Callable[[int, Any, Any, Sequence[Any]], Any],
    to_array: Callable[[np.ndarray], Any],
) -> Any:
    """Return float64 points (n, 2) after the deformation.

    Args:
        record: the strength and the smoothing.
        points, to_pixels: as for `displace`; points can be a tensor.
        sizes_xy: the width and height of the image of each point, or of all points, (n or 1, 2).
        weigh: returns the noise of a plane at rows and columns, (n,); or, with weights along y and along x, the
            weighted sum of the noise at rows (n, y, 1) and columns (n, 1, x).
        to_array: converts a NumPy array to the type of `points`.
    """
    xp, moved = namespace(points), []
    pixels = xp.clip(cast(to_pixels(points), "int64"), xp.zeros_like(sizes_xy), sizes_xy - 1)
    for plane in (0, 1):
        columns, rows, weights = pixels[:, 0], pixels[:, 1], []
        if record.sigma[plane]:
            size = kernel_size(record.sigma[plane])
            offsets = to_array(np.arange(size) - size // 2)
            columns, rows = (_mirror(pixels[:, k, None] + offsets, sizes_xy[:, k, None]) for k in (0, 1))
            columns, rows = columns[:, None, :], rows[:, :, None]
            weights = [to_array(gaussian(sigma, size)) for sigma in record.sigma[::-1]]
        moved.append(points[:, plane] - 0.5 * record.alpha[plane] * weigh(plane, rows, columns, weights))
    return xp.stack(moved, -1)


def _mirror(indices: Any, length: Any) -> Any:
    """Mirror indices at the borders of an axis, as `padded_indices` with ``"reflect"``."""
    xp = namespace(indices)
    period = xp.clip(2 * (length - 1), 1, None)
    indices = indices % period
    return xp.clip(xp.minimum(indices, period - indices), xp.zeros_like(length), length - 1)


def _noise(key: Key, plane: int, rows: np.ndarray, columns: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    """Return the noise of a plane at these rows and columns, float64."""
    height, width = size_hw.tolist()
    indices = plane * height * width + rows * width + columns
    counters = np.zeros((indices.size, 4), np.uint32)
    counters[:, 0] = (indices // 4).ravel()
    words = philox.philox4x32(counters, key)[np.arange(indices.size), (indices % 4).ravel()]
    return ((words >> np.uint32(8)).astype(np.float64) * 2.0**-23 - (1 - 2.0**-24)).reshape(indices.shape)
