"""The position in an epoch, and a worker's progress in a pass over an iterable dataset. Both are plain values that do
not depend on torch; the main process and workers exchange them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DIGESTED_SAMPLES", "IterablePlace", "IterableStart", "Place"]

# The number of samples at the start of a pass to compare, to detect workers or ranks that yield the same samples.
DIGESTED_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Place:
    """The position of the next batch.

    Attributes:
        epoch: the number of the epoch.
        position: the number of finished positions of the epoch, over all ranks.
        sampler: the saved state of a user's sampler, and the number of batches that it has yielded.
        iterable_progress: the progress of each worker in an iterable dataset, and the worker whose turn is next.
        division: within an epoch whose order depends on its division into batches, the options that define it.
    """

    epoch: int
    position: int
    sampler: dict[str, Any] | None = None
    iterable_progress: dict[str, Any] | None = None
    division: str | None = None


@dataclass(frozen=True, slots=True)
class IterableStart:
    """The pass over an iterable dataset that a chunk belongs to, and the point from which a worker starts the pass.

    Attributes:
        pass_number: identifies the pass; each pass has a new iterator.
        worker: the index of the worker that reads the samples.
        samples: the number of samples read before the starting point.
        state: a dict with the pickled ``state_dict()`` of the iterator (key "iterator") and of the dataset (key
            "dataset") at the starting point. A value is a message instead if the state could not be saved. If there is
            a message, or `state` is None, the worker reads the earlier samples again and drops them.
        stride, offset: sample n has the position n × stride + offset.
    """

    pass_number: int
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
        broken: whether the iterator raised an exception after which it cannot continue, as with a generator.
        state: as in `IterableStart`.
        digests: the digests of the first samples, up to `DIGESTED_SAMPLES`.
        read_worker_info: whether get_worker_info() was called in the worker.
    """

    samples: int
    ended: bool
    broken: bool = False
    state: dict[str, bytes | str] | None = None
    digests: tuple[bytes, ...] = ()
    read_worker_info: bool = False
