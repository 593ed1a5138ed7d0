"""How samples become batches, and in which order: one group of a `Loader`'s options. Main process; no torch."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gpuload.datasets.kinds import check_dataset, is_iterable
from gpuload.datasets.mix import Mix, find_mix
from gpuload.order.blocks import Blocks, BlockShuffle
from gpuload.order.mixture import Mixture
from gpuload.order.permutation import cumulate
from gpuload.order.ranks import check_rank
from gpuload.order.shares import Uneven

__all__ = ["OrderOptions", "check_flag", "check_integer"]

MIXES = ("MixUp", "CutMix")  # their partners need not be neighbours in the epoch's order


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """Options that decide which samples are in which batch.

    Args:
        mixes: the transform that puts neighbouring samples of a batch together; "" for none.
        group: how many; 1 for none. All others are as for `Loader`.

    Attributes:
        batch_size: None for single samples, or with a batch_sampler.
        seed: as given, or the generator's.
        warned: what the user was warned of already, once for a loader.
        promised: how many samples an iterable dataset has, by the last ``len(loader)``.

    Raises:
        TypeError, ValueError: an argument is wrong, or two exclude each other.
    """

    dataset: Any = field(repr=False)
    batch_size: int | None = 1
    shuffle: bool | BlockShuffle = False  # or "block", the defaults
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    in_order: bool = True
    seed: int = None  # pyright: ignore[reportAssignmentType]
    generator: Any = None
    rank: int | None = None
    world_size: int | None = None
    uneven: Uneven = "pad"
    weights: Any = field(default=None, repr=False)
    repeats: int = 1
    info: bool = False
    mixes: str = ""
    group: int = 1
    warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    promised: deque[int] = field(default_factory=lambda: deque(maxlen=1), init=False, repr=False, compare=False)
    _blocks: deque[Blocks] = field(default_factory=lambda: deque(maxlen=1), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffle", _shuffle(self.shuffle))
        for name in ("drop_last", "in_order", "info"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        self._check_dataset()
        size = None if self.batch_size is None else check_integer("batch_size", self.batch_size, 1)
        seed = _seed(self.seed, self.generator)
        self._check_groups()
        repeats = check_integer("repeats", self.repeats, 1)
        self._check_ways()
        self._check_mix()
        checked = {"batch_size": None if self.batch_sampler is not None else size, "seed": seed, "repeats": repeats}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_rank(self.rank, self.world_size)
        _ = self.cumulative, self.blocks, self.mixture
        if repeats != 1 and self.mixes not in ("", *MIXES):
            raise ValueError(
                f"repeats={repeats} does not go with {self.mixes}, which puts together the samples at neighbouring "
                "positions: they would be the same sample, or on different ranks; leave one of them out"
            )

    @property
    def iterable(self) -> bool:
        """The dataset itself decides what comes next."""
        return is_iterable(self.dataset)

    @property
    def sampled(self) -> bool:
        """The user's sampler decides which keys are in a batch."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def planned(self) -> bool:
        """A map dataset in gpuload's own order."""
        return not self.iterable and not self.sampled

    @property
    def single(self) -> bool:
        """Samples come one by one."""
        return self.batch_size is None and self.batch_sampler is None

    @property
    def size(self) -> int:
        """Samples in a batch; 1 if not known."""
        return self.batch_size or 1

    @property
    def samples(self) -> int | None:
        """The dataset's length, of a `Mix` that of an epoch; or None."""
        try:
            return None if self.iterable else len(self.dataset) if self.mix is None else self.mix.length
        except (TypeError, NotImplementedError):
            return None

    @property
    def mix(self) -> Mix | None:
        """The `Mix` that is read; None if there is none."""
        return None if self.iterable else find_mix(self.dataset)

    @cached_property
    def mixture(self) -> Mixture | None:
        """Say how the `Mix` is mixed; None if there is none."""
        if (mix := self.mix) is None:
            return None
        shuffle = self.shuffle if isinstance(self.shuffle, BlockShuffle) else None
        blocks = () if shuffle is None else tuple(Blocks.of(dataset, shuffle) for dataset in mix.datasets)
        return Mixture(mix.sizes, mix.parts, mix.length, blocks)

    def peers(self, index: Any) -> tuple[int, int]:
        """Return where the indices of the samples begin that may replace the one of this index, and their number."""
        if (mix := self.mix) is None:
            return 0, len(self.dataset)
        which = bisect_right(mix.cumulative_sizes, index)
        return mix.cumulative_sizes[which] - mix.sizes[which], mix.sizes[which]

    @cached_property
    def cumulative(self) -> np.ndarray | None:
        """The weights for `Weighted`."""
        return None if self.weights is None else cumulate(self.weights, len(self.dataset))

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of a block shuffle; None for another order."""
        if not isinstance(self.shuffle, BlockShuffle) or not self.planned or self.mix is not None:
            return None
        if not self._blocks or self._blocks[-1].n != len(self.dataset):  # it may have grown between two epochs
            self._blocks.append(Blocks.of(self.dataset, self.shuffle))
        return self._blocks[-1]

    def _check_dataset(self) -> None:
        dataset = self.dataset
        if isinstance(dataset, os.PathLike) or (
            isinstance(dataset, str) and (os.sep in dataset or os.path.exists(dataset))
        ):
            path = os.fspath(dataset)
            raise TypeError(
                f"the dataset is a path, {path!r}; to read the images of a folder pass gpuload.ImageFolder({path!r}), "
                f"with a folder for each class, or gpuload.ImageFiles({path!r}), without labels"
            )
        check_dataset(dataset)
        if not self.iterable:
            for name in ("__getitem__", "__len__")[: 1 if self.sampled else 2]:
                if not hasattr(dataset, name):
                    raise TypeError(
                        f"the dataset must have {name} (a map-style dataset) or __iter__ (an iterable one), got "
                        f"{type(dataset).__name__}"
                        + (f": {dataset!r}" if isinstance(dataset, str | int | None) else "")
                    )
        elif hasattr(dataset, "__next__") and not hasattr(dataset, "__getitem__"):  # torch's IterableDataset has both
            raise TypeError(
                f"the dataset is a {type(dataset).__name__}, which can be iterated over once only; pass an object "
                "whose __iter__ starts again (an IterableDataset), or a list"
            )

    def _check_ways(self) -> None:
        """Refuse ways to make batches that exclude each other."""
        batch_size, sampler, batch_sampler = self.batch_size, self.sampler, self.batch_sampler
        shuffle, weights, repeats, uneven = self.shuffle, self.weights, self.repeats, self.uneven
        conditions = {
            f"shuffle={shuffle!r}": bool(shuffle),
            "sampler": sampler is not None,
            "batch_sampler": batch_sampler is not None,
            "weights": weights is not None,
            f"repeats={repeats}": repeats != 1,
            f"uneven={uneven!r}": uneven != "pad",
        }
        named = [name for name, is_given in conditions.items() if is_given]
        if self.iterable and named:
            raise ValueError(
                f"{named[0]} does not apply to an iterable dataset, which defines its own order; leave it out"
            )
        if sampler is not None and batch_sampler is not None:
            raise ValueError("sampler and batch_sampler are both given; a batch_sampler has a sampler of its own")
        others = [name for name in named if name not in ("sampler", "batch_sampler")]
        if (sampler is not None or batch_sampler is not None) and others:
            what = "sampler" if sampler is not None else "batch_sampler"
            raise ValueError(
                f"{others[0]} cannot be combined with a {what}, which defines its own order; leave one of them out"
            )
        if batch_sampler is not None and (batch_size not in (1, None) or self.drop_last):
            what = "drop_last=True" if self.drop_last else f"batch_size={batch_size}"
            raise ValueError(f"{what} cannot be combined with a batch_sampler, which defines batches; leave it out")
        if batch_size is None and batch_sampler is None and self.drop_last:
            raise ValueError("drop_last=True cannot be combined with batch_size=None, which gives single samples")
        if weights is not None and shuffle:
            raise ValueError("weights draw the samples at random already; leave shuffle out")
        if repeats != 1 and not shuffle and weights is None:
            raise ValueError(
                f"repeats={repeats} needs shuffle=True or weights: an epoch has as many positions as the dataset has "
                "samples, so in their own order the last ones would never come"
            )
        if uneven == "exact" and (weights is not None or repeats != 1):
            raise ValueError("uneven='exact' counts every sample once; it does not go with weights or repeats")
        if uneven == "exact" and not self.info:
            raise ValueError(
                "uneven='exact' needs info=True: rows that only fill up are False in BatchInfo.valid, and do not count"
            )

    def _check_mix(self) -> None:
        """Refuse what decides over the order of a `Mix`."""
        if self.mix is None:
            return
        refused = {
            "sampler": self.sampler is not None,
            "batch_sampler": self.batch_sampler is not None,
            "weights": self.weights is not None,
            f"uneven={self.uneven!r}": self.uneven == "exact",
        }
        for name in (name for name, is_given in refused.items() if is_given):
            raise ValueError(
                f"{name} does not go with a Mix, whose weights say how often each data set comes, and which goes "
                "through each in an order of its own; leave it out, or read the data sets without Mix"
            )

    @property
    def _puts(self) -> str:
        return "mixes" if self.mixes in MIXES else "puts together"

    def _check_groups(self) -> None:
        """Refuse batches that cut groups of neighbours apart; a batch_sampler's may have any size."""
        size, name, group = self.batch_size, self.mixes, self.group
        if not name or self.batch_sampler is not None or (size is not None and size % group == 0):
            return
        number = "even" if group == 2 else f"a multiple of {group}"
        if size is None:
            raise ValueError(
                f"batch_size=None gives samples one by one, so {name} has no neighbour to mix them with; give "
                + ("an even batch_size" if group == 2 else f"a batch_size that is {number}")
            )
        raise ValueError(
            f"batch_size must be {number} with {name}, which {self._puts} the samples of a batch in "
            f"{'pairs' if group == 2 else 'fours'}, got {size}; use batch_size={-(-size // group) * group}"
            + (f" or {size // group * group}" if size > group else "")
        )


def check_flag(name: str, value: Any) -> bool:
    """`value` as True or False; None is False. TypeError of anything but these, 0 and 1: "no" would be True."""
    if value is None or (isinstance(value, bool | int | np.bool_) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def _shuffle(value: Any) -> bool | BlockShuffle:
    if isinstance(value, BlockShuffle):
        return value
    if isinstance(value, str) and value == "block":
        return BlockShuffle()
    try:
        return check_flag("shuffle", value)
    except TypeError:
        raise TypeError(f"shuffle must be True or False, or 'block' or a gpuload.BlockShuffle, got {value!r}") from None


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """`value` as an int; TypeError or ValueError if it is no integer within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")
    return int(value)


def _seed(seed: int | None, generator: Any) -> int:
    if generator is None:
        return 0 if seed is None else check_integer("seed", seed, 0, 2**64 - 1)
    torch: Any = sys.modules.get("torch")  # imported, if there is a torch.Generator
    if torch is None or not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if seed is not None:
        raise ValueError(f"seed={seed} and generator are both given; the generator only gives its initial seed")
    return generator.initial_seed() % 2**64
