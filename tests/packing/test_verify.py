"""`verify`: which files of a packed set are damaged, missing or unexpected, and which of their samples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import lacking

import gpuload as gl
from gpuload.packing.manifest import add_hash, open_packed
from gpuload.packing.stores import GROUP_ROWS

from .packed_sets import STORES, Packing, content


def flip_a_bit(path: Path, original: bytes) -> None:
    """Flip a bit in the middle of these bytes wherever the file contains them."""
    damaged = bytearray(original)
    damaged[len(original) // 2] ^= 1
    data = path.read_bytes()
    assert original in data
    path.write_bytes(data.replace(original, damaged))


def read_parts(path: Path) -> list[dict]:
    return json.loads((path / "manifest.json").read_text())["parts"]


@pytest.mark.parametrize("to", ["tar", "parquet", "array"])
def test_verify_names_the_damaged_sample(packed: Packing, to: str) -> None:
    path = packed(to, **({} if to == "array" else {"shard_bytes": 18_000}))
    image, _ = open_packed(str(path))[6]
    parts = read_parts(path)
    part_number = max(n for n, part in enumerate(parts) if part["first"] <= 6)
    file, first = path / parts[part_number]["file"], parts[part_number]["first"]
    image_bytes = image.hwc.tobytes() if to == "array" else image.data
    flip_a_bit(file, image_bytes[-100:])
    end = parts[part_number + 1]["first"] if part_number + 1 < len(parts) else 12
    damage = {
        "tar": f"in 1 of its {end - first} samples: key '00000006'",
        "array": f"in 1 of its {end - first} samples: entry 6",
        "parquet": f"in {min(GROUP_ROWS, end - first)} of its {end - first} samples: row 0",
    }[to]
    (problem,) = gl.verify(path)
    assert problem.startswith(f"{file.name} is damaged {damage}"), problem
    assert problem.endswith(f"(samples {first} to {end - 1} of the source dataset)")


def test_manifest_hashes_equal_hashes_of_sha256sum(packed: Packing) -> None:
    path = packed("tar")
    hashes = [json.loads((path / "manifest.json").read_text())["files"]["classes.json"]]
    hashes += [part["sha256"] for part in read_parts(path)]
    files = [path / "classes.json", *(path / part["file"] for part in read_parts(path))]
    text = subprocess.run(["sha256sum", *files], check=True, capture_output=True, text=True).stdout
    assert [line.split()[0].lstrip("\\") for line in text.splitlines()] == hashes


@pytest.mark.parametrize("to", STORES)
def test_verify_finds_one_changed_byte_in_any_file(packed: Packing, to: str) -> None:
    path = packed(to)
    files = [path / name for name in content(path)]
    for file in files:
        data = file.read_bytes()
        for offset in [*range(20, len(data), max(1, len(data) // 7)), len(data) - 1]:
            file.write_bytes(data[:offset] + bytes((data[offset] ^ 4,)) + data[offset + 1 :])
            if file.name == "manifest.json":
                with pytest.raises(gl.GpuloadError, match="is damaged"):
                    gl.verify(path)
            else:
                assert [problem.split()[0] for problem in gl.verify(path)] == [file.name], (file.name, offset)
        file.write_bytes(data)
    assert gl.verify(path) == []


def test_verify_names_missing_truncated_and_added_files(packed: Packing) -> None:
    path = packed("tar")
    parts = read_parts(path)
    os.truncate(path / parts[1]["file"], 1000)
    (path / parts[2]["file"]).unlink()
    shutil.copy(path / parts[3]["file"], path / "shard-99999.tar")
    (path / "classes.json").write_text("[]")
    (path / "manifest-crc32.npy").unlink()
    assert gl.verify(path) == [
        "classes.json is damaged: its hash differs from that in manifest.json",
        "manifest-crc32.npy is missing",
        f"{parts[2]['file']} is missing",
        "shard-99999.tar is unexpected: the manifest does not list it, but a pattern such as *.tar would load "
        "it; remove it",
        f"{parts[1]['file']} has 1,000 bytes instead of {parts[1]['bytes']:,} (samples {parts[1]['first']} to "
        f"{parts[2]['first'] - 1} of the source dataset)",
    ]


def test_verify_reports_damage_outside_of_images(packed: Packing) -> None:
    path = packed("tar")
    shard = path / read_parts(path)[0]["file"]
    data = bytearray(shard.read_bytes())
    data[-1] = 1
    shard.write_bytes(data)
    (problem,) = gl.verify(path)
    assert "is damaged, but its images are intact; the damage is in labels, names or padding" in problem


@lacking.needs("lmdb")
def test_verify_checks_an_lmdb_by_its_hash_without_opening_it(packed: Packing) -> None:
    """A damaged LMDB can end the process that opens it."""
    path = packed("lmdb")
    (path / "data.mdb").write_bytes(bytes(8192))
    assert gl.verify(path) == ["data.mdb is damaged: its hash differs from that in manifest.json"]
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["data.mdb"]
    (path / "manifest.json").write_text(json.dumps(add_hash(manifest)))
    assert gl.verify(path) == [
        "data.mdb has no hash in manifest.json: it was packed by an earlier gpuload; pack it again"
    ]
    (path / "data.mdb").unlink()
    assert gl.verify(path)[0] == "data.mdb is missing"


def test_verify_of_a_damaged_manifest_or_no_set_raises(packed: Packing, tmp_path: Path) -> None:
    path = packed("tar")
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"samples": 12', '"samples": 13'))
    with pytest.raises(gl.GpuloadError, match=r"manifest.json' is damaged, so the set cannot be checked"):
        gl.verify(path)
    (path / "manifest.json").write_text(text.replace('"format": 2', '"format": 1'))
    message = r"manifest.json' has version 1, but this gpuload reads version 2: pack again, or"
    with pytest.raises(gl.GpuloadError, match=message):
        gl.verify(path)
    with pytest.raises(FileNotFoundError, match=r"is not a packed set; it has no manifest.json"):
        gl.verify(tmp_path)


def test_pack_and_verify_report_progress(packed: Packing) -> None:
    packed_counts = []
    path = packed("tar", progress=lambda done, total, nbytes: packed_counts.append((done, total)))
    assert packed_counts[0] == (0, 12)
    assert packed_counts[-1] == (12, 12)
    verified_counts = []
    gl.verify(path, progress=lambda done, total: verified_counts.append((done, total)))
    assert verified_counts[-1] == (len(read_parts(path)),) * 2
