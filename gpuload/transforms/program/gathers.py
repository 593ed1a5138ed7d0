"""The record that takes parts of other samples' images into an image: Mosaic and CopyPaste.

Which samples these are is a matter of positions: those of a *group* of neighbours, at p XOR 1, p XOR 2, … Their rows in
the batch are not drawn, but set once the batch is there (`gpuload.batches.gathering`). Backends never see the record:
the stage applies it between two runs, when all images of the batch have come as far (`gpuload.stage.gathering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpuload.transforms.program.ops import Record
from gpuload.transforms.program.windows import full_windows

__all__ = ["Gather"]


@dataclass(eq=False, repr=False)
class Gather(Record):
    """The images of a group are put into each image; a program has the record for all rows.

    With `keys`, and no `order` and `centre_yx` (CopyPaste), instances of the partner, at position p XOR 1, are pasted
    onto the image, at their places. Else (Mosaic) four images meet at a centre: each quadrant shows one, its corner at
    the centre, cut where the result ends.

    Attributes:
        gathered: bool (n,), which images are changed at all.
        size_hw: the sizes of the results; None: as they were.
        order: int64 (n, 4), which of the group is shown top left, top right, bottom left and bottom right: the sample
            at position p XOR that number.
        centre_yx: int64 (n, 2), where they meet in the result.
        keys: uint64 (n, 2), the words of the key of the random numbers that choose instances.
        fill: levels where no image is: one, or one for each channel.
        mask_fill: the same for masks: any number.
        groups: int64 (n, 2 or 4), of each sample the rows of its group: its own, that at position p XOR 1, …; its own
            row again for those that are missing. Set once the batch is there.
        covered: of a paste, where each image shows its partner: a bool tensor H×W, or None for nowhere; set likewise.
    """

    told: ClassVar[tuple[str, ...]] = ("gathered", "order", "centre_yx", "keys")

    gathered: np.ndarray
    size_hw: np.ndarray | None = None
    order: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    centre_yx: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    keys: np.ndarray | None = None
    fill: tuple[float, ...] = (0,)
    mask_fill: float = 0
    groups: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    covered: Sequence[Any] = ()

    @property
    def after_hw(self) -> np.ndarray:
        return self.sizes_hw if self.size_hw is None else self.size_hw

    def input_windows(self, windows_tlhw: np.ndarray) -> np.ndarray:
        return full_windows(self.sizes_hw)

    def quadrants(self, windows_tlhw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each quadrant of a mosaic, which image it shows and where.

        Args:
            windows_tlhw: int64 (n, 4), the parts of the results that are wanted.

        Returns:
            (rows, corners, shown): the rows of the images, int64 (n, 4); their top left corners in the result, int64
            (n, 4, 2), which may lie outside; and the parts of the result where they are seen, int64 (n, 4, 4), with
            height or width 0 where they are not.
        """
        rows = np.take_along_axis(self.groups, self.order, axis=1)
        sizes = self.sizes_hw[rows]
        after = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.bool_)  # quadrants below and right of the centre
        corners = np.where(after, self.centre_yx[:, None], self.centre_yx[:, None] - sizes)
        start = np.maximum(corners, windows_tlhw[:, None, :2])
        end = np.minimum(corners + sizes, (windows_tlhw[:, :2] + windows_tlhw[:, 2:])[:, None])
        return rows, corners, np.concatenate([start, np.maximum(end - start, 0)], axis=2)
