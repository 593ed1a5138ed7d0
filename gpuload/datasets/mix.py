"""`Mix`: several data sets, of which each block of an epoch has the same shares.

Here is what it is made of; `gpuload.order.mixture` says which sample is at which position. Made in the main process,
copied to workers. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Final

from gpuload.datasets.joined import Dataset, Joined, Mapped, has_samples
from gpuload.datasets.kinds import check_dataset, draws_nothing, is_iterable
from gpuload.datasets.resident import DeviceCached, datasets_in
from gpuload.datasets.sample import Boxes, Encoded, Image, Keypoints, Mask
from gpuload.datasets.tree import LEAF, Structure, describe, flatten

__all__ = ["Mix", "find_mix"]

MOST_PARTS: Final = 2**31  # the sum of weights as integers; so a share of a remainder can be computed in 64 bits
DENOMINATOR: Final = 10**6  # a weight within 1e-12 of such a fraction is that fraction: 0.7 is 7/10
KINDS: Final = (  # of leaves; any other may be an image or a target of another library
    ((Encoded, Image), "image"),
    (Mask, "mask"),
    (Boxes, "boxes"),
    (Keypoints, "keypoints"),
    ((int, float, str, bytes, type(None)), "value"),
)


class Mix(Joined):
    """Several map-style data sets, mixed by weights: with (0.7, 0.3), 7 of 10 samples of each batch are of the first
    one, about.

    Each 1,024 positions of an epoch hold the exact shares (less than one sample of a share is carried on to the next
    positions), in an order that is shuffled by the seed. Each data set goes through its own samples in shuffled order,
    none twice before all had their turn, then through a new order of them; the next epoch continues where this one
    stopped. With ``shuffle=False`` each data set goes through its samples in their own order. A sample that
    ``on_error="replace"`` replaces is replaced by one of the same data set.

    A sample's index is its number in the data sets one after the other, as of what ``+`` makes; ``len(mix)`` is the
    number of all samples, `length` how many positions an epoch has. (An epoch of fewer than 1,024 positions has the
    shares only about, but several of them together exactly.)

    Args:
        datasets: what to mix, with samples of one form. ``dataset.map(fn)`` brings them into one.
        weights: how often each data set is drawn from, positive numbers in any scale; those of ``[7, 3]`` are the
            shares 0.7 and 0.3.
        length: the positions of an epoch. Default: the sum of the lengths.

    Raises:
        TypeError: a data set is iterable, or no data set; the weights are no numbers; samples of gpuload's own data
            sets have different forms (their first samples are read).
        ValueError: a data set is empty; there are more or fewer weights than data sets, or they are not finite and
            positive; `length` is not positive.

    Example:
        >>> import gpuload as gl, numpy as np
        >>> red, blue = (["red"] * 1000, ["blue"] * 100)
        >>> mix = gl.Mix([red, blue], weights=[0.75, 0.25])
        >>> len(mix), mix.length
        (1100, 1100)
        >>> loader = gl.Loader(mix, batch_size=8, shuffle=True, num_workers=0, device="cpu")
        >>> next(iter(loader))
        ['red', 'red', 'blue', 'red', 'blue', 'red', 'red', 'red']
    """

    def __init__(self, datasets: Iterable[Any], weights: Sequence[float], *, length: int | None = None) -> None:
        datasets = _checked(datasets)
        super().__init__(datasets)
        self.sizes = tuple(map(len, datasets))
        self.weights = _numbers(weights, len(datasets))
        self.parts = _whole_parts(self.weights)
        if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
            raise TypeError(f"Mix(length=…) must be an integer of at least 1, or None, got {length!r}")
        if length is not None and length < 1:
            raise ValueError(f"Mix(length=…) must be at least 1, got {length}")
        self.length = len(self) if length is None else length
        _check_forms(datasets)

    def map(self, fn: Callable[[Any], Any]) -> Mix:
        """Return this mix with each sample changed by a function, in the workers."""
        return Mix([Mapped(dataset, fn) for dataset in self.datasets], self.weights, length=self.length)

    __add__ = Dataset.__add__  # a Mix is not taken apart

    def __repr__(self) -> str:
        return f"Mix({self.datasets!r}, weights={self.weights!r}, length={self.length})"


def find_mix(dataset: Any) -> Mix | None:
    """Return the `Mix` that a loader's dataset is, or is a `DeviceCached` of; None if there is none.

    Raises:
        ValueError: there is one inside of another dataset, where its weights would be without effect.
    """
    inner = dataset.dataset if isinstance(dataset, DeviceCached) else dataset
    parts = inner.datasets if isinstance(inner, Mix) else [inner]
    if any(isinstance(part, Mix) for outer in parts for part in datasets_in(outer)):
        name = type(inner).__name__
        raise ValueError(
            f"there is a Mix inside of {name}, where its weights would have no effect; mix last: put {name} around the "
            "data sets in Mix([…]), or only a DeviceCached around it"
        )
    return inner if isinstance(inner, Mix) else None


def _checked(datasets: Iterable[Any]) -> list[Any]:
    if isinstance(datasets, str | bytes | dict) or not isinstance(datasets, Iterable):
        raise TypeError(f"Mix() takes a list of data sets, got {type(datasets).__name__}")
    datasets = list(datasets)
    if not datasets:
        raise ValueError("Mix() takes at least one data set, got an empty list")
    for number, dataset in enumerate(datasets):
        check_dataset(dataset)
        name, kind = f"datasets[{number}]", type(dataset).__name__
        if is_iterable(dataset):
            raise TypeError(
                f"Mix() takes map-style data sets, but {name} is of type {kind}, which is iterable and defines "
                "its own order; mix in its __iter__"
            )
        if not has_samples(dataset):
            raise TypeError(
                f"Mix() takes map-style data sets, with a length and an index for each sample, but {name} is of type "
                f"{kind}"
            )
        if not len(dataset):
            raise ValueError(
                f"Mix() takes data sets with samples, but {name}, of type {kind}, has the length 0; leave it out"
            )
    return datasets


def _numbers(weights: Any, count: int) -> list[float]:
    try:
        weights = [*weights]
    except TypeError:
        raise TypeError(f"Mix(weights=…) must be a list of numbers, one for each data set, got {weights!r}") from None
    if len(weights) != count:
        raise ValueError(f"Mix(weights=…) must be one number for each of the {count} data sets, got {len(weights)}")
    numbers: list[float] = []
    for at, weight in enumerate(weights):
        try:
            numbers.append(float(weight))
        except (TypeError, ValueError):
            raise TypeError(f"Mix(weights=…) must be numbers, but weights[{at}] is {weight!r}") from None
        if not 0 < numbers[at] < math.inf:
            raise ValueError(
                f"Mix(weights=…) must be finite and greater than 0, but weights[{at}] is {numbers[at]}; leave out a "
                "data set that is not to be read"
            )
    return numbers


def _whole_parts(weights: list[float]) -> tuple[int, ...]:
    """Return weights as integers in the same proportions, to one part of `MOST_PARTS` if their sum would be larger."""
    total = sum(map(Fraction, weights))
    shares = [_simple(Fraction(weight)) for weight in weights]
    scale = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * scale) for share in shares]
    parts = [part // math.gcd(*parts) for part in parts]
    if sum(parts) > MOST_PARTS:
        parts = [max(1, int(Fraction(weight) / total * MOST_PARTS)) for weight in weights]
    return tuple(parts)


def _simple(share: Fraction) -> Fraction:
    near = share.limit_denominator(DENOMINATOR)
    return near if abs(near - share) <= share / 10**12 else share


def _check_forms(datasets: list[Any]) -> None:
    """Refuse data sets whose first samples have different forms. Only gpuload's own are looked at, whose files this
    process may open: a data set of the user's may open a file that workers could then not be sent."""
    first: tuple[list[Any], str] | None = None
    for number, dataset in enumerate(datasets):
        if not draws_nothing(dataset, stored=True):
            continue
        leaves: list[Any] = []
        try:
            form = flatten(dataset[0], leaves)
        except Exception:  # a damaged file: its sample fails when it comes
            continue
        parts = _parts(form, iter(leaves))
        name = f"datasets[{number}] ({type(dataset).__name__}) gives {describe(form, leaves)}"
        if first is None:
            first = parts, name
        elif not _alike(parts, first[0]):
            raise TypeError(
                f"Mix() takes data sets whose samples have one form, but {first[1]}, and {name}; bring them into one "
                "with .map(fn)"
            )


def _parts(node: Structure, leaves: Iterator[Any]) -> list[Any]:
    """Return the containers of a sample, depth first, and the kind of each leaf, "" if unknown. A list may have any
    length, so what is in one does not count."""
    if node == LEAF:
        leaf = next(leaves)
        return [next((kind for types, kind in KINDS if isinstance(leaf, types)), "")]
    kind, cls, keys, children = node
    inside = [part for child in children for part in _parts(child, leaves)]
    return [(kind, cls, keys)] if kind == "list" else [(kind, cls, keys, len(children)), *inside]


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Return whether samples of these parts may be in one batch."""
    return len(one) == len(other) and all(
        a == b or ("" in (a, b) and isinstance(a, str) and isinstance(b, str)) for a, b in zip(one, other, strict=True)
    )
