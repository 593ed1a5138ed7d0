"""A line of transforms, drawn for a batch: a program.

Each transform draws from a counter lane of its own, and gets the sizes, and perhaps the boxes, that those before it
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from gpuload.rng.philox import Key
from gpuload.transforms.base import DrawError, Resampling, Transform, Uniforms
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import CHANGES_PIXELS, Record
from gpuload.transforms.program.targets import move_boxes
from gpuload.transforms.program.windows import SMOOTHING

__all__ = ["Line", "draw_some", "numbered"]

_put: Final = object.__setattr__  # only for records that nobody else has seen; `replace` takes ten times as long


@dataclass(frozen=True)
class Line:
    """Transforms in the order in which they are applied, each with the number of its first counter lane."""

    transforms: tuple[Transform, ...]
    lanes: tuple[int, ...]

    @cached_property
    def prefix_length(self) -> int:
        """How many transforms a worker draws, from the first on: up to the last crop before one that needs the whole
        image (these decide the region to decode), and at least up to the last that may refuse an image."""
        length = 0
        for number, transform in enumerate(self.transforms):
            if transform.needs_whole:
                break
            if transform.crops:
                length = number + 1
        return max([length, *(number + 1 for number, transform in enumerate(self.transforms) if transform.may_refuse)])

    @cached_property
    def first(self) -> int | None:
        """The number of the first transform that changes pixels."""
        changing = (any(issubclass(known.kind, CHANGES_PIXELS) for known in one.outline) for one in self.transforms)
        return next((number for number, changes in enumerate(changing) if changes), None)

    @cached_property
    def resizes_late(self) -> str | None:
        """Why the first transform that changes pixels cannot begin with an image that is smaller already, in a few
        words; None if it can: it resizes, by a filter that smooths."""
        if self.first is None:
            return "no transform resizes"
        first = self.transforms[self.first]
        name = type(first).__name__
        if not isinstance(first, Resampling):
            return f"{name} changes pixels before any resize"
        rough = next(
            (filter_name for known in first.outline for filter_name in known.filters if filter_name not in SMOOTHING),
            None,
        )
        return None if rough is None else f"{name} takes single pixels ({rough})"

    @cached_property
    def late_from(self) -> int | None:
        """The number of the first transform that works on finished images."""
        return next((number for number, transform in enumerate(self.transforms) if transform.works_on_finished), None)

    def draw(
        self,
        key: Key,
        positions: np.ndarray,
        sizes_hw: np.ndarray,
        boxes: Sequence[np.ndarray] | None = None,
        *,
        steps: int | None = None,
        regions_tlhw: np.ndarray | None = None,
    ) -> Program:
        """Draw the records of all transforms, or of the first `steps`. `regions_tlhw`: the regions that a worker drew
        for these images, if known; a prefix of one transform then need not be drawn again."""
        positions, sizes = np.asarray(positions, np.int64), np.asarray(sizes_hw, np.int64)
        if sizes.shape != (len(positions), 2):
            raise ValueError(f"sizes_hw must be of shape (B, 2) beside {len(positions)} positions, got {sizes.shape}")
        uniforms = Uniforms(key, positions, 0, boxes)
        regions = regions_tlhw if self.prefix_length == 1 else None
        records, results = _draw(self.transforms[:steps], self.lanes[:steps], uniforms, sizes, regions)
        return Program(tuple(records), sizes, results, self.late_from)


def numbered(transforms: Sequence[Transform], first: int) -> tuple[list[int], int]:
    """The first counter lane of each, and the next free one."""
    *lanes, free = accumulate((transform.lanes for transform in transforms), initial=first)
    return lanes, free


def draw_some(
    transforms: Sequence[Transform], lanes: Sequence[int], uniforms: Uniforms, sizes_hw: np.ndarray, rows: np.ndarray
) -> list[Record]:
    """The records of consecutive transforms that work on these rows of a batch only."""
    try:
        records, _ = _draw(transforms, lanes, uniforms.take(rows), sizes_hw[rows])
    except DrawError as error:
        raise DrawError(error.message, int(rows[error.row])) from None
    for record in records:
        _put(record, "rows", rows if record.rows is None else rows[record.rows])
    return records


def _draw(
    transforms: Sequence[Transform],
    lanes: Sequence[int],
    uniforms: Uniforms,
    sizes_hw: np.ndarray,
    regions_tlhw: np.ndarray | None = None,
) -> tuple[list[Record], np.ndarray]:
    """The records of consecutive transforms, and the sizes of the results; `regions_tlhw`: what the first one gave."""
    records: list[Record] = []
    boxes = uniforms.boxes
    last = max((number for number, transform in enumerate(transforms) if transform.reads_boxes), default=-1)
    for step, (lane, transform) in enumerate(zip(lanes, transforms, strict=True)):
        own_uniforms = Uniforms(uniforms.key, uniforms.positions, lane, boxes if step <= last else None)
        drawn = None if regions_tlhw is None or step else transform.drawn_again(own_uniforms, regions_tlhw)
        drawn = drawn or transform.drawn(own_uniforms, sizes_hw)
        if drawn is None:
            continue
        if isinstance(drawn, Record):
            _put(drawn, "sizes_hw", sizes_hw)
            _put(drawn, "name", type(transform).__name__)
            drawn = [drawn]
        for record in drawn:
            _put(record, "step", step)
            sizes_hw = record.resized(sizes_hw)
        if boxes is not None and step < last:
            boxes = move_boxes(drawn, boxes)
        records += drawn
    return records, sizes_hw
