"""A batch of decoded regions of all sizes in one flat tensor: the input of a stage; and which rows of a batch go
together.

Layout: image i is H×W×C, contiguous, from ``offsets[i]`` on in `pixels`, which are of the images' dtype. On the CPU
`pixels` is the whole ring of shared memory, which is never copied; on CUDA it is the batch's bytes. A stage only reads
it, and is done with it when the call returns (on CUDA: when the stream has reached that point).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from gpuload.datasets.sample import PIXELS
from gpuload.transforms.program.draws import Program, image_table

__all__ = ["RaggedImages", "rows_by_key"]


@dataclass(slots=True)
class RaggedImages:
    """The images of a batch.

    Attributes:
        pixels: one-dimensional, on the device.
        table: `gpuload.transforms.program.draws.IMAGE` (B,), with offsets in elements of `pixels`.
        labels: the images' names in errors.
        dtype: of the images: one of `gpuload.datasets.sample.PIXELS`.
    """

    pixels: torch.Tensor
    table: np.ndarray
    labels: Sequence[str]
    dtype: str = "uint8"

    def __len__(self) -> int:
        return len(self.table)

    @property
    def offsets(self) -> np.ndarray:
        """Each image's first element in `pixels`, int64 (B,)."""
        return self.table["offset"]

    @property
    def shapes(self) -> np.ndarray:
        """Height, width and channels of the decoded regions, int64 (B, 3)."""
        return self.table["shape"]

    @property
    def sizes_hw(self) -> np.ndarray:
        """Sizes of the whole upright images, int64 (B, 2)."""
        return self.table["size_hw"]

    @property
    def regions_tlhw(self) -> np.ndarray:
        """The decoded regions, int64 (B, 4); of another size than the pixels where a worker has resized a region, see
        `through`."""
        return self.table["region_tlhw"]

    def take(self, rows: np.ndarray) -> RaggedImages:
        """Return some of the images, without a copy of their pixels."""
        return replace(self, table=self.table[rows], labels=[str(self.labels[row]) for row in rows.tolist()])

    def through(self, program: Program) -> tuple[RaggedImages, Program]:
        """Return these, and the program, for a stage: where a worker has resized a region as it was decoded, the image
        is the result of the program's first resize; see `Program.of_decoded`."""
        program, table = program.of_decoded(self.table)
        return (self if table is self.table else replace(self, table=table)), program

    def viewed(self, dtype: str) -> RaggedImages:
        """Return these bytes as images of a dtype."""
        size, table = np.dtype(dtype).itemsize, self.table.copy()
        table["offset"] //= size
        table["shape"][:, 2] //= size
        pixels: torch.Tensor | None = self.pixels
        pixels = None if pixels is None else pixels.view(getattr(torch, dtype))
        return RaggedImages(pixels, table, self.labels, dtype)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray], device: str | torch.device = "cpu") -> RaggedImages:
        """Whole images, H×W×C of one dtype, one after the other.

        Raises:
            TypeError: an array is something else.

        Example:
            >>> RaggedImages.from_arrays([np.zeros((4, 5, 3), np.uint8)]).sizes_hw
            array([[4, 5]])
        """
        first = arrays[0] if len(arrays) else None
        dtype = first.dtype.name if isinstance(first, np.ndarray) and first.dtype.name in PIXELS else "uint8"
        for number, array in enumerate(arrays):
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 3:
                got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"image {number} must be a {dtype} array H×W×C, got {got}")
        shapes = np.array([array.shape for array in arrays], np.int64).reshape(-1, 3)
        ends = np.cumsum(shapes.prod(axis=1))
        flat = np.concatenate([array.ravel() for array in arrays]) if len(arrays) else np.empty(0, np.uint8)
        regions = np.concatenate([np.zeros_like(shapes[:, :2]), shapes[:, :2]], axis=1)
        labels = [f"image {number}" for number in range(len(arrays))]
        starts = ends - shapes.prod(axis=1)
        table = image_table(starts, shapes, shapes[:, :2], regions)
        return cls(torch.from_numpy(flat).to(device), table, labels, dtype)


Key = TypeVar("Key", bound=Hashable)


def rows_by_key(keys: Iterable[Key]) -> dict[Key, np.ndarray]:
    """Return the rows of each different key, int64, ascending.

    Example:
        >>> rows_by_key("aba")
        {'a': array([0, 2]), 'b': array([1])}
    """
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return {key: np.array(numbers, np.int64) for key, numbers in rows.items()}
