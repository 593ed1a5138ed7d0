"""Loaders made slow in one way each: `stats()` measures and names the bottleneck. test_advice.py tests all sentences.

The bottleneck is far slower than everything else by construction: it sleeps, or does at least several times as much
work, so that shares of time hold on a busy machine.
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
from helpers.generated_images import jpeg_bytes
from helpers.map_datasets import MapDataset
from PIL import Image
from simulated.machine import Event, Machine
from simulated.runtime import simulated

import gpuload as gl
from gpuload import transforms as T

MORE_WORKERS = r"(\d+) workers?(?: and prefetch_factor=\d+)? (?:would give|the loop would)"


def sleeping(seconds: float, size: int = 100) -> MapDataset:
    """Return a dataset of arrays that each take some seconds."""

    def sample(index: int) -> tuple[np.ndarray, int]:
        time.sleep(seconds)
        return np.zeros((size, size, 3), np.uint8), index

    return MapDataset(sample, 10_000)


def make_jpeg(width: int, height: int) -> bytes:
    small = np.random.default_rng(0).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return jpeg_bytes(small.repeat(4, 0).repeat(4, 1), quality=95)


PHOTO = make_jpeg(1600, 1200)
PHOTOS = MapDataset(lambda index: (gl.Encoded(PHOTO), index), 10_000)


class SlowModule(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return images


@pytest.fixture
def sixteen_cpus(monkeypatch):
    monkeypatch.setattr("gpuload.loader.meter.usable_cpus", lambda: 16)


def measure_batches(
    dataset: Any, step: Callable[[], object] = lambda: None, batches: int = 6, **overrides: Any
) -> gl.Stats:
    """Return the stats of some batches, from the third on.

    Workers have work while this process does not run, and a slow step begins with batches that are ready.
    """
    options = {"batch_size": 4, "num_workers": 1, "device": "cpu", "prefetch_factor": 8} | overrides
    with gl.Loader(dataset, **options) as loader:
        iterator, before = iter(loader), None
        loader._session.feed.await_engine()  # until all workers have started
        for number in range(2 + batches):
            if number == 2:
                before = loader.stats()
            next(iterator)
            step()
        stats = loader.stats(since=before)
        assert stats.batches == batches
        return stats


def assert_advice_contains(stats: gl.Stats, *expected: str) -> None:
    assert [words for words in expected if words not in stats.advice] == [], f"{stats}\n{stats.as_dict()}"


@lacking.needs("nvidia.nvimgcodec")
@pytest.mark.processes
def test_stats_of_a_worker_that_decodes_large_jpegs_name_decode(sixteen_cpus):
    stats = measure_batches(PHOTOS, transforms=[T.CenterCrop(64)])
    assert_advice_contains(stats, "decode is the bottleneck: ", " of 1 worker is busy")
    assert re.search(r"; (with )?\d+ workers ", stats.advice)
    assert stats.waiting > 0.5


@pytest.mark.processes
def test_stats_of_sleeping_reads_name_reading(sixteen_cpus):
    stats = measure_batches(sleeping(0.05), num_workers=2)
    assert_advice_contains(stats, "reading is the bottleneck (a sample takes ", " of 2 workers are busy")
    assert stats.part("read").seconds > sum(stats.part(name).seconds for name in ("header", "decode", "pack"))


@pytest.mark.processes
def test_stats_of_a_sleeping_step_name_the_training_step():
    stats = measure_batches(sleeping(0.0, 32), step=lambda: time.sleep(0.2))
    expected = "a faster loader could raise throughput by at most "
    assert_advice_contains(stats, "the training step is the bottleneck: the loop waits ", expected)
    assert stats.waiting < 0.05


@pytest.mark.processes
def test_stats_of_a_sleeping_module_name_the_stage():
    stats = measure_batches(sleeping(0.0, 32), transforms=[T.CenterCrop(16), SlowModule()])
    assert_advice_contains(stats, "the stage is the bottleneck: it takes ")
    assert stats.part("stage").seconds >= 6 * 0.1  # six batches


@pytest.mark.processes
def test_stats_of_a_ring_smaller_than_a_batch_name_the_ring(sixteen_cpus):
    """The ring has room for two samples, so most of the six workers are idle."""
    stats = measure_batches(sleeping(0.03), num_workers=6, chunk_size=1, ring_bytes=1 << 16)
    assert_advice_contains(stats, "the ring is the bottleneck: ring_bytes=65,536 is too small", "try ring_bytes=")
    assert stats.ring.spilled >= 3 * 6  # of the four chunks of a batch, one stays in the ring


def block_nvimagecodec(worker: int) -> None:
    sys.modules["nvidia.nvimgcodec"] = None  # pyright: ignore[reportArgumentType]


@pytest.mark.processes
def test_stats_without_nvimagecodec_count_fully_decoded_jpegs(sixteen_cpus):
    stats = measure_batches(PHOTOS, transforms=[T.CenterCrop(64)], worker_init_fn=block_nvimagecodec)
    assert_advice_contains(stats, "nvImageCodec cannot be used here", " JPEGs were fully decoded", "gpuload doctor")
    assert stats.decode.counts.keys() == {"simplejpeg"}
    assert stats.decode.whole == stats.decode.counts["simplejpeg"]


@lacking.mark_missing("no GPU", torch.cuda.is_available())  # which would lock the memory
def test_stats_with_refused_page_locking_name_copying_and_ulimit(monkeypatch):
    """The simulated driver refuses to page-lock, and a copy from other memory waits for the device, which is busy."""

    def long_wait(machine: Machine, what: str, event: Event) -> None:
        time.sleep(0.4 * (what not in ("event", "blocking event", "stream")))  # only copies
        wait(machine, what, event)

    wait = Machine.wait
    monkeypatch.setattr(Machine, "wait", long_wait)
    before, pictures = resource.getrlimit(resource.RLIMIT_MEMLOCK), [np.zeros((64, 64, 3), np.uint8)] * 64
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        with simulated("lazy", most_locks=0), pytest.warns(RuntimeWarning, match="refused to page-lock"):
            stats = measure_batches(pictures, num_workers=0, prefetch_factor=2, device="cuda", backend="torch")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert (stats.stage.pinned_bytes, stats.stage.pinning_refused) == (0, True)
    assert_advice_contains(
        stats,
        "copying batches to the device is the bottleneck: ",
        "the ring is not page-locked (this process may lock only 64 KiB of memory)",
        "ulimit -l",
    )


def compute(index: int) -> int:
    """Take 5 ms of CPU time."""
    began = time.thread_time()
    while time.thread_time() - began < 0.005:
        pass
    return index


def opened_photos(*, lazily: bool) -> MapDataset:
    """Return a dataset that opens photographs: decoded at once, or `lazily`, by Pillow when the image is used."""

    def sample(index: int) -> tuple[Any, int]:
        image = Image.open(io.BytesIO(PHOTO))
        return (image if lazily else np.asarray(image)), index

    return MapDataset(sample, 10_000)


class SlowBlocks(MapDataset):
    """A dataset of encoded images that each take some time, in blocks that the dataset names."""

    def __init__(self) -> None:
        self.samples, self.data = 10_000, make_jpeg(64, 48)

    def blocks(self) -> np.ndarray:
        return np.arange(0, 10_001, 100)

    def __getitem__(self, index: int) -> tuple[gl.Encoded, int]:
        time.sleep(0.05)
        return gl.Encoded(self.data), index


class SlowToUnpickle(MapDataset):
    """A dataset of numbers that takes two seconds to unpickle."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(2.0)
        self.__dict__.update(state)


