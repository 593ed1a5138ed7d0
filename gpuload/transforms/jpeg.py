"""JPEG's losses as augmentation. Argument and meaning are torchvision's."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gpuload.transforms.arguments import is_sequence, whole
from gpuload.transforms.base import Uniforms, declaration
from gpuload.transforms.color_random import OneOperation
from gpuload.transforms.program.ops import Ops

__all__ = ["JPEG"]


@declaration
class JPEG(OneOperation):
    """Compress images as JPEG, with colour at half the resolution, and decompress them.

    Images must have 1 or 3 channels.

    Args:
        quality: 1 … 100, or (lowest, highest), of which each image gets a whole number.

    Raises:
        TypeError, ValueError: it is neither.

    Example:
        >>> JPEG((30, 90))
        JPEG(quality=(30, 90))
    """

    operations: ClassVar[tuple[str, ...]] = ("jpeg",)
    needs_whole: ClassVar[bool] = True  # blocks are counted from the corner of the image

    quality: int | tuple[int, int]

    def __post_init__(self) -> None:
        given = self.quality if is_sequence(self.quality) else (self.quality, self.quality)
        qualities = tuple(whole("JPEG(quality=…)", quality, least=1) for quality in given)  # pyright: ignore[reportGeneralTypeIssues]
        if len(qualities) != 2 or qualities[0] > qualities[1] or qualities[1] > 100:
            raise ValueError(f"JPEG(quality=…) must lie in 1 … 100, or be (lowest, highest), got {self.quality!r}")
        object.__setattr__(self, "quality", qualities)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        lowest, highest = self.quality  # pyright: ignore[reportGeneralTypeIssues]
        qualities = lowest + np.floor(uniforms(1) * (highest - lowest + 1))
        return self.ops(np.ones(len(qualities), bool), qualities)
