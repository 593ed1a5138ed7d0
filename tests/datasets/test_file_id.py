"""`FileId` and `FileMappings`: whether a file that is opened again by path is still the same file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.patterns import exactly

import gpuload as gl
from gpuload.datasets import file_id as file_id_module
from gpuload.datasets.file_id import FileId, FileMappings, check_replaced_size


def map_file(path: Path) -> tuple[np.memmap, int]:
    """Map a file of 5000 bytes; return the array and its address."""
    path.write_bytes(bytes(5000))
    array = np.memmap(path, np.uint8, "r")
    return array, array.__array_interface__["data"][0]


def test_check_passes_a_file_that_was_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12")
    file_id = FileId.of(str(path))
    with open(path, "ab") as file:
        file.write(b"34")
    os.utime(path, ns=(1, 1))
    file_id.check(str(path))


def test_check_refuses_a_file_that_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12")
    file_id = FileId.of(str(path))
    (tmp_path / "b").write_bytes(b"12")
    os.replace(tmp_path / "b", path)
    message = (
        f"{str(path)!r}: it was replaced by another file after the dataset was created; create the dataset again when "
        "the file is complete"
    )
    with pytest.raises(gl.DecodeError, match=exactly(message)):
        file_id.check(str(path))
    dataclasses.replace(file_id, machine=("another", "one")).check(str(path))


def test_check_refuses_a_file_that_was_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(5000))
    file_id = FileId.of(str(path))
    os.truncate(path, 10)
    with pytest.raises(gl.DecodeError, match="a': it was cut from 5,000 to 10 bytes after the dataset was created; "):
        file_id.check(str(path))


def test_identify_returns_the_file_at_the_path_only_while_that_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a"
    array, address = map_file(path)
    assert FileMappings().identify(str(path), address) == FileId.of(str(path))
    (tmp_path / "link").symlink_to(path)
    assert FileMappings().identify(str(tmp_path / "link"), address) == FileId.of(str(path))
    os.rename(path, tmp_path / "moved")
    assert FileMappings().identify(str(path), address) is None, "a missing file must not be identified"
    path.write_bytes(b"")
    assert FileMappings().identify(str(path), address) is None, "an empty file must not be identified"
    path.write_bytes(bytes(5000))
    assert FileMappings().identify(str(path), address) is None, "another file must not be identified"
    assert FileMappings().identify(str(tmp_path / "moved"), address) == FileId.of(str(tmp_path / "moved"))
    assert not array.any()


def test_identify_returns_any_file_for_memory_that_maps_none(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1")
    array = np.zeros(10)
    for address in (array.__array_interface__["data"][0], 0):
        assert FileMappings().identify(str(path), address) == FileId.of(str(path))


def test_identify_recognizes_a_mapping_with_another_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On overlayfs and btrfs, /proc/self/maps lists inodes that differ from those of os.stat."""
    path = tmp_path / "a"
    array, address = map_file(path)
    find = FileMappings.find

    def find_with_other_inode(self: FileMappings, address: int):
        mapping = find(self, address)
        return mapping and mapping._replace(inode=mapping.inode + 1_000_000)

    monkeypatch.setattr(FileMappings, "find", find_with_other_inode)
    assert FileMappings().identify(str(path), address) == FileId.of(str(path))
    os.rename(path, tmp_path / "moved")
    path.write_bytes(bytes(5000))
    assert FileMappings().identify(str(path), address) is None
    assert not array.any()


def test_check_replaced_size_refuses_more_than_max_replaced_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_id_module, "MAX_REPLACED_BYTES", 1000)
    check_replaced_size("/a", 1000)
    message = (
        "'/a' was replaced or deleted after it was mapped, so workers cannot open it, and its 1,001 bytes are more "
        "than the 1,000 that are sent instead"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        check_replaced_size("/a", 1001)
