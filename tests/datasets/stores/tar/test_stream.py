"""Tars in one pass: shared out, shuffled, resumed, and damage told once."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tar_files import archive, pictures_in, shards_of_pictures
from scipy import stats

import gpuload as gl
from gpuload.datasets.kinds import is_iterable
from gpuload.datasets.stores.tar import stream as stream_module
from gpuload.datasets.stores.tar.headers import Damage
from gpuload.datasets.stores.tar.stream import SequentialReader, ShuffleBuffer, TarPass, shard_order
from gpuload.rng.philox import epoch_key

FIELDS = ("jpg", "cls")


def numbers(root: Path, shards: int = 4, each: int = 5) -> str:
    """Shards of samples that hold their number, beside a field that nobody asks for."""
    for shard in range(shards):
        span = range(shard * each, (shard + 1) * each)
        files = {f"{n}.{field}": data for n in span for field, data in (("cls", b"%d" % n), ("bin", bytes(n * 100)))}
        archive(root / f"{shard}.tar", files)
    return f"{root}/*.tar"


def loaded(
    shards: object, buffer: int = 0, state: object = None, stop: int = -1, epoch: int = 0, **options: object
) -> Any:
    """The numbers in batches of two, and the state at the stop."""
    stream = gl.TarShards(shards, fields="cls", stream=True, shuffle_buffer=buffer)
    with gl.Loader(stream, 2, device="cpu", **options) as loader:
        loader.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        batches = [batch.tolist() for batch in islice(loader, stop if stop >= 0 else None)]
        return (batches, json.loads(json.dumps(loader.state_dict()))) if stop >= 0 else batches


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_samples_come_as_by_number_whatever_packs_them(tmp_path: Path) -> None:
    by_number = gl.TarShards(shards_of_pictures(tmp_path, 2, 3), fields=FIELDS)
    stream = gl.TarShards(tmp_path / "*.tar", fields=FIELDS, stream=True)
    assert is_iterable(stream)
    assert list(stream) == list(by_number)
    assert list(gl.TarShards(tmp_path / "*.tar", stream=True)) == list(gl.TarShards(tmp_path / "*.tar"))
    packed = tmp_path / "x.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "train-000.tar").read_bytes()))
    assert [label for _, label in gl.TarShards(packed, fields=FIELDS, stream=True)] == [0, 1, 2]


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    data = archive(tmp_path / "x.tar", pictures_in(3)).read_bytes()
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    assert [label for _, label in gl.TarShards(path, fields=FIELDS, stream=True)] == [0, 1, 2]
    writer.join(10)


def test_a_pass_reads_a_compressed_shard_to_its_end_and_reports_a_wrong_checksum(tmp_path: Path) -> None:
    numbers(tmp_path, 2)
    packed = bytearray(gzip.compress((tmp_path / "0.tar").read_bytes() + b"a signature" * 100_000))
    packed[-6] ^= 1  # in the checksum
    (tmp_path / "0.tar").write_bytes(packed)
    with pytest.warns(UserWarning, match="has bytes after the end of the archive"):
        found, told = errors(gl.TarShards(tmp_path / "*.tar", stream=True, fields="cls"))
    assert found == [*range(10)]
    [text] = told
    assert "0.tar' cannot be read beyond" in text
    assert "CRC check failed" in text


@pytest.mark.parametrize("buffer", [0, 1, 4, 100])
def test_the_shuffle_has_all_samples_in_another_order_in_each_epoch(tmp_path: Path, buffer: int) -> None:
    shards = numbers(tmp_path)
    epochs = [flat(loaded(shards, buffer, epoch=epoch)) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert (epochs[0] == epochs[1]) == (buffer == 0)
    assert (epochs[0] == list(range(20))) == (buffer == 0)
    assert flat(loaded(shards, buffer, epoch=1)) == epochs[1]
    assert (flat(loaded(shards, buffer, seed=1)) == epochs[0]) == (buffer == 0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("buffer", [0, 4, 100])
def test_the_rest_is_what_it_would_have_been_wherever_it_was_stopped(tmp_path: Path, buffer: int, packed: bool) -> None:
    shards = numbers(tmp_path)
    if packed:
        for number in range(4):
            path = tmp_path / f"{number}.tar"
            path.write_bytes(gzip.compress(path.read_bytes(), 1))
    undisturbed = loaded(shards, buffer, epoch=3)
    for stop in (0, 1, 3, 7, 9):
        begun, state = loaded(shards, buffer, stop=stop, epoch=3)
        assert begun + loaded(shards, buffer, state) == undisturbed
        assert len(json.dumps(state)) < 800


@pytest.mark.parametrize("buffer", [0, 3])
def test_a_resumed_stream_reads_only_from_the_oldest_sample_of_its_buffer_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    shards = numbers(tmp_path, 4, 10)
    _, state = loaded(shards, buffer, stop=18)
    opened = []
    plain = TarPass._samples_of
    monkeypatch.setattr(TarPass, "_samples_of", lambda *args: opened.append(args[1:3]) or plain(*args))
    rest = loaded(shards, buffer, state)
    assert len(flat(rest)) == 4
    shard, offset = opened[0]
    assert shard == 3
    assert (offset > 0) == (buffer == 0), "the oldest of the buffer is the first of its shard here"


def without_torch(worker: int) -> None:
    assert "torch" not in sys.modules


@pytest.mark.processes
def test_shards_are_shared_out_over_workers_and_ranks(tmp_path: Path) -> None:
    shards = numbers(tmp_path, 4, 3)
    options = {"num_workers": 2, "world_size": 2, "worker_init_fn": without_torch}
    begun, state = loaded(shards, 3, rank=0, stop=2, **options)
    first = begun + loaded(shards, 3, state, rank=0, **options)
    assert len(flat(begun)) == 4
    second = loaded(shards, 3, rank=1, **options)
    assert sorted(flat(first) + flat(second)) == list(range(12))


def test_too_few_shards_for_all_who_read(tmp_path: Path) -> None:
    shards = numbers(tmp_path, 4, 1)
    with pytest.raises(gl.SampleError, match=r"4 shard\(s\) cannot be divided among 5 readers \(world_size=5 × 1 work"):
        loaded(shards, rank=0, world_size=5, num_workers=0)


def test_images_go_through_the_loader(tmp_path: Path) -> None:
    shards = shards_of_pictures(tmp_path, 2, 4)
    chain = [gl.transforms.RandomResizedCrop(16)]
    found = []
    for dataset in (gl.TarShards(shards, fields=FIELDS), gl.TarShards(shards, fields=FIELDS, stream=True)):
        with gl.Loader(dataset, 4, transforms=chain, device="cpu", num_workers=0) as loader:
            found.append(torch.cat([images for images, _ in loader]))
    assert torch.equal(*found)


# What is refused


def errors(stream: object) -> tuple[list, list[str]]:
    """What comes, and what is told on the way."""
    found, told = [], []
    iterator = iter(stream)
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found, told
        except (ValueError, LookupError, OSError) as error:
            told.append(str(error))


@pytest.mark.parametrize("at", [1536 + 200, 1024 + 600, 5000])
def test_a_shard_that_is_cut_off_is_told_once_and_the_next_one_follows(tmp_path: Path, at: int) -> None:
    shards = numbers(tmp_path, 3, 5)
    os.truncate(tmp_path / "1.tar", at)
    found, told = errors(gl.TarShards(shards, stream=True, fields="cls"))
    assert found[:5] + found[-5:] == [*range(5), *range(10, 15)]
    [text] = told
    assert text.startswith(f"'{tmp_path}/1.tar' is truncated at {at:,} bytes")
    with pytest.raises(gl.SampleError, match=r"1.tar' is truncated at"):
        loaded(shards, num_workers=0)
    with pytest.warns(RuntimeWarning, match=r"1.tar' is truncated at .* it was skipped"):
        rest = loaded(shards, num_workers=0, faults=gl.Faults(on_error="skip", max_error_rate=1))
    assert flat(rest) == found


def test_after_an_interrupt_the_pass_goes_on_with_the_next_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, read_at, interrupts = (
        iter(gl.TarShards(numbers(tmp_path), fields="cls", stream=True)),
        SequentialReader.read_at,
        [1],
    )

    def interrupted(file: SequentialReader, offset: int, nbytes: int) -> bytes:
        if file.path.endswith("1.tar") and interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        return read_at(file, offset, nbytes)

    monkeypatch.setattr(SequentialReader, "read_at", interrupted)
    assert [next(samples) for _ in range(5)] == [*range(5)]
    with pytest.raises(KeyboardInterrupt):
        next(samples)
    assert list(samples) == [*range(10, 20)]
    assert samples.state_dict()["damaged"] == []


def test_after_a_resume_its_damage_is_not_told_again(tmp_path: Path) -> None:
    shards = numbers(tmp_path, 3, 5)
    os.truncate(tmp_path / "1.tar", 2000)
    stream = gl.TarShards(shards, stream=True, fields="cls", shuffle_buffer=100)
    everything, told = errors(stream)
    assert len(told) == 1
    iterator = iter(stream)
    with pytest.raises(Damage):
        next(iterator)
    begun = [next(iterator) for _ in range(3)]
    state = iterator.state_dict()
    resumed = iter(stream)
    resumed.load_state_dict(state)
    assert begun + list(resumed) == everything


def test_a_bad_sample_is_told_and_the_next_one_follows(tmp_path: Path) -> None:
    archive(tmp_path / "x.tar", {"a.cls": b"1", "b.cls": b"x", "c.txt": b"?", "d.cls": b"4"})
    found, told = errors(gl.TarShards(tmp_path / "x.tar", stream=True, fields="cls"))
    assert found == [1, 4]
    assert "field 'cls' of sample 'b'" in told[0]
    assert "sample 'c' of" in told[1]
    assert "has no field 'cls'; its fields are: 'txt'" in told[1]


def test_other_damage_is_told_as_by_number(tmp_path: Path) -> None:
    archive(tmp_path / "1.tar", [("a.cls", b"1"), ("a.cls", b"2")])
    (tmp_path / "2.tar").write_bytes(b"no tar" * 200)
    archive(tmp_path / "3.tar", {"a.cls": b"7"})
    found, told = errors(gl.TarShards(tmp_path / "*.tar", stream=True, fields="cls"))
    assert found == [7]
    assert "has two samples with the key 'a'" in told[0]
    assert "is not a tar archive" in told[1]


@pytest.mark.parametrize("packed", [False, True])
def test_archives_that_are_joined_are_read_on_and_resumed_in_any(tmp_path: Path, packed: bool) -> None:
    numbers(tmp_path, 3)
    parts = [path.read_bytes() for path in sorted(tmp_path.glob("*.tar"))]
    path = tmp_path / "joined"
    path.write_bytes(b"".join(map(gzip.compress, parts) if packed else parts))
    whole = loaded(path)
    assert flat(whole) == list(range(15))
    if not packed:
        assert list(gl.TarShards(path, fields="cls")) == list(range(15))
    for stop in range(9):
        before, state = loaded(path, 4, stop=stop)
        assert before + loaded(path, 4, state) == loaded(path, 4)


def test_bytes_behind_the_end_are_warned_of(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.cls": b"1"})
    path.write_bytes(path.read_bytes() + b"a signature")
    with pytest.warns(
        UserWarning, match=r"has bytes after the end of the archive, at offset 10,240, that are not part"
    ):
        assert list(gl.TarShards(path, stream=True, fields="cls")) == [1]


def test_one_without_the_blocks_that_close_it_is_warned_of(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.cls": b"1"})
    os.truncate(path, 1024)
    with pytest.warns(UserWarning, match="without the empty blocks that close an archive"):
        assert list(gl.TarShards(path, stream=True, fields="cls")) == [1]


def test_a_state_of_other_shards_or_another_buffer_is_refused(tmp_path: Path) -> None:
    shards = numbers(tmp_path)
    state = iter(gl.TarShards(shards, stream=True)).state_dict()
    for other, name in (
        (gl.TarShards(shards, stream=True, shuffle_buffer=3), "shards|shuffle_buffer"),
        (gl.TarShards(tmp_path / "[012].tar", stream=True), "shards"),
    ):
        with pytest.raises(ValueError, match=rf"the state was saved with ({name})="):
            iter(other).load_state_dict(state)
    state["read"], state["given"] = 100, 1
    with pytest.raises(ValueError, match=r"have fewer samples than the state expects \(20 of 100\)"):
        iter(gl.TarShards(shards, stream=True)).load_state_dict(state)


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shuffle_buffer must be at least 0, got -1"):
        gl.TarShards(numbers(tmp_path), stream=True, shuffle_buffer=-1)
    assert gl.TarShards("-", stream=True).shards == ["-"]
    assert repr(gl.TarShards(tmp_path / "0.tar", stream=True)) == f"TarStream('{tmp_path}/0.tar', shuffle_buffer=0)"


# The shuffle of a stream: a permutation by keyed draws, and what was in the buffer, computed again


def ordered(buffer: ShuffleBuffer, source: Iterator[int]) -> list[int]:
    """All that comes out."""
    return list(iter(lambda: buffer.draw(lambda: next(source, None)), None))


@pytest.mark.parametrize(("capacity", "count"), [(1, 5), (3, 0), (3, 2), (3, 3), (3, 40), (50, 40), (7, 700)])
def test_what_comes_out_is_what_went_in_and_can_be_restored_anywhere(capacity: int, count: int, monkeypatch) -> None:
    monkeypatch.setattr(stream_module, "REPLAY_DRAWS", 16)
    made = lambda: ShuffleBuffer(capacity, epoch_key(1, 2), 1, 3)  # noqa: E731
    out = ordered(made(), iter(range(count)))
    assert sorted(out) == list(range(count))
    assert (out == list(range(count))) == (capacity == 1) or count < 5
    for given in {*range(min(count, 12)), count // 2, *range(max(0, count - 9), count + 1)}:
        read = min(count, capacity + given - 1) if given else 0
        buffer = made()
        buffer.restore(given, read, given > 0 and given + capacity > count + 1)
        assert ordered(buffer, iter(range(read, count))) == out[given:], given


def test_draws_differ_by_share_and_epoch() -> None:
    orders = [
        ordered(ShuffleBuffer(20, epoch_key(0, epoch), share, 2), iter(range(60)))
        for epoch, share in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_each_slot_is_as_likely_as_the_others() -> None:
    firsts = [ordered(ShuffleBuffer(8, epoch_key(seed, 0), 0, 1), iter(range(8)))[0] for seed in range(400)]
    assert stats.chisquare(np.bincount(firsts, minlength=8)).pvalue > 0.001


def test_shards_come_in_another_order_in_each_epoch() -> None:
    orders = [shard_order(epoch_key(0, epoch), 20).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert shard_order(epoch_key(0, 1), 20).tolist() == orders[1]


# Streams of bytes: the same whatever packs them, and damage in each


DATA = np.random.default_rng(0).integers(0, 9, 300_000, np.uint8).tobytes()


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data[:100_000]) + zstandard.compress(data[100_000:])  # in two frames


PACKED = {"plain": lambda data: data, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstd}


@pytest.mark.parametrize("kind", PACKED)
def test_it_is_unpacked_by_what_it_begins_with_not_by_its_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(PACKED[kind](DATA))
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
def test_one_that_is_cut_or_damaged(tmp_path: Path, kind: str) -> None:
    path, packed = tmp_path / "x.bin", bytearray(PACKED[kind](DATA))
    path.write_bytes(packed[: len(packed) // 2])
    file = SequentialReader(str(path))
    with pytest.raises(Damage, match=r"x.bin' cannot be read beyond 0 bytes") if kind != "zstd" else nullcontext():
        assert len(file.read_at(0, 300_000)) < 300_000
    file.close()
    packed[len(packed) // 2 : len(packed) // 2 + 40] = bytes(40)
    path.write_bytes(packed)
    file = SequentialReader(str(path))
    with pytest.raises(Damage, match="cannot be read beyond 0 bytes: "):
        file.read_at(0, 9_000_000)
    file.close()


def test_the_end_of_what_is_compressed_is_read_too(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(DATA))
    packed[-6] ^= 1  # in the sum
    (tmp_path / "x").write_bytes(packed)
    file = SequentialReader(str(tmp_path / "x"))
    assert file.read_at(0, 300_000) == DATA
    with pytest.raises(Damage, match=r"cannot be read beyond 300,000 bytes: BadGzipFile: CRC check failed"):
        file.finish()
    file.close()


def test_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(DATA),))
    writer.start()
    file = SequentialReader(str(path))
    assert file.read_at(200_000, 100) == DATA[200_000:200_100]
    file.read_at(300_000, 1)
    file.close()
    writer.join(10)


def test_without_what_unpacks_zstd_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    (tmp_path / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(99))
    with pytest.raises(ImportError, match=r"x.tar.zst' is compressed with zstd, .* pip install 'gpuload\[zstd\]'"):
        SequentialReader(str(tmp_path / "x.tar.zst"))
