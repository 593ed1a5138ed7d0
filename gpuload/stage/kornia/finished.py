"""Kornia's sums, normalisation, erasing and mixing of images of numbers of any kind.

Images are N×C×H×W. Functions are pure: they work in memory of their own, and gradients flow through them. Runs on any
device, in the process of the stage.
"""

from __future__ import annotations

import numpy as np
import torch
from kornia.enhance import add_weighted, normalize
from kornia.geometry.bbox import bbox_to_mask

from gpuload.stage.device import upload

__all__ = ["blended", "erased", "inside", "normalized", "weighted"]

Weight = torch.Tensor | float


def weighted(one: torch.Tensor, share: Weight, other: torch.Tensor, rest: Weight, more: Weight = 0.0) -> torch.Tensor:
    """``one · share + other · rest + more``, each product and each sum rounded by itself; tensors are broadcast."""
    # Kornia before 0.9 needs weights of the images' shape.
    weights = [weight.expand_as(one) if isinstance(weight, torch.Tensor) else weight for weight in (share, rest, more)]
    return add_weighted(one, weights[0], other.expand_as(one), weights[1], weights[2])


def normalized(images: torch.Tensor, means: torch.Tensor, stds: torch.Tensor) -> torch.Tensor:
    """(images - mean) / standard deviation; these are (C,), or (1,) for all channels."""
    return normalize(images, means, stds)


def inside(boxes_tlhw: np.ndarray, size_hw: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Which pixels of images of a size are in boxes, int64 (N, 4): bool N×1×H×W. A box of height 0 has none."""
    top, left, height, width = boxes_tlhw.T
    bottom, right = top + height - 1, left + width - 1
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    return bbox_to_mask(upload(corners.astype(np.float32), device), size_hw[1], size_hw[0])[:, None] > 0


def erased(images: torch.Tensor, boxes_tlhw: np.ndarray, numbers: torch.Tensor) -> torch.Tensor:
    """Images with `numbers`, which can be broadcast to N×C×H×W, in a box of each."""
    size_hw = images.shape[2], images.shape[3]
    return torch.where(inside(boxes_tlhw, size_hw, images.device), numbers.to(images.dtype), images)


def blended(images: torch.Tensor, others: torch.Tensor, shares: np.ndarray) -> torch.Tensor:
    """Each image times its share, float64 (N,), plus another one times the rest; in float32."""
    ours, rest = (
        upload(numbers.astype(np.float32), images.device)[:, None, None, None] for numbers in (shares, 1 - shares)
    )
    return weighted(images.to(torch.float32), ours, others.to(torch.float32), rest).to(images.dtype)
