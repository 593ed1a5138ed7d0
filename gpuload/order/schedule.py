"""The schedule of an epoch: which of the ways to make batches the options ask for, and its batches.

Runs in the main process. Ranks are looked up anew each time: `torch.distributed` may come up after the loader was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from gpuload.order.iterable import IterableSchedule
from gpuload.order.options import OrderOptions
from gpuload.order.place import Place
from gpuload.order.ranks import find_rank
from gpuload.order.sampler import SamplerSchedule
from gpuload.order.shares import Shares
from gpuload.order.spec import BatchSpec

__all__ = ["Schedule", "SharesSchedule", "check_begin", "order_name", "schedule_of", "shares_of", "steps_of"]


class Schedule(Protocol):
    """The batches of an epoch."""

    def steps(self, place: Place) -> int | None:
        """How many there are from a place on; None where nobody knows."""
        ...

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        """They themselves, each with the place that follows it, which is what a state is made from."""
        ...

    def end(self, epoch: int) -> Place:
        """The place after an epoch whose end was only seen when there were no more batches."""
        ...


class SharesSchedule:
    """The batches of a rank's `Shares`."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def steps(self, place: Place) -> int:
        return self._shares.steps(place.position)

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        shares, start = self._shares, place.position
        last = shares.steps(start) - 1
        for number, rows in enumerate(shares.batches(place.epoch, start)):
            after = Place(place.epoch, start + (number + 1) * shares.global_batch)
            yield BatchSpec(
                start // shares.global_batch + number,
                place.epoch,
                rows.positions,
                rows.indices,
                None if rows.valid.all() else rows.valid,
                after=after if number < last else Place(place.epoch + 1, 0),
            )

    def end(self, epoch: int) -> Place:
        return Place(epoch + 1, 0)


def schedule_of(order: OrderOptions, workers: int) -> Schedule:
    """What is in which batch; `workers` processes read."""
    if order.planned:
        return SharesSchedule(shares_of(order))
    rank, world_size = _rank(order)
    if order.iterable:
        return IterableSchedule(
            batch_size=order.size,
            drop_last=order.drop_last,
            workers=max(1, workers),
            rank=rank,
            world_size=world_size,
        )
    return SamplerSchedule(
        sampler=order.sampler,
        batch_sampler=order.batch_sampler,
        batch_size=order.size,
        drop_last=order.drop_last,
        seed=order.seed,
        rank=rank,
        world_size=world_size,
    )


def shares_of(order: OrderOptions) -> Shares:
    """Who gets what of a map dataset, in gpuload's own order."""
    rank, world_size = _rank(order)
    return Shares(
        samples=len(order.dataset),
        batch_size=order.size,
        shuffle=order.shuffle,
        seed=order.seed,
        drop_last=order.drop_last,
        rank=rank,
        world_size=world_size,
        uneven=order.uneven,
        weights=order.cumulative,
        repeats=order.repeats,
        pairs=bool(order.mixes),
    )


def check_begin(order: OrderOptions) -> None:
    """Refuse to begin an epoch that has no batch.

    Raises:
        ValueError: the dataset has too few samples for a batch on each of the ranks there are by now.
    """
    if order.planned and (shares := shares_of(order)).steps() == 0:
        raise ValueError(_nothing_left(shares))


def steps_of(order: OrderOptions) -> int:
    """Batches in a whole epoch.

    Raises:
        TypeError: an iterable dataset, or a sampler, without a length.
    """
    if order.iterable:
        samples = len(order.dataset)  # a TypeError that names its class where it has none
        return samples // order.size if order.drop_last else -(-samples // order.size)
    steps = schedule_of(order, 0).steps(Place(0, 0))
    if steps is None:
        sampler = order.sampler if order.batch_sampler is None else order.batch_sampler
        raise TypeError(f"the Loader has no length: its sampler, a {type(sampler).__name__}, has none")
    return steps


def order_name(order: OrderOptions) -> str:
    """How the samples are ordered, as a state says it."""
    return "stream" if order.iterable else "sampler" if order.sampled else shares_of(order).order


def _rank(order: OrderOptions) -> tuple[int, int]:
    """(rank, world_size): as given, else discovered."""
    if order.rank is None or order.world_size is None:
        return find_rank()
    return order.rank, order.world_size


def _nothing_left(shares: Shares) -> str:
    """Why an epoch has no batch."""
    if shares.samples == 0:
        return "the dataset is empty: len(dataset) is 0"
    ranks = f" for {shares.world_size} ranks" if shares.world_size > 1 else ""
    if shares.drop_last:
        return (
            f"drop_last=True leaves no batch: the dataset has {shares.samples} samples{ranks}, "
            f"batch_size is {shares.batch_size}"
        )
    return f"uneven='drop' leaves no batch: the dataset has {shares.samples} samples{ranks}; use uneven='pad'"
