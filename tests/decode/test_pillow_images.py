"""PNM files of any maximum are decoded to the pixels of Pillow's decoder, which reads number by number and is slow."""

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
    images_by_pillow = [Image.open(io.BytesIO(data)) for data in files]
    pixels_by_pillow = [np.asarray(image) for image in images_by_pillow]
    monkeypatch.setattr(PpmImagePlugin.PpmDecoder, "decode", lambda *_: pytest.fail("read number by number"))
    for data, image, expected_pixels in zip(files, images_by_pillow, pixels_by_pillow, strict=True):
        opened = open_image(data, "PPM")
        assert np.array_equal(opened.values((0, 0, 53, 37)), expected_pixels)
        assert opened.mode == image.mode


def test_truncated_pnm_raises_decode_error():
    decoder, encoded = Decoder(Decode()), Encoded(b"P6 1 2 200\n12345")
    with pytest.raises(DecodeError, match=r"not enough image data|truncated"):
        decoder.decode(encoded, decoder.header(encoded))
