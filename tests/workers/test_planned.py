"""Plans of batches, made in this process by the code of workers: which batches have one, and which slots plans use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.map_datasets import MapDataset
from helpers.programs import run_python

from gpuload import transforms as T
from gpuload.decode import Decode
from gpuload.order.spec import BatchSpec
from gpuload.ring.columns import Columns, ImageColumn, ValueColumn
from gpuload.ring.packing import read_content
from gpuload.ring.ring import Ring
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.draws import concat_tables, image_table
from gpuload.transforms.program.fusing.plan import Fusing, KernelTile
from gpuload.workers.batch import Batch, PlannedBatch
from gpuload.workers.feed import Consumer, Feed
from gpuload.workers.inline import InProcessEngine
from gpuload.workers.job import Job
from gpuload.workers.planned import make_plan
from gpuload.workers.protocol import Event, Lost, Reply, Request, Status

CHAIN = T.Chain([T.RandomResizedCrop(8), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4), T.Normalize([0.5], [0.5])])
FUSING = Fusing(KernelTile(8, 32, 1), channels_last=True)
BATCH_SIZE = 4  # samples in a batch


def noise_image(number: int, channels: int = 3) -> tuple[np.ndarray, int]:
    """Return an image whose size depends on its number, and the number."""
    return np.random.default_rng(number).integers(0, 256, (20 + number, 30, channels), np.uint8), number


class Engine(InProcessEngine):
    """An engine that processes one request per call. `fate` determines what happens to plans: "later" delays them, and
    a function returns their events."""

    fate: Any = None

    def collect_events(self, timeout_s: float) -> list[Event]:
        if self._waiting and self._waiting[0].is_planning and self.fate is not None:
            if self.fate == "later":
                self._waiting.rotate(-1)
                return []
            return self.fate(self._waiting.popleft())
        return super().collect_events(timeout_s)


def part_offsets(batch: Batch) -> list[int]:
    """Return the offsets of a batch's parts on the device, as if each part had 100 bytes."""
    return [100 * number for number in range(len(batch.copied_parts))]


def image_table_of(batch: Batch) -> np.ndarray:
    tables = [part.content.images[0].table.copy() for part in batch.parts if part.content is not None]
    for table, start in zip(tables, range(0, 1000, 100), strict=False):
        table["offset"] += start
    return concat_tables(tables)


def make_feed(
    samples: int, dataset: Any = None, *, ring_bytes: int = 1 << 24, chain: T.Chain = CHAIN, **options: Any
) -> tuple[Feed, Engine]:
    ring = Ring(ring_bytes)
    job = Job(dataset or MapDataset(noise_image, 40), chain, Decode(), 3, fusing=FUSING)
    engine, consumer = Engine(job, ring), Consumer(plan_job=job, part_offsets=part_offsets)
    feed = Feed(engine, ring, consumer, **{"chunk_size": 2, "ahead": 2, **options})
    begin_epoch(feed, samples)
    return feed, engine


def begin_epoch(feed: Feed, samples: int) -> None:
    steps = np.arange(samples).reshape(-1, BATCH_SIZE)
    feed.begin(BatchSpec(step, 0, positions, positions, size_hw=(10 + step, 9)) for step, positions in enumerate(steps))


def pump(feed: Feed, times: int = 40) -> None:
    for _ in range(times):
        feed.pump(0.0)


def pump_and_pop(feed: Feed) -> Batch:
    """Let workers finish all batches ahead, and return the first."""
    pump(feed)
    batch = feed.pop_ready_batch()
    assert batch is not None
    return batch


def count_busy_slots(feed: Feed) -> int:
    return len(feed.ring._busy)


def check_unplanned(feed: Feed, batch: Batch | None) -> None:
    """Check that a batch has no plan, and release it."""
    assert batch is not None
    assert batch.planned is None
    feed.release(batch)


def check_arrays(data: np.ndarray, spans: dict[Any, Any], arrays: dict[Any, Any]) -> None:
    for name, (start, nbytes, kind) in spans.items():
        expected = np.concatenate([array.reshape(-1) for array in arrays[name]])
        np.testing.assert_array_equal(data[start : start + nbytes].view(kind), expected)


