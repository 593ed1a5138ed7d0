"""Mixtures of chains of operations: AugMix, on one image on the CPU and on batches on any device.

The shares are multiplied with levels and summed up in float32, the image first, then chain after chain, and cut off
behind the decimal point, as torchvision does it; both ways round the same products and sums, so their results are the
same. `GUARD` keeps an image that is mixed with itself as it is, where a sum of shares stays below 1 by its last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.upload import upload
from gpuload.transforms.program.ops import Mixture, Ops

__all__ = ["GUARD", "mix_batch", "mix_image"]

GUARD: Final = 1e-4  # what is lost is some 6e-5 at most: four roundings of numbers below 256


def mix_image(canvas: Canvas, shares: np.ndarray, chains: list[Callable[[], None]]) -> None:
    """Replace the image on a canvas by its mixture with what each of the chains makes of it there.

    Args:
        canvas: holds the image.
        shares: float32 (1 + chains), of the image itself and of each chain.
        chains: what works on the canvas.
    """
    image = canvas.image()
    total = image * shares[0]
    for chain, share in zip(chains, shares[1:], strict=True):
        canvas.set(image)
        chain()
        # Floats are read as they lie: bringing them to levels first would take a pass more.
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
