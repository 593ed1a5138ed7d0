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


def _weigh(keys: np.ndarray, indices: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
    """Return weighted sums of the noise of one image; see `displace`."""
    if not len(keys):
        return np.zeros(0)
    counters = np.zeros((indices.size, 4), np.uint32)
    counters[:, 0] = (indices // 4).ravel()
    words = philox.philox4x32(counters, Key(*keys[0].tolist()))[np.arange(indices.size), (indices % 4).ravel()]
    noise = (words >> np.uint32(8)).astype(np.float64) * 2.0**-23 - (1 - 2.0**-24)
    return np.einsum("nyx,y,x->n", noise.reshape(indices.shape), *weights)


def displace(
    record: Elastic,
    points: Any,
    keys: Any,
    sizes_xy: Any,
    to_pixels: Callable[[Any], Any],
    weigh: Callable[[Any, Any, Sequence[Any]], Any] = _weigh,
    to_array: Callable[[np.ndarray], Any] = np.asarray,
) -> Any:
    """Return points (…, 2), x and y, after the deformation, float64.

    Args:
        record: the strength and the smoothing.
        points: the points, of one image if they are an array, or of several images if they are a tensor.
        keys, sizes_xy: the words of the random key, int64, and the width and height of the image of each point; they
            broadcast against the points.
        to_pixels: ceil or trunc; each point moves by the displacement of the pixel that this function selects.
        weigh: given keys (n, 2), indices of noise values (n, y, x), and weights along y and x, returns weighted sums of
            the noise, (n,). The default takes arrays of one image.
        to_array: converts a NumPy array to the type of `points`.
    """
    xp, shape, moved = namespace(points), points.shape, []
    keys, sizes_xy = (xp.broadcast_to(array, shape).reshape(-1, 2) for array in (keys, sizes_xy))
    points = cast(points.reshape(-1, 2), "float64")
    pixels = xp.clip(cast(to_pixels(points), "int64"), xp.zeros_like(sizes_xy), sizes_xy - 1)
    width, height = sizes_xy[:, 0, None, None], sizes_xy[:, 1, None, None]
    for plane in (0, 1):
        size = kernel_size(record.sigma[plane])
        offsets = to_array(np.arange(size) - size // 2)
        columns, rows = (padded_indices(pixels[:, k, None] + offsets, sizes_xy[:, k, None], "reflect") for k in (0, 1))
        indices = plane * height * width + rows[:, :, None] * width + columns[:, None, :]
        weights = [to_array(gaussian(sigma or 1.0, size)) for sigma in record.sigma[::-1]]
        amounts = weigh(keys, indices, weights)
        moved.append(points[:, plane] - 0.5 * record.alpha[plane] * amounts)
    return xp.stack(moved, -1).reshape(shape)
