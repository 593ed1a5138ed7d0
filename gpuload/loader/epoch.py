"""One epoch of a `Loader`: the iterator that yields its batches, its progress, and where the next epoch begins.

An `Epoch` runs in the thread that iterates. `Cursor` and `Progress` do not depend on sessions or workers. A `Cursor` is
immutable: the loader replaces it in one assignment, so a Ctrl-C before the assignment changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpuload.loader.session import ITERATOR_ENDED, Session
from gpuload.order.place import Place
from gpuload.order.schedule import Schedule
from gpuload.workers.signals import deferred_signals

__all__ = ["Cursor", "Epoch", "Progress"]


@dataclass(slots=True)
class Progress:
    """The progress of an epoch. It outlives the iterator, so that a state can be saved after a ``break``.

    Attributes:
        start: the place where the epoch began.
        remaining_batches: the number of remaining batches; None means unknown.
        place: the place before which all samples are done. A batch that raised an error counts as done once another
            batch follows.
        has_begun: whether a batch has been yielded.
        end_reason: why the epoch yields no more batches, "" after the last batch; None while it may yield more.
        is_completed: whether the epoch was completed before its state was saved, so that it yields no batch.
    """

    start: Place
    remaining_batches: int | None
    place: Place
    has_begun: bool = False
    end_reason: str | None = None
    is_completed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether batches remain."""
        return self.end_reason is None and (self.remaining_batches is None or self.remaining_batches > 0)


