"""RandomErasing before and after normalization, with and without a flip afterwards, compared with Pillow's paste.

Pillow has no such operation, but it can paste boxes into each band of an image, even a float32 image (mode "F"). The
oracle uses the recorded random numbers and checks only their places; other tests check their distribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from parity.case import Case
from PIL import Image, ImageOps

from gpuload import transforms as T
from gpuload.stage.noise import normals
from gpuload.transforms.program.ops import Erase, Flip

__all__ = ["FLOAT", "NORMALIZE", "denormalize", "erasing"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = T.Normalize(MEAN, STD)
FLOAT = T.ToDtype("float32", scale=True)


def erase_bands(bands: list[Image.Image], transform: Any, params: Erase, row: int, unit: float) -> None:
    """Paste the boxes into the bands of an image; the transform's values are multiplied by `unit`."""
    numbers = normals(tuple(params.keys[row].tolist()), sum(band.width * band.height for band in bands) * 4)
    index = 0
    for top, left, height, width in params.boxes_tlhw[row].tolist():
        for channel, band in enumerate(bands if height else []):
            box = (left, top, left + width, top + height)
            if transform.kind == "pixel":
                noise = numbers[index : index + height * width].reshape(height, width)
                band.paste(Image.fromarray(noise, mode="F"), box)
                index += height * width
            elif transform.kind == "rand":
                band.paste(float(numbers[index]), box)
                index += 1
            else:
                values = np.ravel(transform.value) * unit
                band.paste(float(values[channel % len(values)]), box)


def erase_by_pillow(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    from kornia.enhance import normalize

    numbers, is_converted, unit = image.astype(np.float32), False, 1.0
    bands = [Image.fromarray(np.ascontiguousarray(numbers[:, :, channel])) for channel in range(image.shape[2])]
    for transform, params in steps:
        if isinstance(transform, T.ToDtype | T.Normalize):
            planes = torch.from_numpy(np.stack([np.asarray(band) for band in bands])[None].astype(np.float64))
            planes = planes if is_converted else planes / 255
            if isinstance(transform, T.Normalize):
                planes = normalize(
                    planes, torch.tensor(transform.mean).to(planes), torch.tensor(transform.std).to(planes)
                )
            bands = [Image.fromarray(plane) for plane in planes[0].to(torch.float32).numpy()]
            is_converted = True
        elif isinstance(params, Erase):
            if transform.works_on_finished or not is_converted:
                unit = 1.0
            else:  # a level, as a float
                unit = round(float(np.ravel(transform.value)[0]) * 255) / 255 / float(np.ravel(transform.value)[0])
            erase_bands(bands, transform, params, row, unit)
        elif isinstance(params, Flip) and params.flipped[row]:
            bands = [ImageOps.mirror(band) if params.axis else ImageOps.flip(band) for band in bands]
    return np.stack([np.asarray(band) for band in bands], -1)


def denormalize(numbers: np.ndarray) -> np.ndarray:
    return (numbers * np.array(STD) + np.array(MEAN)) * 255


def erasing(
    name: str,
    transforms: list[Any],
    to_levels: Any = None,
    reason: str = "gpuload and the oracle copy the same values into the erased rectangles",
) -> Case:
    if to_levels is None:
        return Case("erasing", name, transforms, erase_by_pillow, 0.0, 0.0, "Pillow Image.paste", reason)
    against = "Kornia normalize, Pillow Image.paste"
    reason += "; any conversion or normalization is one multiplication and one addition in float32"
    return Case("erasing", name, transforms, erase_by_pillow, 1e-4, 1e-3, against, reason, to_levels=to_levels)
