"""The grid of cells over a JPEG's picture, shared by both methods of cutting out crops (`cut`, `indexed`).

The cells that a region touches form a smaller picture. The file's header with a new height and width, followed by the
coded bytes of these cells, is the JPEG of that picture. If chroma is subsampled, a pixel's chroma is interpolated from
its neighbours, so the cells must cover one more pixel on each side. At the edges of the picture, decoders extrapolate;
the cut has the same edge there, so the decoded pixels are the same.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from gpuload.decode.header import BLOCK, JpegHeader, Region, count_mcus, scan_start

__all__ = ["CellRange", "Cut", "Grid", "Piece"]

# libjpeg does not interpolate chroma in rows of one or two samples, which are at most four pixels.
NARROW: Final = 4

Piece = bytes | bytearray | memoryview


class Cut(NamedTuple):
    """A JPEG, its header, and the position of the requested region in it (top, left, height, width)."""

    data: bytes
    header: JpegHeader
    region_tlhw: Region


@dataclass
class Grid(ABC):
    """A JPEG's picture as a grid of cells that can be cut out. Only the header is checked; see also `is_intact`.

    Attributes:
        data, header: the file.
        mcu: the width and height of an MCU in pixels.
        blocks: the number of blocks of each component in an MCU.
        cell_mcus_across, cell_mcus_down: the width and height of a cell in MCUs.
        cost_ns: the estimated time to cut one region, in nanoseconds.
        columns, rows: the number of columns and rows of cells.
        cell_width, cell_height: the width and height of a cell in pixels.
    """

    data: bytes
    header: JpegHeader
    mcu: tuple[int, int]
    blocks: tuple[int, ...]
    cell_mcus_across: int
    cell_mcus_down: int
    cost_ns: float

    def __post_init__(self) -> None:
        mcus_across, mcus_down = count_mcus(self.header, self.mcu)
        self.columns, self.rows = -(-mcus_across // self.cell_mcus_across), -(-mcus_down // self.cell_mcus_down)
        self.cell_width, self.cell_height = self.cell_mcus_across * self.mcu[0], self.cell_mcus_down * self.mcu[1]

    @abstractmethod
    def is_intact(self) -> bool:
        """Return whether the file matches the grid, as far as this can be checked without decoding."""

    @classmethod
    @abstractmethod
    def cut(cls, parts: Sequence[CellRange[Any]]) -> list[Cut | None]:
        """Cut parts out of intact files whose MCUs have the same `blocks`. A part that cannot be cut yields None."""

    @property
    def chroma_margins_xy(self) -> tuple[bool, bool]:
        """The margin around a region, in pixels, that its chroma also depends on, along x and y: 1 (True) if chroma is
        subsampled and therefore interpolated, else 0 (False)."""
        return self.mcu[0] > BLOCK, self.mcu[1] > BLOCK

    def part(self, region_tlhw: Region) -> CellRange[Self]:
        """Return the cells that a region needs."""
        top, left, height, width = region_tlhw
        x_margin, y_margin = self.chroma_margins_xy
        x0 = max(left - x_margin, 0) // self.cell_width
        y0 = max(top - y_margin, 0) // self.cell_height
        x1 = min((left + width - 1 + x_margin) // self.cell_width + 1, self.columns)
        y1 = min((top + height - 1 + y_margin) // self.cell_height + 1, self.rows)
        if x0 and self.header.width - x0 * self.cell_width <= NARROW:
            x0 -= 1
        return CellRange(self, region_tlhw, x0, x1, y0, y1)


G = TypeVar("G", bound=Grid, covariant=True)


class CellRange(NamedTuple, Generic[G]):
    """The cells of a grid that a region needs: columns `x0` to `x1` - 1 and rows `y0` to `y1` - 1."""

    grid: G
    region_tlhw: Region
    x0: int
    x1: int
    y0: int
    y1: int

    def build_jpeg(
        self,
        coded: Iterable[Piece],
        x_margins: tuple[int, int] = (0, 0),
        y_margin: int = 0,
        segment: tuple[int, int] = (0, 0),
    ) -> Cut:
        """Build the JPEG of these cells.

        Args:
            coded: the pieces of the cells' coded data, including the end-of-image marker.
            x_margins: the number of extra pixels to the left and to the right of the cells.
            y_margin: the number of extra pixels above the cells.
            segment: the start and end offsets of a segment to drop from the header.
        """
        grid, header, (top, left, *size) = self.grid, self.grid.header, self.region_tlhw
        x, y, dropped_bytes = (
            self.x0 * grid.cell_width - x_margins[0],
            self.y0 * grid.cell_height - y_margin,
            segment[1] - segment[0],
        )
        width = min(header.width, self.x1 * grid.cell_width) + x_margins[1] - x
        height = min(header.height, self.y1 * grid.cell_height) - y
        first_scan, frame_at = header.first_scan - dropped_bytes, header.frame_at - dropped_bytes
        head = bytearray(grid.data[: segment[0]])
        head += grid.data[segment[1] : scan_start(grid.data, header)]
        struct.pack_into(">HH", head, frame_at + 5, height, width)
        new_header = header._replace(
            height=height, width=width, first_scan=first_scan, frame_at=frame_at, exif=b"", xmp=b"", index_at=0
        )
        return Cut(b"".join((head, *coded)), new_header, (top - y, left - x, size[0], size[1]))
