"""The feed with a fake engine, without processes and decoders."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.datasets.tree import LEAF
from gpuload.decode import Decode
from gpuload.errors import ErrorRecord, LimitError
from gpuload.loader.options import look_ahead
from gpuload.order.place import IterableStart
from gpuload.order.spec import BatchSpec
from gpuload.ring.columns import Columns, ImageColumn, ValueColumn
from gpuload.ring.packing import write_content
from gpuload.ring.ring import GRANULE_BYTES, Ring
from gpuload.transforms import Chain
from gpuload.transforms.program.draws import IMAGE
from gpuload.workers.batch import Batch
from gpuload.workers.faults import Faults
from gpuload.workers.feed import FIRST_CHUNKS, HEADROOM, Consumer, Feed, SlotSize
from gpuload.workers.job import Job
from gpuload.workers.protocol import Event, Lost, Reply, Request, Status


class FakeEngine:
    """An engine that writes each sample's index into `sizes[index]` bytes, unless the function `fate` returns events.

    Its queue holds `capacity` requests. With a seed `shuffle`, it processes them in random order, and with `spares`, it
    returns a chunk too large for its slot in separate memory.
    """

    changes_bytes = 0

    def __init__(self, ring: Ring, sizes, fate=None, capacity=10**9, shuffle: int | None = None, spares=False):
        self.ring, self.sizes, self.fate, self.capacity, self.spares = ring, sizes, fate, capacity, spares
        self.queue: deque[Request] = deque()
        self.processed: list[Request] = []
        self.wanted_from = 0
        self.rng = None if shuffle is None else np.random.default_rng(shuffle)

    def submit(self, request: Request) -> bool:
        if len(self.queue) >= self.capacity:
            self.ring.release_at(request.slot_offset)
            return False
        self.queue.append(request)
        return True

    def cancel_before(self, chunk: int) -> None:
        self.wanted_from = chunk

    def recover_slots(self) -> bool:
        return False

    def lose(self, request: Request, row: int | None, cause: str) -> Lost:
        """Return the event of a worker that died with this chunk."""
        self.ring.release_at(request.slot_offset)
        return Lost(request.chunk, row, cause)

    def collect_events(self, timeout_s: float) -> list[Event]:
        if not self.queue:
            return []
        position = 0 if self.rng is None else int(self.rng.integers(len(self.queue)))
        request = self.queue[position]
        del self.queue[position]
        self.processed.append(request)
        if request.chunk < self.wanted_from:
            return [Reply(request.chunk, Status.UNWANTED, 0, b"")]
        return (self.fate and self.fate(request, self)) or [self.process(request)]

    def process(self, request: Request) -> Reply:
        sizes, data = [self.sizes[index] for index in request.indices], None
        slot = self.ring.bytes[request.slot_offset : request.slot_offset + request.slot_bytes]
        if sum(sizes) > request.slot_bytes:
            if not self.spares or sum(sizes) > request.spare_bytes:
                return Reply(request.chunk, Status.TOO_LARGE, sum(sizes), b"")
            slot = data = np.empty(sum(sizes), np.uint8)
        offsets = np.cumsum([0, *sizes])
        for index, start, end in zip(request.indices, offsets, offsets[1:], strict=False):
            slot[start:end] = int(index) % 251
        rows = [(start, (size, 1, 1), (size, 1), (0, 0, size, 1)) for start, size in zip(offsets, sizes, strict=False)]
        content = numbered_columns(request, [ImageColumn(np.array(rows, IMAGE), [0])])
        packed = write_content(content, slot, int(offsets[-1]), inline_bytes=10**6)
        if not packed.is_written:
            return Reply(request.chunk, Status.TOO_LARGE, packed.nbytes, b"")
        return Reply(request.chunk, Status.DONE, packed.nbytes, packed.meta, packed.meta_at, data=data)


def numbered_columns(request: Request, images: list[ImageColumn]) -> Columns:
    """Return the columns of a chunk with these images and each sample's index."""
    indices = request.indices.tolist()
    return Columns(list(range(len(indices))), [LEAF], images, {1: ValueColumn(indices)}, [None] * len(indices))


def batch_specs(n: int, size: int, epoch: int = 0):
    """Yield batches of `size` of `n` samples. Position p has index 7·p."""
    for step, start in enumerate(range(0, n, size)):
        positions = np.arange(start, min(start + size, n))
        yield BatchSpec(step, epoch, positions, positions * 7)