@pytest.fixture
def busy_cpu() -> Iterator[None]:
    """Restrict this process and its workers to one CPU, shared with six programs that compute all the time."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    spin = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    programs = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(6)]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()  # printed once it runs
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate()
        os.sched_setaffinity(0, allowed)


def measure_epoch(dataset: Any, **overrides: Any) -> gl.Stats:
    """Return the stats of an epoch of 8 batches, including the start of its workers."""
    options = {"batch_size": 4, "num_workers": 1, "device": "cpu", "sampler": range(32)} | overrides
    with gl.Loader(dataset, **options) as loader:
        for _ in loader:
            pass
        return loader.stats()


@pytest.mark.usefixtures("busy_cpu")
@pytest.mark.processes
def test_stats_of_a_computing_dataset_on_a_busy_cpu_recommend_no_workers():
    """A worker gets a seventh of a CPU, and otherwise waits for it, not for a disk."""
    stats = measure_batches(MapDataset(compute, 10_000))
    assert_advice_contains(stats, "reading is the bottleneck, and takes CPU time (", "more workers would not help")
    assert stats.cpu.count == 1
    assert stats.cpu.queued_s > stats.cpu.workers_s
    assert re.search(MORE_WORKERS, stats.advice) is None


@pytest.mark.processes
def test_stats_of_a_dataset_that_is_slow_to_unpickle_name_the_start_of_workers():
    """The start is a row of the table, in which no worker counts as idle."""
    stats = measure_epoch(SlowToUnpickle(samples=10_000))
    assert_advice_contains(
        stats, "starting the workers is the bottleneck so far: ", "workers start only once, not in each epoch"
    )
    start = stats.part("start", "workers")
    assert start.count == 1
    assert start.seconds > 1.9
    assert stats.first_s > 1.9
    assert "start      workers" in str(stats)
    busy_s = sum(stats.part(name, "workers").seconds for name in ("read", "header", "decode", "pack"))
    assert stats.busy >= busy_s / (stats.seconds - start.seconds) * 0.99
    stats = measure_epoch(SlowToUnpickle(samples=10_000), persistent_workers=False)
    assert_advice_contains(stats, "starting the workers is the bottleneck", "persistent_workers=True starts them once")


@pytest.mark.processes
def test_stats_count_worker_init_fn_as_start_and_not_as_step():
    stats = measure_epoch(sleeping(0.0, 32), worker_init_fn=lambda worker: time.sleep(2.0))
    assert_advice_contains(stats, "starting the workers is the bottleneck so far: ")
    assert stats.first_s > 1.9
    assert stats.part("step").seconds < stats.seconds - 1.9


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.processes
def test_stats_of_a_dataset_that_decodes_by_itself_recommend_encoded_images(sixteen_cpus, lazily: bool):
    stats = measure_batches(opened_photos(lazily=lazily), transforms=[T.CenterCrop(32)])
    assert_advice_contains(
        stats, "reading is the bottleneck, and takes CPU time (", "have it return gl.read(path) or gl.Encoded(bytes)"
    )
    assert "JPEG" not in stats.advice
    assert stats.decode.counts == {}


def test_stats_of_a_decoding_dataset_without_workers_recommend_at_most_one_worker_per_cpu():
    """The main process does not know which part of this work waits for a disk."""
    stats = measure_batches(opened_photos(lazily=False), num_workers=0, transforms=[T.CenterCrop(32)])
    assert_advice_contains(
        stats, "main process does this itself (num_workers=0)", "have it return gl.read(path) or gl.Encoded(bytes)"
    )
    (count,) = re.findall(MORE_WORKERS, stats.advice)
    assert int(count) <= stats.cpu.count


@pytest.mark.processes
def test_stats_of_slow_reads_recommend_blocks_and_a_cache_that_are_not_in_use(sixteen_cpus):
    stats = measure_batches(SlowBlocks(), shuffle=True)
    assert_advice_contains(
        stats,
        "reading is the bottleneck (",
        'shuffle="block" reads neighbouring samples together',
        "gl.Cached(dataset, …) keeps",
    )
    stats = measure_batches(SlowBlocks(), shuffle="block", batches=3)
    assert_advice_contains(stats, "reading is the bottleneck (", "gl.Cached(dataset, …) keeps")
    assert "block" not in stats.advice
    stats = measure_batches(gl.Cached(SlowBlocks(), 1 << 20), shuffle="block", batches=3)
    assert_advice_contains(stats, "reading is the bottleneck (")
    assert "Cached" not in stats.advice


@pytest.mark.processes
def test_stats_show_the_same_figures_in_table_and_advice(sixteen_cpus):
    """Both count workers from their start, and waits from the first batch."""
    stats = measure_epoch(sleeping(0.05))
    busy, workers, waits = re.search(
        r"([\d.]+) of (\d) worker is busy, and the loop waits (\d+)%", stats.advice
    ).groups()  # pyright: ignore
    assert f"workers   {busy} of {workers} busy" in str(stats)
    (waits_in_table,) = re.findall(r"after the first batch it waited ([\d.]+)%", str(stats))
    assert abs(float(waits_in_table) - float(waits)) <= 0.5
