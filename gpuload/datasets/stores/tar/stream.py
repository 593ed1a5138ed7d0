"""`TarStream`, what ``TarShards(…, stream=True)`` is: archives in one pass, an iterable dataset.

Each worker of each rank reads every so manieth shard of the epoch's order (`TarPass`), unpacks it if it is compressed
(`Sequential`), and draws samples from a buffer (`ShuffleBuffer`). All order is a function of (seed, epoch, share, how
many samples came before). So a state is a few numbers: how many samples were given and read, and where the oldest one
in the buffer begins; from there on what was in the buffer is read again.
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

from gpuload.datasets.files import check_size
from gpuload.datasets.litter import LeftOut
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Mode
from gpuload.datasets.stores.opening import open_stream, remote_for
from gpuload.datasets.stores.tar.fields import Fields
from gpuload.datasets.stores.tar.headers import Damage, Member, compression_of, cut_off, members
from gpuload.datasets.stores.tar.index import fields_of
from gpuload.datasets.stores.tar.shards import Patterns, as_list, find_shards
from gpuload.datasets.worker import get_worker_info
from gpuload.errors import DecodeError
from gpuload.rng.generators import sample_being_made
from gpuload.rng.philox import Key, epoch_key, words
from gpuload.rng.streams import SHARDS, SHUFFLE_BUFFER

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["Sequential", "ShuffleBuffer", "TarPass", "TarStream", "shard_order"]

AT_ONCE: Final = 512  # draws made together
REPLAYED: Final = 1 << 16  # draws of a resumed stream that are made together
UNPACKED_BY: Final = {"gzip": "gzip", "bzip2": "bz2", "xz": "lzma", "zstd": "compression.zstd"}  # from Python 3.14 on
PIECE: Final = 1 << 20  # bytes that are read or passed over together


class TarStream:
    """The samples of archives, in one pass; see `TarShards` for the arguments.

    Args:
        shards: as for `TarShards`; also FIFOs, and ``"-"`` for the standard input.
        fields, mode, shuffle_buffer, storage_options: as for `TarShards`.
    """

    @dataset_arguments
    def __init__(
        self,
        shards: Patterns,
        *,
        fields: str | Sequence[str] | None = None,
        mode: Mode = "RGB",
        shuffle_buffer: int = 0,
        storage_options: StorageOptions = None,
    ) -> None:
        if not isinstance(shuffle_buffer, int | np.integer) or shuffle_buffer < 0:
            raise ValueError(
                f"shuffle_buffer must be how many samples are kept, 0 for no shuffle; got {shuffle_buffer!r}"
            )
        shards = as_list(shards)
        self._remote = remote_for(shards, storage_options)
        self.shards = ["-"] if shards == ["-"] else find_shards(shards, self._remote)
        self.shuffle_buffer = int(shuffle_buffer)
        self.fields = Fields(fields, mode)

    def __iter__(self) -> TarPass:
        return TarPass(self)

    def __repr__(self) -> str:
        count = len(self.shards)
        more = f" and {count - 1} more" if count > 1 else ""
        return f"TarStream({self.shards[0]!r}{more}, shuffle_buffer={self.shuffle_buffer})"


class _Raw(NamedTuple):
    """A sample as it was read. Its place is the number of its shard in this pass, the offset in there where it begins,
    and its number in the pass; of fields that are not needed there is None, of a refused one the error."""

    place: tuple[int, int, int]
    key: str
    parts: dict[str, Any]


class TarPass:
    """A worker's pass over its share of the shards: an iterator with a state."""

    def __init__(self, stream: TarStream) -> None:
        info = get_worker_info()
        share, shares = 0, 1
        if info is not None:
            share, shares = info.rank * info.num_workers + info.id, info.world_size * info.num_workers
        if shares > len(stream.shards):
            raise ValueError(
                f"{len(stream.shards)} shard(s) cannot be shared out over {shares} readers (world_size="
                f"{info.world_size if info else 1} × {info.num_workers if info else 1} workers): each reads whole "
                f"shards. Make more of them, or use fewer workers; without stream=True any number of workers will do"
            )
        seed, epoch, _ = sample_being_made() or (0, 0, 0)
        key = epoch_key(seed, epoch)
        order = shard_order(key, len(stream.shards)) if stream.shuffle_buffer else np.arange(len(stream.shards))
        self._stream = stream
        self._share = [share, shares]
        self._shards = [stream.shards[number] for number in order[share::shares]]
        self._buffer = ShuffleBuffer(max(1, stream.shuffle_buffer), key, share, shares)
        self._left_out = LeftOut()
        self._damaged: list[int] = []  # numbers of shards whose damage was told
        self._last, self._read = (0, 0, 0), 0  # the place of the last sample that was read; how many were read
        self._samples = self._samples_from(0, 0, 0, lambda number: True)

    def __iter__(self) -> TarPass:
        return self

    def __next__(self) -> Any:
        raw = self._buffer.take(self._next_raw)  # may raise: the next call goes on
        if raw is None:
            raise StopIteration
        fields, path = self._stream.fields, self._shards[raw.place[0]]
        chosen = fields.choose(raw.parts, path, raw.key)
        for name in chosen:
            if isinstance(raw.parts.get(name), Exception):
                raise raw.parts[name]
        return fields.sample(raw.parts, chosen, path, raw.key)

    def _next_raw(self) -> _Raw | None:
        raw = next(self._samples, None)
        if isinstance(raw, BaseException):
            raise raw
        if raw is None:
            self._left_out.log(self._shards)
        else:
            self._last, self._read = raw.place, raw.place[2] + 1
        return raw

    def _samples_from(
        self, first: int, offset: int, number: int, needed: Callable[[int], bool]
    ) -> Iterator[_Raw | BaseException]:
        """Yield the samples from a place on, with the bytes of those whose numbers are needed. The error of a damaged
        shard comes once, and then the next shard, as after an interrupt."""
        for shard in range(first, len(self._shards)):
            try:
                for raw in self._samples_of(shard, offset, number, needed):
                    yield raw
                    number = raw.place[2] + 1
            except GeneratorExit:
                raise
            except Exception as error:  # also a warning that was made one
                if shard not in self._damaged:
                    self._damaged.append(shard)
                    yield error
            except BaseException as error:  # raised here, a KeyboardInterrupt would end the generator, and the pass
                yield error
            offset = 0

    def _samples_of(self, shard: int, offset: int, first: int, needed: Callable[[int], bool]) -> Iterator[_Raw]:
        path, wanted = self._shards[shard], self._stream.fields.names
        with contextlib.closing(Sequential(path, self._stream._remote)) as file:
            archive = members(file.read_at, path, start=offset, remark=warnings.warn)
            samples = itertools.groupby(fields_of(archive, path, self._left_out), operator.itemgetter(0, 1))
            for count, ((begin, key), fields) in enumerate(samples):
                number, parts = first + count, {}
                for _, _, name, member in fields:
                    field = _text(name)
                    is_read = needed(number) and (wanted is None or field in wanted)
                    parts[field] = _content(file, member) if is_read else None
                yield _Raw((shard, begin, number), _text(key), parts)
            file.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return how far the pass has come: a few plain numbers."""
        places = [raw.place for raw in self._buffer.slots if raw] or [self._last]
        return {
            **self._identity(),
            "given": self._buffer.items_drawn,
            "read": self._read,
            "ended": self._buffer.ended,
            "from": list(min(places, key=operator.itemgetter(2))),
            "damaged": list(self._damaged),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; the buffer's samples are read again.

        Raises:
            ValueError: the state is of other shards, of another share of them, or of another buffer.
        """
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise ValueError(
                    f"the state is of a stream with {name}={state.get(name)!r}, this one has {mine!r}: give the same "
                    "shards in the same order, ranks, workers and shuffle_buffer (shards and the epoch's order of them "
                    "are told as a sum)"
                )
        read = state["read"]
        self._buffer.restore(state["given"], read, state["ended"])
        needed = set(self._buffer.slots) - {None}
        self._damaged = list(state["damaged"])
        self._last = shard, offset, self._read = state["from"]
        self._samples = self._samples_from(shard, offset, self._read, lambda n: n >= read or n in needed)
        samples: dict[int, _Raw] = {}
        while self._read < read and (raw := self._next_raw()) is not None:
            if raw.place[2] in needed:
                samples[raw.place[2]] = raw
        if self._read < read or len(samples) < len(needed):
            raise ValueError(
                f"the shards have fewer samples than the state says ({self._read} of {read}): were they changed?"
            )
        self._buffer.slots = [samples.get(number) for number in self._buffer.slots]

    def _identity(self) -> dict[str, Any]:
        """Return what a state depends on: the shards' names, in the order in which this pass reads them (the folder may
        be another), as a sum; whose share of them; and the buffer."""
        names = "\0".join(map(os.path.basename, self._shards)).encode("utf-8", "surrogateescape")
        return {"shards": zlib.crc32(names), "share": self._share, "shuffle_buffer": self._stream.shuffle_buffer}


