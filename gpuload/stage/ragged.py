"""The input of a stage: a batch of decoded regions of various sizes, stored in one flat tensor or in separate tensors.
`rows_by_key` groups a batch's rows.

Layout: image i is H×W×C, contiguous, at ``offsets[i]`` in `pixels`, a tensor of the images' dtype. On the CPU `pixels`
is the entire ring of shared memory, which is never copied; on CUDA it holds only this batch. A stage only reads
`pixels`, and no longer needs it when the call returns (on CUDA: when the stream has reached that point).

A user's tensors keep their memory layout, with strides in `RaggedImages.steps`. The fused kernels and, on the CPU,
Kornia's runner read strided images; all others get the result of `RaggedImages.interleave` (`gpuload.stage.segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from gpuload.datasets.sample import PIXELS
from gpuload.transforms.program.draws import Program, image_table

__all__ = ["RaggedImages", "complete_images", "rows_by_key"]


@dataclass(slots=True)
class RaggedImages:
    """The images of a batch.

    Attributes:
        pixels: a one-dimensional tensor on the device.
        table: `gpuload.transforms.program.draws.IMAGE` (B,), with offsets in elements of `pixels`.
        labels: the images' names in error messages.
        dtype: the images' dtype, one of `gpuload.datasets.sample.PIXELS`.
        steps: strides of rows, columns and channels in elements, int64 (B, 3); None means H×W×C without gaps.
        planes: with `steps`, the images as one N×C×H×W tensor, or as a list of C×H×W tensors. Offsets then point from
            the start of `pixels` to other tensors' memory, and can be negative; kernels can address that memory, torch
            cannot.
    """

    pixels: torch.Tensor
    table: np.ndarray
    labels: Sequence[str]
    dtype: str = "uint8"
    steps: np.ndarray | None = None
    planes: torch.Tensor | Sequence[torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def offsets(self) -> np.ndarray:
        """The offset of each image in `pixels`, int64 (B,)."""
        return self.table["offset"]

    @property
    def shapes(self) -> np.ndarray:
        """Height, width and channels of the decoded regions, int64 (B, 3)."""
        return self.table["shape"]

    @property
    def sizes_hw(self) -> np.ndarray:
        """Sizes of the complete upright images, int64 (B, 2)."""
        return self.table["size_hw"]

    @property
    def regions_tlhw(self) -> np.ndarray:
        """The decoded regions, int64 (B, 4). Where a worker resized a region, the region and `shapes` differ; see
        `resolve`."""
        return self.table["region_tlhw"]

    def take(self, rows: np.ndarray) -> RaggedImages:
        """Return the images with these batch indices, without copying pixels."""
        labels = [str(self.labels[row]) for row in rows.tolist()]
        if self.steps is None or self.planes is None:
            return replace(self, table=self.table[rows], labels=labels)
        planes = [self.planes[row] for row in rows.tolist()]
        return replace(self, table=self.table[rows], labels=labels, steps=self.steps[rows], planes=planes)

    def resolve(self, program: Program) -> tuple[RaggedImages, Program]:
        """Return the images and program for a stage. In them, a region that a worker resized while decoding counts as a
        complete image, the output of the program's first resize; see `Program.of_decoded`."""
        program, table = program.of_decoded(self.table)
        return (self if table is self.table else replace(self, table=table)), program

    def view_as(self, dtype: str) -> RaggedImages:
        """Reinterpret the pixels, which are bytes, as another dtype."""
        assert self.steps is None
        size, table = np.dtype(dtype).itemsize, self.table.copy()
        table["offset"] //= size
        table["shape"][:, 2] //= size
        pixels: torch.Tensor | None = self.pixels
        pixels = None if pixels is None else pixels.view(getattr(torch, dtype))
        return RaggedImages(pixels, table, self.labels, dtype)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray], device: str | torch.device = "cpu") -> RaggedImages:
        """Concatenate complete H×W×C images of one dtype.

        Raises:
            TypeError: an image is not an array, or has another dtype or number of axes.

        Example:
            >>> RaggedImages.from_arrays([np.zeros((4, 5, 3), np.uint8)]).sizes_hw
            array([[4, 5]])
        """
        first_array = arrays[0] if len(arrays) else None
        dtype = (
            first_array.dtype.name
            if isinstance(first_array, np.ndarray) and first_array.dtype.name in PIXELS
            else "uint8"
        )
        for index, array in enumerate(arrays):
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 3:
                got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"image {index} must be an H×W×C array of {dtype}, got {got}")
        shapes = np.array([array.shape for array in arrays], np.int64).reshape(-1, 3)
        ends = np.cumsum(shapes.prod(axis=1))
        flat = np.concatenate([array.ravel() for array in arrays]) if len(arrays) else np.empty(0, np.uint8)
        labels = [f"image {index}" for index in range(len(arrays))]
        table = complete_images(ends - shapes.prod(axis=1), shapes)
        return cls(torch.from_numpy(flat).to(device), table, labels, dtype)

    @classmethod
    def from_planes(cls, images: torch.Tensor | Sequence[torch.Tensor], labels: Sequence[str]) -> RaggedImages:
        """Wrap complete images that are tensors, at any address and with any strides, without copying.

        Args:
            images: an N×C×H×W tensor, or a list of C×H×W tensors. They are plain tensors on one device, with the same
                number of channels and the same dtype, one of `gpuload.datasets.sample.PIXELS`.
            labels: the images' names in error messages.

        Example:
            >>> RaggedImages.from_planes(torch.zeros(2, 3, 4, 5), ["one", "two"]).steps
            array([[ 5,  1, 20],
                   [ 5,  1, 20]])
        """
        planes: torch.Tensor | Sequence[torch.Tensor]
        if isinstance(images, torch.Tensor):
            planes = first = images.detach()
            image_step, channel, row, column = first.stride()
            shapes = np.tile(np.array([first.shape[axis] for axis in (2, 3, 1)], np.int64), (len(first), 1))
            steps = np.tile(np.array([row, column, channel], np.int64), (len(first), 1))
            starts, is_flat = np.arange(len(first), dtype=np.int64) * image_step, True
        else:
            planes = [image.detach() for image in images]
            first = planes[0]
            shapes = np.array([image.shape for image in planes], np.int64)[:, [1, 2, 0]]
            steps = np.array([image.stride() for image in planes], np.int64)[:, [1, 2, 0]]
            addresses = np.array([image.data_ptr() for image in planes], np.int64)
            starts = (addresses - addresses[0]) // first.element_size()
            is_flat = len({image.untyped_storage().data_ptr() for image in planes}) == 1 and bool((starts >= 0).all())
        count = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
        pixels = first.as_strided((count,), (1,), first.storage_offset())
        table, dtype = complete_images(starts, shapes), str(first.dtype).removeprefix("torch.")
        gapless = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 2], np.ones_like(starts)], axis=1)
        if is_flat and ((steps == gapless) | (shapes == 1)).all():
            return cls(pixels, table, labels, dtype)
        steps[shapes[:, 2] == 1, 2] = 1  # torch allows any stride along an axis of length 1
        return cls(pixels, table, labels, dtype, steps, planes)

    def interleave(self, windows_tlhw: np.ndarray, memory: Callable[[int], torch.Tensor] | None = None) -> RaggedImages:
        """Return the images as gapless H×W×C images in one tensor, copied if they have `steps`. On the CPU, only the
        windows are copied. On a device, where a copy is one operation, complete images are copied.

        Args:
            windows_tlhw: int64 (B, 4), the windows that a stage reads.
            memory: a function that returns a tensor of n elements on the device; None allocates new memory.
        """
        if self.steps is None or self.planes is None:
            return self
        device = self.pixels.device
        windows = windows_tlhw if device.type == "cpu" else self.regions_tlhw
        shapes = np.column_stack([windows[:, 2:], self.shapes[:, 2]])
        sizes = shapes.prod(axis=1)
        ends = sizes.cumsum()
        count, starts = int(ends[-1]), ends - sizes
        pixels = self.pixels.new_empty(count) if memory is None else memory(count)
        copies = zip(self.planes, starts.tolist(), ends.tolist(), shapes.tolist(), strict=True)
        if device.type == "cpu":
            flat = pixels.numpy()
            for (image, start, end, shape), window in zip(copies, windows.tolist(), strict=True):
                _copy_window(image.numpy(), window, flat[start:end].reshape(shape))
        elif isinstance(self.planes, torch.Tensor):
            pixels.view(len(self), *shapes[0].tolist()).copy_(self.planes.permute(0, 2, 3, 1))
        else:
            for image, start, end, shape in copies:
                pixels[start:end].view(shape).copy_(image.permute(1, 2, 0))
        return RaggedImages(pixels, image_table(starts, shapes, self.sizes_hw, windows), self.labels, self.dtype)


