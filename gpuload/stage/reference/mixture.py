"""Mixtures of chains of operations: AugMix, on one image on the CPU and on batches on any device.

Levels are multiplied by their shares and summed up in float32, the image first, then chain after chain, and truncated,
as in torchvision; both ways round the same products and sums, so their results are equal. With `GUARD` an image mixed
with itself stays as it is, even if its shares' sum is below 1 by the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.reference.canvas import Canvas
from gpuload.transforms.program.ops import Mixture, Ops

__all__ = ["GUARD", "mix_batch", "mix_image"]

GUARD: Final = 1e-4  # at most some 6e-5 is lost: four roundings of numbers below 256


def mix_image(canvas: Canvas, shares: np.ndarray, chains: list[Callable[[], None]]) -> None:
    """Replace the image on a canvas by its mixture with the results of chains.

    Args:
        canvas: holds the image.
        shares: float32 (1 + chains), of the image itself and of each chain.
        chains: each changes the image on the canvas.
    """
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
    """The same for levels N×C×H×W, float32; `operate` does operations in place."""
    shares = upload(record.weights.astype(np.float32), levels.device)[:, :, None, None, None]
    total = levels * shares[:, 0]
    for chain in range(record.codes.shape[1]):
        made = operate(levels.clone(), record.chain(chain))
        total.add_(made.mul_(shares[:, 1 + chain]))
    return total.add_(GUARD).floor_()
