"""One epoch of a `Loader`: the iterator that a loop takes its batches from, how far it has come, and where the next
epoch begins.

An `Epoch` runs in the thread that iterates. `Cursor` and `Progress` know no session and no worker. A `Cursor` never
changes: the loader replaces it in one assignment, so a ctrl-C before that leaves everything as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpuload.loader.session import OVER, Session
from gpuload.order.place import Place
from gpuload.order.schedule import Schedule
from gpuload.workers.signals import deferred_signals

__all__ = ["Cursor", "Epoch", "Progress"]


@dataclass(slots=True)
class Progress:
    """How far an epoch has come. It outlives the iterator: after a ``break`` a state is made from it.

    Attributes:
        start: the place where it began.
        left: batches that are still to come; None means not known.
        place: all before it is done. A batch that was raised as an error counts as done when another follows.
        begun: whether a batch was taken.
        ended: why it gives no more batches, "" after the last one; None means that it may give more.
    """

    start: Place
    left: int | None
    place: Place
    begun: bool = False
    ended: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether batches are still to come."""
        return self.ended is None and (self.left is None or self.left > 0)


class Epoch(Iterator[Any]):
    """The batches of an epoch, or of the rest of one.

    Args:
        loader: kept alive while the loop runs, and with it the session.
        session: makes the batches.
        schedule: says what is in them.
        progress: where it begins; updated with each batch that is given.
        epoch_sent: what workers give to the dataset's own ``set_epoch()``; -1: they do not call it.
    """

    def __init__(
        self, loader: Any, session: Session, schedule: Schedule, progress: Progress, epoch_sent: int = -1
    ) -> None:
        self._loader, self._session = loader, session
        self._schedule, self._progress = schedule, progress
        self._token = session.begin(schedule.batches(progress.start), epoch_sent)

    def __len__(self) -> int:
        """Batches that are still to come; TypeError if the dataset or sampler has no length."""
        if self._progress.left is None:
            raise TypeError("how many batches are still to come is not known: the dataset or sampler has no length")
        return max(0, self._progress.left)

    def __next__(self) -> Any:
        session, progress = self._session, self._progress
        session.check_process()
        while True:
            is_over = False
            with session.lock:
                if progress.ended is not None:
                    raise RuntimeError(OVER.format(progress.ended)) if progress.ended else StopIteration
                if session.ready is None and not session.advance(self._loader.info):
                    is_over = True
                    progress.ended, progress.left, progress.begun = "", 0, True
                    if progress.place.epoch == progress.start.epoch:
                        progress.place = self._schedule.end(progress.start.epoch)
            if is_over:
                if not self._loader.persistent_workers:
                    self._loader.close()
                raise StopIteration
            # No function is called from here on, so no signal handler and no other thread runs: a ctrl-C that came
            # before leaves the batch to the next `__next__`.
            ready, session.ready = session.ready, None
            if ready is not None:
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

    def __del__(self) -> None:
        # At the interpreter's exit this module's names may be gone already, and the session ends itself.
        if sys is None or sys.is_finalizing():
            return
        if self._progress.ended is None and hasattr(self, "_token"):
            self._progress.ended = "nobody has it any more"
            with deferred_signals():
                self._session.drop_epoch(self._token)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a loader is.

    Attributes:
        chosen: where the next epoch begins, if it was said after the last one began.
        loaded: `chosen` is from a state.
        epoch: the number of the last epoch; before the first, the number it will have.
        last: how far the last epoch has come; None before the first.
        epoch_sent: the last argument of `set_epoch`; -1 if it was never called.
    """

    chosen: Place | None = None
    loaded: bool = False
    epoch: int = 0
    last: Progress | None = None
    epoch_sent: int = -1

    @property
    def next(self) -> Place:
        """Where the next epoch begins."""
        if self.chosen is not None:
            return self.chosen
        if self.last is None:
            return Place(0, 0)
        return self.last.start if self._replaces_last else Place(self.last.start.epoch + 1, 0)

    @property
    def _replaces_last(self) -> bool:
        """Whether the next epoch takes the place of the last, from which nothing was taken: trainers call `iter()` just
        to look at the iterator."""
        return self.chosen is None and self.last is not None and not self.last.begun

    def set_epoch(self, epoch: int, *, running: bool) -> Cursor:
        """Return the cursor whose next epoch has this number; a place in that epoch stays. `running`: there is a
        session, so `epoch` still names its last epoch."""
        stays = epoch == self.next.epoch
        if stays and self._replaces_last:  # begun already: Lightning calls iter() first
            return replace(self, epoch_sent=epoch)
        cursor = self.go_to(self.next if stays else Place(epoch, 0), running=running, loaded=self.loaded and stays)
        return replace(cursor, epoch_sent=epoch)

    def go_to(self, place: Place, *, running: bool, loaded: bool = False) -> Cursor:
        """Return the cursor whose next epoch begins there."""
        return replace(self, chosen=place, loaded=loaded, epoch=self.epoch if running else place.epoch)

    def start(self, schedule: Schedule) -> Progress:
        """Return the progress of an epoch that begins now."""
        start = self.next
        left = schedule.steps(start)
        return Progress(start, left, Place(start.epoch + 1, 0) if left == 0 else self._as_saved(start))

    def begin(self, progress: Progress) -> Cursor:
        """Return the cursor once the epoch with this progress has begun."""
        return Cursor(epoch=progress.start.epoch, last=progress, epoch_sent=self.epoch_sent)

    def end(self, reason: str) -> None:
        """End the last epoch early, if it has not ended."""
        if self.last is not None and self.last.ended is None:
            self.last.ended = reason

    @property
    def is_open(self) -> bool:
        """Whether somebody has the last epoch's iterator, and batches are still to come."""
        return self.last is not None and self.last.is_open

    @property
    def place(self) -> Place:
        """The place that a state saves: the one that was loaded; else the last epoch's or, if that is over and another
        was chosen, the next epoch's."""
        if self.loaded:
            return self.next
        if self.last is None or (self.chosen is not None and not self.last.is_open):
            return self._as_saved(self.next)
        return self.last.place

    @property
    def is_untouched(self) -> bool:
        """Whether no sample has been taken, neither by this loader nor in its last epoch."""
        return not self.loaded and (self.last is None or not self.last.begun)

    def _as_saved(self, place: Place) -> Place:
        """Return a place; if an epoch begins there, with the sampler's or dataset's state at the end of the one
        before."""
        if self.last is None or place != Place(place.epoch, 0):
            return place
        end = self.last.place
        is_end = (end.sampler or {}).get("over") or (end.iterable or {}).get("step") == 0
        return end if is_end and end.epoch == place.epoch else place
