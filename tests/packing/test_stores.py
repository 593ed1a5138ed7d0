"""Tar shards: headers and files equal those that Python's tarfile writes."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import gpuload as gl
from gpuload.datasets.stores.tar.index import build
from gpuload.packing.stores import MAX_MEMBER_BYTES, tar_header

from .packed_sets import Samples

SAMPLES: list[dict[str, Any]] = [
    {"one": b"x" * 1500, "cls": 7},
    {"one": b"y" * 512, "ä": b"", "cls": 12},
    {"two": bytes(range(256)) * 60},
]


def write_with_tarfile(samples: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in enumerate(samples):
            for field, value in sample.items():
                name, data = (f"{field}.bin", value) if isinstance(value, bytes) else (field, str(value).encode())
                member = tarfile.TarInfo(f"{number:08d}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("name", ["0.jpg", "ä" * 50, "n" * 100, "00000012.\udcff.jpg"])
@pytest.mark.parametrize("nbytes", [0, 511, 130_000, MAX_MEMBER_BYTES])
def test_tar_header_has_the_bytes_of_tarfile(name: str, nbytes: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = nbytes
    assert tar_header(name, nbytes) == member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


@pytest.mark.parametrize(("name", "nbytes"), [("n" * 101, 1), ("0.jpg", MAX_MEMBER_BYTES + 1)])
def test_tar_header_of_too_long_a_name_or_file_raises(name: str, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"too long|overflow"):
        tar_header(name, nbytes)


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES[:1]])
def test_tar_shard_has_the_bytes_of_tarfile_and_an_index(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    gl.pack(Samples(*samples), tmp_path / "set", to="tar", workers=0)
    path = tmp_path / "set" / "shard-00000.tar"
    data = write_with_tarfile(samples)
    assert path.read_bytes() == data
    (part,) = json.loads((tmp_path / "set" / "manifest.json").read_text())["parts"]
    assert (part["bytes"], part["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert Path(f"{path}.gpuload-index").read_bytes() == build(str(path)).table.tobytes()
