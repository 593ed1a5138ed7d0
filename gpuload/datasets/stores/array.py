"""`ArrayFile`: decoded samples in one memory-mapped file, ``.npy`` or raw.

A sample is a view of the mapping, from which a worker copies only the region of the first crop, directly to a slot of
the ring. All processes share the pages.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from gpuload.checks import integer, numbers, one_of, optional
from gpuload.datasets.files import DiskReads
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import PIXELS, Image
from gpuload.datasets.stores.opening import client, open_file, open_seekable, remote_options
from gpuload.datasets.stores.store import (
    Store,
    check_stamp,
    existing_file,
    labels_array,
    read_npy_header,
    stamp,
    value_of,
)

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import StorageOptions

__all__ = ["LAYOUTS", "ArrayFile", "EntryConverter", "Layout"]

Layout = Literal["HW", "HWC", "CHW", "DHW", "DHWC", "DCHW", "data"]
LAYOUTS: Final = get_args(Layout)
MAGIC: Final = b"\x93NUMPY"
COLD_CHUNKS: Final = 4  # the number of chunks to prefetch after a chunk that was read from disk
# The first bytes of files in other formats, with a remedy for each.
FOREIGN_FILES: Final = (
    (b"PK\x03\x04", "an .npz or another zip file; write the array itself with numpy.save(path, array)"),
    (b"\x80", "probably a pickle, which gpuload never loads; write the array with numpy.save(path, array)"),
    (b"\x89HDF", "an HDF5 file; read it with gpuload.HDF5"),
)


class EntryConverter:
    """A converter of array entries to samples, for all stores of arrays.

    Args:
        shape, dtype: the shape and dtype of one entry.
        layout: as in `ArrayFile`; None treats entries as images if their dtype and axes allow it.
        as_dtype: the dtype to convert entries to, or None.
        source: the name of the file or dataset in messages.

    Attributes:
        dtype: the dtype to convert entries to; None if they need no conversion.
        layout: the layout of entries.
        size_hw: height and width of an image; None if entries are not images.

    Raises:
        ValueError: an entry does not match `layout`.
    """

    size_hw: tuple[int, int] | None = None

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout | None, as_dtype: str | None, source: str
    ) -> None:
        target_dtype = np.dtype(as_dtype or dtype).newbyteorder("=")
        self.dtype: np.dtype[Any] | None = target_dtype if target_dtype != dtype else None
        is_guess = layout is None
        if layout is None:
            default: dict[int, Layout] = {2: "HW", 3: "HWC", 4: "DHWC"}
            layout = default.get(len(shape), "data") if target_dtype.name in PIXELS else "data"
        self.layout: Layout = layout
        if layout == "data":
            return
        description = f"{source} holds samples of shape {shape}, {dtype}"
        if target_dtype.name not in PIXELS:
            raise ValueError(
                f"{description}, but images must be uint8, uint16 or float32; convert them with as_dtype='float32', or "
                "get plain arrays with layout='data'"
            )
        if len(shape) != len(layout):
            raise ValueError(f"{description}, but layout={layout!r} needs {len(layout)} axes")
        try:
            zeros = self._make_image(np.broadcast_to(np.zeros((), target_dtype), shape)).hwc
            if is_guess:
                Image(zeros)  # raises if the channel axis looks like height or width
            self.size_hw = zeros.shape[-3:-1]
        except ValueError as error:
            raise ValueError(
                f"{description}: {error}. Use layout='DHW' for volumes without channels, and layout='data' for "
                "non-images"
            ) from None

    def convert(self, array: np.ndarray) -> Image | np.ndarray | Any:
        """Convert an entry to the sample that a dataset yields."""
        if self.dtype is not None:
            array = array.astype(self.dtype)
        if self.layout == "data":
            return array if array.ndim else array.item()
        return self._make_image(array)

    def _make_image(self, array: np.ndarray) -> Image:
        if self.layout == "DHW":
            array = array[..., None]
        return Image(array, "CHW" if self.layout in ("CHW", "DCHW") else "HWC")


class ArrayFile(Store):
    """A memory-mapped N×… array of images or volumes, with any dtype and any number of channels.

    Yields ``(Image, label)``, or `Image` without labels. Entries that cannot be images (other dtypes, other axes) are
    yielded as arrays, which transforms ignore. At a URL, samples are read as byte ranges.

    Args:
        path: a ``.npy`` file, or a raw file without a header, with `dtype` and `shape`.
        labels: one label per sample, as an array, a list, or the path of a ``.npy`` file.
        layout: the axes of a sample, without the first axis of the file: ``"HW"``, ``"HWC"``, ``"CHW"``; ``"DHW"``,
            ``"DHWC"``, ``"DCHW"`` for volumes and clips, whose slices share random parameters; ``"data"`` for
            non-images. Default: H×W, H×W×C or D×H×W×C, depending on the number of axes, for uint8, uint16 and float32;
            otherwise ``"data"``.
        as_dtype: ``"uint8"``, ``"uint16"`` or ``"float32"``: convert (and copy) each sample. Required for images of
            other dtypes.
        dtype, shape: the dtype and shape of a raw file, in C order; the first axis may be -1.
        offset: the byte offset of the array in a raw file.
        storage_options: for URLs, fsspec options or a `Remote`.

    Attributes:
        shape: the shape of the complete array.
        dtype: the dtype of the complete array.
        labels: the labels as an array, or None.

    Raises:
        FileNotFoundError, IsADirectoryError: the path does not exist, or is a folder.
        TypeError: labels are neither numbers nor strings.
        ValueError: the file is not an array, is truncated, holds objects, or is in Fortran order; labels or layout do
            not match the array.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "train.npy")
        ...     np.save(path, np.zeros((10, 32, 48, 13), np.float32))
        ...     dataset = ArrayFile(path, labels=range(10))
        ...     image, label = dataset[-1]
        >>> len(dataset), image.hwc.shape, label
        (10, (32, 48, 13), 9)
    """

    @dataset_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        labels: Any = None,
        layout: Layout | None = None,
        as_dtype: Literal["uint8", "uint16", "float32"] | None = None,
        dtype: Any = None,
        shape: tuple[int, ...] | None = None,
        offset: int = 0,
        storage_options: StorageOptions = None,
    ) -> None:
        optional(one_of, "layout", layout, choices=LAYOUTS)
        optional(one_of, "as_dtype", as_dtype, choices=PIXELS)
        self._remote = remote_options(path, storage_options)
        self.path = existing_file(path, "a .npy file, or a raw file with dtype= and shape=")
        self._stamp = stamp(self.path, self._remote)
        nbytes = self._stamp[0]
        with open_seekable(self.path, self._remote) as file:
            first_bytes = file.read(16)
            if first_bytes.startswith(MAGIC):
                if dtype is not None or shape is not None or offset:
                    raise ValueError(
                        f"{self.path!r} is a .npy file, whose header states dtype and shape; omit dtype=, shape= "
                        "and offset="
                    )
                header = _read_header(file, self.path)
            else:
                header = _raw_file_header(self.path, first_bytes, nbytes, dtype, shape, offset)
        self.shape, self.dtype, self._offset = header
        _check_dtype(self.path, self.dtype)
        if not self.shape:
            raise ValueError(
                f"{self.path!r} holds a single number; expected an array with samples along its first axis"
            )
        if 0 in self.shape[1:]:
            raise ValueError(f"the samples of {self.path!r} are empty: its array has shape {self.shape}")
        self._sample_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
        expected_bytes = self._offset + self.shape[0] * self._sample_bytes
        if nbytes < expected_bytes:
            raise ValueError(
                f"{self.path!r} is truncated: {self.dtype} of shape {self.shape} ends at byte {expected_bytes:,}, but "
                f"the file has {nbytes:,} bytes; write or copy it again"
            )
        if not first_bytes.startswith(MAGIC) and nbytes > expected_bytes:
            raise ValueError(
                f"{self.path!r} has {nbytes:,} bytes, but {self.dtype} of shape {self.shape} at offset {offset} ends "
                f"at byte {expected_bytes:,}; check dtype, shape and offset"
            )
        self._converter = EntryConverter(self.shape[1:], self.dtype, layout, as_dtype, repr(self.path))
        if isinstance(labels, str | os.PathLike):
            options = None if remote_options(labels, None) is None else storage_options
            labels = ArrayFile(labels, layout="data", storage_options=options)._read_all()
        self.labels = labels_array(labels, self.shape[0], f"the {self.shape[0]} samples of {self.path!r}")

    def __len__(self) -> int:
        return self.shape[0]

    def _open(self) -> Any:
        check_stamp(self.path, self._stamp, self._remote)
        if self._remote is not None:
            return open_file(self.path, self._remote)
        if not self.shape[0]:
            return _MappedArray(np.empty(self.shape, self.dtype), None)
        with open(self.path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        return _MappedArray(np.ndarray(self.shape, self.dtype, mapping, self._offset), mapping)

    def _read(self, handle: Any, indices: list[int]) -> list[Any]:
        if self._remote is not None:
            nbytes = self._sample_bytes
            ranges = [(handle, self._offset + index * nbytes, nbytes) for index in indices]
            contents = client(self._remote).read(ranges)
            arrays = [np.frombuffer(content, self.dtype).reshape(self.shape[1:]) for content in contents]
        else:
            self._prefetch(handle, indices)
            arrays = [handle.array[index] for index in indices]
        images = [self._converter.convert(array) for array in arrays]
        if self.labels is None:
            return images
        return [(image, value_of(self.labels, index)) for image, index in zip(images, indices, strict=True)]

    @property
    def _row_bytes(self) -> int:
        """The size of an image in bytes if images can be copied from the file unchanged; else 0."""
        is_direct = self._remote is None and self._converter.dtype is None and self._converter.layout in ("HW", "HWC")
        return self._sample_bytes if is_direct and len(self) else 0

    def _image_rows(self, indices: list[int]) -> np.ndarray | None:
        """Return a view of the mapped file as an N×H×W×C array, and prefetch the samples that the caller is about to
        copy. Return None if `_row_bytes` is 0."""
        if not self._row_bytes:
            return None
        self._prefetch(self._handle, indices)
        array = self._handle.array
        return array[..., None] if self._converter.layout == "HW" else array

    def _read_all(self) -> np.ndarray:
        """Read the entire array into memory."""
        if self._remote is None:
            return np.array(self._handle.array)
        data = self._handle.read_at(self._offset, len(self) * self._sample_bytes)
        return np.frombuffer(data, self.dtype).reshape(self.shape)

    def _prefetch(self, mapped: _MappedArray, indices: list[int]) -> None:
        """Ask the kernel to read a chunk's samples concurrently instead of one page fault at a time. This pays off only
        while samples come from disk, and not for adjacent samples: for these, the kernel's own read-ahead allocates
        larger pages, which cost less CPU time on every read."""
        if not indices or mapped.mapping is None or not mapped.is_cold():
            return
        sorted_indices = np.unique(indices)
        runs = np.split(sorted_indices, np.flatnonzero(np.diff(sorted_indices) > 1) + 1)
        if len(runs) == 1 < len(sorted_indices):
            return
        for run in runs:
            begin, end = (self._offset + int(index) * self._sample_bytes for index in (run[0], run[-1] + 1))
            start = begin - begin % mmap.PAGESIZE
            mapped.mapping.madvise(mmap.MADV_WILLNEED, start, end - start)

    def __repr__(self) -> str:
        sample_shape = "×".join(map(str, self.shape[1:])) or "one number"
        return f"ArrayFile({self.path!r}: {len(self)} samples of {sample_shape}, {self.dtype})"


class _MappedArray:
    """An array of all samples, and the mapping that holds it (None if the dataset is empty)."""

    __slots__ = ("_chunks_left", "_disk", "array", "mapping")

    def __init__(self, array: np.ndarray, mapping: mmap.mmap | None) -> None:
        self.array, self.mapping = array, mapping
        self._disk, self._chunks_left = DiskReads(), COLD_CHUNKS

    def is_cold(self) -> bool:
        """Return whether one of the last few chunks was read from disk, or none was read yet. Call this once per chunk,
        before reading it."""
        self._chunks_left = COLD_CHUNKS if self._disk.was_read() else self._chunks_left - 1
        return self._chunks_left >= 0


def _read_header(file: Any, path: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Read the header of a ``.npy`` file. Return shape, dtype, and the offset of the data."""
    file.seek(0)
    try:
        shape, fortran, dtype = read_npy_header(file)
    except (ValueError, EOFError) as error:
        raise ValueError(f"the header of the .npy file {path!r} cannot be read: {error}") from error
    if fortran and len(shape) > 1:
        raise ValueError(
            f"{path!r} is stored in Fortran order, which scatters each sample across the file; save it again with "
            "numpy.save(path, numpy.ascontiguousarray(array))"
        )
    return shape, dtype, file.tell()