def test_batches_that_are_ready_before_the_loop_asks_have_the_plan_of_their_draws():
    feed, _ = make_feed(6 * BATCH_SIZE)
    for step in range(6):
        batch = pump_and_pop(feed)
        if step == 0:  # the loop might have waited for the first batch
            check_unplanned(feed, batch)
            continue
        assert batch.planned is not None
        assert len(batch.copied_parts) == 3  # two chunks and the plan
        table, positions = image_table_of(batch), np.arange(BATCH_SIZE * step, BATCH_SIZE * (step + 1))
        program = CHAIN.draw(epoch_key(3, 0), positions, table["size_hw"], regions_tlhw=table["region_tlhw"])
        plan, plan_arrays = FUSING(table, program)
        arrays: dict[Any, Any] = {**plan_arrays}
        assert batch.planned.plan == plan
        assert arrays.keys() >= {"ints", "floats", "codes", "values", "counted", "factors"}
        arrays[1] = [positions]  # the labels
        assert batch.planned.spans.keys() == arrays.keys()
        check_arrays(batch.planned.data, batch.planned.spans, arrays)
        assert (len(batch.planned), batch.planned.results_hw.tolist()) == (BATCH_SIZE, [[8, 8]])
        feed.release(batch)
    assert feed.pop_batch() is None
    assert count_busy_slots(feed) == 0


def test_plans_have_the_arguments_of_their_batch():
    by_batch = T.by_batch([8, 9, 12])
    drawn = [T.Chain([T.CenterCrop(by_batch)]).at(0, step, seed=3).output_size_hw for step in range(6)]
    for size, expected in ((by_batch, drawn), (T.bucket_size, [(10 + step, 9) for step in range(6)])):
        feed, _ = make_feed(6 * BATCH_SIZE, chain=T.Chain([T.RandomResizedCrop(size), T.Normalize([0.5], [0.5])]))
        for step in range(6):
            batch = pump_and_pop(feed)
            if step:
                assert batch.planned is not None
                assert tuple(batch.planned.results_hw[0]) == expected[step]
            feed.release(batch)


def test_a_planned_batch_joins_the_columns_of_its_chunks_from_one_description():
    feed, _ = make_feed(BATCH_SIZE)
    batch = pump_and_pop(feed)
    assert [bool(part.description) for part in batch.parts] == [True, True]
    assert [part.sample_count for part in batch.parts] == [2, 2]
    assert batch.planned is not None
    columns = batch.join_columns(batch.planned.starts)
    assert [bool(part.description) for part in batch.parts] == [True, True]
    joined = Batch(batch.spec, batch.parts).join_columns(batch.planned.starts)
    assert [bool(part.description) for part in batch.parts] == [False, False]
    [planned_images], [chunk_images] = columns.images, joined.images
    np.testing.assert_array_equal(planned_images.table, chunk_images.table)
    assert (planned_images.rows, planned_images.leaves) == (chunk_images.rows, chunk_images.leaves)
    assert columns.values == joined.values == {1: ValueColumn([0, 1, 2, 3])}
    assert columns.structure(3) == joined.structure(3)
    assert columns.source_list == joined.source_list
    assert columns.positions.tolist() == joined.positions.tolist()
    feed.release(batch)


def test_a_batch_that_is_waited_for_is_not_planned_by_workers():
    feed, engine = make_feed(BATCH_SIZE)
    check_unplanned(feed, feed.pop_batch())
    assert not engine._waiting


def test_a_plan_is_requested_if_as_many_earlier_batches_are_complete_as_batches_are_open():
    feed, engine = make_feed(12 * BATCH_SIZE, ahead=6)
    for _ in range(6):
        check_unplanned(feed, feed.pop_batch())
    assert [request for request in engine._waiting if request.is_planning] == []
    feed, engine = make_feed(12 * BATCH_SIZE, ahead=6)
    feed._submit_chunks()
    engine._waiting.rotate(-2)  # the first batch is completed last
    pump(feed, 12)
    assert [batch.planned is not None for batch in feed.batches][:6] == [False, False, False, False, True, True]
    feed.abandon()


