"""Several views of one image: SimCLR's two, BYOL's pair, DINO's two global and eight local crops.

`gpuload.transforms.chain` turns a chain with a `MultiView` into a line of transforms for each view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

import numpy as np

from gpuload.transforms.arguments import is_sequence
from gpuload.transforms.base import EVERYWHERE, Transform, Uniforms, declaration
from gpuload.transforms.composite import Compose, held

__all__ = ["MultiView"]


@declaration
class MultiView(Transform):
    """Make several views of each image, each by transforms of its own, with draws of its own.

    Instead of the image a batch has a list of tensors N×C×H×W, one for each view in this order. The file is read once,
    and the region that covers all views is decoded once. Transforms before it in the chain are drawn once for all
    views; those after it are applied to each view, with draws of its own.

    Args:
        chains: for each view a list of transforms, or one transform.

    Raises:
        TypeError, ValueError: it is not a list of these, or a list is empty.

    Example:
        >>> from gpuload import transforms as T
        >>> T.Chain([T.MultiView([T.RandomResizedCrop(224), *[T.RandomResizedCrop(96)] * 6])]).views
        7
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    chains: Sequence[Sequence[Transform] | Transform]

    def __post_init__(self) -> None:
        if isinstance(self.chains, Transform) or not is_sequence(self.chains) or not len(self.chains):
            raise TypeError(f"MultiView(chains=…) must be a list with the transforms of each view, got {self.chains!r}")
        chains = []
        for number, chain in enumerate(self.chains):
            if isinstance(chain, Compose):
                chain = chain.transforms
            chains.append(held(f"MultiView(chains=…)[{number}]", [chain] if isinstance(chain, Transform) else chain))
        object.__setattr__(self, "chains", tuple(chains))

    @property
    def children(self) -> tuple[Transform, ...]:
        return tuple(transform for chain in self.chains for transform in chain)  # pyright: ignore

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> NoReturn:
        raise NotImplementedError("a chain makes a line of transforms for each view")
