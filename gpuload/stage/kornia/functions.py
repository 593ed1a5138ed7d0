"""Operations of `gpuload.transforms.program.ops.OPS` as Kornia computes them: floats in and out, not rounded to levels.

Images are float N×C×H×W on the scale of levels, 0 … 255; `values` is float64 (N, `VALUES`), what was drawn for each
image. Functions are pure: they work in memory of their own, and gradients flow through them if the definition has any.
`gpuload.stage.kornia.operations` makes levels of their results.

If several functions of Kornia have the name of an operation, the one that means the same as Pillow's is used; if none
does, the operation is built from others (on photographs of 220×180 and on random images, in levels):

- brightness: `adjust_brightness` adds, `adjust_brightness_accumulative` multiplies.
- contrast: `adjust_contrast` multiplies as well (up to 143 levels from Pillow), and
  `adjust_contrast_with_mean_subtraction` does not round the mean (9% of the numbers differ by one). Here it is a blend
  by `add_weighted`, in the order of Pillow's arithmetic. So are saturation (`adjust_saturation` works in HSV: up to
  195; `adjust_saturation_with_gray_subtraction` does not round the grey: 14% differ by one) and sharpness
  (`kornia.enhance.sharpness` does not round the smoothed image: 16% differ by one).
- hue: `adjust_hue` keeps hue and saturation as floats, where Pillow has 8 bits (up to 17); here they are truncated to 8
  bits between `rgb_to_hsv` and `hsv_to_rgb` (up to 4).
- autocontrast: `normalize_min_max` subtracts first, where Pillow multiplies first and then truncates (8 numbers of
  10,000 differ by one), and makes a channel of one level black; `add_weighted` again.
- grey: `rgb_to_grayscale` with Pillow's weights (3 numbers of 10,000 differ by one).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from kornia.color import hsv_to_rgb, rgb_to_grayscale, rgb_to_hsv
from kornia.enhance import adjust_brightness, adjust_brightness_accumulative
from kornia.enhance import equalize as kornia_equalize
from kornia.enhance import invert as kornia_invert
from kornia.enhance import posterize as kornia_posterize
from kornia.enhance import solarize as kornia_solarize
from kornia.filters import filter2d, filter2d_separable, gaussian_blur2d, get_gaussian_kernel1d

from gpuload.stage.device import upload, upload_together
from gpuload.stage.kornia.finished import weighted
from gpuload.stage.noise import batch_normals
from gpuload.stage.reference.blur import mirrored
from gpuload.stage.reference.color import LUMA

__all__ = [
    "autocontrast",
    "blur",
    "brightness",
    "contrast",
    "equalize",
    "grayscale",
    "hue",
    "invert",
    "noise",
    "posterize",
    "saturation",
    "sharpness",
    "solarize",
    "solarize_add",
]

WHITE: Final = 255.0
CIRCLE: Final = 2 * math.pi
# Before truncation, float32 results may be below a whole number by some 5e-5.
GUARD: Final = 1e-4


def brightness(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """A product with the factor."""
    return adjust_brightness_accumulative(images, _each(values[:, 0], images), clip_output=False)


def contrast(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """A blend with the mean grey level, a whole number. Sums of whole numbers do not depend on the batch."""
    grey = _grey(images)
    count = grey[0].numel()
    total = grey.to(torch.int64).sum(dim=(1, 2, 3), keepdim=True)
    mean = torch.div(2 * total + count, 2 * count, rounding_mode="floor")
    return _blend(images, mean.to(images.dtype), values)


def saturation(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """A blend with the grey levels, whole numbers."""
    return images if images.shape[1] == 1 else _blend(images, _grey(images), values)


def sharpness(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """A blend with the smoothed image, whole numbers; its border is the image's."""
    height, width = images.shape[2:]
    if height < 3 or width < 3:
        return images
    # The weights are whole numbers, exact in any arithmetic of a convolution, TF32 too.
    kernel = images.new_ones(1, 3, 3)
    kernel[0, 1, 1].fill_(5)  # an assignment would wait for the device
    planes = images.flatten(0, 1)[None]  # as channels of one image: 64 images of 128×128 in 4 ms on the CPU, not 80
    inner = filter2d(planes, kernel, padding="valid").view(*images.shape[:2], height - 2, width - 2)
    inner = torch.floor((inner + 6.5) / 13)
    rows = torch.cat([images[:, :, 1:-1, :1], inner, images[:, :, 1:-1, -1:]], dim=3)
    return _blend(images, torch.cat([images[:, :, :1], rows, images[:, :, -1:]], dim=2), values)


