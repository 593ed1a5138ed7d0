"""An iterable dataset in the process that iterates over it: its samples by number, resumed if the dataset can do that.

Runs in a worker, or with num_workers=0 in the main process. There is no index, so each worker has an iterator of its
own and is asked for its samples 0, 1, 2 …; `Pass` keeps the samples it has taken until they were given to the user,
since a chunk may have to be done again.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpuload.datasets.tree import flatten
from gpuload.datasets.worker import worker_info_was_asked
from gpuload.order.place import DIGESTS, IterablePlace, IterableStart
from gpuload.rng.generators import GeneratorStates, seed_generators, seeds_of, set_states, states

__all__ = ["Ended", "Pass", "own_state"]

SEEDS_AT_ONCE = 64
MAX_STATE_BYTES = 100_000  # pickled: it travels with each chunk


class Ended(Exception):
    """There are no more samples."""


class Pass:
    """One pass over an iterable dataset.

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
        self._taken: dict[int, tuple[Any, Exception | None]] = {}
        self._seeds: dict[int, int] = {}
        self._digests: list[bytes] = []
        self._ended = False
        packed = {whose: state for whose, state in (start.state or {}).items() if isinstance(state, bytes)}
        whole = len(packed) == len(start.state or {})
        self._state = {whose: pickle.loads(state) for whose, state in packed.items()} if whole else {}
        self._next = start.samples if self._state else 0
        self._iterator: Iterator[Any] | None = None  # made with the first sample, or by `begin`
        self._paused: GeneratorStates | None = None  # of the global generators, after `begin`
        self.broken: Exception | None = None  # the error that ended it: of iter(), or of a generator

    def begin(self) -> IterablePlace:
        """Call the dataset's ``iter()`` now, and say where the pass begins."""
        if self._iterator is None and self.broken is None:
            with contextlib.suppress(Exception):  # raised with the first sample
                self._begin()
                self._paused = states()
        return self.place(self._next)

    def _begin(self) -> None:
        self._seed_for(0)  # on resume too: iter() draws what it drew before
        try:
            self._iterator = self._made(self._state)
        except Exception as error:
            self.broken = error
            raise

    def _made(self, state: dict[str, Any]) -> Iterator[Any]:
        if "dataset" in state:
            self._dataset.load_state_dict(state["dataset"])
        iterator: Any = iter(self._dataset)
        if "iterator" in state:
            iterator.load_state_dict(state["iterator"])
            if "dataset" in state:  # it was saved after iter()
                self._dataset.load_state_dict(state["dataset"])
        return iterator

    def get(self, number: int, touch: Callable[[], None] = lambda: None) -> Any:
        """Sample `number` of this pass; `touch` is called for each sample taken on the way.

        Raises:
            Ended: there are fewer samples.
            Exception: whatever the iterator raised for this one.
        """
        while self._next <= number:
            self._take()
            touch()
        sample, error = self._taken[number]
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
            if inspect.isgenerator(self._iterator):
                self.broken = error
        if self._next >= self._start.samples:
            self._taken[self._next] = (sample, failed)
        if self._next < DIGESTS:
            self._digests.append(_digest(sample))
        self._next += 1

    def _seed_at(self, position: int) -> int:
        """The seed of a position; drawn for many samples at once."""
        if position not in self._seeds:
            positions = position + np.arange(SEEDS_AT_ONCE, dtype=np.int64) * self._start.stride
            self._seeds = dict(zip(positions.tolist(), seeds_of(self._seed, self._epoch, positions), strict=True))
        return self._seeds[position]

    def _seed_for(self, number: int) -> None:
        position = self._start.position(number)
        seed_generators(self._seed, self._epoch, position, self._seed_at(position))

    def forget(self, before: int) -> None:
        """Drop samples with a smaller number: the user has them. Others may be asked for again, also those already in a
        slot: a chunk that is declared lost is done again."""
        for number in [number for number in self._taken if number < before]:
            del self._taken[number]

    def place(self, samples: int) -> IterablePlace:
        """Where it is after this many samples; with the dataset's own state if no sample was taken since."""
        state: dict[str, bytes | str] = {}
        if self._ended:  # more may have been asked for
            samples = min(samples, self._next)
        if samples == self._next:
            owners: dict[str, Any] = {"iterator": self._iterator}
            if self._iterator is not self._dataset:
                owners["dataset"] = self._dataset
            for whose, owner in owners.items():
                if (own := own_state(owner, whose)) is not None:
                    state[whose] = own
        return IterablePlace(
            samples, self._ended, self.broken is not None, state or None, tuple(self._digests), worker_info_was_asked()
        )


def own_state(owner: Any, whose: str) -> bytes | str | None:
    """What its ``state_dict()`` gives, pickled, so that it stays as it is; or why that cannot be kept, as text; None if
    it has no such method, and none to load it."""
    if not (callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))):
        return None
    try:
        given = owner.state_dict()
        try:
            packed = pickle.dumps(given, 5)
        except (pickle.PicklingError, AttributeError, TypeError):  # of a class in __main__
            import cloudpickle

            packed = cloudpickle.dumps(given, 5)
        if len(packed) > MAX_STATE_BYTES:
            raise ValueError(f"it has {len(packed):,} bytes, more than {MAX_STATE_BYTES:,}")
    except Exception as error:  # reported only when the state is asked for
        return f"the state_dict() of the {whose} cannot be kept: {type(error).__name__}: {error}"
    return packed


def _digest(sample: Any) -> bytes:
    """A hash of a sample; empty if it cannot be pickled."""
    import hashlib  # here: it takes longer than all of this room, and only iterable datasets need it

    leaves: list[Any] = []
    with contextlib.suppress(Exception):
        flatten(sample, leaves)
        return hashlib.blake2b(pickle.dumps(leaves, 5), digest_size=16).digest()
    return b""
