"""`Cached`: a dataset whose samples are kept, in memory or on disk that all workers share.

A sample is kept as bytes: JSON that describes it, then the bytes of its images, arrays, tensors and texts of bytes.
What is read may come from a disk that others write to: nothing is unpickled, and no class is named. Bytes that are no
packed sample raise a ValueError. Runs in workers; torch is imported where a sample has tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, SupportsIndex

import numpy as np

from gpuload.datasets.cache_file import Entries, Folder, Memory, Shape
from gpuload.datasets.files import is_complete
from gpuload.datasets.joined import Dataset
from gpuload.datasets.kinds import check_dataset, draws_nothing, fetched, forget, is_iterable, natural_blocks
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import META, Boxes, Encoded, Image, Keypoints, Mask, as_meta, plain_meta
from gpuload.datasets.scan import from_start, full_path
from gpuload.datasets.stores.store import Store
from gpuload.datasets.tree import dtype_of, flatten

__all__ = ["CacheStatistics", "Cached", "pack", "unpack"]

LEAST_BYTES: Final = 1 << 20
SETTLED_NS: Final = 100_000_000  # a file changed so shortly before it was read may have been changed while it was
PLAIN: Final = (type(None), bool, int, float, str)
NUMPY_KINDS: Final = "biufcUS"
DECLARED: Final[dict[str, type]] = {"image": Image, "mask": Mask, "boxes": Boxes, "keypoints": Keypoints}
DETAILS: Final = {"image": ("layout",), "boxes": ("format", "canvas_hw")}  # what they hold in addition to an array


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """What a cache did, in all processes together.

    Attributes:
        hits, misses: samples that were there, and that were not, since the `Cached` was made.
        entries: samples in it now.
        bytes_used, bytes_allowed, bytes_limit: what they take; how much they may at the moment, by the hit rate; how
            much they ever may.
        evicted: samples that had to go; too_large: samples that were not kept for their size (1/16 of the limit).
    """

    hits: int
    misses: int
    entries: int
    bytes_used: int
    bytes_allowed: int
    bytes_limit: int
    evicted: int
    too_large: int

    @property
    def hit_rate(self) -> float:
        """Hits among all samples that were asked for; 0.0 if none was."""
        return self.hits / max(1, self.hits + self.misses)


class Cached(Dataset):
    """The samples of a map-style dataset, kept as encoded bytes that all workers of a loader share.

    A sample may be nested tuples, lists and dicts of `Encoded`, `Image`, `Mask`, `Boxes`, `Keypoints`, numbers, str,
    bytes, None, numpy arrays and torch tensors. What a dataset draws at random is kept as it was drawn first: augment
    in ``Loader(transforms=…)``. Encoded images with a file as their `source` are read again once that file has changed.
    What was not used for longest goes first. Other attributes are those of the dataset.

    Args:
        dataset: what to keep.
        bytes_limit: the most bytes of memory or disk. A table of 16 bytes for each sample comes in addition.
        where: ``"memory"``: as long as the program runs; several loaders share it. ``"disk"``: also for later runs, and
            for all ranks of this machine, in the folder `path`.
        path: the folder, one for each dataset, on a disk of this machine.
        version: for ``"disk"``: a name for the dataset and all that its samples depend on; what another version has
            kept is thrown away. Default: from the files and options of gpuload's own datasets; any other needs one.

    Raises:
        TypeError: it is no map-style dataset; it has ``set_epoch()``, so its samples change; it needs a `version`; or,
            from ``dataset[i]``, a sample holds something else. The message says where.
        ValueError: an argument is not valid; the folder is in use for another dataset, version or limit.
        OSError: the folder cannot be written, or its file system cannot give back parts of a file.
    """

    @dataset_arguments
    def __init__(
        self,
        dataset: Any,
        bytes_limit: int,
        *,
        where: Literal["memory", "disk"] = "memory",
        path: str | os.PathLike[str] | None = None,
        version: str | None = None,
    ) -> None:
        _check(dataset, bytes_limit, where, path, version)
        self.dataset, self.where = dataset, where
        if where == "memory":
            self._backing: Any = Memory(Shape(len(dataset), bytes_limit, os.urandom(16)))
        else:
            shape = Shape(len(dataset), bytes_limit, _identity(dataset, version))
            self._backing = Folder(full_path(path or ""), shape)
        self._opened: tuple[int, Entries] | None = None
        self._before = self._entries.totals()

    @property
    def _entries(self) -> Entries:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), Entries(self._backing)
        return self._opened[1]

    def __len__(self) -> int:
        return self._backing.shape.samples

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Several samples; those that are not kept are asked for together."""
        numbers = [from_start(index, len(self), f"the cached dataset has {len(self)} samples") for index in indices]
        entries = self._entries
        found: dict[int, Any] = {}
        missing = []
        for number in dict.fromkeys(numbers):
            if not entries.get(number, lambda packed, number=number: _unpacked(number, packed, found)):
                missing.append(number)
        if missing:
            began = time.time_ns() - SETTLED_NS
            for number, sample in zip(missing, fetched(self.dataset, missing), strict=True):
                found[number] = sample
                images = _images(sample)
                stamps = _stamps(images)
                packed = pack((stamps, sample))
                # A page to log in, or half of a file, that a server gave once is not kept.
                if all(max(changed) < began for _, _, *changed in stamps) and all(is_complete(i.data) for i in images):
                    entries.put(number, packed)
        return [found[number] for number in numbers]

    def statistics(self) -> CacheStatistics:
        """What all processes together have done since this was made, and what is in the cache."""
        now, before = self._entries.totals(), self._before
        done = {name: now[name] - before[name] for name in now}
        return CacheStatistics(
            hits=done["hits"],
            misses=done["first"] + done["again"],
            entries=now["entries"],
            bytes_used=now["used"],
            bytes_allowed=now["allowed"],
            bytes_limit=self._backing.shape.limit_bytes,
            evicted=done["evicted"],
            too_large=done["too_large"],
        )

    def blocks(self) -> np.ndarray | None:
        """Those of the dataset."""
        return natural_blocks(self.dataset)

    def _forget(self, index: int) -> list[str]:
        """See `gpuload.datasets.kinds.forget`."""
        name = f"the cache in {self._backing.path!r}" if self.where == "disk" else "the cache in memory"
        return [name] * self._entries.drop(index) + forget(self.dataset, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __repr__(self) -> str:
        return f"Cached({self.dataset!r}, bytes_limit={self._backing.shape.limit_bytes}, where={self.where!r})"


def _check(dataset: Any, bytes_limit: Any, where: Any, path: Any, version: Any) -> None:
    check_dataset(dataset)
    name = type(dataset).__name__
    if is_iterable(dataset) or not hasattr(dataset, "__len__"):
        raise TypeError(f"Cached() takes a map-style dataset, with a length and an index for each sample, got {name}")
    if callable(getattr(dataset, "set_epoch", None)):
        raise TypeError(
            f"{name} has set_epoch(), so its samples change from epoch to epoch, and kept ones would not; cache what "
            "it reads from instead"
        )
    if isinstance(bytes_limit, bool) or not isinstance(bytes_limit, int):
        raise TypeError(f"bytes_limit must be a number of bytes, such as 64 << 30, got {bytes_limit!r}")
    if bytes_limit < LEAST_BYTES:
        raise ValueError(f"bytes_limit must be at least {LEAST_BYTES} bytes (1 MiB), got {bytes_limit}")
    if where not in ("memory", "disk"):
        raise ValueError(f"where must be 'memory' or 'disk', got {where!r}")
    if where == "disk" and path is None:
        raise ValueError("where='disk' needs path=, a folder for this dataset alone, on a disk of this machine")
    if where == "memory" and (path is not None or version is not None):
        given = "path" if path is not None else "version"
        raise ValueError(f"{given}= is for where='disk'; memory ends with the program")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if where == "memory" and bytes_limit > memory:
        raise ValueError(
            f"bytes_limit={bytes_limit} is more than the {memory} bytes of memory of this machine; use where='disk'"
        )


def _identity(dataset: Any, version: str | None) -> bytes:
    """Return a key of what the dataset's samples depend on."""
    digest = hashlib.blake2b(f"{type(dataset).__qualname__} {len(dataset)} ".encode(), digest_size=16)
    if version is not None:
        digest.update(str(version).encode())
    elif draws_nothing(dataset):
        file, buffers = io.BytesIO(), []
        pickler = _Identity(file, 5, buffer_callback=buffers.append)
        pickler.dump(dataset)
        for part in (file.getbuffer(), *(buffer.raw() for buffer in buffers), repr(pickler.stamps).encode()):
            digest.update(part)
    else:
        raise TypeError(
            f"a cache on disk outlives the program, and nothing tells whether a {type(dataset).__name__} gives the "
            "same samples the next time: pass version=, a name that you change with its data and code"
        )
    return digest.digest()


class _Identity(pickle.Pickler):
    """Pickles a dataset to be compared, not to be loaded: with size and time of the files of all stores in it, and
    without where other caches in it are."""

    def __init__(self, file: Any, protocol: int, *, buffer_callback: Any) -> None:
        super().__init__(file, protocol, buffer_callback=buffer_callback)
        self.stamps: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Cached):
            return Cached, (obj.dataset,)
        if isinstance(obj, Store):
            own: Any = vars(obj)
            paths = [obj.path, own.get("_file"), *own.get("files", ())]
            self.stamps += [_stamp(path) for path in paths if path]
        return NotImplemented


