"""The grid of cells over a JPEG's picture, shared by both methods of cutting out crops (`cut`, `indexed`).

The cells that a region touches form a smaller picture. The file's header with a new height and width, followed by the
coded bytes of these cells, is the JPEG of that picture. If chroma is subsampled, a pixel's chroma is interpolated from
its neighbours, so the cells cover one more pixel on each side. At the edges of the picture, decoders extrapolate; the
cut has the same edge there, so it gets the same values.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Self, TypeVar

from gpuload.decode.header import BLOCK, JpegHeader, Region, mcus, scan_start

__all__ = ["Cut", "Grid", "Part", "Piece"]

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
    """The cells of a JPEG's picture that can be cut out, according to its header; nothing else is checked yet.

    Attributes:
        data, header: the file.
        mcu: the width and height of an MCU in pixels.
        blocks: the number of blocks of each component in an MCU.
        across, down: the number of MCUs in a row and in a column of a cell.
        cost_ns: the cost of cutting.
        columns, rows: the number of columns and rows of cells.
        width, height: the size of a cell in pixels.
    """

    data: bytes
    header: JpegHeader
    mcu: tuple[int, int]
    blocks: tuple[int, ...]
    across: int
    down: int
    cost_ns: float

    def __post_init__(self) -> None:
        mcus_across, mcus_down = mcus(self.header, self.mcu)
        self.columns, self.rows = -(-mcus_across // self.across), -(-mcus_down // self.down)
        self.width, self.height = self.across * self.mcu[0], self.down * self.mcu[1]

    @abstractmethod
    def is_intact(self) -> bool:
        """Return whether the file matches the grid, as far as this can be checked without decoding."""

    @classmethod
    @abstractmethod
    def cut(cls, parts: Sequence[Part[Self]]) -> list[Cut | None]:
        """Cut parts out of intact files whose MCUs have the same `blocks`; None for a part that cannot be cut."""

    @property
    def is_interpolated(self) -> tuple[bool, bool]:
        """Whether chroma is interpolated from horizontal neighbours, and from vertical neighbours."""
        return self.mcu[0] > BLOCK, self.mcu[1] > BLOCK

    def part(self, region_tlhw: Region) -> Part[Self]:
        """Return the cells that a region needs."""
        top, left, height, width = region_tlhw
        horizontally, vertically = self.is_interpolated
        x0 = max(left - horizontally, 0) // self.width
        y0 = max(top - vertically, 0) // self.height
        x1 = min((left + width - 1 + horizontally) // self.width + 1, self.columns)
        y1 = min((top + height - 1 + vertically) // self.height + 1, self.rows)
        if x0 and self.header.width - x0 * self.width <= NARROW:
            x0 -= 1
        return Part(self, region_tlhw, x0, x1, y0, y1)


G = TypeVar("G", bound=Grid, covariant=True)


class Part(NamedTuple, Generic[G]):
    """The cells of a grid that a region needs: columns `x0` to `x1` - 1 and rows `y0` to `y1` - 1."""

    grid: G
    region_tlhw: Region
    x0: int
    x1: int
    y0: int
    y1: int

    def jpeg(
        self,
        coded: Iterable[Piece],
        x_margins: tuple[int, int] = (0, 0),
        y_margin: int = 0,
        segment: tuple[int, int] = (0, 0),
    ) -> Cut:
        """Return the JPEG of these cells.

        Args:
            coded: pieces of its coded data, including the end-of-image marker.
            x_margins: the number of extra pixels to the left and to the right of the cells.
            y_margin: the number of extra pixels above the cells.
            segment: the start and end in the file of a segment to drop from the header.
        """
        grid, header, (top, left, *size) = self.grid, self.grid.header, self.region_tlhw
        x, y, cut_bytes = self.x0 * grid.width - x_margins[0], self.y0 * grid.height - y_margin, segment[1] - segment[0]
        width = min(header.width, self.x1 * grid.width) + x_margins[1] - x
        height = min(header.height, self.y1 * grid.height) - y
        first_scan, frame_at = header.first_scan - cut_bytes, header.frame_at - cut_bytes
        head = bytearray(grid.data[: segment[0]])
        head += grid.data[segment[1] : scan_start(grid.data, header)]
        struct.pack_into(">HH", head, frame_at + 5, height, width)
        new_header = header._replace(
            height=height, width=width, first_scan=first_scan, frame_at=frame_at, exif=b"", xmp=b"", index_at=0
        )
        return Cut(b"".join((head, *coded)), new_header, (top - y, left - x, size[0], size[1]))
