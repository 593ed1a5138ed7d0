"""Worker processes that make parts. The main process hands out numbers, the next one when the samples of the one before
are read, and hears records.

A worker is a fresh interpreter, which runs `serve`. It may start before the job is known, which reaches it in a memfd,
through a pair of sockets; numbers and records follow as lines of JSON. It holds the read end of a pipe that nobody
writes to, so the kernel kills it with the main process: no worker of a job that was killed writes on while the job is
taken up again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from gpuload.errors import GpuloadError, WorkerError
from gpuload.packing.job import Job, Report, make_part
from gpuload.workers.inherited import import_path
from gpuload.workers.process import KEEP_MEMORY, check_platform, environment_of
from gpuload.workers.protocol import arm_lifeline
from gpuload.workers.shipping import ship

__all__ = ["Worker", "make_parts", "started"]

PROGRAM: Final = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
from gpuload.packing.serve import serve
serve(*given["descriptors"])
"""


@contextlib.contextmanager
def started(count: int) -> Iterator[list[Worker]]:
    """So many processes, for a job that is not known yet: to start takes them 0.2 s. They end with the context."""
    if count:
        check_platform()
    with contextlib.ExitStack() as undo:
        yield [undo.enter_context(Worker()) for _ in range(count)]


def make_parts(
    job: Job, numbers: Sequence[int], workers: int, report: Report, early: Sequence[Worker] = ()
) -> Generator[dict[str, Any], None, None]:
    """Make these parts, by so many processes, or by this one with 0. Yields their records as they are done.

    Args:
        job: the job; numbers: of its parts.
        workers: how many processes; early: those of them that were started already.
        report: called with how far they are.

    Raises:
        GpuloadError, OSError: as `make_part`, by a process's words.
        WorkerError: a process ended; what it was at is named.
    """
    if not workers:
        for number in numbers:
            yield make_part(job, number, report)
        return
    check_platform()
    waiting = list(reversed(numbers))
    with contextlib.ExitStack() as undo:
        shared = ship(job, {})
        for descriptor in shared:
            undo.callback(os.close, descriptor)
        crew = [] if shared[1:] else list(early)  # shared memory is inherited
        working: dict[int, Worker] = {}
        for place in range(min(workers, len(numbers))):
            worker = crew[place] if place < len(crew) else undo.enter_context(Worker(shared[1:]))
            worker.begin(shared[0])
            worker.give(waiting.pop())
            working[worker.end.fileno()] = worker
        poll = select.poll()
        for descriptor in working:
            poll.register(descriptor, select.POLLIN)
        while any(worker.numbers for worker in working.values()):
            for descriptor, _ in poll.poll():
                worker = working[descriptor]
                if (heard := worker.hear(job)) is None:
                    poll.unregister(descriptor)
                for told in heard or ():
                    if "error" in told:
                        raise GpuloadError(f"{told['error']}\n\nWhere it happened:\n{told['traceback']}")
                    report(told.pop("done"), told.pop("bytes_done"))
                    if "read" in told and waiting:
                        worker.give(waiting.pop())
                    elif "part" in told:
                        worker.numbers.remove(told["part"])
                        yield told


class Worker:
    """A process at work on a part, and on the end of the one before.

    Args:
        shared: descriptors of shared memory that its job refers to.

    Attributes:
        numbers: of the parts that it has not told the records of, the last one given last.
    """

    def __init__(self, shared: Sequence[int] = ()) -> None:
        self.numbers: list[int] = []
        self.end, theirs = socket.socketpair()
        for end in (self.end, theirs):  # whatever socket.setdefaulttimeout() says
            end.setblocking(True)
        lifeline, self._lifeline = os.pipe()
        descriptors = [theirs.fileno(), lifeline]
        given = json.dumps({"path": import_path(), "descriptors": descriptors})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, given],
                stdin=subprocess.DEVNULL,
                pass_fds=(*shared, *descriptors),
                env=environment_of(KEEP_MEMORY),
            )
            arm_lifeline(lifeline, self._process.pid)
        finally:
            theirs.close()
            os.close(lifeline)
        self._heard = b""

    def begin(self, job_descriptor: int) -> None:
        """Tell it the job; once."""
        with contextlib.suppress(OSError):  # it has ended, which is noticed as it is heard
            socket.send_fds(self.end, [b"j"], [job_descriptor])

    def give(self, number: int) -> None:
        self.numbers.append(number)
        with contextlib.suppress(OSError):  # it has ended, which is noticed as it is heard
            self.end.sendall(b"%d\n" % number)

    def hear(self, job: Job) -> list[dict[str, Any]] | None:
        """What it has said since. If it has ended, WorkerError; or None, if it had nothing to do."""
        try:
            data = self.end.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data and not self.numbers:
            return None
        if not data:
            status = self._process.wait()
            why = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            number = self.numbers[-1]
            raise WorkerError(
                f"a worker process {why} while it made part {number}, samples {job.bounds[number]} to "
                f"{job.bounds[number + 1] - 1}. What is done is kept: run the same again, with fewer workers if "
                "memory was short"
            )
        *lines, self._heard = (self._heard + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end.close()
        os.close(self._lifeline)
        self._process.kill()
        self._process.wait()
