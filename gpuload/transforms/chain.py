"""Chains of transforms: check their order, draw their records, and compute the region of an image to decode.

The main process builds a `Chain` once and sends it to every worker, pickled in a few hundred bytes. Workers can
unpickle it without torch. A chain is immutable.

Each transform draws from its own counter lanes (`gpuload.rng`), numbered in the order of the chain. So its random
parameters depend only on the epoch's key, the sample's position, the transform's position in the chain, the image's
size and, for some transforms, the sample's boxes.

A chain with a `MultiView` has one *line* per view. A line contains the transforms before the `MultiView`, with the same
random parameters in all lines; the view's own transforms; and the transforms after the `MultiView`, with separate
parameters in each line.

The functions at the end of the file check which transforms can follow which, and bind each transform to its position.
An invalid order raises a `ValueError` that names both transforms and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.errors import one_line
from gpuload.rng import philox
from gpuload.rng.philox import Key
from gpuload.rng.streams import BATCHES, DRAWS, MODULE
from gpuload.transforms.arguments import (
    is_module,
    is_torchvision_transform,
    name_of,
    refuse_albumentations,
)
from gpuload.transforms.base import ChainPosition, Transform
from gpuload.transforms.composite import Compose, Identity, MultiView, RandomChoice, flatten, wrap_modules
from gpuload.transforms.convert import UniformTemporalSubsample, check_windows
from gpuload.transforms.line import Line, assign_lanes
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import MOVES_PIXELS, Box, Call
from gpuload.transforms.program.windows import full_windows
from gpuload.transforms.state import has_state
from gpuload.transforms.varying import ByBatch, ByEpoch, Moment, Varying, naming

if TYPE_CHECKING:  # imported at run time only for chains with such transforms, since few workers need them
    from gpuload.transforms.custom import Custom, Lambda
    from gpuload.transforms.mixing import CutMix, MixUp

__all__ = ["Chain", "find_varying", "variants_of"]

CACHED_CHAINS: Final = 256  # more than an epoch has sizes, since it takes as long to build a chain as to draw it


class Chain:
    """A sequence of transforms, in order of application.

    Args:
        transforms: transforms of `gpuload.transforms`, or torch modules, which are called with the batch's images.
            Convert torchvision transforms with `gpuload.transforms.from_torchvision`.

    Attributes:
        transforms: the declarations, as a tuple.
        lines: one `Line` per view, with the transforms that are applied to an image.
        modules: each `nn.Module`, and the function of each ``per="batch"`` `Lambda`, at the end of the chain; empty if
            there is none. They are called one after the other and may change the size and dtype of the images. The last
            can return anything with one entry per image. Pickling a chain omits the modules and replaces each of the
            user's own transforms with a `StandIn`.
        module_lanes: for each view, the counter lane of each module's seed.

    Raises:
        TypeError: an entry is not a transform.
        ValueError: the transforms are in an invalid order, or cannot be combined.

    Example:
        >>> from gpuload import transforms as T
        >>> Chain([T.RandomResizedCrop(224), T.Normalize([0.5], [0.5])])
        Chain([RandomResizedCrop(size=(224, 224)), Normalize(mean=(0.5,), std=(0.5,))])
    """

    transforms: tuple[Transform, ...]
    lines: tuple[Line, ...]
    modules: tuple[Any, ...]
    module_lanes: tuple[tuple[int, ...], ...]

    def __init__(self, transforms: Iterable[Any] | Compose | None = ()) -> None:
        if is_torchvision_transform(transforms):
            raise TypeError(
                f"transforms must be a list of gpuload transforms, got torchvision's {_class_name(transforms)}; write "
                "transforms=T.from_torchvision(…), where T is gpuload.transforms"
            )
        refuse_albumentations("transforms", transforms)
        if isinstance(transforms, Compose):
            transforms = transforms.transforms
        elif isinstance(transforms, Transform) or is_module(transforms):
            raise TypeError(
                f"transforms must be a list, got a single {type(transforms).__name__}; write [{transforms!r}]"
            )
        elif isinstance(transforms, Mapping | Set | str):
            raise TypeError(
                f"transforms must be a list in the order of application, got a {_class_name(transforms)}: "
                f"{one_line(repr(transforms))}; pass one list, which applies to all images of a sample"
            )
        try:
            entries = list(transforms or ())
        except TypeError:
            hint = f"; write [T.Lambda({name_of(transforms)})] to call it with a batch" if callable(transforms) else ""
            raise TypeError(f"transforms must be a list of transforms, got {_class_name(transforms)}{hint}") from None
        for index, entry in enumerate(entries):
            if not isinstance(entry, Transform) and (is_torchvision_transform(entry) or not is_module(entry)):
                refuse_albumentations(f"transforms[{index}]", entry)
                raise TypeError(_invalid_entry_message(entry, index))
        entries: list[Any] = flatten(wrap_modules(entries))
        end = len(entries)
        while end and entries[end - 1].record is Call and entries[end - 1].per == "batch":
            end -= 1
        self.transforms, calls = tuple(entries[:end]), tuple(entries[end:])
        self.modules = tuple(call.fn for call in calls)
        # Modules before the last have lanes among those of the transforms, so that the last has the same seed however
        # many modules come before it.
        lines, module_lanes = [], []
        for view, line in enumerate(_build_lines((*self.transforms, *calls[:-1]))):
            end = len(line.transforms) - len(calls[:-1])
            lines.append(Line(line.transforms[:end], line.lanes[:end]))
            module_lanes.append((*(lane + 1 for lane in line.lanes[end:]), MODULE[view])[: len(calls)])
            check_order(lines[-1].transforms)
            check_fills(lines[-1].transforms)
        self.lines = tuple(Line(bind_all(line.transforms), line.lanes) for line in lines)
        self.module_lanes = tuple(module_lanes)
        check_windows([line.transforms for line in self.lines])
        check_mixing([line.transforms for line in self.lines])
        check_combining([line.transforms for line in self.lines])
        self._resolved_chains: dict[tuple[Any, ...], Chain] = {}  # keyed by the choice for each argument

    def at(self, epoch: int, step: int = 0, size_hw: tuple[int, int] | None = None, *, seed: int = 0) -> Chain:
        """Return the chain with its arguments for a batch, or this chain if no argument depends on the batch (see
        `gpuload.transforms.varying`).

        Args:
            epoch, step: the number of the epoch, and of the batch in the epoch.
            size_hw: the size that the loader's order gives the batch.
            seed: the seed of the loader.

        Raises:
            TypeError, ValueError: a function passed to `by_epoch` returned an invalid value, or the chain contains
                `bucket_size`, and the batch has no size.
        """
        number = 0.0
        if find_varying(self, ByBatch):
            number = philox.uniforms(philox.epoch_key(seed, epoch), np.array([step]), BATCHES, 1)[0, 0].item()
        return self._resolve(Moment(epoch, number, size_hw))

    def _resolve(self, moment: Moment) -> Chain:
        choices = tuple(value.choice(moment) for _, value in self._varying)
        if not choices:
            return self
        chain = self._resolved_chains.get(choices)
        if chain is None:
            with naming(f"an argument in epoch {moment.epoch}"):
                transforms = [_resolve(transform, moment) for transform in self.transforms]
                chain = self._resolved_chains[choices] = Chain([*transforms, *_as_lambdas(self.modules)])
            if len(self._resolved_chains) > CACHED_CHAINS:
                del self._resolved_chains[next(iter(self._resolved_chains))]
        return chain

    @property
    def entries(self) -> list[Any]:
        """The transforms, followed by the modules; `Chain(entries)` equals this chain."""
        calls = _as_lambdas(self.modules)
        return [*self.transforms, *(call.fn if is_module(call.fn) else call for call in calls)]

    @cached_property
    def _varying(self) -> list[tuple[str, Any]]:
        """The arguments that depend on the batch, each with its name, such as ``"Resize(size=…)"``."""
        return [entry for transform in self.transforms for entry in _varying_arguments(transform)]

    @cached_property
    def views(self) -> int | None:
        """The number of views that `MultiView` makes of an image; None without a `MultiView`."""
        return len(self.lines) if any(isinstance(transform, MultiView) for transform in self.transforms) else None

    @property
    def module_names(self) -> tuple[str, ...]:
        """The names of `modules` in messages, such as ``"the module RandomAffine"`` or ``"Lambda(brighten)"``."""
        return tuple(
            f"the module {_class_name(module)}" if is_module(module) else f"Lambda({name_of(module)})"
            for module in self.modules
        )

    @cached_property
    def calls(self) -> list[Custom]:
        """The user's own transforms, except the modules at the end."""
        transforms = {id(custom): custom for line in self.lines for custom in _custom_transforms(line.transforms)}
        return list(transforms.values())

    @cached_property
    def ends_in_state(self) -> bool:
        """Whether a module at the end may depend on state that training changes: True for a torch module with
        parameters or buffers, and for any function, since a function may use any state."""
        return any(not is_module(module) or has_state(module) for module in self.modules)

    @cached_property
    def holds_state(self) -> bool:
        """Whether one of the user's own transforms before the end refers to a torch module with parameters or buffers,
        or to a tensor that requires gradients."""
        return any(has_state(_reachable_objects(custom)) for custom in self.calls)

    @cached_property
    def mixing(self) -> MixUp | CutMix | None:
        """The first transform that mixes images; its arguments say where the labels are. None if no transform mixes."""
        return next(iter(find_mixing_transforms(self.lines[0].transforms)), None)

    @cached_property
    def is_combining(self) -> bool:
        """Whether a transform combines images of several samples."""
        return any(transform.group_size > 1 for transform in self.transforms)

    @cached_property
    def group(self) -> tuple[str, int]:
        """The name of the transform that combines the most samples, and the number of samples that it combines, which
        are neighbours in the epoch's order and must be in one batch. ``("", 1)`` if no transform combines samples."""
        group_sizes = [
            (type(transform).__name__, transform.group_size)
            for transform in self.transforms
            if transform.group_size > 1
        ]
        if self.mixing is not None:
            group_sizes.append((type(self.mixing).__name__, 2))
        return max(group_sizes, key=lambda entry: entry[1], default=("", 1))

    @property
    def frames(self) -> tuple[int, ...]:
        """The frame count of each `UniformTemporalSubsample`, in order. Workers select frames before all other
        transforms."""
        return tuple(
            transform.num_samples for transform in self.transforms if isinstance(transform, UniformTemporalSubsample)
        )

    @cached_property
    def reads_boxes(self) -> bool:
        """Whether random parameters depend on the boxes of a sample."""
        return any(transform.reads_boxes for line in self.lines for transform in line.transforms)

    @cached_property
    def moves_pixels(self) -> bool:
        """Whether masks, boxes and keypoints have to move with the images. This includes the user's own
        transforms whose `moves_pixels` is True."""
        outlines = [outline for line in self.lines for transform in line.transforms for outline in transform.outline]
        return (
            self.is_combining
            or any(custom.moves_pixels for custom in self.calls)
            or any(issubclass(outline.kind, MOVES_PIXELS) or "warp" in outline.operations for outline in outlines)
        )

    def with_draws(self, draws: int) -> Chain:
        """Return the chain for images with these `draws` (see `gpuload.datasets.sample.Encoded`), which uses other
        lanes."""
        if not draws:
            return self
        chain, lines = object.__new__(Chain), tuple(line.with_draws(draws) for line in self.lines)
        module_lanes = tuple(tuple(lane + DRAWS[draws] for lane in lanes) for lanes in self.module_lanes)
        vars(chain).update(vars(self), lines=lines, module_lanes=module_lanes)
        return chain

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
            key: the epoch's key.
            positions: int64 (B,), the samples' positions in the epoch's order.
            sizes_hw: int64 (B, 2), the sizes of their images.
            boxes: the boxes of each sample, float64 (n, 4) left, top, right, bottom; required if `reads_boxes`.
            view: the index of the view.
            regions_tlhw: the result of `regions` for these images, if known. The crop that determined the regions is
                then not drawn again.

        Raises:
            DrawError: a transform cannot be drawn for one image; `row` is the image's index.
        """
        regions = regions_tlhw if len(self.lines) == 1 else None
        return self.lines[view].draw(key, positions, sizes_hw, boxes, regions_tlhw=regions)

    def regions(
        self, key: Key, positions: np.ndarray, sizes_hw: np.ndarray, boxes: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the region of each image to decode, int64 (B, 4): top, left, height, width. For several views, this
        is the smallest box around the regions of all views.

        Arguments and errors are as for `draw`. Only the first `Line.prefix_length` transforms are drawn: up to the last
        transform that the region depends on, or that can refuse an image. An image must be
        refused by the process that reads it.
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
        """The reason why images cannot be decoded at a reduced size, in a few words. None if this is possible, because
        the first operation is a resize."""
        if self.views is not None:
            return "several views use one image"
        if self.is_combining:
            return "images of several samples are combined"
        return self.lines[0].resizes_late

    def resizes(
        self, key: Key, positions: np.ndarray, sizes_hw: np.ndarray, boxes: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, Box | None]:
        """Return the result of `regions`, and the record of the initial resize, or None if that resize does not apply
        to all images. The chain's `resizes_late` must be None."""
        [line] = self.lines
        assert line.first_change is not None
        program = line.draw(key, positions, sizes_hw, boxes, steps=max(line.prefix_length, line.first_change + 1))
        return program.windows_tlhw[0], program.resize

    @property
    def output_size_hw(self) -> tuple[int, int] | None:
        """The size of all results of the first view; None if the size depends on the image or the batch."""
        size = None
        for transform in self.lines[0].transforms:
            size = transform.output_size(size)
        return size

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that identify the transforms and their arguments, followed by the name of the
        last module's class if there are modules."""
        import hashlib  # imported here, since workers never need it

        *first_modules, last_module = self.modules or (None,)
        description = repr([_describe(entry) for entry in (*self.transforms, *_as_lambdas(first_modules))])
        digits = hashlib.sha256(description.encode()).hexdigest()[:16]
        return f"{digits}-{_to_plain(last_module)}" if self.modules else digits

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chain):
            return NotImplemented
        return self.transforms == other.transforms and list(map(id, self.modules)) == list(map(id, other.modules))

    def __hash__(self) -> int:
        return hash((self.transforms, *map(id, self.modules)))

    def __reduce__(self) -> tuple[type[Chain], tuple[tuple[Transform, ...]]]:
        # With several views, the lanes of a view come after those of the modules of the views before it.
        modules = self.modules[:-1] if self.views is not None else ()
        if not (self.calls or modules):
            return Chain, (self.transforms,)
        from gpuload.transforms.custom import replace_with_stand_ins

        return Chain, (replace_with_stand_ins((*self.transforms, *_as_lambdas(modules))),)

    def __repr__(self) -> str:
        names = [repr(transform) for transform in self.transforms]
        names += [f"<{name.removeprefix('the ')}>" if name[:3] == "the" else name for name in self.module_names]
        return f"Chain([{', '.join(names)}])"


