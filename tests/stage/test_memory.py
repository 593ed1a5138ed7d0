"""Memory of batches comes back when the last tensor that looks at it is gone, and not before."""

from __future__ import annotations

import gc

import pytest
import torch

from gpuload.stage.memory import MAX_FREE, OutputPool

pytestmark = pytest.mark.slow

SHAPE = (4, 3, 300, 300)


def free_bytes(pool: OutputPool) -> int:
    """How much memory waits to be used again."""
    return sum(map(len, pool._free))


def test_a_tensor_is_an_ordinary_one():
    tensor = OutputPool().empty(SHAPE, torch.float16)
    assert tensor.shape == SHAPE
    assert tensor.dtype == torch.float16
    assert tensor.is_contiguous()
    assert tensor.fill_(2).sum(dtype=torch.float64) == 2 * tensor.numel()


def test_memory_is_used_again():
    pool = OutputPool()
    tensor = pool.empty(SHAPE, torch.float32)
    place = tensor.data_ptr()
    assert free_bytes(pool) == 0
    del tensor
    gc.collect()
    assert free_bytes(pool) >= 4 * 3 * 300 * 300 * 4
    again = pool.empty((5, 3, 300, 290), torch.float32)
    assert again.data_ptr() == place
    assert free_bytes(pool) == 0


def test_a_view_keeps_it():
    pool = OutputPool()
    row = pool.empty(SHAPE, torch.float32)[2]
    row.fill_(7)
    gc.collect()
    other = pool.empty(SHAPE, torch.float32)
    other.fill_(1)
    assert (row == 7).all()
    array = row.numpy()
    del row
    gc.collect()
    assert free_bytes(pool) == 0
    assert (array == 7).all()


def test_what_is_kept_is_bounded():
    pool = OutputPool()
    tensors = [pool.empty(SHAPE, torch.float32) for _ in range(MAX_FREE + 2)]
    one = -(-tensors[0].nbytes // (2 << 20)) * (2 << 20)
    tensors.clear()
    gc.collect()
    assert free_bytes(pool) == MAX_FREE * one


def test_much_larger_memory_is_not_taken_for_a_small_tensor():
    pool = OutputPool()
    large = pool.empty((64, 3, 300, 300), torch.float32)
    place = large.data_ptr()
    del large
    gc.collect()
    assert pool.empty(SHAPE, torch.float32).data_ptr() != place


def test_the_pool_may_go_first():
    pool = OutputPool()
    tensor = pool.empty(SHAPE, torch.float32)
    del pool
    gc.collect()
    assert (tensor.fill_(3) == 3).all()
