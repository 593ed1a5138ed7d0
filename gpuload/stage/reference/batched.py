"""The reference on CUDA: a chain applied to many images at once, with batched tensor operations.

Where the images of a batch differ in size somewhere between two transforms, they are taken one by one. Everything is
issued on the current stream; parameters go to the device as small arrays. Nothing is kept from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch

from gpuload import transforms as T
from gpuload.stage.finish import Finish
from gpuload.stage.finished import Outputs, erase_levels
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.gather import Source, crop, resize
from gpuload.stage.reference.line import LineRunner
from gpuload.stage.reference.mixture import mix_batch
from gpuload.stage.reference.operations import OPERATIONS, Operation, in_channels
from gpuload.stage.reference.warp import warp_batch
from gpuload.stage.upload import upload
from gpuload.transforms.program.ops import FILTERS, NOTHING, OPS, Box, Branches, Erase, Flip, Mixture, Ops, Warp

__all__ = ["BatchRunner", "dense"]

PIECE: Final = 64  # images at once: what a resize needs in between is some 3 MB for each


class BatchRunner(LineRunner):
    """Applies a chain to batches.

    What it does to pixels stands in methods of its own, which another backend may have its own way of; levels N×C×H×W
    are uint8 where they are moved, and float32 where operations work on them.

    Args:
        finish: the end of the chain.
        device: where.
        masks: what is given are masks: they are moved as images are, by the nearest pixel, and keep their values.
    """

    operations: ClassVar[Mapping[str, Operation]] = OPERATIONS
    piece: int = PIECE  # images at once

    def __init__(self, finish: Finish, device: torch.device, *, masks: bool = False) -> None:
        super().__init__(masks=masks)
        self._finish = finish
        self._constants = finish.constants(device)

    def levels(
        self, images: RaggedImages, draws: T.Draws, windows_tlhw: tuple[np.ndarray, ...], outputs: Outputs
    ) -> None:
        uniform = (images.shapes[:, 2] == images.shapes[0, 2]).all() and _of_one_size(draws, windows_tlhw)
        step = self.piece if uniform else 1
        for start in range(0, len(images), step):
            rows = np.arange(start, min(start + step, len(images)))
            windows = tuple(window[rows] for window in windows_tlhw)
            results = self._run(images, draws.take(rows), rows, windows)
            if isinstance(outputs, torch.Tensor):
                outputs[start : start + len(rows)].copy_(results)
            else:
                for output, result in zip(outputs[start:], results, strict=False):
                    output.copy_(result)

    def _run(
        self, images: RaggedImages, draws: T.Draws, rows: np.ndarray, windows: tuple[np.ndarray, ...]
    ) -> torch.Tensor:
        source = Source.of_ragged(images, rows, windows[0])
        levels = dense(self._line(source, draws, windows))
        if self._finish.dtype == torch.uint8:
            return levels
        return self._finished(levels)

    def _finished(self, levels: torch.Tensor) -> torch.Tensor:
        """The numbers that levels become, float32."""
        result = levels.to(torch.float32)
        if not self._finish.is_identity:
            result.mul_(self._constants[0]).add_(self._constants[1])
        return result

    def _line(self, source: Source, draws: T.Draws, windows: tuple[np.ndarray, ...]) -> Source:
        for index, (transform, params) in enumerate(zip(draws.transforms, draws.params, strict=True)):
            sizes = draws.sizes_hw[index]
            source = self._apply(source, transform, params, sizes, windows[index], windows[index + 1])
        return source

    def _apply(
        self, source: Source, transform: Any, params: Any, sizes_hw: np.ndarray, before: np.ndarray, after: np.ndarray
    ) -> Source:
        match params:
            case Flip():
                return self._flip(source, params)
            case Box() if transform.pads:
                corners = params.box_tlhw[:, :2] + after[:, :2]
                if np.array_equal(after[:, 2:], before[:, 2:]) and np.array_equal(corners, before[:, :2]):
                    return source
                size = int(after[0, 2]), int(after[0, 3])
                return self._crop(source, transform, np.hstack([corners, before[:, :2]]), size, sizes_hw)
            case Box():
                corners = before[:, :2] - params.box_tlhw[:, :2]
                boxes, sizes = params.box_tlhw[:, 2:], params.size_hw
                filters = self._filters(transform, params, len(before))
                results = None
                for name in np.unique(filters).tolist():
                    rows = np.flatnonzero(filters == name)
                    some = source if len(rows) == len(filters) else source.take(rows)
                    found = resize(some, corners[rows], boxes[rows], sizes[rows], after[rows], name)
                    if len(rows) == len(filters):
                        return Source.of_dense(found)
                    if results is None:
                        results = found.new_empty((len(filters), *found.shape[1:]))
                    results[upload(rows, found.device)] = found
                assert results is not None
                return Source.of_dense(results)
            case Warp():
                return self._warp(source, transform, params, after)
            case Ops() | Mixture() | Erase() if self._masks:
                inside = np.concatenate([after[:, :2] - before[:, :2], after[:, 2:]], axis=1)
                return source if np.array_equal(before, after) else source.cut(inside)
            case Ops():
                levels = dense(source).to(torch.float32)
                operated = Source.of_dense(self._operate(levels, params, transform).to(torch.uint8))
                return operated if np.array_equal(before, after) else operated.cut(after)
            case Mixture():
                levels = dense(source).to(torch.float32)
                mixed = Source.of_dense(self._mix(levels, params, transform).to(torch.uint8))
                return mixed if np.array_equal(before, after) else mixed.cut(after)
            case Erase():
                return Source.of_dense(self._erase(dense(source), params, transform, before))
            case Branches():
                return self._branch(source, params, after)
        return source

    def _flip(self, source: Source, params: Flip) -> Source:
        return source.flip(params.flipped, horizontally=params.axis == 1)

    def _crop(
        self, source: Source, transform: Any, corners: np.ndarray, size: tuple[int, int], sizes_hw: np.ndarray
    ) -> Source:
        """Boxes of one size that may reach beyond the image; `corners` as for `gather.crop`."""
        fill = transform.outside(masks=self._masks)
        return Source.of_dense(crop(source, corners, size, sizes_hw, transform.padding_mode, fill))

    def _mix(self, levels: torch.Tensor, params: Mixture, transform: Any) -> torch.Tensor:
        return mix_batch(levels, params, lambda some, chain: self._operate(some, chain, transform))

    def _erase(self, levels: torch.Tensor, params: Erase, transform: Any, windows_tlhw: np.ndarray) -> torch.Tensor:
        return erase_levels(levels, params, transform, windows_tlhw)

    def _warped(
        self,
        levels: torch.Tensor,
        coefficients: np.ndarray,
        size: tuple[int, int],
        interpolation: str,
        fill: Sequence[int],
        corners: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Images through a map; arguments as for `warp_batch`."""
        return warp_batch(levels, coefficients, size, interpolation, fill, corners=corners)

    def _filters(self, transform: Any, params: Any, count: int) -> np.ndarray:
        if self._masks:
            return np.full(count, "nearest")
        if params.filters is None:
            return np.full(count, transform.interpolation)
        return np.array(FILTERS)[params.filters]

    def _warp(self, source: Source, transform: Any, params: Warp, after: np.ndarray) -> Source:
        levels = dense(source)
        size = int(after[0, 2]), int(after[0, 3])
        filters = self._filters(transform, params, len(levels))
        fill = transform.outside(masks=self._masks)
        results = levels.new_empty(*levels.shape[:2], *size)
        still = np.flatnonzero(~params.warped)
        if len(still):
            index = upload(still, levels.device)
            results[index] = source.take(still).cut(after[still]).dense()
        for name in np.unique(filters).tolist():
            rows = np.flatnonzero((filters == name) & params.warped)
            if len(rows):
                index = upload(rows, levels.device)
                results[index] = self._warped(
                    levels[index], params.coefficients[rows], size, name, fill, after[rows, :2]
                )
        return Source.of_dense(results)

    def _branch(self, source: Source, params: Branches, after: np.ndarray) -> Source:
        """Each way for the images that take it. All results are of one size, or there is but one image."""
        if len(params.rows) == 1 and len(params.rows[0]) == params.count:
            return self._line(source, params.draws[0], params.draws[0].windows_for(after))
        results: torch.Tensor | None = None
        ways = list(zip(params.rows, params.draws, strict=True))
        taken = np.concatenate([rows for rows, _ in ways]) if ways else np.empty(0, np.int64)
        rest = np.setdiff1d(np.arange(params.count), taken)
        for rows, draws in [*ways, (rest, None)]:
            if not len(rows):
                continue
            some = source.take(rows)
            if draws is not None:
                some = self._line(some, draws, draws.windows_for(after[rows]))
            found = dense(some)
            if results is None:
                results = found.new_empty((params.count, *found.shape[1:]))
            results[upload(rows, found.device)] = found
        assert results is not None
        return Source.of_dense(results)

    def _operate(self, levels: torch.Tensor, params: Ops, transform: Any) -> torch.Tensor:
        """Do the operations, the first of all images first; images with the same one go together."""
        for turn in range(params.codes.shape[1]):
            for code in np.unique(params.codes[:, turn]).tolist():
                if code == NOTHING:
                    continue
                rows = np.flatnonzero(params.codes[:, turn] == code)
                index = upload(rows, levels.device)
                values = params.values[rows, turn]
                if OPS[code] == "warp":
                    filters = None if params.filters is None else params.filters[rows, turn]
                    self._warp_levels(levels, rows, values, filters, transform)
                elif OPS[code] != "identity":
                    levels[index] = self.operations[OPS[code]](levels[index], values)
        return in_channels(levels, transform.output_channels(levels.shape[1]))

    def _warp_levels(
        self,
        levels: torch.Tensor,
        rows: np.ndarray,
        coefficients: np.ndarray,
        filters: np.ndarray | None,
        transform: Any,
    ) -> None:
        """Warp these images in place, those of one filter together."""
        fill, size = transform.outside(masks=False), (levels.shape[2], levels.shape[3])
        if filters is None:
            filters = np.full(len(rows), FILTERS.index(transform.interpolation))
        for number in np.unique(filters).tolist():
            some = np.flatnonzero(filters == number)
            index = upload(rows[some], levels.device)
            warped = self._warped(levels[index].to(torch.uint8), coefficients[some], size, FILTERS[number], fill)
            levels[index] = warped.to(torch.float32)


