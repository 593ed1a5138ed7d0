"""Chains, batches of images, and comparisons of batches for tests of `gl.Augment` on the CPU and on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_structure

import gpuload as gl
from gpuload import transforms as T

__all__ = ["CLASSIC", "GEOMETRY", "NORMALIZE", "assert_equal_batches", "image_batch", "image_sample", "ragged_images"]

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLASSIC = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4), NORMALIZE]
GEOMETRY = [T.RandomResizedCrop(24), T.RandomAffine(20), T.RandomVerticalFlip(), T.GaussianBlur(3)]


def image_batch(count: int = 6, size_hw: tuple[int, int] = (40, 56), channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Return smooth images N×C×H×W, uint8."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(count, channels, 6, 7, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(rough, size_hw, mode="bicubic", align_corners=False)
    return smooth.round().clamp(0, 255).to(torch.uint8)


def ragged_images(count: int = 6) -> list[torch.Tensor]:
    return [image_batch(1, (30 + 3 * row, 52 - 2 * row), seed=row)[0] for row in range(count)]


def image_sample(image: torch.Tensor) -> gl.Image:
    """Return the `gl.Image` that a Loader's dataset would yield for a tensor C×H×W or a clip T×C×H×W."""
    return gl.Image(np.ascontiguousarray(image.movedim(-3, -1).numpy()), layout="HWC")


def assert_equal_batches(batch: Any, expected_batch: Any) -> None:
    """Check that two batches have the same structure and equal leaves, tensors to the last bit."""
    assert tree_structure(batch) == tree_structure(expected_batch)
    for leaf, expected in zip(tree_leaves(batch), tree_leaves(expected_batch), strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(leaf, expected, rtol=0, atol=0)
        else:
            assert leaf == expected
