"""Images and options of loaders that several tests use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl
from gpuload import transforms as T

__all__ = ["CHAIN", "LARGE", "encoded_samples", "noise_images", "options", "samples"]

CHAIN = [T.RandomCrop(12), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.5,) * 3)]

LARGE = (4, (120, 160))


def samples(count: int = 24) -> list[Any]:
    """Make samples of one size, each with different noise, and the sample's number as label."""
    rng = np.random.default_rng(5)
    return [(rng.integers(0, 256, (14, 16, 3), np.uint8), number) for number in range(count)]


def options(**changes: Any) -> dict[str, Any]:
    return {"dataset": samples(), "transforms": CHAIN, **changes}


def encoded_samples(count: int = 12) -> list[Any]:
    """Make encoded images, but every fourth sample an array, so that a batch has pixels from both."""
    pictures = [smooth_image(20 + number, 30, number) for number in range(count)]
    return [
        (gl.Encoded(jpeg_bytes(picture)) if number % 4 < 3 else picture, number)
        for number, picture in enumerate(pictures)
    ]


def noise_images(count: int = 4, size_hw: tuple[int, int] = (14, 18), channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Return uint8 N×C×H×W."""
    levels = np.random.default_rng(seed).integers(0, 256, (count, channels, *size_hw), np.uint8)
    return torch.from_numpy(levels)
