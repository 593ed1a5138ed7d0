"""Reading ahead: the samples of the next chunk are passed to the `will_need` of a dataset whose reads are slow."""

from __future__ import annotations

import json
import os
import random
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import lacking
from helpers.map_datasets import MapDataset
from helpers.tar_files import archive

import gpuload as gl
from gpuload.workers.protocol import MESSAGE_BYTES, Queue, Request, peek_request, read_message
from gpuload.workers.source import CHUNKS_AHEAD, DISK_CHUNKS, SLOW_NS, Source


class SlowDataset(MapDataset):
    """Numbers that take some time to load. `needed` records the calls of `will_need`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(samples=64)
        self.seconds, self.needed = seconds, []

    def __getitem__(self, index: int) -> int:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return index

    def will_need(self, indices: list[int]) -> None:
        self.needed.append(indices)


class SlowBatchDataset(SlowDataset):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def request(*indices: int) -> Request:
    return Request(0, 0, 0, 0, np.arange(len(indices)), np.array(indices, np.int64))


def read_chunk(source: Source, *indices: int) -> None:
    get, start = source.open(request(*indices)), time.perf_counter_ns()
    assert [get(row) for row in range(len(indices))] == list(indices)
    source.add_read_time(start)


@pytest.mark.parametrize("kind", [SlowDataset, SlowBatchDataset])
def test_source_reads_ahead_for_chunks_ahead_chunks_after_a_slow_one(kind: type[SlowDataset]) -> None:
    dataset = kind(seconds=2 * SLOW_NS / 1e9)
    source = Source(dataset, 0)
    read_chunk(source, 1, 2)
    dataset.seconds = 0.0
    dataset.needed.clear()
    read_chunk(source, 3, 4)
    assert source.reads_ahead
    source.store_next_keys(request(5, 6))
    read_chunk(source, 3, 4)
    source.store_next_keys(None)
    read_chunk(source, 5, 6)
    source.store_next_keys(replace(request(7, 8), is_planning=True))  # the positions of a plan are not indices
    read_chunk(source, 5, 6)
    assert dataset.needed == [[5, 6]]
    source._slow_chunks_left = CHUNKS_AHEAD
    source._read_ns = 0  # quick, even on a busy machine
    for _ in range(CHUNKS_AHEAD):
        assert source.reads_ahead
        source._note_speed(2)
    assert not source.reads_ahead


def test_source_announces_only_the_first_chunk_of_a_quick_dataset() -> None:
    source = Source(dataset := SlowDataset(0.0), 0)
    for _ in range(3):
        source.open(request(1, 2))
        source._read_ns = SLOW_NS  # quick for two samples
    assert not source.reads_ahead
    assert dataset.needed == [[1, 2]]


@pytest.mark.parametrize("kind", [SlowDataset, SlowBatchDataset])
def test_source_announces_the_samples_of_the_first_three_chunks(kind: type[SlowDataset]) -> None:
    """The source does not know yet whether samples are read from a disk."""
    source, chunks = Source(dataset := kind(0.0), 0), [request(*range(at, at + 3)) for at in range(0, 18, 3)]
    needed: list[list[int]] = []
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        if source.reads_ahead:
            source.store_next_keys(following)
        dataset.needed.clear()
        get = source.open(chunk)
        source._read_ns = 0  # quick, even on a busy machine
        for row in range(3):
            get(row)
            source._read_ns = 0
        needed.append([index for indices in dataset.needed for index in indices])
    assert needed == [[0, 1, 2, 3, 4, 5], [6, 7, 8], [], [], [], []]


@pytest.mark.parametrize("kind", [SlowDataset, SlowBatchDataset])
def test_will_need_gets_a_few_samples_at_a_time(kind: type[SlowDataset]) -> None:
    source = Source(dataset := kind(0.0), 0)
    read_chunk(source, 0)
    dataset.needed.clear()
    source.store_next_keys(request(*range(20, 31)))
    get, counts = source.open(request(*range(9))), []
    for row in range(9):
        get(row)
        counts.append(sum(map(len, dataset.needed)))
    assert counts == ([4, 4, 4, 4, 8, 8, 8, 8, 11] if kind is SlowDataset else [11] * 9)
    assert [index for indices in dataset.needed for index in indices] == list(range(20, 31))
    source.store_next_keys(request(*range(40, 50)))
    source.open(request(20))(0)
    source.store_next_keys(request(50))
    source.open(request(40))(0)
    assert dataset.needed[-2:] == [[40, 41, 42, 43], [50]], "samples that were read meanwhile were announced"
    source.store_next_keys(request(*range(60, 70)))
    source.open(request(20))(0)
    source.store_next_keys(None)
    source.open(request(60))(0)
    assert dataset.needed[-1] == [60, 61, 62, 63], "samples were announced although no chunk follows"


def test_an_index_error_of_will_need_skips_only_its_samples() -> None:
    class Picky(SlowDataset):
        def will_need(self, indices: list[int]) -> None:
            if 5 in indices:
                raise IndexError(5)
            super().will_need(indices)

    source = Source(dataset := Picky(0.0), 0)
    source.store_next_keys(request(*range(4, 12)))
    read_chunk(source, *range(5))
    assert dataset.needed == [[0, 1, 2, 3, 4], [8, 9, 10, 11]]


def test_will_need_gets_keys_of_any_type() -> None:
    source = Source(dataset := SlowDataset(0.0), 0)
    source.store_next_keys(replace(request(1), indices=[(1, 2), "three", (4,)]))
    source.open(replace(request(7), indices=[("seven",)]))(0)
    assert dataset.needed == [[("seven",)], [(1, 2), "three", (4,)]]


class RandomDataset(SlowDataset):
    def __getitem__(self, index: int) -> int:
        return random.getrandbits(30)

    def will_need(self, indices: list[int]) -> None:
        random.random()


def test_random_numbers_of_a_dataset_do_not_depend_on_will_need() -> None:
    draws = []
    for following in (None, request(7, 8)):
        source = Source(RandomDataset(0.0), 0)
        source.store_next_keys(following)
        get = source.open(request(1, 2, 3))
        draws.append([get(row) for row in range(3)])
    assert draws[0] == draws[1]


def test_source_reads_ahead_while_quick_reads_come_from_a_disk(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(1 << 20))

    class Read(SlowDataset):
        cold = True

        def __getitem__(self, index: int) -> int:
            with open(path, "rb") as file:
                if self.cold:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.read()
            return index

    source = Source(dataset := Read(0.0), 0)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
    read_chunk(source, 1, 2)
    if resource.getrusage(resource.RUSAGE_THREAD).ru_inblock == before:
        lacking.skip("a disk")
    source._read_ns = 0  # quick
    dataset.cold = False
    read_chunk(source, 3, 4)
    for _ in range(DISK_CHUNKS):
        assert source.reads_ahead
        source._read_ns = 0
        source._note_speed(2)
    assert not source.reads_ahead


def test_an_error_of_will_need_does_not_fail_the_chunk() -> None:
    source = Source(dataset := SlowDataset(0.0), 0)
    dataset.needed = None  # so that will_need raises an AttributeError
    source.store_next_keys(request(1))
    read_chunk(source, 2)


def test_peek_request_leaves_the_request_in_the_queue() -> None:
    queue, memory = Queue(), memoryview(bytearray(MESSAGE_BYTES))
    try:
        assert peek_request(queue.read_end, memory) is None
        queue.send(request(7, 8))
        queue.send(request(9))
        for _ in range(2):
            peeked = peek_request(queue.read_end, memory)
            assert peeked.indices.tolist() == [7, 8]
        assert Request.unpack(read_message(queue.read_end, memory)).indices.tolist() == [7, 8]
        assert peek_request(queue.read_end, memory).indices.tolist() == [9]
        queue.send_end.close()
        read_message(queue.read_end, memory)
        assert peek_request(queue.read_end, memory) is None  # the other end is closed
    finally:
        queue.close()


class LogsWillNeed(SlowDataset):
    """A dataset that writes the calls of `will_need` to a file."""

    def __init__(self, path: str) -> None:
        super().__init__(0.001)
        self.path = path

    def will_need(self, indices: list[int]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(indices) + "\n")


@pytest.mark.processes
def test_workers_call_will_need_with_the_next_chunks(tmp_path: Path) -> None:
    # Four chunks at a time: with two, the worker takes the second before the third is sent.
    options = {"num_workers": 1, "prefetch_factor": 4, "device": "cpu", "chunk_size": 4}
    loader = gl.Loader(LogsWillNeed(str(tmp_path / "needed")), 4, **options)
    assert [batch.tolist() for batch in loader] == [list(range(at, at + 4)) for at in range(0, 64, 4)]
    needed = [json.loads(line) for line in (tmp_path / "needed").read_text().splitlines()]
    assert len(needed) > 1  # the first chunk is announced when it begins
    for indices in needed:
        assert indices == list(range(indices[0], indices[0] + 4))
    assert needed == sorted(needed)


def tar_shards(path: Path, nbytes: int) -> gl.TarShards:
    archive(path, [(f"{number}.bin", bytes([number]) * nbytes) for number in range(3)])
    return gl.TarShards(path, fields="bin")


def test_large_samples_of_an_archive_are_read_one_by_one(tmp_path: Path) -> None:
    source = Source(tar_shards(tmp_path / "x.tar", 70_000), 0)
    get = source.open(request(1, 2, 0))
    assert get(0) == b"\1" * 70_000
    os.truncate(tmp_path / "x.tar", 2 * (512 + 70_144))  # two members: a header, and contents in blocks of 512 bytes
    message = r"x.tar' returned 0 bytes at offset .*, but its index expects 70,000: the archive was"
    with pytest.raises(ValueError, match=message):
        get(1)
    assert get(2) == b"\0" * 70_000
    with pytest.raises(IndexError, match="index 3 is out of range"):
        source.open(request(0, 3))(1)


def test_small_samples_of_a_truncated_archive_are_read_one_by_one(tmp_path: Path) -> None:
    source = Source(tar_shards(tmp_path / "x.tar", 700), 0)
    get = source.open(request(0, 1, 2))
    os.truncate(tmp_path / "x.tar", 2 * (512 + 1024))  # two members
    assert [get(0), get(1)] == [b"\0" * 700, b"\1" * 700]
    with pytest.raises(ValueError, match="returned 0 bytes at offset 3,584, but its index expects 700"):
        get(2)