def _build_lines(transforms: tuple[Transform, ...]) -> tuple[Line, ...]:
    multi_views = [index for index, transform in enumerate(transforms) if isinstance(transform, MultiView)]
    if len(multi_views) > 1:
        raise ValueError(
            f"transforms in an impossible order: there are two MultiViews (numbers {multi_views[0] + 1} and "
            f"{multi_views[1] + 1}); put all views into one"
        )
    split = multi_views[0] if multi_views else len(transforms)
    before, after = transforms[:split], transforms[split + 1 :]
    views = transforms[split].chains if multi_views else ((),)  # pyright: ignore[reportAttributeAccessIssue]
    shared_lanes, next_lane = assign_lanes(before, 0)
    lines = []
    for view in views:
        view_transforms = flatten(view)
        lanes, next_lane = assign_lanes((*view_transforms, *after), next_lane)
        lines.append(Line((*before, *view_transforms, *after), (*shared_lanes, *lanes)))
    return tuple(lines)


def _custom_transforms(transforms: Iterable[Transform]) -> Iterator[Custom]:
    for transform in transforms:
        if transform.record is Call:
            yield transform  # pyright: ignore[reportReturnType]
        yield from _custom_transforms(transform.children)


def _as_lambdas(modules: Sequence[Any]) -> list[Lambda]:
    """Return a `Lambda` for each of the modules and functions at the end of a chain."""
    if not modules:
        return []
    from gpuload.transforms.custom import Lambda  # imported here, since few chains need it

    return [Lambda(module) for module in modules]


