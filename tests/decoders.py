"""Decoders that give JPEGs to one of nvImageCodec, simplejpeg and Pillow: for tests of each, and that all agree."""

from __future__ import annotations

from typing import Any

from gpuload.decode import Decode, Decoder

NAMES = ("nvImageCodec", "simplejpeg", "Pillow")


def decoder_by(name: str, **options: Any) -> Decoder:
    """A decoder that gives JPEGs to this one, if it is installed, and to Pillow what it refuses."""
    decoder = Decoder(Decode(**options))
    decoder.jpeg_decoders = [one for one in decoder.jpeg_decoders[0] if one.name == name], []
    return decoder
