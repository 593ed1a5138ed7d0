"""Crops cut out of a JPEG's bytes, so that its decoder sees only the region.

Two kinds of JPEGs are **cuttable**: those with an index of their own bits (`indexed`), and those whose restart markers
lie well, which is what follows here.

Restart markers cut the entropy-coded bytes of a JPEG into **intervals** of as many MCUs each (blocks of 8×8 to 32×16
pixels, by the chroma's sampling). An interval is coded by itself: at its start the bits begin anew, and the DC
prediction too. Where a row of MCUs is a whole number of intervals, or an interval a whole number of rows, intervals lie
over the picture as a grid, and those that a region touches are a smaller picture: their bytes, with the markers
numbered anew, behind the same header with another height and width. Nothing is decoded for that, and what comes out is
as valid a JPEG as the other.

Pixels are equal to the last bit. The chroma of a pixel is interpolated from its neighbours', so where chroma has fewer
samples, one pixel more on each side is covered; at the picture's own edges decoders make up what is missing, and there
the cut has the same edge.

Pure functions of the bytes, some 0.05 ms for a photograph; by an index 0.2, and 0.1 for several at once. What is out
of the ordinary gives None, and is decoded as if there were no markers and no index: all markers have to be there, in
order, with the end-of-image marker behind them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from gpuload.decode.grid import Cut, Grid, touched
from gpuload.decode.header import JpegHeader, Region, mcu_size, scan_start
from gpuload.decode.indexed import Wanted, cut_by_index, is_intact, read_index

__all__ = ["cut", "cuts", "find_intervals", "grid_of", "is_cuttable"]

RESTARTS, END = bytes(range(0xD0, 0xD8)), b"\xd9"

# By which a cut pays or not, in ns, measured: decoding a byte of entropy-coded data; a pixel of a region by
# nvImageCodec, and of a whole picture by simplejpeg; a byte that is searched for markers; the cut itself.
BYTE_NS, REGION_PIXEL_NS, PIXEL_NS, SEARCH_NS, CUT_NS, INDEXED_NS = 8.0, 2.1, 0.7, 0.4, 30_000, 120_000


def grid_of(data: bytes, header: JpegHeader) -> Grid | None:
    """How the intervals of a sequential JPEG of one scan lie; None if it is none, or if they are no grid."""
    interval = header.restart_interval
    if not interval or not header.plain or not header.single_scan:
        return None
    width, height = mcu_size(data, header)
    if not width or not height:
        return None
    in_row = -(-header.width // width)
    if in_row % interval == 0:
        columns, width = in_row // interval, interval * width
    elif interval % in_row == 0:
        columns, width, height = 1, in_row * width, interval // in_row * height
    else:
        return None
    return Grid(columns, -(-header.height // height), width, height)


def find_intervals(data: bytes, header: JpegHeader) -> np.ndarray | None:
    """Where each interval begins, and at last where the picture ends: offsets, int64, one more than intervals.

    Each but the first is that of the byte behind a marker. None if markers are missing, too many or out of order, or if
    `grid_of` gives None.
    """
    grid = grid_of(data, header)
    start = scan_start(data, header)
    if grid is None or start + 2 > len(data):
        return None
    scan = np.frombuffer(data, np.uint8, offset=start)
    offsets = np.flatnonzero(scan[:-1] == 0xFF)
    codes = scan[offsets + 1]
    marked = codes != 0  # the others are bytes of 0xFF
    count = grid.rows * grid.columns
    if codes[marked][:count].tobytes() != _codes(count):
        return None
    table = np.empty(count + 1, np.int64)
    table[0] = start
    np.add(offsets[marked][:count], start + 2, out=table[1:])
    return table


def is_cuttable(data: bytes, header: JpegHeader) -> bool:
    """Whether narrower parts than whole rows can be cut out of a JPEG, as far as its header and its index tell."""
    index = read_index(data, header)
    if index is not None:
        return index.grid.columns > 1 and is_intact(data, header, index)
    grid = grid_of(data, header)
    return grid is not None and grid.columns > 1


def cut(data: bytes, header: JpegHeader, region_tlhw: Region) -> Cut | None:
    """The part of a JPEG that a region needs; None where there is none, or where decoding it saves nothing.

    Args:
        data: the file.
        header: what `scan_markers` says of it.
        region_tlhw: top, left, height, width, within the picture as stored.
    """
    return cuts([(data, header, region_tlhw)])[0]


def cuts(wanted: Sequence[tuple[bytes, JpegHeader, Region]]) -> list[Cut | None]:
    """`cut` of several files, in half the time."""
    found: list[Cut | None] = [None] * len(wanted)
    by_index: dict[int, Wanted] = {}
    for number, (data, header, region_tlhw) in enumerate(wanted):
        index = read_index(data, header)
        grid = index.grid if index is not None else grid_of(data, header)
        if grid is None:
            continue
        part = touched(grid, header, region_tlhw, mcu_size(data, header) if index is None else index.mcu)
        if not _pays(grid, region_tlhw, part, len(data) - header.first_scan, index is not None):
            continue
        if index is not None:
            by_index[number] = Wanted(data, header, region_tlhw, index, part)
        else:
            found[number] = _cut_by_markers(data, header, region_tlhw, grid, part)
    for number, made in zip(by_index, cut_by_index([*by_index.values()]), strict=True):
        found[number] = made
    return found


def _cut_by_markers(
    data: bytes, header: JpegHeader, region_tlhw: Region, grid: Grid, part: tuple[int, int, int, int]
) -> Cut | None:
    table = find_intervals(data, header)
    if table is None:
        return None
    x0, x1, y0, y1 = part
    width = min(header.width, x1 * grid.width) - x0 * grid.width
    height = min(header.height, y1 * grid.height) - y0 * grid.height
    head = bytearray(data[: scan_start(data, header)])
    struct.pack_into(">HH", head, header.frame_at + 5, height, width)
    starts, stops = (ends.reshape(grid.rows, grid.columns)[y0:y1, x0:x1] for ends in (table[:-1], table[1:]))
    view = memoryview(data)
    rows = map(slice, starts[:, 0].tolist(), stops[:, -1].tolist())
    made = bytearray().join([head, *(view[row] for row in rows)])
    ends = np.cumsum(stops - starts, dtype=np.int64)
    np.frombuffer(made, np.uint8)[ends + (len(head) - 1)] = np.frombuffer(_codes(len(ends)), np.uint8)
    top, left, *size = region_tlhw
    within = (top - y0 * grid.height, left - x0 * grid.width, size[0], size[1])
    return Cut(bytes(made), header._replace(height=height, width=width, exif=b"", xmp=b""), within)


def _codes(count: int) -> bytes:
    """The second bytes of the markers behind so many intervals."""
    return (RESTARTS * (count // 8 + 1))[: count - 1] + END


def _pays(grid: Grid, region_tlhw: Region, part: tuple[int, int, int, int], size: int, indexed: bool) -> bool:
    """Whether cutting costs less than it saves: bytes beside and above the region, of which each interval has as many,
    and the time that a decoder of regions takes for a pixel."""
    x0, x1, y0, y1 = part
    _, _, height, width = region_tlhw
    count, needed = grid.rows * grid.columns, (y1 - y0) * (x1 - x0)
    saved = (y1 * grid.columns - needed) / count * size
    decoded = (x1 - x0) * grid.width * (y1 - y0) * grid.height
    gain = saved * BYTE_NS + height * width * REGION_PIXEL_NS - decoded * PIXEL_NS
    return needed < count and gain > (INDEXED_NS if indexed else CUT_NS + size * SEARCH_NS)