def _reachable_objects(custom: Custom) -> list[Any]:
    """Return the objects that a user's own transform can access: its attributes, and its classes' attributes and
    methods."""
    classes = [cls for cls in type(custom).__mro__ if not f"{cls.__module__}.".startswith(("gpuload.", "builtins."))]
    return [custom, vars(custom), *(list(vars(cls).values()) for cls in classes)]


def _describe(transform: Transform) -> tuple[Any, ...]:
    """Return the class name and the arguments of a transform as plain values."""
    names = [field.name for field in fields(transform) if field.compare]
    if transform.record is Call and "__dataclass_fields__" not in vars(type(transform)):  # not a dataclass
        names = sorted(set(vars(transform)) - {"works_on_finished"})
    return type(transform).__name__, *((name, _to_plain(getattr(transform, name))) for name in names)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Transform):
        return _describe(value)
    if isinstance(value, float):
        return value + 0.0  # turns -0.0 into 0.0, whose repr is different
    if isinstance(value, Varying):
        return repr(value)
    if isinstance(value, tuple | list):
        return tuple(map(_to_plain, value))
    if isinstance(value, np.ndarray):
        return _to_plain(value.tolist())
    if callable(value):  # only the name of a function or module is the same in all processes
        return value.__name__ if isinstance(getattr(value, "__name__", 0), str) else _class_name(value)
    return _class_name(value) if type(value).__repr__ is object.__repr__ else value


