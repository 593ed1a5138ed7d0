"""The plan of a batch for the fused kernels: the jobs and their launches.

A plan is built from a program and the locations of the images, without reading pixels, in the main process or in a
worker. Nothing is stored between batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing import jobs as R
from gpuload.transforms.program.fusing.passes import ERASE_BOX, POINTWISE, Passes
from gpuload.transforms.program.ops import Box, Erase, Ops, Record, RecordOutline, Turn, Warp, code
from gpuload.transforms.program.windows import FILTERS, transpose_boxes

__all__ = ["Features", "Fusing", "KernelTile", "Launch", "LaunchPlan", "leading_erase_records", "portions"]

SECOND_AXIS: Final = 65_535  # the maximum number of programs along a grid's second axis
# The maximum number of programs in a launch. Triton's launcher multiplies the axes as int32, and launches nothing if
# the product is not positive.
MOST_PROGRAMS: Final = 2**31 - 1
KINDS: Final = 8  # an upper bound on the number of geometry kinds
ARRAYS: Final = ("ints", "floats", "codes", "values", "places", "boxes", "counted", "factors")
KERNELS: Final = np.arange(KINDS)  # maps each geometry kind to the kind whose kernel handles it
KERNELS[R.TABLE] = R.COPY
CHANNELS: Final = (1, 3)  # the supported numbers of channels
WARP_BIT: Final = 1 << code("warp")
POINTWISE_MASK: Final = sum(1 << code(name) for name in POINTWISE if name != "identity")
RESIZE_FILTERS: Final = 1 << R.BILINEAR | 1 << R.BICUBIC  # other supported filters select pixels, as a copy does


class KernelTile(NamedTuple):
    """The part of a result that one program computes.

    Attributes:
        rows, columns: the size of the tile; 32 columns per warp, so that each thread handles complete columns.
        warps: the number of warps of the program.
    """

    rows: int
    columns: int
    warps: int


class Features(NamedTuple):
    """The features that kernels are compiled for: those that a batch needs, or all batches of a chain.

    A kernel for more features is slower and takes longer to compile, and a kernel for fewer gives wrong results.

    Attributes:
        operations: a mask of the operations on single pixels; an operation's code is the index of its bit.
        transposes: whether rows of a result can be written as columns.
        resize_filters, warp_filters: masks of the filters of resampled boxes and of warps; filter n has bit 2**n.
    """

    operations: int = 0
    has_transposes: bool = False
    resize_filters: int = 0
    warp_filters: int = 0

    @classmethod
    def of_outlines(cls, outlines: Iterable[RecordOutline]) -> Features:
        """Return all features that records with these outlines can need."""
        return cls._combine(
            (outline.kind, _mask(map(code, outline.operations)), _filter_mask(map(FILTERS.index, outline.filters)))
            for outline in outlines
        )

    @classmethod
    def of_program(cls, program: Program) -> Features:
        """Return the features that a program needs."""
        return cls._combine((type(record), *_used_by(record)) for record in program.records)

    @classmethod
    def _combine(cls, parts: Iterable[tuple[type[Record], int, int]]) -> Features:
        """Combine the features of parts of a program: a kind of record, and masks of its operations and filters."""
        operations, transposes, resize_filters, warp_filters = cls()
        for kind, used_operations, filters in parts:
            if kind is Box:
                resize_filters |= filters & RESIZE_FILTERS
            elif kind is Warp or used_operations & WARP_BIT:
                warp_filters |= filters
            operations |= 1 << ERASE_BOX if kind is Erase else used_operations & POINTWISE_MASK
            transposes |= kind is Turn
        return cls(operations, transposes, resize_filters, warp_filters)

    def __or__(self, other: Features) -> Features:
        return Features(
            self.operations | other.operations,
            self.has_transposes or other.has_transposes,
            self.resize_filters | other.resize_filters,
            self.warp_filters | other.warp_filters,
        )

    def filters_of(self, geometry: int) -> int:
        """Return the mask of the filters that jobs of this kind of geometry can have; 0 if the kind has no filter."""
        return {R.RESIZE: self.resize_filters, R.WARP: self.warp_filters}.get(geometry, 0)


class Launch(NamedTuple):
    """A launch of one pass over images whose geometries are of one kind, and of the kernels that prepare its tables.

    Each geometry kind has its own kernel, because a kernel for all kinds would need twice as many registers.

    Attributes:
        first, jobs: the index of the first job, and the number of jobs.
        tiles: the number of tiles of the largest result.
        number: the index of the pass.
        geometry: the geometry kind.
        finished: whether this is the last pass of the images.
        counted_first, counted_images: the images whose pixel values are counted before the launch: the index of the
            first one among all such images of the batch, and their number.
        counted_pixels: the number of pixels of the largest counted image.
        weights, weight_programs: the number of int32 values in the weight tables, and the number of programs that
            compute the tables of a job; 0 if there are no tables.
    """

    first: int
    jobs: int
    tiles: int
    number: int
    geometry: int
    finished: bool
    counted_first: int
    counted_images: int
    counted_pixels: int
    weights: int
    weight_programs: int

    @property
    def grid(self) -> tuple[int, int]:
        """The launch grid. Tiles come first because there can be more tiles than fit along the second axis."""
        return self.tiles, self.jobs


class LaunchPlan(NamedTuple):
    """The launches of a batch's passes.

    Attributes:
        launches: the launches, in order.
        channels, out_channels: the number of channels between passes, and of results.
        features: the features that the passes need.
        has_erasing: whether boxes are erased after the conversion to the final type.
        scratch_bytes: the sizes of the two scratch buffers between passes.
    """

    launches: tuple[Launch, ...]
    channels: int
    out_channels: int
    features: Features
    has_erasing: bool
    scratch_bytes: tuple[int, int]

    @classmethod
    def build(
        cls,
        images: np.ndarray,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        starts: np.ndarray,
        steps: Sequence[np.ndarray | int],
        on_finished: Sequence[Erase],
        tile: KernelTile,
        source_steps: np.ndarray | None = None,
    ) -> tuple[LaunchPlan, dict[str, list[np.ndarray]]]:
        """Return the plan for a batch, and a dict with the pieces of each array in `ARRAYS` that is not empty.

        Args:
            images: the table of decoded images, `IMAGE` (B,).
            program, windows_tlhw: as for `gpuload.stage.backend.LevelRunner`.
            starts: the offset of each result in elements, int64 (B,).
            steps: the steps between channels, rows and columns of a result; each int64 (B,), or one integer for all
                results.
            on_finished: the records that erase boxes after the conversion to the final type.
            tile: the division of results into tiles.
            source_steps: `gpuload.stage.ragged.RaggedImages.steps`.
        """
        channels = channels_of(images, program)
        passes = Passes(images, windows_tlhw[0], max(channels), source_steps)
        passes.apply(program, windows_tlhw)
        codes, values = passes.pack_operations()
        scratch = _place_scratch(passes)
        channel, *down_across = steps
        if passes.transposed.any():
            down_across = [np.where(passes.transposed, *pair) for pair in (down_across[::-1], down_across)]
        indices = R.OUT_AT, R.OUT_CHANNEL, R.OUT_ROW, R.OUT_PIXEL
        passes.set_in_last_passes(zip(indices, (starts, channel, *down_across), strict=True))
        boxes = _place_boxes(passes, on_finished, channels[-1])
        launches, jobs, statistics = _build_launches(passes, codes, values, tile)
        groups = *jobs, [codes], [values], passes.tables, [boxes], *statistics
        plan = cls(launches, max(channels), channels[-1], Features.of_program(program), bool(on_finished), scratch)
        return plan, {name: arrays for name, arrays in zip(ARRAYS, groups, strict=True) if any(map(len, arrays))}


@dataclass(frozen=True)
class Fusing:
    """A planner of batches for a chain that runs entirely in fused kernels. It works in any process that knows the
    locations and sizes of the decoded images.

    Args:
        tile: the division of results into tiles.
        channels_last: whether results are in channels-last memory format.
    """

    tile: KernelTile
    channels_last: bool

    def __call__(self, images: np.ndarray, program: Program) -> tuple[LaunchPlan, dict[str, list[np.ndarray]]]:
        """Return the plan of a batch, and the plan's arrays, as `LaunchPlan.build` does.

        Raises:
            ValueError: the batch cannot be planned here, because images differ in channels, results differ in size, or
                images of the final type need more than erasing.
        """
        pixel_program, on_finished = program.split()
        erasing = leading_erase_records(on_finished)
        size, count = program.results_hw[0], len(program)
        stored_channels = images["shape"][:, 2]
        is_uniform = (program.results_hw == size).all() and (stored_channels == stored_channels[0]).all()
        if (
            not is_uniform
            or int(stored_channels[0]) not in CHANNELS
            or (on_finished and len(erasing) < len(on_finished.records))
        ):
            raise ValueError("this batch must be planned where it is assembled")
        channels, (height, width) = channels_of(images, pixel_program)[-1], size.tolist()
        steps = (1, width * channels, channels) if self.channels_last else (height * width, width, 1)
        starts = np.arange(count) * (channels * height * width)
        return LaunchPlan.build(images, pixel_program, pixel_program.windows_tlhw, starts, steps, erasing, self.tile)


def _mask(numbers: Iterable[int]) -> int:
    """Return the integer whose bits with these indices are set."""
    return sum(1 << number for number in set(numbers))


def _filter_mask(codes: Iterable[int]) -> int:
    """Return the mask of filters. Warps apply the filters after bicubic as bicubic, like the reference."""
    return _mask(min(number, R.BICUBIC) for number in codes)


def _used_by(record: Record) -> tuple[int, int]:
    """Return masks of the operations and of the filters of a record."""
    operations = 0
    if isinstance(record, Ops):  # shifted, because `NOTHING` is negative
        operations = int(np.bitwise_or.reduce(1 << (record.codes + 1), axis=None)) >> 1
    elif not isinstance(record, Warp) and (not isinstance(record, Box) or record.padding_mode is not None):
        return 0, 0
    filters: np.ndarray | str = record.filters
    if isinstance(filters, str):
        return operations, _filter_mask([FILTERS.index(filters)])
    return operations, int(np.bitwise_or.reduce(1 << np.minimum(filters, R.BICUBIC), axis=None))


def channels_of(images: np.ndarray, program: Program) -> list[int]:
    """Return the images' number of channels, followed by the number after each record that changes this number."""
    new_counts = [record.channels for record in program.records if isinstance(record, Ops) and record.channels]
    return [int(images["shape"][0, 2]), *new_counts]


