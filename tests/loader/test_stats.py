"""`loader.stats()`: what real loaders count, and what a snapshot says."""

from __future__ import annotations

import html
import json
import os
import pickle
import threading
import time
from collections import Counter
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.html_cells import Cells

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader.stats import (
    COLUMNS,
    MOVED,
    CacheStats,
    Counters,
    DecodeStats,
    FaultStats,
    Part,
    RingStats,
    StageStats,
    Stats,
    WorkerStats,
    format_bytes,
)


class Pictures:
    """JPEGs and, as every fourth, an array; `bad` ones are no images."""

    def __init__(self, samples: int = 24, bad: tuple[int, ...] = (), kills: int = -1) -> None:
        self.samples, self.bad, self.kills, self.data = samples, bad, kills, jpeg_bytes(smooth_image(40, 60, 0))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == self.kills:
            os._exit(3)
        if index in self.bad:
            return gl.Encoded(b"no image"), index
        return (gl.Image(np.zeros((40, 60, 3), np.uint8)) if index % 4 == 0 else gl.Encoded(self.data)), index


def loader(dataset: Any = None, **given: Any) -> gl.Loader:
    return gl.Loader(dataset or Pictures(), **{"batch_size": 4, "num_workers": 0, "device": "cpu"} | given)


def drain(made: gl.Loader) -> Stats:
    for _ in made:
        pass
    return made.stats()


