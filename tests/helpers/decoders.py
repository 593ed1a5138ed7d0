"""Decoders that use only one of nvImageCodec, simplejpeg and Pillow, and the pixels of gpuload and of Pillow."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from gpuload.datasets.sample import Encoded, Mode
from gpuload.decode import Decode, Decoder

NAMES = ("nvImageCodec", "simplejpeg", "Pillow")


def decoder_by(name: str, **options: Any) -> Decoder:
    """Make a decoder that uses this library for JPEGs, if installed, and Pillow for files that the library refuses."""
    decoder = Decoder(Decode(**options))
    decoder.jpeg_decoders = [jpeg_decoder for jpeg_decoder in decoder.jpeg_decoders[0] if jpeg_decoder.name == name], []
    return decoder


def decode(data: bytes, mode: Mode = "RGB", region: tuple[int, int, int, int] | None = None) -> np.ndarray:
    """Decode an image, or a region of it, with the default options."""
    decoder, encoded = Decoder(Decode()), Encoded(data, mode)
    header = decoder.header(encoded)
    pixels = decoder.decode(encoded, header, region)
    assert pixels.shape[2] == decoder.channels(header, mode)
    return pixels


def pillow_pixels(data: bytes, mode: str = "RGB", exif: bool = False) -> np.ndarray:
    """Decode an image with Pillow to H×W×C."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(data))
        pixels = np.asarray((ImageOps.exif_transpose(image) if exif else image).convert(mode))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
