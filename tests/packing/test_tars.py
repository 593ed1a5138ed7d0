"""Shards are those that tarfile writes, and their indexes those that are made by reading them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import tarfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuload.datasets.stores.tar.index import build
from gpuload.packing import durable
from gpuload.packing.durable import Hashed
from gpuload.packing.tars import MOST_BYTES, TarWriter, header

SAMPLES: list[tuple[str, list[tuple[str, bytes]]]] = [
    ("00000000", [("jpg", b"x" * 1500), ("cls", b"7")]),
    ("00000001", [("jpg", b"y" * 512), ("seg.png", b""), ("cls", b"12")]),
    ("00000002", [("ä.jpg", bytes(range(256)) * 60)]),
]


def by_tarfile(samples: Sequence[tuple[str, list[tuple[str, bytes]]]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, fields in samples:
            for field, data in fields:
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("name", ["0.jpg", "ä" * 50, "n" * 100, "00000012.\udcff.jpg"])
@pytest.mark.parametrize("nbytes", [0, 511, 130_000, MOST_BYTES])
def test_headers_are_those_of_tarfile(name: str, nbytes: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = nbytes
    assert header(name, nbytes) == member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


@pytest.mark.parametrize(("name", "nbytes"), [("n" * 101, 1), ("0.jpg", MOST_BYTES + 1)])
def test_what_no_header_can_hold_is_refused(name: str, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"too long|overflow"):
        header(name, nbytes)


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES[:1], []])
def test_a_shard_is_that_of_tarfile_and_its_index_that_of_the_shard(
    tmp_path: Path, samples: list[tuple[str, list[tuple[str, bytes]]]]
) -> None:
    path = tmp_path / "shard.tar"
    with Hashed(str(path), "sha256") as file:
        tar = TarWriter(file)
        for key, fields in samples:
            tar.add(key, fields)
        tar.end()
    data = by_tarfile(samples)
    assert path.read_bytes() == data
    assert (file.nbytes, file.digest) == (len(data), hashlib.sha256(data).hexdigest())
    tar.keep_index(str(path))
    assert Path(f"{path}.gpuload-index").read_bytes() == build(str(path)).table.tobytes()


@pytest.mark.parametrize("read_soon", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, durable.PIECE - 1, durable.PIECE, 3 * durable.PIECE + 5])
def test_a_file_has_what_was_written_in_order(tmp_path: Path, nbytes: int, read_soon: bool) -> None:
    """Also a second one, which gets the first one's memory."""
    for first in (b"zero", b""):
        path = tmp_path / f"file{len(first)}"
        large = os.urandom(nbytes)
        with Hashed(str(path), "blake2b", read_soon=read_soon) as file:
            for part in (first, large, memoryview(b"one"), large[: nbytes // 2]):
                assert file.write(part) == len(part)
        data = first + large + b"one" + large[: nbytes // 2]
        assert path.read_bytes() == data
        assert (file.nbytes, file.tell(), file.digest) == (len(data), len(data), b2(data))


def b2(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def test_whole_pieces_go_past_the_page_cache_and_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the filesystem takes that; one that refuses, or writes less than was asked for, gets all of it as well."""
    told: list[tuple[int, bool]] = []
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        told.append((len(data), direct))
        if direct and len(told) == 2:
            return real(descriptor, data[:4096])
        if direct and len(data) % durable.PIECE:
            raise OSError(errno.EINVAL, "not whole blocks")
        return real(descriptor, data)

    monkeypatch.setattr(durable.os, "write", write)
    data = os.urandom(3 * durable.PIECE + 5)
    path = tmp_path / "file"
    with Hashed(str(path), "blake2b") as file:
        file.write(data)
    assert path.read_bytes() == data
    assert file.digest == b2(data)
    sizes = [durable.PIECE, durable.PIECE, durable.PIECE - 4096, durable.PIECE - 4096, durable.PIECE, 5]
    if told[0][1]:  # not on every filesystem
        assert told == list(zip(sizes, [True, True, True, False, False, False], strict=True))
    told.clear()
    with Hashed(str(tmp_path / "soon"), "blake2b", read_soon=True) as file:
        file.write(data)
    assert not any(direct for _, direct in told)


def test_what_the_disk_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next piece, or at the end."""

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "write", full)
    for pieces in (0, 1, 2):
        with pytest.raises(OSError, match="No space left"), Hashed(str(tmp_path / f"{pieces}"), "sha256") as file:
            file.write(bytes(pieces * durable.PIECE + 1))
        assert file.closed


def test_no_more_pieces_wait_for_a_slow_disk_than_memory_is_meant_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen, disk = [], [], threading.Event()
    real, piece = os.write, durable._piece

    def write(descriptor: int, data: memoryview) -> int:
        disk.wait()
        return real(descriptor, data)

    def goes_on() -> None:
        deadline = time.monotonic() + 60
        while len(made) <= durable.WRITTEN and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # if more were made, they would be by now
        seen.append(len(made))
        disk.set()

    monkeypatch.setattr(durable.os, "write", write)
    monkeypatch.setattr(durable, "_piece", lambda: made.append(None) or piece())
    data = os.urandom((durable.WRITTEN + 3) * durable.PIECE + 5)
    later = threading.Thread(target=goes_on)
    later.start()
    with Hashed(str(tmp_path / "file"), "blake2b") as file:
        file.write(data)
    later.join()
    assert seen == [durable.WRITTEN + 1], "one more is filled"
    assert (tmp_path / "file").read_bytes() == data


def test_what_is_held_is_not_written_after_an_error(tmp_path: Path) -> None:
    file = Hashed(str(tmp_path / "file"), "sha256")
    file.write(b"held")
    file.__exit__(KeyError, KeyError(), None)
    assert file.closed
    assert not (tmp_path / "file").read_bytes()
