"""Crops decoded with and without cutting, for tests of cutting at restart markers and by an index."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
from helpers.jpeg_restarts import header_of

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.cut import cut, is_cuttable
from gpuload.decode.jpeg import JpegDecoder, NvImageCodecRegions, SimpleJpeg
from gpuload.errors import DecodeError

Region = tuple[int, int, int, int]
always_cutting = mock.patch("gpuload.decode.cut._pays_off", return_value=True)  # cut even where it does not pay off


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
    header, gray = header_of(jpeg), sampling.startswith("grey")
    image, message = SimpleJpeg().decode(jpeg, header, gray, (0, 0, header.height, header.width))
    assert image is not None, message
    for region in regions:
        with always_cutting:
            part = cut(jpeg, header, region)
        assert part.header[:5] == header_of(part.data)[:5]
        top, left, height, width = region
        for decoder in decoders:
            pixels, message = decoder.decode(part.data, part.header, gray, part.region_tlhw)
            assert not message
            np.testing.assert_array_equal(pixels, image[top : top + height, left : left + width])


def check_same_without_cutting(jpeg: bytes, region: Region) -> np.ndarray | None:
    """Check that a region has the same pixels, or is refused, with and without cutting. Return the pixels."""
    decoder = Decoder(Decode())
    expected, pixels = without_cutting(decoder, jpeg, region), with_cutting(decoder, jpeg, region)
    assert (pixels is None) == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(pixels, expected)
    return pixels


def check_not_cut(jpeg: bytes, region: Region) -> None:
    """Check that a JPEG cannot be cut, and that a region is decoded, or refused, as without cutting."""
    header = header_of(jpeg)
    with always_cutting:
        assert cut(jpeg, header, region) is None
    assert not is_cuttable(jpeg, header)
    check_same_without_cutting(jpeg, region)
