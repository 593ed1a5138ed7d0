"""Arguments of transforms whose value depends on the batch: on its epoch (`by_epoch`), on its number in the epoch
(`by_batch`), or on the size that the loader's order gives it (`bucket_size`).

Workers and the main process resolve the chain for a batch (`Chain.at`) before they draw anything. Everything that is
decided once for all batches, such as the outline, describes what any value allows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpuload.checks import integer, is_sequence

__all__ = ["BucketSize", "ByBatch", "ByEpoch", "Moment", "Varying", "bucket_size", "by_batch", "by_epoch", "naming"]


class Moment(NamedTuple):
    """The batch for which arguments are resolved.

    Attributes:
        epoch: the number of its epoch.
        number: its random number between 0 and 1, which all results of `by_batch` share.
        size_hw: the size that its order gives it; None if it gives none.
    """

    epoch: int = 0
    number: float = 0.0
    size_hw: tuple[int, int] | None = None


ANY: Final = Moment(size_hw=(1, 1))


class Varying:
    """Base class of arguments whose value depends on the batch."""

    def choice(self, moment: Moment) -> Any:
        """Return what decides the value for a batch."""
        raise NotImplementedError

    def at(self, moment: Moment) -> Any:
        """Return the value for a batch."""
        raise NotImplementedError

    def map(self, function: Callable[[Moment], Any], moment: Moment = ANY) -> Varying:
        """Return a copy with each value replaced by the result of `function` for the first moment that has this value.
        What `moment` says about other arguments stays."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class ByEpoch(Varying):
    """An argument that depends on the epoch: (first epoch, value) pairs in ascending order, or a function of the
    epoch. A value can be another varying argument."""

    values: tuple[tuple[int, Any], ...] | Callable[[int], Any]

    def choice(self, moment: Moment) -> int:
        if isinstance(self.values, tuple):
            return bisect_right(self.values, moment.epoch, key=lambda entry: entry[0]) - 1
        return moment.epoch

    def at_epoch(self, epoch: int) -> Any:
        """Return the value for an epoch, which may vary from batch to batch."""
        if isinstance(self.values, tuple):
            return self.values[self.choice(Moment(epoch))][1]
        value = self.values(epoch)
        if isinstance(value, Varying):  # it must be known before the first epoch whether batches need sizes
            raise TypeError(f"a function of the epoch must return plain values, got {value!r}; pass by_epoch() a dict")
        return value

    def at(self, moment: Moment) -> Any:
        value = self.at_epoch(moment.epoch)
        return value.at(moment) if isinstance(value, Varying) else value

    def map(self, function: Callable[[Moment], Any], moment: Moment = ANY) -> ByEpoch:
        if not isinstance(self.values, tuple):  # the values are not known yet
            return self
        pairs = []
        for epoch, value in self.values:
            first = moment._replace(epoch=epoch)
            with naming(f"the value from by_epoch() for epoch {epoch}"):
                pairs.append((epoch, value.map(function, first) if isinstance(value, Varying) else function(first)))
        return ByEpoch(tuple(pairs))

    def __repr__(self) -> str:
        if isinstance(self.values, tuple):
            return f"by_epoch({dict(self.values)!r})"
        return f"by_epoch({getattr(self.values, '__qualname__', type(self.values).__name__)})"


@dataclass(frozen=True, repr=False)
class ByBatch(Varying):
    """An argument that has one of several values in each batch."""

    values: tuple[Any, ...]

    def choice(self, moment: Moment) -> int:
        return int(moment.number * len(self.values))

    def at(self, moment: Moment) -> Any:
        return self.values[self.choice(moment)]

    def map(self, function: Callable[[Moment], Any], moment: Moment = ANY) -> ByBatch:
        values = []
        for index, value in enumerate(self.values):
            with naming(f"the value {value!r} from by_batch()"):
                values.append(function(moment._replace(number=(index + 0.5) / len(self.values))))
        return ByBatch(tuple(values))

    def __repr__(self) -> str:
        return f"by_batch({list(self.values)!r})"


