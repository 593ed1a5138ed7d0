"""The samples of a part, in order, as the dataset gives them; what comes next is read ahead where reading takes long.

On a disk a single reader waits for each file: of a virtual one it got 350 MB/s, and 600 with 16 files named ahead. What
lies in the page cache is read in less time than naming it is worth, so only after a slow block the next ones are named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Final

from gpuload.errors import DecodeError

__all__ = ["AT_ONCE", "each_sample"]

AT_ONCE: Final = 16  # samples that are asked for together
SLOW_S: Final = 200e-6  # for a sample; 130 KB in the page cache take 25, on a busy machine 100
BLOCKS_AHEAD: Final = 64  # for so many blocks after a slow one: read-ahead makes them quick
FAILURES: Final = (DecodeError, OSError, ValueError, LookupError)  # of one sample


def each_sample(dataset: Any, span: range) -> Iterator[tuple[int, Any]]:
    """The samples in order, neighbours asked for together where the dataset can; an exception in the place of one."""
    many = getattr(dataset, "__getitems__", None)
    will_need = getattr(dataset, "will_need", None)
    ahead = 0
    for start in range(span.start, span.stop, AT_ONCE):
        indices = range(start, min(start + AT_ONCE, span.stop))
        if ahead and will_need is not None:
            ahead -= 1
            with contextlib.suppress(*FAILURES):  # told when it is read
                will_need(range(indices.stop, min(indices.stop + AT_ONCE, span.stop)))
        samples: list[Any] | None = None
        began = perf_counter()
        if many is not None:
            try:
                samples = list(many(list(indices)))
            except FAILURES:
                samples = None  # one of them: each for itself
        took = perf_counter() - began
        for place, index in enumerate(indices):
            if samples is not None:
                yield index, samples[place]
                continue
            began = perf_counter()
            try:
                sample = dataset[index]
            except FAILURES as error:
                sample = error
            took += perf_counter() - began
            yield index, sample
        if took > SLOW_S * len(indices):
            ahead = BLOCKS_AHEAD
