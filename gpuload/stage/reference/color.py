"""Colour arithmetic on levels (pixel values 0–255), and Pillow's operations on single pixels (solarize, posterize,
equalize …), for batches on any device and, in tuned versions, for one image on the CPU.

Results are integers. The semantics are Pillow's (ImageEnhance, ImageOps, and torchvision's hue shift in Pillow's HSV):
blends are truncated, not rounded. Statistics of an image are sums and counts of integers, which are exact in floats, so
they depend neither on the batch nor on the order of summation. Non-linear mappings use tables of 256 entries.

Batches are N×C×H×W float tensors with levels 0 … 255. The functions in `ADJUST` work in place; `factor` is one number
for all images, or a tensor of shape (N, 1, 1, 1). `POINTS` holds the operations on pixels.

The operations from `single_colors` give the same results for one image. The time for contrast and hue depends on the
number of passes over an image's planes and on whether the planes stay in the cache, so they work in place on C×H×W
float32 arrays. numpy and torch share that memory, and the faster library is used for each operation (a plane of
224×224, one core: a subtraction takes 2.8 µs in numpy and 3.7 µs in torch, clamping 5.4 and 3.0, `copysign` 24 and
10.5).

The pixel operations for one image work on H×W×C uint8 levels, which use a quarter of the memory of floats. Comparisons
and masks process many bytes per instruction (224×224×3: 10 µs each). numpy's look-up first converts bytes to 64-bit
indices, so tables are applied with `bytes.translate` instead (20 µs per plane, a third of numpy's time).

This module runs in the stage's process, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.stage.device import upload, upload_arrays
from gpuload.stage.reference.canvas import Canvas, Floats

__all__ = [
    "ADJUST",
    "GAMMA_GUARD",
    "GUARD",
    "LUMA",
    "POINTS",
    "TINY",
    "ImageOperation",
    "equalize_table",
    "luma",
    "shadow_vertices",
    "single_colors",
    "stretch_table",
]

Factor = float | torch.Tensor
ImageOperation = Callable[[Canvas, Sequence[float]], None]

LEVELS: Final = 256

# ITU-R 601-2 luma in Pillow's fixed point (Convert.c): (19595 R + 38470 G + 7471 B + 32768) >> 16. All products and
# sums fit in 24 bits, so they are exact in float32.
LUMA: Final = (19595 / 65536, 38470 / 65536, 7471 / 65536)
HALF: Final = torch.tensor(0.5, device="cpu")

# An affine blend, m + f (x - m) = f x + (1 - f) m, can lose its last bits if x = m, and truncation would then make the
# level too low by one. This summand is larger than the loss (6e-5 at 511). It changes one level in 10,000, but up to 2%
# of the levels with a factor of 1.2, whose blends are often just below an integer.
GUARD: Final = 1e-4

# Added before a power is truncated: float32 powers lose less than this.
GAMMA_GUARD: Final = 1e-3

TINY: Final = 1e-20  # added to integer divisors that can be 0, to avoid dividing 0 by 0


def luma(levels: torch.Tensor) -> torch.Tensor:
    """Return the grey levels, N×1×H×W."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.split(1, dim=1)
    grey = torch.add(HALF, red, alpha=LUMA[0])
    return grey.add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).floor_()


def _truncate(levels: torch.Tensor, factor: Factor) -> None:
    """Truncate, and clamp to 0 … 255 unless the factor is in 0 … 1, which cannot leave this range."""
    if isinstance(factor, torch.Tensor) or factor > 1:
        levels.clamp_(0, 255)
    levels.floor_()


