"""The same parts, made as tasks of a Ray cluster. Its machines need gpuload, and see the source and the set's folder
under the same paths, on a file system that they share. What comes back are records; the samples go from machine to
file, and not through the main process.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

from gpuload.errors import GpuloadError, WorkerError
from gpuload.packing.parts import Job, Report, make_part
from gpuload.workers.ray import connected

__all__ = ["make_parts_on_ray"]


def make_parts_on_ray(
    job: Job, numbers: Sequence[int], address: str, workers: int | None, report: Report
) -> Generator[dict[str, Any], None, None]:
    """Make these parts on the cluster at an address. Yields their records as they are done.

    Args:
        job, numbers, report: as for `pool.make_parts`; it is told of whole parts.
        address: as for ``ray.init``: ``"auto"`` is the cluster that this machine belongs to, ``"local"`` starts one
            here. Without effect if this program has called ``ray.init`` already.
        workers: how many parts are made at once; None: one for each CPU of the cluster.

    Raises:
        GpuloadError: as `make_part`, in the words of the task.
        WorkerError: there is no cluster; a task ended again and again.
    """
    ray = connected(address, "pack(ray=…)")
    at_once = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    task, sent = ray.remote(_part), ray.put(job)
    waiting, working = list(reversed(numbers)), {}
    try:
        while waiting or working:
            while waiting and len(working) < at_once:
                number = waiting.pop()
                working[task.options(name=f"gpuload pack: part {number}").remote(sent, number)] = number
            for done in ray.wait(list(working))[0]:
                number = working.pop(done)
                try:
                    record = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause
                    raise GpuloadError(
                        f"{type(cause).__name__}: {cause}\n\nWhere it happened, on the cluster:\n{error}"
                    ) from error
                except ray.exceptions.RayError as error:
                    raise WorkerError(
                        f"part {number}, samples {job.bounds[number]} to {job.bounds[number + 1] - 1}, could not be "
                        f"made on the cluster: {error}. What is done is kept: run the same again"
                    ) from error
                report(job.bounds[number + 1] - job.bounds[number], record["bytes"])
                yield record
    finally:
        for one in working:
            ray.cancel(one, force=True)


def _part(job: Job, number: int) -> dict[str, Any]:
    """On a machine of the cluster."""
    if not os.path.isdir(job.work):
        raise FileNotFoundError(
            f"{job.folder!r} is not on the machine {os.uname().nodename!r} of the cluster; all of its machines have "
            "to see the set's folder (and the source) under one path, on a file system that they share"
        )
    return make_part(job, number)
