"""`load_or_build`: indices in files, which are built again after a change; and the folder of these files."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import gpuload as gl
from gpuload.datasets.stores import cached as cached_module
from gpuload.datasets.stores.cached import cache_folder, load_or_build

pytestmark = pytest.mark.usefixtures("index_cache")


def build(number: int = 3) -> dict[str, np.ndarray]:
    return {"data": np.arange(1000, dtype=np.uint8), "offsets": np.arange(number, dtype=np.int64), "none": np.empty(0)}


def fail_to_build() -> dict[str, np.ndarray]:
    raise AssertionError("built again")


def check_arrays(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == expected.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, expected[name], name)
        assert values.dtype == expected[name].dtype, name


def test_load_or_build_reads_the_stored_index_the_next_time(index_cache: Path) -> None:
    check_arrays(load_or_build("/a", [1, "x", None], build), build())
    check_arrays(load_or_build("/a", (1, "x", None), fail_to_build), build())
    assert os.stat(index_cache).st_mode & 0o777 == 0o700
    assert [path.suffix for path in index_cache.iterdir()] == [".index"]


def test_load_or_build_builds_a_new_index_for_a_different_path_or_identity(index_cache: Path) -> None:
    load_or_build("/a", [1], build)
    check_arrays(load_or_build("/a", [2], lambda: build(4)), build(4))
    check_arrays(load_or_build("/b", [1], lambda: build(5)), build(5))
    check_arrays(load_or_build("/a", [2], fail_to_build), build(4))
    assert len(list(index_cache.iterdir())) == 2, "an index must replace the earlier index of the same path"


@pytest.mark.parametrize("damage", ["cut off", "empty", "identity", "directory", "length", "swapped"])
def test_load_or_build_builds_a_damaged_index_again(index_cache: Path, damage: str) -> None:
    load_or_build("/a", [1], build)
    (path,) = index_cache.iterdir()
    data = path.read_bytes()
    offset = data.index(bytes(range(64)))
    damaged_data = {
        "cut off": data[:-1],
        "empty": b"",
        "identity": data.replace(b'["/a", [1]]', b'["/a", [7]]'),
        "directory": data[:-60] + bytes(20) + data[-40:],
        "length": data.replace(b"(1000,)", b"(9999,)"),
        "swapped": data[:offset] + data[offset + 8 : offset + 16] + data[offset : offset + 8] + data[offset + 16 :],
    }
    assert damaged_data[damage] != data
    path.write_bytes(damaged_data[damage])
    identity = [7] if damage == "identity" else [1]  # as in the damaged file
    check_arrays(load_or_build("/a", identity, lambda: build(7)), build(7))
    check_arrays(load_or_build("/a", identity, fail_to_build), build(7))


def test_load_or_build_raises_errors_of_is_fresh_unless_an_array_is_missing(index_cache: Path) -> None:
    load_or_build("/a", [1], build)
    with pytest.raises(ZeroDivisionError):
        load_or_build("/a", [1], fail_to_build, is_fresh=lambda arrays: 1 / 0 > 0)
    arrays = load_or_build("/a", [1], lambda: build(4), is_fresh=lambda arrays: arrays["lost"].all())
    check_arrays(arrays, build(4))


@pytest.mark.parametrize("damage", ["directory", "length"])
def test_load_or_build_of_a_damaged_length_allocates_little(index_cache: Path, damage: str) -> None:
    load_or_build("/a", [1], lambda: {"data": np.zeros(1_000_000, np.uint8)})
    (path,) = index_cache.iterdir()
    data = path.read_bytes()
    if damage == "directory":
        size = (1_000_128).to_bytes(4, "little")  # of the member: the array, and its header of 128 bytes
        offset = data.rindex(size + size)
        damaged_data = data[:offset] + b"\xfe\xff\xff\x7f" * 2 + data[offset + 8 :]
    else:
        damaged_data = data.replace(b"(1000000,), }   ", b"(1000000000,), }")
    assert len(damaged_data) == len(data)
    assert damaged_data != data
    path.write_bytes(damaged_data)
    tracemalloc.start()
    try:
        check_arrays(load_or_build("/a", [1], lambda: build(7)), build(7))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_load_or_build_does_not_store_small_indices(index_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_module, "LEAST_BYTES", 1 << 20)
    load_or_build("/a", [1], build)
    assert not index_cache.exists()
    monkeypatch.setattr(cached_module, "LEAST_BYTES", 0)
    index_cache.write_text("a file where the folder should be")
    check_arrays(load_or_build("/a", [1], build), build())


def test_cache_folder_follows_xdg_cache_home_and_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPULOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == "/x/gpuload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == "/home/me/.cache/gpuload"


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The temporary folder of a user without HOME and without an entry in the table of users."""
    for name in ("GPULOAD_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_cache_folder_without_home_is_temporary(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = temporary_folder / f"gpuload-{os.getuid()}"
    for _ in range(2):
        check_arrays(load_or_build("/a", [1], build), build())
        assert cache_folder() == str(expected)
    assert expected.stat().st_mode & 0o777 == 0o700
    assert len(list(expected.iterdir())) == 1
    assert os.listdir() == []
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert cache_folder() == str(expected)


@pytest.mark.parametrize("obstacle", ["a link", "others may write", "a file", "no temporary folder", "another user's"])
def test_cache_folder_refuses_a_temporary_folder_that_others_control(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    path = temporary_folder / f"gpuload-{os.getuid()}"
    make = {
        "a link": lambda: path.symlink_to(temporary_folder.parent),
        "others may write": lambda: (path.mkdir(), path.chmod(0o777)),
        "a file": path.touch,
        "no temporary folder": lambda: monkeypatch.setattr(tempfile, "tempdir", "/dev/null"),
        "another user's": lambda: monkeypatch.setattr(cached_module.os, "getuid", lambda: -1),
    }
    make[obstacle]()
    (temporary_folder / "gpuload--1").mkdir()  # the folder of user -1, which this user owns
    assert cache_folder() == cached_module.NOWHERE
    check_arrays(load_or_build("/a", [1], build), build())
    assert os.listdir() == []


def test_datasets_refuse_a_tilde_without_a_home(temporary_folder: Path) -> None:
    for call in (gl.ImageFolder, gl.TarShards, gl.ArrayFile, gl.verify, lambda path: gl.pack([b""], path, to="tar")):
        with pytest.raises(FileNotFoundError, match=r"^the home directory for '~/set' is unknown: HOME is not set, "):
            call("~/set")
    assert os.listdir() == []
