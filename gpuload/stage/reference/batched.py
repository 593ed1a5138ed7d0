"""The reference on CUDA: a program applied to many images at once, with batched tensor operations.

The images of a batch are in *groups*, each with its rows: a record takes its rows out of them, and its results are a
new group. If images that go through a record together differ in size, all are taken one by one. Everything is issued
on the current stream; numbers go to the device as small arrays. Nothing is kept from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.finish import TOPS, Finish, Outputs, erase_levels
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.gather import Source, crop, resize
from gpuload.stage.reference.operations import OPERATIONS, Operation, in_channels, mix_batch
from gpuload.stage.reference.resample import on_grid
from gpuload.stage.reference.warp import deform, warp_batch
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import (
    CHANGES_PIXELS,
    NOTHING,
    OPS,
    Box,
    Elastic,
    Erase,
    Flip,
    Mixture,
    Ops,
    Record,
    Turn,
    Warp,
    filter_codes,
)
from gpuload.transforms.program.windows import FILTERS

__all__ = ["BatchRunner", "dense"]

PIECE: Final = 64  # images at once: between its axes a resize needs some 3 MB for each
USUAL_CHANNELS: Final = 4  # with more of them fewer images

Group = tuple[np.ndarray, Source]  # rows of a batch, ascending, and where their pixels are


class BatchRunner:
    """Applies programs to batches.

    What changes pixels is in methods that another backend may override; levels N×C×H×W are uint8 when they are moved,
    and float32 in operations. Those of images that are not uint8 are always float32.

    Args:
        finish: the end of the chain.
        device: where the images are.
    """

    operations: ClassVar[Mapping[str, Operation]] = OPERATIONS
    piece: int = PIECE  # images at once

    def __init__(self, finish: Finish, device: torch.device) -> None:
        self._finish = finish
        self._top = TOPS[finish.levels]
        self._constants = finish.constants(device)

    def levels(
        self, images: RaggedImages, program: Program, windows_tlhw: tuple[np.ndarray, ...], outputs: Outputs
    ) -> None:
        """Apply the records that work on levels, and finish; arguments as for `gpuload.stage.backend.Levels`."""
        together = (images.shapes[:, 2] == images.shapes[0, 2]).all() and _go_together(program, windows_tlhw)
        step = max(1, self.piece * USUAL_CHANNELS // max(int(images.shapes[0, 2]), USUAL_CHANNELS)) if together else 1
        for start in range(0, len(images), step):
            rows = np.arange(start, min(start + step, len(images)))
            windows = tuple(window[rows] for window in windows_tlhw)
            some = program if len(rows) == len(program) else program.take(rows)
            results = self._run(images, some, rows, windows)
            if isinstance(outputs, torch.Tensor):
                outputs[start : start + len(rows)].copy_(results)
            else:
                for output, result in zip(outputs[start:], results, strict=False):
                    output.copy_(result)

    def _run(
        self, images: RaggedImages, program: Program, rows: np.ndarray, windows: tuple[np.ndarray, ...]
    ) -> torch.Tensor:
        everyone = np.arange(len(rows))
        groups: list[Group] = [(everyone, Source.of_ragged(images, rows, windows[0]))]
        for number, record in enumerate(program.records):
            if not isinstance(record, CHANGES_PIXELS):
                continue
            before, after = windows[number : number + 2]
            own = everyone
            if record.rows is not None:
                own, before, after = record.rows, before[record.rows], after[record.rows]
            if len(own):
                source, groups = _picked(groups, own)
                groups.append((own, self._apply(source, record, before, after)))
        levels = dense(_picked(groups, everyone)[0])
        return self._finished(levels) if self._finish.dtype.is_floating_point else levels

    def _finished(self, levels: torch.Tensor) -> torch.Tensor:
        """Finished images, float32."""
        result = levels.to(torch.float32, copy=True)  # float32 levels may be the stage's input
        if not self._finish.is_identity:
            result.mul_(self._constants[0]).add_(self._constants[1])
        return result

    def _apply(self, source: Source, record: Record, before: np.ndarray, after: np.ndarray) -> Source:
        match record:
            case Flip():
                return self._flip(source, record)
            case Turn():
                source = source.transpose(record.transposed).flip(record.flipped[:, 0], horizontally=False)
                return source.flip(record.flipped[:, 1], horizontally=True)
            case Box() if record.pads:
                corners = record.box_tlhw[:, :2] + after[:, :2]
                if np.array_equal(after[:, 2:], before[:, 2:]) and np.array_equal(corners, before[:, :2]):
                    return source
                return self._crop(source, record, np.hstack([corners, before[:, :2]]), _size(after))
            case Box():
                return _resized(source, record, before, after, self._top)
            case Warp():
                return self._warp(source, record, after)
            case Elastic():
                found = deform(dense(source), record, np.arange(len(after)))
                deformed = Source.of_dense(found if found.dtype == torch.uint8 else on_grid(found, self._top))
                return deformed if np.array_equal(before, after) else deformed.cut(after)
            case Ops() | Mixture():
                levels = dense(source).to(torch.float32)
                levels = self._operate(levels, record) if isinstance(record, Ops) else self._mix(levels, record)
                operated = Source.of_dense(levels.to(torch.uint8))
                return operated if np.array_equal(before, after) else operated.cut(after)
            case Erase():
                return Source.of_dense(self._erase(dense(source), record, before))
        return source

    def _flip(self, source: Source, record: Flip) -> Source:
        return source.flip(record.flipped, horizontally=record.axis == 1)

    def _crop(self, source: Source, record: Box, corners: np.ndarray, size: tuple[int, int]) -> Source:
        """Boxes of one size that may reach beyond the image; `corners` as for `gather.crop`."""
        assert record.padding_mode is not None
        return Source.of_dense(crop(source, corners, size, record.sizes_hw, record.padding_mode, record.fill))

    def _mix(self, levels: torch.Tensor, record: Mixture) -> torch.Tensor:
        return mix_batch(levels, record, self._operate)

    def _erase(self, levels: torch.Tensor, record: Erase, windows_tlhw: np.ndarray) -> torch.Tensor:
        return erase_levels(levels, record, windows_tlhw, self._finish.levels)

    def _warped(
        self,
        levels: torch.Tensor,
        coefficients: np.ndarray,
        size: tuple[int, int],
        interpolation: str,
        fill: Sequence[float],
        corners: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Images through maps; arguments as for `warp_batch`."""
        found = warp_batch(levels, coefficients, size, interpolation, fill, corners=corners)
        return found if found.dtype == torch.uint8 else on_grid(found, self._top)

    def _warp(self, source: Source, record: Warp, after: np.ndarray) -> Source:
        levels = dense(source)
        size, filters = _size(after), filter_codes(record.filters, len(levels))
        results = levels.new_empty(*levels.shape[:2], *size)
        still = np.flatnonzero(~record.warped)
        if len(still):
            index = upload(still, levels.device)
            results[index] = source.take(still).cut(after[still]).dense()
        for number in np.unique(filters).tolist():
            rows = np.flatnonzero((filters == number) & record.warped)
            if len(rows):
                index = upload(rows, levels.device)
                results[index] = self._warped(
                    levels[index], record.coefficients[rows], size, FILTERS[number], record.fill, after[rows, :2]
                )
        return Source.of_dense(results)

    def _operate(self, levels: torch.Tensor, record: Ops) -> torch.Tensor:
        """Do each image's operations; images with the same n-th one go together."""
        filters = filter_codes(record.filters, record.codes.shape)
        for turn in range(record.codes.shape[1]):
            for code in np.unique(record.codes[:, turn]).tolist():
                if code == NOTHING:
                    continue
                rows = np.flatnonzero(record.codes[:, turn] == code)
                values = record.values[rows, turn]
                if OPS[code] == "warp":
                    self._warp_levels(levels, rows, values, filters[rows, turn], record.fill)
                elif OPS[code] != "identity":
                    index = upload(rows, levels.device)
                    levels[index] = self.operations[OPS[code]](levels[index], values)
        return levels if record.channels is None else in_channels(levels, record.channels)

    def _warp_levels(
        self,
        levels: torch.Tensor,
        rows: np.ndarray,
        coefficients: np.ndarray,
        filters: np.ndarray,
        fill: Sequence[float],
    ) -> None:
        """Warp some images in place, those with the same filter together."""
        size = levels.shape[2], levels.shape[3]
        for number in np.unique(filters).tolist():
            some = np.flatnonzero(filters == number)
            index = upload(rows[some], levels.device)
            warped = self._warped(levels[index].to(torch.uint8), coefficients[some], size, FILTERS[number], fill)
            levels[index] = warped.to(torch.float32)


