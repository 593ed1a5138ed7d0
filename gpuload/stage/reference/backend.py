"""The reference backend, ``"torch"``: it supports all records, and runs the records that other backends do not
support."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from gpuload.stage.backend import Backend, LevelRunner
from gpuload.stage.finish import Finish
from gpuload.stage.reference.batched import BatchRunner
from gpuload.stage.reference.single import SingleRunner
from gpuload.transforms.program.ops import RecordOutline

__all__ = ["Runner", "TorchBackend"]

Runner = Literal["single", "batched"]


class TorchBackend(Backend):
    """The reference backend. The default `runner` is single on the CPU and batched on other devices."""

    name: ClassVar[str] = "torch"

    def __init__(self, device: torch.device, runner: Runner | None = None) -> None:
        super().__init__(device)
        self._is_single = device.type == "cpu" if runner is None else runner == "single"

    def why_unsupported(self, outline: RecordOutline, *, is_late: bool, follows_own: bool) -> str | None:
        return None

    def level_runner(self, finish: Finish) -> LevelRunner:
        return SingleRunner(finish) if self._is_single else BatchRunner(finish, self.device)
