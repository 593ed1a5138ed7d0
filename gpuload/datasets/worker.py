"""`get_worker_info()`, which describes the worker that reads a dataset, without torch. `gpuload.workers.main` sets the
value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["THIS_PROCESS", "WorkerInfo", "get_worker_info", "replace_worker_info"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The worker that reads a dataset. Share ``rank * num_workers + id`` of ``world_size * num_workers`` is unique
    among all workers of all ranks.

    Attributes:
        id, num_workers: this worker's index, and the number of workers on this rank; 0 and 1 with ``num_workers=0``.
        rank, world_size: the values that the `Loader` uses, from its arguments or detected at `iter()`.
        seed: a seed for your own generators, 0 ≤ seed < 2**32, which differs in each epoch, worker and rank.
        dataset: this worker's copy of the dataset.
    """

    id: int
    num_workers: int
    rank: int
    world_size: int
    seed: int
    dataset: Any = field(repr=False)


@dataclass(slots=True)
class ProcessState:
    """The state of this process.

    Attributes:
        info: the value that `get_worker_info` returns.
        worker_info_was_read: whether gpuload's or torch's `get_worker_info` was called.
        is_worker: whether the process is a worker, which may be killed: another process then takes over its work.
    """

    info: WorkerInfo | None = None
    worker_info_was_read: bool = False
    is_worker: bool = False


THIS_PROCESS: Final = ProcessState()


def get_worker_info() -> WorkerInfo | None:
    """Return the worker that runs this code, so that an iterable dataset can yield only its share; None if no `Loader`
    is reading samples in this process.

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
    THIS_PROCESS.worker_info_was_read |= THIS_PROCESS.info is not None
    return THIS_PROCESS.info


def replace_worker_info(info: WorkerInfo | None) -> WorkerInfo | None:
    """Replace the current worker info, and return the previous one."""
    previous, THIS_PROCESS.info = THIS_PROCESS.info, info
    return previous
