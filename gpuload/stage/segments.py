"""A line of transforms on several backends, cut into runs of neighbours on the same backend.

Between two runs images are levels again, uint8 H×W×C in one flat tensor, only the windows that the next run needs. That
memory is kept on the CPU, and comes from torch's allocator on CUDA. Runs in the process of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch

from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import UNCHANGED, Finish
from gpuload.stage.finished import Outputs
from gpuload.stage.gathering import Gathered, gather, gather_records, groups_of
from gpuload.stage.plan import PlanStep
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.gathers import Gather
from gpuload.transforms.program.ops import CHANGES_PIXELS, Ops

__all__ = ["SegmentRunner"]

GATHERS: Final = "gathering"


@dataclass(frozen=True)
class _Run:
    """The steps `start` … `end` - 1 of a line, on a backend; or one that puts images together."""

    backend: str
    start: int
    end: int

    @property
    def gathers(self) -> bool:
        """Whether it is a step that puts images together, which is done here."""
        return self.backend.startswith(GATHERS)

    def bounds(self, program: Program) -> tuple[int, int]:
        """Where its records begin and end in a program."""
        return program.place_of(self.start), program.place_of(self.end)


class SegmentRunner:
    """Applies a line of transforms to batches.

    Args:
        steps: where each transform runs.
        finish: the end of the line.
        backends: by name, those of the steps and the reference.
    """

    def __init__(self, steps: Sequence[PlanStep], finish: Finish, backends: dict[str, Backend]) -> None:
        at = next((number for number, step in enumerate(steps) if step.transform.late), len(steps))
        self._runs = _runs(steps[:at], 0)
        if not self._runs or self._runs[-1].gathers:  # something has to finish images
            self._runs.append(_Run("torch", at, at))
        self._after = _runs(steps[at:], at)
        self._levels: list[Levels] = [
            backends["torch" if run.gathers else run.backend].levels(
                UNCHANGED if number < len(self._runs) - 1 else finish
            )
            for number, run in enumerate(self._runs)
        ]
        self._late: list[Late] = [backends[run.backend].late() for run in self._after]
        self._scratch = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        outputs: Outputs,
        partners: np.ndarray | None = None,
        gathered: Sequence[Gathered] | None = None,
    ) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W; `partners` as for
        `gpuload.stage.finished.apply_late`, `gathered` for each record that puts images together; None: rows 4k … 4k +
        3 are groups."""
        program, late = program.split()
        windows = program.windows_tlhw
        if gathered is None:
            gathered = [Gathered(groups_of(np.arange(len(images)), 4)) for _ in gather_records(program)]
        found = iter(gathered)
        later = [] if late is None else [late.part(*run.bounds(late)) for run in self._after]
        for number, (run, levels) in enumerate(zip(self._runs, self._levels, strict=True)):
            start, end = run.bounds(program)
            part, seen = program.part(start, end), windows[start : end + 1]
            if run.gathers:
                between, memory = self._between(images, part, seen[-1], number)
                [(_, record)] = gather_records(part)
                gather(images, record, next(found), seen[-1], memory)
                images = between
            elif number == len(self._runs) - 1:
                # The same backend may apply the first of the late records in the same pass.
                joins = bool(later) and self._after[0].backend == run.backend
                left = levels(images, part, seen, outputs, later[0] if joins else None)
                later = [left, *later[1:]] if joins else later
            else:
                between, memory = self._between(images, part, seen[-1], number)
                levels(images, part, seen, memory, None)
                images = between
        for run_late, rest in zip(self._late, later, strict=True):
            if rest is not None:
                run_late(outputs, rest, partners)

    def _between(
        self, images: RaggedImages, program: Program, windows_tlhw: np.ndarray, number: int
    ) -> tuple[RaggedImages, list[torch.Tensor]]:
        """Memory for the results of a run that is not the last: as the next run's images, and, as views of these, this
        run's outputs."""
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
        """Memory between two runs. A run reads what the one before it wrote, so two pieces take turns."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        turn = number % 2
        if len(self._scratch[turn]) < nbytes:
            self._scratch[turn] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._scratch[turn][:nbytes]


def _runs(steps: Sequence[PlanStep], first: int) -> list[_Run]:
    """Neighbours on one backend. A step that changes no pixels of levels joins the run after it, so that no run only
    copies; at the end of the line it keeps its own, which finishes images."""
    names = [f"{GATHERS} {number}" if step.transform.gathers > 1 else step.backend for number, step in enumerate(steps)]
    for number in reversed(range(len(steps) - 1)):
        if not any(issubclass(outline.kind, (*CHANGES_PIXELS, Gather)) for outline in steps[number].transform.outline):
            names[number] = names[number + 1]
    runs, start = [], first
    for name, group in groupby(names):
        runs.append(_Run(name, start, start + len(list(group))))
        start = runs[-1].end
    return runs
