"""`scan_markers`, `read_scans` and `read_orientation`: the header of a JPEG, and regions of rotated images."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.jpeg_restarts import header_of
from PIL import Image

from gpuload.decode.header import (
    end_of_scan,
    has_eoi,
    read_orientation,
    read_scans,
    scan_markers,
    stored_region,
    turn_upright,
)


def segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(payload) + 2).to_bytes(2, "big") + payload


def test_scan_markers_reads_the_frame_and_the_first_scan(picture, encode):
    jpeg = encode(picture, "JPEG", subsampling=2)
    header = header_of(jpeg)
    assert header[:5] == (0xFFC0, 8, 83, 122, 3)
    assert jpeg[header.first_scan : header.first_scan + 2] == b"\xff\xda"
    assert header.has_single_scan
    assert header.is_plain
    assert (header.exif, header.xmp) == (b"", b"")
    assert read_scans(jpeg, header) == (1, True)


def test_markers_of_a_thumbnail_in_the_metadata_are_skipped(picture, encode):
    thumbnail = encode(picture[:16, :16], "JPEG", progressive=True)
    metadata = segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail) + segment(0xE2, thumbnail)
    jpeg = encode(picture, "JPEG")
    header = header_of(jpeg[:2] + metadata + jpeg[2:])
    assert header[:5] == (0xFFC0, 8, 83, 122, 3)
    progressive = encode(picture, "JPEG", progressive=True)
    with_metadata = progressive[:2] + metadata + progressive[2:]
    header = header_of(with_metadata)
    assert read_scans(with_metadata, header)[0] == progressive.count(b"\xff\xda")
    truncated = jpeg[:2] + metadata + jpeg[2:-100]
    header = header_of(truncated)
    assert not has_eoi(truncated, header)


def test_end_of_scan_is_the_first_marker_other_than_a_restart(picture, encode):
    jpeg = encode(picture, "JPEG", restart_marker_blocks=3)
    header = header_of(jpeg)
    assert end_of_scan(jpeg, header) == len(jpeg) - 2
    assert end_of_scan(jpeg[:-2], header) == len(jpeg) - 2
    assert end_of_scan(jpeg[:-40] + b"\xff\xe1", header) == len(jpeg) - 40


def test_read_scans_skips_segments_and_junk_between_scans(picture, encode):
    jpeg = encode(picture, "JPEG", progressive=True)
    scans = jpeg.count(b"\xff\xda")
    last_scan = jpeg.rindex(b"\xff\xda")
    header = header_of(jpeg)
    assert read_scans(jpeg, header) == (scans, True)
    for inserted in (segment(0xFE, b"\xff\xda" * 40), b"junk between segments", b"\xff\x01", b"\xff\xff"):
        assert read_scans(jpeg[:last_scan] + inserted + jpeg[last_scan:] + jpeg, header) == (scans, True)


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"mode": "L"}])
def test_read_scans_reports_that_a_progressive_jpeg_lacks_scans(picture, encode, options):
    jpeg = encode(picture, "JPEG", progressive=True, **options)
    header = header_of(jpeg)
    scan, ends = header.first_scan, []
    while (scan := jpeg.find(b"\xff\xda", scan + 1)) >= 0:
        ends.append(scan)
    assert len(ends) >= 5
    for scans, end in enumerate(ends, 1):
        assert read_scans(jpeg[:end] + b"\xff\xd9", header) == (scans, False)
    assert read_scans(jpeg, header) == (len(ends) + 1, True)


@pytest.mark.parametrize(
    "change",
    [
        lambda jpeg: jpeg[:2] + b"junk" + jpeg[2:],
        lambda jpeg: jpeg[:300],
        lambda jpeg: jpeg[:2],
        lambda jpeg: jpeg[:2] + b"\xff\xd9" + jpeg[2:],
        lambda jpeg: jpeg.replace(b"\xff\xc0\x00\x11\x08\x00\x53", b"\xff\xc0\x00\x11\x08\x00\x00"),
        lambda jpeg: jpeg[:20] + jpeg[jpeg.index(b"\xff\xda") :],
    ],
    ids=["junk", "no scan", "only the start", "end before the frame", "height 0", "no frame"],
)
def test_scan_markers_of_an_unusual_jpeg_is_none(picture, encode, change):
    assert scan_markers(change(encode(picture, "JPEG"))) is None


def test_scan_markers_skips_fill_bytes(picture, encode):
    jpeg = encode(picture, "JPEG")
    assert scan_markers(jpeg[:2] + b"\xff\xff\xff" + jpeg[2:]) is not None


def pillow_exif(entries: dict[int, object], endian: str) -> bytes:
    exif = Image.Exif()
    exif.endian = endian
    for tag, value in entries.items():
        exif[tag] = value
    return exif.tobytes()[6:]


@pytest.mark.parametrize("endian", ["<", ">"])
@pytest.mark.parametrize(
    ("entries", "expected"),
    [({0x0112: 6}, 6), ({}, 1), ({0x0112: 9}, 1), ({0x0112: 0}, 1), ({0x010F: "maker", 0x0112: 3, 0x0132: "x"}, 3)],
)
def test_read_orientation_returns_the_orientation_of_an_exif_block_or_1_if_invalid(entries, expected, endian):
    assert read_orientation(pillow_exif(entries, endian), b"") == expected


@pytest.mark.parametrize(
    "exif", [b"", b"II*\0", b"nonsense" * 5, b"II*\0\xff\xff\xff\xff" + bytes(20), b"MM\0*\0\0\0\x08\xff\xff"]
)
def test_read_orientation_of_a_broken_exif_block_falls_back_to_xmp(exif):
    assert read_orientation(exif, b"") == 1
    assert read_orientation(exif, b"<tiff:Orientation>5</tiff:Orientation>") == 5


@pytest.mark.parametrize("orientation", range(1, 9))
def test_stored_region_turned_upright_is_the_region_of_the_upright_image(orientation):
    stored = np.arange(7 * 11).reshape(7, 11, 1)
    upright = turn_upright(stored, orientation)
    for region in [(0, 0, 2, 3), (4, 5, 3, 2), (1, 2, 5, 4)]:
        top, left, height, width = stored_region(region, orientation, upright.shape[:2])
        part = turn_upright(stored[top : top + height, left : left + width], orientation)
        np.testing.assert_array_equal(
            part, upright[region[0] : region[0] + region[2], region[1] : region[1] + region[3]]
        )
