"""`DiskCache`: its limit and eviction, damaged files, and killed writers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuload.datasets.stores import remote_cache as remote_cache_module
from gpuload.datasets.stores.remote_cache import HEADER, DiskCache


def cached_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "used"]


def test_disk_cache_returns_what_was_put(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "new"), 10_000)
    for data in (b"", b"x", bytes(range(256)) * 3 + b"abc"):
        cache.put("key", data)
        assert cache.get("key") == data
    assert cache.get("other") is None


def test_disk_cache_evicts_the_least_recently_used_and_obeys_the_limit(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 10_000)
    for number in range(40):
        cache.put(str(number), bytes(1000 - HEADER.size))
        for path in cached_files(tmp_path):  # make each file 100 seconds older
            os.utime(path, (path.stat().st_mtime - 100,) * 2)
        cache.get("0")  # so that file 0 is always the most recently used
        assert sum(path.stat().st_size for path in cached_files(tmp_path)) <= 10_000
    stored = [number for number in range(40) if cache.get(str(number)) is not None]
    assert stored[0] == 0
    assert stored[1:] == list(range(41 - len(stored), 40))
    assert len(stored) >= 8
    cache.put("large", bytes(20_000))  # exceeds the limit: it is stored in place of all other data
    assert sum(path.stat().st_size for path in cached_files(tmp_path)) <= 20_000 + HEADER.size


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: data[:-9] + b"xxxxxxxxx",
        lambda data: data[:-16] + data[-8:] + data[-16:-8],
    ],
)
def test_disk_cache_removes_a_damaged_file(tmp_path: Path, damage) -> None:
    cache = DiskCache(str(tmp_path), 10_000)
    cache.put("key", bytes(range(104)))
    (file,) = cached_files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert cache.get("key") is None
    assert cached_files(tmp_path) == []
    cache.put("key", b"again")
    assert cache.get("key") == b"again"


@pytest.mark.processes
def test_disk_cache_ignores_and_evicts_the_draft_of_a_killed_writer(tmp_path: Path) -> None:
    program = f"""
import os, signal
from gpuload.datasets.stores import remote_cache as disk
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
disk.os.replace = die
disk.DiskCache({str(tmp_path)!r}, 10_000).put("key", bytes(1000))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, "-c", program], env=environment)
    assert process.returncode == -9
    (draft,) = cached_files(tmp_path)
    cache = DiskCache(str(tmp_path), 3000)
    assert cache.get("key") is None
    cache.put("key", b"complete")
    assert cache.get("key") == b"complete"
    os.utime(draft, (0, 0))
    cache.put("more", bytes(2500))  # makes room
    assert not draft.exists()
    assert cache.get("more") == bytes(2500)


def test_disk_cache_does_not_evict_a_recent_draft(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 4000)
    cache.put("old", bytes(1000))
    (file,) = cached_files(tmp_path)
    draft = file.with_name(f"{file.name}.0123{remote_cache_module.DRAFT}")
    draft.write_bytes(bytes(1000))
    os.utime(draft, (file.stat().st_mtime - 100,) * 2)  # older than any file
    cache.put("new", bytes(3000))
    assert draft.exists()
    assert cache.get("old") is None
    assert cache.get("new") == bytes(3000)


def test_disk_cache_counts_again_after_its_total_is_damaged(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 10_000)
    cache.put("a", bytes(1000))
    (tmp_path / "used").write_bytes(b"abc")  # damaged
    cache.put("b", bytes(1000))
    assert cache.get("a") is not None
    assert int.from_bytes((tmp_path / "used").read_bytes(), "little") == 2 * (HEADER.size + 1000)


def test_disk_cache_on_a_full_disk_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(str(tmp_path), 10_000)

    def raise_enospc(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_cache_module.os, "replace", raise_enospc)
    cache.put("a", bytes(1000))
    assert cache.get("a") is None
    assert cached_files(tmp_path) == []


def test_disk_cache_refuses_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskCache(str(tmp_path / "file" / "cache"), 1000)
