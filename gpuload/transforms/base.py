"""What every transform is: a frozen declaration that turns uniform numbers into draws.

A transform knows three things: how to make a record from uniform numbers and image sizes, for all samples of a batch at
once (`draw`); which records these may be (`outline`); and where in a chain it may be used (`works_on`, `makes`). It
never touches pixels: backends do, and see the records (`gpuload.transforms.program`) but not the transform.

Sizes are int64 (B, 2), height and width. Boxes and windows are int64 (B, 4): top, left, height, width, in the frame of
their image; they may reach beyond it where a transform pads. A size may depend on the epoch (`by_epoch`): a chain is
made into that of an epoch before anything is drawn (`Chain.at`), in workers as in the main process.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, dataclass_transform

import numpy as np

from gpuload.errors import knows_arguments
from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.transforms.arguments import Fill, shown, whole
from gpuload.transforms.program.ops import Box, Outline, Record
from gpuload.transforms.program.windows import FILTERS, filter_names

__all__ = [
    "EVERYWHERE",
    "ByEpoch",
    "DrawError",
    "Padding",
    "Resampling",
    "Standing",
    "Transform",
    "Uniforms",
    "argument",
    "between",
    "by_epoch",
    "declaration",
    "marked_on_finished",
]

T = TypeVar("T", bound="Transform")
Class = TypeVar("Class", bound=type)

EVERYWHERE: Final = ("uint8", "float", "normalized")  # the states of an image, see `Transform.works_on`


class DrawError(ValueError):
    """A transform cannot be drawn for one image of a batch.

    Attributes:
        row: the number of the image in the given arrays.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message, row)
        self.message = message
        self.row = row

    def __str__(self) -> str:
        return self.message


@dataclass(slots=True, eq=False)
class Uniforms:
    """The random numbers of a transform: called with a count, gives float64 (B, count) in the open interval (0, 1).

    `lane` is the transform's first counter lane; those of its children follow. `boxes` are each sample's boxes as they
    reach the transform, float64 (n, 4): left, top, right, bottom; None if no transform of the chain reads them.
    """

    key: Key
    positions: np.ndarray
    lane: int
    boxes: Sequence[np.ndarray] | None = None

    def __call__(self, count: int) -> np.ndarray:
        return philox.uniforms(self.key, self.positions, self.lane, count)

    def take(self, rows: np.ndarray) -> Uniforms:
        """Return the uniforms of some of the samples."""
        boxes = None if self.boxes is None else [self.boxes[row] for row in rows.tolist()]
        return Uniforms(self.key, self.positions[rows], self.lane, boxes)


class Standing(NamedTuple):
    """Where in a chain a transform is: the `state` of the images that reach it (see `Transform.works_on`); whether they
    are `finished`, so that no later transform needs levels; how many levels make 1 in the finished numbers (`unit`);
    whether nothing but calls of the user's own comes from here on (`ends`), or one has been `called` with images that
    are finished."""

    state: str
    finished: bool
    unit: float
    ends: bool = False
    called: bool = False


