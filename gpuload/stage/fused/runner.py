"""Runs the fused kernels on batches: a batch's passes are prepared on the host, then launched.

`prepare` does not read pixels, and copies all jobs to the device. `launch` only launches kernels: in each pass, one
kernel for each kind of geometry, and the kernels that make tables of weights or statistics. Between passes, images are
H×W×C levels in scratch memory from the device's allocator. `change_finished` mixes pairs of finished images in place,
and erases boxes after mixing; erasing before mixing is part of the pass that writes the images. This module runs in
the stage's process, on the current stream.
"""

# Type checkers do not understand how kernels are launched.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.backend import ResultFormat
from gpuload.stage.device import capability, upload_arrays, use_device_of
from gpuload.stage.finish import UNCHANGED, Finish, Outputs, apply_late, default_partners
from gpuload.stage.fused.erasing import erase_images
from gpuload.stage.fused.kernel import compiler_options, one_pass
from gpuload.stage.fused.mixing import mix
from gpuload.stage.fused.pixels import INTERPRETED
from gpuload.stage.fused.separable import make_weight_tables
from gpuload.stage.fused.statistics import JOB_LENGTH as COUNTED
from gpuload.stage.fused.statistics import make_level_tables
from gpuload.stage.fused.variants import level_variants
from gpuload.stage.noise import quantile_table
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.backend import TorchBackend
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing.jobs import FLOATS, JOB
from gpuload.transforms.program.fusing.plan import (
    CHANNELS,
    Features,
    Fusing,
    KernelTile,
    LaunchPlan,
    leading_erase_records,
)
from gpuload.transforms.program.ops import Erase, PartnerMix, RecordOutline
from gpuload.workers.batch import PlannedBatch

__all__ = ["FusedRunner", "change_finished", "compile_trial_kernel", "tile_of"]

# Compute capabilities of GPUs whose multiprocessors hold only 16 programs, which would leave them half empty if each
# program had one warp.
FEW_PROGRAMS: Final = ((7, 5), (8, 6), (8, 7))
MAX_REACH_BYTES: Final = 1 << 31  # kernels address the pixels of an image with int32 offsets


class FusedRunner:
    """A runner for records that work on levels (pixel values before normalization), and for erasing right after them.
    The reference processes images whose number of channels is neither 1 nor 3.

    Args:
        finish: the conversion of the final levels to results, for 1 or 3 channels.
        device: the device of the images.

    Attributes:
        tile: the size of tiles.
        features: the features for which kernels are always compiled, so that batches which need only some of the
            features do not need additional kernels.
    """

    reads_planes = True

    def __init__(self, finish: Finish, device: torch.device) -> None:
        self._device = device
        self.tile = tile_of(device)
        self.features = Features()
        constants = [constant.flatten().expand(3) for constant in finish.constants(torch.device("cpu"))]
        self._constants = torch.cat(constants).to(device)
        self._empty_table = torch.zeros(1, dtype=torch.int32, device=device)
        self._reference = TorchBackend(device).level_runner(finish)

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None,
    ) -> Program | None:
        """Implement `gpuload.stage.backend.LevelRunner`."""
        if int(images.shapes[0, 2]) not in CHANNELS:
            return self._reference(images.interleave(windows_tlhw[0]), program, windows_tlhw, outputs, late_program)
        images = images.interleave(windows_tlhw[0]) if _exceeds_int32(images) else images
        erase_records = leading_erase_records(late_program)
        self.launch(*self.prepare(images, program, windows_tlhw, outputs, erase_records), images.pixels, outputs)
        if late_program is None or len(erase_records) == len(late_program.records):
            return None
        return late_program.part(len(erase_records), len(late_program.records))

    def kernels(self, steps: Sequence[Sequence[RecordOutline]], result_format: ResultFormat) -> set[Any]:
        """Implement `gpuload.stage.backend.CompiledRunner.kernels`."""
        self.features = Features.of_outlines(outline for outlines in steps for outline in outlines)
        return (
            level_variants(steps, result_format=result_format, tile=self.tile)
            if {*result_format.channels} <= {*CHANNELS}
            else set()
        )

    def batch_planner(self, *, channels_last: bool) -> Fusing:
        """Return the planner for `launch_planned`, for dense results in this memory format."""
        return Fusing(self.tile, channels_last)

    def prepare(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        erase_records: Sequence[Erase] = (),
    ) -> tuple[LaunchPlan, dict[str, torch.Tensor]]:
        """Plan the passes for a batch; return the plan, and the arrays that kernels read, on the device and keyed by
        name.

        Args:
            images, program, windows_tlhw, outputs: as for `gpuload.stage.backend.LevelRunner`.
            erase_records: the records that erase boxes of finished images.
        """
        plan, arrays = LaunchPlan.build(
            images.table, program, windows_tlhw, *_strides(outputs), erase_records, self.tile, images.steps
        )
        tensors = upload_arrays(list(arrays.values()), self._device)
        return plan, dict(zip(arrays, tensors, strict=True))

    def launch_planned(self, planned: PlannedBatch, pixels: torch.Tensor, outputs: Outputs) -> None:
        """Launch the kernels of a batch that a worker planned; the plan's arrays are stored after the pixels."""
        assert planned.plan is not None
        self.launch(planned.plan, planned.arrays, pixels, outputs)

    def launch(self, plan: LaunchPlan, arrays: dict[str, torch.Tensor], pixels: torch.Tensor, outputs: Outputs) -> None:
        """Launch the kernels of a prepared batch."""
        # Kernels do not read missing arrays, but still need a pointer of the right type, so they get another array.
        filler = {
            "codes": arrays["ints"],
            "values": arrays["floats"],
            "places": self._empty_table,
            "boxes": arrays["ints"],
        }
        arrays = filler | arrays
        features = self.features | plan.features
        # A pass reads the results of the previous pass, so two buffers alternate; the first pass reads the pixels.
        buffers = [
            torch.empty(size, dtype=torch.uint8, device=self._device) if size else pixels for size in plan.scratch_bytes
        ]
        results = outputs if isinstance(outputs, torch.Tensor) else outputs[0]  # offsets count from the first result
        column_stride = 0 if features.has_transposes else results.stride(-1)
        quantiles = quantile_table(pixels.device) if plan.has_erasing else self._constants
        with use_device_of(pixels):
            for launch in plan.launches:
                source = pixels if launch.number == 0 else buffers[(launch.number - 1) % 2]
                target = results if launch.finished else buffers[launch.number % 2]
                statistics = pixels
                if launch.counted_images:
                    start, end = launch.counted_first, launch.counted_first + launch.counted_images
                    count_jobs = _slice(arrays["counted"], start * COUNTED, end * COUNTED)
                    factors = _slice(arrays["factors"], start, end)
                    statistics = make_level_tables(source, count_jobs, factors, launch.counted_pixels, plan.channels)
                ints = _slice(arrays["ints"], launch.first * JOB, (launch.first + launch.jobs) * JOB)
                floats = _slice(arrays["floats"], launch.first * FLOATS, (launch.first + launch.jobs) * FLOATS)
                weights, filters = arrays["places"], features.filters_of(launch.geometry)
                if launch.weights:
                    sizes = launch.jobs, launch.weights, launch.weight_programs
                    weights = make_weight_tables(ints, floats, *sizes, launch.geometry, filters, self.tile.rows)
                one_pass[launch.grid](
                    source,
                    arrays["places"],
                    ints,
                    floats,
                    arrays["codes"],
                    arrays["values"],
                    statistics,
                    weights,
                    arrays["boxes"],
                    quantiles,
                    self._constants,
                    target,
                    CHANNELS=plan.channels,
                    OUT_CHANNELS=plan.out_channels if launch.finished else plan.channels,
                    OUT_COLUMN=column_stride if launch.finished else plan.channels,
                    GEOMETRY=launch.geometry,
                    FILTERS=filters,
                    OPERATIONS=features.operations,
                    FINISHED=launch.finished and target.dtype != torch.uint8,
                    ERASES=launch.finished and plan.has_erasing,
                    ROWS=self.tile.rows,
                    COLUMNS=self.tile.columns,
                    **compiler_options(launch.geometry, self.tile.warps),
                )


