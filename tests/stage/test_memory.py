"""Memory of batches comes back when the last tensor that looks at it is gone, and not before."""

from __future__ import annotations

import gc
import re

import pytest
import torch

from gpuload.stage.memory import OutputPool

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
    pool = OutputPool(max_free=2)
    tensors = [pool.empty(SHAPE, torch.float32) for _ in range(5)]
    one = -(-tensors[0].nbytes // (2 << 20)) * (2 << 20)
    tensors.clear()
    gc.collect()
    assert free_bytes(pool) == 2 * one


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


def test_a_negative_number_of_mappings_is_refused():
    with pytest.raises(ValueError, match=re.escape("OutputPool(max_free=…) must be at least 0, got -1")):
        OutputPool(max_free=-1)


def test_none_may_be_kept():
    pool = OutputPool(max_free=0)
    tensor = pool.empty(SHAPE, torch.float32)
    del tensor
    gc.collect()
    assert free_bytes(pool) == 0
