"""The turns of an iterable dataset's workers, as the schedule counts them: no worker, no dataset."""

from __future__ import annotations

from gpuload.order.iterable import IterableSchedule
from gpuload.order.place import IterablePlace, Place


def come_due(spec, taken, empty, places):
    assert spec.on_due is not None
    return spec.on_due(spec, taken, empty, places)


def run(samples, *, batch_size=4, drop_last=False, place=None, bad=(), rank=0, world_size=1, stop=10**9):
    """What is given where worker w has samples[w]: of each batch its step and positions, and the place behind it."""
    schedule = IterableSchedule(
        batch_size=batch_size, drop_last=drop_last, workers=len(samples), rank=rank, world_size=world_size
    )
    given = []
    for spec in schedule.batches(place or Place(0, 0)):
        worker = spec.iterable.worker
        asked = spec.indices.tolist()
        there = [number for number in asked if number < samples[worker]]
        last = IterablePlace(asked[0] + len(there), len(there) < len(asked))
        empty = all((worker, number) in bad for number in there)
        due = come_due(spec, len(there), empty, [last])
        if due is not None:
            given.append((due.step, due.positions.tolist(), due.after))
        if len(given) == stop:
            break
    return given


def test_workers_come_in_turn_and_one_that_has_ended_is_left_out():
    given = run([6, 1, 9])
    assert [positions for _, positions, _ in given] == [
        [0, 3, 6, 9], [1], [2, 5, 8, 11], [12, 15], [14, 17, 20, 23], [26]
    ]  # fmt: skip
    assert [step for step, _, _ in given] == list(range(6))


def test_out_of_order_the_worker_with_the_least_to_do_is_asked():
    schedule = IterableSchedule(batch_size=1, drop_last=False, workers=3, rank=0, world_size=1, in_order=False)
    specs = schedule.batches(Place(0, 0))
    asked = [next(specs) for _ in range(6)]
    assert [(spec.iterable.worker, spec.queue) for spec in asked] == [(0, 0), (1, 1), (2, 2)] * 2
    for number in range(1, 4):  # worker 1 gives a batch, and is asked for another
        mine = next(spec for spec in asked if spec.iterable.worker == 1)
        asked.remove(mine)
        after = come_due(mine, 1, False, [IterablePlace(number, False)]).after
        assert [worker["samples"] for worker in after.iterable_progress["workers"]] == [0, number, 0]
        asked.append(next(specs))
        assert asked[-1].iterable.worker == 1


def test_batches_that_are_too_small_or_empty_are_not_given_and_not_counted():
    assert [(step, positions) for step, positions, _ in run([6, 4], drop_last=True)] == [
        (0, [0, 2, 4, 6]),
        (1, [1, 3, 5, 7]),
    ]
    bad = {(0, number) for number in range(4)}
    assert [(step, positions) for step, positions, _ in run([6, 2], bad=bad)] == [(0, [1, 3]), (1, [8, 10])]


def test_ranks_have_positions_of_their_own():
    positions = [run([3, 2], rank=rank, world_size=2) for rank in (0, 1)]
    seen = [position for given in positions for _, batch, _ in given for position in batch]
    assert sorted(seen) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_from_each_place_the_rest_is_what_it_would_have_been():
    samples = [9, 3, 6]
    whole = run(samples)
    for count in range(1, len(whole)):
        _, _, place = whole[count - 1]
        assert run(samples, place=place) == whole[count:]


def test_a_spec_says_where_its_worker_begins_and_is_never_changed():
    schedule = IterableSchedule(batch_size=4, drop_last=False, workers=2, rank=0, world_size=1)
    spec = next(schedule.batches(Place(3, 0)))
    assert (spec.epoch, spec.iterable.worker, spec.iterable.samples, spec.after) == (3, 0, 0, None)
    due = come_due(spec, 2, False, [IterablePlace(2, True)])
    assert (len(spec.positions), spec.after) == (4, None)
    assert (due.positions.tolist(), due.after.iterable_progress["turn"]) == ([0, 2], 1)


def test_workers_that_give_the_same_are_told_of_once_with_the_next_batch_that_is_given():
    schedule = IterableSchedule(batch_size=2, drop_last=True, workers=2, rank=0, world_size=1)
    specs = schedule.batches(Place(0, 0))
    warnings = []
    for taken in (2, 1, 2):
        spec = next(specs)
        due = come_due(spec, taken, False, [IterablePlace(2, False, digests=(b"a", b"b"))])
        warnings.append(None if due is None else due.warning)
    assert warnings[:2] == ["", None]
    assert warnings[2].startswith("workers 0 and 1 yielded the same first 2 samples")
