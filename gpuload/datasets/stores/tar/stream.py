"""`TarStream`, the iterable dataset that ``TarShards(…, stream=True)`` returns: it reads archives in one pass.

Each epoch orders the shards and divides them among the workers of all ranks. Each worker reads its share
(`TarPass`), decompresses shards if necessary (`SequentialReader`), and draws samples from a buffer (`ShuffleBuffer`).
The order depends only on the seed, the epoch, the share, and the number of samples drawn so far. So a state is a few
numbers: how many samples were drawn and read, and the position of the oldest sample in the buffer. On resuming, the
contents of the buffer are read again, starting at that position.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import operator
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuload.checks import integer
from gpuload.datasets.files import check_size
from gpuload.datasets.litter import SkippedFiles
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Mode
from gpuload.datasets.stores.opening import open_stream, remote_options
from gpuload.datasets.stores.store import Patterns, as_list
from gpuload.datasets.stores.tar.fields import Fields
from gpuload.datasets.stores.tar.headers import Damage, Member, compression_of, members, truncated_error
from gpuload.datasets.stores.tar.index import fields_of
from gpuload.datasets.stores.tar.shards import find_shards
from gpuload.datasets.worker import get_worker_info
from gpuload.errors import DecodeError
from gpuload.rng.generators import current_sample
from gpuload.rng.philox import Key, epoch_key, words
from gpuload.rng.streams import SHARDS, SHUFFLE_BUFFER

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["SequentialReader", "ShuffleBuffer", "TarPass", "TarStream", "shard_order"]

DRAWS_PER_BLOCK: Final = 512
REPLAY_DRAWS: Final = 1 << 16  # draws per block when a stream is resumed
DECOMPRESSORS: Final = {"gzip": "gzip", "bzip2": "bz2", "xz": "lzma", "zstd": "compression.zstd"}  # zstd: Python 3.14
PIECE: Final = 1 << 20  # bytes to read or skip per call


class TarStream:
    """An iterable dataset that reads the samples of archives in one pass; see `TarShards`.

    Args:
        shards: as for `TarShards`; also FIFOs, and ``"-"`` for standard input.
        fields, mode, exif, shuffle_buffer, storage_options: as for `TarShards`.
    """

    @dataset_arguments
    def __init__(
        self,
        shards: Patterns,
        *,
        fields: str | Sequence[str] | None = None,
        mode: Mode = "RGB",
        exif: bool | None = None,
        shuffle_buffer: int = 0,
        storage_options: StorageOptions = None,
    ) -> None:
        shards = as_list(shards)
        self._remote = remote_options(shards, storage_options)
        self.shards = ["-"] if shards == ["-"] else find_shards(shards, self._remote)
        self.shuffle_buffer = integer("shuffle_buffer", shuffle_buffer, minimum=0)
        self.fields = Fields(fields, mode, exif)
        self.exif = self.fields.exif

    def __iter__(self) -> TarPass:
        return TarPass(self)

    def __repr__(self) -> str:
        count = len(self.shards)
        suffix = f" and {count - 1} more" if count > 1 else ""
        return f"TarStream({self.shards[0]!r}{suffix}, shuffle_buffer={self.shuffle_buffer})"


class _RawSample(NamedTuple):
    """A sample before its fields are converted.

    Attributes:
        place: the index of its shard in this pass, its offset in the shard, and its number in the pass.
        parts: maps each field to its bytes, to None if it is not needed, or to the error if it is refused.
    """

    place: tuple[int, int, int]
    key: str
    parts: dict[str, Any]


class TarPass:
    """A worker's pass over its share of the shards: an iterator whose state can be saved."""

    def __init__(self, stream: TarStream) -> None:
        info = get_worker_info()
        share, shares = 0, 1
        if info is not None:
            share, shares = info.rank * info.num_workers + info.id, info.world_size * info.num_workers
        if shares > len(stream.shards):
            raise ValueError(
                f"{len(stream.shards)} shard(s) cannot be divided among {shares} readers (world_size="
                f"{info.world_size if info else 1} × {info.num_workers if info else 1} workers), which read entire "
                "shards. Write more shards, use fewer workers, or omit stream=True: without it, any number of workers "
                "can read the shards"
            )
        seed, epoch, _ = current_sample() or (0, 0, 0)
        key = epoch_key(seed, epoch)
        order = shard_order(key, len(stream.shards)) if stream.shuffle_buffer else np.arange(len(stream.shards))
        self._stream = stream
        self._share = [share, shares]
        self._shards = [stream.shards[index] for index in order[share::shares]]
        self._buffer = ShuffleBuffer(max(1, stream.shuffle_buffer), key, share, shares)
        self._skipped_files = SkippedFiles()
        self._damaged_shards: list[int] = []  # the indices of shards whose damage was reported
        self._last_place, self._samples_read = (0, 0, 0), 0
        self._samples = self._samples_from(0, 0, 0, lambda number: True)

    def __iter__(self) -> TarPass:
        return self

    def __next__(self) -> Any:
        raw = self._buffer.draw(self._next_raw)  # if this raises an error, the next call continues
        if raw is None:
            raise StopIteration
        fields, path = self._stream.fields, self._shards[raw.place[0]]
        chosen = fields.choose(raw.parts, path, raw.key)
        for name in chosen:
            if isinstance(raw.parts.get(name), Exception):
                raise raw.parts[name]
        return fields.build_sample(raw.parts, chosen, path, raw.key)

    def _next_raw(self) -> _RawSample | None:
        raw = next(self._samples, None)
        if isinstance(raw, BaseException):
            raise raw
        if raw is None:
            self._skipped_files.log(self._shards)
        else:
            self._last_place, self._samples_read = raw.place, raw.place[2] + 1
        return raw

    def _samples_from(
        self, first: int, offset: int, number: int, is_needed: Callable[[int], bool]
    ) -> Iterator[_RawSample | BaseException]:
        """Yield the samples from a position on, including the bytes only of those for which `is_needed` is true. For a
        damaged shard (reported once) or an interrupt, yield the exception, and continue with the next shard."""
        for shard in range(first, len(self._shards)):
            try:
                for raw in self._samples_of(shard, offset, number, is_needed):
                    yield raw
                    number = raw.place[2] + 1
            except GeneratorExit:
                raise
            except Exception as error:  # includes warnings that were turned into errors
                if shard not in self._damaged_shards:
                    self._damaged_shards.append(shard)
                    yield error
            except BaseException as error:
                yield error  # if a KeyboardInterrupt were raised here, the generator and the pass would end
            offset = 0

    def _samples_of(
        self, shard: int, offset: int, first: int, is_needed: Callable[[int], bool]
    ) -> Iterator[_RawSample]:
        path, selected = self._shards[shard], self._stream.fields.names
        with contextlib.closing(SequentialReader(path, self._stream._remote)) as file:
            archive = members(file.read_at, path, start=offset, warn=warnings.warn)
            samples = itertools.groupby(fields_of(archive, path, self._skipped_files), operator.itemgetter(0, 1))
            for count, ((begin, key), fields) in enumerate(samples):
                number, parts = first + count, {}
                for _, _, name, member in fields:
                    field = _text(name)
                    is_read = is_needed(number) and (selected is None or field in selected)
                    parts[field] = _content(file, member) if is_read else None
                yield _RawSample((shard, begin, number), _text(key), parts)
            file.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the pass, as a few numbers."""
        places = [raw.place for raw in self._buffer.slots if raw] or [self._last_place]
        return {
            **self._identity(),
            "given": self._buffer.items_drawn,
            "read": self._samples_read,
            "ended": self._buffer.ended,
            "from": list(min(places, key=operator.itemgetter(2))),
            "damaged": list(self._damaged_shards),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. The samples of the buffer are read again.

        Raises:
            ValueError: the state was saved with other shards, another share, or another buffer size.
        """
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, but this stream has {expected!r}: use the "
                    "same shards in the same order, the same numbers of ranks and workers, and the same "
                    "shuffle_buffer (share= is the index of the worker among all ranks' workers, and their number; "
                    "shards= is a checksum of the shards' names in the epoch's order)"
                )
        read = state["read"]
        self._buffer.restore(state["given"], read, state["ended"])
        needed = set(self._buffer.slots) - {None}
        self._damaged_shards = list(state["damaged"])
        self._last_place = shard, offset, self._samples_read = state["from"]
        self._samples = self._samples_from(shard, offset, self._samples_read, lambda n: n >= read or n in needed)
        samples: dict[int, _RawSample] = {}
        while self._samples_read < read and (raw := self._next_raw()) is not None:
            if raw.place[2] in needed:
                samples[raw.place[2]] = raw
        if self._samples_read < read or len(samples) < len(needed):
            raise ValueError(
                f"the shards have fewer samples than the state expects ({self._samples_read} of {read}); use the same "
                "files"
            )
        self._buffer.slots = [samples.get(number) for number in self._buffer.slots]

    def _identity(self) -> dict[str, Any]:
        """Return the settings that must match when a state is loaded: a checksum of the shards' names in the order of
        this pass (folders may differ), the share, and the size of the buffer."""
        names = "\0".join(map(os.path.basename, self._shards)).encode("utf-8", "surrogateescape")
        return {"shards": zlib.crc32(names), "share": self._share, "shuffle_buffer": self._stream.shuffle_buffer}


