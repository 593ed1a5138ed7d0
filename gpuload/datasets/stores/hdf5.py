"""`HDF5`: images in a dataset of an HDF5 file, as encoded bytes of varying length or as pixels.

HDF5 reads and decompresses entire chunks of a dataset, and caches the last few chunks. The samples of one call are
therefore read in the order of the file, and each chunk is decompressed only once.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gpuload.checks import integer, one_of, optional
from gpuload.datasets.file_id import FileId
from gpuload.datasets.files import MAX_BYTES, check_expanded, check_pixels
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import MODES, PIXELS, Encoded, Mode
from gpuload.datasets.stores.array import LAYOUTS, EntryConverter, Layout
from gpuload.datasets.stores.opening import display_path, is_url, open_seekable, remote_options
from gpuload.datasets.stores.store import (
    Store,
    check_stamp,
    decode_error_at,
    existing_file,
    labels_array,
    replace_errors,
    stamp,
    value_of,
)
from gpuload.errors import import_optional

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import StorageOptions

__all__ = ["HDF5"]

MAX_LINKS: Final = 64  # soft links to follow when looking up a dataset
MAX_SEARCHED: Final = 1000  # objects to search for the dataset names that an error message lists
MAX_LISTED: Final = 20
ADJACENT_ROWS: Final = 16  # adjacent rows to read per call; reading 16 rows takes as long as reading one


class HDF5(Store):
    """Images in an HDF5 file: variable-length bytes (each an encoded image), or an N×… array of pixels.

    Yields ``(Encoded, target)`` for bytes, and ``(Image, target)`` for pixels; or only the image if there are no
    targets. Entries that cannot be images are yielded as arrays, as in `ArrayFile`. Needs h5py: ``pip install
    'gpuload[hdf5]'``.

    Args:
        path: the path of the file.
        image: the name of the dataset of images, such as ``"images"`` or ``"train/images"``. Encoded images need one
            axis and the type ``h5py.vlen_dtype("uint8")``.
        target: the name of the dataset of targets, with one entry per image; None for no targets. Numbers and strings
            are all read at construction; arrays are read along with each image.
        layout, as_dtype: for pixels, as in `ArrayFile`.
        mode: for encoded images, the pixel mode, see `Encoded`.
        cache_bytes: the size of HDF5's chunk cache in each worker; raised to the size of one chunk if necessary.
        storage_options: for URLs, fsspec options or a `Remote`. Chunks of a remote file are read one at
            a time.

    Raises:
        FileNotFoundError: the file does not exist.
        TypeError: images are neither bytes nor numbers.
        ValueError: the file is not HDF5, is truncated, or lacks a dataset; the numbers of targets and images differ.
        ModuleNotFoundError: h5py is not installed.

    Reading a sample from a damaged chunk raises a DecodeError that names the row.
    """

    @dataset_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        image: str = "images",
        target: str | None = "labels",
        layout: Layout | None = None,
        as_dtype: Literal["uint8", "uint16", "float32"] | None = None,
        mode: Mode = "RGB",
        cache_bytes: int = 32 << 20,
        storage_options: StorageOptions = None,
    ) -> None:
        cache_bytes = integer("cache_bytes", cache_bytes, minimum=0)
        optional(one_of, "layout", layout, choices=LAYOUTS)
        optional(one_of, "as_dtype", as_dtype, choices=PIXELS)
        self.mode: Mode = one_of("mode", mode, MODES)
        self._remote = remote_options(path, storage_options)
        self.path = existing_file(path, "an HDF5 file")
        self.image, self.target, self._cache_bytes = image, target, cache_bytes
        # A local file may be written to meanwhile: a program may add attributes, or another dataset.
        self._expected = stamp(self.path, self._remote) if is_url(self.path) else FileId.of(self.path)
        h5py = _h5py()
        self.labels: np.ndarray | None = None
        with replace_errors(self.path, self._unreadable_error), self._open() as file:
            images = self._find_dataset(file, image, "image")
            item_type = h5py.check_vlen_dtype(images.dtype)
            subject = f"dataset {image!r} of {self.path!r}"
            self._converter: EntryConverter | None = None
            if item_type is None and images.dtype.kind in "biufc":
                self._converter = EntryConverter(images.shape[1:], images.dtype, layout, as_dtype, subject)
            elif item_type is None or np.dtype(item_type).itemsize != 1 or images.ndim != 1:
                raise TypeError(
                    f"{subject} is {images.dtype} of shape {images.shape}; expected an N×… array of numbers, or "
                    'variable-length bytes of type h5py.vlen_dtype("uint8") (a string would end at the first zero byte)'
                )
            elif layout is not None or as_dtype is not None:
                raise ValueError(f"{subject} holds encoded images; omit layout= and as_dtype=, which apply to pixels")
            self._count = len(images)
            self._chunk_rows = images.chunks[0] if images.chunks else 1  # samples per chunk
            if target is not None:
                self._read_targets(h5py, self._find_dataset(file, target, "target"))

    def _read_targets(self, h5py: Any, targets: Any) -> None:
        """Check the targets, and read them if each is one number or string."""
        if len(targets) != self._count:
            raise ValueError(
                f"{self.path!r} has {len(targets)} targets in {self.target!r}, but {self._count} images in "
                f"{self.image!r}; expected one target per image"
            )
        if (nbytes := targets.dtype.itemsize * targets.size) > MAX_BYTES and targets.ndim == 1:
            raise ValueError(
                f"the targets in {self.target!r} of {self.path!r} take {nbytes:,} bytes, which exceeds the limit "
                f"of {MAX_BYTES:,} for targets that are read at construction; pass target=None, and add the "
                "targets in your own dataset"
            )
        if targets.ndim == 1:
            is_text = h5py.check_string_dtype(targets.dtype) is not None
            values = np.array(targets.asstr()[:].tolist(), str) if is_text else targets[:]
            self.labels = labels_array(values, self._count, f"the {self._count} images of {self.path!r}")
        elif targets.dtype.kind not in "biuf":
            raise TypeError(
                f"targets in {self.target!r} of {self.path!r} are {targets.dtype}; expected numbers. Convert "
                "them, or pass target=None"
            )

    def _find_dataset(self, file: Any, name: str, argument: str) -> Any:
        dataset = self._look_up(file, name)
        # Refuse data in other files before any other access, which could open those files.
        if isinstance(dataset, _h5py().Dataset):
            if dataset.is_virtual or dataset.external:
                raise self._external_error(name)
            if dataset.shape:
                # For bytes of varying length, NumPy's type is a pointer, which is smaller than the type in the file.
                chunk_bytes = dataset.id.get_type().get_size() * math.prod(dataset.chunks) if dataset.chunks else 0
                self._cache_bytes = max(self._cache_bytes, chunk_bytes)
                return dataset
        names: list[str] = []
        searched = 0

        def visit(name: str, node: object) -> bool | None:
            nonlocal searched
            if searched == MAX_SEARCHED or len(names) == MAX_LISTED:
                return True  # ends the search
            searched += 1
            if isinstance(node, _h5py().Dataset):
                names.append(name)
            return None

        has_more = file.visititems(visit)  # does not follow links
        suffix = (", …" if names else f" among its first {MAX_SEARCHED:,} objects") if has_more else ""
        remedy = f"Choose one with {argument}=" if names else f"Check the file, or pass the full name as {argument}="
        remedy += ", or pass target=None" * (argument == "target")
        raise ValueError(
            f"{self.path!r} has no dataset {name!r} with an axis of samples; it has "
            f"{', '.join(map(repr, sorted(names))) or 'none'}{suffix}. {remedy}"
        )

    def _look_up(self, file: Any, name: str) -> Any:
        """Return the object with this name, or None. Links into other files are refused: the target may be a FIFO, and
        opening a FIFO waits for a writer, which ctrl-C does not interrupt."""
        h5l, node, links = _h5py().h5l, file, 0
        parts = deque(name.split("/"))
        while parts:
            part = parts.popleft().encode()
            if part in (b"", b"."):
                continue
            if not isinstance(node, _h5py().Group) or not node.id.links.exists(part):
                return None
            link_type = node.id.links.get_info(part).type
            if link_type == h5l.TYPE_SOFT and links < MAX_LINKS:
                target = node.id.links.get_val(part).decode()
                parts.extendleft(reversed(target.split("/")))
                node, links = file if target.startswith("/") else node, links + 1
            elif link_type == h5l.TYPE_HARD:
                node = node[part]
            else:
                raise self._external_error(name)
        return node

    def _external_error(self, name: str) -> ValueError:
        return ValueError(
            f"the dataset {name!r} of {self.path!r} is stored in other files, which gpuload does not open on behalf of "
            "a data file; copy the dataset into this file"
        )

    def _unreadable_error(self, text: str) -> ValueError:
        return ValueError(f"{self.path!r} is not an HDF5 file, or is truncated: {text}")

    def __len__(self) -> int:
        return self._count

    def blocks(self) -> np.ndarray | None:
        """Return the index of the first sample of each chunk, followed by the number of samples, for
        ``shuffle="block"``; None if each chunk is one sample."""
        return None if self._chunk_rows == 1 else np.append(np.arange(0, self._count, self._chunk_rows), self._count)

    def _open(self) -> Any:
        if isinstance(self._expected, FileId):
            self._expected.check(self.path)
        else:
            check_stamp(self.path, self._expected, self._remote)
        with replace_errors(self.path, self._unreadable_error):
            if is_url(self.path):
                return _h5py().File(open_seekable(self.path, self._remote), "r", rdcc_nbytes=self._cache_bytes)
            return _h5py().File(self.path, "r", locking=False, rdcc_nbytes=self._cache_bytes)

    def _read(self, handle: Any, indices: list[int]) -> list[Any]:
        if self._converter is not None and self._converter.size_hw is not None:
            check_pixels(*self._converter.size_hw, f"an image in {self.image!r} of {self.path!r}")
        rows = self._read_rows(handle[self.image], indices)
        images = [self._make_image(rows[index], index) for index in indices]
        if self.target is None:
            return images
        if self.labels is not None:
            targets = [value_of(self.labels, index) for index in indices]
        else:
            arrays = self._read_rows(handle[self.target], indices)
            targets = [arrays[index] for index in indices]
        return list(zip(images, targets, strict=True))

    def _make_image(self, value: np.ndarray, index: int) -> Any:
        if self._converter is not None:
            return self._converter.convert(value)
        return Encoded(value.tobytes(), self.mode, f"{display_path(self.path)}: {self.image!r}, row {index}")

    def _read_rows(self, dataset: Any, indices: list[int]) -> dict[int, np.ndarray]:
        """Return rows of a dataset, keyed by index. Reading in the file's order decompresses each chunk only once."""
        if self._converter is not None or dataset.ndim > 1:
            elements = max(math.prod(dataset.chunks or ()), math.prod(dataset.shape[1:]))
            description = f"a sample or chunk of {dataset.name!r}"
            check_expanded(dataset.dtype.itemsize * elements, description, path=self.path)
        rows: dict[int, np.ndarray] = {}
        sorted_indices = np.array(sorted(set(indices)), np.int64)
        for adjacent in np.split(sorted_indices, np.flatnonzero(np.diff(sorted_indices) > 1) + 1):
            for start in range(0, len(adjacent), ADJACENT_ROWS):
                run = adjacent[start : start + ADJACENT_ROWS].tolist()
                rows.update(zip(run, self._read_run(dataset, run), strict=True))
        return rows

    def _read_run(self, dataset: Any, run: list[int]) -> list[np.ndarray]:
        if len(run) > 1:
            with contextlib.suppress(Exception):  # if this fails, read rows one by one, so that the error names the row
                return [np.asarray(row) for row in dataset[run[0] : run[-1] + 1]]
        return [self._read_row(dataset, index) for index in run]

    def _read_row(self, dataset: Any, index: int) -> np.ndarray:
        with replace_errors(
            self.path,
            lambda text: decode_error_at(self.path, f"row {index} of {dataset.name!r} cannot be read: {text}"),
        ):
            return np.asarray(dataset[index])

    def __repr__(self) -> str:
        return f"HDF5({self.path!r}: {len(self)} samples in {self.image!r})"


def _h5py() -> Any:
    return import_optional("h5py", "HDF5", "hdf5")
