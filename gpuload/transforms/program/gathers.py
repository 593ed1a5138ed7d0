"""Records that take parts of other samples' images into an image: Mosaic and CopyPaste.

Which samples these are is a matter of positions: those of a *group* of neighbours, at p XOR 1, p XOR 2, … Their rows in
the batch are not drawn: whoever applies the record is told. Backends never see these records: the stage applies them
between two runs, when all images of the batch have come as far (`gpuload.stage.gathering`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gpuload.transforms.program.ops import Record
from gpuload.transforms.program.windows import full_windows

__all__ = ["Gather", "Paste", "Tile"]


@dataclass(eq=False, repr=False)
class Gather(Record):
    """Base of these records; a program has them for all rows."""

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw)


@dataclass(eq=False, repr=False)
class Tile(Gather):
    """Four images meet at a centre: each quadrant shows one, its corner at the centre, cut where the result ends.

    Attributes:
        tiled: bool (n,), which images are changed at all.
        order: int64 (n, 4), which of the group is shown top left, top right, bottom left and bottom right: the sample
            at position p XOR that number.
        centre_yx: int64 (n, 2), in the result.
        size_hw: the sizes of the results.
        fill: levels where no image is: one, or one for each channel.
        mask_fill: the same for masks: any number.
    """

    told: ClassVar[tuple[str, ...]] = ("tiled", "order", "centre_yx")

    tiled: np.ndarray
    order: np.ndarray
    centre_yx: np.ndarray
    size_hw: np.ndarray
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0

    @property
    def after_hw(self) -> np.ndarray:
        return self.size_hw

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the images are.

        Args:
            rows: int64 (n, 4), the row of the image in each quadrant.

        Returns:
            (corners, shown): the top left corners of the images in the result, int64 (n, 4, 2), which may lie outside;
            and the parts of the result where they are seen, int64 (n, 4, 4), with height or width 0 where they are not.
        """
        sizes = self.sizes_hw[rows]
        after = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.bool_)  # quadrants below and right of the centre
        corners = np.where(after, self.centre_yx[:, None], self.centre_yx[:, None] - sizes)
        start = np.maximum(corners, 0)
        end = np.minimum(corners + sizes, self.size_hw[:, None])
        return corners, np.concatenate([start, np.maximum(end - start, 0)], axis=2)


@dataclass(eq=False, repr=False)
class Paste(Gather):
    """Instances of the partner, the sample at position p XOR 1, are pasted onto the image, at their places there.

    Attributes:
        pasted: bool (n,), onto which images.
        keys: uint64 (n, 2), the words of the key of the random numbers that choose instances.
    """

    told: ClassVar[tuple[str, ...]] = ("pasted", "keys")

    pasted: np.ndarray
    keys: np.ndarray
