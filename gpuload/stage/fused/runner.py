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
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.accelerator import device_of
from gpuload.stage.finish import Finish
from gpuload.stage.finished import Outputs
from gpuload.stage.fused.erasing import RECORD, quantile_table, records
from gpuload.stage.fused.grid import Tile, portions, tile_of
from gpuload.stage.fused.jobs import OUT, WHOLE
from gpuload.stage.fused.kernel import one_pass
from gpuload.stage.fused.passes import Passes
from gpuload.stage.fused.record import FLOATS, JOB
from gpuload.stage.fused.record import PLAIN as R
from gpuload.stage.fused.statistics import tables
from gpuload.stage.fused.weights import Tables, make_tables, place_tables
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.upload import upload_together
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Ops

__all__ = ["FusedRunner", "Prepared", "options_of"]

KINDS: Final = 8  # more than there are kinds of geometry
ARRAYS: Final = ("ints", "floats", "codes", "values", "places", "boxes")  # of a batch on the device
KERNELS: Final = np.arange(KINDS)  # the kind of kernel that does each kind of geometry
KERNELS[R.TABLE] = R.COPY


@dataclass(frozen=True)
class _Launch:
    """Pass `number` over some images whose geometries are of one kind: the range of its jobs, the tiles of the largest,
    whether it is their last, and what is needed before it: statistics of some (jobs and factors), and weights.

    A kernel for one kind needs half the registers of one for all kinds.
    """

    first: int
    count: int
    tiles: int
    number: int
    geometry: int
    finished: bool
    statistics: tuple[np.ndarray, np.ndarray] | None
    tables: Tables | None

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles come first: there may be more than the second axis of a grid takes."""
        return self.tiles, self.count


@dataclass(frozen=True)
class Prepared:
    """A batch's passes on the device."""

    launches: tuple[_Launch, ...]
    ints: torch.Tensor
    floats: torch.Tensor
    codes: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor
    boxes: torch.Tensor
    channels: int
    out_channels: int
    operates: bool
    erases: bool
    scratch_bytes: tuple[int, int]


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
        channels = [int(images.shapes[0, 2])]
        channels += [record.channels for record in program.records if isinstance(record, Ops) and record.channels]
        passes = Passes(images, windows_tlhw[0], max(channels))
        passes.apply(program, windows_tlhw)
        codes, values = passes.packed_operations()
        scratch = _place_scratch(passes)
        _place_outputs(passes, outputs)
        boxes = _place_boxes(passes, late, channels[-1])
        launches, ints, floats = _launches(passes, codes, values, self.tile)
        own = ints, floats, [codes], [values], passes.tables, [boxes]
        given = {name: arrays for name, arrays in zip(ARRAYS, own, strict=True) if any(map(len, arrays))}
        found = dict(zip(given, upload_together(list(given.values()), self._device), strict=True))
        # What there is none of is not read, but a kernel takes a pointer of its type.
        some = {"codes": found["ints"], "values": found["floats"], "places": self._places, "boxes": found["ints"]}
        return Prepared(
            launches,
            **(some | found),
            channels=max(channels),
            out_channels=channels[-1],
            operates=self.operates or any(isinstance(record, Ops | Erase) for record in program.records),
            erases=bool(late),
            scratch_bytes=scratch,
        )

    def launch(self, prepared: Prepared, pixels: torch.Tensor, outputs: Outputs) -> None:
        """Make a batch of decoded pixels, as it was prepared."""
        # A pass reads what the one before it wrote, so two pieces take turns; the first pass reads the pixels.
        pieces = [torch.empty(max(1, size), dtype=torch.uint8, device=self._device) for size in prepared.scratch_bytes]
        quantiles = quantile_table(pixels.device) if prepared.erases else self._constants
        with device_of(pixels):
            for run in prepared.launches:
                source = pixels if run.number == 0 else pieces[(run.number - 1) % 2]
                target = outputs[0] if run.finished else pieces[run.number % 2]
                statistics = pieces[0]
                if run.statistics is not None:
                    statistics = tables(source, *run.statistics, prepared.channels)
                ints, floats = prepared.ints[run.first * JOB :], prepared.floats[run.first * FLOATS :]
                weights = prepared.places
                if run.tables is not None:
                    weights = make_tables(ints, floats, run.count, run.tables, run.geometry, self.tile.rows)
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
                    CHANNELS=prepared.channels,
                    OUT_CHANNELS=prepared.out_channels if run.finished else prepared.channels,
                    OUT_COLUMN=target.stride(-1) if run.finished else prepared.channels,
                    GEOMETRY=run.geometry,
                    OPERATES=prepared.operates,
                    FINISHED=run.finished and target.dtype != torch.uint8,
                    ERASES=run.finished and prepared.erases,
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
        options["maxnreg"] = 128 if geometry == R.WARP else 80
    return options


