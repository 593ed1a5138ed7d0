"""`TarShards`: random access to the samples of tar archives.

The main process builds or loads the indexes, and all workers map them. Workers open archives on first use.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsIndex

import numpy as np

from gpuload.checks import flag, integer, optional
from gpuload.datasets.files import byte_limit, check_size, start_bytes
from gpuload.datasets.litter import SkippedFiles
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Mode
from gpuload.datasets.scan import LazySequence, normalize_index
from gpuload.datasets.stores.opening import OpenFile, client, remote_options
from gpuload.datasets.stores.store import Patterns, Store, as_list
from gpuload.datasets.stores.tar.fields import Fields, is_image_field
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.shards import find_shards, open_shards
from gpuload.datasets.stores.tar.stream import TarStream
from gpuload.datasets.worker import THIS_PROCESS

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import RemoteFile, StorageOptions
    from gpuload.datasets.stores.tar.index import Shard

__all__ = ["TarShards"]

MAX_OPEN_FILES: Final = 64
MAX_MAPPED_BYTES: Final = 16 << 30  # page tables for mappings of this size take 32 MB per worker


class SamplePlan(NamedTuple):
    """The members to read for one sample."""

    shard: int
    key: str
    fields: list[str]
    members: list[tuple[str, int, int]]  # field name, offset and size of each field in the archive


class TarShards(Store):
    """Samples in tar archives as written for WebDataset: adjacent files with the same base name form a sample.

    A file's name up to its first dot, including the folder, is the sample's key; the remainder is the field name. The
    extension determines the field's type: images (``jpg png webp ppm …``) become `Encoded`; ``seg.png`` and
    ``mask.png`` a `Mask`; ``cls id index count`` int; ``json`` the decoded value; ``txt`` str; ``npy`` an array (object
    arrays are refused, since they are pickles). In a sample without images, the first H×W×C uint8 array with one to
    four channels becomes an `Image`. Any other field is returned as bytes.

    An index of each archive is built once from its headers and saved next to it as ``….tar.gpuload-index``, or if that
    fails, in the cache folder (``$GPULOAD_CACHE``, else ``~/.cache/gpuload``). It is rebuilt when the archive's size or
    modification time changes. Samples can be read in any order, so ``Loader(shuffle=True)`` is a full shuffle.

    Args:
        shards: one or more paths, which may contain ``{000..099}``, ``{a,b}``, ``*`` and ``?``.
        fields: the fields of a sample: ``("jpg", "cls")`` yields tuples; ``"jpg;png"`` selects the first field that
            exists, and ``"__key__"`` is the key. A str yields only the value of that field. None yields a dict of all
            fields and ``"__key__"``.
        mode, exif: the pixel mode of images, and whether they are turned upright, see `Encoded`.
        stream: read the archives in one pass, as an iterable dataset. This also works for compressed archives (gzip,
            bzip2, xz, zstd), pipes, and ``"-"``, the standard input. A stream has no index, and only shuffles within a
            buffer.
        shuffle_buffer: for `stream`: 0 preserves the order of the archives. Otherwise, each epoch reads the archives in
            a different order, and draws samples from a buffer of this size.
        storage_options: for URLs, fsspec options or a `Remote`.
        workers: the number of processes that build indexes; by default one per available CPU, up to 16.

    Attributes:
        shards: the path of each shard.
        keys: the key of each sample, as a lazy sequence of str. Keys are unique within a shard, but may repeat across
            shards.

    Raises:
        FileNotFoundError: no shard is found.
        ValueError: a shard is truncated, damaged, compressed, or not a tar; it has links or duplicate keys; there are
            no samples; an argument is not valid.
        LookupError: from ``dataset[i]``: the sample lacks a field.

    Example:
        >>> import pathlib, tarfile, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name, data in (("1.jpg", b"..."), ("1.cls", b"7")):
        ...         size = pathlib.Path(root, name).write_bytes(data)
        ...     with tarfile.open(f"{root}/train-000.tar", "w") as tar:
        ...         for name in ("1.jpg", "1.cls"):
        ...             tar.add(f"{root}/{name}", name)
        ...     dataset = TarShards(f"{root}/train-{{000..000}}.tar", fields=("jpg", "cls"))
        ...     image, label = dataset[0]
        >>> len(dataset), dataset.keys[0], len(image.data), label
        (1, '1', 3, 7)
    """

    def __new__(cls, *arguments: Any, stream: bool = False, **options: Any) -> Any:
        if flag("stream", stream):  # an iterable dataset, which must not have __getitem__
            return TarStream(*arguments, **options)
        return super().__new__(cls)

    @dataset_arguments
    def __init__(
        self,
        shards: Patterns,
        *,
        fields: str | Sequence[str] | None = None,
        mode: Mode = "RGB",
        exif: bool | None = None,
        stream: bool = False,
        shuffle_buffer: int = 0,
        workers: int | None = None,
        storage_options: StorageOptions = None,
    ) -> None:
        if integer("shuffle_buffer", shuffle_buffer, minimum=0):
            raise ValueError(
                f"shuffle_buffer={shuffle_buffer} needs stream=True; to shuffle all samples, use "
                "gpuload.Loader(dataset, shuffle=True)"
            )
        self._fields = Fields(fields, mode, exif)
        self.exif, workers = self._fields.exif, optional(integer, "workers", workers, minimum=0)
        shards = as_list(shards)
        self._remote = remote_options(shards, storage_options)
        self._shards = open_shards(find_shards(shards, self._remote), workers=workers, remote=self._remote)
        SkippedFiles(sum(shard.skipped_files for shard in self._shards)).log(shards[0] if len(shards) == 1 else shards)
        self._ends: list[int] = np.cumsum([shard.samples for shard in self._shards]).tolist()
        if not len(self):
            raise ValueError(
                f"there are no samples in {len(self._shards)} shard(s), starting with {self._shards[0].path!r}: no "
                "file in the shards has an extension; expected names such as 0001.jpg"
            )
        self.path = self._shards[0].path

    @property
    def shards(self) -> list[str]:
        """The path of each archive."""
        return [shard.path for shard in self._shards]

    @property
    def keys(self) -> Sequence[str]:
        """The key of each sample."""
        return _Keys(self)

    @property
    def nbytes(self) -> int:
        """The memory used by the indexes."""
        return sum(shard.table.nbytes for shard in self._shards)

    def __len__(self) -> int:
        return self._ends[-1]

    def _open(self) -> Callable[[int], OpenFile] | dict[int, RemoteFile]:
        """Return a function that opens a shard, given its index, and keeps the last few shards open; for URLs, a dict
        of the shards whose size and version are known."""
        if self._remote is not None:
            return {}
        return lru_cache(MAX_OPEN_FILES)(partial(_open_shard, self._shards, use_mmap=self._uses_mmap()))

    def _uses_mmap(self) -> bool:
        """Return whether archives are mapped: in workers, if all of them fit in memory. Otherwise page faults read more
        of a file than the accessed bytes, and would evict pages that are still needed."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if not THIS_PROCESS.is_worker or len(self._shards) > MAX_OPEN_FILES:
            return False
        return sum(shard.size for shard in self._shards) <= min(MAX_MAPPED_BYTES, memory // 2)

    def _read(self, handle: Any, indices: list[int]) -> list[Any]:
        """Read samples: from URLs in one batch, from local files in the order of the index."""
        if self._remote is None:
            samples = {i: self._read_sample(indices[i]) for i in np.argsort(indices).tolist()}
            return [samples[i] for i in range(len(indices))]
        plans = [self._plan_sample(index) for index in indices]
        ranges = [(plan.shard, offset, nbytes) for plan in plans for _, offset, nbytes in plan.members]
        new_shards = [shard for shard in dict.fromkeys(shard for shard, _, _ in ranges) if shard not in handle]
        reader = client(self._remote)
        files = reader.stat([self._shards[shard].path for shard in new_shards])
        for shard, file in zip(new_shards, files, strict=True):
            _check_unchanged(self._shards[shard], file)
            handle[shard] = file
        contents = iter(reader.read([(handle[shard], offset, nbytes) for shard, offset, nbytes in ranges]))
        return [self._build_sample(plan, [next(contents) for _ in plan.members]) for plan in plans]

    def _lazy_reader(self, indices: Iterable[SupportsIndex]) -> Callable[[int], Any] | None:
        """Return a function that takes a position in `indices` and reads the sample. So a sample can be used before the
        next one is read, and its memory can be reused. Return None for URLs, which are read in one batch."""
        if self._remote is not None:
            return None
        valid_indices = self._normalize_indices(indices)
        return lambda position: self._read_sample(valid_indices[position])

    def _read_sample(self, index: int) -> Any:
        plan = self._plan_sample(index)
        contents = []
        if plan.members:
            file = self._handle(plan.shard)
            contents = [file.read_at(offset, nbytes) for _, offset, nbytes in plan.members]
        return self._build_sample(plan, contents)

    def _build_sample(self, plan: SamplePlan, contents: list[bytes]) -> Any:
        """Build a sample from the bytes of its fields."""
        path, data = self._shards[plan.shard].path, {}
        for (name, offset, nbytes), content in zip(plan.members, contents, strict=True):
            if len(content) < nbytes:
                raise ValueError(
                    f"{path!r} returned {len(content):,} bytes at offset {offset:,}, but its index expects "
                    f"{nbytes:,}: the archive was changed after it was opened; create the dataset again"
                )
            data[name] = content
        return self._fields.build_sample(data, plan.fields, path, plan.key)

    def will_need(self, indices: Iterable[int]) -> None:
        """Ask the kernel to prefetch samples that will be read soon."""
        if self._remote is not None:
            return
        indices = list(indices)
        if len(indices) > 1 and all(after - index == 1 for index, after in pairwise(indices)) and self._uses_mmap():
            return  # the kernel reads ahead itself, which costs less and makes copying faster
        for index in indices:
            plan = self._plan_sample(normalize_index(index, len(self), lambda: repr(self)))
            if plan.members:
                begin = plan.members[0][1]
                end = max(offset + nbytes for _, offset, nbytes in plan.members)
                self._handle(plan.shard).prefetch(begin, end - begin)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the index of a sample's shard, and the sample's index within that shard."""
        shard = bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)

    def _plan_sample(self, index: int) -> SamplePlan:
        shard, sample = self._locate(index)
        source = self._shards[shard]
        columns, key = source.columns, source.key(sample)
        blocks, sizes, first = columns.blocks, columns.sizes, columns.first[sample]
        names = [columns.names[field] for field in columns.fields[first : columns.first[sample + 1]]]
        fields = self._fields.choose(names, source.path, key)
        members = [(name, blocks[i] * BLOCK, sizes[i]) for i, name in enumerate(names, first) if name in fields]
        limit = byte_limit()
        for name, _, nbytes in members:
            if nbytes > limit:
                check_size(nbytes, f"{source.path}:{key}.{name}")
        if (start := start_bytes()) is not None:
            members = [
                (name, at, min(nbytes, start) if is_image_field(name) else nbytes) for name, at, nbytes in members
            ]
        return SamplePlan(shard, key, fields, members)

    def __repr__(self) -> str:
        path, count = self._shards[0].path, len(self._shards)
        return f"TarShards({path!r}{f' and {count - 1} more' if count > 1 else ''}: {len(self)} samples)"


setattr(TarShards.__new__, "__wrapped__", TarShards.__init__)  # noqa: B010  for inspect and the reference


def _open_shard(shards: list[Shard], index: int, *, use_mmap: bool) -> OpenFile:
    file = OpenFile(shards[index].path, use_mmap)
    _check_unchanged(shards[index], file)
    return file


def _check_unchanged(shard: Shard, file: OpenFile | RemoteFile) -> None:
    """Check that a shard's file has not changed since it was indexed."""
    if (file.size, file.mtime_ns) != (shard.size, shard.mtime_ns):
        change = f"it still has {file.size:,} bytes, but a different modification time"
        if file.size != shard.size:
            change = f"it had {shard.size:,} bytes, and now has {file.size:,}"
        raise ValueError(f"{shard.path!r} was changed after its index was read ({change}); create the dataset again")


class _Keys(LazySequence[str]):
    """The keys of a dataset's samples, decoded lazily."""

    _entry_noun = "keys"

    def __init__(self, dataset: TarShards) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def _build_entry(self, index: int) -> str:
        shard, sample = self._dataset._locate(index)
        return self._dataset._shards[shard].key(sample)
