"""`make_cuttable` and `add_index`: pixels and metadata stay, and files that cannot be indexed are left unchanged."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers import lacking
from helpers.generated_images import encode
from helpers.jpeg_crops import always_cutting
from helpers.jpeg_restarts import header_of, make_jpeg
from PIL import Image

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.cut import cut, find_grid, is_cuttable
from gpuload.decode.header import JpegHeader, scan_markers, scan_start
from gpuload.errors import GpuloadError
from gpuload.packing.jpeg_cuttable import MAX_GROWTH, add_index, make_cuttable
from gpuload.packing.jpeg_huffman import read_tables

small_limits = mock.patch.multiple("gpuload.packing.jpeg_cuttable", MIN_SCAN_BYTES=1, ALLOWED_BYTES=65_000)
needs_jpegtran = lacking.mark_missing("jpegtran", shutil.which("jpegtran") is None)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def blurred_noise(height: int, width: int) -> np.ndarray:
    """Return an image with less detail than noise, for which Pillow does not write optimized tables."""
    small = Image.fromarray(noise(height // 2, width // 2))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def decode(jpeg: bytes) -> np.ndarray:
    decoder = Decoder(Decode())
    return decoder.decode(Encoded(jpeg), decoder.header(Encoded(jpeg)))


def replace_jpegtran(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make a script named jpegtran the only program on PATH."""
    program = folder / "jpegtran"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 2},
        {"mode": "L"},
        {"optimize": True},
        pytest.param({"progressive": True}, marks=needs_jpegtran),
        pytest.param({"restart_marker_blocks": 3}, marks=needs_jpegtran),
    ],
)
def test_make_cuttable_keeps_pixels_and_metadata(options):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    metadata = {"exif": exif, "icc_profile": b"an ICC profile", "comment": b"a comment"}
    jpeg = encode(blurred_noise(240, 320), "JPEG", quality=70, **metadata, **options)
    cuttable = make_cuttable(jpeg + b"another picture")
    assert is_cuttable(cuttable, header_of(cuttable))
    with always_cutting:
        assert cut(cuttable, header_of(cuttable), (100, 100, 60, 60)) is not None
    np.testing.assert_array_equal(decode(cuttable), decode(jpeg))
    with Image.open(io.BytesIO(cuttable)) as image:
        assert image.getexif()[0x0112] == 6
        assert (image.info["icc_profile"], image.info["comment"]) == (b"an ICC profile", b"a comment")
    assert make_cuttable(cuttable) == cuttable


