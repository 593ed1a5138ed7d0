"""`Cached`: a dataset whose samples are cached in memory or on disk, shared by all workers.

A sample is stored as bytes: JSON that describes it, then the bytes of its images, arrays, tensors and bytes objects.
Other programs may be able to write to the disk, so nothing is unpickled, and the data cannot specify a class to
instantiate. Bytes that are not a packed sample raise ValueError. Runs in workers; torch is imported if a sample has
tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Final, Literal, SupportsIndex

import numpy as np

from gpuload.checks import integer, one_of
from gpuload.datasets.cache_file import CacheLocation, Entries
from gpuload.datasets.files import is_complete, read_starts
from gpuload.datasets.joined import View
from gpuload.datasets.kinds import check_dataset, fetch_samples, forget, is_deterministic, is_iterable
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import LEAVES, META, Encoded, Mask, as_meta, plain_meta
from gpuload.datasets.scan import full_path, normalize_index
from gpuload.datasets.stores.store import Store
from gpuload.datasets.tree import dtype_of, flatten, is_plain_tensor

__all__ = ["CacheStatistics", "Cached", "identity_of", "pack", "unpack"]

FORMAT: Final = "gpuload3"  # version of the format on disk
MIN_BYTES: Final = 1 << 20
SETTLED_NS: Final = 100_000_000  # a file modified this recently may also have been modified while it was read
PLAIN: Final = (type(None), bool, int, float, str)
NUMPY_KINDS: Final = "biufcUS"
MAKERS: Final[dict[str, Callable[..., Any]]] = {  # functions that build a value from its parts, keyed by kind
    "tuple": lambda *parts: parts,
    "list": lambda *parts: [*parts],
    "dict": lambda keys, values: dict(zip(keys, values, strict=True)),
    "meta": as_meta,
    **{leaf.__name__: leaf for leaf in LEAVES},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counters of a cache, summed over all processes.

    Attributes:
        hits, misses: the number of requested samples that were in the cache, and that were not, since the `Cached` was
            created.
        entries: the number of samples in the cache.
        bytes_used: the size of all entries.
        bytes_allowed: the current limit, which adapts to the hit rate.
        bytes_limit: the user's limit.
        evicted: the number of evicted samples.
        too_large: the number of samples that were not cached because they exceed 1/16 of the limit.
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
        """The fraction of requested samples that were hits; 0.0 if no sample was requested."""
        return self.hits / max(1, self.hits + self.misses)


class Cached(View):
    """A cache for the samples of a map-style dataset, stored as encoded bytes that all workers of a loader share.

    A sample can be nested tuples, lists and dicts of `Encoded`, `Image`, `Mask`, `Boxes`, `Keypoints`, numbers, str,
    bytes, None, numpy arrays and torch tensors. If the dataset draws random numbers, the first results are cached, so
    augment in ``Loader(transforms=…)`` instead. An `Encoded` image whose `source` is a file is read again if that file
    has changed. The least recently used samples are evicted first. All other attributes are looked up in the dataset.

    Args:
        dataset: the dataset to cache.
        bytes_limit: the maximum number of bytes, in memory or on disk; a table of 16 bytes per sample is added to it.
        where: ``"memory"`` keeps the cache in memory until the program ends; all its loaders share it. ``"disk"`` keeps
            it in the folder `path`, for later runs and for all ranks on this machine.
        path: the folder, which must be on a local disk and hold this dataset only.
        version: for ``"disk"``: a name for the dataset and everything that its samples depend on; samples cached under
            another version are discarded. By default, it is derived from the files and options of gpuload's datasets;
            any other dataset needs a version.

    Raises:
        TypeError: the dataset is not map-style; it has ``set_epoch()``, so its samples change; it needs a `version`;
            or, from ``dataset[i]``, a sample contains another type. The message says where.
        ValueError: an argument is invalid; the folder is in use for another dataset, version or limit.
        OSError: the folder is not writable, or its file system does not support punching holes in a file.
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
        bytes_limit = integer("bytes_limit", bytes_limit, minimum=MIN_BYTES)
        self.where = one_of("where", where, ("memory", "disk"))
        _check(dataset, bytes_limit, where, path, version)
        super().__init__(dataset)
        key = os.urandom(16) if where == "memory" else identity_of(dataset, version)
        self._location = CacheLocation(len(dataset), bytes_limit, key, "" if path is None else full_path(path))
        self._opened: tuple[int, Entries] | None = None
        self._initial_totals = self._entries.totals()

    @property
    def _entries(self) -> Entries:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), Entries(self._location)
        return self._opened[1]

    def __len__(self) -> int:
        return self._location.samples

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Return several samples; all samples that are not cached are read from the dataset in one call."""
        count = len(self)
        numbers = [
            normalize_index(index, count, lambda: f"the cached dataset has {count} samples") for index in indices
        ]
        entries = self._entries
        stamped_samples = {number: entries.get(number, _unpack_current) for number in dict.fromkeys(numbers)}
        if missing_numbers := [number for number, entry in stamped_samples.items() if entry is None]:
            settled_before_ns = time.time_ns() - SETTLED_NS
            with read_starts(None):  # a part of a file must not be cached
                samples = fetch_samples(self.dataset, missing_numbers)
            for number, sample in zip(missing_numbers, samples, strict=True):
                images = _encoded_images(sample)
                stamps = [stamp for path in sorted({i.source for i in images if i.source}) if (stamp := _stamp(path))]
                stamped_samples[number] = stamps, sample
                packed = pack(stamped_samples[number])
                # Do not cache a login page or a truncated file that a server sent once.
                if all(max(changed) < settled_before_ns for _, _, *changed in stamps) and all(
                    is_complete(i.data) for i in images
                ):
                    entries.put(number, packed)
        return [stamped_samples[number][1] for number in numbers]

    def statistics(self) -> CacheStatistics:
        """Return the counters of all processes since this object was created, and the current size of the cache."""
        totals = self._entries.totals()
        new_counts = {
            name: totals[name] - self._initial_totals[name] for name in ("hits", "misses", "evicted", "too_large")
        }
        return CacheStatistics(**(totals | new_counts), bytes_limit=self._location.limit_bytes)

    def _forget(self, index: int) -> list[str]:
        """Drop a sample from this cache and from inner caches, and return the names of the caches that had it; see
        `gpuload.datasets.kinds.forget`."""
        name = f"the cache in {self._location.folder!r}" if self._location.folder else "the cache in memory"
        return [name] * self._entries.drop(index) + forget(self.dataset, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __repr__(self) -> str:
        return f"Cached({self.dataset!r}, bytes_limit={self._location.limit_bytes}, where={self.where!r})"


def _check(dataset: object, bytes_limit: int, where: str, path: object, version: object) -> None:
    check_dataset(dataset)
    name = type(dataset).__name__
    if is_iterable(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"Cached() takes a map-style dataset, which has __len__ and __getitem__, got {name}")
    if callable(getattr(dataset, "set_epoch", None)):
        raise TypeError(
            f"{name} has set_epoch(), so its samples change while it is used, but cached samples would not; cache the "
            "dataset inside it instead"
        )
    if where == "disk" and path is None:
        raise ValueError("where='disk' needs path=, a folder on a local disk that no other dataset uses")
    if where == "memory" and (path is not None or version is not None):
        option = "path" if path is not None else "version"
        raise ValueError(f"{option}= applies to where='disk' only; remove it, or write where='disk'")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if where == "memory" and bytes_limit > memory:
        raise ValueError(
            f"bytes_limit={bytes_limit} is more than the {memory} bytes of memory on this machine; use where='disk'"
        )


def identity_of(dataset: Any, version: str | None = None) -> bytes:
    """Return a key that changes with everything that the dataset's samples depend on, except the contents of image
    files.

    Raises:
        TypeError: this is not known of the dataset, and there is no `version`.
    """
    digest = hashlib.blake2b(f"{FORMAT} {type(dataset).__qualname__} {len(dataset)} ".encode(), digest_size=16)
    if version is not None:
        digest.update(str(version).encode())
    elif is_deterministic(dataset):
        file: Any = SimpleNamespace(write=digest.update)
        pickler = _Identity(file, 5)
        pickler.stamps = []
        pickler.dump(dataset)
        digest.update(repr(pickler.stamps).encode())
    else:
        raise TypeError(
            f"a cache on disk outlives the program, and gpuload cannot tell whether a {type(dataset).__name__} yields "
            "the same samples next time: pass version=, a name that you change whenever its data or code changes"
        )
    return digest.digest()


class _Identity(pickle.Pickler):
    """A pickler whose output is only hashed, never loaded. It records the size and modification time of the files of
    all stores inside the dataset, and skips the locations of other caches inside it."""

    stamps: list[Any]

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Cached):
            return Cached, (obj.dataset,)
        if isinstance(obj, Store):
            attributes = vars(obj)
            paths = [obj.path, attributes.get("_file"), *attributes.get("files", ())]
            self.stamps += [_stamp(path) for path in paths if path]
        return NotImplemented


def _unpack_current(packed: memoryview) -> tuple[list[Any], Any] | None:
    """Return the stamps of an entry and its sample; None if a file has changed since, or if the entry is invalid."""
    try:
        stamps, sample = unpack(packed)
        return None if any(_stamp(stamp[0]) != stamp for stamp in stamps) else (stamps, sample)
    except (ValueError, TypeError, LookupError):
        return None


def _encoded_images(sample: object) -> list[Encoded]:
    leaves: list[Any] = []
    flatten(sample, leaves)
    images = [leaf.array if isinstance(leaf, Mask) else leaf for leaf in leaves]
    return [image for image in images if isinstance(image, Encoded)]


def _stamp(path: str) -> list[Any] | None:
    """Return a file's path, its size, and the modification times of its content and of its inode; None if the file does
    not exist."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [path, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


