"""Assembling batches for the user: finishing the columns of a batch's chunks, and collating them.

This module runs in the main process, on the transfer stream. The batch's columns are read, images go through the stage,
masks, boxes and keypoints are transformed like the images, and blocks of arrays are concatenated in one copy. The
finished columns are collated like torch's `default_collate`. A user's `collate_fn` gets samples that are rebuilt one by
one, unless a worker has already called it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from gpuload.batches.collate import (
    BatchOptions,
    FinishedColumns,
    Outline,
    collate,
    convert_arrays,
    keep_meta,
    outline_of,
    unwrap,
)
from gpuload.batches.memory import BatchMemory
from gpuload.batches.mixing import half_batch_numbers, soften
from gpuload.batches.targets import target_warning
from gpuload.batches.transform import BatchTransform
from gpuload.datasets.sample import takes_meta
from gpuload.datasets.tree import convert_to_type
from gpuload.errors import CollateError, ErrorRecord, error_class_names, one_line
from gpuload.order.place import Place
from gpuload.ring.columns import Columns
from gpuload.stage import OutputPool, Stage
from gpuload.stage import device as devices
from gpuload.workers.batch import Batch

__all__ = ["Assembly", "BatchInfo", "LaunchedBatch"]

MAX_DEPTH = 3  # nesting depth up to which user-defined objects are searched for tensors
NO_CONTEXT = contextlib.nullcontext()
MakePlan = Callable[[Batch, Columns], None]
TENSORLESS_TYPES = (int, float, str, bytes, type, type(None))  # types that contain no tensors
PILLOW_HINT = (
    "; it got the images as C×H×W tensors. To get Pillow's images, return these from the dataset, without transforms"
)


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


@dataclass(slots=True)
class LaunchedBatch:
    """A batch whose stage has been launched, or the error to raise in its place.

    Attributes:
        value: the batch to yield, once `last_steps` has run.
        tensors: all tensors in the value, or all tensors that the last steps read.
        last_steps: a function that runs the postponed steps and returns the value, to be called on the consumer's
            stream; None if no step is postponed.
        ticket: what the transfer needs to hand the batch over; None once this has been done.
        error: the error to raise when the batch is due.
        failures: the records of the batch's failed samples.
        after: the place of the next batch.
        pending_warnings: the warnings to issue with the batch, as (kind, text). A loader issues one warning per kind,
            but every warning of kind "".
        images: the number of the batch's samples.
    """

    value: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    last_steps: Callable[[], Any] | None = None
    ticket: Any = None
    error: Exception | None = None
    failures: list[ErrorRecord] = field(default_factory=list)
    after: Place | None = None
    pending_warnings: list[tuple[str, str]] = field(default_factory=list)
    images: int = 0


class Assembly:
    """The assembly of batches from loaded chunks.

    Args:
        options: the batch options of the loader.
        stage: the compiled transforms.
        transfer: copies slots and tensors to the device.

    Attributes:
        copy_s, stage_s, collate_s: host time of issuing copies, of running transforms and drawing their parameters, and
            of all other steps.
    """

    def __init__(self, options: BatchOptions, stage: Stage, transfer: Any) -> None:
        self._options, self._transfer = options, transfer
        self.copy_s = self.stage_s = self.collate_s = 0.0
        self._step, self._began_s = "", 0.0  # the current step, and when it began, see `_begin`
        self._pool = None if transfer.is_asynchronous else OutputPool()
        self._transform = BatchTransform(options.chain, stage, options.seed, repeats=options.repeats)
        chain = options.chain
        makes_new_images = len(chain) or chain.modules or chain.views is not None or options.rebuilds_samples
        self._lends_images = self._pool is not None and options.ragged == "list" and not makes_new_images
        self._has_checked_targets = False  # whether `target_warning` has been called

    def make(self, batch: Batch, info: bool, release: Callable[[], None], make_plan: MakePlan) -> LaunchedBatch:
        """Assemble a batch. On asynchronous devices, the modules at the end of the transforms and a `collate_fn` are
        postponed, since they may depend on values that the consumer's stream is still computing.

        Args:
            batch: a complete batch; its slots are released once they have been read.
            info: also return a `BatchInfo`.
            release: releases the slots.
            make_plan: plans a batch that no worker has planned, if possible (`Feed.plan`).

        Raises:
            CollateError: the samples cannot be collated.
        """
        return self._measure(partial(self._assemble, batch, info, release, make_plan))

    def _measure(self, assemble: Callable[[], Any]) -> Any:
        """Return the result of a function; add its time to `collate_s`, or to the steps that it begins."""
        self._begin("collate_s")
        try:
            return assemble()
        finally:
            self._begin("")

    def _begin(self, step: str) -> None:
        """Begin a step: add the time since the last call to the attribute of the step that ends. "" begins no step."""
        now_s = perf_counter()
        if self._step:
            setattr(self, self._step, getattr(self, self._step) + now_s - self._began_s)
        self._step, self._began_s = step, now_s

    def _assemble(self, batch: Batch, info: bool, release: Callable[[], None], make_plan: MakePlan) -> LaunchedBatch:
        options, finished = self._options, None
        starts = self._transfer.part_offsets(batch)
        columns = batch.join_columns(starts, splits_blocks=options.rebuilds_samples)
        if columns.collated is not None:
            release()  # unpickling has copied the batch
            collate_batch = partial(self._move_to_device, _value_from_worker(columns))
        else:
            outline = None if options.rebuilds_samples else outline_of(columns, pads_boxes=options.boxes == "padded")
            finished = self.finish(batch, columns, release, make_plan)
            collate_batch = partial(self._collate, batch.spec.epoch, finished, outline)
        warning = batch.spec.warning
        if columns.has_targets and not (self._has_checked_targets or warning):
            self._has_checked_targets, warning = True, target_warning(options.chain, columns)
        batch_info = self._make_info(batch, columns) if info else None

        def run_last_steps() -> Any:
            value = collate_batch()
            return value if batch_info is None else (value, batch_info)

        launched = LaunchedBatch(after=batch.spec.after, pending_warnings=[("", warning)] if warning else [])
        if finished is not None and self._transfer.is_asynchronous and self._reads_state(columns):
            launched.last_steps = partial(self._measure, run_last_steps)
            launched.tensors = _find_tensors([finished.images, finished.cells, finished.full_columns, batch_info])
        else:
            launched.value = run_last_steps()
            launched.tensors = _find_tensors(launched.value)
        return launched

    def _reads_state(self, columns: Columns) -> bool:
        """Return whether user code (a `collate_fn` or the modules at the end of the transforms) may read values that
        the consumer's stream is still writing."""
        return self._options.collate_fn is not None or (self._options.chain.ends_in_state and bool(columns.images))

    def finish(
        self, batch: Batch, columns: Columns, release: Callable[[], None], make_plan: MakePlan | None = None
    ) -> FinishedColumns:
        """Finish the columns of a batch, except for `end_images`, and release the batch's slots."""
        memory = BatchMemory(self._transfer, self._pool, batch, columns, release)
        if columns.images:
            finished = self._finish_images(batch, columns, memory, make_plan)
        else:
            finished = FinishedColumns(columns)
            if columns.blocks and self._pool is None:
                self._begin("copy_s")
                memory.load()
        self._begin("collate_s")
        finished.full_columns |= memory.finish_blocks()
        memory.release()
        return finished

    def _finish_images(
        self, batch: Batch, columns: Columns, memory: BatchMemory, make_plan: MakePlan | None
    ) -> FinishedColumns:
        """Return the columns of a batch with the images and targets. The images are in lent slots, are made from a
        plan, or from programs."""
        transform = self._transform
        if self._lends_images and not (columns.has_targets or batch.has_device_images):
            self._begin("stage_s")
            transform.check(columns, memory.read)
            return FinishedColumns(columns, images=[[images] for images in memory.lend_images()])
        if batch.planned is None and make_plan is not None:
            self._begin("stage_s")
            make_plan(batch, columns)
        self._begin("copy_s")
        memory.load()
        self._begin("stage_s")
        if batch.planned is None:
            return transform(batch.spec, columns, self._combination_numbers(batch, columns), memory.read)
        finished = FinishedColumns(columns, transform.has_views, full_columns=memory.read_plan(batch.planned))
        finished.images = [[transform.stage(memory.read(columns.images[0]), batch.planned)]]
        return finished

    def end_images(self, epoch: int, finished: FinishedColumns, *, splits_images: bool) -> None:
        """Call the modules at the end of the transforms on the images, on the current stream. If samples have targets,
        or `splits_images`, put each image into a cell."""
        if self._options.chain.modules:
            self._begin("stage_s")
            self._transform.call_modules(epoch, finished)
            self._begin("collate_s")
        if splits_images or finished.columns.has_targets:
            finished.split_images()

    def _collate(self, epoch: int, finished: FinishedColumns, outline: Outline | None) -> Any:
        """Collate the finished columns into the user's batch. If `outline` is None, rebuild the samples first."""
        self.end_images(epoch, finished, splits_images=outline is None)
        if outline is None:
            return self._move_to_device(self._collate_samples(finished))
        pairing, options = finished.pairing, self._options
        # Labels are checked and mixed before they are copied to the device, to avoid waiting for the device.
        move = self._move if pairing is None else lambda tensor: tensor
        with _cpu_context():
            value = collate(finished, outline, options, move)
            if pairing is None:
                return value
            return self._move_to_device(soften(value, pairing, finished.columns.name))

    def _combination_numbers(self, batch: Batch, columns: Columns) -> np.ndarray:
        """Return the numbers that determine which samples are combined; see `BatchTransform`."""
        repeats, (_, group) = self._options.repeats, self._options.chain.group
        if group == 1 or (self._options.planned and repeats == 1):
            return columns.positions
        rows = batch.find_rows(columns.positions)
        return rows if repeats == 1 else half_batch_numbers(rows, len(batch.spec.positions))

    def _collate_samples(self, finished: FinishedColumns) -> Any:
        """Rebuild the samples, and return the result of the `collate_fn`; without a `collate_fn`, the converted
        samples."""
        collate_fn, pairing, columns = self._options.collate_fn, finished.pairing, finished.columns
        samples = finished.samples(keep_meta if takes_meta(collate_fn) else unwrap)
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

    def _move_to_device(self, value: object) -> Any:
        """Copy a collated batch's tensors to the device. Other objects stay on the host; with the option `pin_memory`,
        their ``pin_memory()`` is called."""
        return tree_map(self._move_leaf, value)

    def _move_leaf(self, leaf: object) -> Any:
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


def _value_from_worker(columns: Columns) -> Any:
    """Return the result of the `collate_fn`, or raise its error, if it ran in a worker."""
    assert columns.collated is not None
    if (collated := columns.collated).error:
        raise _collate_error(columns, collated.error, collated.traceback, collated.error_classes)
    return collated.value


def _collate_error(columns: Columns, cause: str, traceback: str, kinds: Sequence[str], hint: str = "") -> CollateError:
    return CollateError(
        f"collate_fn raised {cause} for a batch of {len(columns)} samples, the first of which is {columns.name(0)}"
        + hint
        + (f"\n\nWhere it happened:\n{traceback.rstrip()}" if traceback else ""),
        kinds,
    )


def _find_tensors(value: object, depth: int = MAX_DEPTH) -> list[torch.Tensor]:
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
