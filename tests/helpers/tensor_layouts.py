"""Images as tensors with many memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from gpuload.stage import RaggedImages

__all__ = ["DENSE", "LAYOUTS", "interleaved_and_planes"]


def _each(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array.transpose(2, 0, 1).copy()) for array in arrays]


def _batch(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def _within(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Make tensors that are slices of larger images, each with its own memory."""
    padded = [np.pad(array, ((2, 1), (3, 5), (1, 0)), constant_values=77) for array in arrays]
    return [image[1:, 2:-1, 3:-5] for image in _each(padded)]


def _backwards(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Make tensors that share one buffer in reverse order, without gaps."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in reversed(arrays)]))
    parts = flat.split([array.size for array in reversed(arrays)])
    return [part.view(array.shape).permute(2, 0, 1) for part, array in zip(reversed(parts), arrays, strict=True)]


# Functions that turn H×W×C arrays of one size into N×C×H×W tensors.
DENSE: Final[dict[str, Callable[[Sequence[np.ndarray]], torch.Tensor]]] = {
    "contiguous": lambda arrays: _batch(arrays).contiguous(),
    "channels last": _batch,
    "sliced": lambda arrays: _batch(np.pad(np.stack(arrays), ((0, 0), (2, 1), (3, 5), (0, 1))))[:, :-1, 2:-1, 3:-5],
    "columns first": lambda arrays: _batch(arrays).permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
}
# Functions that turn H×W×C arrays of any sizes into lists of C×H×W tensors.
LAYOUTS: Final[dict[str, Callable[[Sequence[np.ndarray]], list[torch.Tensor]]]] = {
    "each": _each,
    "each channels last": lambda arrays: [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays],
    "within others": _within,
    "one after the other": lambda arrays: _backwards(arrays[::-1])[::-1],
    "backwards": _backwards,
}


def interleaved_and_planes(
    arrays: Sequence[np.ndarray], layout: str, device: str = "cpu"
) -> tuple[RaggedImages, RaggedImages]:
    """Return H×W×C arrays as interleaved images, and as planes in one of these layouts."""
    planes = DENSE[layout](arrays) if layout in DENSE else LAYOUTS[layout](arrays)
    on_device = planes.to(device) if isinstance(planes, torch.Tensor) else [image.to(device) for image in planes]
    labels = [f"image {number}" for number in range(len(arrays))]
    return RaggedImages.from_arrays(arrays, device), RaggedImages.from_planes(on_device, labels)