class Epoch(Iterator[Any]):
    """An iterator over the batches of an epoch, or over its remaining batches after resuming.

    Args:
        loader: the loader, which the iterator keeps alive together with the session.
        session: makes the batches.
        schedule: defines the content of the batches.
        progress: where to begin; updated with each batch.
        epoch_sent: the argument that workers pass to the dataset's ``set_epoch()``, or -1 if they do not call it.
    """

    def __init__(
        self, loader: Any, session: Session, schedule: Schedule, progress: Progress, epoch_sent: int = -1
    ) -> None:
        self._loader, self._session = loader, session
        self._schedule, self._progress = schedule, progress
        batches = iter(()) if progress.is_completed else schedule.batches(progress.start)
        self._token = session.begin(batches, epoch_sent)

    def __len__(self) -> int:
        """Return the number of remaining batches; raise a TypeError if the dataset or sampler has no length."""
        if self._progress.remaining_batches is None:
            raise TypeError("the number of remaining batches is unknown, since the dataset or sampler has no length")
        return max(0, self._progress.remaining_batches)

    def __next__(self) -> Any:
        session, progress = self._session, self._progress
        session.check_process()
        while True:
            is_over = False
            with session.lock:
                if progress.end_reason is not None:
                    raise (
                        RuntimeError(ITERATOR_ENDED.format(progress.end_reason))
                        if progress.end_reason
                        else StopIteration
                    )
                if session.next_batch is None and not session.advance(self._loader.info):
                    is_over = True
                    progress.end_reason, progress.remaining_batches, progress.has_begun = "", 0, True
                    if progress.place.epoch == progress.start.epoch:
                        progress.place = self._schedule.place_after(progress.start.epoch)
            if is_over:
                if not self._loader.persistent_workers:
                    self._loader.close()
                raise StopIteration
            # From here on, no function is called, so neither a signal handler nor another thread can run. If a Ctrl-C
            # arrives before this line, the next `__next__` yields the batch.
            batch, session.next_batch = session.next_batch, None
            if batch is not None:
                progress.has_begun = True
                if progress.remaining_batches is not None:
                    progress.remaining_batches -= 1
                try:
                    if batch.error is not None:
                        raise batch.error
                    if batch.after is not None:
                        progress.place = batch.after
                    return batch.value
                finally:
                    del batch  # otherwise this frame and the error would form a reference cycle

    def __reduce__(self) -> Any:
        raise TypeError(
            "an iterator of a gpuload Loader can be neither copied nor pickled; copy the Loader, and resume with its "
            "state_dict() and load_state_dict()"
        )

    def __del__(self) -> None:
        # At the interpreter's exit this module's globals may already be cleared, and the session ends itself.
        if sys is None or sys.is_finalizing():
            return
        if self._progress.end_reason is None and hasattr(self, "_token"):
            self._progress.end_reason = "it was garbage-collected"
            with deferred_signals():
                self._session.drop_epoch(self._token)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a loader.

    Attributes:
        chosen_place: the place of the next epoch, if it was set after the last epoch began.
        is_loaded: whether `chosen_place` comes from a state.
        completed: the epoch whose last batch was the last one before the loaded state was saved; None if there is none.
        repeats_completed: whether `set_epoch` has named this epoch, so that the next `iter()` yields no batch.
        epoch: the number of the last epoch, or of the first epoch before it begins.
        last_progress: the progress of the last epoch; None before the first epoch.
        epoch_sent: the last argument of `set_epoch`; -1 if it was never called.
    """

    chosen_place: Place | None = None
    is_loaded: bool = False
    completed: int | None = None
    repeats_completed: bool = False
    epoch: int = 0
    last_progress: Progress | None = None
    epoch_sent: int = -1

    @property
    def next_place(self) -> Place:
        """Return the place where the next epoch begins."""
        if self.chosen_place is not None:
            return self.chosen_place
        if self.last_progress is None:
            return Place(0, 0)
        return self.last_progress.start if self._replaces_last else Place(self.last_progress.start.epoch + 1, 0)

    @property
    def _replaces_last(self) -> bool:
        """Whether the next epoch replaces the last one, which has yielded no batch: trainers call `iter()` just to
        inspect the iterator."""
        return self.chosen_place is None and self.last_progress is not None and not self.last_progress.has_begun

    def set_epoch(self, epoch: int, *, is_running: bool) -> Cursor:
        """Return the cursor whose next epoch has this number; keep the place if it is already in that epoch. While a
        session is running, `epoch` remains the number of its last epoch."""
        if self.is_loaded and epoch == self.completed:
            return replace(self, repeats_completed=True, epoch_sent=epoch)
        is_same = epoch == self.next_place.epoch
        if is_same and self._replaces_last:  # the epoch has already begun: Lightning calls iter() first
            return replace(self, epoch_sent=epoch)
        cursor = self.go_to(
            self.next_place if is_same else Place(epoch, 0), is_running=is_running, is_loaded=self.is_loaded and is_same
        )
        return replace(cursor, epoch_sent=epoch)

    def go_to(self, place: Place, *, is_running: bool, is_loaded: bool = False, completed: int | None = None) -> Cursor:
        """Return the cursor whose next epoch begins at this place."""
        return replace(
            self,
            chosen_place=place,
            is_loaded=is_loaded,
            completed=completed,
            repeats_completed=False,
            epoch=self.epoch if is_running else place.epoch,
        )

    def start_progress(self, schedule: Schedule) -> Progress:
        """Return the initial progress of the next epoch."""
        start = self.next_place
        if self.repeats_completed and self.completed is not None:
            return Progress(Place(self.completed, 0), 0, start, is_completed=True)
        remaining_batches = schedule.steps(start)
        return Progress(
            start,
            remaining_batches,
            Place(start.epoch + 1, 0) if remaining_batches == 0 else self._add_saved_state(start),
        )

    def begin(self, progress: Progress) -> Cursor:
        """Return the cursor after the epoch with this progress has begun."""
        return Cursor(epoch=progress.start.epoch, last_progress=progress, epoch_sent=self.epoch_sent)

    def end(self, reason: str) -> None:
        """End the last epoch early, if it has not ended."""
        if self.last_progress is not None and self.last_progress.end_reason is None:
            self.last_progress.end_reason = reason

    @property
    def is_open(self) -> bool:
        """Whether the last epoch's iterator is still in use and has batches left."""
        return self.last_progress is not None and self.last_progress.is_open

    @property
    def place(self) -> Place:
        """Return the place to save in a state: the loaded place, if any; otherwise the last epoch's place or, if that
        epoch has ended and a place was chosen, the next epoch's place."""
        if self.is_loaded:
            return self.next_place
        if self.last_progress is None or (self.chosen_place is not None and not self.last_progress.is_open):
            return self._add_saved_state(self.next_place)
        return self.last_progress.place

    @property
    def completed_epoch(self) -> int | None:
        """The epoch whose last batch was yielded last, if its iterator has not ended yet; else None. In a state, this
        is the only sign that a loop over this epoch has nothing left to do."""
        if self.is_loaded:
            return self.completed
        progress = self.last_progress
        if progress is None or self.chosen_place is not None or not progress.has_begun or progress.end_reason == "":
            return None
        return progress.start.epoch if progress.place.epoch > progress.start.epoch else None

    @property
    def is_untouched(self) -> bool:
        """Whether no state was loaded and the last epoch has not yielded a batch."""
        return not self.is_loaded and (self.last_progress is None or not self.last_progress.has_begun)

    def _add_saved_state(self, place: Place) -> Place:
        """Return the place. At the beginning of an epoch, add the state that the sampler or dataset had at the end of
        the previous epoch."""
        if self.last_progress is None or place != Place(place.epoch, 0):
            return place
        end = self.last_progress.place
        is_end = (end.sampler or {}).get("over") or (end.iterable_progress or {}).get("step") == 0
        return end if is_end and end.epoch == place.epoch else place
