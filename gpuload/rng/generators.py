"""Per-sample seeding of the global random generators of Python (`random`), numpy and torch.

A user's dataset draws from these generators. They are seeded from (seed, epoch, position) before each sample, so the
dataset's random numbers are as reproducible as gpuload's. In the user's process, a context manager restores the
generators afterwards. Workers and the main process use this module. It does not import torch, but seeds torch if it is
already imported.
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
    "current_sample",
    "restore_states",
    "sample_rng",
    "seed_generators",
    "seed_sample",
    "seeds_of",
    "set_states",
    "states",
]

GeneratorStates = tuple[Any, Any, Any]

LEARNING_SAMPLES = 32  # if this many samples draw nothing, assume that no sample draws
MIN_UNSEEDED_CHUNK = 16  # samples; smaller chunks are always seeded, since comparing the states costs ten seedings
DRAWS_SEEN = -1
FRESHLY_SEEDED = 624  # the position in a Mersenne Twister's state after seeding, before the first draw
_current: tuple[int, int, int] | None = None  # seed, epoch and position of the current sample


def seeds_of(seed: int, epoch: int, positions: np.ndarray) -> list[int]:
    """Return the seeds for these positions, to be passed to `seed_sample`. A call takes 18 µs for one position, and 1
    µs per position for 32."""
    fractions = uniforms(epoch_key(seed, epoch), positions, GENERATORS, 2)[:, 0]
    return (fractions * 2**32).astype(np.int64).tolist()


def seed_generators(seed: int, epoch: int, position: int) -> None:
    """Seed the global generators for one sample."""
    [sample_seed] = seeds_of(seed, epoch, np.asarray([position], np.int64))
    seed_sample((seed, epoch, position), sample_seed)


def seed_sample(sample: tuple[int, int, int], sample_seed: int) -> None:
    """Seed the global generators with `sample_seed`, from `seeds_of`, for one sample: its seed, epoch and position."""
    random.seed(sample_seed)
    np.random.seed(sample_seed)
    seed_torch(sample, sample_seed)


def seed_torch(sample: tuple[int, int, int], sample_seed: int) -> None:
    """Seed only torch's global generator for one sample; arguments as for `seed_sample`."""
    global _current
    _current = sample
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(sample_seed)  # CPU only: torch.manual_seed would also seed CUDA


def states() -> GeneratorStates:
    """Return the states of the global generators."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch is not None else None


def restore_states(saved: GeneratorStates, *, torch_only: bool = False) -> None:
    """Restore the states of all generators, or only torch's, and clear the current sample."""
    global _current
    _current = None
    set_states(saved, torch_only=torch_only)


def set_states(saved: GeneratorStates, *, torch_only: bool = False) -> None:
    """Restore the states of all generators, or only torch's, without changing the current sample."""
    if not torch_only:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
    if saved[2] is not None:
        sys.modules["torch"].set_rng_state(saved[2])


class Seeding:
    """Per-chunk seeding of the global generators, which skips generators that the dataset does not use.

    Seeding Python and numpy takes 5 µs, longer than many datasets take for a sample. After `LEARNING_SAMPLES` samples
    that drew from neither, both are no longer seeded. If a later chunk does draw from either, the caller must read the
    chunk again, and both are seeded from then on. torch is always seeded, which takes 1 µs, because a dataset may read
    the seed without drawing (``torch.initial_seed()``).

    Args:
        seed: the loader's seed.
        is_learning: whether to skip generators that the dataset does not use.
    """

    def __init__(self, seed: int, *, is_learning: bool = True) -> None:
        self._seed = seed
        self._undrawn_count = 0 if is_learning else DRAWS_SEEN  # samples without a draw so far; DRAWS_SEEN after a draw
        self._states_before: GeneratorStates | None = None  # the states before the chunk
        self._is_unseeded = False  # whether Python and numpy are not seeded in this chunk
        self._is_unchanged = False  # whether this chunk did not draw from Python or numpy

    def begin(self, epoch: int, positions: np.ndarray) -> Callable[[int], None]:
        """Begin a chunk with these positions, int64 (N,). Return a function that seeds the generators for the sample at
        a row."""
        seed, position_list, sample_seeds = self._seed, positions.tolist(), seeds_of(self._seed, epoch, positions)
        self._is_unseeded = self._undrawn_count >= LEARNING_SAMPLES and len(positions) >= MIN_UNSEEDED_CHUNK
        self._states_before = (self._states_before or states()) if self._is_unseeded else None
        seed_row = seed_torch if self._is_unseeded else seed_sample
        return lambda row: seed_row((seed, epoch, position_list[row]), sample_seeds[row])

    @property
    def is_learning(self) -> bool:
        """Whether it is not known yet if the dataset draws from Python or numpy."""
        return 0 <= self._undrawn_count < LEARNING_SAMPLES

    def learn(self) -> None:
        """Record whether the latest sample drew from Python or numpy."""
        if not self.is_learning:
            return
        state: Any = np.random.get_state()  # a dict if the user replaced the bit generator
        has_drawn = type(state) is not tuple or state[2] != FRESHLY_SEEDED or random.getstate()[1][-1] != FRESHLY_SEEDED
        self._undrawn_count = DRAWS_SEEN if has_drawn else self._undrawn_count + 1

    def has_drawn_unseeded(self) -> bool:
        """Return whether a sample of the chunk drew from a generator that was not seeded."""
        if self._states_before is None or not self._is_unseeded:
            return False
        python_state, old, _ = self._states_before
        new: Any = np.random.get_state()
        self._is_unchanged = random.getstate() == python_state and (
            (type(old), type(new)) == (tuple, tuple) and old[2:] == new[2:] and np.array_equal(old[1], new[1])
        )
        if not self._is_unchanged:
            self._undrawn_count = DRAWS_SEEN
        self._is_unseeded = False  # until the next chunk
        return not self._is_unchanged

    @contextlib.contextmanager
    def preserve_states(self) -> Iterator[None]:
        """Restore the states of the user's generators after the code in this context has processed a chunk."""
        saved = self._states_before = states()
        self._is_unchanged = False
        try:
            yield
        finally:
            restore_states(saved, torch_only=self._is_unchanged)
            self._states_before = None


def current_sample() -> tuple[int, int, int] | None:
    """Return the seed, epoch and position of the sample that a `Loader` is reading in this process, or of the first
    sample of a pass while the dataset's ``iter()`` runs; None if no `Loader` is reading."""
    return _current


def sample_rng() -> np.random.Generator:
    """Return a generator for the current sample, for libraries that do not use the global generators.

    Use it in place of seeds that are only read from a global generator, such as ``np.random.get_state()[1][0]``: they
    repeat, because a worker stops seeding the generators of `random` and numpy if no sample draws from them.

    Call this in the dataset's ``__getitem__`` or ``__iter__``: the same seed, epoch and position give the same numbers
    with any number of workers. Each call returns a new generator in its initial state.

    Raises:
        RuntimeError: no `Loader` is reading a sample in this process.

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
            "gpuload.sample_rng() was called while no Loader is reading a sample; call it in the dataset's __getitem__ "
            "or __iter__, under a gpuload.Loader, not when the dataset is built"
        )
    seed, epoch, position = _current
    words = uniforms(epoch_key(seed, epoch), np.asarray([position], np.int64), SAMPLE_RNG, 4)[0]
    return np.random.Generator(np.random.Philox(seed=[int(word * 2**32) for word in words]))
