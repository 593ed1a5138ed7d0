"""Transforms that apply other transforms: all, one or none, in a fixed or random order, or once per view.

A branching transform draws a path (a sequence of its children) for each sample, and returns records for each path.
Every child has separate counter lanes, so one sample's random parameters never depend on another sample.
`gpuload.transforms.chain` converts a chain with a `MultiView` to one `Line` of transforms per view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import numpy as np

from gpuload.checks import argument, is_sequence, numbers, probability
from gpuload.transforms.arguments import is_module, is_torchvision_transform, refuse_albumentations
from gpuload.transforms.base import EVERYWHERE, ChainPosition, Transform, Uniforms, declaration
from gpuload.transforms.convert import UniformTemporalSubsample
from gpuload.transforms.line import assign_lanes, draw_for_rows
from gpuload.transforms.program.ops import PartnerMix, Record

__all__ = ["Compose", "Identity", "MultiView", "RandomApply", "RandomChoice", "RandomOrder", "as_one", "flatten"]


@declaration
class Identity(Transform):
    """Leave images unchanged, like torch's and torchvision's ``Identity``; useful in a `RandomChoice`."""

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE


@declaration
class _Container(Transform):
    transforms: Sequence[Transform]

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", check_children(type(self).__name__, self.transforms))
        super().__post_init__()

    @property
    def children(self) -> tuple[Transform, ...]:
        return tuple(self.transforms)

    def bind(self, position: ChainPosition) -> Transform:
        return replace(self, transforms=tuple(child.bind(position) for child in self.transforms))


@declaration
class Compose(_Container):
    """Transforms applied in sequence. In a chain, equivalent to listing its transforms directly.

    Accepted wherever a list of transforms is accepted: `Loader(transforms=Compose([…]))`, `RandomApply(Compose([…]))`.

    Args:
        transforms: a list of transforms.

    Example:
        >>> from gpuload import transforms as T
        >>> T.Chain(T.Compose([T.Resize(256), T.CenterCrop(224)])) == T.Chain([T.Resize(256), T.CenterCrop(224)])
        True
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> NoReturn:
        raise NotImplementedError("a chain replaces a Compose with its transforms before it draws")


def as_one(transforms: list[Transform]) -> Transform:
    """Return one transform that applies all of these in sequence."""
    return transforms[0] if len(transforms) == 1 else Compose(transforms) if transforms else Identity()


def _nested_any_property(name: str) -> Any:
    """Return a property that is True if the attribute `name` is true for any nested transform."""
    return property(lambda self: any(getattr(leaf, name) for leaf in flatten(self.transforms)))


