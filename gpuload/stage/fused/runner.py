"""Runs the fused kernels over batches: a batch's passes are prepared on the host, then launched.

`prepare` does not look at pixels and copies all jobs to the device; `launch` only launches: for each pass one kernel
for each kind of geometry that images have in it, and the kernels that make its tables of weights or statistics. Between
passes images are levels H×W×C in scratch memory of the device's allocator. Runs in the process of the stage, on the
current stream.
"""

# Type checkers do not know how a kernel is launched.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuload.stage.device import device_of, upload_together
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.fused.grid import tile_of
from gpuload.stage.fused.kernel import one_pass
from gpuload.stage.fused.record import WARP
from gpuload.stage.fused.statistics import JOB as TOLD
from gpuload.stage.fused.statistics import tables
from gpuload.stage.fused.weights import make_tables
from gpuload.stage.noise import quantile_table
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing.layout import FLOATS, JOB
from gpuload.transforms.program.fusing.plan import Plan, Written
from gpuload.transforms.program.ops import Erase
from gpuload.workers.planned import PlannedBatch

__all__ = ["FusedRunner", "Prepared", "options_of"]


class Prepared(NamedTuple):
    """A batch's passes on the device."""

    plan: Plan
    ints: torch.Tensor
    floats: torch.Tensor
    codes: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor
    boxes: torch.Tensor
    told: torch.Tensor
    factors: torch.Tensor


class FusedRunner:
    """Applies records that work on levels, and the erasing right after them.

    Args:
        finish: the end of the chain, for 1 or 3 channels.
        device: where the images are.

    Attributes:
        tile: how images are divided.
        operates: whether all kernels can do operations: so a batch for which none was drawn needs no others.
    """

    def __init__(self, finish: Finish, device: torch.device) -> None:
        self._device = device
        self.tile = tile_of(device)
        self.operates = False
        constants = [constant.flatten().expand(3) for constant in finish.constants(torch.device("cpu"))]
        self._constants = torch.cat(constants).to(device)
        self._places = torch.zeros(1, dtype=torch.int32, device=device)

    def prepare(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late: Sequence[Erase] = (),
    ) -> Prepared:
        """Make the passes for a batch.

        Args:
            images, program, windows_tlhw, outputs: as for `gpuload.stage.backend.Levels`.
            late: what is erased of all finished images.
        """
        plan, arrays = Plan.of(images.table, program, windows_tlhw, _written(outputs), late, self.tile)
        return self._prepared(
            plan, dict(zip(arrays, upload_together(list(arrays.values()), self._device), strict=True))
        )

    def launch_planned(self, planned: PlannedBatch, pixels: torch.Tensor, outputs: Outputs) -> None:
        """Make a batch that was planned elsewhere, whose arrays lie behind the pixels."""
        assert planned.plan is not None
        self.launch(self._prepared(Plan.of_plain(planned.plan), planned.arrays), pixels, outputs)

    def _prepared(self, plan: Plan, found: dict[str, torch.Tensor]) -> Prepared:
        # What there is none of is not read, but a kernel takes a pointer of its type.
        some = {"codes": found["ints"], "values": found["floats"], "places": self._places, "boxes": found["ints"]}
        some |= {"told": found["ints"], "factors": found["floats"]}
        return Prepared(plan, **(some | found))

    def launch(self, prepared: Prepared, pixels: torch.Tensor, outputs: Outputs) -> None:
        """Make a batch of decoded pixels, as it was prepared."""
        plan, operates = prepared.plan, self.operates or prepared.plan.operates
        # A pass reads what the one before it wrote, so two pieces take turns; the first pass reads the pixels.
        # What is not read is the pixels: a kernel takes a pointer of its type.
        pieces = [
            torch.empty(size, dtype=torch.uint8, device=self._device) if size else pixels for size in plan.scratch_bytes
        ]
        results = outputs if isinstance(outputs, torch.Tensor) else outputs[0]  # where they begin
        quantiles = quantile_table(pixels.device) if plan.erases else self._constants
        with device_of(pixels):
            for run in plan.launches:
                source = pixels if run.number == 0 else pieces[(run.number - 1) % 2]
                target = results if run.finished else pieces[run.number % 2]
                statistics = pixels
                if run.statistics is not None:
                    first, count, most = run.statistics
                    told = _part(prepared.told, first * TOLD, (first + count) * TOLD)
                    factors = _part(prepared.factors, first, first + count)
                    statistics = tables(source, told, factors, most, plan.channels)
                ints = _part(prepared.ints, run.first * JOB, (run.first + run.jobs) * JOB)
                floats = _part(prepared.floats, run.first * FLOATS, (run.first + run.jobs) * FLOATS)
                weights = prepared.places
                if run.tables is not None:
                    weights = make_tables(ints, floats, run.jobs, run.tables, run.geometry, self.tile.rows)
                one_pass[run.grid](
                    source,
                    prepared.places,
                    ints,
                    floats,
                    prepared.codes,
                    prepared.values,
                    statistics,
                    weights,
                    prepared.boxes,
                    quantiles,
                    self._constants,
                    target,
                    CHANNELS=plan.channels,
                    OUT_CHANNELS=plan.out_channels if run.finished else plan.channels,
                    OUT_COLUMN=target.stride(-1) if run.finished else plan.channels,
                    GEOMETRY=run.geometry,
                    OPERATES=operates,
                    FINISHED=run.finished and target.dtype != torch.uint8,
                    ERASES=run.finished and plan.erases,
                    ROWS=self.tile.rows,
                    COLUMNS=self.tile.columns,
                    **options_of(run.geometry, self.tile.warps),
                )


@cache
def options_of(geometry: int, warps: int) -> dict[str, Any]:
    """The compiler's options for the kernel of a kind of geometry.

    Without a limit it takes so many registers that few programs run at once; with these limits none is spilled.
    """
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if torch.version.hip is None:
        options["maxnreg"] = 128 if geometry == WARP.value else 80
    return options


def _part(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Some of its numbers; a view of all would only cost time."""
    return tensor if end - start == tensor.numel() else tensor[start:end]


def _written(outputs: Outputs) -> Written:
    """Where results are written."""
    if isinstance(outputs, torch.Tensor):
        step, *steps = outputs.stride()
        return Written(np.arange(len(outputs)) * step, steps[0], steps[1])
    first, size = outputs[0].data_ptr(), outputs[0].element_size()
    starts = np.array([(output.data_ptr() - first) // size for output in outputs], np.int64)
    steps = np.array([output.stride() for output in outputs], np.int64).T
    return Written(starts, steps[0], steps[1])
