"""How long the device takes for copies and transforms, by events on the transfer's stream: of one batch in `EVERY`, as
an event that keeps the time costs the host a few µs. Nothing waits for them: they are looked at when they have passed.

Runs in the main process; belongs to the transfer.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

__all__ = ["EVERY", "DeviceTimes"]

EVERY: Final = 8


class DeviceTimes:
    """The times of one device.

    Args:
        device: a `gpuload.stage.accelerator.Accelerator`.

    Attributes:
        batches: how many were measured; copy_s and stage_s: what they took.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._coming = 0  # batches
        self._marks: list[Any] | None = None  # of the batch in work, if it is measured
        self._measured: deque[list[Any]] = deque()
        self.batches = 0
        self.copy_s = self.stage_s = 0.0

    def begin(self, stream: Any) -> None:
        """A batch begins."""
        measure = self._coming % EVERY == 0
        self._coming += 1
        self._marks = [] if measure else None
        self.mark(stream)

    def mark(self, stream: Any) -> None:
        """One of its steps was issued: nothing yet, its copies, all of it."""
        if self._marks is None:
            return
        event = self._device.record_time(stream)
        self._marks = None if event is None else [*self._marks, event]

    def end(self, stream: Any) -> None:
        """All of it was issued."""
        self.mark(stream)
        marks, self._marks = self._marks, None
        if marks is not None and len(marks) == 3:
            self._measured.append(marks)
        while self._measured and self._measured[0][-1].query():
            begun, copied, ended = self._measured.popleft()
            self.copy_s += begun.elapsed_time(copied) / 1e3
            self.stage_s += copied.elapsed_time(ended) / 1e3
            self.batches += 1
