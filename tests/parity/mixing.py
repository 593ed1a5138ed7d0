"""MixUp, compared with Kornia's blend, and CutMix, compared with Pillow's paste of float32 bands (mode "F")."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from parity.case import Case
from parity.geometry import geometry_oracle
from PIL import Image

from gpuload import transforms as T
from gpuload.transforms.program.ops import PartnerMix

__all__ = ["mixing"]

FLOAT = T.ToDtype("float32", scale=True)
SIZE = 48


def cropped_bands(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> list[Image.Image]:
    """Return the bands of an image's crop, in 0 … 1."""
    small = geometry_oracle(image, steps[:1], row).astype(np.float32) / 255
    return [Image.fromarray(np.ascontiguousarray(small[:, :, channel])) for channel in range(3)]


def mix_by_libraries(pair: tuple[np.ndarray, np.ndarray], steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    from kornia.enhance import add_weighted

    partner = row ^ 1 if row ^ 1 < len(steps[0][1].box_tlhw) else row
    image_bands, partner_bands = cropped_bands(pair[0], steps, row), cropped_bands(pair[1], steps, partner)
    params = next(params for _, params in steps if isinstance(params, PartnerMix))
    top, left, height, width = params.box_tlhw[row].tolist()
    results = []
    for band, partner_band in zip(image_bands, partner_bands, strict=True):
        if height:
            box = (left, top, left + width, top + height)
            band.paste(partner_band.crop(box), box)
            results.append(band)
        else:
            share = float(params.share[row])
            planes = (torch.from_numpy(np.array(plane))[None, None] for plane in (band, partner_band))
            results.append(add_weighted(next(planes), share, next(planes), 1 - share, 0.0)[0, 0])
    return np.stack([np.asarray(result) for result in results], axis=2)


def mixing(transform: Any) -> Case:
    blends = isinstance(transform, T.MixUp)
    return Case(
        topic="mixing",
        name=f"{transform!r}, of floats",
        transforms=[T.CenterCrop(SIZE), FLOAT, transform],
        oracle=mix_by_libraries,
        mean=1e-4,
        max=1e-4,
        against="Kornia add_weighted" if blends else "Pillow crop and paste, mode F",
        reason="float32 sums are computed in another order" if blends else "the factor 1/255 is rounded to float32",
        mixes_images=True,
        to_levels=lambda numbers: numbers * 255,
    )
