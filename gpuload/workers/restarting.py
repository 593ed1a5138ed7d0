"""The base class of the engines whose workers can die."""

from __future__ import annotations

import time
import warnings

from gpuload.errors import WorkerError
from gpuload.ring.ring import Ring
from gpuload.workers.faults import Deaths
from gpuload.workers.protocol import Engine, Event

__all__ = ["RestartingEngine"]


class RestartingEngine(Engine):
    """Base class of engines whose workers can die: counts deaths and collects warnings.

    Attributes:
        pending_warnings: warnings for the next `collect_events` to issue, before it collects events: if a filter turns
            a warning into an exception, no event is lost.
    """

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.deaths = Deaths()
        self.pending_warnings: list[str] = []
        self._warned_topics: set[str] = set()
        self._closed = False

    def collect_events(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_usable()
            while self.pending_warnings:
                warnings.warn(self.pending_warnings.pop(0), RuntimeWarning, stacklevel=2)
            try:
                self._step(max(0.0, deadline - time.monotonic()), events)
            except WorkerError as error:
                self.failure = error
                raise
            if events or time.monotonic() >= deadline:
                return events

    def _step(self, wait_s: float, events: list[Event]) -> None:
        """Process the messages and deaths since the last call, waiting for up to `wait_s` seconds if there are none;
        add the events to `events`."""
        raise NotImplementedError

    def _check_usable(self) -> None:
        if self._closed or self._halted:
            raise RuntimeError("this Loader's workers are closed; create a new Loader")
        if self.failure is not None:
            raise WorkerError(f"this epoch has failed: {self.failure}")

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned_topics:
            self._warned_topics.add(topic)
            self.pending_warnings.append(text)
