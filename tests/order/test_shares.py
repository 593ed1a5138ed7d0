"""How samples are shared among ranks and steps, also after a resume."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuload.order.shares import Shares

SIZES = {
    "samples": st.integers(1, 400),
    "batch_size": st.integers(1, 12),
    "ranks": st.integers(1, 5),
}


def make_shares(ranks: int, **options) -> list[Shares]:
    return [Shares(rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def steps_of(shares: list[Shares], epoch: int = 0, start: int = 0) -> list[list]:
    """Return the `RankBatch` of each rank in each step, as [step][rank]."""
    return [list(step) for step in zip(*(share.batches(epoch, start) for share in shares), strict=True)]


def valid_positions(steps) -> list[int]:
    """Return the valid positions in the order of steps and ranks."""
    return [position for step in steps for batch in step for position in batch.positions[batch.valid].tolist()]


@given(**SIZES, shuffle=st.booleans())
def test_uneven_exact_counts_every_sample_once_without_empty_batches(samples, batch_size, ranks, shuffle):
    shares = make_shares(ranks, samples=samples, batch_size=batch_size, shuffle=shuffle, uneven="exact")
    steps = steps_of(shares)
    assert valid_positions(steps) == list(range(samples))
    indices = [index for step in steps for batch in step for index in batch.indices[batch.valid].tolist()]
    assert sorted(indices) == list(range(samples))
    for number, step in enumerate(steps):
        lengths = {len(batch.positions) for batch in step}
        assert len(lengths) == 1, f"the ranks' batches of step {number} differ in length"
        assert 0 not in lengths, f"step {number} has empty batches"


@given(**SIZES)
def test_uneven_pad_wraps_around_to_a_multiple_of_the_ranks(samples, batch_size, ranks):
    steps = steps_of(make_shares(ranks, samples=samples, batch_size=batch_size))
    padded = -(-samples // ranks) * ranks
    assert valid_positions(steps) == [position % samples for position in range(padded)]


@given(**SIZES)
def test_uneven_drop_cuts_to_a_multiple_of_the_ranks_and_drop_last_to_complete_steps(samples, batch_size, ranks):
    complete = samples // (batch_size * ranks) * batch_size * ranks
    length = complete + (samples - complete) // ranks * ranks
    steps = steps_of(make_shares(ranks, samples=samples, batch_size=batch_size, uneven="drop"))
    assert valid_positions(steps) == list(range(length))
    for uneven in ("pad", "drop", "exact"):
        dropped = steps_of(make_shares(ranks, samples=samples, batch_size=batch_size, uneven=uneven, drop_last=True))
        assert valid_positions(dropped) == list(range(complete))


@given(**SIZES, uneven=st.sampled_from(["pad", "drop", "exact"]), group=st.sampled_from([2, 4]))
def test_shares_keep_groups_of_samples_together(samples, batch_size, ranks, uneven, group):
    options = {"samples": samples, "batch_size": group * batch_size, "uneven": uneven}
    shares = make_shares(ranks, **options, group_size=group)
    steps = steps_of(shares)
    assert len(steps) == shares[0].steps()
    last_group = set(range(samples - samples % group, samples))
    for step in steps:
        assert len({len(batch.positions) for batch in step}) == 1
        for batch in step:
            positions = set(batch.positions[batch.valid].tolist())
            in_split_groups = {
                position for position in positions if any(position ^ offset not in positions for offset in range(group))
            }
            assert in_split_groups in (set(), last_group)
    counted_positions, global_batch_size = valid_positions(steps), group * batch_size * ranks
    complete = samples // global_batch_size * global_batch_size
    if uneven == "drop":
        multiple = group * ranks if ranks > 1 else 1
        assert counted_positions == list(range(complete + (samples - complete) // multiple * multiple))
    else:
        assert sorted(set(counted_positions)) == list(range(samples))
        assert uneven == "pad" or len(counted_positions) == samples


@given(**SIZES, uneven=st.sampled_from(["pad", "drop", "exact"]), drop_last=st.booleans())
def test_all_ranks_make_the_number_of_steps_that_steps_returns(samples, batch_size, ranks, uneven, drop_last):
    shares = make_shares(ranks, samples=samples, batch_size=batch_size, uneven=uneven, drop_last=drop_last)
    step_counts = {plan.steps() for plan in shares}
    assert step_counts == {len(list(plan.batches(0))) for plan in shares}
    assert len(step_counts) == 1


@given(
    samples=st.integers(1, 600),
    batch_size=st.integers(1, 6),
    stop=st.integers(0, 60),
    uneven=st.sampled_from(["pad", "exact"]),
)
def test_changing_the_number_of_ranks_keeps_the_global_batches(samples, batch_size, stop, uneven):
    def shares_of(ranks):
        return make_shares(ranks, samples=samples, batch_size=4 * batch_size // ranks, shuffle=True, uneven=uneven)

    expected = [sorted(np.concatenate([r.indices[r.valid] for r in step]).tolist()) for step in steps_of(shares_of(1))]
    resumed, start = [], 0
    for ranks, max_steps in ((1, stop // 3), (4, stop // 2), (2, 10**6)):
        for step in steps_of(shares_of(ranks), start=start)[:max_steps]:
            resumed.append(sorted(np.concatenate([r.indices[r.valid] for r in step]).tolist()))
            start = min(start + 4 * batch_size, samples)
    if uneven == "exact":
        assert resumed == expected
    else:  # the padding depends on the ranks
        assert resumed[:-1] == expected[:-1]
        assert len(resumed) == len(expected)


@given(**SIZES, stop=st.integers(0, 40))
def test_batches_from_a_later_start_are_the_remainder_of_the_epoch(samples, batch_size, ranks, stop):
    shares = make_shares(ranks, samples=samples, batch_size=batch_size, shuffle=True, seed=7)
    steps = steps_of(shares, epoch=3)
    stop = min(stop, len(steps))
    resumed = steps_of(shares, epoch=3, start=min(stop * batch_size * ranks, samples))
    assert len(resumed) == len(steps) - stop
    for before, after in zip(steps[stop:], resumed, strict=True):
        for batch_before, batch_after in zip(before, after, strict=True):  # positions, indices and valid
            assert [column.tolist() for column in batch_before[:3]] == [column.tolist() for column in batch_after[:3]]


def test_batches_from_a_start_of_a_billion_come_at_once():
    shares = Shares(samples=2 * 10**9, batch_size=256, shuffle=True)

    def time_first_batch(start):
        began = time.perf_counter()
        batch = next(shares.batches(0, start))
        return time.perf_counter() - began, batch

    time_first_batch(0)  # warm up
    seconds, batch = time_first_batch(10**9)
    assert batch.positions.tolist() == list(range(10**9, 10**9 + 256))
    seconds_of_position_0, _ = time_first_batch(0)
    # Not a benchmark: iterating from position 0 would take minutes.
    assert seconds < 20 + 100 * seconds_of_position_0
