"""The `Loader` options that determine the order of samples and batches. This module runs only in the main process
and does not import torch."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import numpy as np

from gpuload.checks import argument, check_fields, flag, integer, one_of
from gpuload.datasets.kinds import check_dataset, is_iterable
from gpuload.datasets.mix import Mix, find_mix
from gpuload.order.blocks import Blocks, BlockShuffle
from gpuload.order.buckets import Buckets
from gpuload.order.mixture import BLOCK, Mixture, Steps
from gpuload.order.permutation import cumulate
from gpuload.order.ranks import check_rank, find_caller
from gpuload.order.shares import Uneven

__all__ = ["OrderOptions"]

MIXING_TRANSFORMS = ("MixUp", "CutMix")  # these can also mix samples that are not neighbours in the epoch's order


def _parse_shuffle(name: str, value: object) -> bool | BlockShuffle | Buckets:
    if isinstance(value, BlockShuffle | Buckets):
        return value
    if isinstance(value, str) and value == "block":
        return BlockShuffle()
    return value is not None and flag(
        f"{name}, unless it is 'block', a gpuload.BlockShuffle or a gpuload.Buckets,", value
    )


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """Options that determine the samples of each batch.

    Args:
        combining_transform: the name of the transform that combines neighbouring samples of a batch, or "".
        group_size: the number of samples that this transform combines; 1 if there is none.
        sized_argument: the name of the argument of a transform that is `bucket_size`, or "".

    All other arguments are as for `Loader`.

    Attributes:
        batch_size: the `batch_size` argument; None with a batch_sampler.
        seed: the `seed` argument, or the initial seed of `generator`.
        issued_warnings: the subjects of warnings that were already issued; each is issued once per loader.
        caller: the place in the user's program that created the loader.
        promised_lengths: the length of an iterable dataset at the last ``len(loader)`` call; empty before the first.

    Raises:
        TypeError, ValueError: an argument is invalid, or two arguments exclude each other.
    """

    dataset: Any = field(repr=False)
    batch_size: int | None = argument(integer, default=1, optional=True, minimum=1)
    shuffle: bool | BlockShuffle | Buckets = argument(_parse_shuffle, default=False)  # "block" becomes BlockShuffle()
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = argument(flag, default=False)
    in_order: bool = argument(flag, default=True)
    seed: int = argument(integer, default=None, minimum=0, maximum=2**64 - 1)
    generator: Any = None
    rank: int | None = argument(integer, default=None, minimum=0)
    world_size: int | None = argument(integer, default=None, minimum=1)
    uneven: Uneven = argument(one_of, default="pad", choices=get_args(Uneven))
    weights: Any = field(default=None, repr=False)
    repeats: int = argument(integer, default=1, minimum=1)
    info: bool = argument(flag, default=False)
    combining_transform: str = ""
    group_size: int = 1
    sized_argument: str = ""
    issued_warnings: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    promised_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=1), init=False, repr=False, compare=False)
    caller: str = field(default_factory=find_caller, init=False, repr=False, compare=False)
    _blocks: deque[Blocks] = field(default_factory=lambda: deque(maxlen=1), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_dataset()
        self._check_groups()
        self._check_conflicts()
        self._check_mix()
        if self.batch_sampler is not None:
            object.__setattr__(self, "batch_size", None)
        object.__setattr__(self, "seed", _choose_seed(self.seed, self.generator))
        check_rank(self.rank, self.world_size)
        _ = self.cumulative_weights, self.blocks, self.mixture, self.buckets
        if self.repeats != 1 and self.combining_transform not in ("", *MIXING_TRANSFORMS):
            raise ValueError(
                f"repeats={self.repeats} cannot be combined with {self.combining_transform}, which combines the "
                "samples at neighbouring positions: with repeats, these are the same sample, or are on different "
                "ranks; leave one of the two out"
            )

    @property
    def iterable(self) -> bool:
        """Whether the dataset is iterable and so defines its own order."""
        return is_iterable(self.dataset)

    @property
    def has_sampler(self) -> bool:
        """Whether a user's sampler defines the order."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def is_planned(self) -> bool:
        """Whether gpuload itself defines the order, which requires a map dataset."""
        return not self.iterable and not self.has_sampler

    @property
    def yields_samples(self) -> bool:
        """Whether the loader yields single samples."""
        return self.batch_size is None and self.batch_sampler is None

    @property
    def size(self) -> int:
        """The number of samples in a batch; 1 for single samples or with a batch_sampler."""
        return self.batch_size or 1

    @property
    def samples(self) -> int | None:
        """The length of the dataset, or of an epoch of a `Mix`; None if it is not known."""
        try:
            return None if self.iterable else len(self.dataset) if self.mix is None else self.mix.length
        except (TypeError, NotImplementedError):
            return None

    @property
    def mix(self) -> Mix | None:
        """The dataset's `Mix`; None if it is not a `Mix`."""
        return None if self.iterable else find_mix(self.dataset)

    @cached_property
    def mixture(self) -> Mixture | None:
        """The sizes and weights of the `Mix`; None if the dataset is not a `Mix`."""
        if (mix := self.mix) is None:
            return None
        shuffle = self.shuffle if isinstance(self.shuffle, BlockShuffle) else None
        blocks = () if shuffle is None else tuple(Blocks.from_dataset(dataset, shuffle) for dataset in mix.datasets)
        is_stepped = mix.per == "sample" and mix.parts_by_epoch is not None
        steps = Steps(BLOCK, 1, -(-mix.length // self.repeats)) if is_stepped else None
        return Mixture(mix.sizes, mix.parts, mix.length, blocks, mix.per, mix.parts_by_epoch, steps)

    def substitute_range(self, index: Any) -> tuple[int, int]:
        """Return the first index and the count of the samples that can replace the sample at `index`."""
        if (mix := self.mix) is None:
            return 0, len(self.dataset)
        dataset_index = bisect_right(mix.cumulative_sizes, index)
        return mix.cumulative_sizes[dataset_index] - mix.sizes[dataset_index], mix.sizes[dataset_index]

    @cached_property
    def cumulative_weights(self) -> np.ndarray | None:
        """The cumulative weights for `Weighted`; None without weights."""
        return None if self.weights is None else cumulate(self.weights, len(self.dataset))

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of a block shuffle; None for any other order."""
        if not isinstance(self.shuffle, BlockShuffle) or not self.is_planned or self.mix is not None:
            return None
        if not self._blocks or self._blocks[-1].n != len(self.dataset):  # the dataset may have grown between epochs
            self._blocks.append(Blocks.from_dataset(self.dataset, self.shuffle))
        return self._blocks[-1]

    @property
    def buckets(self) -> Buckets | None:
        """The buckets of a shuffle by buckets; None for any other order.

        Raises:
            ValueError: the dataset does not have one sample for each of the sizes; it may have grown between epochs.
        """
        if not isinstance(self.shuffle, Buckets) or not self.is_planned:
            return None
        if len(self.shuffle.sizes) != len(self.dataset):
            raise ValueError(
                f"shuffle=Buckets(…) has {len(self.shuffle.sizes):,} sizes, but the dataset has {len(self.dataset):,} "
                "samples; pass the size of each sample, as from gpuload.image_sizes(dataset)"
            )
        return self.shuffle

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
            for name in ("__getitem__", "__len__")[: 1 if self.has_sampler else 2]:
                if not hasattr(dataset, name):
                    raise TypeError(
                        f"the dataset must have {name} (a map-style dataset) or __iter__ (an iterable one), got "
                        f"{type(dataset).__name__}"
                        + (f": {dataset!r}" if isinstance(dataset, str | int | None) else "")
                    )
        elif hasattr(dataset, "__next__") and not hasattr(dataset, "__getitem__"):  # torch's IterableDataset has both
            raise TypeError(
                f"the dataset is a {type(dataset).__name__}, which can be iterated over only once; pass an object "
                "whose __iter__ starts from the beginning (an IterableDataset), or a list"
            )

    def _check_conflicts(self) -> None:
        """Refuse options that exclude each other."""
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
        given_options = [name for name, is_given in conditions.items() if is_given]
        if self.iterable and given_options:
            raise ValueError(
                f"{given_options[0]} does not apply to an iterable dataset, which defines its own order; leave it out"
            )
        if sampler is not None and batch_sampler is not None:
            raise ValueError(
                "sampler and batch_sampler are both given, but a batch_sampler includes a sampler; leave one of "
                "them out"
            )
        conflicts = [name for name in given_options if name not in ("sampler", "batch_sampler")]
        if (sampler is not None or batch_sampler is not None) and conflicts:
            option = "sampler" if sampler is not None else "batch_sampler"
            raise ValueError(
                f"{conflicts[0]} cannot be combined with a {option}, which defines its own order; leave one of them out"
            )
        if batch_sampler is not None and (batch_size not in (1, None) or self.drop_last):
            option = "drop_last=True" if self.drop_last else f"batch_size={batch_size}"
            raise ValueError(f"{option} cannot be combined with a batch_sampler, which defines batches; leave it out")
        if batch_size is None and batch_sampler is None and self.drop_last:
            raise ValueError(
                "drop_last=True cannot be combined with batch_size=None, which gives single samples; leave "
                "drop_last out"
            )
        gives_sizes = batch_sampler is not None or isinstance(shuffle, Buckets)
        if self.sized_argument and not (gives_sizes or self.iterable):
            raise ValueError(
                f"{self.sized_argument} is bucket_size, but the batches of this order have no size; pass "
                "shuffle=gpuload.Buckets(…) or a batch_sampler whose lists have an attribute size_hw, or a fixed size"
            )
        if weights is not None and shuffle:
            raise ValueError("weights already draw samples at random; leave shuffle out")
        if repeats != 1 and weights is None and (not shuffle or isinstance(shuffle, Buckets)):
            raise ValueError(
                f"repeats={repeats} needs shuffle=True or weights: an epoch has as many positions as the dataset has "
                "samples, so without shuffling the last samples would never be used, and Buckets have each sample once"
            )
        if uneven == "exact" and (weights is not None or repeats != 1):
            raise ValueError(
                "uneven='exact' counts every sample once, and cannot be combined with weights or repeats; leave "
                "them out"
            )
        if uneven == "exact" and not self.info:
            raise ValueError(
                "uneven='exact' needs info=True, because BatchInfo.valid marks padding samples, which must not be "
                "counted"
            )

    def _check_mix(self) -> None:
        """Refuse options that conflict with the order of a `Mix`."""
        if self.mix is None:
            return
        refused = {
            "sampler": self.sampler is not None,
            "batch_sampler": self.batch_sampler is not None,
            "weights": self.weights is not None,
            f"uneven={self.uneven!r}": self.uneven == "exact",
            "shuffle=Buckets(…)": isinstance(self.shuffle, Buckets),
        }
        for name in (name for name, is_given in refused.items() if is_given):
            raise ValueError(
                f"{name} cannot be combined with a Mix, whose weights determine how often each dataset is used, and "
                "which reads each dataset in its own order; leave it out, or read the datasets without Mix"
            )
        if self.repeats != 1 and self.mix.per != "sample":
            raise ValueError(
                f"repeats={self.repeats} cannot be combined with Mix(per={self.mix.per!r}), which chooses the samples "
                "of each rank's batch, while repeats go to different ranks; leave one of the two out"
            )

    def _check_groups(self) -> None:
        """Refuse a batch size that would split groups of neighbours; batches of a batch_sampler can have any size."""
        size, name, group = self.batch_size, self.combining_transform, self.group_size
        if not name or self.batch_sampler is not None or (size is not None and size % group == 0):
            return
        requirement = "even" if group == 2 else f"a multiple of {group}"
        if size is None:
            raise ValueError(
                f"batch_size=None yields samples one by one, so {name} has no neighbours to mix; pass "
                + ("an even batch_size" if group == 2 else f"a batch_size that is {requirement}")
            )
        verb = "mixes" if name in MIXING_TRANSFORMS else "combines"
        raise ValueError(
            f"batch_size must be {requirement} with {name}, which {verb} the samples of a batch in "
            f"{'pairs' if group == 2 else 'fours'}, got {size}; use batch_size={-(-size // group) * group}"
            + (f" or {size // group * group}" if size > group else "")
        )


def _choose_seed(seed: int | None, generator: Any) -> int:
    if generator is None:
        return seed or 0
    torch: Any = sys.modules.get("torch")  # already imported if there is a torch.Generator
    if torch is None or not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if seed is not None:
        raise ValueError(
            f"seed={seed} and generator are both given; leave one of them out: a generator only sets the seed"
        )
    return generator.initial_seed() % 2**64