# -- samples as bytes -------------------------------------------------------------------------------------------------


def pack(sample: Any) -> bytes:
    """Return a sample as bytes.

    Raises:
        TypeError: the sample contains a type that cannot be cached; the message says where.
    """
    blobs: list[Any] = []
    description = _describe(sample, "", blobs)
    header = json.dumps([description, [len(blob) for blob in blobs]]).encode()
    return b"".join([len(header).to_bytes(4, "little"), header, *blobs])


def unpack(data: memoryview) -> Any:
    """Return the sample in these bytes; raise ValueError if the bytes are not a packed sample."""
    try:
        end = 4 + int.from_bytes(data[:4], "little")
        description, lengths = json.loads(bytes(data[4:end]))
        if sum(lengths) != len(data) - end or min(lengths, default=0) < 0:
            raise ValueError("its parts do not have the lengths in its header")
        blobs = (data[begin:end] for begin, end in pairwise(accumulate(lengths, initial=end)))
        sample = _rebuild(description, blobs)
        if next(blobs, None) is not None:
            raise ValueError("it has more parts than its header lists")
        return sample
    except (ValueError, TypeError, LookupError, StopIteration, RuntimeError, OverflowError) as error:
        raise ValueError(f"not a packed sample: {error}") from error


def _describe(value: Any, path: str, blobs: list[Any]) -> Any:
    """Return the JSON description of a value: a plain value describes itself; any other value is described as
    [kind, …], and its bytes are appended to `blobs`."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in META:
        return ["meta", _describe(plain_meta(value), path, blobs)]
    if kind is tuple or kind is list:
        return [kind.__name__, *(_describe(part, f"{path}[{i}]", blobs) for i, part in enumerate(value))]
    if kind is dict:
        for key in value:
            if type(key) not in PLAIN:
                raise TypeError(
                    f"{path or 'the sample'} has the key {key!r}, a {type(key).__name__}; dict keys must be str, int, "
                    "float, bool or None"
                )
        parts = [_describe(part, f"{path}[{key!r}]", blobs) for key, part in value.items()]
        return ["dict", ["list", *value], ["list", *parts]]
    if kind in LEAVES:
        return [kind.__name__, *(_describe(getattr(value, part.name), path, blobs) for part in fields(kind))]
    if kind is bytes:
        blobs.append(value)
        return ["bytes"]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMPY_KINDS:
        blobs.append(value.tobytes())
        return ["array" if isinstance(value, np.ndarray) else "number", value.dtype.str, list(np.shape(value))]
    if is_plain_tensor(kind) and _is_packable(value):
        import torch

        tensor: Any = value
        blobs.append(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return ["tensor", dtype_of(tensor), list(tensor.shape)]
    leaf_name = f"{path} of the sample" if path else "the sample"
    raise TypeError(
        f"{leaf_name} is a {kind.__module__}.{kind.__qualname__}, which gpuload.Cached cannot store; {_EXPECTED}"
    )


_EXPECTED = (
    "expected tuples, lists and dicts of gpuload.Encoded, images, masks, boxes, keypoints, numbers, str, bytes, None, "
    "numpy arrays of numbers and torch tensors on the CPU"
)


def _is_packable(tensor: Any) -> bool:
    """Return whether a tensor has plain numbers in main memory, without a gradient or a special layout."""
    is_special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return not is_special and tensor.device.type == "cpu" and str(tensor.layout) == "torch.strided"


def _rebuild(description: object, blobs: Iterator[memoryview]) -> Any:
    if not isinstance(description, list):
        return description
    kind, *parts = description
    if kind == "bytes":
        return bytes(next(blobs))
    if kind in ("array", "number"):
        dtype = np.dtype(parts[0])
        if dtype.kind not in NUMPY_KINDS:
            raise ValueError(f"it has an array of dtype {dtype}, which samples cannot contain")
        array = np.frombuffer(bytearray(next(blobs)), dtype).reshape(parts[1])
        return array if kind == "array" else array[()]
    if kind == "tensor":
        import torch

        bits = torch.from_numpy(np.frombuffer(bytearray(next(blobs)), np.uint8))
        return bits.view(vars(torch)[parts[0]]).reshape(parts[1])
    return MAKERS[kind](*(_rebuild(part, blobs) for part in parts))
