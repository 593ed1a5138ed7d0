"""The global generators of random, numpy and torch, seeded for each sample.

A user's own dataset draws from them. Before each sample they are seeded from (seed, epoch, position), so its draws are
as reproducible as gpuload's own. In the user's process a guard puts them back afterwards. Used by workers and by the
main process; imports no torch, but seeds it if somebody else did.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpuload.rng.philox import epoch_key, uniforms
from gpuload.rng.streams import GENERATORS, SAMPLE_RNG

__all__ = [
    "GeneratorStates",
    "Seeding",
    "put_back",
    "sample_being_made",
    "sample_rng",
    "seed_for",
    "seed_generators",
    "seeds_of",
    "set_states",
    "states",
]

GeneratorStates = tuple[Any, Any, Any]

LEARNED = 32  # samples that drew nothing say that others do not either
LEAST_ALONE = 16  # samples of a chunk: to see whether they drew takes as long as to seed for ten
DRAWS = -1
UNUSED = 624  # the place of a Mersenne Twister in its state, once it is seeded and before it is drawn from
_current: tuple[int, int, int] | None = None  # seed, epoch, position of the sample that is being made


def seeds_of(seed: int, epoch: int, positions: np.ndarray) -> list[int]:
    """The seeds at these positions, for `seed_for`. For 32 at once it takes 1 µs each; for one, 18."""
    drawn = uniforms(epoch_key(seed, epoch), positions, GENERATORS, 2)[:, 0]
    return (drawn * 2**32).astype(np.int64).tolist()


def seed_generators(seed: int, epoch: int, position: int) -> None:
    """Seed the global generators for one sample."""
    [value] = seeds_of(seed, epoch, np.asarray([position], np.int64))
    seed_for((seed, epoch, position), value)


def seed_for(sample: tuple[int, int, int], value: int) -> None:
    """Seed the global generators for one sample, by its seed, epoch and position, with `value` from `seeds_of`."""
    random.seed(value)
    np.random.seed(value)
    seed_torch_for(sample, value)


def seed_torch_for(sample: tuple[int, int, int], value: int) -> None:
    """Do the same, but leave Python's and numpy's generator alone."""
    global _current
    _current = sample
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(value)  # of the CPU alone: torch.manual_seed would touch CUDA's too


def states() -> GeneratorStates:
    """The states of the global generators."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch is not None else None


def put_back(saved: GeneratorStates, *, torch_alone: bool = False) -> None:
    """Set the generators to these states; no sample is being made any more."""
    global _current
    _current = None
    set_states(saved, torch_alone=torch_alone)


def set_states(saved: GeneratorStates, *, torch_alone: bool = False) -> None:
    """Set the generators, or torch's alone, to these states; the sample that is being made stays the same."""
    if not torch_alone:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
    if saved[2] is not None:
        sys.modules["torch"].set_rng_state(saved[2])


class Seeding:
    """Seeds the global generators for the samples of one chunk after the other, as far as the dataset draws from them.

    To seed Python's and numpy's takes 5 µs, longer than many a dataset for a sample. Once `LEARNED` samples have drawn
    from neither, both are left alone. If a chunk then moves one of them all the same, it has to be read again, and from
    then on both are seeded. torch's is seeded always, which takes 1 µs: a dataset may ask for its seed without drawing
    (``torch.initial_seed()``).

    Args:
        seed: the loader's.
        learns: leave out what is not needed.
    """

    def __init__(self, seed: int, *, learns: bool = True) -> None:
        self._seed = seed
        self._idle = 0 if learns else DRAWS  # how many samples have drawn nothing; DRAWS once one did
        self._before: GeneratorStates | None = None  # the states before the chunk
        self._leaves_alone = False  # Python's and numpy's, in this chunk
        self._is_untouched = False  # they were found to be the same after it

    def begin(self, epoch: int, positions: np.ndarray) -> Callable[[int], None]:
        """Return a function that seeds for the sample of a row, for a chunk with these positions, int64 (N,)."""
        seed, places, values = self._seed, positions.tolist(), seeds_of(self._seed, epoch, positions)
        self._leaves_alone = self._idle >= LEARNED and len(positions) >= LEAST_ALONE
        self._before = (self._before or states()) if self._leaves_alone else None
        seed_sample = seed_torch_for if self._leaves_alone else seed_for
        return lambda row: seed_sample((seed, epoch, places[row]), values[row])

    @property
    def is_learning(self) -> bool:
        """Return whether it is not yet known if samples draw from Python's or numpy's generator."""
        return 0 <= self._idle < LEARNED

    def learn(self) -> None:
        """Note whether the sample that was read last drew from one of them."""
        if not self.is_learning:
            return
        state: Any = np.random.get_state()  # a dict, if the user has set another kind of generator
        drew = random.getstate()[1][-1] != UNUSED or type(state) is not tuple or state[2] != UNUSED
        self._idle = DRAWS if drew else self._idle + 1

    def drew_unseeded(self) -> bool:
        """Return whether a sample of the chunk drew from a generator that was left alone."""
        if self._before is None or not self._leaves_alone:
            return False
        python, before, _ = self._before
        now: Any = np.random.get_state()
        self._is_untouched = random.getstate() == python and (
            (type(before), type(now)) == (tuple, tuple) and before[2:] == now[2:] and np.array_equal(before[1], now[1])
        )
        if not self._is_untouched:
            self._idle = DRAWS
        self._leaves_alone = False  # until the next chunk
        return not self._is_untouched

    @contextlib.contextmanager
    def preserving(self) -> Iterator[None]:
        """Put the generators back after a chunk, whatever was drawn or seeded."""
        saved = self._before = states()
        self._is_untouched = False
        try:
            yield
        finally:
            put_back(saved, torch_alone=self._is_untouched)
            self._before = None


def sample_being_made() -> tuple[int, int, int] | None:
    """Seed, epoch and position of the sample that is being made here, or of the first one of a pass; None means no
    `Loader` is making any."""
    return _current


def sample_rng() -> np.random.Generator:
    """A generator for the sample that is being made, for libraries that do not draw from global ones.

    Call it in ``dataset[i]`` or in the loop of an iterable dataset: for the same seed, epoch and position it draws the
    same numbers, with any number of workers. Each call gives a fresh one, at its beginning.

    Raises:
        RuntimeError: no `Loader` is making a sample here.

    Example:
        >>> class Noisy:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return sample_rng().integers(100)
        >>> from gpuload import Loader
        >>> first, second = (Loader(Noisy(), batch_size=4, num_workers=0, device="cpu") for _ in range(2))
        >>> bool((next(iter(first)) == next(iter(second))).all())
        True
    """
    if _current is None:
        raise RuntimeError(
            "gpuload.sample_rng() was called while no Loader is making a sample; call it in the dataset's __getitem__ "
            "or __iter__, under a gpuload.Loader, not when the dataset is built"
        )
    seed, epoch, position = _current
    words = uniforms(epoch_key(seed, epoch), np.asarray([position], np.int64), SAMPLE_RNG, 4)[0]
    return np.random.Generator(np.random.Philox(seed=[int(word * 2**32) for word in words]))
