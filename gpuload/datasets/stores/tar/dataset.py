"""`TarShards`: the samples of tar archives by number, each read at its place.

The indexes are made or read in the main process, and mapped by all workers, which open the archives as they read them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsIndex

import numpy as np

from gpuload.datasets.files import byte_limit, check_size
from gpuload.datasets.litter import LeftOut
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Mode
from gpuload.datasets.scan import Lazy, from_start
from gpuload.datasets.stores.opening import KEPT_OPEN, OpenFile, OpenFiles, remote_for
from gpuload.datasets.stores.store import Store
from gpuload.datasets.stores.tar.fields import Fields
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.shards import Patterns, as_list, find_shards, open_shards
from gpuload.datasets.stores.tar.stream import TarStream
from gpuload.datasets.worker import THIS_PROCESS

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import StorageOptions

__all__ = ["TarShards"]

MOST_MAPPED: Final = 16 << 30  # whose page tables take 32 MB in each worker


class Plan(NamedTuple):
    """What is read for one sample."""

    shard: int
    key: str
    chosen: list[str]  # the fields that make it up
    places: list[tuple[str, int, int]]  # of those in the archive: the name, the offset and the bytes


class TarShards(Store):
    """Samples in tar archives by WebDataset's convention: files side by side that share a name are the fields of one.

    The name up to its first dot, with its folder, is the sample's key; the rest is the field's name. By the end of that
    name a field becomes: an image (``jpg png webp ppm …``) `Encoded`; one named ``seg.png`` or ``mask.png`` a `Mask`;
    ``cls id index count`` int; ``json`` what it says; ``txt`` str; ``npy`` an array (one of objects is refused: it is a
    pickle), and where no field is an image, the first one of uint8, H×W×C with one to four channels, is an `Image`;
    anything else bytes.

    An index of each archive is made once, from its headers, and kept beside it as ``….tar.gpuload-index``, or where
    that cannot be written, in the cache folder (``$GPULOAD_CACHE``, else ``~/.cache/gpuload``). It is made again if the
    archive's size or time differ. Any sample is read at its place, so ``Loader(shuffle=True)`` shuffles all of them.

    Args:
        shards: a path, or several. ``{000..099}`` and ``{a,b}`` in it stand for several, as do ``*`` and ``?``.
        fields: which make up a sample: ``("jpg", "cls")`` gives tuples of these; ``"jpg;png"`` is the first of the two
            that is there, ``"__key__"`` the key. A str gives this one alone. None: a dict of all of them, with
            ``"__key__"``.
        mode: what the pixels of images become, see `Encoded`.
        stream: read the archives in one pass, as an iterable dataset: compressed ones (gzip, bzip2, xz, zstd), pipes,
            and ``"-"``, the standard input. Without an index, and with a shuffle of limited reach.
        shuffle_buffer: with `stream`: 0 for the order of the archives; else these are read in another order in each
            epoch, and a sample is drawn from as many as this, in memory.
        storage_options: of URLs, what fsspec takes, or a `Remote`.
        workers: processes that make indexes; default: one for each CPU that this process may use, up to 16.

    Attributes:
        shards: the paths.
        keys: the key of each sample: a sequence that makes each str when it is asked for. It names a sample within its
            shard; in another shard it may come again.

    Raises:
        FileNotFoundError: no shard is found.
        ValueError: a shard is cut off, damaged, compressed, or no tar; it has links, or two samples with one key; there
            are no samples; an argument is not valid.
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
        if stream:  # another kind of dataset: with __iter__, without __getitem__
            return TarStream(*arguments, **options)
        return super().__new__(cls)

    @dataset_arguments
    def __init__(
        self,
        shards: Patterns,
        *,
        fields: str | Sequence[str] | None = None,
        mode: Mode = "RGB",
        stream: bool = False,
        shuffle_buffer: int = 0,
        workers: int | None = None,
        storage_options: StorageOptions = None,
    ) -> None:
        if shuffle_buffer:
            raise ValueError(
                f"shuffle_buffer={shuffle_buffer} is for stream=True; without it, all samples are shuffled by "
                "gpuload.Loader(dataset, shuffle=True)"
            )
        self._fields = Fields(fields, mode)
        shards = as_list(shards)
        self._remote = remote_for(shards, storage_options)
        self._shards = open_shards(find_shards(shards, self._remote), workers=workers, remote=self._remote)
        LeftOut(sum(shard.left_out for shard in self._shards)).log(shards[0] if len(shards) == 1 else shards)
        self._ends: list[int] = np.cumsum([shard.samples for shard in self._shards]).tolist()
        if not len(self):
            raise ValueError(
                f"there are no samples in {len(self._shards)} shard(s), {self._shards[0].path!r} first: no file in "
                "them has a name with an ending, such as 0001.jpg"
            )
        self.path = self._shards[0].path

    @property
    def shards(self) -> list[str]:
        """The paths of the archives."""
        return [shard.path for shard in self._shards]

    @property
    def keys(self) -> Sequence[str]:
        """The key of each sample."""
        return _Keys(self)

    @property
    def nbytes(self) -> int:
        """How much memory the indexes take."""
        return sum(shard.table.nbytes for shard in self._shards)

    def __len__(self) -> int:
        return self._ends[-1]

    def _open(self) -> OpenFiles:
        return OpenFiles(remote=self._remote, mapped=THIS_PROCESS.is_worker and self._fit_memory())

    def _fit_memory(self) -> bool:
        """Whether memory has room for all: the kernel reads more around a place than a mapping is asked for."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total = sum(shard.size for shard in self._shards)
        return len(self._shards) <= KEPT_OPEN and total <= min(MOST_MAPPED, memory // 2)

    def _read(self, handle: OpenFiles, numbers: list[int]) -> list[Any]:
        """Return these samples; those at URLs are read together, others in the order in which they lie."""
        file_of = cache(partial(self._file, handle))
        if self._remote is None:
            samples = {row: self._read_one(file_of, numbers[row]) for row in np.argsort(numbers).tolist()}
            return [samples[row] for row in range(len(numbers))]
        plans = [self._plan(number) for number in numbers]
        handle.look(self._shards[plan.shard].path for plan in plans if plan.places)
        places = [(plan.shard, offset, nbytes) for plan in plans for _, offset, nbytes in plan.places]
        contents = iter(handle.read([(file_of(shard), offset, nbytes) for shard, offset, nbytes in places]))
        return [self._sample(plan, [next(contents) for _ in plan.places]) for plan in plans]

    def _each(self, indices: Iterable[SupportsIndex]) -> Callable[[int], Any] | None:
        """Return a function that reads the sample of a row when it is asked for: nobody waits for those behind it, and
        memory that is used again costs less than the copy. None: at URLs all come at once."""
        if self._remote is not None:
            return None
        file_of, numbers = cache(partial(self._file, self._handle)), self._numbers(indices)
        return lambda row: self._read_one(file_of, numbers[row])

    def _read_one(self, file_of: Callable[[int], OpenFile], number: int) -> Any:
        plan = self._plan(number)
        contents = []
        if plan.places:
            file = file_of(plan.shard)
            contents = [file.read_at(offset, nbytes) for _, offset, nbytes in plan.places]
        return self._sample(plan, contents)

    def _sample(self, plan: Plan, contents: list[bytes]) -> Any:
        """Return a sample from the bytes of its fields."""
        path, data = self._shards[plan.shard].path, {}
        for (name, offset, nbytes), content in zip(plan.places, contents, strict=True):
            if len(content) < nbytes:
                raise ValueError(
                    f"{path!r} gave {len(content):,} bytes from offset {offset:,} on, where its index expects "
                    f"{nbytes:,}: it was changed after it was opened; make the dataset again"
                )
            data[name] = content
        return self._fields.sample(data, plan.chosen, path, plan.key)

    def will_need(self, indices: Iterable[int]) -> None:
        """Let the kernel read these samples, which are asked for soon."""
        if self._remote is not None:
            return
        indices = list(indices)
        if self._handle.mapped and len(indices) > 1 and all(after - index == 1 for index, after in pairwise(indices)):
            return  # in order: what the kernel reads ahead of a mapping by itself is cheaper, and copied in less time
        for number in indices:
            plan = self._plan(from_start(number, len(self), repr(self)))
            if plan.places:
                begin = plan.places[0][1]
                end = max(offset + nbytes for _, offset, nbytes in plan.places)
                self._handle.get(self._shards[plan.shard].path).will_read(begin, end - begin)

    def _place(self, number: int) -> tuple[int, int]:
        """Return the number of a sample's shard, and its number in there."""
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)

    def _plan(self, number: int) -> Plan:
        shard, number = self._place(number)
        source = self._shards[shard]
        columns, key = source.columns, source.key(number)
        blocks, sizes, first = columns.blocks, columns.sizes, columns.first[number]
        names = [columns.names[field] for field in columns.fields[first : columns.first[number + 1]]]
        chosen = self._fields.choose(names, source.path, key)
        places = [
            (name, blocks[member] * BLOCK, sizes[member]) for member, name in enumerate(names, first) if name in chosen
        ]
        limit = byte_limit()
        for name, _, nbytes in places:
            if nbytes > limit:
                check_size(nbytes, f"{source.path}:{key}.{name}")
        return Plan(shard, key, chosen, places)

    def _file(self, handle: OpenFiles, shard: int) -> OpenFile:
        """Return the file of a shard, which is still the one that was indexed."""
        source = self._shards[shard]
        file = handle.get(source.path)
        if (file.size, file.mtime_ns) != (source.size, source.mtime_ns):
            was = f"of {file.size:,} bytes, is newer"
            if file.size != source.size:
                was = f"{source.size:,} bytes, is {file.size:,}"
            raise ValueError(
                f"{source.path!r} was changed after its index was read (it was {was}); make the dataset again"
            )
        return file

    def __repr__(self) -> str:
        first, count = self._shards[0].path, len(self._shards)
        return f"TarShards({first!r}{f' and {count - 1} more' if count > 1 else ''}: {len(self)} samples)"


setattr(TarShards.__new__, "__wrapped__", TarShards.__init__)  # noqa: B010  inspect and the reference show its arguments


class _Keys(Lazy[str]):
    """The keys of a dataset's samples, each made when it is asked for."""

    _entries = "keys"

    def __init__(self, dataset: TarShards) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def _entry(self, number: int) -> str:
        shard, number = self._dataset._place(number)
        return self._dataset._shards[shard].key(number)
