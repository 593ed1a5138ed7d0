"""Where in an epoch, and how far in a worker's pass over an iterable dataset. Plain values, both sides; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DIGESTS", "IterablePlace", "IterableStart", "Place"]

DIGESTS = 8  # this many first samples are compared, to detect workers and ranks that give the same samples


@dataclass(frozen=True, slots=True)
class Place:
    """Where in which epoch the next batch is.

    Attributes:
        epoch: its number.
        position: how many of its positions all ranks together have finished.
        sampler: what a user's sampler needs to go on from there.
        iterable: how far each worker has come with an iterable dataset.
    """

    epoch: int
    position: int
    sampler: dict[str, Any] | None = None
    iterable: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class IterableStart:
    """The pass over an iterable dataset that a chunk belongs to, and where a worker begins it.

    Attributes:
        run: the number of the pass; another number is another iterator.
        worker: whose samples these are.
        samples: how many were taken before.
        state: the ``state_dict()`` of "iterator" and "dataset" after them, each pickled, or as text why that failed.
            None, or with a text: they are taken again and dropped.
        stride, offset: sample n has the position n × stride + offset.
    """

    run: int
    worker: int
    samples: int
    state: dict[str, bytes | str] | None
    stride: int
    offset: int

    def position(self, number: int) -> int:
        """The position of sample `number`."""
        return number * self.stride + self.offset


@dataclass(slots=True)
class IterablePlace:
    """How far a worker's iterator has come after a chunk.

    `samples` were taken in all; `ended`: there are no more; `broken`: a generator raised, and cannot go on. `state` is
    as in `IterableStart`. `digests` are of the first `DIGESTS` samples; `read_worker_info`: the
    dataset has read what get_worker_info() returned.
    """

    samples: int
    ended: bool
    broken: bool = False
    state: dict[str, bytes | str] | None = None
    digests: tuple[bytes, ...] = ()
    read_worker_info: bool = False
