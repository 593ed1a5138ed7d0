"""A session: the resources of a `Loader` that live from its first `iter()` to `close()`.

The session owns the ring, the engine (worker processes, or the main process itself), the transfer and the compiled
stage, and makes batches from the feed's chunks. This module runs in the main process, in the thread that iterates. It
starts no threads, except that a device decodes in two (`gpuload.stage.decode.threads`). Any thread may take the next
batch or close the session, one thread at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._device  # otherwise torch imports it at the first `with torch.device(…)`, within the first batch
from torch.utils._pytree import tree_leaves

from gpuload.batches.assemble import Assembly, LaunchedBatch
from gpuload.datasets.kinds import is_deterministic, uses_getitems
from gpuload.datasets.recognise import SHARED_DRAWS
from gpuload.decode.decoder import UNUSABLE
from gpuload.errors import GpuloadError, SampleError, TooManyErrors
from gpuload.loader.autotune import Autotune, Setting, Tuner
from gpuload.loader.limits import Placement, memory_left_bytes
from gpuload.loader.log import logger, report_session_start
from gpuload.loader.meter import Meter
from gpuload.loader.options import Options
from gpuload.order.options import OrderOptions
from gpuload.order.place import IterablePlace
from gpuload.order.ranks import find_group
from gpuload.order.schedule import ranks_of
from gpuload.order.spec import BatchSpec
from gpuload.ring.ring import Ring
from gpuload.stage.decode import Choice, ImageDecoder, decoders_for_threads
from gpuload.stage.device import DECODE, STAGE, WAIT, profiler_range
from gpuload.stage.noise import forget_tables
from gpuload.stage.transfer import make_transfer
from gpuload.workers.batch import Batch
from gpuload.workers.box_fields import WARNING_PREFIX
from gpuload.workers.dataset_changes import DatasetChanges, find_objects, name_attribute
from gpuload.workers.faults import ErrorLog, substitutes
from gpuload.workers.feed import LAUNCHED_AHEAD, Consumer, Feed
from gpuload.workers.inherited import imported_libraries, library_values, module_values
from gpuload.workers.inline import InProcessEngine
from gpuload.workers.job import Job
from gpuload.workers.pool import WorkerPool
from gpuload.workers.ray import RayPool
from gpuload.workers.signals import deferred_signals

__all__ = [
    "ITERATOR_ENDED",
    "NEWER_ITERATOR",
    "Session",
    "SessionState",
    "Steps",
    "libraries_for",
]

THREAD_WAIT_S = 5.0  # how long to wait for another thread to leave its next()
NO_CONTEXT = contextlib.nullcontext()
ITERATOR_ENDED = "this iterator has ended: {}"
NEWER_ITERATOR = (
    "a newer iter() of its Loader was started. A Loader runs one epoch at a time; for two at the same time, as in "
    "zip(loader, loader) or nested loops, create a second Loader"
)


class SessionState(enum.Enum):
    """The state of a session: it can take another step, can only be closed, or is closed."""

    OPEN = enum.auto()
    BROKEN = enum.auto()  # a step was interrupted, so an event or a batch may be lost: iter() starts a new session
    CLOSED = enum.auto()  # or about to be closed


class Steps:
    """The steps of a session, and the session's state.

    A Ctrl-C, a finalizer, a fork or another thread can intervene at any line, and the state must be correct at every
    line. So the state is derived from attributes that each change in a single operation; `closed` and `ended` never
    become False again.

    The finalizer of the session's `Loader` shares this object, so it refers neither to the session nor to the Loader.
    Steps are taken under the session's lock; closing does not need the lock.

    Attributes:
        broken_by: what interrupted a step; empty if no step was interrupted.
        closed: whether closing has begun; ended: whether everything has been freed, or is about to be freed.
    """

    def __init__(self) -> None:
        self.broken_by = ""
        self.closed = self.ended = False
        self._pid = os.getpid()

    @property
    def state(self) -> SessionState:
        if self.closed:
            return SessionState.CLOSED
        return SessionState.BROKEN if self.broken_by else SessionState.OPEN

    @property
    def in_forked_child(self) -> bool:
        """Whether this process was forked from the session's process."""
        return os.getpid() != self._pid

    def begin(self, *, engine_is_broken: bool) -> Steps:
        """Begin a step, which is a context manager. An exception in the step breaks the session, except for gpuload's
        errors and warnings, which are only raised when no event or batch can be lost. If `engine_is_broken`, a broken
        session raises no error here, since the engine reports why it cannot continue."""
        if self.closed:
            raise RuntimeError(ITERATOR_ENDED.format("its Loader was closed"))
        if self.broken_by and not engine_is_broken:
            raise RuntimeError(
                ITERATOR_ENDED.format(
                    f"it was interrupted by {self.broken_by}, and a batch may be lost. Begin a new epoch with iter()"
                )
            )
        self.broken_by = "an interrupt"
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and self.closed:  # closed by a signal handler; the feed looks as if the epoch had ended
            error = RuntimeError("closed")
        if error is None or isinstance(error, GpuloadError | Warning):
            self.broken_by = ""
            return
        self.broken_by = type(error).__name__
        if self.closed and isinstance(error, Exception):
            raise RuntimeError(ITERATOR_ENDED.format("its Loader was closed meanwhile")) from error


