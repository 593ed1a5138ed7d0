"""A device that is this CPU, for tests of the calls made to a device. `tests/simulated` models asynchronous work."""

from __future__ import annotations

import contextlib

import torch


class Event:
    """An event that passes when `passed` is set, or when something waits for it."""

    def __init__(self, passed: bool = True):
        self.passed = passed

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


class TimedEvent(Event):
    """An event ten milliseconds after the previous one."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def elapsed_time(self, later: TimedEvent) -> float:
        return 10.0 * (later.number - self.number)


class Device:
    """A device that is this CPU: work issued on a stream completes immediately. It locks up to `allowed` memory ranges
    and then refuses. `event` makes an event from its stream and its number."""

    def __init__(self, allowed: int = 100, event=lambda stream, number: Event()):
        self.device = torch.device("cpu")
        self.allowed = allowed
        self.locked: set[int] = set()
        self.recorded_tensors: list[tuple[torch.Tensor, str]] = []
        self.current = "consumer"
        self.events: dict[str, list[Event]] = {"side": [], "consumer": []}
        self._event = event
        self.timed = 0

    def new_stream(self):
        return "side"

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def make_current(self, stream):
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    def record(self, stream):
        events = self.events.setdefault(stream, [])
        events.append(self._event(stream, len(events)))
        return events[-1]

    record_for_host = record

    def record_time(self, stream):
        self.timed += 1
        return TimedEvent(self.timed)

    def wait(self, stream, event):
        pass

    def keep(self, tensor, stream):
        self.recorded_tensors.append((tensor, stream))

    def synchronize(self, stream):
        pass

    def lock(self, address, nbytes):
        if len(self.locked) >= self.allowed:
            return 2
        self.locked.add(address)
        return 0

    def unlock(self, address):
        self.locked.remove(address)
