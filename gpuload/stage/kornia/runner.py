"""Kornia's runner on levels: the reference's runner for batches, with pixels changed by Kornia.

Images of one size go together, so each of Kornia's functions is called once for all images that it is drawn for; if
sizes differ between two transforms, images are taken one by one. Nothing is kept from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.finish import Finish
from gpuload.stage.kornia import operations
from gpuload.stage.kornia.finished import erased, normalized
from gpuload.stage.kornia.geometry import cropped, flipped, warped
from gpuload.stage.reference.batched import BatchRunner
from gpuload.stage.reference.gather import Source
from gpuload.stage.reference.operations import Operation
from gpuload.transforms.program.ops import Box, Erase, Flip, Mixture
from gpuload.transforms.program.windows import boxes_within

__all__ = ["KorniaRunner"]

# Images at once on the CPU. Kornia makes a new tensor at each step: for 8 images of 224×224 the process reuses memory,
# for 64 it gets new memory from the system each time (autocontrast 3.3 and 14 ms for an image, hue 7.7 and 16).
CPU_PIECE: Final = 8


class KorniaRunner(BatchRunner):
    """Applies transforms that work on levels, all but those that resample boxes."""

    operations: ClassVar[Mapping[str, Operation]] = operations.OPERATIONS

    def __init__(self, finish: Finish, device: torch.device) -> None:
        super().__init__(finish, device)
        if device.type == "cpu":
            self.piece = CPU_PIECE
        # y = a · level + b as Kornia has it: (level - mean) / std.
        scale, bias = np.array(finish.scale), np.array(finish.bias)
        self._mean = torch.tensor(-bias / scale, dtype=torch.float32, device=device)
        self._std = torch.tensor(1 / scale, dtype=torch.float32, device=device)

    def _finished(self, levels: torch.Tensor) -> torch.Tensor:
        numbers = levels.to(torch.float32)
        return numbers if self._finish.is_identity else normalized(numbers, self._mean, self._std)

    def _flip(self, source: Source, record: Flip) -> Source:
        if not record.flipped.any():
            return source
        return Source.of_dense(flipped(source.dense(), record.flipped, record.axis))

    def _crop(self, source: Source, record: Box, corners: np.ndarray, size: tuple[int, int]) -> Source:
        return Source.of_dense(cropped(source, record, corners, size))

    def _mix(self, levels: torch.Tensor, record: Mixture) -> torch.Tensor:
        return operations.mix(levels, record, self._operate)

    def _erase(self, levels: torch.Tensor, record: Erase, windows_tlhw: np.ndarray) -> torch.Tensor:
        boxes = boxes_within(record.boxes_tlhw, windows_tlhw)
        constant = upload(np.array(record.numbers, np.uint8)[:, None, None], levels.device)
        for number in range(boxes.shape[1]):
            levels = erased(levels, boxes[:, number], constant)
        return levels

    def _warped(
        self,
        levels: torch.Tensor,
        coefficients: np.ndarray,
        size: tuple[int, int],
        interpolation: str,
        fill: Sequence[float],
        corners: np.ndarray | None = None,
    ) -> torch.Tensor:
        return warped(levels, coefficients, size, interpolation, fill, corners)
