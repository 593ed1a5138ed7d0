"""Files are complete or absent, and have the hash of their content; a full disk has one message."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import lacking

import gpuload as gl
from gpuload.datasets.stores.tar.shards import SUFFIX
from gpuload.packing.durable import BUFFER_BYTES, explain_full_disk, open_draft, size_and_hash

from .packed_sets import STORES, content


@pytest.mark.parametrize("nbytes", [0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, 3 * BUFFER_BYTES + 5])
def test_open_draft_writes_in_order_and_size_and_hash_match(tmp_path: Path, nbytes: int) -> None:
    large = os.urandom(nbytes)
    with open_draft(str(tmp_path / "file"), str(tmp_path)) as file:
        for piece in (b"zero", large, memoryview(b"one"), large[: nbytes // 2]):
            assert file.write(piece) == len(piece)
    data = b"zero" + large + b"one" + large[: nbytes // 2]
    assert (tmp_path / "file").read_bytes() == data
    assert size_and_hash(file) == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_open_draft_replaces_the_path_only_on_success(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(data: bytes, *, fails: bool) -> None:
        with open_draft(str(path), str(tmp_path)) as file:
            file.write(data)
            assert not path.exists()
            if fails:
                raise KeyError

    with pytest.raises(KeyError):
        write(b"half", fails=True)
    assert os.listdir(tmp_path) == []
    write(b"all", fails=False)
    assert (os.listdir(tmp_path), path.read_bytes()) == (["file"], b"all")


@pytest.mark.parametrize("to", ["tar", "parquet", "array"])
def test_files_are_synced_before_they_are_renamed_and_the_manifest_comes_last(
    folder: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, fsync, replace = tmp_path / "set", os.fsync, os.replace
    synced_content: dict[str, bytes] = {}  # the content of each file when it was last synced
    events: list[str] = []

    def record_sync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        fsync(fd)
        if os.path.isdir(path):
            events.append(f"sync {os.path.relpath(path, tmp_path)}")
        else:
            synced_content[path] = Path(path).read_bytes()

    def record_rename(source: str, path: str) -> None:
        if Path(path).parent == target and not path.endswith(SUFFIX):  # an index can be built again, so is not synced
            assert synced_content.get(source) == Path(source).read_bytes(), path
            events.append(Path(path).name)
        replace(source, path)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    gl.pack(gl.ImageFolder(folder), target, to=to, workers=0, short_side=16 if to == "array" else None)
    *before, synced_before, manifest, synced_last = events
    assert (synced_before, manifest, synced_last) == ("sync set", "manifest.json", "sync set")
    names = {path.name for path in target.iterdir() if not path.name.endswith(SUFFIX)}
    assert names - {"manifest.json"} <= set(before)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("mdb_txn_commit: No space left on device"),  # LMDB's error
    ],
)
def test_explain_full_disk_translates_errors_of_a_full_disk(error: Exception) -> None:
    message = rf"^there is no room for the set in '/set' \({re.escape(str(error))}\); free some space, and run the same"
    with pytest.raises(gl.GpuloadError, match=message), explain_full_disk("/set"):
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "an error"), gl.GpuloadError("No space left on device")])
def test_explain_full_disk_passes_unrelated_errors_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explain_full_disk("/set"):
        raise error
    assert raised.value is error


APP_WITH_A_FILE_SIZE_LIMIT = """
import resource, sys
import gpuload as gl
from gpuload.cli.app import app
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
    app(sys.argv[2:])
"""


@lacking.needs("typer")
@pytest.mark.processes
@pytest.mark.parametrize("to", STORES)
def test_pack_command_on_a_full_disk_explains_it_and_can_be_continued(folder: Path, tmp_path: Path, to: str) -> None:
    """A limit on the size of files simulates a full disk: the kernel refuses writes in the same way."""
    (tmp_path / "limited.py").write_text(APP_WITH_A_FILE_SIZE_LIMIT)
    command = ["pack", folder, tmp_path / "set", "--to", to, "--workers", 0]
    options = ["--short-side", 16] if to == "array" else []
    # Otherwise, Python would leave truncated files of compiled modules.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(limit: int) -> subprocess.CompletedProcess[str]:
        arguments = map(str, [sys.executable, tmp_path / "limited.py", limit, *command, *options])
        return subprocess.run([*arguments], env=environment, capture_output=True, text=True, timeout=100)

    process = run(5_000)  # less than a file of each set
    assert process.returncode == 1
    message = " ".join(process.stderr.split())
    assert "there is no room for the set in" in message, process.stderr
    remedy = "raise the limit on the size of files (`ulimit -f unlimited`), and run the same command again"
    assert message.endswith(f"{remedy} (finished parts are kept)"), process.stderr
    assert "Traceback" not in process.stderr
    process = run(1 << 30)
    assert process.returncode == 0, process.stderr
    gl.pack(gl.ImageFolder(folder), tmp_path / "other", to=to, workers=0, short_side=16 if to == "array" else None)
    assert content(tmp_path / "set") == content(tmp_path / "other")
