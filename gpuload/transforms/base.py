"""Base classes of all transforms. A transform is a frozen declaration that turns uniform random numbers into records.

A transform defines three things: how to make a record, with the random parameters of all samples of a batch, from
uniform numbers and image sizes (`draw`); which kinds of records it can draw (`outline`); and where in a chain it can be
used (`works_on`, `output_state`). A transform never touches pixels: backends do, and they get only its records
(`gpuload.transforms.program`).

Sizes are int64 (B, 2): height, width. Boxes and windows are int64 (B, 4): top, left, height, width, in the coordinates
of the image that they belong to; if a transform pads, they can extend beyond the image.

Arguments can depend on the batch (`gpuload.transforms.varying`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, dataclass_transform

import numpy as np

from gpuload.checks import argument, check_field
from gpuload.errors import explain_unknown_arguments
from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.transforms.arguments import Fill, format_argument
from gpuload.transforms.program.ops import Box, Record, RecordOutline
from gpuload.transforms.program.windows import FILTERS, filter_names
from gpuload.transforms.varying import BucketSize, Moment, Varying

__all__ = [
    "EVERYWHERE",
    "ChainPosition",
    "DrawError",
    "Padding",
    "Resampling",
    "Transform",
    "Uniforms",
    "copy_for_finished_images",
    "declaration",
    "scale_to_range",
]

T = TypeVar("T", bound="Transform")
Class = TypeVar("Class", bound=type)

EVERYWHERE: Final = ("uint8", "float", "normalized")  # all image states; see `Transform.works_on`


class DrawError(ValueError):
    """Raised when a transform cannot be drawn for one image of a batch.

    Attributes:
        row: the index of the image in the batch.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message, row)
        self.message = message
        self.row = row

    def __str__(self) -> str:
        return self.message


@dataclass(slots=True, eq=False)
class Uniforms:
    """A transform's source of random numbers: a call returns `count` of them per sample, float64 (B, count) in (0, 1).

    `lane` is the transform's first counter lane; the transform's children use the lanes after it. `boxes` has each
    sample's boxes as they reach the transform, float64 (n, 4): left, top, right, bottom. It is None if neither this
    transform nor a later one reads boxes.
    """

    key: Key
    positions: np.ndarray
    lane: int
    boxes: Sequence[np.ndarray] | None = None

    def __call__(self, count: int) -> np.ndarray:
        return philox.uniforms(self.key, self.positions, self.lane, count)

    def take(self, rows: np.ndarray) -> Uniforms:
        """Return the uniforms of the samples with these batch indices."""
        boxes = None if self.boxes is None else [self.boxes[row] for row in rows.tolist()]
        return Uniforms(self.key, self.positions[rows], self.lane, boxes)


class ChainPosition(NamedTuple):
    """The position of a transform in a chain.

    Attributes:
        state: the state of the images that reach the transform (see `Transform.works_on`).
        finished: whether the images are in their final type, which means that neither the transform nor a later one
            works on integer pixel values (0 … 255).
        unit: the integer pixel value that corresponds to 1 in images of the final type.
        only_custom_follows: whether the transform and all later ones are the user's own code.
        after_custom: whether the user's own code has already been called with images of the final type.
    """

    state: str
    finished: bool
    unit: float
    only_custom_follows: bool = False
    after_custom: bool = False