def _place_scratch(passes: Passes) -> tuple[int, int]:
    """Set where all passes but an image's last write, and where the next ones read; the sizes of both pieces, bytes."""
    sizes = [0, 0]
    for number in range(passes.count - 1):
        own, rows = passes.jobs[number], passes.after(number)
        widths = own[R.OUT_WIDTH, rows] * passes.channels
        lengths = own[R.OUT_HEIGHT, rows] * widths
        ends = lengths.cumsum()
        starts = ends - lengths
        own[R.OUT_AT, rows], own[R.OUT_CHANNEL, rows], own[R.OUT_ROW, rows] = starts, 1, widths
        passes.jobs[number + 1, R.BASE, rows] += starts
        sizes[number % 2] = max(sizes[number % 2], int(ends[-1]))
    return sizes[0], sizes[1]


def _place_outputs(passes: Passes, outputs: Outputs) -> None:
    """Set where an image's last pass writes."""
    if isinstance(outputs, torch.Tensor):
        step, *steps = outputs.stride()
        starts = np.arange(len(passes.last)) * step
    else:
        first, size = outputs[0].data_ptr(), outputs[0].element_size()
        starts = np.array([(output.data_ptr() - first) // size for output in outputs], np.int64)
        steps = np.array([output.stride() for output in outputs], np.int64).T
    passes.set_last(((R.OUT_AT, starts), (R.OUT_CHANNEL, steps[0]), (R.OUT_ROW, steps[1])))


def _place_boxes(passes: Passes, late: Sequence[Erase], channels: int) -> np.ndarray:
    """Set what an image's last pass erases; the numbers of all boxes, int64 (n, `RECORD`)."""
    if not late:
        return np.empty((0, RECORD), np.int64)
    boxes = np.concatenate([records(erase, channels) for erase in late], axis=1)
    each = boxes.shape[1]
    passes.set_last(((R.BOXES_AT, np.arange(len(boxes)) * each), (R.BOXES, each)))
    return boxes.reshape(-1, RECORD)


def _launches(
    passes: Passes, codes: np.ndarray, values: np.ndarray, tile: Tile
) -> tuple[tuple[_Launch, ...], list[np.ndarray], list[np.ndarray]]:
    """The launches, in order, and the numbers of their jobs, in the same order, pass by pass."""
    launches, ints, floats, first = [], [], [], 0
    for number in range(passes.count):
        jobs, own_floats = passes.jobs[number], passes.floats[number]
        # Those of one launch are brought together: of one kernel, and that end here or do not.
        groups = KERNELS[jobs[R.KIND]] + KINDS * (passes.last == number)
        rows, spans = passes.after(number - 1), [(int(groups[0]), 0, len(groups))]
        if not isinstance(rows, slice) or (groups != groups[0]).any():
            rows = np.arange(len(groups))[rows]
            rows = rows[groups[rows].argsort(kind="stable")]
            jobs, own_floats, groups = jobs.take(rows, 1), own_floats.take(rows, 0), groups[rows]
            ends = np.bincount(groups).cumsum().tolist()
            spans = [(group, *span) for group, span in enumerate(pairwise([0, *ends])) if span[0] < span[1]]
        heights, widths = jobs[OUT]
        tiles = (heights + (tile.rows - 1)) // tile.rows * ((widths + (tile.columns - 1)) // tile.columns)
        counted = jobs[R.STATISTICS_AT].nonzero()[0]  # ascending
        for group, start, end in spans:
            finished, kind = divmod(group, KINDS)
            for own in portions(end - start, start):
                statistics = None if not len(counted) else _statistics(jobs, own, counted, codes, values)
                weighed = place_tables(jobs[:, own].T, kind, tile.rows)
                most, count = int(tiles[own].max()), own.stop - own.start
                launches.append(_Launch(first, count, most, number, kind, bool(finished), statistics, weighed))
                first += count
        ints.append(jobs.T)
        floats.append(own_floats)
    return tuple(launches), ints, floats


def _statistics(
    jobs: np.ndarray, own: slice, counted: np.ndarray, codes: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """The tables that a launch needs, for its `own` jobs of a pass of which those `counted` need one: the jobs and the
    factors that make them; each job is told which one is its own. None: it needs none."""
    at, to = counted.searchsorted((own.start, own.stop)).tolist()
    if to == at:
        return None
    these = counted[at:to]
    jobs[R.STATISTICS_AT, these] = np.arange(to - at)
    places = jobs[R.OPERATIONS_AT, these]  # what needs it comes first in a pass
    told = np.empty((len(these), 4), np.int64)
    told[:, 0], told[:, 1:3], told[:, 3] = jobs[R.BASE, these], jobs[WHOLE, these].T, codes[places]
    return told, values[places, 0]
