"""`HDF5`: images in a dataset of an HDF5 file, as encoded bytes of varying length or as pixels.

HDF5 reads whole chunks of a dataset, decompresses them, and keeps those read last. So samples that are asked for
together are read in the file's order, each chunk once.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gpuload.datasets.files import MAX_BYTES, check_expanded, check_pixels
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.datasets.stores.array import Layout, Pixels
from gpuload.datasets.stores.opening import is_url, named, open_seekable, remote_for
from gpuload.datasets.stores.store import (
    Store,
    check_stamp,
    damaged,
    existing_file,
    labels_array,
    naming,
    stamp,
    value_of,
)
from gpuload.errors import import_optional

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import StorageOptions

__all__ = ["HDF5"]

MOST_LINKS: Final = 64  # soft links on the way to a dataset
LOOKED_AT: Final = 1000  # objects of a file, for a message that lists its datasets
SHOWN: Final = 20
AT_ONCE: Final = 16  # neighbours that are read by one call, which costs as much as for one


class HDF5(Store):
    """Images in an HDF5 file: variable-length bytes (each an encoded image), or an array N×… of pixels.

    Yields ``(Encoded, target)`` of bytes, ``(Image, target)`` of pixels, arrays where those are no images, as
    `ArrayFile` does; without the target if there is none. Needs h5py: ``pip install 'gpuload[hdf5]'``.

    Args:
        path: the file.
        image: the name of the dataset of images, such as ``"images"`` or ``"train/images"``. Of bytes: one axis, with
            the type ``h5py.vlen_dtype("uint8")``.
        target: the name of the dataset of targets, as long as that of images; None for none. A number or string for
            each sample is read at once, at the start; arrays are read with the image.
        layout, as_dtype: of pixels, as `ArrayFile` has them.
        mode: of bytes, what the pixels become, see `Encoded`.
        cache_bytes: the size of each worker's chunk cache (HDF5's own), at least one chunk.
        storage_options: of a URL, what fsspec takes, or a `Remote`. There chunks are read one after the other.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: images are neither bytes nor numbers.
        ValueError: the file is no HDF5, is cut off or lacks a dataset; targets are more or fewer than images.
        ModuleNotFoundError: h5py is not installed.

    While reading, DecodeError names a row of a damaged chunk.
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
        if type(cache_bytes) is not int or cache_bytes < 0:
            raise ValueError(f"cache_bytes must be a number of bytes, 0 or more, got {cache_bytes!r}")
        self.mode: Mode = check_mode(mode)
        self._remote = remote_for(path, storage_options)
        self.path = existing_file(path, "an HDF5 file")
        self.image, self.target, self._cache_bytes = image, target, cache_bytes
        self._stamp = stamp(self.path, self._remote)
        h5py = _h5py()
        self.labels: np.ndarray | None = None
        with naming(self.path, self._unreadable), self._open() as file:
            images = self._dataset(file, image, "image")
            each = h5py.check_vlen_dtype(images.dtype)
            what = f"dataset {image!r} of {self.path!r}"
            self._pixels: Pixels | None = None
            if each is None and images.dtype.kind in "biufc":
                self._pixels = Pixels(images.shape[1:], images.dtype, layout, as_dtype, what)
            elif each is None or np.dtype(each).itemsize != 1 or images.ndim != 1:
                raise TypeError(
                    f"{what} is {images.dtype} of shape {images.shape}; expected numbers N×…, or bytes of varying "
                    'length, of h5py.vlen_dtype("uint8"): strings end at the first zero, which images hold many of'
                )
            elif layout is not None or as_dtype is not None:
                raise ValueError(f"{what} holds encoded images; layout= and as_dtype= are for pixels")
            self._count = len(images)
            self._chunk = images.chunks[0] if images.chunks else 1  # samples that are read as one
            if target is not None:
                self._take_targets(h5py, self._dataset(file, target, "target"))

    def _take_targets(self, h5py: Any, targets: Any) -> None:
        """Look at the targets; read them if each is one number or string."""
        if len(targets) != self._count:
            raise ValueError(
                f"{self.path!r} has {len(targets)} targets in {self.target!r}, but {self._count} images in "
                f"{self.image!r}; there must be one for each"
            )
        if (nbytes := targets.dtype.itemsize * targets.size) > MAX_BYTES and targets.ndim == 1:
            raise ValueError(
                f"the targets in {self.target!r} of {self.path!r} take {nbytes:,} bytes, more than the {MAX_BYTES:,} "
                "that are read at the start; give target=None, and the targets by a dataset of your own"
            )
        if targets.ndim == 1:
            text = h5py.check_string_dtype(targets.dtype) is not None
            values = np.array(targets.asstr()[:].tolist(), str) if text else targets[:]
            self.labels = labels_array(values, self._count, f"the {self._count} images of {self.path!r}")
        elif targets.dtype.kind not in "biuf":
            raise TypeError(f"targets in {self.target!r} of {self.path!r} are {targets.dtype}; expected numbers")

    def _dataset(self, file: Any, name: str, argument: str) -> Any:
        dataset = self._look_up(file, name)
        # What lies elsewhere is seen before anything else is asked of it: that may open those files.
        if isinstance(dataset, _h5py().Dataset):
            if dataset.is_virtual or dataset.external:
                raise self._elsewhere(name)
            if dataset.shape:
                # The file's type: NumPy's, of bytes of varying length, is a pointer, which is smaller.
                chunk_bytes = dataset.id.get_type().get_size() * math.prod(dataset.chunks) if dataset.chunks else 0
                self._cache_bytes = max(self._cache_bytes, chunk_bytes)
                return dataset
        names: list[str] = []
        more = ""
        for number, names_there in enumerate(_objects(file)):
            if number == LOOKED_AT or len(names) == SHOWN:
                more = ", …" if names else f" among the {LOOKED_AT:,} objects that were looked at"
                break
            names += names_there
        none = ", or target=None" if argument == "target" else ""
        raise ValueError(
            f"{self.path!r} has no dataset {name!r} with an axis of samples; it has "
            f"{', '.join(map(repr, sorted(names))) or 'none'}{more}. Say which with {argument}={none}"
        )

    def _look_up(self, file: Any, name: str) -> Any:
        """Return what has this name, None if nothing has. No link into another file is followed: that may be a FIFO,
        which waits for a writer, and ctrl-C does not end it."""
        h5l, node, links = _h5py().h5l, file, 0
        parts = deque(name.split("/"))
        while parts:
            part = parts.popleft().encode()
            if part in (b"", b"."):
                continue
            if not isinstance(node, _h5py().Group) or not node.id.links.exists(part):
                return None
            kind = node.id.links.get_info(part).type
            if kind == h5l.TYPE_SOFT and links < MOST_LINKS:
                target = node.id.links.get_val(part).decode()
                parts.extendleft(reversed(target.split("/")))
                node, links = file if target.startswith("/") else node, links + 1
            elif kind == h5l.TYPE_HARD:
                node = node[part]
            else:
                raise self._elsewhere(name)
        return node

    def _elsewhere(self, name: str) -> ValueError:
        return ValueError(
            f"the dataset {name!r} of {self.path!r} lies in other files, which are not read because a data file "
            "names them; copy it into one file"
        )

    def _unreadable(self, text: str) -> ValueError:
        return ValueError(f"{self.path!r} is no HDF5 file, or is cut off: {text}")

    def __len__(self) -> int:
        return self._count

    def blocks(self) -> np.ndarray | None:
        """Return where each chunk, which is read as one, begins, and the number of samples, for ``shuffle="block"``;
        None if a chunk is one sample."""
        return None if self._chunk == 1 else np.append(np.arange(0, self._count, self._chunk), self._count)

    def _open(self) -> Any:
        check_stamp(self.path, self._stamp, self._remote)
        with naming(self.path, self._unreadable):
            if is_url(self.path):
                return _h5py().File(open_seekable(self.path, self._remote), "r", rdcc_nbytes=self._cache_bytes)
            return _h5py().File(self.path, "r", locking=False, rdcc_nbytes=self._cache_bytes)

    def _read(self, handle: Any, numbers: list[int]) -> list[Any]:
        if self._pixels is not None and self._pixels.size_hw is not None:
            check_pixels(*self._pixels.size_hw, f"an image in {self.image!r} of {self.path!r}")
        rows = self._rows(handle[self.image], numbers)
        images = [self._image(rows[number], number) for number in numbers]
        if self.target is None:
            return images
        if self.labels is not None:
            targets = [value_of(self.labels, number) for number in numbers]
        else:
            arrays = self._rows(handle[self.target], numbers)
            targets = [arrays[number] for number in numbers]
        return list(zip(images, targets, strict=True))

    def _image(self, value: np.ndarray, number: int) -> Any:
        if self._pixels is not None:
            return self._pixels.sample(value)
        return Encoded(value.tobytes(), self.mode, f"{named(self.path)}: {self.image!r}, row {number}")

    def _rows(self, dataset: Any, numbers: list[int]) -> dict[int, np.ndarray]:
        """Return rows of a dataset by their numbers, read in the file's order, so that a chunk is decompressed once."""
        if self._pixels is not None or dataset.ndim > 1:
            elements = max(math.prod(dataset.chunks or ()), math.prod(dataset.shape[1:]))
            what = f"a sample or chunk of {dataset.name!r}"
            check_expanded(dataset.dtype.itemsize * elements, what, path=self.path)
        rows: dict[int, np.ndarray] = {}
        ordered = np.array(sorted(set(numbers)), np.int64)
        for neighbours in np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1):
            for start in range(0, len(neighbours), AT_ONCE):
                run = neighbours[start : start + AT_ONCE].tolist()
                rows.update(zip(run, self._neighbours(dataset, run), strict=True))
        return rows

    def _neighbours(self, dataset: Any, run: list[int]) -> list[np.ndarray]:
        if len(run) > 1:
            with contextlib.suppress(Exception):  # read again one by one, which names the row that fails
                return [np.asarray(row) for row in dataset[run[0] : run[-1] + 1]]
        return [self._row(dataset, number) for number in run]

    def _row(self, dataset: Any, number: int) -> np.ndarray:
        with naming(
            self.path, lambda text: damaged(self.path, f"row {number} of {dataset.name!r} cannot be read: {text}")
        ):
            return np.asarray(dataset[number])

    def __repr__(self) -> str:
        return f"HDF5({self.path!r}: {len(self)} samples in {self.image!r})"


def _h5py() -> Any:
    return import_optional("h5py", "HDF5", "hdf5")


def _objects(file: Any) -> Iterator[list[str]]:
    """Yield the names of a file's objects, the uppermost first: a list of one for a dataset, of none for others."""
    h5py, groups = _h5py(), deque([("", file)])
    while groups:
        above, group = groups.popleft()
        for name in group:
            is_here = group.id.links.get_info(name.encode()).type == h5py.h5l.TYPE_HARD
            item = group[name] if is_here else None
            if isinstance(item, h5py.Group):
                groups.append((f"{above}{name}/", item))
            yield [f"{above}{name}"] if isinstance(item, h5py.Dataset) else []
