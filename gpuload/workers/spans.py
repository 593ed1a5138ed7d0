"""What a worker does and when, written down for a trace: only where the environment names a folder for it.

``GPULOAD_SPANS=folder`` makes each worker write ``<parent>-<worker>-<pid>.jsonl`` there. The first line says who it is,
and how far the system's clock was ahead of the monotonic one; then there is a line for each chunk or plan, written when
it ends, so a worker that is killed loses its last one:

    {"parent": 41, "worker": 0, "pid": 42, "unix_minus_monotonic_ns": 1764000000000000000}
    {"name": "chunk", "chunk": 7, "attempt": 0, "epoch": 0, "position": 96, "rows": 16, "status": "DONE",
     "spans": [["idle", 1000, 1400], ["chunk", 1400, 9000], ["read", 1450, 1500], …]}

A span is a name, and nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share: where it begins, and where
it ends. "idle" is the time before, without work. ``python -m benchmarks.trace`` puts them into a trace of torch's
profiler.

Runs in workers. Without the variable this module is not imported, and nothing is timed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpuload.workers.job import Job
from gpuload.workers.protocol import Reply, Request
from gpuload.workers.runner import ChunkRunner

__all__ = ["NotingRunner", "Spans"]

TRIES: Final = 5  # at reading two clocks at the same time


class Spans:
    """The file of a worker, and the spans of the chunk that it is at.

    Raises:
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: str, worker: int) -> None:
        parent, pid = os.getppid(), os.getpid()
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = open(Path(folder, f"{parent}-{worker}-{pid}.jsonl"), "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise OSError(
                f"GPULOAD_SPANS={folder!r} must be a folder where workers can write their spans: {error}; name another "
                "one, or unset the variable"
            ) from error
        self.noted: list[tuple[str, int, int]] = []
        self._write({"parent": parent, "worker": worker, "pid": pid, "unix_minus_monotonic_ns": _clocks_apart_ns()})

    def end_chunk(self, facts: dict[str, Any]) -> None:
        """Write the spans since the last call, with what they belong to."""
        self._write({**facts, "spans": self.noted})
        self.noted = []

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")  # in one call: nothing is left behind if it is killed


def _clocks_apart_ns() -> int:
    """How far CLOCK_REALTIME is ahead of CLOCK_MONOTONIC: read between two looks at the latter."""
    found = []
    for _ in range(TRIES):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after - before, unix - (before + after) // 2))
    return min(found)[1]


def _let_note(spans: Spans, whose: Any, method: str, name: str) -> None:
    """Let the calls of an object's method be noted."""
    untimed = getattr(whose, method)

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.monotonic_ns()
        try:
            return untimed(*arguments, **options)
        finally:
            spans.noted.append((name, start, time.monotonic_ns()))

    setattr(whose, method, timed)


class NotingRunner(ChunkRunner):
    """A `ChunkRunner` whose spans are written to a folder."""

    def __init__(self, job: Job, folder: str, worker: int) -> None:
        super().__init__(job, guard_generators=False)
        self.spans = Spans(folder, worker)
        self._idle_since: int | None = time.monotonic_ns()  # None: at work
        decoder, source = self._reader._decoder, self.source
        for its, method, name in (
            (source, "open", "open"),  # where a dataset that fetches many reads all of a chunk
            (decoder, "header", "header"),
            (decoder, "decode", "decode"),
            (decoder, "decode_resized", "decode"),
            (decoder, "decode_mask", "decode"),
            (self, "_draw_regions", "draw"),
            (self, "_collate", "collate"),
            (self, "_reply", "pack"),
            *([] if self._rows is None else [(self._rows, "fill", "decode")]),  # all of a chunk
        ):
            _let_note(self.spans, its, method, name)
        self._open, source.open = source.open, self._opened

    def _opened(self, request: Request, touch: Callable[[], None] = lambda: None) -> Callable[[int], Any]:
        """What `Source.open` gives, noted each time."""
        sample = self._open(request, touch)

        def timed(row: int) -> Any:
            start = time.monotonic_ns()
            try:
                return sample(row)
            finally:
                self.spans.noted.append(("read", start, time.monotonic_ns()))

        return timed

    def run(self, request: Request, slot: np.ndarray, note: Callable[[int], None], wanted: Callable[[], bool]) -> Reply:
        if self._idle_since is None:  # a chunk that is begun anew
            return super().run(request, slot, note, wanted)
        self.spans.noted.append(("idle", self._idle_since, time.monotonic_ns()))
        self._idle_since = None
        start, name = time.monotonic_ns(), "plan" if request.plans else "chunk"
        reply = super().run(request, slot, note, wanted)
        self._idle_since = time.monotonic_ns()
        self.spans.noted.append((name, start, self._idle_since))
        self.spans.end_chunk(
            {
                "name": name,
                "chunk": request.chunk,
                "attempt": request.attempt,
                "epoch": request.epoch,
                "position": int(request.positions[0]) if len(request.positions) else None,
                "rows": len(request.positions),
                "status": reply.status.name,
            }
        )
        return reply
