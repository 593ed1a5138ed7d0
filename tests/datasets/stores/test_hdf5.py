"""HDF5 files: bytes and pixels, how much is read, and what is refused."""

from __future__ import annotations

import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from descriptors import open_below
from stored import COUNT, LABELS, check_loader, jpegs

import gpuload as gl
from gpuload.datasets.stores.hdf5 import HDF5

PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 24, 32, 3), np.uint8)


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


def written(path: Path, *, pixels: bool = False, labels: Any = LABELS, **options: Any) -> Path:
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
def test_batches_are_those_of_the_images(tmp_path: Path) -> None:
    check_loader(HDF5(written(tmp_path / "a.h5")))


def test_batches_are_those_of_the_pixels(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", pixels=True, chunks=(5, 24, 32, 3), compression="gzip")
    dataset = HDF5(path)
    order = [7, 2, 11, 3, 7]
    assert [label for _, label in dataset.__getitems__(order)] == [LABELS[number] for number in order]
    for (image, _), number in zip(dataset.__getitems__(order), order, strict=True):
        assert (image.hwc == PIXELS[number]).all()


def test_encoded_images(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5")
    dataset = HDF5(path, mode="L")
    assert dataset[-1] == (gl.Encoded(jpegs()[11], "L", f"{path}: 'images', row 11"), 2)
    assert (len(dataset), type(dataset[0][1])) == (COUNT, int)
    assert HDF5(path, target=None)[4].data == jpegs()[4]
    assert repr(dataset) == f"HDF5('{path}': 12 samples in 'images')"


def test_other_targets_and_layouts(tmp_path: Path) -> None:
    texts = HDF5(written(tmp_path / "a.h5", labels=[f"ä{n}" for n in range(COUNT)]))
    assert texts[3][1] == "ä3"
    arrays = np.arange(COUNT * 6.0).reshape(COUNT, 6)
    path = written(tmp_path / "b.h5", pixels=True, labels=arrays)
    assert HDF5(path)[5][1].tolist() == arrays[5].tolist()
    assert HDF5(path, as_dtype="float32")[1][0].hwc.dtype == np.float32
    assert HDF5(path, layout="data")[1][0].tolist() == PIXELS[1].tolist()


@pytest.mark.parametrize(
    ("chunks", "spans"),
    [((5, 24, 32, 3), [(1, 4), (7, 8), (11, 12)]), (None, [(1, 2), (3, 4), (7, 8), (11, 12)])],
)
def test_one_read_for_each_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: Any, spans: list) -> None:
    dataset = HDF5(written(tmp_path / "a.h5", pixels=True, chunks=chunks))
    reads: list[tuple[int, int]] = []
    real = h5py.Dataset.__getitem__

    def watched(self: Any, place: Any, *more: Any) -> Any:
        if isinstance(place, slice):
            reads.append((place.start, place.stop))
        return real(self, place, *more)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", watched)
    dataset.__getitems__([7, 3, 1, 11, 7])
    assert reads == spans


def test_pickled_without_its_descriptor(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5")
    dataset = HDF5(path)
    assert open_below(tmp_path) == 0
    assert dataset[1][0].data == jpegs()[1]
    assert open_below(tmp_path) == 1
    copy = pickle.loads(pickle.dumps(dataset))
    assert open_below(tmp_path) == 1
    dataset.close()
    assert open_below(tmp_path) == 0
    assert copy[1][0].data == jpegs()[1]


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5")
    dataset = HDF5(path)
    os.truncate(path, path.stat().st_size - 500)
    with pytest.raises(ValueError, match=r"a.h5' is no HDF5 file, or is cut off: .*truncated file"):
        HDF5(path)
    with pytest.raises(gl.DecodeError, match="it has been written to since the dataset was made, when it had"):
        dataset[0]
    path.write_bytes(b"no HDF5")
    with pytest.raises(ValueError, match=r"a.h5' is no HDF5 file, or is cut off: .*signature not found"):
        HDF5(path)


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", pixels=True, chunks=(4, 24, 32, 3), compression="gzip")
    with h5py.File(path) as file:
        where = file["images"].id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as file:
        file.seek(where + 100)
        file.write(bytes(500))
    dataset = HDF5(path)
    message = f"^{re.escape(repr(str(path)))}: rows 5 to 6 of '/images' cannot be read: "
    with pytest.raises(gl.DecodeError, match=message) as caught:
        dataset.__getitems__([6, 0, 5])
    assert caught.value.filename == str(path)
    assert (dataset[3][0].hwc == PIXELS[3]).all()


def strings(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["images"] = [b"abc"] * 3


def none(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["train/x"] = [1]
        file["y"] = [[2]]


def elsewhere(path: Path) -> None:
    written(path.parent / "other.h5")
    with h5py.File(path, "w") as file:
        file["images"] = h5py.ExternalLink("other.h5", "images")


def virtual(path: Path) -> None:
    written(path.parent / "other.h5", pixels=True)
    layout = h5py.VirtualLayout(PIXELS.shape, "uint8")
    layout[:] = h5py.VirtualSource("other.h5", "images", PIXELS.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("images", layout)


def external(path: Path) -> None:
    (path.parent / "numbers").write_bytes(PIXELS.tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset("images", PIXELS.shape, "uint8", external=str(path.parent / "numbers"))


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (virtual, {"target": None}, ValueError, "lies in other files, which are not read because a data file names"),
        (external, {"target": None}, ValueError, "lies in other files, which are not read because a data file names"),
        (
            none,
            {},
            ValueError,
            "has no dataset 'images' with an axis of samples; it has 'train/x', 'y'. Say which with image=",
        ),
        (written, {"target": "y"}, ValueError, "Say which with target=, or target=None"),
        (strings, {"target": None}, TypeError, "expected numbers N×…, or bytes of varying length, of h5py.vlen_dtype("),
        (elsewhere, {"target": None}, ValueError, "lies in other files, which are not read because a data file names"),
        (written, {"layout": "HWC"}, ValueError, "holds encoded images; layout= and as_dtype= are for pixels"),
        (written, {"cache_bytes": -1}, ValueError, "cache_bytes must be a number of bytes, 0 or more, got -1"),
        (
            lambda path: written(path, labels=[1, 2]),
            {},
            ValueError,
            "has 2 targets in 'labels', but 12 images in 'images'; there must be one for each",
        ),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, make: Any, options: dict, error: type[Exception], message: str) -> None:
    make(tmp_path / "a.h5")
    with pytest.raises(error, match=re.escape(message)):
        HDF5(tmp_path / "a.h5", **options)


def test_without_h5py_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    message = "gpuload.HDF5 needs h5py, which is not installed: pip install 'gpuload[hdf5]'"
    with pytest.raises(ModuleNotFoundError, match=exactly(message)):
        HDF5(path)


def test_chunks_are_its_blocks(tmp_path: Path) -> None:
    assert HDF5(written(tmp_path / "a.h5", pixels=True, chunks=(5, 24, 32, 3))).blocks().tolist() == [0, 5, 10, 12]
    assert HDF5(written(tmp_path / "b.h5", pixels=True, chunks=(1, 24, 32, 3))).blocks() is None
    assert HDF5(written(tmp_path / "c.h5", pixels=True)).blocks() is None, "not in chunks"
