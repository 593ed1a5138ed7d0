"""`HDF5`: encoded images and pixels, chunks, and errors about files."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers.file_descriptors import open_below
from helpers.jpeg_dataset import COUNT, LABELS, check_loader, jpegs
from helpers.patterns import starting
from helpers.programs import run_python

import gpuload as gl
from gpuload.datasets.files import size_limits
from gpuload.datasets.stores.hdf5 import HDF5

PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 24, 32, 3), np.uint8)
IN_OTHER_FILES = "in other files, which gpuload does not open on behalf of a data file"


def write_hdf5(path: Path, *, pixels: bool = False, labels: Any = LABELS, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        if pixels:
            file.create_dataset("images", data=PIXELS, **options)
        else:
            images = file.create_dataset("images", COUNT, h5py.vlen_dtype("uint8"), **options)
            for number, data in enumerate(jpegs()):
                images[number] = np.frombuffer(data, np.uint8)
        file["labels"] = labels
    return path


@pytest.mark.processes
def test_hdf5_batches_equal_batches_of_the_images(tmp_path: Path) -> None:
    check_loader(HDF5(write_hdf5(tmp_path / "a.h5")))


def test_hdf5_reads_encoded_images(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5")
    dataset = HDF5(path, mode="L")
    assert dataset[-1] == (gl.Encoded(jpegs()[11], "L", f"{path}: 'images', row 11"), 2)
    assert (len(dataset), type(dataset[0][1])) == (COUNT, int)
    assert HDF5(path, target=None)[4].data == jpegs()[4]
    assert repr(dataset) == f"HDF5('{path}': 12 samples in 'images')"


def test_hdf5_reads_string_and_array_targets_and_the_data_layout(tmp_path: Path) -> None:
    texts = HDF5(write_hdf5(tmp_path / "a.h5", labels=[f"ä{n}" for n in range(COUNT)]))
    assert texts[3][1] == "ä3"
    arrays = np.arange(COUNT * 6.0).reshape(COUNT, 6)
    path = write_hdf5(tmp_path / "b.h5", pixels=True, labels=arrays)
    assert HDF5(path)[5][1].tolist() == arrays[5].tolist()
    assert HDF5(path, as_dtype="float32")[1][0].hwc.dtype == np.float32
    assert HDF5(path, layout="data")[1][0].tolist() == PIXELS[1].tolist()


@pytest.mark.parametrize("cache_bytes", [0, 32 << 20])
def test_hdf5_reads_rows_in_any_order_and_each_chunk_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    path = write_hdf5(tmp_path / "a.h5", pixels=True, chunks=(5, 24, 32, 3), compression="gzip")
    with h5py.File(path) as file:
        offsets = [file["images"].id.get_chunk_info(chunk).byte_offset for chunk in range(3)]
    read_offsets: list[int] = []

    class RecordingFile(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            read_offsets.append(self.tell())
            return super().readinto(buffer)

    open_file, recording_file = h5py.File, RecordingFile(path.read_bytes())
    monkeypatch.setattr(h5py, "File", lambda _, mode, locking, **options: open_file(recording_file, mode, **options))
    dataset, indices = HDF5(path, cache_bytes=cache_bytes), [7, 3, 11, 1, 7, 9]
    read_offsets.clear()
    samples = dataset.__getitems__(indices)
    assert [read_offsets.count(offset) for offset in offsets] == [1, 1, 1]
    assert [label for _, label in samples] == [LABELS[index] for index in indices]
    for (image, _), index in zip(samples, indices, strict=True):
        assert (image.hwc == PIXELS[index]).all()


def test_hdf5_pickles_without_its_descriptor(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5")
    dataset = HDF5(path)
    assert open_below(tmp_path) == 0
    assert dataset[1][0].data == jpegs()[1]
    assert open_below(tmp_path) == 1
    copy = pickle.loads(pickle.dumps(dataset))
    assert open_below(tmp_path) == 1
    dataset.close()
    assert open_below(tmp_path) == 0
    assert copy[1][0].data == jpegs()[1]


def test_hdf5_refuses_truncated_files_and_other_formats(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5")
    dataset = HDF5(path)
    os.truncate(path, path.stat().st_size - 500)
    with pytest.raises(ValueError, match=r"a.h5' is not an HDF5 file, or is truncated: .*truncated file"):
        HDF5(path)
    with pytest.raises(gl.DecodeError, match=r"it was cut from [\d,]+ to [\d,]+ bytes after the dataset was created"):
        dataset[0]
    path.write_bytes(b"no HDF5")
    with pytest.raises(ValueError, match=r"a.h5' is not an HDF5 file, or is truncated: .*signature not found"):
        HDF5(path)


def test_hdf5_refuses_a_replaced_file_and_reads_an_extended_file(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5")
    dataset = HDF5(path)
    with h5py.File(path, "r+") as file:
        file["more"] = np.zeros(1000)
    assert dataset[1][0].data == jpegs()[1]
    dataset.close()
    os.replace(write_hdf5(tmp_path / "b.h5"), path)
    with pytest.raises(gl.DecodeError, match=r"a.h5': it was replaced by another file after the dataset was created"):
        dataset[1]


def test_hdf5_names_a_damaged_chunk(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", pixels=True, chunks=(4, 24, 32, 3), compression="gzip")
    with h5py.File(path) as file:
        chunk_offset = file["images"].id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as file:
        file.seek(chunk_offset + 100)
        file.write(bytes(500))
    dataset = HDF5(path)
    message = f"^{re.escape(repr(str(path)))}: row 5 of '/images' cannot be read: "
    with pytest.raises(gl.DecodeError, match=message) as caught:
        dataset.__getitems__([6, 0, 5])
    assert caught.value.filename == str(path)
    assert (dataset[3][0].hwc == PIXELS[3]).all()


def test_hdf5_reads_up_to_16_adjacent_rows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        images = file.create_dataset("images", 50, h5py.vlen_dtype("uint8"))
        for number in range(50):
            images[number] = np.full(number, number, np.uint8)
    dataset = HDF5(tmp_path / "a.h5", target=None)
    requests: list[Any] = []
    read_rows = h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda self, rows: requests.append(rows) or read_rows(self, rows))
    indices = [49, *range(3, 22), 1, 24, 25, 5]
    assert [image.data for image in dataset.__getitems__(indices)] == [bytes([number]) * number for number in indices]
    # Rows 3 … 21 are adjacent, so they are read in calls of 16 rows and of the last 3.
    assert requests == [1, slice(3, 19), slice(19, 22), slice(24, 26), 49]
    assert dataset.__getitems__([]) == []


def test_hdf5_names_the_damaged_row_of_rows_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = HDF5(write_hdf5(tmp_path / "a.h5"))
    read_rows = h5py.Dataset.__getitem__

    def read_undamaged_rows(images: h5py.Dataset, rows: Any) -> Any:
        if 4 in np.atleast_1d(np.arange(COUNT)[rows]):
            raise OSError("bad heap")
        return read_rows(images, rows)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", read_undamaged_rows)
    with pytest.raises(gl.DecodeError, match=r": row 4 of '/images' cannot be read: bad heap$"):
        dataset.__getitems__(range(2, 8))


def test_hdf5_cache_holds_a_chunk_of_variable_length_data(tmp_path: Path) -> None:
    dataset = HDF5(write_hdf5(tmp_path / "a.h5", chunks=(6,)), cache_bytes=0)
    row_bytes = 16  # in the file: a length, the address of a heap, and an index into it
    assert dataset._cache_bytes == 6 * row_bytes
    assert HDF5(write_hdf5(tmp_path / "b.h5"), cache_bytes=0)._cache_bytes == 0, "unchunked data need no cache"


def write_strings(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["images"] = [b"abc"] * 3


def write_no_samples(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["train/x"] = [1]
        file["y"] = [[2]]


def write_external_link(path: Path) -> None:
    write_hdf5(path.parent / "other.h5")
    with h5py.File(path, "w") as file:
        file["images"] = h5py.ExternalLink("other.h5", "images")


def write_virtual(path: Path) -> None:
    write_hdf5(path.parent / "other.h5", pixels=True)
    layout = h5py.VirtualLayout(PIXELS.shape, "uint8")
    layout[:] = h5py.VirtualSource("other.h5", "images", PIXELS.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("images", layout)


def write_external(path: Path) -> None:
    (path.parent / "numbers").write_bytes(PIXELS.tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset("images", PIXELS.shape, "uint8", external=str(path.parent / "numbers"))


READ_THROUGH_LINKS = """
import os, sys
import h5py
from gpuload.datasets.stores.hdf5 import HDF5
os.mkfifo("pipe.h5")
with h5py.File("a.h5", "w") as file:
    file["images"] = h5py.ExternalLink("pipe.h5", "images")
    file["soft"] = h5py.SoftLink("/group/outside/images")
    file.create_group("group")["outside"] = h5py.ExternalLink("pipe.h5", "/")
    file["circular"] = h5py.SoftLink("circular")
