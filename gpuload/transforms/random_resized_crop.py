"""RandomResizedCrop: torchvision's rejection sampling, for a batch at once.

torchvision (transforms/v2/_geometry.py, `RandomResizedCrop.make_params`) tries ten times to draw an area and an aspect
ratio whose box fits into the image, then takes the largest central box whose ratio is allowed. Here each sample owns 22
numbers: the place of the box first, then ten pairs of area and ratio; later pairs are only made for the samples whose
first pairs failed (one in six on photographs), which does not change what is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpuload.transforms.arguments import antialias_flag, interpolation_name, interval, size_pair
from gpuload.transforms.base import Box, Params, Transform, Uniforms, full_windows
from gpuload.transforms.resampling import source_windows

__all__ = ["RandomResizedCrop"]

TRIES: Final = 10


@dataclass(frozen=True, repr=False)
class RandomResizedCrop(Transform):
    """Cut out a box of random area and aspect ratio, and resize it.

    The filter is cut at the box: what lies outside has no part in the result.

    Args:
        size: of the result: an integer (a square), or (height, width).
        scale: the least and the greatest area of the box, as fractions of the image's.
        ratio: the least and the greatest aspect ratio (width / height) of the box; drawn log-uniformly.
        interpolation: ``"bilinear"``, ``"bicubic"`` or ``"nearest"``.
        antialias: True; anything else is refused.

    Raises:
        TypeError, ValueError: an argument is not one of these.
    """

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
        object.__setattr__(self, "interpolation", interpolation_name(f"{own}(interpolation=…)", self.interpolation))
        object.__setattr__(self, "antialias", antialias_flag(f"{own}(antialias=…)", self.antialias))

    @property
    def crops(self) -> bool:
        return True

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Params:
        first = uniforms(4)
        boxes_hw, fits = self._try(first[:, 2], first[:, 3], sizes_hw)
        if not fits.all():
            rows = np.flatnonzero(~fits)
            numbers = uniforms(2 + 2 * TRIES, rows)
            sizes = np.repeat(sizes_hw[rows], TRIES, axis=0)
            tried_hw, fit = self._try(numbers[:, 2::2].ravel(), numbers[:, 3::2].ravel(), sizes)
            fit = fit.reshape(-1, TRIES)
            chosen = tried_hw.reshape(-1, TRIES, 2)[np.arange(len(rows)), fit.argmax(axis=1)]
            any_fit = fit.any(axis=1)
            boxes_hw[rows] = np.where(any_fit[:, None], chosen, self._central(sizes_hw[rows]))
            fits[rows] = any_fit
        spare = sizes_hw - boxes_hw
        starts = np.where(fits[:, None], (first[:, :2] * (spare + 1)).astype(np.int64), spare // 2)
        size_hw = np.broadcast_to(np.array(self.size, np.int64), sizes_hw.shape)
        return Box(np.concatenate([starts, boxes_hw], axis=1), size_hw)

    def _try(self, for_area: np.ndarray, for_ratio: np.ndarray, sizes_hw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The heights and widths (n, 2) that the numbers give, and whether they fit."""
        low, high = self.scale
        area = sizes_hw[:, 0] * sizes_hw[:, 1] * (low + for_area * (high - low))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        root = np.exp(0.5 * (low + for_ratio * (high - low)))
        side = np.sqrt(area)
        boxes_hw = np.rint(np.stack([side / root, side * root], axis=1))
        fits = ((boxes_hw > 0) & (boxes_hw <= sizes_hw)).all(axis=1)
        return boxes_hw.astype(np.int64), fits

    def _central(self, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of the largest boxes with an allowed ratio."""
        height, width = sizes_hw[:, 0], sizes_hw[:, 1]
        low, high = self.ratio
        ratio = width / height
        boxes_hw = sizes_hw.copy()
        boxes_hw[:, 0] = np.where(ratio < low, np.rint(width / low), height)
        boxes_hw[:, 1] = np.where(ratio > high, np.rint(height * high), width)
        return np.clip(boxes_hw, 1, sizes_hw)

    def output_sizes(self, params: Box, sizes_hw: np.ndarray) -> np.ndarray:
        return params.size_hw

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size  # pyright: ignore[reportReturnType]

    def input_windows(self, params: Box, sizes_hw: np.ndarray, windows_tlhw: np.ndarray) -> np.ndarray:
        if np.array_equal(windows_tlhw, full_windows(params.size_hw)):
            return params.box_tlhw
        inner = source_windows(windows_tlhw, params.size_hw, params.box_tlhw[:, 2:], self.interpolation)
        inner[:, :2] += params.box_tlhw[:, :2]
        return inner