def brightness(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with black: Pillow's `ImageEnhance.Brightness`."""
    levels.mul_(factor)
    _truncate(levels, factor)


def contrast(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with the rounded mean grey level: Pillow's `ImageEnhance.Contrast`. The mean is the grey level of the mean
    colour; Pillow's mean of rounded grey levels differs by a few thousandths."""
    channels, height, width = levels.shape[1:]
    # Sum rows first: their sums stay below 2**24, so float32 is exact. Then use float64, which is exact below 2**53.
    sums = levels.sum(dim=3, keepdim=True).sum(dim=2, keepdim=True, dtype=torch.float64)
    if channels == 3:
        sums = sums[:, :1] * LUMA[0] + sums[:, 1:2] * LUMA[1] + sums[:, 2:] * LUMA[2]
    mean = sums.div(height * width).add_(0.5).floor_()
    # The factor is a float32, as in Pillow; the summand is computed in float64 on all devices.
    mean_share = 1 - (factor.double() if isinstance(factor, torch.Tensor) else factor)
    levels.mul_(factor).add_((mean * mean_share + GUARD).to(levels.dtype))
    _truncate(levels, factor)


def saturation(levels: torch.Tensor, factor: Factor) -> None:
    """Blend with the grey levels: Pillow's `ImageEnhance.Color`."""
    if levels.shape[1] == 1:
        return
    grey = luma(levels)
    # Pillow rounds the product and the sum. `torch.lerp`, `addcmul` and `add(alpha=)` round only the sum, so the result
    # is off by a level where only the rounded product gives an integer: 54 + 1.7 (24 - 54) = 3, for example.
    levels.sub_(grey).mul_(factor).add_(grey)
    _truncate(levels, factor)


def hue(levels: torch.Tensor, factor: Factor) -> None:
    """Rotate the hue by a fraction of the circle: convert to Pillow's HSV and back, with torchvision's shift of H by
    ⌊255 factor⌋. As in Pillow, H and S are rounded down to integers in 0 … 255 in between."""
    if levels.shape[1] == 1:
        return
    red, green, blue = levels.split(1, dim=1)
    value = torch.maximum(torch.maximum(red, green), blue)
    lowest = torch.minimum(torch.minimum(red, green), blue)
    chroma = value - lowest
    # If R, G and B are scaled so that the least channel is 0 and the greatest is 1, the hue is 1 + G + B - R sixths of
    # the circle where G ≥ B, and 5 - (G + B - R) elsewhere: 3 minus a distance with the sign of G - B.
    distance = 2 - (green + blue - red - lowest) / (chroma + TINY)
    turns = torch.copysign(distance, green - blue).mul_(-255 / 6).add_(255 / 2).floor_()
    shift = torch.trunc(factor * 255).to(levels.dtype) if isinstance(factor, torch.Tensor) else int(factor * 255)
    sixths = _wrap(turns + shift, 256).mul_(6 / 255)
    # The maximum distance of a channel below the value: the saturation, rounded down, times the value.
    max_drop = (chroma * 255).div_(value + TINY).floor_().mul_(value).mul_(1 / 255)
    value = value - max_drop + 0.5
    for channel, start, sign, centre in ((red, -1, 1, 3), (green, 2, -1, 2), (blue, 2, -1, 4)):
        share = (sixths - centre).abs_().mul_(sign).add_(start).clamp_(0, 1)
        torch.add(value, share.mul_(max_drop), out=channel)
    levels.floor_()


def _wrap(numbers: torch.Tensor, period: float) -> torch.Tensor:
    """Reduce values modulo `period` in place; `torch.remainder` takes several times as long."""
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
    # The result is the same as that of `contrast`, without its many tensor operations on scalars.
    sums = levels.tensor.sum(dim=2).numpy().sum(axis=1, dtype=np.float64).tolist()
    grey = sums[0] if channels == 1 else sum(weight * total for weight, total in zip(LUMA, sums, strict=True))
    mean = int(grey / (height * width) + 0.5)
    np.multiply(levels.array, factor, out=levels.array)
    np.add(levels.array, mean * (1 - float(np.float32(factor))) + GUARD, out=levels.array)
    _truncate(levels.tensor, factor)


class _SingleHue:
    """The `hue` operation for single images, with three planes of scratch memory."""

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
        np.add(green, blue, out=turns)  # the same formulas as in `hue`
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
        np.multiply(chroma, 255.0, out=chroma)  # becomes `max_drop`
        np.add(value, TINY, out=red)
        np.divide(chroma, red, out=chroma)
        np.floor(chroma, out=chroma)
        np.multiply(chroma, value, out=chroma)
        np.multiply(chroma, 1 / 255, out=chroma)
        np.subtract(value, chroma, out=value)
        np.add(value, 0.5, out=value)
        for index, (centre, is_inverted) in enumerate(((3.0, False), (2.0, True), (4.0, True))):
            channel = levels.array[index]
            np.subtract(turns, centre, out=channel)
            np.abs(channel, out=channel)
            if is_inverted:
                np.subtract(2.0, channel, out=channel)
            else:
                np.subtract(channel, 1.0, out=channel)
            levels.tensor[index].clamp_(0, 1)
            np.multiply(channel, chroma, out=channel)
            np.add(channel, value, out=channel)
        levels.tensor.floor_()


def posterize_step(bits: float) -> int:
    """Return the distance between neighbouring levels if this many bits are kept."""
    return 1 << (8 - int(bits))


def invert(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Invert levels: Pillow's `ImageOps.invert`."""
    return levels.neg_().add_(255)


def solarize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Invert levels at or above a threshold: Pillow's `ImageOps.solarize`."""
    threshold = _upload_per_image(np.ceil(values[:, 0]), levels)  # `ceil` in float64: 34 + 1e-14 is not 34
    return torch.where(levels < threshold, levels, 255 - levels)


def solarize_add(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Raise levels below a threshold, up to 255: timm's operation, which uses Pillow's `Image.point`."""
    threshold, increment = _upload_per_image(values[:, 0], levels), _upload_per_image(values[:, 1], levels)
    return torch.where(levels < threshold, (levels + increment).clamp_(max=255), levels)


def posterize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Keep the upper bits: Pillow's `ImageOps.posterize`; with 0 bits all levels are 0."""
    step = _upload_per_image(np.array([posterize_step(bits) for bits in values[:, 0].tolist()]), levels)
    return levels.div_(step).floor_().mul_(step)


def grayscale(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Write the luma, as computed by Pillow's `convert("L")`, to all channels."""
    return luma(levels).expand_as(levels)


def permute(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Reorder the channels; a single channel does not change."""
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


def gamma(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Raise levels to a power, truncated as in Albumentations."""
    tables = upload(np.stack([gamma_table(exponent) for exponent in values[:, 0].tolist()]), levels.device)
    return _look_up(levels, tables[:, None].expand(-1, levels.shape[1], -1))


def gamma_table(exponent: float) -> np.ndarray:
    """Return the new level for each level, float64 (256,), the same for an exponent of 1. Albumentations adds nothing,
    so it darkens levels whose product is just below an integer."""
    return np.floor((np.arange(LEVELS) / 255) ** exponent * 255 + GAMMA_GUARD)


def white_balance(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Multiply red and blue by factors, truncated as in Albumentations; a single channel does not change."""
    if levels.shape[1] == 3:
        factors = np.insert(values[:, :2], 1, 1, axis=1).astype(np.float32)
        levels.mul_(upload(factors, levels.device)[:, :, None, None]).clamp_(0, 255).floor_()
    return levels


def illumination(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Multiply levels by 1 plus a bell around a point, truncated as in Albumentations. The bell is the product of one
    number per row and one per column, from the host, so that it is the same on every device."""
    intensity, *centers, sigma = (values[:, column, None] for column in range(4))
    rows, columns = (
        np.exp(-(((np.arange(length) - center) / sigma) ** 2) / 2)
        for length, center in zip(levels.shape[2:], centers, strict=True)
    )
    rows, columns = upload_arrays([(intensity * rows).astype(np.float32), columns.astype(np.float32)], levels.device)
    gain = (rows[:, None, :, None] * columns[:, None, None, :]).add_(1)
    return levels.mul_(gain).clamp_(0, 255).floor_()


def shadow(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Darken a polygon, truncated as in Albumentations. As in OpenCV's `fillPoly`, the polygon consists of the pixels
    that its sides enclose an odd number of times, and of those on its sides."""
    rows, columns = (torch.arange(length, device=levels.device) for length in levels.shape[2:])
    rows = rows[:, None]
    ends = np.stack([shadow_vertices(row) for row in values.tolist()])
    sides = np.concatenate([ends, np.roll(ends, -1, axis=1)], axis=2).transpose(1, 2, 0).copy()
    is_inside = torch.zeros(len(levels), *levels.shape[2:], dtype=torch.bool, device=levels.device)
    is_on_side = is_inside.clone()
    for x0, y0, x1, y1 in upload(sides, levels.device)[..., None, None]:  # each n × 1 × 1
        across, down = x1 - x0, y1 - y0
        offset = across * (rows - y0) - down * (columns - x0)  # has the sign of `down` to the left of the side
        is_inside ^= ((rows >= y0) != (rows >= y1)) & (offset * down > 0)
        is_in_box = ((rows - y0) * (rows - y1) <= 0) & ((columns - x0) * (columns - x1) <= 0)
        is_on_side |= is_in_box & (2 * offset.abs() <= torch.maximum(across.abs(), down.abs()))
    share = upload(values[:, 0].copy(), levels.device)[:, None, None, None]
    return torch.where((is_inside | is_on_side)[:, None], (levels * share).floor_().to(levels.dtype), levels)


def shadow_vertices(values: list[float]) -> np.ndarray:
    """Return the vertices of a shadow, (x, y) in pixels, int64 (n, 2)."""
    left, top, right, bottom = values[1:5]
    key = Key(int(values[6]), int(values[7]))
    numbers = philox.uniforms(key, np.zeros(1, np.int64), 0, 2 * int(values[5])).reshape(-1, 2)
    return np.floor((left, top) + numbers * (right - left, bottom - top)).astype(np.int64)


POINTS: Final[dict[str, Callable[[torch.Tensor, np.ndarray], torch.Tensor]]] = {
    "solarize": solarize,
    "posterize": posterize,
    "equalize": equalize,
    "autocontrast": autocontrast,
    "invert": invert,
    "grayscale": grayscale,
    "permute": permute,
    "solarize_add": solarize_add,
    "gamma": gamma,
    "white_balance": white_balance,
    "illumination": illumination,
    "shadow": shadow,
}


def stretch_table(lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Return the table of `autocontrast`, which has the new level for each level, float64 (…, 256). The arguments are
    the lowest and highest level of each channel, float64 (…)."""
    ramp = torch.arange(LEVELS, dtype=torch.float64, device=lowest.device)
    span = highest - lowest
    scale = torch.full_like(span, 255) / span.clamp(min=1)  # with a plain 255, torch would multiply by the reciprocal
    offset = -lowest * scale
    # Truncate, and keep the order of Pillow's operations, which are also in float64.
    product = ramp * scale[..., None]
    stretched = (product + offset[..., None]).trunc_().clamp_(0, 255)
    return torch.where((span > 0)[..., None], stretched, ramp)


def equalize_table(counts: torch.Tensor) -> torch.Tensor:
    """Return the table of `equalize`, which has the new level for each level, float64 (…, 256). `counts` has the number
    of pixels with each level, int64 (…, 256)."""
    ramp = torch.arange(LEVELS, device=counts.device)
    last_level = torch.where(counts > 0, ramp, 0).amax(dim=-1, keepdim=True)
    step = (counts.sum(dim=-1, keepdim=True) - counts.gather(-1, last_level)) // 255
    counts_below = counts.cumsum(dim=-1) - counts
    table = ((counts_below + step // 2) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table, ramp).to(torch.float64)


def _look_up(levels: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Map each channel through its table; `tables` is N×C×256."""
    return tables.to(levels.dtype).gather(2, levels.flatten(2).to(torch.int64)).view_as(levels)


def _upload_per_image(numbers: np.ndarray, levels: torch.Tensor) -> torch.Tensor:
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
    mask = np.greater_equal(image, max(threshold, 0)).view(np.uint8)
    canvas.set(np.bitwise_xor(image, np.negative(mask, out=mask)))  # the mask's ones become 255


def _autocontrast(canvas: Canvas, values: Sequence[float]) -> None:
    planes = _planes(canvas)
    flat = planes.reshape(len(planes), -1)
    extremes = np.array([flat.min(axis=1), flat.max(axis=1)], np.float64)
    canvas.set(_look_up_planes(planes, stretch_table(*torch.from_numpy(extremes))))


def _equalize(canvas: Canvas, values: Sequence[float]) -> None:
    planes = _planes(canvas)
    counts = [torch.bincount(torch.from_numpy(plane.reshape(-1)), minlength=LEVELS) for plane in planes]
    canvas.set(_look_up_planes(planes, equalize_table(torch.stack(counts))))


def _planes(canvas: Canvas) -> np.ndarray:
    """Return a copy of the levels, C×H×W."""
    return canvas.image().transpose(2, 0, 1).copy()


def _look_up_planes(planes: np.ndarray, tables: torch.Tensor) -> np.ndarray:
    """Map each plane through its table, in place; `tables` is C×256. Return the result as H×W×C."""
    for plane, table in zip(planes, tables.to(torch.uint8).numpy(), strict=True):
        plane[:] = np.frombuffer(plane.tobytes().translate(table.tobytes()), np.uint8).reshape(plane.shape)
    return planes.transpose(1, 2, 0)


def single_colors() -> dict[str, ImageOperation]:
    """Return the operations of `ADJUST` and `POINTS` that have versions tuned for single images."""

    def apply_to_batch_of_one(adjust: Callable[[torch.Tensor, Factor], None]) -> ImageOperation:
        return lambda canvas, values: adjust(canvas.floats().tensor[None], values[0])

    return {
        "brightness": apply_to_batch_of_one(brightness),
        "contrast": _contrast,
        "saturation": apply_to_batch_of_one(saturation),
        "hue": _SingleHue(),
        "invert": _invert,
        "posterize": _posterize,
        "solarize": _solarize,
        "autocontrast": _autocontrast,
        "equalize": _equalize,
    }
