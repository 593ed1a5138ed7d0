"""What both runners of the reference share: a whole line of transforms is those that work on levels, from window to
window, and then those that work on finished images."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from gpuload import transforms as T
from gpuload.stage.finished import Outputs, apply_late
from gpuload.stage.ragged import RaggedImages

__all__ = ["LineRunner"]


class LineRunner(ABC):
    """Applies transforms to batches.

    Args:
        masks: what is given are masks: they are moved as images are, by the nearest pixel, and keep their values.
    """

    def __init__(self, *, masks: bool = False) -> None:
        self._masks = masks

    def __call__(
        self, images: RaggedImages, draws: T.Draws, outputs: Outputs, partners: np.ndarray | None = None
    ) -> None:
        """Write the result for image i to ``outputs[i]``, C×H×W; it is mixed with that of its partner, see
        `apply_late`."""
        draws, late = draws.split()
        self.levels(images, draws, draws.windows_tlhw, outputs)
        if late is not None:
            apply_late(outputs, late, partners=partners, masks=self._masks)

    @abstractmethod
    def levels(
        self, images: RaggedImages, draws: T.Draws, windows_tlhw: tuple[np.ndarray, ...], outputs: Outputs
    ) -> None:
        """Apply transforms that work on levels.

        Args:
            images: of which the first of the windows is there, at least.
            draws: for neighbouring transforms of a chain.
            windows_tlhw: of the input of each, and of the result: what is wanted of it.
            outputs: image i is finished and written to ``outputs[i]``, C×H×W.
        """
