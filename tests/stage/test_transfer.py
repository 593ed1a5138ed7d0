"""Slots → device. The tests marked `cuda` need a GPU; the others show what a refused page-lock does, without one."""

from __future__ import annotations

import contextlib
import types

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import gpuload as gl
from gpuload import transforms as T
from gpuload.ring.ring import Ring
from gpuload.stage import accelerator
from gpuload.stage.transfer import CpuTransfer, CudaTransfer, make_transfer

RECIPE = (T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1))
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_the_device_decides_the_transfer():
    ring = Ring(1 << 16)
    assert type(make_transfer(ring, torch.device("cpu"))) is CpuTransfer
    with pytest.raises(ValueError, match="device must be 'cpu' or one of 'cuda', 'xpu', got 'meta'"):
        make_transfer(ring, torch.device("meta"))
    ring.close()


class Event:
    """Passes when it is told to, or when it is waited for."""

    def __init__(self, passed: bool = True):
        self.passed = passed

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


class Device:
    """A device that is this CPU: what is issued on a stream is done at once. It locks `allowed` ranges and then
    refuses; an event is made by `event`, for a stream and its number."""

    def __init__(self, allowed: int = 100, event=lambda stream, number: Event()):
        self.device = torch.device("cpu")
        self.allowed = allowed
        self.locked: set[int] = set()
        self.kept: list[tuple[torch.Tensor, str]] = []
        self.current = "consumer"
        self.events: dict[str, list[Event]] = {"side": [], "consumer": []}
        self._event = event

    def new_stream(self, *, urgent=False):
        assert urgent
        return "side"

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, stream):
        made = self.events.setdefault(stream, [])
        made.append(self._event(stream, len(made)))
        return made[-1]

    def wait(self, stream, event):
        pass

    def keep(self, tensor, stream):
        self.kept.append((tensor, stream))

    def synchronize(self, stream):
        pass

    def lock(self, address, nbytes):
        if len(self.locked) >= self.allowed:
            return 2
        self.locked.add(address)
        return 0

    def unlock(self, address):
        self.locked.remove(address)


@pytest.fixture
def locking(monkeypatch):
    """A CudaTransfer over a real ring, for a device that is no GPU."""

    def make(*args, **kwargs):
        device = Device(*args, **kwargs)
        monkeypatch.setattr(accelerator, "accelerator", lambda asked: device)
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
    assert made._refused


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
        part = types.SimpleNamespace(slot=slot, data=ring.view(slot)[:100], used_bytes=100)
        with Watched():
            pixels, starts = made.load(types.SimpleNamespace(parts=[part]), lambda: ring.release(slot))
        return pixels[: part.used_bytes].tolist(), starts

    first = ring.acquire(100_000)
    assert load(first, 3) == ([3] * 100, [0])
    with pytest.warns(RuntimeWarning, match="batches are copied from pageable memory, which is slower"):
        second = ring.acquire(100_000)
    assert load(second, 4) == ([4] * 100, [0])
    assert asynchronous == [True, False]
    assert made.reclaim(False)
    assert ring.acquire(100_000) is second
    assert ring.acquire(100_000) is first


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_cuda_batches_equal_cpu_batches_within_two_levels(jpeg_folder):
    def run(device):
        options = {"batch_size": 16, "shuffle": True, "transforms": RECIPE, "num_workers": 2, "seed": 1}
        with gl.Loader(gl.ImageFolder(jpeg_folder), device=device, **options) as loader:
            return [(images.cpu(), labels.cpu(), images.device.type) for images, labels in loader]

    for (images, labels, device), (images_, labels_, _) in zip(run("cuda"), run("cpu"), strict=True):
        assert device == "cuda"
        assert torch.equal(labels, labels_)
        assert (images.int() - images_.int()).abs().max() <= 2


@pytest.mark.cuda
def test_cuda_batches_are_equal_to_the_last_bit_with_any_workers_and_chunks(jpeg_folder):
    def run(workers, chunk):
        options = {"batch_size": 20, "shuffle": True, "transforms": [*RECIPE, NORMALIZE]}
        with gl.Loader(
            gl.ImageFolder(jpeg_folder), num_workers=workers, chunk_size=chunk, device="cuda", **options
        ) as loader:
            return [images.cpu() for images, _ in loader]

    expected = run(0, 16)
    for workers, chunk in ((1, 5), (4, 1), (2, 16)):
        assert all(torch.equal(a, b) for a, b in zip(run(workers, chunk), expected, strict=True))


@pytest.mark.cuda
def test_everything_of_a_batch_is_on_the_device(jpeg_folder):
    with gl.Loader(
        gl.ImageFolder(jpeg_folder), 8, transforms=RECIPE, num_workers=1, device="cuda", info=True
    ) as loader:
        (images, labels), info = next(iter(loader))
    assert {t.device.type for t in (images, labels, info.positions, info.indices, info.valid)} == {"cuda"}


@pytest.mark.cuda
def test_slots_are_page_locked(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 8, transforms=RECIPE, num_workers=1, device="cuda") as loader:
        list(loader)
        ring = loader._session.ring
        slot = ring.acquire(1)
        assert torch.from_numpy(ring.view(slot)).is_pinned()
        ring.release(slot)


@pytest.mark.cuda
def test_a_batch_is_safe_while_the_consumers_stream_still_reads_it(jpeg_folder):
    """Each batch is read late, behind a long sleep on the consumer's stream, while the loader reuses memory."""
    options = {"batch_size": 8, "transforms": [*RECIPE, NORMALIZE], "num_workers": 2, "device": "cuda"}
    with gl.Loader(gl.ImageFolder(jpeg_folder), **options) as loader:
        expected = [float(images.double().sum()) for images, _ in loader]
        loader.set_epoch(0)
        stream = torch.cuda.Stream()
        sums = []
        with torch.cuda.stream(stream):
            for images, _ in loader:
                torch.cuda._sleep(20_000_000)
                sums.append(images.double().sum())
                del images
        stream.synchronize()
    np.testing.assert_array_equal([float(value) for value in sums], expected)


@pytest.mark.cuda
def test_the_next_batch_is_issued_while_the_consumer_has_the_current_one(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 4, transforms=RECIPE, num_workers=2, device="cuda") as loader:
        seen = 0
        for _ in loader:
            torch.cuda._sleep(20_000_000)  # a training step, during which the workers run ahead
            torch.cuda.current_stream().synchronize()
            seen = max(seen, len(loader._session.launched))
        assert seen == 1


@pytest.mark.cuda
def test_ten_broken_off_epochs_leave_no_memory_on_the_device(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 4, transforms=RECIPE, num_workers=2, device="cuda") as loader:
        used = []
        for _ in range(10):
            for step, _ in enumerate(loader):
                if step == 5:
                    break
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
        assert used[-1] <= used[0] + (1 << 20)
