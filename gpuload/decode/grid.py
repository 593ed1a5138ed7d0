"""What both ways to cut crops out of a JPEG have in common: a grid of cells over its picture (`cut`, `indexed`).

The cells that a region touches are a smaller picture, and their coded bytes, behind the file's header with another
height and width, are its JPEG. Where chroma has fewer samples, a pixel's is interpolated from its neighbours', so one
pixel more on each side is covered; at the picture's own edges decoders make up what is missing, and there the cut has
the same edge.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Self, TypeVar

from gpuload.decode.header import BLOCK, JpegHeader, Region, mcus, scan_start

__all__ = ["Cut", "Grid", "Part", "Piece"]

# libjpeg interpolates no chroma of one or two samples in a row; a picture has at most twice as many pixels.
NARROW: Final = 4

Piece = bytes | bytearray | memoryview


class Cut(NamedTuple):
    """A JPEG, its header, and where in it the region is that was asked for (top, left, height, width)."""

    data: bytes
    header: JpegHeader
    region_tlhw: Region


@dataclass
class Grid(ABC):
    """How cells that can be cut out lie over the picture of a JPEG, as its header says; nothing else is checked yet.

    Attributes:
        data, header: the file.
        mcu: width and height of an MCU in pixels.
        blocks: how many blocks of each component an MCU has.
        across, down: how many MCUs a cell has in a row and in a column.
        cost_ns: what cutting costs.
        columns, rows: how many cells there are.
        width, height: of a cell in pixels.
    """

    data: bytes
    header: JpegHeader
    mcu: tuple[int, int]
    blocks: tuple[int, ...]
    across: int
    down: int
    cost_ns: float

    def __post_init__(self) -> None:
        in_row, in_column = mcus(self.header, self.mcu)
        self.columns, self.rows = -(-in_row // self.across), -(-in_column // self.down)
        self.width, self.height = self.across * self.mcu[0], self.down * self.mcu[1]

    @abstractmethod
    def is_intact(self) -> bool:
        """Return whether the file is as the grid says, as far as can be seen without decoding it."""

    @classmethod
    @abstractmethod
    def cut(cls, parts: Sequence[Part[Self]]) -> list[Cut | None]:
        """Cut parts out of intact files whose MCUs have as many blocks; None where that cannot be."""

    @property
    def is_interpolated(self) -> tuple[bool, bool]:
        """Whether chroma is interpolated from what is beside a pixel, and from what is above and below."""
        return self.mcu[0] > BLOCK, self.mcu[1] > BLOCK

    def part(self, region_tlhw: Region) -> Part[Self]:
        """Return the cells that a region needs."""
        top, left, height, width = region_tlhw
        beside, above = self.is_interpolated
        x0 = max(left - beside, 0) // self.width
        y0 = max(top - above, 0) // self.height
        x1 = min((left + width - 1 + beside) // self.width + 1, self.columns)
        y1 = min((top + height - 1 + above) // self.height + 1, self.rows)
        if x0 and self.header.width - x0 * self.width <= NARROW:
            x0 -= 1
        return Part(self, region_tlhw, x0, x1, y0, y1)


G = TypeVar("G", bound=Grid, covariant=True)


class Part(NamedTuple, Generic[G]):
    """The cells of a grid that a region needs: columns `x0` to `x1` and rows `y0` to `y1`, the last ones excluded."""

    grid: G
    region_tlhw: Region
    x0: int
    x1: int
    y0: int
    y1: int

    def jpeg(
        self,
        coded: Iterable[Piece],
        beside: tuple[int, int] = (0, 0),
        above: int = 0,
        dropped: tuple[int, int] = (0, 0),
    ) -> Cut:
        """Return the JPEG of these cells.

        Args:
            coded: its coded data in pieces, with the end-of-image marker.
            beside, above: how many pixels it has more at the left and right, and above the cells.
            dropped: from where to where in the file the segment lies that is left out of the header.
        """
        grid, header, (top, left, *size) = self.grid, self.grid.header, self.region_tlhw
        x, y, fewer = self.x0 * grid.width - beside[0], self.y0 * grid.height - above, dropped[1] - dropped[0]
        width = min(header.width, self.x1 * grid.width) + beside[1] - x
        height = min(header.height, self.y1 * grid.height) - y
        first_scan, frame_at = header.first_scan - fewer, header.frame_at - fewer
        head = bytearray(grid.data[: dropped[0]])
        head += grid.data[dropped[1] : scan_start(grid.data, header)]
        struct.pack_into(">HH", head, frame_at + 5, height, width)
        changed = header._replace(
            height=height, width=width, first_scan=first_scan, frame_at=frame_at, exif=b"", xmp=b"", index_at=0
        )
        return Cut(b"".join((head, *coded)), changed, (top - y, left - x, size[0], size[1]))
