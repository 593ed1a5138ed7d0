"""A chain of transforms: its order checked, its draws made, and which part of an image it needs.

A `Chain` is made once, in the main process, and pickled to every worker (a few hundred bytes, no torch). It is
immutable. Each transform draws from counter lanes of its own (`gpuload.rng`), numbered in the order in which they are
written, so a draw depends only on the epoch's key, the sample's position, the transform's number in the chain, the
image's size and perhaps its boxes.

With a `MultiView` a chain has several *lines*, one for each view: the transforms before it, with the same draws in all
lines; the view's own transforms; and those after it, with other draws in each line.

The functions at the end of the file say which transforms may follow which, and tell each where it is; an impossible
order is a `ValueError` that names both transforms and says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.errors import one_line
from gpuload.rng.philox import Key
from gpuload.transforms.arguments import depends_on_epoch, is_module, is_torchvisions, name_of
from gpuload.transforms.base import Standing, Transform
from gpuload.transforms.composite import Compose, Identity, MultiView, RandomChoice, flat, wrap_modules
from gpuload.transforms.convert import UniformTemporalSubsample
from gpuload.transforms.line import Line, numbered
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import MOVES_PIXELS, Box, Call
from gpuload.transforms.program.windows import full_windows
from gpuload.transforms.state import has_state

if TYPE_CHECKING:  # what is the user's own is imported where there is some: few workers need it
    from gpuload.transforms.custom import Custom
    from gpuload.transforms.mixing import CutMix, MixUp

__all__ = ["Chain"]

EPOCHS: Final = 4  # whose chains are kept: batches of two are in work at a time


class Chain:
    """Transforms in the order in which they are applied.

    Args:
        transforms: from `gpuload.transforms`, or modules of torch, which are called with the batch's images. For
            torchvision's transforms see `gpuload.transforms.from_torchvision`.

    Attributes:
        transforms: the declarations, as a tuple.
        lines: the transforms as they are applied to an image; one `Line` for each view.
        module: the `nn.Module` at the end, or the function of a `Lambda` of batches there: it may return anything with
            an entry for each image. Or None. It is left out when a chain is pickled, and a `StandIn` takes the place of
            other transforms of the user's own.

    Raises:
        TypeError: an entry is not a transform.
        ValueError: the transforms are in an impossible order.

    Example:
        >>> from gpuload import transforms as T
        >>> Chain([T.RandomResizedCrop(224), T.Normalize([0.5], [0.5])])
        Chain([RandomResizedCrop(size=(224, 224)), Normalize(mean=(0.5,), std=(0.5,))])
    """

    transforms: tuple[Transform, ...]
    lines: tuple[Line, ...]
    module: Any = None

    def __init__(self, transforms: Iterable[Any] | Compose | None = ()) -> None:
        if is_torchvisions(transforms):
            raise TypeError(
                f"transforms must be a list of gpuload's, got one {_name(transforms)} of torchvision's; write "
                "transforms=T.from_torchvision(…), where T is gpuload.transforms"
            )
        if isinstance(transforms, Compose):
            transforms = transforms.transforms
        elif isinstance(transforms, Transform) or is_module(transforms):
            raise TypeError(f"transforms must be a list, got one {type(transforms).__name__}; write [{transforms!r}]")
        try:
            entries = list(transforms or ())
        except TypeError:
            hint = f"; write [T.Lambda({name_of(transforms)})] to call it with a batch" if callable(transforms) else ""
            raise TypeError(f"transforms must be a list of transforms, got {_name(transforms)}{hint}") from None
        for number, entry in enumerate(entries):
            if not isinstance(entry, Transform) and (is_torchvisions(entry) or not is_module(entry)):
                raise TypeError(_no_transform(entry, number))
        entries: list[Any] = flat(wrap_modules(entries))
        if entries and entries[-1].record is Call and entries[-1].per == "batch":
            self.module = entries.pop().fn
        self.transforms = tuple(entries)
        lines = _lines(self.transforms)
        for line in lines:
            check_order(line.transforms)
            check_fills(line.transforms)
        self.lines = tuple(Line(placed(line.transforms), line.lanes) for line in lines)
        check_mixing([line.transforms for line in self.lines])
        check_gathering([line.transforms for line in self.lines])
        self._at: dict[int, Chain] = {}  # that of each epoch

    def at(self, epoch: int) -> Chain:
        """The chain with the sizes of an epoch (see `by_epoch`); itself, if none of them depends on it.

        Raises:
            TypeError, ValueError: a function gave a size that cannot be.
        """
        if not self._varies:
            return self
        if epoch not in self._at:
            try:
                transforms = [_at(transform, epoch) for transform in self.transforms]
            except (TypeError, ValueError) as error:
                raise type(error)(f"in epoch {epoch}, by by_epoch(): {error}") from error
            if len(self._at) > EPOCHS:
                self._at.clear()
            self._at[epoch] = Chain([*transforms, *self.entries[len(transforms) :]])
        return self._at[epoch]

    @property
    def entries(self) -> list[Any]:
        """The transforms, and what is called with the finished batch, if anything: a list that makes this chain."""
        if self.module is None:
            return [*self.transforms]
        if is_module(self.module):
            return [*self.transforms, self.module]
        from gpuload.transforms.custom import Lambda

        return [*self.transforms, Lambda(self.module)]

    @cached_property
    def _varies(self) -> bool:
        return any(_varies(transform) for transform in self.transforms)

    @cached_property
    def views(self) -> int | None:
        """How many views `MultiView` makes of an image; None without one."""
        return len(self.lines) if any(isinstance(transform, MultiView) for transform in self.transforms) else None

    @property
    def module_name(self) -> str | None:
        """The package and class of the module at the end: ``"kornia's RandomAffine"``; None without one."""
        return None if self.module is None else name_of(self.module)

    @property
    def last(self) -> str | None:
        """The last transform as messages name it: ``"the module RandomAffine"``, or ``"Lambda(brighten)"``."""
        if self.module is None:
            return None
        return f"the module {_name(self.module)}" if is_module(self.module) else f"Lambda({name_of(self.module)})"

    @cached_property
    def calls(self) -> list[Custom]:
        """The user's own transforms, without the module at the end."""
        transforms = {id(one): one for line in self.lines for one in _calls(line.transforms)}
        return list(transforms.values())

    @cached_property
    def ends_in_state(self) -> bool:
        """Whether what is called at the end may depend on what training changes: a torch module with parameters or
        buffers; or a function, of which nothing is known."""
        return self.module is not None and (not is_module(self.module) or has_state(self.module))

    @cached_property
    def holds_state(self) -> bool:
        """Whether what is called before the end refers to such a module."""
        return any(has_state(_reached(custom)) for custom in self.calls)

    @cached_property
    def mixing(self) -> MixUp | CutMix | None:
        """A transform that mixes images, and says where their labels are; None if there is none."""
        return next(iter(mixing_of(self.lines[0].transforms)), None)

    @cached_property
    def gathers(self) -> bool:
        """Whether a transform puts levels of several samples together."""
        return any(transform.gathers > 1 for transform in self.transforms)

    @cached_property
    def group(self) -> tuple[str, int]:
        """How many neighbours in the epoch's order have to be in one batch, since they get into each other's images,
        and the transform that needs them; ``("", 1)`` if none does."""
        needed = [
            (type(transform).__name__, transform.gathers) for transform in self.transforms if transform.gathers > 1
        ]
        if self.mixing is not None:
            needed.append((type(self.mixing).__name__, 2))
        return max(needed, key=lambda entry: entry[1], default=("", 1))

    @property
    def frames(self) -> tuple[int, ...]:
        """How many frames of each clip are kept, one after the other, before anything else is done."""
        return tuple(
            transform.num_samples for transform in self.transforms if isinstance(transform, UniformTemporalSubsample)
        )

    @cached_property
    def reads_boxes(self) -> bool:
        """Whether draws depend on the boxes of a sample."""
        return any(transform.reads_boxes for line in self.lines for transform in line.transforms)

    @cached_property
    def moves_pixels(self) -> bool:
        """Whether masks, boxes and keypoints have to move with the images; of the user's own transforms, those that say
        so."""
        outlines = [known for line in self.lines for transform in line.transforms for known in transform.outline]
        return (
            self.gathers
            or any(custom.moves_pixels for custom in self.calls)
            or any(issubclass(known.kind, MOVES_PIXELS) or "warp" in known.operations for known in outlines)
        )

    def draw(
        self,
        key: Key,
        positions: np.ndarray,
        sizes_hw: np.ndarray,
        boxes: Sequence[np.ndarray] | None = None,
        *,
        view: int = 0,
        regions_tlhw: np.ndarray | None = None,
    ) -> Program:
        """Draw the records of all transforms.

        Args:
            key: of the epoch.
            positions: int64 (B,), of the samples in the epoch's order.
            sizes_hw: int64 (B, 2), the sizes of their images.
            boxes: of each sample, float64 (n, 4) left, top, right, bottom; needed if `reads_boxes`.
            view: the number of the view.
            regions_tlhw: what `regions` gave for these images, if known: a crop need not be drawn again.

        Raises:
            DrawError: a transform cannot be drawn for one image; `row` says which.
        """
        regions = regions_tlhw if len(self.lines) == 1 else None
        return self.lines[view].draw(key, positions, sizes_hw, boxes, regions_tlhw=regions)

    def regions(
        self, key: Key, positions: np.ndarray, sizes_hw: np.ndarray, boxes: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """The part of each image that has to be decoded, int64 (B, 4): top, left, height, width; for several views the
        smallest box around what each needs.

        Arguments and errors as for `draw`; only the first `Line.prefix_length` transforms are drawn: up to the last one
        that the region depends on, or that may refuse an image, since an image is refused where it is read.
        """
        sizes = np.asarray(sizes_hw, np.int64)
        windows_of_lines = [
            line.draw(key, positions, sizes, boxes, steps=line.prefix_length).windows_tlhw[0]
            if line.prefix_length
            else full_windows(sizes)
            for line in self.lines
        ]
        if len(windows_of_lines) == 1:
            return windows_of_lines[0]
        start = np.min([windows[:, :2] for windows in windows_of_lines], axis=0)
        end = np.max([windows[:, :2] + windows[:, 2:] for windows in windows_of_lines], axis=0)
        return np.concatenate([start, end - start], axis=1)

    @cached_property
    def resizes_late(self) -> str | None:
        """Why no image may be decoded smaller than it is, in a few words; None if it may: the first thing that is done
        to it is a resize."""
        if self.views is not None:
            return "several views show an image"
        if self.gathers:
            return "images of several samples are put together"
        return self.lines[0].resizes_late

    def resizes(
        self, key: Key, positions: np.ndarray, sizes_hw: np.ndarray, boxes: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, Box | None]:
        """Return what `regions` returns, and the record that resizes all images before anything else, if there is one;
        only for a chain without `resizes_late`."""
        [line] = self.lines
        assert line.first is not None
        program = line.draw(key, positions, sizes_hw, boxes, steps=max(line.prefix_length, line.first + 1))
        return program.windows_tlhw[0], program.resize

    @property
    def output_size_hw(self) -> tuple[int, int] | None:
        """The size of every result of the first view, or None if it depends on the image or the epoch."""
        if self._varies:
            return None
        size = None
        for transform in self.lines[0].transforms:
            size = transform.output_size(size)
        return size

    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ between chains with different transforms or arguments, then the name of
        the module's class, if there is one."""
        import hashlib  # here, since workers never need it

        written = repr([_identity(transform) for transform in self.transforms])
        digits = hashlib.sha256(written.encode()).hexdigest()[:16]
        return digits if self.module is None else f"{digits}-{_plain(self.module)}"

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chain):
            return NotImplemented
        return self.transforms == other.transforms and self.module is other.module

    def __hash__(self) -> int:
        return hash((self.transforms, id(self.module)))

    def __reduce__(self) -> tuple[type[Chain], tuple[tuple[Transform, ...]]]:
        if not self.calls:
            return Chain, (self.transforms,)
        from gpuload.transforms.custom import stand_ins

        return Chain, (stand_ins(self.transforms),)

    def __repr__(self) -> str:
        names = [repr(transform) for transform in self.transforms]
        if self.module is not None:
            names.append(f"<module {_name(self.module)}>" if is_module(self.module) else str(self.last))
        return f"Chain([{', '.join(names)}])"


