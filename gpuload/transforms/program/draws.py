"""The program of a batch: a flat sequence of records, and which parts of the images it needs.

**The decode plan.** Going backwards from the whole result, every record says which part (*window*) of its input it
needs; the first window is the region that a worker decodes. A crop narrows the window, a flip mirrors it, a resize
widens it by the support of its filter, and what looks at the whole image (contrast) resets it. A backend runs each
record from window to window, so the result is that of the whole chain on the whole image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from gpuload.transforms.program.ops import CHANGES_PIXELS, Box, Mix, Record
from gpuload.transforms.program.windows import full_windows

__all__ = ["IMAGE", "Program", "concat_tables", "image_table"]

# A row for each decoded image, the same from the worker that decoded it to the kernels that read it: the first byte in
# its memory; height, width and channels there; height and width of the whole upright image; the region of it that was
# decoded. A region of another height or width than `shape` was resized by a worker, see `Program.of_decoded`. Packed
# and little-endian, so a table is sent as its bytes.
IMAGE = np.dtype([("offset", "<i8"), ("shape", "<i8", 3), ("size_hw", "<i8", 2), ("region_tlhw", "<i8", 4)])


def image_table(offsets: np.ndarray, shapes: np.ndarray, sizes_hw: np.ndarray, regions_tlhw: np.ndarray) -> np.ndarray:
    """Return a table of `IMAGE` rows (B,) with these columns, int64 (B,), (B, 3), (B, 2) and (B, 4)."""
    table = np.empty(len(offsets), IMAGE)
    table["offset"], table["shape"], table["size_hw"], table["region_tlhw"] = offsets, shapes, sizes_hw, regions_tlhw
    return table


def concat_tables(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return one table with the rows of all: NumPy takes sixty times as long to find that their types are one."""
    return np.concatenate([table.view(np.int64) for table in tables]).view(IMAGE)


@dataclass(frozen=True)
class Program:
    """The random draws of a line of transforms for the images of a batch.

    Attributes:
        records: in the order of application.
        sizes_hw: int64 (B, 2), the sizes of the images.
        results_hw: int64 (B, 2), the sizes of the results.
        late_from: the first step that works on finished images, or None.
    """

    records: tuple[Record, ...]
    sizes_hw: np.ndarray
    results_hw: np.ndarray
    late_from: int | None = None

    def __len__(self) -> int:
        return len(self.sizes_hw)

    @cached_property
    def windows_tlhw(self) -> tuple[np.ndarray, ...]:
        """The part of each image that matters before each record, int64 (B, 4); last, the whole results."""
        windows = [whole := full_windows(self.results_hw)]
        for record in reversed(self.records):
            after = windows[-1]
            if after is whole and record.after_hw is record.sizes_hw:  # what keeps sizes shows all of an image
                windows.append(whole)
            elif record.rows is None:
                windows.append(record.input_windows(after))
            else:
                before = after.copy()
                before[record.rows] = record.input_windows(after[record.rows])
                windows.append(before)
        return tuple(reversed(windows))

    @property
    def mix(self) -> Mix | None:
        """How each image is mixed; None if no transform mixes."""
        return next((record for record in self.records if isinstance(record, Mix)), None)

    @property
    def resize(self) -> Box | None:
        """The first record that changes pixels, if it resamples boxes of all images; else None."""
        first = next((record for record in self.records if isinstance(record, CHANGES_PIXELS)), None)
        return first if isinstance(first, Box) and first.padding_mode is None and first.rows is None else None

    def of_decoded(self, images: np.ndarray) -> tuple[Program, np.ndarray]:
        """Return the program, and the images, for what was decoded.

        Where a region's pixels are fewer than the region has, a worker has resized the region already: the pixels are
        the whole result of `resize`, which then has nothing left to do.

        Args:
            images: `IMAGE` (B,).
        """
        resized = (images["shape"][:, :2] != images["region_tlhw"][:, 2:]).any(axis=1)
        if not resized.any():
            return self, images
        done = self.resize
        assert done is not None
        whole, which = full_windows(done.size_hw), resized[:, None]
        box = np.where(which, whole, done.box_tlhw)
        now = replace(done, box_tlhw=box, sizes_hw=np.where(which, done.size_hw, done.sizes_hw))
        records = tuple(now if record is done else record for record in self.records)
        sizes = np.where(which, done.size_hw, self.sizes_hw)
        images = image_table(images["offset"], images["shape"], sizes, np.where(which, whole, images["region_tlhw"]))
        return replace(self, records=records, sizes_hw=sizes), images

    def part(self, start: int, end: int) -> Program:
        """The records `start` … `end` - 1 as a program."""
        if start == 0 and end == len(self.records):
            return self
        return Program(self.records[start:end], self._sizes_before(start), self._sizes_before(end), self.late_from)

    def place_of(self, step: int) -> int:
        """The number of the first record that comes from a step of the line or a later one."""
        return sum([record.step < step for record in self.records])  # they are in order

    def split(self) -> tuple[Program, Program | None]:
        """The part that works on levels, and the part after it that works on finished images, if any."""
        if self.late_from is None:
            return self, None
        end = self.place_of(self.late_from)
        return self.part(0, end), self.part(end, len(self.records))

    def take(self, rows: np.ndarray) -> Program:
        """The program of some of the images; records for none of them stay, so windows keep their numbers."""
        records = []
        for record in self.records:
            if record.rows is None:
                records.append(record.take(rows, None))
                continue
            entries = np.full(len(self), -1, np.int64)
            entries[record.rows] = np.arange(len(record.rows))
            there = entries[rows]
            here = np.flatnonzero(there >= 0)
            records.append(record.take(there[here], here))
        return Program(tuple(records), self.sizes_hw[rows], self.results_hw[rows], self.late_from)

    def _sizes_before(self, number: int) -> np.ndarray:
        if number == len(self.records):
            return self.results_hw
        return reduce(lambda sizes, record: record.resized(sizes), self.records[:number], self.sizes_hw)


Draws = Program