def batch_indices(batch: Batch) -> list[int]:
    """Return the dataset indices of a batch, and check that its pixels and values agree."""
    indices = []
    for part in batch.parts:
        assert part.content is not None
        [column], values = part.content.images, part.content.values[1].values
        columns = column.table["offset"], column.table["shape"], values
        for offset, (size, _, _), value in zip(*columns, strict=True):
            assert (part.data[offset : offset + size] == value % 251).all()
            indices.append(value)
    return indices


def pump_until_idle(feed: Feed) -> None:
    while not feed.is_idle():
        feed.pump(0)


def drain(feed: Feed) -> list[list[int]]:
    result = []
    while (batch := feed.pop_batch()) is not None:
        result.append(batch_indices(batch))
        feed.release(batch)
    pump_until_idle(feed)
    return result


def expected_indices(n: int, size: int) -> list[list[int]]:
    return [spec.indices.tolist() for spec in batch_specs(n, size)]


def check_epoch(feed: Feed, n: int, size: int) -> None:
    """Begin an epoch of `n` samples in batches of `size`, and check that its batches are complete and in order."""
    feed.begin(batch_specs(n, size))
    assert drain(feed) == expected_indices(n, size)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 80),
    size=st.integers(1, 30),
    chunk=st.integers(1, 17),
    ahead=st.integers(1, 4),
    granules=st.integers(2, 40),
    seed=st.integers(0, 2**32 - 1),
    spares=st.booleans(),
)
def test_batches_are_complete_and_in_order_for_any_ring_and_chunk_size(n, size, chunk, ahead, granules, seed, spares):
    rng = np.random.default_rng(seed)
    ring = Ring(granules * GRANULE_BYTES)
    sizes = {7 * p: int(rng.integers(1, 2 * GRANULE_BYTES)) for p in range(n)}
    engine = FakeEngine(ring, sizes, capacity=3, shuffle=seed, spares=spares)
    feed = Feed(engine, ring, chunk_size=chunk, ahead=ahead)
    check_epoch(feed, n, size)
    assert ring.slot_bytes <= ring.ring_bytes
    ring.close()


def make_feed(sizes: Any = 1000, *, ring_bytes=1 << 22, fate=None, **options) -> tuple[Feed, FakeEngine]:
    """Return a feed and its engine. `sizes` are the bytes of the samples by index, or of each of 1,000 samples."""
    ring = Ring(ring_bytes)
    engine_options = {name: options.pop(name) for name in ("capacity", "spares") if name in options}
    sizes = dict.fromkeys(range(0, 7000, 7), sizes) if isinstance(sizes, int) else sizes
    engine = FakeEngine(ring, sizes, fate, **engine_options)
    return Feed(engine, ring, **{"chunk_size": 4, "ahead": 2, **options}), engine


def test_a_sample_larger_than_the_ring_is_the_only_sample_that_fails():
    sizes = dict.fromkeys(range(0, 700, 7), 1000)
    sizes[21] = 5 << 20
    feed, _ = make_feed(sizes)
    feed.begin(batch_specs(8, 8))
    batch = feed.pop_batch()
    [record] = [record for part in batch.parts for _, record in part.content.errors]
    assert record.index == 21
    assert "its pixels take 5,242,880 bytes, more than ring_bytes=4,194,304 allows; raise ring_bytes" in record.cause
    assert sum(len(part.content.rows) for part in batch.parts) == 7


def test_a_finished_chunk_whose_slot_is_needed_while_memory_is_short_is_requested_again():
    sizes = dict.fromkeys(range(0, 28, 7), 30_000) | dict.fromkeys(range(28, 56, 7), 1000)
    feed, engine = make_feed(sizes, ring_bytes=2 * GRANULE_BYTES)

    def refuse(slot, nbytes):
        raise LimitError("memory is short")

    feed.ring.move_out = refuse
    check_epoch(feed, 8, 4)
    assert [request.indices[0] for request in engine.processed] == [0, 28, 0, 28]


def test_later_batches_wait_for_slots_instead_of_leaving_the_ring():
    feed, _ = make_feed(100_000, ring_bytes=1 << 20, chunk_size=2, ahead=10)
    feed.begin(batch_specs(40, 4))
    for _ in range(50):
        feed.pump(0)
    for indices in expected_indices(40, 4):
        batch = feed.pop_batch()
        assert batch_indices(batch) == indices
        assert None not in [part.slot for part in batch.parts]
        feed.release(batch)


