"""Kornia's operators for the operations in `gpuload.transforms.program.ops.OPS`, and the matrices of its warps.

An operator takes N×C×H×W float32 images in 0 … 1 and float64 (N, `VALUES`) values, on the host, and returns new images.
It leaves its input unchanged. If Kornia has two definitions, the one that `kornia.augmentation.ColorJitter` uses is
called. Functions that would make the host wait for the device are replaced by the functions that they consist of.

**An image's result does not depend on the other images.** Convolutions run in float64, since float32 convolutions may
use TF32, which has 10 bits of precision. A mean of float32 numbers depends on the order of the sum. On the CPU, torch
divides the sum of a single image between its threads, but not the sums of several images, so a single image is passed
twice. On CUDA, where the order depends on the number of images, contrast runs in float64, and the last bit can differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from kornia import enhance
from kornia.augmentation import RandomClahe, RandomPlanckianJitter
from kornia.color import rgb_to_grayscale
from kornia.filters import filter2d, filter2d_separable, get_gaussian_kernel1d, get_motion_kernel2d

from gpuload.stage.device import upload, upload_arrays
from gpuload.stage.reference.blur import mirrored_indices

__all__ = ["OPERATORS", "forward_matrices"]

Operator = Callable[[torch.Tensor, np.ndarray], torch.Tensor]

MAX_LEVEL: Final = 255  # thresholds and amounts of operations are in levels


def _with_factor(function: Callable[..., torch.Tensor], unit: float = 1, *, needs_colors: bool = False) -> Operator:
    """Make an operator of a function that takes a number per image: the first value, multiplied by `unit`. With
    `needs_colors`, the operator leaves grey images unchanged."""

    def operator(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        if needs_colors and images.shape[1] == 1:
            return images
        return function(images, upload((values[:, 0] * unit).astype(np.float32), images.device))

    return operator


def _contrast(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    factors = upload(values[:, 0].astype(np.float32), images.device)
    if not images.is_cpu:
        return enhance.adjust_contrast_with_mean_subtraction(images.double(), factors.double()).to(images.dtype)
    if len(images) == 1:
        images, factors = images.expand(2, -1, -1, -1).contiguous(), factors.expand(2)
        return enhance.adjust_contrast_with_mean_subtraction(images, factors)[:1]
    return enhance.adjust_contrast_with_mean_subtraction(images.contiguous(), factors)


def _sharpness(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Sharpen; images with a side below 3 pixels are left unchanged, because Kornia does not accept them."""
    if min(images.shape[2:]) < 3:
        return images
    factors = upload(values[:, 0].astype(np.float32), images.device)
    return enhance.sharpness(images.double(), factors.double()).to(images.dtype)