@dataclass(frozen=True, repr=False)
class Transform:
    """Base class of all declarations."""

    # The image states that the transform accepts: "uint8", "float" (0 … 255 converted by ToDtype) and "normalized".
    works_on: ClassVar[tuple[str, ...]] = ("uint8", "float")
    record: ClassVar[type[Record] | None] = None  # the type of the transform's own records; None if it has none
    filter_names: ClassVar[tuple[str, ...]] = ()  # the filters that its records can use
    operations: ClassVar[tuple[str, ...]] = ()  # sorted names from `program.ops.OPS`
    depth: ClassVar[int | None] = None  # as in `program.ops.RecordOutline`
    is_optional: ClassVar[bool] = False  # as in `program.ops.RecordOutline`
    is_crop: ClassVar[bool] = False  # the output may use only part of the input
    needs_full_image: ClassVar[bool] = False  # each pixel of the output can depend on the entire input
    may_refuse: ClassVar[bool] = False  # `draw` can raise a `DrawError`
    works_on_finished: ClassVar[bool] = False  # it and all later transforms work on images of the final type
    output_state: ClassVar[str | None] = None  # the state of its output images; None means unchanged
    fill_argument: ClassVar[str] = "fill"  # the name of the argument that sets `fill`
    image_only: ClassVar[bool] = False  # it moves pixels but cannot move boxes, masks or keypoints
    reads_boxes: ClassVar[bool] = False  # its random parameters depend on the boxes of a sample
    drops_boxes: ClassVar[bool] = False  # it can remove boxes of a sample, along with their fields
    drops_points: ClassVar[bool] = False  # it can remove keypoints, along with their fields
    is_mixing: ClassVar[bool] = False  # it mixes the image with the image of another sample
    group_size: ClassVar[int] = 1  # the number of samples whose pixels a result can contain

    def __post_init__(self) -> None:
        """Check the arguments in the order of their declaration. Values that depend on the batch come last: each is
        checked in a copy of the transform whose arguments are those of the first batch with this value."""
        varying: dict[str, Varying] = {}
        for declared in fields(self):
            value, is_checked = getattr(self, declared.name), "check" in declared.metadata
            name = f"{type(self).__name__}({declared.name}=…)"
            if isinstance(value, Varying):
                if is_checked and not declared.metadata["by_epoch"]:
                    raise TypeError(f"{name} cannot be {value!r}; pass one value for all batches")
                if is_checked and isinstance(value, BucketSize) and declared.name != "size":
                    raise TypeError(f"{name} cannot be bucket_size, which is only for the size of Resize and of crops")
                varying[declared.name] = value
            elif is_checked:
                entries = value if isinstance(value, list | tuple) else ()
                inner = next((entry for entry in entries if isinstance(entry, Varying)), None)
                if inner is not None:
                    raise TypeError(
                        f"{name} contains {inner!r}; pass entire values, as in by_batch([(…), (…)]) or "
                        "by_epoch({0: (…), 10: (…)})"
                    )
                object.__setattr__(self, declared.name, check_field(declared, name, value))
        if not varying:
            self.check_arguments()

        def resolved(moment: Moment) -> Transform:
            return replace(self, **{name: value.at(moment) for name, value in varying.items()})

        for name, value in varying.items():
            checked = value.map(lambda moment, name=name: getattr(resolved(moment), name))
            object.__setattr__(self, name, checked)

    def check_arguments(self) -> None:
        """Raise a ValueError if arguments that are valid on their own cannot be combined. They are those of one
        batch."""

    def bind(self, position: ChainPosition) -> Transform:
        """Bind the transform to its position in a chain; raise ValueError if it cannot be used there."""
        return self

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record | list[Record] | None:
        """Draw the record for images of these sizes; return None if there is nothing to do. A transform with children
        returns the records of its children, which `gpuload.transforms.line` draws."""
        return None

    def drawn(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Record | list[Record] | None:
        """Draw the record or records for a `Line`. `Custom` overrides this method to wrap the result of `draw`."""
        return self.draw(uniforms, sizes_hw)

    def __call__(self, image: Any, *, seed: int = 0) -> Any:
        """Apply the transform to one image, to see its effect; see `gpuload.transforms.apply`."""
        from gpuload import transforms

        return transforms.apply(self, image, seed=seed)

    def record_from_regions(self, uniforms: Uniforms, regions_tlhw: np.ndarray) -> Record | None:
        """Return the record that produced the regions that a worker decoded, if the worker drew only this transform;
        None if the record must be drawn again."""
        return None

    @property
    def outline(self) -> tuple[RecordOutline, ...]:
        """The records that the transform and its children can draw."""
        if self.record is None:
            return tuple(replace(outline, is_optional=True) for child in self.children for outline in child.outline)
        return (
            RecordOutline(
                kind=self.record,
                name=type(self).__name__,
                operations=self.operations,
                depth=self.depth,
                is_optional=self.is_optional,
                filters=self.filter_names,
                min_hw=self.min_output_hw,
            ),
        )

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the size of the result for images of size `size_hw`; None if it depends on the image or the batch."""
        return size_hw

    @property
    def min_output_hw(self) -> tuple[int, int]:
        """A size that no result is smaller than."""
        return self.output_size(None) or (1, 1)

    def output_channels(self, channels: int) -> int:
        """Return the number of channels of the result for images with `channels` channels."""
        return channels

    @property
    def outside(self) -> Fill:
        """The fill values outside an image and a mask: `fill`, or 0 without a `fill`. Masks get 0 if `fill` has one
        value per channel."""
        fill: Any = getattr(self, "fill", None) or (0,)
        return fill if isinstance(fill, Fill) else Fill(fill, fill[0] if len(fill) == 1 else 0)

    @property
    def display_name(self) -> str:
        """The transform's name in messages."""
        return type(self).__name__

    @property
    def children(self) -> tuple[Transform, ...]:
        """The transforms that this transform contains."""
        return ()

    @property
    def lanes(self) -> int:
        """The number of counter lanes that the transform and its children use."""
        return 1 + sum(child.lanes for child in self.children)

    def __repr__(self) -> str:
        arguments = [
            f"{field.name}={format_argument(getattr(self, field.name))}"
            for field in fields(self)
            if field.repr and getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"


def scale_to_range(bounds: Any, numbers: np.ndarray) -> np.ndarray:
    """Scale numbers in 0 … 1 to the range (low, high)."""
    low, high = bounds
    return low + numbers * (high - low)


@dataclass_transform(frozen_default=True, field_specifiers=(field, argument))
def declaration(cls: Class) -> Class:
    """Turn a class into a transform: a frozen dataclass. If a caller passes an argument under another library's name,
    the error suggests gpuload's name; if the entries of the first argument are passed as separate arguments, the error
    says how to join them."""
    declared: Any = dataclass(frozen=True, repr=False)(cls)
    declared.__init__ = explain_unknown_arguments(_find_equivalent_argument, partial(_join_first_argument, declared))(
        declared.__init__
    )
    return declared


def _join_first_argument(cls: type[Transform], args: Sequence[Any]) -> str | None:
    """Return the remedy for a call that passes a height and a width, or several transforms or views, as separate
    arguments; None for other calls."""
    if len(args) < 2:
        return None
    name = fields(cls)[0].name
    if name in ("size", "target_size") and isinstance(args[0], int) and isinstance(args[1], int):
        return f"pass (height, width) as one argument, {cls.__name__}(({args[0]}, {args[1]}))"
    if name in ("transforms", "chains") and all(isinstance(entry, Transform | list) for entry in args):
        return f"pass one list, {cls.__name__}([…, …])"
    return None


def _find_equivalent_argument(argument: str) -> str | None:
    from gpuload.transforms.names import ARGUMENTS  # imported only when an error is raised

    return ARGUMENTS.get(argument)


def copy_for_finished_images(transform: T) -> T:
    """Return a copy that works on images of the final type."""
    copied = copy.copy(transform)
    object.__setattr__(copied, "works_on_finished", True)
    return copied


class Resampling(Transform):
    """Base class of the transforms that resample a box, with a fixed filter or a random filter per image.

    Neither this class nor `Padding` is a dataclass, so that each transform can declare its arguments in torchvision's
    order.
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
                f"{type(self).__name__}(antialias=…) must be True for interpolation='lanczos', which is defined only "
                "with antialiasing"
            )

    def filters(self, numbers: np.ndarray | None) -> np.ndarray | str:
        """Return the `filters` of a `Box`. Random filters need `numbers`, one uniform number per image."""
        names = self.filter_names
        if len(names) == 1 or numbers is None:
            return names[0]
        codes = np.array([FILTERS.index(name) for name in names])
        return codes[(numbers * len(codes)).astype(np.int64)]


class Padding(Transform):
    """Base class of the transforms whose box can extend beyond the image and is not resampled."""

    record: ClassVar[type[Record]] = Box
    padding_mode: Any = "constant"

    @property
    def outline(self) -> tuple[RecordOutline, ...]:
        [outline] = super().outline
        return (replace(outline, padding_mode=self.padding_mode, min_input_hw=self.min_input_hw),)

    @property
    def min_input_hw(self) -> tuple[int, int] | None:
        """The size from which on boxes stay inside the image; None means that they can extend beyond any image."""
        return None

    def box_record(self, starts: np.ndarray, sizes_hw: np.ndarray, kept_boxes: np.ndarray | None = None) -> Box:
        """Return a `Box` record for boxes with these top left corners (B, 2) and sizes."""
        fill, mask_fill = self.outside
        boxes = np.concatenate([starts, sizes_hw], axis=1)
        return Box(
            boxes, sizes_hw, padding_mode=self.padding_mode, fill=fill, mask_fill=mask_fill, kept_boxes=kept_boxes
        )
