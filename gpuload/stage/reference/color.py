"""The arithmetic of colours on levels, and Pillow's operations on single pixels (solarize, posterize, equalize and
others): on batches on any device, and tuned for one image on the CPU.

Results are whole numbers. The meaning is Pillow's (ImageEnhance, ImageOps, and torchvision's hue shift in Pillow's
HSV): blends are truncated, not rounded. Statistics of an image are sums and counts of whole numbers that are exact in
floats, so they depend neither on the batch nor on the order of summation. What is not linear goes through tables of 256
entries.

Batches are float tensors N×C×H×W with levels 0 … 255. The functions of `ADJUST` work in place; `factor` is a number for
all images, or a tensor of shape (N, 1, 1, 1). `POINTS` are the operations on pixels.

`single_colors` gives the same results for one image. The time of contrast and hue depends on the number of passes over
an image's planes and on whether they stay in the cache, so they work in place on float32 C×H×W. numpy and torch share
that memory, and each is used where it is faster (a plane of 224×224, one core: a difference takes 2.8 µs in numpy and
3.7 in torch, clamping 5.4 and 3.0, `copysign` 24 and 10.5).

The operations on pixels of one image work on the uint8 levels H×W×C, a quarter of the memory of floats. Comparisons and
masks of bytes take many bytes an instruction (224×224×3: 10 µs each); numpy's look-up turns bytes into 64-bit indices
first, so tables go through `bytes.translate` (20 µs a plane, a third of numpy's time).

Runs in the process of the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.reference.canvas import Canvas, Floats

__all__ = [
    "ADJUST",
    "GUARD",
    "LUMA",
    "POINTS",
    "TINY",
    "ImageOperation",
    "equalize_table",
    "luma",
    "single_colors",
    "stretch_table",
]

Factor = float | torch.Tensor
ImageOperation = Callable[[Canvas, Sequence[float]], None]

LEVELS: Final = 256

# ITU-R 601-2 luma in Pillow's fixed point (Convert.c): (19595 R + 38470 G + 7471 B + 32768) >> 16. In float32 all
# products and sums are exact, since they have 24 bits.
LUMA: Final = (19595 / 65536, 38470 / 65536, 7471 / 65536)
HALF: Final = torch.tensor(0.5, device="cpu")

# An affine blend, m + f (x - m) = f x + (1 - f) m, loses the last bits where x = m, and truncated it would be a level
# too low. This is more than what is lost (6e-5 at 511), and shifts one level in 10,000.
GUARD: Final = 1e-4

TINY: Final = 1e-20  # added to whole numbers that may be 0 before 0 is divided by them


def luma(levels: torch.Tensor) -> torch.Tensor:
    """The grey levels, N×1×H×W."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.split(1, dim=1)
    grey = torch.add(HALF, red, alpha=LUMA[0])
    return grey.add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).floor_()


def _to_levels(levels: torch.Tensor, factor: Factor) -> None:
    """Clamp to 0 … 255, which a factor in 0 … 1 never leaves, and truncate."""
    if isinstance(factor, torch.Tensor) or factor > 1:
        levels.clamp_(0, 255)
    levels.floor_()


