"""PNM files that Pillow reads number by number come out as Pillow reads them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.pillow_images import open_image, rewritten_pnm
from gpuload.errors import DecodeError


def decode(data: bytes) -> np.ndarray:
    decoder, encoded = Decoder(Decode()), Encoded(data)
    return decoder.decode(encoded, decoder.header(encoded))


def text(numbers: np.ndarray, between: bytes = b" ") -> bytes:
    return between.join(b"%d" % number for number in numbers.ravel().tolist())


@pytest.mark.parametrize("most", [1, 7, 200, 255, 256, 1000, 65535])
def test_pnm_of_any_maximum_is_what_pillow_makes_of_it_number_by_number(most):
    rng, dtype = np.random.default_rng(most), "u1" if most < 256 else ">u2"
    grey, colour = rng.integers(0, most + 1, (53, 37)), rng.integers(0, most + 1, (53, 37, 3))
    files = [b"P2\n# by hand\n37 53 %d\n" % most + text(grey, b"\n"), b"P3 37 53 %d\n" % most + text(colour)]
    files += [b"P5 37 53 %d\n" % most + grey.astype(dtype).tobytes()]
    files += [b"P6 37 53 %d\n" % most + colour.astype(dtype).tobytes() + b"more"]
    for data in files:
        opened = open_image(data, "PPM")
        assert rewritten_pnm(opened._image) is not None or (data[:2] in (b"P5", b"P6") and most in (255, 65535))
        expected = np.asarray(Image.open(io.BytesIO(data)))
        assert np.array_equal(opened.values((0, 0, 53, 37)), expected)
        assert opened.mode == Image.open(io.BytesIO(data)).mode


@pytest.mark.parametrize("between", [b"", b" ", b"\n"])
def test_a_bitmap_of_text(between):
    data = b"P1 37 53\n" + text(np.random.default_rng(0).integers(0, 2, (53, 37)), between)
    assert rewritten_pnm(open_image(data, "PPM")._image) is not None
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"1 2 3 4 5", "truncated|not enough"),
        (b"1 2 3 4 5 900", "too large"),
        (b"1 2 3 4 5 -6", "negative"),
        (b"1 2 3 4 5 x", "invalid literal"),
    ],
)
def test_what_is_wrong_with_a_pnm_says_pillow(body, complaint):
    with pytest.raises(DecodeError, match=complaint):
        decode(b"P3 1 2 255\n" + body)


def test_comments_within_a_pnm_are_left_out_and_blocks_end_between_numbers(monkeypatch):
    monkeypatch.setattr("gpuload.decode.pillow_images.PNM_BLOCK_BYTES", 5)
    for body in (b"1 2 3 # six\n4 5 6", b"1  2\n\n\n\n\n\n\n3 4\t5   6\n"):
        assert decode(b"P3 1 2 255\n" + body).ravel().tolist() == [1, 2, 3, 4, 5, 6]
