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
    made: list[JpegDecoder] = [SimpleJpeg()]
    with contextlib.suppress(ImportError):
        made.append(NvImageCodecRegions())
    return made


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
    whole, said = SimpleJpeg().decode(jpeg, header, grey, (0, 0, header.height, header.width))
    assert whole is not None, said
    for region in regions:
        with always:
            made = cut(jpeg, header, region)
        assert made.header[:5] == header_of(made.data)[:5]
        top, left, height, width = region
        for decoder in decoders:
            pixels, said = decoder.decode(made.data, made.header, grey, made.region_tlhw)
            assert not said
            np.testing.assert_array_equal(pixels, whole[top : top + height, left : left + width])
