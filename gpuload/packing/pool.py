"""Parts made by worker processes: those of the Loader, for which making a part is reading a sample.

A worker's answer says only that a part is done, or why it failed: the part's record is on the disk. How far workers
are they note in memory that they share with this process.

(`concurrent.futures` was tried: a program without ``if __name__ == "__main__"`` ends in a BrokenProcessPool, an error
does not name what the process that was killed was at, and when the program itself is killed its processes write on,
while the job is taken up again.)
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Generator, Sequence
from typing import Any, Final

import numpy as np

from gpuload.decode import Decode
from gpuload.errors import GpuloadError, WorkerError
from gpuload.packing.durable import read_json
from gpuload.packing.parts import Job, Report, make_part, record_path
from gpuload.ring.packing import read_content
from gpuload.ring.ring import Ring, Slot
from gpuload.transforms import Chain
from gpuload.workers.job import Job as LoadingJob
from gpuload.workers.pool import WorkerPool
from gpuload.workers.protocol import Lost, Reply, Request

__all__ = ["Parts", "make_parts"]

SLOT_BYTES: Final = 64 << 10  # of an answer: a number, or an error with its traceback
EACH: Final = 2  # parts that are asked for at once, for each worker: the next one begins without waiting
REPORT_S: Final = 0.2
NEVER_S: Final = 1e9  # a part may take long: no worker is stopped, or warned of, for that


class Parts:
    """The parts of a job as samples of a dataset: to read one is to make it.

    Attributes:
        progress: samples done and bytes written of each part, int64 in memory that all workers share.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.progress = multiprocessing.get_context("spawn").RawArray("q", 2 * (len(job.bounds) - 1))

    def __len__(self) -> int:
        return len(self.job.bounds) - 1

    def __getitem__(self, number: int) -> int:
        counted = np.frombuffer(self.progress, np.int64)[2 * number : 2 * number + 2]

        def report(samples: int, nbytes: int) -> None:
            counted[0] += samples
            counted[1] += nbytes

        make_part(self.job, number, report)
        return number


def make_parts(job: Job, numbers: Sequence[int], workers: int, report: Report) -> Generator[dict[str, Any], None, None]:
    """Make these parts, by so many processes, or by this one with 0. Yields their records as they are done.

    Raises:
        GpuloadError, OSError: as `make_part`; what failed in a worker is a GpuloadError with its traceback.
        WorkerError: a process ended; the part that it was at is named.
    """
    if not workers:
        for number in numbers:
            yield make_part(job, number, report)
        return
    if not numbers:
        return
    parts, count = Parts(job), min(workers, len(numbers))
    waiting = list(reversed(numbers))
    asked: dict[int, tuple[int, Slot]] = {}  # by the request's number
    chunk, reported = 0, np.zeros(2, np.int64)
    loading = LoadingJob(parts, Chain(()), Decode(), 0)
    with (
        contextlib.closing(Ring(EACH * count * SLOT_BYTES)) as ring,
        contextlib.closing(WorkerPool(loading, count, ring, timeout_s=NEVER_S)) as pool,
    ):
        while waiting or asked:
            while waiting and (slot := ring.acquire(SLOT_BYTES)) is not None:
                chunk, position = chunk + 1, np.array([waiting[-1]])
                if not pool.submit(Request(chunk, 0, slot.offset, slot.capacity_bytes, position, position)):
                    break
                asked[chunk] = waiting.pop(), slot
            events = pool.gather(REPORT_S)
            done = np.frombuffer(parts.progress, np.int64).reshape(-1, 2).sum(0)
            report(*(done - reported).tolist())
            reported = done
            for event in events:
                number, slot = asked.pop(event.chunk)
                if isinstance(event, Lost):
                    if event.row is not None:
                        raise _death(job, number, event)
                    waiting.append(number)
                    continue
                error = _error(event, ring, slot)
                ring.release(slot)
                if error is not None:
                    raise error
                yield read_json(record_path(job, number))


def _death(job: Job, number: int, lost: Lost) -> WorkerError:
    span = job.span(number)
    return WorkerError(
        f"a worker process was {lost.cause} while it made part {number}, samples {span.start} to {span.stop - 1}. What "
        "is done is kept: run the same again, with fewer workers if memory was short"
    )


def _error(reply: Reply, ring: Ring, slot: Slot) -> GpuloadError | None:
    """Return what failed in a worker: an error of gpuload's by its words, any other one with its traceback."""
    answer = ring.bytes[slot.offset : slot.offset + slot.capacity_bytes]
    errors = read_content(answer, reply.meta, reply.meta_at).errors
    if not errors:
        return None
    _, record = errors[0]
    if any(kind.endswith(":GpuloadError") for kind in record.kinds):
        return GpuloadError(record.cause.partition(": ")[2])
    return GpuloadError(f"{record.cause}\n\nWhere it happened:\n{record.traceback}")
