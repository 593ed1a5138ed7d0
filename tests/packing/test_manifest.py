"""Manifests and plans from elsewhere: an entry that `pack` does not write raises, and nothing that it names is used."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import lacking
from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl
from gpuload.packing.manifest import add_hash, open_packed

from .packed_sets import Packing

# For each case: the store, the entry to change, its new value, and the expected message.
FOREIGN_ENTRIES: dict[str, tuple[str, str, Any, str]] = {
    "another class": ("tar", "read.dataset", "Cached", "read.dataset is 'Cached'; expected 'TarShards'"),
    "a class of another store": ("tar", "read.dataset", "LMDB", "read.dataset is 'LMDB'; expected 'TarShards'"),
    "a path above": ("tar", "read.path", "../victim/*.tar", "read.path is '../victim/*.tar'; expected 'shard-*.tar'"),
    "an absolute path": ("parquet", "read.path", "/victim", "read.path is '/victim'; expected '.'"),
    "an argument": ("tar", "read.options.mode", "L", "read.options has an entry 'mode', which gpuload does not write"),
    "an argument of a stream": ("tar", "read.options.stream", True, "has an entry 'stream', which gpuload does not"),
    "storage options": ("parquet", "read.options.storage_options", {}, "has an entry 'storage_options', which"),
    "labels elsewhere": ("array", "read.options.labels", "/victim.npy", "is '/victim.npy'; expected 'labels.npy'"),
    "keys of another store": ("lmdb", "read.options.target", "{}", "read.options.target is '{}'; expected '{}.label'"),
    "a target's type": ("lmdb", "read.options.target_type", "x", "target_type is 'x'; expected 'int' or 'text'"),
    "a part elsewhere": ("tar", "parts.0.file", "../victim", "parts[0].file is '../victim'; expected text that"),
    "a part of bytes": ("array", "parts.0.bytes", -1, "parts[0].bytes is -1; expected a number"),
    "a file elsewhere": ("tar", "files./victim", "0" * 64, "files has an entry '/victim', which gpuload does not"),
    "a dropped sample without a source": ("tar", "left_out", [{"index": 0}], "left_out[0] lacks the entry 'source'"),
    "text instead of a number": ("tar", "kept", {"why": "\x1b[2J"}, r"kept.why is '\x1b[2J'; expected a number"),
    "another store": ("tar", "to", "pickle", "'to' is 'pickle'; expected one of tar, parquet, lmdb, array"),
    "a list as store": ("tar", "to", ["tar"], "'to' is ['tar']; expected one of tar, parquet, lmdb, array"),
    "an additional entry": ("tar", "more", 1, "its content has an entry 'more', which gpuload does not write"),
    "a list instead of a dict": ("tar", "read", [], "read is []; expected a dict"),
}


def change_entry(path: Path, entry: str, value: Any) -> None:
    """Change an entry of a set's manifest, and update its hash."""
    manifest = json.loads((path / "manifest.json").read_text())
    *parents, key = entry.split(".") if not entry.startswith("files.") else entry.split(".", 1)
    container = manifest
    for name in parents:
        container = container[int(name) if isinstance(container, list) else name]
    container[key] = value
    (path / "manifest.json").write_text(json.dumps(add_hash(manifest)))


@pytest.mark.parametrize(("to", "entry", "value", "message"), FOREIGN_ENTRIES.values(), ids=FOREIGN_ENTRIES)
def test_manifest_entry_that_gpuload_does_not_write_raises(
    packed: Packing, to: str, entry: str, value: Any, message: str
) -> None:
    path = packed(to, short_side=16)
    change_entry(path, entry, value)
    pattern = rf"manifest.json' is not a gpuload manifest: .*{re.escape(message)}.*\. It was not used; copy the set"
    for call in (open_packed, gl.verify, lambda path: packed(to, short_side=16)):
        with pytest.raises(gl.GpuloadError, match=pattern):
            call(str(path))