@dataclass(frozen=True, repr=False)
class Transform:
    """Base of all declarations."""

    # The states of the images that it takes: "uint8" levels, "float" (levels that ToDtype converts), "normalized".
    works_on: ClassVar[tuple[str, ...]] = ("uint8", "float")
    record: ClassVar[type[Record] | None] = None  # the kind of its records; None means none, or its children's
    filter_names: ClassVar[tuple[str, ...]] = ()  # the filters that its records may use
    operations: ClassVar[tuple[str, ...]] = ()  # of `program.ops.OPS`, those that its records may hold, sorted
    crops: ClassVar[bool] = False  # some of the input may not matter to the output
    needs_whole: ClassVar[bool] = False  # every pixel of the output depends on the whole input
    may_refuse: ClassVar[bool] = False  # drawing can raise a `DrawError`
    works_on_finished: ClassVar[bool] = False  # it works on finished images, and so does every later transform
    makes: ClassVar[str | None] = None  # the state that it brings an image to; None means unchanged
    fill_argument: ClassVar[str] = "fill"  # the name of the argument that says what lies outside
    image_only: ClassVar[bool] = False  # it moves pixels, but boxes, masks and keypoints could not follow
    reads_boxes: ClassVar[bool] = False  # its draws depend on the boxes of a sample
    drops_boxes: ClassVar[bool] = False  # it may leave out boxes of a sample, and their belongings
    drops_points: ClassVar[bool] = False  # it may leave out keypoints, and what belongs to them
    mixes: ClassVar[bool] = False  # it mixes an image with that of another sample
    gathers: ClassVar[int] = 1  # of how many samples a result may show levels

    def __post_init__(self) -> None:
        """Check each `argument`, in the order in which they are declared."""
        for argument in fields(self):
            value, check = getattr(self, argument.name), argument.metadata.get("check")
            if check is not None and (value is not None or argument.default is not None):
                checked = check(f"{type(self).__name__}({argument.name}=…)", value)
                object.__setattr__(self, argument.name, checked)

    def standing(self, where: Standing) -> Transform:
        """The transform, told where it is in a chain; raises ValueError if it cannot be used there."""
        return self

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record | list[Record] | None:
        """The record for images of these sizes; None if there is nothing to do. A transform that holds others gives
        theirs, drawn by `gpuload.transforms.line`."""
        return None

    def drawn(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record | list[Record] | None:
        """Draw the records that a line takes."""
        return self.draw(uniforms, sizes_hw)

    def __call__(self, image: Any, *, seed: int = 0) -> Any:
        """Apply it to one image, to look at what it does; see `gpuload.transforms.apply`."""
        from gpuload import transforms

        return transforms.apply(self, image, seed=seed)

    def drawn_again(self, uniforms: Uniforms, regions_tlhw: np.ndarray) -> Record | None:
        """Make the record again, where a worker has drawn it and nothing else, and decoded these regions of the
        images for it; None means it has to be drawn."""
        return None

    @property
    def outline(self) -> tuple[Outline, ...]:
        """The records that it and its children may draw."""
        if self.record is None:
            return tuple(known for child in self.children for known in child.outline)
        name, operations, filters = type(self).__name__, self.operations, self.filter_names
        return (Outline(kind=self.record, name=name, operations=operations, filters=filters),)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        """The size of every result, if known before any image is seen."""
        return size_hw

    def output_channels(self, channels: int) -> int:
        """The number of channels of the results."""
        return channels

    @property
    def outside(self) -> Fill:
        """The values outside an image and a mask: its `fill`; without one 0, as for masks if the fill is a colour."""
        fill: Any = getattr(self, "fill", None) or (0,)
        return fill if isinstance(fill, Fill) else Fill(fill, fill[0] if len(fill) == 1 else 0)

    @property
    def called(self) -> str:
        """The name in messages."""
        return type(self).__name__

    @property
    def children(self) -> tuple[Transform, ...]:
        """The transforms that it holds."""
        return ()

    @property
    def lanes(self) -> int:
        """How many counter lanes it and its children draw from."""
        return 1 + sum(child.lanes for child in self.children)

    def __repr__(self) -> str:
        written = [
            f"{field.name}={shown(getattr(self, field.name))}"
            for field in fields(self)
            if field.repr and getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(written)})"


def between(bounds: Any, numbers: np.ndarray) -> np.ndarray:
    """Uniform numbers, brought to a range (low, high)."""
    low, high = bounds
    return low + numbers * (high - low)


def argument(
    check: Callable[..., Any], *, default: Any = MISSING, compare: bool = True, kw_only: bool = False, **options: Any
) -> Any:
    """A field whose value is replaced by what `check`, a function of `gpuload.transforms.arguments`, makes of it: it
    takes the name, for messages, the value, and `options`. None stays where it is the default."""
    return field(default=default, compare=compare, kw_only=kw_only, metadata={"check": partial(check, **options)})


@dataclass_transform(frozen_default=True, field_specifiers=(field, argument))
def declaration(cls: Class) -> Class:
    """Make a transform of a class: a frozen dataclass that says what to write for an argument of another library."""
    declared: Any = dataclass(frozen=True, repr=False)(cls)
    declared.__init__ = knows_arguments(_instead)(declared.__init__)
    return declared


def _instead(argument: str) -> str | None:
    from gpuload.transforms.names import ARGUMENTS  # only an error needs it

    return ARGUMENTS.get(argument)


def marked_on_finished(transform: T) -> T:
    """A copy that works on finished images."""
    placed = copy.copy(transform)
    object.__setattr__(placed, "works_on_finished", True)
    return placed


