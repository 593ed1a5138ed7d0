"""Draws the records of a line of transforms for a batch, as a `Program`.

Each transform draws from separate counter lanes. It gets the image sizes after the preceding transforms and, if it
reads boxes, the boxes after the preceding transforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

import numpy as np

from gpuload.rng.philox import Key
from gpuload.rng.streams import DRAWS
from gpuload.transforms.base import DrawError, Resampling, Transform, Uniforms
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import CHANGES_PIXELS, Call, Record
from gpuload.transforms.program.targets import move_boxes
from gpuload.transforms.program.windows import SMOOTHING

__all__ = ["Line", "assign_lanes", "draw_for_rows"]

NO_KEY: Final[Any] = None  # drawing random numbers with it is an error
_set_field: Final = object.__setattr__  # used only on new records; `dataclasses.replace` is ten times as slow


@dataclass(frozen=True)
class Line:
    """A sequence of transforms in order of application, each with the index of its first counter lane."""

    transforms: tuple[Transform, ...]
    lanes: tuple[int, ...]

    @cached_property
    def prefix_length(self) -> int:
        """The number of transforms at the beginning that a worker draws. They end with the last crop before a transform
        that needs the complete image, since these crops determine the region to decode, or with the last transform that
        can refuse an image, whichever is later."""
        length = 0
        for index, transform in enumerate(self.transforms):
            if transform.needs_full_image:
                break
            if transform.is_crop:
                length = index + 1
        return max([length, *(index + 1 for index, transform in enumerate(self.transforms) if transform.may_refuse)])

    @cached_property
    def first_change(self) -> int | None:
        """The index of the first transform that changes pixels; None if there is none."""
        changes_pixels = (
            any(issubclass(outline.kind, CHANGES_PIXELS) for outline in t.outline) for t in self.transforms
        )
        return next((index for index, changes in enumerate(changes_pixels) if changes), None)

    @cached_property
    def resizes_late(self) -> str | None:
        """The reason why the first transform that changes pixels cannot start from an image of reduced size, in a few
        words. None if this is possible, because that transform resizes with a smoothing filter."""
        if self.first_change is None:
            return "no transform resizes"
        resize = self.transforms[self.first_change]
        name = type(resize).__name__
        if not isinstance(resize, Resampling):
            return f"{name} changes pixels before any resize"
        sampling_filter = next(
            (f for outline in resize.outline for f in outline.filters if f not in SMOOTHING),
            None,
        )
        return None if sampling_filter is None else f"{name} samples single pixels ({sampling_filter})"

    @cached_property
    def late_from(self) -> int | None:
        """The index of the first transform that works on images of the final type; None if there is none."""
        return next((index for index, transform in enumerate(self.transforms) if transform.works_on_finished), None)

    def draw(
        self,
        key: Key,
        positions: np.ndarray,
        sizes_hw: np.ndarray,
        boxes: Sequence[np.ndarray] | None = None,
        *,
        steps: int | None = None,
        regions_tlhw: np.ndarray | None = None,
        draws: int = 0,
    ) -> Program:
        """Draw the records of all transforms, or of the first `steps` transforms. `regions_tlhw` are the regions that a
        worker drew for these images, if known. They replace drawing the first transform if the worker drew only that
        transform. `draws` is the number of the images' draws (see `gpuload.datasets.sample.Encoded`)."""
        positions, sizes = np.asarray(positions, np.int64), np.asarray(sizes_hw, np.int64)
        if sizes.shape != (len(positions), 2):
            raise ValueError(f"sizes_hw must be of shape (B, 2) with B = {len(positions)} positions, got {sizes.shape}")
        uniforms = Uniforms(key, positions, 0, boxes)
        regions = regions_tlhw if self.prefix_length == 1 else None
        records, results = _draw(self.transforms[:steps], self._lanes_of(draws)[:steps], uniforms, sizes, regions)
        return Program(tuple(records), sizes, results, self.late_from)

    @cached_property
    def is_random(self) -> bool:
        """Whether images with different `draws` can get different records; True if user code draws them."""
        transforms = [transform for transform in self.transforms if not transform.is_mixing]
        if any(outline.kind is Call for transform in transforms for outline in transform.outline):
            return True
        uniforms = Uniforms(NO_KEY, np.zeros(1, np.int64), 0, [np.zeros((0, 4))])
        try:
            _draw(transforms, [0] * len(transforms), uniforms, np.full((1, 2), 256))
        except Exception:
            return True
        return False

    def _lanes_of(self, draws: int) -> Sequence[int]:
        """Return the lanes of the transforms for images with these `draws`. Mixing transforms draw once for all images
        of a sample, since they also mix the sample's label."""
        if not draws:
            return self.lanes
        assert not self.lanes or self.lanes[-1] + self.transforms[-1].lanes < DRAWS.step
        pairs = zip(self.transforms, self.lanes, strict=True)
        return [lane if transform.is_mixing else lane + DRAWS[draws] for transform, lane in pairs]


def assign_lanes(transforms: Sequence[Transform], first_lane: int) -> tuple[list[int], int]:
    """Return the first counter lane of each transform, and the next free lane."""
    *lanes, next_lane = accumulate((transform.lanes for transform in transforms), initial=first_lane)
    return lanes, next_lane


def draw_for_rows(
    transforms: Sequence[Transform], lanes: Sequence[int], uniforms: Uniforms, sizes_hw: np.ndarray, rows: np.ndarray
) -> list[Record]:
    """Draw the records of consecutive transforms for only the images with the batch indices `rows`."""
    try:
        records, _ = _draw(transforms, lanes, uniforms.take(rows), sizes_hw[rows])
    except DrawError as error:
        raise DrawError(error.message, int(rows[error.row])) from None
    for record in records:
        _set_field(record, "rows", rows if record.rows is None else rows[record.rows])
    return records


def _draw(
    transforms: Sequence[Transform],
    lanes: Sequence[int],
    uniforms: Uniforms,
    sizes_hw: np.ndarray,
    regions_tlhw: np.ndarray | None = None,
) -> tuple[list[Record], np.ndarray]:
    """Draw the records of consecutive transforms, and return them with the sizes of the results. `regions_tlhw` are the
    regions that the first transform drew in a worker, if known."""
    records: list[Record] = []
    boxes = uniforms.boxes
    last_reader = max((index for index, transform in enumerate(transforms) if transform.reads_boxes), default=-1)
    for step, (lane, transform) in enumerate(zip(lanes, transforms, strict=True)):
        step_uniforms = Uniforms(uniforms.key, uniforms.positions, lane, boxes if step <= last_reader else None)
        new_records = (
            None if regions_tlhw is None or step else transform.record_from_regions(step_uniforms, regions_tlhw)
        )
        new_records = new_records or transform.drawn(step_uniforms, sizes_hw)
        if new_records is None:
            continue
        if isinstance(new_records, Record):
            _set_field(new_records, "sizes_hw", sizes_hw)
            _set_field(new_records, "name", type(transform).__name__)
            new_records = [new_records]
        for record in new_records:
            _set_field(record, "step", step)
            sizes_hw = record.sizes_after(sizes_hw)
        if boxes is not None and step < last_reader:
            boxes = move_boxes(new_records, boxes)
        records += new_records
    return records, sizes_hw
