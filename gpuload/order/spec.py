"""What is asked for in one step of an epoch: a schedule says it, workers do it. Plain values, main process only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuload.order.place import IterablePlace, IterableStart, Place

__all__ = ["BatchSpec"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSpec:
    """The samples of one batch, and what follows it.

    Of an iterable dataset it asks for as many samples as there may be. How many there are, and so `step`, `positions`,
    `indices` and `after`, is known when the batch is due: all of it is done, and so are those before it.

    Attributes:
        step: its number in the epoch.
        epoch: the epoch's number.
        positions: int64 (N,), in the epoch's order.
        indices: the dataset's, int64 (N,), or the keys that a user's sampler gave.
        valid: bool (N,), False for rows that only fill the batch up; None where there are none.
        after: the place that follows.
        may_be_dropped: it need not be given where nothing of it is left: no other rank waits for it.
        iterable: whose samples of an iterable dataset these are.
        on_due: called with this, how many samples came (failed ones too), whether none of them is any good, and how far
            each chunk has come: what the batch is, or None where it shall not be given.
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
    on_due: Callable[[BatchSpec, int, bool, Sequence[IterablePlace]], BatchSpec | None] | None = None
    warning: str = ""
