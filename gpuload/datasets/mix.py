"""`Mix`: several datasets, each of which contributes a fixed share of every 1,024 samples, of each batch, or of the
batches.

This module holds the datasets and their weights; `gpuload.order.mixture` computes the sample for each position. A
`Mix` is created in the main process and copied to workers. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, get_args

import numpy as np

from gpuload.checks import integer, numbers, one_of
from gpuload.datasets.joined import Dataset, Joined, Mapped, is_map_style, walk_datasets
from gpuload.datasets.kinds import check_dataset, is_deterministic, is_iterable
from gpuload.datasets.sample import Boxes, Encoded, Image, Keypoints, Mask
from gpuload.datasets.tree import LEAF, Structure, describe, flatten

__all__ = ["Mix", "PartsByEpoch", "Per", "find_mix"]

Per = Literal["sample", "batch", "dataset"]

MAX_WEIGHT_SUM: Final = 2**31  # for integer weights; a remainder times a weight must fit into 64 bits
# A weight within 1e-12 of a fraction whose denominator is at most this is replaced by the fraction: 0.7 by 7/10.
MAX_DENOMINATOR: Final = 10**6
KINDS: Final = (  # kinds of leaves, by type; a leaf of any other type may be an image or a target of another library
    ((Encoded, Image), "image"),
    (Mask, "mask"),
    (Boxes, "boxes"),
    (Keypoints, "keypoints"),
    ((int, float, str, bytes, type(None)), "value"),
)


@dataclass(frozen=True, slots=True)
class PartsByEpoch:
    """Weights by epoch of `count` datasets, as integers. `weights` is the result of `by_epoch`, which this package
    cannot import."""

    weights: Any
    count: int

    def __post_init__(self) -> None:
        values = self.weights.values
        for epoch in [first for first, _ in values] if isinstance(values, tuple) else [0]:
            self.at(epoch)

    def at(self, epoch: int) -> tuple[int, ...]:
        """Return the weights in an epoch. They can be 0, but not all of them."""
        name = f"Mix(weights={self.weights!r}) in epoch {epoch}"
        weights = _check_weights(name, self.weights.at_epoch(epoch), self.count, minimum=0)
        if not any(weights):
            raise ValueError(f"{name} must have a weight above 0, got {weights}")
        return _to_integer_parts(weights)

    def __str__(self) -> str:
        return repr(self.weights)


class Mix(Joined):
    """Several map-style datasets, mixed by weights: with (0.7, 0.3), about 7 of 10 samples in each batch come from the
    first dataset.

    Each run of 1,024 positions contains exactly these shares, in an order that depends on the seed; a fraction of a
    sample is carried over to the next 1,024 positions. Each dataset goes through its samples in shuffled order,
    without repetition, and then starts again with a new order; the next epoch continues where the previous one stopped.
    With ``shuffle=False``, each dataset keeps the order of its samples. A sample that fails with
    ``on_error="replace"`` is replaced by a sample of the same dataset.

    With ``per="batch"``, each batch of each rank contains the shares, rounded up or down, and with ``per="dataset"``,
    each batch has samples of one dataset, the same on all ranks in the same step. Rounding is carried over from batch
    to batch, and restarts with each epoch. The order then depends on the batch size and the number of ranks, so a state
    from the middle of an epoch can be resumed only with the same ones.

    Indices refer to the concatenated datasets, as with ``+``. ``len(mix)`` is the total number of samples, `length`
    the number of positions in an epoch. (With ``per="sample"``, the shares are only approximate in an epoch of fewer
    than 1,024 positions, but exact over several such epochs.)

    Args:
        datasets: the datasets, whose samples must have the same structure; convert them with ``dataset.map(fn)``.
        weights: the relative frequency of each dataset, positive numbers on any scale: ``[7, 3]`` gives the shares
            0.7 and 0.3. Or such numbers by epoch, ``T.by_epoch({0: [7, 3], 10: [1, 1]})``, of which some can be 0;
            then the rounding of shares restarts with each epoch.
        length: the number of positions in an epoch. Default: the total number of samples.
        per: what has the shares: ``"sample"`` (each run of 1,024 samples), ``"batch"`` (each batch) or ``"dataset"``
            (the batches of an epoch, each with samples of one dataset). With the last two, the ranks' batches at the
            end of an epoch are filled up with the next samples instead of the epoch's first ones (``uneven="pad"``).

    Raises:
        TypeError: an item is an iterable dataset, or is not a dataset; a weight is not a number; the first samples of
            gpuload's datasets differ in structure (only gpuload's datasets are checked).
        ValueError: a dataset is empty; the number of weights differs from the number of datasets; a weight is not
            finite and positive; `length` is not positive.

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

    def __init__(
        self,
        datasets: Iterable[Any],
        weights: Sequence[float],
        *,
        length: int | None = None,
        per: Per = "sample",
    ) -> None:
        self.per: Per = one_of("Mix(per=…)", per, get_args(Per))
        datasets = _check_datasets(datasets, self.per)
        super().__init__(datasets)
        self.sizes = tuple(map(len, datasets))
        is_by_epoch = hasattr(weights, "at_epoch")
        self.parts_by_epoch = PartsByEpoch(weights, len(datasets)) if is_by_epoch else None
        if self.parts_by_epoch is None:
            self.weights = _check_weights("Mix(weights=…)", weights, len(datasets), above=0)
            self.parts = _to_integer_parts(self.weights)
        else:
            self.weights, self.parts = weights, self.parts_by_epoch.at(0)
        self.length = len(self) if length is None else integer("Mix(length=…)", length, minimum=1)
        _check_structures(datasets)

    def map(self, fn: Callable[[Any], Any]) -> Mix:
        """Return this mix with a function applied to each sample, in the workers."""
        datasets = [Mapped(dataset, fn) for dataset in self.datasets]
        return Mix(datasets, self.weights, length=self.length, per=self.per)

    def source_of(self, indices: Any) -> np.ndarray:
        """Return the number of the dataset that each sample comes from, such as 1 for ``datasets[1]``.

        Args:
            indices: indices of samples, integers of any shape, such as ``BatchInfo.indices``.

        Returns:
            int64, of the same shape.

        Raises:
            TypeError: the indices are not integers.
            IndexError: an index is negative, or not below ``len(mix)``.
        """
        array = np.asarray(indices)
        if array.dtype.kind not in "iu":
            raise TypeError(f"Mix.source_of() takes integers, as from BatchInfo.indices, got {array.dtype}")
        if invalid := array[(array < 0) | (array >= len(self))][:1].tolist():
            raise IndexError(f"Mix.source_of() takes indices in 0 … {len(self) - 1}, got {invalid[0]}")
        return np.searchsorted(self.cumulative_sizes, array, side="right")

    __add__ = Dataset.__add__  # `Joined.__add__` would concatenate the datasets without their weights

    def __repr__(self) -> str:
        per = "" if self.per == "sample" else f", per={self.per!r}"
        return f"Mix({self.datasets!r}, weights={self.weights!r}, length={self.length}{per})"


