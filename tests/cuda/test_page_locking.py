"""Slots are page-locked when they are created; if the driver refuses, batches are copied more slowly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.labelled_images import Pictures

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import device as devices

pytestmark = pytest.mark.cuda


PIXELS_PER_IMAGE, SMALL_RING_BYTES = (10, 6 << 20) if lacking.IS_FAKE else (30, 24 << 20)


class GrowingImages:
    """A dataset of images, each `PIXELS_PER_IMAGE` higher and wider than the one before."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray:
        side = 40 + PIXELS_PER_IMAGE * index
        return np.full((side, side, 3), index, np.uint8)


def load_levels() -> list[list[int]]:
    options: dict[str, Any] = {"transforms": [T.Resize((8, 8))], "num_workers": 1, "device": "cuda", "backend": "torch"}
    with gl.Loader(GrowingImages(), 4, **options) as loader:
        return [batch[:, 0, 0, 0].tolist() for batch in loader]


IN_ORDER = [list(range(start, start + 4)) for start in range(0, 40, 4)]


def test_slots_of_the_ring_are_page_locked():
    with gl.Loader(Pictures(40), 8, transforms=[T.RandomResizedCrop(16)], num_workers=1, device="cuda") as loader:
        list(loader)
        ring = loader._session.ring
        slot = ring.acquire(1)
        assert torch.from_numpy(ring.view(slot)).is_pinned()
        ring.release(slot)


@pytest.mark.parametrize("ring_bytes", [2 << 30, SMALL_RING_BYTES], ids=["roomy", "retiring"])
def test_slots_that_grow_are_locked_again(ring_bytes):
    """Small slots are retired when the ring is full; their pages must be unlocked before they are freed."""
    options = {"num_workers": 1, "device": "cuda", "backend": "torch", "ring_bytes": ring_bytes, "chunk_size": 2}
    with gl.Loader(GrowingImages(), 4, transforms=[T.Resize((8, 8))], **options) as loader:
        assert [batch[:, 0, 0, 0].tolist() for batch in loader] == IN_ORDER
        loader.set_epoch(0)
        assert [batch[:, 0, 0, 0].tolist() for batch in loader] == IN_ORDER
        ring = loader._session.ring
        for slot in [ring.acquire(1 << 20), ring.acquire(1 << 20)]:
            assert torch.from_numpy(ring.view(slot)).is_pinned()


class RefusingRuntime:
    """The real runtime, from which each lock after `allowed` ones requests more memory than it can lock."""

    def __init__(self, allowed: int):
        self.allowed, self.refused = allowed, 0
        self.real = torch.cuda.cudart()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        if self.allowed:
            self.allowed -= 1
            return self.real.cudaHostRegister(address, nbytes, flags)
        self.refused += 1
        return self.real.cudaHostRegister(address, 1 << 50, flags)

    def cudaHostUnregister(self, address: int) -> Any:
        return self.real.cudaHostUnregister(address)


@pytest.mark.parametrize("allowed", [0, 2])
def test_refused_page_lock_warns_and_batches_are_complete(monkeypatch, allowed):
    runtime = RefusingRuntime(allowed)
    monkeypatch.setattr(devices, "_runtime", lambda: runtime)
    with pytest.warns(RuntimeWarning, match="refused to page-lock"):
        assert load_levels() == IN_ORDER
    assert runtime.refused == 1


def test_lock_clears_the_last_error_of_the_runtime_after_a_refusal(monkeypatch):
    device = devices.Accelerator(torch.device("cuda", 0))
    memory = np.zeros(1 << 16, np.uint8)
    runtime = RefusingRuntime(0)
    monkeypatch.setattr(devices, "_runtime", lambda: runtime)
    assert device.lock(memory.ctypes.data, memory.nbytes) > 0
    for _ in range(2):
        torch.ones(3, device="cuda").add_(1)  # a launch, after which torch checks the last error
    torch.cuda.synchronize()
