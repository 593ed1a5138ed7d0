"""The state of a session, right at every line: a ctrl-C, a finalizer, a fork or another thread may come in between.

Owned by a session, and by the finalizer of its `Loader`; it refers to neither. Work is done under the session's lock; a
session may be closed without it.
"""

from __future__ import annotations

import os

from gpuload.errors import GpuloadError

__all__ = ["NEWER", "OVER", "Life"]

OVER = "this iterator is over: {}"
NEWER = (
    "a newer iter() of its Loader was started. A Loader gives one epoch at a time: for two at once, as in "
    "zip(loader, loader) or nested loops, make a second Loader"
)


class Life:
    """The states of a session, and the transitions between them.

        open ⇄ at work ─▶ torn           `work`, `tear`
          any of these  ─▶ closing ─▶ over  `close`, `end`
          any of these  ─▶ buried         `bury`: the session itself is garbage

    There is no way back from the last three. They are kept in a set, to which one is added in a single operation, so
    nothing that runs at the same time undoes it.

    Attributes:
        epoch: the token of the current epoch; None between two.
    """

    def __init__(self) -> None:
        self.epoch: object = None
        self._torn = ""  # what interrupted the work on an epoch, with an event or a batch in hand
        self._reached: set[str] = set()
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """Another epoch can begin."""
        return not self._reached and not self._torn

    @property
    def is_torn(self) -> bool:
        """Work was interrupted, so feed and engine may be in any state."""
        return bool(self._torn)

    @property
    def is_closed(self) -> bool:
        """`close` has begun."""
        return bool(self._reached)

    @property
    def is_buried(self) -> bool:
        return "buried" in self._reached

    @property
    def is_elsewhere(self) -> bool:
        """This process was forked from the session's own."""
        return os.getpid() != self._pid

    def tear(self, reason: str) -> None:
        """Work was interrupted."""
        self._torn = reason

    def close(self) -> bool:
        """The end has begun; False if it had before."""
        first = not self._reached
        self._reached.add("closing")
        return first

    def end(self) -> bool:
        """The session's resources are freed now; False if they were before."""
        first = "over" not in self._reached
        self._reached.add("over")
        self.epoch = None
        return first

    def bury(self) -> None:
        """It was ended by the finalizer, after the session became garbage."""
        self._reached.add("buried")

    def work(self, *, broken: bool) -> Life:
        """Notice work that is interrupted: a ctrl-C may come between any two lines, with an event or a batch in hand.
        `broken`: the engine itself says why it cannot go on."""
        if self._reached:
            raise RuntimeError(OVER.format("its Loader was closed"))
        if self._torn and not broken:
            raise RuntimeError(
                OVER.format(
                    f"it was broken off by {self._torn}, and a batch may be lost. Begin a new epoch with iter()"
                )
            )
        self._torn = "an interrupt"
        return self

    def __enter__(self) -> None:
        """Work begins."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and self._reached:  # by a signal handler: the feed is empty, as at the end of an epoch
            error = RuntimeError("closed")
        if error is None or isinstance(error, GpuloadError | Warning):  # raised on purpose, with nothing in hand
            self._torn = ""
            return
        self.tear(type(error).__name__)
        if self._reached and isinstance(error, Exception):
            raise RuntimeError(OVER.format("its Loader was closed meanwhile")) from error
