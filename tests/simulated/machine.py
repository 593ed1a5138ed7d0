"""Streams and events of the simulated device, and the policies that decide which stream runs first.

An operation is a function in the queue of its stream. It runs when the policy lets its stream run ahead, or when the
host waits for a later operation, and never before the operations that CUDA guarantees to run first. CUDA guarantees
nothing else, so an access that neither a stream's order nor an event protects gives wrong numbers in every run, not in
one of a thousand.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch

__all__ = ["DIRECTED", "POLICIES", "Event", "HostWait", "Machine", "Stream", "where_the_host_waits"]

CUDA: Final = 1  # torch's number of this device type
MODEL_FOLDERS: Final = (Path(__file__).parent, Path(__file__).parent.parent / "fakecuda")


class Stream:
    """A queue of operations that run in order, with the methods of `torch.Stream`.

    Attributes:
        device, device_index, device_type: the device of the stream.
        stream_id: the number of the stream.
        side: whether gpuload created the stream; otherwise, the consumer did.
        priority: negative if urgent, as in CUDA.
    """

    def __init__(self, machine: Machine, device: int, *, side: bool = False, priority: int = 0) -> None:
        self._machine = machine
        self.device, self.device_index, self.device_type = torch.device("cuda", device), device, CUDA
        self.stream_id = id(self)
        self.side = side
        self.priority = priority
        self.queue: deque[Callable[[], object] | Event] = deque()  # an event in the queue makes the stream wait

    def go(self) -> bool:
        """Run one operation; return False if there is none, or if the stream waits for an event."""
        if not self.queue:
            return False
        operation = self.queue[0]
        if isinstance(operation, Event):
            if not operation.happened:
                return False
            self.queue.popleft()
        else:
            self.queue.popleft()
            operation()
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return self._machine.record(self)

    def wait_event(self, event: Event) -> None:
        self._machine.stream_waits(self, event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._machine.wait("stream", self.record_event())


class Event:
    """A place in a stream, with the methods of `torch.Event`.

    Attributes:
        stream: the stream.
        is_blocking: whether the host sleeps while it waits for the event.
        happened: whether all operations before the event have run.
    """

    def __init__(self, machine: Machine, stream: Stream, *, is_blocking: bool = False) -> None:
        self._machine = machine
        self.stream = stream
        self.is_blocking = is_blocking
        self.happened = False
        stream.queue.append(self._happen)

    def _happen(self) -> None:
        self.happened = True

    def query(self) -> bool:
        self._machine.raise_error()
        return self.happened

    def synchronize(self) -> None:
        if not self.happened:
            self._machine.wait("blocking event" if self.is_blocking else "event", self)


class HostWait(NamedTuple):
    """A wait of the host for the device.

    Attributes:
        what: ``"event"``, ``"blocking event"`` (the host sleeps), ``"stream"``, or the operation that made the host
            wait.
        where, function, line: the file of gpuload or of the test, the function, and the line.
    """

    what: str
    where: str
    function: str
    line: int


# Whether a stream runs as soon as it can; otherwise it runs when the host waits for it. "random" chooses streams
# randomly.
POLICIES: Final[dict[str, Callable[[Stream], bool]]] = {
    "eager": lambda stream: True,
    "lazy": lambda stream: False,
    "side first": lambda stream: stream.side,
    "consumer first": lambda stream: not stream.side,
    "random": lambda stream: False,
}
DIRECTED: Final = ("lazy", "side first", "consumer first")


class Machine:
    """A host with several devices.

    Args:
        policy: a key of `POLICIES`.
        seed: the seed of the policy ``"random"``.
        devices: the number of devices.

    Attributes:
        waits: the waits of the host, in order.
        lock: held while streams and memory change, since several threads issue work.
        error: the exception of an operation, which the host's next wait raises, as with CUDA.
    """

    def __init__(self, policy: str, *, seed: int = 0, devices: int = 2) -> None:
        self._runs_ahead = POLICIES[policy]
        self._random = random.Random(seed) if policy == "random" else None
        self._current = threading.local()
        self.lock = threading.RLock()
        self.defaults = [Stream(self, number) for number in range(devices)]
        self.streams = list(self.defaults)
        self.waits: list[HostWait] = []
        self.error: Exception | None = None

    # -- streams ------------------------------------------------------------------------------------------------------

    def new_stream(self, device: int = 0, *, side: bool = False, priority: int = 0) -> Stream:
        stream = Stream(self, device, side=side, priority=priority)
        self.streams.append(stream)
        return stream

    @property
    def current_device(self) -> int:
        return getattr(self._current, "device", 0)

    def set_device(self, device: int) -> None:
        self._current.device = device

    def current_stream(self, device: int | None = None) -> Stream:
        """Return this thread's current stream on a device, by default the current device."""
        device = self.current_device if device is None else device
        return getattr(self._current, f"stream{device}", self.defaults[device])

    def set_stream(self, stream: Stream) -> None:
        """Make a stream and its device current in this thread."""
        self.set_device(stream.device.index)
        setattr(self._current, f"stream{stream.device.index}", stream)

    @contextlib.contextmanager
    def on_device(self, device: int | None) -> Iterator[None]:
        """Make a device current within a context; None changes nothing."""
        previous = self.current_device
        self.set_device(previous if device is None else device)
        try:
            yield
        finally:
            self.set_device(previous)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream and its device current within a context."""
        with self.on_device(stream.device.index):
            previous = self.current_stream(stream.device.index)
            self.set_stream(stream)
            try:
                yield
            finally:
                self.set_stream(previous)

    # -- order --------------------------------------------------------------------------------------------------------

    def issue(self, stream: Stream, operation: Callable[[], object]) -> None:
        """Queue an operation, and let streams run ahead."""
        with self.lock:
            stream.queue.append(operation)
            self.advance()

    def advance(self) -> None:
        """Let streams run as far as the policy and events allow."""
        if self._random is not None:
            for _ in range(self._random.randrange(4)):
                self._step(self._random.choice(self.streams))
            return
        streams_ahead = [stream for stream in self.streams if self._runs_ahead(stream)]
        while sum(self._step(stream) for stream in streams_ahead):  # the streams take turns
            pass

    def record(self, stream: Stream, *, is_blocking: bool = False) -> Event:
        with self.lock:
            event = Event(self, stream, is_blocking=is_blocking)
            self.advance()
        return event

    def stream_waits(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, Event), "a generic stream cannot wait for an event of torch.cuda"
        with self.lock:
            stream.queue.append(event)
            self.advance()

    def wait(self, what: str, event: Event) -> None:
        """Let the host wait for an event, and run only the operations that the event needs."""
        self.waits.append(HostWait(what, *where_the_host_waits()))
        self.reach(event)
        self.raise_error()

    def reach(self, event: Event) -> None:
        """Run the operations that an event needs."""
        with self.lock:
            needed = [event]
            while needed:
                last_needed = needed[-1]
                if last_needed.happened:
                    needed.pop()
                elif not self._step(last_needed.stream):
                    blocking_event = last_needed.stream.queue[0]
                    assert isinstance(blocking_event, Event)
                    assert blocking_event not in needed, "streams wait for each other"
                    needed.append(blocking_event)

    def synchronize(self) -> None:
        """Run all queued operations, for a test; `waits` does not count this."""
        for stream in self.streams:
            self.reach(self.record(stream))
        self.raise_error()

    def raise_error(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise RuntimeError(f"an operation on the device failed: {error}") from error

    def _step(self, stream: Stream) -> bool:
        try:
            with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
                return stream.go()
        except Exception as error:
            self.error = self.error or error
            return True


def where_the_host_waits() -> tuple[str, str, int]:
    """Return the file, function and line of the innermost frame outside torch, the model and device.py."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        is_model = path.parent in MODEL_FOLDERS and not path.name.startswith("test_")
        if not is_model and "torch" not in path.parts and path.name not in ("contextlib.py", "device.py"):
            break
        frame = frame.f_back
    return Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno
