"""Assembling batches for the user: finishing the columns of a batch's chunks, and collating them.

Runs in the main process, on the transfer stream. The batch's columns are read, images go through the stage,
masks, boxes and keypoints are transformed like the images, and blocks of arrays are concatenated in one copy. The
finished columns are collated like torch's `default_collate`. A user's `collate_fn` gets samples that are rebuilt row by
row, unless a worker has already called it.
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
    outline_of,
    samples_of,
    unwrap,
    with_tensor,
)
from gpuload.batches.gathering import target_stage
from gpuload.batches.mixing import Pairing, half_batch_numbers, partners_of, soften
from gpuload.batches.targets import TargetStage, warning_on_targets
from gpuload.datasets.sample import takes_meta
from gpuload.datasets.tree import convert_to_type
from gpuload.errors import CollateError, error_types, one_line
from gpuload.ring.columns import Block, Columns, ImageColumn, entry, leaves_with_mismatched_blocks
from gpuload.rng import philox, streams
from gpuload.stage import OutputPool, RaggedImages
from gpuload.stage import device as devices
from gpuload.stage.device import COPY, profiler_range, view_arrays
from gpuload.transforms import Chain, Program
from gpuload.workers.batch import Batch, Part
from gpuload.workers.planned import PlannedBatch

__all__ = ["AssembledBatch", "Assembly", "BatchInfo", "columns_of", "draw_programs", "module_seed"]

MAX_DEPTH = 3  # levels of nested user-defined objects that are searched for tensors
NO_CONTEXT = contextlib.nullcontext()
LEND_BYTES = 1 << 20  # smaller arrays are copied instead of lent
TENSORLESS_TYPES = (int, float, str, bytes, type, type(None))  # types that contain no tensors


def columns_of(batch: Batch, starts: Sequence[int], *, spread: bool) -> Columns:
    """Return the successfully loaded samples of a batch, concatenated from its chunks, in the order of their positions.

    If no sample failed, this is the order of the chunks. In the chunks, substitutes for failed samples come after the
    other samples. Skipped samples are missing.

    Args:
        batch: a complete batch.
        starts: the offset of each part's bytes in the batch's memory.
        spread: split blocks into values, one array per sample. Even if False, all blocks are split if the batch has
            targets or failed samples, and leaves whose blocks differ between chunks are always split.
    """
    spec, planned = batch.spec, batch.planned
    if planned is not None and planned.columns is not None:
        columns = planned.columns
    else:
        chunks = [
            (part, part.content, start) for part, start in zip(batch.parts, starts, strict=False) if part.sample_count
        ]
        contents = [content for _, content, _ in chunks if content is not None]
        spread = spread or bool(batch.errors) or any(content.has_targets for content in contents)
        leaves = (
            {leaf for content in contents for leaf in content.blocks}
            if spread
            else leaves_with_mismatched_blocks(contents)
        )
        for (part, _, _), content in zip(chunks, contents, strict=True):
            content.unstack(leaves & content.blocks.keys(), part.data)
        columns = Columns.concat(contents, [start for _, _, start in chunks])
        if batch.errors:
            columns.positions = np.concatenate([part.positions[content.rows] for part, content, _ in chunks])  # pyright: ignore
            columns.indices = [part.indices[row] for part, content, _ in chunks for row in content.rows]  # pyright: ignore
            return columns.take(np.argsort(planned_rows(batch, columns), kind="stable"))
    columns.positions, columns.indices = spec.positions, spec.indices
    return columns


def planned_rows(batch: Batch, columns: Columns) -> np.ndarray:
    """Return each sample's row in the requested batch, int64 (N,). In a batch that wraps around, positions are not
    ascending."""
    order = np.argsort(batch.spec.positions, kind="stable")
    return order[np.searchsorted(batch.spec.positions[order], columns.positions)]


def draw_programs(
    chain: Chain, seed: int, epoch: int, columns: Columns, *, entire_images: bool = False
) -> list[list[Program]]:
    """Draw the programs for each column of images, one program per view. With `entire_images`, the
    regions are entire images; otherwise they are in the tables, where a worker has stored the regions it drew.

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
            programs.append(programs[0])  # both columns have the same rows and sizes
            continue
        boxes = columns.boxes(rows.tolist()) if chain.reads_boxes else None
        draw = partial(chain.draw, key, columns.positions[rows], sizes, boxes)
        regions = None if entire_images else images.table["region_tlhw"]
        programs.append([draw(view=view, regions_tlhw=regions) for view in range(len(chain.lines))])
    return programs


