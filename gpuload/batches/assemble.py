"""Assembling batches for the user: finishing the columns of a batch's chunks, and collating them.

This module runs in the main process, on the transfer stream. The batch's columns are read, images go through the stage,
masks, boxes and keypoints are transformed like the images, and blocks of arrays are concatenated in one copy. The
finished columns are collated like torch's `default_collate`. A user's `collate_fn` gets samples that are rebuilt one by
one, unless a worker has already called it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from gpuload.batches.collate import (
    BatchOptions,
    FinishedColumns,
    collate,
    convert_arrays,
    keep_meta,
    outline_of,
    samples_of,
    unwrap,
)
from gpuload.batches.combined_targets import make_target_stage
from gpuload.batches.mixing import Pairing, half_batch_numbers, partners_of, soften
from gpuload.batches.targets import TargetStage, target_warning
from gpuload.datasets.sample import takes_meta
from gpuload.datasets.tree import convert_to_type
from gpuload.errors import CollateError, error_class_names, one_line
from gpuload.ring.columns import Block, Columns, ImageColumn, entry, leaves_with_mismatched_blocks
from gpuload.ring.packing import spans_of, write_arrays
from gpuload.ring.ring import Slot
from gpuload.rng import philox
from gpuload.stage import OutputPool, RaggedImages
from gpuload.stage import device as devices
from gpuload.stage.device import COPY, profiler_range, view_arrays
from gpuload.transforms import Chain, Program
from gpuload.transforms.program.fusing.plan import CHANNELS, Fusing
from gpuload.workers.batch import Batch, Part, PlannedBatch
from gpuload.workers.planned import plan_images

__all__ = ["AssembledBatch", "Assembly", "BatchInfo", "columns_of", "draw_programs", "module_seeds"]

MAX_DEPTH = 3  # nesting depth up to which user-defined objects are searched for tensors
NO_CONTEXT = contextlib.nullcontext()
LEND_BYTES = 1 << 20  # smaller arrays are copied instead of lent
AllocatePlan = Callable[[int], tuple[Slot, np.ndarray] | None]
TENSORLESS_TYPES = (int, float, str, bytes, type, type(None))  # types that contain no tensors
PILLOW_HINT = (
    "; it got the images as C×H×W tensors. To get Pillow's images, return these from the dataset, without transforms"
)


def columns_of(batch: Batch, starts: Sequence[int], *, splits_blocks: bool) -> Columns:
    """Return the successfully loaded samples of a batch, concatenated from its chunks, in the order of their positions.

    If no sample failed, this is the order of the chunks. In the chunks, substitutes for failed samples come after the
    other samples. Skipped samples are missing.

    Args:
        batch: a complete batch.
        starts: the offset of each part's bytes in the batch's memory.
        splits_blocks: whether to split all blocks into values, one array per sample. If the batch has targets or failed
            samples, all blocks are split in any case; leaves whose blocks differ between chunks are always split.
    """
    spec, planned = batch.spec, batch.planned
    if planned is not None and planned.columns is not None:
        columns = planned.columns
    else:
        chunks = [
            (part, part.content, start) for part, start in zip(batch.parts, starts, strict=False) if part.sample_count
        ]
        contents = [content for _, content, _ in chunks if content is not None]
        splits_blocks = splits_blocks or bool(batch.errors) or any(content.has_targets for content in contents)
        leaves = (
            {leaf for content in contents for leaf in content.blocks}
            if splits_blocks
            else leaves_with_mismatched_blocks(contents)
        )
        for (part, _, _), content in zip(chunks, contents, strict=True):
            content.unstack(leaves & content.blocks.keys(), part.data)
        columns = Columns.concat(contents, [start for _, _, start in chunks])
        if batch.errors:
            columns.positions = np.concatenate([part.positions[content.rows] for part, content, _ in chunks])  # pyright: ignore
            columns.indices = [part.indices[row] for part, content, _ in chunks for row in content.rows]  # pyright: ignore
            return columns.take(np.argsort(find_requested_rows(batch, columns), kind="stable"))
    columns.positions, columns.indices = spec.positions, spec.indices
    return columns


def find_requested_rows(batch: Batch, columns: Columns) -> np.ndarray:
    """Return the row of each sample in the requested batch, int64 (N,). In a batch that wraps around, positions are not
    ascending."""
    order = np.argsort(batch.spec.positions, kind="stable")
    return order[np.searchsorted(batch.spec.positions[order], columns.positions)]


def draw_programs(
    chain: Chain, seed: int, epoch: int, columns: Columns, *, entire_images: bool = False
) -> list[list[Program]]:
    """Draw the programs for each column of images, one program per view. With `entire_images`, the regions are the
    entire images; otherwise, they are the regions that a worker has drawn and stored in the tables.

    Raises:
        DrawError: the parameters of a transform cannot be drawn for an image.
    """
    key = philox.epoch_key(seed, epoch)
    programs: list[list[Program]] = []
    for images in columns.images:
        rows, sizes, first_column = images.row_indices, images.table["size_hw"], columns.images[0]
        if (
            programs
            and np.array_equal(rows, first_column.row_indices)
            and np.array_equal(sizes, first_column.table["size_hw"])
        ):
            programs.append(programs[0])  # the columns have the same rows and sizes
            continue
        boxes = columns.boxes(rows.tolist()) if chain.reads_boxes else None
        draw = partial(chain.draw, key, columns.positions[rows], sizes, boxes)
        regions = None if entire_images else images.table["region_tlhw"]
        programs.append([draw(view=view, regions_tlhw=regions) for view in range(len(chain.lines))])
    return programs


def module_seeds(chain: Chain, seed: int, epoch: int, columns: Columns, view: int) -> list[int]:
    """Return the seed of torch's generators for each module at the end of the transforms. It depends on the first
    position of the batch, which is the same when an epoch is resumed."""
    key, position = philox.epoch_key(seed, epoch), columns.positions[:1]
    return [int(philox.uniforms(key, position, lane, 1)[0, 0] * 2.0**32) for lane in chain.module_lanes[view]]


class BatchInfo(NamedTuple):
    """The samples of a batch, returned with the batch if ``info=True``. A named tuple, so that trainers can move it to
    a device.

    Attributes:
        epoch: the epoch's number.
        step: the batch's index in the epoch.
        positions: int64 (N,), each sample's position in the epoch's order.
        indices: int64 (N,), each sample's index in the dataset; a list if a sampler yields keys that are not integers.
            For an iterable dataset, the number of samples that the worker had yielded before each sample.
        valid: bool (N,), False for entries that only pad the batch.
    """

    epoch: int
    step: int
    positions: torch.Tensor
    indices: torch.Tensor | list[Any]
    valid: torch.Tensor


class AssembledBatch(NamedTuple):
    """An assembled batch, or one whose last steps are postponed.

    Attributes:
        value: the batch to yield; None if its last steps are postponed.
        tensors: all tensors in the value, or all tensors that the postponed steps read.
        last_steps: a function that runs the postponed steps and returns the value, to be called on the consumer's
            stream; None if no step is postponed.
        warning: the warning to issue with the batch; "" if there is none.
    """

    value: Any
    tensors: list[torch.Tensor]
    last_steps: Callable[[], Any] | None
    warning: str


class Assembly:
    """The assembly of batches from loaded chunks.

    Args:
        options: the batch options of the loader.
        stage: the compiled transforms.
        transfer: copies slots and tensors to the device.
        fusing: makes the plans of batches that workers have not planned; None if the stage makes them.

    Attributes:
        copy_s, stage_s, collate_s: host time of issuing copies, of running transforms and drawing their parameters, and
            of all other steps.
    """

    def __init__(self, options: BatchOptions, stage: Any, transfer: Any, fusing: Fusing | None = None) -> None:
        self._options = options
        self._stage = stage
        self._transfer = transfer
        self._fusing = fusing
        self.copy_s = self.stage_s = self.collate_s = 0.0
        self._rebuilds_samples = options.rebuilds_samples
        self._pool = None if transfer.is_asynchronous else OutputPool()
        chain = options.chain
        has_transforms = len(chain) or chain.modules or chain.views is not None
        self._lends_slots = (
            self._pool is not None and options.ragged == "list" and not has_transforms and not self._rebuilds_samples
        )
        self._targets: TargetStage | None = None  # created for the first sample with targets
        self._has_checked_targets = False  # whether `target_warning` has been called

    def make(
        self, batch: Batch, info: bool, release: Callable[[], None], allocate_plan: AllocatePlan
    ) -> AssembledBatch:
        """Assemble a batch. On asynchronous devices, the modules at the end of the transforms and a `collate_fn` are
        postponed, since they may depend on values that the consumer's stream is still computing.

        Args:
            batch: a complete batch; its slots are released once they have been read.
            info: also return a `BatchInfo`.
            release: releases the slots.
            allocate_plan: returns a free slot for a plan of this many bytes, and these bytes; None if no slot is free.

        Raises:
            CollateError: the samples cannot be collated.
        """
        with self._measure_collation():
            return self._assemble(batch, info, release, allocate_plan)

    @contextlib.contextmanager
    def _measure_collation(self) -> Iterator[None]:
        """Return a context that adds its time to `collate_s`, except time that is added to `copy_s` or `stage_s`."""
        began_s, issued_s = perf_counter(), self.copy_s + self.stage_s
        try:
            yield
        finally:
            self.collate_s += perf_counter() - began_s - (self.copy_s + self.stage_s - issued_s)

    def _assemble(
        self, batch: Batch, info: bool, release: Callable[[], None], allocate_plan: AllocatePlan
    ) -> AssembledBatch:
        columns = columns_of(batch, self._transfer.part_offsets(batch), splits_blocks=self._rebuilds_samples)
        is_postponed, outputs = False, None
        if columns.collated is not None:
            release()  # unpickling has copied the batch
            if (collated := columns.collated).error:
                raise _collate_error(columns, collated.error, collated.traceback, collated.error_classes)
            collect = partial(self._move_to_device, collated.value)
        else:
            is_postponed = self._transfer.is_asynchronous and self._reads_state(columns)
            outline = None if self._rebuilds_samples else outline_of(columns)
            if batch.planned is None:
                start = perf_counter()
                batch.planned = self._plan(batch, columns, allocate_plan)
                self.stage_s += perf_counter() - start
            outputs = self.finish(
                batch, columns, release, uses_cells=self._rebuilds_samples, calls_modules=not is_postponed
            )
            collect = partial(self._collate, columns, outline, outputs)
        warning = batch.spec.warning
        if columns.has_targets and not (self._has_checked_targets or warning):
            self._has_checked_targets, warning = True, target_warning(self._options.chain, columns)
        epoch, batch_info = batch.spec.epoch, self._make_info(batch, columns) if info else None

        def build_value() -> Any:
            return collect() if batch_info is None else (collect(), batch_info)

        def run_last_steps() -> Any:
            assert outputs is not None
            with self._measure_collation():
                start = perf_counter()
                self._call_modules(epoch, columns, outputs, uses_cells=self._rebuilds_samples)
                self.stage_s += perf_counter() - start
                return build_value()

        if is_postponed and outputs is not None:
            return AssembledBatch(
                None, _find_tensors([*outputs.results, batch_info], MAX_DEPTH), run_last_steps, warning
            )
        result = build_value()
        return AssembledBatch(result, _find_tensors(result, MAX_DEPTH), None, warning)

    def _reads_state(self, columns: Columns) -> bool:
        """Return whether user code (a `collate_fn` or the modules at the end of the transforms) may read values that
        the consumer's stream is still writing."""
        return self._options.collate_fn is not None or (self._options.chain.ends_in_state and bool(columns.images))

    def plan_inputs(self, batch: Batch) -> tuple[PlannedBatch, bytes] | None:
        """Return an empty plan for a complete batch, and the inputs for the worker that plans the batch; None if the
        stage plans it."""
        planned = PlannedBatch(self._transfer.part_offsets(batch))
        chunks = [part.description for part in batch.parts]
        if not all(chunks):
            chunks = []
            planned.columns = columns_of(batch, planned.starts, splits_blocks=False)
            if not _is_plannable(planned.columns):
                return None
        return planned, planned.pack_input(chunks)

    def _plan(self, batch: Batch, columns: Columns, allocate_plan: AllocatePlan) -> PlannedBatch | None:
        """Plan a batch that no worker has planned. The plan goes to a slot, as a worker's does, and is copied with the
        batch's other slots, which takes less time than uploading the plan and each column of integers from memory that
        torch page-locks. Return None if the stage plans the batch, because it is unusual or no slot is free."""
        if self._fusing is None or not _is_plannable(columns):
            return None
        epoch, images = batch.spec.epoch, columns.images[0].table
        key, chain = philox.epoch_key(self._options.seed, epoch), self._options.chain.at(epoch)
        try:
            plan, entries, size_hw = plan_images(self._fusing, chain, key, columns.positions, images, columns.values)
        except Exception:  # the stage will raise it again, and can name the image
            return None
        spans, nbytes = spans_of(list(entries.values()))
        place = allocate_plan(nbytes)
        if place is None:
            return None
        slot, data = place
        write_arrays(list(entries.values()), spans, data)
        placed = dict(zip(entries, spans, strict=True))
        return PlannedBatch([], columns, slot=slot, data=data, plan=plan, spans=placed, size_hw=size_hw)

    def _collate(self, columns: Columns, outline: Any, outputs: FinishedColumns) -> Any:
        """Collate the finished columns into the user's batch. If `outline` is None, rebuild the samples first."""
        if outline is None:
            return self._move_to_device(self._collate_rows(columns, outputs))
        pairing, options = outputs.pairing, self._options
        # Labels are checked and mixed before they are copied to the device, to avoid waiting for the device.
        move = self._move if pairing is None else lambda tensor: tensor
        with _cpu_context():
            value = collate(columns, outline, outputs, ragged=options.ragged, pad_to=options.pad_to, to_device=move)
            return value if pairing is None else self._move_to_device(soften(value, pairing, columns.name))

    def finish(
        self,
        batch: Batch,
        columns: Columns,
        release: Callable[[], None],
        *,
        uses_cells: bool,
        calls_modules: bool = True,
    ) -> FinishedColumns:
        """Finish the columns of a batch, and release the batch's slots. If `uses_cells`, put images into cells, and
        split blocks into values. If `calls_modules`, call `_call_modules` too."""
        chain, epoch, pool = self._options.chain, batch.spec.epoch, self._pool
        has_cells = uses_cells or columns.has_targets  # otherwise, all rows share one empty dict
        cells = [{} for _ in range(len(columns))] if has_cells else [{}] * len(columns)
        outputs = FinishedColumns(chain.views, cells, self._combination_numbers(batch, columns))
        if chain.mixing is not None:
            samples = columns.positions // self._options.repeats
            outputs.pairing = Pairing(chain.mixing, partners_of(outputs.numbers, samples))
        lends_slots = bool(
            self._lends_slots and columns.images and not (columns.has_targets or batch.has_device_images)
        )
        loads_slots = bool((columns.images and not lends_slots) or (columns.blocks and pool is None))
        started_at = perf_counter()
        with profiler_range(COPY):
            pixels, starts = self._transfer.load(batch, release) if loads_slots else (None, [])
        loaded_at = perf_counter()
        self.copy_s += loaded_at - started_at

        def pixels_of(images: ImageColumn) -> RaggedImages:
            return RaggedImages(pixels, images.table, _Names(columns, images))  # pyright: ignore[reportArgumentType]

        if (planned := batch.planned) is not None:
            assert pixels is not None
            planned.arrays = view_arrays(pixels, planned.spans, starts[-1])
            leaves = {name: planned.arrays.pop(name) for name in planned.spans if isinstance(name, int)}
            if self._transfer.is_asynchronous:  # views would keep the pixels alive as long as the user keeps the labels
                outputs.planned_columns = {leaf: array.clone() for leaf, array in leaves.items()}
            outputs.images.append([self._stage(pixels_of(columns.images[0]), planned)])
        else:
            outputs.programs = draw_programs(chain.at(epoch), self._options.seed, epoch, columns)
            if columns.has_targets:
                self._targets = self._targets or make_target_stage(chain, self._stage.device)
                self._targets(columns, outputs, pixels_of)
            for images, programs in zip(columns.images, outputs.programs, strict=True):
                ragged = _restore_dtype(images, pixels_of(images))
                if lends_slots:
                    self._stage.check(ragged, programs[0])
                else:
                    outputs.images.append(self._run_stage(columns, images, ragged, programs, outputs.pairing))
            if lends_slots and pool is not None:
                outputs.images = [[views] for views in _lend_images(self._transfer, batch, columns, pool)]
        if calls_modules:
            self._call_modules(epoch, columns, outputs, uses_cells=uses_cells)
        self.stage_s += perf_counter() - loaded_at
        if columns.blocks and pool is not None:
            outputs.full_columns |= _lend_or_copy_blocks(self._transfer, batch, columns, pool)
        elif columns.blocks:
            assert pixels is not None
            outputs.full_columns |= {leaf: _device_block(block, pixels) for leaf, block in columns.blocks.items()}
        if not loads_slots:
            release()  # everything in the slots has been copied or lent
        return outputs

    def _call_modules(self, epoch: int, columns: Columns, outputs: FinishedColumns, *, uses_cells: bool) -> None:
        """Call the modules at the end of the transforms on the images, on the current stream. If rows have separate
        cells, put each resulting image into the cell of its row."""
        chain = self._options.chain
        if chain.modules:
            for index, views in enumerate(outputs.images):
                outputs.images[index] = [
                    self._stage.call_modules(images, module_seeds(chain, self._options.seed, epoch, columns, view))
                    for view, images in enumerate(views)
                ]
        if uses_cells or columns.has_targets:
            for images, views, programs in zip(columns.images, outputs.images, outputs.programs, strict=True):
                for position, (row, leaf) in enumerate(images.rows_and_leaves()):
                    results = [
                        _get_image(view, position, program) for view, program in zip(views, programs, strict=True)
                    ]
                    outputs.cells[row][leaf] = outputs.combine_views(results)

    def _run_stage(
        self,
        columns: Columns,
        images: ImageColumn,
        ragged: RaggedImages,
        programs: Sequence[Program],
        pairing: Pairing | None,
    ) -> list[Any]:
        """Return the images of a column for each view, before `_call_modules`. If images are mixed, `pairing` provides
        the partners and receives the shares."""
        if pairing is not None:
            pairing.store_shares(programs[0], columns, images)
        partners = None if pairing is None else pairing.partners
        return [
            self._stage(*ragged.resolve(program), view=view, partners=partners) for view, program in enumerate(programs)
        ]

    def _combination_numbers(self, batch: Batch, columns: Columns) -> np.ndarray:
        """Return the numbers that determine which samples are combined; see `FinishedColumns.numbers`."""
        repeats, (_, group) = self._options.repeats, self._options.chain.group
        if group == 1 or (self._options.planned and repeats == 1):
            return columns.positions
        rows = find_requested_rows(batch, columns)
        return rows if repeats == 1 else half_batch_numbers(rows, len(batch.spec.positions))

    def _collate_rows(self, columns: Columns, outputs: FinishedColumns) -> Any:
        """Rebuild the samples, and return the result of the `collate_fn`; without a `collate_fn`, the converted
        samples."""
        collate_fn, pairing = self._options.collate_fn, outputs.pairing
        samples = samples_of(columns, outputs.cells, keep_meta if takes_meta(collate_fn) else unwrap)
        argument = samples[0] if self._options.single else samples
        if collate_fn is None:
            with torch.device("cpu"):
                return convert_arrays(argument, partial(columns.name, 0))
        try:
            value = collate_fn(argument)
        except Exception as error:
            problem = one_line(f"{type(error).__name__}: {error}")
            hint = PILLOW_HINT if columns.images else ""
            raise _collate_error(columns, problem, "", error_class_names(error), hint) from error
        return value if pairing is None else soften(value, pairing, columns.name)

    def _move_to_device(self, value: Any) -> Any:
        """Copy a collated batch's tensors to the device. Other objects stay on the host; with the option `pin_memory`,
        their ``pin_memory()`` is called."""
        return tree_map(self._move_leaf, value)

    def _move_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._move(leaf)
        pin_memory: Any = getattr(leaf, "pin_memory", None)
        if callable(pin_memory):
            return pin_memory() if self._options.pin_memory and devices.is_available() else leaf
        if isinstance(leaf, Mapping):  # an instance of a user-defined class, which pytree treats as a leaf
            return convert_to_type(type(leaf), {key: tree_map(self._move_leaf, item) for key, item in leaf.items()})
        return leaf

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if self._options.pin_memory and not self._transfer.is_asynchronous and devices.is_available():
            return tensor.pin_memory()
        return self._transfer.copy_to_device(tensor)

    def _make_info(self, batch: Batch, columns: Columns) -> BatchInfo:
        indices = columns.indices
        is_int = isinstance(indices, np.ndarray) or all(isinstance(index, int | np.integer) for index in indices)
        with _cpu_context():
            return BatchInfo(
                batch.spec.epoch,
                batch.spec.step,
                self._move(torch.from_numpy(columns.positions.copy())),
                self._move(torch.from_numpy(np.array(indices, np.int64))) if is_int else list(indices),
                self._move(torch.from_numpy(_find_valid(batch, columns))),
            )


