"""Runs a segment on Kornia: reads images, applies records with the operators in `gpuload.stage.kornia.operators`, and
writes results. It works on any device, in the stage's process, and keeps no state between calls.

Images are N×C×H×W float32 within a segment, uint8 images in 0 … 1, and are rounded to levels only at its end. Each
operator is called once for the images that it applies to and that have the same size, so an image is never padded to
the size of another. On the CPU a batch is processed in pieces of a few images; results do not depend on their size.

**Resizing.** `kornia.geometry.transform.resize` takes one size per call, so on the CPU images of different sizes are
resized one by one. On CUDA, images of similar size are resized by one call of `warp_affine`: each is copied to the top
left of a canvas, its own size rounded up to a multiple of `CANVAS`, and its border pixels fill the rest. The results of
both agree to about 1e-4 of the range of values.

Where a resized image is cropped, the decoded part of the image may be smaller than the resized box. On the CPU the part
is placed in a box of zeros, because the values of `resize` depend on the box's size in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from kornia.enhance import normalize
from kornia.geometry.transform import hflip, resize, vflip, warp_affine, warp_perspective

from gpuload.stage.device import Accelerator, upload
from gpuload.stage.finish import MAX_LEVELS, Finish, Outputs
from gpuload.stage.kornia.operators import OPERATORS, forward_matrices
from gpuload.stage.ragged import RaggedImages, rows_by_key
from gpuload.stage.reference.gather import PixelSource, crop
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import (
    CHANGES_PIXELS,
    NOTHING,
    OPS,
    Box,
    ChainMixture,
    Erase,
    Flip,
    Ops,
    Record,
    Turn,
    Warp,
    filter_codes,
)
from gpuload.transforms.program.ops import code as code_of
from gpuload.transforms.program.windows import FILTERS, clip_to_windows, full_windows

__all__ = ["KorniaRunner", "images_per_piece"]

# Temporary memory per value of an image within Kornia, in bytes. 42 bytes were measured for a blur, which works in
# float64, and 39 for a bilinear map.
BYTES_PER_VALUE: Final = 64
# Memory for a piece on the CPU, which is enough for 10 images of 224×224. Kornia allocates a tensor at each step. With
# pieces of this size, the process reuses its memory; pieces of 64 images get new memory from the system each time, and
# take 1.2 to 3.1 times as long.
CPU_BYTES: Final = 100_000_000
GPU_SHARE: Final = 0.5  # memory for a piece on a GPU, as a fraction of free memory; training needs the rest
CANVAS: Final = 64  # on CUDA, images are resized together whose height and width round up to the same multiples of this

FLIPS: Final = (vflip, hflip)
NO_CHANGE: Final = (NOTHING, code_of("identity"))
WARP: Final = code_of("warp")
SIZED: Final = [*map(code_of, ("blur", "motion_blur", "clahe"))]  # their first two values are a size

# Changes N×C×H×W images; `indices` are their indices in the arrays of a record.
Change = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


class KorniaRunner:
    """A runner for the records that Kornia supports: those for which `KorniaBackend.why_unsupported` returns None."""

    def __init__(self, finish: Finish, device: torch.device) -> None:
        self._finish = finish
        self._gpu = None if device.type == "cpu" else Accelerator(device)
        self.reads_planes = self._gpu is None  # on a GPU, one copy of the batch takes less time than a copy per image
        self._unit = MAX_LEVELS[finish.image_dtype] or 1  # the level that Kornia gets as 1
        scale, bias = np.array(finish.scale) * self._unit, np.array(finish.bias)
        self._factor = float(scale[0])
        self._mean, self._std = (
            torch.tensor(part, dtype=torch.float32, device=device) for part in (-bias / scale, 1 / scale)
        )
        self._is_normalized = bias.any() or (scale != scale[0]).any()

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None = None,
    ) -> Program | None:
        nbytes = CPU_BYTES if self._gpu is None else self._gpu.free_bytes()
        if self._gpu is not None and nbytes is not None:
            nbytes = int(nbytes * GPU_SHARE)
        step = len(images) if nbytes is None else images_per_piece(windows_tlhw, images.shapes, nbytes)
        for start in range(0, len(images), step):
            rows = np.arange(start, min(start + step, len(images)))
            piece = _Piece(images.take(rows), windows_tlhw[0][rows], self._unit)
            self._apply_program(piece, program.take(rows), tuple(window[rows] for window in windows_tlhw))
            piece.change(piece.rows, lambda values, _: self._finish_values(values))
            if late_program is not None:
                late_part = late_program.take(rows)
                self._apply_program(piece, late_part, late_part.windows_tlhw, is_late=True)
            if isinstance(outputs, torch.Tensor):
                outputs[start : start + len(rows)].copy_(piece.take(piece.rows))
            else:
                for row, output in enumerate(outputs[start : start + len(rows)]):
                    output.copy_(piece.take(piece.rows[row : row + 1])[0])
        return None

    def _finish_values(self, values: torch.Tensor) -> torch.Tensor:
        if not self._finish.dtype.is_floating_point:
            return values.mul(self._unit).round_().clamp_(0, self._unit)
        if self._is_normalized:
            return normalize(values, self._mean, self._std)
        return values if self._factor == 1 else values * self._factor

    def _apply_program(
        self, piece: _Piece, program: Program, windows_tlhw: Sequence[np.ndarray], *, is_late: bool = False
    ) -> None:
        for record, (before, after) in zip(program.records, pairwise(windows_tlhw), strict=True):
            rows = piece.rows if record.rows is None else record.rows
            if isinstance(record, CHANGES_PIXELS) and len(rows):
                self._apply(piece, record, rows, before[rows], after[rows], is_late=is_late)

    def _apply(
        self, piece: _Piece, record: Record, rows: np.ndarray, before: np.ndarray, after: np.ndarray, *, is_late: bool
    ) -> None:
        match record:
            case Flip():
                piece.change(rows[record.flipped], lambda images, _: FLIPS[record.axis](images))
            case Turn():
                turns = np.column_stack([record.transposed, record.flipped])
                piece.change(rows, lambda images, indices: _turn(images, *turns[indices[0]].tolist()), turns)
            case Box(padding_mode=None):
                self._resize(piece, record, rows, before, after)
            case Box():
                self._crop(piece, record, rows, before, after)
            case Warp():
                self._warp(piece, record, rows, after)
            case Erase():
                boxes = record.boxes_tlhw if is_late else clip_to_windows(record.boxes_tlhw, before)
                max_level = MAX_LEVELS[self._finish.image_dtype]
                values = np.array(record.numbers if is_late else record.values_for(max_level))
                values = values if is_late else values / self._unit
                erased = np.flatnonzero(boxes[:, :, 2:].all(axis=2).sum(axis=1))
                boxes = boxes[erased]
                piece.change(rows[erased], lambda images, indices: _erase(images, boxes[indices], values))
            case Ops():
                piece.change(rows, lambda images, indices: self._operate(images, record, indices))
                _cut(piece, rows, before, after)
            case ChainMixture():
                piece.change(rows, lambda images, indices: self._mix(images, record, indices))
                _cut(piece, rows, before, after)
            case _:
                raise TypeError(f"Kornia has no operator for {type(record).__name__}")

    def _resize(self, piece: _Piece, record: Box, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Resize boxes of which the images are the windows `before`, and return the windows `after`."""
        codes = filter_codes(record.filters, len(rows))
        names = [FILTERS[code].removeprefix("plain ") for code in codes.tolist()]
        corners, boxes_hw = before[:, :2] - record.box_tlhw[:, :2], record.box_tlhw[:, 2:]

        def resize_box(images: torch.Tensor, index: int) -> torch.Tensor:
            (y, x), box_hw, (top, left, height, width) = corners[index], boxes_hw[index].tolist(), after[index].tolist()
            if list(images.shape[2:]) != box_hw:
                box = images.new_zeros(*images.shape[:2], *box_hw)
                box[:, :, y : y + images.shape[2], x : x + images.shape[3]] = images
                images = box
            resized = resize(images, tuple(record.size_hw[index].tolist()), names[index], antialias=False)
            return self._clip(resized, names[index])[:, :, top : top + height, left : left + width].contiguous()

        def resize_canvases(images: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
            matrices = np.tile(np.eye(3)[:2], (len(indices), 1, 1))
            for axis, column in ((0, 1), (1, 0)):  # y is the second coordinate of a matrix
                scale = record.size_hw[indices, axis] / boxes_hw[indices, axis]
                matrices[:, column, column] = scale
                matrices[:, column, 2] = (corners[indices, axis] + 0.5) * scale - 0.5 - after[indices, axis]
            name, moved = names[indices[0]], upload(matrices.astype(np.float32), images.device)
            size = tuple(after[indices[0], 2:].tolist())
            return self._clip(warp_affine(images, moved, size, name, "border", align_corners=False), name)

        is_alone = (codes == FILTERS.index("nearest")) | (self._gpu is None)
        alone, together = np.flatnonzero(is_alone), np.flatnonzero(~is_alone)
        keys = np.column_stack([codes, boxes_hw, corners, record.size_hw, after])[alone]
        piece.change(rows[alone], lambda images, i: resize_box(images, int(alone[i[0]])), keys, any_layout=True)
        keys = np.column_stack([codes, after[:, 2:]])[together]
        piece.change(rows[together], lambda images, i: resize_canvases(images, together[i]), keys, canvas=CANVAS)

    def _clip(self, images: torch.Tensor, interpolation: str) -> torch.Tensor:
        """Clip overshoots of a bicubic filter, for images with a greatest level."""
        return images.clamp(0, 1) if self._unit > 1 and interpolation == "bicubic" else images

    def _crop(self, piece: _Piece, record: Box, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        corners = np.hstack([record.box_tlhw[:, :2] + after[:, :2], before[:, :2]])
        changed = np.flatnonzero((corners[:, :2] != corners[:, 2:]).any(axis=1) | (before != after)[:, 2:].any(axis=1))
        fill, mode = [level / self._unit for level in record.fill], str(record.padding_mode)

        def crop_group(images: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
            group, source = changed[indices], PixelSource.from_dense(images)
            return crop(source, corners[group], tuple(after[group[0], 2:]), record.sizes_hw[group], mode, fill)

        piece.change(rows[changed], crop_group, after[changed, 2:])

    def _warp(self, piece: _Piece, record: Warp, rows: np.ndarray, after: np.ndarray) -> None:
        warped, codes = np.flatnonzero(record.warped), filter_codes(record.filters, len(rows))
        keys = _warp_keys(record.coefficients, codes)

        def warp_group(images: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
            group = warped[indices]
            return self._warp_images(images, record.coefficients[group], keys[group[0]], record.fill, after[group])

        unchanged = np.flatnonzero(~record.warped)
        _cut(piece, rows[unchanged], np.zeros_like(after[unchanged]), after[unchanged])
        piece.change(rows[warped], warp_group, np.hstack([keys, after[:, 2:]])[warped])

    def _warp_images(
        self,
        images: torch.Tensor,
        coefficients: np.ndarray,
        key: np.ndarray,
        fill: Sequence[float],
        windows_tlhw: np.ndarray,
    ) -> torch.Tensor:
        """Warp images by maps that all have the same `_warp_keys`; return windows, of one size, of the results."""
        filter_code, is_affine = key.tolist()
        matrices = upload(forward_matrices(coefficients, windows_tlhw[:, :2]).astype(np.float32), images.device)
        fill_value = upload(np.array(fill, np.float32) / self._unit, images.device) if any(fill) else None
        warped = (warp_affine if is_affine else warp_perspective)(
            images,
            matrices[:, :2] if is_affine else matrices,
            tuple(windows_tlhw[0, 2:].tolist()),
            FILTERS[filter_code],
            padding_mode="zeros" if fill_value is None else "fill",
            align_corners=False,
            fill_value=fill_value,
        )
        return self._clip(warped, FILTERS[filter_code])

    def _operate(self, images: torch.Tensor, record: Ops, indices: np.ndarray) -> torch.Tensor:
        """Apply each image's operations. Images with the same operation at a position are processed together."""
        images = images.clamp(0, 1) if self._unit == 1 else images  # the filters before may have overshot
        filters, is_owned = filter_codes(record.filters, record.codes.shape), False
        for position in range(record.codes.shape[1]):
            codes, values = record.codes[indices, position], record.values[indices, position]
            # Warps are also grouped by filter and kind of map, blurs by the size of their kernels, CLAHE by its grid.
            extra = np.where(np.isin(codes, SIZED)[:, None], values[:, :2], 0).astype(np.int64)
            extra = np.where((codes == WARP)[:, None], _warp_keys(values, filters[indices, position]), extra)
            for (code, *key), group in rows_by_key(map(tuple, np.column_stack([codes, extra]).tolist())).items():
                if code in NO_CHANGE:
                    continue
                change = OPERATORS.get(OPS[code])
                if change is None:  # a warp
                    windows = full_windows(np.tile(images.shape[2:], (len(group), 1)))
                    change = partial(self._warp_images, key=np.array(key), fill=record.fill, windows_tlhw=windows)
                if len(group) == len(images):
                    images = change(images, values)
                    continue
                images, is_owned = images if is_owned else images.clone(), True
                index = upload(group, images.device)
                images[index] = change(images[index], values[group])
        if record.channels in (None, images.shape[1]):
            return images
        return images[:, :1].expand(-1, record.channels, -1, -1).contiguous()  # the channels are equal

    def _mix(self, images: torch.Tensor, record: ChainMixture, indices: np.ndarray) -> torch.Tensor:
        weights = upload(record.weights[indices].astype(np.float32), images.device)[:, :, None, None, None]
        total = images * weights[:, 0]
        for number in range(record.codes.shape[1]):
            total += self._operate(images, record.chain(number), indices) * weights[:, number + 1]
        return total.clamp_(0, 1)


def _warp_keys(coefficients: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Return what maps that are applied in one call must have in common, int64 (n, 2): the filter, and whether the map
    is affine."""
    return np.column_stack([filters, (coefficients[:, 6:8] == 0).all(axis=1)])


def _turn(images: torch.Tensor, transposed: bool, flipped_y: bool, flipped_x: bool) -> torch.Tensor:
    images = images.mT if transposed else images
    images = vflip(images) if flipped_y else images
    return (hflip(images) if flipped_x else images).contiguous()


def _erase(images: torch.Tensor, boxes_tlhw: np.ndarray, values: np.ndarray) -> torch.Tensor:
    images, constant = images.clone(), upload(values.astype(np.float32)[:, None, None], images.device)
    for index, box in np.argwhere(boxes_tlhw[:, :, 2:].all(axis=2)).tolist():
        top, left, height, width = boxes_tlhw[index, box].tolist()
        images[index, :, top : top + height, left : left + width] = constant
    return images


def _cut(piece: _Piece, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    """Cut the windows `after` out of images that are the windows `before`."""
    boxes = np.hstack([after[:, :2] - before[:, :2], after[:, 2:]])

    def cut(images: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
        top, left, height, width = boxes[indices[0]].tolist()
        return images[:, :, top : top + height, left : left + width].contiguous()

    piece.change(rows, cut, boxes)


class _Piece:
    """Images of a batch that are processed together, float32, each at an index of one of several N×C×H×W tensors.

    Attributes:
        rows: the indices of all images, int64 (n,).
    """

    def __init__(self, images: RaggedImages, windows_tlhw: np.ndarray, unit: int) -> None:
        self.rows = np.arange(len(images))
        self._images, self._windows, self._unit = images, windows_tlhw, unit
        # The tensor and index of each image; None until the image is read.
        self._homes: list[tuple[torch.Tensor, int] | None] = [None] * len(images)

    def change(
        self,
        rows: np.ndarray,
        function: Change,
        keys: np.ndarray | None = None,
        *,
        canvas: int | None = None,
        any_layout: bool = False,
    ) -> None:
        """Replace images with the results of a function.

        Args:
            rows: int64 (n,), the indices of the images.
            function: called for images of the same size and key; must not change its input. Its second argument has the
                indices in `rows` of these images.
            keys: int64 (n, k), one key per image.
            canvas: if given, images are first extended to multiples of this size by their border pixels.
            any_layout: whether the function also takes images in torch's channels-last layout.
        """
        sizes = np.array(
            [
                self._windows[row, 2:] if (home := self._homes[row]) is None else home[0].shape[2:]
                for row in rows.tolist()
            ],
            np.int64,
        ).reshape(-1, 2)
        sizes = sizes if canvas is None else -(-sizes // canvas) * canvas
        table = sizes if keys is None else np.column_stack([sizes, keys])
        results = []
        for (height, width, *_), indices in rows_by_key(map(tuple, table.tolist())).items():
            group = rows[indices]
            images = self.take(group) if canvas is None else self._take_extended(group, height, width)
            results.append((group.tolist(), function(images if any_layout else images.contiguous(), indices)))
        for group, images in results:
            for place, row in enumerate(group):
                self._homes[row] = images, place

    def take(self, rows: np.ndarray) -> torch.Tensor:
        """Return images of the same size, N×C×H×W; the result must not be modified."""
        unread = np.array([row for row in rows.tolist() if self._homes[row] is None], np.int64)
        if len(unread):
            images = self._read(unread)
            for place, row in enumerate(unread.tolist()):
                self._homes[row] = images, place
        homes = [home for row in rows.tolist() if (home := self._homes[row]) is not None]
        first = homes[0][0]
        if any(images is not first for images, _ in homes):
            return torch.stack([images[place] for images, place in homes])
        places = [place for _, place in homes]
        if places == list(range(len(first))):
            return first
        return first.index_select(0, upload(np.array(places), first.device))

    def _read(self, rows: np.ndarray) -> torch.Tensor:
        """Read windows of the same size as floats. A single image has torch's channels-last layout on the CPU, in which
        Kornia's resize takes 60% of the time."""
        if not self._images.pixels.is_cpu:
            images = PixelSource.from_ragged(self._images, rows, self._windows[rows]).to_dense().to(torch.float32)
        elif len(rows) == 1:
            images = self._view(int(rows[0]))[None].to(torch.float32, memory_format=torch.channels_last, copy=True)
        else:
            views = [self._view(row) for row in rows.tolist()]
            images = torch.empty(len(rows), *views[0].shape)
            for image, view in zip(images, views, strict=True):
                image.copy_(view)
        return images.div_(self._unit) if self._unit > 1 else images

    def _view(self, row: int) -> torch.Tensor:
        """Return the window of an image, C×H×W, without copying."""
        images, (top, left, height, width) = self._images, self._windows[row].tolist()
        if images.steps is not None and images.planes is not None:
            return images.planes[row][:, top : top + height, left : left + width]
        offset, (rows, columns, channels) = int(images.offsets[row]), images.shapes[row].tolist()
        image = images.pixels[offset : offset + rows * columns * channels].view(rows, columns, channels)
        top, left = top - int(images.regions_tlhw[row, 0]), left - int(images.regions_tlhw[row, 1])
        return image[top : top + height, left : left + width].permute(2, 0, 1)

    def _take_extended(self, rows: np.ndarray, height: int, width: int) -> torch.Tensor:
        """Return images extended to this size by their border pixels, N×C×H×W."""
        if all(self._homes[row] is None for row in rows.tolist()):
            sources = [PixelSource.from_ragged(self._images, rows, self._windows[rows])]
        else:
            sources = [PixelSource.from_dense(self.take(row).contiguous()) for row in rows[:, None]]
        parts = []
        for source in sources:
            axes = ((height, source.heights), (width, source.widths))
            indices = [np.minimum(np.arange(count), lengths[:, None] - 1) for count, lengths in axes]
            parts.append(source.gather(*(upload(index, source.pixels.device) for index in indices)))
        images = parts[0] if len(parts) == 1 else torch.cat(parts)
        return images if images.is_floating_point() else images.to(torch.float32).div_(self._unit)


def images_per_piece(windows_tlhw: Iterable[np.ndarray], shapes: np.ndarray, nbytes: int) -> int:
    """Return how many images Kornia can process at a time in `nbytes` of memory. `windows_tlhw` has the images' windows
    at each step; `shapes` is int64 (n, 3)."""
    channels = max(3, int(shapes[:, 2].max()))  # a map's memory per pixel was measured with three channels
    num_values = channels * max(int(windows[:, 2:].prod(axis=1).max()) for windows in windows_tlhw)
    return max(1, nbytes // max(1, num_values * BYTES_PER_VALUE))
