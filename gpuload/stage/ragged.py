"""A batch of decoded regions of all sizes in one flat tensor, or of planes that lie anywhere: the input of a stage; and
which rows of a batch go together.

Layout: image i is H×W×C, contiguous, from ``offsets[i]`` on in `pixels`, which are of the images' dtype. On the CPU
`pixels` is the whole ring of shared memory, which is never copied; on CUDA it is the batch's bytes. A stage only reads
it, and is done with it when the call returns (on CUDA: when the stream has reached that point).

Images that are a user's own tensors lie as they do there: `RaggedImages.steps` says how. Only the fused kernels read
them so; all others are given `RaggedImages.interleaved` (`gpuload.stage.segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
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
        steps: elements between the rows, columns and channels of each image, int64 (B, 3); None means H×W×C without
            gaps.
        planes: where there are steps, the images themselves, N×C×H×W or each C×H×W. Offsets lead from the beginning of
            `pixels` to other tensors' memory then, and may be negative: kernels can follow them, torch cannot.
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
        labels = [str(self.labels[row]) for row in rows.tolist()]
        if self.steps is None or self.planes is None:
            return replace(self, table=self.table[rows], labels=labels)
        planes = [self.planes[row] for row in rows.tolist()]
        return replace(self, table=self.table[rows], labels=labels, steps=self.steps[rows], planes=planes)

    def through(self, program: Program) -> tuple[RaggedImages, Program]:
        """Return these, and the program, for a stage: where a worker has resized a region as it was decoded, the image
        is the result of the program's first resize; see `Program.of_decoded`."""
        program, table = program.of_decoded(self.table)
        return (self if table is self.table else replace(self, table=table)), program

    def viewed(self, dtype: str) -> RaggedImages:
        """Return these bytes as images of a dtype."""
        assert self.steps is None
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

    @classmethod
    def of_planes(cls, images: torch.Tensor | Sequence[torch.Tensor], labels: Sequence[str]) -> RaggedImages:
        """Whole images that are tensors, wherever and however they lie; nothing is copied.

        Args:
            images: N×C×H×W, or each C×H×W: plain tensors on one device, of one dtype of
                `gpuload.datasets.sample.PIXELS` and one number of channels.
            labels: their names in errors.

        Example:
            >>> RaggedImages.of_planes(torch.zeros(2, 3, 4, 5), ["one", "two"]).steps
            array([[ 5,  1, 20],
                   [ 5,  1, 20]])
        """
        planes: torch.Tensor | Sequence[torch.Tensor]
        if isinstance(images, torch.Tensor):
            planes = first = images.detach()
            apart, channel, row, column = first.stride()
            shapes = np.tile(np.array([first.shape[axis] for axis in (2, 3, 1)], np.int64), (len(first), 1))
            steps = np.tile(np.array([row, column, channel], np.int64), (len(first), 1))
            starts, together = np.arange(len(first), dtype=np.int64) * apart, True
        else:
            planes = [image.detach() for image in images]
            first = planes[0]
            shapes = np.array([image.shape for image in planes], np.int64)[:, [1, 2, 0]]
            steps = np.array([image.stride() for image in planes], np.int64)[:, [1, 2, 0]]
            places = np.array([image.data_ptr() for image in planes], np.int64)
            starts = (places - places[0]) // first.element_size()
            together = len({image.untyped_storage().data_ptr() for image in planes}) == 1 and bool((starts >= 0).all())
        count = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
        pixels = first.as_strided((count,), (1,), first.storage_offset())
        regions = np.concatenate([np.zeros_like(shapes[:, :2]), shapes[:, :2]], axis=1)
        table, dtype = image_table(starts, shapes, shapes[:, :2], regions), str(first.dtype).removeprefix("torch.")
        gapless = np.stack([shapes[:, 1] * shapes[:, 2], shapes[:, 2], np.ones_like(starts)], axis=1)
        if together and ((steps == gapless) | (shapes == 1)).all():
            return cls(pixels, table, labels, dtype)
        steps[shapes[:, 2] == 1, 2] = 1  # along an axis of length 1 a step means nothing, and may be any number
        return cls(pixels, table, labels, dtype, steps, planes)

    def interleaved(
        self, windows_tlhw: np.ndarray, memory: Callable[[int], torch.Tensor] | None = None
    ) -> RaggedImages:
        """Return these as H×W×C without gaps in one memory: themselves, or a copy of what is needed; on the CPU that
        is the windows alone, on a device, where a copy is one operation, the whole images.

        Args:
            windows_tlhw: int64 (B, 4), the parts of the images that are read.
            memory: gives memory for this many elements, on the device; None means new memory.
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
        parts = zip(self.planes, starts.tolist(), ends.tolist(), shapes.tolist(), strict=True)
        if device.type == "cpu":
            levels = pixels.numpy()
            for (image, start, end, shape), window in zip(parts, windows.tolist(), strict=True):
                _copy_window(image.numpy(), window, levels[start:end].reshape(shape))
        elif isinstance(self.planes, torch.Tensor):
            pixels.view(len(self), *shapes[0].tolist()).copy_(self.planes.permute(0, 2, 3, 1))
        else:
            for image, start, end, shape in parts:
                pixels[start:end].view(shape).copy_(image.permute(1, 2, 0))
        return RaggedImages(pixels, image_table(starts, shapes, self.sizes_hw, windows), self.labels, self.dtype)


def _copy_window(image: np.ndarray, window_tlhw: Sequence[int], result: np.ndarray) -> None:
    """Copy a window of an image C×H×W, which may lie in any way, to H×W×C.

    64 windows of a random resized crop, of 3×256×256 uint8 planes: channel by channel 1.7 ms, at once 5.8 ms; torch
    takes 3.3 ms on one thread for either, and 2.1 ms on two. Where each pixel is in one piece, at once 0.2 ms. New
    memory, instead of that of the last batch, may cost 2 ms more.
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
    """Return the rows of each different key, int64, ascending.

    Example:
        >>> rows_by_key("aba")
        {'a': array([0, 2]), 'b': array([1])}
    """
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return {key: np.array(numbers, np.int64) for key, numbers in rows.items()}
