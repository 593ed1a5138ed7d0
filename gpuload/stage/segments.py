"""Runs a sequence of transforms on more than one backend. The sequence is split into *segments* of consecutive
transforms on the same backend. For each batch, a segment's program is split into *parts* at each call of a custom
transform.

Between two segments, images are pixel values (levels) again: H×W×C images in one flat tensor, which holds only the
windows that the next segment needs. A custom transform gets its images as planes, C×H×W. A user's planar images are
converted to the interleaved layout before the first segment, unless that segment's runner reads planes in place. On the
CPU the memory between segments is reused for the next batch; on CUDA it comes from torch's allocator. This module runs
in the stage's process.
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

from gpuload.stage.backend import Backend, CompiledRunner, LateRunner, LevelRunner, ResultFormat
from gpuload.stage.combined_images import combine_images
from gpuload.stage.finish import UNCHANGED, Finish, Outputs
from gpuload.stage.plan import CUSTOM, PlanStep
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.user_code import run_call, split_at_calls
from gpuload.transforms.base import Transform
from gpuload.transforms.program.draws import Program, image_table
from gpuload.transforms.program.fusing.plan import Fusing
from gpuload.transforms.program.ops import CHANGES_PIXELS, Call, Combination, Erase, Ops
from gpuload.workers.batch import PlannedBatch

__all__ = ["CallRunner", "SegmentRunner"]

COMBINING: Final = "combining"


@dataclass(frozen=True)
class _Segment:
    """Consecutive steps that run on one backend, or a single step that combines images.

    Attributes:
        executor: the name of the backend; for a step that combines images, a unique name.
        start, end: the range of the steps; `end` is exclusive.
    """

    executor: str
    start: int
    end: int

    @property
    def is_combining(self) -> bool:
        """Whether this segment is a step that combines images, which `combine_images` does instead of a backend."""
        return self.executor.startswith(COMBINING)

    def bounds(self, program: Program) -> tuple[int, int]:
        """Return where this segment's records begin and end in a program."""
        return program.place_of(self.start), program.place_of(self.end)


