"""Operations on colours as the reference means them, built from DALI's operators and arithmetic.

They take and return uint8 H×W×C batches; `values`, float64 (n, `VALUES`), is what was drawn for each image. DALI's own
contrast turns about a constant, and its saturation and hue are rotations in YIQ, so none of them is used. The number of
operators decides the time, not what they do: each has memory of its own to fill, and a call takes 0.2 ms.

DALI rounds floats to levels, and Pillow truncates them: so half a level is subtracted before.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpuload.stage.dali.engine import ndd, numbers, own, types
from gpuload.stage.reference.color import GUARD, LUMA, TINY, posterize_step

__all__ = [
    "autocontrast",
    "blend",
    "brightness",
    "contrast",
    "grayscale",
    "hue",
    "in_channels",
    "invert",
    "permute",
    "posterize",
    "saturation",
    "solarize",
    "solarize_add",
    "to_levels",
]

math = ndd.math
CUT: Final = GUARD - 0.5  # added to a number before it is rounded, to truncate it


def to_levels(batch: ndd.Batch) -> ndd.Batch:
    """Floats as levels: rounded, and clamped to 0 … 255."""
    return ndd.cast(batch, dtype=ndd.uint8)


def blend(images: ndd.Batch, other: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Images times their factor, the first of the values, plus 1 - factor times other images or numbers."""
    factor = values[:, 0].astype(np.float32)
    rest = other * numbers(1 - factor, images) + CUT
    return to_levels(own(images * numbers(factor, images)) + rest)


def brightness(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Blend with black."""
    factor = ndd.as_batch(values[:, 0].astype(np.float32))
    shift = ndd.as_batch(np.full(len(values), (1e-5 - 0.5) / 255, np.float32))  # a product loses less than a blend
    return ndd.brightness_contrast(images, brightness=factor, brightness_shift=shift, dtype=ndd.uint8)


def contrast(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Blend with the mean grey level, rounded: that of the mean colour."""
    shapes = np.array(images.shape)
    sums = ndd.reductions.sum(images, axes=[0, 1], keep_dims=True)  # whole numbers
    shares = np.array(LUMA if shapes[0, 2] == 3 else [1.0])
    weights = shares[None, None, None] / shapes[:, :2].prod(axis=1)[:, None, None, None]
    mean = ndd.reductions.sum(sums * numbers(weights.astype(np.float32), images), axes=[2], keep_dims=True)
    return blend(images, math.floor(mean + 0.5), values)


def saturation(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Blend with the grey levels."""
    return images if _channels(images) == 1 else blend(images, _grey(images), values)


def hue(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Turn the hue by a fraction of the circle, in Pillow's HSV; `gpuload.stage.reference.color` has the formulas."""
    if _channels(images) == 1:
        return images
    red, green, blue = (own(_channel(images, channel) * 1.0) for channel in range(3))
    value = own(math.max(math.max(red, green), blue))
    least = own(math.min(math.min(red, green), blue))
    chroma = own(value - least)
    distance = 2.0 - (green + blue - red - least) / (chroma + TINY)
    side = (green < blue) * 85.0 - 42.5  # sixths of 255, with the sign of blue - green
    turns = own(math.floor(distance * side + 127.5))
    shift = np.trunc(values[:, 0].astype(np.float32) * np.float32(255)) + np.float32(256)  # nothing is below 0
    sixths = own((turns + numbers(shift, images)) % 256.0 * (6 / 255))
    lack = own(math.floor(chroma * 255.0 / (value + TINY)) * value * (1 / 255))
    # |sixths - 3| - 1 for red, 2 - |sixths - 2| for green, 2 - |sixths - 4| for blue.
    centre, sign, start = (
        numbers(np.tile(np.array(row, np.float32), (len(values), 1, 1, 1)), images)
        for row in ((3, 2, 4), (1, -1, -1), (-1, 2, 2))
    )
    share = own(math.min(math.max(own(math.abs(sixths - centre)) * sign + start, 0.0), 1.0))
    return to_levels(share * lack + (value - lack))


def grayscale(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Luma in all channels."""
    return images if _channels(images) == 1 else in_channels(_grey(images), 3)


def in_channels(images: ndd.Batch, count: int) -> ndd.Batch:
    """Grey levels in this many channels."""
    if _channels(images) == count:
        return images
    first = _channel(images, 0)
    return first if count == 1 else ndd.cat(*[first] * count, axis_name="C")


def permute(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Channels in another order."""
    if _channels(images) == 1:
        return images
    starts = [ndd.as_batch(values[:, channel, None].astype(np.int32)) for channel in range(3)]
    return ndd.cat(*(_channel(images, start) for start in starts), axis_name="C")


def invert(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Pillow's `ImageOps.invert`."""
    return ~images


def solarize(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Invert levels from a threshold on."""
    kept = images < numbers(np.ceil(values[:, 0]).astype(np.float32), images)
    # Both summands are 0 or a level, so nothing is rounded.
    return to_levels(kept * images + ~kept * ~images)


def solarize_add(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Raise levels below a threshold, to 255 at most."""
    threshold, added = (numbers(values[:, column].astype(np.float32), images) for column in (0, 1))
    return to_levels((images < threshold) * added + images)


def posterize(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Keep the upper bits."""
    masks = np.array([256 - posterize_step(bits) for bits in values[:, 0].tolist()], np.uint8)
    return images & numbers(masks, images)


def autocontrast(images: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Stretch each channel to 0 … 255, in float64 like Pillow."""
    least, greatest = (
        ndd.cast(reduce(images, axes=[0, 1], keep_dims=True), dtype=ndd.float64)
        for reduce in (ndd.reductions.min, ndd.reductions.max)
    )
    one, most, cut = (numbers(np.full(len(values), number), images) for number in (1.0, 255.0, 1e-9 - 0.5))
    span = greatest - least
    varied = ndd.cast(span >= one, dtype=ndd.float64)  # a channel of one level stays as it is
    scale = (most / math.max(span, one)) * varied + (one - varied)
    return to_levels(images * scale + (cut - least * scale * varied))


def _channels(images: ndd.Batch) -> int:
    return images.shape[0][2]


def _channel(images: ndd.Batch, start: Any) -> ndd.Batch:
    """One channel; `start`: its number, or a batch with one for each image."""
    start = [start] if isinstance(start, int) else start
    return ndd.slice(images, start=start, shape=[1], axis_names="C")


def _grey(images: ndd.Batch) -> ndd.Batch:
    """The grey levels, H×W×1; for one colour in 770 a level from Pillow's."""
    return ndd.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