def _unpacked(number: int, packed: memoryview, found: dict[int, Any]) -> bool:
    """Return whether an entry is of the files as they are now; its sample goes to `found`."""
    try:
        stamps, sample = unpack(packed)
        if any(_stamp(stamp[0]) != stamp for stamp in stamps):
            return False
    except (ValueError, TypeError, LookupError):
        return False
    found[number] = sample
    return True


def _images(sample: Any) -> list[Encoded]:
    leaves: list[Any] = []
    flatten(sample, leaves)
    images = [leaf.array if isinstance(leaf, Mask) else leaf for leaf in leaves]
    return [image for image in images if isinstance(image, Encoded)]


def _stamps(images: list[Encoded]) -> list[list[Any]]:
    """Return the files that images are of: path, size, and when content and file were changed."""
    paths = sorted({image.source for image in images if image.source})
    return [stamp for path in paths if (stamp := _stamp(path)) is not None]


def _stamp(path: str) -> list[Any] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [path, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


# -- samples as bytes -------------------------------------------------------------------------------------------------


def pack(sample: Any) -> bytes:
    """Return a sample as bytes.

    Raises:
        TypeError: it holds what is not kept; the message says where.
    """
    blobs: list[Any] = []
    described = _described(sample, "", blobs)
    head = json.dumps([described, [len(blob) for blob in blobs]]).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *blobs])


