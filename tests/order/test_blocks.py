"""The block shuffle: a permutation for all blocks and windows, in which neighboring samples are close together."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from helpers.both_loaders import cpu_loader
from helpers.map_datasets import MapDataset
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuload as gl
from gpuload.order.blocks import BlockOrder, Blocks, BlockShuffle
from gpuload.order.shares import RankBatch, Shares
from gpuload.rng.philox import Key, epoch_key

KEYS = st.builds(Key, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
OPTIONS = st.builds(BlockShuffle, st.integers(1, 70), st.integers(1, 12))


@st.composite
def any_blocks(draw: st.DrawFn, min_samples: int = 0) -> Blocks:
    """Draw blocks of one length, or with the bounds of a dataset, some of them empty."""
    options = draw(OPTIONS)
    if draw(st.booleans()):
        return Blocks(draw(st.integers(min_samples, 1500)), options)
    lengths = st.lists(st.integers(0, 90), min_size=1, max_size=40).filter(lambda values: sum(values) >= min_samples)
    bounds = np.unique(np.cumsum([0, *draw(lengths)]))
    return Blocks(int(bounds[-1]), options, bounds)


def bounds_of(blocks: Blocks) -> np.ndarray:
    return np.append(np.arange(0, blocks.n, blocks.length), blocks.n) if blocks.bounds is None else blocks.bounds


def windows_of(order: BlockOrder) -> list[np.ndarray]:
    """Split the indices of an epoch into windows, each of which ends with its last sample of `Blocks.window` blocks."""
    blocks, indices, bounds = order._blocks, order(np.arange(order.n)), bounds_of(order._blocks)
    windows, start = [], 0
    while start < len(indices):
        block_numbers: set[int] = set()
        end = start
        while end < len(indices):
            block_numbers.add(int(np.searchsorted(bounds, indices[end], "right")) - 1)
            end += 1
            samples = sum(int(bounds[block + 1] - bounds[block]) for block in block_numbers)
            if len(block_numbers) == blocks.window and end - start == samples:
                break
        windows.append(indices[start:end])
        start = end
    return windows


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(blocks=any_blocks(), key=KEYS)
def test_block_order_is_a_permutation_for_every_length_block_and_window(blocks: Blocks, key: Key) -> None:
    indices = BlockOrder(blocks, key)(np.arange(blocks.n))
    assert indices.dtype == np.int64
    assert np.sort(indices).tolist() == list(range(blocks.n))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(blocks=any_blocks(min_samples=1), key=KEYS)
def test_each_window_of_a_block_order_consists_of_complete_blocks(blocks: Blocks, key: Key) -> None:
    bounds, windows = bounds_of(blocks), windows_of(BlockOrder(blocks, key))
    assert len(windows) == -(-blocks.count // blocks.window)
    for window in windows:
        block_numbers = np.unique(np.searchsorted(bounds, window, "right") - 1)
        expected = np.concatenate([np.arange(bounds[block], bounds[block + 1]) for block in block_numbers])
        assert np.sort(window).tolist() == expected.tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(blocks=any_blocks(min_samples=1), key=KEYS, data=st.data())
def test_index_of_a_block_order_does_not_depend_on_other_positions(
    blocks: Blocks, key: Key, data: st.DataObject
) -> None:
    indices = BlockOrder(blocks, key)(np.arange(blocks.n))
    positions = np.array(data.draw(st.lists(st.integers(0, blocks.n - 1), min_size=1, max_size=12)))
    assert BlockOrder(blocks, key)(positions.reshape(1, -1)).tolist() == [indices[positions].tolist()]


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    blocks=any_blocks(min_samples=1), batch_size=st.integers(1, 9), ranks=st.integers(1, 5),
    steps_done=st.integers(0, 30), uneven=st.sampled_from(["exact", "pad", "drop"]),
    group_size=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_ranks_share_the_global_batches_of_a_block_order(blocks, batch_size, ranks, steps_done, uneven, group_size):
    options = {"samples": blocks.n, "shuffle": True, "blocks": blocks, "uneven": uneven, "group_size": group_size}

    def steps_of_epoch(ranks: int, batch_size: int, start: int = 0) -> list[tuple[RankBatch, ...]]:
        plans = [Shares(rank=r, world_size=ranks, batch_size=batch_size, **options) for r in range(ranks)]
        return list(zip(*(plan.batches(2, start) for plan in plans), strict=True))

    global_batch_size = batch_size * group_size * ranks
    single_rank, steps = steps_of_epoch(1, global_batch_size), steps_of_epoch(ranks, batch_size * group_size)
    assert len(steps) == Shares(rank=0, world_size=ranks, batch_size=batch_size * group_size, **options).steps()
    for number, step in enumerate(steps):
        positions = np.concatenate([batch.positions[batch.valid] for batch in step])
        indices = np.concatenate([batch.indices[batch.valid] for batch in step])
        if (number + 1) * global_batch_size <= blocks.n:
            expected = np.arange(number * global_batch_size, (number + 1) * global_batch_size)
            assert np.sort(positions).tolist() == expected.tolist()
            assert np.sort(indices).tolist() == np.sort(single_rank[number][0].indices).tolist()
            for batch in step:  # groups are complete and in order
                groups = batch.positions.reshape(-1, group_size)
                assert (groups // group_size * group_size == groups[:, :1]).all()
    if uneven == "exact":
        all_indices = [index for step in steps for batch in step for index in batch.indices[batch.valid].tolist()]
        assert sorted(all_indices) == list(range(blocks.n))
    steps_done = min(steps_done, len(steps))
    resumed = steps_of_epoch(ranks, batch_size * group_size, min(steps_done * global_batch_size, blocks.n))
    for before, after in zip(steps[steps_done:], resumed, strict=True):
        assert [r.indices.tolist() for r in before] == [r.indices.tolist() for r in after]


def test_each_rank_reads_only_its_part_of_the_blocks_of_a_window():
    """Each of 8 ranks reads 8 of a window's 64 blocks, and a few more blocks in which its share begins or ends."""
    blocks = Blocks(64 * 256, BlockShuffle(block=256, window=64))
    for rank in range(8):
        plan = Shares(samples=blocks.n, batch_size=32, shuffle=True, blocks=blocks, rank=rank, world_size=8)
        indices = np.concatenate([batch.indices for batch in plan.batches(0)])
        assert len(indices) == blocks.n // 8
        assert len(np.unique(indices // 256)) <= 20, rank


@settings(deadline=None, max_examples=20)
@given(n=st.integers(10**9, 10**12), start=st.floats(0, 1))
def test_block_order_of_a_huge_dataset_takes_little_memory(n: int, start: float) -> None:
    order = BlockOrder(Blocks(n, BlockShuffle()), epoch_key(1, 2))
    first_position = int(start * (n - 256))
    tracemalloc.start()
    indices = order(np.arange(first_position, first_position + 256))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(indices)) == 256
    assert 0 <= indices.min() <= indices.max() < n
    assert peak_bytes < 1 << 20


@pytest.mark.slow
def test_block_order_has_each_sample_equally_often_at_the_first_and_last_position():
    blocks = Blocks(10, BlockShuffle(block=4, window=2))
    firsts = np.array([BlockOrder(blocks, epoch_key(0, epoch))(np.arange(10))[[0, 9]] for epoch in range(500)])
    for column in firsts.T:
        counts = np.bincount(column, minlength=10)
        # The block of 2 is in the first window as often as each block of 4, so its samples come first twice as often.
        expected = np.array([np.mean(counts[:8])] * 8 + [np.mean(counts[8:])] * 2)
        assert ((counts - expected) ** 2 / expected).sum() < 35  # chi-squared with 8 degrees of freedom: p < 0.0001


def test_blocks_join_short_natural_blocks_and_keep_long_ones():
    bounds = np.array([0, 10, 20, 30, 130, 135, 140])
    assert Blocks(140, BlockShuffle(block=25), bounds).bounds.tolist() == [0, 30, 130, 140]
    assert Blocks(140, BlockShuffle(block=1), bounds).bounds.tolist() == bounds.tolist()


def test_blocks_have_different_names_for_different_orders():
    names = [
        Blocks(100, BlockShuffle(8, 3)).name,
        Blocks(100, BlockShuffle(9, 3)).name,
        Blocks(100, BlockShuffle(8, 4)).name,
        Blocks(100, BlockShuffle(8, 3), np.array([0, 50, 100])).name,
        Blocks(100, BlockShuffle(8, 3), np.array([0, 51, 100])).name,
    ]
    assert len(set(names)) == len(names)
    assert names[0] == "blocks-8-3"
    assert Blocks(100, BlockShuffle(200, 3)).name == Blocks(100, BlockShuffle(100, 1)).name


# -- in a loader ------------------------------------------------------------------------------------------------------


class BlockDataset(MapDataset):
    def __init__(self, count: int, bounds: object = None) -> None:
        super().__init__(samples=count)
        self.bounds = bounds

    def blocks(self) -> object:
        return self.bounds


def make_loader(dataset: object, **options: object) -> gl.Loader:
    return cpu_loader(dataset, 8, **{"shuffle": "block", **options})


def load_indices(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


def test_loader_with_block_shuffle_reshuffles_each_epoch_and_resumes():
    options = BlockShuffle(block=4, window=3)
    with make_loader(BlockDataset(50), shuffle=options) as first_loader:
        epochs = [load_indices(first_loader), load_indices(first_loader)]
        assert epochs[0] != epochs[1]
        assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 2
        assert len({index // 4 for index in epochs[0][:12]}) in (3, 4)  # the short block may be among them
        first_loader.set_epoch(1)
        iterator = iter(first_loader)
        batches = [next(iterator), next(iterator)]
        state = first_loader.state_dict()
    assert state["order"] == "blocks-4-3"
    with make_loader(BlockDataset(50), shuffle=options) as second_loader:
        second_loader.load_state_dict(state)
        assert load_indices(batches) + load_indices(second_loader) == epochs[1]
    for shuffle in (BlockShuffle(block=4, window=2), True, "block"):
        with pytest.raises(ValueError, match="order was 'blocks-4-3' and is"):
            make_loader(BlockDataset(50), shuffle=shuffle).load_state_dict(state)


def test_loader_uses_the_blocks_of_a_dataset():
    with make_loader(BlockDataset(90, [0, 40, 45, 90]), shuffle=BlockShuffle(block=1, window=1)) as loader:
        indices = load_indices(loader)
    assert sorted(indices) == list(range(90))
    start = min(indices.index(index) for index in range(40, 45))  # a window is a block
    assert sorted(indices[start : start + 5]) == [40, 41, 42, 43, 44]
    assert start in (0, 40, 45, 85)


@pytest.mark.parametrize(
    ("bounds", "error", "text"),
    [
        ([0, 5], ValueError, "from 0; got 0, 5"),
        ([1, 9], ValueError, "from 0; got 1, 9"),
        ([0, 6, 4, 9], ValueError, "from 0; got 0, 6, 4, 9"),
        ([], TypeError, "as integers; got float64 of shape (0,)"),
        ([0.0, 9.0], TypeError, "as integers; got float64 of shape (2,)"),
    ],
)
def test_invalid_bounds_from_blocks_are_refused_by_the_loader(bounds, error, text):
    with pytest.raises(error, match=re.escape(text)) as caught:
        make_loader(BlockDataset(9, bounds))
    assert "BlockDataset.blocks() must return the first index of each block, then the length 9" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": [1.0] * 9}, "weights already draw samples at random; leave shuffle out"),
        ({"sampler": range(9)}, "shuffle=BlockShuffle(block=64, window=256) cannot be combined with a sampler"),
        ({"shuffle": BlockShuffle(2, 2), "sampler": [1]}, "shuffle=BlockShuffle(block=2, window=2) cannot be combined"),
    ],
)
def test_block_shuffle_with_weights_or_a_sampler_raises(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make_loader(BlockDataset(9), **options)


def test_unknown_string_for_shuffle_is_refused():
    types = "'block', a gpuload.BlockShuffle or a gpuload.Buckets"
    text = f"shuffle, unless it is {types}, must be True or False, got 'blocks' (str)"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        make_loader(BlockDataset(9), shuffle="blocks")
