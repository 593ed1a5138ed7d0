"""Files are complete or absent, with the hash of what was written; a full disk is one message."""

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

from .conftest import content


@pytest.mark.parametrize("nbytes", [0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, 3 * BUFFER_BYTES + 5])
def test_a_file_has_what_was_written_in_order_and_its_hash(tmp_path: Path, nbytes: int) -> None:
    large = os.urandom(nbytes)
    with open_draft(str(tmp_path / "file"), str(tmp_path)) as file:
        for piece in (b"zero", large, memoryview(b"one"), large[: nbytes // 2]):
            assert file.write(piece) == len(piece)
    data = b"zero" + large + b"one" + large[: nbytes // 2]
    assert (tmp_path / "file").read_bytes() == data
    assert size_and_hash(file) == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_draft_takes_its_place_only_when_it_is_done(tmp_path: Path) -> None:
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
def test_files_are_on_disk_before_they_get_their_names_and_the_manifest_comes_last(
    folder: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking.require(*{"parquet": ["pyarrow"]}.get(to, []))
    target, fsync, replace = tmp_path / "set", os.fsync, os.replace
    on_disk: dict[str, bytes] = {}  # the content of each file when it was last synced
    events: list[str] = []

    def synced(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        fsync(fd)
        if os.path.isdir(path):
            events.append(f"sync {os.path.relpath(path, tmp_path)}")
        else:
            on_disk[path] = Path(path).read_bytes()

    def moved(source: str, path: str) -> None:
        if Path(path).parent == target and not path.endswith(SUFFIX):  # an index can be built again
            assert on_disk.get(source) == Path(source).read_bytes(), path
            events.append(Path(path).name)
        replace(source, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
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
        RuntimeError("mdb_txn_commit: No space left on device"),  # as LMDB says it
    ],
)
def test_a_full_disk_is_told_as_such(error: Exception) -> None:
    said = rf"^there is no room for the set in '/set' \({re.escape(str(error))}\); free some space, and run the same"
    with pytest.raises(gl.GpuloadError, match=said), explain_full_disk("/set"):
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "an error"), gl.GpuloadError("No space left on device")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explain_full_disk("/set"):
        raise error
    assert raised.value is error


FULL = """
import resource, sys
import gpuload as gl
from gpuload.cli.app import app
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
    app(sys.argv[2:])
"""


@pytest.mark.processes
@pytest.mark.parametrize("to", ["tar", "parquet", "lmdb", "array"])
def test_a_full_disk_is_a_message_and_the_job_goes_on_with_room(folder: Path, tmp_path: Path, to: str) -> None:
    """The limit is that on the size of files, which the kernel refuses to exceed as it refuses to fill a full disk."""
    lacking.require(*{"parquet": ["pyarrow"], "lmdb": ["lmdb"]}.get(to, []))
    (tmp_path / "full.py").write_text(FULL)
    command = ["pack", folder, tmp_path / "set", "--to", to, "--workers", 0]
    options = ["--short-side", 16] if to == "array" else []
    # Python would leave cut files of compiled modules behind.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(limit: int) -> subprocess.CompletedProcess[str]:
        arguments = map(str, [sys.executable, tmp_path / "full.py", limit, *command, *options])
        return subprocess.run([*arguments], env=environment, capture_output=True, text=True, timeout=100)

    done = run(5_000)
    assert done.returncode == 1
    message = " ".join(done.stderr.split())
    assert "there is no room for the set in" in message, done.stderr
    remedy = "raise the limit on the size of files (`ulimit -f unlimited`), and run the same command again"
    assert message.endswith(f"{remedy} (finished parts are kept)"), done.stderr
    assert "Traceback" not in done.stderr
    done = run(1 << 30)
    assert done.returncode == 0, done.stderr
    gl.pack(gl.ImageFolder(folder), tmp_path / "other", to=to, workers=0, short_side=16 if to == "array" else None)
    assert content(tmp_path / "set") == content(tmp_path / "other")
