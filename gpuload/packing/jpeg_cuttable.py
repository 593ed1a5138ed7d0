"""JPEGs made cuttable: crops can be cut out of their bytes (`gpuload.decode.cut`), by an index (`jpeg_indexing`)."""

from __future__ import annotations

import subprocess

from gpuload.decode.cut import is_cuttable
from gpuload.decode.header import SOI, JpegHeader, read_header, scan_markers
from gpuload.decode.options import Decode
from gpuload.errors import DecodeError, GpuloadError
from gpuload.packing.jpeg_indexing import add_index

__all__ = ["make_cuttable"]


def make_cuttable(data: bytes) -> bytes:
    """Return a JPEG of the same pixels, EXIF and ICC blocks, with an index that lets crops be cut out.

    What is coded stays as it is. Only a progressive JPEG, one of several scans, and one with restart markers are
    written anew, by jpegtran: the same coefficients, in one scan. What stands behind the picture (a phone's second
    picture, or film) is left out. Bytes that are cuttable already come back as they are, and so does what cannot be
    made cuttable: no JPEG or one of four components, twelve bits or arithmetic coding; it is damaged, smaller than
    16 KB, or larger than `Decode()` allows.

    Raises:
        GpuloadError: jpegtran is needed, and not installed.
    """
    header = _jpeg_header(data)
    if header is None or not header.complete or not header.plain:
        return data
    if is_cuttable(data, header):
        return data
    if header.single_scan and not header.restart_interval:
        return add_index(data, header) or data
    written = _in_one_scan(data)
    made = None if written is None else scan_markers(written)
    if written is None or made is None or made[1:5] != header[1:5]:
        return data
    return add_index(written, made) or data


def _in_one_scan(data: bytes) -> bytes | None:
    """Return what jpegtran makes of a JPEG; None if it complains."""
    try:
        done = subprocess.run(["jpegtran", "-copy", "all", "-optimize"], input=data, capture_output=True)
    except FileNotFoundError as error:
        raise GpuloadError(
            "making progressive JPEGs cuttable, and those with restart markers, needs the program jpegtran, which is "
            "not on PATH; install the package libjpeg-turbo-progs (Debian, Ubuntu), libjpeg-turbo-utils (Fedora) or "
            "jpeg-turbo (Homebrew)"
        ) from error
    return None if done.returncode or done.stderr else done.stdout  # a warning is damage


def _jpeg_header(data: bytes) -> JpegHeader | None:
    if not data.startswith(SOI):
        return None
    try:
        return read_header(data, Decode()).jpeg
    except DecodeError:
        return None