class Session:
    """The parts that produce a loader's batches, and the next batch.

    Args:
        options: the loader's options.
        errors: the log of failed samples.
        epoch: the number of the first epoch.
        autotune: adjusts the options that are set to "auto".

    Attributes:
        is_outdated: whether the workers' state no longer matches the loader's, so that the next epoch needs a new
            session.
        next_batch: the batch to yield next; its consumer sets it to None.
        lock: held while an epoch begins, advances or ends, and until `close` has finished.
    """

    def __init__(
        self,
        options: Options,
        errors: ErrorLog,
        epoch: int = 0,
        autotune: Autotune | None = None,
    ) -> None:
        started_at = time.monotonic()
        self.options, self.errors, self._warned = options, errors, options.order.issued_warnings
        workers, device = options.workers, options.resolve_device()
        self.stage = options.compile(device)
        choice = options.choose_decoder(device)
        self.stage.plan = replace(self.stage.plan, decoder=choice.text)
        if choice.warning and "decoder" not in self._warned:
            self._warned.add("decoder")
            warnings.warn(choice.warning, RuntimeWarning, stacklevel=4)  # points at the loop that iterates
        self._ranks = ranks_of(options.order), find_group()
        # Workers plan batches by the locations of the images in the ring, so every image must be there. An image that
        # the device refuses to decode would be missing.
        batch_planner = self.stage.batch_planner() if workers.processes and not choice.share else None
        self._make_job = partial(_make_job, options, batch_planner=batch_planner, device_share=choice.share)
        job = self._make_job(epoch)
        start = Setting(workers.count, workers.prefetch) if autotune is None else autotune.setting
        options.check_limits(device, start.workers, epoch)
        self.placement = options.find_placement(device)
        self._resources = self._open(job, choice, device, start.workers)
        self.engine.started_at = started_at
        min_ahead, ahead = options.batches_ahead(start.workers, start.ahead)
        self.feed = Feed(
            self.engine,
            self.ring,
            # These functions do not refer to the session: only the garbage collector could free such a reference cycle.
            Consumer(
                substitute_candidates=partial(_substitute_candidates, options.order),
                reclaim=self.transfer.reclaim,
                # The job's dataset can be a copy, which the session must not keep.
                plan_job=None if batch_planner is None else replace(job, dataset=None),
                part_offsets=self.transfer.part_offsets,
                decoder=self.decoder,
            ),
            chunk_size=options.chunk_size,
            plain_chunk_size=1 if self.transfer.is_asynchronous else options.plain_chunk_size,
            min_ahead=min_ahead,
            ahead=ahead,
            workers=start.workers,
            faults=workers.faults,
            reads_together=uses_getitems(options.order.dataset) and not is_deterministic(options.order.dataset),
        )
        # Only worker processes have a copy of the dataset, which must follow the user's changes.
        self.changes = DatasetChanges(options.order.dataset if workers.count else None)
        self.tuner = None if autotune is None else Tuner(autotune, options, self.engine, self.feed, self.stage)
        self.launched_batches: deque[LaunchedBatch] = deque()
        self.next_batch: LaunchedBatch | None = None
        self.is_outdated = False
        self.lock = threading.RLock()
        self.steps = Steps()
        self._awaits_first_launch = False  # whether the first batch of the epoch has yet to be launched
        self._epoch: object = None  # the token of the current epoch; None between epochs
        self.meter = Meter(self)
        _sessions.add(self)
        report_session_start(
            options, self.stage.plan, self.placement.describe(start.workers if workers.processes else 0)
        )

    def _open(self, job: Job, choice: Choice, device: torch.device, count: int) -> contextlib.ExitStack:
        """Create the parts that must be closed, with `count` workers. Return a stack that closes them in reverse order:
        first the workers that write, then the transfer that copies, last the memory.

        Workers start first, so that they import the dataset's modules while this process locks pages and compiles
        kernels.
        """
        options, workers = self.options, self.options.workers
        with contextlib.ExitStack() as resources, contextlib.ExitStack() as undo:
            resources.callback(_forget_tables)
            self.ring = Ring(workers.ring_bytes, memory_left=memory_left_bytes, near=self.placement.cpus)
            resources.callback(self.ring.close)
            self.engine: Any = _make_engine(job, options, self.ring, count, self.placement)
            undo.callback(self.engine.close)
            self.transfer = make_transfer(self.ring, device)
            resources.callback(self.transfer.close)  # after the decoder, which reads the slots
            self.decoder: ImageDecoder | None = None
            if choice.decoder is not None:
                decoders = decoders_for_threads(choice.decoder, device, options.cpu_threads)
                self.decoder = ImageDecoder(decoders, workers.decode, device, self.transfer)
                resources.callback(self.decoder.close)
            self.stage.prepare()
            self.assembly = Assembly(options.batches, self.stage, self.transfer)
            undo.pop_all()
            if count:  # otherwise the engine refers to the dataset, which may refer to an object that owns the Loader
                resources.callback(self.engine.close)
            return resources.pop_all()

    @property
    def is_usable(self) -> bool:
        """Whether another epoch can begin in this session: no step was interrupted, the engine works, and the workers'
        state matches the loader's. For an iterable dataset, the ranks must also be the same."""
        if self.steps.state is not SessionState.OPEN or self.engine.failure is not None or self.is_outdated:
            return False
        return not self.options.order.iterable or self._ranks == (ranks_of(self.options.order), find_group())

    def begin(self, batches: Iterator[BatchSpec], epoch_sent: int = -1) -> object:
        """Start an epoch, and drop the work of an earlier one. Return a token for `drop_epoch`.

        `epoch_sent` is the argument that workers pass to the dataset's ``set_epoch()``, which they do not call if it is
        -1. Raise a WorkerError if a `worker_init_fn` raises an exception.
        """
        with self.lock, self.steps.begin(engine_is_broken=self.engine.failure is not None):
            epoch = self._epoch = object()
            self.next_batch = None
            self.launched_batches.clear()
            self.meter.begin()
            self.changes.ignore(only_simple=True)  # ignore changes that iter() itself made
            self._awaits_first_launch = True
            self.transfer.follow_consumer()  # constants of the user's transforms may still be in flight
            self.feed.begin(batches, epoch_sent)
            if self.tuner is not None:
                self.tuner.begin()
            if self.options.workers.worker_init_fn is not None:
                with self.meter:  # count this as waiting, like the start of workers without a worker_init_fn
                    self.feed.await_engine()  # may raise an error
        return epoch

    def note_changes(self) -> None:
        """Record the user's changes to the dataset for the workers' next epoch."""
        for text in self.changes.record():
            logger.info("%s: workers apply the change from the next epoch on", text)

    def update_workers(self, epoch: int) -> None:
        """Give the workers the user's changes to the dataset, before `epoch` begins. If workers of a cluster would need
        the complete dataset, the session becomes outdated instead."""
        self.note_changes()
        changes = self.changes
        if not changes.pending:
            return
        if not changes.changed_data:
            self.engine.add_changes(changes.pop())
        elif self.options.workers.ray_workers is not None:
            self.is_outdated = True
        else:
            self._exchange_workers(epoch, name_attribute(changes.changed_data[0]))

    def _exchange_workers(self, epoch: int, name: str) -> None:
        """Send the dataset again, to new workers, since the attribute `name` has changed."""
        logger.info("%s has changed: the dataset is sent again, to new workers", name)
        with self.lock, self.steps.begin(engine_is_broken=False):
            try:
                self.feed.exchange_workers(self._make_job(epoch))
            except TypeError as error:
                if "stale" not in self._warned:
                    self._warned.add("stale")
                    warnings.warn(
                        f"{name} has changed, but the dataset cannot be sent to the workers again, which keep the "
                        f"dataset that they have, without any later change: {error}. Call loader.close() once the "
                        "dataset can be sent",
                        RuntimeWarning,
                        stacklevel=5,  # points at the loop that iterates
                    )
                return
            for text in self.changes.note_resent():
                warnings.warn(
                    f"{text} has changed between epochs for the second time. Each time, the complete dataset is sent "
                    "to new workers. Keep what changes in memory that workers share, such as a tensor after "
                    "share_memory_(), or in a small attribute",
                    RuntimeWarning,
                    stacklevel=5,
                )

    def advance(self, info: bool) -> bool:
        """Set `next_batch`; return False at the end of the epoch. The caller holds the lock."""
        with self.steps.begin(engine_is_broken=self.engine.failure is not None):
            with self.meter:
                self.next_batch = self._prepare_next_batch(info)
            if self.next_batch is None:
                self.meter.end()
                self.changes.end_epoch()
            elif self.next_batch.error is None:
                self.meter.count_batch(self.next_batch.images)
            if self.tuner is not None and self.next_batch is not None:
                self.tuner.record_batch(self.meter.last_waited_s)
        return self.next_batch is not None

    def initial_place(self) -> IterablePlace | None:
        """Call ``iter()`` of an iterable dataset, without workers and before the first batch; return this process's
        initial place."""
        with self.lock:
            request = self.feed.first_request()
            return None if request is None else self.engine.begin(request)  # pyright: ignore[reportAttributeAccessIssue]

    def _prepare_next_batch(self, info: bool) -> LaunchedBatch | None:
        """Return the next batch; None at the end of the epoch. On a GPU, also launch the following batches that are
        already complete."""
        self.transfer.hold_back()
        if not self.launched_batches:
            try:
                with profiler_range(WAIT):
                    batch = self._pop(self.feed.pop_batch)
            except TooManyErrors:
                self.errors.extend(self.feed.pop_errors(), warn=False)
                raise
            if batch is None:
                return None
            if self._awaits_first_launch:  # `begin` only followed the stream that was current at that time
                self._awaits_first_launch = False
                self.transfer.follow_consumer()
            self.launched_batches.append(self._launch(batch, info))
        # The copies and stages of the following batches run while the consumer works on the current batch. Launching
        # two batches together takes the host less time than launching one in each `next()`, since the second one finds
        # all code and tables in the processor's cache. The `next()` in between launches nothing.
        if len(self.launched_batches) <= 1 and self.transfer.is_asynchronous and not self.options.chain.holds_state:
            while (
                len(self.launched_batches) <= LAUNCHED_AHEAD
                and (following_batch := self._pop(self.feed.pop_ready_batch)) is not None
            ):
                self.launched_batches.append(self._launch(following_batch, info))
        due_batch = self.launched_batches[0]
        if due_batch.last_steps is not None:
            self._end_batch(due_batch)
        failures, due_batch.failures = due_batch.failures, []
        # If a warning raises an error, the batch stays queued.
        self.errors.extend(failures, warn=due_batch.error is None)
        while due_batch.pending_warnings:
            kind, text = due_batch.pending_warnings.pop(0)
            if kind not in self._warned:
                self._warned.update(filter(None, [kind]))
                warnings.warn(text, RuntimeWarning, stacklevel=4)  # points at the loop that iterates
        self.launched_batches.popleft()
        if due_batch.error is None:
            self._hand_over(due_batch)
        return due_batch

    def _hand_over(self, batch: LaunchedBatch) -> None:
        """Make the consumer's stream wait for a batch, unless this was done before."""
        ticket, batch.ticket = batch.ticket, None
        if ticket is not None:
            self.transfer.hand_over(ticket, batch.tensors)

    def _end_batch(self, batch: LaunchedBatch) -> None:
        """Run the postponed part of a batch (a `collate_fn`, or the end of the transforms), now that the consumer has
        issued everything that this part may depend on."""
        last_steps, batch.last_steps = batch.last_steps, None
        assert last_steps is not None
        self._hand_over(batch)
        try:
            with torch.inference_mode(False), self.transfer.consumer_stream(), profiler_range(STAGE):
                batch.value = last_steps()
        except Exception as error:
            batch.error = _make_raisable(error)
        if self.options.batches.collate_fn is not None:
            batch.pending_warnings += self._layout_warnings(batch.value)
        batch.tensors = []

    def _pop(self, pop: Callable[[], Batch | None]) -> Batch | None:
        """Return the next batch that is not dropped, or whose error must be raised. Record the failures of dropped
        batches."""
        while (batch := pop()) is not None and batch.dropped:
            if batch.fatal_error is not None or (batch.errors and self.options.workers.faults.on_error == "raise"):
                break
            failures, batch.errors = batch.errors, []
            self.feed.release(batch)
            self.errors.extend(failures, warn=True)
        return batch

    def check_process(self) -> None:
        """Raise an error in a forked child, since ring and workers belong to its parent."""
        if self.steps.in_forked_child:
            raise RuntimeError(
                "this Loader's shared memory and workers belong to the process that this one was forked from; create a "
                "new Loader in the child"
            )

    def drop_epoch(self, epoch: object) -> None:
        """Drop all work for the epoch with this token from `begin`, if it is still the current epoch."""
        if self.steps.closed or self._epoch is not epoch or self.steps.in_forked_child:
            return
        with self.lock:
            if self.steps.state is SessionState.BROKEN:
                self.close()
            elif self.steps.state is SessionState.OPEN and self._epoch is epoch:
                self._epoch = self.next_batch = None
                self.meter.end()
                self.launched_batches.clear()
                self.feed.abandon()

    def make_finalizer(self) -> Callable[[], None]:
        """Return a function that ends the session. It does not keep the session alive, whose options may refer to an
        object that owns the Loader."""
        return partial(_end_session, weakref.ref(self), self.steps, self.ring, self._resources)

    def close(self) -> None:
        """End the workers and free the memory, at any time. Idempotent. The caller defers signals."""
        if self.steps.in_forked_child:
            self.ring.close()  # closes the child's copy of the descriptor; everything else belongs to the parent
            return
        if not self.steps.closed:
            self.steps.closed = True
            self.engine.halt()
        # Another thread leaves its next() now, unless a dataset hangs there (num_workers=0).
        has_lock = self.lock.acquire(timeout=THREAD_WAIT_S)
        try:
            self._end()
        finally:
            if has_lock:
                self.lock.release()

    def _end(self) -> None:
        if self.steps.ended:
            return
        self.steps.ended = True
        self._epoch = self.next_batch = None
        self.meter.end()
        self.launched_batches.clear()
        with self._resources:  # closed at the end of this context
            try:
                self.feed.abandon()  # the feed's views would keep the ring's memory alive
            finally:
                self.engine.close()

    def _launch(self, batch: Batch, info: bool) -> LaunchedBatch:
        """Issue a batch (`_issue`). If that fails, release its slots and store the error until the batch is due."""
        try:
            return self._issue(batch, info)
        except BaseException as error:
            is_loading = self.transfer.loading is batch
            with contextlib.suppress(RuntimeError):  # the device is broken, and no work is left on it
                self.transfer.finish()  # releases the slots once the launched work has ended
            if not is_loading:
                self.feed.release(batch)
            if not isinstance(error, Exception):
                raise
            # Raised when this batch is due, perhaps after the current one.
            return LaunchedBatch(error=_make_raisable(error), failures=batch.errors)
        finally:
            self.transfer.loading = None

    def _issue(self, batch: Batch, info: bool) -> LaunchedBatch:
        if batch.fatal_error is not None:
            raise SampleError(batch.fatal_error)
        if batch.errors and self.options.workers.faults.on_error == "raise":
            raise SampleError(min(batch.errors, key=lambda record: record.position))
        if batch.unreplaced_error is not None and (self.options.workers.faults.on_error == "replace" or batch.is_empty):
            raise TooManyErrors(
                f"the sample at position {batch.unreplaced_error.position} of epoch {batch.spec.epoch} could not be "
                f"replaced: all substitutes failed, the last one with {batch.unreplaced_error.describe()}. Check that "
                "the files can still be reached; loader.errors lists the failures"
            )

        holds_state = self.options.chain.holds_state  # the user's stream may still be writing this state
        inference_mode_off = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_CONTEXT
        with inference_mode_off, self.transfer.stream(after_consumer=holds_state), profiler_range(STAGE):
            release = partial(self.feed.release, batch)
            launched = self.assembly.make(batch, info, release, self.feed.plan)
            launched.ticket = self.transfer.finish()
        launched.failures, warning_text = batch.errors, batch.warning
        for part in batch.parts:  # break the reference cycle of a batch and its parts, which only the gc would collect
            launched.images += part.sample_count
            part.content = None
        if launched.last_steps is None:  # otherwise the batch is not final yet
            launched.pending_warnings += self._layout_warnings(launched.tensors)
        if warning_text:
            prefixes = (WARNING_PREFIX, SHARED_DRAWS, UNUSABLE)
            kind = next((prefix for prefix in prefixes if warning_text.startswith(prefix)), "unrecognized")
            launched.pending_warnings.append((kind, warning_text))
        return launched

    def _layout_warnings(self, value: object) -> list[tuple[str, str]]:
        """Return a warning if ``memory_format="channels_last"`` affects no tensor of a batch."""
        if self.options.stage.memory_format != "channels_last" or "layout" in self._warned:
            return []
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.ndim == 4]
        if not tensors or any(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors):
            return []
        if self.options.batches.collate_fn is not None:
            reason, remedy_location = "the collate_fn makes the tensors of a batch", "in the collate_fn or in the loop"
        else:
            reason = "the samples contain no images, and plain arrays keep their layout"
            remedy_location = "in the loop, or have the dataset return gpuload.Image(array, layout=…)"
        text = (
            f"memory_format='channels_last' has no effect: {reason}. Write images.to(memory_format=torch.channels_last)"
        )
        return [("layout", f"{text} {remedy_location}")]


