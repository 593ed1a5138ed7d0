"""What an engine tells the feed: how chunks ended. Main process only; plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gpuload.errors import WorkerError
from gpuload.workers.protocol import Reply, Request

__all__ = ["Engine", "Event", "Freed", "Lost"]


@dataclass(slots=True, frozen=True)
class Lost:
    """The worker that had this chunk died, at `row`, or before it noted a row (None).

    `cause` says why, `outside` whether by SIGKILL (memory ran out, or somebody killed it), `stack` where it crashed.
    """

    chunk: int
    attempt: int
    row: int | None
    cause: str
    slot_is_free: bool
    outside: bool = False
    stack: str = ""


@dataclass(slots=True, frozen=True)
class Freed:
    """The slot of this lost chunk is free."""

    chunk: int
    attempt: int


Event = Reply | Lost | Freed


class Engine(Protocol):
    """Does chunks: a `WorkerPool` or a `HomeEngine`.

    Attributes:
        waited_s: how long `gather` has waited for something to be done.
    """

    waited_s: float

    @property
    def broken(self) -> WorkerError | None: ...
    @property
    def ready(self) -> bool: ...

    def submit(self, request: Request) -> bool: ...
    def disown(self, before: int) -> None: ...
    def forgive(self) -> None: ...
    def gather(self, timeout_s: float) -> list[Event]: ...
    def counted(self) -> np.ndarray: ...  # what its workers did, as `gpuload.workers.counters` has it
    def close(self) -> None: ...
