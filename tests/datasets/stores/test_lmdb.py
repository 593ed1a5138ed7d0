"""`LMDB`: samples from keys, databases that another process changes, and errors."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb
import pytest
from helpers.file_descriptors import open_below
from helpers.jpeg_dataset import COUNT, LABELS, check_loader, jpegs
from helpers.patterns import exactly, starting

import gpuload as gl
from gpuload.datasets.kinds import is_deterministic, uses_getitems
from gpuload.datasets.stores.lmdb import LMDB


def write_lmdb(path: Path, content: Mapping[bytes, bytes], database: bytes | None = None, **options: Any) -> Path:
    with lmdb.open(str(path), map_size=1 << 24, max_dbs=4, **options) as env:
        named_database = env.open_db(database)
        with env.begin(write=True, db=named_database) as transaction:
            for key, value in content.items():
                transaction.put(key, value)
    return path


def make_images() -> dict[bytes, bytes]:
    return {b"%08d" % number: data for number, data in enumerate(jpegs())}


def make_images_and_labels() -> dict[bytes, bytes]:
    content = {b"%03d.jpg" % number: data for number, data in enumerate(jpegs())}
    return content | {b"%03d.cls" % number: b"%d" % label for number, label in enumerate(LABELS)}


@pytest.mark.processes
def test_lmdb_batches_equal_batches_of_the_images(tmp_path: Path) -> None:
    check_loader(LMDB(write_lmdb(tmp_path, make_images_and_labels()), image="{}.jpg", target="{}.cls"))


def test_lmdb_yields_each_value_in_the_order_of_the_keys(tmp_path: Path) -> None:
    write_lmdb(tmp_path, {**make_images(), b"__len__": b"12"})
    dataset = LMDB(tmp_path, mode="L")
    assert dataset[-1] == gl.Encoded(jpegs()[11], "L", f"{tmp_path}/data.mdb: key '00000011'")
    assert (len(dataset), dataset.keys[0]) == (COUNT, "00000000")
    assert [image.data for image in dataset.__getitems__([5, 2, 5])] == [jpegs()[n] for n in (5, 2, 5)]
    assert LMDB(tmp_path, labels=LABELS)[4] == (gl.Encoded(jpegs()[4], "RGB", dataset[4].source), 1)
    assert repr(dataset) == f"LMDB('{tmp_path}': 12 keys)"


def test_lmdb_reads_a_file_and_a_named_database(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "all.mdb", {b"one": jpegs()[0]}, database=b"train", subdir=False)
    assert LMDB(path, database="train")[0].data == jpegs()[0]
    with pytest.raises(ValueError, match=re.escape(f"{str(path)!r} has no database named 'test': ")):
        LMDB(path, database="test")


def test_lmdb_reads_images_and_targets_by_patterns_of_keys(tmp_path: Path) -> None:
    content = {b"image-%03d" % n: data for n, data in enumerate(jpegs())}
    content |= {b"label-%03d" % n: f"wört {n}".encode() for n in range(COUNT)} | {b"num-samples": b"12"}
    dataset = LMDB(write_lmdb(tmp_path, content), image="image-{}", target="label-{}", target_type="text")
    assert len(dataset) == COUNT
    assert (dataset[3][0].data, dataset[3][1]) == (jpegs()[3], "wört 3")
    for target, message in (
        (
            "label-{}",
            "the target under key b'label-003' is b'w\\xc3\\xb6rt 3'; expected an integer; for other values, use "
            "target_type='text' or decode=",
        ),
        ("class-{}", "it lacks the key b'class-003', which a sample needs"),
    ):
        with pytest.raises(gl.DecodeError, match=re.escape(message)):
            LMDB(tmp_path, image="image-{}", target=target)[3]
    write_lmdb(folder := tmp_path / "other", {b"image-": b""})
    message = f"^{re.escape(repr(str(folder / 'data.mdb')))}: the value of key b'' cannot be read: .*MDB_BAD_VALSIZE"
    with pytest.raises(gl.DecodeError, match=message):
        LMDB(folder, image="image-{}", target="{}")[0]


def test_lmdb_decode_reads_values_in_another_format(tmp_path: Path) -> None:
    dataset = LMDB(write_lmdb(tmp_path, {b"7": b"ab"}), decode=lambda key, value: (value[::-1], int(key)))
    assert dataset[0] == (b"ba", 7)
    assert not is_deterministic(dataset), "a function of the user may be random"
    assert not uses_getitems(dataset)
    assert is_deterministic(LMDB(tmp_path))


def test_lmdb_refuses_pickles(tmp_path: Path) -> None:
    class ExitsWhenUnpickled:
        def __reduce__(self) -> Any:
            return os._exit, (3,)

    write_lmdb(tmp_path, {b"one": pickle.dumps(ExitsWhenUnpickled()), b"two": jpegs()[0]})
    dataset = LMDB(tmp_path)
    with pytest.raises(gl.DecodeError, match="the value of key b'one' looks like a pickle, which gpuload never loads"):
        dataset[0]
    assert dataset[1].data == jpegs()[0]


WRITER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], map_size=1 << 24)
transaction = env.begin(write=True)
transaction.put(b"00000003", b"new")
print("written", flush=True)
sys.stdin.readline()
transaction.commit()
print("committed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.processes
def test_lmdb_refuses_to_read_after_another_process_committed(tmp_path: Path) -> None:
    write_lmdb(tmp_path, make_images())
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        dataset = LMDB(tmp_path)
        assert dataset[3].data == jpegs()[3], "an uncommitted transaction must not be visible"
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "committed\n"
        message = (
            f"'{tmp_path}/data.mdb': it was written to after the dataset was created (transaction 1 then, 2 now). It "
            "is read without a lock, so no process may write to it meanwhile: create the dataset again when the writer "
            "has finished, or read a copy"
        )
        for reader in (dataset, pickle.loads(pickle.dumps(dataset))):
            with pytest.raises(gl.DecodeError, match=exactly(message)):
                reader[5]
        assert LMDB(tmp_path)[3].data == b"new", "a new dataset must read the new value"
        writer.stdin.write("\n")


def test_lmdb_refuses_a_database_that_was_replaced(tmp_path: Path) -> None:
    """Both databases have the same transaction ID."""
    path, replacement = (write_lmdb(tmp_path / name, make_images()) / "data.mdb" for name in ("a", "b"))
    dataset = LMDB(path)
    assert dataset[1].data == jpegs()[1]
    dataset.close()
    os.utime(path)
    assert dataset[1].data == jpegs()[1]
    dataset.close()
    os.replace(replacement, path)
    with pytest.raises(gl.DecodeError, match=r"a/data.mdb': it was replaced by another file after the dataset was"):
        dataset[1]


def test_lmdb_reads_a_new_database_while_the_replaced_database_is_open(tmp_path: Path) -> None:
    path, replacement = (write_lmdb(tmp_path / name, {b"1": jpegs()[n]}) / "data.mdb" for n, name in enumerate("ab"))
    old = LMDB(path)
    assert old[0].data == jpegs()[0]
    os.replace(replacement, path)
    assert LMDB(path)[0].data == jpegs()[1]
    assert old[0].data == jpegs()[0]


def test_lmdb_pickles_without_its_descriptor(tmp_path: Path) -> None:
    write_lmdb(tmp_path, make_images())
    dataset = LMDB(tmp_path)
    assert open_below(tmp_path) == 0
    assert dataset[1].data == jpegs()[1]
    assert open_below(tmp_path) == 1
    copy = pickle.loads(pickle.dumps(dataset))
    second = LMDB(tmp_path)
    assert second[2].data == copy[2].data == jpegs()[2], "a process opens a file once, so the datasets share it"
    assert open_below(tmp_path) == 1
    for each in (dataset, copy, second):
        each.close()
    assert open_below(tmp_path) == 0


def test_lmdb_keys_are_cached_until_the_database_changes(
    tmp_path: Path, index_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lmdb(tmp_path / "set", make_images())
    dataset = LMDB(tmp_path / "set")
    assert len(os.listdir(index_cache)) == 1
    with monkeypatch.context() as patch:
        patch.setattr("gpuload.datasets.stores.lmdb._list_keys_in_subprocess", None)
        assert LMDB(tmp_path / "set").keys == dataset.keys
    assert dataset.keys.nbytes < 13 * (COUNT + 1)  # 8 for a key, and 4 for its offset
    dataset.close()
    write_lmdb(tmp_path / "set", {b"more": b"", b"other": b""})
    assert len(LMDB(tmp_path / "set")) == COUNT + 2


@pytest.mark.parametrize("kind", ["cut off", "empty", "not LMDB"])
def test_lmdb_refuses_truncated_files_and_other_formats(tmp_path: Path, kind: str) -> None:
    path = write_lmdb(tmp_path, make_images()) / "data.mdb"
    size = path.stat().st_size
    if kind == "cut off":
        os.truncate(path, 4096 * 4)
        pages = size // 4096
        message = f"{str(path)!r} is truncated: its last page ends at {pages * 4096:,} bytes, but the file has 16,384; "
    else:
        path.write_bytes(b"" if kind == "empty" else b"x" * 10_000)
        message = f"{str(path)!r} cannot be opened as an LMDB database: "
    with pytest.raises(ValueError, match=starting(message)):
        LMDB(tmp_path)


def test_lmdb_errors_about_damaged_pages_name_the_file(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path, {b"%08d" % number: b"" for number in range(1000)}) / "data.mdb"
    valid = path.read_bytes()
    content = bytearray(valid)
    # Of the two meta pages, the one with the later transaction ID, which is in bytes 144 … 151.
    meta = max((0, 4096), key=lambda page: content[page + 144 : page + 152][::-1])
    content[meta + 128 : meta + 136] = (1 << 40).to_bytes(8, "little")  # the root is beyond the last page
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(repr(str(path)))} cannot be read: .*MDB_PAGE_NOTFOUND"):
        LMDB(tmp_path)
    content = bytearray(valid)
    kind_offsets = range(2 * 4096 + 10, len(content), 4096)  # of each page's kind; 2 means keys
    for offset in [offset for offset in kind_offsets if content[offset] == 2][1:]:
        content[offset] = 0
    path.write_bytes(content)
    message = (
        f"{str(path)!r} is damaged: LMDB crashed the process that read its keys (SIGABRT); copy or write the file again"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        LMDB(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"image": "jpg"}, ValueError, "image must be a pattern of keys with one {} in it, as in '{}.jpg', got 'jpg'"),
        ({"image": "{}", "target": "{}{}"}, ValueError, "target must be a pattern of keys with one {} in it"),
        ({"target": "{}.cls"}, ValueError, "target= needs image=, the pattern"),
        ({"image": "{}.png"}, ValueError, "no keys that match '{}.png'; its first keys are: b'00000000', b'0000000"),
        ({"labels": [1], "decode": print}, ValueError, "target=, labels= and decode= cannot be combined"),
        ({"labels": [1]}, ValueError, "labels must have one entry for each of the 12 keys of"),
    ],
)
def test_lmdb_refuses_wrong_arguments(tmp_path: Path, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        LMDB(write_lmdb(tmp_path, make_images()), **options)


def test_lmdb_refuses_missing_and_empty_databases(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.mdb' does not exist; expected an LMDB database \(got "):
        LMDB(tmp_path)
    with pytest.raises(ValueError, match=r"data.mdb' has no keys; its first keys are: none$"):
        LMDB(write_lmdb(tmp_path, {}))