def change_finished(outputs: Outputs, late_program: Program, partners: np.ndarray | None) -> None:
    """Mix finished images and erase boxes in them, in place. The arguments are those of
    `gpuload.stage.finish.apply_late`."""
    if outputs[0].shape[0] not in CHANNELS:
        return apply_late(outputs, late_program, partners=partners)
    for record in late_program.records:
        match record:
            case PartnerMix():
                mix(outputs, record, default_partners(len(late_program)) if partners is None else partners)
            case Erase():
                erase_images(outputs, record)


def compile_trial_kernel(device: torch.device) -> None:
    """Compile a small kernel and run it; raise Triton's error if this fails."""
    image = RaggedImages.from_arrays([np.zeros((4, 4, 1), np.uint8)], device)
    empty_program = Program((), image.sizes_hw, image.sizes_hw)
    output = torch.empty(1, 1, 4, 4, dtype=torch.uint8, device=device)
    runner = FusedRunner(UNCHANGED, device)
    runner.launch(*runner.prepare(image, empty_program, empty_program.windows_tlhw, output), image.pixels, output)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def tile_of(device: torch.device) -> KernelTile:
    if INTERPRETED.value:  # the interpreter takes as long for a large tile as for a small one
        return KernelTile(64, 64, 1)
    if capability(device) in FEW_PROGRAMS:
        return KernelTile(8, 64, 2)
    return KernelTile(8, 32, 1)


def _exceeds_int32(images: RaggedImages) -> bool:
    """Return whether strided images have pixels too far from the image's first pixel for int32 offsets."""
    return images.steps is not None and bool(((images.shapes - 1) * images.steps).sum(axis=1).max() >= MAX_REACH_BYTES)


def _slice(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return a slice of a tensor, or the tensor itself if the slice is complete, which saves creating a view."""
    return tensor if end - start == tensor.numel() else tensor[start:end]


def _strides(outputs: Outputs) -> tuple[np.ndarray, Sequence[Any]]:
    """Return each result's offset from the first result, in elements, and the strides of channels, rows and columns."""
    if isinstance(outputs, torch.Tensor):
        step, *steps = outputs.stride()
        return np.arange(len(outputs)) * step, steps
    first, size = outputs[0].data_ptr(), outputs[0].element_size()
    starts = np.array([(output.data_ptr() - first) // size for output in outputs], np.int64)
    return starts, list(np.array([output.stride() for output in outputs], np.int64).T)