@declaration
class _Branching(_Container):
    """Base class of transforms that draw each child only for the samples whose path contains that child.

    Children must not convert uint8 images to floats, since all images of a batch have one dtype.
    """

    is_crop: ClassVar[bool] = _nested_any_property("is_crop")
    needs_full_image: ClassVar[bool] = _nested_any_property("needs_full_image")
    may_refuse: ClassVar[bool] = _nested_any_property("may_refuse")
    image_only: ClassVar[bool] = _nested_any_property("image_only")
    reads_boxes: ClassVar[bool] = _nested_any_property("reads_boxes")
    is_mixing: ClassVar[bool] = _nested_any_property("is_mixing")
    works_on_finished: ClassVar[bool] = _nested_any_property("works_on_finished")

    def __post_init__(self) -> None:
        super().__post_init__()
        container = type(self).__name__
        for child in self.transforms:
            leaves = flatten([child])
            if any(leaf.output_state for leaf in leaves):
                raise ValueError(
                    f"{container} cannot hold {type(child).__name__}, which would convert only some images of "
                    f"a batch to floats; put it after {container}"
                )
            if subsamplers := [type(leaf).__name__ for leaf in leaves if isinstance(leaf, UniformTemporalSubsample)]:
                raise ValueError(
                    f"{container} cannot hold {subsamplers[0]}: all clips of a batch need equal frame counts; put it "
                    f"outside {container}"
                )
            if combiners := [type(leaf).__name__ for leaf in leaves if leaf.group_size > 1]:
                raise ValueError(
                    f"{container} cannot hold {combiners[0]}, which combines images of several samples and must "
                    "run on the entire batch; put it directly in the chain, and set its probability with p=…"
                )
            if any(leaf.output_channels(3) != 3 for leaf in leaves):
                raise ValueError(
                    f"{container} cannot hold {child!r}, which would reduce three channels to one for only some images "
                    f"of a batch; use Grayscale(3), whose three channels are equal, or put it outside {container}"
                )

    @property
    def works_on(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(state for state in EVERYWHERE if all(state in leaf.works_on for leaf in flatten(self.transforms)))

    def draw_paths(
        self, uniforms: Uniforms, sizes_hw: np.ndarray, paths: Iterable[tuple[np.ndarray, Sequence[int]]]
    ) -> list[Record]:
        """Draw the children on each path. A path is a pair: the batch indices of the samples that take it, and the
        indices of the children in order of application."""
        offsets = np.cumsum([1, *(child.lanes for child in self.transforms)]).tolist()
        records: list[Record] = []
        for rows, order in paths:
            if not len(rows):
                continue
            transforms, lanes = [], []
            for child, offset in ((self.transforms[index], offsets[index]) for index in order):
                leaves = flatten([child])
                transforms += leaves
                lanes += assign_lanes(leaves, uniforms.lane + offset + isinstance(child, Compose))[0]
            records += draw_for_rows(transforms, lanes, uniforms, sizes_hw, rows)
        return [self._merge_mixes(records, sizes_hw)] if self.is_mixing else records

    def _merge_mixes(self, records: Sequence[Record], sizes_hw: np.ndarray) -> PartnerMix:
        """Merge all `PartnerMix` records into one record for all samples. A sample without a record is not mixed."""
        count = len(sizes_hw)
        share, boxes, names = np.ones(count), np.zeros((count, 4), np.int64), np.full(count, "", object)
        for record in records:
            if isinstance(record, PartnerMix):
                share[record.rows], boxes[record.rows] = record.share, record.box_tlhw
                names[record.rows] = record.name if record.names is None else record.names
        return PartnerMix(share, boxes, names, sizes_hw=sizes_hw, name=type(self).__name__)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return size_hw if all(leaf.output_size(size_hw) == size_hw for leaf in flatten(self.transforms)) else None


@declaration
class RandomApply(_Branching):
    """Apply either all of the transforms, with probability `p`, or none.

    Args:
        transforms: a list of transforms.
        p: the probability of applying the transforms.

    Raises:
        TypeError, ValueError: an argument is invalid, or a transform converts images to floats.
    """

    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> list[Record]:
        rows = np.flatnonzero(uniforms(1)[:, 0] < self.p)
        return self.draw_paths(uniforms, sizes_hw, [(rows, range(len(self.transforms)))])


def _check_weights(name: str, value: Any) -> tuple[float, ...]:
    weights = numbers(name, value, minimum=0)
    if not sum(weights):
        raise ValueError(f"{name} must have a positive sum, got {value!r}")
    return weights


@declaration
class RandomChoice(_Branching):
    """Apply one of several transforms.

    Args:
        transforms: a list of transforms.
        p: the probability of each transform, scaled to sum to 1; None means equal probabilities.

    Raises:
        TypeError, ValueError: an argument is invalid, or a transform converts images to floats.
    """

    p: Sequence[float] | None = argument(_check_weights, default=None, by_epoch=True)

    def check_arguments(self) -> None:
        if self.p is not None and len(self.p) != len(self.transforms):
            raise ValueError(
                f"RandomChoice(p=…) must have one number for each of the {len(self.transforms)} transforms, "
                f"got {self.p!r}"
            )

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> list[Record]:
        share = np.ones(len(self.transforms)) if self.p is None else np.array(self.p)
        ends = np.cumsum(share / share.sum())
        ends[-1] = 1.0
        choices = np.searchsorted(ends, uniforms(1)[:, 0], side="right")
        paths = [(np.flatnonzero(choices == index), [index]) for index in range(len(self.transforms))]
        return self.draw_paths(uniforms, sizes_hw, paths)


@declaration
class RandomOrder(_Branching):
    """Apply transforms in a random order, drawn for each sample.

    Args:
        transforms: a list of transforms.

    Raises:
        TypeError, ValueError: an argument is invalid, or a transform converts images to floats.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> list[Record]:
        orders = np.argsort(uniforms(len(self.transforms)), axis=1, kind="stable")
        distinct_orders, order_indices = np.unique(orders, axis=0, return_inverse=True)
        order_indices = order_indices.ravel()
        paths = [
            (np.flatnonzero(order_indices == index), order.tolist()) for index, order in enumerate(distinct_orders)
        ]
        return self.draw_paths(uniforms, sizes_hw, paths)


def flatten(transforms: Iterable[Transform]) -> list[Transform]:
    """Return the transforms with each `Compose` replaced by its contents."""
    flattened = []
    for transform in transforms:
        flattened += flatten(transform.transforms) if isinstance(transform, Compose) else [transform]
    return flattened


def wrap_modules(transforms: Iterable[Any]) -> list[Any]:
    """Return the transforms with each torch module wrapped in a `Lambda`."""
    entries = list(transforms)
    for index, entry in enumerate(entries):
        if is_module(entry) and not is_torchvision_transform(entry):
            from gpuload.transforms.custom import Lambda  # imported here, since few chains need it

            entries[index] = Lambda(entry)
    return entries


def check_children(owner: str, transforms: Any) -> tuple[Transform, ...]:
    """Check the `transforms` argument of the class named `owner` and return its transforms."""
    if isinstance(transforms, Compose):
        return check_children(owner, transforms.transforms)
    if isinstance(transforms, Transform) or not is_sequence(transforms):
        raise TypeError(f"{owner}(transforms=…) must be a list of transforms, got {transforms!r}")
    children = tuple(wrap_modules(transforms))
    if not children:
        raise ValueError(
            f"{owner}(transforms=…) is empty; pass at least one transform, such as Identity(), which does nothing"
        )
    for index, child in enumerate(children):
        if not isinstance(child, Transform):
            refuse_albumentations(f"{owner}(transforms=…)[{index}]", child)
            raise TypeError(
                f"{owner}(transforms=…)[{index}] is not a gpuload transform: got {child!r} ({type(child).__name__})"
            )
        if owner != "Compose" and any(isinstance(leaf, MultiView) for leaf in flatten([child])):
            raise ValueError(
                f"{owner} cannot hold a MultiView, which makes several images from one; put it directly in the chain"
            )
    return children


@declaration
class MultiView(Transform):
    """Make several views of each image, each with its own transforms and random parameters.

    The batch then contains a list of N×C×H×W tensors, one per view in the order of `chains`. The file is read once, and
    the region that covers all views is decoded once. Transforms before the `MultiView` in the chain are drawn once for
    all views; transforms after it are drawn separately for each view.

    Args:
        chains: a list with one entry per view: a list of transforms, or a single transform.

    Raises:
        TypeError, ValueError: an entry is neither a transform nor a list of transforms, or a list is empty.

    Example:
        >>> from gpuload import transforms as T
        >>> T.Chain([T.MultiView([T.RandomResizedCrop(224), *[T.RandomResizedCrop(96)] * 6])]).views
        7
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    chains: Sequence[Sequence[Transform] | Transform]

    def __post_init__(self) -> None:
        if isinstance(self.chains, Transform) or not is_sequence(self.chains) or not len(self.chains):
            raise TypeError(f"MultiView(chains=…) must be a list with one entry per view, got {self.chains!r}")
        chains = []
        for index, chain in enumerate(self.chains):
            chain = [chain] if isinstance(chain, Transform) else chain
            chains.append(tuple(flatten(check_children(f"MultiView(chains=…)[{index}]", chain))))
        object.__setattr__(self, "chains", tuple(chains))
        for child in self.children:
            if isinstance(child, UniformTemporalSubsample):
                raise ValueError(
                    f"MultiView cannot hold {child.display_name}: frames are selected once, before decoding; put "
                    "it before MultiView"
                )

    @property
    def children(self) -> tuple[Transform, ...]:
        return tuple(transform for chain in self.chains for transform in chain)  # pyright: ignore

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> NoReturn:
        raise NotImplementedError("a chain replaces a MultiView with one line of transforms per view before it draws")
