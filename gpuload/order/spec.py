"""The request for one batch, which a schedule creates and workers fulfil: plain values, used only in the main
process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuload.order.place import IterablePlace, IterableStart, Place

__all__ = ["BatchSpec"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSpec:
    """The samples of one batch, and the place after it.

    For an iterable dataset, the spec requests a full batch. The actual number of samples, and so the final `step`,
    `positions`, `indices` and `after`, are known only when the batch is due, which means that the batch and all earlier
    batches of its queue are done.

    Attributes:
        step: the index of the batch in the epoch.
        epoch: the number of the epoch.
        positions: int64 (N,), the positions in the epoch's order.
        indices: int64 (N,), the dataset's indices, or the keys from a user's sampler.
        valid: bool (N,), False for padding samples; None if all samples are valid.
        after: the place after the batch.
        size_hw: the (height, width) that the schedule gives the batch's images, which `T.bucket_size` stands for; None
            if it gives none.
        may_be_dropped: whether the batch can be dropped if all its samples failed, since no other rank waits for it.
        iterable: the pass and the worker, for an iterable dataset.
        queue: the index of the batch's queue. A batch waits for the earlier batches of its queue, but can overtake
            batches of other queues.
        on_due: a function called with this spec, the number of samples (including failed ones), whether all samples
            failed, and the progress after each chunk. Returns the final spec, or None to drop the batch.
        warning: a warning to issue with the batch.
    """

    step: int
    epoch: int
    positions: np.ndarray
    indices: np.ndarray | list[object]
    valid: np.ndarray | None = None
    after: Place | None = None
    size_hw: tuple[int, int] | None = None
    may_be_dropped: bool = False
    iterable: IterableStart | None = None
    queue: int = 0
    on_due: Callable[[BatchSpec, int, bool, Sequence[IterablePlace]], BatchSpec | None] | None = None
    warning: str = ""
