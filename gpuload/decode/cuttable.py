"""JPEGs made anew with restart markers, so that crops can be cut out of their bytes (`cut`).

`make_cuttable` runs jpegtran, which writes the same coefficients down in another way: pixels are equal to the last bit.
For those who pack data sets; nothing here runs in a worker.
"""

from __future__ import annotations

import subprocess
from typing import Final

from gpuload.decode.cut import BYTE_NS, PIXEL_NS, find_intervals, grid_of, mcu_size
from gpuload.decode.header import read_header
from gpuload.decode.jpeg_header import SOI, JpegHeader, scan_markers
from gpuload.decode.options import Decode
from gpuload.errors import DecodeError, GpuloadError

__all__ = ["choose_interval", "make_cuttable"]

SHORTEST, LONGEST = 2, 12  # MCUs of an interval
MARKER_BYTES: Final = 4  # what an interval adds to a file: a marker, the bits that fill a byte, DC coefficients in full
CROP: Final = 0.6  # the usual width of a crop, of the picture's


def choose_interval(data: bytes, header: JpegHeader) -> int | None:
    """After how many MCUs a restart marker should come, so that crops cost least to decode; None if nothing divides.

    It divides the MCUs of a row and leaves at least two intervals there. Short intervals fit a crop more closely (half
    of one is too much, on average: nothing where the crop ends with the picture), long ones add fewer bytes.
    """
    width, height = mcu_size(data, header)
    in_row = -(-header.width // width)
    mcus = in_row * -(-header.height // height)
    size = len(data) - header.first_scan

    def cost(interval: int) -> float:
        pixel_ns = PIXEL_NS + BYTE_NS * (size + MARKER_BYTES * mcus / interval) / (mcus * width * height)
        return (CROP * header.width + interval * width / 2) * pixel_ns

    divisors = (n for n in range(SHORTEST, LONGEST + 1) if in_row % n == 0 and n < in_row)
    return min(divisors, key=cost, default=None)


def make_cuttable(data: bytes) -> bytes:
    """A JPEG of the same pixels, EXIF and ICC blocks, with restart markers that let crops be cut out.

    A progressive JPEG becomes a sequential one. What stands behind the picture (a phone's second picture, or film) is
    left out. Bytes that are cuttable already come back as they are, and so does what cannot be made cuttable: no JPEG
    or one of four components, twelve bits or arithmetic coding; no number from 2 to 12 divides the MCUs of its rows;
    it is damaged, or larger than `Decode()` allows.

    Raises:
        GpuloadError: jpegtran is not installed.
    """
    header = _jpeg_header(data)
    if header is None or not header.complete:
        return data
    grid = grid_of(data, header)
    if grid is not None and grid.columns > 1 and header.restart_interval <= LONGEST:
        return data
    interval = choose_interval(data, header)
    if interval is None:
        return data
    command = ["jpegtran", "-copy", "all", "-optimize", "-restart", f"{interval}B"]
    try:
        done = subprocess.run(command, input=data, capture_output=True)
    except FileNotFoundError as error:
        raise GpuloadError(
            "making cuttable JPEGs needs the program jpegtran, which is not on PATH; install the package "
            "libjpeg-turbo-progs (Debian, Ubuntu), libjpeg-turbo-utils (Fedora) or jpeg-turbo (Homebrew)"
        ) from error
    if done.returncode or done.stderr:  # a warning is damage
        return data
    made = scan_markers(done.stdout)
    whole = made is not None and made[:5] == (0xFFC0, *header[1:5]) and find_intervals(done.stdout, made) is not None
    return done.stdout if whole else data


def _jpeg_header(data: bytes) -> JpegHeader | None:
    if not data.startswith(SOI):
        return None
    try:
        return read_header(data, Decode()).jpeg
    except DecodeError:
        return None