def _lines(transforms: tuple[Transform, ...]) -> tuple[Line, ...]:
    multi_views = [number for number, transform in enumerate(transforms) if isinstance(transform, MultiView)]
    if len(multi_views) > 1:
        raise ValueError(
            f"transforms in an impossible order: there are two MultiViews (numbers {multi_views[0] + 1} and "
            f"{multi_views[1] + 1}); write all views in one"
        )
    split = multi_views[0] if multi_views else len(transforms)
    before, after = transforms[:split], transforms[split + 1 :]
    views = transforms[split].chains if multi_views else ((),)  # pyright: ignore[reportAttributeAccessIssue]
    shared, free = numbered(before, 0)
    lines = []
    for view in views:
        inside = flat(view)
        lanes, free = numbered((*inside, *after), free)
        lines.append(Line((*before, *inside, *after), (*shared, *lanes)))
    return tuple(lines)


def _calls(transforms: Iterable[Transform]) -> Iterator[Custom]:
    for transform in transforms:
        if transform.record is Call:
            yield transform  # pyright: ignore[reportReturnType]
        yield from _calls(transform.children)


def _reached(custom: Custom) -> list[Any]:
    """Return what a user's own transform may read: its attributes, and those of its classes, with their methods."""
    kinds = [kind for kind in type(custom).__mro__ if not f"{kind.__module__}.".startswith(("gpuload.", "builtins."))]
    return [custom, vars(custom), *(list(vars(kind).values()) for kind in kinds)]


