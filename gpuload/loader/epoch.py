"""The iterator of one epoch, from which a loop takes its batches. Runs in the thread that iterates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from gpuload.loader.cursor import Progress
from gpuload.loader.session import OVER, Session
from gpuload.order.schedule import Schedule
from gpuload.workers.signals import deferred_signals

__all__ = ["Epoch"]


class Epoch(Iterator[Any]):
    """One epoch, or the rest of one.

    Args:
        loader: kept alive while the loop runs, and with it the session.
        session: makes the batches.
        schedule: says what is in them.
        progress: where it begins; updated with each batch that is given.
        info: give `BatchInfo` too.
        persistent: the session outlives the epoch.
        told_epoch: what workers give to the dataset's own ``set_epoch()``; -1: they do not call it.
    """

    def __init__(
        self,
        loader: Any,
        session: Session,
        schedule: Schedule,
        progress: Progress,
        *,
        info: bool,
        persistent: bool,
        told_epoch: int = -1,
    ) -> None:
        self._loader = loader
        self._session = session
        self._schedule = schedule
        self._progress = progress
        self._info = info
        self._persistent = persistent
        self._ended: str | None = None  # "": it came to its end
        self._token = session.begin(schedule.batches(progress.start), told_epoch)

    def __len__(self) -> int:
        """Batches that are still to come; TypeError if the dataset or sampler has no length."""
        if self._progress.left is None:
            raise TypeError("how many batches are still to come is not known: the dataset or sampler has no length")
        return max(0, self._progress.left)

    def __next__(self) -> Any:
        session = self._session
        session.check_process()
        while True:
            over = False
            with session.lock:
                if self._ended is not None:
                    raise RuntimeError(OVER.format(self._ended)) if self._ended else StopIteration
                if session.ready is None and not session.advance(self._info):
                    self._ended, over = "", True
                    self._progress.left, self._progress.begun = 0, True
                    if self._progress.place.epoch == self._progress.start.epoch:
                        self._progress.place = self._schedule.end(self._progress.start.epoch)
            if over:
                if not self._persistent:
                    self._loader.close()
                raise StopIteration
            # No function is called from here on, so no signal handler and no other thread runs: a ctrl-C that came
            # before leaves the batch to the next `__next__`.
            ready, session.ready = session.ready, None
            if ready is not None:
                progress = self._progress
                progress.begun = True
                if progress.left is not None:
                    progress.left -= 1
                try:
                    if ready.error is not None:
                        raise ready.error
                    if ready.after is not None:
                        progress.place = ready.after
                    return ready.value
                finally:
                    del ready  # else the error would refer to itself, through this frame

    @property
    def is_open(self) -> bool:
        """Whether batches are still to come."""
        return self._ended is None and (self._progress.left is None or self._progress.left > 0)

    def end(self, reason: str) -> None:
        """End it early."""
        if self._ended is None:
            self._ended = reason

    def __del__(self) -> None:
        # At the interpreter's exit this module's names may be gone already, and the session ends itself.
        if sys is None or sys.is_finalizing():
            return
        if self._ended is None and hasattr(self, "_token"):
            with deferred_signals():
                self._session.drop_epoch(self._token)
