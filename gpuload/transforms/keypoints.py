"""Transforms for the keypoints of a sample. Names, arguments, defaults and meaning are torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from gpuload.transforms.base import EVERYWHERE, Transform, Uniforms, declaration
from gpuload.transforms.program.ops import ClampPoints, Record, TidyPoints

__all__ = ["ClampKeyPoints", "SanitizeKeyPoints"]


@declaration
class ClampKeyPoints(Transform):
    """Move keypoints that are outside their image to its nearest pixel: x to 0 … width - 1, y to 0 … height - 1."""

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record]] = ClampPoints

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> ClampPoints:
        return ClampPoints()


@declaration
class SanitizeKeyPoints(Transform):
    """Leave out keypoints outside their image, and what belongs to them. Of groups of keypoints, (N, …, 2), those of
    which one is outside are left out as a whole.

    A sample must have one leaf of `Keypoints`.

    Args:
        labels_getter: what belongs to the keypoints, with an entry for each (for each group). None: nothing.
            ``"default"``, and a function: as for `SanitizeBoundingBoxes`.

    Raises:
        ValueError: the argument is invalid.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    drops_points: ClassVar[bool] = True
    record: ClassVar[type[Record]] = TidyPoints

    # Not compared: it does not decide which keypoints are kept, and a function is another object in each process.
    labels_getter: Callable[[Any], Any] | str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.labels_getter not in ("default", None) and not callable(self.labels_getter):
            raise ValueError(
                "SanitizeKeyPoints(labels_getter=…) must be 'default', None, or a function that takes a sample and "
                f"gives what belongs to its keypoints, such as lambda s: s[1]['labels']; got {self.labels_getter!r}"
            )

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> TidyPoints:
        return TidyPoints()
