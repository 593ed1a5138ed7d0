"""Streams of bytes: the same whatever packs them, and damage in each."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from gpuload.datasets.stores.tar.headers import Damage
from gpuload.datasets.stores.tar.unpacking import Sequential

DATA = np.random.default_rng(0).integers(0, 9, 300_000, np.uint8).tobytes()


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data[:100_000]) + zstandard.compress(data[100_000:])  # in two frames


PACKED = {"plain": lambda data: data, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstd}


@pytest.mark.parametrize("kind", PACKED)
def test_it_is_unpacked_by_what_it_begins_with_not_by_its_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(PACKED[kind](DATA))
    file = Sequential(str(path))
    assert file.read_at(10, 100) == DATA[10:110]
    assert file.read_at(110, 0) == b""
    assert file.read_at(150_000, 140_000) == DATA[150_000:290_000]
    assert file.read_at(299_990, 100) == DATA[299_990:]
    assert (file.position, file.read_at(400_000, 1)) == (300_000, b"")
    file.close()


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_one_that_is_cut_or_damaged(tmp_path: Path, kind: str) -> None:
    path, packed = tmp_path / "x.bin", bytearray(PACKED[kind](DATA))
    path.write_bytes(packed[: len(packed) // 2])
    file = Sequential(str(path))
    with pytest.raises(Damage, match=r"x.bin' cannot be read on after 0 bytes") if kind != "zstd" else nullcontext():
        assert len(file.read_at(0, 300_000)) < 300_000
    file.close()
    packed[len(packed) // 2 : len(packed) // 2 + 40] = bytes(40)
    path.write_bytes(packed)
    file = Sequential(str(path))
    with pytest.raises(Damage, match="cannot be read on after 0 bytes: "):
        file.read_at(0, 9_000_000)
    file.close()


def test_the_end_of_what_is_compressed_is_read_too(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(DATA))
    packed[-6] ^= 1  # in the sum
    (tmp_path / "x").write_bytes(packed)
    file = Sequential(str(tmp_path / "x"))
    assert file.read_at(0, 300_000) == DATA
    with pytest.raises(Damage, match=r"cannot be read on after 300,000 bytes: BadGzipFile: CRC check failed"):
        file.finish()
    file.close()


def test_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(DATA),))
    writer.start()
    file = Sequential(str(path))
    assert file.read_at(200_000, 100) == DATA[200_000:200_100]
    file.read_at(300_000, 1)
    file.close()
    writer.join(10)


def test_without_what_unpacks_zstd_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    (tmp_path / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(99))
    with pytest.raises(ImportError, match=r"x.tar.zst' is compressed by zstd, .* pip install 'gpuload\[zstd\]'"):
        Sequential(str(tmp_path / "x.tar.zst"))