class Resampling(Transform):
    """Base of the transforms that resample a box, by a filter that is given or drawn for each image.

    Neither this nor `Padding` is a dataclass, so that each transform has its arguments where torchvision has them.
    """

    record: ClassVar[type[Record]] = Box
    interpolation: str
    antialias: Any = True

    @property
    def filter_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return filter_names(self.interpolation, antialias=self.antialias)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interpolation == "lanczos" and not self.antialias:
            raise ValueError(
                f"{type(self).__name__}(antialias=…) must be True for interpolation='lanczos', which is defined with "
                "antialiasing alone"
            )

    def filters(self, numbers: np.ndarray | None) -> np.ndarray | str:
        """The filters of a `Box`, from a uniform number for each image if they are drawn."""
        names = self.filter_names
        if len(names) == 1 or numbers is None:
            return names[0]
        codes = np.array([FILTERS.index(name) for name in names])
        return codes[(numbers * len(codes)).astype(np.int64)]


class Padding(Transform):
    """Base of the transforms whose box may reach beyond the image, and is not resampled."""

    padding_mode: Any = "constant"

    @property
    def outline(self) -> tuple[Outline, ...]:
        return (Outline(kind=Box, name=type(self).__name__, padding_mode=self.padding_mode),)

    def box(self, starts: np.ndarray, sizes_hw: np.ndarray, kept_boxes: np.ndarray | None = None) -> Box:
        """The boxes with these top left corners (B, 2) and sizes."""
        fill, mask_fill = self.outside
        boxes = np.concatenate([starts, sizes_hw], axis=1)
        return Box(
            boxes, sizes_hw, padding_mode=self.padding_mode, fill=fill, mask_fill=mask_fill, kept_boxes=kept_boxes
        )


@dataclass(frozen=True, repr=False)
class ByEpoch:
    """A size for each epoch: (first epoch, size) in ascending order, or a function."""

    sizes: tuple[tuple[int, Any], ...] | Callable[[int], Any]

    def at_epoch(self, epoch: int) -> Any:
        """The size in an epoch."""
        if not isinstance(self.sizes, tuple):
            return self.sizes(epoch)
        return self.sizes[bisect_right(self.sizes, epoch, key=lambda entry: entry[0]) - 1][1]

    def checked(self, check: Callable[[Any], Any]) -> ByEpoch:
        """Return a copy with sizes as `check` returns them; what a function returns is checked when it is used."""
        if not isinstance(self.sizes, tuple):
            return self
        return ByEpoch(tuple((epoch, check(size)) for epoch, size in self.sizes))

    def __repr__(self) -> str:
        if isinstance(self.sizes, tuple):
            return f"by_epoch({dict(self.sizes)!r})"
        return f"by_epoch({getattr(self.sizes, '__qualname__', type(self.sizes).__name__)})"


def by_epoch(sizes: Mapping[int, Any] | Callable[[int], Any]) -> Any:
    """A size that changes from epoch to epoch, as `size` of `Resize`, the crops and `Mosaic`.

    Args:
        sizes: by the first epoch that has them, from 0 on: ``{0: 128, 10: 176, 20: 224}``. Or a function of the epoch's
            number, which must depend on nothing else; workers get a copy of it. A state of the loader knows a function
            by its name only.

    Raises:
        TypeError, ValueError: it is neither, or does not begin at epoch 0.

    Example:
        >>> from gpuload import transforms as T
        >>> chain = T.Chain([T.RandomResizedCrop(by_epoch({0: 128, 10: 176}))])
        >>> chain.at(9).output_size_hw, chain.at(10).output_size_hw
        ((128, 128), (176, 176))
    """
    if callable(sizes):
        return ByEpoch(sizes)
    if not isinstance(sizes, Mapping):
        raise TypeError(
            "by_epoch() takes a dict of sizes by their first epoch, such as {0: 128, 10: 176}, or a function of the "
            f"epoch, got {type(sizes).__name__}: {sizes!r}"
        )
    epochs = [(whole("by_epoch({epoch: size})", epoch, minimum=0), size) for epoch, size in sizes.items()]
    epochs.sort(key=lambda entry: entry[0])
    if not epochs or epochs[0][0] != 0:
        raise ValueError(f"by_epoch() needs a size for epoch 0, got {dict(sizes)!r}; write {{0: …, …}}")
    return ByEpoch(tuple(epochs))
