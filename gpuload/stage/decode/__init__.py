"""Decoding on the device: workers only read files, the main process has a batch of them decoded where the stage is.

Which decoder a device has is `choose`'s to say, `backend` is what gpuload needs of one, `nvimagecodec` is one. `images`
makes of a batch's files what workers' pixels would have been: nothing behind it knows the difference.
"""

from __future__ import annotations

from gpuload.stage.decode.choose import Choice, choose
from gpuload.stage.decode.images import ImageDecoder

__all__ = ["Choice", "ImageDecoder", "choose"]
