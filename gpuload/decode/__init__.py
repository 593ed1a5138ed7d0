"""Image bytes to pixels: the header first, then only the region that is needed.

Runs in workers, and in the main process with ``num_workers=0``. Imports no torch, and decoders at their first use.
`Decoder` is the interface: one per process. Which decoder gets what:

1. JPEGs of 8 bits, Huffman coded, grey or of three components go to nvImageCodec's CPU decoder, which decodes a region
   without the rest; if that is missing or complains, to simplejpeg; if that complains too, to Pillow.
   Where a JPEG has an index or restart markers, the region's part of its bytes is cut out first, and they get that
   (`cut`).
2. All other JPEGs (CMYK, YCCK, arithmetic …) and all other formats go to Pillow.

Pillow has the last word: what it decodes is decoded, what it refuses is refused. `jpeg` says what happens to damage.
"""

from __future__ import annotations

from gpuload.decode.decoder import Decoder
from gpuload.decode.header import Header
from gpuload.decode.options import Decode

__all__ = ["Decode", "Decoder", "Header"]
