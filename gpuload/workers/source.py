"""Reading the samples of a chunk: by key from a map dataset, one or many at a time, and by number from an iterable
dataset.

This module runs in a worker or, with num_workers=0, in the main process. An `IterablePass` iterates over an iterable
dataset; each worker has a separate pass. The global generators are seeded before each sample of a user's dataset, so
that its random numbers are a function of (seed, epoch, position).

Read-ahead: the source announces the samples of the next chunk to datasets that have ``will_need(indices)``, so that the
kernel reads these samples in the background. It announces a few samples at a time while it reads the current chunk, so
that the disk always has work. It does this only while samples come from a disk or are slow to read: for a sample in
memory, the announcement takes longer than the read. At the start, it assumes a disk, and also announces the samples of
the first chunk.
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

from gpuload.datasets.files import DiskReads
from gpuload.datasets.kinds import fetch_samples, is_deterministic, lazy_reader, uses_getitems
from gpuload.datasets.tables import Columns, select_columns
from gpuload.datasets.tree import flatten
from gpuload.datasets.worker import THIS_PROCESS, WorkerInfo
from gpuload.order.place import DIGESTED_SAMPLES, IterablePlace, IterableStart
from gpuload.rng.generators import GeneratorStates, Seeding, seed_sample, seeds_of, set_states, states
from gpuload.rng.streams import WORKER_INIT_POSITIONS
from gpuload.workers.counters import FLUSH_NS, WorkerCounters
from gpuload.workers.dataset_changes import apply_changes
from gpuload.workers.job import Job
from gpuload.workers.protocol import Request

__all__ = ["EndOfSamples", "IterablePass", "Source", "init_position", "make_worker_info", "pickle_state"]

SLOW_NS: Final = 200_000  # per sample; reading 130 KB from the page cache takes 25 µs, or 100 µs on a busy machine
# The number of chunks with read-ahead after a slow chunk: many, since read-ahead makes these chunks look fast.
CHUNKS_AHEAD: Final = 64
# The same after a chunk that was read from disk: fewer, since read-ahead itself also counts as reading from disk.
DISK_CHUNKS: Final = 4
# The same at the start: disk reads are known only when chunk 2 begins, and chunk 3 is announced before that.
UNKNOWN_CHUNKS: Final = 2
ANNOUNCED_TOGETHER: Final = 4  # the number of samples in one announcement
SEEDS_TOGETHER: Final = 64  # the number of seeds computed in one call for an iterable dataset
OnSample = Callable[[bool], None]
Seed = Callable[[int], None]  # seeds the generators for the sample of a row
MAX_STATE_BYTES: Final = 100_000  # the limit for a pickled state, which is sent with each chunk


class Source:
    """A reader of a dataset's samples.

    Args:
        dataset: this process's copy of the user's dataset.
        seed: the seed of the loader.
        learns: whether to stop seeding generators that the dataset turns out not to use. It must be False if there is a
            `collate_fn`, which draws from the generators as the last sample has left them.

    Attributes:
        seeding: seeds the global generators before each sample; None if the dataset draws nothing.
        counters: the counters to which the reading time is added.
        read_changes: returns the bytes from a start to an end of the changes to the dataset.
        set_worker_info: called at the start of each epoch with the epoch's number and, for an iterable dataset, the
            position of the first sample; called again if the dataset imports torch while it makes its first samples.
    """

    def __init__(self, dataset: Any, seed: int, *, is_learning: bool = True) -> None:
        self._dataset = dataset
        self._seed = seed
        self.seeding = (
            None
            if is_deterministic(dataset, allow_plain_containers=is_learning)
            else Seeding(seed, is_learning=is_learning)
        )
        self._uses_getitems = uses_getitems(dataset)
        self.counters = WorkerCounters()
        self._lacks_torch = "torch" not in sys.modules
        self._pass: IterablePass | None = None
        self._will_need: Callable[[list[Any]], None] | None = getattr(dataset, "will_need", None)
        self._read_ns, self._rows_read = 0, 0  # the reading time of the last chunk, and its number of samples
        self._slow_chunks_left = UNKNOWN_CHUNKS  # the number of chunks for which reading still counts as slow
        self._disk = DiskReads()
        self._keys_to_announce: list[Any] = []  # the keys of the next chunk that are not announced yet
        self._is_first_chunk = True  # whether no chunk has been opened yet; the first chunk is not announced beforehand
        self._epoch_sent = -1
        self._changes_applied = 0  # in bytes
        self._epoch = -1
        self.read_changes: Callable[[int, int], bytes] = lambda start, end: b""
        self.set_worker_info: Callable[..., object] = lambda epoch, position=None: None

    def open(self, request: Request, on_sample: OnSample = lambda is_replay: None) -> Callable[[int], Any]:
        """Return a function that reads the sample of a row of a chunk. Call this function for the rows in ascending
        order, and pass the time that it takes to `add_read_time`.

        The function raises `EndOfSamples` when an iterable dataset has no more samples, and any error of the dataset.
        `on_sample` is called before an iterable dataset yields each sample up to that row: with True for the samples
        on the way to the row, which the dataset has yielded before, usually in another worker.
        """
        if request.changes > self._changes_applied:
            apply_changes(self._dataset, self.read_changes(self._changes_applied, request.changes))
            self._changes_applied = request.changes
        if request.epoch_sent not in (-1, self._epoch_sent):
            self._epoch_sent = request.epoch_sent
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                try:
                    set_epoch(request.epoch_sent)
                except Exception as error:
                    return partial(_raise, error)
        if request.iterable is not None:
            return self._open_pass(request, request.iterable, on_sample)
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            self.set_worker_info(request.epoch)
        keys = _keys_of(request)
        if self._will_need is not None:
            self._note_speed(len(keys))
            if self._is_first_chunk:
                self._is_first_chunk = False
                self._announce(keys)
        return self._open_keys(request, keys)

    def _open_keys(self, request: Request, keys: list[Any]) -> Callable[[int], Any]:
        seed = None if self.seeding is None else self.seeding.begin(request.epoch, request.positions)
        read = (
            (lambda key: fetch_samples(self._dataset, [key])[0])
            if self._uses_getitems
            else partial(getitem, self._dataset)
        )
        if self._uses_getitems and len(keys) > 1:
            with contextlib.suppress(Exception):  # read the samples one by one instead, to find the one that fails
                if (read_row := lazy_reader(self._dataset, keys)) is None:
                    return self._fetch_all(request, keys, seed).__getitem__

                def read_row_or_key(row: int) -> Any:
                    try:
                        return read_row(row)
                    except Exception:  # the sample cannot be read together with the other samples of its chunk
                        return read(keys[row])

                return self._open_one_by_one(request, range(len(keys)), read_row_or_key, seed)
        return self._open_one_by_one(request, keys, read, seed)

    def _open_one_by_one(
        self, request: Request, keys: Sequence[object], read: Callable[[Any], object], seed: Seed | None
    ) -> Callable[[int], Any]:
        """Return a function that seeds the generators for the sample of a row, and reads the sample by its key."""
        learning = self.seeding if self.seeding is not None and self.seeding.is_learning else None
        may_import_torch = seed is not None and self._lacks_torch
        announces = bool(self._keys_to_announce)

        def get(row: int) -> Any:
            if announces and row % ANNOUNCED_TOGETHER == 0:
                self._announce_next(ANNOUNCED_TOGETHER)
            if seed is not None:
                seed(row)
            sample = read(keys[row])
            if learning is not None:
                learning.learn()
            if may_import_torch and self._has_imported_torch(request):
                return get(row)
            return sample

        return get

    def _fetch_all(self, request: Request, keys: list[Any], seed: Seed | None) -> list[Any]:
        """Return all samples of a chunk, read together."""
        self._announce_next(len(self._keys_to_announce))
        if seed is not None:  # seed once for the entire chunk; random numbers then depend on all of its samples
            seed(0)
        start = perf_counter_ns()
        try:
            samples = fetch_samples(self._dataset, keys)
        finally:
            self.add_read_time(start)
        if seed is not None and self._has_imported_torch(request):
            return self._fetch_all(request, keys, seed)
        return samples

    def _has_imported_torch(self, request: Request) -> bool:
        """Return whether the dataset has just imported torch. In this case, the last sample has to be read again: torch
        was not seeded for the sample, and torch's get_worker_info() did not know this worker."""
        if not self._lacks_torch or "torch" not in sys.modules:
            return False
        self._lacks_torch = False
        self.set_worker_info(request.epoch)
        return True

    def select_plain_samples(self, request: Request) -> Columns | None:
        """Return the samples of a chunk as columns if they are plain data in memory; else None. The caller then reads
        them with `open`."""
        return select_columns(self._dataset, request.indices) if request.iterable is None else None

    def add_read_time(self, since_ns: int) -> int:
        """Add the time since `since_ns` to the reading time; return the current time."""
        now = perf_counter_ns()
        elapsed_ns = now - since_ns
        self._read_ns += elapsed_ns
        self.counters.read_ns += elapsed_ns
        if elapsed_ns > FLUSH_NS:
            self.counters.flush()  # so that the main process sees the time of a slow read immediately
        return now

    def _note_speed(self, rows: int) -> None:
        """Record whether the previous chunk came from a disk or was slow; `rows` is the size of the next chunk.

        Both checks are needed: reads from a network do not count as disk reads, and a fast disk takes 0.1 ms for a
        photograph, which is no longer than a read from the page cache on a busy machine.
        """
        chunks_left = max(self._slow_chunks_left - 1, 0)
        if self._disk.was_read():
            self._slow_chunks_left = max(chunks_left, DISK_CHUNKS)
        else:
            self._slow_chunks_left = CHUNKS_AHEAD if self._read_ns > SLOW_NS * self._rows_read else chunks_left
        self._read_ns, self._rows_read = 0, rows

    @property
    def reads_ahead(self) -> bool:
        """Return whether the next samples should be announced, because this makes reading them faster."""
        return self._slow_chunks_left > 0 and self._will_need is not None

    def store_next_keys(self, request: Request | None) -> None:
        """Store the keys of the epoch's next chunk, to announce them later, even if another worker will read the
        chunk."""
        self._keys_to_announce = []  # the chunk whose keys were stored before is being read now
        if request is not None and not request.is_planning and request.iterable is None:
            self._keys_to_announce = _keys_of(request)

    def _announce_next(self, count: int) -> None:
        keys, self._keys_to_announce = self._keys_to_announce[:count], self._keys_to_announce[count:]
        self._announce(keys)

    def _announce(self, keys: list[Any]) -> None:
        """Announce to the dataset that the samples of these keys will be read soon."""
        if keys and self._will_need is not None:
            with contextlib.suppress(Exception):  # reading the sample will raise the error again
                self._will_need(keys)

    def _open_pass(self, request: Request, start: IterableStart, on_sample: OnSample) -> Callable[[int], Any]:
        if self._pass is None or self._pass.pass_number != start.pass_number:
            self._pass = None  # the old iterator ends before the new one begins
            self.set_worker_info(request.epoch, start.offset)
            self._pass = IterablePass(self._dataset, self._seed, start, request.epoch)
        current_pass, numbers = self._pass, _keys_of(request)
        current_pass.forget(start.samples)
        return lambda row: current_pass.get(numbers[row], on_sample)

    def begin(self, request: Request) -> IterablePlace:
        """Start the pass of a request, and return its progress before the first chunk."""
        self.open(request)
        return IterablePlace(0, False) if self._pass is None else self._pass.begin()

    def progress(self, request: Request, rows: int) -> IterablePlace | None:
        """Return the progress of the pass after this many rows of a chunk; None for a map dataset."""
        if self._pass is None:
            return None
        return self._pass.progress(int(request.indices[0]) + rows)  # pyright: ignore[reportArgumentType]

    @property
    def broken(self) -> bool:
        """Return whether the pass cannot yield any more samples, after an error."""
        return self._pass is not None and self._pass.failure is not None


