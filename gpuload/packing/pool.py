"""Making parts in worker processes. They are the Loader's workers, for which each part is one sample of a dataset.

Workers run on this machine, or on the machines of a Ray cluster. The machines of a cluster need gpuload, and must see
the source and the set's folder under the same paths on a shared file system: each worker copies samples from the source
to a file, and returns only the record. Workers on this machine note their progress in a file; workers of a cluster
report it with each part.

(`concurrent.futures` was tried: without ``if __name__ == "__main__"``, a program fails with a BrokenProcessPool; errors
do not name the part that a killed process was making; and when the program itself is killed, its processes continue to
write while the job is resumed.)
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
from gpuload.packing.plan import PackJob
from gpuload.packing.stores import Report, make_part
from gpuload.ring.packing import read_content
from gpuload.ring.ring import Ring, Slot
from gpuload.transforms import Chain
from gpuload.workers.job import Job
from gpuload.workers.pool import WorkerPool
from gpuload.workers.protocol import Lost, Reply, Request
from gpuload.workers.ray import RayPool, RayWorkers, connect_ray
from gpuload.workers.restarting import RestartingEngine

__all__ = ["make_parts"]

SLOT_BYTES: Final = 64 << 10  # for a reply: a record, or an error with its traceback
SPARE_BYTES: Final = 256 << 20  # for a larger reply, since a record has 8 bytes and a label per sample
PARTS_IN_FLIGHT: Final = 2  # per worker, so that it starts its next part without waiting
REPORT_S: Final = 0.2
PROGRESS: Final = "=qq"  # for each part: samples done, bytes written
NEVER_S: Final = 1e9  # effectively no timeout and no warning, since a part may take a long time


class Parts:
    """The parts of a job, as a dataset: reading sample k makes part k and returns its record as JSON.

    Workers on this machine note their progress in a file: samples done and bytes written for each part, int64.
    """

    def __init__(self, job: PackJob, *, is_local: bool) -> None:
        self.job, self._is_local = job, is_local
        if is_local:
            np.zeros((len(self), 2), np.int64).tofile(self._progress_file)

    @property
    def _progress_file(self) -> str:
        return os.path.join(self.job.work_folder, "progress")

    def __len__(self) -> int:
        return len(self.job.bounds) - 1

    def __getitem__(self, part: int) -> str:
        if not os.path.isdir(self.job.work_folder):
            raise GpuloadError(
                f"{self.job.folder!r} does not exist on the machine {os.uname().nodename!r} of the cluster; put the "
                "set's folder (and the source) on a shared file system that all machines see under the same path"
            )
        samples_done, bytes_done = 0, 0

        def report(samples: int, nbytes: int) -> None:
            nonlocal samples_done, bytes_done
            samples_done, bytes_done = samples_done + samples, bytes_done + nbytes
            os.pwrite(
                progress.fileno(), struct.pack(PROGRESS, samples_done, bytes_done), struct.calcsize(PROGRESS) * part
            )

        with open(self._progress_file if self._is_local else os.devnull, "r+b", buffering=0) as progress:
            return json.dumps(make_part(self.job, part, report))

    def read_progress(self) -> tuple[int, int]:
        """Return the number of samples done, and the number of bytes written."""
        sample_count, nbytes = np.fromfile(self._progress_file, np.int64).reshape(-1, 2).sum(0).tolist()
        return sample_count, nbytes


def make_parts(
    job: PackJob, part_numbers: Sequence[int], workers: int | None, report: Report, ray: str | None = None
) -> Generator[dict[str, Any], None, None]:
    """Make the parts with these numbers. Yield the record of each part when it is done.

    Args:
        workers: the number of processes. On this machine, 0 and None make the parts in this process; for a cluster,
            they mean one process per CPU.
        report: called with the progress, see `Report`.
        ray: the address of a cluster, as for `RayWorkers`; None means this machine.

    Raises:
        GpuloadError, OSError: as in `make_part`; the error of a worker becomes a GpuloadError with its traceback.
        WorkerError: a process died (the message names its part), or the cluster cannot be reached.
    """
    if ray is None and not workers:
        for part_number in part_numbers:
            yield make_part(job, part_number, report)
        return
    if not part_numbers:
        return
    if ray is not None:
        cpus = connect_ray(ray, "pack(ray=…)").cluster_resources().get("CPU", 1)
        workers = workers or max(1, int(cpus))
    parts, worker_count = Parts(job, is_local=ray is None), min(workers or 1, len(part_numbers))
    loading = Job(parts, Chain(()), Decode(), 0)
    with contextlib.closing(Ring(PARTS_IN_FLIGHT * worker_count * SLOT_BYTES)) as ring:
        if ray is None:
            engine: RestartingEngine = WorkerPool(loading, worker_count, ring, timeout_s=NEVER_S)
        else:
            engine = RayPool(loading, RayWorkers(count=worker_count, address=ray), ring, timeout_s=NEVER_S)
        with contextlib.closing(engine):
            yield from _collect_records(parts, list(reversed(part_numbers)), engine, ring, report, is_local=ray is None)


def _collect_records(
    parts: Parts, pending: list[int], engine: RestartingEngine, ring: Ring, report: Report, *, is_local: bool
) -> Generator[dict[str, Any], None, None]:
    in_flight: dict[int, tuple[int, Slot]] = {}  # the part's number and the reply's slot, keyed by `Request.chunk`
    chunk, reported_progress = 0, (0, 0)
    while pending or in_flight:
        while pending and (slot := ring.acquire(SLOT_BYTES)) is not None:
            chunk, row = chunk + 1, np.array([pending[-1]])
            request = Request(chunk, 0, slot.offset, slot.capacity_bytes, row, row, spare_bytes=SPARE_BYTES)
            if not engine.submit(request):
                break
            in_flight[chunk] = pending.pop(), slot
        if not in_flight:
            engine.recover_slots()  # the slots of lost parts
        events = engine.collect_events(REPORT_S)
        if is_local:
            previous_progress, reported_progress = reported_progress, parts.read_progress()
            report(reported_progress[0] - previous_progress[0], reported_progress[1] - previous_progress[1])
        for event in events:
            part_number, slot = in_flight.pop(event.chunk)
            if isinstance(event, Lost):
                if event.row is not None:
                    span = parts.job.span(part_number)
                    raise WorkerError(
                        f"a worker process was {event.cause} while it made part {part_number}, samples {span.start} to "
                        f"{span.stop - 1}. Run the same command again, with fewer workers if memory was short "
                        "(finished parts are kept)"
                    )
                pending.append(part_number)  # the worker had not started the part, or its machine died
                continue
            record = _record(event, ring, slot)
            if not is_local:
                report(len(parts.job.span(part_number)), record["bytes"])
            yield record


def _record(reply: Reply, ring: Ring, slot: Slot) -> dict[str, Any]:
    """Return the record of a finished part.

    Raises:
        GpuloadError: the worker failed. The message is that of the worker's error, followed by its traceback unless it
            is a GpuloadError too.
    """
    reply_bytes = ring.bytes[slot.offset : slot.offset + slot.capacity_bytes] if reply.data is None else reply.data
    content = read_content(reply_bytes, reply.meta, reply.meta_at)
    ring.release(slot)
    if not content.errors:
        (column,) = content.values.values()
        return json.loads(column.values[0])
    _, failure = content.errors[0]
    if any(kind.endswith(":GpuloadError") for kind in failure.kinds):
        raise GpuloadError(failure.cause.partition(": ")[2])
    raise GpuloadError(f"{failure.cause}\n\nWhere it happened:\n{failure.traceback}")
