"""Where a `Loader` is: where its next epoch begins, and how far the last one has come. Pure; no worker is needed.

A `Cursor` never changes: the loader replaces it in one assignment, so a ctrl-C before that leaves everything as it was.
A `Progress` belongs to one epoch, and counts its batches.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

from gpuload.order.place import Place
from gpuload.order.schedule import Schedule

__all__ = ["Cursor", "Progress"]


@dataclass(slots=True)
class Progress:
    """How far an epoch has come. It outlives the iterator: after a ``break`` a state is made from it.

    It began at the place `start`; `left` batches are still to come, None if not known. All before `place` is done; a
    batch that was raised as an error counts as done when another follows.
    """

    start: Place
    left: int | None
    place: Place
    begun: bool = False  # whether a batch was taken

    @classmethod
    def at(cls, schedule: Schedule, start: Place) -> Progress:
        """An epoch at a place, with nothing given from there yet."""
        left = schedule.steps(start)
        return cls(start, left, start if left != 0 else Place(start.epoch + 1, 0))


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a loader is.

    Attributes:
        next: where the next epoch begins.
        epoch: the number of the last one; before the first, the number it will have.
        last: how far the last one has come; None before the first.
        by_hand: `next` was set after the last one began; `loaded`: from a state.
        told_epoch: the last argument of `set_epoch`; -1 if it was never called.
        iterator: of the last one, as long as somebody has it.
    """

    next: Place
    epoch: int = 0
    last: Progress | None = None
    by_hand: bool = False
    loaded: bool = False
    told_epoch: int = -1
    iterator: weakref.ref[Any] | None = None

    def set_epoch(self, epoch: int, *, running: bool) -> Cursor:
        """The next epoch has this number; `next` stays if it is in that epoch already. `running`: there is a session,
        so `epoch` still names its last epoch."""
        if self.following.epoch == epoch != self.next.epoch:  # begun already: Lightning calls iter() first
            return replace(self, told_epoch=epoch)
        place = self.next if epoch == self.next.epoch else Place(epoch, 0)
        loaded = self.loaded and place is self.next
        return replace(self.go_to(place, running=running, loaded=loaded), told_epoch=epoch)

    def go_to(self, place: Place, *, running: bool, loaded: bool = False) -> Cursor:
        """The next epoch begins there."""
        return replace(self, next=place, by_hand=True, loaded=loaded, epoch=self.epoch if running else place.epoch)

    def start(self, schedule: Schedule) -> Progress:
        """The progress of an epoch that begins now. It replaces one from which nothing was taken: trainers call
        `iter()` just to look at the iterator."""
        begin = self.following
        progress = Progress.at(schedule, begin)
        if progress.place == begin:
            progress.place = self._as_saved(begin)
        return progress

    @property
    def following(self) -> Place:
        """Where an epoch that is begun now starts."""
        if self.last is not None and not self.last.begun and not self.by_hand:
            return self.last.start
        return self.next

    def begin(self, progress: Progress, iterator: Any) -> Cursor:
        """The epoch with this progress has begun."""
        epoch, told = progress.start.epoch, self.told_epoch
        return Cursor(Place(epoch + 1, 0), epoch, progress, told_epoch=told, iterator=weakref.ref(iterator))

    def end(self, reason: str) -> None:
        """End the last epoch early."""
        if (iterator := self._iterator) is not None:
            iterator.end(reason)

    @property
    def is_open(self) -> bool:
        """Whether somebody has its iterator, and batches are still to come."""
        return self._iterator is not None and self._iterator.is_open

    @property
    def place(self) -> Place:
        """What a state saves: the one that was loaded; else the last epoch's place or, if that is over and another was
        set by hand, the next's."""
        if self.loaded:
            return self.next
        if self.last is None or (self.by_hand and not self.is_open):
            return self._as_saved(self.next)
        return self.last.place

    @property
    def is_untouched(self) -> bool:
        """Whether no sample has been taken, neither by this loader nor, if an epoch is open, in that."""
        return not self.loaded and (self.last is None or (self.is_open and not self.last.begun))

    @property
    def _iterator(self) -> Any:
        return None if self.iterator is None else self.iterator()

    def _as_saved(self, place: Place) -> Place:
        """A place; if an epoch begins there, with the sampler's or dataset's state at the end of the one before."""
        if self.last is None or place != Place(place.epoch, 0):
            return place
        end = self.last.place
        is_end = (end.sampler or {}).get("over") or (end.iterable or {}).get("step") == 0
        return end if is_end and end.epoch == place.epoch else place
