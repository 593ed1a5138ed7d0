"""What cuttable JPEGs have in common: a grid over the picture, whose parts' bytes are known (`cut`, `indexed`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from gpuload.decode.jpeg_header import JpegHeader

__all__ = ["BLOCK", "Cut", "Grid", "Region", "is_interpolated", "mcu_size", "mcus", "sampling", "scan_start", "touched"]

Region = tuple[int, int, int, int]
BLOCK: Final = 8  # pixels of a side
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


def mcu_size(data: bytes, header: JpegHeader) -> tuple[int, int]:
    """Width and height of an MCU in pixels."""
    if header.components == 1:  # whatever its sampling says: a scan of one component is not interleaved
        return BLOCK, BLOCK
    return _largest(sampling(data, header))


def sampling(data: bytes, header: JpegHeader) -> bytes:
    """Of each component its sampling factors: horizontal · 16 + vertical."""
    return data[header.frame_at + 11 : header.frame_at + 10 + 3 * header.components : 3]


@lru_cache(maxsize=64)
def _largest(factors: bytes) -> tuple[int, int]:
    return BLOCK * max(factor >> 4 for factor in factors), BLOCK * max(factor & 15 for factor in factors)


def mcus(header: JpegHeader, mcu: tuple[int, int]) -> tuple[int, int]:
    """How many MCUs of this size a row and a column have."""
    return -(-header.width // mcu[0]), -(-header.height // mcu[1])


def is_interpolated(mcu: tuple[int, int]) -> tuple[bool, bool]:
    """Whether chroma is interpolated from what is beside a pixel, and from what is above and below."""
    return mcu[0] > BLOCK, mcu[1] > BLOCK


def scan_start(data: bytes, header: JpegHeader) -> int:
    """Where the entropy-coded data of the first scan begins."""
    at = header.first_scan + 2
    return at + int.from_bytes(data[at : at + 2], "big")


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