@dataclass(frozen=True, repr=False)
class BucketSize(Varying):
    """The size that the loader's order gives the images of each batch, as the `size` of `Resize` and of crops: with
    ``shuffle=gpuload.Buckets(…)`` the shape of the batch's bucket, with a `batch_sampler` the ``size_hw`` of its lists.

    Example:
        >>> from gpuload import transforms as T
        >>> chain = T.Chain([T.Resize(T.bucket_size)])
        >>> chain.at(0, size_hw=(64, 48)).output_size_hw
        (64, 48)
    """

    def choice(self, moment: Moment) -> tuple[int, int] | None:
        return moment.size_hw

    def at(self, moment: Moment) -> tuple[int, int]:
        if moment.size_hw is None:
            raise ValueError("bucket_size needs a batch with a size; see gpuload.transforms.bucket_size")
        return moment.size_hw

    def map(self, function: Callable[[Moment], Any], moment: Moment = ANY) -> BucketSize:
        function(moment)  # only to check that the argument can be a size
        return self

    def __repr__(self) -> str:
        return "bucket_size"


bucket_size: Final[Any] = BucketSize()


@contextmanager
def naming(subject: str) -> Iterator[None]:
    """Say in the message of an error which value of a varying argument is invalid."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{subject} is invalid: {error}") from error


def by_epoch(values: Mapping[int, Any] | Callable[[int], Any]) -> Any:
    """Return an argument that changes from epoch to epoch: a size, a probability, an `alpha`, or the strength of a
    transform, such as the `magnitude` of `RandAugment` or the `scale` of `RandomResizedCrop`.

    The values can be whatever the argument accepts, such as pairs (low, high). Those of a dict are checked when the
    transform is created, the results of a function when their epoch begins.

    Args:
        values: a dict that maps the first epoch of each value to the value, starting at epoch 0: ``{0: 128, 10: 176,
            20: 224}``. A value can also be the result of `by_batch`. Or a function of the epoch, which must not depend
            on anything else, because each worker gets a copy of it. The loader's state identifies a function only by
            its name.

    Raises:
        TypeError, ValueError: `values` is neither a dict nor a function, or has no value for epoch 0.

    Example:
        >>> from gpuload import transforms as T
        >>> chain = T.Chain([T.RandomResizedCrop(by_epoch({0: 128, 10: 176}))])
        >>> chain.at(9).output_size_hw, chain.at(10).output_size_hw
        ((128, 128), (176, 176))
        >>> T.RandomApply([T.MixUp(num_classes=10)], p=by_epoch({0: 1, 200: 0})).p
        by_epoch({0: 1.0, 200: 0.0})
    """
    if callable(values):
        return ByEpoch(values)
    if not isinstance(values, Mapping):
        raise TypeError(
            "by_epoch() takes a dict of values keyed by their first epoch, such as {0: 128, 10: 176}, or a function of "
            f"the epoch, got {type(values).__name__}: {values!r}"
        )
    epochs = [(integer("by_epoch({epoch: value})", epoch, minimum=0), value) for epoch, value in values.items()]
    epochs.sort(key=lambda entry: entry[0])
    if not epochs or epochs[0][0] != 0:
        raise ValueError(f"by_epoch() needs a value for epoch 0, got {dict(values)!r}; write {{0: …, …}}")
    return ByEpoch(tuple(epochs))


def by_batch(values: Sequence[Any]) -> Any:
    """Return an argument that changes from batch to batch: each batch has one of several values, all equally likely.

    It is accepted wherever `by_epoch` is, and is most useful as a size. A batch's value is a function of (seed, epoch,
    step), so it is the same on all ranks. All results of `by_batch` in a loader share one random number, so lists of
    the same length change together.

    Args:
        values: the values, each of which can be whatever the argument accepts: ``[320, 480, 640]``.

    Raises:
        TypeError, ValueError: `values` is not a list, is empty, or contains a value that itself changes.

    Example:
        >>> from gpuload import transforms as T
        >>> chain = T.Chain([T.RandomResizedCrop(by_batch([128, 160, 192]))])
        >>> [chain.at(0, step).output_size_hw[0] for step in range(6)]
        [160, 192, 160, 128, 160, 192]
    """
    if not is_sequence(values):
        raise TypeError(
            "by_batch() takes a list of values, one of which is drawn for each batch, such as [320, 480, 640], got "
            f"{type(values).__name__}: {values!r}"
        )
    entries = tuple(values)
    if not entries:
        raise ValueError(f"by_batch() needs at least one value, got {values!r}")
    for value in entries:
        if isinstance(value, Varying):
            raise TypeError(
                f"by_batch() contains {value!r}; its values must not change. For a list that changes from epoch to "
                "epoch, write by_epoch({0: by_batch([…]), …})"
            )
    return ByBatch(entries)
