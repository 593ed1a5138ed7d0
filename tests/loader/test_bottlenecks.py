"""Loaders made slow in one way each: `stats()` measures it and names it; all sentences are in test_advice.py.

What bounds is far slower than all else by its making (it sleeps, or is a hundred times as much work), so that shares
are right on any machine, whatever else it does.
"""

from __future__ import annotations

import io
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from PIL import Image
from simulated.machine import Event, Machine
from simulated.runtime import simulated

import gpuload as gl
from gpuload import transforms as T

MORE_WORKERS = r"(\d+) workers?(?: and prefetch_factor=\d+)? (?:would give|the loop would)"


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
    monkeypatch.setattr("gpuload.loader.meter.usable_cpus", lambda: 16)


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
    check(found, "decode is the bottleneck: ", " of 1 worker is busy")
    assert re.search(r"; (with )?\d+ workers ", found.advice)
    assert found.waiting > 0.5


@pytest.mark.processes
def test_a_slow_disk(many_cpus):
    found = measured(Sleeping(0.01), num_workers=2)
    check(found, "reading is the bottleneck (a sample takes ", " of 2 workers are busy")
    assert found.part("read").seconds > 0.5 * sum(part.seconds for part in found.parts if part.where == "workers")


@pytest.mark.processes
def test_a_slow_step():
    found = measured(Sleeping(0.0, 32), step=lambda: time.sleep(0.2))
    check(
        found,
        "the training step is the bottleneck: the loop waits ",
        "a faster loader could raise throughput by at most ",
    )
    assert found.waiting < 0.05


@pytest.mark.processes
def test_a_slow_stage():
    found = measured(Sleeping(0.0, 32), transforms=[T.CenterCrop(16), SlowModule()])
    check(found, "the stage is the bottleneck: it takes ")
    assert found.part("stage").seconds >= 6 * 0.02


@pytest.mark.processes
def test_a_ring_too_small(many_cpus):
    found = measured(Sleeping(0.01), num_workers=2, chunk_size=1, ring_bytes=1 << 16)
    check(found, "the ring is the bottleneck: ring_bytes=65,536 is too small", "try ring_bytes=")
    assert found.ring.spilled >= 3 * 6  # of the four chunks of a batch, one stays


def lose_nvimagecodec(worker: int) -> None:
    sys.modules["nvidia.nvimgcodec"] = None  # pyright: ignore[reportArgumentType]


@pytest.mark.processes
def test_without_nvimagecodec(many_cpus):
    photos = Photos(1600, 1200)
    found = measured(photos, transforms=[T.CenterCrop(64)], worker_init_fn=lose_nvimagecodec)
    check(found, "nvImageCodec cannot be used here, so ", " JPEGs were fully decoded", "gpuload doctor")
    assert found.decode.counts.keys() == {"simplejpeg"}
    assert found.decode.whole == found.decode.counts["simplejpeg"]


@lacking.mark("no GPU", torch.cuda.is_available())  # it locks what it is asked to
def test_little_memory_may_be_locked(monkeypatch):
    """On the simulated device, whose driver refuses, and which has much to do: a copy from memory that is not
    page-locked waits for it."""

    def long_wait(machine: Machine, what: str, event: Event) -> None:
        time.sleep(0.4 * (what not in ("event", "stream")))
        wait(machine, what, event)

    wait = Machine.wait
    monkeypatch.setattr(Machine, "wait", long_wait)
    before, pictures = resource.getrlimit(resource.RLIMIT_MEMLOCK), [np.zeros((64, 64, 3), np.uint8)] * 64
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        with simulated("lazy", most_locks=0), pytest.warns(RuntimeWarning, match="refused to page-lock"):
            found = measured(pictures, num_workers=0, prefetch_factor=2, device="cuda", backend="torch")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert (found.stage.pinned_bytes, found.stage.pinning_refused) == (0, True)
    check(
        found,
        "copying batches to the device is the bottleneck: ",
        "the ring is not page-locked (this process may lock only 64 KiB of memory)",
        "ulimit -l",
    )


# -- the first ten minutes --------------------------------------------------------------------------------------------


class Computing:
    """Numbers, each after 5 ms of a CPU."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        began = time.thread_time()
        while time.thread_time() - began < 0.005:
            pass
        return index


class Opened(Photos):
    """A photograph that the dataset opens by itself: `lazily`, so that Pillow decodes it when somebody looks at it, or
    at once."""

    def __init__(self, *, lazily: bool) -> None:
        super().__init__(1600, 1200)
        self.lazily = lazily

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.open(io.BytesIO(self.data))
        return (image if self.lazily else np.asarray(image)), index


class Slowly:
    """Bytes of images, each after some time, in blocks that the dataset names."""

    def __init__(self) -> None:
        self.data = Photos(64, 48).data

    def __len__(self) -> int:
        return 10_000

    def blocks(self) -> np.ndarray:
        return np.arange(0, 10_001, 100)

    def __getitem__(self, index: int) -> tuple[gl.Encoded, int]:
        time.sleep(0.02)
        return gl.Encoded(self.data), index


class SlowToUnpack(Sleeping):
    """A dataset that workers need two seconds to unpack."""

    def __init__(self) -> None:
        super().__init__(0.0, 32)

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(2.0)
        self.__dict__.update(state)


@pytest.fixture
def neighbours() -> Iterator[None]:
    """Two other programs that compute all the time, on the one CPU that this process and its workers have."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    spin = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    programs = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()  # it runs
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate()
        os.sched_setaffinity(0, allowed)


