"""The samples of a chunk: from a map dataset by key, one or many at a time, or from an iterable one by number.

Runs in a worker, or with num_workers=0 in the main process. A `Pass` is an iterator over an iterable dataset, of which
each worker has its own. Seeds the global generators before each sample of a user's
own dataset, so that its draws are a function of (seed, epoch, position).

Read-ahead: a dataset with ``will_need(indices)`` is told which samples come after those of this chunk, for the kernel
to read them meanwhile; a few at a time, as those of this chunk are read, so that the disk has always some to read. Only
while samples come from a disk, or take long: what is in memory already is read in less time than that. At first a disk
is assumed, and the first chunk's own samples are named too.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import getitem
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from gpuload.datasets.files import Disk
from gpuload.datasets.kinds import draws_nothing, each_of, fetched, fetches_many
from gpuload.datasets.tables import Found, picked
from gpuload.datasets.tree import flatten
from gpuload.datasets.worker import THIS_PROCESS, WorkerInfo
from gpuload.order.place import DIGESTS, IterablePlace, IterableStart
from gpuload.rng.generators import GeneratorStates, Seeding, seed_for, seeds_of, set_states, states
from gpuload.rng.streams import WORKER_INIT_POSITIONS
from gpuload.workers.counters import FLUSH_NS, Counters
from gpuload.workers.inherited import apply_changes
from gpuload.workers.job import Job
from gpuload.workers.protocol import Request

__all__ = ["Ended", "Pass", "Source", "init_position", "own_state", "worker_info"]

SLOW_NS: Final = 200_000  # for a sample; 130 KB in the page cache take 25, on a busy machine 100
CHUNKS_AHEAD: Final = 64  # for this many chunks after a slow one: read-ahead makes them quick
DISK_CHUNKS: Final = 4  # and after one with blocks from a disk, which are counted where they are named ahead, too
UNKNOWN_CHUNKS: Final = 2  # the first ones: the disk is seen when the second begins, and the third is named by then
AT_ONCE: Final = 4  # samples that are named together
SEEDS_AT_ONCE: Final = 64  # of the positions of an iterable dataset
Seed = Callable[[int], None]  # seeds the generators for the sample of a row
MAX_STATE_BYTES: Final = 100_000  # pickled: it travels with each chunk


class Source:
    """The samples of a dataset.

    Args:
        dataset: the user's, in this process.
        seed: the loader's.
        learns: leave out seeding that the dataset does not need. Without it, whoever draws on from the last sample
            goes on from its seed.

    Attributes:
        seeding: seeds the global generators before each sample; None means the dataset draws nothing.
        counters: where it says how long reading took.
        introduce: called with the number of each epoch that begins, and the position of an iterable dataset's first
            sample; and again if the dataset imports torch while it makes its first samples.
    """

    def __init__(self, dataset: Any, seed: int, *, learns: bool = True) -> None:
        self._dataset = dataset
        self._seed = seed
        self.seeding = None if draws_nothing(dataset, stored=learns) else Seeding(seed, learns=learns)
        self._many = fetches_many(dataset)
        self.counters = Counters()
        self._without_torch = "torch" not in sys.modules
        self._pass: Pass | None = None
        self._will_need: Callable[[list[Any]], None] | None = getattr(dataset, "will_need", None)
        self._read_ns, self._read = 0, 0  # in the last chunk: how long its samples took, and how many they are
        self._slow_left = UNKNOWN_CHUNKS  # for how many more it is slow
        self._disk = Disk()
        self._to_announce: list[Any] = []  # keys of the next chunk that `will_need` was not given yet
        self._is_first = True  # nobody has named the samples of this chunk
        self._epoch_sent = -1
        self._changes = b""
        self._applied: dict[Any, Any] = {}
        self._epoch = -1
        self.introduce: Callable[..., Any] = lambda epoch, position=None: None

    def open(self, request: Request, touch: Callable[[], None] = lambda: None) -> Callable[[int], Any]:
        """Return a function that gives the sample of a row of a chunk; to be called in the order of the rows.

        It raises `Ended` when an iterable dataset has no more samples, and whatever the dataset raises; the caller
        counts how long it takes. `touch` is called for each sample that an iterable dataset gives on the way.
        """
        if request.changes != self._changes:
            self._changes = request.changes
            apply_changes(self._dataset, request.changes, self._applied)
        if request.epoch_sent not in (-1, self._epoch_sent):
            self._epoch_sent = request.epoch_sent
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                try:
                    set_epoch(request.epoch_sent)
                except Exception as error:
                    return partial(_raise, error)
        if request.iterable is not None:
            return self._open_pass(request, request.iterable, touch)
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            self.introduce(request.epoch)
        keys = _keys_of(request)
        if self._will_need is not None:
            self._note_speed(len(keys))
            if self._is_first:
                self._is_first = False
                self._announce(keys)
        return self._open_keys(request, keys)

    def _open_keys(self, request: Request, keys: list[Any]) -> Callable[[int], Any]:
        seed = None if self.seeding is None else self.seeding.begin(request.epoch, request.positions)
        one = (lambda key: fetched(self._dataset, [key])[0]) if self._many else partial(getitem, self._dataset)
        if self._many and len(keys) > 1:
            with contextlib.suppress(Exception):  # one by one, to find which
                if (each := each_of(self._dataset, keys)) is None:
                    return self._fetch(request, keys, seed).__getitem__

                def each_or_one(row: int) -> Any:
                    try:
                        return each(row)
                    except Exception:  # it cannot be read with the others of its chunk
                        return one(keys[row])

                return self._open_each(request, range(len(keys)), each_or_one, seed)
        return self._open_each(request, keys, one, seed)

    def _open_each(
        self, request: Request, keys: Sequence[Any], read: Callable[[Any], Any], seed: Seed | None
    ) -> Callable[[int], Any]:
        """Return a function that reads the sample of a row by its key, with the generators seeded for it."""
        learning = self.seeding if self.seeding is not None and self.seeding.is_learning else None
        torch_may_come = seed is not None and self._without_torch
        announces = bool(self._to_announce)

        def get(row: int) -> Any:
            if announces and row % AT_ONCE == 0:
                self._announce_next(AT_ONCE)
            if seed is not None:
                seed(row)
            sample = read(keys[row])
            if learning is not None:
                learning.learn()
            if torch_may_come and self._torch_has_come(request):
                return get(row)
            return sample

        return get

    def _fetch(self, request: Request, keys: list[Any], seed: Seed | None) -> list[Any]:
        """Return all samples of a chunk, read at once."""
        self._announce_next(len(self._to_announce))
        if seed is not None:  # once for all of them, so their draws depend on the chunk
            seed(0)
        start = perf_counter_ns()
        try:
            samples = fetched(self._dataset, keys)
        finally:
            self.count(start)
        if seed is not None and self._torch_has_come(request):
            return self._fetch(request, keys, seed)
        return samples

    def _torch_has_come(self, request: Request) -> bool:
        """Return whether the dataset has imported torch meanwhile: then what it read last was read with torch neither
        seeded nor told which worker this is, and has to be read again."""
        if not self._without_torch or "torch" not in sys.modules:
            return False
        self._without_torch = False
        self.introduce(request.epoch)
        return True

    def picked(self, request: Request) -> Found | None:
        """Return the samples of a chunk that lie in memory as plain data; None means they have to be read, see
        `open`."""
        return picked(self._dataset, request.indices) if request.iterable is None else None

    def count(self, since_ns: int) -> int:
        """Count the time since then as reading; return what time it is."""
        now = perf_counter_ns()
        took_ns = now - since_ns
        self._read_ns += took_ns
        self.counters.read_ns += took_ns
        if took_ns > FLUSH_NS:
            self.counters.flush()  # let others see it now
        return now

    def _note_speed(self, rows: int) -> None:
        """Note whether the samples of the chunk before came from a disk, or took long; the next one has this many
        `rows`.

        From a network no blocks are counted. And from a quick disk a photograph takes 0.1 ms, as long as from the page
        cache of a busy machine.
        """
        left = max(self._slow_left - 1, 0)
        if self._disk.was_read():
            self._slow_left = max(left, DISK_CHUNKS)
        else:
            self._slow_left = CHUNKS_AHEAD if self._read_ns > SLOW_NS * self._read else left
        self._read_ns, self._read = 0, rows

    @property
    def reads_ahead(self) -> bool:
        """Return whether it helps to name the samples that come next."""
        return self._slow_left > 0 and self._will_need is not None

    def will_need(self, request: Request | None) -> None:
        """Note the chunk that comes next, whichever worker does it."""
        self._to_announce = []  # what is left of the chunk before is being read
        if request is not None and not request.plans and request.iterable is None:
            self._to_announce = _keys_of(request)

    def _announce_next(self, count: int) -> None:
        keys, self._to_announce = self._to_announce[:count], self._to_announce[count:]
        self._announce(keys)

    def _announce(self, keys: list[Any]) -> None:
        """Tell the dataset that the samples of these keys come soon."""
        if keys and self._will_need is not None:
            with contextlib.suppress(Exception):  # an error of the sample, when it is read
                self._will_need(keys)

    def _open_pass(self, request: Request, start: IterableStart, touch: Callable[[], None]) -> Callable[[int], Any]:
        if self._pass is None or self._pass.run != start.run:
            self._pass = None  # the old iterator ends before the new one begins
            self.introduce(request.epoch, start.offset)
            self._pass = Pass(self._dataset, self._seed, start, request.epoch)
        samples, numbers = self._pass, _keys_of(request)
        samples.forget(start.samples)
        return lambda row: samples.get(numbers[row], touch)

    def begin(self, request: Request) -> IterablePlace:
        """Return where the pass of a request begins, before its first chunk is done."""
        self.open(request)
        return IterablePlace(0, False) if self._pass is None else self._pass.begin()

    def place(self, request: Request, rows: int) -> IterablePlace | None:
        """Return where the pass is after this many rows of a chunk; None for a map dataset."""
        if self._pass is None:
            return None
        return self._pass.place(int(request.indices[0]) + rows)  # pyright: ignore[reportArgumentType]

    @property
    def broken(self) -> bool:
        """Return whether the pass can give no more samples, after an error."""
        return self._pass is not None and self._pass.broken is not None


def _raise(error: Exception, row: int) -> Any:
    raise error


def _keys_of(request: Request) -> list[Any]:
    if isinstance(request.indices, np.ndarray):
        return request.indices.tolist()
    return [int(key) if isinstance(key, np.integer) else key for key in request.indices]


class Ended(Exception):
    """There are no more samples."""


class Pass:
    """A pass over an iterable dataset: its samples by number, resumed if the dataset can do that.

    There is no index, so each worker has an iterator of its own and is asked for its samples 0, 1, 2 …; samples that it
    has taken are kept until they were given to the user, since a chunk may have to be done again.

    Args:
        dataset: the user's, in this process.
        seed: the loader's: before each sample the global generators are seeded from it and the position.
        start: which pass, and where it begins.
        epoch: its number.
    """

    def __init__(self, dataset: Any, seed: int, start: IterableStart, epoch: int) -> None:
        self.run = start.run
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch
        self._start = start
        self._pulled: dict[int, tuple[Any, Exception | None]] = {}
        self._seeds: dict[int, int] = {}
        self._digests: list[bytes] = []
        self._ended = False
        state = start.state or {}  # a text, where an object's could not be kept
        can_resume = all(isinstance(packed, bytes) for packed in state.values())
        self._state = {whose: pickle.loads(state[whose]) for whose in state} if can_resume else {}  # pyright: ignore
        self._next = start.samples if self._state else 0
        self._iterator: Iterator[Any] | None = None  # made with the first sample, or by `begin`
        self._paused: GeneratorStates | None = None  # of the global generators, after `begin`
        self.broken: Exception | None = None  # the error that ended it: of iter(), or of a generator

    def begin(self) -> IterablePlace:
        """Call the dataset's ``iter()`` now, and return where the pass begins."""
        if self._iterator is None and self.broken is None:
            with contextlib.suppress(Exception):  # raised with the first sample
                self._begin()
                self._paused = states()
        return self.place(self._next)

    def _begin(self) -> None:
        self._seed_for(0)  # on resume too: iter() draws what it drew before
        state = self._state
        try:
            if "dataset" in state:
                self._dataset.load_state_dict(state["dataset"])
            iterator: Any = iter(self._dataset)
            if "iterator" in state:
                iterator.load_state_dict(state["iterator"])
                if "dataset" in state:  # it was saved after iter()
                    self._dataset.load_state_dict(state["dataset"])
        except Exception as error:
            self.broken = error
            raise
        self._iterator = iterator

    def get(self, number: int, touch: Callable[[], None] = lambda: None) -> Any:
        """Return sample `number` of this pass; `touch` is called for each sample taken on the way.

        Raises:
            Ended: there are fewer samples.
            Exception: whatever the iterator raised for this one.
        """
        while self._next <= number:
            self._take()
            touch()
        sample, error = self._pulled[number]
        if error is not None:
            raise error
        return sample

    def _take(self) -> None:
        if self._ended:
            raise Ended
        if self.broken is not None:
            raise self.broken
        if self._iterator is None:
            self._begin()
            if self._next:
                self._seed_for(self._next)
        else:
            self._seed_for(self._next)
            if self._paused is not None and not self._next:  # the first sample draws on after iter()
                set_states(self._paused)
            self._paused = None
        assert self._iterator is not None
        sample, failed = None, None
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise Ended from None
        except Exception as error:
            failed = error
            if inspect.isgenerator(self._iterator) or getattr(self._iterator, "broken", False) is True:
                self.broken = error
        if self._next >= self._start.samples:
            self._pulled[self._next] = (sample, failed)
        if self._next < DIGESTS:
            self._digests.append(_digest(sample))
        self._next += 1

    def _seed_for(self, number: int) -> None:
        position = self._start.position(number)
        if position not in self._seeds:  # drawn for many samples at once
            positions = position + np.arange(SEEDS_AT_ONCE, dtype=np.int64) * self._start.stride
            self._seeds = dict(zip(positions.tolist(), seeds_of(self._seed, self._epoch, positions), strict=True))
        seed_for((self._seed, self._epoch, position), self._seeds[position])

    def forget(self, before: int) -> None:
        """Drop samples with a smaller number: the user has them. Others may be asked for again, also those already in a
        slot: a chunk that is declared lost is done again."""
        for number in [number for number in self._pulled if number < before]:
            del self._pulled[number]

    def place(self, samples: int) -> IterablePlace:
        """Return where the pass is after this many samples; with the dataset's own state, if no sample was taken since
        then."""
        state: dict[str, bytes | str] = {}
        if self._ended:  # more may have been asked for
            samples = min(samples, self._next)
        if samples == self._next:
            owners: dict[str, Any] = {"iterator": self._iterator}
            if self._iterator is not self._dataset:
                owners["dataset"] = self._dataset
            for whose, owner in owners.items():
                if (packed := own_state(owner, whose)) is not None:
                    state[whose] = packed
        digests, was_asked = tuple(self._digests), THIS_PROCESS.was_asked
        return IterablePlace(samples, self._ended, self.broken is not None, state or None, digests, was_asked)