def _is_plannable(columns: Columns) -> bool:
    """Return whether each sample has one uint8 image, of a number of channels that the fused kernels support, and no
    targets."""
    if columns.has_targets or len(columns.images) != 1:
        return False
    [images] = columns.images
    return not images.kinds and images.rows is None and int(images.table["shape"][0, 2]) in CHANNELS


def _cpu_context() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors are on the CPU. Creating a tensor is the fastest way to find the default
    device."""
    return NO_CONTEXT if torch.empty(0).device.type == "cpu" else torch.device("cpu")


def _find_valid(batch: Batch, columns: Columns) -> np.ndarray:
    """Return whether each row is a sample and not padding, bool (N,)."""
    positions = columns.positions
    valid = np.ones(len(positions), np.bool_)
    if batch.spec.valid is not None:
        # Padding repeats a position. If the original row is in this batch, the padding rows follow it.
        valid[1:] = positions[1:] != positions[:-1]
        valid &= np.isin(positions, batch.spec.positions[batch.spec.valid])
    return valid


def _restore_dtype(images: ImageColumn, ragged: RaggedImages) -> RaggedImages:
    """Return images in their original dtype; images that are not uint8 were transferred as bytes."""
    if not images.kinds:
        return ragged
    dtypes = ["uint8" if kind is None else kind[0] for kind in images.kinds_per_image]
    mismatch = next((row for row, dtype in enumerate(dtypes) if dtype != dtypes[0]), None)
    if mismatch is not None:
        raise ValueError(
            f"the images of a batch must have the same dtype, but {ragged.labels[0]} is {dtypes[0]} and "
            f"{ragged.labels[mismatch]} is {dtypes[mismatch]}; convert them in the dataset"
        )
    return ragged.view_as(dtypes[0])


def _collate_error(columns: Columns, cause: str, traceback: str, kinds: Sequence[str], hint: str = "") -> CollateError:
    return CollateError(
        f"collate_fn raised {cause} for a batch of {len(columns)} samples, the first of which is {columns.name(0)}"
        + hint
        + (f"\n\nWhere it happened:\n{traceback.rstrip()}" if traceback else ""),
        kinds,
    )


def _get_image(images: Any, row: int, program: Program) -> torch.Tensor:
    """Return one image of a batch, which is an N×C×H×W tensor, a list, or an N×C×H×W tensor with sizes. The image's
    size is read from the program on the host, since the stage's sizes may be on a device."""
    if isinstance(images, tuple):
        height, width = program.results_hw[row].tolist()
        return images[0][row][:, :height, :width]
    return images[row]


