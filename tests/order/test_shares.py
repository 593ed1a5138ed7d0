"""How samples are shared out over ranks, steps and resumes."""

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
    """[step][rank] → RankBatch."""
    return [list(step) for step in zip(*(plan.batches(epoch, start) for plan in plans_), strict=True)]


def counted(steps) -> list[int]:
    """The positions that count, in the order of steps and ranks."""
    return [p for step in steps for rows in step for p in rows.positions[rows.valid].tolist()]


@given(**SIZES, shuffle=st.booleans())
def test_exact_counts_every_sample_once_and_no_batch_is_empty(samples, batch, ranks, stop, shuffle):
    all_ = plans(ranks, samples=samples, batch_size=batch, shuffle=shuffle, uneven="exact")
    steps = runs(all_)
    assert counted(steps) == list(range(samples))
    indices = [i for step in steps for rows in step for i in rows.indices[rows.valid].tolist()]
    assert sorted(indices) == list(range(samples))
    assert all(len(rows.positions) for step in steps for rows in step)
    assert all(len({len(rows.positions) for rows in step}) == 1 for step in steps)


@given(**SIZES)
def test_pad_wraps_round_to_a_multiple_of_the_ranks(samples, batch, ranks, stop):
    steps = runs(plans(ranks, samples=samples, batch_size=batch))
    padded = -(-samples // ranks) * ranks
    assert counted(steps) == [position % samples for position in range(padded)]


@given(**SIZES)
def test_drop_cuts_to_a_multiple_of_the_ranks_and_drop_last_to_whole_steps(samples, batch, ranks, stop):
    whole = samples // (batch * ranks) * batch * ranks
    cut = whole + (samples - whole) // ranks * ranks
    assert counted(runs(plans(ranks, samples=samples, batch_size=batch, uneven="drop"))) == list(range(cut))
    for uneven in ("pad", "drop", "exact"):
        dropped = runs(plans(ranks, samples=samples, batch_size=batch, uneven=uneven, drop_last=True))
        assert counted(dropped) == list(range(whole))


@given(**SIZES, uneven=st.sampled_from(["pad", "drop", "exact"]), group=st.sampled_from([2, 4]))
def test_groups_stay_together(samples, batch, ranks, stop, uneven, group):
    options = {"samples": samples, "batch_size": group * batch, "uneven": uneven}
    all_ = plans(ranks, **options, group_size=group)
    steps = runs(all_)
    assert len(steps) == all_[0].steps()
    last = set(range(samples - samples % group, samples))
    for step in steps:
        assert len({len(rows.positions) for rows in step}) == 1
        for rows in step:
            own = set(rows.positions[rows.valid].tolist())
            torn = {one for one in own if any(one ^ other not in own for other in range(group))}
            assert torn in (set(), last)
    seen, whole = counted(steps), samples // (group * batch * ranks) * group * batch * ranks
    if uneven == "drop":
        unit = group * ranks if ranks > 1 else 1
        assert seen == list(range(whole + (samples - whole) // unit * unit))
    else:
        assert sorted(set(seen)) == list(range(samples))
        assert uneven == "pad" or len(seen) == samples


@given(**SIZES, uneven=st.sampled_from(["pad", "drop", "exact"]), drop_last=st.booleans())
def test_all_ranks_make_the_number_of_steps_that_is_told(samples, batch, ranks, stop, uneven, drop_last):
    all_ = plans(ranks, samples=samples, batch_size=batch, uneven=uneven, drop_last=drop_last)
    told = {plan.steps() for plan in all_}
    assert told == {len(list(plan.batches(0))) for plan in all_}
    assert len(told) == 1


@given(
    samples=st.integers(1, 600),
    batch=st.integers(1, 6),
    stop=st.integers(0, 60),
    uneven=st.sampled_from(["pad", "exact"]),
)
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(samples, batch, stop, uneven):
    """1 → 4 → 2 ranks, the global batch held."""

    def stage(ranks):
        return plans(ranks, samples=samples, batch_size=4 * batch // ranks, shuffle=True, uneven=uneven)

    undisturbed = [sorted(np.concatenate([r.indices[r.valid] for r in step]).tolist()) for step in runs(stage(1))]
    resumed, at = [], 0
    for ranks, most in ((1, stop // 3), (4, stop // 2), (2, 10**6)):
        for step in runs(stage(ranks), start=at)[:most]:
            resumed.append(sorted(np.concatenate([r.indices[r.valid] for r in step]).tolist()))
            at = min(at + 4 * batch, samples)
    if uneven == "exact":
        assert resumed == undisturbed
    else:  # what is padded depends on the ranks
        assert resumed[:-1] == undisturbed[:-1]
        assert len(resumed) == len(undisturbed)


@given(**SIZES)
def test_starting_later_gives_the_rest_of_the_epoch(samples, batch, ranks, stop):
    all_ = plans(ranks, samples=samples, batch_size=batch, shuffle=True, seed=7)
    steps = runs(all_, epoch=3)
    stop = min(stop, len(steps))
    rest = runs(all_, epoch=3, start=min(stop * batch * ranks, samples))
    assert len(rest) == len(steps) - stop
    for before, after in zip(steps[stop:], rest, strict=True):
        for one, other in zip(before, after, strict=True):
            assert [column.tolist() for column in one] == [column.tolist() for column in other]


def test_to_start_at_a_billion_costs_no_more_than_at_zero():
    plan = Shares(samples=2 * 10**9, batch_size=256, shuffle=True)

    def first(start):
        began = time.perf_counter()
        rows = next(plan.batches(0, start))
        return time.perf_counter() - began, rows

    first(0)
    assert first(10**9)[1].positions.tolist() == list(range(10**9, 10**9 + 256))
    # Not a benchmark: walking there would take minutes.
    assert first(10**9)[0] < 20 + 100 * first(0)[0]
