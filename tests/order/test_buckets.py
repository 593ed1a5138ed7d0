"""Buckets: which shape each sample gets, and how the batches of all buckets are divided among steps and ranks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuload as gl
from gpuload.order.buckets import BucketShares
from gpuload.order.shares import RankBatch

SIZES = st.lists(st.sampled_from([(48, 64), (64, 48), (50, 50), (20, 90)]), min_size=1, max_size=120)
SHAPES = [(48, 64), (64, 48), (64, 64), (32, 128)]
DIVISIONS = {"sizes": SIZES, "batch": st.integers(1, 9), "ranks": st.integers(1, 4), "epoch": st.integers(0, 3)}


def run_ranks(buckets: gl.Buckets, ranks: int, epoch: int = 0, **options: Any) -> list[list[RankBatch]]:
    """Return the batches of all ranks, as [step][rank]."""
    shares = [BucketShares(buckets, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    steps = [list(step) for step in zip(*(rank.batches(epoch) for rank in shares), strict=True)]
    assert all(rank.steps() == len(steps) for rank in shares)
    return steps


def valid_indices(steps: list[list[RankBatch]]) -> list[int]:
    return [index for step in steps for batch in step for index in batch.indices[batch.valid].tolist()]


# -- shapes ------------------------------------------------------------------------------------------------------------


def preference(size: tuple[int, int], shape: tuple[int, int]) -> tuple[Fraction, Fraction, int]:
    """Return what remains of an image after it is resized to cover a shape and cropped, the enlargement, and the
    area."""
    scale = max(Fraction(side, length) for side, length in zip(shape, size, strict=True))
    area = shape[0] * shape[1]
    return Fraction(area) / (size[0] * size[1] * scale**2), -max(Fraction(1), scale), area


SIDES = st.one_of(st.integers(1, 8), st.integers(1, 2000))


@given(
    sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=10),
    shapes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=12, unique=True),
)
def test_each_sample_gets_the_shape_that_cuts_least_then_enlarges_least_then_is_largest(sizes, shapes):
    buckets = gl.Buckets(sizes, shapes=shapes)
    assert buckets.shapes == tuple(shapes)
    for shape, members in zip(shapes, buckets._members, strict=True):
        for index in members.tolist():
            assert preference(sizes[index], shape) == max(preference(sizes[index], other) for other in shapes)


def test_max_pixels_creates_the_largest_shapes_that_the_data_need():
    buckets = gl.Buckets([(480, 640), (640, 480), (300, 410), (500, 500)], max_pixels=512 * 512)
    assert buckets.shapes == ((448, 576), (512, 512), (576, 448))
    assert [members.tolist() for members in buckets._members] == [[0, 2], [3], [1]]
    assert gl.Buckets([(100, 100)], max_pixels=100 * 100, multiple_of=32).shapes == ((96, 96),)


@given(sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=20), multiple=st.sampled_from([1, 8, 32]))
def test_created_shapes_are_multiples_of_at_most_max_pixels_and_cannot_grow_in_one_direction(sizes, multiple):
    shapes = np.array(gl.Buckets(sizes, max_pixels=3000, multiple_of=multiple).shapes)
    assert (shapes % multiple == 0).all()
    assert (shapes.prod(axis=1) <= 3000).all()
    is_tallest, is_widest = ((shapes + growth).prod(axis=1) > 3000 for growth in ([multiple, 0], [0, multiple]))
    assert (is_tallest | is_widest).all()


def test_buckets_of_a_million_different_sizes_have_every_sample_and_none_is_empty():
    sizes = np.stack(np.meshgrid(np.arange(1, 1001), np.arange(1, 1001)), axis=2).reshape(-1, 2)
    buckets = gl.Buckets(sizes, max_pixels=1 << 20)
    assert sum(map(len, buckets._members)) == len(sizes)
    assert all(len(members) for members in buckets._members)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"takes either shapes= or max_pixels=, got neither; pass one of them"),
        ({"shapes": [(8, 8)], "max_pixels": 64}, r"takes either shapes= or max_pixels=, got both; pass one of them"),
        ({"shapes": [(8, 8)], "multiple_of": 8}, r"multiple_of=8\) applies to the shapes that max_pixels= creates"),
        ({"shapes": [(8, 0)]}, r"shapes=…\), entry 0, must be at least 1, got 0"),
        ({"shapes": [(8, 8, 3)]}, r"shapes=…\), entry 0, must be a pair \(height, width\) in pixels"),
        ({"shapes": []}, r"shapes=…\) must be a list of pairs \(height, width\), got \[\]"),
        ({"max_pixels": 4095}, r"max_pixels=…\) must be at least multiple_of² = 4096, got 4095"),
    ],
)
def test_bad_shapes_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gl.Buckets([(10, 10)], **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 2], r"sizes=…\) must have the shape \(samples, 2\), a height and a width each, got \(2,\)"),
        (np.empty((0, 2), int), r"must have the shape \(samples, 2\), .* got \(0, 2\)"),
        ([(10, 10), (0, 5)], r"must be heights and widths of at least 1, but sizes\[1\] is \[0, 5\]"),
        ([(0.5, 1)], r"must be integers, as from gpuload\.image_sizes\(dataset\), got float64"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gl.Buckets(sizes, max_pixels=1 << 20)


def test_the_name_of_the_order_depends_on_the_shapes_and_on_their_members():
    sizes, shapes = [(10, 20), (20, 10)], [(8, 16), (16, 8)]

    def name_of(sizes: Any, shapes: list[tuple[int, int]]) -> str:
        return BucketShares(gl.Buckets(sizes, shapes=shapes), batch_size=1).name

    assert name_of(np.array(sizes), shapes) == name_of(sizes, shapes)
    assert len({name_of(sizes, shapes), name_of(sizes, shapes[::-1]), name_of(sizes[::-1], shapes)}) == 3


# -- batches -----------------------------------------------------------------------------------------------------------


@given(**DIVISIONS)
def test_an_epoch_has_every_sample_once_over_all_ranks(sizes, batch, ranks, epoch):
    buckets = gl.Buckets(sizes, shapes=SHAPES)
    steps = run_ranks(buckets, ranks, epoch, batch_size=batch, uneven="exact")
    assert sorted(valid_indices(steps)) == list(range(len(sizes)))
    positions = [position for step in steps for rank in step for position in rank.positions[rank.valid].tolist()]
    assert len(set(positions)) == len(sizes)


@given(**DIVISIONS, uneven=st.sampled_from(["pad", "drop", "exact"]), drop_last=st.booleans())
def test_all_ranks_have_one_shape_and_one_batch_length_in_a_step(sizes, batch, ranks, epoch, uneven, drop_last):
    buckets = gl.Buckets(sizes, shapes=SHAPES)
    shape_of = {i: shape for shape, members in zip(buckets.shapes, buckets._members, strict=True) for i in members}
    lengths: dict[Any, list[int]] = {}
    for step in run_ranks(buckets, ranks, epoch, batch_size=batch, uneven=uneven, drop_last=drop_last):
        (shape,), (length,) = {rank.size_hw for rank in step}, {len(rank.indices) for rank in step}
        assert {shape_of[index] for rank in step for index in rank.indices.tolist()} == {shape}
        assert drop_last is False or length == batch
        lengths.setdefault(shape, []).append(length)
    # Only a bucket's last batch can be short.
    assert all(length == batch for bucket in lengths.values() for length in bucket[:-1])


@given(**DIVISIONS)
def test_drop_last_drops_less_than_a_global_batch_per_bucket(sizes, batch, ranks, epoch):
    buckets = gl.Buckets(sizes, shapes=SHAPES)
    indices = valid_indices(run_ranks(buckets, ranks, epoch, batch_size=batch, drop_last=True))
    assert len(set(indices)) == len(indices)
    for members in buckets._members:
        assert 0 <= len(members) - len(np.intersect1d(members, indices)) < batch * ranks


@given(**DIVISIONS)
def test_uneven_drop_drops_less_than_the_number_of_ranks_per_bucket_and_pad_repeats_as_few(sizes, batch, ranks, epoch):
    buckets = gl.Buckets(sizes, shapes=SHAPES)
    dropped = valid_indices(run_ranks(buckets, ranks, epoch, batch_size=batch, uneven="drop"))
    padded = valid_indices(run_ranks(buckets, ranks, epoch, batch_size=batch, uneven="pad"))
    assert len(set(dropped)) == len(dropped)
    assert set(padded) == set(range(len(sizes)))
    for members in buckets._members:
        assert np.isin(members, dropped).sum() == len(members) // ranks * ranks
        assert np.isin(padded, members).sum() == -(-len(members) // ranks) * ranks


def test_a_padded_sample_keeps_its_position():
    buckets = gl.Buckets([(10, 10)] * 9 + [(10, 20)] * 5, shapes=[(8, 8), (8, 16)])
    index_at: dict[int, int] = {}
    steps = run_ranks(buckets, 4, batch_size=2)
    for rank in (rank for step in steps for rank in step):
        for position, index in zip(rank.positions.tolist(), rank.indices.tolist(), strict=True):
            assert index_at.setdefault(position, index) == index
    assert sorted(index_at.values()) == list(range(14))
    assert sum(len(rank.indices) for step in steps for rank in step) == 12 + 8


@given(**DIVISIONS, uneven=st.sampled_from(["pad", "drop", "exact"]), drop_last=st.booleans())
def test_batches_from_the_middle_are_those_of_the_entire_epoch(sizes, batch, ranks, epoch, uneven, drop_last):
    shares = BucketShares(
        gl.Buckets(sizes, shapes=SHAPES), batch_size=batch, world_size=ranks, rank=ranks - 1, uneven=uneven,
        drop_last=drop_last,
    )  # fmt: skip
    batches = list(shares.batches(epoch))
    for step in range(len(batches)):
        remaining = list(shares.batches(epoch, step * batch * ranks))
        assert len(remaining) == shares.steps(step * batch * ranks)
        for expected, actual in zip(batches[step:], remaining, strict=True):
            assert expected.size_hw == actual.size_hw
            for field in ("positions", "indices", "valid"):
                assert np.array_equal(getattr(expected, field), getattr(actual, field))


@given(**DIVISIONS)
def test_groups_of_neighbours_stay_together_and_are_found_by_position(sizes, batch, ranks, epoch):
    buckets = gl.Buckets(sizes, shapes=SHAPES)
    shares = [
        BucketShares(buckets, batch_size=2 * batch, world_size=ranks, rank=rank, group_size=2) for rank in range(ranks)
    ]
    for rank in shares:
        for rank_batch in rank.batches(epoch):
            for position, index in zip(rank_batch.positions.tolist(), rank_batch.indices.tolist(), strict=True):
                group = rank.group_at(epoch, position)
                assert group.size_hw == rank_batch.size_hw
                assert group.indices[group.positions == position].tolist() == [index]
                assert set(group.positions.tolist()) <= {position & ~1, position | 1}
                assert np.isin(group.positions, rank_batch.positions).all()


def test_the_order_depends_on_the_seed_and_the_epoch_for_batches_and_within_buckets():
    buckets = gl.Buckets([(10, 10)] * 300 + [(10, 20)] * 300, shapes=[(8, 8), (8, 16)])

    def run(seed: int, epoch: int) -> tuple[list[Any], list[int], list[int]]:
        steps = [step[0] for step in run_ranks(buckets, 1, epoch, batch_size=8, seed=seed)]
        by_shape = {
            shape: [i for step in steps if step.size_hw == shape for i in step.indices.tolist()]
            for shape in buckets.shapes
        }
        return [step.size_hw for step in steps], by_shape[8, 8], by_shape[8, 16]

    first = run(0, 0)
    assert run(0, 0) == first
    for other in (run(0, 1), run(1, 0)):
        assert all(values != expected for values, expected in zip(other, first, strict=True))
    # Two buckets of one length have different orders, and the batches of both are mixed from the beginning.
    assert [index - 300 for index in first[2]] != first[1]
    assert len(set(first[0][:10])) == 2


def test_drop_last_drops_different_samples_in_different_epochs():
    buckets = gl.Buckets([(10, 10)] * 30, shapes=[(8, 8)])
    dropped = [
        set(range(30)) - set(valid_indices(run_ranks(buckets, 1, epoch, batch_size=8, drop_last=True)))
        for epoch in range(20)
    ]
    assert all(len(samples) == 6 for samples in dropped)
    assert set.union(*dropped) == set(range(30))


def test_ranks_with_different_buckets_are_refused(group):
    def begin(rank: int, shapes: list[tuple[int, int]]) -> None:
        buckets = gl.Buckets([(10, 10), (10, 20)] * 4, shapes=shapes)
        with gl.Loader(range(8), 2, buckets, num_workers=0, device="cpu", rank=rank, world_size=2) as loader:
            object.__setattr__(loader._options.order, "caller", "train.py:7, call 1")  # the same on all ranks
            iter(loader)

    begin(1, [(8, 8), (8, 16)])
    with pytest.raises(ValueError, match=r"seed=0 and buckets-\w+ on rank 1, and seed=0 and buckets-\w+ on rank 0"):
        begin(0, [(8, 16), (8, 8)])