def test_before_the_first_batch_all_is_zero():
    made = loader()
    assert made.stats() == Stats()
    assert str(made.stats()) == (
        "epoch 0: 0.0 s, 0 batches, 0 images, 0 images/s\n\nnothing has been loaded yet: ask again after a few batches"
    )
    with pytest.raises(TypeError, match=r"^since must be a gpuload.Stats, got 1.5 \(float\)$"):
        made.stats(since=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_everything_is_counted(workers: int):
    dataset = Pictures()
    with loader(dataset, num_workers=workers, transforms=[T.CenterCrop(32)]) as made:
        found = drain(made)
        assert (found.epoch, found.batches, found.images) == (0, 6, 24)
        assert (found.faults.errors, found.faults.restarts) == (0, 0)
        assert found.decode.read_bytes == 18 * len(dataset.data) + 6 * 40 * 60 * 3
        assert found.decode.bytes == 24 * 32 * 32 * 3
        assert sum(found.decode.counts.values()) == 18
        where = "workers" if workers else "main"
        for name in ("read", "header", "decode", "pack"):
            assert found.part(name, where).count == 24
            assert found.part(name, where).seconds > 0
        assert found.part("stage", "main").count == found.part("step").count == 6
        assert len(found.workers) == workers
        assert sum(worker.samples for worker in found.workers) == 24 * (workers > 0)
        assert (found.chunks_ready, found.batches_ready, found.ring.used_bytes) == (0, 0, 0)
        assert 0 < found.ring.bytes < found.ring.limit_bytes == 2 << 30
        assert found.ring.slots == found.ring.grown > 0
        assert found.images_per_s == pytest.approx(found.images / found.seconds)
        assert found.cpu.seconds > 0
        assert (found.cpu.workers_s > 0) == (workers > 0)
        main = sum(part.seconds for part in found.parts if part.where == "main" and part.name != "slot wait")
        if workers:
            assert main == pytest.approx(found.seconds)  # the loop is always at one of them


@pytest.mark.processes
def test_a_snapshot_since_another_is_the_difference():
    with loader(num_workers=1) as made:
        iterator = iter(made)
        next(iterator)
        first = made.stats()
        assert first.first_s > 0
        next(iterator)
        next(iterator)
        began = time.perf_counter()
        second, whole = made.stats(since=first), made.stats()
        between_s = time.perf_counter() - began
        assert (first.batches, second.batches, whole.batches) == (1, 2, 3)
        assert second.first_s == 0
        assert whole.seconds == pytest.approx(first.seconds + second.seconds, abs=between_s + 1e-6)
        drain(made)
        assert (made.stats().epoch, made.stats().batches, made.stats(since=first).batches) == (1, 6, 8)
        deadline = time.monotonic() + 60
        while (last := made.stats()).workers != made.stats().workers:  # until the worker has nothing to do
            assert time.monotonic() < deadline
    kept = made.stats()  # after the end
    assert (kept.batches, kept.seconds, kept.workers, kept.ring.bytes) == (
        6,
        last.seconds,
        last.workers,
        last.ring.bytes,
    )
    assert kept.part("idle").seconds <= kept.seconds
    assert made.stats(since=first).batches == 8
    next(iter(made))  # new workers: what came before them is no begin
    assert made.stats(since=first).batches == made.stats().batches == 1
    made.close()


def test_an_epoch_with_workers_of_its_own_is_told_when_they_are_gone():
    made = loader(persistent_workers=False)
    assert (drain(made).batches, made.stats().images) == (6, 24)
    assert drain(made).epoch == 1


@pytest.mark.processes
def test_what_a_dead_worker_did_is_kept():
    with loader(Pictures(kills=9), num_workers=1, chunk_size=1, on_error="skip") as made:
        with pytest.warns(RuntimeWarning, match="sample 9"):
            found = drain(made)
        assert (found.images, found.faults.errors) == (23, 1)
        assert found.faults.restarts == found.workers[0].restarts >= 2
        assert found.workers[0].samples >= 23


class Stream:
    def __iter__(self):
        return iter([(gl.Image(np.zeros((8, 8, 3), np.uint8)), number) for number in range(10)])


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_an_iterable_dataset(workers: int):
    with loader(Stream(), num_workers=workers) as made:
        found = drain(made)
        assert (found.batches, found.images) == (3, 10)
        assert found.part("read").count == 10
        assert found.part("read").seconds > 0


@pytest.mark.processes
def test_batches_that_workers_collate():
    with loader(list(range(16)), num_workers=1, collate_fn=sum) as made:
        found = drain(made)
        assert found.part("collate", "workers").count == 4
        assert found.part("collate", "workers").seconds > 0


def test_caches_are_found_wherever_they_are():
    cached = gl.Cached(Pictures(8), 1 << 24)
    made = loader(type("Subset", (), {"__len__": lambda self: 8, "__getitem__": lambda self, i: self.dataset[i]})())
    made.dataset.dataset = cached
    first, second = drain(made), drain(made)
    assert (first.cache.hits, first.cache.misses) == (0, 8)
    assert (second.cache.hits, second.cache.misses) == (8, 0)
    assert first.part("read").count == second.part("read").count == 8
    assert "cache     8 hits, 0 misses: 100%" in str(second)


def test_it_may_be_asked_while_another_thread_is_in_next():
    inside, go_on = threading.Event(), threading.Event()

    class Waits(Pictures):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            if index == 8:
                inside.set()
                assert go_on.wait(60)
            return super().__getitem__(index)

    made = loader(Waits())
    thread = threading.Thread(target=drain, args=(made,))
    thread.start()
    try:
        assert inside.wait(60)
        assert made.stats().batches == 2
    finally:
        go_on.set()
        thread.join()
    assert made.stats().batches == 6
    made.close()


def test_counters_subtract():
    first = Counters(7, Counter(batches=2, next_s=0.5), Counter(Pillow=1), workers=np.array([[5, 3], [0, 0]]))
    later = Counters(
        7,
        Counter(batches=5, next_s=0.75, errors=1),
        Counter(Pillow=1, simplejpeg=4),
        Counter({"too large": 2}),
        np.array([[9, 2], [4, 0]]),  # a row that was read while it was written; a worker that began meanwhile
    )
    done = later - first
    assert (done.session, done.main) == (7, Counter(batches=3, next_s=0.25, errors=1))
    assert (done.decoded, done.refused) == (Counter(simplejpeg=4), Counter({"too large": 2}))
    assert done.workers.tolist() == [[4, 0], [4, 0]]
    assert done.main["images"] == 0
    everything = later - Counters(7)
    assert (everything.main, everything.workers.tolist()) == (later.main, later.workers.tolist())


def test_a_snapshot_is_plain():
    found = drain(loader())
    again = json.loads(json.dumps(found.as_dict()))
    assert again["images"] == 24
    assert again["ring"]["slots"] == found.ring.slots > 0
    assert again["parts"][0]["name"] == "read"
    assert "totals" not in again
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found
    assert hash(found.parts) == hash(copy.parts)
    with pytest.raises(AttributeError):
        found.images = 3  # type: ignore[misc]


def test_an_attribute_that_is_in_a_group_now_is_refused_with_its_path():
    found = Stats()
    with pytest.raises(AttributeError, match=r"^Stats has no attribute 'cpu_s': it is stats\.cpu\.seconds$"):
        found.cpu_s  # noqa: B018
    with pytest.raises(AttributeError, match=r"^Stats has no attribute 'speed'$"):
        found.speed  # noqa: B018
    for name, path in MOVED.items():
        assert not hasattr(found, name)
        attrgetter(path)(found)  # the attribute is there


def test_the_table():
    found = Stats(
        epoch=3, seconds=12.4, batches=97, images=24832, images_per_s=2002.6, waiting=0.312, next_ms=1.34,
        parts=(
            Part("read", "workers", 3.0, 25000), Part("decode", "workers", 88.0, 25000), Part("wait", "main", 3.87, 97),
            Part("plan", "workers", 0.0, 0), Part("step", "main", 8.4, 97), Part("stage", "device", 0.0291, 97),
        ),
        workers=tuple(WorkerStats(number, 0.975, 3000, 0) for number in range(9)), num_workers=9,
        chunks_ready=3, batches_ready=1,
        ring=RingStats(used_bytes=12_300_000, bytes=48_000_000, limit_bytes=2 << 30, slots=12, grown=2),
        stage=StageStats("cuda:0", pinned_bytes=48_000_000),
        decode=DecodeStats(2_400_000_000, 13_900_000_000, {"nvImageCodec": 24000, "cut": 1000}),
        cache=CacheStats(300, 100), faults=FaultStats(2, 1), advice="decode bounds: " + "word " * 30 + "end",
    )  # fmt: skip
    text = str(found)
    assert max(map(len, text.splitlines())) <= COLUMNS
    lines = text.splitlines()
    assert lines[:9] == [
        "epoch 3: 12.4 s, 97 batches, 24,832 images, 2,003 images/s",
        "",
        "part       where     share      total         each            rate",
        "read       workers      3%     3.00 s     120.0 µs         8,333/s",
        "decode     workers     79%       88 s      3.52 ms           284/s",
        "wait       main        31%     3.87 s     39.90 ms            25/s",
        "plan       workers      0%     0.0 µs                             ",
        "step       main        68%     8.40 s     86.60 ms            12/s",
        "stage      device       0%   29.10 ms     300.0 µs         3,333/s",
    ]
    assert lines[10:20] == [
        "next()    waited 31.2% of the time; takes 1.34 ms without waiting",
        "workers   8.8 of 9 busy: 98% 98% 98% 98% 98% 98% 98% 98% …",
        "ready     3 chunks; 1 batch",
        "ring      12 MB of 48 MB in use, limit 2,147 MB; 12 slots, 2 allocated so far",
        "          48 MB page-locked",
        "read      2,400 MB, 194 MB/s; decoded 14 GB",
        "decoders  nvImageCodec 24,000, cut 1,000",
        "cache     300 hits, 100 misses: 75%",
        "faults    2 errors, 1 restart",
        "",
    ]
    assert lines[20].startswith("decode bounds: word")
    assert lines[-1].endswith("word end")


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (9_999, "9,999 B"), (10_000, "10 kB"), (2_147_483_648, "2,147 MB"), (14e9, "14 GB"), (2e15, "2,000 TB"),
])  # fmt: skip
def test_sizes(nbytes: float, text: str):
    assert format_bytes(nbytes) == text


def test_in_a_notebook_it_says_what_it_prints():
    with loader(transforms=[T.CenterCrop(16)]) as made:
        assert Cells(made.stats()._repr_html_()).rows == []
        stats = drain(made)
    found, printed = Cells(stats._repr_html_()), str(stats)
    assert found.rows[0] == ["part", "where", "share", "total", "each", "rate"]
    assert {row[0] for row in found.rows} >= {"read", "decode", "stage", "next()", "ring", "faults"}
    for row in found.rows:
        assert all(cell in printed for cell in row)
    assert stats.advice in html.unescape(stats._repr_html_())
