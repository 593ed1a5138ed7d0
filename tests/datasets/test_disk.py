"""Whether something was read from a disk since it was asked last."""

from __future__ import annotations

import os
from pathlib import Path

import lacking
import pytest

from gpuload.datasets import disk


def test_what_the_page_cache_has_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        found = disk.Disk()
        for advice in (os.POSIX_FADV_NORMAL, os.POSIX_FADV_DONTNEED):
            os.posix_fadvise(descriptor, 0, 0, advice)
            os.pread(descriptor, 1 << 20, 0)
            was_read = found.was_read()
            assert not (was_read and advice == os.POSIX_FADV_NORMAL)
    finally:
        os.close(descriptor)
    assert not found.was_read(), "it is told once"
    if not was_read:
        lacking.skip("a disk")


def test_where_nothing_is_counted_nothing_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "resource", None)
    assert not disk.Disk().was_read()
