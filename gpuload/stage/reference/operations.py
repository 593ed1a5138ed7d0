"""What each of `gpuload.transforms.program.ops.OPS` means: on batches on any device, and on one image on the CPU; and
mixtures of chains of operations (AugMix).

`OPERATIONS` are for batches. Levels and results are float32 N×C×H×W, whole numbers in 0 … 255. An operation may work in
place, and returns its result. `values` is float64 (N, `VALUES`), what was drawn for each image, on the host, since some
operations need a number before they issue anything. The meaning is Pillow's if Pillow has the operation. Statistics of
an image are sums and counts of whole numbers, so an image's result never depends on its batch. The callers do
``"warp"`` and ``"identity"`` themselves.

`image_operations` do the same to one image with the same results, as a batch of one unless there is a faster way.

In a mixture, levels are multiplied by their shares and summed up in float32, the image first, then chain after chain,
and truncated, as in torchvision; for one image and for batches by the same products and sums, so results are equal.
With `GUARD` an image mixed with itself stays as it is, even if its shares' sum is below 1 by the last bit.

Runs in the process of the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.noise import batch_normals, normals
from gpuload.stage.reference.blur import blur, blur_image, box_blur, box_blur_image, sharpness
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.color import ADJUST, POINTS, ImageOperation, single_colors
from gpuload.stage.reference.jpeg import compress, compress_image
from gpuload.transforms.program.ops import OPS, Mixture, Ops

__all__ = ["OPERATIONS", "Operation", "image_operations", "mix_batch", "mix_image"]

Operation = Callable[[torch.Tensor, np.ndarray], torch.Tensor]

GUARD: Final = 1e-4  # at most some 6e-5 is lost: four roundings of numbers below 256


def _factor(name: str) -> Operation:
    adjust = ADJUST[name]
    # A turn is truncated to 255ths, and must not be rounded before: 51 / 255 without its last bit would be 50.
    dtype = np.float64 if name == "hue" else np.float32

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        adjust(levels, upload(values[:, 0].astype(dtype), levels.device)[:, None, None, None])
        return levels

    return operation


def noise(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Add normal numbers, truncated as by torchvision on uint8 images; what leaves 0 … 255 is clamped, or wraps."""
    numbers = upload(values[:, :2].astype(np.float32), levels.device)[:, :, None, None, None]
    keys = upload(values[:, 2:4], levels.device)
    added = batch_normals(keys, levels[0].numel()).view_as(levels)
    levels.add_(added.mul_(numbers[:, 1]).add_(numbers[:, 0]).trunc_())
    if not values[:, 4].any():
        return levels.clamp_(0, 255)
    wraps = upload(values[:, 4] != 0, levels.device)[:, None, None, None]
    return torch.where(wraps, levels.remainder(256), levels.clamp(0, 255))


OPERATIONS: Final[dict[str, Operation]] = {
    **{name: _factor(name) for name in ADJUST},
    **POINTS,
    "sharpness": sharpness,
    "blur": blur,
    "noise": noise,
    "pillow_blur": box_blur,
    "jpeg": compress,
}


def image_operations() -> list[ImageOperation]:
    """Return what each code means for one image on the CPU, with scratch memory of its own."""
    tuned: dict[str, ImageOperation] = {
        **single_colors(),
        "blur": blur_image,
        "noise": _noise,
        "pillow_blur": box_blur_image,
        "jpeg": compress_image,
        "identity": lambda canvas, values: None,
    }
    return [tuned.get(name) or _batched(name) for name in OPS]


def _batched(name: str) -> ImageOperation:
    def apply(canvas: Canvas, values: Sequence[float]) -> None:
        floats = canvas.floats()
        result = OPERATIONS[name](floats.tensor[None], np.array([values]))
        if result.data_ptr() != floats.tensor.data_ptr():
            floats.tensor.copy_(result[0])

    return apply


def _noise(canvas: Canvas, values: Sequence[float]) -> None:
    levels = canvas.floats()
    added = torch.from_numpy(normals((int(values[2]), int(values[3])), levels.array.size)).view(levels.tensor.shape)
    added.mul_(float(np.float32(values[1]))).add_(float(np.float32(values[0]))).trunc_()
    levels.tensor.add_(added)
    if values[4]:
        levels.tensor.remainder_(256)
    else:
        levels.tensor.clamp_(0, 255)


def mix_image(canvas: Canvas, shares: np.ndarray, chains: list[Callable[[], None]]) -> None:
    """Replace the image on a canvas by its mixture with the results of chains, which work on that canvas. `shares`,
    float32 (1 + chains), are those of the image itself and of each chain."""
    image = canvas.image()
    total = image * shares[0]
    for chain, share in zip(chains, shares[1:], strict=True):
        canvas.set(image)
        chain()
        # Floats are read as they are: making them levels first would take another pass.
        levels = canvas.floats().array.transpose(1, 2, 0) if canvas.is_float else canvas.image()
        total += levels * share
    total += np.float32(GUARD)
    canvas.set(total.astype(np.uint8))


def mix_batch(
    levels: torch.Tensor, record: Mixture, operate: Callable[[torch.Tensor, Ops], torch.Tensor]
) -> torch.Tensor:
    """Mix levels N×C×H×W, float32; `operate` applies operations in place."""
    shares = upload(record.weights.astype(np.float32), levels.device)[:, :, None, None, None]
    total = levels * shares[:, 0]
    for chain in range(record.codes.shape[1]):
        augmented = operate(levels.clone(), record.chain(chain))
        total.add_(augmented.mul_(shares[:, 1 + chain]))
    return total.add_(GUARD).floor_()
