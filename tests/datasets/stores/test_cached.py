"""Indices in files: given back as they were, built anew where the source or the file is another one."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import gpuload as gl
from gpuload.datasets.stores import cached as module
from gpuload.datasets.stores.cached import cache_folder, load_or_build


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    return tmp_path / "cache"


def build(number: int = 3) -> dict[str, np.ndarray]:
    return {"data": np.arange(1000, dtype=np.uint8), "offsets": np.arange(number, dtype=np.int64), "none": np.empty(0)}


def refuse() -> dict[str, np.ndarray]:
    raise AssertionError("built again")


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        array.dtype == expected[name].dtype and np.array_equal(array, expected[name]) for name, array in found.items()
    )


def test_what_was_built_is_read_the_next_time(folder: Path) -> None:
    assert same(load_or_build("/a", [1, "x", None], build), build())
    assert same(load_or_build("/a", (1, "x", None), refuse), build())
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".index"]


def test_another_source_gets_its_own(folder: Path) -> None:
    load_or_build("/a", [1], build)
    assert same(load_or_build("/a", [2], lambda: build(4)), build(4)), "the same one, written to"
    assert same(load_or_build("/b", [1], lambda: build(5)), build(5))
    assert same(load_or_build("/a", [2], refuse), build(4))
    assert len(list(folder.iterdir())) == 2, "the new one takes the place of the old one"


@pytest.mark.parametrize("damage", ["cut off", "empty", "identity", "directory", "length", "swapped"])
def test_a_damaged_file_is_built_anew(folder: Path, damage: str) -> None:
    load_or_build("/a", [1], build)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    at = data.index(bytes(range(64)))
    changed = {
        "cut off": data[:-1],
        "empty": b"",
        "identity": data.replace(b'["/a", [1]]', b'["/a", [7]]'),
        "directory": data[:-60] + bytes(20) + data[-40:],
        "length": data.replace(b"(1000,)", b"(9999,)"),
        "swapped": data[:at] + data[at + 8 : at + 16] + data[at : at + 8] + data[at + 16 :],
    }
    assert changed[damage] != data
    path.write_bytes(changed[damage])
    for identity in ([1], [7]):
        assert same(load_or_build("/a", identity, lambda: build(7)), build(7))
    assert same(load_or_build("/a", [7], refuse), build(7))


def test_an_error_of_is_fresh_is_raised_unless_the_arrays_are_other_ones(folder: Path) -> None:
    load_or_build("/a", [1], build)
    with pytest.raises(ZeroDivisionError):
        load_or_build("/a", [1], refuse, is_fresh=lambda arrays: 1 / 0 > 0)
    assert same(load_or_build("/a", [1], lambda: build(4), is_fresh=lambda arrays: arrays["lost"].all()), build(4))


@pytest.mark.parametrize("damage", ["directory", "length"])
def test_a_damaged_length_takes_no_memory(folder: Path, damage: str) -> None:
    load_or_build("/a", [1], lambda: {"data": np.zeros(1_000_000, np.uint8)})
    (path,) = folder.iterdir()
    data = path.read_bytes()
    if damage == "directory":
        size = (1_000_128).to_bytes(4, "little")  # of the member: the array, and its head
        at = data.rindex(size + size)
        changed = data[:at] + b"\xfe\xff\xff\x7f" * 2 + data[at + 8 :]
    else:
        changed = data.replace(b"(1000000,), }   ", b"(1000000000,), }")
    assert len(changed) == len(data)
    assert changed != data
    path.write_bytes(changed)
    tracemalloc.start()
    try:
        assert same(load_or_build("/a", [1], lambda: build(7)), build(7))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_small_ones_and_those_without_a_place_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 20)
    load_or_build("/a", [1], build)
    assert not folder.exists()
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    folder.write_text("a file where the folder should be")
    assert same(load_or_build("/a", [1], build), build())


def test_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPULOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == "/x/gpuload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == "/home/me/.cache/gpuload"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As for a user without HOME and without an entry in the table of users; returns the temporary folder."""
    for name in ("GPULOAD_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_without_a_home_they_are_in_a_temporary_folder(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = homeless / f"gpuload-{os.getuid()}"
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    for _ in range(2):
        assert same(load_or_build("/a", [1], build), build())
        assert cache_folder() == str(expected)
    assert expected.stat().st_mode & 0o777 == 0o700
    assert len(list(expected.iterdir())) == 1
    assert os.listdir() == []
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert cache_folder() == str(expected)


@pytest.mark.parametrize("theirs", ["a link", "others may write", "a file", "no temporary folder", "another user's"])
def test_a_temporary_folder_that_is_not_this_users_alone_is_not_used(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    path = homeless / f"gpuload-{os.getuid()}"
    make = {
        "a link": lambda: path.symlink_to(homeless.parent),
        "others may write": lambda: (path.mkdir(), path.chmod(0o777)),
        "a file": path.touch,
        "no temporary folder": lambda: monkeypatch.setattr(tempfile, "tempdir", "/dev/null"),
        "another user's": lambda: (path.mkdir(), monkeypatch.setattr(module.os, "getuid", lambda: -1)),
    }
    make[theirs]()
    (homeless / "gpuload--1").mkdir()
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    assert cache_folder() == module.NOWHERE
    assert same(load_or_build("/a", [1], build), build())
    assert os.listdir() == []


def test_a_path_in_a_home_that_is_not_known_is_refused(homeless: Path) -> None:
    for use in (gl.ImageFolder, gl.TarShards, gl.ArrayFile, gl.verify, lambda path: gl.pack([b""], path, to="tar")):
        with pytest.raises(FileNotFoundError, match=r"^the home directory for '~/set' is unknown: HOME is not set, "):
            use("~/set")
    assert os.listdir() == []