def _resized(source: Source, record: Box, before: np.ndarray, after: np.ndarray, top: int | None) -> Source:
    """Windows of resized boxes, those with the same filter together; `top`: the highest level."""
    corners = before[:, :2] - record.box_tlhw[:, :2]
    boxes, sizes = record.box_tlhw[:, 2:], record.size_hw
    filters = filter_codes(record.filters, len(before))
    groups: list[Group] = []
    for number in np.unique(filters).tolist():
        rows = np.flatnonzero(filters == number)
        some = source if len(rows) == len(filters) else source.take(rows)
        found = resize(some, corners[rows], boxes[rows], sizes[rows], after[rows], FILTERS[number])
        groups.append((rows, Source.of_dense(found if found.dtype == torch.uint8 else on_grid(found, top))))
    return _picked(groups, np.arange(len(filters)))[0]


def _picked(groups: Sequence[Group], rows: np.ndarray) -> tuple[Source, list[Group]]:
    """The images of some rows, in their order, and the groups that are left."""
    picked: list[Group] = []
    left: list[Group] = []
    for own, source in groups:
        inside = np.isin(own, rows, assume_unique=True)
        if inside.all():
            picked.append((own, source))
        elif inside.any():
            picked.append((own[inside], source.take(np.flatnonzero(inside))))
            left.append((own[~inside], source.take(np.flatnonzero(~inside))))
        else:
            left.append((own, source))
    if len(picked) == 1:
        return picked[0][1], left
    source = Source.joined([source for _, source in picked])
    if source is not None:
        return source.take(np.argsort(np.concatenate([own for own, _ in picked]))), left
    results: torch.Tensor | None = None
    for own, source in picked:
        found = dense(source)
        if results is None:
            results = found.new_empty((len(rows), *found.shape[1:]))
        results[upload(np.searchsorted(rows, own), found.device)] = found
    assert results is not None
    return Source.of_dense(results), left


