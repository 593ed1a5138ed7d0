"""The backend ``"torch"``: all transforms, on the CPU image by image, on CUDA batch by batch. What the others are held
against, and what runs in their place."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import Finish
from gpuload.stage.finished import Outputs, apply_late
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.batched import BatchRunner
from gpuload.stage.reference.line import LineRunner
from gpuload.stage.reference.single import SingleRunner
from gpuload.transforms import Draws
from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import Params

__all__ = ["TorchBackend", "levels_of", "reference_runner"]


class TorchBackend(Backend):
    """The reference."""

    name: ClassVar[str] = "torch"

    def _lacks(self, transform: Transform, kind: type[Params]) -> str | None:
        return None

    def levels(self, finish: Finish) -> Levels:
        return levels_of(reference_runner(finish, self.device))

    def late(self) -> Late:
        def run(outputs: Outputs, late: Draws, partners: np.ndarray | None) -> None:
            apply_late(outputs, late, partners=partners)

        return run


def reference_runner(finish: Finish, device: torch.device, *, masks: bool = False) -> LineRunner:
    """The one of both that is for a device."""
    return SingleRunner(finish, masks=masks) if device.type == "cpu" else BatchRunner(finish, device, masks=masks)


def levels_of(runner: LineRunner) -> Levels:
    """A runner of whole lines as one of transforms on levels, which leaves all that is late."""

    def run(
        images: RaggedImages,
        draws: Draws,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late: Draws | None,
    ) -> Draws | None:
        runner.levels(images, draws, windows_tlhw, outputs)
        return late

    return run
