"""What has become of a packed set is told: which file, and which samples in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import lacking
import pytest

import gpuload as gl
from gpuload.packing import manifest
from gpuload.packing.manifest import open_packed

Packing = Callable[..., Path]


def spoil(path: Path, where: bytes) -> None:
    """Change a byte in the middle of these bytes, wherever they are (an LMDB has old pages, too)."""
    other = bytearray(where)
    other[len(where) // 2] ^= 1
    data = path.read_bytes()
    assert where in data
    path.write_bytes(data.replace(where, other))


def parts(path: Path) -> list[dict]:
    return json.loads((path / "manifest.json").read_text())["parts"]


@pytest.mark.parametrize("to", ["tar", "parquet", "lmdb", "array"])
def test_a_damaged_sample_is_named(packed: Packing, to: str) -> None:
    if to in ("lmdb", "parquet"):
        lacking.require({"parquet": "pyarrow"}.get(to, to))
    options = {"short_side": 16, "shard_bytes": 1600} if to == "array" else {"shard_bytes": 18_000}
    path = packed(to, **options)
    image = open_packed(str(path))[6][0]
    held = parts(path)
    number = max(n for n, part in enumerate(held) if part["first"] <= 6)
    file, first = path / held[number]["file"], held[number]["first"]
    where = image.hwc.tobytes() if to == "array" else image.data
    spoil(file, where[-100:])
    after = held[number + 1]["first"] if number + 1 < len(held) else 12
    what = {
        "tar": f"in 1 of its {after - first} samples: key '00000006'",
        "array": f"in 1 of its {after - first} samples: entry 6",
        "lmdb": "in 1 of its 12 samples: 00000006.image",
        "parquet": f"in {min(16, after - first)} of its {after - first} samples: row 0",
    }[to]
    (problem,) = gl.verify(path)
    assert problem.startswith(f"{file.name} is damaged {what}"), problem
    if to != "lmdb":
        assert problem.endswith(f"(samples {first} to {after - 1} of what was packed)")


@pytest.mark.parametrize(("version", "program"), [(1, ["b2sum", "-l", "256"]), (2, ["sha256sum"])])
@pytest.mark.parametrize("to", ["tar", "array"])
def test_sets_of_every_version_are_verified_by_their_own_hash(
    packed: Packing, monkeypatch: pytest.MonkeyPatch, to: str, version: int, program: list[str]
) -> None:
    monkeypatch.setattr(manifest, "FORMAT", version)
    path = packed(to, short_side=16)
    monkeypatch.undo()
    assert gl.verify(path) == []
    if to == "tar":
        held = [json.loads((path / "manifest.json").read_text())["files"]["classes.json"]]
        held += [part[{1: "blake2b", 2: "sha256"}[version]] for part in parts(path)]
        files = [path / "classes.json", *(path / part["file"] for part in parts(path))]
        told = subprocess.run([*program, *files], check=True, capture_output=True, text=True).stdout
        assert [line.split()[0].lstrip("\\") for line in told.splitlines()] == held
    image = open_packed(str(path))[11][0]
    spoil(path / parts(path)[-1]["file"], (image.hwc.tobytes() if to == "array" else image.data)[-100:])
    (problem,) = gl.verify(path)
    assert "is damaged in 1 of its" in problem


def test_missing_cut_and_added_files_are_named(packed: Packing) -> None:
    path = packed("tar")
    held = parts(path)
    os.truncate(path / held[1]["file"], 1000)
    (path / held[2]["file"]).unlink()
    shutil.copy(path / held[3]["file"], path / "shard-99999.tar")
    (path / "classes.json").write_text("[]")
    (path / "manifest-crc32.npy").unlink()
    assert gl.verify(path) == [
        "classes.json is damaged: its hash is not that in manifest.json",
        "manifest-crc32.npy is missing",
        f"{held[2]['file']} is missing",
        "shard-99999.tar is too much: the manifest does not name it, but a pattern may read it",
        f"{held[1]['file']} has 1,000 bytes instead of {held[1]['bytes']:,} (samples {held[1]['first']} to "
        f"{held[2]['first'] - 1} of what was packed)",
    ]


def test_damage_between_samples_is_told(packed: Packing) -> None:
    path = packed("tar")
    name = path / parts(path)[0]["file"]
    data = bytearray(name.read_bytes())
    data[-1] = 1
    name.write_bytes(data)
    (problem,) = gl.verify(path)
    assert "is damaged, but in none of its images: in labels, names or what lies between" in problem


def test_a_missing_sample_of_an_lmdb_is_told(packed: Packing) -> None:
    import lmdb

    path = packed("lmdb")
    with lmdb.open(str(path), map_size=1 << 24, lock=False) as env, env.begin(write=True) as transaction:
        transaction.delete(b"00000003.image")
    assert gl.verify(path) == ["data.mdb has 11 samples instead of 12"]


def test_a_damaged_manifest_and_no_set_at_all_are_told(packed: Packing, tmp_path: Path) -> None:
    path = packed("tar")
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"samples": 12', '"samples": 13'))
    with pytest.raises(gl.GpuloadError, match=r"manifest.json' is damaged, so nothing "):
        gl.verify(path)
    (path / "manifest.json").write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(gl.GpuloadError, match=r"manifest.json' is of version 3, this gpuload reads 1, 2$"):
        gl.verify(path)
    with pytest.raises(FileNotFoundError, match=r"is no packed set; it has no manifest.json"):
        gl.verify(tmp_path)


def test_progress_is_told(packed: Packing) -> None:
    told = []
    path = packed("tar", progress=lambda done, total, nbytes: told.append((done, total)))
    assert told[0] == (0, 12)
    assert told[-1] == (12, 12)
    read = []
    gl.verify(path, progress=lambda done, total: read.append((done, total)))
    assert read[-1] == (len(parts(path)),) * 2
