"""Which transforms may follow which in a chain, and telling each where it is.

Pure functions of declarations, run once when a `Chain` is made. An impossible order is a `ValueError` that names both
transforms and says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpuload.transforms.base import ClipTransform, Standing, Transform
from gpuload.transforms.composite import Identity, RandomChoice, flat
from gpuload.transforms.program.ops import Call

if TYPE_CHECKING:  # a worker imports the transforms of its chain, and no others
    from gpuload.transforms.mixing import CutMix, MixUp

__all__ = ["check_clips", "check_fills", "check_gathering", "check_mixing", "check_order", "mixing_of", "placed"]


def check_order(transforms: tuple[Transform, ...]) -> None:
    """Refuse a transform that cannot take the images that those before it make."""
    state, maker = "uint8", -1
    for number, transform in enumerate(transforms):
        if state not in transform.works_on and maker < 0:
            raise ValueError(
                f"transforms in an impossible order: {_name(transform)} (number {number + 1}) takes "
                f"{' or '.join(transform.works_on)} images and gets {state} ones; put ToDtype('float32', scale=True) "
                "or Normalize before it"
            )
        if state not in transform.works_on:
            late, early = _name(transform), _name(transforms[maker])
            remedy = "leave one of them out" if late == early else f"put {late} before {early}"
            raise ValueError(
                f"transforms in an impossible order: {late} (number {number + 1}) cannot come after {early} "
                f"(number {maker + 1}), since it takes {' or '.join(transform.works_on)} images and gets {state} "
                f"ones; {remedy}"
            )
        if transform.makes is not None:
            state, maker = transform.makes, number


def check_fills(transforms: tuple[Transform, ...]) -> None:
    """Refuse fills other than 0 after images are scaled, since a fill is in levels."""
    scaler: Transform | None = None
    for transform in transforms:
        filling = None if scaler is None else _filling(transform)
        if scaler is not None and filling is not None:
            late, early = _name(filling), _name(scaler)
            raise ValueError(
                f"{late}({filling.fill_argument}={getattr(filling, 'fill', None)!r}) is in levels, 0 … 255, but comes "
                f"after {early}, which scales images to 0 … 1; put {late} before {early}, or use "
                f"{filling.fill_argument}=0"
            )
        if transform.makes is not None and scaler is None and getattr(transform, "scale", True):
            scaler = transform


def _filling(transform: Transform) -> Transform | None:
    """The transform, or one that it holds, if its fill is not 0."""
    if any(transform.outside(masks=False)):
        return transform
    return next(filter(None, map(_filling, transform.children)), None)


def placed(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """The transforms, each told where it is. After one that works on finished images all others must do so too."""
    found, state, unit = [], "uint8", 1.0
    first: int | None = None
    for number, transform in enumerate(transforms):
        # Whatever takes normalized images takes any finished ones.
        rest, called = transforms[number:], first is not None and _calls(transforms[first])
        ready = (
            state == "normalized"
            or first is not None
            or (state == "float" and all("normalized" in later.works_on for later in rest))
        )
        ends = all(map(_calls, rest))
        found.append(transform.standing(Standing(state, ready, unit, ends=ends, called=called)))
        if first is not None and "normalized" not in transform.works_on and not found[-1].late:
            late, early = _name(transform), _name(transforms[first])
            raise ValueError(
                f"transforms in an impossible order: {late} (number {number + 1}) cannot come after {early} (number "
                f"{first + 1}), which works on finished images; put {late} before {early}"
            )
        if found[-1].late and first is None:
            first = number
            _check_held(transform, number)
        if transform.makes is not None:
            state = transform.makes
            unit = 255.0 if getattr(transform, "scale", False) else unit
    return tuple(found)


def _calls(transform: Transform) -> bool:
    """Whether it only calls what is the user's own."""
    return transform.record is Call or bool(transform.children and all(map(_calls, transform.children)))


def _check_held(transform: Transform, number: int) -> None:
    """Refuse one that works on finished images, but holds another that needs levels."""
    for inner in flat(transform.children):
        if "normalized" not in inner.works_on:
            raise ValueError(
                f"transforms in an impossible order: {_name(transform)} (number {number + 1}) holds {_name(inner)}, "
                "which needs levels, beside a transform of your own, which gets the floats of ToDtype; put "
                f"{_name(transform)} before ToDtype, or one of the two out of it"
            )


