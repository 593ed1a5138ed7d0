"""What every transform is: a frozen declaration, and a function from uniform numbers to draws.

A transform knows three things: how a record comes from uniform numbers and image sizes, for all samples of a batch at
once (`draw`); which records these may be (`outline`); and where in a chain it may stand (`works_on`, `makes`). It never
touches pixels: that is a backend's work, which sees the records (`gpuload.transforms.program`) and not the transform.
Imported by workers, so there is no torch here; nothing here holds state.

Sizes are int64 (B, 2), height and width. Boxes and windows are int64 (B, 4): top, left, height, width, in the frame of
the image they belong to; they may reach beyond it where a transform pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.transforms.arguments import Fill, shown
from gpuload.transforms.program.ops import Box, Outline, Record
from gpuload.transforms.program.windows import RANDOM_FILTERS, filter_names

__all__ = ["DrawError", "Padding", "Resampling", "Standing", "Transform", "Uniforms"]


class DrawError(ValueError):
    """A transform cannot be drawn for one image of a batch.

    Attributes:
        row: which image, counted from 0 in the arrays that were given.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message, row)
        self.message = message
        self.row = row

    def __str__(self) -> str:
        return self.message


@dataclass(slots=True, eq=False)
class Uniforms:
    """Where a transform's random numbers come from: called with how many a sample needs, it gives float64 (B, count)
    in the open interval (0, 1).

    `lane` is the counter lane of the transform; one that holds others has theirs behind its own.
    `boxes` are each sample's boxes as they are at this place of the chain, float64 (n, 4), left, top, right and bottom;
    None where no transform of the chain reads them.
    """

    key: Key
    positions: np.ndarray
    lane: int
    boxes: Sequence[np.ndarray] | None = None

    def __call__(self, count: int) -> np.ndarray:
        return philox.uniforms(self.key, self.positions, self.lane, count)

    def take(self, rows: np.ndarray) -> Uniforms:
        """For some of the samples."""
        boxes = None if self.boxes is None else [self.boxes[row] for row in rows.tolist()]
        return Uniforms(self.key, self.positions[rows], self.lane, boxes)


class Standing(NamedTuple):
    """Where in a chain a transform stands: in which `state` images come to it (see `Transform.works_on`); whether they
    are `finished`, so that nothing behind it needs levels; how many levels are a `unit` of the numbers they will be."""

    state: str
    finished: bool
    unit: float


@dataclass(frozen=True, repr=False)
class Transform:
    """Base of all declarations."""

    # In which states an image may come: "uint8" levels, "float" (levels that ToDtype makes numbers of), "normalized".
    works_on: ClassVar[tuple[str, ...]] = ("uint8", "float")
    # The kind of its records; None: it has none, or those of the transforms that it holds.
    record: ClassVar[type[Record] | None] = None
    # The operations of `program.ops.OPS` that they may hold, sorted.
    operations: ClassVar[tuple[str, ...]] = ()
    # Whether some of the input may not matter to the output.
    crops: ClassVar[bool] = False
    # Whether every pixel of the output depends on the whole input.
    needs_whole: ClassVar[bool] = False
    # Whether drawing can raise a `DrawError` for some images.
    may_refuse: ClassVar[bool] = False
    # Whether it is applied to finished images, and so all that stands behind it.
    late: ClassVar[bool] = False
    # The state that it brings an image to; None: as it was.
    makes: ClassVar[str | None] = None
    # How the argument is called that says what lies outside.
    fill_argument: ClassVar[str] = "fill"
    # Whether pixels move but boxes, masks and keypoints could not follow.
    image_only: ClassVar[bool] = False
    # Whether it draws from the boxes of a sample.
    reads_boxes: ClassVar[bool] = False
    # Whether it may leave out boxes of a sample, and what belongs to them.
    drops_boxes: ClassVar[bool] = False
    # Whether it mixes an image with that of another sample.
    mixes: ClassVar[bool] = False

    def standing(self, place: Standing) -> Transform:
        """Itself, knowing where in a chain it stands; a ValueError where it cannot stand there."""
        return self

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record | list[Record] | None:
        """The record for images of these sizes; None where nothing is done. A transform that holds others gives theirs,
        placed as `gpuload.transforms.line` does it."""
        return None

    @property
    def outline(self) -> tuple[Outline, ...]:
        """The records that it may draw, and those of the transforms that it holds."""
        if self.record is None:
            return tuple(known for child in self.children for known in child.outline)
        return (Outline(kind=self.record, name=type(self).__name__, operations=self.operations),)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        """The size of every result, where it is known before any image is seen."""
        return size_hw

    def output_channels(self, channels: int) -> int:
        """How many channels the results have."""
        return channels

    def outside(self, *, masks: bool) -> tuple[float, ...]:
        """What lies outside an image, or a mask: its `fill`, one level or one for each channel; for a mask one number
        of any kind.

        A fill with one number for each channel says nothing of masks, which get 0; a dict says it.
        """
        fill: Any = getattr(self, "fill", (0,))
        if isinstance(fill, Fill):
            return (fill.mask,) if masks else fill.image
        return fill if not masks or len(fill) == 1 else (0,)

    @property
    def children(self) -> tuple[Transform, ...]:
        """The transforms that it holds."""
        return ()

    @property
    def lanes(self) -> int:
        """How many counter lanes it draws from: its own, and those of the transforms that it holds."""
        return 1 + sum(child.lanes for child in self.children)

    def __repr__(self) -> str:
        written = [
            f"{field.name}={shown(getattr(self, field.name))}"
            for field in fields(self)
            if field.repr and getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(written)})"


class Resampling(Transform):
    """What transforms share that resample a box: by a filter that is given, or drawn for each image.

    Neither this nor `Padding` is a dataclass, so that each transform has its arguments where torchvision has them.
    """

    interpolation: str

    @property
    def outline(self) -> tuple[Outline, ...]:
        return (Outline(kind=Box, name=type(self).__name__, filters=filter_names(self.interpolation)),)

    def filters(self, numbers: np.ndarray) -> np.ndarray | str:
        """The filters, by a uniform number for each image, for a `Box`."""
        if self.interpolation != "random":
            return self.interpolation
        return RANDOM_FILTERS[(numbers * len(RANDOM_FILTERS)).astype(np.int64)]


class Padding(Transform):
    """What transforms share whose box may reach beyond the image; nothing is resampled."""

    padding_mode: Any = "constant"

    @property
    def outline(self) -> tuple[Outline, ...]:
        return (Outline(kind=Box, name=type(self).__name__, padding_mode=self.padding_mode),)

    def box(self, starts: np.ndarray, sizes_hw: np.ndarray, kept: np.ndarray | None = None) -> Box:
        """The boxes with these top left corners (B, 2) and sizes."""
        fill, mask_fill = self.outside(masks=False), self.outside(masks=True)[0]
        boxes = np.concatenate([starts, sizes_hw], axis=1)
        return Box(boxes, sizes_hw, padding_mode=self.padding_mode, fill=fill, mask_fill=mask_fill, kept=kept)