def _of_one_size(draws: T.Draws, windows: tuple[np.ndarray, ...]) -> bool:
    """Whether the images of a batch can go together: they are of one size all the way, within branches too.

    Sources may differ, unless something comes first that takes pixels as they are.
    """
    gathers_first = bool(draws.params) and isinstance(draws.params[0], Box | Flip)
    if any((window[:, 2:] != window[0, 2:]).any() for window in windows[1 if gathers_first else 0 :]):
        return False
    for params, after in zip(draws.params, windows[1:], strict=True):
        if isinstance(params, Branches):
            for rows, inner in zip(params.rows, params.draws, strict=True):
                if len(rows) and not _of_one_size(inner, inner.windows_for(after[rows])):
                    return False
    return True


def dense(source: Source) -> torch.Tensor:
    """All pixels of images of one size, N×C×H×W, to be read only: where they lie, if they lie as they are wanted."""
    count, height, width = len(source.base), int(source.heights[0]), int(source.widths[0])
    length = source.channels * height * width
    first = int(source.base[0])
    as_wanted = (
        (source.channel_step == height * width or source.channels == 1)
        and (source.row_step == width).all()
        and (source.column_step == 1).all()
        and (source.heights == height).all()
        and (source.widths == width).all()
        and (source.base == first + np.arange(count) * length).all()
    )
    if not as_wanted:
        return source.dense()
    return source.pixels[first : first + count * length].view(count, source.channels, height, width)