def module_seed(seed: int, epoch: int, columns: Columns, view: int) -> int:
    """Return the seed of torch's generators for the module at the end of the transforms. It depends on the first
    position of the batch, which is the same when an epoch is resumed."""
    key = philox.epoch_key(seed, epoch)
    return int(philox.uniforms(key, columns.positions[:1], streams.MODULE[view], 2)[0, 0] * 2.0**32)


class BatchInfo(NamedTuple):
    """The samples of a batch, returned with the batch if ``info=True``. A named tuple, so that trainers can move it to
    a device.

    Attributes:
        epoch: the epoch's number.
        step: the batch's number in the epoch, from 0.
        positions: int64 (N,), each sample's position in the epoch's order.
        indices: int64 (N,), each sample's index in the dataset; a list if a sampler yields keys that are not integers.
            For an iterable dataset, the number of samples that its worker yielded before it.
        valid: bool (N,), False for rows that only pad a batch.
    """

    epoch: int
    step: int
    positions: torch.Tensor
    indices: torch.Tensor | list[Any]
    valid: torch.Tensor


class AssembledBatch(NamedTuple):
    """An assembled batch, or one whose last steps are postponed.

    Attributes:
        value: the finished batch; None if its last steps are postponed.
        tensors: all tensors in the value, or all tensors that the postponed steps read.
        last_steps: a function that runs the postponed steps and returns the value, to be called on the consumer's
            stream; None if no step is postponed.
        warning: the warning to issue with the batch; "" for none.
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

    Attributes:
        copy_s, stage_s, collate_s: host time of issuing copies, of transforms with their draws, and of all other steps.
    """

    def __init__(self, options: BatchOptions, stage: Any, transfer: Any) -> None:
        self._options = options
        self._stage = stage
        self._transfer = transfer
        self.copy_s = self.stage_s = self.collate_s = 0.0
        self._by_row = options.by_row
        self._pool = None if transfer.is_asynchronous else OutputPool()
        chain = options.chain
        has_transforms = len(chain) or chain.module is not None or chain.views is not None
        self._lends_slots = (
            self._pool is not None and options.ragged == "list" and not has_transforms and not self._by_row
        )
        self._targets: TargetStage | None = None  # created for the first sample with targets
        self._warned = False  # whether `warning_on_targets` was called

    def make(self, batch: Batch, info: bool, release: Callable[[], None]) -> AssembledBatch:
        """Assemble a batch. On asynchronous devices, the module at the end of the transforms and a `collate_fn` are
        postponed, since they may depend on values that the consumer's stream is still computing.

        Args:
            batch: a complete batch; its slots are released when they have been read.
            info: also return a `BatchInfo`.
            release: releases the slots.

        Raises:
            CollateError: the samples cannot be collated.
        """
        with self._collating():
            return self._assemble(batch, info, release)

    @contextlib.contextmanager
    def _collating(self) -> Iterator[None]:
        """Return a context that adds its time to `collate_s`, except time that is added to `copy_s` or `stage_s`."""
        began_s, issued_s = perf_counter(), self.copy_s + self.stage_s
        try:
            yield
        finally:
            self.collate_s += perf_counter() - began_s - (self.copy_s + self.stage_s - issued_s)

    def _assemble(self, batch: Batch, info: bool, release: Callable[[], None]) -> AssembledBatch:
        columns = columns_of(batch, self._transfer.part_offsets(batch), spread=self._by_row)
        is_postponed, finished = False, None
        if columns.collated is not None:
            release()  # unpickling has copied the batch
            if (collated := columns.collated).error:
                raise _collate_error(columns, collated.error, collated.traceback, collated.error_classes)
            collect = partial(self._on_device, collated.value)
        else:
            is_postponed = self._transfer.is_asynchronous and self._reads_state(columns)
            outline = None if self._by_row else outline_of(columns)
            finished = self.finish(batch, columns, release, by_row=self._by_row, calls_module=not is_postponed)
            collect = partial(self._collate, columns, outline, finished)
        warning = batch.spec.warning
        if columns.has_targets and not (self._warned or warning):
            self._warned, warning = True, warning_on_targets(self._options.chain, columns)
        epoch, batch_info = batch.spec.epoch, self._info(batch, columns) if info else None

        def build_value() -> Any:
            return collect() if batch_info is None else (collect(), batch_info)

        def run_last_steps() -> Any:
            assert finished is not None
            with self._collating():
                start = perf_counter()
                self._call_module(epoch, columns, finished, by_row=self._by_row)
                self.stage_s += perf_counter() - start
                return build_value()

        if is_postponed and finished is not None:
            return AssembledBatch(
                None, _find_tensors([*finished.results, batch_info], MAX_DEPTH), run_last_steps, warning
            )
        result = build_value()
        return AssembledBatch(result, _find_tensors(result, MAX_DEPTH), None, warning)

    def _reads_state(self, columns: Columns) -> bool:
        """Return whether user code (a `collate_fn` or the module at the end of the transforms) may read values that
        the consumer's stream is still writing."""
        return self._options.collate_fn is not None or (self._options.chain.ends_in_state and bool(columns.images))

    def plan_inputs(self, batch: Batch) -> tuple[PlannedBatch, bytes] | None:
        """Return an empty plan for a complete batch, and the inputs for the worker that plans the batch; None if the
        stage plans it."""
        planned = PlannedBatch(self._transfer.part_offsets(batch))
        chunks = [part.description for part in batch.parts]
        if not all(chunks):
            chunks = []
            planned.columns = columns = columns_of(batch, planned.starts, spread=False)
            images = columns.images
            if columns.has_targets or len(images) != 1 or images[0].kinds or images[0].rows is not None:
                return None
        return planned, planned.pack_input(chunks)

    def _collate(self, columns: Columns, outline: Any, finished: FinishedColumns) -> Any:
        """Collate the finished columns into the user's batch, row by row if `outline` is None."""
        if outline is None:
            return self._on_device(self._collate_rows(columns, finished))
        pairing, options = finished.pairing, self._options
        # Labels are checked and mixed before they are copied to the device, to avoid waiting for the device.
        place = self._place if pairing is None else lambda tensor: tensor
        with _on_the_cpu():
            value = collate(columns, outline, finished, ragged=options.ragged, pad_to=options.pad_to, to_device=place)
            return value if pairing is None else self._on_device(soften(value, pairing, columns.name))

    def finish(
        self, batch: Batch, columns: Columns, release: Callable[[], None], *, by_row: bool, calls_module: bool = True
    ) -> FinishedColumns:
        """Finish the columns of a batch, and release its slots. With `by_row`, put images into cells, and split blocks
        into values. With `calls_module`, also call `_call_module`."""
        chain, epoch, pool = self._options.chain, batch.spec.epoch, self._pool
        has_cells = by_row or columns.has_targets  # otherwise all rows share one empty dict
        cells = [{} for _ in range(len(columns))] if has_cells else [{}] * len(columns)
        finished = FinishedColumns(chain.views, cells, self._numbers(batch, columns))
        if chain.mixing is not None:
            samples = columns.positions // self._options.repeats
            finished.pairing = Pairing(chain.mixing, partners_of(finished.numbers, samples))
        lends_slots = bool(
            self._lends_slots and columns.images and not (columns.has_targets or batch.has_device_images)
        )
        loads_slots = bool((columns.images and not lends_slots) or (columns.blocks and pool is None))
        started_at = perf_counter()
        with profiler_range(COPY):
            pixels, starts = self._transfer.load(batch, release) if loads_slots else (None, [])
        loaded_at = perf_counter()
        self.copy_s += loaded_at - started_at

        def bytes_of(images: ImageColumn) -> RaggedImages:
            return RaggedImages(pixels, images.table, _Names(columns, images))  # pyright: ignore[reportArgumentType]

        if (planned := batch.planned) is not None:
            assert pixels is not None
            planned.arrays = view_arrays(pixels, planned.spans, starts[-1])
            leaves = {name: planned.arrays.pop(name) for name in planned.spans if isinstance(name, int)}
            if self._transfer.is_asynchronous:  # views would keep the pixels alive as long as the user keeps the labels
                finished.planned_columns = {leaf: array.clone() for leaf, array in leaves.items()}
            finished.images.append([self._stage(bytes_of(columns.images[0]), planned)])
        else:
            finished.programs = draw_programs(chain.at(epoch), self._options.seed, epoch, columns)
            if columns.has_targets:
                self._targets = self._targets or target_stage(chain, self._stage.device)
                self._targets(columns, finished, bytes_of)
            for images, programs in zip(columns.images, finished.programs, strict=True):
                ragged = _in_original_dtype(images, bytes_of(images))
                if lends_slots:
                    self._stage.check(ragged, programs[0])
                else:
                    finished.images.append(self._images(columns, images, ragged, programs, finished.pairing))
            if lends_slots and pool is not None:
                finished.images = [[views] for views in _lent_images(self._transfer, batch, columns, pool)]
        if calls_module:
            self._call_module(epoch, columns, finished, by_row=by_row)
        self.stage_s += perf_counter() - loaded_at
        if columns.blocks and pool is not None:
            finished.full_columns |= _host_blocks(self._transfer, batch, columns, pool)
        elif columns.blocks:
            assert pixels is not None
            finished.full_columns |= {leaf: _device_block(block, pixels) for leaf, block in columns.blocks.items()}
        if not loads_slots:
            release()  # everything in the slots has been copied or lent
        return finished

    def _call_module(self, epoch: int, columns: Columns, finished: FinishedColumns, *, by_row: bool) -> None:
        """Call the module at the end of the transforms, if any, on the images, on the current stream. If rows have
        separate cells, put each finished image into the cell of its row."""
        if self._options.chain.module is not None:
            for number, views in enumerate(finished.images):
                finished.images[number] = [
                    self._stage.call_last(images, module_seed(self._options.seed, epoch, columns, view))
                    for view, images in enumerate(views)
                ]
        if by_row or columns.has_targets:
            for images, views, programs in zip(columns.images, finished.images, finished.programs, strict=True):
                for place, (row, leaf) in enumerate(images.rows_and_leaves()):
                    results = [_row_of(view, place, program) for view, program in zip(views, programs, strict=True)]
                    finished.cells[row][leaf] = finished.of_views(results)

    def _images(
        self,
        columns: Columns,
        images: ImageColumn,
        ragged: RaggedImages,
        programs: Sequence[Program],
        pairing: Pairing | None,
    ) -> list[Any]:
        """Return the images of a column for each view, before `_call_module`. If images are mixed, `pairing` has the
        partners, and receives the shares."""
        if pairing is not None:
            pairing.store_shares(programs[0], columns, images)
        partners = None if pairing is None else pairing.partners
        return [
            self._stage(*ragged.resolve(program), view=view, partners=partners) for view, program in enumerate(programs)
        ]

    def _numbers(self, batch: Batch, columns: Columns) -> np.ndarray:
        """Return the numbers that determine which samples are neighbours; see `FinishedColumns.numbers`."""
        repeats, (_, group) = self._options.repeats, self._options.chain.group
        if group == 1 or (self._options.planned and repeats == 1):
            return columns.positions
        rows = planned_rows(batch, columns)
        return rows if repeats == 1 else half_batch_numbers(rows, len(batch.spec.positions))

    def _collate_rows(self, columns: Columns, finished: FinishedColumns) -> Any:
        """Return the result of the `collate_fn` for the samples; without one, the converted samples."""
        collate_fn, pairing = self._options.collate_fn, finished.pairing
        samples = samples_of(columns, finished.cells, with_tensor if takes_meta(collate_fn) else unwrap)
        argument = samples[0] if self._options.single else samples
        if collate_fn is None:
            with torch.device("cpu"):
                return convert_arrays(argument, partial(columns.name, 0))
        try:
            value = collate_fn(argument)
        except Exception as error:
            problem = one_line(f"{type(error).__name__}: {error}")
            raise _collate_error(columns, problem, "", error_types(error)) from error
        return value if pairing is None else soften(value, pairing, columns.name)

    def _on_device(self, value: Any) -> Any:
        """Copy a collated batch's tensors to the device. Other objects stay on the host; with the option `pin_memory`,
        their ``pin_memory()`` is called."""
        return tree_map(self._place_leaf, value)

    def _place_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._place(leaf)
        pin_memory: Any = getattr(leaf, "pin_memory", None)
        if callable(pin_memory):
            return pin_memory() if self._options.pin_memory and devices.is_available() else leaf
        if isinstance(leaf, Mapping):  # an instance of a user-defined class, which pytree treats as a leaf
            return convert_to_type(type(leaf), {key: tree_map(self._place_leaf, item) for key, item in leaf.items()})
        return leaf

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if self._options.pin_memory and not self._transfer.is_asynchronous and devices.is_available():
            return tensor.pin_memory()
        return self._transfer.copy_to_device(tensor)

    def _info(self, batch: Batch, columns: Columns) -> BatchInfo:
        is_int = all(isinstance(index, int | np.integer) for index in columns.indices)
        with _on_the_cpu():
            return BatchInfo(
                batch.spec.epoch,
                batch.spec.step,
                self._place(torch.from_numpy(columns.positions.copy())),
                self._place(torch.from_numpy(np.array(columns.indices, np.int64))) if is_int else list(columns.indices),
                self._place(torch.from_numpy(_valid(batch, columns))),
            )


