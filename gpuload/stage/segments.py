"""Runs a line of transforms on more than one backend. The line is split into runs of consecutive transforms on the same
backend, and runs are split again at each call of a custom transform.

Between two runs, images are levels again: uint8 H×W×C in one flat tensor, which holds only the windows that the next
run needs. A call gets its images as planes, C×H×W. A user's planar images are converted to such levels before the first
run, unless that run uses compiled kernels, which read planes in place. On the CPU this memory is reused for the next
batch; on CUDA it comes from torch's allocator. Runs in the stage's process.
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
    """Steps `start` … `end` - 1 of a line, which run on one backend; or a single step that combines images."""

    backend: str
    start: int
    end: int

    @property
    def gathers(self) -> bool:
        """Whether this run is a step that combines images, which no backend does."""
        return self.backend.startswith(GATHERS)

    def bounds(self, program: Program) -> tuple[int, int]:
        """Return where this run's records begin and end in a program."""
        return program.place_of(self.start), program.place_of(self.end)


class SegmentRunner:
    """Applies a line of transforms to batches.

    Args:
        steps: the backend of each transform.
        finish: converts the last levels to results.
        backends: the backends of the steps and the reference, keyed by name.

    Attributes:
        finish: the argument.
        reads_planes: whether strided uint8 images (`RaggedImages.steps`) are read in place, without being copied first.
    """

    def __init__(self, steps: Sequence[PlanStep], finish: Finish, backends: dict[str, Backend]) -> None:
        backends = {**backends, OWN: backends["torch"]}
        self._transforms = [step.transform for step in steps]
        self._backends = backends
        end = next((number for number, step in enumerate(steps) if step.transform.works_on_finished), len(steps))
        self._runs = _runs(steps[:end], 0)
        if not self._runs or self._runs[-1].gathers:  # a backend has to finish the images
            self._runs.append(_Run("torch", end, end))
        self._call: Callable[..., None] = run_call
        self._late_runs = _runs(steps[end:], end)
        unchanged = Finish.of((), None, finish.levels)
        self._levels: list[Levels] = [
            gather
            if run.gathers
            else backends[run.backend].levels(unchanged if number < len(self._runs) - 1 else finish)
            for number, run in enumerate(self._runs)
        ]
        self.reads_planes = isinstance(self._levels[0], Compiled)
        self.finish, self._constants = finish, finish.constants(backends["torch"].device)
        self._has_calls = any(outline.kind is Call for step in steps for outline in step.transform.outline)
        # A call in the last run gets images that are not finished yet.
        self._before_call = backends[self._runs[-1].backend].levels(unchanged) if self._has_calls else self._levels[-1]
        self._late: list[Late] = [backends[run.backend].on_finished() for run in self._late_runs]
        self._dtype = unchanged.dtype
        self._scratch = [torch.empty(0, dtype=self._dtype, device="cpu") for _ in range(3)]

    def __call__(
        self,
        images: RaggedImages,
        program: Program | PlannedBatch,
        outputs: Outputs,
        partners: np.ndarray | None = None,
    ) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W; `partners` is the argument of
        `gpuload.stage.finish.apply_late`."""
        if isinstance(program, PlannedBatch):
            assert images.steps is None
            fused_runner: Any = self._levels[0]  # the only runner, see `fusing`
            return fused_runner.launch_planned(program, images.pixels, outputs)
        program, on_finished = program.split()
        late_parts = (
            []
            if on_finished is None
            else [cut_at_calls(on_finished.part(*run.bounds(on_finished))) for run in self._late_runs]
        )
        # If the first late records have the same backend as the last run, that backend may apply them in the same pass.
        can_join = bool(late_parts and late_parts[0]) and self._late_runs[0].backend == self._runs[-1].backend
        joined = late_parts[0][0] if can_join else None
        remaining = self._apply_levels(images, program, outputs, joined if isinstance(joined, Program) else None)
        if isinstance(joined, Program):
            late_parts[0][:1] = [] if remaining is None else [remaining]
        for finish_images, parts in zip(self._late, late_parts, strict=True):
            for part in parts:
                if isinstance(part, Call):
                    self._call(part, outputs)
                else:
                    finish_images(outputs, part, partners)

    def fusing(self, *, channels_last: bool) -> Fusing | None:
        """Return the planner with which workers can plan batches, if a single run executes the entire line; else
        None."""
        levels, [run, *other_runs] = self._levels[0], self._runs
        late_transforms = [
            transform for late in self._late_runs for transform in self._transforms[late.start : late.end]
        ]
        is_single = not (other_runs or self._has_calls) and all(map(_erases, late_transforms))
        if not (
            is_single and isinstance(levels, Compiled) and {late.backend for late in self._late_runs} <= {run.backend}
        ):
            return None
        return levels.fusing(channels_last=channels_last)

    def kernels(self, channels: int, *, channels_last: bool) -> set[Any]:
        """Return the kernels that may be launched for images with this many channels."""
        kernels: set[Any] = set()
        for number, (run, levels) in enumerate(zip(self._runs, self._levels, strict=True)):
            transforms = self._transforms[run.start : run.end]
            counts = [channels]
            for transform in transforms:
                counts.append(transform.output_channels(counts[-1]))
            max_channels, channels = max(counts), counts[-1]
            if not isinstance(levels, Compiled):
                continue
            forms = set[Form]()
            steps = [transform.outline for transform in transforms]
            is_last = number == len(self._runs) - 1
            column = channels if channels_last else 1
            if is_last:
                forms.add(Form((max_channels, channels), self.finish.dtype, column, self._erases(run)))
            if not is_last or self._has_calls:
                forms |= {Form((max_channels, channels), self._dtype, step) for step in {channels, 1}}
            for form in forms:
                kernels |= levels.kernels(steps, form)
            if is_last and self._has_calls and isinstance(self._before_call, Compiled):
                kernels |= self._before_call.kernels(steps, Form((max_channels, channels), self._dtype, 1))
        for run in self._late_runs:
            form = Form((channels, channels), self.finish.dtype, channels if channels_last else 1)
            late_transforms = self._transforms[run.start : run.end]
            while (
                late_transforms
                and run is self._late_runs[0]
                and self._erases(self._runs[-1]) == (True,)
                and _erases(late_transforms[0])
            ):
                del late_transforms[0]  # applied while the images are written
            kernels |= self._backends[run.backend].late_kernels(
                [transform.outline for transform in late_transforms], form
            )
        return kernels

    def _erases(self, run: _Run) -> tuple[bool, ...]:
        """Return whether the last run on levels also erases; both values if that depends on draws."""
        if not self._late_runs or self._late_runs[0].backend != run.backend:
            return (False,)
        first_late = self._transforms[self._late_runs[0].start]
        return (True,) if _erases(first_late) else (False, True) if first_late.children else (False,)

    def _apply_levels(
        self, images: RaggedImages, program: Program, outputs: Outputs, on_finished: Program | None
    ) -> Program | None:
        """Apply the records that work on levels, and finish the images; return the records of `on_finished` that remain
        to be applied."""
        windows, parts = program.windows_tlhw, self._split(program)
        if images.steps is not None and not isinstance(parts[0][0], Compiled):
            allocate = partial(self._memory, device=images.pixels.device, buffer=2)
            images = images.interleaved(windows[0], allocate)
        planes: Outputs | None = None  # the input of a call, which changes it in place
        buffers = cycle((0, 1))  # a run reads the results of the previous run, so two buffers alternate
        for (levels, start, end), next_part in pairwise(parts):
            part, part_windows = program.part(start, end), windows[start : end + 1]
            if levels is None:
                assert planes is not None
                record = program.records[start]
                assert isinstance(record, Call)
                if next_part is parts[-1] and record.rows is None and not _changes_pixels(program, next_part):
                    self._call(record, planes, write=partial(self._write, outputs))
                    return on_finished
                self._call(record, planes)
                continue
            if planes is not None:
                images, planes = self._interleaved(images, planes, next(buffers)), None
            channels = _channels(images, part)
            if next_part[0] is None:
                planes = self._planes(channels, part_windows[-1], images.pixels.device, next(buffers))
                levels(images, part, part_windows, planes, None)
                # The table now describes the planes.
                table = image_table(images.offsets, images.shapes, part.results_hw, part_windows[-1])
                images = replace(images, table=table)
            else:
                results, views = self._allocate(images, channels, part.results_hw, part_windows[-1], next(buffers))
                levels(images, part, part_windows, views, None)
                images = results
        levels, start, end = parts[-1]
        assert levels is not None
        if planes is not None:
            if not _changes_pixels(program, parts[-1]):
                self.finish.write(planes, outputs, self._constants)
                return on_finished
            images = self._interleaved(images, planes, next(buffers))
        return levels(images, program.part(start, end), windows[start : end + 1], outputs, on_finished)

    def _write(self, outputs: Outputs, rows: np.ndarray, levels: torch.Tensor) -> None:
        """Finish the images of some rows, and write them to the batch."""
        start, end = int(rows[0]), int(rows[-1]) + 1
        is_contiguous = end - start == len(rows)
        destination = outputs[start:end] if is_contiguous else [outputs[row] for row in rows.tolist()]
        self.finish.write(levels, destination, self._constants)

    def _split(self, program: Program) -> list[tuple[Levels | None, int, int]]:
        """Split a program into parts that are applied in order. Each part is a runner, or None for a call, and the
        range of its records. The first and the last part have a runner."""
        parts: list[tuple[Levels | None, int, int]] = []
        for number, (run, levels) in enumerate(zip(self._runs, self._levels, strict=True)):
            start, end = run.bounds(program)
            is_last = number == len(self._runs) - 1
            for index in range(start, end) if self._has_calls else ():
                if isinstance(program.records[index], Call):
                    if index > start or not parts:
                        parts.append((self._before_call if is_last else levels, start, index))
                    parts.append((None, index, index + 1))
                    start = index + 1
            if start < end or is_last or run.backend != OWN:
                parts.append((levels, start, end))
        return parts

    def _allocate(
        self, images: RaggedImages, channels: int, sizes_hw: np.ndarray, windows_tlhw: np.ndarray, buffer: int
    ) -> tuple[RaggedImages, list[torch.Tensor]]:
        """Allocate the results of a run before the last. Return them as the next run's images, and as this run's
        outputs, C×H×W views of the same memory."""
        shapes = np.column_stack([windows_tlhw[:, 2:], np.full(len(windows_tlhw), channels)])
        sizes = shapes.prod(axis=1)
        ends = np.cumsum(sizes)
        pixels = self._memory(int(ends[-1]), images.pixels.device, buffer)
        offsets = ends - sizes
        outputs = [
            pixels[offset : offset + size].view(shape).permute(2, 0, 1)
            for offset, size, shape in zip(offsets.tolist(), sizes.tolist(), shapes.tolist(), strict=True)
        ]
        table = image_table(offsets, shapes, sizes_hw, windows_tlhw)
        return replace(images, pixels=pixels, table=table, steps=None, planes=None), outputs

    def _planes(self, channels: int, windows_tlhw: np.ndarray, device: torch.device, buffer: int) -> Outputs:
        """Allocate the planes for the images of a call."""
        sizes = windows_tlhw[:, 2:]
        ends = np.cumsum(channels * sizes.prod(axis=1)).tolist()
        levels = self._memory(ends[-1], device, buffer)
        if (sizes == sizes[0]).all():
            return levels.view(len(sizes), channels, *sizes[0].tolist())
        return [
            levels[start:end].view(channels, *size)
            for start, end, size in zip([0, *ends], ends, sizes.tolist(), strict=False)
        ]

    def _interleaved(self, images: RaggedImages, planes: Outputs, buffer: int) -> RaggedImages:
        """Copy planes, which a call has changed, to images for the next run."""
        channels = len(planes[0])
        results, views = self._allocate(images, channels, images.sizes_hw, images.regions_tlhw, buffer)
        for image, output in zip(planes, views, strict=True):
            output.copy_(image)
        return results

    def _memory(self, count: int, device: torch.device, buffer: int) -> torch.Tensor:
        """Return memory for `count` levels. On the CPU it is part of a scratch buffer: 0 and 1 alternate between runs,
        2 is for the input of the first run."""
        if device.type != "cpu":
            return torch.empty(count, dtype=self._dtype, device=device)
        if len(self._scratch[buffer]) < count:
            self._scratch[buffer] = torch.empty(count, dtype=self._dtype, device="cpu")
        return self._scratch[buffer][:count]


class CallRunner(SegmentRunner):
    """A runner for the programs of masks, which contain only calls and records for the reference, and whose results
    stay levels. `call` performs a call, with the arguments of `run_call`."""

    def __init__(self, backend: Backend, call: Callable[..., None]) -> None:
        super().__init__((), UNCHANGED, {"torch": backend})
        self._runs, self._has_calls, self._call = [_Run("torch", 0, sys.maxsize)], True, call


def _erases(transform: Transform) -> bool:
    """Return whether a transform erases boxes of all finished images."""
    return not transform.children and any(outline.kind is Erase for outline in transform.outline)


def _changes_pixels(program: Program, part: tuple[Levels | None, int, int]) -> bool:
    return any(isinstance(record, CHANGES_PIXELS) for record in program.records[part[1] : part[2]])


def _channels(images: RaggedImages, program: Program) -> int:
    """Return the number of channels that images have after a program."""
    channels = int(images.shapes[0, 2])
    for record in program.records:
        if isinstance(record, Ops) and record.channels is not None:
            channels = record.channels
    return channels


def _runs(steps: Sequence[PlanStep], start_number: int) -> list[_Run]:
    """Group consecutive steps on one backend. A step that changes no pixels of levels joins the next run, so that no
    run only copies; at the end of the line it stays a separate run, which finishes the images."""
    names = [f"{GATHERS} {number}" if step.transform.gathers > 1 else step.backend for number, step in enumerate(steps)]
    for number in reversed(range(len(steps) - 1)):
        if not any(issubclass(outline.kind, (*CHANGES_PIXELS, Gather)) for outline in steps[number].transform.outline):
            names[number] = names[number + 1]
    runs, start = [], start_number
    for name, group in groupby(names):
        runs.append(_Run(name, start, start + len(list(group))))
        start = runs[-1].end
    return runs
