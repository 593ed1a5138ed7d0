"""The schedule of an iterable dataset's workers, without workers and dataset."""

from __future__ import annotations

from gpuload.order.iterable import IterableSchedule
from gpuload.order.place import IterablePlace, Place


def come_due(spec, sample_count, is_empty, places):
    assert spec.on_due is not None
    return spec.on_due(spec, sample_count, is_empty, places)


def run(samples, *, drop_last=False, place=None, broken=(), rank=0, world_size=1):
    """Return each batch's step, positions and the place after it. Worker w has ``samples[w]`` samples; samples in
    `broken`, pairs of worker and number, fail."""
    schedule = IterableSchedule(
        batch_size=4, drop_last=drop_last, workers=len(samples), rank=rank, world_size=world_size
    )
    batches = []
    for spec in schedule.batches(place or Place(0, 0)):
        worker = spec.iterable.worker
        requested = spec.indices.tolist()
        read = [number for number in requested if number < samples[worker]]
        place_after = IterablePlace(requested[0] + len(read), len(read) < len(requested))
        is_empty = all((worker, number) in broken for number in read)
        due_spec = come_due(spec, len(read), is_empty, [place_after])
        if due_spec is not None:
            batches.append((due_spec.step, due_spec.positions.tolist(), due_spec.after))
    return batches


def test_workers_take_turns_until_their_iterators_end():
    batches = run([6, 1, 9])
    assert [positions for _, positions, _ in batches] == [
        [0, 3, 6, 9], [1], [2, 5, 8, 11], [12, 15], [14, 17, 20, 23], [26]
    ]  # fmt: skip
    assert [step for step, _, _ in batches] == list(range(6))


def test_out_of_order_requests_go_to_the_worker_with_the_fewest_pending_requests():
    schedule = IterableSchedule(batch_size=1, drop_last=False, workers=3, rank=0, world_size=1, in_order=False)
    specs = schedule.batches(Place(0, 0))
    requested = [next(specs) for _ in range(6)]
    assert [(spec.iterable.worker, spec.queue) for spec in requested] == [(0, 0), (1, 1), (2, 2)] * 2
    for number in range(1, 4):  # worker 1 returns a batch, and gets another request
        request = next(spec for spec in requested if spec.iterable.worker == 1)
        requested.remove(request)
        after = come_due(request, 1, False, [IterablePlace(number, False)]).after
        assert [worker["samples"] for worker in after.iterable_progress["workers"]] == [0, number, 0]
        requested.append(next(specs))
        assert requested[-1].iterable.worker == 1


def test_dropped_and_empty_batches_are_skipped_and_not_counted():
    batches = [(step, positions) for step, positions, _ in run([6, 4], drop_last=True)]
    assert batches == [(0, [0, 2, 4, 6]), (1, [1, 3, 5, 7])]
    broken = {(0, number) for number in range(4)}
    assert [(step, positions) for step, positions, _ in run([6, 2], broken=broken)] == [(0, [1, 3]), (1, [8, 10])]


def test_ranks_of_an_iterable_dataset_have_distinct_positions():
    batches_of_ranks = [run([3, 2], rank=rank, world_size=2) for rank in (0, 1)]
    positions_of_batches = [positions for batches in batches_of_ranks for _, positions, _ in batches]
    assert sorted(position for positions in positions_of_batches for position in positions) == list(range(10))


def test_iterable_schedule_continues_from_the_place_of_each_batch():
    samples = [9, 3, 6]
    batches = run(samples)
    for count in range(1, len(batches)):
        _, _, place = batches[count - 1]
        assert run(samples, place=place) == batches[count:]


def test_on_due_returns_a_new_spec_and_leaves_the_requested_spec_unchanged():
    schedule = IterableSchedule(batch_size=4, drop_last=False, workers=2, rank=0, world_size=1)
    spec = next(schedule.batches(Place(3, 0)))
    assert (spec.epoch, spec.iterable.worker, spec.iterable.samples, spec.after) == (3, 0, 0, None)
    due_spec = come_due(spec, 2, False, [IterablePlace(2, True)])
    assert (len(spec.positions), spec.after) == (4, None)
    assert (due_spec.positions.tolist(), due_spec.after.iterable_progress["turn"]) == ([0, 2], 1)


def test_workers_with_the_same_first_samples_cause_one_warning_with_the_next_batch():
    schedule = IterableSchedule(batch_size=2, drop_last=True, workers=2, rank=0, world_size=1)
    specs = schedule.batches(Place(0, 0))
    warnings = []
    for sample_count in (2, 1, 2):
        spec = next(specs)
        due_spec = come_due(spec, sample_count, False, [IterablePlace(2, False, digests=(b"a", b"b"))])
        warnings.append(None if due_spec is None else due_spec.warning)
    assert warnings[:2] == ["", None]
    assert warnings[2].startswith("workers 0 and 1 yielded the same first 2 samples")