def _content(file: Sequential, member: Member) -> bytes | Exception:
    """Return the bytes of a member, or why it is refused."""
    try:
        check_size(member.nbytes, f"{file.path}:{_text(member.name)}")
    except DecodeError as error:
        return error
    content = file.read_at(member.data, member.nbytes)
    if len(content) < member.nbytes:
        raise cut_off(member, file.position, file.path)
    return content


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def shard_order(key: Key, count: int) -> np.ndarray:
    """Return the numbers of the shards in the order of an epoch: int64 (count,), the same for all ranks and workers."""
    drawn = words(key, np.arange(count), SHARDS, 2).astype(np.uint64)
    return np.argsort(drawn[:, 0] << np.uint64(32) | drawn[:, 1], kind="stable")


class ShuffleBuffer:
    """A buffer of items, of which one after the other is drawn, and the next one read is put into its slot.

    When there are no more to read, the last slot's takes that place, and there is one slot less.

    Args:
        capacity: how many; 1 changes no order.
        key: of the epoch.
        share, shares: whose draws these are: another share has others.

    Attributes:
        slots: the items, None where one was taken.
        items_drawn: how many items were taken.
        ended: there are no more to read.
    """

    def __init__(self, capacity: int, key: Key, share: int, shares: int) -> None:
        self.items_drawn = 0
        self.ended = False
        self._capacity, self._key, self._share, self._shares = capacity, key, share, shares
        self.slots: list[Any] = []
        self._hole: int | None = None  # the slot that the last one was taken from
        self._block, self._words = -1, np.zeros(0, np.uint64)

    def take(self, read: Callable[[], Any]) -> Any:
        """Return the next item in the shuffled order; None if there is none.

        `read` gives the items to put in, and None behind the last one. If it raises, the next call goes on.
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
        block, turn = divmod(self.items_drawn, AT_ONCE)
        if self._block != block and len(self.slots) > 1:
            self._block, self._words = block, self._drawn(block * AT_ONCE, AT_ONCE)
        self._hole = int(self._words[turn]) * len(self.slots) >> 32 if len(self.slots) > 1 else 0
        self.items_drawn += 1
        item, self.slots[self._hole] = self.slots[self._hole], None
        return item

    def restore(self, items_drawn: int, read: int, ended: bool) -> None:
        """Set the buffer to its state after n items were given and m read. The slots then hold the items' numbers,
        counted as they were read."""
        replaced = min(max(0, items_drawn - 1), max(0, read - self._capacity))
        numbers = np.arange(min(self._capacity, read))
        for start in range(0, replaced, REPLAYED):
            drawn = self._drawn(start, min(REPLAYED, replaced - start)) * np.uint64(len(numbers)) >> np.uint64(32)
            numbers[drawn] = np.arange(start, start + len(drawn)) + len(numbers)  # of several in a slot the last stays
        self.slots, self._hole = numbers.tolist(), None
        self.items_drawn, self.ended = replaced, ended
        for _ in range(replaced, items_drawn):
            self.take(lambda: None)
        self.ended = ended

    def _drawn(self, start: int, count: int) -> np.ndarray:
        turns = np.arange(start, start + count, dtype=np.int64)
        return words(self._key, turns * self._shares + self._share, SHUFFLE_BUFFER, 1)[:, 0].astype(np.uint64)


class Sequential:
    """Reads at offsets that never decrease; what lies between is passed over.

    Args:
        path: a file, a FIFO, a URL, or ``"-"``.
        remote: how a URL is read.

    Attributes:
        position: how far it has come, in bytes that are unpacked.

    Raises:
        OSError: it cannot be opened.
        ImportError: it is compressed by zstd, and there is nothing to unpack that with.
    """

    def __init__(self, path: str, remote: Remote | None = None) -> None:
        self.path = path
        self.position = 0
        self._file = open_stream(path, remote)
        self._stream: Any = self._file
        try:
            kind = compression_of(self._file.peek(6))
            self._seeks = kind is None and self._file.seekable()
            if kind is not None:
                self._stream = _unpacked(kind, self._file, path)
        except BaseException:
            self._file.close()
            raise

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at an offset; fewer only where the file ends.

        Raises:
            Damage: the file cannot be unpacked, or ends before the offset.
        """
        try:
            if self._seeks and offset > self.position:
                raw = self._file.raw
                size = raw.size if hasattr(raw, "size") else os.fstat(self._file.fileno()).st_size
                self.position = self._file.seek(min(offset, size))
            while self.position < offset and (skipped := self._stream.read(min(PIECE, offset - self.position))):
                self.position += len(skipped)
            parts, left = [], nbytes if self.position == offset else 0
            while left and (part := self._stream.read(min(PIECE, left))):
                parts.append(part)
                left -= len(part)
        except Exception as error:  # each library has errors of its own
            raise Damage(
                f"{self.path!r} cannot be read on after {self.position:,} bytes: {type(error).__name__}: {error}"
            ) from error
        if self.position < offset:
            raise Damage(f"{self.path!r} is cut off at {self.position:,} bytes, in a member before {offset:,}")
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.position += len(data)
        return data

    def finish(self) -> None:
        """Read what cannot be passed over to its end: sums are checked there, and who writes to a pipe may end.

        Raises:
            Damage: it cannot be unpacked.
        """
        while not self._seeks and self.read_at(self.position, PIECE):
            pass

    def close(self) -> None:
        """Close the file."""
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()


def _unpacked(kind: str, file: Any, path: str) -> Any:
    try:
        return importlib.import_module(UNPACKED_BY[kind]).open(file)
    except ModuleNotFoundError:
        if kind != "zstd":
            raise
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ImportError(
            f"{path!r} is compressed by zstd, which Python unpacks from 3.14 on; before, it takes the package "
            "zstandard: pip install 'gpuload[zstd]'"
        ) from None
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
