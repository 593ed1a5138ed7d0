"""`TarShards`: the samples of tar archives by number, each read at its place.

The indexes are made or read in the main process, and mapped by all workers, which open the archives as they read them.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import numpy as np

from gpuload.datasets.files import byte_limit, check_size
from gpuload.datasets.litter import LeftOut
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Mode
from gpuload.datasets.scan import Lazy, from_start
from gpuload.datasets.stores.opening import KEPT_OPEN, OpenFile, OpenFiles, remote_for
from gpuload.datasets.stores.store import Store
from gpuload.datasets.stores.tar.fields import KEY, Fields
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.index import Shard
from gpuload.datasets.stores.tar.shards import Patterns, as_list, find_shards, open_shards
from gpuload.datasets.stores.tar.stream import TarStream
from gpuload.datasets.worker import is_replaceable

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import StorageOptions

__all__ = ["TarShards"]

GAP_BYTES: Final = 64 << 10  # what lies between two reads is read too, up to here: it costs less than a call
LARGE_BYTES: Final = 32 << 10  # a field of a file from here on is read by itself: another call costs less than a copy
READ_BYTES: Final = 32 << 20  # the most that several samples are read together
MOST_MAPPED: Final = 16 << 30  # whose page tables take 32 MB in each worker
MOST_CHOICES: Final = 1024  # sets of fields that are remembered, of a shard


class TarShards(Store):
    """Samples in tar archives by WebDataset's convention: files side by side that share a name are the fields of one.

    The name up to its first dot, with its folder, is the sample's key; the rest is the field's name. By the end of that
    name a field becomes: an image (``jpg png webp ppm …``) `Encoded`; one named ``seg.png`` or ``mask.png`` a `Mask`;
    ``cls id index count`` int; ``json`` what it says; ``txt`` str; ``npy`` an array (one of objects is refused: it is a
    pickle), and where no field is an image, the first one of uint8, H×W×C with one to four channels, is an `Image`;
    anything else bytes.

    An index of each archive is made once, from its headers, and kept beside it as ``….tar.gpuload-index``, or where
    that cannot be written, in the cache folder (``$GPULOAD_CACHE``, else ``~/.cache/gpuload``). It is made again if the
    archive's size or time differ. So any sample is one read, and ``Loader(shuffle=True)`` shuffles all of them.

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
        return OpenFiles(remote=self._remote, mapped=is_replaceable() and self._fit_memory())

    def _fit_memory(self) -> bool:
        """Whether memory has room for all: the kernel reads more around a place than a mapping is asked for."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total = sum(shard.size for shard in self._shards)
        return len(self._shards) <= KEPT_OPEN and total <= min(MOST_MAPPED, memory // 2)

    def _read(self, handle: OpenFiles, numbers: list[int]) -> list[Any]:
        """Several samples at once, read in the order in which they lie; neighbours by one call."""
        reading = _Reading(self, handle, numbers)
        found = {row: reading(row) for row in reading.rows}
        return [found[row] for row in range(len(numbers))]

    def _each(self, indices: Iterable[SupportsIndex]) -> Callable[[int], Any] | None:
        """The same, each sample read when it is asked for by its row; each once. None: at URLs all come at once."""
        return _Reading(self, self._handle, self._numbers(indices)) if self._remote is None else None

    def will_need(self, indices: Iterable[int]) -> None:
        """Let the kernel read these samples, which are asked for soon."""
        if self._remote is not None:
            return
        indices = list(indices)
        if self._handle.mapped and len(indices) > 1 and all(after - index == 1 for index, after in pairwise(indices)):
            return  # in order: what the kernel reads ahead of a mapping by itself is cheaper, and copied in less time
        for number in indices:
            plan = self._plan(from_start(number, len(self), repr(self)))
            self._check(plan)
            shard, _, _, places = plan
            if places:
                begin = min(begin for _, begin, _ in places)
                end = max(begin + size for _, begin, size in places)
                self._handle.get(self._shards[shard].path).will_read(begin, end - begin)

    def _place(self, number: int) -> tuple[int, int]:
        """The number of its shard, and its number in there."""
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)

    def _plan(self, number: int) -> Plan:
        """What has to be read for a sample."""
        shard, number = self._place(number)
        source = self._shards[shard]
        columns, key = source.columns, source.key(number)
        first, end = columns.first[number], columns.first[number + 1]
        chosen = source.choices.get(codes := columns.fields[first:end].tobytes())
        if chosen is None:  # nearly all samples have the same fields
            there = {columns.names[field]: at for at, field in enumerate(columns.fields[first:end])}
            names = self._fields.choose(there, source.path, key)
            if len(source.choices) == MOST_CHOICES:
                source.choices.clear()
            chosen = source.choices[codes] = (
                names,
                sorted([(name, there[name]) for name in set(names) if name != KEY], key=itemgetter(1)),
            )
        blocks, sizes = columns.blocks, columns.sizes
        return shard, key, chosen[0], [(name, blocks[first + at] * BLOCK, sizes[first + at]) for name, at in chosen[1]]

    def _check(self, plan: Plan) -> None:
        """Refuse a sample with a field that is larger than is allowed."""
        shard, key, _, places = plan
        for name, _, size in places:
            check_size(size, f"{self._shards[shard].path}:{key}.{name}")

    def _file(self, handle: OpenFiles, shard: int) -> OpenFile:
        """The file of a shard, which is still the one that was indexed."""
        source = self._shards[shard]
        file = handle.get(source.path)
        if (file.size, file.mtime_ns) != (source.size, source.mtime_ns):
            raise _changed(source, file)
        return file

    def __repr__(self) -> str:
        first, count = self._shards[0].path, len(self._shards)
        return f"TarShards({first!r}{f' and {count - 1} more' if count > 1 else ''}: {len(self)} samples)"


Part = tuple[int, int, int, int, str]
"""A field of one of the samples that are asked for: shard, offset and bytes; row and name."""
Run = tuple[int, int, int, list[Part]]
"""Parts that are read together: their shard, where they begin and end; and they."""
Plan = tuple[int, str, list[str], list[tuple[str, int, int]]]
"""What is read for one sample: its shard and key, the fields that make it up; and of each that is stored the name, the
offset and the bytes."""


setattr(TarShards.__new__, "__wrapped__", TarShards.__init__)  # noqa: B010  inspect and the reference show its arguments


class _Reading:
    """The samples of some numbers, each read when it is asked for by its row: nobody waits for those behind it, and
    what is done with before the next one is read takes no memory of its own, which costs more than the copy.

    What is read by one call is cut apart at once, and kept for its other rows. URLs are read at the start, together.
    """

    def __init__(self, dataset: TarShards, handle: OpenFiles, numbers: list[int]) -> None:
        self._dataset, remote = dataset, dataset._remote
        self._plans = plans = [dataset._plan(number) for number in numbers]
        self._data: dict[int, dict[str, bytes]] = {}  # what was read with that of another row
        self._together: dict[tuple[int, str], Run] = {}  # where a field is not read by itself
        # Files on this machine: nothing is read together with what is so large.
        alone = sys.maxsize if remote is not None else max(GAP_BYTES, LARGE_BYTES)
        parts, most = [], 0
        for row, (shard, _, _, places) in enumerate(plans):
            for name, begin, size in places:
                if size <= alone:
                    parts.append((shard, begin, size, row, name))
                if size > most:
                    most = size
        if most > byte_limit():
            for plan in plans:
                dataset._check(plan)
        parts.sort()
        shards = {plan[0] for plan in plans if plan[3]}
        if remote is None:
            self._files = {shard: dataset._file(handle, shard) for shard in shards}
            for run in _runs(parts, GAP_BYTES, LARGE_BYTES):
                if len(run[3]) > 1:
                    self._together.update(((row, name), run) for _, _, _, row, name in run[3])
            return
        runs = _runs(parts, remote.gap_bytes, READ_BYTES)
        handle.look(dataset._shards[run[0]].path for run in runs)
        self._files = {shard: dataset._file(handle, shard) for shard in shards}
        found = handle.read([(self._files[shard], low, end - low) for shard, low, end, _ in runs])
        for run, read in zip(runs, found, strict=True):
            self._share(run, read)

    @property
    def rows(self) -> list[int]:
        """All rows, in the order in which their samples lie."""
        first = [(plan[0], plan[3][0][1] if plan[3] else 0) for plan in self._plans]
        return sorted(range(len(first)), key=first.__getitem__)

    def __call__(self, row: int) -> Any:
        shard, key, chosen, places = self._plans[row]
        data = self._data.pop(row, None) or {}
        for name, begin, size in places:
            if name in data:
                continue
            file = self._files[shard]
            if (run := self._together.get((row, name))) is not None:
                self._share(run, file.read_at(run[1], run[2] - run[1]))
                data.update(self._data.pop(row))
            elif len(read := file.read_at(begin, size)) == size:
                data[name] = read
            else:
                raise self._short(shard, len(read), begin, size)
        return self._dataset._fields.sample(data, chosen, self._dataset._shards[shard].path, key)

    def _share(self, run: Run, read: bytes) -> None:
        """Give what was read to the rows that it is for."""
        shard, low, end, parts = run
        if len(read) < end - low:
            raise self._short(shard, len(read), low, end - low)
        for _, begin, size, row, name in parts:
            own = read if size == len(read) else read[begin - low : begin - low + size]
            self._data.setdefault(row, {})[name] = own

    def _short(self, shard: int, got: int, offset: int, expected: int) -> ValueError:
        return ValueError(
            f"{self._dataset._shards[shard].path!r} gave {got:,} bytes from offset {offset:,} on, where its index "
            f"expects {expected:,}: it was changed after it was opened; make the dataset again"
        )


def _runs(parts: list[Part], gap_bytes: int, large_bytes: int) -> list[Run]:
    """Parts that are read together; they come in the order in which they lie."""
    runs: list[Run] = []
    run: list[Part] = []
    of, low, end, last = -1, 0, 0, 0
    for part in parts:
        shard, begin, size, _, _ = part
        after = begin + size
        if run:
            apart = shard != of or begin > end + gap_bytes or last >= large_bytes or size >= large_bytes
            if not apart and max(end, after) - low <= max(READ_BYTES, end - low):
                run.append(part)
                end, last = max(end, after), size
                continue
            runs.append((of, low, end, run))
        run, of, low, end, last = [part], shard, begin, after, size
    if run:
        runs.append((of, low, end, run))
    return runs


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


def _changed(shard: Shard, file: OpenFile) -> ValueError:
    was = f"{shard.size:,} bytes, is {file.size:,}" if file.size != shard.size else f"of {file.size:,} bytes, is newer"
    return ValueError(f"{shard.path!r} was changed after its index was read (it was {was}); make the dataset again")
