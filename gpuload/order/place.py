"""The position in an epoch, and a worker's progress in a pass over an iterable dataset: plain values without torch,
used in the main process and in workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DIGESTS", "IterablePlace", "IterableStart", "Place"]

DIGESTS = 8  # number of first samples to compare, to detect workers and ranks that yield the same samples


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the next batch.

    Attributes:
        epoch: the number of the epoch.
        position: the number of positions of the epoch that all ranks together have finished.
        sampler: the state from which a user's sampler continues.
        iterable: the progress of each worker with an iterable dataset.
    """

    epoch: int
    position: int
    sampler: dict[str, Any] | None = None
    iterable: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class IterableStart:
    """The pass over an iterable dataset that a chunk belongs to, and the point where a worker starts it.

    Attributes:
        run: the number of the pass; each pass has a new iterator.
        worker: the number of the worker that reads the samples.
        samples: the number of samples read before this point.
        state: the ``state_dict()`` of "iterator" and "dataset" at this point, each pickled, or the reason for a failure
            as text. If it is None or has such a text, the worker reads the earlier samples again and drops them.
        stride, offset: sample n has the position n × stride + offset.
    """

    run: int
    worker: int
    samples: int
    state: dict[str, bytes | str] | None
    stride: int
    offset: int

    def position(self, number: int) -> int:
        """Return the position of sample `number`."""
        return number * self.stride + self.offset


@dataclass(slots=True)
class IterablePlace:
    """The progress of a worker's iterator after a chunk.

    Attributes:
        samples: the total number of samples read.
        ended: whether the iterator is exhausted.
        broken: whether a generator raised an exception, after which it cannot continue.
        state: as in `IterableStart`.
        digests: the digests of the first `DIGESTS` samples.
        read_worker_info: whether the dataset has read the result of get_worker_info().
    """

    samples: int
    ended: bool
    broken: bool = False
    state: dict[str, bytes | str] | None = None
    digests: tuple[bytes, ...] = ()
    read_worker_info: bool = False
