"""Blurs and sharpness, for batches and for one image on the CPU.

Batches of pixel values are N×C×H×W float32 tensors that hold integers in 0 … 255. All sums are exact in their float
type, so results depend neither on the order of summation nor on the batch or the device. The weights of a Gaussian blur
are integer multiples of 2**-16; its first pass needs all 24 bits of float32, and its second pass needs 40 of float64's
53 bits.

The Gaussian blur of a single image on the CPU is bit-identical to that of a batch. Each pass multiplies the image by a
band matrix of weights, in tiles of `TILE` columns so that the matrix contains few zeros (224×224×3 with 23×23 weights,
one core: 0.2 ms for rows in float32, 0.45 ms for columns in float64; adding up shifted images takes 3 ms).

`box_blur` is Pillow's `ImageFilter.GaussianBlur`: three box blurs along rows, then three along columns. A single image
on the CPU goes through Pillow itself. A box has an integer radius and a fraction of the next pixel on either side, in
units of 2**-24. Sums are integers below 2**33, which are exact in float64, so Pillow and this module give the same
result. It differs by a few levels from the result of `blur`, which uses torchvision's Gaussian kernel. Source: Gwosdek
et al., SSVM 2011.

This module runs in the stage's process, in one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.nn.functional import conv2d, pad

from gpuload.stage.device import upload
from gpuload.stage.reference.canvas import Canvas
from gpuload.transforms.program.windows import padded_indices

__all__ = [
    "WEIGHT_SCALE",
    "blur",
    "blur_image",
    "blur_weights",
    "box_blur",
    "box_blur_image",
    "mirrored_indices",
    "motion_blur",
    "motion_kernel",
    "sharpness",
]

WEIGHT_SCALE: Final = 1 << 16


@lru_cache(maxsize=512)
def blur_weights(width: int, sigma: float) -> np.ndarray:
    """Return the weights of a Gaussian kernel in units of 1 / `WEIGHT_SCALE`: float64 (n,), whose sum is
    `WEIGHT_SCALE`. Zeros at the ends are dropped; n is odd and at most `width`."""
    distances = np.arange(width) - width // 2
    density = np.exp(-0.5 * (distances / sigma) ** 2)
    weights = np.rint(density / density.sum() * WEIGHT_SCALE)
    weights[width // 2] += WEIGHT_SCALE - weights.sum()
    nonzero = np.flatnonzero(weights)
    weights = weights[nonzero[0] : nonzero[-1] + 1]
    weights.flags.writeable = False
    return weights


@lru_cache(maxsize=64)
def mirrored_indices(length: int, radius: int) -> np.ndarray:
    """Return the indices of the pixels to read for positions -radius … length + radius - 1, mirrored at the end pixels
    as often as necessary."""
    return padded_indices(np.arange(-radius, length + radius), length, "reflect")


def blur(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Apply a Gaussian blur with mirrored borders, like torchvision and like Kornia's `gaussian_blur2d`. The columns of
    `values` are the kernel's width and height, and sigma along x and y."""
    rows = _blur_axis(levels, 3, [blur_weights(int(row[0]), row[2]) for row in values.tolist()])
    blurred = _blur_axis(rows.to(torch.float64), 2, [blur_weights(int(row[1]), row[3]) for row in values.tolist()])
    return blurred.round_().to(levels.dtype)