def _varying_arguments(value: Any, name: str = "") -> Iterator[tuple[str, Varying]]:
    """Yield the varying arguments in a transform or argument, each with its name. For a `ByEpoch`, also yield those
    among its values."""
    if isinstance(value, Transform):
        for declared in fields(value):
            yield from _varying_arguments(getattr(value, declared.name), f"{type(value).__name__}({declared.name}=…)")
    elif isinstance(value, Varying):
        yield name, value
        if isinstance(value, ByEpoch) and isinstance(value.values, tuple):
            for _, inner in value.values:
                yield from _varying_arguments(inner, name)
    elif isinstance(value, tuple):
        for inner in value:
            yield from _varying_arguments(inner, name)


def _resolve(value: Any, moment: Moment) -> Any:
    """Return an argument or a transform with each varying argument replaced by its value for a batch."""
    if isinstance(value, Varying):
        return value.at(moment)
    if not any(_varying_arguments(value)):
        return value
    if isinstance(value, Transform):
        arguments = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: _resolve(argument, moment) for name, argument in arguments.items()})
    return tuple(_resolve(inner, moment) for inner in value)


def find_varying(chain: Chain, *kinds: type[Varying]) -> str:
    """Return the name of the first argument of these kinds; "" if there is none."""
    return next((name for name, value in chain._varying if isinstance(value, kinds)), "")