def whole_epoch(dataset: Any, **given: Any) -> gl.Stats:
    """What an epoch of 8 batches takes, from its first moment on."""
    options = {"batch_size": 4, "num_workers": 1, "device": "cpu", "sampler": range(32)} | given
    with gl.Loader(dataset, **options) as loader:
        for _ in loader:
            pass
        return loader.stats()


@pytest.mark.usefixtures("neighbours")
@pytest.mark.processes
def test_a_dataset_that_computes_beside_other_programs():
    """A worker gets a third of a CPU, and waits for it in the time between, not for a disk."""
    found = measured(Computing())
    check(found, "reading is the bottleneck, and takes CPU time (", "more workers would not help")
    assert found.cpu.count == 1
    assert found.cpu.queued_s > found.cpu.workers_s
    assert re.search(MORE_WORKERS, found.advice) is None


@pytest.mark.processes
def test_the_start_of_workers():
    """Most of an epoch's time is a row of the table, and no worker counts as idle in it."""
    found = whole_epoch(SlowToUnpack())
    check(found, "starting the workers is the bottleneck so far: ", "workers start only once, not in each epoch")
    start = found.part("start", "workers")
    assert (start.count, start.seconds > 1.9) == (1, True)
    assert found.first_s > 1.9
    assert "start      workers" in str(found)
    busy_s = sum(found.part(name, "workers").seconds for name in ("read", "header", "decode", "pack"))
    assert found.busy >= busy_s / (found.seconds - start.seconds) * 0.99
    found = whole_epoch(SlowToUnpack(), persistent_workers=False)
    check(found, "starting the workers is the bottleneck", "persistent_workers=True starts them once")


@pytest.mark.processes
def test_the_start_of_workers_with_a_worker_init_fn_is_no_step():
    found = whole_epoch(Sleeping(0.0, 32), worker_init_fn=lambda worker: time.sleep(2.0))
    check(found, "starting the workers is the bottleneck so far: ")
    assert found.first_s > 1.9
    assert found.part("step").seconds < found.seconds - 1.9


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.processes
def test_a_dataset_that_decodes_by_itself(many_cpus, lazily: bool):
    found = measured(Opened(lazily=lazily), transforms=[T.CenterCrop(32)])
    check(found, "reading is the bottleneck, and takes CPU time (", "have it return gl.read(path) or gl.Encoded(bytes)")
    assert "JPEG" not in found.advice
    assert found.decode.counts == {}


def test_a_dataset_that_decodes_in_the_main_process():
    """How much of its work waits is not known there, so that no more workers are named than there are CPUs."""
    found = measured(Opened(lazily=False), num_workers=0, transforms=[T.CenterCrop(32)])
    check(found, "main process does this itself (num_workers=0)", "have it return gl.read(path) or gl.Encoded(bytes)")
    (count,) = re.findall(MORE_WORKERS, found.advice)
    assert int(count) <= found.cpu.count


@pytest.mark.processes
def test_blocks_and_a_cache_are_named_where_they_would_help(many_cpus):
    found = measured(Slowly(), shuffle=True)
    check(
        found,
        "reading is the bottleneck (",
        'shuffle="block" reads neighbouring samples together',
        "gl.Cached(dataset, …) keeps",
    )
    found = measured(Slowly(), shuffle="block", batches=3)
    check(found, "reading is the bottleneck (", "gl.Cached(dataset, …) keeps")
    assert "block" not in found.advice
    found = measured(gl.Cached(Slowly(), 1 << 20), shuffle="block", batches=3)
    check(found, "reading is the bottleneck (")
    assert "Cached" not in found.advice


@pytest.mark.processes
def test_the_table_and_the_sentence_agree(many_cpus):
    """Both count workers from their start on, and waits from the first batch on."""
    found = whole_epoch(Sleeping(0.05))
    busy, workers, waits = re.search(
        r"([\d.]+) of (\d) worker is busy, and the loop waits (\d+)%", found.advice
    ).groups()  # pyright: ignore
    assert f"workers   {busy} of {workers} busy" in str(found)
    (later,) = re.findall(r"after the first batch it waited ([\d.]+)%", str(found))
    assert abs(float(later) - float(waits)) <= 0.5
