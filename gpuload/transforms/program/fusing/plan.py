"""A batch as the fused kernels get it: its jobs, and how they are launched.

Made from images' places and a program, without a look at pixels: in the main process, or by a worker. Nothing is kept
from batch to batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing import jobs as R
from gpuload.transforms.program.fusing.passes import Passes
from gpuload.transforms.program.ops import Erase, Ops, Turn
from gpuload.transforms.program.windows import transposed_boxes

__all__ = ["Fusing", "Launch", "Plan", "Tile", "leading_erasing", "portions"]

SECOND_AXIS: Final = 65_535  # programs along a grid's second axis
# Programs of a launch: Triton's launcher multiplies the axes as int32, and launches nothing if that is not positive.
MOST_PROGRAMS: Final = 2**31 - 1
KINDS: Final = 8  # more than there are kinds of geometry
ARRAYS: Final = ("ints", "floats", "codes", "values", "places", "boxes", "counted", "factors")
KERNELS: Final = np.arange(KINDS)  # the kind of kernel that does each kind of geometry
KERNELS[R.TABLE] = R.COPY
CHANNELS: Final = (1, 3)  # that images may have


class Tile(NamedTuple):
    """The part of a result that a program makes.

    Attributes:
        rows, columns: its size; 32 columns for each warp, so that a thread has whole columns.
        warps: of the program.
    """

    rows: int
    columns: int
    warps: int


class Launch(NamedTuple):
    """Pass `number` over some images whose geometries are of one kind, and what is needed before it.

    A kernel for one kind needs half the registers of one for all kinds.

    Attributes:
        first, jobs: the range of its jobs.
        tiles: of the largest result.
        finished: whether it is the images' last pass.
        counted_first, counted: the range of the images whose levels are counted before, among all such; or 0 of them.
        counted_pixels: of the largest of these.
        weights, weight_programs: how many int32 numbers the tables of weights have, and how many programs make those
            of a job; 0: there are none.
    """

    first: int
    jobs: int
    tiles: int
    number: int
    geometry: int
    finished: bool
    counted_first: int
    counted: int
    counted_pixels: int
    weights: int
    weight_programs: int

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles come first: there may be more than the second axis of a grid takes."""
        return self.tiles, self.jobs


class Plan(NamedTuple):
    """How a batch's passes are launched.

    Attributes:
        launches: in order.
        channels, out_channels: of pixels between passes, and of results.
        operates, erases: whether any pass does operations, and whether finished images are erased.
        transposes: whether rows of a result may be written as columns.
        scratch_bytes: of both pieces of memory between passes.
    """

    launches: tuple[Launch, ...]
    channels: int
    out_channels: int
    operates: bool
    erases: bool
    transposes: bool
    scratch_bytes: tuple[int, int]

    @classmethod
    def of(
        cls,
        images: np.ndarray,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        starts: np.ndarray,
        steps: Sequence[np.ndarray | int],
        on_finished: Sequence[Erase],
        tile: Tile,
        source_steps: np.ndarray | None = None,
    ) -> tuple[Plan, dict[str, list[np.ndarray]]]:
        """The plan for a batch, and of each of `ARRAYS` its parts, without those that are empty.

        Args:
            images: `IMAGE` (B,).
            program, windows_tlhw: as for `gpuload.stage.backend.Levels`.
            starts: where each result begins, int64 (B,), in elements from the first one.
            steps: between channels, rows and columns of a result; int64 (B,), or one for all.
            on_finished: what is erased of all finished images.
            tile: how results are divided.
            source_steps: `gpuload.stage.ragged.RaggedImages.steps`.
        """
        channels = channels_of(images, program)
        passes = Passes(images, windows_tlhw[0], max(channels), source_steps)
        passes.apply(program, windows_tlhw)
        codes, values = passes.packed_operations()
        scratch = _place_scratch(passes)
        channel, *down_across = steps
        if passes.transposed.any():
            down_across = [np.where(passes.transposed, *both) for both in (down_across[::-1], down_across)]
        places = R.OUT_AT, R.OUT_CHANNEL, R.OUT_ROW, R.OUT_PIXEL
        passes.set_last(zip(places, (starts, channel, *down_across), strict=True))
        boxes = _place_boxes(passes, on_finished, channels[-1])
        launches, jobs, statistics = _launches(passes, codes, values, tile)
        groups = *jobs, [codes], [values], passes.tables, [boxes], *statistics
        operates = any(isinstance(record, Ops | Erase) for record in program.records)
        transposes = any(isinstance(record, Turn) for record in program.records)
        plan = cls(launches, max(channels), channels[-1], operates, bool(on_finished), transposes, scratch)
        return plan, {name: arrays for name, arrays in zip(ARRAYS, groups, strict=True) if any(map(len, arrays))}


