"""Ten loaders made slow in one way each: `stats()` names it.

What bounds is far slower than all else by its making (it sleeps, or is a hundred times as much work), so that shares
are right on any machine, whatever else it does.
"""

from __future__ import annotations

import io
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import lacking
import numpy as np
import pytest
import torch
from PIL import Image
from simulated.machine import Event
from simulated.machine import Machine as SimulatedMachine
from simulated.runtime import simulated

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader.advice import Machine


class Sleeping:
    """Arrays, each after some seconds."""

    def __init__(self, seconds: float, size: int = 100) -> None:
        self.seconds, self.size = seconds, size

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(self.seconds)
        return np.zeros((self.size, self.size, 3), np.uint8), index


class Photos:
    """One JPEG, again and again."""

    def __init__(self, width: int, height: int, quality: int = 95) -> None:
        small = np.random.default_rng(0).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "JPEG", quality=quality)
        self.data = file.getvalue()

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[gl.Encoded, int]:
        return gl.Encoded(self.data), index


class SlowModule(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return images


@pytest.fixture
def many_cpus(monkeypatch):
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine(cpus=16)))


def measured(dataset: Any, step: Callable[[], object] = lambda: None, batches: int = 6, **given: Any) -> gl.Stats:
    """What some batches take, from the third on. Workers have work for as long as this process does not run, and a slow
    step begins with batches that are ready."""
    options = {"batch_size": 4, "num_workers": 1, "device": "cpu", "prefetch_factor": 8} | given
    with gl.Loader(dataset, **options) as loader:
        iterator, before = iter(loader), None
        loader._session.feed.await_engine()  # all workers are there
        for number in range(2 + batches):
            if number == 2:
                before = loader.stats()
            next(iterator)
            step()
        found = loader.stats(since=before)
        assert found.batches == batches
        return found


def check(found: gl.Stats, *said: str) -> None:
    assert [words for words in said if words not in found.advice] == [], f"{found}\n{found.as_dict()}"


@pytest.mark.processes
def test_one_worker(many_cpus):
    found = measured(Photos(1600, 1200), transforms=[T.CenterCrop(64)])
    check(found, "decode bounds: ", " of 1 worker busy", "; with ", " workers it would")
    assert found.waiting > 0.5


@pytest.mark.processes
def test_a_slow_disk(many_cpus):
    found = measured(Sleeping(0.01), num_workers=2)
    check(found, "reading bounds (a sample takes 1", " of 2 workers busy")
    assert found.part("read").seconds > 0.5 * sum(part.seconds for part in found.parts if part.where == "workers")


@pytest.mark.processes
def test_huge_images(many_cpus):
    found = measured(Photos(4000, 3000), batches=3, batch_size=2, transforms=[T.CenterCrop(2000)])
    check(found, "the images are large (4.0 megapixels decoded of each)", "--short-side 512")


@pytest.mark.processes
def test_tiny_images(many_cpus):
    # Few batches are ready when it is measured, however late this process gets to run, and many are taken.
    found = measured(Photos(32, 32), batch_size=256, batches=20, prefetch_factor=1)
    check(found, "tiny images bound: 3,072 bytes of pixels each", "gl.ArrayFile")


@pytest.mark.processes
def test_a_slow_step():
    found = measured(Sleeping(0.0, 32), step=lambda: time.sleep(0.2))
    check(found, "the training step bounds", "loading keeps up")
    assert found.waiting < 0.05


@pytest.mark.processes
def test_a_slow_stage():
    found = measured(Sleeping(0.0, 32), transforms=[T.CenterCrop(16), SlowModule()])
    check(found, "the stage bounds: it takes ")
    assert found.part("stage").seconds >= 6 * 0.02


@pytest.mark.processes
def test_a_ring_too_small(many_cpus):
    found = measured(Sleeping(0.01), num_workers=2, chunk_size=1, ring_bytes=1 << 16)
    check(found, "the ring bounds: ring_bytes=65,536 is too small", "try ring_bytes=")
    assert found.ring_spilled >= 3 * 6  # of the four chunks of a batch, one stays


@pytest.mark.processes
def test_one_core():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        found = measured(Photos(1600, 1200), transforms=[T.CenterCrop(64)])
    finally:
        os.sched_setaffinity(0, allowed)
    assert found.cpus == 1
    check(found, "decode bounds: ", "more workers would not help, as this process ", " 1 CPU")


def lose_nvimagecodec(worker: int) -> None:
    sys.modules["nvidia.nvimgcodec"] = None  # pyright: ignore[reportArgumentType]


@pytest.mark.processes
def test_without_nvimagecodec(many_cpus):
    photos = Photos(1600, 1200)
    found = measured(photos, transforms=[T.CenterCrop(64)], worker_init_fn=lose_nvimagecodec)
    check(found, "nvImageCodec cannot be used here, so ", " JPEGs were decoded whole", "gpuload doctor")
    assert found.decoders.keys() == {"simplejpeg"}
    assert found.decoded_whole == found.decoders["simplejpeg"]


@lacking.mark("no GPU", torch.cuda.is_available())  # it locks what it is asked to
def test_little_memory_may_be_locked(monkeypatch):
    """On the simulated device, whose driver refuses, and which has much to do: a copy from memory that is not
    page-locked waits for it."""

    def long_wait(machine: SimulatedMachine, what: str, event: Event) -> None:
        time.sleep(0.1 * (what not in ("event", "stream")))
        wait(machine, what, event)

    wait = SimulatedMachine.wait
    monkeypatch.setattr(SimulatedMachine, "wait", long_wait)
    before, pictures = resource.getrlimit(resource.RLIMIT_MEMLOCK), [np.zeros((64, 64, 3), np.uint8)] * 64
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        with simulated("lazy", most_locks=0), pytest.warns(RuntimeWarning, match="refused to page-lock"):
            found = measured(pictures, num_workers=0, prefetch_factor=2, device="cuda", backend="torch")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert (found.pinned_bytes, found.pinning_refused) == (0, True)
    check(found, "copies bound: the ring is not page-locked (this process may lock 64 KiB of memory)", "ulimit -l")