def _on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors are on the CPU. Creating a tensor is the fastest way to find the default
    device."""
    return NO_CONTEXT if torch.empty(0).device.type == "cpu" else torch.device("cpu")


def _valid(batch: Batch, columns: Columns) -> np.ndarray:
    """Return whether each row is a sample and not padding, bool (N,)."""
    positions = columns.positions
    valid = np.ones(len(positions), np.bool_)
    if batch.spec.valid is not None:
        # Padding repeats a position. If the original row is in this batch, the padding rows follow it.
        valid[1:] = positions[1:] != positions[:-1]
        valid &= np.isin(positions, batch.spec.positions[batch.spec.valid])
    return valid


def _in_original_dtype(images: ImageColumn, ragged: RaggedImages) -> RaggedImages:
    """Return images in their dtype; images that are not uint8 were transferred as bytes."""
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


def _collate_error(columns: Columns, cause: str, traceback: str, kinds: Sequence[str]) -> CollateError:
    return CollateError(
        f"collate_fn raised {cause} for a batch of {len(columns)} samples, the first of which is {columns.name(0)}"
        + (f"\n\nWhere it happened:\n{traceback.rstrip()}" if traceback else ""),
        kinds,
    )


def _row_of(images: Any, row: int, program: Program) -> torch.Tensor:
    """Return one image of a batch that is N×C×H×W, a list, or (N×C×H×W, sizes). The image's size comes from the program
    on the host, since the stage's sizes may be on a device."""
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
        inner = value.values()
    elif isinstance(value, list | tuple | set | deque):
        inner = value
    else:
        inner = list(getattr(value, "__dict__", {}).values())
        slots = getattr(type(value), "__slots__", ())
        inner += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return [tensor for entry in inner for tensor in _find_tensors(entry, depth)]


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


