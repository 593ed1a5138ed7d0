"""The global generators of random, numpy and torch, seeded for each sample.

A user's own dataset draws from them. Before each sample they are seeded from (seed, epoch, position), so its draws are
as reproducible as gpuload's own. In the user's process a guard puts them back afterwards. Used by workers and by the
main process; imports no torch, but seeds it if somebody else did.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuload.rng.philox import epoch_key, uniforms
from gpuload.rng.streams import GENERATORS, SAMPLE_RNG

__all__ = [
    "GeneratorStates",
    "generators_preserved",
    "put_back",
    "sample_being_made",
    "sample_rng",
    "seed_generators",
    "seeds_of",
    "set_states",
    "states",
]

GeneratorStates = tuple[Any, Any, Any]

_current: tuple[int, int, int] | None = None  # seed, epoch, position of the sample that is being made


def seeds_of(seed: int, epoch: int, positions: np.ndarray) -> list[int]:
    """The seeds at these positions, for `seed_generators`. For 32 at once it takes 1 µs each; for one, 18."""
    drawn = uniforms(epoch_key(seed, epoch), positions, GENERATORS, 2)[:, 0]
    return [int(value) for value in (drawn * 2**32).tolist()]


def seed_generators(seed: int, epoch: int, position: int, value: int | None = None) -> None:
    """Seed the global generators for one sample, with `value` from `seeds_of`, if it was asked for several at once."""
    global _current
    _current = seed, epoch, position
    if value is None:
        [value] = seeds_of(seed, epoch, np.asarray([position], np.int64))
    import random  # here and below: most workers never need it

    random.seed(value)
    np.random.seed(value)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(value)  # of the CPU alone: torch.manual_seed would touch CUDA's too


def states() -> GeneratorStates:
    """The states of the global generators."""
    import random

    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch is not None else None


def put_back(saved: GeneratorStates) -> None:
    """Set the generators to these states; no sample is being made any more."""
    global _current
    _current = None
    set_states(saved)


def set_states(saved: GeneratorStates) -> None:
    """Set the generators to these states; the sample that is being made stays the same."""
    import random

    random.setstate(saved[0])
    np.random.set_state(saved[1])
    if saved[2] is not None:
        sys.modules["torch"].set_rng_state(saved[2])


@contextlib.contextmanager
def generators_preserved() -> Iterator[None]:
    """Put the global generators back afterwards, whatever was drawn or seeded."""
    saved = states()
    try:
        yield
    finally:
        put_back(saved)


def sample_being_made() -> tuple[int, int, int] | None:
    """Seed, epoch and position of the sample that is being made here, or of the first one of a pass; None: no `Loader`
    is making any."""
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