def test_look_ahead_exceeds_the_minimum_once_the_size_of_a_chunk_is_known():
    counts = []
    feed, engine = make_feed(ring_bytes=1 << 28, ahead=7, min_ahead=2)
    engine.fate = lambda request, engine: counts.append(len(feed.batches))
    check_epoch(feed, 400, 8)
    assert counts[:2] == [2, 7]


def test_look_ahead_exceeds_the_minimum_only_while_less_than_a_quarter_of_the_ring_is_in_use():
    feed, _ = make_feed(100_000, ring_bytes=64 << 20, ahead=10, min_ahead=2)
    feed.begin(batch_specs(400, 8))
    max_batches, max_bytes = 0, 0
    for indices in expected_indices(400, 8):
        for _ in range(20):
            feed.pump(0)
        if len(feed.batches) > 2:
            max_batches, max_bytes = max(max_batches, len(feed.batches)), max(max_bytes, feed.ring.used_bytes)
        batch = feed.pop_batch()
        assert batch_indices(batch) == indices
        feed.release(batch)
    assert 2 < max_batches < 10
    assert max_bytes <= 16 << 20


@pytest.mark.parametrize(("plans", "count"), [(True, 6), (False, 4)])
def test_look_ahead_of_a_loop_that_waits_and_plans_nothing_includes_batches_for_plans(plans, count):
    job = Job(None, Chain([]), Decode(), 0) if plans else None
    consumer = Consumer(plan_job=job, part_offsets=lambda batch: [0] * len(batch.parts))
    feed, _ = make_feed(ring_bytes=1 << 28, ahead=4, min_ahead=2, consumer=consumer)
    feed.begin(batch_specs(400, 8))
    feed.release(feed.pop_batch())
    assert len(feed.batches) == count
    assert [batch for batch in feed.batches if batch.planned is not None] == []


def test_large_images_are_loaded_once_with_a_long_look_ahead():
    sizes = dict.fromkeys(range(0, 7 * 96, 7), 2_400_000)  # a chunk is a seventh of the ring
    feed, engine = make_feed(sizes, ring_bytes=64 << 20, spares=True, ahead=12, min_ahead=2)
    check_epoch(feed, 96, 8)
    assert sorted(index for request in engine.processed for index in request.indices) == list(sizes)


def test_chunks_of_an_abandoned_epoch_are_not_used_in_the_next_epoch():
    feed, engine = make_feed()
    feed.begin(batch_specs(40, 8, epoch=0))
    feed.release(feed.pop_batch())
    feed.begin(batch_specs(40, 8, epoch=1))
    assert drain(feed) == expected_indices(40, 8)
    assert {request.epoch for request in engine.processed if request.chunk >= engine.wanted_from} == {1}
    slots = feed.ring.slots
    for epoch in range(2, 12):
        feed.begin(batch_specs(40, 8, epoch))
        feed.release(feed.pop_batch())
    feed.abandon()
    pump_until_idle(feed)
    assert feed.ring.slots == slots


def test_slots_released_late_are_reused_before_the_ring_grows():
    """On a GPU, copies out of the slots end one batch after the consumer received its batch."""
    copying = []

    def reclaim(wait: bool) -> bool:
        finished_count = len(copying) if wait else len(copying) - 1
        for _ in range(finished_count):
            feed.release(copying.pop(0))
        return finished_count > 0

    feed, _ = make_feed(consumer=Consumer(reclaim=reclaim))
    feed.begin(batch_specs(800, 8))
    max_slots = 0
    while (batch := feed.pop_batch()) is not None:
        batch_indices(batch)
        copying.append(batch)
        max_slots = max(max_slots, feed.ring.slots)
    assert max_slots <= 10


def separate_bytes(batches) -> list[int]:
    return [part.used_bytes for batch in batches for part in batch.parts if part.data is not None and not part.slot]