def _content(file: SequentialReader, member: Member) -> bytes | Exception:
    """Return the bytes of a member, or the error if it is too large."""
    try:
        check_size(member.nbytes, f"{file.path}:{_text(member.name)}")
    except DecodeError as error:
        return error
    content = file.read_at(member.data, member.nbytes)
    if len(content) < member.nbytes:
        raise truncated_error(member, file.position, file.path)
    return content


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def shard_order(key: Key, count: int) -> np.ndarray:
    """Return the shard indices in the order of an epoch: int64 (count,), the same for all ranks and workers."""
    draws = words(key, np.arange(count), SHARDS, 2).astype(np.uint64)
    return np.argsort(draws[:, 0] << np.uint64(32) | draws[:, 1], kind="stable")


class ShuffleBuffer:
    """A buffer of items from which random items are drawn. The next item of the input fills the slot of a drawn item.

    When the input has ended, the item of the last slot moves to the empty slot, and the number of slots decreases.

    Args:
        capacity: the number of slots; 1 preserves the order.
        key: the epoch's key.
        share, shares: the index of this share, and the number of shares. Each share has its own random draws.

    Attributes:
        slots: the items; None in the slot of the last drawn item.
        items_drawn: the number of items drawn so far.
        ended: whether the input has ended.
    """

    def __init__(self, capacity: int, key: Key, share: int, shares: int) -> None:
        self.items_drawn = 0
        self.ended = False
        self._capacity, self._key, self._share, self._shares = capacity, key, share, shares
        self.slots: list[Any] = []
        self._hole: int | None = None  # the slot of the last drawn item
        self._block, self._words = -1, np.zeros(0, np.uint64)

    def draw(self, read: Callable[[], object]) -> Any:
        """Return the next item in the shuffled order; None if there is none.

        `read` returns the next item of the input, or None at its end. If it raises an error, the next call continues.
        """
        while not self.ended and (self._hole is not None or len(self.slots) < self._capacity):
            if (item := read()) is None:
                self.ended = True
            elif self._hole is None:
                self.slots.append(item)
            else:
                self.slots[self._hole], self._hole = item, None
        if self._hole is not None:
            last = self.slots.pop()
            if self._hole < len(self.slots):
                self.slots[self._hole] = last
            self._hole = None
        if not self.slots:
            return None
        block, offset = divmod(self.items_drawn, DRAWS_PER_BLOCK)
        if self._block != block and len(self.slots) > 1:
            self._block, self._words = block, self._draws(block * DRAWS_PER_BLOCK, DRAWS_PER_BLOCK)
        self._hole = int(self._words[offset]) * len(self.slots) >> 32 if len(self.slots) > 1 else 0
        self.items_drawn += 1
        item, self.slots[self._hole] = self.slots[self._hole], None
        return item

    def restore(self, items_drawn: int, read: int, ended: bool) -> None:
        """Restore the state after `items_drawn` items were drawn and `read` items were read. Each slot then holds the
        index of its item in the order of reading, instead of the item."""
        replaced = min(max(0, items_drawn - 1), max(0, read - self._capacity))
        numbers = np.arange(min(self._capacity, read))
        for start in range(0, replaced, REPLAY_DRAWS):
            slots = self._draws(start, min(REPLAY_DRAWS, replaced - start)) * np.uint64(len(numbers)) >> np.uint64(32)
            # If a slot appears more than once, the last assignment wins.
            numbers[slots] = np.arange(start, start + len(slots)) + len(numbers)
        self.slots, self._hole = numbers.tolist(), None
        self.items_drawn, self.ended = replaced, ended
        for _ in range(replaced, items_drawn):
            self.draw(lambda: None)
        self.ended = ended

    def _draws(self, start: int, count: int) -> np.ndarray:
        numbers = np.arange(start, start + count, dtype=np.int64)
        return words(self._key, numbers * self._shares + self._share, SHUFFLE_BUFFER, 1)[:, 0].astype(np.uint64)