def brightness(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with black: Pillow's `ImageEnhance.Brightness`."""
    levels.mul_(factor)
    _to_levels(levels, factor)


def contrast(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with the mean grey level, rounded: Pillow's `ImageEnhance.Contrast`. It is the grey level of the mean
    colour; Pillow's mean of the rounded grey levels differs by some thousandths."""
    channels, height, width = levels.shape[1:]
    # Rows first: their sums stay below 2**24, where float32 is exact, then float64, exact below 2**53.
    sums = levels.sum(dim=3, keepdim=True).sum(dim=2, keepdim=True, dtype=torch.float64)
    if channels == 3:
        sums = sums[:, :1] * LUMA[0] + sums[:, 1:2] * LUMA[1] + sums[:, 2:] * LUMA[2]
    mean = sums.div(height * width).add_(0.5).floor_()
    # The factor is a float32, as Pillow's is; the summand is computed in float64 on all devices.
    mean_share = 1 - (factor.double() if isinstance(factor, torch.Tensor) else factor)
    levels.mul_(factor).add_((mean * mean_share + GUARD).to(levels.dtype))
    _to_levels(levels, factor)


def saturation(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with the grey levels: Pillow's `ImageEnhance.Color`."""
    if levels.shape[1] == 1:
        return
    torch.lerp(luma(levels), levels, factor, out=levels)
    _to_levels(levels, factor)


def hue(levels: torch.Tensor, factor: Factor) -> None:
    """Turn the hue by a fraction of the circle: Pillow's HSV and back, with torchvision's shift of H by ⌊255 factor⌋.
    H and S are rounded down to whole numbers in 0 … 255 on the way, as in Pillow."""
    if levels.shape[1] == 1:
        return
    red, green, blue = levels.split(1, dim=1)
    value = torch.maximum(torch.maximum(red, green), blue)
    lowest = torch.minimum(torch.minimum(red, green), blue)
    chroma = value - lowest
    # With R, G, B in 0 … 1 between the least and the greatest channel, the hue is 1 + G + B - R sixths of the circle
    # where G ≥ B, and 5 - (G + B - R) elsewhere: 3 minus a distance with the sign of G - B.
    distance = 2 - (green + blue - red - lowest) / (chroma + TINY)
    turns = torch.copysign(distance, green - blue).mul_(-255 / 6).add_(255 / 2).floor_()
    shift = torch.trunc(factor * 255).to(levels.dtype) if isinstance(factor, torch.Tensor) else int(factor * 255)
    sixths = _wrap(turns + shift, 256).mul_(6 / 255)
    # By how much channels are below the value at most: the saturation, rounded down, times the value.
    lack = (chroma * 255).div_(value + TINY).floor_().mul_(value).mul_(1 / 255)
    value = value - lack + 0.5
    for channel, start, sign, centre in ((red, -1, 1, 3), (green, 2, -1, 2), (blue, 2, -1, 4)):
        share = (sixths - centre).abs_().mul_(sign).add_(start).clamp_(0, 1)
        torch.add(value, share.mul_(lack), out=channel)
    levels.floor_()


def _wrap(numbers: torch.Tensor, period: float) -> torch.Tensor:
    """Remainders, in place; `torch.remainder` takes several times as long."""
    return numbers.sub_(torch.mul(numbers, 1 / period).floor_(), alpha=period)


ADJUST: Final[dict[str, Callable[[torch.Tensor, Factor], None]]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
}


def _contrast(canvas: Canvas, values: Sequence[float]) -> None:
    levels, factor = canvas.floats(), values[0]
    channels, height, width = levels.array.shape
    # As in `contrast`, without its many operations on single numbers.
    sums = levels.tensor.sum(dim=2).numpy().sum(axis=1, dtype=np.float64).tolist()
    grey = sums[0] if channels == 1 else sum(weight * total for weight, total in zip(LUMA, sums, strict=True))
    mean = int(grey / (height * width) + 0.5)
    np.multiply(levels.array, factor, out=levels.array)
    np.add(levels.array, mean * (1 - float(np.float32(factor))) + GUARD, out=levels.array)
    _to_levels(levels.tensor, factor)


class _SingleHue:
    """`hue` for one image after the other, with three planes of scratch memory."""

    def __init__(self) -> None:
        self._scratch = Floats(3, 0, 0)

    def __call__(self, canvas: Canvas, values: Sequence[float]) -> None:
        levels = canvas.floats()
        if len(levels.array) == 1:
            return
        if self._scratch.array.shape != levels.array.shape:
            self._scratch = Floats(*levels.array.shape)
        red, green, blue = levels.array
        value, chroma, turns = self._scratch.array
        turns_tensor, lowest = self._scratch.tensor[2], chroma
        np.maximum(np.maximum(red, green, out=value), blue, out=value)
        np.minimum(np.minimum(red, green, out=lowest), blue, out=lowest)
        np.add(green, blue, out=turns)  # the formulas are those of `hue`
        np.subtract(turns, red, out=turns)
        np.subtract(turns, lowest, out=turns)
        np.subtract(green, blue, out=green)
        np.subtract(value, lowest, out=chroma)
        np.add(chroma, TINY, out=red)
        np.divide(turns, red, out=turns)
        np.subtract(2.0, turns, out=turns)
        turns_tensor.copysign_(levels.tensor[1])
        np.multiply(turns, -255 / 6, out=turns)
        np.add(turns, 255 / 2, out=turns)
        np.floor(turns, out=turns)
        np.add(turns, int(values[0] * 255) % 256, out=turns)
        np.subtract(turns, 255.0, out=red)
        levels.tensor[0].clamp_(0, 1).mul_(256.0)  # 256 where the hue is 256 or more
        np.subtract(turns, red, out=turns)
        np.multiply(turns, 6 / 255, out=turns)
        np.multiply(chroma, 255.0, out=chroma)  # becomes `lack`
        np.add(value, TINY, out=red)
        np.divide(chroma, red, out=chroma)
        np.floor(chroma, out=chroma)
        np.multiply(chroma, value, out=chroma)
        np.multiply(chroma, 1 / 255, out=chroma)
        np.subtract(value, chroma, out=value)
        np.add(value, 0.5, out=value)
        for number, (centre, inverted) in enumerate(((3.0, False), (2.0, True), (4.0, True))):
            channel = levels.array[number]
            np.subtract(turns, centre, out=channel)
            np.abs(channel, out=channel)
            if inverted:
                np.subtract(2.0, channel, out=channel)
            else:
                np.subtract(channel, 1.0, out=channel)
            levels.tensor[number].clamp_(0, 1)
            np.multiply(channel, chroma, out=channel)
            np.add(channel, value, out=channel)
        levels.tensor.floor_()


def posterize_step(bits: float) -> int:
    """The distance of neighbouring levels if this many bits are kept."""
    return 1 << (8 - int(bits))


def invert(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Pillow's `ImageOps.invert`."""
    return levels.neg_().add_(255)


def solarize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Invert levels from a threshold on: Pillow's `ImageOps.solarize`."""
    threshold = _constant(np.ceil(values[:, 0]), levels)  # `ceil` in float64: 34 + 1e-14 is not 34
    return torch.where(levels < threshold, levels, 255 - levels)


def solarize_add(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Raise levels below a threshold, to 255 at most: timm's, by Pillow's `Image.point`."""
    threshold, added = _constant(values[:, 0], levels), _constant(values[:, 1], levels)
    return torch.where(levels < threshold, (levels + added).clamp_(max=255), levels)


def posterize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Keep the upper bits: Pillow's `ImageOps.posterize`; with 0 bits all levels are 0."""
    step = _constant(np.array([posterize_step(bits) for bits in values[:, 0].tolist()]), levels)
    return levels.div_(step).floor_().mul_(step)


def grayscale(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Luma in all channels: Pillow's `convert("L")`."""
    return luma(levels).expand_as(levels)


def permute(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Channels in another order; a single channel stays."""
    if levels.shape[1] == 1:
        return levels
    channels = upload(values[:, :3].astype(np.int64), levels.device)
    return levels[torch.arange(len(levels), device=levels.device)[:, None], channels]


def autocontrast(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Stretch each channel to 0 … 255: Pillow's `ImageOps.autocontrast`."""
    lowest, highest = torch.aminmax(levels.flatten(2), dim=2)
    return _look_up(levels, stretch_table(lowest.to(torch.float64), highest.to(torch.float64)))


def equalize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Spread the levels of each channel evenly: Pillow's `ImageOps.equalize`."""
    indices = levels.flatten(2).to(torch.int64)
    counts = indices.new_zeros(*levels.shape[:2], LEVELS)
    counts.scatter_add_(2, indices, torch.ones_like(indices))
    return _look_up(levels, equalize_table(counts))


POINTS: Final[dict[str, Callable[[torch.Tensor, np.ndarray], torch.Tensor]]] = {
    "solarize": solarize,
    "posterize": posterize,
    "equalize": equalize,
    "autocontrast": autocontrast,
    "invert": invert,
    "grayscale": grayscale,
    "permute": permute,
    "solarize_add": solarize_add,
}


def stretch_table(lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """The new level of each level, float64 (…, 256), from the least and the greatest, float64 (…)."""
    ramp = torch.arange(LEVELS, dtype=torch.float64, device=lowest.device)
    span = highest - lowest
    scale = torch.full_like(span, 255) / span.clamp(min=1)  # torch would multiply a plain number by a reciprocal
    offset = -lowest * scale
    # Truncated, in the order of Pillow's operations, which are in float64 too.
    product = ramp * scale[..., None]
    stretched = (product + offset[..., None]).trunc_().clamp_(0, 255)
    return torch.where((span > 0)[..., None], stretched, ramp)


def equalize_table(counts: torch.Tensor) -> torch.Tensor:
    """The new level of each level, float64 (…, 256), from the numbers of pixels with it, int64 (…, 256)."""
    ramp = torch.arange(LEVELS, device=counts.device)
    last = torch.where(counts > 0, ramp, 0).amax(dim=-1, keepdim=True)
    step = (counts.sum(dim=-1, keepdim=True) - counts.gather(-1, last)) // 255
    before = counts.cumsum(dim=-1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table, ramp).to(torch.float64)


def _look_up(levels: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Each channel through its table, N×C×256."""
    return tables.to(levels.dtype).gather(2, levels.flatten(2).to(torch.int64)).view_as(levels)


def _constant(numbers: np.ndarray, levels: torch.Tensor) -> torch.Tensor:
    return upload(numbers.astype(np.float32)[:, None, None, None], levels.device)


def _invert(canvas: Canvas, values: Sequence[float]) -> None:
    canvas.set(np.bitwise_not(canvas.image()))


def _posterize(canvas: Canvas, values: Sequence[float]) -> None:
    canvas.set(np.bitwise_and(canvas.image(), np.uint8(LEVELS - posterize_step(values[0]) & 255)))


def _solarize(canvas: Canvas, values: Sequence[float]) -> None:
    image = canvas.image()
    threshold = int(np.ceil(values[0]))  # the first level that is inverted
    if threshold > 255:
        return
    above = np.greater_equal(image, max(threshold, 0)).view(np.uint8)
    canvas.set(np.bitwise_xor(image, np.negative(above, out=above)))  # 255 where it was 1


def _autocontrast(canvas: Canvas, values: Sequence[float]) -> None:
    planes = _planes(canvas)
    flat = planes.reshape(len(planes), -1)
    ends = np.array([flat.min(axis=1), flat.max(axis=1)], np.float64)
    canvas.set(_look_up_planes(planes, stretch_table(*torch.from_numpy(ends))))


def _equalize(canvas: Canvas, values: Sequence[float]) -> None:
    planes = _planes(canvas)
    counts = [torch.bincount(torch.from_numpy(plane.reshape(-1)), minlength=LEVELS) for plane in planes]
    canvas.set(_look_up_planes(planes, equalize_table(torch.stack(counts))))


def _planes(canvas: Canvas) -> np.ndarray:
    """A copy of the levels, C×H×W."""
    return canvas.image().transpose(2, 0, 1).copy()


def _look_up_planes(planes: np.ndarray, tables: torch.Tensor) -> np.ndarray:
    """Each plane through its table of C × 256, in place; returned as H×W×C."""
    for plane, table in zip(planes, tables.to(torch.uint8).numpy(), strict=True):
        plane[:] = np.frombuffer(plane.tobytes().translate(table.tobytes()), np.uint8).reshape(plane.shape)
    return planes.transpose(1, 2, 0)


def single_colors() -> dict[str, ImageOperation]:
    """Return those operations of `ADJUST` and `POINTS` that are tuned for one image after the other."""

    def of_batch(adjust: Callable[[torch.Tensor, Factor], None]) -> ImageOperation:
        return lambda canvas, values: adjust(canvas.floats().tensor[None], values[0])

    return {
        "brightness": of_batch(brightness),
        "contrast": _contrast,
        "saturation": of_batch(saturation),
        "hue": _SingleHue(),
        "invert": _invert,
        "posterize": _posterize,
        "solarize": _solarize,
        "autocontrast": _autocontrast,
        "equalize": _equalize,
    }