def variants_of(chain: Chain, epoch: int, sizes_hw: Sequence[tuple[int, int]] = ((1, 1),)) -> list[Chain]:
    """Return the chain with all arguments that batches of an epoch can have, for orders that give batches one of these
    sizes."""
    lengths = {len(value.values) for _, value in chain._varying if isinstance(value, ByBatch)}
    numbers = {index / length for length in lengths for index in range(length)} or {0.0}  # where a value begins
    return [chain._resolve(Moment(epoch, number + 1e-9, size_hw)) for number in numbers for size_hw in sizes_hw]


def _class_name(entry: object) -> str:
    return type(entry).__name__


def _invalid_entry_message(entry: object, index: int) -> str:
    cls = type(entry) if not isinstance(entry, type) else entry
    text = f"transforms[{index}] is not a gpuload transform: got {one_line(' '.join(repr(entry).split()))}"
    if isinstance(entry, list | tuple):
        return f"{text}, a {cls.__name__} in the list; unpack it with *, as in transforms=[*T.from_torchvision(…), …]"
    if isinstance(entry, type) and issubclass(entry, Transform):
        return f"transforms[{index}] is the class {entry.__name__}; write {entry.__name__}(…)"
    if is_torchvision_transform(entry) and cls.__name__ in ("Compose", "Sequential"):
        return f"{text}, a torchvision chain; write *gpuload.transforms.from_torchvision(…) in its place"
    if cls.__module__.startswith("torchvision."):
        return (
            f"{text}, a torchvision transform; write gpuload.transforms.{cls.__name__}(…) if it exists, or convert "
            "the chain with gpuload.transforms.from_torchvision([…])"
        )
    text = f"{text} ({cls.__name__}); use a transform of gpuload.transforms or a torch nn.Module"
    return f"{text}, or T.Lambda({name_of(entry)}) to call it with a batch" if callable(entry) else text


