"""The scheduler of chunks: it submits the chunks of upcoming batches in order, collects the results in any order, and
returns complete batches.

This module runs in the main process. The feed owns a chunk's slot in the ring from the moment the chunk is submitted
until the consumer calls `release` for its batch. Chunk numbers are never reused, so replies to the chunks of an
abandoned epoch cannot be mistaken for replies of the next epoch; such replies only free their slots.

Look-ahead: `min_ahead` batches are always in progress. More are started, up to `ahead`, so that each worker has a few
chunks even if a batch has fewer chunks than there are workers; but only once the size of a chunk is known, and while
most of the ring is free, so that large images get no more memory than they would with `min_ahead` batches.

Back-pressure: chunks of the batch that is due next always get a slot, in the worst case by moving finished chunks out
of the ring into ordinary memory. Chunks of later batches wait for a free slot. A chunk that does not fit in its slot is
returned in separate memory, and its slot is freed. The separate memory of all chunks in progress is limited to the
ring's size; each chunk gets an equal share. A chunk that needs more than its share is repeated in a larger slot. A
chunk that does not fit in the ring is split, down to single samples; a sample that does not fit in the ring fails.

Faults: if a worker dies, its chunk is repeated; the sample that the worker was processing becomes a separate chunk.
Substitutes for failed samples are requested as an additional chunk of the same batch. They come last in the batch until
`Batch.join_columns` sorts the samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any, Final

from gpuload.errors import ErrorRecord, LimitError
from gpuload.order.spec import BatchSpec
from gpuload.ring.columns import Columns
from gpuload.ring.packing import read_content
from gpuload.ring.ring import Ring, Slot
from gpuload.workers.batch import Batch, BatchPart
from gpuload.workers.faults import Deaths, Faults, Tally
from gpuload.workers.job import Job
from gpuload.workers.planned import Planner
from gpuload.workers.protocol import Engine, Event, Lost, Reply, Request, Status

__all__ = ["CHUNKS_PER_WORKER", "LAUNCHED_AHEAD", "Consumer", "Feed"]

# The look-ahead that keeps workers busy: a chunk in progress for each worker, the next one, and one in reserve for when
# the main process is busy. With 8 chunks for 15 workers, workers were idle for 55% of the time; with 45, for 1%.
CHUNKS_PER_WORKER: Final = 3
RING_SHARE: Final = 4  # only `min_ahead` batches are in progress while at least 1/RING_SHARE of the ring is in use
LAUNCHED_AHEAD = 2  # additional batches in progress, so that the plans of the next batches are ready in time
DECODED_AHEAD: Final = 2  # how many batches the device decodes, or has decoded, before they are taken
POLL_INTERVAL_S = 0.01  # the interval at which to check whether workers have started or left
FIRST_GUESS_BYTES: Final = 320 * 1024  # the assumed size of a sample until the first one is loaded
HEADROOM: Final = 1.4  # slots grow to this multiple of the observed size, so that few have to be reallocated
MIN_HEADROOM: Final = 1.2  # slots grow if they are smaller than this multiple of the observed size
FIRST_CHUNKS: Final = 64  # only this many chunks set the slot size, since growth costs a new slot per chunk in progress


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """The code that takes a feed's batches.

    Attributes:
        substitute_candidates: returns the indices of the samples to try in place of a sample that failed, given its
            batch, position and index.
        reclaim: releases the batches whose copies to the device have ended, and returns whether a batch was released.
            Given True, it waits for one copy if any is running.
        plan_job, part_offsets: as for `gpuload.workers.planned.Planner`.
        decoder: the `gpuload.stage.decode.ImageDecoder` that decodes the images that workers leave encoded; None if
            they leave none.
    """

    substitute_candidates: Callable[[Batch, int, Any], Iterator[Any]] = lambda batch, position, index: iter(())
    reclaim: Callable[[bool], bool] = lambda wait: False
    plan_job: Job | None = None
    part_offsets: Callable[[Batch], list[int]] | None = None
    decoder: Any = None


class Feed:
    """A scheduler that keeps several batches in progress.

    Args:
        engine: loads the chunks.
        ring: holds the pixels of the chunks.
        consumer: takes the batches.
        chunk_size: the maximum number of samples in a chunk.
        plain_chunk_size: the `chunk_size` once samples turn out to be plain arrays. It can be a complete batch, since a
            batch in a single slot need not be copied.
        ahead: the number of batches in progress after the batch that was returned last, while most of the ring is free.
        min_ahead: the number of batches in progress even if the ring is full; default `ahead`.
        workers: the number of workers. If each batch is a single chunk, at least `workers` + 1 batches are in progress,
            so that each worker has a batch.
        faults: the options for samples that fail.
        reads_together: whether the random numbers of a chunk's samples depend on the other samples, so that a chunk is
            first repeated as a whole if its worker dies.

    Attributes:
        decoding_s: how long `pop_batch` has waited for a batch of which only images for the device were not decoded
            yet.
    """

    def __init__(
        self,
        engine: Engine,
        ring: Ring,
        consumer: Consumer | None = None,
        *,
        chunk_size: int,
        ahead: int,
        min_ahead: int | None = None,
        workers: int = 1,
        plain_chunk_size: int = 1,
        faults: Faults | None = None,
        reads_together: bool = False,
    ) -> None:
        self._reads_together = reads_together
        self.engine, self.ring, self._consumer = engine, ring, consumer or Consumer()
        self.chunk_size, self._plain_chunk_size = chunk_size, plain_chunk_size
        self.ahead, self.min_ahead, self.workers = ahead, ahead if min_ahead is None else min_ahead, workers
        self._epoch_sent = -1
        self.faults = faults or Faults()
        self._tally = Tally(self.faults.max_error_rate)
        self.plans = Planner(engine, ring, self._consumer.plan_job, self._consumer.part_offsets)
        self._chunk_numbers = count(1)
        self._is_awaited = False  # whether the caller waits for the batch that is due
        self._slot_size = SlotSize(ring.ring_bytes, chunk_size)
        self._specs: Iterator[BatchSpec] = iter(())  # the specs of the batches that are not in progress yet
        self._batches: deque[Batch] = deque()  # the batches in progress, in order
        self._waiting: deque[BatchPart] = deque()  # parts that are not submitted yet, in order
        # The slot and part of each chunk that was sent, keyed by chunk number; None means that it is no longer wanted.
        self._in_flight: dict[int, tuple[Slot, BatchPart | None]] = {}
        self._events: deque[Event] = deque()  # events that are not processed yet
        self.decoding_s = 0.0

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The batches in progress, in order."""
        return tuple(self._batches)

    def begin(self, specs: Iterator[BatchSpec], epoch_sent: int = -1) -> None:
        """Start an epoch, and abandon the previous one.

        Args:
            specs: the specs of the epoch's batches.
            epoch_sent: the number that workers pass to the dataset's ``set_epoch()``; -1 means no call.
        """
        self.abandon()
        self._epoch_sent = epoch_sent
        self._specs = specs
        self._tally = Tally(self.faults.max_error_rate)
        self.engine.deaths = Deaths(self.faults.max_restarts)

    def abandon(self) -> None:
        """Abandon the current epoch. The slots of chunks in progress are freed when workers have finished with them."""
        self._specs = iter(())
        self._waiting.clear()
        if self._consumer.decoder is not None:
            self._consumer.decoder.cancel()
        for batch in self._batches:
            self.release(batch)
        self._batches.clear()
        self._in_flight = {key: (slot, None) for key, (slot, _) in self._in_flight.items()}
        self.engine.cancel_before(next(self._chunk_numbers))

    def exchange_workers(self, job: Job) -> None:
        """Abandon the current epoch, and continue with new workers that have a new job.

        Raises:
            TypeError: the job cannot be sent, and the workers stay.
            WorkerError: a worker could not be started.
        """
        self.abandon()
        self._events.extend(self.engine.exchange(job))

    def first_request(self) -> Request | None:
        """Return the first request of an epoch without submitting it; None if the epoch has no batch. Call this before
        any chunk is submitted."""
        self._start_batches()
        return self._waiting[0].make_request(0, Slot(0, 0), self._epoch_sent) if self._waiting else None

    def pop_batch(self) -> Batch | None:
        """Wait for the next batch and return it; None at the end of the epoch.

        The caller calls `release` once it no longer needs the batch's slots: when the feed calls `reclaim`, or at the
        latest before the caller waits for another batch.

        Raises:
            TooManyErrors: too many samples of the epoch failed.
            WorkerError: workers died too often.
        """
        self._start_batches()
        # Without reading the replies first, a batch that is complete would look as if it had to be awaited.
        if self.plans.in_flight or self._consumer.plan_job is not None or self._consumer.decoder is not None:
            self.pump(0.0)
        while True:
            if self._has_too_many_errors:
                self._tally.check()
            if (batch := self._pop()) is not None or not self._batches:
                return batch
            if not self._has_too_many_errors:
                self.pump(1.0, is_awaited=True)

    def pop_errors(self) -> list[ErrorRecord]:
        """Return the records of failed samples in the batches in progress, and clear them in these batches."""
        records = [record for batch in self._batches for record in batch.errors]
        for batch in self._batches:
            batch.errors = []
        return records

    @property
    def _has_too_many_errors(self) -> bool:
        """Whether `pop_batch` will raise `TooManyErrors`; never with on_error="raise", which raises each failure."""
        return self.faults.on_error != "raise" and self._tally.is_exceeded

    def pop_ready_batch(self) -> Batch | None:
        """Return the next batch if it is complete, including its plan if one was requested; else None."""
        self.pump(0.0)
        return None if self._has_too_many_errors else self._pop(planned=True)

    def _next_complete(self, *, planned: bool = False) -> Batch | None:
        """Return the first batch whose parts are all done and decoded, unless an earlier batch of the same
        `BatchSpec.queue` is unfinished. With `planned`, a batch whose plan was requested also needs its plan to be
        complete."""
        open_queues: set[int] = set()
        for batch in self._batches:
            is_open = batch.open_part_count or (planned and batch.planned is not None and batch.planned.plan is None)
            is_open = is_open or (self._consumer.decoder is not None and not batch.is_decoded)
            if not is_open and batch.spec.queue not in open_queues:
                return batch
            open_queues.add(batch.spec.queue)
        return None

    def _pop(self, *, planned: bool = False) -> Batch | None:
        if (batch := self._next_complete(planned=planned)) is None:
            return None
        self._consumer.reclaim(False)  # call this while the batch is still queued: if it raises, the batch is not lost
        if batch.decoding is not None and not self._end_decoding(batch):
            return None
        self._batches.remove(batch)
        if batch.planned is not None and batch.planned.plan is None:
            batch.planned = None  # the main process plans the batch instead of waiting for the plan
        batch.finalize_spec()
        self._is_awaited = False
        self._submit_chunks()  # so that workers have work while the consumer processes this batch
        return batch

    def _begin_decoding(self) -> None:
        """Have the device decode the next batches whose parts are all done, unless `DECODED_AHEAD` earlier batches are
        decoded already. Later batches do not count, so that a batch that is complete late, or again, does not wait."""
        ahead = 0
        for batch in self._batches:
            if ahead == DECODED_AHEAD:
                return
            if batch.decoding is None and not batch.open_part_count and batch.waits_for_device:
                self._consumer.decoder.begin(batch)
            ahead += batch.decoding is not None

    def _await_decoding(self, timeout_s: float) -> float:
        """If the device is decoding, wait until it or the engine has finished something. Return how long the engine may
        still wait."""
        if all(batch.decoding is None or batch.decoding.is_done for batch in self._batches):
            return timeout_s
        engine_fd = self.engine.fileno() if self._pending_count else None
        if self._pending_count and engine_fd is None:  # an engine that cannot be polled
            return min(timeout_s, POLL_INTERVAL_S)
        start_s = time.perf_counter()
        self._consumer.decoder.wait(timeout_s, engine_fd)
        waited_s = time.perf_counter() - start_s
        if self._batches[0].open_part_count:  # otherwise, the batch that is due waits only for the device
            self.engine.waited_s += waited_s
        else:
            self.decoding_s += waited_s
        return 0.0

    def _end_decoding(self, batch: Batch) -> bool:
        """Complete a batch whose images the device has decoded; return False if the batch is still incomplete, or if
        too many samples have failed."""
        batch.open_part_count += len(failed := self._consumer.decoder.end(batch))
        for part, errors in failed:
            self._tally.add(0, errors)
            self._close_part(part, errors)
        return not batch.open_part_count and not self._has_too_many_errors

    def pump(self, timeout_s: float, *, is_awaited: bool = False) -> None:
        """Submit chunks and process events; wait up to `timeout_s` seconds for an event. `is_awaited` means that the
        caller waits for the batch that is due."""
        self._is_awaited = is_awaited
        self._consumer.reclaim(False)  # free slots before new ones are needed, or the ring would grow to its limit
        self._submit_chunks()
        if timeout_s and self._consumer.decoder is not None:
            timeout_s = self._await_decoding(timeout_s)
        if not self._pending_count:  # workers are still starting
            timeout_s = min(timeout_s, POLL_INTERVAL_S) if self._waiting else 0.0
        self._events.extend(self.engine.collect_events(0.0 if self._events else timeout_s))
        while self._events:
            self._process_event(self._events.popleft())
        if self._consumer.decoder is not None:
            self._begin_decoding()
        self._submit_chunks()

    def await_engine(self) -> None:
        """Submit the first chunks, then wait until the engine is ready."""
        self._is_awaited = False
        self._submit_chunks()
        while not self.engine.ready:
            self._events.extend(self.engine.collect_events(POLL_INTERVAL_S))

    def plan(self, batch: Batch, columns: Columns) -> None:
        """Plan a batch that was taken without a plan, if possible; `columns` are the batch's columns."""
        self.plans.plan(batch, columns, self._slot_size.estimate(self.chunk_size))

    def release(self, batch: Batch) -> None:
        """Return the slots of a batch to the ring."""
        for part in batch.copied_parts:
            if part.slot is not None:
                self.ring.release(part.slot)
                part.slot = None
            part.data = None
        for part in batch.parts:
            part.decoded = None
        batch.planned = None

    @property
    def _pending_count(self) -> int:
        """The number of chunks and plans that the engine will report on."""
        return len(self._in_flight) + len(self.plans.in_flight)

    def is_idle(self) -> bool:
        """Return whether no chunk and no plan is in progress, of this epoch or an earlier one."""
        return not self._pending_count

    # -- submitting -------------------------------------------------------------------------------------------------

    def _start_batches(self) -> None:
        while self._has_room and (spec := next(self._specs, None)) is not None:
            batch = Batch(spec)
            for start in range(0, len(spec.positions), self.chunk_size):
                rows = slice(start, start + self.chunk_size)
                batch.parts.append(BatchPart(batch, spec.positions[rows], spec.indices[rows]))
            batch.open_part_count = len(batch.parts)
            self._batches.append(batch)
            self._waiting.extend(batch.parts)

    @property
    def _has_room(self) -> bool:
        """Whether another batch may begin. Up to `LAUNCHED_AHEAD` batches that have a plan, or wait for a plan, do not
        count towards `min_ahead`. Towards `ahead`, no batch that workers plan counts, planned or not: a loop that waits
        plans its batches itself, and would otherwise have the fewest batches in progress."""
        count, planned_count = len(self._batches), sum(batch.planned is not None for batch in self._batches)
        min_ahead = self.min_ahead + min(planned_count, LAUNCHED_AHEAD)
        if self._batches and len(self._batches[-1].spec.positions) <= self.chunk_size:
            min_ahead = max(min_ahead, self.workers + 1)  # if a batch is one chunk, each worker needs a batch
        if count < min_ahead:
            return True
        ahead = self.ahead + (LAUNCHED_AHEAD if self._consumer.plan_job is not None else 0)
        free_bytes = self.ring.ring_bytes // RING_SHARE - self.ring.used_bytes
        return count < ahead and self._slot_size.is_known and self._estimate_waiting_bytes() < free_bytes

    def _estimate_waiting_bytes(self) -> int:
        """Return the size of the slots for the chunks that are not submitted yet, and for one more batch."""
        parts = [*self._waiting, *self._batches[-1].parts]
        return sum(self._slot_size.estimate(len(part.positions)) for part in parts)

    def _spare_bytes(self) -> int:
        """Return the size of the separate memory that the next chunk may use."""
        parts, spare_bytes = [part for batch in self._batches for part in batch.parts], self.ring.spare_bytes()
        return max(0, min(spare_bytes // len(parts), spare_bytes - sum(part.spare_bytes for part in parts)))

    def _submit_chunks(self) -> None:
        self._start_batches()
        while self._waiting:
            part = self._waiting[0]
            try:
                slot = self._acquire_slot(part)
            except LimitError:
                if self._is_awaited:
                    raise
                return  # if the error persists, it is raised once the caller waits for the batch
            if slot is None:
                return
            part.spare_bytes = self._spare_bytes()
            number, changes = next(self._chunk_numbers), self.engine.changes_bytes
            request = part.make_request(number, slot, self._epoch_sent, changes)
            if not self.engine.submit(request):
                return
            self._in_flight[request.chunk] = (slot, part)
            self._waiting.popleft()

    def _acquire_slot(self, part: BatchPart) -> Slot | None:
        slot_bytes = max(part.need_bytes, self._slot_size.estimate(len(part.positions)))
        # The required size is known only for a chunk that did not fit its slot. For other chunks, `size` is an
        # estimate, and a smaller slot can be enough.
        while (slot := self.ring.acquire(slot_bytes, min_bytes=part.need_bytes or 1)) is None:
            if self._consumer.reclaim(False):
                continue
            if self._pending_count or not self._is_awaited or part.batch is not self._batches[0]:
                return None
            # The consumer waits for this batch and holds no slots, and no chunk in progress will free a slot.
            if self._consumer.reclaim(True) or self._spill():
                continue
            if self.engine.recover_slots():
                self._events.extend(self.engine.collect_events(POLL_INTERVAL_S))
                continue
            # Only the user can still occupy slots, with arrays of earlier batches.
            if part.need_bytes or slot_bytes <= 1:
                self._waiting.popleft()
                self._halve(
                    part,
                    f"a slot of {slot_bytes:,} bytes does not fit in the ring (ring_bytes={self.ring.ring_bytes:,}) "
                    "while the program still holds earlier batches; delete these batches, or raise ring_bytes",
                )
                return None
            slot_bytes //= 2
        return slot

    def _spill(self) -> bool:
        """Free a slot in the ring: drop a plan, which can be made again. If there is none, move the last finished chunk
        out of the ring or, if memory is short, discard its result and repeat the chunk later. Return False if no
        slot can be freed.

        Raises:
            LimitError: memory is short, and the chunk belongs to the first batch, which the caller waits for.
        """
        if any(self.plans.drop(batch) for batch in reversed(self._batches)):
            return True
        for batch in reversed(self._batches):
            if batch.decoding is not None:
                self._consumer.decoder.finish(batch)
            for part in reversed(batch.parts):
                if part.slot is None or part.data is None:
                    continue
                try:
                    part.data, part.slot = self.ring.move_out(part.slot, part.used_bytes), None
                except LimitError:
                    if batch is self._batches[0]:
                        raise
                    has_failures = not part.description and (part.content is None or part.content.errors)
                    if has_failures or batch.spec.iterable is not None or batch.decoding is not None:
                        continue  # the failures are already counted, or the samples cannot be repeated
                    self._discard_result(part)
                return True
        return False

    def _discard_result(self, part: BatchPart) -> None:
        """Discard the result of a finished chunk to free its slot, and queue the chunk again."""
        assert part.slot is not None
        self.plans.drop(part.batch)
        self.ring.release(part.slot)
        part.slot = part.data = part.content = part.decoded = None
        part.batch.open_part_count += 1
        self._requeue(part)

    # -- processing events ------------------------------------------------------------------------------------------

    def _process_event(self, event: Event) -> None:
        if self.plans.receive(event):
            return
        slot, part = self._in_flight.pop(event.chunk)
        if part is not None:
            part.spare_bytes = 0
        if isinstance(event, Lost):  # the engine releases the slot
            if part is not None:
                self._retry_lost(part, event)
        elif part is None or event.status is Status.UNWANTED:
            self.ring.release(slot)
        elif event.status is Status.TOO_LARGE:
            self.ring.release(slot)
            self._enlarge(part, event.nbytes)
        else:
            self._store_result(part, slot, event)

    def _store_result(self, part: BatchPart, slot: Slot, reply: Reply) -> None:
        """Store the pixels and the description of a finished chunk in its part, and learn from the chunk's size."""
        sample_count, content = len(part.positions), None
        part.slot, data = slot, reply.data
        if data is not None:
            self.ring.release(slot)
            self._slot_size.grow_for(reply.nbytes, sample_count)
            part.slot = self.ring.move_in(data)
            part.spare_bytes = reply.nbytes if part.slot is None else 0
        if part.slot is not None:
            data = self.ring.view(part.slot)[: reply.nbytes]
        assert data is not None
        if reply.plain and not self._is_awaited:  # the description is read later, if at all
            part.description = reply.meta
        else:
            try:
                part.content = content = read_content(data, reply.meta, reply.meta_at)
            except Exception as error:  # raised by a user's object while it is unpickled
                if part.slot is not None:
                    self.ring.release(part.slot)
                    part.slot = None
                self._fail(part, f"{type(error).__name__}: {error} (while unpickling the samples in the main process)")
                return
        part.data, part.used_bytes = data, reply.nbytes
        if content is not None and content.blocks and not content.images and self.chunk_size < self._plain_chunk_size:
            self.chunk_size = self._plain_chunk_size
            self._slot_size = SlotSize(self.ring.ring_bytes, self.chunk_size, guess_bytes=0)
            self._slot_size.grow_for(reply.nbytes, sample_count)
        self._slot_size.learn(reply.nbytes, sample_count)
        self._count_and_close(part, content)

    def _enlarge(self, part: BatchPart, need_bytes: int) -> None:
        sample_count = len(part.positions)
        if need_bytes <= self.ring.ring_bytes:
            part.need_bytes = need_bytes
            self._slot_size.grow_for(need_bytes, sample_count)
            self._requeue(part)
        else:
            self._halve(
                part,
                f"its pixels take {need_bytes:,} bytes, more than ring_bytes={self.ring.ring_bytes:,} allows; "
                "raise ring_bytes, or put a crop first in the transforms",
            )

    def _halve(self, part: BatchPart, reason: str) -> None:
        """Split a chunk that does not fit in the ring into two; if the chunk is a single sample, the sample fails."""
        sample_count = len(part.positions)
        if sample_count > 1:
            self._split(part, [slice(0, sample_count // 2), slice(sample_count // 2, sample_count)])
        else:
            self._fail(part, f"MemoryError: {reason}")

    def _retry_lost(self, part: BatchPart, lost: Lost) -> None:
        """Queue a chunk again after its worker died. The sample that the worker was processing becomes a separate
        chunk, unless the chunk has to be repeated as a whole. A sample that was already alone in its chunk fails once
        too many workers have died on it."""
        sample_count = len(part.positions)
        if lost.row is None or lost.row >= sample_count:
            self._requeue(part)
        elif sample_count > 1 and self._reads_together and not part.was_lost:
            part.was_lost = True
            self._requeue(part)
        elif sample_count > 1:
            ends = sorted({0, lost.row, lost.row + 1, sample_count})
            self._split(part, [slice(*pair) for pair in pairwise(ends)])
        else:
            if not part.count_solo_death(killed_externally=lost.killed_externally):
                self._requeue(part)
            else:
                deaths = f"{part.solo_deaths} workers died while processing only this sample"
                self._fail(part, f"WorkerError: {deaths}: {lost.cause}", lost.stack)
                if self.faults.on_error == "raise":
                    self._give_up(part.batch)

    def _give_up(self, batch: Batch) -> None:
        """Stop working on a batch that is going to fail with an error: its other samples might kill more workers."""
        if batch.spec.iterable is not None:  # the iterator has to continue, since later batches need its samples
            return
        self._waiting = deque(part for part in self._waiting if part.batch is not batch)
        for key, (slot, part) in self._in_flight.items():
            if part is not None and part.batch is batch:
                self._in_flight[key] = (slot, None)
        batch.open_part_count = 0

    def _split(self, part: BatchPart, slices: list[slice]) -> None:
        pieces = [part.subset(rows) for rows in slices]
        index = part.batch.parts.index(part)
        part.batch.parts[index : index + 1] = pieces
        part.batch.open_part_count += len(pieces) - 1
        self._requeue(*pieces)

    def _requeue(self, *parts: BatchPart) -> None:
        # The batch that is due next comes first; within a batch, samples with the most deaths come first.
        waiting = sorted([*parts, *self._waiting], key=lambda part: (part.batch.spec.step, -part.solo_deaths))
        self._waiting = deque(waiting)

    def _fail(self, part: BatchPart, cause: str, stack: str = "") -> None:
        """End a chunk whose samples all failed."""
        part.content = part.make_failed_content(cause, stack)
        self._count_and_close(part, part.content)

    def _count_and_close(self, part: BatchPart, content: Columns | None) -> None:
        """Count the samples and failures of a chunk that has ended, and close its part."""
        batch, errors = part.batch, [] if content is None else [record for _, record in content.errors]
        if content is None or content.iterable is None:
            self._tally.add(len(part.positions), errors)
        else:  # an iterable dataset may have yielded fewer samples
            self._tally.add(len(content.rows) + len(errors), errors)
            if content.iterable.broken and errors:
                batch.fatal_error = errors[-1]
        self._close_part(part, errors)

    def _close_part(self, part: BatchPart, errors: list[ErrorRecord]) -> None:
        """Mark a part as done, and replace or record its failed samples. If it was the last open part of its batch,
        request the batch's plan; if the batch has no samples, fill or drop it first."""
        batch = part.batch
        batch.open_part_count -= 1
        if errors and (self.faults.on_error == "replace" or part.has_substitutes):
            self._replace(batch, errors)
        else:
            batch.errors += errors
        skips = self.faults.on_error == "skip" and batch.spec.iterable is None
        if not batch.open_part_count and skips and not batch.unreplaced_error and batch.is_empty:
            if batch.spec.may_be_dropped:
                batch.dropped = True
                return
            errors, batch.errors = batch.errors, []
            self._replace(batch, errors)
        if not batch.open_part_count and self._can_be_planned_in_time(batch):
            self.plans.submit(batch, next(self._chunk_numbers), self._slot_size.estimate(self.chunk_size))

    def _can_be_planned_in_time(self, batch: Batch) -> bool:
        """Whether workers can plan a complete batch before it is taken. The plan comes after all chunks in the workers'
        queue, so at least as many complete batches have to be taken before this one as there are open batches."""
        earlier = islice(self._batches, self._batches.index(batch))
        complete_count = sum(not other.open_part_count for other in earlier)
        open_count = sum(other.open_part_count > 0 for other in self._batches)
        return not self._is_awaited and complete_count >= open_count

    def _replace(self, batch: Batch, errors: list[ErrorRecord]) -> None:
        """Request substitutes for the failed samples, as an additional chunk of the batch."""
        part = batch.substitute(errors, self._consumer.substitute_candidates)
        if part is not None:
            self._requeue(part)


class SlotSize:
    """An estimate of the slot size for chunks of up to `chunk_size` samples in a ring of `ring_bytes`.

    The first chunks use a guess; the estimate is then learned from their sizes. It rarely grows later, because a slot
    that is allocated in the middle of an epoch stalls the loop while its memory is page-locked.
    """

    def __init__(self, ring_bytes: int, chunk_size: int, guess_bytes: int = FIRST_GUESS_BYTES) -> None:
        self._ring_bytes = ring_bytes
        self._chunks_to_learn = FIRST_CHUNKS
        self._max_sample_bytes = max(1, ring_bytes // (4 * chunk_size))  # at least four typical chunks fit a small ring
        self._sample_bytes = min(guess_bytes, self._max_sample_bytes)

    def estimate(self, samples: int) -> int:
        """Return the slot size for a chunk of this many samples, in bytes."""
        return min(samples * self._sample_bytes, self._ring_bytes)

    @property
    def is_known(self) -> bool:
        """Whether the estimate is based on the size of at least one chunk."""
        return self._chunks_to_learn < FIRST_CHUNKS

    def learn(self, nbytes: int, samples: int) -> None:
        """Update the estimate from the size of a chunk, if the chunk is one of the first."""
        if self._chunks_to_learn:
            self._chunks_to_learn -= 1
            if nbytes * MIN_HEADROOM > self.estimate(samples):
                self.grow_for(nbytes, samples)

    def grow_for(self, nbytes: int, samples: int) -> None:
        """Raise the estimate, so that later slots fit chunks of this size, with headroom."""
        self._sample_bytes = max(self._sample_bytes, min(int(nbytes * HEADROOM / samples), self._max_sample_bytes))
