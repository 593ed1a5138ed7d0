"""What a worker process of `pool` runs: parts that it is asked for, one at a time.

What this imports, each worker does when it starts: 0.2 s of a CPU, half of that numpy.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from typing import Any, Final

from gpuload.packing.job import Job, make_part
from gpuload.workers.job import receive
from gpuload.workers.lifeline import arm_lifeline

__all__ = ["serve"]

TELL_S: Final = 0.2  # how often a worker says how far it is


def serve(end_descriptor: int, lifeline: int) -> None:
    """In a worker: wait for the job, and make the parts that are asked for, until nobody asks."""
    arm_lifeline(lifeline, os.getpid())
    with socket.socket(fileno=end_descriptor) as end, end.makefile("rb") as asked:
        _, descriptors, *_ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            return
        job: Job = receive(descriptors[0])
        for line in asked:
            state = [0, 0, time.monotonic()]

            def tell(record: dict[str, Any], state: list[Any] = state) -> None:
                told = {"done": state[0], "bytes_done": state[1], **record}
                state[:] = 0, 0, time.monotonic()
                end.sendall(json.dumps(told).encode() + b"\n")

            def report(samples: int, nbytes: int, state: list[Any] = state, tell: Any = tell) -> None:
                state[0] += samples
                state[1] += nbytes
                if time.monotonic() - state[2] > TELL_S:
                    tell({})

            try:
                tell(make_part(job, int(line), report))
            except Exception as error:
                tell({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
                return
