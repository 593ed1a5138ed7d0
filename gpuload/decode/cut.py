"""Crops cut out of a JPEG's bytes, so that its decoder sees only the region.

Two kinds of JPEGs are **cuttable**: those with an index of their own bits (`indexed`), and those whose restart markers
lie well, which is what follows here. Each is a `Grid`: it says which bytes make the smaller JPEG of a region, and where
in it the region is.

Restart markers cut the entropy-coded bytes of a JPEG into **intervals** of as many MCUs each (blocks of 8×8 to 32×16
pixels, by the chroma's sampling). An interval is coded by itself: at its start the bit stream restarts, and the DC
prediction too. Where a row of MCUs is a whole number of intervals, or an interval a whole number of rows, intervals lie
over the picture as a grid, and a smaller picture is their bytes, with the markers renumbered. Nothing is decoded
for that, and what comes out is as valid a JPEG as the other. Pixels are equal to the last bit.

Pure functions of the bytes, some 0.05 ms for a photograph; by an index 0.2, and 0.1 for several at once. What is out
of the ordinary gives None, and is decoded as if there were no markers and no index: all markers have to be there, in
order, with the end-of-image marker behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import numpy as np

from gpuload.decode.grid import Cut, Grid, Part
from gpuload.decode.header import JpegHeader, Region, mcu_layout, mcus, scan_start
from gpuload.decode.indexed import Index

__all__ = ["cut", "cuts", "find_grid", "is_cuttable"]

RESTARTS, END = bytes(range(0xD0, 0xD8)), b"\xd9"

# By which a cut pays or not, in ns, measured: decoding a byte of entropy-coded data; a pixel of a region by
# nvImageCodec, and of a whole picture by simplejpeg; a byte that is searched for markers, and the cut.
BYTE_NS, REGION_PIXEL_NS, PIXEL_NS, SEARCH_NS, CUT_NS = 8.0, 2.1, 0.7, 0.4, 30_000


def find_grid(data: bytes, header: JpegHeader) -> Grid | None:
    """Return how a JPEG can be cut, as far as its header and its index tell; None if it cannot."""
    if not (header.restart_interval or header.index_at) or not header.plain or not header.single_scan:
        return None
    mcu, blocks = mcu_layout(data, header)
    kind = Intervals if header.restart_interval else Index
    return kind.read(data, header, mcu, blocks) if all(mcu) else None


def is_cuttable(data: bytes, header: JpegHeader) -> bool:
    """Return whether narrower parts than whole rows can be cut out of a JPEG."""
    grid = find_grid(data, header)
    return grid is not None and grid.columns > 1 and grid.is_intact()


def cut(data: bytes, header: JpegHeader, region_tlhw: Region) -> Cut | None:
    """`cuts` of one file."""
    return cuts([(data, header, region_tlhw)])[0]


def cuts(wanted: Sequence[tuple[bytes, JpegHeader | None, Region]]) -> list[Cut | None]:
    """Return the part of each JPEG that a region needs; None if there is none, or decoding it saves nothing.

    Several at once take half the time.

    Args:
        wanted: of each file its bytes; what `scan_markers` says of it, None for other formats; and top, left, height,
            width, within the picture as stored.
    """
    results: list[Cut | None] = [None] * len(wanted)
    parts: dict[tuple[type[Grid], tuple[int, ...]], dict[int, Part[Grid]]] = {}
    for number, (data, header, region_tlhw) in enumerate(wanted):
        grid = None if header is None else find_grid(data, header)
        if grid is not None and _pays(part := grid.part(region_tlhw)) and grid.is_intact():
            parts.setdefault((type(grid), grid.blocks), {})[number] = part
    for (kind, _), alike in parts.items():
        for number, result in zip(alike, kind.cut([*alike.values()]), strict=True):
            results[number] = result
    return results


def _pays(part: Part[Grid]) -> bool:
    """Return whether cutting costs less than it saves: bytes beside and above the region, of which each cell has as
    many, and the time that a decoder of regions takes for a pixel."""
    grid, (_, _, height, width), x0, x1, y0, y1 = part
    count, needed = grid.rows * grid.columns, (y1 - y0) * (x1 - x0)
    saved = (y1 * grid.columns - needed) / count * (len(grid.data) - grid.header.first_scan)
    decoded = (x1 - x0) * grid.width * (y1 - y0) * grid.height
    gain = saved * BYTE_NS + height * width * REGION_PIXEL_NS - decoded * PIXEL_NS
    return needed < count and gain > grid.cost_ns


class Intervals(Grid):
    """The intervals between restart markers, as cells."""

    @classmethod
    def read(cls, data: bytes, header: JpegHeader, mcu: tuple[int, int], blocks: tuple[int, ...]) -> Self | None:
        """Return the grid of a JPEG that has such markers; None if they are not a grid."""
        interval, (in_row, _) = header.restart_interval, mcus(header, mcu)
        cost_ns = CUT_NS + (len(data) - header.first_scan) * SEARCH_NS
        if interval % in_row and in_row % interval:
            return None
        return cls(data, header, mcu, blocks, min(interval, in_row), max(interval // in_row, 1), cost_ns)

    def is_intact(self) -> bool:
        return self.offsets is not None

    @cached_property
    def offsets(self) -> np.ndarray | None:
        """Where each interval begins, and at last where the picture ends: int64, one more than intervals.

        Each but the first is that of the byte behind a marker. None if markers are missing, too many or out of order.
        """
        start = scan_start(self.data, self.header)
        if start + 2 > len(self.data):
            return None
        scan = np.frombuffer(self.data, np.uint8, offset=start)
        offsets = np.flatnonzero(scan[:-1] == 0xFF)
        codes = scan[offsets + 1]
        marked = codes != 0  # the others are bytes of 0xFF
        count = self.rows * self.columns
        if codes[marked][:count].tobytes() != _codes(count):
            return None
        return np.concatenate(([start], offsets[marked][:count] + (start + 2)))

    @classmethod
    def cut(cls, parts: Sequence[Part[Self]]) -> list[Cut | None]:
        return [_cut_by_markers(part) for part in parts]


def _cut_by_markers(part: Part[Intervals]) -> Cut:
    grid, _, x0, x1, y0, y1 = part
    table = grid.offsets
    assert table is not None
    starts, stops = (ends.reshape(grid.rows, grid.columns)[y0:y1, x0:x1] for ends in (table[:-1], table[1:]))
    view = memoryview(grid.data)
    coded = bytearray().join(map(view.__getitem__, map(slice, starts[:, 0].tolist(), stops[:, -1].tolist())))
    ends = np.cumsum(stops - starts, dtype=np.int64)
    np.frombuffer(coded, np.uint8)[ends - 1] = np.frombuffer(_codes(len(ends)), np.uint8)
    return part.jpeg([coded])


def _codes(count: int) -> bytes:
    """Return the second bytes of the markers behind this many intervals."""
    return (RESTARTS * (count // 8 + 1))[: count - 1] + END