class SegmentRunner:
    """A runner that applies a sequence of transforms to batches.

    Args:
        steps: the transforms, each with its backend.
        finish: the conversion of the final levels to results.
        backends: the backends of the steps, and the reference, keyed by name.

    Attributes:
        finish: the conversion of the final levels to results.
        reads_planes: whether strided uint8 images (`RaggedImages.steps`) are read in place, without being copied first.
    """

    def __init__(self, steps: Sequence[PlanStep], finish: Finish, backends: dict[str, Backend]) -> None:
        backends = {**backends, CUSTOM: backends["torch"]}
        self._transforms = [step.transform for step in steps]
        self._backends = backends
        end = next((index for index, step in enumerate(steps) if step.transform.works_on_finished), len(steps))
        self._segments = _group_steps(steps[:end], 0)
        if not self._segments or self._segments[-1].is_combining:  # a backend has to finish the images
            self._segments.append(_Segment("torch", end, end))
        self._call: Callable[..., None] = run_call
        self._late_segments = _group_steps(steps[end:], end)
        unchanged = Finish.of((), None, finish.image_dtype)
        self._runners: list[LevelRunner] = [
            combine_images
            if segment.is_combining
            else backends[segment.executor].level_runner(unchanged if index < len(self._segments) - 1 else finish)
            for index, segment in enumerate(self._segments)
        ]
        self.reads_planes = _reads_planes(self._runners[0])
        self.finish, self._constants = finish, finish.constants(backends["torch"].device)
        self._has_calls = any(outline.kind is Call for step in steps for outline in step.transform.outline)
        # A call in the last segment gets images that are not finished yet.
        self._runner_before_call = (
            backends[self._segments[-1].executor].level_runner(unchanged) if self._has_calls else self._runners[-1]
        )
        self._late_runners: list[LateRunner] = [
            backends[segment.executor].late_runner() for segment in self._late_segments
        ]
        self._dtype = unchanged.dtype
        self._scratch = [torch.empty(0, dtype=self._dtype, device="cpu") for _ in range(3)]

    def __call__(
        self,
        images: RaggedImages,
        program: Program | PlannedBatch,
        outputs: Outputs,
        partners: np.ndarray | None = None,
    ) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W; `partners` is passed to
        `gpuload.stage.finish.apply_late`."""
        if isinstance(program, PlannedBatch):
            assert images.steps is None
            fused_runner: Any = self._runners[0]  # the only runner, see `batch_planner`
            return fused_runner.launch_planned(program, images.pixels, outputs)
        program, late_program = program.split()
        late_parts = (
            []
            if late_program is None
            else [split_at_calls(late_program.part(*segment.bounds(late_program))) for segment in self._late_segments]
        )
        # If the backend of the last segment also runs the first late records, it may apply them in the same pass.
        can_join = bool(late_parts and late_parts[0]) and self._late_segments[0].executor == self._segments[-1].executor
        joined_part = late_parts[0][0] if can_join else None
        remaining = self._apply_levels(
            images, program, outputs, joined_part if isinstance(joined_part, Program) else None
        )
        if isinstance(joined_part, Program):
            late_parts[0][:1] = [] if remaining is None else [remaining]
        for apply_late, parts in zip(self._late_runners, late_parts, strict=True):
            for part in parts:
                if isinstance(part, Call):
                    self._call(part, outputs)
                else:
                    apply_late(outputs, part, partners)

    def batch_planner(self, *, channels_last: bool) -> Fusing | None:
        """Return the planner with which workers can plan batches, if one segment contains all transforms; else
        None."""
        runner, [segment, *other_segments] = self._runners[0], self._segments
        late_transforms = [
            transform
            for late_segment in self._late_segments
            for transform in self._transforms[late_segment.start : late_segment.end]
        ]
        is_single = not (other_segments or self._has_calls) and all(map(_erases_finished_images, late_transforms))
        if not (
            is_single
            and isinstance(runner, CompiledRunner)
            and {late_segment.executor for late_segment in self._late_segments} <= {segment.executor}
        ):
            return None
        return runner.batch_planner(channels_last=channels_last)

    def kernels(self, channels: int, *, channels_last: bool) -> set[Any]:
        """Return the kernels that may be launched for images with this many channels."""
        kernels: set[Any] = set()
        for index, (segment, runner) in enumerate(zip(self._segments, self._runners, strict=True)):
            transforms = self._transforms[segment.start : segment.end]
            channel_counts = [channels]
            for transform in transforms:
                channel_counts.append(transform.output_channels(channel_counts[-1]))
            max_channels, channels = max(channel_counts), channel_counts[-1]
            if not isinstance(runner, CompiledRunner):
                continue
            result_formats = set[ResultFormat]()
            steps = [transform.outline for transform in transforms]
            is_last = index == len(self._segments) - 1
            column_stride = channels if channels_last else 1
            if is_last:
                result_formats.add(
                    ResultFormat(
                        (max_channels, channels), self.finish.dtype, column_stride, self._possible_erases(segment)
                    )
                )
            if not is_last or self._has_calls:
                strides = {channels, 1} if self._has_calls else {channels}  # a call's images are planes
                result_formats |= {ResultFormat((max_channels, channels), self._dtype, stride) for stride in strides}
            for result_format in result_formats:
                kernels |= runner.kernels(steps, result_format)
            if is_last and self._has_calls and isinstance(self._runner_before_call, CompiledRunner):
                kernels |= self._runner_before_call.kernels(
                    steps, ResultFormat((max_channels, channels), self._dtype, 1)
                )
        for segment in self._late_segments:
            result_format = ResultFormat((channels, channels), self.finish.dtype, channels if channels_last else 1)
            late_transforms = self._transforms[segment.start : segment.end]
            while (
                late_transforms
                and not self._has_calls  # after a call at the end, finished images are erased
                and segment is self._late_segments[0]
                and self._possible_erases(self._segments[-1]) == (True,)
                and _erases_finished_images(late_transforms[0])
            ):
                del late_transforms[0]  # applied while the images are written
            kernels |= self._backends[segment.executor].late_kernels(
                [transform.outline for transform in late_transforms], result_format
            )
        return kernels

    def _possible_erases(self, segment: _Segment) -> tuple[bool, ...]:
        """Return whether this segment, the last one on levels, also erases boxes; both values if random parameters
        decide."""
        if not self._late_segments or self._late_segments[0].executor != segment.executor:
            return (False,)
        first_late = self._transforms[self._late_segments[0].start]
        return (True,) if _erases_finished_images(first_late) else (False, True) if first_late.children else (False,)

    def _apply_levels(
        self, images: RaggedImages, program: Program, outputs: Outputs, late_program: Program | None
    ) -> Program | None:
        """Apply the records that work on levels, and finish the images; return the part of `late_program` that remains
        to be applied."""
        windows, parts = program.windows_tlhw, self._split_program(program)
        if images.steps is not None and not _reads_planes(parts[0][0]):
            allocate = partial(self._allocate_levels, device=images.pixels.device, buffer=2)
            images = images.interleave(windows[0], allocate)
        planes: Outputs | None = None  # the input of a call, which changes it in place
        buffers = cycle((0, 1))  # a segment reads the results of the previous segment, so two buffers alternate
        for (runner, start, end), next_part in pairwise(parts):
            part, part_windows = program.part(start, end), windows[start : end + 1]
            if runner is None:
                assert planes is not None
                record = program.records[start]
                assert isinstance(record, Call)
                if next_part is parts[-1] and record.rows is None and not _changes_pixels(program, next_part):
                    self._call(record, planes, write=partial(self._write, outputs))
                    return late_program
                self._call(record, planes)
                continue
            if planes is not None:
                images, planes = self._interleave(images, planes, next(buffers)), None
            channels = _channels_after(images, part)
            if next_part[0] is None:
                planes = self._allocate_planes(channels, part_windows[-1], images.pixels.device, next(buffers))
                runner(images, part, part_windows, planes, None)
                # The table now describes the planes.
                table = image_table(images.offsets, images.shapes, part.results_hw, part_windows[-1])
                images = replace(images, table=table)
            else:
                results, views = self._allocate_images(
                    images, channels, part.results_hw, part_windows[-1], next(buffers)
                )
                runner(images, part, part_windows, views, None)
                images = results
        runner, start, end = parts[-1]
        assert runner is not None
        if planes is not None:
            if not _changes_pixels(program, parts[-1]):
                self.finish.write(planes, outputs, self._constants)
                return late_program
            images = self._interleave(images, planes, next(buffers))
        return runner(images, program.part(start, end), windows[start : end + 1], outputs, late_program)

    def _write(self, outputs: Outputs, rows: np.ndarray, levels: torch.Tensor) -> None:
        """Finish levels, and write them to the batch at the indices `rows`."""
        start, end = int(rows[0]), int(rows[-1]) + 1
        is_contiguous = end - start == len(rows)
        destination = outputs[start:end] if is_contiguous else [outputs[row] for row in rows.tolist()]
        self.finish.write(levels, destination, self._constants)

    def _split_program(self, program: Program) -> list[tuple[LevelRunner | None, int, int]]:
        """Split a program into parts that are applied in order. Each part is a runner, or None for a call, and the
        range of the part's records. The first part and the last part have a runner."""
        parts: list[tuple[LevelRunner | None, int, int]] = []
        for segment_index, (segment, runner) in enumerate(zip(self._segments, self._runners, strict=True)):
            start, end = segment.bounds(program)
            is_last = segment_index == len(self._segments) - 1
            for record_index in range(start, end) if self._has_calls else ():
                if isinstance(program.records[record_index], Call):
                    if record_index > start or not parts:
                        parts.append((self._runner_before_call if is_last else runner, start, record_index))
                    parts.append((None, record_index, record_index + 1))
                    start = record_index + 1
            if start < end or is_last or segment.executor != CUSTOM:
                parts.append((runner, start, end))
        return parts

    def _allocate_images(
        self, images: RaggedImages, channels: int, sizes_hw: np.ndarray, windows_tlhw: np.ndarray, buffer: int
    ) -> tuple[RaggedImages, list[torch.Tensor]]:
        """Allocate the results of a segment other than the last. Return them as the next segment's images, and as this
        segment's outputs, which are C×H×W views of the same memory."""
        shapes = np.column_stack([windows_tlhw[:, 2:], np.full(len(windows_tlhw), channels)])
        sizes = shapes.prod(axis=1)
        ends = np.cumsum(sizes)
        pixels = self._allocate_levels(int(ends[-1]), images.pixels.device, buffer)
        offsets = ends - sizes
        outputs = [
            pixels[offset : offset + size].view(shape).permute(2, 0, 1)
            for offset, size, shape in zip(offsets.tolist(), sizes.tolist(), shapes.tolist(), strict=True)
        ]
        table = image_table(offsets, shapes, sizes_hw, windows_tlhw)
        return replace(images, pixels=pixels, table=table, steps=None, planes=None), outputs

    def _allocate_planes(self, channels: int, windows_tlhw: np.ndarray, device: torch.device, buffer: int) -> Outputs:
        """Allocate the planes for the images of a call."""
        sizes = windows_tlhw[:, 2:]
        ends = np.cumsum(channels * sizes.prod(axis=1)).tolist()
        levels = self._allocate_levels(ends[-1], device, buffer)
        if (sizes == sizes[0]).all():
            return levels.view(len(sizes), channels, *sizes[0].tolist())
        return [
            levels[start:end].view(channels, *size)
            for start, end, size in zip([0, *ends], ends, sizes.tolist(), strict=False)
        ]

    def _interleave(self, images: RaggedImages, planes: Outputs, buffer: int) -> RaggedImages:
        """Copy planes, which a call has changed, to H×W×C images for the next segment."""
        channels = len(planes[0])
        results, views = self._allocate_images(images, channels, images.sizes_hw, images.regions_tlhw, buffer)
        for image, output in zip(planes, views, strict=True):
            output.copy_(image)
        return results

    def _allocate_levels(self, count: int, device: torch.device, buffer: int) -> torch.Tensor:
        """Return memory for `count` levels. On the CPU, the memory is part of a scratch buffer: buffers 0 and 1
        alternate between segments, and buffer 2 holds the input of the first segment."""
        if device.type != "cpu":
            return torch.empty(count, dtype=self._dtype, device=device)
        if len(self._scratch[buffer]) < count:
            self._scratch[buffer] = torch.empty(count, dtype=self._dtype, device="cpu")
        return self._scratch[buffer][:count]


