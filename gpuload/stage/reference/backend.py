"""The backend ``"torch"``, the reference: it has all records, and runs what the other backends lack."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch

from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import Finish, Outputs, apply_late
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.batched import BatchRunner
from gpuload.stage.reference.single import SingleRunner
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Outline

__all__ = ["Runner", "TorchBackend", "levels_of", "reference_runner"]

Runner = Literal["single", "batched"]


class TorchBackend(Backend):
    """The reference; `runner` None: by the device."""

    name: ClassVar[str] = "torch"

    def __init__(self, device: torch.device, runner: Runner | None = None) -> None:
        super().__init__(device)
        self._runner: Runner | None = runner

    def lacks(self, outline: Outline, *, late: bool = False) -> str | None:
        return None

    def levels(self, finish: Finish) -> Levels:
        return levels_of(reference_runner(finish, self.device, self._runner))

    def late(self) -> Late:
        return apply_late


def reference_runner(finish: Finish, device: torch.device, runner: Runner | None = None) -> SingleRunner | BatchRunner:
    """The runner with this name, else the device's."""
    single = device.type == "cpu" if runner is None else runner == "single"
    return SingleRunner(finish) if single else BatchRunner(finish, device)


def levels_of(runner: SingleRunner | BatchRunner) -> Levels:
    """A runner of the reference as a backend's, which leaves all late records to be done."""

    def run(
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late: Program | None,
    ) -> Program | None:
        runner.levels(images, program, windows_tlhw, outputs)
        return late

    return run