def hue(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """To HSV and back, with hue and saturation truncated to 8 bits, as in Pillow, and the hue turned by ⌊255 turns⌋."""
    if images.shape[1] == 1:
        return images
    turns, saturated, value = rgb_to_hsv(images / WHITE).split(1, dim=1)
    turns = torch.floor(turns * (WHITE / CIRCLE) + GUARD) + _each(np.trunc(values[:, 0] * WHITE), images)
    saturated = torch.floor(saturated * WHITE + GUARD) / WHITE
    turned = torch.remainder(turns, 256) * (CIRCLE / WHITE)
    return hsv_to_rgb(torch.cat([turned, saturated, value], dim=1)) * WHITE


def grayscale(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Luma in all channels."""
    return images if images.shape[1] == 1 else _luma(images).expand_as(images)


def invert(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """The negative."""
    return kornia_invert(images, images.new_full((), WHITE))


def solarize(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Levels from a threshold on are inverted. It is moved between two levels, where rounding does not matter."""
    thresholds = (np.ceil(values[:, 0]) - 0.5) / WHITE
    return kornia_solarize(images / WHITE, upload(thresholds, images.device).to(images.dtype)) * WHITE


def solarize_add(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Levels below a threshold are raised, to white at most. Kornia's `solarize` would invert the others."""
    raised = adjust_brightness(images / WHITE, _each(values[:, 1] / WHITE, images)) * WHITE
    return torch.where(images < _each(values[:, 0], images), raised, images)


def posterize(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """The upper bits of each level."""
    return kornia_posterize(images / WHITE, upload(values[:, 0].astype(np.int64), images.device)) * WHITE


def equalize(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """The levels of each channel, spread evenly."""
    return kornia_equalize(images / WHITE) * WHITE


def autocontrast(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Each channel stretched to 0 … 255; a channel of one level stays as it is."""
    numbers = images.to(torch.float64)
    least, greatest = torch.aminmax(numbers.flatten(2), dim=2)
    flat = greatest == least
    scale = torch.full_like(least, WHITE) / torch.where(flat, WHITE, greatest - least)
    scale, offset = scale[:, :, None, None], (-least * scale)[:, :, None, None]
    return torch.where(flat[:, :, None, None], numbers, weighted(numbers, scale, numbers, 0.0, offset))


def blur(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """A Gaussian blur with mirrored borders, in float64, so that TF32 with its 10 bits is never used."""
    sizes, which = np.unique(values[:, :2].astype(np.int64), axis=0, return_inverse=True)
    numbers = images.to(torch.float64)
    if len(sizes) == 1:
        return _blurred(numbers, values, *sizes[0].tolist())
    order = [np.flatnonzero(which.ravel() == number) for number in range(len(sizes))]
    parts = [
        _blurred(numbers[upload(rows, images.device)], values[rows], *size)
        for rows, size in zip(order, sizes.tolist(), strict=True)
    ]
    return torch.cat(parts)[upload(np.argsort(np.concatenate(order)), images.device)]


def noise(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """The sum with truncated normal numbers, the same ones as in all backends."""
    numbers = batch_normals(upload(values[:, 2:4], images.device), images[0].numel()).view_as(images)
    numbers = torch.trunc(numbers * _each(values[:, 1], images) + _each(values[:, 0], images))
    wraps = upload(values[:, 4] != 0, images.device)[:, None, None, None]
    return torch.where(wraps, (images + numbers).remainder(256), weighted(images, 1.0, numbers.to(images.dtype), 1.0))


def _each(numbers: np.ndarray, images: torch.Tensor) -> torch.Tensor:
    """One number for each image."""
    return upload(numbers.astype(np.float32), images.device).to(images.dtype)[:, None, None, None]


def _luma(images: torch.Tensor) -> torch.Tensor:
    return rgb_to_grayscale(images, upload(np.array(LUMA), images.device))


def _grey(images: torch.Tensor) -> torch.Tensor:
    """The grey levels N×1×H×W, whole numbers."""
    return images if images.shape[1] == 1 else torch.floor(_luma(images) + 0.5)


def _blend(images: torch.Tensor, other: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """The other image plus the factor times the difference from it, in Pillow's order."""
    return weighted(images - other, _each(values[:, 0], images), other, 1.0)


def _blurred(numbers: torch.Tensor, values: np.ndarray, width: int, height: int) -> torch.Tensor:
    rows, columns = numbers.shape[2:]
    down, across = height // 2, width // 2
    if down < rows and across < columns:
        return _gaussian(numbers, values, width, height, "reflect")
    # An image smaller than its kernel is mirrored more than once, which torch's padding does not do.
    padded = numbers.index_select(2, upload(mirrored(rows, down), numbers.device))
    padded = padded.index_select(3, upload(mirrored(columns, across), numbers.device))
    blurred = _gaussian(padded, values, width, height, "constant")
    return blurred[:, :, down : down + rows, across : across + columns]


def _gaussian(numbers: torch.Tensor, values: np.ndarray, width: int, height: int, border: str) -> torch.Tensor:
    sigmas_xy = torch.from_numpy(values[:, [2, 3]])  # on the host, since Kornia reads them
    if numbers.device.type == "cpu":
        return gaussian_blur2d(numbers, (height, width), sigmas_xy[:, [1, 0]], border)
    # What it does elsewhere, without waiting for the copies of the kernels.
    kernels = [get_gaussian_kernel1d(size, sigmas_xy[:, [axis]]) for axis, size in enumerate((width, height))]
    across, down = upload_together([kernel.numpy() for kernel in kernels], numbers.device)
    return filter2d_separable(numbers, across, down, border)