def _go_together(program: Program, windows: tuple[np.ndarray, ...]) -> bool:
    """Whether the images of each record have one size, and all results too. Images of any size may go through the first
    box, flip or turn, which reads pixels where they are."""
    untouched = np.ones(len(program), np.bool_)  # still a view of the stage's input
    for number, record in enumerate(program.records):
        rows = slice(None) if record.rows is None else record.rows
        before, after = windows[number][rows, 2:], windows[number + 1][rows, 2:]
        if not len(after) or not isinstance(record, CHANGES_PIXELS):
            continue
        gathers = isinstance(record, Box | Flip | Turn) and untouched[rows].all()
        if (not gathers and (before != before[0]).any()) or (after != after[0]).any():
            return False
        untouched[rows] = False
    results = windows[-1][:, 2:]
    return not (results != results[0]).any()


def _size(windows_tlhw: np.ndarray) -> tuple[int, int]:
    """The size of all windows."""
    return int(windows_tlhw[0, 2]), int(windows_tlhw[0, 3])


def dense(source: Source) -> torch.Tensor:
    """All pixels of images of one size, N×C×H×W, read-only: a view if they are contiguous, else a copy."""
    count, height, width = len(source.base), int(source.heights[0]), int(source.widths[0])
    length = source.channels * height * width
    first = int(source.base[0])
    contiguous = (
        (source.channel_step == height * width or source.channels == 1)
        and (source.row_step == width).all()
        and (source.column_step == 1).all()
        and (source.heights == height).all()
        and (source.widths == width).all()
        and (source.base == first + np.arange(count) * length).all()
    )
    if not contiguous or source.pixels.dtype == torch.uint16:
        return source.dense()
    return source.pixels[first : first + count * length].view(count, source.channels, height, width)
