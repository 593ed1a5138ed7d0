from __future__ import annotations

import io
from unittest import mock

import numpy as np
import pytest
from cuts import always
from pictures import encode
from PIL import Image
from restarts import header_of, restarted

from gpuload.decode.cut import cut, find_grid
from gpuload.decode.header import JpegHeader, scan_markers, scan_start
from gpuload.packing.jpeg_huffman import read_tables
from gpuload.packing.jpeg_indexing import add_index

small = mock.patch.multiple("gpuload.packing.jpeg_indexing", SMALLEST=1, AT_LEAST=65_000)


def test_coded_data_metadata_and_tables_stay():
    noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    jpeg = encode(noise, "JPEG", icc_profile=b"an ICC profile", comment=b"a comment")
    made = add_index(jpeg + b"a second picture", header_of(jpeg))
    header, other = header_of(made), header_of(jpeg)
    assert made[scan_start(made, header) :] == jpeg[scan_start(jpeg, other) :]
    assert made[: header.index_at] == jpeg[: header.index_at]
    assert b"a comment" in made[: header.index_at]
    assert len(made) < 1.055 * len(jpeg)
    assert made.endswith(jpeg[header.index_at :])


def test_codes_that_a_table_lacks_are_added():
    jpeg = restarted("4:2:0", (6, 4), 0, content="few")
    with small:
        made = add_index(jpeg, header_of(jpeg))
    before, after = (read_tables(data, header_of(data))[0] for data in (jpeg, made))
    assert before != after
    for number, table in before.items():
        assert after[number].codes().items() >= table.codes().items()
    np.testing.assert_array_equal(*(np.asarray(Image.open(io.BytesIO(data))) for data in (jpeg, made)))


def test_a_larger_picture_has_its_points_further_apart():
    found = []
    for size in (20, 40, 80):
        jpeg = restarted("4:4:4", (size, size), 0)
        found.append(find_grid(made := add_index(jpeg, header_of(jpeg)), header_of(made)))
    with mock.patch("gpuload.packing.jpeg_indexing.MOST_BYTES", 10_000):
        limited = add_index(jpeg, header_of(jpeg))
    assert len(limited) < len(jpeg) + 10_010
    assert find_grid(limited, header_of(limited)).across > found[-1].across


def test_bits_of_rows_longer_than_16_bits_count():
    """Noise of a high quality, whose rows have more than 65,535 bits."""
    noise = np.random.default_rng(0).integers(0, 256, (16, 3000, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=95, subsampling=0)
    jpeg = file.getvalue()
    made = add_index(jpeg, header_of(jpeg))
    whole = np.asarray(Image.open(file))
    with always:
        part = cut(made, header_of(made), (9, 2000, 5, 500))
    pixels = np.asarray(Image.open(io.BytesIO(part.data)))
    top, left, height, width = part.region_tlhw
    np.testing.assert_array_equal(pixels[top : top + height, left : left + width], whole[9:14, 2000:2500])


def test_what_is_out_of_the_ordinary_has_no_index():
    noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    jpeg = encode(noise, "JPEG")
    header = header_of(jpeg)
    start = header.first_scan
    turned = jpeg[: start + 5] + jpeg[start + 7 : start + 9] + jpeg[start + 5 : start + 7] + jpeg[start + 9 :]
    assert add_index(jpeg, header) is not None
    others = turned, encode(noise, "JPEG", progressive=True), encode(noise, "JPEG", restart_marker_blocks=2)
    for other in (*others, encode(noise, "JPEG", mode="CMYK"), encode(noise[:30, :30], "JPEG")):
        assert add_index(other, header_of(other)) is None


@pytest.mark.parametrize("seed", range(3))
def test_no_header_breaks_it(seed):
    """Bytes of the header are changed: then there is an index, or none, and cuts that fit it, or none."""
    rng, made = np.random.default_rng(seed), 0
    smooth = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((96, 72))
    file = io.BytesIO()
    smooth.save(file, "JPEG", quality=70, subsampling=seed)
    with small, always:
        for _ in range(150):
            jpeg = bytearray(file.getvalue())
            for at in rng.integers(2, header_of(file.getvalue()).first_scan + 14, 2):
                jpeg[at] = rng.integers(256)
            header = scan_markers(bytes(jpeg))
            indexed = None if header is None else add_index(bytes(jpeg), header)
            if indexed is not None:
                made += 1
                of_index: JpegHeader = header_of(indexed)
                if of_index.height > 50 and of_index.width > 70:
                    cut(indexed, of_index, (20, 30, 30, 40))
    assert made > 10