def _raise(error: Exception, row: int) -> Any:
    raise error


def _keys_of(request: Request) -> list[Any]:
    if isinstance(request.indices, np.ndarray):
        return request.indices.tolist()
    return [int(key) if isinstance(key, np.integer) else key for key in request.indices]


class EndOfSamples(Exception):
    """The end of an iterable dataset."""


class IterablePass:
    """A pass over an iterable dataset, which returns samples by number and can resume if the dataset can.

    An iterable dataset has no indices, so each worker has a separate iterator and numbers its samples 0, 1, 2 …. A pass
    caches samples until the user has received them, since a chunk may have to be repeated.

    Args:
        dataset: this process's copy of the user's dataset.
        seed: the seed of the loader; the global generators are seeded from it and the position before each sample.
        start: the number of the pass, and the point where it starts.
        epoch: the number of the epoch.
    """

    def __init__(self, dataset: Any, seed: int, start: IterableStart, epoch: int) -> None:
        self.pass_number = start.pass_number
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch
        self._start = start
        self._results: dict[int, tuple[Any, Exception | None]] = {}
        self._seeds: dict[int, int] = {}
        self._digests: list[bytes] = []
        self._ended = False
        state = start.state or {}
        can_resume = all(isinstance(packed, bytes) for packed in state.values())  # text says why it could not be saved
        self._state = {name: pickle.loads(state[name]) for name in state} if can_resume else {}  # pyright: ignore
        self._next_number = start.samples if self._state else 0
        self._iterator: Iterator[Any] | None = None  # created for the first sample, or by `begin`
        self._states_after_iter: GeneratorStates | None = None  # the states of the global generators after `begin`
        self.failure: Exception | None = None  # the error, of iter() or of a generator, that ended the pass

    def begin(self) -> IterablePlace:
        """Call the dataset's ``iter()`` now, and return the progress with which the pass begins."""
        if self._iterator is None and self.failure is None:
            with contextlib.suppress(Exception):  # raised again for the first sample
                self._begin()
                self._states_after_iter = states()
        return self.progress(self._next_number)

    def _begin(self) -> None:
        self._seed_for(0)  # even on resume, so that iter() draws the same numbers
        state = self._state
        try:
            if "dataset" in state:
                self._dataset.load_state_dict(state["dataset"])
            iterator: Any = iter(self._dataset)
            if "iterator" in state:
                iterator.load_state_dict(state["iterator"])
                if "dataset" in state:  # the state was saved after iter(), which may change it
                    self._dataset.load_state_dict(state["dataset"])
        except Exception as error:
            self.failure = error
            raise
        self._iterator = iterator

    def get(self, number: int, on_sample: OnSample = lambda is_replay: None) -> Any:
        """Return sample `number` of this pass. Call `on_sample` before the iterator yields each sample up to this one,
        with True for all samples before it.

        Raises:
            EndOfSamples: there are fewer samples.
            Exception: the iterator's error for this sample.
        """
        if self._iterator is None and self._next_number and self.failure is None:
            on_sample(True)  # the dataset resumes, and may read the samples before this point again
            self._begin()
        while self._next_number <= number:
            on_sample(self._next_number < number)
            self._pull_next()
        sample, error = self._results[number]
        if error is not None:
            raise error
        return sample

    def _pull_next(self) -> None:
        if self._ended:
            raise EndOfSamples
        if self.failure is not None:
            raise self.failure
        if self._iterator is None:
            self._begin()
            if self._next_number:
                self._seed_for(self._next_number)
        else:
            self._seed_for(self._next_number)
            if (
                self._states_after_iter is not None and not self._next_number
            ):  # the first sample's draws continue those of iter()
                set_states(self._states_after_iter)
            self._states_after_iter = None
        assert self._iterator is not None
        sample, sample_error = None, None
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise EndOfSamples from None
        except Exception as error:
            sample_error = error
            if inspect.isgenerator(self._iterator) or getattr(self._iterator, "broken", False) is True:
                self.failure = error
        if self._next_number >= self._start.samples:
            self._results[self._next_number] = (sample, sample_error)
        if self._next_number < DIGESTED_SAMPLES:
            self._digests.append(_digest(sample))
        self._next_number += 1

    def _seed_for(self, number: int) -> None:
        position = self._start.position(number)
        if position not in self._seeds:  # compute the seeds of many samples together
            positions = position + np.arange(SEEDS_TOGETHER, dtype=np.int64) * self._start.stride
            self._seeds = dict(zip(positions.tolist(), seeds_of(self._seed, self._epoch, positions), strict=True))
        seed_sample((self._seed, self._epoch, position), self._seeds[position])

    def forget(self, before: int) -> None:
        """Drop cached samples with a smaller number, which the user has received. Later samples may be requested again
        even if they are already in a slot: a chunk that is declared lost is repeated."""
        for number in [number for number in self._results if number < before]:
            del self._results[number]

    def progress(self, samples: int) -> IterablePlace:
        """Return the progress of the pass after this many samples. It includes the states of the dataset and of its
        iterator only if the iterator has not yielded any further sample."""
        state: dict[str, bytes | str] = {}
        if self._ended:  # the chunk may have more rows than there are samples
            samples = min(samples, self._next_number)
        if samples == self._next_number:
            owners: dict[str, Any] = {"iterator": self._iterator}
            if self._iterator is not self._dataset:
                owners["dataset"] = self._dataset
            for name, owner in owners.items():
                if (packed := pickle_state(owner, name)) is not None:
                    state[name] = packed
        digests, was_read = tuple(self._digests), THIS_PROCESS.worker_info_was_read
        return IterablePlace(samples, self._ended, self.failure is not None, state or None, digests, was_read)


