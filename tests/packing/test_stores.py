"""Shards are those that tarfile writes, and their indexes those that are made by reading them."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuload.datasets.stores.tar.index import build
from gpuload.packing.durable import Hashed
from gpuload.packing.stores import MOST_BYTES, TarWriter, tar_header

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
    assert tar_header(name, nbytes) == member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


@pytest.mark.parametrize(("name", "nbytes"), [("n" * 101, 1), ("0.jpg", MOST_BYTES + 1)])
def test_what_no_header_can_hold_is_refused(name: str, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"too long|overflow"):
        tar_header(name, nbytes)


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES[:1], []])
def test_a_shard_is_that_of_tarfile_and_its_index_that_of_the_shard(
    tmp_path: Path, samples: list[tuple[str, list[tuple[str, bytes]]]]
) -> None:
    path = tmp_path / "shard.tar"
    with Hashed(str(path)) as file:
        tar = TarWriter(file)
        for key, fields in samples:
            tar.add(key, fields)
        tar.end()
    data = by_tarfile(samples)
    assert path.read_bytes() == data
    assert file.record() == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    tar.keep_index(str(path))
    assert Path(f"{path}.gpuload-index").read_bytes() == build(str(path)).table.tobytes()
