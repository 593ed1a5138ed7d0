"""The backend ``"torch"``: all transforms, on the CPU image by image, on CUDA batch by batch. What the others are held
against, and what runs in their place."""

from __future__ import annotations

from typing import ClassVar, Literal

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

__all__ = ["Runner", "TorchBackend", "levels_of", "reference_runner"]

Runner = Literal["single", "batched"]


class TorchBackend(Backend):
    """The reference.

    Args:
        device: where the images are.
        runner: which of both; None: the one for the device.
    """

    name: ClassVar[str] = "torch"

    def __init__(self, device: torch.device, runner: Runner | None = None) -> None:
        super().__init__(device)
        self._runner: Runner | None = runner

    def _lacks(self, transform: Transform, kind: type[Params]) -> str | None:
        return None

    def levels(self, finish: Finish) -> Levels:
        return levels_of(reference_runner(finish, self.device, runner=self._runner))

    def late(self) -> Late:
        def run(outputs: Outputs, late: Draws, partners: np.ndarray | None) -> None:
            apply_late(outputs, late, partners=partners)

        return run


def reference_runner(
    finish: Finish, device: torch.device, *, masks: bool = False, runner: Runner | None = None
) -> LineRunner:
    """The one of both that is asked for, else the one for the device."""
    single = device.type == "cpu" if runner is None else runner == "single"
    return SingleRunner(finish, masks=masks) if single else BatchRunner(finish, device, masks=masks)


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