@lacking.needs("typer")
@pytest.mark.parametrize("command", ["inspect", "pack", "verify", "bench"])
def test_commands_touch_no_file_that_a_foreign_manifest_names(packed: Packing, tmp_path: Path, command: str) -> None:
    from typer.testing import CliRunner

    from gpuload.cli.app import app

    path, cache, victim = packed("tar"), tmp_path / "cache", tmp_path / "victim"
    victim.mkdir()
    (path / "shard-00000.tar").rename(victim / "shard-00000.tar")
    arguments = {"pack": [tmp_path / "out", "--to", "tar"], "inspect": ["--html", ""]}.get(command, [])
    for entry, value in (
        ("read", {"dataset": "Cached", "path": ".", "options": {"where": "disk", "path": str(cache)}}),
        ("read", {"dataset": "TarShards", "path": "../victim/*.tar", "options": {"fields": ["jpg", "cls"]}}),
    ):
        change_entry(path, entry, value)
        result = CliRunner().invoke(app, [command, str(path), *map(str, arguments)])
        assert (result.exit_code, "is not a gpuload manifest" in result.stderr) == (1, True), result.output
    assert sorted(os.listdir(tmp_path)) == ["images", "set", "victim"]


def test_link_out_of_a_set_raises(packed: Packing, tmp_path: Path) -> None:
    path = packed("tar")
    inside, outside = path / "shard-00001.tar", tmp_path / "shard.tar"
    inside.rename(path / "other")
    inside.symlink_to("other")
    assert len(open_packed(str(path))) == 12
    (path / "other").rename(outside)
    inside.unlink()
    inside.symlink_to(outside)
    with pytest.raises(gl.GpuloadError, match=r"shard-00001.tar' is a link to .*shard.tar', outside .*set'"):
        open_packed(str(path))


def test_classes_json_with_values_that_are_not_names_raises(packed: Packing) -> None:
    path = packed("tar")
    (path / "classes.json").write_text('["ant", 1]')
    with pytest.raises(gl.GpuloadError, match=r"classes.json' holds \['ant', 1\]; expected a list of class names\."):
        open_packed(str(path))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": [1]}', "[]", "1"])
def test_json_that_is_not_a_manifest_raises(packed: Packing, text: str) -> None:
    path = packed("tar")
    (path / "manifest.json").write_text(text)
    with pytest.raises(gl.GpuloadError, match=r"manifest.json' is damaged"):
        gl.verify(path)


def test_oversized_checksum_file_is_reported_as_damaged(packed: Packing) -> None:
    path = packed("tar", "other")
    with open(path / "manifest-crc32.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u4", "fortran_order": False, "shape": (1 << 50,)})
    assert gl.verify(path) == ["manifest-crc32.npy is damaged: its hash differs from that in manifest.json"]


@pytest.fixture
def work_folder(folder: Path, packed: Packing) -> Path:
    """The work folder of a set that is not finished."""
    (folder / "bee" / "001.jpg").write_bytes(jpeg_bytes(smooth_image(24, 48, 1))[:99])
    with pytest.raises(gl.GpuloadError, match="is not finished"):
        packed("tar")
    return folder.parent / "set" / ".gpuload-pack"


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("bounds", [0, 5, 5, 12], "its parts do not contain each of 12 samples exactly once"),
        ("bounds", [0, 10**9], "its parts do not contain each of 12 samples exactly once"),
        ("bounds", [], "its parts do not contain each of 12 samples exactly once"),
        ("bounds", ["0", "12"], r"bounds\[0\] is '0'; expected a number"),
        ("options", None, "options is None; expected a dict"),
        ("format", {}, "format is {}; expected 2"),
    ],
)
def test_plan_that_gpuload_does_not_write_raises(
    work_folder: Path, packed: Packing, entry: str, value: Any, message: str
) -> None:
    plan = json.loads((work_folder / "plan.json").read_text())
    (work_folder / "plan.json").write_text(json.dumps({**plan, entry: value}))
    with pytest.raises(FileExistsError, match=rf"plan.json' is not a plan of `gpuload pack`: {message}; remove "):
        packed("tar")


def test_part_with_a_foreign_record_is_packed_again(work_folder: Path, packed: Packing) -> None:
    records = list(work_folder.glob("0*.json"))
    assert records, "no part was finished, so no record can be changed"
    for path in records:
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "file": "../../victim"}))
    path = packed("tar", skip_bad=True)
    assert gl.verify(path) == []
    assert len(open_packed(str(path))) == 11


def test_unfinished_folder_that_is_a_link_raises_and_keeps_its_target(packed: Packing, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "letters.part").write_bytes(b"mine")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / ".gpuload-pack").symlink_to(victim)
    message = r"gpuload-pack' is a link, so files at its target would be removed; remove the link"
    with pytest.raises(FileExistsError, match=message):
        packed("tar")
    assert (victim / "letters.part").read_bytes() == b"mine"
