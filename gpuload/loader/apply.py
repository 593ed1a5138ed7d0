"""Transforms applied to one sample, to look at what they do. Main process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpuload.datasets.sample import Image
from gpuload.loader.loader import Loader

__all__ = ["apply"]


def apply(transforms: Any, sample: Any, *, seed: int = 0, device: Any = "cpu") -> Any:
    """Apply transforms to one sample, as a `Loader` does to the first of an epoch.

    Args:
        transforms: a list of them, or one.
        sample: an image: Pillow's, an array H×W×C or H×W, a tensor C×H×W, `gpuload.Image` or `Encoded`. Or a sample
            with one in it, beside masks, boxes and keypoints: ``(image, gpuload.Mask(mask))``.
        seed: of the draws.
        device: where they are applied.

    Returns:
        The image as a tensor C×H×W, uint8 unless a transform makes floats; a list of them for a `MultiView`. A sample
        comes back as it was, with tensors in it.

    Raises:
        SampleError: there is something that no transform can be applied to.
        TypeError, ValueError: as for `Loader`.

    Example:
        >>> from gpuload import transforms as T
        >>> apply([T.Resize((4, 6)), T.RandomInvert(1.0)], np.zeros((8, 8, 3), np.uint8)).unique()
        tensor([255], dtype=torch.uint8)
    """
    chain = list(transforms) if isinstance(transforms, list | tuple) else [transforms]
    if isinstance(sample, np.ndarray):
        sample = Image(sample if sample.ndim == 3 else sample[..., None], layout="HWC")
    elif isinstance(sample, torch.Tensor):
        sample = Image(sample.cpu(), layout="CHW")
    with Loader([sample], batch_size=None, transforms=chain, seed=seed, num_workers=0, device=device) as loader:
        return next(iter(loader))
