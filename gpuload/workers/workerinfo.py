"""Says which worker this is: what `get_worker_info()` gives, gpuload's and torch's, and what `torch.distributed` does.

gpuload's own is said with num_workers=0 too. torch is told only in workers, and only if the user's dataset has imported
it: a worker that reads image files never does.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpuload.datasets.worker import WorkerInfo, note_that_it_was_asked, swap
from gpuload.rng.generators import seeds_of
from gpuload.rng.streams import WORKER_INIT_POSITIONS
from gpuload.workers.job import Job

__all__ = ["init_position", "introduce"]


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


def _tell_torch(worker: int, workers: int, seed: int, dataset: Any) -> None:
    from torch.utils.data._utils import worker as torch_worker

    class WorkerInfo(torch_worker.WorkerInfo):
        """torch's own, which notes that it was read."""

        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_"):
                note_that_it_was_asked()
            return super().__getattribute__(name)

    torch_worker._worker_info = WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