def _find_tensors(value: Any, depth: int) -> list[torch.Tensor]:
    """Return all tensors in a batch, including attributes of user-defined objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, TENSORLESS_TYPES):
        return []
    if not isinstance(value, dict | list | tuple):
        depth -= 1
    if depth < 0:
        return []
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, list | tuple | set | deque):
        children = value
    else:
        children = list(getattr(value, "__dict__", {}).values())
        slots = getattr(type(value), "__slots__", ())
        children += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return [tensor for child in children for tensor in _find_tensors(child, depth)]


class _Names(Sequence[str]):
    """The names of a batch's images in errors, created on access."""

    def __init__(self, columns: Columns, images: ImageColumn) -> None:
        self._columns = columns
        self._images = images

    def __len__(self) -> int:
        return len(self._images.table)

    def __getitem__(self, row: Any) -> Any:
        return self._columns.name(int(self._images.row_indices[row]), entry(self._images.leaves, row))


# -- lending slots to the user ---------------------------------------------------------------------------------------
# On the CPU, the user gets tensors that are views of a slot. The slot is released when the last view is deleted. On
# other devices, or if the transfer refuses to lend the slot, the bytes are copied.


def _lend_or_copy_blocks(transfer: Any, batch: Batch, columns: Columns, pool: OutputPool) -> dict[int, torch.Tensor]:
    """Return the batch's blocks as N×… tensors: views of the batch's slot if one slot has all blocks and is worth
    lending, otherwise copies in memory from the `pool`."""
    parts = [
        (part, start)
        for part, start in zip(batch.parts, transfer.part_offsets(batch), strict=False)
        if part.sample_count
    ]
    arrays = {
        leaf: [block.array(part.data, piece, start) for piece, (part, start) in enumerate(parts)]  # pyright: ignore
        for leaf, block in columns.blocks.items()
    }
    lends_slots = len(parts) == 1 and not columns.images and _is_worth_lending(parts[0][0])
    if lends_slots and transfer.lend(parts[0][0], [array for [array] in arrays.values()]):
        return {leaf: _to_tensor(array, columns.blocks[leaf]) for leaf, [array] in arrays.items()}
    copies = {}
    for leaf, block in columns.blocks.items():
        pieces = arrays[leaf]
        copy = pool.empty((sum(map(len, pieces)), *block.shape), torch.from_numpy(pieces[0]).dtype)
        if copy.nbytes < LEND_BYTES:
            np.concatenate(pieces, out=copy.numpy())
        else:  # torch uses several threads, and waking threads takes milliseconds on busy CPUs
            torch.cat([*map(torch.from_numpy, pieces)], out=copy)
        copies[leaf] = copy.view(getattr(torch, block.torch_dtype)) if block.torch_dtype else copy
    return copies


