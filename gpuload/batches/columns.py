"""A batch as columns, joined from its chunks, with rows in the order of their positions; and what becomes of them.

Runs in the main process, between the feed and the stage. Rows come chunk by chunk. Without faults that is the order of
their positions; substitutes for failed samples come after the others, and skipped samples are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.ring.columns import Columns, unlike_blocks
from gpuload.workers.batch import Batch

if TYPE_CHECKING:
    from gpuload.batches.mixing import Pairing
    from gpuload.transforms import Draws

__all__ = ["Finished", "columns_of", "planned_rows"]


def columns_of(batch: Batch, starts: Sequence[int], *, spread: bool) -> Columns:
    """Return the samples of a batch that loaded.

    Args:
        batch: complete.
        starts: where the bytes of each of its parts begin, in the memory that offsets count from.
        spread: blocks become values; they do anyway where there are targets, and where they are not alike.
    """
    planned = batch.planned
    if planned is not None and planned.columns is not None and not spread:
        columns = planned.columns
        columns.positions, columns.indices = batch.spec.positions, batch.spec.indices
        return columns
    chunks = [(part, part.content, start) for part, start in zip(batch.parts, starts, strict=False) if part.samples]
    contents = [content for _, content, _ in chunks if content is not None]
    every = spread or any(content.has_targets for content in contents)
    leaves = {leaf for content in contents for leaf in content.blocks} if every else unlike_blocks(contents)
    for (part, _, _), content in zip(chunks, contents, strict=True):
        content.spread(leaves & content.blocks.keys(), part.data)
    columns = Columns.concat(contents, [start for _, _, start in chunks])
    if not batch.errors:
        columns.positions, columns.indices = batch.spec.positions, batch.spec.indices
        return columns
    columns.positions = np.concatenate([part.positions[content.rows] for part, content, _ in chunks])  # pyright: ignore
    columns.indices = [part.indices[row] for part, content, _ in chunks for row in content.rows]  # pyright: ignore
    return columns.take(np.argsort(planned_rows(batch, columns), kind="stable"))


def planned_rows(batch: Batch, columns: Columns) -> np.ndarray:
    """Return the row that each sample has in the batch as it was asked for, int64 (N,). Positions of a batch that wraps
    around are not ascending."""
    order = np.argsort(batch.spec.positions, kind="stable")
    return order[np.searchsorted(batch.spec.positions[order], columns.positions)]


@dataclass(slots=True)
class Finished:
    """The finished columns of a batch.

    Attributes:
        cells: of each row the leaves finished one by one, by number.
        whole: leaves finished for all rows at once: blocks; and masks of equal shapes as one tensor.
        placed: leaves that are on the device already, for all rows at once.
        images: for each of `Columns.images` the stage's result; with a `MultiView` a list of results.
        sizes_hw: for each of these, for each view, the sizes of the results, int64 (M, 2).
        drawn: the programs of the first of these, for each view.
        pairing: how they were mixed, if they were.
    """

    cells: list[dict[int, Any]]
    whole: dict[int, Any] = field(default_factory=dict)
    placed: dict[int, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)
    sizes_hw: list[list[np.ndarray]] = field(default_factory=list)
    drawn: Sequence[Draws] = ()
    pairing: Pairing | None = None

    @property
    def results(self) -> list[Any]:
        """All that may be on the device."""
        return [self.images, self.cells, self.whole, self.placed]
