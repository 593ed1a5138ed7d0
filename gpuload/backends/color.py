"""The arithmetic of colour transforms on levels: float tensors N×C×H×W that hold whole numbers in 0 … 255.

Every function works in place and leaves whole numbers behind. The meaning is Pillow's (ImageEnhance, and the hue shift
that torchvision makes of Pillow's HSV): blends are cut off after the decimal point, not rounded. Statistics of an image
are sums of whole numbers that are exact in floats, so they are the same in any batch and in any order of summation.

`factor` is a number for all images, or a tensor of shape (N, 1, 1, 1). Runs on any device, in the process of the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

__all__ = ["ADJUST", "GUARD", "LUMA", "TINY", "luma"]

Factor = float | torch.Tensor

# ITU-R 601-2 luma in Pillow's fixed point (Convert.c): (19595 R + 38470 G + 7471 B + 32768) >> 16. In float32 all
# products and sums are exact, since they have 24 bits.
LUMA: Final = (19595 / 65536, 38470 / 65536, 7471 / 65536)

# A blend by an affine map m + f (x - m) = f x + (1 - f) m loses the last bits where x = m, and cutting off would then
# miss a level; this is more than what is lost (6e-5 at 511), and shifts one level in 10,000.
GUARD: Final = 1e-4

TINY: Final = 1e-20  # added to whole numbers that may be 0 before they divide 0


def luma(levels: torch.Tensor) -> torch.Tensor:
    """The grey levels, N×1×H×W."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.split(1, dim=1)
    grey = torch.mul(red, LUMA[0])
    return grey.add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).add_(0.5).floor_()


def _to_levels(levels: torch.Tensor, factor: Factor) -> None:
    """Cut off what is outside 0 … 255 and behind the decimal point. A factor in 0 … 1 cannot lead outside."""
    if isinstance(factor, torch.Tensor) or factor > 1:
        levels.clamp_(0, 255)
    levels.floor_()


def brightness(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with black: Pillow's `ImageEnhance.Brightness`."""
    levels.mul_(factor)
    _to_levels(levels, factor)


def contrast(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with the mean grey level, rounded: Pillow's `ImageEnhance.Contrast`.

    It is the grey level of the mean colour; Pillow takes the mean of the rounded grey levels, which lies within some
    thousandths.
    """
    channels, height, width = levels.shape[1:]
    # Rows first: their sums stay below 2**24, where float32 is exact, then float64, exact below 2**53.
    sums = levels.sum(dim=3, keepdim=True).sum(dim=2, keepdim=True, dtype=torch.float64)
    if channels == 3:
        sums = sums[:, :1] * LUMA[0] + sums[:, 1:2] * LUMA[1] + sums[:, 2:] * LUMA[2]
    mean = sums.div(height * width).add_(0.5).floor_()
    # The factor is a float32, as Pillow's is; what is added is worked out in float64 on all devices.
    rest = 1 - (factor.double() if isinstance(factor, torch.Tensor) else factor)
    levels.mul_(factor).add_((mean * rest + GUARD).to(levels.dtype))
    _to_levels(levels, factor)


def saturation(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with the grey levels: Pillow's `ImageEnhance.Color`."""
    if levels.shape[1] == 1:
        return
    torch.lerp(luma(levels), levels, factor, out=levels)
    _to_levels(levels, factor)


def hue(levels: torch.Tensor, factor: Factor) -> None:
    """Turn the hue by a fraction of the circle: Pillow's HSV and back, with torchvision's shift of H by ⌊255 factor⌋.

    H and S are rounded down to whole numbers in 0 … 255 on the way, as Pillow's are.
    """
    if levels.shape[1] == 1:
        return
    red, green, blue = levels.split(1, dim=1)
    value = torch.maximum(torch.maximum(red, green), blue)
    least = torch.minimum(torch.minimum(red, green), blue)
    chroma = value - least
    # With R, G, B in 0 … 1 between the least and the greatest channel, the hue is 1 + G + B - R sixths of the circle
    # where G ≥ B, and 5 - (G + B - R) elsewhere: 3 minus a distance with the sign of G - B.
    distance = 2 - (green + blue - red - least) / (chroma + TINY)
    turns = torch.copysign(distance, green - blue).mul_(-255 / 6).add_(255 / 2).floor_()
    shift = torch.trunc(factor * 255).to(levels.dtype) if isinstance(factor, torch.Tensor) else int(factor * 255)
    sixths = _wrap(turns + shift, 256).mul_(6 / 255)
    # What the channels lack at most: the saturation, rounded down to whole numbers as Pillow's is, of the value.
    lack = (chroma * 255).div_(value + TINY).floor_().mul_(value).mul_(1 / 255)
    value = value - lack + 0.5
    for channel, start, sign, centre in ((red, -1, 1, 3), (green, 2, -1, 2), (blue, 2, -1, 4)):
        share = (sixths - centre).abs_().mul_(sign).add_(start).clamp_(0, 1)
        torch.add(value, share.mul_(lack), out=channel)
    levels.floor_()


def _wrap(numbers: torch.Tensor, period: float) -> torch.Tensor:
    """The remainder of a division, in place; `torch.remainder` takes several times as long."""
    return numbers.sub_(torch.mul(numbers, 1 / period).floor_(), alpha=period)


ADJUST: Final[dict[str, Callable[[torch.Tensor, Factor], None]]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
}
