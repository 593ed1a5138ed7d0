"""A batch on its way through the workers, and the parts that it is done in. Main process only; plain data.

A part is one chunk: what is asked for and, once it is done, what came. The feed owns both until a batch is complete,
then the consumer has it until it is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.errors import ErrorRecord
from gpuload.order.place import IterableStart, Place
from gpuload.ring.chunk import ChunkContent
from gpuload.ring.ring import Slot

__all__ = ["Batch", "Part"]


@dataclass(slots=True, eq=False)
class Part:
    """A chunk of a batch: what is asked for, and once it is done, what came.

    `data` are the chunk's bytes: a view of its slot, or of private memory where it was moved out (`slot` is None then).
    """

    batch: Batch
    positions: np.ndarray
    indices: np.ndarray | list[object]
    chunk: int = 0
    attempt: int = 0
    need_bytes: int = 0
    deaths_alone: int = 0
    own_deaths_alone: int = 0
    substitutes: bool = False  # stands in for samples that failed
    slot: Slot | None = None
    data: np.ndarray | None = None
    used_bytes: int = 0
    content: ChunkContent | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """The parts of one batch, in the order of their positions; behind them, those that stand in for failed samples.

    `valid` is False for rows that only fill the batch up; None where there are none. `errors` are the samples that
    failed; `lost` is one of them that nothing could take the place of, `fatal` one after which there can be no other.
    `after` is the place that follows the batch, `dropped` says that it shall not be given.

    Of an iterable dataset, `stream` says whose samples are asked for; how many there were, and so `positions`,
    `indices`, `step` and `after`, is known when `on_due` was called: with all parts done, in the order of the batches.
    """

    step: int
    epoch: int
    positions: np.ndarray
    indices: np.ndarray | list[object]
    valid: np.ndarray | None = None
    parts: list[Part] = field(default_factory=list)
    open_parts: int = 0
    loaded: bool = False  # the transfer has it: it says when the slots are free
    errors: list[ErrorRecord] = field(default_factory=list)
    lost: ErrorRecord | None = None
    fatal: ErrorRecord | None = None
    after: Place | None = None
    dropped: bool = False
    may_be_dropped: bool = False  # where nothing of it is left: no other rank waits for it
    warning: str = ""
    stream: IterableStart | None = None
    on_due: Callable[[Batch], None] | None = None
    candidates: dict[int, Iterator[Any]] = field(default_factory=dict)  # by position, what may take its place

    @property
    def is_empty(self) -> bool:
        """Whether not one of its samples could be had."""
        return not any(part.content is not None and part.content.rows for part in self.parts)
