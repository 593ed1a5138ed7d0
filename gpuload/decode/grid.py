"""What cuttable JPEGs have in common: a grid over the picture, whose parts' bytes are known (`cut`, `indexed`)."""

from __future__ import annotations

from typing import Final, NamedTuple

from gpuload.decode.header import BLOCK, JpegHeader, Region

__all__ = ["Cut", "Grid", "is_interpolated", "touched"]

# libjpeg interpolates no chroma of one or two samples in a row; a picture has at most twice as many pixels.
NARROW: Final = 4


class Grid(NamedTuple):
    """How intervals lie over a picture: how many in a row and in a column, and the pixels of one."""

    columns: int
    rows: int
    width: int
    height: int


class Cut(NamedTuple):
    """A JPEG, its header, and where in it the region is that was asked for (top, left, height, width)."""

    data: bytes
    header: JpegHeader
    region_tlhw: Region


def is_interpolated(mcu: tuple[int, int]) -> tuple[bool, bool]:
    """Whether chroma is interpolated from what is beside a pixel, and from what is above and below."""
    return mcu[0] > BLOCK, mcu[1] > BLOCK


def touched(grid: Grid, header: JpegHeader, region_tlhw: Region, mcu: tuple[int, int]) -> tuple[int, int, int, int]:
    """The columns and rows of intervals that a region needs: the first, behind the last, the first, behind the last."""
    top, left, height, width = region_tlhw
    beside, above = is_interpolated(mcu)
    x0 = max(left - beside, 0) // grid.width
    y0 = max(top - above, 0) // grid.height
    x1 = min((left + width - 1 + beside) // grid.width + 1, grid.columns)
    y1 = min((top + height - 1 + above) // grid.height + 1, grid.rows)
    if x0 and header.width - x0 * grid.width <= NARROW:
        x0 -= 1
    return x0, x1, y0, y1
