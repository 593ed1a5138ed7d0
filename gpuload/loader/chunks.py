"""What does the chunks of a session, and what it is told. Runs in the main process; keeps nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gpuload.loader.options import Options
from gpuload.loader.placement import Placement
from gpuload.order.ranks import find_group
from gpuload.order.schedule import ranks_of
from gpuload.ring.ring import Ring
from gpuload.stage.ranges import DECODE, named
from gpuload.workers.changes import objects_in
from gpuload.workers.inherited import module_values
from gpuload.workers.inline import InProcessEngine
from gpuload.workers.job import Job
from gpuload.workers.pool import WorkerPool

if TYPE_CHECKING:
    from gpuload.workers.ray.pool import RayPool

__all__ = ["engine_for", "job_for"]


def job_for(options: Options, epoch: int, fusing: Any = None, *, whole: bool = False, device_share: float = 0.0) -> Job:
    """What workers are told; `epoch` is the first one's number, `fusing` plans batches, if workers do that, `whole` is
    for images that are kept, and the device decodes `device_share` of the samples."""
    return Job(
        options.order.dataset,
        options.chain,
        options.workers.decode,
        options.order.seed,
        collate_fn=options.batches.collate_fn,
        worker_init_fn=options.workers.worker_init_fn,
        single=options.order.single,
        plain=not len(options.chain) and options.chain.module is None,
        moves=options.chain.moves_pixels,
        epoch=epoch,
        **ranks_of(options.order),
        group=find_group(),
        fusing=fusing,
        whole=whole,
        device_share=device_share,
        module_values=_module_values(options) if options.workers.processes else {},
    )


def _module_values(options: Options) -> dict[str, dict[str, Any]]:
    """Return the values of the user's modules that workers' code refers to."""
    users = [options.batches.collate_fn, options.workers.worker_init_fn]
    for _, part in objects_in(options.order.dataset):
        users += [part, *getattr(part, "__dict__", {}).values()]
    return module_values(user for user in users if user is not None)


def engine_for(
    job: Job, options: Options, ring: Ring, count: int, placement: Placement
) -> WorkerPool | RayPool | InProcessEngine:
    """What does the chunks: processes of this machine, workers of a cluster, or this process."""
    workers = options.workers
    watch = {
        "timeout_s": workers.timeout,
        "max_restarts": workers.faults.max_restarts,
        "own_queues": options.order.iterable,
    }
    if workers.workers is not None:
        from gpuload.workers.ray.pool import RayPool  # few loaders have workers elsewhere

        return RayPool(job, workers.workers, ring, **watch)
    if not count:
        return InProcessEngine(job, ring, around=partial(named, DECODE))
    return WorkerPool(job, count, ring, most=workers.most, cpus_for=placement.cpus_for, **watch)
