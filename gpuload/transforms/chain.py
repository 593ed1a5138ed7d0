"""A chain of transforms: its order checked, its draws made, and what of an image it needs to see.

A `Chain` is made once, in the main process, and pickled to every worker (a few hundred bytes, no torch). It is
immutable. Transform i draws from the counter stream i of `gpuload.rng`, so a draw depends on the epoch's key, the
sample's position, the transform's place in the chain and the image's size, and on nothing else.

**The decode plan.** Going backwards from the whole result, every transform says which part (*window*) of its input it
needs; what comes out at the front is the region that a worker decodes. A crop narrows the window, a flip mirrors it, a
resize widens it by the support of its filter, and a transform that looks at the whole image (contrast) resets it. A
backend runs each transform from window to window, so the result is that of the whole chain on the whole image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from gpuload.rng import Key, uniforms
from gpuload.transforms.base import Params, Transform, full_windows, take

__all__ = ["Chain", "Draws"]


@dataclass(frozen=True)
class Draws:
    """What was drawn for the images of a batch.

    `params[i]` (also ``draws[i]``) are the parameters of transform i, or None; `sizes_hw[i]` int64 (B, 2) are the
    sizes of its inputs, and ``sizes_hw[-1]`` those of the results.
    """

    transforms: tuple[Transform, ...]
    params: tuple[Params | None, ...]
    sizes_hw: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        """How many images."""
        return len(self.sizes_hw[0])

    def __getitem__(self, transform: int) -> Any:
        return self.params[transform]

    @cached_property
    def windows_tlhw(self) -> tuple[np.ndarray, ...]:
        """The part of the input of each transform that matters, int64 (B, 4); one more, the whole, for the result."""
        windows = [full_windows(self.sizes_hw[-1])]
        for transform, params, sizes in zip(
            reversed(self.transforms), reversed(self.params), reversed(self.sizes_hw[:-1]), strict=True
        ):
            if transform.needs_whole:
                windows.append(full_windows(sizes))
            else:
                windows.append(transform.input_windows(params, sizes, windows[-1]))
        return tuple(reversed(windows))

    def take(self, rows: np.ndarray) -> Draws:
        """The draws of some of the images."""
        return Draws(
            self.transforms,
            tuple(take(params, rows) for params in self.params),
            tuple(sizes[rows] for sizes in self.sizes_hw),
        )


class Chain:
    """Transforms in the order in which they are applied.

    Args:
        transforms: from `gpuload.transforms`; the last one may be a torch `nn.Module`, which is applied to the batch.

    Attributes:
        transforms: the declarations, as a tuple.
        module: the trailing `nn.Module`, or None. It does not travel when a chain is pickled.

    Raises:
        TypeError: something is no transform.
        ValueError: the transforms are in an impossible order.

    Example:
        >>> from gpuload import transforms as T
        >>> Chain([T.RandomResizedCrop(224), T.Normalize([0.5], [0.5])])
        Chain([RandomResizedCrop(size=(224, 224)), Normalize(mean=(0.5,), std=(0.5,))])
    """

    transforms: tuple[Transform, ...]
    module: Any

    def __init__(self, transforms: Iterable[Any] | None = ()) -> None:
        if isinstance(transforms, Transform) or _is_module(transforms):
            raise TypeError(f"transforms must be a list, got one {type(transforms).__name__}; write [{transforms!r}]")
        try:
            found = list(transforms or ())
        except TypeError:
            raise TypeError(f"transforms must be a list of transforms, got {_name(transforms)}") from None
        self.module = None
        for number, entry in enumerate(found):
            if _is_module(entry):
                if number < len(found) - 1:
                    raise ValueError(
                        f"transforms in an impossible order: {_name(found[number + 1])} (number {number + 2}) cannot "
                        f"come after the module {_name(entry)} (number {number + 1}), which is applied to the finished "
                        "batch; put the module last"
                    )
                self.module = entry
            elif not isinstance(entry, Transform):
                raise TypeError(_no_transform(entry, number))
        self.transforms = tuple(found if self.module is None else found[:-1])
        self._check_order()

    def _check_order(self) -> None:
        state, maker = "uint8", -1
        for number, transform in enumerate(self.transforms):
            if state not in transform.works_on:
                late, early = _name(transform), _name(self.transforms[maker])
                remedy = "leave one of them out" if late == early else f"put {late} before {early}"
                raise ValueError(
                    f"transforms in an impossible order: {late} (number {number + 1}) cannot come after {early} "
                    f"(number {maker + 1}), since it takes {' or '.join(transform.works_on)} images and gets {state} "
                    f"ones; {remedy}"
                )
            if transform.makes is not None:
                state, maker = transform.makes, number

    def draw(self, key: Key, positions: np.ndarray, sizes_hw: np.ndarray) -> Draws:
        """Draw the parameters of all transforms.

        Args:
            key: of the epoch.
            positions: int64 (B,), the places of the samples in the epoch's order.
            sizes_hw: int64 (B, 2), the sizes of their images.

        Raises:
            DrawError: a transform cannot be drawn for an image, which its `row` names.
        """
        return self._draw(self.transforms, key, positions, sizes_hw)

    def regions(self, key: Key, positions: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        """The part of each image that has to be decoded, int64 (B, 4): top, left, height, width.

        Arguments and errors as for `draw`, of which it makes only what it needs: up to the last transform that the
        region hangs on, or that may refuse an image, since an image is refused where it is read.
        """
        lead = self.transforms[: self._lead]
        if not lead:
            return full_windows(np.asarray(sizes_hw, np.int64))
        return self._draw(lead, key, positions, sizes_hw).windows_tlhw[0]

    @cached_property
    def _lead(self) -> int:
        """How many transforms a worker draws: up to the last crop before one that needs the whole image, on which the
        decode region hangs, or the last that may refuse an image."""
        lead = 0
        for number, transform in enumerate(self.transforms):
            if transform.needs_whole:
                break
            if transform.crops:
                lead = number + 1
        return max([lead, *(number + 1 for number, transform in enumerate(self.transforms) if transform.may_refuse)])

    @staticmethod
    def _draw(transforms: tuple[Transform, ...], key: Key, positions: np.ndarray, sizes_hw: np.ndarray) -> Draws:
        positions, sizes = np.asarray(positions, np.int64), [np.asarray(sizes_hw, np.int64)]
        if sizes[0].shape != (len(positions), 2):
            raise ValueError(
                f"sizes_hw must be of shape (B, 2) beside {len(positions)} positions, got {sizes[0].shape}"
            )
        params = []
        for stream, transform in enumerate(transforms):
            params.append(transform.draw(partial(uniforms, key, positions, stream), sizes[-1]))
            sizes.append(transform.output_sizes(params[-1], sizes[-1]))
        return Draws(transforms, tuple(params), tuple(sizes))

    @property
    def output_size_hw(self) -> tuple[int, int] | None:
        """The size of every result, or None where it hangs on the image."""
        size = None
        for transform in self.transforms:
            size = transform.output_size(size)
        return size

    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ between chains with different transforms or arguments."""
        import hashlib  # workers never need it

        parts = [
            (type(t).__name__, *((field.name, getattr(t, field.name)) for field in fields(t) if field.compare))
            for t in self.transforms
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

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
        return Chain, (self.transforms,)

    def __repr__(self) -> str:
        names = [repr(transform) for transform in self.transforms]
        if self.module is not None:
            names.append(f"<module {_name(self.module)}>")
        return f"Chain([{', '.join(names)}])"


def _is_module(entry: Any) -> bool:
    """Whether it is a torch module; without torch nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(entry, torch.nn.Module)


def _name(entry: Any) -> str:
    return type(entry).__name__


def _no_transform(entry: Any, number: int) -> str:
    kind = type(entry) if not isinstance(entry, type) else entry
    text = f"transforms[{number}] is no transform of gpuload: got {entry!r}"
    if isinstance(entry, type) and issubclass(entry, Transform):
        return f"transforms[{number}] is the class {entry.__name__}; write {entry.__name__}(…)"
    if kind.__module__.startswith("torchvision."):
        return f"{text}, which is torchvision's; write gpuload.transforms.{kind.__name__}(…), where there is one"
    return f"{text} ({kind.__name__}); write one of gpuload.transforms, or a torch nn.Module as the last one"
