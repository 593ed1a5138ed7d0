"""The reference backend on CUDA: a program is applied to many images together, with batched tensor operations.

If a record applies only to some rows, their images are taken out of the batch and put back afterwards (`Branches`). If
images that a record processes together differ in size, all images are processed one by one. All work is issued on the
current stream, and parameters are uploaded to the device as small arrays. No state is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.finish import MAX_LEVELS, Finish, Outputs, erase_levels
from gpuload.stage.ragged import RaggedImages, rows_by_key
from gpuload.stage.reference.gather import PixelSource, crop, resize
from gpuload.stage.reference.operations import OPERATIONS, mix_batch
from gpuload.stage.reference.resample import round_to_levels
from gpuload.stage.reference.warp import deform, warp_batch
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import (
    CHANGES_PIXELS,
    NOTHING,
    OPS,
    Box,
    ChainMixture,
    Elastic,
    Erase,
    Flip,
    Ops,
    Record,
    Turn,
    Warp,
    filter_codes,
)
from gpuload.transforms.program.ops import code as code_of
from gpuload.transforms.program.windows import FILTERS

__all__ = ["BatchRunner", "Branches", "change_by_key"]

PIECE_SIZE: Final = 64  # images per piece: a resize needs about 3 MB per image between its two passes
PIECE_CHANNELS: Final = 4  # images with more channels are processed in smaller pieces

WARP: Final = code_of("warp")
NO_CHANGE: Final = (NOTHING, code_of("identity"))
NOT_WARPED: Final = -1  # replaces the filter code of images that are not warped


class BatchRunner:
    """A runner that applies programs to batches.

    N×C×H×W levels are uint8 when pixels are moved, and float32 in operations. For images that are not uint8, levels are
    always float32.
    """

    def __init__(self, finish: Finish, device: torch.device) -> None:
        self._finish = finish
        self._max_level = MAX_LEVELS[finish.image_dtype]
        self._constants = finish.constants(device)

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None,
    ) -> Program | None:
        """Apply records as specified in `gpuload.stage.backend.LevelRunner`. Return `late_program`, which is not
        applied."""
        is_batched = (images.shapes[:, 2] == images.shapes[0, 2]).all() and _can_batch(program, windows_tlhw)
        step = max(1, PIECE_SIZE * PIECE_CHANNELS // max(int(images.shapes[0, 2]), PIECE_CHANNELS)) if is_batched else 1
        for start in range(0, len(images), step):
            rows = np.arange(start, min(start + step, len(images)))
            windows = tuple(window[rows] for window in windows_tlhw)
            part = program if len(rows) == len(program) else program.take(rows)
            results = self._run(images, part, rows, windows)
            if isinstance(outputs, torch.Tensor):
                outputs[start : start + len(rows)].copy_(results)
            else:
                for output, result in zip(outputs[start:], results, strict=False):
                    output.copy_(result)
        return late_program

    def _run(
        self, images: RaggedImages, program: Program, rows: np.ndarray, windows: tuple[np.ndarray, ...]
    ) -> torch.Tensor:
        branches = Branches(PixelSource.from_ragged(images, rows, windows[0]))
        for record, (before, after) in zip(program.records, pairwise(windows), strict=True):
            if isinstance(record, CHANGES_PIXELS):
                index = slice(None) if record.rows is None else record.rows
                change = partial(self._apply, record=record, before=before[index], after=after[index])
                branches.change(record.rows, change)
        levels = branches.take_all().to_dense()
        if not self._finish.dtype.is_floating_point:
            return levels
        result = levels.to(torch.float32, copy=True)  # a copy, because float32 levels can be the stage's input
        if not self._finish.is_identity:
            result.mul_(self._constants[0]).add_(self._constants[1])
        return result

    def _apply(self, source: PixelSource, record: Record, before: np.ndarray, after: np.ndarray) -> PixelSource:
        match record:
            case Flip():
                return source.flip(record.flipped, horizontally=record.axis == 1)
            case Turn():
                source = source.transpose(record.transposed).flip(record.flipped[:, 0], horizontally=False)
                return source.flip(record.flipped[:, 1], horizontally=True)
            case Box(padding_mode=None):
                return self._resize(source, record, before, after)
            case Box():
                corners = record.box_tlhw[:, :2] + after[:, :2]
                if np.array_equal(after[:, 2:], before[:, 2:]) and np.array_equal(corners, before[:, :2]):
                    return source
                corners, mode = np.hstack([corners, before[:, :2]]), str(record.padding_mode)
                return PixelSource.from_dense(crop(source, corners, _size(after), record.sizes_hw, mode, record.fill))
            case Warp():
                return self._warp(source, record, after)
            case Erase():
                return PixelSource.from_dense(erase_levels(source.to_dense(), record, before, self._finish.image_dtype))
            case Elastic():
                levels = round_to_levels(deform(source.to_dense(), record, np.arange(len(after))), self._max_level)
            case Ops():
                levels = self._operate(source.to_dense().to(torch.float32), record).to(torch.uint8)
            case ChainMixture():
                levels = mix_batch(source.to_dense().to(torch.float32), record, self._operate).to(torch.uint8)
            case _:
                return source
        result = PixelSource.from_dense(levels)
        return result if np.array_equal(before, after) else result.cut(after)

    def _resize(self, source: PixelSource, record: Box, before: np.ndarray, after: np.ndarray) -> PixelSource:
        """Resize boxes and return the windows. Images with the same filter are processed together."""
        corners, boxes_hw, sizes_hw = before[:, :2] - record.box_tlhw[:, :2], record.box_tlhw[:, 2:], record.size_hw

        def resize_group(images: PixelSource, rows: np.ndarray, filter_code: int) -> PixelSource:
            levels = resize(images, corners[rows], boxes_hw[rows], sizes_hw[rows], after[rows], FILTERS[filter_code])
            return PixelSource.from_dense(round_to_levels(levels, self._max_level))

        return change_by_key(source, filter_codes(record.filters, len(before)), resize_group)

    def _warp(self, source: PixelSource, record: Warp, after: np.ndarray) -> PixelSource:
        def warp_group(images: PixelSource, rows: np.ndarray, filter_code: int) -> PixelSource:
            if filter_code == NOT_WARPED:
                return images.cut(after[rows])
            coefficients, interpolation = record.coefficients[rows], FILTERS[filter_code]
            levels = warp_batch(
                images.to_dense(), coefficients, _size(after), interpolation, record.fill, corners=after[rows, :2]
            )
            return PixelSource.from_dense(round_to_levels(levels, self._max_level))

        return change_by_key(
            source, np.where(record.warped, filter_codes(record.filters, len(after)), NOT_WARPED), warp_group
        )

    def _operate(self, levels: torch.Tensor, record: Ops) -> torch.Tensor:
        """Apply each image's operations. Images with the same operation at a position are processed together."""
        filters = filter_codes(record.filters, record.codes.shape)
        for position in range(record.codes.shape[1]):
            codes = record.codes[:, position]
            # Warps are also grouped by filter.
            keys = zip(codes.tolist(), np.where(codes == WARP, filters[:, position], 0).tolist(), strict=True)
            for (code, filter_code), rows in rows_by_key(keys).items():
                if code in NO_CHANGE:
                    continue
                values, index = record.values[rows, position], upload(rows, levels.device)
                if code == WARP:
                    size, images = (levels.shape[2], levels.shape[3]), levels[index].to(torch.uint8)
                    levels[index] = warp_batch(images, values, size, FILTERS[filter_code], record.fill).to(
                        torch.float32
                    )
                else:
                    levels[index] = OPERATIONS[OPS[code]](levels[index], values)
        if record.channels in (None, levels.shape[1]):
            return levels
        return levels[:, :1].expand(-1, record.channels, -1, -1)  # the channels are equal