def pickle_state(owner: Any, name: str) -> bytes | str | None:
    """Return the result of an object's ``state_dict()``, pickled immediately, since the object may change it later.
    Return the reason as text if the state cannot be saved, and None if the object lacks ``state_dict()`` or
    ``load_state_dict()``."""
    if not (callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))):
        return None
    try:
        state = owner.state_dict()
        try:
            packed = pickle.dumps(state, 5)
        except (pickle.PicklingError, AttributeError, TypeError):  # its class is defined in __main__
            import cloudpickle

            packed = cloudpickle.dumps(state, 5)
        if len(packed) > MAX_STATE_BYTES:
            raise ValueError(f"its pickle has {len(packed):,} bytes, more than {MAX_STATE_BYTES:,}")
    except Exception as error:  # reported only when the state is requested
        return f"the state_dict() of the {name} cannot be saved: {type(error).__name__}: {error}"
    return packed


def _digest(sample: object) -> bytes:
    """Return a hash of a sample; empty if it cannot be pickled."""
    import hashlib  # only iterable datasets need it, and importing it takes longer than importing this entire package

    leaves: list[Any] = []
    with contextlib.suppress(Exception):
        flatten(sample, leaves)
        return hashlib.blake2b(pickle.dumps(leaves, 5), digest_size=16).digest()
    return b""


def init_position(rank: int, worker: int) -> int:
    """Return the position whose seed a worker's `worker_init_fn` uses."""
    return WORKER_INIT_POSITIONS[rank << 32 | worker]


def make_worker_info(job: Job, worker: int, workers: int, epoch: int, position: int | None = None) -> WorkerInfo:
    """Return the result of `get_worker_info()` for worker `worker` of `workers`. Its seed is the seed at `position`, by
    default at the worker's `init_position`."""
    position = init_position(job.rank, worker) if position is None else position
    [seed] = seeds_of(job.seed, epoch, np.array([position], np.int64))
    return WorkerInfo(worker, workers, job.rank, job.world_size, seed, job.dataset)