def test_a_late_plan_is_dropped_and_its_slot_is_released():
    feed, engine = make_feed(2 * BATCH_SIZE)
    engine.fate = "later"
    pump(feed)
    feed.release(feed.pop_ready_batch())
    assert feed.pop_ready_batch() is None  # the batch waits for its plan
    assert feed._pending_count == 1  # the plan, which has a slot
    batch = feed.pop_batch()
    engine.fate = None
    pump(feed)
    assert (batch.planned, len(batch.copied_parts)) == (None, 2)
    feed.release(batch)
    assert feed.is_idle()
    assert count_busy_slots(feed) == 0


def test_pop_batch_uses_a_plan_that_is_complete():
    feed, _ = make_feed(BATCH_SIZE)
    while not feed._batches or feed._batches[0].planned is None:
        feed.pump(0.0)
    batch = feed.pop_batch()
    assert batch.planned is not None
    feed.release(batch)


def test_a_batch_whose_plan_is_lost_has_no_plan():
    feed, engine = make_feed(BATCH_SIZE)
    lost_requests: list[Request] = []

    def fate(request: Request) -> list[Event]:
        lost_requests.append(request)
        return [Lost(request.chunk, None, "killed")]

    engine.fate = fate
    batch = pump_and_pop(feed)
    assert (batch.planned, len(batch.copied_parts), batch.errors) == (None, 2, [])
    feed.release(batch)
    assert len(lost_requests) == 1  # the plan is not requested again
    assert (count_busy_slots(feed), feed.is_idle()) == (1, True)  # the engine releases the slot of a lost plan


def test_a_batch_that_workers_cannot_plan_has_no_plan():
    # Images with different channels are an error of the main process.
    feed, _ = make_feed(BATCH_SIZE, MapDataset(lambda number: noise_image(number, channels=3 if number < 2 else 1)))
    check_unplanned(feed, pump_and_pop(feed))
    assert count_busy_slots(feed) == 0


def test_a_plan_too_large_for_its_slot_enlarges_the_slots_of_later_plans():
    feed, engine = make_feed(4 * BATCH_SIZE)
    slot_sizes: list[int] = []
    run_request, need_bytes = engine._runner.run, 1 << 20

    def run(request: Request, slot: np.ndarray, *arguments: Any) -> Reply:
        if request.is_planning:
            slot_sizes.append(len(slot))
            if len(slot_sizes) == 1:  # as if the slot had 1024 bytes, and the plan needed more than a chunk's slot
                return replace(run_request(request, slot[:1024], *arguments), nbytes=need_bytes)
        return run_request(request, slot, *arguments)

    engine._runner.run = run  # pyright: ignore[reportAttributeAccessIssue]
    has_plan = []
    for _ in range(4):
        batch = pump_and_pop(feed)
        has_plan.append(batch.planned is not None)
        feed.release(batch)
    assert has_plan == [False, False, True, True]
    assert slot_sizes[0] < need_bytes <= slot_sizes[-1]
    assert count_busy_slots(feed) == 0


def test_an_abandoned_epoch_releases_the_slots_of_its_plans():
    feed, engine = make_feed(3 * BATCH_SIZE)
    engine.fate = "later"
    pump(feed)
    begin_epoch(feed, 3 * BATCH_SIZE)
    engine.fate = None
    count = 0
    while (batch := feed.pop_batch()) is not None:
        count += 1
        assert batch.planned is None or len(batch.copied_parts) == 3
        feed.release(batch)
    while not feed.is_idle():
        feed.pump(0.0)
    assert (count, count_busy_slots(feed)) == (3, 0)


def test_a_chunk_that_is_loaded_again_discards_the_plan_of_its_batch():
    feed, _ = make_feed(BATCH_SIZE)
    pump(feed)
    [batch] = feed._batches
    first_plan = batch.planned
    assert first_plan is not None
    feed._discard_result(batch.parts[0])
    assert (batch.planned, len(batch.copied_parts), batch.open_part_count) == (None, 2, 1)
    pump(feed)
    reloaded = feed.pop_ready_batch()
    assert reloaded.planned not in (None, first_plan)
    feed.release(reloaded)
    assert count_busy_slots(feed) == 0