def _identity(transform: Transform) -> tuple[Any, ...]:
    """The class and the arguments of a transform, in plain values."""
    names = [field.name for field in fields(transform) if field.compare]
    if transform.record is Call and "__dataclass_fields__" not in vars(type(transform)):  # a plain class of the user's
        names = sorted(set(vars(transform)) - {"works_on_finished"})
    return type(transform).__name__, *((name, _plain(getattr(transform, name))) for name in names)


def _plain(value: Any) -> Any:
    if isinstance(value, Transform):
        return _identity(value)
    if isinstance(value, float):
        return value + 0.0  # -0.0 is 0.0
    if depends_on_epoch(value):
        return repr(value)
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if callable(value):  # a function, or a module: what it does is not known
        return value.__name__ if isinstance(getattr(value, "__name__", 0), str) else _name(value)
    return _name(value) if type(value).__repr__ is object.__repr__ else value


def _varies(value: Any) -> bool:
    """Whether an argument, or one that it holds, depends on the epoch."""
    if isinstance(value, Transform):
        return any(_varies(getattr(value, field.name)) for field in fields(value))
    return any(map(_varies, value)) if isinstance(value, tuple) else depends_on_epoch(value)


def _at(value: Any, epoch: int) -> Any:
    """An argument, or a transform, in an epoch."""
    if not _varies(value):
        return value
    if isinstance(value, Transform):
        return replace(value, **{field.name: _at(getattr(value, field.name), epoch) for field in fields(value)})
    return tuple(_at(inner, epoch) for inner in value) if isinstance(value, tuple) else value.at_epoch(epoch)


