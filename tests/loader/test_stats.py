"""`loader.stats()`: what loaders count, and how a snapshot is printed, saved and compared."""

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
from helpers.map_datasets import MapDataset
from torch.utils.data import Subset

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

JPEG = jpeg_bytes(smooth_image(40, 60, 0))


def mixed_images(samples: int = 24, deadly_index: int = -1) -> MapDataset:
    """Return a dataset of JPEGs and, as every fourth sample, an array. The sample `deadly_index` ends its process."""

    def sample(index: int) -> tuple[Any, int]:
        if index == deadly_index:
            os._exit(3)
        return (gl.Encoded(JPEG) if index % 4 else gl.Image(np.zeros((40, 60, 3), np.uint8))), index

    return MapDataset(sample, samples)


def make_loader(dataset: Any = None, **overrides: Any) -> gl.Loader:
    return gl.Loader(dataset or mixed_images(), **{"batch_size": 4, "num_workers": 0, "device": "cpu"} | overrides)


def load_all(loader: gl.Loader) -> Stats:
    for _ in loader:
        pass
    return loader.stats()


def test_stats_before_the_first_batch_are_zero():
    loader = make_loader()
    assert loader.stats() == Stats()
    assert str(loader.stats()) == (
        "epoch 0: 0.0 s, 0 batches, 0 images, 0 images/s\n\nnothing has been loaded yet: ask again after a few batches"
    )
    with pytest.raises(TypeError, match=r"^since must be a gpuload.Stats, got 1.5 \(float\)$"):
        loader.stats(since=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_stats_of_an_epoch_count_all_work(workers: int):
    with make_loader(num_workers=workers, transforms=[T.CenterCrop(32)]) as loader:
        stats = load_all(loader)
        assert (stats.epoch, stats.batches, stats.images) == (0, 6, 24)
        assert (stats.faults.errors, stats.faults.restarts) == (0, 0)
        assert stats.decode.read_bytes == 18 * len(JPEG) + 6 * 40 * 60 * 3  # 18 JPEGs and 6 arrays
        assert stats.decode.bytes == 24 * 32 * 32 * 3
        assert sum(stats.decode.counts.values()) == 18
        where = "workers" if workers else "main"
        for name in ("read", "header", "decode", "pack"):
            assert stats.part(name, where).count == 24
            assert stats.part(name, where).seconds > 0
        assert stats.part("stage", "main").count == stats.part("step").count == 6
        assert len(stats.workers) == workers
        assert sum(worker.samples for worker in stats.workers) == 24 * (workers > 0)
        assert (stats.chunks_ready, stats.batches_ready, stats.ring.used_bytes) == (0, 0, 0)
        assert 0 < stats.ring.bytes < stats.ring.limit_bytes == 2 << 30
        assert stats.ring.slots == stats.ring.grown > 0
        assert stats.images_per_s == pytest.approx(stats.images / stats.seconds)
        assert stats.cpu.seconds > 0
        assert (stats.cpu.workers_s > 0) == (workers > 0)
        loop_s = sum(part.seconds for part in stats.parts if part.where == "main" and part.name != "slot wait")
        if workers:
            assert loop_s == pytest.approx(stats.seconds)  # the loop is always in one part; chunks wait meanwhile


@pytest.mark.processes
def test_stats_since_a_snapshot_are_the_difference():
    with make_loader(num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        snapshot = loader.stats()
        assert snapshot.first_s > 0
        next(iterator)
        next(iterator)
        began = time.perf_counter()
        difference, total = loader.stats(since=snapshot), loader.stats()
        between_s = time.perf_counter() - began
        assert (snapshot.batches, difference.batches, total.batches) == (1, 2, 3)
        assert difference.first_s == 0
        assert total.seconds == pytest.approx(snapshot.seconds + difference.seconds, abs=between_s + 1e-6)
        load_all(loader)
        assert (loader.stats().epoch, loader.stats().batches, loader.stats(since=snapshot).batches) == (1, 6, 8)
        deadline = time.monotonic() + 60
        while (last := loader.stats()).workers != loader.stats().workers:  # until the worker is idle
            assert time.monotonic() < deadline, "the counters of the worker still change after 60 s"
    final = loader.stats()  # after close()
    assert (final.batches, final.seconds) == (6, last.seconds)
    assert (final.workers, final.ring.bytes) == (last.workers, last.ring.bytes)
    assert final.part("idle").seconds <= final.seconds
    assert loader.stats(since=snapshot).batches == 8
    next(iter(loader))  # new workers, whose counters begin at 0
    assert loader.stats(since=snapshot).batches == loader.stats().batches == 1
    loader.close()


def test_stats_without_persistent_workers_are_available_after_the_epoch():
    loader = make_loader(persistent_workers=False)
    assert (load_all(loader).batches, loader.stats().images) == (6, 24)
    assert load_all(loader).epoch == 1


@pytest.mark.processes
def test_stats_keep_the_counts_of_a_dead_worker():
    with make_loader(mixed_images(deadly_index=9), num_workers=1, chunk_size=1, on_error="skip") as loader:
        with pytest.warns(RuntimeWarning, match="sample 9"):
            stats = load_all(loader)
        assert (stats.images, stats.faults.errors) == (23, 1)
        assert stats.faults.restarts == stats.workers[0].restarts >= 2  # a sample is bad after two crashes
        assert stats.workers[0].samples >= 23


class Stream:
    def __iter__(self):
        return iter([(gl.Image(np.zeros((8, 8, 3), np.uint8)), number) for number in range(10)])


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_stats_count_an_iterable_dataset(workers: int):
    with make_loader(Stream(), num_workers=workers) as loader:
        stats = load_all(loader)
        assert (stats.batches, stats.images) == (3, 10)
        assert stats.part("read").count == 10
        assert stats.part("read").seconds > 0


@pytest.mark.processes
def test_stats_count_collation_in_workers():
    with make_loader(list(range(16)), num_workers=1, collate_fn=sum) as loader:
        stats = load_all(loader)
        assert stats.part("collate", "workers").count == 4
        assert stats.part("collate", "workers").seconds > 0


def test_stats_find_a_cache_within_a_wrapped_dataset():
    loader = make_loader(Subset(gl.Cached(mixed_images(8), 1 << 24), range(8)))
    first, second = load_all(loader), load_all(loader)
    assert (first.cache.hits, first.cache.misses) == (0, 8)
    assert (second.cache.hits, second.cache.misses) == (8, 0)
    assert first.part("read").count == second.part("read").count == 8
    assert "cache     8 hits, 0 misses: 100%" in str(second)


def test_stats_can_be_read_while_another_thread_is_in_next():
    inside, resume = threading.Event(), threading.Event()

    def sample(index: int) -> tuple[Any, int]:
        if index == 8:
            inside.set()
            assert resume.wait(60)
        return mixed_images()[index]

    loader = make_loader(MapDataset(sample, 24))
    thread = threading.Thread(target=load_all, args=(loader,))
    thread.start()
    try:
        assert inside.wait(60)
        assert loader.stats().batches == 2
    finally:
        resume.set()
        thread.join()
    assert loader.stats().batches == 6
    loader.close()


def test_counters_minus_earlier_counters_are_the_counts_since_then():
    earlier = Counters(7, Counter(batches=2, next_s=0.5), Counter(Pillow=1), workers=np.array([[5, 3], [0, 0]]))
    later = Counters(
        7,
        Counter(batches=5, next_s=0.75, errors=1),
        Counter(Pillow=1, simplejpeg=4),
        Counter({"too large": 2}),
        np.array([[9, 2], [4, 0]]),  # a row read while it was written, and a new worker
    )
    difference = later - earlier
    assert (difference.session, difference.main) == (7, Counter(batches=3, next_s=0.25, errors=1))
    assert (difference.decoded, difference.refused) == (Counter(simplejpeg=4), Counter({"too large": 2}))
    assert difference.workers.tolist() == [[4, 0], [4, 0]]
    assert difference.main["images"] == 0
    everything = later - Counters(7)
    assert (everything.main, everything.workers.tolist()) == (later.main, later.workers.tolist())


def test_stats_can_be_pickled_and_written_as_json():
    stats = load_all(make_loader())
    loaded = json.loads(json.dumps(stats.as_dict()))
    assert loaded["images"] == 24
    assert loaded["ring"]["slots"] == stats.ring.slots > 0
    assert loaded["parts"][0]["name"] == "read"
    assert "totals" not in loaded  # an internal field, for `since=`
    copy = pickle.loads(pickle.dumps(stats))
    assert copy == stats
    assert hash(stats.parts) == hash(copy.parts)
    with pytest.raises(AttributeError):
        stats.images = 3  # type: ignore[misc]


def test_stats_attribute_that_has_moved_raises_with_its_path():
    stats = Stats()
    with pytest.raises(AttributeError, match=r"^Stats has no attribute 'cpu_s': it is stats\.cpu\.seconds$"):
        stats.cpu_s  # noqa: B018
    with pytest.raises(AttributeError, match=r"^Stats has no attribute 'speed'$"):
        stats.speed  # noqa: B018
    for name, path in MOVED.items():
        assert not hasattr(stats, name)
        attrgetter(path)(stats)  # must exist


def test_stats_are_printed_as_a_table():
    stats = Stats(
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
    text = str(stats)
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
def test_format_bytes_uses_decimal_units(nbytes: float, text: str):
    assert format_bytes(nbytes) == text


def test_stats_in_a_notebook_show_what_they_print():
    with make_loader(transforms=[T.CenterCrop(16)]) as loader:
        assert Cells(loader.stats()._repr_html_()).rows == []
        stats = load_all(loader)
    table, printed = Cells(stats._repr_html_()), str(stats)
    assert table.rows[0] == ["part", "where", "share", "total", "each", "rate"]
    assert {row[0] for row in table.rows} >= {"read", "decode", "stage", "next()", "ring", "faults"}
    assert [cell for row in table.rows for cell in row if cell not in printed] == []
    assert stats.advice in html.unescape(stats._repr_html_())