def _host_blocks(transfer: Any, batch: Batch, columns: Columns, pool: OutputPool) -> dict[int, torch.Tensor]:
    """Return the batch's blocks as tensors N×…: views of its slot if one slot has all blocks and is worth lending,
    otherwise copies in memory from the `pool`."""
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
        return {leaf: _as_tensor(array, columns.blocks[leaf]) for leaf, [array] in arrays.items()}
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
    """Return a block as one tensor N×…, from the batch's memory on the device."""
    dtype = getattr(torch, block.torch_dtype or block.dtype)
    row_bytes = prod(block.shape) * dtype.itemsize
    pieces = [pixels[start : start + n * row_bytes].view(dtype).view(n, *block.shape) for start, n in block.pieces]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _as_tensor(array: np.ndarray, block: Block) -> torch.Tensor:
    tensor = torch.from_numpy(array)  # the tensor keeps this array object alive
    return tensor.view(getattr(torch, block.torch_dtype)) if block.torch_dtype else tensor


def _lent_images(transfer: Any, batch: Batch, columns: Columns, pool: OutputPool) -> list[list[torch.Tensor]]:
    """Return the decoded images of a batch, C×H×W: views of H×W×C memory in lent slots, or in copies."""
    starts = np.array(transfer.part_offsets(batch))
    memory: list[torch.Tensor | None] = []
    for part in batch.parts:
        if part.data is None:
            memory.append(None)
            continue
        bytes_ = part.data[: part.used_bytes]
        tensor = torch.from_numpy(bytes_)  # the tensor keeps this array object alive
        if not (_is_worth_lending(part) and transfer.lend(part, [bytes_])):
            tensor = pool.empty((len(bytes_),), torch.uint8).copy_(tensor)
        memory.append(tensor)
    return [_views(memory, starts, images) for images in columns.images]


def _views(memory: Sequence[torch.Tensor | None], starts: np.ndarray, images: ImageColumn) -> list[torch.Tensor]:
    """Return images as views; `starts` has the offset of each part's memory."""
    views, size, offsets = [], 1, images.table["offset"]
    if images.kinds:
        dtype = getattr(torch, images.kinds[0][0])  # pyright: ignore[reportOptionalSubscript]
        size = dtype.itemsize
        memory = [None if part is None else part[: len(part) // size * size].view(dtype) for part in memory]
    order = starts.argsort(kind="stable")
    parts = order[starts[order].searchsorted(offsets, "right") - 1]
    columns = (offsets - starts[parts]).tolist(), images.table["shape"].tolist()
    for part, offset, (height, width, pixel) in zip(parts.tolist(), *columns, strict=True):
        part_memory: Any = memory[part]
        channels = pixel // size
        strides = (1, width * channels, channels)
        views.append(part_memory.as_strided((channels, height, width), strides, offset // size))
    return views


def _is_worth_lending(part: Part) -> bool:
    if part.data is None or part.slot is None:
        return False
    return part.used_bytes >= max(LEND_BYTES, part.slot.capacity_bytes // 4)
