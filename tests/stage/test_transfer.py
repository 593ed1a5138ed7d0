"""Transfers of slots to a device, on a stand-in for a GPU.

`tests/cuda` tests transfers to a GPU, and `tests/simulated` tests devices that run behind the host.
"""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from helpers.cpu_device import Device, Event
from torch.overrides import TorchFunctionMode

from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import Ring
from gpuload.stage import device as devices
from gpuload.stage.transfer import (
    MIN_GRAIN_BYTES,
    STEPS_BEHIND,
    CpuTransfer,
    CudaTransfer,
    make_transfer,
    round_up_bytes,
)
from gpuload.workers.batch import BatchPart


def test_make_transfer_for_the_cpu_returns_a_cpu_transfer():
    ring = Ring(1 << 16)
    assert type(make_transfer(ring, torch.device("cpu"))) is CpuTransfer
    ring.close()


def make_batch(ring, slot, used_bytes):
    batch = types.SimpleNamespace(parts=[])
    no_rows = np.empty(0, np.int64)
    batch.parts.append(
        BatchPart(batch, no_rows, no_rows, slot=slot, data=ring.view(slot)[:used_bytes], used_bytes=used_bytes)
    )
    batch.copied_parts = batch.parts
    return batch


@pytest.fixture
def make_cuda_transfer(monkeypatch):
    """A function that makes a ring, and a CudaTransfer from the ring to a stand-in for a GPU."""

    def make(*args, **kwargs):
        device = Device(*args, **kwargs)
        monkeypatch.setattr(devices, "Accelerator", lambda torch_device: device)
        ring = Ring(1 << 20)
        return ring, CudaTransfer(ring, torch.device("cuda", 0)), device

    return make


def test_slots_are_locked_once_and_unlocked_when_retired(make_cuda_transfer):
    ring, _, device = make_cuda_transfer()
    slots = [ring.acquire(100_000) for _ in range(3)]
    base = ring.bytes.ctypes.data
    assert device.locked == {base + slot.offset for slot in slots}
    for slot in slots:
        ring.release(slot)
    ring.release(ring.acquire(100_000))
    assert len(device.locked) == 3
    ring.close()
    assert device.locked == set()


def test_close_unlocks_slots_that_are_still_in_use(make_cuda_transfer):
    ring, transfer, device = make_cuda_transfer()
    slots = [ring.acquire(100_000) for _ in range(3)]
    ring.release(slots[1])
    transfer.close()
    assert device.locked == set()
    ring.close()


def test_refused_locks_warn_once(make_cuda_transfer):
    ring, transfer, device = make_cuda_transfer(allowed=1)
    ring.acquire(100_000)
    with pytest.warns(RuntimeWarning, match=r"refused to page-lock 131,072 bytes \(cudaHostRegister: error 2\)"):
        ring.acquire(100_000)
    ring.acquire(100_000)  # a second warning would be an error
    assert len(device.locked) == 1
    assert transfer.pinning_refused


