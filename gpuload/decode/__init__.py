"""Decoding of image bytes to pixels: first the header, then only the requested region.

This package runs in workers, and in the main process with ``num_workers=0``. It does not import torch, and imports
decoders on first use. `Decoder` is the interface; each process has one instance. It chooses a decoder as follows:

1. Huffman-coded JPEGs of 8 bits with one or three components go to nvImageCodec's CPU decoder, which decodes only the
   region. If it is missing or rejects an image, the image goes to simplejpeg; if simplejpeg also rejects it, to Pillow.
   If a JPEG has an index or restart markers, the region's part of its bytes is cut out first, and these decoders
   receive only that part (see `cut`).
2. All other JPEGs (CMYK, YCCK, arithmetic coding …) and all other formats go to Pillow.

Pillow's result is final: gpuload decodes the files that Pillow decodes and refuses the files that Pillow refuses.
`jpeg` explains how damaged files are handled.
"""

from __future__ import annotations

from gpuload.decode.decoder import Decoder
from gpuload.decode.header import Header
from gpuload.decode.options import Decode

__all__ = ["Decode", "Decoder", "Header"]