def check_order(transforms: tuple[Transform, ...]) -> None:
    """Refuse a transform that does not accept the image state that the preceding transforms produce."""
    state, converter = "uint8", -1  # the current image state, and the index of the transform that produced it
    for index, transform in enumerate(transforms):
        if state not in transform.works_on and converter < 0:
            raise ValueError(
                f"transforms in an impossible order: {transform.display_name} (number {index + 1}) takes "
                f"{' or '.join(transform.works_on)} images but gets {state} images; put ToDtype('float32', "
                "scale=True) or Normalize before it"
            )
        if state not in transform.works_on:
            later, earlier = transform.display_name, transforms[converter].display_name
            remedy = "leave one of them out" if later == earlier else f"put {later} before {earlier}"
            raise ValueError(
                f"transforms in an impossible order: {later} (number {index + 1}) cannot come after {earlier} "
                f"(number {converter + 1}), since it takes {' or '.join(transform.works_on)} images but gets {state} "
                f"images; {remedy}"
            )
        if transform.output_state is not None:
            state, converter = transform.output_state, index


def check_fills(transforms: tuple[Transform, ...]) -> None:
    """Refuse fills other than 0 after images are scaled to 0 … 1, since a fill is a pixel value in 0 … 255."""
    scaler: Transform | None = None
    for transform in transforms:
        filler = None if scaler is None else _transform_with_fill(transform)
        if scaler is not None and filler is not None:
            later, earlier = filler.display_name, scaler.display_name
            raise ValueError(
                f"{later}({filler.fill_argument}={getattr(filler, 'fill', None)!r}) is a pixel value in 0 … 255, but "
                f"comes after {earlier}, which scales images to 0 … 1; put {later} before {earlier}, or use "
                f"{filler.fill_argument}=0"
            )
        if transform.output_state is not None and scaler is None and getattr(transform, "scale", True):
            scaler = transform


def _transform_with_fill(transform: Transform) -> Transform | None:
    """Return the transform itself or the first nested transform whose fill is not 0; None if there is none."""
    if any(transform.outside.image):
        return transform
    return next(filter(None, map(_transform_with_fill, transform.children)), None)