@dataclass(frozen=True)
class Fusing:
    """Plans batches of a chain of which fused kernels do everything, wherever the decoded images are known.

    Args:
        tile: how the device's results are divided.
        channels_last: their memory format.
    """

    tile: Tile
    channels_last: bool

    def __call__(self, images: np.ndarray, program: Program) -> tuple[Plan, dict[str, list[np.ndarray]]]:
        """The plan of a batch, and its arrays.

        Raises:
            ValueError: it is none that is planned here: images differ in channels or results in size, or something is
                left to do to finished images.
        """
        levels, on_finished = program.split()
        erasing = leading_erasing(on_finished)
        size, count = program.results_hw[0], len(program)
        stored_channels = images["shape"][:, 2]
        alike = (program.results_hw == size).all() and (stored_channels == stored_channels[0]).all()
        if (
            not alike
            or int(stored_channels[0]) not in CHANNELS
            or (on_finished and len(erasing) < len(on_finished.records))
        ):
            raise ValueError("this batch is planned where it is made")
        channels, (height, width) = channels_of(images, levels)[-1], size.tolist()
        steps = (1, width * channels, channels) if self.channels_last else (height * width, width, 1)
        starts = np.arange(count) * (channels * height * width)
        return Plan.of(images, levels, levels.windows_tlhw, starts, steps, erasing, self.tile)


def channels_of(images: np.ndarray, program: Program) -> list[int]:
    """How many channels images have, and from each record on that changes it."""
    changed = [record.channels for record in program.records if isinstance(record, Ops) and record.channels]
    return [int(images["shape"][0, 2]), *changed]


def leading_erasing(on_finished: Program | None) -> list[Erase]:
    """Return the records that erase parts of all images before anything else changes finished images: the last pass
    runs them."""
    erasing = []
    for record in () if on_finished is None else on_finished.records:
        if not isinstance(record, Erase) or record.rows is not None:
            break
        erasing.append(record)
    return erasing


