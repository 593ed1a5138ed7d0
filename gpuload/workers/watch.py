"""Workers that stay at one sample too long: killed after the timeout, warned of without one. Main process only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from gpuload.errors import visible
from gpuload.workers.process import WorkerProcess
from gpuload.workers.protocol import Board, Note, Request

__all__ = ["Watch", "at_sample"]

SLOW_SAMPLE_S = 60.0  # without a timeout, a warning names a sample that takes longer
WATCH_INTERVAL_S = 1.0


class Watch:
    """Looks at workers now and then.

    Args:
        timeout_s: a worker that stays at one sample longer is killed; 0: never.

    Attributes:
        interval_s: between two looks.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.interval_s = min(WATCH_INTERVAL_S, timeout_s / 4) if timeout_s else WATCH_INTERVAL_S
        self._looked_at = time.monotonic()
        self._warned: dict[int, Note | None] = {}  # what a worker was at when the last warning named it

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._looked_at > self.interval_s

    def forget(self, worker: int) -> None:
        """Its process is gone; the next one with its number is another."""
        self._warned.pop(worker, None)

    def look(self, team: Iterable[WorkerProcess], board: Board, flying: Mapping[tuple[int, int], Request]) -> list[str]:
        """Kill workers that are over the timeout. Returns the warnings to give: of slow ones, if there is none."""
        self._looked_at = time.monotonic()
        now, warnings = time.monotonic_ns(), []
        for worker in team:
            if worker.killed_for:
                continue
            if not worker.ready:
                warnings += self._slow_start(worker)
                continue
            note = board.read(worker.number)
            request = flying.get((note.chunk, note.attempt))
            if request is None or note.row >= len(request.positions):
                continue  # time counts only while it has a chunk
            seconds = (now - note.since_ns) / 1e9
            if seconds <= (self._timeout_s or SLOW_SAMPLE_S):
                continue
            if not self._timeout_s and self._warned.get(worker.number) == note:
                continue
            stack = worker.stack()
            if board.read(worker.number) != note:
                continue  # it has gone on
            if self._timeout_s:
                worker.kill(f"no progress for timeout={self._timeout_s:g} seconds", stack)
            else:
                self._warned[worker.number] = note
                warnings.append(
                    f"worker {worker.number} (process {worker.pid}) has been{at_sample(request, note.row)} for "
                    f"{seconds:.0f} seconds; timeout=… would end it. Where it is:\n{stack}"
                )
        return warnings

    def _slow_start(self, worker: WorkerProcess) -> list[str]:
        if time.monotonic() - worker.started_at <= SLOW_SAMPLE_S or worker.number in self._warned:
            return []
        self._warned[worker.number] = None
        return [
            f"worker {worker.number} (process {worker.pid}) has not been ready for {SLOW_SAMPLE_S:.0f} seconds: it "
            f"imports and unpacks the dataset. Where it is:\n{worker.stack()}"
        ]


def at_sample(request: Request, row: int) -> str:
    """Where a worker is, as a part of a sentence; empty if at no sample."""
    if row >= len(request.positions):
        return ""
    return f" at sample {visible(str(request.indices[row]))} (position {request.positions[row]})"