@pytest.mark.parametrize("ahead", [2, 8])
def test_a_chunk_in_separate_memory_is_used_and_later_slots_are_larger(ahead):
    def fate(request, engine):
        separate = sum(separate_bytes(feed.batches)) + sum(queued.spare_bytes for queued in [*engine.queue, request])
        assert separate <= feed.ring.ring_bytes

    small_count = FIRST_CHUNKS * 4  # samples, whose chunks determine the size of the first slots
    sizes = {7 * position: 1000 if position < small_count else 400_000 for position in range(small_count + 80)}
    feed, engine = make_feed(sizes, ring_bytes=1 << 27, spares=True, fate=fate, ahead=ahead, min_ahead=2)
    feed.begin(batch_specs(small_count + 80, 8))
    in_slots = []
    for indices in expected_indices(small_count + 80, 8):
        batch = feed.pop_batch()
        assert batch_indices(batch) == indices
        in_slots.append(not separate_bytes([batch]))
        feed.release(batch)
        assert [part.data for part in batch.parts if part.data is not None] == []
    assert in_slots == [True] * (small_count // 8) + [False] * ahead + [True] * (10 - ahead)
    assert sorted(index for request in engine.processed for index in request.indices) == list(sizes)
    assert feed.pop_batch() is None
    assert feed.ring.used_bytes == 0


def test_slot_size_does_not_shrink_with_a_chunk_of_an_older_slot():
    """A chunk that was submitted before the estimate grew can exceed its slot and still need less than the estimate."""
    size = SlotSize(1 << 30, chunk_size=4)
    size.grow_for(4_000_000, 4)
    size.grow_for(2_000_000, 4)
    assert size.estimate(4) == HEADROOM * 4_000_000


def test_a_chunk_larger_than_its_spare_bytes_is_requested_again_in_a_larger_slot():
    sizes = dict.fromkeys(range(0, 56, 7), 100_000) | dict.fromkeys(range(56, 112, 7), 600_000)
    feed, engine = make_feed(sizes, ring_bytes=4 << 20, spares=True, ahead=1, chunk_size=4)
    check_epoch(feed, 16, 8)
    assert {request.spare_bytes for request in engine.processed} == {2 << 20}
    repeated = [list(request.indices) for request in engine.processed][4:]
    assert repeated == [[56, 63, 70, 77], [84, 91, 98, 105]]
    assert [request.slot_bytes >= 2_400_000 for request in engine.processed] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("data", [None, np.zeros(10, np.uint8)], ids=["in its slot", "in separate memory"])
def test_a_chunk_that_cannot_be_unpickled_fails_and_releases_its_slot_once(data):
    def fate(request, engine):
        return [Reply(request.chunk, Status.DONE, 10, b"\0" * 20, data=data)]

    feed, _ = make_feed(fate=fate)
    feed.begin(batch_specs(8, 8))
    batch = feed.pop_batch()
    assert len(batch.errors) == 8
    assert "(while unpickling the samples in the main process)" in batch.errors[0].cause
    assert feed.ring.used_bytes == 0
    feed.release(batch)
    assert feed.ring.used_bytes == 0


def test_separate_memory_of_abandoned_chunks_is_freed():
    feed, _ = make_feed(400_000, ring_bytes=64 << 20, spares=True)
    feed.begin(batch_specs(80, 8))
    feed.pump(0)
    feed.abandon()
    pump_until_idle(feed)
    assert feed.ring.used_bytes == 0


def worker_dies_at(index: int, times: int = 1000):
    """Return a fate of requests in which a worker dies at this sample, at most `times` times."""
    deaths: list[Request] = []

    def fate(request: Request, engine: FakeEngine) -> list[Event] | None:
        if index not in request.indices or len(deaths) == times:
            return None
        deaths.append(request)
        return [engine.lose(request, list(request.indices).index(index), "killed by SIGKILL")]

    return fate


@pytest.mark.parametrize(
    ("reads_together", "times", "requested_again"),
    [(False, 1, [[28], [35], [42, 49]]), (True, 2, [[28, 35, 42, 49], [28], [35], [42, 49]])],
)
def test_a_lost_chunk_is_requested_again_with_the_suspect_sample_alone(reads_together, times, requested_again):
    feed, engine = make_feed(fate=worker_dies_at(35, times), reads_together=reads_together)
    check_epoch(feed, 8, 8)
    assert [list(request.indices) for request in engine.processed[2:]] == requested_again


@pytest.mark.parametrize("is_iterable", [False, True])
def test_a_batch_that_will_raise_is_given_up_unless_the_iterator_has_to_continue(is_iterable):
    feed, engine = make_feed(fate=worker_dies_at(0), capacity=1, chunk_size=1, ahead=1)
    start = IterableStart(0, 0, 0, None, 1, 0) if is_iterable else None
    feed.begin(replace(spec, iterable=start) for spec in batch_specs(3, 3))
    batch = feed.pop_batch()
    assert [record.index for record in batch.errors] == [0]
    assert [request.indices[0] for request in engine.processed] == [0, 0, *([7, 14] if is_iterable else [])]


def with_candidates(candidates: dict[int, list[int]]) -> Consumer:
    """Return a consumer that names the substitutes of each position."""
    return Consumer(substitute_candidates=lambda batch, position, index: iter(candidates[position]))


def failed_reply(request: Request) -> Reply:
    """Return a reply in which all samples have failed."""
    errors = [
        (row, ErrorRecord(epoch=0, position=position, index=index, source=None, cause="broken", traceback=""))
        for row, (position, index) in enumerate(zip(request.positions.tolist(), request.indices.tolist(), strict=True))
    ]
    packed = write_content(Columns(errors=errors), np.empty(0, np.uint8), 0, inline_bytes=10**6)
    return Reply(request.chunk, Status.DONE, packed.nbytes, packed.meta, packed.meta_at)


@pytest.mark.parametrize("on_error", ["replace", "skip"])  # with "skip", substitutes fill a batch that would be empty
def test_a_substitute_that_fails_is_replaced_by_the_next_candidate(on_error):
    def fate(request, engine):
        return None if request.indices[0] == 14 else [failed_reply(request)]

    feed, _ = make_feed(fate=fate, consumer=with_candidates({0: [7, 14, 21]}), faults=Faults(on_error=on_error))
    feed.begin(batch_specs(1, 1))
    batch = feed.pop_batch()
    assert batch.parts[-1].content.values[1].values == [14]
    assert [(record.index, record.replaced_by) for record in batch.errors] == [(0, 7), (7, 14)]


def test_a_substitute_that_kills_its_workers_is_replaced_by_the_next_candidate():
    def fate(request, engine):
        if request.indices[0] == 14:
            return [engine.lose(request, 0, "killed by SIGSEGV")]
        return [failed_reply(request)] if request.indices[0] == 0 else None

    candidates = with_candidates({0: [14, 21], 1: [28]})
    feed, _ = make_feed(fate=fate, consumer=candidates, faults=Faults(on_error="skip"))
    feed.begin(batch_specs(2, 2))
    batch = feed.pop_batch()
    loaded = [part.content.values[1].values for part in batch.parts if part.sample_count]
    assert sorted(loaded) == [[21], [28]]
    assert [(record.index, record.replaced_by) for record in batch.errors] == [(0, 14), (7, 28), (14, 21)]


def test_a_chunk_whose_slot_is_written_off_is_requested_again_in_another_slot():
    lost_requests = []

    def fate(request, engine):
        if 0 in request.indices and not lost_requests:
            lost_requests.append(request)
            return [Lost(request.chunk, None, "died")]
        if 0 in request.indices:
            assert request.slot_offset != lost_requests[0].slot_offset
        return None

    feed, _ = make_feed(fate=fate)
    check_epoch(feed, 16, 8)
    assert len(feed.ring._busy) == 1


def test_a_due_batch_recovers_a_written_off_slot_and_no_sample_fails():
    lost_requests = []

    def fate(request, engine):
        if len(lost_requests) < 2:
            lost_requests.append(request)
            return [Lost(request.chunk, None, "died")]
        return None

    feed, engine = make_feed(10_000, fate=fate, ring_bytes=2 * GRANULE_BYTES)

    def recover_slots():
        if lost_requests and engine.ring._busy:
            engine.ring.release_at(lost_requests[0].slot_offset)
        return bool(engine.ring._busy)

    engine.recover_slots = recover_slots
    feed.begin(batch_specs(16, 8))
    batch = feed.pop_batch()
    assert batch_indices(batch) == expected_indices(16, 8)[0]
    assert batch.errors == []


class SizeOnlyEngine(FakeEngine):
    """An engine that replies with the size of a chunk and writes no pixels."""

    def process(self, request: Request) -> Reply:
        nbytes = sum(self.sizes[index] for index in request.indices)
        if nbytes > request.slot_bytes:
            return Reply(request.chunk, Status.TOO_LARGE, nbytes, b"")
        packed = write_content(numbered_columns(request, []), np.empty(0, np.uint8), 0, inline_bytes=10**6)
        return Reply(request.chunk, Status.DONE, nbytes, packed.meta, packed.meta_at)


@pytest.mark.parametrize("seed", range(4))
def test_no_slot_is_created_after_the_first_batches(seed):
    """Use crops of 500×375 photographs. As on a GPU, slots are released three batches later, and each new slot is
    page-locked, which delays everything."""
    batch_count, batch_size = 100, 64
    areas = np.random.default_rng(seed).uniform(0.08, 1.0, 7 * batch_count * batch_size)
    ring, steps_with_new_slots, step = Ring(2 << 30), [], 0
    ring.on_new = lambda slot: steps_with_new_slots.append(step)
    feed = Feed(SizeOnlyEngine(ring, (areas * 500 * 375 * 3).astype(int)), ring, chunk_size=16, ahead=2)
    feed.begin(batch_specs(batch_count * batch_size, batch_size))
    held_batches: deque[Batch] = deque()
    while (batch := feed.pop_batch()) is not None:
        held_batches.append(batch)
        if len(held_batches) == 3:
            feed.release(held_batches.popleft())
        step += 1
    assert step == batch_count
    assert max(steps_with_new_slots) < 12
    assert len(steps_with_new_slots) <= 1.6 * ring.slots
    assert ring.slot_bytes < 2 * 5 * batch_size * 500 * 375 * 3  # twice five batches of complete photographs
    ring.close()


SAMPLE_MS = 1.93  # the mean time of a sample, and its standard deviation relative to the mean
SAMPLE_VARIATION = 0.31


class SimulatedWorkers(FakeEngine):
    """Workers that take a random time for each chunk, on a virtual clock. `starved_count` counts how often a worker
    finished a chunk and found the queue empty."""

    def __init__(self, ring: Ring, workers: int, seed: int) -> None:
        super().__init__(ring, dict.fromkeys(range(0, 7 * 100_000, 7), 3072))
        self.idle_count, self.starved_count, self.now_ms = workers, 0, 0.0
        self.running: list[tuple[float, int, Request]] = []  # a heap of (end time, chunk number, request)
        self.ended: list[Request] = []
        self.times = np.random.default_rng(seed)

    def submit(self, request: Request) -> bool:
        self.queue.append(request)
        self.begin_chunks()
        return True

    def begin_chunks(self) -> None:
        while self.idle_count and self.queue:
            request = self.queue.popleft()
            duration_ms = self.times.gamma(
                len(request.positions) / SAMPLE_VARIATION**2, SAMPLE_MS * SAMPLE_VARIATION**2
            )
            heapq.heappush(self.running, (self.now_ms + duration_ms, request.chunk, request))
            self.idle_count -= 1

    def advance(self, until_ms: float) -> None:
        while self.running and self.running[0][0] <= until_ms:
            self.now_ms, _, request = heapq.heappop(self.running)
            self.ended.append(request)
            self.starved_count += not self.queue
            self.idle_count += 1
            self.begin_chunks()
        self.now_ms = max(self.now_ms, until_ms)

    def collect_events(self, timeout_s: float) -> list[Event]:
        if not self.ended and timeout_s:
            self.advance(self.running[0][0])
        replies: list[Event] = [self.process(request) for request in self.ended]
        self.ended.clear()
        return replies


def count_starved(workers: int, batch_size: int, chunk_size: int, ahead: int, load: float) -> int:
    """Return how often a worker found no chunk in 100 batches. The loop is busy for the fraction `load` of the time
    that workers need for a batch."""
    ring = Ring(2 << 30)
    engine = SimulatedWorkers(ring, workers, seed=batch_size)
    feed = Feed(engine, ring, chunk_size=chunk_size, ahead=ahead, min_ahead=2, workers=workers)
    feed.begin(batch_specs(200 * batch_size, batch_size))
    for step in range(120):
        if step == 20:  # before, workers find an empty queue while the look-ahead grows
            engine.starved_count = 0
        feed.release(feed.pop_batch())
        engine.advance(engine.now_ms + load * SAMPLE_MS * batch_size / workers)
    feed.abandon()
    ring.close()
    return engine.starved_count


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.0, 0.8])
@pytest.mark.parametrize(
    ("workers", "batch_size", "chunk_size"),
    [(4, 16, 8), (15, 32, 8), (15, 256, 18), (31, 256, 9), (63, 32, 8), (63, 256, 8)],
)
def test_workers_with_three_chunks_each_never_find_the_queue_empty(workers, batch_size, chunk_size, load):
    ahead = look_ahead(workers, -(-batch_size // chunk_size))
    assert count_starved(workers, batch_size, chunk_size, ahead, load) == 0
    assert count_starved(workers, batch_size, chunk_size, 2, load) > 0