def _posterize(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return enhance.posterize(images, upload(values[:, 0].astype(np.int64), images.device))


def _solarize_add(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Add an amount, at most 0.5, to all pixels, and invert the sums at or above the threshold."""
    scaled = np.minimum(values[:, :2] / MAX_LEVEL, (np.inf, 0.5)).astype(np.float32)
    thresholds, amounts = upload(np.ascontiguousarray(scaled.T), images.device)
    return enhance.solarize(images, thresholds, amounts)


def _autocontrast(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return enhance.normalize_min_max(images).clamp_(0, 1)


def _invert(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return enhance.invert(images, images.new_ones(()))


def _grayscale(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return images if images.shape[1] == 1 else rgb_to_grayscale(images).expand_as(images).contiguous()


def _blur(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Blur with kernels of the same size and mirrored borders.

    These are the two steps of Kornia's `gaussian_blur2d`. That function is not called, because it waits for the device,
    and on the CPU it chooses its algorithm by the number of images.
    """
    doubles = images.double()
    width, height = values[0, :2].astype(np.int64).tolist()
    sigmas_xy = torch.from_numpy(values[:, 2:4].copy())
    kernels = [get_gaussian_kernel1d(size, sigmas_xy[:, [axis]]) for axis, size in enumerate((width, height))]
    kernel_x, kernel_y = upload_arrays([kernel.numpy() for kernel in kernels], images.device)
    rows, columns = images.shape[2:]
    if height // 2 < rows and width // 2 < columns:
        return filter2d_separable(doubles, kernel_x, kernel_y, "reflect").to(images.dtype)
    # An image smaller than its kernel is mirrored more than once, which torch's padding does not support.
    doubles = doubles.index_select(2, upload(mirrored_indices(rows, height // 2), images.device))
    doubles = doubles.index_select(3, upload(mirrored_indices(columns, width // 2), images.device))
    return filter2d_separable(doubles, kernel_x, kernel_y, padding="valid").to(images.dtype)


def _gamma(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return enhance.adjust_gamma(images, factors, torch.ones_like(factors))  # Kornia would wait to upload a gain of 1


def _motion_blur(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Blur along lines of the same length, with mirrored borders: the two steps of Kornia's `motion_blur`, which waits
    for the device. Kornia's angle is counterclockwise, and its line cannot be shifted."""
    doubles, size = images.double(), int(values[0, 0])
    angles, directions = torch.from_numpy(values[:, 2:4].T.copy())
    kernels = upload(get_motion_kernel2d(size, -angles, directions).numpy(), images.device)
    for axis, length in ((2, images.shape[2]), (3, images.shape[3])):
        doubles = doubles.index_select(axis, upload(mirrored_indices(length, size // 2), images.device))
    return filter2d(doubles, kernels, padding="valid").to(images.dtype)


def _white_balance(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Scale red and blue by the factors of gpuload's illuminants instead of one from Kornia's table."""
    if images.shape[1] == 1:
        return images
    jitter = RandomPlanckianJitter()
    jitter.pl = upload(values[:, :2].astype(np.float32), images.device)
    return jitter.apply_transform(images, {"idx": torch.arange(len(images), device=images.device)}, {})


def _clahe(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Equalize each channel; images that are not larger than the grid are left unchanged, because Kornia does not
    accept them."""
    columns, rows = values[0, :2].astype(np.int64).tolist()
    if images.shape[2] <= rows or images.shape[3] <= columns:
        return images
    flags = {"grid_size": (rows, columns), "slow_and_differentiable": False}
    limits = upload(values[:, 2].astype(np.float32), images.device)
    return RandomClahe().apply_transform(images, {"clip_limit_factor": limits}, flags)


OPERATORS: Final[dict[str, Operator]] = {
    "brightness": _with_factor(enhance.adjust_brightness_accumulative),
    "contrast": _contrast,
    "saturation": _with_factor(enhance.adjust_saturation_with_gray_subtraction, needs_colors=True),
    "hue": _with_factor(enhance.adjust_hue, 2 * math.pi, needs_colors=True),
    "sharpness": _sharpness,
    "solarize": _with_factor(enhance.solarize, 1 / MAX_LEVEL),
    "posterize": _posterize,
    "equalize": lambda images, values: enhance.equalize(images),
    "autocontrast": _autocontrast,
    "invert": _invert,
    "grayscale": _grayscale,
    "blur": _blur,
    "solarize_add": _solarize_add,
    "gamma": _with_factor(_gamma),
    "white_balance": _white_balance,
    "motion_blur": _motion_blur,
    "clahe": _clahe,
}


def forward_matrices(coefficients: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Return the matrices that Kornia's warps take, from pixels of the image to pixels of a window of the result.

    Args:
        coefficients: float64 (n, 8), the maps of `gpuload.transforms.program.ops.Warp`, from the centres of the
            result's pixels, at x + ½, to points of the image.
        corners: int64 (n, 2), the top and left of the windows.

    Returns:
        float64 (n, 3, 3).
    """
    inverse = np.concatenate([coefficients, np.ones((len(coefficients), 1))], axis=1).reshape(-1, 3, 3)
    to_center, from_center = np.tile(np.eye(3), (len(corners), 1, 1)), np.eye(3)
    to_center[:, :2, 2] = corners[:, ::-1] + 0.5
    from_center[:2, 2] = -0.5
    return np.linalg.inv(from_center @ inverse @ to_center)