def bind_all(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Bind each transform to its position. Once a transform works on images of the final type, all later ones must."""
    bound, state, unit = [], "uint8", 1.0
    first_finished: int | None = None
    for index, transform in enumerate(transforms):
        # A transform that accepts normalized images accepts all images of the final type.
        tail, after_custom = transforms[index:], first_finished is not None and _is_custom(transforms[first_finished])
        is_finished = (
            state == "normalized"
            or first_finished is not None
            or (state == "float" and all("normalized" in later.works_on for later in tail))
        )
        only_custom_follows = all(map(_is_custom, tail))
        bound.append(
            transform.bind(
                ChainPosition(
                    state, is_finished, unit, only_custom_follows=only_custom_follows, after_custom=after_custom
                )
            )
        )
        if first_finished is not None and "normalized" not in transform.works_on and not bound[-1].works_on_finished:
            later, earlier = transform.display_name, transforms[first_finished].display_name
            raise ValueError(
                f"transforms in an impossible order: {later} (number {index + 1}) cannot come after {earlier} (number "
                f"{first_finished + 1}), which works on images of the final type; put {later} before {earlier}"
            )
        if bound[-1].works_on_finished and first_finished is None:
            first_finished = index
            _check_children(transform, index)
        if transform.output_state is not None:
            state = transform.output_state
            unit = 255.0 if getattr(transform, "scale", False) else unit
    return tuple(bound)


def _is_custom(transform: Transform) -> bool:
    """Return whether a transform consists only of the user's own code."""
    return transform.record is Call or bool(transform.children and all(map(_is_custom, transform.children)))


def _check_children(transform: Transform, index: int) -> None:
    """Refuse a transform that works on images of the final type but has a child that needs integer pixel values."""
    for inner in flatten(transform.children):
        if "normalized" not in inner.works_on:
            raise ValueError(
                f"transforms in an impossible order: {transform.display_name} (number {index + 1}) holds "
                f"{inner.display_name}, which needs pixel values in 0 … 255, together with your own transform, which "
                f"gets the floats of ToDtype; put {transform.display_name} before ToDtype, or move "
                f"{inner.display_name} or your transform out of it"
            )


def find_mixing_transforms(transforms: Iterable[Transform]) -> list[MixUp | CutMix]:
    """Return the transforms that mix images, including nested ones."""
    mixing: list[Any] = []
    for transform in flatten(transforms):
        if transform.is_mixing:  # the transform itself, or one of its children
            mixing += find_mixing_transforms(transform.children) or [transform]
    return mixing


def check_mixing(lines: Sequence[tuple[Transform, ...]]) -> None:
    """Refuse chains that mix a sample twice, that mix several views, or whose mixing transforms have different
    arguments for the labels."""
    mixing = find_mixing_transforms(lines[0])
    if not mixing:
        return
    name = mixing[0].display_name
    if len(lines) > 1:
        raise ValueError(
            f"{name} cannot be combined with MultiView: a sample has one label, but its views would be mixed with "
            "different shares; remove one of them"
        )
    _check_once(lines[0], "a chain")
    for other_transform in mixing[1:]:
        for argument in ("num_classes", "labels_getter", "label_smoothing"):
            value, other_value = getattr(mixing[0], argument), getattr(other_transform, argument)
            if value != other_value:
                raise ValueError(
                    f"{name}({argument}={value!r}) and {other_transform.display_name}({argument}={other_value!r}) "
                    "apply to the labels of one batch; pass the same value to both"
                )


def check_combining(lines: Sequence[tuple[Transform, ...]]) -> None:
    """Refuse chains that combine samples with the same transform twice, in several views, or before a transform that
    reads boxes."""
    names = [transform.display_name for line in lines for transform in line if transform.group_size > 1]
    combined_by: list[str] = []  # the names of the preceding transforms that combine samples
    if not names:
        return
    if len(lines) > 1:
        raise ValueError(
            f"{names[0]} cannot be combined with MultiView: a sample has one set of boxes and masks, but each view "
            "would get the boxes and masks of different samples; remove one of them"
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"a chain can have at most one {name}, but this chain has {names.count(name)}; keep only one"
            )
    for transform in lines[0]:
        if transform.group_size > 1:
            combined_by.append(transform.display_name)
        if combined_by and transform.reads_boxes:
            raise ValueError(
                f"{transform.display_name} needs the boxes of each sample, which are no longer known after "
                f"{combined_by[-1]} has combined several samples; put {transform.display_name} before {combined_by[-1]}"
            )
        if transform.drops_points and len(combined_by) < len(names):
            raise ValueError(
                f"{transform.display_name} cannot come before {names[-1]}, which joins the keypoints of several "
                f"samples; put it after {names[-1]}"
            )
        if transform.drops_points and getattr(transform, "labels_getter", None) is not None:
            raise ValueError(
                f"{transform.display_name}(labels_getter=…) cannot be combined with {names[-1]}, which joins only "
                f"fields that belong to boxes; remove {names[-1]} or labels_getter"
            )


def _check_once(transforms: Iterable[Transform], container: str) -> None:
    mixing = [transform for transform in flatten(transforms) if transform.is_mixing]
    if len(mixing) > 1:
        raise ValueError(
            f"{container} can mix an image only once, but has {mixing[0].display_name} and {mixing[1].display_name}; "
            "put them into one RandomChoice, which applies one of them to each sample"
        )
    for transform in mixing:
        inner_transforms = flatten(transform.children)
        other_transforms = [inner for inner in inner_transforms if not (inner.is_mixing or isinstance(inner, Identity))]
        if other_transforms:
            mixer = next(inner.display_name for inner in inner_transforms if inner.is_mixing)
            raise ValueError(
                f"{transform.display_name} cannot hold {other_transforms[0].display_name} together with {mixer}, which "
                f"mixes images after all other transforms; put {other_transforms[0].display_name} into a separate "
                f"{transform.display_name}"
            )
        alternatives = transform.children if isinstance(transform, RandomChoice) else [transform.children]
        for alternative in alternatives:
            _check_once([alternative] if isinstance(alternative, Transform) else alternative, transform.display_name)
