"""A line of transforms on several backends: cut into runs, each of neighbours that the same backend has.

Between two runs images are levels again, uint8 H×W×C in one flat tensor, of which a run sees the windows that matter;
that memory is kept on the CPU, and comes from torch's allocator on CUDA. Runs in the process of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import UNCHANGED, Finish
from gpuload.stage.finished import Outputs
from gpuload.stage.plan import PlanStep
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import CHANGES_PIXELS, Ops

__all__ = ["SegmentRunner"]


@dataclass(frozen=True)
class _Run:
    """The steps `start` … `end` - 1 of a line, on a backend."""

    backend: str
    start: int
    end: int


class SegmentRunner:
    """Applies a line of transforms to batches.

    Args:
        steps: where each transform runs.
        finish: the end of the line.
        backends: by name: those that the steps name, and the reference.
    """

    def __init__(self, steps: Sequence[PlanStep], finish: Finish, backends: dict[str, Backend]) -> None:
        at = next((number for number, step in enumerate(steps) if step.transform.late), len(steps))
        self._runs = _runs(steps[:at], 0) or [_Run("torch", 0, 0)]
        self._behind = _runs(steps[at:], at)
        self._levels: list[Levels] = [
            backends[run.backend].levels(UNCHANGED if number < len(self._runs) - 1 else finish)
            for number, run in enumerate(self._runs)
        ]
        self._late: list[Late] = [backends[run.backend].late() for run in self._behind]
        self._scratch = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def __call__(
        self, images: RaggedImages, program: Program, outputs: Outputs, partners: np.ndarray | None = None
    ) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W; it is mixed with that of its partner, see
        `gpuload.stage.finished.apply_late`."""
        program, late = program.split()
        windows = program.windows_tlhw
        behind = [] if late is None else [late.part(*_places(late, run)) for run in self._behind]
        for number, (run, levels) in enumerate(zip(self._runs, self._levels, strict=True)):
            start, end = _places(program, run)
            part, seen = program.part(start, end), windows[start : end + 1]
            if number == len(self._runs) - 1:
                # The same backend may do what comes next in the same pass.
                joins = bool(behind) and self._behind[0].backend == run.backend
                left = levels(images, part, seen, outputs, behind[0] if joins else None)
                behind = [left, *behind[1:]] if joins else behind
            else:
                between, memory = self._between(images, part, seen[-1], number)
                levels(images, part, seen, memory, None)
                images = between
        for run_late, rest in zip(self._late, behind, strict=True):
            if rest is not None:
                run_late(outputs, rest, partners)

    def _between(
        self, images: RaggedImages, program: Program, windows_tlhw: np.ndarray, number: int
    ) -> tuple[RaggedImages, list[torch.Tensor]]:
        """What a run that is not the last one makes: as the images that the next one gets, and as the outputs of this
        one, which are views of these."""
        channels = int(images.shapes[0, 2])
        for record in program.records:
            if isinstance(record, Ops) and record.channels is not None:
                channels = record.channels
        shapes = np.column_stack([windows_tlhw[:, 2:], np.full(len(windows_tlhw), channels)])
        sizes = shapes.prod(axis=1)
        ends = np.cumsum(sizes)
        pixels = self._memory(int(ends[-1]), images.pixels.device, number)
        offsets = ends - sizes
        outputs = [
            pixels[offset : offset + size].view(shape).permute(2, 0, 1)
            for offset, size, shape in zip(offsets.tolist(), sizes.tolist(), shapes.tolist(), strict=True)
        ]
        return RaggedImages(pixels, offsets, shapes, program.results_hw, windows_tlhw, images.labels), outputs

    def _memory(self, nbytes: int, device: torch.device, number: int) -> torch.Tensor:
        """Memory for what lies between two runs. A run reads what the one before it wrote, so that there are two
        pieces in turn."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        place = number % 2
        if len(self._scratch[place]) < nbytes:
            self._scratch[place] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._scratch[place][:nbytes]


def _runs(steps: Sequence[PlanStep], first: int) -> list[_Run]:
    """Neighbours on one backend. What changes no pixels of levels is part of the run that follows, so that none only
    copies; at the end it is what finishes images."""
    names = [step.backend for step in steps]
    for number in reversed(range(len(steps) - 1)):
        if not any(issubclass(outline.kind, CHANGES_PIXELS) for outline in steps[number].transform.outline):
            names[number] = names[number + 1]
    runs, start = [], first
    for name, group in groupby(names):
        count = sum(1 for _ in group)
        runs.append(_Run(name, start, start + count))
        start += count
    return runs


def _places(program: Program, run: _Run) -> tuple[int, int]:
    """Where the records of a run begin and end."""
    return program.place_of(run.start), program.place_of(run.end)
