"""DALI's dynamic mode by hand, next to `gpuload.Augment` on dense batches: what a user would write without gpuload.

Every operator is called once for the entire batch, and each image has random parameters of its own, drawn with NumPy.
From a uint8 batch N×C×H×W to normalised floats, on the CPU with one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from nvidia.dali import types as dali_types
from nvidia.dali.experimental import dynamic as ndd

from benchmarks.augmentation.cases import CLASSIC
from benchmarks.peers.protocol import MEAN, STD

types: Any = dali_types  # the module's members are created at run time, so type checkers do not know them

Recipe = Callable[[Any, np.random.Generator], Any]
"""A function that makes a normalised DALI batch from one of levels H×W×C and a random generator."""


def make_run(name: str, batch: torch.Tensor) -> Callable[[int], torch.Tensor] | None:
    """Return a function that augments a uint8 batch N×C×H×W with DALI's recipe of this name, if there is one."""
    if (recipe := RECIPES.get(name)) is None:
        return None
    device = ndd.Device("cpu")
    with device:  # otherwise DALI would create a context for a GPU if the machine has one
        context = ndd.EvalContext(num_threads=1)

    def run(turn: int) -> torch.Tensor:
        with device, context, ndd.EvalMode.sync_cpu:  # the default mode takes as much CPU time
            images = ndd.as_batch(batch.permute(0, 2, 3, 1).contiguous(), layout="HWC")
            return recipe(images, np.random.default_rng(turn)).torch()

    return run


def _floats(values: np.ndarray) -> Any:
    return ndd.as_batch(values.astype(np.float32))


def _resized_crop(images: Any, rng: np.random.Generator) -> Any:
    """Resize a random box of each image to 224×224: 8 to 100% of its area, with an aspect ratio of 3:4 to 4:3."""
    count, (height, width, _) = images.batch_size, images.shape[0]
    area, ratio = rng.uniform(0.08, 1, count), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), count))
    size_hw = np.sqrt(area * height * width)[:, None] * np.stack([ratio**-0.5, ratio**0.5], axis=1)
    size_hw = np.minimum(size_hw, (height, width))
    start_hw = rng.uniform(0, (height, width) - size_hw)
    return ndd.resize(images, roi_start=_floats(start_hw), roi_end=_floats(start_hw + size_hw), size=[224, 224])


def _jitter(images: Any, rng: np.random.Generator, hue_degrees: float) -> Any:
    brightness, contrast, saturation = rng.uniform(0.6, 1.4, (3, images.batch_size))
    hue = rng.uniform(-hue_degrees, hue_degrees, images.batch_size)
    return ndd.color_twist(
        images,
        brightness=_floats(brightness),
        contrast=_floats(contrast),
        saturation=_floats(saturation),
        hue=_floats(hue),
    )


def _affine(images: Any, rng: np.random.Generator) -> Any:
    """Rotate, shear, scale and shift each image about its centre."""
    count, (height, width, _) = images.batch_size, images.shape[0]
    (angle, shear), scale = np.radians(rng.uniform(-1, 1, (2, count)) * [[15], [10]]), rng.uniform(0.8, 1.2, count)
    linear = np.empty((count, 2, 2))  # from the result's pixels to the image's
    linear[:, 0] = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    linear[:, 1] = np.stack([-np.sin(angle) - np.tan(shear), np.cos(angle)], axis=1)
    linear /= scale[:, None, None]
    centre, shift = np.array([width, height]) / 2, rng.uniform(-0.1, 0.1, (count, 2)) * (width, height)
    offset = centre - (linear @ (centre + shift)[:, :, None])[:, :, 0]
    return ndd.warp_affine(images, matrix=_floats(np.concatenate([linear, offset[:, :, None]], axis=2)), fill_value=0)


def _normalize(images: Any, **options: Any) -> Any:
    mean, std = ([255 * value for value in values] for values in (MEAN, STD))
    return ndd.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std, **options)


def _normalize_flipped(images: Any, rng: np.random.Generator) -> Any:
    return _normalize(images, mirror=ndd.as_batch(rng.integers(0, 2, images.batch_size, np.int32)))


RECIPES: Final[dict[str, Recipe]] = {
    f"dense, {CLASSIC}": lambda images, rng: _normalize_flipped(_resized_crop(images, rng), rng),
    f"dense, {CLASSIC} + ColorJitter": lambda images, rng: _normalize_flipped(
        _jitter(_resized_crop(images, rng), rng, 0), rng
    ),
    f"dense, {CLASSIC} + ColorJitter with hue": lambda images, rng: _normalize_flipped(
        _jitter(_resized_crop(images, rng), rng, 36), rng
    ),
    "dense, evaluation": lambda images, rng: _normalize(ndd.resize(images, size=[232, 232]), crop=[224, 224]),
    "dense, robot": lambda images, rng: _normalize(_jitter(_affine(images, rng), rng, 36)),
}
