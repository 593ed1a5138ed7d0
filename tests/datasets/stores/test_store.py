"""`Store`: when files are opened, which library is missing, and errors of libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.patterns import exactly

import gpuload as gl
from gpuload.datasets.kinds import is_deterministic
from gpuload.datasets.stores.store import Store, decode_error_at, existing_file, replace_errors
from gpuload.errors import DecodeError, import_optional


class Numbers(Store):
    """Sample i is the number i and the number of times that the store was opened."""

    path = "/numbers"

    def __init__(self) -> None:
        self.openings = 0

    def __len__(self) -> int:
        return 5

    def _open(self) -> int:
        self.openings += 1
        return self.openings

    def _read(self, handle: Any, numbers: list[int]) -> list[Any]:
        return [(number, handle) for number in numbers]


def test_store_opens_at_the_first_sample_and_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers()
    assert numbers.openings == 0
    assert numbers.__getitems__([3, -1]) == [(3, 1), (4, 1)]
    assert numbers[0] == (0, 1)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert [numbers[0], numbers[1]] == [(0, 2), (1, 2)], "a child must open the file again"
    numbers.close()
    assert numbers[2] == (2, 3)


def test_store_checks_indices_before_opening() -> None:
    numbers = Numbers()
    with pytest.raises(IndexError, match=r"^index 5 is out of range: Numbers\('/numbers'\) has 5 samples$"):
        numbers.__getitems__([1, 5])
    with pytest.raises(TypeError, match=r"^an index must be an integer, got 'a' \(str\)$"):
        numbers["a"]
    assert numbers.openings == 0


def test_stores_are_joined_by_plus() -> None:
    joined = Numbers() + Numbers()
    assert (len(joined), joined[7]) == (10, (2, 1))
    assert not is_deterministic(joined), "samples of a user's class may be random"


def test_import_optional_names_only_the_library_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "halfway.py").write_text("import not_there_either")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_there_either'$"):
        import_optional("halfway", "Half", "half")
    with pytest.raises(ModuleNotFoundError, match=r"^gpuload.Half needs not_there, which is not installed: pip"):
        import_optional("not_there.inner", "Half", "half")
    assert "halfway" not in sys.modules


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        (gl.Parquet, "pyarrow.parquet", "pyarrow, which is not installed: pip install 'gpuload[parquet]'"),
        (gl.HDF5, "h5py", "h5py, which is not installed: pip install 'gpuload[hdf5]'"),
        (gl.LMDB, "lmdb", "lmdb, which is not installed: pip install 'gpuload[lmdb]'"),
    ],
)
def test_store_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, module: str, extra: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=exactly(f"gpuload.{kind.__name__} needs {extra}")):
        kind(tmp_path / "file")


def test_existing_file_takes_a_fifo_only_with_allow_streams(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(OSError, match=r"/x' is a FIFO; expected a Parquet file, as a regular file$"):
        existing_file(tmp_path / "x", "a Parquet file")
    assert existing_file(tmp_path / "x", "a manifest", allow_streams=True) == f"{tmp_path}/x"


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("bad\x1b[31m"), MemoryError()])
def test_replace_errors_adds_the_name_of_the_file(error: Exception) -> None:
    with (
        pytest.raises(DecodeError, match=r"^'/a.h5': it cannot be read: ('x'|bad\\x1b\[31m|MemoryError)$"),
        replace_errors("/a.h5", lambda text: decode_error_at("/a.h5", f"it cannot be read: {text}")),
    ):
        raise error


@pytest.mark.parametrize("error", [ValueError("'/a.h5' is odd"), FileNotFoundError(2, "gone", "/b"), ImportError("x")])
def test_replace_errors_passes_errors_that_name_a_file_or_module(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, replace_errors("/a.h5", lambda text: decode_error_at("/a.h5", text)):
        raise error
    assert caught.value is error