def unpack(data: memoryview) -> Any:
    """Return the sample in these bytes; ValueError if they are none."""
    try:
        end = 4 + int.from_bytes(data[:4], "little")
        described, lengths = json.loads(bytes(data[4:end]))
        if sum(lengths) != len(data) - end or min(lengths, default=0) < 0:
            raise ValueError("its parts are longer or shorter than it says")
        return _made(described, (data[begin:end] for begin, end in pairwise(accumulate(lengths, initial=end))))
    except (ValueError, TypeError, LookupError, StopIteration, RecursionError, OverflowError) as error:
        raise ValueError(f"not a packed sample: {error}") from error


def _described(value: Any, where: str, blobs: list[Any]) -> Any:
    """Return what JSON says of a value: plain ones as they are, others as [kind, …]; their bytes go to `blobs`."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in META:
        return ["meta", _described(plain_meta(value), where, blobs)]
    if kind is tuple or kind is list:
        return [kind.__name__, [_described(part, f"{where}[{i}]", blobs) for i, part in enumerate(value)]]
    if kind is dict:
        for key in value:
            if type(key) not in PLAIN:
                raise TypeError(f"{where or 'the sample'} has the key {key!r}, a {type(key).__name__}; {_KEPT}")
        parts = [_described(part, f"{where}[{key!r}]", blobs) for key, part in value.items()]
        return ["dict", list(value), parts]
    if kind is Encoded:
        blobs.append(value.data)
        return ["encoded", value.mode, value.source]
    if kind is bytes:
        blobs.append(value)
        return ["bytes"]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMPY_KINDS:
        array = np.ascontiguousarray(value)
        blobs.append(array.tobytes())
        return ["array" if isinstance(value, np.ndarray) else "number", value.dtype.str, list(np.shape(value))]
    if (kind.__module__, kind.__name__) == ("torch", "Tensor") and _is_plain(value):
        blobs.append(_bytes_of(value))
        return ["tensor", dtype_of(value), list(value.shape)]
    for name, declared in DECLARED.items():
        if kind is declared:
            inner: Any = value
            more = [getattr(inner, attribute) for attribute in DETAILS.get(name, ())]
            return [name, _described(inner.array, where, blobs), *more]
    place = f"{where} of the sample" if where else "the sample"
    raise TypeError(f"{place} is a {kind.__module__}.{kind.__qualname__}, which gpuload.Cached does not keep; {_KEPT}")


_KEPT = (
    "expected tuples, lists and dicts of gpuload.Encoded, images, masks, boxes, keypoints, numbers, str, bytes, None, "
    "numpy arrays of numbers and torch tensors on the CPU"
)


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is numbers in this machine's memory, and no more than that."""
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return not special and tensor.device.type == "cpu" and str(tensor.layout) == "torch.strided"


def _bytes_of(tensor: Any) -> bytes:
    import torch

    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _made(described: Any, parts: Iterator[memoryview]) -> Any:
    if not isinstance(described, list):
        return described
    kind, *rest = described
    if kind in ("tuple", "list"):
        made = [_made(part, parts) for part in rest[0]]
        return tuple(made) if kind == "tuple" else made
    if kind == "dict":
        return dict(zip(rest[0], [_made(part, parts) for part in rest[1]], strict=True))
    if kind == "meta":
        return as_meta(_made(rest[0], parts))
    if kind == "encoded":
        return Encoded(bytes(next(parts)), *rest)
    if kind == "bytes":
        return bytes(next(parts))
    if kind in ("array", "number"):
        dtype = np.dtype(rest[0])
        if dtype.kind not in NUMPY_KINDS:
            raise ValueError(f"an array of {dtype}")
        array = np.frombuffer(bytearray(next(parts)), dtype).reshape(rest[1])
        return array if kind == "array" else array[()]
    if kind == "tensor":
        return _tensor(bytearray(next(parts)), *rest)
    return DECLARED[kind](_made(rest[0], parts), *rest[1:])


def _tensor(data: bytearray, name: str, shape: list[int]) -> Any:
    import torch

    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of {name!r}")
    try:
        return torch.from_numpy(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
    except RuntimeError as error:
        raise ValueError(f"a tensor of shape {shape}: {error}") from error
