"""A session: everything of a `Loader` that lasts from its first `iter()` to `close()`.

It owns the ring, the engine (worker processes, or the main process itself), the transfer and the compiled stage, and
makes batches from the feed's chunks. Runs in the main process, in the thread that iterates; it starts no thread. Any
thread may take the next batch or close it, one at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils._device  # torch would load it at the first `with torch.device(…)`, within the first batch
from torch.utils._pytree import tree_leaves

from gpuload.batches.assemble import Assembly
from gpuload.decode.decoder import UNUSABLE
from gpuload.errors import ErrorRecord, GpuloadError, SampleError, TooManyErrors
from gpuload.loader import log
from gpuload.loader.autotune import Autotune, Setting, Tuner
from gpuload.loader.limits import Placement, memory_left_bytes
from gpuload.loader.meter import Meter
from gpuload.loader.options import Options
from gpuload.order.place import IterablePlace, Place
from gpuload.order.ranks import find_group
from gpuload.order.schedule import ranks_of
from gpuload.order.spec import BatchSpec
from gpuload.ring.ring import Ring
from gpuload.stage.decode import Choice, ImageDecoder
from gpuload.stage.device import DECODE, STAGE, WAIT, named
from gpuload.stage.device_cache import transfer_of
from gpuload.stage.noise import forget_tables
from gpuload.stage.transfer import make_transfer
from gpuload.workers.batch import Batch
from gpuload.workers.box_fields import REMARK
from gpuload.workers.device_cache import CachedSamples, CacheEngine
from gpuload.workers.faults import ErrorLog, substitutes
from gpuload.workers.feed import LAUNCHED_AHEAD, Consumer, FailedParts, Feed
from gpuload.workers.inherited import DatasetChanges, module_values, objects_in
from gpuload.workers.inline import InProcessEngine
from gpuload.workers.job import Job
from gpuload.workers.planned import PlannedBatch
from gpuload.workers.pool import WorkerPool
from gpuload.workers.ray import RayPool
from gpuload.workers.signals import deferred_signals

__all__ = ["NEWER", "OVER", "Session", "SessionState", "Steps", "engine_for", "job_for"]

THREAD_WAIT_S = 5.0  # for another thread to leave its next()
NOTHING = contextlib.nullcontext()
logger = logging.getLogger("gpuload.loader")
OVER = "this iterator is over: {}"
NEWER = (
    "a newer iter() of its Loader was started. A Loader gives one epoch at a time: for two at once, as in "
    "zip(loader, loader) or nested loops, make a second Loader"
)


class SessionState(enum.Enum):
    """The state of a session: it can take another step, can only be closed, or is closed."""

    OPEN = enum.auto()
    BROKEN = enum.auto()  # a step was interrupted with an event or a batch in hand: iter() starts a new session
    CLOSED = enum.auto()  # or about to be


class Steps:
    """The steps of a session, and its state, which is right at every line: a ctrl-C, a finalizer, a fork or another
    thread may come in between. So it is derived from facts that are each set in one operation; those of the end stay.

    Shared with the finalizer of the session's `Loader`, so it refers to neither. Steps are taken under the session's
    lock; a session may be closed without it.

    Attributes:
        broken_by: what interrupted a step; empty: nothing.
        closed: the end has begun; ended: all is freed, or about to be.
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
        """Whether this process was forked from the session's own."""
        return os.getpid() != self._pid

    def begin(self, *, engine_broken: bool) -> Steps:
        """Begin a step, which is a context: what interrupts it breaks the session, but for errors that are raised on
        purpose, with nothing in hand. `engine_broken`: the engine itself says why it cannot go on."""
        if self.closed:
            raise RuntimeError(OVER.format("its Loader was closed"))
        if self.broken_by and not engine_broken:
            raise RuntimeError(
                OVER.format(
                    f"it was broken off by {self.broken_by}, and a batch may be lost. Begin a new epoch with iter()"
                )
            )
        self.broken_by = "an interrupt"
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and self.closed:  # by a signal handler: the feed is empty, as at the end of an epoch
            error = RuntimeError("closed")
        if error is None or isinstance(error, GpuloadError | Warning):
            self.broken_by = ""
            return
        self.broken_by = type(error).__name__
        if self.closed and isinstance(error, Exception):
            raise RuntimeError(OVER.format("its Loader was closed meanwhile")) from error