def mixing_of(transforms: Iterable[Transform]) -> list[MixUp | CutMix]:
    """The transforms that mix, also inside others."""
    found: list[Any] = []
    for transform in flat(transforms):
        if transform.mixes:  # it or one that it holds
            found += mixing_of(transform.children) or [transform]
    return found


def check_mixing(lines: Sequence[tuple[Transform, ...]]) -> None:
    """Refuse to mix a sample twice, to mix several views, and to mix by different arguments for the labels."""
    mixing = mixing_of(lines[0])
    if not mixing:
        return
    name = _name(mixing[0])
    if len(lines) > 1:
        raise ValueError(
            f"{name} does not go with MultiView: a sample has one label, but its views would be mixed with different "
            "shares; leave one of them out"
        )
    _check_once(lines[0], "a chain")
    for other in mixing[1:]:
        for argument in ("num_classes", "labels_getter", "label_smoothing"):
            one, two = getattr(mixing[0], argument), getattr(other, argument)
            if one != two:
                raise ValueError(
                    f"{name}({argument}={one!r}) and {_name(other)}({argument}={two!r}) are for the labels of one "
                    "batch; give both the same"
                )


def check_clips(transforms: Sequence[Transform]) -> None:
    """Refuse to choose other frames for each view."""
    for transform in transforms:
        for child in transform.children if type(transform).__name__ == "MultiView" else ():
            if isinstance(child, ClipTransform):
                raise ValueError(
                    f"MultiView cannot hold {_name(child)}: frames are chosen once, before they are decoded; put it "
                    "before MultiView"
                )


def check_gathering(lines: Sequence[tuple[Transform, ...]]) -> None:
    """Refuse to put images of several samples together twice in one way, in several views, or before boxes are read."""
    names = [_name(transform) for line in lines for transform in line if transform.gathers > 1]
    if names and len(lines) > 1:
        raise ValueError(
            f"{names[0]} does not go with MultiView: a sample has its boxes and masks once, but each view would have "
            "those of others; leave one of them out"
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"a chain has at most one {name}, but this one has {names.count(name)}; leave all but one out"
            )
    gathering = [number for number, transform in enumerate(lines[0]) if transform.gathers > 1]
    for number, transform in enumerate(lines[0] if names else ()):
        before = [name for at, name in zip(gathering, names, strict=True) if at < number]
        if before and transform.reads_boxes:
            raise ValueError(
                f"{_name(transform)} draws from the boxes of a sample, which are not known before {before[-1]} has put "
                f"several samples together; put {_name(transform)} before {before[-1]}"
            )
        if transform.drops_points and len(before) < len(names):
            raise ValueError(
                f"{_name(transform)} cannot come before {names[-1]}, which joins keypoints with those of other "
                f"samples; put it after"
            )
        if transform.drops_points and getattr(transform, "labels_getter", None) is not None:
            raise ValueError(
                f"{_name(transform)}(labels_getter=…) does not go with {names[-1]}, which joins what belongs to boxes "
                "alone; leave it out, or leave labels_getter out"
            )


def _check_once(transforms: Iterable[Transform], within: str) -> None:
    found = [transform for transform in flat(transforms) if transform.mixes]
    if len(found) > 1:
        raise ValueError(
            f"{within} mixes an image once, but has {_name(found[0])} and {_name(found[1])}; put them into one "
            "RandomChoice, which takes one of them for each sample"
        )
    for transform in found:
        inside = flat(transform.children)
        others = [inner for inner in inside if not (inner.mixes or isinstance(inner, Identity))]
        if others:
            mixer = next(_name(inner) for inner in inside if inner.mixes)
            raise ValueError(
                f"{_name(transform)} cannot hold {_name(others[0])} beside {mixer}, which mixes images after all else "
                f"is done; put {_name(others[0])} into a {_name(transform)} of its own"
            )
        ways = transform.children if isinstance(transform, RandomChoice) else [transform.children]
        for way in ways:
            _check_once([way] if isinstance(way, Transform) else way, _name(transform))


def _name(entry: Any) -> str:
    return getattr(entry, "called", None) or type(entry).__name__
