"""Transforming the images and targets of a batch, for a `Loader`, for its `replay()` and for `Augment`.

This module runs in the main process, on the current stream. The random parameters are drawn first. Then targets are
transformed, because masks decide what is pasted where, and last the images, one column after the other. The modules at
the end of the transforms are a separate step, since they may have to wait for the consumer's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from gpuload.batches.collate import FinishedColumns
from gpuload.batches.combined_targets import combine_targets
from gpuload.batches.mixing import Pairing, partners_of
from gpuload.batches.targets import transform_targets
from gpuload.errors import CollateError
from gpuload.order.spec import BatchSpec
from gpuload.ring.columns import Columns, ImageColumn
from gpuload.rng import philox
from gpuload.rng.streams import DRAWS
from gpuload.stage import RaggedImages, Stage
from gpuload.stage.combined_images import groups_of
from gpuload.stage.masks import MaskStage
from gpuload.transforms import Chain, Program
from gpuload.transforms.program.ops import Combination

__all__ = ["BatchTransform", "ReadImages"]

ReadImages = Callable[[ImageColumn], RaggedImages]


class BatchTransform:
    """The transforms of a loader, or of an `Augment`, applied to batches.

    Args:
        chain, stage: the transforms, and the same transforms compiled.
        seed: the seed of their random parameters.
        repeats: how many consecutive positions have the same sample.
        draws_regions: whether images are entire, so that the region of the first crop has yet to be drawn; otherwise,
            workers have drawn the regions.

    Attributes:
        has_views: whether a `MultiView` makes several views of each image.
    """

    def __init__(self, chain: Chain, stage: Stage, seed: int, *, repeats: int = 1, draws_regions: bool = False) -> None:
        self.stage = stage
        self._chain, self._seed = chain, seed
        self._repeats, self._draws_regions = repeats, draws_regions
        self.has_views = chain.views is not None

    @cached_property
    def _masks(self) -> MaskStage:
        return MaskStage(self.stage.device)

    def __call__(self, spec: BatchSpec, columns: Columns, numbers: np.ndarray, read: ReadImages) -> FinishedColumns:
        """Transform a batch, except for the modules at the end.

        Args:
            spec, columns: the request for the batch, and the batch.
            numbers: int64 (N,), which define the samples that are combined: those whose numbers differ only in the last
                bit (for pairs) or the last two bits (for groups of four).
            read: returns the pixels of a column of images or masks. Of clips, it returns all frames, clip after clip.

        Raises:
            DrawError: the parameters of a transform cannot be drawn for an image.
            ValueError, CollateError: the transforms cannot be applied to the batch.
        """
        check_draws(columns)
        chain, programs, partners = self._chain, self._draw_programs(spec, columns), None
        finished = FinishedColumns(columns, self.has_views, programs)
        if chain.mixing is not None:
            partners = partners_of(numbers, columns.positions // self._repeats)
            finished.pairing = Pairing.of(chain.mixing, partners, columns, [views[0] for views in programs])
        if chain.is_combining:
            for record in (record for views in programs for program in views for record in program.records):
                if isinstance(record, Combination):
                    record.groups = groups_of(numbers, record.group_size)
        for part in finished.parts() if columns.has_targets else ():
            if part.columns.has_targets:
                (combine_targets if chain.is_combining else transform_targets)(part, self._masks, read)
        for images, views in zip(columns.images, programs, strict=True):
            pixels = _restore_dtype(images, read(images))
            finished.images.append(self._make_views(pixels, len(pixels) // len(images), views, partners))
        return finished

    def check(self, columns: Columns, read: ReadImages) -> None:
        """Check images that are not transformed, as `stage` checks them otherwise."""
        for images in columns.images:
            self.stage.check(_restore_dtype(images, read(images)))

    def _make_views(
        self, pixels: RaggedImages, frames: int, programs: Sequence[Program], partners: np.ndarray | None
    ) -> list[Any]:
        """Return the images of a column for each view; each sample has this many frames."""
        if frames > 1:
            programs = [program.take(np.repeat(np.arange(len(program)), frames)) for program in programs]
            partners = None if partners is None else (partners[:, None] * frames + np.arange(frames)).ravel()
        return [
            self.stage(*pixels.resolve(program), view=view, partners=partners) for view, program in enumerate(programs)
        ]

    def call_modules(self, epoch: int, finished: FinishedColumns) -> None:
        """Call the modules at the end of the transforms on the images, on the current stream. Modules are called once
        for each frame of clips, with this frame of all clips."""
        # The seeds depend on the first position of the batch, which is the same when an epoch is resumed.
        key, position = philox.epoch_key(self._seed, epoch), finished.columns.positions[:1]
        for index, (column, views) in enumerate(zip(finished.columns.images, finished.images, strict=True)):
            for view, images in enumerate(views):
                lanes = [lane + DRAWS[column.draws[0]] for lane in self._chain.module_lanes[view]]
                seeds = [int(philox.uniforms(key, position, lane, 1)[0, 0] * 2.0**32) for lane in lanes]
                call: Any = partial(self.stage.call_modules, seeds=seeds)
                is_clips = images.dim() == 5
                finished.images[index][view] = (
                    torch.stack([*map(call, images.unbind(1))], 1) if is_clips else call(images)
                )

    def _draw_programs(self, spec: BatchSpec, columns: Columns) -> list[list[Program]]:
        """Draw the programs for each column of images, one program per view."""
        chain = self._chain.at(spec.epoch, spec.step, spec.size_hw, seed=self._seed)
        key = philox.epoch_key(self._seed, spec.epoch)
        programs: list[list[Program]] = []
        first_indices: dict[int, int] = {}  # of the first column with each `draws`
        for index, images in enumerate(columns.images):
            rows, sizes, [draws] = images.row_indices, images.table["size_hw"], images.draws
            first_index = first_indices.setdefault(draws, index)
            first_column = columns.images[first_index]
            if (
                first_index < index
                and np.array_equal(rows, first_column.row_indices)
                and np.array_equal(sizes, first_column.table["size_hw"])
            ):
                programs.append(programs[first_index])  # the columns have the same draws, rows and sizes
                continue
            boxes = columns.with_draws(draws).boxes(rows.tolist()) if chain.reads_boxes else None
            draw = partial(chain.draw, key, columns.positions[rows], sizes, boxes, draws=draws)
            regions = None if self._draws_regions else images.table["region_tlhw"]
            programs.append([draw(view=view, regions_tlhw=regions) for view in range(len(chain.lines))])
        return programs


def check_draws(columns: Columns) -> None:
    """Raise an error if the same leaf has different `draws` in two samples."""
    leaves: list[list[tuple[int, int, int]]] = [
        [(row, leaf, draws) for (row, leaf), draws in zip(column.rows_and_leaves(), column.draws, strict=True)]
        for column in (*columns.images, *columns.masks)
        if len(column.draws) > 1
    ]
    if len(columns.structures) == 1:
        leaves += [[(row, leaf, v.draws or 0) for row, v in column.items()] for leaf, column in columns.points.items()]
    for (row, leaf, draws), other_row, other_leaf, other_draws in (
        (entries[0], *entry) for entries in leaves for entry in entries if entry[2] != entries[0][2]
    ):
        raise CollateError(
            f"{columns.name(row, leaf)} has draws={draws}, but {columns.name(other_row, other_leaf)} has "
            f"draws={other_draws}; pass the same draws= to this leaf of all samples"
        )


def _restore_dtype(images: ImageColumn, ragged: RaggedImages) -> RaggedImages:
    """Return images in their original dtype; images that are not uint8 were transferred as bytes."""
    if not images.kinds:
        return ragged
    dtypes = ["uint8" if kind is None else kind[0] for kind in images.kinds_per_image]
    mismatch = next((row for row, dtype in enumerate(dtypes) if dtype != dtypes[0]), None)
    if mismatch is not None:
        raise ValueError(
            f"the images of a batch must have the same dtype, but {ragged.labels[0]} is {dtypes[0]} and "
            f"{ragged.labels[mismatch]} is {dtypes[mismatch]}; convert them in the dataset"
        )
    return ragged.view_as(dtypes[0])