@dataclass(slots=True)
class _Launched:
    """A batch whose stage was launched: the value to give, once what is `postponed` was run; or the error to raise
    instead.

    `after` is the place of the next batch, `remarks` what the user is warned of with this one: each of a kind, of which
    a loader warns once; or of the kind "", of which it warns each time.
    """

    value: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    postponed: Callable[[], Any] | None = None
    ticket: Any = None
    error: Exception | None = None
    failed: list[ErrorRecord] = field(default_factory=list)
    after: Place | None = None
    remarks: list[tuple[str, str]] = field(default_factory=list)
    images: int = 0


class Session:
    """The parts that make the batches of a loader, and the batch that is due.

    Args:
        options: the loader's.
        errors: where samples that failed are recorded.
        epoch: the number of the first epoch.
        autotune: decides what is "auto".
        cached: all samples, if the dataset is a `DeviceCached`: then there are no workers.

    Attributes:
        outdated: workers have something else than the loader now has, so the next epoch begins in another session.
        ready: the batch that is due; whoever takes it sets None.
        lock: held while an epoch begins, advances or ends, and until `close` has ended.
    """

    def __init__(
        self,
        options: Options,
        errors: ErrorLog,
        epoch: int = 0,
        autotune: Autotune | None = None,
        cached: CachedSamples | None = None,
    ) -> None:
        begun_at = time.monotonic()
        if cached is not None:
            options, autotune = replace(options, workers=replace(options.workers, num_workers=0)), None
        self.options, self.errors, self._warned = options, errors, options.order.warned
        workers, device = options.workers, options.resolve_device()
        self.stage = options.compile(device)
        choice = options.choose_decoder(device)
        self.stage.plan = replace(self.stage.plan, decoder=choice.text)
        if choice.warning and "decoder" not in self._warned:
            self._warned.add("decoder")
            warnings.warn(choice.warning, RuntimeWarning, stacklevel=4)  # the loop that iterates
        self._ranks = ranks_of(options.order), find_group()
        # Workers plan batches by where their images will lie, and one that the device refuses would not be there.
        fusing = self.stage.fusing() if workers.processes and not choice.share else None
        job = job_for(options, epoch, fusing, device_share=choice.share)
        start = Setting(workers.count, workers.prefetch) if autotune is None else autotune.setting
        options.check_limits(device, start.workers)
        self.placement = options.find_placement(device)
        self._resources = self._open(job, choice, device, start.workers, cached)
        self.engine.begun_at = begun_at
        self.feed = Feed(
            self.engine,
            self.ring,
            _Consumer(options, self.transfer, self.decoder, self.assembly if fusing is not None else None),
            chunk_size=options.chunk_size,
            plain_chunk_size=1 if self.transfer.asynchronous else options.plain_chunk_size,
            ahead=options.ahead_for(start.workers, start.ahead),
            workers=start.workers,
            faults=workers.faults,
        )
        # Workers have a copy of the dataset; in this process and on a device it is the user's own, or read.
        self.changes = DatasetChanges(options.order.dataset if workers.processes else None)
        self.tuner = None if autotune is None else Tuner(autotune, options, self.engine, self.feed, self.stage)
        self.launched: deque[_Launched] = deque()
        self.ready: _Launched | None = None
        self.outdated = False
        self.lock = threading.RLock()
        self.steps = Steps()
        self._awaits_first_launch = False  # whether the epoch's first batch is still to be launched
        self._epoch: object = None  # the token of the current one; None between two
        self.meter = Meter(
            options,
            feed=self.feed,
            assembly=self.assembly,
            transfer=self.transfer,
            decoder=self.decoder,
            errors=errors,
            stage=self.stage,
            placement=self.placement,
            launched=self.launched,
            resident_bytes=None if cached is None else int(cached.memory.nbytes),
        )
        _sessions.add(self)
        log.session_start(options, self.stage.plan, self.placement.describe(start.workers if workers.processes else 0))

    def _open(
        self, job: Job, choice: Choice, device: torch.device, count: int, cached: CachedSamples | None
    ) -> contextlib.ExitStack:
        """Make the parts that have to be closed, with `count` workers. Return what closes them, from the last: nobody
        writes any more, nothing is copied, the memory goes.

        Workers begin to import what the dataset needs before this process locks pages and compiles kernels.
        """
        options, workers = self.options, self.options.workers
        with contextlib.ExitStack() as resources, contextlib.ExitStack() as undo:
            resources.callback(_forget_tables)
            self.ring = Ring(workers.ring_bytes, memory_left=memory_left_bytes, near=self.placement.cpus)
            resources.callback(self.ring.close)
            self.engine: Any = engine_for(job, options, self.ring, count, self.placement, cached)
            undo.callback(self.engine.close)
            self.transfer = make_transfer(self.ring, device) if cached is None else transfer_of(cached, self.ring)
            self.decoder: ImageDecoder | None = None
            if choice.decoder is not None:
                self.decoder = ImageDecoder(choice.decoder, workers.decode, device, self.transfer)
                resources.callback(self.decoder.close)
            resources.callback(self.transfer.close)
            self.stage.prepare()
            self.assembly = Assembly(options.batches, self.stage, self.transfer)
            undo.pop_all()
            if count:  # else it has the dataset, which may refer to whoever has the Loader
                resources.callback(self.engine.close)
            return resources.pop_all()

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin here: no step was interrupted, the engine works, and workers have what the
        loader now has, an iterable dataset's also the ranks that there are now."""
        if self.steps.state is not SessionState.OPEN or self.engine.broken is not None or self.outdated:
            return False
        return not self.options.order.iterable or self._ranks == (ranks_of(self.options.order), find_group())

    def begin(self, batches: Iterator[BatchSpec], epoch_sent: int = -1) -> object:
        """Start an epoch, and drop the work of an earlier one. Return a token for `drop_epoch`.

        `epoch_sent` is what workers give to the dataset's own ``set_epoch()``; -1: they do not call it. WorkerError if
        a `worker_init_fn` raises an exception.
        """
        with self.lock, self.steps.begin(engine_broken=self.engine.broken is not None):
            epoch = self._epoch = object()
            self.ready = None
            self.launched.clear()
            self.meter.begin()
            self.changes.skip()  # what iter() itself changed
            self._awaits_first_launch = True
            self.transfer.follow()  # constants of the user's own transforms may still be on their way
            self.feed.begin(batches, epoch_sent, self.changes.packed)
            if self.tuner is not None:
                self.tuner.begin()
            if self.options.workers.worker_init_fn is not None:
                with self.meter:  # the loop waits for the start, as it does without a worker_init_fn
                    self.feed.await_engine()  # it may raise
        return epoch

    def note_changes(self) -> None:
        """Note what the user changed of the dataset, for the workers' next epoch."""
        for text in self.changes.look():
            log.dataset_changed(text)

    def advance(self, info: bool) -> bool:
        """Make `ready` the next batch; False at the end of the epoch. The caller holds the lock."""
        with self.steps.begin(engine_broken=self.engine.broken is not None):
            with self.meter:
                self.ready = self._next_launched(info)
            if self.ready is None:
                self.meter.end()
                self.changes.end_epoch()
            elif self.ready.error is None:
                self.meter.count_batch(self.ready.images)
            if self.tuner is not None and self.ready is not None:
                self.tuner.batch(self.meter.last_waited_s)
        return self.ready is not None

    def where_it_begins(self) -> IterablePlace | None:
        """Return where this process, without workers and before the first batch, begins with an iterable dataset, whose
        ``iter()`` is called for it."""
        with self.lock:
            request = self.feed.first_request()
            return None if request is None else self.engine.begin(request)  # pyright: ignore[reportAttributeAccessIssue]

    def _next_launched(self, info: bool) -> _Launched | None:
        """Return the batch that is due; None at the end of the epoch. On a GPU, also launch batches after it that are
        complete already."""
        self.transfer.hold_back()
        if not self.launched:
            try:
                with named(WAIT):
                    batch = self._take(self.feed.take)
            except TooManyErrors:
                self.errors.extend(self.feed.failed(), loud=False)
                raise
            if batch is None:
                return None
            if self._awaits_first_launch:  # as in `begin`, but for the stream that is current now
                self._awaits_first_launch = False
                self.transfer.follow()
            self.launched.append(self._launch(batch, info))
        # Their copies and stages run while the consumer works on the current batch. Two at once take the host less time
        # than one after each of two batches: the second finds all code and tables in the processor's cache. In the
        # `next()` between, nothing is done at all.
        if len(self.launched) <= 1 and self.transfer.asynchronous and not self.options.chain.holds_state:
            while len(self.launched) <= LAUNCHED_AHEAD and (coming := self._take(self.feed.take_if_ready)) is not None:
                self.launched.append(self._launch(coming, info))
        current = self.launched[0]
        if current.postponed is not None:
            self._end_batch(current)
        failed, current.failed = current.failed, []
        self.errors.extend(failed, loud=current.error is None)  # a warning may be an error: the batch stays for later
        while current.remarks:
            kind, text = current.remarks.pop(0)
            if kind not in self._warned:
                self._warned.update(filter(None, [kind]))
                warnings.warn(text, RuntimeWarning, stacklevel=4)  # the loop that iterates
        self.launched.popleft()
        if current.error is None:
            self._hand_over(current)
        return current

    def _hand_over(self, launched: _Launched) -> None:
        """Let the consumer's stream wait for a batch, if it does not yet."""
        ticket, launched.ticket = launched.ticket, None
        if ticket is not None:
            self.transfer.hand_over(ticket, launched.tensors)

    def _end_batch(self, launched: _Launched) -> None:
        """Run what is postponed of a batch (a `collate_fn`, or what is at the end of the transforms), now that the
        consumer has issued everything it may depend on."""
        postponed, launched.postponed = launched.postponed, None
        assert postponed is not None
        self._hand_over(launched)
        try:
            with torch.inference_mode(False), self.transfer.consumer(), named(STAGE):
                launched.value = postponed()
        except Exception as error:
            launched.error = _raisable(error)
        if self.options.batches.collate_fn is not None:
            launched.remarks += self._remarks_on_layout(launched.value)
        launched.tensors = []

    def _take(self, take: Callable[[], Batch | None]) -> Batch | None:
        """Return the next batch that is not dropped, or that has to be raised as an error. Record the failures of the
        batches that are dropped."""
        while (batch := take()) is not None and batch.dropped:
            if batch.fatal is not None or (batch.errors and self.options.workers.faults.on_error == "raise"):
                break
            failed, batch.errors = batch.errors, []
            self.feed.release(batch)
            self.errors.extend(failed, loud=True)
        return batch

    def check_process(self) -> None:
        """Refuse to go on in a forked child: ring and workers are its parent's."""
        if self.steps.in_forked_child:
            raise RuntimeError(
                "this Loader's shared memory and workers belong to the process that this one was forked from; make a "
                "new Loader in the child"
            )

    def drop_epoch(self, epoch: object) -> None:
        """Drop all work for this epoch, if it is still the current one."""
        if self.steps.closed or self._epoch is not epoch or self.steps.in_forked_child:
            return
        with self.lock:
            if self.steps.state is SessionState.BROKEN:
                self.close()
            elif self.steps.state is SessionState.OPEN and self._epoch is epoch:
                self._epoch = self.ready = None
                self.meter.end()
                self.launched.clear()
                self.feed.abandon()

    def ending(self) -> Callable[[], None]:
        """Return a function that ends the session without keeping it: options may refer to whoever has the Loader."""
        return partial(_end, weakref.ref(self), self.steps, self.ring, self._resources)

    def close(self) -> None:
        """End the workers and free the memory, at any time. Idempotent. The caller holds interrupts off."""
        if self.steps.in_forked_child:
            self.ring.close()  # a child's copy of the descriptor; the rest is the parent's
            return
        if not self.steps.closed:
            self.steps.closed = True
            self.engine.halt()
        # Another thread leaves its next() now; but a dataset may hang there (num_workers=0).
        locked = self.lock.acquire(timeout=THREAD_WAIT_S)
        try:
            self._end()
        finally:
            if locked:
                self.lock.release()

    def _end(self) -> None:
        if self.steps.ended:
            return
        self.steps.ended = True
        self._epoch = self.ready = None
        self.meter.end()
        self.launched.clear()
        with self._resources:  # freed at its end
            try:
                self.feed.abandon()  # its views of the ring would keep the memory
            finally:
                self.engine.close()

    def _launch(self, batch: Batch, info: bool) -> _Launched:
        """Issue a batch (`_issue`). If that fails, give its slots back and keep the error until the batch is due."""
        try:
            return self._issue(batch, info)
        except BaseException as error:
            loaded = self.transfer.loading is batch
            with contextlib.suppress(RuntimeError):  # the device is broken, and has ended all work by that
                self.transfer.finish()  # gives the slots back, once the launched work has ended
            if not loaded:
                self.feed.release(batch)
            if not isinstance(error, Exception):
                raise
            # Raised when this batch is due, perhaps after the current one.
            return _Launched(error=_raisable(error), failed=batch.errors)
        finally:
            self.transfer.loading = None

    def _issue(self, batch: Batch, info: bool) -> _Launched:
        if batch.fatal is not None:
            raise SampleError(batch.fatal)
        if batch.errors and self.options.workers.faults.on_error == "raise":
            raise SampleError(min(batch.errors, key=lambda record: record.position))
        if batch.lost is not None and (self.options.workers.faults.on_error == "replace" or batch.is_empty):
            raise TooManyErrors(
                f"nothing could take the place of the sample at position {batch.lost.position} of epoch "
                f"{batch.spec.epoch}: all substitutes failed, the last one with {batch.lost.describe()}. Check that "
                "the files can still be reached; loader.errors lists the failures"
            )

        state = self.options.chain.holds_state  # the user's stream may still be writing it
        usable = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING
        with usable, self.transfer.stream(after_consumer=state), named(STAGE):
            assembled = self.assembly.make(batch, info, partial(self.feed.release, batch))
            ticket = self.transfer.finish()
        images, remark = 0, batch.remark
        for part in batch.parts:  # a batch and its parts refer to each other, and would wait for the collector
            images += part.samples
            part.content = None
        remarks = [("", assembled.warning)] if assembled.warning else []
        if assembled.postponed is None:  # else the batch is not yet what the user gets
            remarks += self._remarks_on_layout(assembled.tensors)
        if remark:
            kind = next((begin for begin in (REMARK, UNUSABLE) if remark.startswith(begin)), "strays")
            remarks.append((kind, remark))
        return _Launched(
            assembled.value,
            assembled.tensors,
            assembled.postponed,
            ticket,
            failed=batch.errors,
            after=batch.spec.after,
            remarks=remarks,
            images=images,
        )

    def _remarks_on_layout(self, value: Any) -> list[tuple[str, str]]:
        """Return what to warn of where ``memory_format="channels_last"`` reaches no tensor of a batch."""
        if self.options.stage.memory_format != "channels_last" or "layout" in self._warned:
            return []
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.ndim == 4]
        if not tensors or any(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors):
            return []
        if self.options.batches.collate_fn is not None:
            why, where = "the collate_fn makes the tensors of a batch", "in it, or in the loop"
        else:
            why = "no leaf of the samples is an image, and arrays that are data stay as the dataset makes them"
            where = "in the loop, or let the dataset return gpuload.Image(array, layout=…)"
        text = f"memory_format='channels_last' has no effect: {why}. Write images.to(memory_format=torch.channels_last)"
        return [("layout", f"{text} {where}")]