def _make_raisable(error: Exception) -> Exception:
    """Return an error that `__next__` may raise: a StopIteration becomes a RuntimeError, since it would silently end
    the epoch."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"making a batch raised {error!r}")
    wrapped.__cause__ = error
    return wrapped


def _end_session(session_ref: weakref.ref[Session], steps: Steps, ring: Ring, resources: contextlib.ExitStack) -> None:
    with deferred_signals():
        if (session := session_ref()) is not None:
            session.close()
        elif steps.in_forked_child:
            ring.close()
        else:  # the session, its Loader and all views of the ring have been garbage-collected
            steps.closed = steps.ended = True
            resources.close()


def _forget_tables() -> None:
    """Free the tables that sessions share on devices, if no session is open."""
    if not any(session.steps.state is SessionState.OPEN for session in list(_sessions)):
        forget_tables()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all sessions at the interpreter's exit. A daemon thread may still be iterating, and must not end with a
    traceback."""
    with deferred_signals(drop_sigint=True):
        for session in list(_sessions):
            # If that thread is in next(), leave the session open: the kernel ends the workers with the process.
            # Otherwise the lock, which is never released, keeps the thread from entering next() again.
            if session.lock.acquire(blocking=False):
                session.close()


def _substitute_candidates(order: OrderOptions, batch: Batch, position: int, index: Any) -> Iterator[Any]:
    """Return substitutes for a sample: other samples of the dataset (for a `Mix`, of the same member); or, if a sampler
    chose the keys, other samples of the batch."""
    if not order.has_sampler:
        first_index, count = order.substitute_range(index)
        return (
            first_index + offset
            for offset in substitutes(order.seed, batch.spec.epoch, position, index - first_index, count)
        )
    keys = list(batch.spec.indices)
    rows = substitutes(order.seed, batch.spec.epoch, position, None, len(keys))
    return (keys[row] for row in rows if keys[row] != index)