def complete_images(offsets: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the table of images that are complete: their regions begin at (0, 0) and have their size."""
    sizes_hw = shapes[:, :2]
    return image_table(offsets, shapes, sizes_hw, np.concatenate([np.zeros_like(sizes_hw), sizes_hw], axis=1))


def _copy_window(image: np.ndarray, window_tlhw: Sequence[int], result: np.ndarray) -> None:
    """Copy a window of a C×H×W image with any strides to H×W×C.

    Measured on 64 random resized crops of 3×256×256 uint8 planes: copying channel by channel takes 1.7 ms, and one
    transposed copy takes 5.8 ms; torch takes 3.3 ms for either on one thread, and 2.1 ms on two. For interleaved
    channels, one copy takes 0.2 ms. Using new memory instead of the previous batch's can add 2 ms.
    """
    top, left, height, width = window_tlhw
    window = image[:, top : top + height, left : left + width]
    if image.strides[0] == image.itemsize:
        result[...] = window.transpose(1, 2, 0)
        return
    for channel, plane in enumerate(window):
        result[:, :, channel] = plane


Key = TypeVar("Key", bound=Hashable)


def rows_by_key(keys: Iterable[Key]) -> dict[Key, np.ndarray]:
    """Group the indices of keys by key, as ascending int64 arrays.

    Example:
        >>> rows_by_key("aba")
        {'a': array([0, 2]), 'b': array([1])}
    """
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return {key: np.array(rows_of_key, np.int64) for key, rows_of_key in rows.items()}