def _blur_axis(levels: torch.Tensor, axis: int, kernels: list[np.ndarray]) -> torch.Tensor:
    """Blur along one axis, each image with its own kernel."""
    radius = max(len(kernel) for kernel in kernels) // 2
    weights = np.stack([np.pad(kernel, radius - len(kernel) // 2) for kernel in kernels]) / WEIGHT_SCALE
    taps = upload(weights, levels.device).to(levels.dtype)[:, :, None, None, None]
    length = levels.shape[axis]
    padded = levels.index_select(axis, upload(mirrored_indices(length, radius), levels.device))
    total = padded.narrow(axis, radius, length) * taps[:, radius]
    for distance in range(1, radius + 1):
        pair = padded.narrow(axis, radius - distance, length) + padded.narrow(axis, radius + distance, length)
        total += pair.mul_(taps[:, radius + distance])
    return total


def sharpness(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Blend with a smoothed image: Pillow's `ImageEnhance.Sharpness`, with its arithmetic in float32."""
    smoothed = smooth(levels)
    factor = upload(values[:, :1].astype(np.float32), levels.device)[:, :, None, None]
    return levels.sub_(smoothed).mul_(factor).add_(smoothed).clamp_(0, 255).floor_()


def smooth(levels: torch.Tensor) -> torch.Tensor:
    """Average 3×3 pixels, with the centre weighted five times, as Pillow's `ImageFilter.SMOOTH` does. Border pixels do
    not change."""
    height, width = levels.shape[2:]
    if height < 3 or width < 3:
        return levels.clone()
    rows = levels[..., :-2] + levels[..., 1:-1] + levels[..., 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    total += 4 * levels[:, :, 1:-1, 1:-1]
    # A thirteenth of an integer is never close to a half, so float32 rounds it as Pillow does.
    smoothed = levels.clone()
    smoothed[:, :, 1:-1, 1:-1] = total.add_(6.5).div_(13).floor_()
    return smoothed


def motion_blur(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Average the pixels on a line, with mirrored borders. Sums of levels are integers, which are exact even if the
    convolution rounds its factors to TF32, and rounded, since some algorithms for CUDA are not exact."""
    kernels = [motion_kernel(int(row[0]), *row[2:6]) for row in values.tolist()]
    count, channels = levels.shape[:2]
    radius = max(map(len, kernels)) // 2
    weights = upload(np.stack([np.pad(kernel, radius - len(kernel) // 2) for kernel in kernels]), levels.device)
    padded = levels
    for axis in (2, 3):
        padded = padded.index_select(axis, upload(mirrored_indices(levels.shape[axis], radius), levels.device))
    taps = weights.to(levels.dtype)[:, None].repeat_interleave(channels, dim=0)
    sums = conv2d(padded.flatten(0, 1)[None], taps, groups=count * channels).round_().view_as(levels)
    return sums.div_(weights.sum(dim=(1, 2))[:, None, None, None]).round_()


def motion_kernel(size: int, angle: float, direction: float, shift_x: float, shift_y: float) -> np.ndarray:
    """Return which pixels of a kernel are on the line, bool (size, size): Albumentations' `create_motion_kernel`."""
    radius, radians = size // 2, np.deg2rad(angle)
    distances = np.linspace(-radius * (1 - max(direction, 0)), radius * (1 + min(direction, 0)), size)
    x, y = radius + np.cos(radians) * distances + shift_x, radius + np.sin(radians) * distances + shift_y
    kernel = np.zeros((size, size), np.bool_)
    kernel[tuple(np.clip(np.rint([y, x]), 0, size - 1).astype(np.int64))] = True
    return kernel


PASSES: Final = 3
BOX_SCALE: Final = 1 << 24


def box_blur_image(canvas: Canvas, values: Sequence[float]) -> None:
    """Blur the image on a canvas; `values[0]` is the radius of Pillow's filter in pixels."""
    image = canvas.image()
    pillow_filter = ImageFilter.GaussianBlur(values[0])
    if image.shape[2] == 3:
        canvas.set(np.array(Image.fromarray(image).filter(pillow_filter)))
        return
    planes = [
        np.array(Image.fromarray(image[:, :, channel]).filter(pillow_filter)) for channel in range(image.shape[2])
    ]
    canvas.set(np.stack(planes, axis=2))


def box_blur(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Blur N×C×H×W float32 levels with boxes; the first column of `values`, float64 (N, …), is the radius."""
    boxes = [_box_weights(radius) for radius in values[:, 0].tolist()]
    radius = max(box_radius for box_radius, _, _ in boxes) + 1
    weights = np.zeros((len(boxes), radius + 1))
    for row, (box_radius, inside_weight, edge_weight) in enumerate(boxes):
        weights[row, : box_radius + 1] = inside_weight
        weights[row, box_radius + 1] = edge_weight
    taps = upload(weights, levels.device)[:, :, None, None, None]
    blurred = levels.to(torch.float64)
    for axis in (3, 2):
        length = levels.shape[axis]
        indices = upload(np.clip(np.arange(-radius, length + radius), 0, length - 1), levels.device)
        for _ in range(PASSES):
            padded = blurred.index_select(axis, indices)
            blurred = padded.narrow(axis, radius, length) * taps[:, 0]
            for distance in range(1, radius + 1):
                pair = padded.narrow(axis, radius - distance, length) + padded.narrow(axis, radius + distance, length)
                blurred += pair.mul_(taps[:, distance])
            blurred.add_(BOX_SCALE // 2).div_(BOX_SCALE).floor_()
    return blurred.to(levels.dtype)


def _box_weights(radius: float) -> tuple[int, int, int]:
    """Return a box's integer radius, the weight of a pixel inside the box, and the weight of the next pixel on either
    side, computed in float32 as in Pillow."""
    deviation = np.float32(radius)
    variance = deviation * deviation / np.float32(PASSES)
    box_radius = np.float32(np.floor((np.sqrt(12.0 * float(variance) + 1.0).astype(np.float32) - 1.0) / 2.0))
    one, two, three, six = (np.float32(number) for number in (1, 2, 3, 6))
    edge_fraction = (two * box_radius + one) * (box_radius * (box_radius + one) - three * variance)
    edge_fraction /= six * (variance - (box_radius + one) * (box_radius + one))
    real_radius = box_radius + edge_fraction
    inside_weight = int(np.float32(BOX_SCALE) / (real_radius * two + one))
    return int(real_radius), inside_weight, (BOX_SCALE - (2 * int(real_radius) + 1) * inside_weight) // 2


TILE: Final = 32


def blur_image(canvas: Canvas, values: Sequence[float]) -> None:
    """Apply `blur` to the image on a canvas."""
    levels = canvas.floats().tensor
    channels, height, width = levels.shape
    weights_x, weights_y = blur_weights(int(values[0]), values[2]), blur_weights(int(values[1]), values[3])
    if len(weights_x) > 1:
        padded = _pad_mirrored(levels, 2, len(weights_x) // 2, torch.float32).view(channels * height, -1)
        band = _band_matrix(weights_x, torch.float32)
        rows = levels.view(channels * height, width)
        for start in range(0, width, TILE):
            size = min(TILE, width - start)
            reach = size + len(weights_x) - 1
            torch.mm(padded[:, start : start + reach], band[:reach, :size], out=rows[:, start : start + size])
    if len(weights_y) > 1:
        padded = _pad_mirrored(levels, 1, len(weights_y) // 2, torch.float64)
        band = _band_matrix(weights_y, torch.float64).T.contiguous()
        scratch = torch.empty(min(TILE, height), width, dtype=torch.float64, device="cpu")
        for channel in range(channels):
            for start in range(0, height, TILE):
                size = min(TILE, height - start)
                reach = size + len(weights_y) - 1
                torch.mm(band[:size, :reach], padded[channel, start : start + reach], out=scratch[:size])
                levels[channel, start : start + size].copy_(scratch[:size].round_())
    else:
        levels.round_()


def _pad_mirrored(levels: torch.Tensor, axis: int, radius: int, dtype: torch.dtype) -> torch.Tensor:
    """Extend the image at both ends of an axis by mirroring."""
    if radius < levels.shape[axis]:
        return pad(levels, (radius, radius, 0, 0) if axis == 2 else (0, 0, radius, radius), "reflect").to(dtype)
    return levels.index_select(axis, torch.from_numpy(mirrored_indices(levels.shape[axis], radius))).to(dtype)


def _band_matrix(weights: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return the (TILE + len(weights) - 1) × TILE matrix whose entry [i, j] is the weight of input pixel i in output
    pixel j."""
    band = torch.zeros(TILE + len(weights) - 1, TILE, dtype=dtype, device="cpu")
    diagonals = band.as_strided((TILE, len(weights)), (TILE + 1, TILE))
    diagonals.copy_(torch.from_numpy(weights / WEIGHT_SCALE))
    return band
