"""Errors and commands escape control characters in text from data, so that the text cannot control a terminal."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.tar_files import archive
from typer.testing import CliRunner

import gpuload as gl
from gpuload.cli.app import app
from gpuload.datasets.stores.remote_failures import failure_of
from gpuload.errors import ErrorRecord, SampleError, one_line, visible

CONTROL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r"
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r"
IMAGE = jpeg_bytes(smooth_image(24, 24, 1))
TARGETS = {f"{CONTROL}.i".encode(): IMAGE, f"{CONTROL}.t".encode(): CONTROL.encode()}


def parquet(folder: Path) -> Path:
    import pyarrow as arrow
    from pyarrow import parquet as pq

    pq.write_table(arrow.table({CONTROL: [1], "image": [{CONTROL: b"1"}]}), folder / "a.parquet")
    return folder / "a.parquet"


def hdf5(folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file[CONTROL] = np.zeros((2, 2))
    return folder / "a.h5"


def lmdb_with(folder: Path, pairs: dict[bytes, bytes]) -> Path:
    import lmdb

    with lmdb.open(str(folder / "a.lmdb"), map_size=1 << 20) as env, env.begin(write=True) as transaction:
        for key, value in pairs.items():
            transaction.put(key, value)
    return folder / "a.lmdb"


def coco(folder: Path) -> Any:
    path = folder / "a.json"
    path.write_text(json.dumps({"images": [CONTROL], "annotations": []}))
    return gl.Coco(folder, path)


def shards(folder: Path, *names: str, **options: Any) -> Any:
    return gl.TarShards(archive(folder / f"{CONTROL}.tar", [(name, b"\xff") for name in names]), **options)


def csv(folder: Path, text: str) -> Any:
    path = folder / "a.csv"
    path.write_text(text, newline="")
    return gl.FileList(path)


def classes(folder: Path) -> Any:
    (folder / CONTROL).mkdir()
    return gl.ImageFolder(folder)


def existing_files(folder: Path) -> Any:
    (folder / CONTROL).write_bytes(IMAGE)
    (folder / "1.jpg").write_bytes(IMAGE)
    return gl.pack(gl.ImageFiles(folder), folder, to="tar")


CASES: dict[str, Callable[[Path], Any]] = {
    "a column of Parquet": lambda folder: gl.Parquet(parquet(folder)),
    "a column's type": lambda folder: gl.Parquet(parquet(folder), image="image", target=None),
    "a column of a list": lambda folder: gl.FileList(parquet(folder)),
    "a dataset of HDF5": lambda folder: gl.HDF5(hdf5(folder)),
    "a key of LMDB": lambda folder: gl.LMDB(lmdb_with(folder, {CONTROL.encode(): b"1"}), image="{}.jpg"),
    "a target of LMDB": lambda folder: gl.LMDB(lmdb_with(folder, TARGETS), image="{}.i", target="{}.t")[0],
    "an image of COCO": coco,
    "a field of a tar": lambda folder: shards(folder, f"a.{CONTROL}", fields="jpg")[0],
    "a key of a tar": lambda folder: shards(folder, f"{CONTROL}.cls", fields="cls")[0],
    "a name twice in a tar": lambda folder: shards(folder, f"{CONTROL}.{CONTROL}", f"{CONTROL}.{CONTROL}"),
    "a stream of a tar": lambda folder: list(shards(folder, f"{CONTROL}.cls", fields="jpg", stream=True)),
    "the header of a CSV": lambda folder: csv(folder, f'"{CONTROL}",label\n1,2\n'),
    "a row of a CSV": lambda folder: csv(folder, f'path,label\n"{CONTROL}"\n'),
    "a path of a CSV": lambda folder: csv(folder, f'path,label\n"../{CONTROL}",1\n'),
    "a class": classes,
    "another file where a set goes": existing_files,
}


@pytest.mark.parametrize("case", CASES)
def test_errors_of_datasets_contain_no_control_characters(tmp_path: Path, case: str) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, OSError, gl.GpuloadError)) as caught:
        CASES[case](tmp_path)
    assert str(caught.value).replace("\n", "").isprintable(), str(caught.value)
    assert r"\x1b" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_samples_contain_no_control_characters(tmp_path: Path, workers: int) -> None:
    path = tmp_path / f"{CONTROL}.jpg"
    path.write_bytes(b"nothing")

    class Failing:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise RuntimeError(f"two\tlines\n{CONTROL}")
            return gl.Encoded(IMAGE) if index else gl.read(path)

    for index in range(2):
        loader = gl.Loader(Failing(), sampler=[index], num_workers=workers, device="cpu")
        with pytest.raises(SampleError) as caught, loader:
            next(iter(loader))
        for text in (str(caught.value), caught.value.worker_traceback, caught.value.record.describe()):
            assert text.replace("\n", "").replace("\t", "").isprintable(), text
        assert r"\x1b]0;owned\x07\x1b[2J" in str(caught.value)
    skip = gl.Faults(on_error="skip", max_error_rate=1)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        with gl.Loader(Failing(), 3, num_workers=workers, device="cpu", faults=skip) as loader:
            assert [len(batch) for batch in loader] == [1]
    assert recorded, "no warning names the skipped samples"
    for warning in recorded:
        assert str(warning.message).replace("\n", "").isprintable(), warning.message


def test_error_record_stores_source_and_index_unchanged() -> None:
    record = ErrorRecord(epoch=0, position=1, index=CONTROL, source=CONTROL, cause="it", traceback="")
    assert record.source == SampleError(record).source == CONTROL
    assert ESCAPED in record.describe()


@pytest.mark.parametrize("command", ["inspect", "pack", "verify", "index", "bench"])
def test_output_of_commands_contains_no_control_characters(tmp_path: Path, command: str) -> None:
    data = tmp_path / CONTROL
    for number in range(2):
        path = data / f"{CONTROL}{number}" / f"{CONTROL}.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(IMAGE if number else b"nothing")
    packed = tmp_path / f"{CONTROL}.set"
    gl.pack(gl.ImageFolder(data), packed, to="tar", workers=0, skip_bad=True)
    (packed / f"{CONTROL}.tar").write_bytes(b"")
    arguments: dict[str, list[Any]] = {
        "inspect": [data, "--html", "", "--workers", "0"],
        "pack": [data, tmp_path / f"{CONTROL}.other", "--to", "tar", "--workers", "0"],
        "verify": [packed],
        "index": [packed / f"{CONTROL}.tar"],
        "bench": [packed / f"{CONTROL}.tar"],
    }
    result = CliRunner().invoke(app, [command, *map(str, arguments[command])])
    assert result.exit_code in (1, 3), result.output
    for text in (result.stdout, result.stderr):
        assert text.replace("\n", "").isprintable(), text
    assert r"\x1b" in result.output


def test_messages_of_servers_contain_no_control_characters() -> None:
    failure = failure_of(RuntimeError(f"no {CONTROL}"), "https://host/a.jpg", 1)
    assert ESCAPED.removesuffix(r"\r") in failure.message


def test_visible_escapes_control_characters() -> None:
    assert visible("plain ünï") == "plain ünï"
    assert visible("a\tb\r\n\x00\u200b\udcff\ud800") == "a\\tb\\r\\n\\x00\\u200b\\xff\\ud800"
    assert visible("a\nb\tc\x1b", "\n\t") == "a\nb\tc\\x1b"
    assert visible(os.fsencode("ä\udcff\n")) == "ä\\xff\\n"
    assert one_line("a\n\x1b[31m b\r\n") == "a; \\x1b[31m b"
    assert str(gl.GpuloadError(f"{CONTROL}\n")) == f"{ESCAPED}\n"
    assert str(gl.DecodeError("a")) == "a"