# -- the engine that processes chunks, and its job --------------------------------------------------------------------


def _make_job(options: Options, epoch: int, batch_planner: Any, device_share: float) -> Job:
    """Return the job to send to workers.

    Args:
        options: the loader's options.
        epoch: the number of the first epoch.
        batch_planner: plans batches for the fused kernels, if workers do that.
        device_share: the share of the samples that the device decodes.
    """
    return Job(
        options.dataset_to_send,
        options.chain,
        options.workers.decode,
        options.order.seed,
        collate_fn=options.batches.collate_fn,
        worker_init_fn=options.workers.worker_init_fn,
        is_unbatched=options.order.yields_samples,
        plain=options.is_plain,
        moves_pixels=options.chain.moves_pixels,
        epoch=epoch,
        **ranks_of(options.order),
        group=find_group(),
        fusing=batch_planner,
        device_share=device_share,
        **(_values_to_compare(options) if options.workers.processes else {}),
    )


def _values_to_compare(options: Options) -> dict[str, Any]:
    """Return the values in modules that the workers' code refers to."""
    parts = (part for _, part in find_objects(options.order.dataset))
    objects = [*_functions_to_send(options), *_with_values(parts)]
    return {"module_values": module_values(objects), "library_values": library_values(objects)}


def libraries_for(options: Options) -> dict[str, str]:
    """Return the libraries that workers import, as in `gpuload.workers.inherited.imported_libraries`."""
    if not options.workers.processes:
        return {}
    objects = _functions_to_send(options)
    if not options.sends_copy:
        # Workers read gpuload's own datasets without the libraries of the objects within these.
        parts = list(find_objects(options.order.dataset))
        own_paths = [path for path, part in parts if type(part).__module__.startswith("gpuload.")]
        objects += _with_values(
            part for path, part in parts if not any(path[: len(outer)] == outer for outer in own_paths)
        )
    libraries = imported_libraries(objects)
    if options.order.iterable and not is_deterministic(options.order.dataset):
        libraries["torch"] = torch.__file__  # workers set torch's get_worker_info()
    return libraries


def _functions_to_send(options: Options) -> list[Any]:
    functions = (options.batches.collate_fn, options.workers.worker_init_fn)
    return [function for function in functions if function is not None]


def _with_values(objects: Iterable[object]) -> list[Any]:
    """Return these objects and the values of their attributes."""
    objects = list(objects)
    return objects + [
        value for each in objects for value in getattr(each, "__dict__", {}).values() if value is not None
    ]


def _make_engine(
    job: Job, options: Options, ring: Ring, count: int, placement: Placement
) -> WorkerPool | RayPool | InProcessEngine:
    """Create the engine that processes chunks: worker processes on this machine, workers of a cluster, or this
    process."""
    workers = options.workers
    pool_options = {"timeout_s": workers.timeout, "queue_per_worker": options.order.iterable}
    if workers.ray_workers is not None:
        return RayPool(job, workers.ray_workers, ring, **pool_options)
    if not count:
        return InProcessEngine(job, ring, chunk_context=partial(profiler_range, DECODE))
    pool_options |= {"libraries": libraries_for(options), "max_workers": workers.max_workers}
    return WorkerPool(job, count, ring, cpus_for=placement.cpus_for, **pool_options)