def find_mix(dataset: object) -> Mix | None:
    """Return the loader's dataset if it is a `Mix`; otherwise None.

    Raises:
        ValueError: a `Mix` is inside another dataset, where its weights would have no effect.
    """
    parts = dataset.datasets if isinstance(dataset, Mix) else [dataset]
    if any(isinstance(part, Mix) for outer in parts for part in walk_datasets(outer)):
        name = type(dataset).__name__
        remedy = (
            "replace the inner Mix by its datasets, each with its share of the inner Mix's weight"
            if isinstance(dataset, Mix)
            else f"put Mix([…]) outermost, with {name} around its datasets"
        )
        raise ValueError(f"there is a Mix inside {name}, where its weights would have no effect; {remedy}")
    return dataset if isinstance(dataset, Mix) else None


def _check_datasets(datasets: Iterable[Any], per: Per) -> list[Any]:
    if isinstance(datasets, str | bytes | dict) or not isinstance(datasets, Iterable):
        raise TypeError(f"Mix() takes a list of datasets, got {type(datasets).__name__}")
    datasets = list(datasets)
    if not datasets:
        raise ValueError("Mix() takes at least one dataset, got an empty list")
    for i, dataset in enumerate(datasets):
        check_dataset(dataset)
        name, kind = f"datasets[{i}]", type(dataset).__name__
        if is_iterable(dataset):
            reason = ", and whose batches depend on its workers" if per != "sample" else ""
            raise TypeError(
                f"Mix() takes map-style datasets, but {name} is of type {kind}, which is iterable and defines "
                f"its own order{reason}; mix inside its __iter__"
            )
        if not is_map_style(dataset):
            raise TypeError(
                f"Mix() takes map-style datasets, which have __len__ and __getitem__, but {name} is of type {kind}"
            )
        if not len(dataset):
            raise ValueError(f"Mix() takes datasets with samples, but {name}, of type {kind}, has length 0; remove it")
    return datasets


