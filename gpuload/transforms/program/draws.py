"""The program of a batch: a flat sequence of records, and what of the images it needs.

**The decode plan.** Going backwards from the whole result, every record says which part (*window*) of its input it
needs; what comes out at the front is the region that a worker decodes. A crop narrows the window, a flip mirrors it, a
resize widens it by the support of its filter, and what looks at the whole image (contrast) resets it. A backend runs
each record from window to window, so the result is that of the whole chain on the whole image.

Made in workers and in the main process; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from gpuload.transforms.program.ops import Mix, Record
from gpuload.transforms.program.windows import full_windows

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """What was drawn for the images of a batch by a line of transforms.

    Attributes:
        records: in the order in which they are applied.
        sizes_hw: int64 (B, 2), the sizes of the images.
        results_hw: int64 (B, 2), the sizes of the results.
        late_from: the first step that works on finished images; None: there is none.
    """

    records: tuple[Record, ...]
    sizes_hw: np.ndarray
    results_hw: np.ndarray
    late_from: int | None = None

    def __len__(self) -> int:
        """How many images."""
        return len(self.sizes_hw)

    @cached_property
    def windows_tlhw(self) -> tuple[np.ndarray, ...]:
        """The part of each image that matters before each record, int64 (B, 4); one more, the whole, of the results."""
        windows = [full_windows(self.results_hw)]
        for record in reversed(self.records):
            after = windows[-1]
            if record.rows is None:
                windows.append(record.input_windows(after))
                continue
            before = after.copy()
            before[record.rows] = record.input_windows(after[record.rows])
            windows.append(before)
        return tuple(reversed(windows))

    @property
    def mix(self) -> Mix | None:
        """How each image is mixed; None where no transform mixes."""
        return next((record for record in self.records if isinstance(record, Mix)), None)

    def part(self, start: int, end: int) -> Program:
        """The records `start` … `end` - 1 as a program."""
        if start == 0 and end == len(self.records):
            return self
        return Program(self.records[start:end], self._sizes_before(start), self._sizes_before(end), self.late_from)

    def place_of(self, step: int) -> int:
        """The number of the first record of a step of the line, or of what comes after it."""
        return next((place for place, record in enumerate(self.records) if record.step >= step), len(self.records))

    def split(self) -> tuple[Program, Program | None]:
        """What works on levels, and what is behind it, if anything, that works on finished images."""
        if self.late_from is None:
            return self, None
        place = self.place_of(self.late_from)
        return self.part(0, place), self.part(place, len(self.records))

    def take(self, rows: np.ndarray) -> Program:
        """The program of some of the images; a record of none of them stays, so that windows keep their places."""
        records = []
        for record in self.records:
            if record.rows is None:
                records.append(record.take(rows, None))
                continue
            places = np.full(len(self), -1, np.int64)
            places[record.rows] = np.arange(len(record.rows))
            there = places[rows]
            here = np.flatnonzero(there >= 0)
            records.append(record.take(there[here], here))
        return Program(tuple(records), self.sizes_hw[rows], self.results_hw[rows], self.late_from)

    def _sizes_before(self, place: int) -> np.ndarray:
        """The sizes of the images before the record at a place."""
        if place == len(self.records):
            return self.results_hw
        return reduce(lambda sizes, record: record.resized(sizes), self.records[:place], self.sizes_hw)


Draws = Program
