"""PNM files of any maximum, which Pillow decodes slowly, number by number, equal Pillow's result."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, PpmImagePlugin

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.pillow_images import open_image
from gpuload.errors import DecodeError


@pytest.mark.parametrize("maximum", [1, 7, 200, 255, 256, 1000, 65535])
def test_pnm_of_any_maximum_equals_pillows_slow_decoder(maximum, monkeypatch):
    rng, dtype = np.random.default_rng(maximum), "u1" if maximum < 256 else ">u2"
    grey, colour = rng.integers(0, maximum + 1, (53, 37)), rng.integers(0, maximum + 1, (53, 37, 3))
    files = [b"P5\n# by hand\n37 53 %d\n" % maximum + grey.astype(dtype).tobytes()]
    files += [b"P6 37 53 %d\n" % maximum + colour.astype(dtype).tobytes() + b"more"]
    expected = [Image.open(io.BytesIO(data)) for data in files]
    pixels = [np.asarray(image) for image in expected]
    monkeypatch.setattr(PpmImagePlugin.PpmDecoder, "decode", lambda *_: pytest.fail("read number by number"))
    for data, image, numbers in zip(files, expected, pixels, strict=True):
        opened = open_image(data, "PPM")
        assert np.array_equal(opened.values((0, 0, 53, 37)), numbers)
        assert opened.mode == image.mode


def test_truncated_pnm_raises_decode_error():
    decoder, encoded = Decoder(Decode()), Encoded(b"P6 1 2 200\n12345")
    with pytest.raises(DecodeError, match=r"not enough image data|truncated"):
        decoder.decode(encoded, decoder.header(encoded))
