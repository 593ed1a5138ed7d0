"""Projective maps of images: Pillow's `Image.transform` on one image on the CPU, and on batches on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["warp_batch", "warp_image"]


def warp_image(
    image: np.ndarray, coefficients: Sequence[float], size_hw: tuple[int, int], interpolation: str, fill: Any
) -> np.ndarray:
    """One image H×W×C uint8 through the map of `gpuload.transforms.params.Warp`, to H'×W'×C."""
    raise NotImplementedError


def warp_batch(
    levels: torch.Tensor, coefficients: np.ndarray, size_hw: tuple[int, int], interpolation: str, fill: Any
) -> torch.Tensor:
    """The same for a batch N×C×H×W uint8, with float64 (N, 8), on any device."""
    raise NotImplementedError