def test_no_plan_is_requested_in_a_small_ring():
    feed, engine = make_feed(BATCH_SIZE, ring_bytes=1 << 18)
    feed.plans._need_bytes = 1 << 16
    engine.fate = lambda request: pytest.fail("a plan was requested")
    check_unplanned(feed, pump_and_pop(feed))


def pop_unplanned(feed: Feed) -> tuple[Batch, Columns]:
    """Return the next batch, which no worker has planned, and its columns."""
    batch = feed.pop_batch()
    assert batch is not None
    assert batch.planned is None
    return batch, batch.join_columns(part_offsets(batch))


def test_a_plan_of_the_main_process_gets_a_slot_that_chunks_can_use_later():
    feed, _ = make_feed(BATCH_SIZE)
    batch, columns = pop_unplanned(feed)
    feed.plan(batch, columns)
    planned = batch.planned
    assert planned.slot.capacity_bytes >= feed._slot_size.estimate(2) > planned.used_bytes > 0
    feed.release(batch)
    assert count_busy_slots(feed) == 0


def test_a_plan_of_the_main_process_that_would_take_much_of_the_ring_gets_no_slot():
    feed, _ = make_feed(BATCH_SIZE, ring_bytes=1 << 20)
    assert feed.plans.allocate((1 << 17) + 1, 1 << 10) is None
    assert feed.plans.allocate(1 << 17, 1 << 10) is not None


def test_a_plan_of_the_main_process_gets_no_slot_while_chunks_have_them_all():
    feed, _ = make_feed(BATCH_SIZE, ring_bytes=1 << 20)
    batch, columns = pop_unplanned(feed)
    while feed.ring.acquire(1 << 17) is not None:
        pass
    feed.plan(batch, columns)
    assert batch.planned is None


def test_batches_with_plans_in_progress_extend_the_look_ahead_by_up_to_two():
    feed, engine = make_feed(20)
    engine.fate = "later"
    pump(feed)
    assert len(feed._batches) == 4  # `ahead` is two


def test_images_resized_while_decoding_are_planned_as_results_of_the_resize():
    positions, sizes = np.arange(BATCH_SIZE), np.tile([[40, 60]], (BATCH_SIZE, 1))
    draws = CHAIN.draw(epoch_key(3, 0), positions, sizes)
    regions = draws.windows_tlhw[0]
    shapes = np.hstack([regions[:, 2:], np.full((BATCH_SIZE, 1), 3)])
    shapes[1::2, :2] = 8  # the size of the crop's result
    table = image_table(1000 * np.arange(BATCH_SIZE), shapes, sizes, regions)
    planned = PlannedBatch([], Columns(images=[ImageColumn(table, [0])]))
    job = Job(MapDataset(noise_image), CHAIN, Decode(scale="fast"), 3, fusing=FUSING)
    slot, plan_input = np.zeros(1 << 16, np.uint8), planned.pack_input(())
    slot[: len(plan_input)] = np.frombuffer(plan_input, np.uint8)
    reply = make_plan(job, Request(0, 0, 0, len(slot), positions, positions, is_planning=True), slot)
    assert reply.status is Status.DONE
    content = read_content(slot, reply.meta, reply.meta_at)
    launches, spans, _ = content.plan
    assert content.rows == []

    program, images = draws.of_decoded(table)
    image_regions = images["region_tlhw"]
    assert image_regions[1::2].tolist() == [[0, 0, 8, 8]] * 2
    assert image_regions[::2].tolist() == regions[::2].tolist()
    plan, arrays = FUSING(images, program)
    assert launches == plan
    check_arrays(slot, spans, arrays)


def test_a_worker_that_plans_nothing_does_not_import_the_fusing_package():
    modules, _ = run_python("import sys, gpuload.workers.main, gpuload.workers.runner; print(*sys.modules)")
    assert "gpuload.workers.planned" in modules
    assert "gpuload.transforms.program.fusing" not in modules