def _raisable(error: Exception) -> Exception:
    """Return the error as a `__next__` may raise it: a StopIteration there would be a quiet end of the epoch."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"making a batch raised {error!r}")
    wrapped.__cause__ = error
    return wrapped


def _end(session_of: weakref.ref[Session], steps: Steps, ring: Ring, resources: contextlib.ExitStack) -> None:
    with deferred_signals():
        if (session := session_of()) is not None:
            session.close()
        elif steps.in_forked_child:
            ring.close()
        else:  # it goes together with its Loader, and so does everything that views the ring
            steps.closed = steps.ended = True
            resources.close()


def _forget_tables() -> None:
    """Let go of what sessions share on devices, if none is open."""
    if not any(session.steps.state is SessionState.OPEN for session in list(_sessions)):
        forget_tables()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all sessions at the interpreter's exit. A daemon thread may still be iterating: it must not end with a
    traceback."""
    with deferred_signals(drop_sigint=True):
        for session in list(_sessions):
            # If that thread is in its next(), the kernel ends the workers with the process. Else it never gets into
            # the next one: the lock is never released.
            if session.lock.acquire(blocking=False):
                session.close()


class _Consumer(Consumer):
    """Answers what the feed asks of a session, to which it does not refer: a cycle would wait for the collector."""

    def __init__(
        self, options: Options, transfer: Any, decoder: ImageDecoder | None, planning: Assembly | None
    ) -> None:
        self._options, self._transfer, self._decoder, self._planning = options, transfer, decoder, planning

    def candidates(self, batch: Batch, position: int, index: Any) -> Iterator[Any]:
        """Return substitutes for a sample: any of the dataset, of a `Mix` any of the same one of its data sets; or, if
        a sampler chose the keys, others of its batch."""
        order = self._options.order
        if not order.sampled:
            begin, count = order.peers(index)
            return (begin + it for it in substitutes(order.seed, batch.spec.epoch, position, index - begin, count))
        keys = list(batch.spec.indices)
        rows = substitutes(order.seed, batch.spec.epoch, position, None, len(keys))
        return (keys[row] for row in rows if keys[row] != index)

    def plan_inputs(self, batch: Batch) -> tuple[PlannedBatch, bytes] | None:
        return None if self._planning is None else self._planning.plan_inputs(batch)

    def reclaim(self, wait: bool) -> bool:
        return self._transfer.reclaim(wait)

    def decode(self, batch: Batch) -> FailedParts:
        assert self._decoder is not None, "only with a device's decoder workers leave it images"
        return self._decoder(batch)


