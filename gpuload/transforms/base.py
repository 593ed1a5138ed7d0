"""What every transform is: a frozen declaration, and a function from uniform numbers to draws.

A transform knows four things, all vectorised over the samples of a batch: how its parameters come from uniform numbers
and image sizes (`draw`), what size it makes of an image (`output_sizes`), which part of its input it must see to give a
part of its output (`input_windows`), and where in a chain it may stand (`works_on`, `makes`). It never touches pixels:
that is a backend's work, which looks at the kind of the parameters (`gpuload.transforms.program.ops`), not at the
transform. Imported by workers, so there is no torch here; nothing here holds state.

Sizes are int64 (B, 2), height and width. Boxes and windows are int64 (B, 4): top, left, height, width, in the frame of
the image they belong to; they may reach beyond it where a crop pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gpuload.datasets.box_formats import BoxFormat
from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.transforms.arguments import Fill, shown
from gpuload.transforms.program.ops import Params

__all__ = ["DrawError", "Standing", "Transform", "Uniforms", "clipped", "full_windows"]


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

    `stream` is the counter stream of the transform; one that holds others has theirs behind its own, as `at` says.
    `boxes` are each sample's boxes as they are at this place of the chain, float64 (n, 4), left, top, right and bottom;
    None where no transform of the chain reads them.
    """

    key: Key
    positions: np.ndarray
    stream: int
    boxes: Sequence[np.ndarray] | None = None

    def __call__(self, count: int) -> np.ndarray:
        return philox.uniforms(self.key, self.positions, self.stream, count)

    def at(self, offset: int, rows: np.ndarray) -> Uniforms:
        """For some of the samples, the stream that lies `offset` behind this one."""
        boxes = None if self.boxes is None else [self.boxes[row] for row in rows.tolist()]
        return Uniforms(self.key, self.positions[rows], self.stream + offset, boxes)


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
    # Whether a box that reaches beyond the image is padded (and never resampled); by `padding_mode` and `fill`.
    pads: ClassVar[bool] = False
    # How the argument is called that says what lies outside.
    fill_argument: ClassVar[str] = "fill"
    # Whether pixels move but boxes, masks and keypoints could not follow.
    image_only: ClassVar[bool] = False
    # Whether it draws from the boxes of a sample.
    reads_boxes: ClassVar[bool] = False
    # Whether it may leave out boxes of a sample, and what belongs to them.
    drops_boxes: ClassVar[bool] = False
    # Whether it cuts boxes to the image.
    clips_boxes: ClassVar[bool] = False
    # Whether it mixes an image with that of another sample.
    mixes: ClassVar[bool] = False

    @property
    def makes(self) -> str | None:
        """The state that it brings an image to; None: as it was."""
        return None

    @property
    def late(self) -> bool:
        """Whether it is applied to finished images, and so all that stands behind it."""
        return False

    def standing(self, place: Standing) -> Transform:
        """Itself, knowing where in a chain it stands; a ValueError where it cannot stand there."""
        return self

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Params | None:
        """The parameters for images of these sizes; None where there are none."""
        return None

    def output_sizes(self, params: Any, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of the results."""
        return sizes_hw

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        """The size of every result, where it is known before any image is seen."""
        return size_hw

    def output_channels(self, channels: int) -> int:
        """How many channels the results have."""
        return channels

    def input_windows(self, params: Any, sizes_hw: np.ndarray, windows_tlhw: np.ndarray) -> np.ndarray:
        """The part of each input that these parts of the outputs are made from."""
        return windows_tlhw

    def keeps(self, params: Any, row: int, boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray | None:
        """Which of a sample's boxes (n, 4) before the transform are still there after it, bool (n,); None for all."""
        return None

    @property
    def box_format(self) -> BoxFormat | None:
        """The format that it gives boxes; None: the one that they have."""
        return None

    @property
    def crops(self) -> bool:
        """Whether some of the input may not matter to the output."""
        return False

    @property
    def needs_whole(self) -> bool:
        """Whether every pixel of the output depends on the whole input."""
        return False

    @property
    def may_refuse(self) -> bool:
        """Whether drawing can raise a `DrawError` for some images."""
        return False

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
    def operations(self) -> tuple[str, ...]:
        """The operations of `program.ops.OPS` that it may draw, sorted; its children's are their own."""
        return ()

    @property
    def streams(self) -> int:
        """How many counter streams it draws from: its own, and those of the transforms that it holds."""
        return 1 + sum(child.streams for child in self.children)

    def __repr__(self) -> str:
        written = [
            f"{field.name}={shown(getattr(self, field.name))}"
            for field in fields(self)
            if field.repr and getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(written)})"


def full_windows(sizes_hw: np.ndarray) -> np.ndarray:
    """The windows that are the whole images."""
    windows = np.zeros((len(sizes_hw), 4), np.int64)
    windows[:, 2:] = sizes_hw
    return windows


def clipped(windows_tlhw: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
    """The windows cut to the images, but never to nothing: at least one pixel is left of each."""
    start = np.clip(windows_tlhw[:, :2], 0, sizes_hw - 1)
    end = np.clip(windows_tlhw[:, :2] + windows_tlhw[:, 2:], start + 1, sizes_hw)
    return np.concatenate([start, end - start], axis=1)
