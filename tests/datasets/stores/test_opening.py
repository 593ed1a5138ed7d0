"""`OpenFile` and streams: complete reads at offsets, with and without a mapping."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from gpuload.datasets.stores.opening import OpenFile, open_file, open_stream


def test_read_at_returns_the_entire_range_despite_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    file = open_file(str(path))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, offset: pread(fd, min(nbytes, 7), offset))
    assert file.read_at(10, 50) == bytes(range(10, 60))
    assert file.read_at(90, 50) == bytes(range(90, 100))
    assert file.read_at(100, 50) == b""
    assert (file.size, file.mtime_ns) == (100, path.stat().st_mtime_ns)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_read_at_uses_the_mapping_until_the_file_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(data := bytes(range(256)) * 64)  # 16,384 bytes
    pread = os.pread
    assert OpenFile(str(path)).read_at(300, 9000) == data[300:9300]
    assert not is_mapped(path)
    monkeypatch.setattr(os, "pread", None)  # so only the mapping can be read
    file = OpenFile(str(path), use_mmap=True)
    assert is_mapped(path)
    spans = ((300, 9000), (16380, 50), (16384, 9))
    assert [file.read_at(*span) for span in spans] == [data[300:9300], data[16380:], b""]
    monkeypatch.setattr(os, "pread", pread)
    os.truncate(path, 4000)  # reading the mapping at 8192 would raise SIGBUS
    assert [file.read_at(*span) for span in ((3990, 50), (8192, 50))] == [data[3990:4000], b""]
    del file
    assert not is_mapped(path)


def test_open_file_reads_files_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_enodev(*arguments: object) -> None:
        raise OSError(19, "No such device")

    (tmp_path / "empty").write_bytes(b"")
    assert OpenFile(str(tmp_path / "empty"), use_mmap=True).read_at(0, 5) == b""
    monkeypatch.setattr(mmap, "mmap", raise_enodev)
    (tmp_path / "x").write_bytes(b"abcdef")
    assert OpenFile(str(tmp_path / "x"), use_mmap=True).read_at(2, 3) == b"cde"


def test_open_file_refuses_fifos_and_folders(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"pipe' is a FIFO; expected a regular file"):
        open_file(str(tmp_path / "pipe"))
    with pytest.raises(OSError, match=r"is a folder; expected a regular file"):
        open_file(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        open_file(str(tmp_path / "none"))


def test_open_stream_opens_a_file_or_standard_input(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("abc")
    with open_stream(str(tmp_path / "x")) as file:
        assert file.read() == b"abc"
    with open_stream("-") as file:
        assert file.fileno() == 0
    os.fstat(0)  # raises OSError if standard input was closed
