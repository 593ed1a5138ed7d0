"""A batch of decoded regions of all sizes in one flat tensor: the input of a stage.

Layout: image i is H×W×C, contiguous, from ``offsets[i]`` on in `pixels`, which are of the images' dtype. On the CPU
`pixels` is the whole ring of shared memory, which is never copied; on CUDA it is the batch's bytes. A stage only reads
it, and is done with it when the call returns (on CUDA: when the stream has reached that point).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpuload.datasets.sample import PIXELS
from gpuload.transforms.program.draws import Program

__all__ = ["RaggedImages"]


@dataclass(slots=True)
class RaggedImages:
    """The images of a batch.

    Attributes:
        pixels: one-dimensional, on the device.
        offsets: int64 (B,), each image's first number in `pixels`.
        shapes: int64 (B, 3), height, width and channels of the decoded region.
        sizes_hw: int64 (B, 2), of the whole upright image.
        regions_tlhw: int64 (B, 4), the decoded region of it; of another size than the pixels where a worker has resized
            it, see `through`.
        labels: the images' names in errors.
        dtype: of the images: one of `gpuload.datasets.sample.PIXELS`.
    """

    pixels: torch.Tensor
    offsets: np.ndarray
    shapes: np.ndarray
    sizes_hw: np.ndarray
    regions_tlhw: np.ndarray
    labels: Sequence[str]
    dtype: str = "uint8"

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, rows: np.ndarray) -> RaggedImages:
        """Some of the images, without a copy of their pixels."""
        shapes, sizes_hw, regions_tlhw = self.shapes[rows], self.sizes_hw[rows], self.regions_tlhw[rows]
        labels = [str(self.labels[row]) for row in rows.tolist()]
        return RaggedImages(self.pixels, self.offsets[rows], shapes, sizes_hw, regions_tlhw, labels, self.dtype)

    def through(self, program: Program) -> tuple[RaggedImages, Program]:
        """These, and the program, for a stage: where a worker has resized a region as it was decoded, the image is the
        result of the program's first resize; see `Program.of_decoded`."""
        rest, regions = program.of_decoded(self.shapes, self.regions_tlhw)
        return (
            (self, program) if rest is program else (replace(self, sizes_hw=rest.sizes_hw, regions_tlhw=regions), rest)
        )

    def viewed(self, dtype: str) -> RaggedImages:
        """These bytes as images of a dtype."""
        size = np.dtype(dtype).itemsize
        pixels = None if self.pixels is None else self.pixels.view(getattr(torch, dtype))
        shapes = self.shapes // [1, 1, size]
        offsets = self.offsets // size
        return RaggedImages(pixels, offsets, shapes, self.sizes_hw, self.regions_tlhw, self.labels, dtype)  # pyright: ignore

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
        return cls(torch.from_numpy(flat).to(device), starts, shapes, shapes[:, :2], regions, labels, dtype)