class SequentialReader:
    """A sequential reader of a file, compressed or not. Offsets must never decrease; bytes between reads are skipped.

    Args:
        path: a file, a FIFO, a URL, or ``"-"`` for standard input.
        remote: the options for reading URLs.

    Attributes:
        position: the current offset in the decompressed data, in bytes.

    Raises:
        OSError: the file cannot be opened.
        ImportError: the file is compressed with zstd, and no library for it is installed.
    """

    def __init__(self, path: str, remote: Remote | None = None) -> None:
        self.path = path
        self.position = 0
        self._file = open_stream(path, remote)
        self._stream: Any = self._file
        try:
            compression = compression_of(self._file.peek(6))
            self._seeks = compression is None and self._file.seekable()
            if compression is not None:
                self._stream = _decompressed(compression, self._file, path)
        except BaseException:
            self._file.close()
            raise

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at an offset; fewer only at the end of the file.

        Raises:
            Damage: the file cannot be decompressed, or ends before the offset.
        """
        try:
            if self._seeks and offset > self.position:
                raw = self._file.raw
                size = raw.size if hasattr(raw, "size") else os.fstat(self._file.fileno()).st_size
                self.position = self._file.seek(min(offset, size))
            while self.position < offset and (skipped := self._stream.read(min(PIECE, offset - self.position))):
                self.position += len(skipped)
            parts, remaining = [], nbytes if self.position == offset else 0
            while remaining and (part := self._stream.read(min(PIECE, remaining))):
                parts.append(part)
                remaining -= len(part)
        except Exception as error:  # each decompression library has its own errors
            raise Damage(
                f"{self.path!r} cannot be read beyond {self.position:,} bytes: {type(error).__name__}: {error}; copy "
                "or download the shard again"
            ) from error
        if self.position < offset:
            raise Damage(
                f"{self.path!r} is truncated at {self.position:,} bytes, before the member at offset {offset:,}; copy "
                "or download the shard again"
            )
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.position += len(data)
        return data

    def finish(self) -> None:
        """Read a compressed file or a pipe to its end, to verify checksums and to let the writer of a pipe finish.

        Raises:
            Damage: the file cannot be decompressed.
        """
        while not self._seeks and self.read_at(self.position, PIECE):
            pass

    def close(self) -> None:
        """Close the file."""
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()


def _decompressed(compression: str, file: Any, path: str) -> Any:
    try:
        return importlib.import_module(DECOMPRESSORS[compression]).open(file)
    except ModuleNotFoundError:
        if compression != "zstd":
            raise
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ImportError(
            f"{path!r} is compressed with zstd, which Python supports from 3.14 on; on earlier versions, install the "
            "package zstandard: pip install 'gpuload[zstd]'"
        ) from None
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
