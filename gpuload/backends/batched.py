"""The reference on CUDA: a chain applied to many images at once, with batched tensor operations.

Where the images of a batch differ in size somewhere between two transforms, they are taken one by one. Everything is
issued on the current stream; parameters go to the device as small arrays. Nothing is kept from call to call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from gpuload import transforms as T
from gpuload.backends.color import ADJUST
from gpuload.backends.finish import Finish
from gpuload.backends.gather import Source, crop, resize
from gpuload.backends.ragged import RaggedImages
from gpuload.backends.upload import upload

__all__ = ["BatchRunner"]

PIECE: Final = 64  # images at once: what a resize needs in between is some 3 MB for each


class BatchRunner:
    """Applies a chain to batches.

    Args:
        finish: the end of the chain.
        device: where.
    """

    def __init__(self, finish: Finish, device: torch.device) -> None:
        self._finish = finish
        self._constants = finish.constants(device)

    def __call__(self, images: RaggedImages, draws: T.Draws, outputs: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W."""
        # Sources may differ in size, unless colour comes first; from then on all must be of one size.
        gathers_first = bool(draws.transforms) and not isinstance(draws.transforms[0], T.ColorJitter)
        windows = draws.windows_tlhw[1 if gathers_first else 0 :]
        uniform = all((window[:, 2:] == window[0, 2:]).all() for window in windows)
        step = PIECE if uniform else 1
        for start in range(0, len(images), step):
            rows = np.arange(start, min(start + step, len(images)))
            results = self._run(images, draws.take(rows), rows)
            if isinstance(outputs, torch.Tensor):
                outputs[start : start + len(rows)].copy_(results)
            else:
                for output, result in zip(outputs[start:], results, strict=False):
                    output.copy_(result)

    def _run(self, images: RaggedImages, draws: T.Draws, rows: np.ndarray) -> torch.Tensor:
        source = Source.of_ragged(images, rows, draws.windows_tlhw[0])
        for index, transform in enumerate(draws.transforms):
            source = _apply(source, draws, index, transform)
        levels = source.dense()
        if self._finish.dtype == torch.uint8:
            return levels
        result = levels.to(torch.float32)
        if not self._finish.is_identity:
            result.mul_(self._constants[0]).add_(self._constants[1])
        return result


def _apply(source: Source, draws: T.Draws, index: int, transform: object) -> Source:
    before, after = draws.windows_tlhw[index], draws.windows_tlhw[index + 1]
    params, size = draws[index], (int(after[0, 2]), int(after[0, 3]))
    if isinstance(transform, T.RandomHorizontalFlip | T.RandomVerticalFlip):
        return source.flip(params.flipped, horizontally=isinstance(transform, T.RandomHorizontalFlip))
    if isinstance(transform, T.CenterCrop | T.RandomCrop):
        corners = params.box_tlhw[:, :2] + after[:, :2]
        if np.array_equal(after[:, 2:], before[:, 2:]) and np.array_equal(corners, before[:, :2]):
            return source
        mode, fill = transform.padding_mode, transform.fill
        frames = draws.sizes_hw[index]
        return Source.of_dense(crop(source, np.hstack([corners, before[:, :2]]), size, frames, mode, fill))
    if isinstance(transform, T.Resize | T.RandomResizedCrop):
        box = params.box_tlhw
        corners = before[:, :2] - box[:, :2]
        return Source.of_dense(resize(source, corners, box[:, 2:], params.size_hw, after, transform.interpolation))
    if isinstance(transform, T.ColorJitter):
        levels = source.dense().to(torch.float32)
        _jitter(levels, transform.adjustments, params.order, params.factors)
        jittered = Source.of_dense(levels.to(torch.uint8))
        return jittered if np.array_equal(before, after) else jittered.cut(after)
    return source


def _jitter(levels: torch.Tensor, names: tuple[str, ...], order: np.ndarray, factors: np.ndarray) -> None:
    """Make the adjustments, the first of all images first; images with the same adjustment go together."""
    for turn in range(len(names)):
        for column, name in enumerate(names):
            rows = np.flatnonzero(order[:, turn] == column)
            if len(rows):
                index = upload(rows, levels.device)
                factor = upload(factors[rows, column].astype(np.float32), levels.device)
                some = levels[index]
                ADJUST[name](some, factor[:, None, None, None])
                levels[index] = some