class CallRunner(SegmentRunner):
    """A runner for the programs of masks, which contain only calls, and records that the reference applies. Results
    remain levels. `call` is a function that performs a call; it takes the arguments of `run_call`."""

    def __init__(self, backend: Backend, call: Callable[..., None]) -> None:
        super().__init__((), UNCHANGED, {"torch": backend})
        self._segments, self._has_calls, self._call = [_Segment("torch", 0, sys.maxsize)], True, call


def _reads_planes(runner: LevelRunner | None) -> bool:
    return getattr(runner, "reads_planes", False)


def _erases_finished_images(transform: Transform) -> bool:
    """Return whether a transform erases boxes of all finished images."""
    return not transform.children and any(outline.kind is Erase for outline in transform.outline)


def _changes_pixels(program: Program, part: tuple[LevelRunner | None, int, int]) -> bool:
    return any(isinstance(record, CHANGES_PIXELS) for record in program.records[part[1] : part[2]])


def _channels_after(images: RaggedImages, program: Program) -> int:
    """Return the number of channels of the images after a program."""
    channels = int(images.shapes[0, 2])
    for record in program.records:
        if isinstance(record, Ops) and record.channels is not None:
            channels = record.channels
    return channels


def _group_steps(steps: Sequence[PlanStep], first_index: int) -> list[_Segment]:
    """Group consecutive steps on one backend. A step that does not change pixels is merged into the next segment, so
    that no segment exists only to copy. At the end of the sequence, such a step remains a separate segment, which
    finishes the images."""
    names = [
        f"{COMBINING} {index}" if step.transform.group_size > 1 else step.backend for index, step in enumerate(steps)
    ]
    for index in reversed(range(len(steps) - 1)):
        if not any(
            issubclass(outline.kind, (*CHANGES_PIXELS, Combination)) for outline in steps[index].transform.outline
        ):
            names[index] = names[index + 1]
    segments, start = [], first_index
    for name, group in groupby(names):
        segments.append(_Segment(name, start, start + len(list(group))))
        start = segments[-1].end
    return segments
