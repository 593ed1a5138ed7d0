"""Batches of plain arrays that are a slot of the ring: right for as long as the user keeps them, then used again."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload.ring.ring import LENT_SHARE, Ring

ROW = 1 << 18  # four samples are enough to be lent


class Rows:
    """Sample i is `ROW` times i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        return np.full(ROW, index % 251, np.uint8), index


def loader(length=64, **options):
    return gl.Loader(Rows(length), 8, **{"num_workers": 0, "device": "cpu", **options})


def lent(loader_) -> int:
    """How many slots the user has."""
    ring = loader_._session.ring
    ring.collect()
    return len(ring._lent)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_stays_what_it_is_and_its_slot_comes_back(workers):
    with loader(num_workers=workers) as loader_:
        for _ in range(2):
            kept = []
            for number, (rows, indices) in enumerate(loader_):
                assert rows.shape == (8, ROW)
                assert rows.dtype == torch.uint8
                assert (rows == indices[:, None] % 251).all()
                if number % 3 == 0:
                    kept.append((rows[2:5, :100], indices[2:5]))  # a view keeps the memory too
        assert lent(loader_) >= 2
        for rows, indices in kept:
            assert (rows == indices[:, None] % 251).all()
        del rows, indices, kept
        gc.collect()
        assert lent(loader_) == 0


def test_a_batch_is_not_copied():
    with loader() as loader_:
        batches = iter(loader_)
        next(batches)
        rows, _ = next(batches)  # from the first one on it is known what the samples are
        memory = loader_._session.ring.bytes
        first = memory.__array_interface__["data"][0]
        assert first <= rows.data_ptr() < first + len(memory)


def test_all_batches_can_be_kept_beyond_what_is_lent():
    ring_bytes = 16 * 8 * ROW
    with loader(30 * 8, ring_bytes=ring_bytes) as loader_:
        kept = list(loader_)
        assert 1 <= lent(loader_) <= 16 // LENT_SHARE
        for rows, indices in kept:
            assert (rows == indices[:, None] % 251).all()


def test_a_batch_outlives_its_loader():
    with loader() as loader_:
        kept = list(loader_)
    del loader_
    gc.collect()
    for rows, indices in kept:
        assert (rows == indices[:, None] % 251).all()
        rows.zero_()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_keeps_what_it_was_forked_with():
    with loader(40 * 8) as loader_:
        batches = iter(loader_)
        next(batches)
        rows, indices = next(batches)
        reads, writes = os.pipe()
        answers, answer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)  # until the parent has let go of the batch and taken many more
            whole = (rows.numpy() == indices.numpy()[:, None] % 251).all()  # torch's threads do not survive a fork
            os.write(answer, b"1" if whole else b"0")
            os._exit(0)
        del rows, indices
        right = all(bool((rows == indices[:, None] % 251).all()) for rows, indices in batches)
        os.close(writes)
        assert right
        assert os.read(answers, 1) == b"1"
        assert os.waitpid(child, 0)[1] == 0
        for fd in (reads, answers, answer):
            os.close(fd)


def test_a_slot_comes_back_when_the_last_of_its_arrays_is_gone():
    ring = Ring(1 << 20)
    slot = ring.acquire(1 << 16)
    assert slot is not None
    first, second = ring.view(slot)[:100], ring.view(slot)[100:200]
    assert ring.lend(slot, [first, second])
    del first
    assert not ring.collect()
    del second
    assert ring.collect()
    assert ring.acquire(1 << 16) is slot
    ring.close()


def test_no_more_than_a_part_of_the_ring_is_lent():
    ring = Ring(1 << 20)
    slot = ring.acquire((1 << 20) // LENT_SHARE)
    other = ring.acquire(1 << 16)
    assert slot is not None
    assert other is not None
    array, another = ring.view(slot)[:1], ring.view(other)[:1]
    assert ring.lend(slot, [array])
    assert not ring.lend(other, [another])
    ring.close()