def portions(count: int, first: int = 0, *, programs: int) -> list[slice]:
    """Return the images of each launch, of `count` from the `first` on.

    Args:
        count, first: which images.
        programs: along the grid's first axis, for each image; the images are along the second.
    """
    end, step = first + count, max(1, min(SECOND_AXIS, MOST_PROGRAMS // max(1, programs)))
    return [slice(at, min(at + step, end)) for at in range(first, end, step)]


def _place_scratch(passes: Passes) -> tuple[int, int]:
    """Set where all passes but an image's last write, and where the next ones read; the sizes of both pieces, bytes."""
    sizes = [0, 0]
    for number in range(passes.count - 1):
        jobs, rows = passes.jobs[number], passes.after(number)
        widths = jobs[R.OUT_WIDTH, rows] * passes.channels
        lengths = jobs[R.OUT_HEIGHT, rows] * widths
        ends = lengths.cumsum()
        starts = ends - lengths
        jobs[R.OUT_AT, rows], jobs[R.OUT_CHANNEL, rows], jobs[R.OUT_ROW, rows] = starts, 1, widths
        passes.jobs[number + 1, R.BASE, rows] += starts
        sizes[number % 2] = max(sizes[number % 2], int(ends[-1]))
    return sizes[0], sizes[1]


def _place_boxes(passes: Passes, on_finished: Sequence[Erase], channels: int) -> np.ndarray:
    """Set what an image's last pass erases; the numbers of all boxes, int64."""
    if not on_finished:
        return np.empty(0, np.int64)
    boxes = np.concatenate([R.erased_boxes(erase, channels) for erase in on_finished], axis=1)
    if (transposed := passes.transposed).any():
        drawn = boxes.view(R.ERASED)
        drawn["box_tlhw"] = transposed_boxes(drawn["box_tlhw"], transposed)
        drawn["kind"][transposed[:, None] & (drawn["kind"] == R.KINDS.index("pixel"))] = R.TRANSPOSED_PIXEL
    each = boxes.shape[1] // R.RECORD
    passes.set_last(((R.BOXES_AT, np.arange(len(boxes)) * each), (R.BOXES, each)))
    return boxes.ravel()


def _launches(
    passes: Passes, codes: np.ndarray, values: np.ndarray, tile: Tile
) -> tuple[tuple[Launch, ...], list[list[np.ndarray]], list[list[np.ndarray]]]:
    """The launches, in order; the numbers of their jobs, in the same order, pass by pass: int64 and float64; and what
    makes the tables of statistics: `COUNTED` of each image, and factors."""
    launches, ints, floats, first = [], [], [], 0
    counted: list[np.ndarray] = []
    factors: list[np.ndarray] = []
    tables = 0
    for number in range(passes.count):
        jobs, own_floats = passes.jobs[number], passes.floats[number]
        # Bring together the jobs of a launch: those of one kernel that end here, or do not.
        groups = KERNELS[jobs[R.KIND]] + KINDS * (passes.last == number)
        rows, spans = passes.after(number - 1), [(int(groups[0]), 0, len(groups))]
        if not isinstance(rows, slice) or (groups != groups[0]).any():
            rows = np.arange(len(groups))[rows]
            rows = rows[groups[rows].argsort(kind="stable")]
            jobs, own_floats, groups = jobs.take(rows, 1), own_floats.take(rows, 0), groups[rows]
            ends = np.bincount(groups).cumsum().tolist()
            spans = [(group, *span) for group, span in enumerate(pairwise([0, *ends])) if span[0] < span[1]]
        heights, widths = jobs[R.OUT]
        tiles = (heights + (tile.rows - 1)) // tile.rows * ((widths + (tile.columns - 1)) // tile.columns)
        counting = jobs[R.STATISTICS_AT].nonzero()[0]  # ascending
        for group, start, end in spans:
            finished, kind = divmod(group, KINDS)
            most = int(tiles[start:end].max())
            for portion in portions(end - start, start, programs=most):
                at, to = counting.searchsorted((portion.start, portion.stop)).tolist() if len(counting) else (0, 0)
                pixels = 0
                if to > at:
                    places = jobs[R.OPERATIONS_AT, counting[at:to]]  # what needs it comes first in a pass
                    counted.append(_counted(jobs, counting[at:to], codes[places]))
                    factors.append(values[places, 0])
                    pixels = int(counted[-1]["size_hw"].prod(axis=1).max())
                needed = tables, to - at, pixels, *R.place_tables(jobs[:, portion].T, kind, tile.rows)
                launches.append(
                    Launch(first, portion.stop - portion.start, most, number, kind, bool(finished), *needed)
                )
                first += portion.stop - portion.start
                tables += to - at
        ints.append(jobs.T)
        floats.append(own_floats)
    return tuple(launches), [ints, floats], [[rows.view(np.int64) for rows in counted], factors]


def _counted(jobs: np.ndarray, these: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the rows, `COUNTED`, from which tables of some jobs of a launch are made; each job gets its number."""
    jobs[R.STATISTICS_AT, these] = np.arange(len(these))
    counted = np.zeros(len(these), R.COUNTED)
    counted["base"], counted["size_hw"], counted["code"] = jobs[R.BASE, these], jobs[R.WHOLE, these].T, codes
    counted["steps"] = jobs[R.SOURCE_STEPS, these].T
    return counted
