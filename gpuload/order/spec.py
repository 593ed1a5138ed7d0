"""What is asked for in one step of an epoch: made by a schedule, done by workers. Plain values, main process only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuload.order.place import IterablePlace, IterableStart, Place

__all__ = ["BatchSpec"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSpec:
    """The samples of one batch, and what follows it.

    For an iterable dataset it asks for a full batch. How many samples there are, and so `step`, `positions`, `indices`
    and `after`, is known when the batch is due: it and those that it waits for are done.

    Attributes:
        step: its number in the epoch.
        epoch: the epoch's number.
        positions: int64 (N,), in the epoch's order.
        indices: the dataset's, int64 (N,), or the keys that a user's sampler gave.
        valid: bool (N,), False for rows that only fill the batch up; None if there are none.
        after: the place that follows.
        may_be_dropped: it need not be given if all its samples failed: no other rank waits for it.
        iterable: the pass and worker, for an iterable dataset.
        queue: a batch waits for those before it of its own queue; of others it may come first.
        on_due: called with this spec, how many samples came (failed ones too), whether all of them failed, and how far
            each chunk has come; returns the batch's final spec, or None if it is not to be given.
        warning: what to tell the user with it.
    """

    step: int
    epoch: int
    positions: np.ndarray
    indices: np.ndarray | list[object]
    valid: np.ndarray | None = None
    after: Place | None = None
    may_be_dropped: bool = False
    iterable: IterableStart | None = None
    queue: int = 0
    on_due: Callable[[BatchSpec, int, bool, Sequence[IterablePlace]], BatchSpec | None] | None = None
    warning: str = ""
