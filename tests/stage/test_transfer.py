"""Slots → device, on one that is no GPU. What only a GPU shows is in `tests/cuda`, and what a late one does in
`tests/simulated`."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from helpers.cpu_device import Device, Event
from torch.overrides import TorchFunctionMode

from gpuload.ring.ring import Ring
from gpuload.stage import device as devices
from gpuload.stage import transfer
from gpuload.stage.transfer import STEPS_BEHIND, CpuTransfer, CudaTransfer, make_transfer
from gpuload.workers.batch import BatchPart


def test_the_device_decides_the_transfer():
    ring = Ring(1 << 16)
    assert type(make_transfer(ring, torch.device("cpu"))) is CpuTransfer
    ring.close()


def batch_of(ring, slot, used_bytes):
    batch = types.SimpleNamespace(parts=[])
    nothing = np.empty(0, np.int64)
    batch.parts.append(
        BatchPart(batch, nothing, nothing, slot=slot, data=ring.view(slot)[:used_bytes], used_bytes=used_bytes)
    )
    batch.copied_parts = batch.parts
    return batch


@pytest.fixture
def locking(monkeypatch):
    """A CudaTransfer over a real ring, for a device that is no GPU."""

    def make(*args, **kwargs):
        device = Device(*args, **kwargs)
        monkeypatch.setattr(devices, "Accelerator", lambda asked: device)
        ring = Ring(1 << 20)
        return ring, CudaTransfer(ring, torch.device("cuda", 0)), device

    return make


def test_slots_are_locked_once_and_unlocked_when_they_are_retired(locking):
    ring, _, runtime = locking()
    slots = [ring.acquire(100_000) for _ in range(3)]
    base = ring.bytes.ctypes.data
    assert runtime.locked == {base + slot.offset for slot in slots}
    for slot in slots:
        ring.release(slot)
    ring.release(ring.acquire(100_000))
    assert len(runtime.locked) == 3
    ring.close()
    assert runtime.locked == set()


def test_closing_unlocks_slots_that_are_still_in_use_before_the_ring_goes(locking):
    ring, made, runtime = locking()
    slots = [ring.acquire(100_000) for _ in range(3)]
    ring.release(slots[1])
    made.close()
    assert runtime.locked == set()
    ring.close()


def test_a_refused_lock_is_one_warning(locking):
    ring, made, runtime = locking(allowed=1)
    ring.acquire(100_000)
    with pytest.warns(RuntimeWarning, match=r"refused to page-lock 131,072 bytes \(cudaHostRegister: error 2\)"):
        ring.acquire(100_000)
    ring.acquire(100_000)  # a second warning would be an error
    assert len(runtime.locked) == 1
    assert made.pinning_refused


def test_after_a_refused_lock_slots_are_copied_as_pageable_memory_and_still_given_back(locking):
    ring, made, _ = locking(allowed=1)
    asynchronous = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_:
                asynchronous.append(kwargs["non_blocking"])
            return function(*args, **(kwargs or {}))

    def load(slot, level):
        ring.view(slot)[:100] = level
        with Watched():
            pixels, starts = made.load(batch_of(ring, slot, 100), lambda: ring.release(slot))
        return pixels[:100].tolist(), starts

    first = ring.acquire(100_000)
    assert load(first, 3) == ([3] * 100, [0])
    with pytest.warns(RuntimeWarning, match="slower and not asynchronous. Raise the limit of locked memory: ulimit -l"):
        second = ring.acquire(100_000)
    assert load(second, 4) == ([4] * 100, [0])
    assert asynchronous == [True, False]
    assert made.reclaim(False)
    assert ring.acquire(100_000) is second
    assert ring.acquire(100_000) is first


def test_buffers_of_batches_that_differ_little_are_of_one_size(locking):
    """So that torch's allocator has the memory of an earlier one for each."""
    ring, made, _ = locking()
    slot = ring.acquire(1 << 20)
    sizes, used = set(), np.random.default_rng(0).integers(930_000, 980_000, 50).tolist()
    for nbytes in used:
        pixels, _ = made.load(batch_of(ring, slot, nbytes), lambda: None)
        assert nbytes <= len(pixels) < nbytes + 64
        sizes.add(pixels.untyped_storage().nbytes())
    assert len(sizes) == 1
    assert max(sizes) <= max(used) * 9 / 8


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4097, 10**6, 2**20, 2**20 + 1, 3 * 10**9])
def test_a_buffer_is_at_most_an_eighth_too_large(nbytes):
    rounded = transfer.round_up_bytes(nbytes)
    assert nbytes <= rounded <= max(nbytes * 9 / 8, nbytes + transfer.MIN_GRAIN_BYTES)


def given(made, device, name):
    device.current = name
    made.hold_back()
    made.hand_over(made.finish(), [])
    device.current = "side"


def test_the_host_waits_for_a_consumer_that_is_far_behind(locking):
    waited = []

    class Late(Event):
        def synchronize(self):
            waited.append(self)
            self.passed = True

    _, made, device = locking(event=lambda stream, number: Late(passed=stream == "side"))
    for number in range(10):
        given(made, device, ("consumer", "another")[number % 2])
        issued = device.events["consumer"] + device.events.get("another", [])
        assert sum(not event.passed for event in issued) <= STEPS_BEHIND
    assert len(waited) == 10 - STEPS_BEHIND
    assert waited[0] is device.events["consumer"][0]
    assert waited[1] is device.events["another"][0]


def test_the_host_does_not_wait_for_a_consumer_that_keeps_up(locking):
    class Done(Event):
        def synchronize(self):
            raise AssertionError("the host waited")

    _, made, device = locking(event=lambda stream, number: Done())
    for _ in range(10):
        given(made, device, "consumer")


def test_what_cannot_be_page_locked_is_brought_to_the_device_all_the_same(locking, monkeypatch):
    _, made, _ = locking()

    def refused(tensor):
        raise NotImplementedError("Could not run 'aten::_pin_memory'")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(made.copy_to_device(sparse).to_dense(), torch.eye(3))
    with pytest.raises(NotImplementedError):
        made.copy_to_device(torch.eye(3))


class Broken(Event):
    """An event of a device on which a kernel failed."""

    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    synchronize = query


@pytest.mark.parametrize("wait", [False, True])
def test_all_slots_come_back_from_a_device_that_broke(locking, wait):
    ring, made, _ = locking(event=lambda stream, number: Broken())
    slots = [ring.acquire(100_000) for _ in range(3)]
    for slot in slots:
        made.load(batch_of(ring, slot, 100), lambda slot=slot: ring.release(slot))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.reclaim(wait)
    assert {ring.acquire(100_000) for _ in range(3)} == set(slots)
    assert not made.reclaim(wait)


def test_closing_gives_slots_back_whose_copies_were_not_asked_about(locking):
    ring, made, device = locking(event=lambda stream, number: Broken())
    device.synchronize = lambda stream: Broken().query()
    back = []
    made.load(batch_of(ring, ring.acquire(100_000), 100), lambda: back.append(True))
    made.close()
    assert back == [True]
    assert device.locked == set()
