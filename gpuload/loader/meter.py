"""The main process's own counters: what `next()` takes, and what for. They belong to a session, and only grow.

A meter is entered once for each ``next()``, and adds up in the thread that iterates; any thread may read it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

__all__ = ["Meter"]


class Meter:
    """Counters of a session; a context for the time within ``next()``.

    Args:
        engine: says how long it was waited for (`waited_s`).
        transfer: says how long the host waited for the device (`held_s`).

    Attributes:
        waited_s: seconds that ``next()`` waited for workers (with ``num_workers=0``: that it did their work).
        held_s: seconds that it waited for the device, which is behind.
        next_s: the other seconds within ``next()``.
        first_s: of `waited_s`, those before the first batch of an epoch.
        batches, images: that the loop was given.
    """

    def __init__(self, engine: Any, transfer: Any) -> None:
        self._engine, self._transfer = engine, transfer
        self.waited_s = self.held_s = self.next_s = self.first_s = 0.0
        self.batches = self.images = 0
        self._epochs_s, self._begun = 0.0, 0.0  # of epochs that ended; when the present one began, 0.0: none has
        self._first = False
        self._entered = (0.0, 0.0, 0.0)

    @property
    def time_s(self) -> float:
        """Seconds within epochs, up to now."""
        begun = self._begun
        return self._epochs_s + (perf_counter() - begun if begun else 0.0)

    def begin(self) -> None:
        """An epoch begins."""
        self.end()
        self._begun, self._first = perf_counter(), True

    def end(self) -> None:
        """It is over: what follows does not count. Idempotent."""
        if self._begun:
            self._epochs_s, self._begun = self.time_s, 0.0

    def given(self, images: int) -> None:
        """The loop gets a batch."""
        self.batches += 1
        self.images += images
        self._first = False

    def __enter__(self) -> None:
        self._entered = perf_counter(), self._engine.waited_s, self._transfer.held_s

    def __exit__(self, *exc_info: object) -> None:
        start, waited, held = self._entered
        waited, held = self._engine.waited_s - waited, self._transfer.held_s - held
        self.waited_s += waited
        self.held_s += held
        self.next_s += perf_counter() - start - waited - held
        if self._first:
            self.first_s += waited
