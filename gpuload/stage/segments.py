"""A line of transforms on several backends, cut into runs of neighbours on the same backend, and these where the user's
own transforms are called.

Between two runs images are levels again, uint8 H×W×C in one flat tensor, only the windows that the next run needs; a
call gets them as planes, C×H×W. A user's planes become such levels before the first run, unless it is one of compiled
kernels, which read them as they lie. That memory is kept on the CPU, and comes from torch's allocator on CUDA. Runs in
the process of the stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, groupby, pairwise
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.backend import Backend, Compiled, Form, Late, Levels
from gpuload.stage.finish import UNCHANGED, Finish, Outputs
from gpuload.stage.gathering import gather
from gpuload.stage.plan import OWN, PlanStep
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.user_code import cut_at_calls, run_call
from gpuload.transforms.base import Transform
from gpuload.transforms.program.draws import Program, image_table
from gpuload.transforms.program.fusing.plan import Fusing
from gpuload.transforms.program.ops import CHANGES_PIXELS, Call, Erase, Gather, Ops
from gpuload.workers.planned import PlannedBatch

__all__ = ["CallRunner", "SegmentRunner"]

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

    Attributes:
        finish: as given.
        reads_planes: whether images of uint8 are read as they lie (`RaggedImages.steps`), and not copied first.
    """

    def __init__(self, steps: Sequence[PlanStep], finish: Finish, backends: dict[str, Backend]) -> None:
        backends = {**backends, OWN: backends["torch"]}
        self._transforms = [step.transform for step in steps]
        self._backends = backends
        at = next((number for number, step in enumerate(steps) if step.transform.works_on_finished), len(steps))
        self._runs = _runs(steps[:at], 0)
        if not self._runs or self._runs[-1].gathers:  # something has to finish images
            self._runs.append(_Run("torch", at, at))
        self._call: Callable[..., None] = run_call
        self._after = _runs(steps[at:], at)
        unchanged = Finish.of((), None, finish.levels)
        self._levels: list[Levels] = [
            gather
            if run.gathers
            else backends[run.backend].levels(unchanged if number < len(self._runs) - 1 else finish)
            for number, run in enumerate(self._runs)
        ]
        self.reads_planes = isinstance(self._levels[0], Compiled)
        self.finish, self._constants = finish, finish.constants(backends["torch"].device)
        self._calls = any(outline.kind is Call for step in steps for outline in step.transform.outline)
        # Before a call in the last run, images are not finished yet.
        self._before_call = backends[self._runs[-1].backend].levels(unchanged) if self._calls else self._levels[-1]
        self._finishing: list[Late] = [backends[run.backend].on_finished() for run in self._after]
        self._dtype = unchanged.dtype
        self._scratch = [torch.empty(0, dtype=self._dtype, device="cpu") for _ in range(3)]

    def __call__(
        self,
        images: RaggedImages,
        program: Program | PlannedBatch,
        outputs: Outputs,
        partners: np.ndarray | None = None,
    ) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W; `partners` as for
        `gpuload.stage.finish.apply_late`."""
        if isinstance(program, PlannedBatch):
            assert images.steps is None
            planner: Any = self._levels[0]  # the only one, see `fusing`
            return planner.launch_planned(program, images.pixels, outputs)
        program, on_finished = program.split()
        later = (
            []
            if on_finished is None
            else [cut_at_calls(on_finished.part(*run.bounds(on_finished))) for run in self._after]
        )
        # The same backend may apply the first of the late records in the same pass.
        joins = bool(later and later[0]) and self._after[0].backend == self._runs[-1].backend
        first = later[0][0] if joins else None
        left = self._apply_levels(images, program, outputs, first if isinstance(first, Program) else None)
        if isinstance(first, Program):
            later[0][:1] = [] if left is None else [left]
        for finish_images, parts in zip(self._finishing, later, strict=True):
            for part in parts:
                if isinstance(part, Call):
                    self._call(part, outputs)
                else:
                    finish_images(outputs, part, partners)

    def fusing(self, *, channels_last: bool) -> Fusing | None:
        """Return what plans batches elsewhere, if one run does all of this line; else None."""
        levels, [run, *others] = self._levels[0], self._runs
        on_finished = [transform for after in self._after for transform in self._transforms[after.start : after.end]]
        alone = not (others or self._calls) and all(map(_erases, on_finished))
        if not (alone and isinstance(levels, Compiled) and {after.backend for after in self._after} <= {run.backend}):
            return None
        return levels.fusing(channels_last=channels_last)

    def kernels(self, channels: int, *, channels_last: bool) -> set[Any]:
        """Return the kernels that may be launched for images of this many channels."""
        kernels: set[Any] = set()
        for number, (run, levels) in enumerate(zip(self._runs, self._levels, strict=True)):
            transforms = self._transforms[run.start : run.end]
            counts = [channels]
            for transform in transforms:
                counts.append(transform.output_channels(counts[-1]))
            most, channels = max(counts), counts[-1]
            if not isinstance(levels, Compiled):
                continue
            forms = set[Form]()
            steps = [transform.outline for transform in transforms]
            last = number == len(self._runs) - 1
            column = channels if channels_last else 1
            if last:
                forms.add(Form((most, channels), self.finish.dtype, column, self._erases(run)))
            if not last or self._calls:
                forms |= {Form((most, channels), self._dtype, step) for step in {channels, 1}}
            for form in forms:
                kernels |= levels.kernels(steps, form)
            if last and self._calls and isinstance(self._before_call, Compiled):
                kernels |= self._before_call.kernels(steps, Form((most, channels), self._dtype, 1))
        for run in self._after:
            form = Form((channels, channels), self.finish.dtype, channels if channels_last else 1)
            on_finished = self._transforms[run.start : run.end]
            while (
                on_finished
                and run is self._after[0]
                and self._erases(self._runs[-1]) == (True,)
                and _erases(on_finished[0])
            ):
                del on_finished[0]  # as the images are written
            kernels |= self._backends[run.backend].late_kernels([one.outline for one in on_finished], form)
        return kernels

    def _erases(self, run: _Run) -> tuple[bool, ...]:
        """Whether a run on levels, the last one, also erases."""
        if not self._after or self._after[0].backend != run.backend:
            return (False,)
        first = self._transforms[self._after[0].start]
        return (True,) if _erases(first) else (False, True) if first.children else (False,)

    def _apply_levels(
        self, images: RaggedImages, program: Program, outputs: Outputs, on_finished: Program | None
    ) -> Program | None:
        """Apply the records that work on levels, and finish; returns what is left of `on_finished`."""
        windows, parts = program.windows_tlhw, self._cut(program)
        if images.steps is not None and not isinstance(parts[0][0], Compiled):
            memory = partial(self._memory, device=images.pixels.device, turn=2)
            images = images.interleaved(windows[0], memory)
        planes: Outputs | None = None  # what a call is given, and leaves
        turns = cycle((0, 1))  # a run reads what the one before it wrote, so two pieces of memory take turns
        for (levels, start, end), following in pairwise(parts):
            part, seen = program.part(start, end), windows[start : end + 1]
            if levels is None:
                assert planes is not None
                record = program.records[start]
                assert isinstance(record, Call)
                if following is parts[-1] and record.rows is None and not _changes_pixels(program, following):
                    self._call(record, planes, write=partial(self._write, outputs))
                    return on_finished
                self._call(record, planes)
                continue
            if planes is not None:
                images, planes = self._interleaved(images, planes, next(turns)), None
            channels = _channels(images, part)
            if following[0] is None:
                planes = self._planes(channels, seen[-1], images.pixels.device, next(turns))
                levels(images, part, seen, planes, None)
                of = image_table(images.offsets, images.shapes, part.results_hw, seen[-1])  # what the planes are of
                images = replace(images, table=of)
            else:
                between, memory = self._between(images, channels, part.results_hw, seen[-1], next(turns))
                levels(images, part, seen, memory, None)
                images = between
        levels, start, end = parts[-1]
        assert levels is not None
        if planes is not None:
            if not _changes_pixels(program, parts[-1]):
                self.finish.write(planes, outputs, self._constants)
                return on_finished
            images = self._interleaved(images, planes, next(turns))
        return levels(images, program.part(start, end), windows[start : end + 1], outputs, on_finished)

    def _write(self, outputs: Outputs, rows: np.ndarray, levels: torch.Tensor) -> None:
        """Finish the images of some rows, and write them to the batch."""
        start, end = int(rows[0]), int(rows[-1]) + 1
        together = end - start == len(rows)
        place = outputs[start:end] if together else [outputs[row] for row in rows.tolist()]
        self.finish.write(levels, place, self._constants)

    def _cut(self, program: Program) -> list[tuple[Levels | None, int, int]]:
        """The parts that are applied one after the other: a runner, or None for a call; and their records. The first
        and the last have a runner."""
        parts: list[tuple[Levels | None, int, int]] = []
        for number, (run, levels) in enumerate(zip(self._runs, self._levels, strict=True)):
            start, end = run.bounds(program)
            last = number == len(self._runs) - 1
            for at in range(start, end) if self._calls else ():
                if isinstance(program.records[at], Call):
                    if at > start or not parts:
                        parts.append((self._before_call if last else levels, start, at))
                    parts.append((None, at, at + 1))
                    start = at + 1
            if start < end or last or run.backend != OWN:
                parts.append((levels, start, end))
        return parts

    def _between(
        self, images: RaggedImages, channels: int, sizes_hw: np.ndarray, windows_tlhw: np.ndarray, turn: int
    ) -> tuple[RaggedImages, list[torch.Tensor]]:
        """Memory for the results of a run that is not the last: as the next run's images, and, as views of these, this
        run's outputs."""
        shapes = np.column_stack([windows_tlhw[:, 2:], np.full(len(windows_tlhw), channels)])
        sizes = shapes.prod(axis=1)
        ends = np.cumsum(sizes)
        pixels = self._memory(int(ends[-1]), images.pixels.device, turn)
        offsets = ends - sizes
        outputs = [
            pixels[offset : offset + size].view(shape).permute(2, 0, 1)
            for offset, size, shape in zip(offsets.tolist(), sizes.tolist(), shapes.tolist(), strict=True)
        ]
        table = image_table(offsets, shapes, sizes_hw, windows_tlhw)
        return replace(images, pixels=pixels, table=table, steps=None, planes=None), outputs

    def _planes(self, channels: int, windows_tlhw: np.ndarray, device: torch.device, turn: int) -> Outputs:
        """Memory for what a call is given."""
        sizes = windows_tlhw[:, 2:]
        ends = np.cumsum(channels * sizes.prod(axis=1)).tolist()
        levels = self._memory(ends[-1], device, turn)
        if (sizes == sizes[0]).all():
            return levels.view(len(sizes), channels, *sizes[0].tolist())
        return [
            levels[start:end].view(channels, *size)
            for start, end, size in zip([0, *ends], ends, sizes.tolist(), strict=False)
        ]

    def _interleaved(self, images: RaggedImages, planes: Outputs, turn: int) -> RaggedImages:
        """Return what a call left, as the next run's images."""
        channels = len(planes[0])
        between, memory = self._between(images, channels, images.sizes_hw, images.regions_tlhw, turn)
        for image, output in zip(planes, memory, strict=True):
            output.copy_(image)
        return between

    def _memory(self, count: int, device: torch.device, turn: int) -> torch.Tensor:
        """Memory between two runs; `turn`: which of the two pieces. Or, with 2, before the first."""
        if device.type != "cpu":
            return torch.empty(count, dtype=self._dtype, device=device)
        if len(self._scratch[turn]) < count:
            self._scratch[turn] = torch.empty(count, dtype=self._dtype, device="cpu")
        return self._scratch[turn][:count]


class CallRunner(SegmentRunner):
    """Applies programs of the reference's records and calls, whose results stay levels: those of masks. `call` makes a
    call, with the arguments of `run_call`."""

    def __init__(self, backend: Backend, call: Callable[..., None]) -> None:
        super().__init__((), UNCHANGED, {"torch": backend})
        self._runs, self._calls, self._call = [_Run("torch", 0, sys.maxsize)], True, call


def _erases(transform: Transform) -> bool:
    """Whether it is one that erases boxes of all finished images."""
    return not transform.children and any(outline.kind is Erase for outline in transform.outline)


def _changes_pixels(program: Program, part: tuple[Levels | None, int, int]) -> bool:
    return any(isinstance(record, CHANGES_PIXELS) for record in program.records[part[1] : part[2]])


def _channels(images: RaggedImages, program: Program) -> int:
    """How many channels images have after a program."""
    channels = int(images.shapes[0, 2])
    for record in program.records:
        if isinstance(record, Ops) and record.channels is not None:
            channels = record.channels
    return channels


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