for name in ("images", "soft", "group/outside/images", "none", "circular"):
    try:
        HDF5("a.h5", image=name, target=None)
    except ValueError as error:
        print(str(error).partition(" is stored")[2] or str(error).partition(" has ")[2])
"""


@pytest.mark.processes
def test_hdf5_does_not_follow_links_into_other_files(tmp_path: Path) -> None:
    """Opening a FIFO blocks, even on Ctrl-C, until a process writes to it, so this runs in a process of its own."""
    lines = run_python(READ_THROUGH_LINKS, cwd=tmp_path)[0].splitlines()
    refusal = f" {IN_OTHER_FILES}; copy the dataset into this file"
    assert lines[:3] == [refusal] * 3
    assert lines[3].startswith("no dataset 'none' with an axis of samples; it has none.")
    assert lines[4] == refusal, "a circular link must be refused, as its target is unknown"


def test_hdf5_searches_a_limited_number_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file
        for depth in range(300):
            group = group.create_group("g")
            group[f"d{depth:03}"] = [depth]
    visited: list[str] = []
    get_item = h5py.Group.__getitem__
    monkeypatch.setattr(h5py.Group, "__getitem__", lambda self, name: visited.append(name) or get_item(self, name))
    with pytest.raises(ValueError, match=r"it has 'g/d000', 'g/g/d001', .*/d019', …\. Choose one with image="):
        HDF5(tmp_path / "a.h5")
    assert len(visited) < 50  # for the 20 datasets listed, of which each is in a group of its own
    monkeypatch.setattr("gpuload.datasets.stores.hdf5.MAX_SEARCHED", 5)
    with pytest.raises(ValueError, match=r"it has 'g/d000', 'g/g/d001', …\. Choose one"):
        HDF5(tmp_path / "a.h5")
    monkeypatch.setattr("gpuload.datasets.stores.hdf5.MAX_SEARCHED", 1)
    with pytest.raises(ValueError, match=r"it has none among its first 1 objects\. Check the file"):
        HDF5(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("shape", "chunks", "nbytes"),
    [
        ((3, 12_000, 12_000, 9), (1, 100, 100, 9), "1,296,000,000"),
        ((1 << 20, 64, 64, 1), (1 << 18, 64, 64, 1), "1,073,741,824"),
    ],
)
def test_hdf5_refuses_samples_and_chunks_beyond_max_bytes(
    tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], nbytes: str
) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", shape, "uint8", chunks=chunks)
    assert path.stat().st_size < 10_000
    dataset = HDF5(path, target=None)
    message = starting(f"{str(path)!r}: a sample or chunk of '/images' takes {nbytes} bytes")
    with size_limits((1 << 30) - 1), pytest.raises(gl.DecodeError, match=f"{message}.*more than max_bytes=1,073"):
        dataset[0]


def test_hdf5_refuses_images_beyond_max_pixels(tmp_path: Path) -> None:
    dataset = HDF5(write_hdf5(tmp_path / "a.h5", pixels=True), target=None)
    message = rf"^an image in 'images' of {re.escape(repr(dataset.path))} has 32×24 = 768 pixels, more than max_pixels="
    with size_limits(max_bytes=None, max_pixels=700), pytest.raises(gl.DecodeError, match=message):
        dataset[0]
    with size_limits(max_bytes=None, max_pixels=768):
        assert dataset[0].hwc.shape == (24, 32, 3)


def test_hdf5_refuses_targets_beyond_the_limit(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("images", "labels"):
            file.create_dataset(name, (1 << 28,), "int64", chunks=(1 << 20,))
    with pytest.raises(ValueError, match=r"a.h5' take 2,147,483,648 bytes, which exceeds the limit of 1,073,741,824"):
        HDF5(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (os.mkfifo, {}, OSError, "a.h5' is a FIFO; expected an HDF5 file, as a regular file"),
        *(
            (write, {"target": None}, ValueError, f"is stored {IN_OTHER_FILES}")
            for write in (write_virtual, write_external, write_external_link)
        ),
        (
            write_no_samples,
            {},
            ValueError,
            "has no dataset 'images' with an axis of samples; it has 'train/x', 'y'. Choose one with image=",
        ),
        (write_hdf5, {"target": "y"}, ValueError, "Choose one with target=, or pass target=None"),
        (write_strings, {"target": None}, TypeError, "expected an N×… array of numbers, or variable-length bytes of t"),
        (write_hdf5, {"layout": "HWC"}, ValueError, "holds encoded images; omit layout= and as_dtype="),
        (
            lambda path: write_hdf5(path, labels=[1, 2]),
            {},
            ValueError,
            "has 2 targets in 'labels', but 12 images in 'images'; expected one target per image",
        ),
    ],
)
def test_hdf5_refuses_files_and_options_that_do_not_match(
    tmp_path: Path, make: Any, options: dict, error: type[Exception], message: str
) -> None:
    make(tmp_path / "a.h5")
    with pytest.raises(error, match=re.escape(message)):
        HDF5(tmp_path / "a.h5", **options)


def test_hdf5_blocks_are_chunks(tmp_path: Path) -> None:
    assert HDF5(write_hdf5(tmp_path / "a.h5", pixels=True, chunks=(5, 24, 32, 3))).blocks().tolist() == [0, 5, 10, 12]
    assert HDF5(write_hdf5(tmp_path / "b.h5", pixels=True, chunks=(1, 24, 32, 3))).blocks() is None
    assert HDF5(write_hdf5(tmp_path / "c.h5", pixels=True)).blocks() is None, "unchunked data have no blocks"
