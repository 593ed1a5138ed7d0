"""Transforms of video clips, which choose frames. Names, arguments and meaning are torchvision's."""

from __future__ import annotations

from typing import ClassVar

from gpuload.transforms.arguments import whole
from gpuload.transforms.base import EVERYWHERE, ClipTransform, declaration

__all__ = ["UniformTemporalSubsample"]


@declaration
class UniformTemporalSubsample(ClipTransform):
    """Keep some frames of each clip, evenly spread from the first to the last; frames are repeated if there are fewer.

    A clip is an `Image` T×H×W×C, or a list of images. Frames are chosen in the worker, before all other transforms,
    wherever it stands in a chain: the others are not decoded. Masks and all else stay as they are.

    Args:
        num_samples: how many.

    Raises:
        TypeError, ValueError: it is no whole number, or less than 1.
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    num_samples: int

    def __post_init__(self) -> None:
        number = whole("UniformTemporalSubsample(num_samples=…)", self.num_samples, least=1)
        object.__setattr__(self, "num_samples", number)
