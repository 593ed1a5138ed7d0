"""Shards are those that tarfile writes, and their indexes those that are made by reading them."""

from __future__ import annotations

import hashlib
import io
import tarfile
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


def test_parts_are_written_whole_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system writes less than was asked for."""
    parts = (b"one", b"", b"two" * 100, b"three")
    real = durable.os.writev
    monkeypatch.setattr(durable.os, "writev", lambda descriptor, given: real(descriptor, [b"".join(given)[:5]]))
    monkeypatch.setattr(durable, "AHEAD", 100)
    with Hashed(str(tmp_path / "file"), "blake2b") as file:
        file.write(b"zero")
        file.write_parts(parts)
        file.write(b"four")
    data = b"zero" + b"".join(parts) + b"four"
    assert (tmp_path / "file").read_bytes() == data
    assert (file.nbytes, file.digest) == (len(data), hashlib.blake2b(data, digest_size=32).hexdigest())


@pytest.mark.parametrize("nbytes", [3, 300_000])
def test_parts_that_are_held_are_written_in_time(tmp_path: Path, nbytes: int) -> None:
    """Where few are enough for a call, or there are more of them than one call takes; at the latest at the end."""
    path = tmp_path / "file"
    with Hashed(str(path), "sha256") as file:
        file.write_parts([b"0" * nbytes] * 4)
        assert path.stat().st_size == (4 * nbytes if nbytes > 3 else 0)
        assert file.nbytes == 4 * nbytes
        file.write_parts([b"1"] * 3000)
        file.write_parts([b"2"])
        file.flush()
        assert path.stat().st_size == file.nbytes
        file.write_parts([b"3"])
    assert path.read_bytes() == b"0" * 4 * nbytes + b"1" * 3000 + b"23"


def test_what_is_held_is_not_written_after_an_error(tmp_path: Path) -> None:
    file = Hashed(str(tmp_path / "file"), "sha256")
    file.write_parts([b"held"])
    file.__exit__(KeyError, KeyError(), None)
    assert file.closed
    assert not (tmp_path / "file").read_bytes()