def leading_erase_records(on_finished: Program | None) -> list[Erase]:
    """Return the initial records of `on_finished` that erase boxes of all images; the last pass applies them."""
    erasing = []
    for record in () if on_finished is None else on_finished.records:
        if not isinstance(record, Erase) or record.rows is not None:
            break
        erasing.append(record)
    return erasing


def portions(count: int, first: int = 0, *, programs: int) -> list[slice]:
    """Divide `count` images, starting at index `first`, into slices whose launches fit into a grid.

    Args:
        count, first: the number of images, and the index of the first image.
        programs: the number of programs per image along the grid's first axis; images are along the second axis.
    """
    end, step = first + count, max(1, min(SECOND_AXIS, MOST_PROGRAMS // max(1, programs)))
    return [slice(start, min(start + step, end)) for start in range(first, end, step)]


def _place_scratch(passes: Passes) -> tuple[int, int]:
    """Set the scratch location to which each pass except an image's last pass writes, and from which the next pass
    reads. Return the sizes of both scratch buffers in bytes."""
    sizes = [0, 0]
    for index in range(passes.count - 1):
        jobs, rows = passes.jobs[index], passes.images_after(index)
        widths = jobs[R.OUT_WIDTH, rows] * passes.channels
        lengths = jobs[R.OUT_HEIGHT, rows] * widths
        ends = lengths.cumsum()
        starts = ends - lengths
        jobs[R.OUT_AT, rows], jobs[R.OUT_CHANNEL, rows], jobs[R.OUT_ROW, rows] = starts, 1, widths
        passes.jobs[index + 1, R.BASE, rows] += starts
        sizes[index % 2] = max(sizes[index % 2], int(ends[-1]))
    return sizes[0], sizes[1]


def _place_boxes(passes: Passes, on_finished: Sequence[Erase], channels: int) -> np.ndarray:
    """Set the boxes that each image's last pass erases; return the entries of all boxes as int64 values."""
    if not on_finished:
        return np.empty(0, np.int64)
    boxes = np.concatenate([R.erased_boxes(erase, channels) for erase in on_finished], axis=1)
    if (transposed := passes.transposed).any():
        entries = boxes.view(R.ERASED)
        entries["box_tlhw"] = transpose_boxes(entries["box_tlhw"], transposed)
        entries["kind"][transposed[:, None] & (entries["kind"] == R.KINDS.index("pixel"))] = R.TRANSPOSED_PIXEL
    per_image = boxes.shape[1] // R.RECORD
    passes.set_in_last_passes(((R.BOXES_AT, np.arange(len(boxes)) * per_image), (R.BOXES, per_image)))
    return boxes.ravel()


def _build_launches(
    passes: Passes, codes: np.ndarray, values: np.ndarray, tile: KernelTile
) -> tuple[tuple[Launch, ...], list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Return the launches in order; the int64 and float64 values of their jobs in the same order, one array per pass;
    and the inputs of the statistics tables: `COUNTED` entries and factors."""
    launches, ints, floats, first = [], [], [], 0
    counted: list[np.ndarray] = []
    factors: list[np.ndarray] = []
    tables = 0
    for index in range(passes.count):
        jobs, job_floats = passes.jobs[index], passes.floats[index]
        # Group the jobs into launches: by kernel, and by whether this is the image's last pass.
        groups = KERNELS[jobs[R.KIND]] + KINDS * (passes.last == index)
        rows, spans = passes.images_after(index - 1), [(int(groups[0]), 0, len(groups))]
        if not isinstance(rows, slice) or (groups != groups[0]).any():
            rows = np.arange(len(groups))[rows]
            rows = rows[groups[rows].argsort(kind="stable")]
            jobs, job_floats, groups = jobs.take(rows, 1), job_floats.take(rows, 0), groups[rows]
            ends = np.bincount(groups).cumsum().tolist()
            spans = [(group, *span) for group, span in enumerate(pairwise([0, *ends])) if span[0] < span[1]]
        heights, widths = jobs[R.OUT]
        tiles = (heights + (tile.rows - 1)) // tile.rows * ((widths + (tile.columns - 1)) // tile.columns)
        counting = jobs[R.STATISTICS_AT].nonzero()[0]  # ascending
        for group, start, end in spans:
            finished, kind = divmod(group, KINDS)
            max_tiles = int(tiles[start:end].max())
            for portion in portions(end - start, start, programs=max_tiles):
                lo, hi = counting.searchsorted((portion.start, portion.stop)).tolist() if len(counting) else (0, 0)
                pixels = 0
                if hi > lo:
                    operations_at = jobs[
                        R.OPERATIONS_AT, counting[lo:hi]
                    ]  # an operation that needs counts is the first of its pass
                    counted.append(_counted_images(jobs, counting[lo:hi], codes[operations_at]))
                    factors.append(values[operations_at, 0])
                    pixels = int(counted[-1]["size_hw"].prod(axis=1).max())
                inputs = tables, hi - lo, pixels, *R.place_tables(jobs[:, portion].T, kind, tile.rows)
                launches.append(
                    Launch(first, portion.stop - portion.start, max_tiles, index, kind, bool(finished), *inputs)
                )
                first += portion.stop - portion.start
                tables += hi - lo
        ints.append(jobs.T)
        floats.append(job_floats)
    return tuple(launches), [ints, floats], [[rows.view(np.int64) for rows in counted], factors]


def _counted_images(jobs: np.ndarray, counting: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the `COUNTED` entries for the jobs `counting`, and set the index of each job's statistics table."""
    jobs[R.STATISTICS_AT, counting] = np.arange(len(counting))
    counted = np.zeros(len(counting), R.COUNTED)
    counted["base"], counted["size_hw"], counted["code"] = (
        jobs[R.BASE, counting],
        jobs[R.SOURCE_SIZE, counting].T,
        codes,
    )
    counted["steps"] = jobs[R.SOURCE_STEPS, counting].T
    return counted
