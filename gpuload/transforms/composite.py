"""Transforms that hold others: all of them, some of them, in any order, as drawn for each sample, or one for each view.

The records are those of each way through the children, for the rows that take it. Children have counter lanes of their
own, so the draws of one sample never depend on another. `gpuload.transforms.chain` turns a chain with a `MultiView`
into a line of transforms for each view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import numpy as np

from gpuload.transforms.arguments import finite, is_module, is_sequence, is_torchvisions, probability
from gpuload.transforms.base import EVERYWHERE, Standing, Transform, Uniforms, argument, declaration
from gpuload.transforms.convert import UniformTemporalSubsample
from gpuload.transforms.line import draw_some, numbered
from gpuload.transforms.program.ops import Mix, Record

__all__ = ["Compose", "Identity", "MultiView", "RandomApply", "RandomChoice", "RandomOrder", "flat"]


@declaration
class Identity(Transform):
    """Leave images as they are: one of several choices, as torch's and torchvision's ``Identity``."""

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE


@declaration
class _Holding(Transform):
    transforms: Sequence[Transform]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "transforms", held(type(self).__name__, self.transforms))

    @property
    def children(self) -> tuple[Transform, ...]:
        return tuple(self.transforms)

    def standing(self, where: Standing) -> Transform:
        return replace(self, transforms=tuple(child.standing(where) for child in self.transforms))


@declaration
class Compose(_Holding):
    """Transforms, one after the other; in a chain the same as writing them there.

    It is taken wherever a list of transforms is: `Loader(transforms=Compose([…]))`, `RandomApply(Compose([…]))`.

    Args:
        transforms: a list of transforms.

    Raises:
        TypeError: it is not a list of transforms.

    Example:
        >>> from gpuload import transforms as T
        >>> T.Chain(T.Compose([T.Resize(256), T.CenterCrop(224)])) == T.Chain([T.Resize(256), T.CenterCrop(224)])
        True
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> NoReturn:
        raise NotImplementedError("a chain takes the transforms out of a Compose")


def _of_any(name: str) -> Any:
    """A property: whether an attribute is true of any transform inside."""
    return property(lambda self: any(getattr(inner, name) for inner in flat(self.transforms)))


