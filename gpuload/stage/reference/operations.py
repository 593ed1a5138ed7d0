"""The operations in `gpuload.transforms.program.ops.OPS` and mixtures of chains of operations (AugMix), implemented for
batches on any device and for one image on the CPU.

`OPERATIONS` process batches. Levels (pixel values) and results are N×C×H×W float32 tensors that hold integers in 0 …
255. An operation may modify its input, and returns its result. `values`, float64 (N, `VALUES`), holds the random
parameters of each image. This array is on the host because some operations need a parameter before they launch a
kernel. Operations that exist in Pillow follow Pillow's definition. Statistics of an image are sums and counts of
integers, so an image's result never depends on its batch. The callers handle ``"warp"`` and ``"identity"`` themselves.

The operations from `image_operations` give the same results for one image. Operations without a version for single
images process the image as a batch of one.

A mixture multiplies levels by their shares, adds them up in float32 (first the image, then each chain in order) and
truncates the sum, as torchvision does. Single images and batches use the same products and sums, so results are equal.
`GUARD` keeps an image that is mixed with itself unchanged even if its shares add up to one bit less than 1.

This module runs in the stage's process, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.noise import batch_normals, normals
from gpuload.stage.reference.blur import blur, blur_image, box_blur, box_blur_image, motion_blur, sharpness
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.clahe import clahe
from gpuload.stage.reference.color import ADJUST, POINTS, ImageOperation, single_colors
from gpuload.stage.reference.jpeg import compress, compress_image
from gpuload.transforms.program.ops import OPS, ChainMixture, Ops

__all__ = ["OPERATIONS", "image_operations", "mix_batch", "mix_image"]

Operation = Callable[[torch.Tensor, np.ndarray], torch.Tensor]

GUARD: Final = 1e-4  # rounding loses at most about 6e-5: four roundings of numbers below 256


def _make_adjustment(name: str) -> Operation:
    adjust = ADJUST[name]
    # A hue shift is truncated to 255ths. Rounding it to float32 first could turn 51 / 255 into 50 / 255.
    dtype = np.float64 if name == "hue" else np.float32

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        adjust(levels, upload(values[:, 0].astype(dtype), levels.device)[:, None, None, None])
        return levels

    return operation


def noise(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Add normal noise, truncated as in torchvision for uint8 images; clamp levels to 0 … 255 or wrap them around."""
    mean_and_std = upload(values[:, :2].astype(np.float32), levels.device)[:, :, None, None, None]
    keys = upload(values[:, 2:4], levels.device)
    normal_numbers = batch_normals(keys, levels[0].numel()).view_as(levels)
    levels.add_(normal_numbers.mul_(mean_and_std[:, 1]).add_(mean_and_std[:, 0]).trunc_())
    if not values[:, 4].any():
        return levels.clamp_(0, 255)
    wraps = upload(values[:, 4] != 0, levels.device)[:, None, None, None]
    return torch.where(wraps, levels.remainder(256), levels.clamp(0, 255))


OPERATIONS: Final[dict[str, Operation]] = {
    **{name: _make_adjustment(name) for name in ADJUST},
    **POINTS,
    "sharpness": sharpness,
    "blur": blur,
    "noise": noise,
    "pillow_blur": box_blur,
    "jpeg": compress,
    "motion_blur": motion_blur,
    "clahe": clahe,
}


def image_operations() -> list[ImageOperation]:
    """Return the operations for one image on the CPU, indexed by code; each list has its own scratch memory."""
    tuned_operations: dict[str, ImageOperation] = {
        **single_colors(),
        "blur": blur_image,
        "noise": _noise,
        "pillow_blur": box_blur_image,
        "jpeg": compress_image,
        "identity": lambda canvas, values: None,
    }
    return [tuned_operations.get(name) or _apply_to_batch_of_one(name) for name in OPS]


def _apply_to_batch_of_one(name: str) -> ImageOperation:
    def apply(canvas: Canvas, values: Sequence[float]) -> None:
        floats = canvas.floats()
        result = OPERATIONS[name](floats.tensor[None], np.array([values]))
        if result.data_ptr() != floats.tensor.data_ptr():
            floats.tensor.copy_(result[0])

    return apply


def _noise(canvas: Canvas, values: Sequence[float]) -> None:
    levels = canvas.floats()
    normal = torch.from_numpy(normals((int(values[2]), int(values[3])), levels.array.size)).view(levels.tensor.shape)
    normal.mul_(float(np.float32(values[1]))).add_(float(np.float32(values[0]))).trunc_()
    levels.tensor.add_(normal)
    if values[4]:
        levels.tensor.remainder_(256)
    else:
        levels.tensor.clamp_(0, 255)


def mix_image(canvas: Canvas, shares: np.ndarray, chains: list[Callable[[], None]]) -> None:
    """Mix the image on a canvas with the results of chains, which use the same canvas, and store the mixture on the
    canvas. `shares`, float32 (1 + chains), holds the share of the image itself, then the share of each chain."""
    image = canvas.image()
    total = image * shares[0]
    for chain, share in zip(chains, shares[1:], strict=True):
        canvas.set(image)
        chain()
        # Floats are used directly: a conversion to uint8 levels would take another pass.
        levels = canvas.floats().array.transpose(1, 2, 0) if canvas.is_float else canvas.image()
        total += levels * share
    total += np.float32(GUARD)
    canvas.set(total.astype(np.uint8))


def mix_batch(
    levels: torch.Tensor, record: ChainMixture, operate: Callable[[torch.Tensor, Ops], torch.Tensor]
) -> torch.Tensor:
    """Mix N×C×H×W float32 levels with the results of the chains in `record`; `operate` applies operations in place."""
    shares = upload(record.weights.astype(np.float32), levels.device)[:, :, None, None, None]
    total = levels * shares[:, 0]
    for chain in range(record.codes.shape[1]):
        augmented = operate(levels.clone(), record.chain(chain))
        total.add_(augmented.mul_(shares[:, 1 + chain]))
    return total.add_(GUARD).floor_()
