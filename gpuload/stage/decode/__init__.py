"""Decoding on the device: workers only read files, and the main process decodes a batch's files on the stage's device.

`choose` decides which decoder a device uses; `backend` has the types that a decoder takes and returns, and
`nvimagecodec` is the only decoder. `images` turns a batch's files into the same pixels and tables that workers would
have produced, so later code sees no difference; `threads` calls the decoders next to the loop. `crops` contains the
kernel that copies a batch's crops.
"""

from __future__ import annotations

from gpuload.stage.decode.choose import Choice, choose, decoders_for_threads
from gpuload.stage.decode.images import ImageDecoder

__all__ = ["Choice", "ImageDecoder", "choose", "decoders_for_threads"]
