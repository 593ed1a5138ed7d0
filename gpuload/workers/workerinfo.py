"""Which worker this is: what `get_worker_info()` says, gpuload's and torch's, and what `torch.distributed` answers.

gpuload's own needs no torch, and is there with num_workers=0 too. torch is told only in workers, and only if the user's
dataset has imported it: a worker that reads image files never does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.rng.generators import seeds_of
from gpuload.rng.streams import WORKER_INIT_POSITIONS
from gpuload.workers.job import Job

__all__ = ["WorkerInfo", "get_worker_info", "init_position", "introduce", "swap", "worker_info_was_asked"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Which part of the work is done here. Share ``rank * num_workers + id`` of ``world_size * num_workers`` is a part
    that no other worker of any rank has.

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


_current: WorkerInfo | None = None
_asked = False


def get_worker_info() -> WorkerInfo | None:
    """Which part of the work is done here, for an iterable dataset to give its share alone; None if no `Loader` is
    making samples in this process.

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
    global _asked
    _asked = _asked or _current is not None
    return _current


def worker_info_was_asked() -> bool:
    """Whether any of it was read."""
    return _asked


def init_position(rank: int, worker: int) -> int:
    """The position that a worker's `worker_init_fn` draws at."""
    return WORKER_INIT_POSITIONS[rank << 32 | worker]


def introduce(
    job: Job,
    worker: int,
    workers: int,
    epoch: int,
    position: int | None = None,
    *,
    in_worker: bool = True,
    needed: bool = False,
) -> None:
    """Say from now on that this is worker `worker` of `workers`.

    Args:
        job: has the dataset, its seed, and the ranks.
        epoch, position: what the seed is of; default: the worker's own position.
        in_worker: tell torch, too.
        needed: import torch for it; else that is done only if torch is already imported.
    """
    position = init_position(job.rank, worker) if position is None else position
    [seed] = seeds_of(job.seed, epoch, np.array([position], np.int64))
    swap(WorkerInfo(worker, workers, job.rank, job.world_size, seed, job.dataset))
    if in_worker and (needed or "torch" in sys.modules):
        _tell_torch(worker, workers, seed, job.dataset)
        if job.group is not None:
            from gpuload.workers.group import answer_as

            answer_as(*job.group)


def swap(info: WorkerInfo | None) -> WorkerInfo | None:
    """Say this from now on; returns what was said before."""
    global _current
    before, _current = _current, info
    return before


def _tell_torch(worker: int, workers: int, seed: int, dataset: Any) -> None:
    from torch.utils.data._utils import worker as torch_worker

    class WorkerInfo(torch_worker.WorkerInfo):
        """torch's own, which notes that it was read."""

        def __getattribute__(self, name: str) -> Any:
            global _asked
            if not name.startswith("_"):
                _asked = True
            return super().__getattribute__(name)

    torch_worker._worker_info = WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
