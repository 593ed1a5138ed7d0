"""Blur and sharpness by DALI's filters; arguments and results as in `gpuload.stage.dali.color`."""

from __future__ import annotations

from typing import Final

import numpy as np

from gpuload.stage.dali.color import blend
from gpuload.stage.dali.engine import ndd
from gpuload.stage.dali.images import Images

__all__ = ["blur", "sharpness"]

# Pillow's SMOOTH. A thirteenth of a whole number is never close to a half, so everyone rounds it alike.
KERNEL: Final = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


def blur(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """A Gaussian blur with mirrored borders: DALI's own, whose weights are not rounded."""
    sizes, sigmas = values[:, 1::-1].astype(np.int32), values[:, 3:1:-1].astype(np.float32)
    window_size, sigma = (ndd.as_batch(np.ascontiguousarray(given)) for given in (sizes, sigmas))
    return ndd.gaussian_blur(images, window_size=window_size, sigma=sigma)


def sharpness(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Blend with a smoothed image, whose border pixels are the image's."""
    sizes = Images(images).sizes_hw
    smoothed = ndd.filter(images, ndd.as_batch(np.repeat(KERNEL[None], len(sizes), axis=0)))
    inner = np.hstack([np.ones_like(sizes), np.maximum(sizes - 2, 0)])
    whole = np.hstack([-np.ones_like(sizes), sizes])
    # Differences of levels wrap around in uint8, and the sum wraps back.
    return blend(images, images + Images(smoothed - images).cut(inner).cut(whole).batch, values)