def test_crops_of_cuttable_photographs_equal_crops_of_the_originals(photos):
    rng, decoder, cut_count = np.random.default_rng(1), Decoder(Decode()), 0
    for path in photos[::16]:
        jpeg = path.read_bytes()
        cuttable = make_cuttable(jpeg)
        header, cuttable_header = (decoder.header(Encoded(data)) for data in (jpeg, cuttable))
        for _ in range(4):
            height, width = (int(rng.integers(size // 4, size // 2)) for size in (header.height, header.width))
            top = int(rng.integers(header.height - height + 1))
            region = (top, int(rng.integers(header.width - width + 1)), height, width)
            cut_count += cut(cuttable, cuttable_header.jpeg, region) is not None
            np.testing.assert_array_equal(
                decoder.decode(Encoded(cuttable), cuttable_header, region),
                decoder.decode(Encoded(jpeg), header, region),
            )
    assert cut_count > 8, "too few regions were cut to test their pixels"


@pytest.mark.processes
def test_make_cuttable_returns_files_that_it_cannot_index_unchanged(tmp_path, monkeypatch):
    replace_jpegtran(tmp_path, monkeypatch, "exit 1")
    large_image, small_image = blurred_noise(320, 240), blurred_noise(84, 122)
    progressive, baseline = encode(large_image, "JPEG", progressive=True), encode(large_image, "JPEG")
    middle = header_of(baseline).first_scan + 900
    files = {
        "nothing": b"",
        "no image": b"neither a JPEG nor another image",
        "PNG": encode(small_image, "PNG"),
        "CMYK": encode(large_image, "JPEG", mode="CMYK"),
        "too small": encode(small_image, "JPEG"),
        "only its header": baseline[:200],
        "cut off": baseline[:-400],
        "a marker": baseline[:middle] + b"\xff\xd3" + baseline[middle:],
        "zeros": baseline[:middle] + bytes(300) + baseline[-2:],
        "extra bytes": baseline[:-2] + b"abc" + baseline[-2:],
        "missing bytes": baseline[:-12] + baseline[-2:],
        "incomplete progressive": progressive[: progressive.rindex(b"\xff\xda")] + b"\xff\xd9",
        "cuttable by markers": encode(small_image, "JPEG", restart_marker_blocks=2),
        "cuttable": make_cuttable(baseline),
    }
    for name, data in files.items():
        assert make_cuttable(data) == data, name
    assert make_cuttable(baseline) != baseline


@pytest.mark.processes
@pytest.mark.parametrize(
    "script",
    ["/bin/cat valid; exit 2", "/bin/cat valid; echo Premature end >&2", "/bin/cat", "echo nonsense", "/bin/cat other"],
)
def test_make_cuttable_returns_the_file_unchanged_if_jpegtran_fails(tmp_path, monkeypatch, script):
    image = blurred_noise(320, 240)
    jpeg, baseline = encode(image, "JPEG", progressive=True), encode(image, "JPEG")
    (tmp_path / "valid").write_bytes(baseline)
    (tmp_path / "other").write_bytes(encode(image[1:], "JPEG"))
    replace_jpegtran(tmp_path, monkeypatch, f"cd {tmp_path}\n{script}")
    assert make_cuttable(jpeg) == jpeg
    replace_jpegtran(tmp_path, monkeypatch, f"cd {tmp_path}\n/bin/cat valid")
    assert make_cuttable(jpeg) == make_cuttable(baseline)


def test_make_cuttable_replaces_a_damaged_index():
    cuttable = make_cuttable(encode(blurred_noise(320, 240), "JPEG", comment=b"a comment"))
    damaged = bytearray(cuttable)
    damaged[header_of(cuttable).index_at + 900] ^= 1
    assert not is_cuttable(bytes(damaged), header_of(bytes(damaged)))
    assert make_cuttable(bytes(damaged)) == cuttable


def test_missing_jpegtran_raises_only_for_progressive_jpegs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    cuttable = make_cuttable(encode(blurred_noise(320, 240), "JPEG"))
    assert is_cuttable(cuttable, header_of(cuttable))
    with pytest.raises(GpuloadError, match=r"needs the program jpegtran, .* libjpeg-turbo-progs \(Debian, Ubuntu\)"):
        make_cuttable(encode(blurred_noise(320, 240), "JPEG", progressive=True))


def test_add_index_keeps_coded_data_metadata_and_tables():
    jpeg = encode(noise(240, 320), "JPEG", icc_profile=b"an ICC profile", comment=b"a comment")
    indexed = add_index(jpeg + b"a second picture", header_of(jpeg))
    header, original = header_of(indexed), header_of(jpeg)
    assert indexed[scan_start(indexed, header) :] == jpeg[scan_start(jpeg, original) :]
    assert indexed[: header.index_at] == jpeg[: header.index_at]
    assert b"a comment" in indexed[: header.index_at]
    assert len(indexed) < (1 + MAX_GROWTH) * len(jpeg)
    assert indexed.endswith(jpeg[header.index_at :])


def test_add_index_adds_codes_that_a_table_lacks():
    jpeg = make_jpeg("4:2:0", (6, 4), content="few")
    with small_limits:
        indexed = add_index(jpeg, header_of(jpeg))
    tables, indexed_tables = (read_tables(data, header_of(data))[0] for data in (jpeg, indexed))
    assert tables != indexed_tables
    for number, table in tables.items():
        assert indexed_tables[number].codes().items() >= table.codes().items()
    np.testing.assert_array_equal(decode(indexed), decode(jpeg))


def test_add_index_has_larger_cells_where_the_segment_size_is_limited():
    jpeg = make_jpeg("4:4:4", (80, 80))
    indexed = add_index(jpeg, header_of(jpeg))
    grid = find_grid(indexed, header_of(indexed))
    with mock.patch("gpuload.packing.jpeg_cuttable.MAX_SEGMENT_BYTES", 10_000):
        limited_jpeg = add_index(jpeg, header_of(jpeg))
    assert len(limited_jpeg) < len(jpeg) + 10_010
    assert find_grid(limited_jpeg, header_of(limited_jpeg)).cell_mcus_across > grid.cell_mcus_across


def test_cut_finds_rows_longer_than_65535_bits():
    """Rows of 3000 pixels of noise have so many bits at a high quality."""
    jpeg = encode(noise(16, 3000), "JPEG", quality=95, subsampling=0)
    indexed = add_index(jpeg, header_of(jpeg))
    with always_cutting:
        part = cut(indexed, header_of(indexed), (9, 2000, 5, 500))
    top, left, height, width = part.region_tlhw
    np.testing.assert_array_equal(
        decode(part.data)[top : top + height, left : left + width], decode(jpeg)[9:14, 2000:2500]
    )


def test_add_index_of_an_unusual_jpeg_returns_none():
    image = noise(240, 320)
    jpeg = encode(image, "JPEG")
    header = header_of(jpeg)
    assert add_index(jpeg, header) is not None
    start = header.first_scan
    tables_swapped = jpeg[: start + 5] + jpeg[start + 7 : start + 9] + jpeg[start + 5 : start + 7] + jpeg[start + 9 :]
    options = {"progressive": True}, {"restart_marker_blocks": 2}, {"mode": "CMYK"}
    unsupported_jpegs = [encode(image, "JPEG", **option) for option in options]
    for unusual in (tables_swapped, *unsupported_jpegs, encode(image[:30, :30], "JPEG")):
        assert add_index(unusual, header_of(unusual)) is None


@pytest.mark.parametrize("seed", range(3))
def test_add_index_and_cut_survive_any_changed_header(seed):
    rng, indexed_count = np.random.default_rng(seed), 0
    smooth = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((96, 72))
    original = encode(np.asarray(smooth), "JPEG", quality=70, subsampling=seed)
    with small_limits, always_cutting:
        for _ in range(150):
            jpeg = bytearray(original)
            for offset in rng.integers(2, header_of(original).first_scan + 14, 2):  # up to the end of the scan's header
                jpeg[offset] = rng.integers(256)
            header = scan_markers(bytes(jpeg))
            indexed = None if header is None else add_index(bytes(jpeg), header)
            if indexed is not None:
                indexed_count += 1
                indexed_header: JpegHeader = header_of(indexed)
                if indexed_header.height > 50 and indexed_header.width > 70:
                    cut(indexed, indexed_header, (20, 30, 30, 40))
    assert indexed_count > 10, "too few changed headers were indexed"