def _device_block(block: Block, pixels: torch.Tensor) -> torch.Tensor:
    """Return a block as one N×… tensor, from the batch's memory on the device."""
    dtype = getattr(torch, block.torch_dtype or block.dtype)
    row_bytes = prod(block.shape) * dtype.itemsize
    pieces = [pixels[start : start + n * row_bytes].view(dtype).view(n, *block.shape) for start, n in block.pieces]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _to_tensor(array: np.ndarray, block: Block) -> torch.Tensor:
    tensor = torch.from_numpy(array)  # the tensor keeps this array object alive
    return tensor.view(getattr(torch, block.torch_dtype)) if block.torch_dtype else tensor


def _lend_images(transfer: Any, batch: Batch, columns: Columns, pool: OutputPool) -> list[list[torch.Tensor]]:
    """Return the decoded C×H×W images of a batch: views of H×W×C memory in lent slots, or in copies of slots."""
    starts = np.array(transfer.part_offsets(batch))
    memory: list[torch.Tensor | None] = []
    for part in batch.parts:
        if part.data is None:
            memory.append(None)
            continue
        data = part.data[: part.used_bytes]
        tensor = torch.from_numpy(data)  # the tensor keeps this array object alive
        if not (_is_worth_lending(part) and transfer.lend(part, [data])):
            tensor = pool.empty((len(data),), torch.uint8).copy_(tensor)
        memory.append(tensor)
    return [_view_images(memory, starts, images) for images in columns.images]


def _view_images(memory: Sequence[torch.Tensor | None], starts: np.ndarray, images: ImageColumn) -> list[torch.Tensor]:
    """Return the images of a column as views; `starts` has the offset of each part's memory."""
    views, itemsize, offsets = [], 1, images.table["offset"]
    if images.kinds:
        dtype = getattr(torch, images.kinds[0][0])  # pyright: ignore[reportOptionalSubscript]
        itemsize = dtype.itemsize
        memory = [None if part is None else part[: len(part) // itemsize * itemsize].view(dtype) for part in memory]
    order = starts.argsort(kind="stable")
    parts = order[starts[order].searchsorted(offsets, "right") - 1]
    columns = (offsets - starts[parts]).tolist(), images.table["shape"].tolist()
    for part, offset, (height, width, pixel_bytes) in zip(parts.tolist(), *columns, strict=True):
        part_memory: Any = memory[part]
        channels = pixel_bytes // itemsize
        strides = (1, width * channels, channels)
        views.append(part_memory.as_strided((channels, height, width), strides, offset // itemsize))
    return views


def _is_worth_lending(part: Part) -> bool:
    if part.data is None or part.slot is None:
        return False
    return part.used_bytes >= max(LEND_BYTES, part.slot.capacity_bytes // 4)