def own_state(owner: Any, whose: str) -> bytes | str | None:
    """Return what an object's ``state_dict()`` gives, pickled, so that it stays as it is; or why that cannot be kept,
    as text; None if the object has no such method, or none to load it."""
    if not (callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))):
        return None
    try:
        state = owner.state_dict()
        try:
            packed = pickle.dumps(state, 5)
        except (pickle.PicklingError, AttributeError, TypeError):  # of a class in __main__
            import cloudpickle

            packed = cloudpickle.dumps(state, 5)
        if len(packed) > MAX_STATE_BYTES:
            raise ValueError(f"it has {len(packed):,} bytes, more than {MAX_STATE_BYTES:,}")
    except Exception as error:  # reported only when the state is asked for
        return f"the state_dict() of the {whose} cannot be kept: {type(error).__name__}: {error}"
    return packed


def _digest(sample: Any) -> bytes:
    """Return a hash of a sample; empty if it cannot be pickled."""
    import hashlib  # here: it takes longer than all of this room, and only iterable datasets need it

    leaves: list[Any] = []
    with contextlib.suppress(Exception):
        flatten(sample, leaves)
        return hashlib.blake2b(pickle.dumps(leaves, 5), digest_size=16).digest()
    return b""


def init_position(rank: int, worker: int) -> int:
    """Return the position that a worker's `worker_init_fn` draws at."""
    return WORKER_INIT_POSITIONS[rank << 32 | worker]


def worker_info(job: Job, worker: int, workers: int, epoch: int, position: int | None = None) -> WorkerInfo:
    """Return what `get_worker_info()` says in worker `worker` of `workers`; its seed is that of a position, by default
    the worker's own."""
    position = init_position(job.rank, worker) if position is None else position
    [seed] = seeds_of(job.seed, epoch, np.array([position], np.int64))
    return WorkerInfo(worker, workers, job.rank, job.world_size, seed, job.dataset)
