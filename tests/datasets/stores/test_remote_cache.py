"""The cache on disk: its limit, what goes first, and what a crash leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuload.datasets.stores import remote_cache as module
from gpuload.datasets.stores.remote_cache import DiskCache


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "used"]


def test_what_is_put_is_got(tmp_path: Path) -> None:
    disk = DiskCache(str(tmp_path / "new"), 10_000)
    for data in (b"", b"x", bytes(range(256)) * 3 + b"abc"):
        disk.put("key", data)
        assert disk.get("key") == data
    assert disk.get("other") is None


def test_the_limit_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    disk = DiskCache(str(tmp_path), 10_000)
    for number in range(40):
        disk.put(str(number), bytes(980))
        for path in files(tmp_path):  # one second older at each step
            os.utime(path, (path.stat().st_mtime - 100,) * 2)
        disk.get("0")  # used all the time
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
    kept = [number for number in range(40) if disk.get(str(number)) is not None]
    assert kept[0] == 0
    assert kept[1:] == list(range(41 - len(kept), 40))
    assert len(kept) >= 8
    disk.put("large", bytes(20_000))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 20_020


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: data[:-9] + b"xxxxxxxxx",
        lambda data: data[:-16] + data[-8:] + data[-16:-8],
    ],
)
def test_a_damaged_file_is_absent(tmp_path: Path, damage) -> None:
    disk = DiskCache(str(tmp_path), 10_000)
    disk.put("key", bytes(range(104)))
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert disk.get("key") is None
    assert files(tmp_path) == []
    disk.put("key", b"again")
    assert disk.get("key") == b"again"


@pytest.mark.processes
def test_a_writer_killed_half_way_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    program = f"""
import os, signal
from gpuload.datasets.stores import remote_cache as disk
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
disk.os.replace = die
disk.DiskCache({str(tmp_path)!r}, 10_000).put("key", bytes(1000))
"""
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -9
    (draft,) = files(tmp_path)
    disk = DiskCache(str(tmp_path), 3000)
    assert disk.get("key") is None
    disk.put("key", b"whole")
    assert disk.get("key") == b"whole"
    os.utime(draft, (0, 0))
    disk.put("more", bytes(2500))  # makes room
    assert not draft.exists()
    assert disk.get("more") == bytes(2500)


def test_a_draft_that_is_being_written_is_not_evicted(tmp_path: Path) -> None:
    disk = DiskCache(str(tmp_path), 4000)
    disk.put("old", bytes(1000))
    (file,) = files(tmp_path)
    draft = file.with_name(f"{file.name}.0123{module.DRAFT}")
    draft.write_bytes(bytes(1000))
    os.utime(draft, (file.stat().st_mtime - 100,) * 2)  # the least recently used one, if it were a file
    disk.put("new", bytes(3000))
    assert draft.exists()
    assert disk.get("old") is None
    assert disk.get("new") == bytes(3000)


def test_a_lost_count_is_made_again(tmp_path: Path) -> None:
    disk = DiskCache(str(tmp_path), 10_000)
    disk.put("a", bytes(1000))
    (tmp_path / "used").write_bytes(b"abc")  # torn
    disk.put("b", bytes(1000))
    assert disk.get("a") is not None
    assert int.from_bytes((tmp_path / "used").read_bytes(), "little") == 2 * 1020


def test_a_full_disk_keeps_nothing_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskCache(str(tmp_path), 10_000)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    disk.put("a", bytes(1000))
    assert disk.get("a") is None
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskCache(str(tmp_path / "file" / "cache"), 1000)