def test_slot_whose_lock_is_refused_is_copied_synchronously_and_released(make_cuda_transfer):
    ring, transfer, _ = make_cuda_transfer(allowed=1)
    non_blocking = []

    class RecordCopies(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_:
                non_blocking.append(kwargs["non_blocking"])
            return function(*args, **(kwargs or {}))

    def load(slot, level):
        ring.view(slot)[:100] = level
        with RecordCopies():
            pixels, starts = transfer.load(make_batch(ring, slot, 100), lambda: ring.release(slot))
        return pixels[:100].tolist(), starts

    locked_slot = ring.acquire(100_000)
    assert load(locked_slot, 3) == ([3] * 100, [0])
    with pytest.warns(RuntimeWarning, match="slower and not asynchronous. Raise the limit of locked memory: ulimit -l"):
        pageable_slot = ring.acquire(100_000)
    assert load(pageable_slot, 4) == ([4] * 100, [0])
    assert non_blocking == [True, False]
    assert transfer.reclaim(False)
    assert ring.acquire(100_000) is pageable_slot
    assert ring.acquire(100_000) is locked_slot


def test_buffers_of_batches_of_similar_sizes_have_one_size(make_cuda_transfer):
    """torch's allocator can then reuse the memory of an earlier batch."""
    ring, transfer, _ = make_cuda_transfer()
    slot = ring.acquire(1 << 20)
    buffer_bytes, used_bytes = set(), np.random.default_rng(0).integers(930_000, 980_000, 50).tolist()
    for nbytes in used_bytes:
        pixels, _ = transfer.load(make_batch(ring, slot, nbytes), lambda: None)
        assert nbytes <= len(pixels) < nbytes + ALIGN
        buffer_bytes.add(pixels.untyped_storage().nbytes())
    assert len(buffer_bytes) == 1
    assert max(buffer_bytes) <= max(used_bytes) * 9 / 8


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4097, 10**6, 2**20, 2**20 + 1, 3 * 10**9])
def test_round_up_bytes_adds_at_most_an_eighth(nbytes):
    rounded = round_up_bytes(nbytes)
    assert nbytes <= rounded <= max(nbytes * 9 / 8, nbytes + MIN_GRAIN_BYTES)


def hand_batch_over(transfer, device, name):
    device.current = name
    transfer.hold_back()
    transfer.hand_over(transfer.finish(), [])
    device.current = "side"


def test_host_waits_for_a_consumer_that_is_far_behind(make_cuda_transfer):
    events_waited_for = []

    class LateEvent(Event):
        def synchronize(self):
            events_waited_for.append(self)
            self.passed = True

    _, transfer, device = make_cuda_transfer(event=lambda stream, number: LateEvent(passed=stream == "side"))
    for number in range(10):
        hand_batch_over(transfer, device, ("consumer", "another")[number % 2])
        events = device.events["consumer"] + device.events.get("another", [])
        assert sum(not event.passed for event in events) <= STEPS_BEHIND
    assert len(events_waited_for) == 10 - STEPS_BEHIND
    assert events_waited_for[0] is device.events["consumer"][0]
    assert events_waited_for[1] is device.events["another"][0]


def test_host_does_not_wait_for_a_consumer_that_keeps_up(make_cuda_transfer):
    class PassedEvent(Event):
        def synchronize(self):
            raise AssertionError("the host waited")

    _, transfer, device = make_cuda_transfer(event=lambda stream, number: PassedEvent())
    for _ in range(10):
        hand_batch_over(transfer, device, "consumer")


def test_copy_to_device_of_a_sparse_tensor_needs_no_page_locked_memory(make_cuda_transfer, monkeypatch):
    _, transfer, _ = make_cuda_transfer()

    def refuse(tensor):
        raise NotImplementedError("Could not run 'aten::_pin_memory'")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(transfer.copy_to_device(sparse).to_dense(), torch.eye(3))
    with pytest.raises(NotImplementedError):
        transfer.copy_to_device(torch.eye(3))


class FailingEvent(Event):
    """An event of a device on which a kernel failed."""

    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    synchronize = query


@pytest.mark.parametrize("wait", [False, True])
def test_reclaim_from_a_broken_device_releases_all_slots(make_cuda_transfer, wait):
    ring, transfer, _ = make_cuda_transfer(event=lambda stream, number: FailingEvent())
    slots = [ring.acquire(100_000) for _ in range(3)]
    for slot in slots:
        transfer.load(make_batch(ring, slot, 100), lambda slot=slot: ring.release(slot))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        transfer.reclaim(wait)
    assert {ring.acquire(100_000) for _ in range(3)} == set(slots)
    assert not transfer.reclaim(wait)


def test_close_releases_slots_whose_copies_were_not_reclaimed(make_cuda_transfer):
    ring, transfer, device = make_cuda_transfer(event=lambda stream, number: FailingEvent())
    device.synchronize = lambda stream: FailingEvent().query()
    released = []
    transfer.load(make_batch(ring, ring.acquire(100_000), 100), lambda: released.append(True))
    transfer.close()
    assert released == [True]
    assert device.locked == set()
