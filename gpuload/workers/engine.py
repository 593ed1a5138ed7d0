"""What an engine tells the feed: how chunks ended. Parent side only; plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpuload.errors import WorkerError
from gpuload.workers.protocol import Reply, Request

__all__ = ["Engine", "Event", "Freed", "Lost"]


@dataclass(slots=True, frozen=True)
class Lost:
    """The worker that had this chunk died, at `row`, or before it noted any (None).

    `cause` says of what, `outside` whether that came from outside (SIGKILL: memory ran out, or somebody), `stack` where
    it crashed.
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
    """What does the chunks: a `WorkerPool` or a `HomeEngine`."""

    @property
    def broken(self) -> WorkerError | None: ...

    def submit(self, request: Request) -> bool: ...
    def disown(self, before: int) -> None: ...
    def forgive(self) -> None: ...
    def gather(self, timeout_s: float) -> list[Event]: ...
    def close(self) -> None: ...