@declaration
class _Branching(_Holding):
    """Base of these: children are drawn for the samples whose way they are on.

    They must not turn levels into floats, since all images of a batch have one dtype.
    """

    crops: ClassVar[bool] = _of_any("crops")
    needs_whole: ClassVar[bool] = _of_any("needs_whole")
    may_refuse: ClassVar[bool] = _of_any("may_refuse")
    image_only: ClassVar[bool] = _of_any("image_only")
    reads_boxes: ClassVar[bool] = _of_any("reads_boxes")
    mixes: ClassVar[bool] = _of_any("mixes")
    on_finished: ClassVar[bool] = _of_any("on_finished")

    def __post_init__(self) -> None:
        super().__post_init__()
        holder = type(self).__name__
        for child in self.transforms:
            inside = flat([child])
            if any(inner.makes for inner in inside):
                raise ValueError(
                    f"{holder} cannot hold {type(child).__name__}, which turns levels into floats: it would do so for "
                    "some images of a batch only; put it after"
                )
            if clips := [type(inner).__name__ for inner in inside if isinstance(inner, UniformTemporalSubsample)]:
                raise ValueError(
                    f"{holder} cannot hold {clips[0]}, since all clips of a batch have as many frames; put it outside"
                )
            if gathering := [type(inner).__name__ for inner in inside if inner.gathers > 1]:
                raise ValueError(
                    f"{holder} cannot hold {gathering[0]}, which takes in images of other samples once all have "
                    "come as far; write it in the chain, with a probability of its own: p=…"
                )
            if any(inner.output_channels(3) != 3 for inner in inside):
                raise ValueError(
                    f"{holder} cannot hold {child!r}, which would make one channel of three for some images of a batch "
                    "only; use Grayscale(3), whose three channels are equal, or put it outside"
                )

    @property
    def works_on(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(state for state in EVERYWHERE if all(state in inner.works_on for inner in flat(self.transforms)))

    def branches(
        self, uniforms: Uniforms, sizes_hw: np.ndarray, ways: Iterable[tuple[np.ndarray, Sequence[int]]]
    ) -> list[Record]:
        """Draw for ways through the children: (rows, the numbers of the children in order)."""
        offsets = np.cumsum([1, *(child.lanes for child in self.transforms)]).tolist()
        records: list[Record] = []
        for rows, order in ways:
            if not len(rows):
                continue
            transforms, lanes = [], []
            for child, offset in ((self.transforms[number], offsets[number]) for number in order):
                inside = flat([child])
                transforms += inside
                lanes += numbered(inside, uniforms.lane + offset + isinstance(child, Compose))[0]
            records += draw_some(transforms, lanes, uniforms, sizes_hw, rows)
        return [self._mixed(records, sizes_hw)] if self.mixes else records

    def _mixed(self, records: Sequence[Record], sizes_hw: np.ndarray) -> Mix:
        """Join records into one for all samples; samples whose branch has no mixing transform are not mixed."""
        count = len(sizes_hw)
        share, boxes, names = np.ones(count), np.zeros((count, 4), np.int64), np.full(count, "", object)
        for record in records:
            if isinstance(record, Mix):
                share[record.rows], boxes[record.rows] = record.share, record.box_tlhw
                names[record.rows] = record.name if record.names is None else record.names
        return Mix(share, boxes, names, sizes_hw=sizes_hw, name=type(self).__name__)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return size_hw if all(inner.output_size(size_hw) == size_hw for inner in flat(self.transforms)) else None


@declaration
class RandomApply(_Branching):
    """Apply transforms, all of them or none, with a probability.

    Args:
        transforms: a list of transforms.
        p: the probability.

    Raises:
        TypeError, ValueError: an argument is invalid; a transform turns levels into floats.
    """

    p: float = argument(probability, default=0.5)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> list[Record]:
        rows = np.flatnonzero(uniforms(1)[:, 0] < self.p)
        return self.branches(uniforms, sizes_hw, [(rows, range(len(self.transforms)))])


@declaration
class RandomChoice(_Branching):
    """Apply one of several transforms.

    Args:
        transforms: a list of transforms.
        p: the probability of each, scaled to a sum of 1; None means all the same.

    Raises:
        TypeError, ValueError: an argument is invalid; a transform turns levels into floats.
    """

    p: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p is None:
            return
        if not is_sequence(self.p) or len(self.p) != len(self.transforms):
            raise ValueError(
                f"RandomChoice(p=…) must have one number for each of the {len(self.transforms)} transforms, "
                f"got {self.p!r}"
            )
        numbers = tuple(finite("RandomChoice(p=…)", number) for number in self.p)
        if min(numbers) < 0 or sum(numbers) <= 0:
            raise ValueError(f"RandomChoice(p=…) must be numbers ≥ 0 with a positive sum, got {self.p!r}")
        object.__setattr__(self, "p", numbers)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> list[Record]:
        share = np.ones(len(self.transforms)) if self.p is None else np.array(self.p)
        ends = np.cumsum(share / share.sum())
        ends[-1] = 1.0
        chosen = np.searchsorted(ends, uniforms(1)[:, 0], side="right")
        ways = [(np.flatnonzero(chosen == number), [number]) for number in range(len(self.transforms))]
        return self.branches(uniforms, sizes_hw, ways)


@declaration
class RandomOrder(_Branching):
    """Apply transforms in a random order, drawn for each sample.

    Args:
        transforms: a list of transforms.

    Raises:
        TypeError, ValueError: an argument is invalid; a transform turns levels into floats.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> list[Record]:
        orders = np.argsort(uniforms(len(self.transforms)), axis=1, kind="stable")
        kinds, which = np.unique(orders, axis=0, return_inverse=True)
        which = which.ravel()
        ways = [(np.flatnonzero(which == number), order.tolist()) for number, order in enumerate(kinds)]
        return self.branches(uniforms, sizes_hw, ways)


def flat(transforms: Iterable[Transform]) -> list[Transform]:
    """The transforms, with those that a `Compose` holds in its place."""
    flattened = []
    for transform in transforms:
        flattened += flat(transform.transforms) if isinstance(transform, Compose) else [transform]
    return flattened


def wrapped(transforms: Iterable[Any]) -> list[Any]:
    """The transforms, with torch modules among them in a `Lambda`."""
    wrapped_transforms = list(transforms)
    for number, entry in enumerate(wrapped_transforms):
        if is_module(entry) and not is_torchvisions(entry):
            from gpuload.transforms.custom import Lambda  # few chains have one

            wrapped_transforms[number] = Lambda(entry)
    return wrapped_transforms


def held(holder: str, transforms: Any) -> tuple[Transform, ...]:
    """The transforms that a transform is given to hold, checked."""
    if isinstance(transforms, Compose):
        return held(holder, transforms.transforms)
    if isinstance(transforms, Transform) or not is_sequence(transforms):
        raise TypeError(f"{holder}(transforms=…) must be a list of transforms, got {transforms!r}")
    children = tuple(wrapped(transforms))
    if not children:
        raise ValueError(f"{holder}(transforms=…) is empty; give at least one transform (Identity() does nothing)")
    for number, child in enumerate(children):
        if not isinstance(child, Transform):
            raise TypeError(
                f"{holder}(transforms=…)[{number}] is no transform of gpuload: got {child!r} ({type(child).__name__})"
            )
        if holder != "Compose" and any(isinstance(inner, MultiView) for inner in flat([child])):
            raise ValueError(
                f"{holder} cannot hold a MultiView, which makes several images of one; write it in the chain"
            )
    return children


@declaration
class MultiView(Transform):
    """Make several views of each image, each by transforms of its own, with draws of its own.

    Instead of the image a batch has a list of tensors N×C×H×W, one for each view in this order. The file is read once,
    and the region that covers all views is decoded once. Transforms before it in the chain are drawn once for all
    views; those after it are applied to each view, with draws of its own.

    Args:
        chains: for each view a list of transforms, or one transform.

    Raises:
        TypeError, ValueError: it is not a list of these, or a list is empty.

    Example:
        >>> from gpuload import transforms as T
        >>> T.Chain([T.MultiView([T.RandomResizedCrop(224), *[T.RandomResizedCrop(96)] * 6])]).views
        7
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    chains: Sequence[Sequence[Transform] | Transform]

    def __post_init__(self) -> None:
        if isinstance(self.chains, Transform) or not is_sequence(self.chains) or not len(self.chains):
            raise TypeError(f"MultiView(chains=…) must be a list with the transforms of each view, got {self.chains!r}")
        chains = []
        for number, chain in enumerate(self.chains):
            chain = [chain] if isinstance(chain, Transform) else chain
            chains.append(tuple(flat(held(f"MultiView(chains=…)[{number}]", chain))))
        object.__setattr__(self, "chains", tuple(chains))
        for child in self.children:
            if isinstance(child, UniformTemporalSubsample):
                raise ValueError(
                    f"MultiView cannot hold {child.called}: frames are chosen once, before they are decoded; put it "
                    "before MultiView"
                )

    @property
    def children(self) -> tuple[Transform, ...]:
        return tuple(transform for chain in self.chains for transform in chain)  # pyright: ignore

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> NoReturn:
        raise NotImplementedError("a chain makes a line of transforms for each view")
