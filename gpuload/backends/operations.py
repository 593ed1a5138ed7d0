"""The operations of `gpuload.transforms.params.OPS` on batches: what each means, on any device.

Levels are float32 N×C×H×W and hold whole numbers in 0 … 255; so do results. An operation may work in place, and returns
where its result is. `values` is float64 (N, `VALUES`), on the device, what was drawn for each image. The meaning is
Pillow's wherever Pillow has the operation. Statistics of an image are sums and counts of whole numbers, so an image's
result never depends on the batch that it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from gpuload.backends.color import ADJUST

__all__ = ["OPERATIONS", "Operation"]

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _factor(name: str) -> Operation:
    adjust = ADJUST[name]

    def operation(levels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        adjust(levels, values[:, 0].to(torch.float32)[:, None, None, None])
        return levels

    return operation


OPERATIONS: Final[dict[str, Operation]] = {name: _factor(name) for name in ADJUST}
