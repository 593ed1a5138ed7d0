from __future__ import annotations

import numpy as np
import pytest
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


def test_what_the_markers_say(picture, encode):
    jpeg = encode(picture, "JPEG", subsampling=2)
    header = scan_markers(jpeg)
    assert header is not None
    assert header[:5] == (0xFFC0, 8, 83, 122, 3)
    assert jpeg[header.first_scan : header.first_scan + 2] == b"\xff\xda"
    assert header.has_single_scan
    assert header.is_plain
    assert (header.exif, header.xmp) == (b"", b"")
    assert read_scans(jpeg, header) == (1, True)


def test_a_thumbnail_in_the_metadata_is_not_mistaken_for_the_image(picture, encode):
    thumbnail = encode(picture[:16, :16], "JPEG", progressive=True)
    inner = segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail) + segment(0xE2, thumbnail)
    jpeg = encode(picture, "JPEG")
    header = scan_markers(jpeg[:2] + inner + jpeg[2:])
    assert header is not None
    assert header[:5] == (0xFFC0, 8, 83, 122, 3)
    progressive = encode(picture, "JPEG", progressive=True)
    with_inner = progressive[:2] + inner + progressive[2:]
    header = scan_markers(with_inner)
    assert header is not None
    assert read_scans(with_inner, header)[0] == progressive.count(b"\xff\xda")
    cut = jpeg[:2] + inner + jpeg[2:-100]
    header = scan_markers(cut)
    assert header is not None
    assert not has_eoi(cut, header)


def test_a_scan_ends_at_its_first_marker_but_restarts(picture, encode):
    jpeg = encode(picture, "JPEG", restart_marker_blocks=3)
    header = scan_markers(jpeg)
    assert header is not None
    assert end_of_scan(jpeg, header) == len(jpeg) - 2
    assert end_of_scan(jpeg[:-2], header) == len(jpeg) - 2
    assert end_of_scan(jpeg[:-40] + b"\xff\xe1", header) == len(jpeg) - 40


def test_scans_are_counted_as_libjpeg_finds_them(picture, encode):
    jpeg = encode(picture, "JPEG", progressive=True)
    scans = jpeg.count(b"\xff\xda")
    last = jpeg.rindex(b"\xff\xda")
    header = scan_markers(jpeg)
    assert header is not None
    assert read_scans(jpeg, header) == (scans, True)
    for between in (segment(0xFE, b"\xff\xda" * 40), b"junk between segments", b"\xff\x01", b"\xff\xff"):
        assert read_scans(jpeg[:last] + between + jpeg[last:] + jpeg, header) == (scans, True)


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"mode": "L"}])
def test_a_progressive_jpeg_is_complete_with_its_last_scan(picture, encode, options):
    jpeg = encode(picture, "JPEG", progressive=True, **options)
    header = scan_markers(jpeg)
    assert header is not None
    at, ends = header.first_scan, []
    while (at := jpeg.find(b"\xff\xda", at + 1)) >= 0:
        ends.append(at)
    assert len(ends) >= 5
    for scans, end in enumerate(ends, 1):
        assert read_scans(jpeg[:end] + b"\xff\xd9", header) == (scans, False)
    assert read_scans(jpeg, header) == (len(ends) + 1, True)


@pytest.mark.parametrize(
    "odd",
    [
        lambda jpeg: jpeg[:2] + b"junk" + jpeg[2:],
        lambda jpeg: jpeg[:300],
        lambda jpeg: jpeg[:2],
        lambda jpeg: jpeg[:2] + b"\xff\xd9" + jpeg[2:],
        lambda jpeg: jpeg.replace(b"\xff\xc0\x00\x11\x08\x00\x53", b"\xff\xc0\x00\x11\x08\x00\x00"),
        lambda jpeg: jpeg[:20] + jpeg[jpeg.index(b"\xff\xda") :],
    ],
)
def test_files_out_of_the_ordinary_are_left_to_pillow(picture, encode, odd):
    assert scan_markers(odd(encode(picture, "JPEG"))) is None


def test_fill_bytes_between_segments_are_allowed(picture, encode):
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
def test_orientation_of_exif_blocks(entries, expected, endian):
    assert read_orientation(pillow_exif(entries, endian), b"") == expected


@pytest.mark.parametrize(
    "exif", [b"", b"II*\0", b"nonsense" * 5, b"II*\0\xff\xff\xff\xff" + bytes(20), b"MM\0*\0\0\0\x08\xff\xff"]
)
def test_a_broken_exif_block_is_no_orientation(exif):
    assert read_orientation(exif, b"") == 1
    assert read_orientation(exif, b"<tiff:Orientation>5</tiff:Orientation>") == 5


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_region_of_the_upright_image_is_the_upright_region_of_the_stored(orientation):
    stored = np.arange(7 * 11).reshape(7, 11, 1)
    whole = turn_upright(stored, orientation)
    for region in [(0, 0, 2, 3), (4, 5, 3, 2), (1, 2, 5, 4)]:
        top, left, height, width = stored_region(region, orientation, whole.shape[:2])
        part = turn_upright(stored[top : top + height, left : left + width], orientation)
        np.testing.assert_array_equal(part, whole[region[0] : region[0] + region[2], region[1] : region[1] + region[3]])
