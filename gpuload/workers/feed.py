"""The chunks of the coming batches: handed out in order, gathered as they finish, given over batch by batch.

Runs in the main process. It owns the slots of the ring from the moment a chunk is handed out until the consumer calls
`release` for its batch. Chunks are numbered without end, so that those of an epoch that was broken off are told from
the next one's: their replies only free their slots.

Back-pressure: chunks of the batch that is due next always get a slot, in the worst case by moving finished chunks out
of the ring into ordinary memory; chunks of later batches wait for a free slot. A chunk that does not fit its slot gets
a larger one; one that does not fit the ring is split, down to a single sample, which then is an error of that sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gpuload.batch import ChunkContent, read_content
from gpuload.errors import ErrorRecord, WorkerError
from gpuload.ring import Ring, Slot
from gpuload.workers.events import Event, Freed, Lost
from gpuload.workers.protocol import Reply, Request, Status

__all__ = ["Batch", "Engine", "Feed", "Part"]

FIRST_GUESS_BYTES = 320 * 1024  # for one sample, until the data says otherwise
HEADROOM = 1.25
DEATHS_ALONE = 2  # a sample whose worker died so often while it was alone in a chunk is a bad sample


class Engine(Protocol):
    """What does the chunks: a `WorkerPool` or a `HomeEngine`."""

    broken: WorkerError | None

    def submit(self, request: Request) -> bool: ...
    def disown(self, before: int) -> None: ...
    def forgive(self) -> None: ...
    def gather(self, timeout_s: float) -> list[Event]: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Part:
    """A chunk of a batch: what is asked for, and once it is done, what came.

    `data` are the chunk's bytes: a view of its slot, or of private memory where it was moved out (`slot` is None then).
    """

    batch: Batch
    positions: np.ndarray
    indices: np.ndarray | list[object]
    chunk: int = 0
    attempt: int = 0
    need_bytes: int = 0
    deaths_alone: int = 0
    slot: Slot | None = None
    data: np.ndarray | None = None
    used_bytes: int = 0
    content: ChunkContent | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """The parts of one batch, in the order of their positions."""

    step: int
    epoch: int
    positions: np.ndarray
    indices: np.ndarray | list[object]
    parts: list[Part] = field(default_factory=list)
    open_parts: int = 0
    loaded: bool = False  # the transfer has it: it says when the slots are free


class Feed:
    """Keeps up to `ahead` batches in work.

    Args:
        engine: does the chunks.
        ring: holds their pixels.
        chunk_size: samples in a chunk, at most.
        ahead: batches in work beyond the one that was given over last.
        reclaim: called when the ring is full; True where it made the consumer give slots back (waiting if told to).
    """

    def __init__(
        self,
        engine: Engine,
        ring: Ring,
        *,
        chunk_size: int,
        ahead: int,
        reclaim: Callable[[bool], bool] = lambda wait: False,
    ) -> None:
        self.engine = engine
        self.ring = ring
        self.chunk_size = chunk_size
        self.ahead = ahead
        self.spilled_chunks = 0
        self._reclaim = reclaim
        self._next_chunk = 1
        # Slots for typical chunks of a small ring must not be so large that only one or two of them fit.
        self._most_row_bytes = max(1, ring.ring_bytes // (4 * chunk_size))
        self._row_bytes = min(FIRST_GUESS_BYTES, self._most_row_bytes)
        self._coming: Iterator[Batch] = iter(())
        self._batches: deque[Batch] = deque()  # in work, in order
        self._waiting: deque[Part] = deque()  # not handed out yet, in order
        self._flying: dict[tuple[int, int], tuple[Slot, Part | None]] = {}  # None: nobody waits for it any more
        self._events: deque[Event] = deque()  # not dealt with yet
        self._limbo: set[tuple[int, int]] = set()  # those of them that were lost, and may yet be found

    def begin(self, batches: Iterator[Batch]) -> None:
        """Start an epoch; whatever an earlier one left in work is dropped."""
        self.abandon()
        self._coming = batches
        self.engine.forgive()

    def abandon(self) -> None:
        """Drop the epoch in work; its slots come back as workers end what they are at."""
        self._coming = iter(())
        self._waiting.clear()
        for batch in self._batches:
            self.release(batch)
        self._batches.clear()
        self._flying = {key: (slot, None) for key, (slot, _) in self._flying.items()}
        self.engine.disown(self._next_chunk)

    def take(self) -> Batch | None:
        """Wait for the next batch and take it over; None at the end of the epoch.

        The caller `release`s it when its slots are free, at the latest before it waits for another, or on `reclaim`.
        """
        self._plan()
        while self._batches and self._batches[0].open_parts:
            self._pump(1.0, waited_for=True)
        return self._pop()

    def take_if_ready(self) -> Batch | None:
        """The next batch, where it is complete already."""
        self.pump(0.0)
        return self._pop() if self._batches and not self._batches[0].open_parts else None

    def _pop(self) -> Batch | None:
        if not self._batches:
            return None
        batch = self._batches.popleft()
        self._reclaim(False)
        # The workers shall have work while the consumer has this batch.
        self._plan()
        self._hand_out(waited_for=False)
        return batch

    def pump(self, timeout_s: float) -> None:
        """Hand out what can be handed out and take in what is finished, waiting for something if there is no work."""
        self._pump(timeout_s, waited_for=False)

    def _pump(self, timeout_s: float, *, waited_for: bool) -> None:
        self._plan()
        self._reclaim(False)  # slots whose copies have ended first, or the ring would grow to its limit
        self._hand_out(waited_for=waited_for)
        self._events.extend(self.engine.gather(timeout_s if self._working and not self._events else 0.0))
        while self._events:
            self._take_in(self._events.popleft())
        self._hand_out(waited_for=waited_for)

    def release(self, batch: Batch) -> None:
        """Give the slots of a batch back."""
        for part in batch.parts:
            if part.slot is not None:
                self.ring.release(part.slot)
                part.slot = None
            part.data = None

    @property
    def _working(self) -> int:
        """How many chunks an engine has and will say something about."""
        return len(self._flying) - len(self._limbo)

    def idle(self) -> bool:
        """Whether no chunk is in work, of this epoch or an earlier one."""
        return not self._flying

    # -- handing out ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        while len(self._batches) < self.ahead and (batch := next(self._coming, None)) is not None:
            for start in range(0, len(batch.positions), self.chunk_size):
                rows = slice(start, start + self.chunk_size)
                batch.parts.append(Part(batch, batch.positions[rows], batch.indices[rows]))
            batch.open_parts = len(batch.parts)
            self._batches.append(batch)
            self._waiting.extend(batch.parts)

    def _hand_out(self, *, waited_for: bool) -> None:
        while self._waiting:
            part = self._waiting[0]
            slot = self._slot_for(part, waited_for)
            if slot is None:
                return
            part.chunk, self._next_chunk = self._next_chunk, self._next_chunk + 1
            request = Request(
                part.chunk,
                part.attempt,
                part.batch.epoch,
                slot.offset,
                slot.capacity_bytes,
                part.positions,
                part.indices,
            )
            sent = False
            try:
                sent = self.engine.submit(request)
            finally:
                if not sent:
                    self.ring.release(slot)
            if not sent:
                return
            self._flying[part.chunk, part.attempt] = (slot, part)
            self._waiting.popleft()

    def _slot_for(self, part: Part, waited_for: bool) -> Slot | None:
        size = max(part.need_bytes, len(part.positions) * self._row_bytes)
        size = min(size, self.ring.ring_bytes)
        while (slot := self.ring.acquire(size)) is None:
            if self._reclaim(False):
                continue
            if self._working or not waited_for or part.batch is not self._batches[0]:
                return None
            # The consumer waits for this batch, holding no slot itself, and nothing in work will free one.
            if self._reclaim(True) or self._spill():
                continue
            # Slots of lost chunks are in the way, and nobody can say yet for how long.
            if part.need_bytes or size <= 1:
                self._waiting.popleft()
                self._divide(part, f"its slot of {size:,} bytes finds no room beside those of lost chunks")
                return None
            size //= 2
        return slot

    def _spill(self) -> bool:
        """Move the latest finished chunk out of the ring."""
        for batch in reversed(self._batches):
            for part in reversed(batch.parts):
                if part.slot is not None and part.data is not None:
                    part.data = part.data.copy()
                    self.ring.release(part.slot)
                    part.slot = None
                    self.spilled_chunks += 1
                    return True
        return False

    # -- taking in --------------------------------------------------------------------------------------------------

    def _take_in(self, event: Event) -> None:
        key = (event.chunk, event.attempt)
        if isinstance(event, Freed):
            slot, _ = self._flying.pop(key)
            self._limbo.discard(key)
            self.ring.release(slot)
            return
        slot, part = self._flying.pop(key)
        self._limbo.discard(key)
        if isinstance(event, Lost):
            if event.slot_is_free:
                self.ring.release(slot)
            else:
                self._flying[key] = (slot, None)  # a worker may still write there; a `Freed` or its reply comes
                self._limbo.add(key)
            if part is not None:
                self._again(part, event)
            return
        if part is None or event.status is Status.UNWANTED:
            self.ring.release(slot)
        elif event.status is Status.TOO_LARGE:
            self.ring.release(slot)
            self._enlarge(part, event.nbytes)
        else:
            self._finish(part, slot, event)

    def _finish(self, part: Part, slot: Slot, reply: Reply) -> None:
        view = self.ring.view(slot)
        try:
            part.content = read_content(view, reply.meta, reply.meta_at)
        except Exception as error:  # an object of the user's that comes apart when it is unpickled
            self.ring.release(slot)
            self._fail(part, f"{type(error).__name__}: {error} (while it was unpickled in the main process)")
            return
        part.slot, part.data, part.used_bytes = slot, view[: reply.nbytes], reply.nbytes
        part.batch.open_parts -= 1

    def _enlarge(self, part: Part, need_bytes: int) -> None:
        rows = len(part.positions)
        if need_bytes <= self.ring.ring_bytes:
            part.need_bytes = need_bytes
            wished = int(need_bytes * HEADROOM / rows)
            self._row_bytes = max(self._row_bytes, min(wished, self._most_row_bytes))
            self._requeue(part, [part])
        else:
            self._divide(part, f"its pixels take {need_bytes:,} bytes")

    def _divide(self, part: Part, reason: str) -> None:
        """A chunk that the ring cannot hold: in two halves; if it is a single sample, give that up."""
        rows = len(part.positions)
        if rows > 1:
            self._split(part, [slice(0, rows // 2), slice(rows // 2, rows)])
        else:
            self._fail(
                part,
                f"MemoryError: {reason}, more than ring_bytes={self.ring.ring_bytes:,} allows; "
                "raise ring_bytes, or let the first transform crop",
            )

    def _again(self, part: Part, lost: Lost) -> None:
        """Do a lost chunk again: the sample that it was at alone, the others without it."""
        part.attempt += 1
        rows = len(part.positions)
        if lost.row is None or lost.row >= rows:
            self._requeue(part, [part])
        elif rows > 1:
            row = lost.row
            self._split(
                part, [s for s in (slice(0, row), slice(row, row + 1), slice(row + 1, rows)) if s.start < s.stop]
            )
        else:
            part.deaths_alone += 1
            if part.deaths_alone < DEATHS_ALONE:
                self._requeue(part, [part])
            else:
                deaths = f"the worker that was alone with it died {part.deaths_alone} times"
                self._fail(part, f"WorkerError: {deaths}: {lost.cause}")

    def _split(self, part: Part, slices: list[slice]) -> None:
        pieces = [Part(part.batch, part.positions[rows], part.indices[rows], attempt=part.attempt) for rows in slices]
        place = part.batch.parts.index(part)
        part.batch.parts[place : place + 1] = pieces
        part.batch.open_parts += len(pieces) - 1
        self._requeue(part, pieces)

    def _requeue(self, part: Part, pieces: list[Part]) -> None:
        self._waiting.extendleft(reversed(pieces))
        # The batch that is due first comes first, however the pieces came back.
        self._waiting = deque(sorted(self._waiting, key=lambda waiting: waiting.batch.step))

    def _fail(self, part: Part, cause: str) -> None:
        """End a chunk as errors of its samples."""
        errors = []
        for row, (position, index) in enumerate(zip(part.positions.tolist(), part.indices, strict=True)):
            index = int(index) if isinstance(index, np.integer) else index
            record = ErrorRecord(position=position, index=index, source=None, cause=cause, traceback="")
            errors.append((row, record))
        part.content = ChunkContent(errors=errors)
        part.batch.open_parts -= 1
