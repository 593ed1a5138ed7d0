"""Crops decoded with and without cutting, for the tests of both ways to cut."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
from helpers.jpeg_restarts import header_of

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decoder
from gpuload.decode.cut import cut
from gpuload.decode.jpeg import JpegDecoder, NvImageCodecRegions, SimpleJpeg
from gpuload.errors import DecodeError

Region = tuple[int, int, int, int]
always = mock.patch("gpuload.decode.cut._pays_off", return_value=True)


def jpeg_decoders() -> list[JpegDecoder]:
    decoders: list[JpegDecoder] = [SimpleJpeg()]
    with contextlib.suppress(ImportError):
        decoders.append(NvImageCodecRegions())
    return decoders


def without_cutting(decoder: Decoder, jpeg: bytes, region: Region, mode: str = "RGB") -> np.ndarray | None:
    """Decode a region as if the JPEG had no restart interval and no index; None on an error."""
    encoded = Encoded(jpeg, mode)
    header = decoder.header(encoded)
    assert header.jpeg is not None
    header = header._replace(jpeg=header.jpeg._replace(restart_interval=0, index_at=0))
    try:
        return decoder.decode(encoded, header, region)
    except DecodeError:
        return None


def with_cutting(decoder: Decoder, jpeg: bytes, region: Region, mode: str = "RGB") -> np.ndarray | None:
    encoded = Encoded(jpeg, mode)
    try:
        return decoder.decode(encoded, decoder.header(encoded), region)
    except DecodeError:
        return None


def check_pixels(jpeg: bytes, sampling: str, regions: list[Region], decoders: list[JpegDecoder]) -> None:
    """Check that the pixels of cuts equal slices of the full image, with each decoder."""
    header, grey = header_of(jpeg), sampling.startswith("grey")
    full, messages = SimpleJpeg().decode(jpeg, header, grey, (0, 0, header.height, header.width))
    assert full is not None, messages
    for region in regions:
        with always:
            crop = cut(jpeg, header, region)
        assert crop.header[:5] == header_of(crop.data)[:5]
        top, left, height, width = region
        for decoder in decoders:
            pixels, messages = decoder.decode(crop.data, crop.header, grey, crop.region_tlhw)
            assert not messages
            np.testing.assert_array_equal(pixels, full[top : top + height, left : left + width])
