"""Decoders that use only one of nvImageCodec, simplejpeg and Pillow, for tests of each and of their agreement."""

from __future__ import annotations

from typing import Any

from gpuload.decode import Decode, Decoder

NAMES = ("nvImageCodec", "simplejpeg", "Pillow")


def decoder_by(name: str, **options: Any) -> Decoder:
    """Make a decoder that uses this library for JPEGs, if installed, and Pillow for files that the library refuses."""
    decoder = Decoder(Decode(**options))
    decoder.jpeg_decoders = [one for one in decoder.jpeg_decoders[0] if one.name == name], []
    return decoder
