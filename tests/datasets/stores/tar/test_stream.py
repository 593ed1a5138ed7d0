"""Streams of tar archives: readers, shuffling, resuming, and damage, which is reported once."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.both_loaders import alike, gpuload_batches
from helpers.tar_files import archive, pictures_in, shards_of_pictures
from scipy import stats

import gpuload as gl
from gpuload.datasets.kinds import is_iterable
from gpuload.datasets.stores.tar import stream as stream_module
from gpuload.datasets.stores.tar.headers import Damage
from gpuload.datasets.stores.tar.stream import SequentialReader, ShuffleBuffer, TarPass, shard_order
from gpuload.rng.philox import epoch_key

FIELDS = ("jpg", "cls")


def write_numbers(root: Path, shards: int = 4, samples: int = 5) -> str:
    """Write shards of samples with their number and a field that the tests do not read; return their pattern."""
    for shard in range(shards):
        numbers = range(shard * samples, (shard + 1) * samples)
        files = {f"{n}.{field}": data for n in numbers for field, data in (("cls", b"%d" % n), ("bin", bytes(n * 100)))}
        archive(root / f"{shard}.tar", files)
    return f"{root}/*.tar"


def load_numbers(
    shards: object, buffer: int = 0, state: object = None, stop: int = -1, epoch: int = 0, **options: object
) -> Any:
    """Load the numbers in batches of two. Return them, and the state after `stop` batches if `stop` is given."""
    stream = gl.TarShards(shards, fields="cls", stream=True, shuffle_buffer=buffer)
    with gl.Loader(stream, 2, device="cpu", **options) as loader:
        loader.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        batches = [batch.tolist() for batch in islice(loader, stop if stop >= 0 else None)]
        return (batches, json.loads(json.dumps(loader.state_dict()))) if stop >= 0 else batches


def flatten(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_tar_stream_yields_the_samples_of_tar_shards(tmp_path: Path) -> None:
    shards = shards_of_pictures(tmp_path, 2, 3)
    for fields in (FIELDS, None):
        stream = gl.TarShards(shards, fields=fields, stream=True)
        assert is_iterable(stream)
        assert list(stream) == list(gl.TarShards(shards, fields=fields))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_tar_stream_reads_a_pipe(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    data = compress(archive(tmp_path / "x.tar", pictures_in(3)).read_bytes())
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    assert [label for _, label in gl.TarShards(path, fields=FIELDS, stream=True)] == [0, 1, 2]
    writer.join(10)


def test_tar_pass_reads_a_compressed_shard_to_its_end_and_reports_a_wrong_checksum(tmp_path: Path) -> None:
    write_numbers(tmp_path, 2)
    compressed = bytearray(gzip.compress((tmp_path / "0.tar").read_bytes() + b"a signature" * 100_000))
    compressed[-6] ^= 1  # in the checksum
    (tmp_path / "0.tar").write_bytes(compressed)
    with pytest.warns(UserWarning, match="has bytes after the end of the archive"):
        samples, messages = samples_and_errors(gl.TarShards(tmp_path / "*.tar", stream=True, fields="cls"))
    assert samples == [*range(10)]
    [text] = messages
    assert "0.tar' cannot be read beyond" in text
    assert "CRC check failed" in text


@pytest.mark.parametrize("buffer", [0, 1, 4, 100])
def test_tar_stream_shuffles_all_samples_differently_in_each_epoch(tmp_path: Path, buffer: int) -> None:
    shards = write_numbers(tmp_path)
    epochs = [flatten(load_numbers(shards, buffer, epoch=epoch)) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert (epochs[0] == epochs[1]) == (buffer == 0)
    assert (epochs[0] == list(range(20))) == (buffer == 0)
    assert flatten(load_numbers(shards, buffer, epoch=1)) == epochs[1]
    assert (flatten(load_numbers(shards, buffer, seed=1)) == epochs[0]) == (buffer == 0)


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("buffer", [0, 4, 100])
def test_tar_stream_resumes_after_any_batch(tmp_path: Path, buffer: int, is_compressed: bool) -> None:
    shards = write_numbers(tmp_path)
    if is_compressed:
        for number in range(4):
            path = tmp_path / f"{number}.tar"
            path.write_bytes(gzip.compress(path.read_bytes(), 1))
    undisturbed = load_numbers(shards, buffer, epoch=3)
    for stop in (0, 1, 3, 7, 9):
        loaded, state = load_numbers(shards, buffer, stop=stop, epoch=3)
        assert loaded + load_numbers(shards, buffer, state) == undisturbed
        assert len(json.dumps(state)) < 800


@pytest.mark.parametrize("buffer", [0, 3])
def test_tar_stream_resumes_at_its_oldest_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    shards = write_numbers(tmp_path, 4, 10)
    _, state = load_numbers(shards, buffer, stop=18)
    opened = []
    samples_of = TarPass._samples_of
    monkeypatch.setattr(TarPass, "_samples_of", lambda *args: opened.append(args[1:3]) or samples_of(*args))
    remaining = load_numbers(shards, buffer, state)
    assert len(flatten(remaining)) == 40 - 18 * 2
    shard, offset = opened[0]
    assert shard == 3
    assert (offset > 0) == (buffer == 0), "the oldest sample in a buffer must be the first of its shard"


def check_torch_is_absent(worker: int) -> None:
    assert "torch" not in sys.modules


@pytest.mark.fresh
@pytest.mark.processes
def test_tar_stream_divides_shards_among_workers_and_ranks(tmp_path: Path) -> None:
    shards = write_numbers(tmp_path, 4, 3)
    options = {"num_workers": 2, "world_size": 2, "worker_init_fn": check_torch_is_absent}
    loaded, state = load_numbers(shards, 3, rank=0, stop=2, **options)
    rank_0 = loaded + load_numbers(shards, 3, state, rank=0, **options)
    assert len(flatten(loaded)) == 4
    rank_1 = load_numbers(shards, 3, rank=1, **options)
    assert sorted(flatten(rank_0) + flatten(rank_1)) == list(range(12))


def test_tar_stream_refuses_more_readers_than_shards(tmp_path: Path) -> None:
    shards = write_numbers(tmp_path, 4, 1)
    with pytest.raises(gl.SampleError, match=r"4 shard\(s\) cannot be divided among 5 readers \(world_size=5 × 1 work"):
        load_numbers(shards, rank=0, world_size=5, num_workers=0)


def test_tar_stream_batches_equal_batches_of_tar_shards(tmp_path: Path) -> None:
    shards = shards_of_pictures(tmp_path, 2, 4)
    steps = [gl.transforms.RandomResizedCrop(16)]
    batches = gpuload_batches(gl.TarShards(shards, fields=FIELDS, stream=True), 4, transforms=steps)
    assert alike(batches, gpuload_batches(gl.TarShards(shards, fields=FIELDS), 4, transforms=steps))


def samples_and_errors(stream: object) -> tuple[list, list[str]]:
    """Return the samples of the stream, and the errors that it raised between them."""
    samples, messages = [], []
    iterator = iter(stream)
    while True:
        try:
            samples.append(next(iterator))
        except StopIteration:
            return samples, messages
        except (ValueError, LookupError, OSError) as error:
            messages.append(str(error))


# Twice in the data of the member 5.bin, and in the header of 7.cls.
@pytest.mark.parametrize("nbytes", [1536 + 200, 1024 + 600, 5000])
def test_tar_stream_reports_a_truncated_shard_once_and_continues(tmp_path: Path, nbytes: int) -> None:
    shards = write_numbers(tmp_path, 3, 5)
    os.truncate(tmp_path / "1.tar", nbytes)
    samples, messages = samples_and_errors(gl.TarShards(shards, stream=True, fields="cls"))
    assert samples[:5] + samples[-5:] == [*range(5), *range(10, 15)]
    [text] = messages
    assert text.startswith(f"'{tmp_path}/1.tar' is truncated at {nbytes:,} bytes")
    with pytest.raises(gl.SampleError, match=r"1.tar' is truncated at"):
        load_numbers(shards, num_workers=0)
    with pytest.warns(RuntimeWarning, match=r"1.tar' is truncated at .* it was skipped"):
        batches = load_numbers(shards, num_workers=0, faults=gl.Faults(on_error="skip", max_error_rate=1))
    assert flatten(batches) == samples


def test_tar_stream_continues_with_next_shard_if_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter(gl.TarShards(write_numbers(tmp_path), fields="cls", stream=True))
    read_at, interrupts = SequentialReader.read_at, [1]

    def read_or_interrupt(file: SequentialReader, offset: int, nbytes: int) -> bytes:
        if file.path.endswith("1.tar") and interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        return read_at(file, offset, nbytes)

    monkeypatch.setattr(SequentialReader, "read_at", read_or_interrupt)
    assert [next(samples) for _ in range(5)] == [*range(5)]
    with pytest.raises(KeyboardInterrupt):
        next(samples)
    assert list(samples) == [*range(10, 20)]
    assert samples.state_dict()["damaged"] == []


def test_tar_stream_does_not_report_damage_again_after_a_resume(tmp_path: Path) -> None:
    shards = write_numbers(tmp_path, 3, 5)
    os.truncate(tmp_path / "1.tar", 2000)
    stream = gl.TarShards(shards, stream=True, fields="cls", shuffle_buffer=100)
    expected, messages = samples_and_errors(stream)
    assert len(messages) == 1
    iterator = iter(stream)
    with pytest.raises(Damage):
        next(iterator)
    loaded = [next(iterator) for _ in range(3)]
    state = iterator.state_dict()
    resumed = iter(stream)
    resumed.load_state_dict(state)
    assert loaded + list(resumed) == expected


def test_tar_stream_reports_bad_samples_and_shards_and_continues(tmp_path: Path) -> None:
    archive(tmp_path / "1.tar", {"a.cls": b"1", "b.cls": b"x", "c.txt": b"?", "d.cls": b"4"})
    archive(tmp_path / "2.tar", [("a.cls", b"1"), ("a.cls", b"2")])
    (tmp_path / "3.tar").write_bytes(b"no tar" * 200)
    archive(tmp_path / "4.tar", {"a.cls": b"7"})
    samples, messages = samples_and_errors(gl.TarShards(tmp_path / "*.tar", stream=True, fields="cls"))
    assert samples == [1, 4, 7]
    expected = (
        "field 'cls' of sample 'b'",
        f"sample 'c' of '{tmp_path}/1.tar' has no field 'cls'; its fields are: 'txt'",
        "has two samples with the key 'a'",
        "is not a tar archive",
    )
    assert [text for text, message in zip(expected, messages, strict=True) if text not in message] == []


@pytest.mark.parametrize("is_compressed", [False, True])
def test_tar_stream_reads_and_resumes_concatenated_archives(tmp_path: Path, is_compressed: bool) -> None:
    write_numbers(tmp_path, 3)
    parts = [path.read_bytes() for path in sorted(tmp_path.glob("*.tar"))]
    path = tmp_path / "joined"
    path.write_bytes(b"".join(map(gzip.compress, parts) if is_compressed else parts))
    batches = load_numbers(path)
    assert flatten(batches) == list(range(15))
    if not is_compressed:
        assert list(gl.TarShards(path, fields="cls")) == list(range(15))
    for stop in range(9):
        loaded, state = load_numbers(path, 4, stop=stop)
        assert loaded + load_numbers(path, 4, state) == load_numbers(path, 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data + b"a signature", "has bytes after the end of the archive, at offset 10,240, that are not"),
        (lambda data: data[:1024], "without the empty blocks that close an archive"),
    ],
)
def test_tar_stream_warns_of_bytes_after_the_end_and_missing_closing_blocks(tmp_path: Path, change, text: str) -> None:
    path = archive(tmp_path / "x.tar", {"a.cls": b"1"})
    path.write_bytes(change(path.read_bytes()))
    with pytest.warns(UserWarning, match=text):
        assert list(gl.TarShards(path, stream=True, fields="cls")) == [1]


def test_tar_stream_refuses_a_state_of_different_shards_or_buffer_size(tmp_path: Path) -> None:
    shards = write_numbers(tmp_path)
    state = iter(gl.TarShards(shards, stream=True)).state_dict()
    for stream, name in (
        (gl.TarShards(shards, stream=True, shuffle_buffer=3), "shards|shuffle_buffer"),  # a buffer shuffles the shards
        (gl.TarShards(tmp_path / "[012].tar", stream=True), "shards"),
    ):
        with pytest.raises(ValueError, match=rf"the state was saved with ({name})="):
            iter(stream).load_state_dict(state)
    state["read"], state["given"] = 100, 1
    with pytest.raises(ValueError, match=r"have fewer samples than the state expects \(20 of 100\)"):
        iter(gl.TarShards(shards, stream=True)).load_state_dict(state)


def test_tar_stream_refuses_a_negative_buffer_and_shows_its_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shuffle_buffer must be at least 0, got -1"):
        gl.TarShards(write_numbers(tmp_path), stream=True, shuffle_buffer=-1)
    assert gl.TarShards("-", stream=True).shards == ["-"]
    assert repr(gl.TarShards(tmp_path / "0.tar", stream=True)) == f"TarStream('{tmp_path}/0.tar', shuffle_buffer=0)"


def draw_all(buffer: ShuffleBuffer, source: Iterator[int]) -> list[int]:
    return list(iter(lambda: buffer.draw(lambda: next(source, None)), None))


@pytest.mark.parametrize(("capacity", "count"), [(1, 5), (3, 0), (3, 2), (3, 3), (3, 40), (50, 40), (7, 700)])
def test_shuffle_buffer_permutes_and_is_restored_after_any_draw(capacity: int, count: int, monkeypatch) -> None:
    monkeypatch.setattr(stream_module, "REPLAY_DRAWS", 16)
    make_buffer = lambda: ShuffleBuffer(capacity, epoch_key(1, 2), 1, 3)  # noqa: E731
    numbers = draw_all(make_buffer(), iter(range(count)))
    assert sorted(numbers) == list(range(count))
    assert (numbers == list(range(count))) == (capacity == 1) or count < 5  # a few may stay in order by chance
    for draws in {*range(min(count, 12)), count // 2, *range(max(0, count - 9), count + 1)}:
        read = min(count, capacity + draws - 1) if draws else 0
        buffer = make_buffer()
        buffer.restore(draws, read, draws > 0 and draws + capacity > count + 1)
        assert draw_all(buffer, iter(range(read, count))) == numbers[draws:], draws


def test_shuffle_buffer_and_shard_order_depend_on_share_and_epoch() -> None:
    orders = [
        draw_all(ShuffleBuffer(20, epoch_key(0, epoch), share, 2), iter(range(60)))
        for epoch, share in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    orders = [shard_order(epoch_key(0, epoch), 20).tolist() for epoch in (0, 1, 2, 1)]
    assert [sorted(order) for order in orders] == [list(range(20))] * 4
    assert orders[0] != orders[1] != orders[2]
    assert orders[3] == orders[1]


def test_shuffle_buffer_draws_each_slot_with_equal_probability() -> None:
    firsts = [draw_all(ShuffleBuffer(8, epoch_key(seed, 0), 0, 1), iter(range(8)))[0] for seed in range(400)]
    assert stats.chisquare(np.bincount(firsts, minlength=8)).pvalue > 0.001


DATA = np.random.default_rng(0).integers(0, 9, 300_000, np.uint8).tobytes()


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data[:100_000]) + zstandard.compress(data[100_000:])  # in two frames


COMPRESSORS = {"plain": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstd}


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_sequential_reader_decompresses_by_the_first_bytes_not_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(COMPRESSORS[kind](DATA))
    file = SequentialReader(str(path))
    assert file.read_at(10, 100) == DATA[10:110]
    assert file.read_at(110, 0) == b""
    assert file.read_at(150_000, 140_000) == DATA[150_000:290_000]
    assert file.read_at(299_990, 100) == DATA[299_990:]
    assert file.position == 300_000
    with pytest.raises(Damage, match=r"x.bin' is truncated at 300,000 bytes, before the member at offset 400,000"):
        file.read_at(400_000, 1)
    file.close()


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_sequential_reader_reports_truncated_and_damaged_data(tmp_path: Path, kind: str) -> None:
    path, compressed = tmp_path / "x.bin", COMPRESSORS[kind](DATA)
    half = len(compressed) // 2
    path.write_bytes(compressed[:half])
    file = SequentialReader(str(path))
    with pytest.raises(Damage, match=r"x.bin' cannot be read beyond 0 bytes") if kind != "zstd" else nullcontext():
        assert len(file.read_at(0, 300_000)) < 300_000  # zstd returns its first frame
    file.close()
    path.write_bytes(compressed[:half] + bytes(40) + compressed[half + 40 :])
    file = SequentialReader(str(path))
    with pytest.raises(Damage, match="cannot be read beyond 0 bytes: "):
        file.read_at(0, 9_000_000)
    file.close()


def test_sequential_reader_without_zstandard_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    (tmp_path / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(99))
    with pytest.raises(ImportError, match=r"x.tar.zst' is compressed with zstd, .* pip install 'gpuload\[zstd\]'"):
        SequentialReader(str(tmp_path / "x.tar.zst"))