def _raw_file_header(
    path: str, first_bytes: bytes, nbytes: int, dtype: Any, shape: tuple[int, ...] | None, offset: int
) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return the shape, dtype and offset of a raw file from the arguments, after checking them."""
    if dtype is None or shape is None:
        hint = next((text for magic, text in FOREIGN_FILES if first_bytes.startswith(magic)), None)
        raise ValueError(
            f"{path!r} is not a .npy file: it begins with {first_bytes[:8]!r}"
            + (f" ({hint})" if hint else "; for a raw file pass dtype= and shape=(n, height, width, channels)")
        )
    item_dtype, lengths = np.dtype(dtype), numbers("shape", shape, entry=integer, minimum=-1)
    if min(lengths[1:], default=0) < 0:
        raise ValueError(f"shape can contain -1 only as its first length, got {shape!r}")
    offset = integer("offset", offset, minimum=0)
    if lengths and lengths[0] == -1:
        sample_bytes = int(np.prod(lengths[1:], dtype=np.int64)) * item_dtype.itemsize
        count, remainder = divmod(max(nbytes - offset, 0), sample_bytes) if sample_bytes else (0, 0)
        if remainder:
            raise ValueError(
                f"{path!r} has {nbytes - offset:,} bytes after offset {offset}, not a multiple of the sample size of "
                f"{sample_bytes:,} bytes; check dtype and shape"
            )
        lengths = (count, *lengths[1:])
    return lengths, item_dtype, offset


def _check_dtype(path: str, dtype: np.dtype) -> None:
    if dtype.hasobject:
        raise ValueError(
            f"{path!r} holds pickled Python objects, which gpuload never loads, since unpickling can run arbitrary "
            "code. Store an array of numbers, or store the images as files"
        )
    if dtype.kind not in "biufc":
        raise ValueError(f"{path!r} holds {dtype}; expected numbers. Convert the array with array.astype(…)")
