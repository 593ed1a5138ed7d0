"""Where in an epoch, and where in a worker's pass over an iterable dataset. Plain values, on both sides; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["IterablePlace", "IterableStart", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in which epoch the next batch is.

    Attributes:
        epoch: its number.
        position: how many positions of it all ranks together are done with.
        sampler: what a user's sampler needs to go on from there.
        iterable: how far each worker has come with an iterable dataset.
    """

    epoch: int
    position: int
    sampler: dict[str, Any] | None = None
    iterable: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class IterableStart:
    """Which pass over an iterable dataset is meant, and where a worker that has not begun it yet begins.

    Attributes:
        run: the pass, counted by the loader; another number is another iterator.
        worker: whose samples these are.
        samples: so many of them were taken before.
        state: what the dataset's own ``state_dict()`` gave after them, or None: they are taken and dropped.
        stride, offset: its sample n has the position n × stride + offset.
    """

    run: int
    worker: int
    samples: int
    state: object
    stride: int
    offset: int

    def position(self, number: int) -> int:
        """Of one of its samples."""
        return number * self.stride + self.offset


@dataclass(slots=True)
class IterablePlace:
    """How far a worker has come with its iterator after a chunk.

    `samples` were taken from it in all; `ended`: there are no more; `broken`: a generator that raised, and can go on no
    more. `state` is what the dataset's own state_dict() gave. `digests` are of the first samples, and `asked` says
    whether somebody read what get_worker_info() says.
    """

    samples: int
    ended: bool
    broken: bool = False
    state: Any = None
    digests: tuple[bytes, ...] = ()
    asked: bool = False
