"""The samples of a part, in order, as the dataset gives them; what comes next is read ahead where reading takes long.

On a disk a single reader waits for each file: of a virtual one it got 350 MB/s, and 600 with 16 files named ahead.
What lies in the page cache is read in less time than naming it is worth, so it is done only while samples come from a
disk, and after a slow one; a few at a time, so that the disk has always some to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Final

from gpuload.datasets.files import Disk
from gpuload.errors import DecodeError

__all__ = ["AT_ONCE", "each_sample"]

AT_ONCE: Final = 16  # samples that are asked for together
SLOW_S: Final = 200e-6  # for a sample; 130 KB in the page cache take 25, on a busy machine 100
SLOW_FOR: Final = 1024  # so many samples after a slow one: read-ahead makes them quick
AHEAD: Final = 48  # how many samples are named
FEW: Final = 4  # at a time
FAILURES: Final = (DecodeError, OSError, ValueError, LookupError)  # of one sample


def each_sample(dataset: Any, span: range) -> Iterator[tuple[int, Any]]:
    """The samples in order, neighbours asked for together where the dataset can; an exception in the place of one."""
    many = getattr(dataset, "__getitems__", None)
    ahead = _Ahead(getattr(dataset, "will_need", None), span.stop)
    for start in range(span.start, span.stop, AT_ONCE):
        indices = list(range(start, min(start + AT_ONCE, span.stop)))
        samples: list[Any] | None = None
        if many is not None:
            began = perf_counter()
            with contextlib.suppress(*FAILURES):  # of one of them: each for itself
                samples = list(many(indices))
            ahead.look(perf_counter() - began, indices)
        for place, index in enumerate(indices):
            if samples is not None:
                yield index, samples[place]
                continue
            began = perf_counter()
            try:
                sample = dataset[index]
            except FAILURES as error:
                sample = error
            ahead.look(perf_counter() - began, indices[place : place + 1])
            yield index, sample


class _Ahead:
    """Names the samples that come next, as long as they come from a disk or take long."""

    def __init__(self, will_need: Callable[[range], object] | None, stop: int) -> None:
        self._will_need, self._stop = will_need, stop
        self._disk = Disk()
        self._slow, self._named = 0, 0  # for how many samples more; up to which one they are named

    def look(self, took_s: float, read: list[int]) -> None:
        """Those were read, in so many seconds."""
        if self._will_need is None:
            return
        slow = took_s > SLOW_S * len(read) or self._disk.was_read()
        self._slow = SLOW_FOR if slow else self._slow - len(read)
        at = read[-1] + 1
        end = min(at + AHEAD, self._stop)
        if self._slow > 0 and (self._named <= end - FEW or self._named < end == self._stop):
            begin, self._named = max(at, self._named), end
            with contextlib.suppress(*FAILURES):  # told when it is read
                self._will_need(range(begin, end))
