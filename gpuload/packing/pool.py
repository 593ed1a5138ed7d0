"""Parts made by worker processes: those of the Loader, for which making a part is reading a sample. They are on this
machine, or on the machines of a Ray cluster, which need gpuload, and see the source and the set's folder under the same
paths, on a file system that they share: the samples go from there to the file, and only records come here.

How far workers of this machine are they note in a file; those of a cluster say so with each part.

(`concurrent.futures` was tried: a program without ``if __name__ == "__main__"`` ends in a BrokenProcessPool, an error
does not name what the process that was killed was at, and when the program itself is killed its processes write on,
while the job is taken up again.)
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Generator, Sequence
from typing import Any, Final

import numpy as np

from gpuload.decode import Decode
from gpuload.errors import GpuloadError, WorkerError
from gpuload.packing.plan import Job
from gpuload.packing.stores import Report, make_part
from gpuload.ring.packing import read_content
from gpuload.ring.ring import Ring, Slot
from gpuload.transforms import Chain
from gpuload.workers.job import Job as LoadingJob
from gpuload.workers.pool import RestartingEngine, WorkerPool
from gpuload.workers.protocol import Lost, Reply, Request
from gpuload.workers.ray import RayPool, RayWorkers, connected

__all__ = ["make_parts"]

SLOT_BYTES: Final = 64 << 10  # of an answer: a record, or an error with its traceback
SPARE_BYTES: Final = 256 << 20  # of an answer that is larger: a record has 8 bytes and a label for each sample
EACH: Final = 2  # parts that are asked for at once, for each worker: the next one begins without waiting
REPORT_S: Final = 0.2
PROGRESS: Final = "=qq"  # of each part: samples done, bytes written
NEVER_S: Final = 1e9  # a part may take long: no worker is stopped, or warned of, for that


class Parts:
    """The parts of a job as samples of a dataset: to read one is to make it, and what comes is its record, as JSON.

    Workers on this machine note in a file how far they are: samples done and bytes written of each part, int64.
    """

    def __init__(self, job: Job, *, is_local: bool) -> None:
        self.job, self._is_local = job, is_local
        if is_local:
            np.zeros((len(self), 2), np.int64).tofile(self._progress_file)

    @property
    def _progress_file(self) -> str:
        return os.path.join(self.job.work, "progress")

    def __len__(self) -> int:
        return len(self.job.bounds) - 1

    def __getitem__(self, number: int) -> str:
        if not os.path.isdir(self.job.work):
            raise GpuloadError(
                f"{self.job.folder!r} is not on the machine {os.uname().nodename!r} of the cluster; all of its "
                "machines have to see the set's folder (and the source) under one path, on a file system that they "
                "share"
            )
        done, written = 0, 0

        def report(samples: int, nbytes: int) -> None:
            nonlocal done, written
            done, written = done + samples, written + nbytes
            os.pwrite(progress.fileno(), struct.pack(PROGRESS, done, written), struct.calcsize(PROGRESS) * number)

        with open(self._progress_file if self._is_local else os.devnull, "r+b", buffering=0) as progress:
            return json.dumps(make_part(self.job, number, report))

    def counted(self) -> tuple[int, int]:
        """Return how many samples are done, and how many bytes are written."""
        samples, nbytes = np.fromfile(self._progress_file, np.int64).reshape(-1, 2).sum(0).tolist()
        return samples, nbytes


def make_parts(
    job: Job, numbers: Sequence[int], workers: int | None, report: Report, ray: str | None = None
) -> Generator[dict[str, Any], None, None]:
    """Make the parts with these numbers. Yields their records as they are done.

    Args:
        workers: how many processes; 0: this one. Of a cluster also None means one for each of its CPUs.
        ray: the address of a cluster, as for `RayWorkers`; None means this machine.

    Raises:
        GpuloadError, OSError: as `make_part`; what failed in a worker is a GpuloadError with its traceback.
        WorkerError: a process ended; the part that it was at is named. There is no such cluster.
    """
    if ray is None and not workers:
        for number in numbers:
            yield make_part(job, number, report)
        return
    if not numbers:
        return
    if ray is not None:
        cpus = connected(ray, "pack(ray=…)").cluster_resources().get("CPU", 1)
        workers = workers or max(1, int(cpus))
    parts, count = Parts(job, is_local=ray is None), min(workers or 1, len(numbers))
    loading = LoadingJob(parts, Chain(()), Decode(), 0)
    with contextlib.closing(Ring(EACH * count * SLOT_BYTES)) as ring:
        if ray is None:
            engine: RestartingEngine = WorkerPool(loading, count, ring, timeout_s=NEVER_S)
        else:
            engine = RayPool(loading, RayWorkers(count=count, address=ray), ring, timeout_s=NEVER_S)
        with contextlib.closing(engine):
            yield from _results(parts, list(reversed(numbers)), engine, ring, report, is_local=ray is None)


def _results(
    parts: Parts, waiting: list[int], engine: RestartingEngine, ring: Ring, report: Report, *, is_local: bool
) -> Generator[dict[str, Any], None, None]:
    requested: dict[int, tuple[int, Slot]] = {}  # by the request's number
    chunk, reported = 0, (0, 0)
    while waiting or requested:
        while waiting and (slot := ring.acquire(SLOT_BYTES)) is not None:
            chunk, row = chunk + 1, np.array([waiting[-1]])
            request = Request(chunk, 0, slot.offset, slot.capacity_bytes, row, row, spare_bytes=SPARE_BYTES)
            if not engine.submit(request):
                break
            requested[chunk] = waiting.pop(), slot
        if not requested:
            engine.recover_slots()  # of parts that were lost
        events = engine.gather(REPORT_S)
        if is_local:
            before, reported = reported, parts.counted()
            report(reported[0] - before[0], reported[1] - before[1])
        for event in events:
            number, slot = requested.pop(event.chunk)
            if isinstance(event, Lost):
                if event.row is not None:
                    span = parts.job.span(number)
                    raise WorkerError(
                        f"a worker process was {event.cause} while it made part {number}, samples {span.start} to "
                        f"{span.stop - 1}. What is done is kept: run the same again, with fewer workers if memory was "
                        "short"
                    )
                waiting.append(number)  # its worker had not begun it, or its machine died
                continue
            record = _record(event, ring, slot)
            if not is_local:
                report(len(parts.job.span(number)), record["bytes"])
            yield record


def _record(reply: Reply, ring: Ring, slot: Slot) -> dict[str, Any]:
    """Return the record of a part that is done. What failed in a worker is raised: an error of gpuload's by its words,
    any other one with its traceback."""
    memory = ring.bytes[slot.offset : slot.offset + slot.capacity_bytes] if reply.data is None else reply.data
    content = read_content(memory, reply.meta, reply.meta_at)
    ring.release(slot)
    if not content.errors:
        (column,) = content.values.values()
        return json.loads(column.values[0])
    _, failure = content.errors[0]
    if any(kind.endswith(":GpuloadError") for kind in failure.kinds):
        raise GpuloadError(failure.cause.partition(": ")[2])
    raise GpuloadError(f"{failure.cause}\n\nWhere it happened:\n{failure.traceback}")
