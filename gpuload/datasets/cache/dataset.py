"""`Cached`: a dataset whose samples are kept, in memory or on disk that all workers share."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, SupportsIndex

import numpy as np

from gpuload.datasets.cache.backing import Folder, Memory
from gpuload.datasets.cache.codec import pack, unpack
from gpuload.datasets.cache.entries import Entries
from gpuload.datasets.cache.layout import Shape
from gpuload.datasets.joined import Dataset, Joined, from_start, has_samples
from gpuload.datasets.kinds import check_dataset, draws_nothing, fetched, is_iterable, natural_blocks
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.paths import full_path
from gpuload.datasets.sample import Encoded, Mask
from gpuload.datasets.tree import flatten

__all__ = ["CacheStatistics", "Cached"]

LEAST_BYTES: Final = 1 << 20
SETTLED_NS: Final = 100_000_000  # a file changed so shortly before it was read may have been changed while it was


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
            folder = full_path(path or "")
            self._backing = Folder(folder, Shape(len(dataset), bytes_limit, _identity(dataset, version)))
        self._opened: tuple[int, Entries] | None = None
        self._before = self._entries.totals()
        if where == "disk":
            self._backing.ready()

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
                stamps = _stamps(sample)
                packed = pack((stamps, sample))
                if all(max(changed) < began for _, _, *changed in stamps):
                    entries.put(number, packed)
        return [found[number] for number in numbers]

    def statistics(self) -> CacheStatistics:
        """What all processes together have done since this was made, and what is in the cache."""
        now, before = self._entries.totals(), self._before
        done = {name: now[name] - before[name] for name in ("hits", "first", "again", "evicted", "too_large")}
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

    def __add__(self, other: Any) -> Joined:
        """This dataset and another map-style one after it."""
        return Joined([self, other]) if has_samples(other) else NotImplemented

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
    """A key of what the dataset's samples depend on."""
    digest = hashlib.blake2b(f"{type(dataset).__qualname__} {len(dataset)} ".encode(), digest_size=16)
    if version is not None:
        digest.update(str(version).encode())
    elif draws_nothing(dataset):
        buffers: list[pickle.PickleBuffer] = []
        digest.update(pickle.dumps(dataset, 5, buffer_callback=buffers.append))
        for buffer in buffers:
            digest.update(buffer.raw())
    else:
        raise TypeError(
            f"a cache on disk outlives the program, and nothing tells whether a {type(dataset).__name__} gives the "
            "same samples the next time: pass version=, a name that you change with its data and code"
        )
    return digest.digest()


def _unpacked(number: int, packed: memoryview, found: dict[int, Any]) -> bool:
    """Whether an entry is of the files as they are now; its sample goes to `found`."""
    try:
        stamps, sample = unpack(packed)
        if any(_stamp(stamp[0]) != stamp for stamp in stamps):
            return False
    except (ValueError, TypeError, LookupError):
        return False
    found[number] = sample
    return True


def _stamps(sample: Any) -> list[list[Any]]:
    """The files that a sample's images are of: path, size, and when content and file were changed."""
    leaves: list[Any] = []
    flatten(sample, leaves)
    images = [leaf.array if isinstance(leaf, Mask) else leaf for leaf in leaves]
    paths = {leaf.source for leaf in images if isinstance(leaf, Encoded) and leaf.source}
    return [stamp for path in sorted(paths) if (stamp := _stamp(path)) is not None]


def _stamp(path: str) -> list[Any] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [path, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
