"""How samples are shared among ranks and steps, also after a resume."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuload.order.shares import Shares

SIZES = {
    "samples": st.integers(1, 400),
    "batch": st.integers(1, 12),
    "ranks": st.integers(1, 5),
    "stop": st.integers(0, 40),
}


def plans(ranks: int, **options) -> list[Shares]:
    return [Shares(rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def runs(plans_: list[Shares], epoch: int = 0, start: int = 0) -> list[list]:
    """Return the `RankBatch` of each rank in each step, as [step][rank]."""
    return [list(step) for step in zip(*(plan.batches(epoch, start) for plan in plans_), strict=True)]


def counted(steps) -> list[int]:
    """Return the valid positions in the order of steps and ranks."""
    return [p for step in steps for rows in step for p in rows.positions[rows.valid].tolist()]


@given(**SIZES, shuffle=st.booleans())
def test_uneven_exact_counts_every_sample_once_without_empty_batches(samples, batch, ranks, stop, shuffle):
    shares = plans(ranks, samples=samples, batch_size=batch, shuffle=shuffle, uneven="exact")
    steps = runs(shares)
    assert counted(steps) == list(range(samples))
    indices = [i for step in steps for rows in step for i in rows.indices[rows.valid].tolist()]
    assert sorted(indices) == list(range(samples))
    assert all(len(rows.positions) for step in steps for rows in step)
    assert all(len({len(rows.positions) for rows in step}) == 1 for step in steps)


@given(**SIZES)
def test_uneven_pad_wraps_around_to_a_multiple_of_the_ranks(samples, batch, ranks, stop):
    steps = runs(plans(ranks, samples=samples, batch_size=batch))
    padded = -(-samples // ranks) * ranks
    assert counted(steps) == [position % samples for position in range(padded)]


@given(**SIZES)
def test_uneven_drop_cuts_to_a_multiple_of_the_ranks_and_drop_last_to_complete_steps(samples, batch, ranks, stop):
    complete = samples // (batch * ranks) * batch * ranks
    cut = complete + (samples - complete) // ranks * ranks
    assert counted(runs(plans(ranks, samples=samples, batch_size=batch, uneven="drop"))) == list(range(cut))
    for uneven in ("pad", "drop", "exact"):
        dropped = runs(plans(ranks, samples=samples, batch_size=batch, uneven=uneven, drop_last=True))
        assert counted(dropped) == list(range(complete))


@given(**SIZES, uneven=st.sampled_from(["pad", "drop", "exact"]), group=st.sampled_from([2, 4]))
def test_shares_keep_groups_of_samples_together(samples, batch, ranks, stop, uneven, group):
    options = {"samples": samples, "batch_size": group * batch, "uneven": uneven}
    shares = plans(ranks, **options, group_size=group)
    steps = runs(shares)
    assert len(steps) == shares[0].steps()
    last = set(range(samples - samples % group, samples))
    for step in steps:
        assert len({len(rows.positions) for rows in step}) == 1
        for rows in step:
            positions = set(rows.positions[rows.valid].tolist())
            split = {
                position for position in positions if any(position ^ offset not in positions for offset in range(group))
            }
            assert split in (set(), last)
    counted_positions, complete = counted(steps), samples // (group * batch * ranks) * group * batch * ranks
    if uneven == "drop":
        unit = group * ranks if ranks > 1 else 1
        assert counted_positions == list(range(complete + (samples - complete) // unit * unit))
    else:
        assert sorted(set(counted_positions)) == list(range(samples))
        assert uneven == "pad" or len(counted_positions) == samples


@given(**SIZES, uneven=st.sampled_from(["pad", "drop", "exact"]), drop_last=st.booleans())
def test_all_ranks_make_the_number_of_steps_that_steps_returns(samples, batch, ranks, stop, uneven, drop_last):
    shares = plans(ranks, samples=samples, batch_size=batch, uneven=uneven, drop_last=drop_last)
    step_counts = {plan.steps() for plan in shares}
    assert step_counts == {len(list(plan.batches(0))) for plan in shares}
    assert len(step_counts) == 1


@given(
    samples=st.integers(1, 600),
    batch=st.integers(1, 6),
    stop=st.integers(0, 60),
    uneven=st.sampled_from(["pad", "exact"]),
)
def test_changing_the_number_of_ranks_keeps_the_global_batches(samples, batch, stop, uneven):
    def stage(ranks):
        return plans(ranks, samples=samples, batch_size=4 * batch // ranks, shuffle=True, uneven=uneven)

    undisturbed = [sorted(np.concatenate([r.indices[r.valid] for r in step]).tolist()) for step in runs(stage(1))]
    resumed, start = [], 0
    for ranks, max_steps in ((1, stop // 3), (4, stop // 2), (2, 10**6)):
        for step in runs(stage(ranks), start=start)[:max_steps]:
            resumed.append(sorted(np.concatenate([r.indices[r.valid] for r in step]).tolist()))
            start = min(start + 4 * batch, samples)
    if uneven == "exact":
        assert resumed == undisturbed
    else:  # the padding depends on the ranks
        assert resumed[:-1] == undisturbed[:-1]
        assert len(resumed) == len(undisturbed)


@given(**SIZES)
def test_batches_from_a_later_start_are_the_remainder_of_the_epoch(samples, batch, ranks, stop):
    shares = plans(ranks, samples=samples, batch_size=batch, shuffle=True, seed=7)
    steps = runs(shares, epoch=3)
    stop = min(stop, len(steps))
    resumed = runs(shares, epoch=3, start=min(stop * batch * ranks, samples))
    assert len(resumed) == len(steps) - stop
    for before, after in zip(steps[stop:], resumed, strict=True):
        for column_before, column_after in zip(before, after, strict=True):
            assert [column.tolist() for column in column_before[:3]] == [column.tolist() for column in column_after[:3]]


def test_batches_from_a_start_of_a_billion_come_at_once():
    plan = Shares(samples=2 * 10**9, batch_size=256, shuffle=True)

    def first(start):
        began = time.perf_counter()
        rows = next(plan.batches(0, start))
        return time.perf_counter() - began, rows

    first(0)
    assert first(10**9)[1].positions.tolist() == list(range(10**9, 10**9 + 256))
    # Not a benchmark: iterating from position 0 would take minutes.
    assert first(10**9)[0] < 20 + 100 * first(0)[0]