def _check_weights(name: str, weights: Any, count: int, **bounds: Any) -> list[float]:
    weights = list(numbers(name, weights, **bounds))
    if len(weights) != count:
        raise ValueError(f"{name} must be one number for each of the {count} datasets, got {len(weights)}")
    return weights


def _to_integer_parts(weights: list[float]) -> tuple[int, ...]:
    """Convert weights to integers in the same proportions. If their sum would exceed `MAX_WEIGHT_SUM`, the proportions
    are rounded to multiples of 1 / `MAX_WEIGHT_SUM`."""
    total = sum(map(Fraction, weights))
    fractions = [_simplify(Fraction(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    parts = [int(fraction * scale) for fraction in fractions]
    parts = [part // math.gcd(*parts) for part in parts]
    if sum(parts) > MAX_WEIGHT_SUM:
        parts = [max(weight > 0, int(Fraction(weight) / total * MAX_WEIGHT_SUM)) for weight in weights]
    return tuple(parts)


def _simplify(weight: Fraction) -> Fraction:
    fraction = weight.limit_denominator(MAX_DENOMINATOR)
    return fraction if abs(fraction - weight) <= weight / 10**12 else weight


def _check_structures(datasets: list[Any]) -> None:
    """Refuse datasets whose first samples differ in structure. Only gpuload's datasets are checked: reading a sample
    of a user's dataset may open a file, after which the dataset could not be sent to workers."""
    reference: tuple[list[Any], str] | None = None
    for i, dataset in enumerate(datasets):
        if not is_deterministic(dataset, allow_plain_containers=True):
            continue
        leaves: list[Any] = []
        try:
            structure = flatten(dataset[0], leaves)
        except Exception:  # a damaged file is reported when its sample is loaded
            continue
        parts = _structure_parts(structure, iter(leaves))
        description = f"datasets[{i}] ({type(dataset).__name__}) yields {describe(structure, leaves)}"
        if reference is None:
            reference = parts, description
        elif not _are_compatible(parts, reference[0]):
            raise TypeError(
                f"Mix() takes datasets whose samples have the same structure, but {reference[1]}, and {description}; "
                "convert them with .map(fn)"
            )


def _structure_parts(node: Structure, leaves: Iterator[object]) -> list[Any]:
    """Return a sample's containers and the kinds of its leaves, in depth-first order; an unknown kind is "". Lists can
    have any length, so their content is ignored."""
    if node == LEAF:
        leaf = next(leaves)
        return [next((kind for types, kind in KINDS if isinstance(leaf, types)), "")]
    kind, cls, keys, children = node
    child_parts = [part for child in children for part in _structure_parts(child, leaves)]
    return [(kind, cls, keys)] if kind == "list" else [(kind, cls, keys, len(children)), *child_parts]


def _are_compatible(first: list[Any], second: list[Any]) -> bool:
    """Return whether samples with these parts can be in one batch."""
    return len(first) == len(second) and all(
        a == b or ("" in (a, b) and isinstance(a, str) and isinstance(b, str))
        for a, b in zip(first, second, strict=True)
    )
