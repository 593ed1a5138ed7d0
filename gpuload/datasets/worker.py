"""Which worker reads this dataset: `get_worker_info()`. Needs no torch; `gpuload.workers.main` sets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["THIS_PROCESS", "WorkerInfo", "get_worker_info", "swap"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The part of the work that is done here. Share ``rank * num_workers + id`` of ``world_size * num_workers`` is a
    part that no other worker of any rank has.

    Attributes:
        id, num_workers: this worker's number, and how many there are on this rank; 0 of 1 with ``num_workers=0``.
        rank, world_size: the `Loader`'s, given or found at `iter()`.
        seed: to seed generators of one's own with: 0 ≤ seed < 2**32, another in each epoch, worker and rank.
        dataset: the copy that this worker has.
    """

    id: int
    num_workers: int
    rank: int
    world_size: int
    seed: int
    dataset: Any = field(repr=False)


@dataclass(slots=True)
class Process:
    """The role of this process.

    Attributes:
        info: what `get_worker_info` returns.
        was_asked: whether anybody has read it, torch's or ours.
        is_worker: it may die, since another process then does its work.
    """

    info: WorkerInfo | None = None
    was_asked: bool = False
    is_worker: bool = False


THIS_PROCESS: Final = Process()


def get_worker_info() -> WorkerInfo | None:
    """Return which part of the work is done here, for an iterable dataset to give its share alone; None if no `Loader`
    is making samples in this process.

    Example:
        >>> from itertools import islice
        >>> from gpuload import Loader
        >>> class Squares:
        ...     def __iter__(self):
        ...         info = get_worker_info()
        ...         share, shares = info.rank * info.num_workers + info.id, info.world_size * info.num_workers
        ...         return (n * n for n in islice(range(12), share, None, shares))
        >>> loader = Loader(Squares(), batch_size=3, rank=1, world_size=2, device="cpu")
        >>> [batch.tolist() for batch in loader]
        [[1, 9, 25], [49, 81, 121]]
    """
    THIS_PROCESS.was_asked |= THIS_PROCESS.info is not None
    return THIS_PROCESS.info


def swap(info: WorkerInfo | None) -> WorkerInfo | None:
    """Say this from now on; returns what was said before."""
    before, THIS_PROCESS.info = THIS_PROCESS.info, info
    return before