def _name(entry: Any) -> str:
    return type(entry).__name__


def _no_transform(entry: Any, number: int) -> str:
    kind = type(entry) if not isinstance(entry, type) else entry
    text = f"transforms[{number}] is not a gpuload transform: got {one_line(' '.join(repr(entry).split()))}"
    if isinstance(entry, list | tuple):
        return f"{text}, a {kind.__name__} in the list; unpack it with *, as in transforms=[*T.from_torchvision(…), …]"
    if isinstance(entry, type) and issubclass(entry, Transform):
        return f"transforms[{number}] is the class {entry.__name__}; write {entry.__name__}(…)"
    if is_torchvisions(entry) and kind.__name__ in ("Compose", "Sequential"):
        return f"{text}, a chain of torchvision's; write *gpuload.transforms.from_torchvision(…) in its place"
    if kind.__module__.startswith("torchvision."):
        return (
            f"{text}, which is torchvision's; write gpuload.transforms.{kind.__name__}(…), where there is "
            "one, or let gpuload.transforms.from_torchvision([…]) write the chain"
        )
    text = f"{text} ({kind.__name__}); write one of gpuload.transforms, or a torch nn.Module"
    return f"{text}, or T.Lambda({name_of(entry)}) to call it with a batch" if callable(entry) else text


