"""Cutting crops out of a JPEG's bytes, so that the decoder receives only the region.

Two kinds of JPEGs are **cuttable**: JPEGs with an index of their bits (`indexed`), and JPEGs with suitable restart
markers, which this module handles. Each kind is a `Grid`, which determines the bytes of the smaller JPEG for a region
and the region's position in it.

Restart markers divide the entropy-coded bytes of a JPEG into **intervals** with the same number of MCUs (blocks of 8×8
to 32×16 pixels, depending on chroma subsampling). Intervals are coded independently: both the bit stream and the DC
prediction restart at each interval. If a row of MCUs is an integer number of intervals, or an interval is an integer
number of rows, the intervals form a grid over the picture. The bytes of a rectangle of intervals, with the markers
renumbered, form a smaller picture. Nothing has to be decoded to build it, and the result is as valid a JPEG as the
original. Its pixels are bit-identical to the original's.

All functions are pure functions of the bytes. A cut takes about 0.05 ms for a photograph; with an index 0.2 ms, or 0.1
ms per file if several files are cut together. All markers must be present and in order, followed by the end-of-image
marker. A file with any irregularity yields None and is decoded as if it had no markers and no index.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import numpy as np

from gpuload.decode.grid import CellRange, Cut, Grid
from gpuload.decode.header import JpegHeader, Region, count_mcus, mcu_layout, scan_start
from gpuload.decode.indexed import Index

__all__ = ["cut", "cut_files", "find_grid", "is_cuttable"]

RESTARTS, END = bytes(range(0xD0, 0xD8)), b"\xd9"

# Measured costs in ns that decide whether a cut pays off: decoding a byte of entropy-coded data; decoding a pixel of a
# region with nvImageCodec, and of a complete picture with simplejpeg; searching a byte for markers; and the cut itself.
BYTE_NS, REGION_PIXEL_NS, PIXEL_NS, SEARCH_NS, CUT_NS = 8.0, 2.1, 0.7, 0.4, 30_000


def find_grid(data: bytes, header: JpegHeader) -> Grid | None:
    """Return a JPEG's grid according to its header and index; None if the JPEG cannot be cut."""
    if not (header.restart_interval or header.index_at) or not header.is_plain or not header.has_single_scan:
        return None
    mcu, blocks = mcu_layout(data, header)
    grid_type = Intervals if header.restart_interval else Index
    return grid_type.read(data, header, mcu, blocks) if all(mcu) else None


def is_cuttable(data: bytes, header: JpegHeader) -> bool:
    """Return whether parts narrower than complete rows can be cut out of a JPEG."""
    grid = find_grid(data, header)
    return grid is not None and grid.columns > 1 and grid.is_intact()


def cut(data: bytes, header: JpegHeader, region_tlhw: Region) -> Cut | None:
    """Cut one file, as `cut_files` does."""
    return cut_files([(data, header, region_tlhw)])[0]


def cut_files(requests: Sequence[tuple[bytes, JpegHeader | None, Region]]) -> list[Cut | None]:
    """Return the part of each JPEG that a region needs; None if it cannot be cut out, or cutting saves no time.

    Cutting several files in one call takes half the time.

    Args:
        requests: for each file, its bytes; the result of `scan_markers` or, for other formats, None; and the region
            (top, left, height, width) of the stored picture.
    """
    results: list[Cut | None] = [None] * len(requests)
    parts: dict[tuple[type[Grid], tuple[int, ...]], dict[int, CellRange[Grid]]] = {}
    for i, (data, header, region_tlhw) in enumerate(requests):
        grid = None if header is None else find_grid(data, header)
        if grid is not None and _pays_off(part := grid.part(region_tlhw)) and grid.is_intact():
            parts.setdefault((type(grid), grid.blocks), {})[i] = part
    for (grid_type, _), group_parts in parts.items():
        for i, result in zip(group_parts, grid_type.cut([*group_parts.values()]), strict=True):
            results[i] = result
    return results


def _pays_off(part: CellRange[Grid]) -> bool:
    """Return whether cutting takes less time than it saves.

    Cutting saves decoding the cells next to and above the region (all cells are assumed to have the same number of
    bytes), and the higher cost per pixel of decoders that decode only a region.
    """
    grid, (_, _, height, width), x0, x1, y0, y1 = part
    all_cells, part_cells = grid.rows * grid.columns, (y1 - y0) * (x1 - x0)
    saved_bytes = (y1 * grid.columns - part_cells) / all_cells * (len(grid.data) - grid.header.first_scan)
    decoded_pixels = (x1 - x0) * grid.cell_width * (y1 - y0) * grid.cell_height
    gain = saved_bytes * BYTE_NS + height * width * REGION_PIXEL_NS - decoded_pixels * PIXEL_NS
    return part_cells < all_cells and gain > grid.cost_ns


class Intervals(Grid):
    """A grid whose cells are the intervals between restart markers."""

    @classmethod
    def read(cls, data: bytes, header: JpegHeader, mcu: tuple[int, int], blocks: tuple[int, ...]) -> Self | None:
        """Return the grid of a JPEG with restart markers; None if its intervals do not form a grid."""
        interval, (mcus_across, _) = header.restart_interval, count_mcus(header, mcu)
        cost_ns = CUT_NS + (len(data) - header.first_scan) * SEARCH_NS
        if interval % mcus_across and mcus_across % interval:
            return None
        return cls(data, header, mcu, blocks, min(interval, mcus_across), max(interval // mcus_across, 1), cost_ns)

    def is_intact(self) -> bool:
        return self.offsets is not None

    @cached_property
    def offsets(self) -> np.ndarray | None:
        """The offset of each interval, followed by the offset of the picture's end: int64, (intervals + 1,).

        Each offset except the first points to the byte after a marker. None if markers are missing, surplus or out of
        order.
        """
        start = scan_start(self.data, self.header)
        if start + 2 > len(self.data):
            return None
        scan = np.frombuffer(self.data, np.uint8, offset=start)
        ff_offsets = np.flatnonzero(scan[:-1] == 0xFF)
        codes = scan[ff_offsets + 1]
        is_marker = codes != 0  # a zero follows each data byte 0xFF
        count = self.rows * self.columns
        if codes[is_marker][:count].tobytes() != _marker_codes(count):
            return None
        return np.concatenate(([start], ff_offsets[is_marker][:count] + (start + 2)))

    @classmethod
    def cut(cls, parts: Sequence[CellRange[Self]]) -> list[Cut | None]:
        return [_cut_by_markers(part) for part in parts]


def _cut_by_markers(part: CellRange[Intervals]) -> Cut:
    grid, _, x0, x1, y0, y1 = part
    offsets = grid.offsets
    assert offsets is not None
    starts, stops = (edges.reshape(grid.rows, grid.columns)[y0:y1, x0:x1] for edges in (offsets[:-1], offsets[1:]))
    view = memoryview(grid.data)
    coded = bytearray().join(map(view.__getitem__, map(slice, starts[:, 0].tolist(), stops[:, -1].tolist())))
    ends = np.cumsum(stops - starts, dtype=np.int64)
    np.frombuffer(coded, np.uint8)[ends - 1] = np.frombuffer(_marker_codes(len(ends)), np.uint8)
    return part.build_jpeg([coded])


def _marker_codes(count: int) -> bytes:
    """Return the second bytes of the markers that follow `count` intervals."""
    return (RESTARTS * (count // 8 + 1))[: count - 1] + END
