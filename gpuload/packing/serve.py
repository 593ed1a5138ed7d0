"""What a worker process of `pool` runs: parts that it is asked for, one after the other. While the disk still takes the
end of one, it begins the next.

What this imports, each worker does when it starts: 0.2 s of a CPU, half of that numpy.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from gpuload.packing.job import Job, begin_part
from gpuload.workers.job import receive
from gpuload.workers.protocol import arm_lifeline

__all__ = ["serve"]

TELL_S: Final = 0.2  # how often a worker says how far it is


def serve(end_descriptor: int, lifeline: int) -> None:
    """In a worker: wait for the job, and make the parts that are asked for, until nobody asks."""
    arm_lifeline(lifeline, os.getpid())
    with socket.socket(fileno=end_descriptor) as end, end.makefile("rb") as asked:
        _, descriptors, *_ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            return
        teller = _Teller(end)
        job: Job = receive(descriptors[0])
        with ThreadPoolExecutor(1, "gpuload-pack-end") as ending:
            before: Future[None] | None = None
            for line in asked:
                with teller.errors():
                    rest = begin_part(job, int(line), teller.report)
                    if before is not None:
                        before.result()  # one at most, for the memory that it holds
                    teller.tell({"read": int(line)})
                    before = ending.submit(teller.ended, rest)


class _Teller:
    """Tells the main process how far this one is, at any thread's word."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._lock = end, threading.Lock()
        self._samples = self._nbytes = 0
        self._told_at = time.monotonic()

    def report(self, samples: int, nbytes: int) -> None:
        with self._lock:
            self._samples += samples
            self._nbytes += nbytes
        if time.monotonic() - self._told_at > TELL_S:
            self.tell({})

    def tell(self, what: dict[str, Any]) -> None:
        with self._lock:
            told = {"done": self._samples, "bytes_done": self._nbytes, **what}
            self._samples, self._nbytes, self._told_at = 0, 0, time.monotonic()
            self._end.sendall(json.dumps(told).encode() + b"\n")

    def ended(self, rest: Callable[[], dict[str, Any]]) -> None:
        """Make the rest of a part, and tell its record."""
        with self.errors():
            self.tell(rest())

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Tell an error in the block; then the main process ends this one."""
        try:
            yield
        except Exception as error:
            self.tell({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