def check_order(transforms: tuple[Transform, ...]) -> None:
    """Refuse a transform that cannot take the images that those before it make."""
    state, maker = "uint8", -1
    for number, transform in enumerate(transforms):
        if state not in transform.works_on and maker < 0:
            raise ValueError(
                f"transforms in an impossible order: {transform.called} (number {number + 1}) takes "
                f"{' or '.join(transform.works_on)} images and gets {state} ones; put ToDtype('float32', scale=True) "
                "or Normalize before it"
            )
        if state not in transform.works_on:
            later, early = transform.called, transforms[maker].called
            remedy = "leave one of them out" if later == early else f"put {later} before {early}"
            raise ValueError(
                f"transforms in an impossible order: {later} (number {number + 1}) cannot come after {early} "
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
            later, early = filling.called, scaler.called
            raise ValueError(
                f"{later}({filling.fill_argument}={getattr(filling, 'fill', None)!r}) is in levels, 0 … 255, but comes "
                f"after {early}, which scales images to 0 … 1; put {later} before {early}, or use "
                f"{filling.fill_argument}=0"
            )
        if transform.makes is not None and scaler is None and getattr(transform, "scale", True):
            scaler = transform


def _filling(transform: Transform) -> Transform | None:
    """The transform, or one that it holds, if its fill is not 0."""
    if any(transform.outside.image):
        return transform
    return next(filter(None, map(_filling, transform.children)), None)


def placed(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """The transforms, each told where it is. After one that works on finished images all others must do so too."""
    bound, state, unit = [], "uint8", 1.0
    first: int | None = None
    for number, transform in enumerate(transforms):
        # Whatever takes normalized images takes any finished ones.
        following, called = transforms[number:], first is not None and _only_calls(transforms[first])
        ready = (
            state == "normalized"
            or first is not None
            or (state == "float" and all("normalized" in later.works_on for later in following))
        )
        ends = all(map(_only_calls, following))
        bound.append(transform.standing(Standing(state, ready, unit, ends=ends, called=called)))
        if first is not None and "normalized" not in transform.works_on and not bound[-1].works_on_finished:
            later, early = transform.called, transforms[first].called
            raise ValueError(
                f"transforms in an impossible order: {later} (number {number + 1}) cannot come after {early} (number "
                f"{first + 1}), which works on finished images; put {later} before {early}"
            )
        if bound[-1].works_on_finished and first is None:
            first = number
            _check_held(transform, number)
        if transform.makes is not None:
            state = transform.makes
            unit = 255.0 if getattr(transform, "scale", False) else unit
    return tuple(bound)


def _only_calls(transform: Transform) -> bool:
    """Whether it only calls what is the user's own."""
    return transform.record is Call or bool(transform.children and all(map(_only_calls, transform.children)))


def _check_held(transform: Transform, number: int) -> None:
    """Refuse one that works on finished images, but holds another that needs levels."""
    for inner in flat(transform.children):
        if "normalized" not in inner.works_on:
            raise ValueError(
                f"transforms in an impossible order: {transform.called} (number {number + 1}) holds {inner.called}, "
                "which needs levels, beside a transform of your own, which gets the floats of ToDtype; put "
                f"{transform.called} before ToDtype, or one of the two out of it"
            )


def mixing_of(transforms: Iterable[Transform]) -> list[MixUp | CutMix]:
    """The transforms that mix, also inside others."""
    mixing: list[Any] = []
    for transform in flat(transforms):
        if transform.mixes:  # it or one that it holds
            mixing += mixing_of(transform.children) or [transform]
    return mixing


def check_mixing(lines: Sequence[tuple[Transform, ...]]) -> None:
    """Refuse to mix a sample twice, to mix several views, and to mix by different arguments for the labels."""
    mixing = mixing_of(lines[0])
    if not mixing:
        return
    name = mixing[0].called
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
                    f"{name}({argument}={one!r}) and {other.called}({argument}={two!r}) are for the labels of one "
                    "batch; give both the same"
                )


def check_gathering(lines: Sequence[tuple[Transform, ...]]) -> None:
    """Refuse to put images of several samples together twice in one way, in several views, or before boxes are read."""
    names = [transform.called for line in lines for transform in line if transform.gathers > 1]
    before: list[str] = []  # names of transforms that have put images together
    if not names:
        return
    if len(lines) > 1:
        raise ValueError(
            f"{names[0]} does not go with MultiView: a sample has its boxes and masks once, but each view would have "
            "those of others; leave one of them out"
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"a chain has at most one {name}, but this one has {names.count(name)}; leave all but one out"
            )
    for transform in lines[0]:
        if transform.gathers > 1:
            before.append(transform.called)
        if before and transform.reads_boxes:
            raise ValueError(
                f"{transform.called} draws from the boxes of a sample, which are not known before {before[-1]} has "
                f"put several samples together; put {transform.called} before {before[-1]}"
            )
        if transform.drops_points and len(before) < len(names):
            raise ValueError(
                f"{transform.called} cannot come before {names[-1]}, which joins keypoints with those of other "
                f"samples; put it after"
            )
        if transform.drops_points and getattr(transform, "labels_getter", None) is not None:
            raise ValueError(
                f"{transform.called}(labels_getter=…) does not go with {names[-1]}, which joins what belongs to boxes "
                "alone; leave it out, or leave labels_getter out"
            )


def _check_once(transforms: Iterable[Transform], within: str) -> None:
    mixing = [transform for transform in flat(transforms) if transform.mixes]
    if len(mixing) > 1:
        raise ValueError(
            f"{within} mixes an image once, but has {mixing[0].called} and {mixing[1].called}; put them into one "
            "RandomChoice, which takes one of them for each sample"
        )
    for transform in mixing:
        inside = flat(transform.children)
        others = [inner for inner in inside if not (inner.mixes or isinstance(inner, Identity))]
        if others:
            mixer = next(inner.called for inner in inside if inner.mixes)
            raise ValueError(
                f"{transform.called} cannot hold {others[0].called} beside {mixer}, which mixes images after all "
                f"else is done; put {others[0].called} into a {transform.called} of its own"
            )
        ways = transform.children if isinstance(transform, RandomChoice) else [transform.children]
        for way in ways:
            _check_once([way] if isinstance(way, Transform) else way, transform.called)