# -- what does the chunks, and what it is sent -----------------------------------------------------------------------


def job_for(options: Options, epoch: int, fusing: Any = None, *, whole: bool = False, device_share: float = 0.0) -> Job:
    """Return what workers are sent.

    Args:
        options: the loader's.
        epoch: the number of the first epoch.
        fusing: plans batches, if workers do that.
        whole: for images that are kept, not cropped.
        device_share: the share of the samples that the device decodes.
    """
    return Job(
        options.sent_dataset,
        options.chain,
        options.workers.decode,
        options.order.seed,
        collate_fn=options.batches.collate_fn,
        worker_init_fn=options.workers.worker_init_fn,
        single=options.order.single,
        plain=options.plain,
        moves=options.chain.moves_pixels,
        epoch=epoch,
        **ranks_of(options.order),
        group=find_group(),
        fusing=fusing,
        whole=whole,
        device_share=device_share,
        module_values=_module_values(options) if options.workers.processes else {},
    )


def _module_values(options: Options) -> dict[str, dict[str, Any]]:
    """Return the values of the user's modules that workers' code refers to."""
    objects = [options.batches.collate_fn, options.workers.worker_init_fn]
    for _, part in objects_in(options.order.dataset):
        objects += [part, *getattr(part, "__dict__", {}).values()]
    return module_values(user for user in objects if user is not None)


def engine_for(
    job: Job,
    options: Options,
    ring: Ring,
    count: int,
    placement: Placement,
    cached: CachedSamples | None = None,
) -> WorkerPool | RayPool | InProcessEngine | CacheEngine:
    """Return what does the chunks: processes of this machine, workers of a cluster, or this process, which may cut them
    out of cached samples."""
    workers = options.workers
    watch = {"timeout_s": workers.timeout, "own_queues": options.order.iterable}
    if cached is not None:
        return CacheEngine(job, ring, cached)
    if workers.workers is not None:
        return RayPool(job, workers.workers, ring, **watch)
    if not count:
        return InProcessEngine(job, ring, around=partial(named, DECODE))
    return WorkerPool(job, count, ring, most=workers.most, cpus_for=placement.cpus_for, **watch)
