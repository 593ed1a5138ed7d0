"""Elastic deformation: each pixel shows what lies at a smooth random displacement from it.

Noise is `gpuload.transforms.program.fields`', the same on every device; it is smoothed by sums over taps, in one order,
so that an image's field does not depend on its batch. Sampling is torch's `grid_sample`, borders as by torchvision:
outside is the fill, and a filtered pixel next to the border is mixed with it. Nothing is kept from call to call.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import grid_sample

from gpuload.stage.device import upload
from gpuload.stage.noise import philox_words
from gpuload.transforms.program.fields import gaussian, kernel_size
from gpuload.transforms.program.ops import Elastic
from gpuload.transforms.program.windows import padded_places

__all__ = ["deform"]


def deform(levels: torch.Tensor, record: Elastic, rows: np.ndarray) -> torch.Tensor:
    """Images of one size, N×C×H×W in any dtype, through the fields of these rows of a record; the same shape."""
    n, channels, height, width = levels.shape
    fields = _fields(upload(record.keys[rows].astype(np.int64), levels.device), record, height, width)
    down, across = (
        (2 * torch.arange(length, device=levels.device, dtype=torch.float32) + 1) / length - 1
        for length in (height, width)
    )
    x = across + fields[:, 0] * (record.alpha[0] / width)
    y = down[:, None] + fields[:, 1] * (record.alpha[1] / height)
    inside = torch.ones((n, 1, height, width), device=levels.device)
    numbers = torch.cat([levels.to(torch.float32), inside], dim=1)
    interpolation = str(record.filters)
    found = grid_sample(numbers, torch.stack([x, y], dim=3), interpolation, "zeros", align_corners=False)
    found, inside = found[:, :channels], found[:, channels:]
    fill = upload(np.array(record.fill, np.float32).reshape(-1, 1, 1), levels.device)
    found = torch.where(inside < 0.5, fill, found) if interpolation == "nearest" else (found - fill) * inside + fill
    if levels.dtype.is_floating_point:
        return found.to(levels.dtype)
    return found.round_().clamp_(0, torch.iinfo(levels.dtype).max).to(levels.dtype)


def _fields(keys: torch.Tensor, record: Elastic, height: int, width: int) -> torch.Tensor:
    """The smoothed noise of images with these keys, (N, 2): float32 N×2×H×W."""
    count = 2 * height * width
    words = philox_words(keys, -(-count // 4)).flatten(1)[:, :count]
    noise = ((words >> 8).to(torch.float32) * 2.0**-23 - (1 - 2.0**-24)).view(-1, 2, height, width)
    planes = []
    for plane, numbers in enumerate(noise.unbind(1)):
        if record.sigma[plane]:
            size = kernel_size(record.sigma[plane])
            for axis, length in ((2, width), (1, height)):
                numbers = _smoothed(numbers, gaussian(record.sigma[2 - axis], size), axis, length)
        planes.append(numbers)
    return torch.stack(planes, dim=1)


def _smoothed(numbers: torch.Tensor, weights: np.ndarray, axis: int, length: int) -> torch.Tensor:
    """Weighted sums along an axis, with mirrored borders."""
    reach = len(weights) // 2
    places = padded_places(np.arange(-reach, length + reach), length, "reflect")
    wider = numbers.index_select(axis, upload(places, numbers.device))
    total = wider.narrow(axis, 0, length) * float(np.float32(weights[0]))
    for tap, weight in enumerate(weights[1:].astype(np.float32).tolist(), 1):
        total.add_(wider.narrow(axis, tap, length) * weight)  # a fused product and sum would round otherwise
    return total
