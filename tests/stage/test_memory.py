"""`OutputPool` reuses the memory of a batch only after the batch's last tensor was collected."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from gpuload.stage.memory import MAX_FREE, OutputPool

pytestmark = pytest.mark.slow

SHAPE = (4, 3, 300, 300)


def free_bytes(pool: OutputPool) -> int:
    return sum(map(len, pool._free))


def test_empty_returns_a_contiguous_tensor_of_the_requested_shape_and_dtype():
    tensor = OutputPool().empty(SHAPE, torch.float16)
    assert tensor.shape == SHAPE
    assert tensor.dtype == torch.float16
    assert tensor.is_contiguous()
    assert tensor.fill_(2).sum(dtype=torch.float64) == 2 * tensor.numel()


def test_empty_reuses_the_memory_of_a_collected_tensor():
    pool = OutputPool()
    tensor = pool.empty(SHAPE, torch.float32)
    address = tensor.data_ptr()
    assert free_bytes(pool) == 0
    del tensor
    gc.collect()
    assert free_bytes(pool) >= 4 * 3 * 300 * 300 * 4
    reused = pool.empty((5, 3, 300, 290), torch.float32)
    assert reused.data_ptr() == address
    assert free_bytes(pool) == 0


def test_empty_does_not_reuse_memory_that_a_view_or_array_uses():
    pool = OutputPool()
    row = pool.empty(SHAPE, torch.float32)[2]
    row.fill_(7)
    gc.collect()
    next_tensor = pool.empty(SHAPE, torch.float32)
    next_tensor.fill_(1)
    assert (row == 7).all()
    array = row.numpy()
    del row
    gc.collect()
    assert free_bytes(pool) == 0
    assert (array == 7).all()


def test_pool_holds_at_most_max_free_blocks():
    pool = OutputPool()
    tensors = [pool.empty(SHAPE, torch.float32) for _ in range(MAX_FREE + 2)]
    block_bytes = -(-tensors[0].nbytes // (2 << 20)) * (2 << 20)  # rounded up to a multiple of 2 MiB
    tensors.clear()
    gc.collect()
    assert free_bytes(pool) == MAX_FREE * block_bytes


def test_empty_does_not_use_much_larger_memory_for_a_small_tensor():
    pool = OutputPool()
    large = pool.empty((64, 3, 300, 300), torch.float32)
    address = large.data_ptr()
    del large
    gc.collect()
    assert pool.empty(SHAPE, torch.float32).data_ptr() != address


def test_tensor_outlives_its_pool():
    pool = OutputPool()
    tensor = pool.empty(SHAPE, torch.float32)
    del pool
    gc.collect()
    assert (tensor.fill_(3) == 3).all()


def test_sizes_that_change_from_batch_to_batch_reuse_memory(monkeypatch):
    new_blocks = []
    reserve = OutputPool._reserve

    def record_new_blocks(pool, nbytes):
        free_count = len(pool._free)
        block = reserve(pool, nbytes)
        new_blocks.extend([block] * (len(pool._free) == free_count))
        return block

    monkeypatch.setattr(OutputPool, "_reserve", record_new_blocks)
    pool, batches = OutputPool(), []
    for side in np.random.default_rng(0).choice(np.arange(320, 641, 32), 300).tolist():
        batches = [*batches[-1:], pool.empty((2, 3, side, side), torch.float32)]
        assert len(pool._free) <= MAX_FREE
    assert len(new_blocks) < 60, "more than one in five of the 300 batches got new memory"
