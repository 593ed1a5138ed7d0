"""Decoding on the device: workers only read files, the main process has a batch of them decoded where the stage is.

Which decoder a device has, `choose` decides; `backend` is what gpuload needs of one, and `nvimagecodec` is the one that
there is. `images` makes of a batch's files what workers' pixels would have been: nothing after it knows the difference.
`crops` is the kernel that copies a batch's crops.
"""

from __future__ import annotations

from gpuload.stage.decode.choose import Choice, choose
from gpuload.stage.decode.images import ImageDecoder

__all__ = ["Choice", "ImageDecoder", "choose"]
