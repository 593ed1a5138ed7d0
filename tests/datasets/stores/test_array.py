"""`ArrayFile`: samples and labels of arrays in a file, and errors about files."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.both_loaders import gpuload_batches
from helpers.file_descriptors import open_below
from helpers.jpeg_dataset import check_loader
from helpers.patterns import exactly

import gpuload as gl
from gpuload.datasets.stores.array import COLD_CHUNKS, ArrayFile

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 24, 32, 3), np.uint8)


def write_npy(folder: Path, array: np.ndarray, **options: object) -> Path:
    path = folder / "array.npy"
    np.save(path, array, **options)
    return path


@pytest.mark.processes
def test_array_file_batches_equal_batches_of_the_pixels(tmp_path: Path) -> None:
    labels = write_npy(tmp_path, np.arange(12)).rename(tmp_path / "labels.npy")
    check_loader(ArrayFile(write_npy(tmp_path, PIXELS), labels=labels), list(PIXELS), range(12))


def test_array_file_samples_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    dataset = ArrayFile(write_npy(tmp_path, PIXELS), labels=np.arange(12, dtype=np.uint8))
    image, label = dataset[-2]
    assert (image.hwc == PIXELS[10]).all()
    assert (label, type(label)) == (10, int)
    assert not image.hwc.flags.writeable, "a view of the file must be read-only"
    assert np.shares_memory(dataset[10][0].hwc, image.hwc)
    assert [label for _, label in dataset.__getitems__([3, 1, 3])] == [3, 1, 3]
    assert ArrayFile(dataset.path).__getitems__([]) == []  # a first chunk counts as read from a disk, even if empty
    with pytest.raises(IndexError, match=r"index 12 is out of range: ArrayFile\('.*array.npy'\) has 12 samples$"):
        dataset[12]
    assert repr(dataset) == f"ArrayFile('{tmp_path}/array.npy': 12 samples of 24×32×3, uint8)"


def test_array_file_pickles_without_pixels_and_descriptors(tmp_path: Path) -> None:
    dataset = ArrayFile(write_npy(tmp_path, PIXELS))
    assert (dataset[1].hwc == PIXELS[1]).all()
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000 < PIXELS.nbytes
    open_files = open_below(tmp_path)
    copy = pickle.loads(pickled)
    assert open_below(tmp_path) == open_files
    assert (copy[1].hwc == PIXELS[1]).all()
    copy.close()
    assert open_below(tmp_path) == open_files
    assert (copy[1].hwc == PIXELS[1]).all()


def test_array_file_reads_a_raw_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"head" + PIXELS.tobytes())
    for length in (12, -1):
        dataset = ArrayFile(path, dtype="uint8", shape=(length, 24, 32, 3), offset=4)
        assert dataset.shape == PIXELS.shape
        assert (dataset[3].hwc == PIXELS[3]).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "hwc"),
    [
        ((20, 30), "uint8", None, (20, 30, 1)),
        ((20, 30, 13), "uint16", None, (20, 30, 13)),
        ((13, 20, 30), "float32", "CHW", (20, 30, 13)),
        ((20, 30, 3), ">f4", None, (20, 30, 3)),
        ((9, 20, 30), "uint8", "DHW", (9, 20, 30, 1)),
        ((9, 20, 30, 2), "float32", None, (9, 20, 30, 2)),
        ((9, 2, 20, 30), "float32", "DCHW", (9, 20, 30, 2)),
    ],
)
def test_array_file_converts_each_layout_to_hwc(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, layout: str | None, hwc: tuple[int, ...]
) -> None:
    array = np.arange(2 * np.prod(shape)).reshape(2, *shape).astype(dtype)
    image = ArrayFile(write_npy(tmp_path, array), layout=layout)[1]
    expected = array[1] if layout in (None, "DHW") else np.moveaxis(array[1], layout.index("C"), -1)
    np.testing.assert_array_equal(image.hwc, expected.reshape(hwc))
    assert image.hwc.dtype == np.dtype(dtype).newbyteorder("=")


def test_array_file_of_data_that_are_not_images_yields_arrays(tmp_path: Path) -> None:
    array = np.arange(4 * 600, dtype=">i2").reshape(4, 600)
    values, _ = gpuload_batches(ArrayFile(write_npy(tmp_path, array), labels=[0, 1, 2, 3]), 2)[0]
    assert torch.equal(values, torch.from_numpy(array[:2].astype(np.int16)))
    assert isinstance(ArrayFile(write_npy(tmp_path, PIXELS), layout="data")[0], np.ndarray)
    assert ArrayFile(write_npy(tmp_path, np.arange(4.0)))[3] == 3.0
    converted = ArrayFile(write_npy(tmp_path, np.full((2, 9, 9), -5, np.int16)), as_dtype="float32")[0]
    assert (converted.hwc.dtype, converted.hwc.min()) == (np.dtype("float32"), -5)


def test_array_file_labels_have_one_entry_per_sample(tmp_path: Path) -> None:
    path = write_npy(tmp_path, PIXELS)
    assert ArrayFile(path, labels=["a", "b"] * 6)[1][1] == "b"
    assert ArrayFile(path, labels=np.ones((12, 5)))[1][1].tolist() == [1.0] * 5
    assert isinstance(ArrayFile(path)[0], gl.Image)
    message = f"labels must have one entry for each of the 12 samples of {str(path)!r}, got shape (11,)"
    with pytest.raises(ValueError, match=exactly(message)):
        ArrayFile(path, labels=range(11))
    with pytest.raises(TypeError, match=r"labels must form an array with one entry per sample, all of the same shape:"):
        ArrayFile(path, labels=[[1], [2, 3]] * 6)
    with pytest.raises(TypeError, match=r"^labels must be numbers or strings, one per sample, got object"):
        ArrayFile(path, labels=[None] * 12)


def test_array_file_refuses_objects_and_fortran_order(tmp_path: Path) -> None:
    for array, message in (
        (np.array([{}, []], object), "holds pickled Python objects, which gpuload never loads, since unpickling"),
        (np.asfortranarray(PIXELS), "is stored in Fortran order, which scatters each sample across the file"),
    ):
        with pytest.raises(ValueError, match=message):
            ArrayFile(write_npy(tmp_path, array, allow_pickle=True))


def test_array_file_refuses_a_truncated_file(tmp_path: Path) -> None:
    path = write_npy(tmp_path, PIXELS)
    dataset = ArrayFile(path)
    os.truncate(path, 5000)
    message = (
        f"{str(path)!r} is truncated: uint8 of shape (12, 24, 32, 3) ends at byte 27,776, but "
        "the file has 5,000 bytes; write or copy it again"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        ArrayFile(path)
    message = "it was changed after the dataset was created (it had 27,776 bytes, and now has 5,000); create"
    with pytest.raises(gl.DecodeError, match=re.escape(message)) as caught:
        dataset[0]
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("shape", [(-1, 3), (2, -3), (True, 3), (2, False)])
def test_array_file_refuses_an_invalid_shape_in_the_header(tmp_path: Path, shape: tuple) -> None:
    """NumPy accepts these shapes."""
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.write(bytes(100))
    text = f"the header of the .npy file {str(path)!r} cannot be read: its shape must consist of integers"
    with pytest.raises(ValueError, match=re.escape(text)):
        ArrayFile(path)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"\x93NUMPY\x01\0\x10\0nonsense", {}, "' cannot be read: "),
        (b"\x93NUMPY", {}, "' cannot be read: "),
        (b"\x93NUMPY\x01\0", {"dtype": "u1", "shape": (1,)}, "whose header states dtype and shape; omit dtype="),
        (b"\x80\x04abc", {}, "it begins with b'\\x80\\x04abc' (probably a pickle, which gpuload never"),
        (b"PK\x03\x04abc", {}, "an .npz or another zip file; write the array itself with numpy.save(path, array)"),
        (b"\x89HDF\r\n", {}, "(an HDF5 file; read it with gpuload.HDF5)"),
        (b"abcdef", {}, "for a raw file pass dtype= and shape=(n, height, width, channels)"),
        (b"abcdef", {"dtype": "u1"}, "for a raw file pass dtype= and shape="),
        (b"abcdef", {"dtype": "u1", "shape": (5,)}, "has 6 bytes, but uint8 of shape (5,) at offset 0 ends at byte 5"),
        (b"abcdef", {"dtype": "u1", "shape": (7,)}, "is truncated: uint8 of shape (7,) ends at byte 7"),
        (b"abcdef", {"dtype": "u2", "shape": (-1, 2)}, "after offset 0, not a multiple of the sample size of 4"),
        (b"abcdef", {"dtype": "u1", "shape": (6, 0)}, "are empty: its array has shape (6, 0)"),
        (b"abcdef", {"dtype": "u1", "shape": (2, -1)}, "shape can contain -1 only as its first length, got (2, -1)"),
        (b"abcdef", {"dtype": "S2", "shape": (3,)}, "holds |S2; expected numbers"),
        (b"abcdefgh", {"dtype": "O", "shape": (1,)}, "holds pickled Python objects, which gpuload never"),
    ],
)
def test_array_file_refuses_other_formats_and_wrong_options_for_raw_files(
    tmp_path: Path, content: bytes, options: dict, message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        ArrayFile(path, **options)


def test_array_file_refuses_wrong_layouts_and_dtypes(tmp_path: Path) -> None:
    for shape, dtype, layout, message in (
        ((100, 64, 100), "u1", None, "Use layout='DHW' for volumes without channels, and layout='data' for non-images"),
        ((9, 9), "u1", "HWC", "of shape (9, 9), uint8, but layout='HWC' needs 3 axes"),
        ((9, 9), "i2", "HW", "int16, but images must be uint8, uint16 or float32; convert them with as_dtype='fl"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            ArrayFile(write_npy(tmp_path, np.zeros((2, *shape), dtype)), layout=layout)


def test_array_file_refuses_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.npy' does not exist; expected a .npy file, or a raw file"):
        ArrayFile(tmp_path / "none.npy")
    with pytest.raises(IsADirectoryError, match=r"is a folder; expected a .npy file"):
        ArrayFile(tmp_path)


def test_array_file_advises_the_kernel_of_samples_on_a_disk(tmp_path: Path) -> None:
    """The kernel is told (madvise) which pages a chunk of scattered samples needs: for the first chunks, and for a few
    chunks after one was read from a disk."""
    images = np.zeros((20, 64, 64, 1), np.uint8)  # each has the size of a page
    dataset = ArrayFile(write_npy(tmp_path, images))
    header_bytes, page_bytes = os.path.getsize(dataset.path) - images.nbytes, images[0].nbytes
    handle, advised = dataset._handle, []
    handle.mapping = SimpleNamespace(madvise=lambda advice, start, nbytes: advised.append((start, start + nbytes)))
    handle._disk = SimpleNamespace(was_read=lambda: from_disk)

    def samples_advised(*chunk: int) -> list[tuple[int, int]]:
        """Return the index of the first sample of each advised span, and the index after its last sample."""
        advised.clear()
        dataset._image_rows(list(chunk))
        return [(start // page_bytes, (end - header_bytes) // page_bytes) for start, end in advised]

    from_disk = True
    assert samples_advised(2, 3, 4) == []
    assert samples_advised(2, 2, 3) == []
    assert samples_advised(9, 1, 2) == [(1, 3), (9, 10)]
    assert samples_advised(9, 9, 1) == [(1, 2), (9, 10)]
    assert samples_advised(5) == [(5, 6)]
    from_disk = False
    assert [len(samples_advised(5)) for _ in range(COLD_CHUNKS + 2)] == [1] * COLD_CHUNKS + [0, 0]
    from_disk = True
    advised.clear()
    dataset.__getitems__([7, 9])
    assert len(advised) == 2
