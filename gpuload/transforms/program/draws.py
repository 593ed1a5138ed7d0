"""The program of a batch: a flat sequence of records, and the parts of the images that the records need.

**The decode plan.** Going backwards from the complete result, each record determines the part (*window*) of its input
that it needs. The first window is the region that a worker decodes. A crop narrows the window, a flip mirrors it, a
resize widens it by the support of its filter, and a record that uses the entire image, such as contrast, resets it to
the entire image. A backend applies each record to one window and gets the next window, so the result equals that of the
complete chain on the complete image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from gpuload.transforms.program.ops import CHANGES_PIXELS, Box, PartnerMix, Record
from gpuload.transforms.program.windows import full_windows

__all__ = ["IMAGE", "Program", "concat_tables", "image_table"]

# One row per decoded image, passed unchanged from the worker that decodes the image to the kernels that read it: the
# offset of the first byte in memory; the height, width and channels in memory; the height and width of the complete
# upright image; and the decoded region of that image. If a region's height or width differs from `shape`, a worker has
# resized the region (see `Program.of_decoded`). The type is packed and little-endian, so tables can be sent as raw
# bytes.
IMAGE = np.dtype([("offset", "<i8"), ("shape", "<i8", 3), ("size_hw", "<i8", 2), ("region_tlhw", "<i8", 4)])


def image_table(offsets: np.ndarray, shapes: np.ndarray, sizes_hw: np.ndarray, regions_tlhw: np.ndarray) -> np.ndarray:
    """Return a table of `IMAGE` rows (B,) from int64 columns (B,), (B, 3), (B, 2) and (B, 4)."""
    table = np.empty(len(offsets), IMAGE)
    table["offset"], table["shape"], table["size_hw"], table["region_tlhw"] = offsets, shapes, sizes_hw, regions_tlhw
    return table


def concat_tables(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate image tables. They are viewed as int64 meanwhile, because comparing structured dtypes takes NumPy
    sixty times as long."""
    return np.concatenate([table.view(np.int64) for table in tables]).view(IMAGE)


@dataclass(frozen=True)
class Program:
    """The records of a line of transforms for the images of a batch.

    Attributes:
        records: the records in the order of application.
        sizes_hw: int64 (B, 2), the sizes of the images.
        results_hw: int64 (B, 2), the sizes of the results.
        late_from: the index of the first transform that works on images of the final type; None if there is none.
    """

    records: tuple[Record, ...]
    sizes_hw: np.ndarray
    results_hw: np.ndarray
    late_from: int | None = None

    def __len__(self) -> int:
        return len(self.sizes_hw)

    @cached_property
    def windows_tlhw(self) -> tuple[np.ndarray, ...]:
        """For each record, the window that it needs of each input image, int64 (B, 4); then the windows of the
        complete results."""
        windows = [full := full_windows(self.results_hw)]
        for record in reversed(self.records):
            after = windows[-1]
            if after is full and record.output_hw is record.sizes_hw:  # the record needs its complete input, too
                windows.append(full)
            elif record.rows is None:
                windows.append(record.input_windows(after))
            else:
                before = after.copy()
                before[record.rows] = record.input_windows(after[record.rows])
                windows.append(before)
        return tuple(reversed(windows))

    @property
    def mix(self) -> PartnerMix | None:
        """The `PartnerMix` record; None if no transform mixes images."""
        return next((record for record in self.records if isinstance(record, PartnerMix)), None)

    @property
    def resize(self) -> Box | None:
        """The first record that changes pixels, if that record resamples boxes of all images; else None."""
        first = next((record for record in self.records if isinstance(record, CHANGES_PIXELS)), None)
        return first if isinstance(first, Box) and first.padding_mode is None and first.rows is None else None

    def of_decoded(self, images: np.ndarray) -> tuple[Program, np.ndarray]:
        """Return the program and the image table adapted to images that workers may have resized.

        If a region and its decoded pixels differ in size, a worker has already resized the region. The pixels are then
        the complete result of `resize`, which becomes a no-op for this image.

        Args:
            images: the image table, `IMAGE` (B,).
        """
        is_resized = (images["shape"][:, :2] != images["region_tlhw"][:, 2:]).any(axis=1)
        if not is_resized.any():
            return self, images
        resize = self.resize
        assert resize is not None
        full, mask = full_windows(resize.size_hw), is_resized[:, None]
        box = np.where(mask, full, resize.box_tlhw)
        new_resize = replace(resize, box_tlhw=box, sizes_hw=np.where(mask, resize.size_hw, resize.sizes_hw))
        records = tuple(new_resize if record is resize else record for record in self.records)
        sizes = np.where(mask, resize.size_hw, self.sizes_hw)
        images = image_table(images["offset"], images["shape"], sizes, np.where(mask, full, images["region_tlhw"]))
        return replace(self, records=records, sizes_hw=sizes), images

    def part(self, start: int, end: int) -> Program:
        """Return the records `start` … `end` - 1 as a program."""
        if start == 0 and end == len(self.records):
            return self
        return Program(self.records[start:end], self._sizes_before(start), self._sizes_before(end), self.late_from)

    def place_of(self, step: int) -> int:
        """Return the index of the first record drawn by this step or a later step."""
        return sum([record.step < step for record in self.records])  # records are in order of their steps

    def split(self) -> tuple[Program, Program | None]:
        """Return the part that works on integer pixel values, and the rest, which works on the final type (or None)."""
        if self.late_from is None:
            return self, None
        end = self.place_of(self.late_from)
        return self.part(0, end), self.part(end, len(self.records))

    def take(self, rows: np.ndarray) -> Program:
        """Return the program for the images in these rows of the batch. Records that apply to none of these images are
        not dropped, so that the indices of windows do not change."""
        records = []
        for record in self.records:
            if record.rows is None:
                records.append(record.take(rows, None))
                continue
            entries = np.full(len(self), -1, np.int64)
            entries[record.rows] = np.arange(len(record.rows))
            row_entries = entries[rows]
            new_rows = np.flatnonzero(row_entries >= 0)
            records.append(record.take(row_entries[new_rows], new_rows))
        return Program(tuple(records), self.sizes_hw[rows], self.results_hw[rows], self.late_from)

    def _sizes_before(self, index: int) -> np.ndarray:
        if index == len(self.records):
            return self.results_hw
        return reduce(lambda sizes, record: record.sizes_after(sizes), self.records[:index], self.sizes_hw)
