"""RandomResizedCrop: torchvision's rejection sampling, for a batch at once.

torchvision (transforms/v2/_geometry.py, `RandomResizedCrop.make_params`) tries ten times to draw an area and an aspect
ratio whose box fits into the image, then takes the largest central box with an allowed ratio. Here each sample has 22
numbers: two for the corner of the box, ten for areas, ten for ratios (and one more for a random filter). All ten boxes
are made at once: drawing later ones only where the first does not fit took 600 µs instead of 250 µs for a chunk of 16.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

import numpy as np

from gpuload.transforms.arguments import antialias_flag, interpolation_name, interval, size_pair
from gpuload.transforms.base import Resampling, Uniforms, declaration
from gpuload.transforms.program.ops import Box

__all__ = ["RandomResizedCrop"]

TRIES: Final = 10


@declaration
class RandomResizedCrop(Resampling):
    """Cut out a box of random area and aspect ratio, and resize it.

    The filter is cut at the box: pixels outside have no effect on the result.

    Args:
        size: of the result: an integer (a square), or (height, width), or `by_epoch`.
        scale: the least and the greatest area of the box, as fractions of the image's.
        ratio: the least and the greatest aspect ratio (width / height) of the box; drawn log-uniformly.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"``: bilinear or bicubic,
            drawn.
        antialias: False: bilinear and bicubic as `torch.nn.functional.interpolate` does without antialiasing.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    crops: ClassVar[bool] = True

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        own = "RandomResizedCrop"
        object.__setattr__(self, "size", size_pair(f"{own}(size=…)", self.size))
        object.__setattr__(self, "scale", interval(f"{own}(scale=…)", self.scale, positive=True))
        object.__setattr__(self, "ratio", interval(f"{own}(ratio=…)", self.ratio, positive=True))
        name = f"{own}(interpolation=…)"
        object.__setattr__(self, "interpolation", interpolation_name(name, self.interpolation, resizing=True))
        object.__setattr__(self, "antialias", antialias_flag(f"{own}(antialias=…)", self.antialias, self.interpolation))

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(2 + 2 * TRIES + (self.interpolation == "random"))
        low, high = self.scale
        area = (sizes_hw[:, :1] * sizes_hw[:, 1:]) * (low + numbers[:, 2 : 2 + TRIES] * (high - low))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        root = np.exp((0.5 * low) + numbers[:, 2 + TRIES : 2 + 2 * TRIES] * (0.5 * (high - low)))
        side = np.sqrt(area)
        heights, widths = np.rint(side / root), np.rint(side * root)
        fits = (heights > 0) & (heights <= sizes_hw[:, :1]) & (widths > 0) & (widths <= sizes_hw[:, 1:])
        rows, tries = np.arange(len(fits)), fits.argmax(axis=1)
        boxes_hw = np.stack([heights[rows, tries], widths[rows, tries]], axis=1).astype(np.int64)
        starts = (numbers[:, :2] * (sizes_hw - boxes_hw + 1)).astype(np.int64)
        failed = ~fits[rows, tries]
        if failed.any():
            boxes_hw[failed] = self._central(sizes_hw[failed])
            starts[failed] = (sizes_hw[failed] - boxes_hw[failed]) // 2
        return self._box(np.concatenate([starts, boxes_hw], axis=1), numbers[:, -1])

    def drawn_again(self, uniforms: Uniforms, regions_tlhw: np.ndarray) -> Box:
        # Most of the numbers are for the box, which is the region.
        return self._box(regions_tlhw, uniforms(3 + 2 * TRIES)[:, -1] if self.interpolation == "random" else None)

    def _box(self, boxes_tlhw: np.ndarray, numbers: np.ndarray | None) -> Box:
        sizes_hw = np.empty((len(boxes_tlhw), 2), np.int64)
        sizes_hw[:] = self.size
        return Box(boxes_tlhw, sizes_hw, self.filters(numbers))

    def _central(self, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of the largest boxes with an allowed ratio."""
        height, width = sizes_hw[:, 0], sizes_hw[:, 1]
        low, high = self.ratio
        ratio = width / height
        boxes_hw = sizes_hw.copy()
        boxes_hw[:, 0] = np.where(ratio < low, np.rint(width / low), height)
        boxes_hw[:, 1] = np.where(ratio > high, np.rint(height * high), width)
        return np.clip(boxes_hw, 1, sizes_hw)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size  # pyright: ignore[reportReturnType]