def _can_batch(program: Program, windows: tuple[np.ndarray, ...]) -> bool:
    """Return whether the images of each record have the same size before the record and the same size after it, and all
    results have the same size. An image's first box, flip or turn reads pixels directly from the stage's input, so the
    input sizes of that record can differ."""
    is_untouched = np.ones(len(program), np.bool_)  # whether an image is still a view of the stage's input
    for record, (before, after) in zip(program.records, pairwise(windows), strict=True):
        rows = slice(None) if record.rows is None else record.rows
        before, after = before[rows, 2:], after[rows, 2:]
        if not len(after) or not isinstance(record, CHANGES_PIXELS):
            continue
        reads_input = isinstance(record, Box | Flip | Turn) and is_untouched[rows].all()
        if (not reads_input and (before != before[0]).any()) or (after != after[0]).any():
            return False
        is_untouched[rows] = False
    results = windows[-1][:, 2:]
    return not (results != results[0]).any()


def _size(windows_tlhw: np.ndarray) -> tuple[int, int]:
    return int(windows_tlhw[0, 2]), int(windows_tlhw[0, 3])


def change_by_key(
    images: PixelSource, keys: np.ndarray, change: Callable[[PixelSource, np.ndarray, int], PixelSource]
) -> PixelSource:
    """Change images in groups with equal `keys`, (n,): call `change` with each group, the group's indices, and its
    key."""
    groups = rows_by_key(keys.tolist())
    if len(groups) == 1:
        [(key, rows)] = groups.items()
        return change(images, rows, key)
    return PixelSource.merge([(rows, change(images.take(rows), rows, key)) for key, rows in groups.items()])


class Branches:
    """The images of a batch, divided into groups, each with the batch indices of its images. The images of a branch of
    a chain stay one group while the branch's records have the same rows."""

    def __init__(self, images: PixelSource) -> None:
        self._all_rows = np.arange(len(images.base))
        self._groups = [(self._all_rows, images)]

    def change(self, rows: np.ndarray | None, change: Callable[[PixelSource], PixelSource]) -> None:
        """Take the images with these indices (ascending; None means all) out of their groups, change them, and put them
        back as one group."""
        rows = self._all_rows if rows is None else rows
        if len(rows):
            images = change(self._take(rows))
            self._groups.append((rows, images))

    def take_all(self) -> PixelSource:
        """Take all images of the batch out of their groups, and return them."""
        return self._take(self._all_rows)

    def _take(self, rows: np.ndarray) -> PixelSource:
        groups, self._groups = self._groups, []
        parts: list[tuple[np.ndarray, PixelSource]] = []
        for group_rows, images in groups:
            is_selected = np.isin(group_rows, rows, assume_unique=True)
            if is_selected.all():
                parts.append((group_rows, images))
            elif is_selected.any():
                parts.append((group_rows[is_selected], images.take(np.flatnonzero(is_selected))))
                self._groups.append((group_rows[~is_selected], images.take(np.flatnonzero(~is_selected))))
            else:
                self._groups.append((group_rows, images))
        if len(parts) == 1:
            return parts[0][1]
        return PixelSource.merge([(np.searchsorted(rows, group_rows), images) for group_rows, images in parts])
