"""Which of the ways to make batches a `Loader` was asked for, and the schedule of an epoch that follows from it.

Runs in the main process. Ranks are looked up anew each time: `torch.distributed` may come up after the loader was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from gpuload.loader.options import Options
from gpuload.order.iterable import IterableSchedule
from gpuload.order.permutation import cumulate
from gpuload.order.place import Place
from gpuload.order.ranks import check_rank, find_rank
from gpuload.order.sampler import SamplerSchedule
from gpuload.order.shares import Plan, Uneven
from gpuload.order.spec import BatchSpec

__all__ = ["Agenda", "PlanSchedule", "Schedule"]


class Schedule(Protocol):
    """The batches of an epoch."""

    def steps(self, place: Place) -> int | None:
        """How many there are from a place on; None where nobody knows."""
        ...

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        """They themselves."""
        ...

    def end(self, epoch: int) -> Place:
        """The place after an epoch whose end was only seen when there were no more batches."""
        ...


class PlanSchedule:
    """The batches of a `Plan`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def steps(self, place: Place) -> int:
        return self._plan.steps(place.position)

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        plan, start = self._plan, place.position
        last = plan.steps(start) - 1
        for number, rows in enumerate(plan.batches(place.epoch, start)):
            after = Place(place.epoch, start + (number + 1) * plan.global_batch)
            yield BatchSpec(
                start // plan.global_batch + number,
                place.epoch,
                rows.positions,
                rows.indices,
                None if rows.valid.all() else rows.valid,
                after=after if number < last else Place(place.epoch + 1, 0),
            )

    def end(self, epoch: int) -> Place:
        return Place(epoch + 1, 0)


class Agenda:
    """What is in which batch, as the arguments of `Loader` say; see there.

    Args:
        options: the loader's, checked.

    Attributes:
        planned: a map dataset in gpuload's own order, which knows every position beforehand.

    Raises:
        TypeError, ValueError: `rank` and `world_size`, or the weights, are wrong.
    """

    def __init__(
        self,
        options: Options,
        *,
        shuffle: bool,
        drop_last: bool,
        sampler: Any,
        batch_sampler: Any,
        rank: int | None,
        world_size: int | None,
        uneven: Uneven,
        weights: Any,
        repeats: int,
    ) -> None:
        check_rank(rank, world_size)
        self._options = options
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._given_rank = rank, world_size
        self._uneven: Uneven = uneven
        self._weights = None if weights is None else cumulate(weights, len(options.dataset))
        self._repeats = repeats
        if repeats != 1 and options.chain.mixing is not None:
            raise ValueError(
                f"repeats={repeats} does not go with {type(options.chain.mixing).__name__}, which mixes the samples at "
                "neighbouring positions: they would be one sample, or on different ranks; leave one of them out"
            )
        self.planned = not options.iterable and not options.sampled

    def check(self) -> None:
        """Refuse to begin an epoch that has no batch.

        Raises:
            ValueError: the dataset has too few samples for a batch on each of the ranks there are by now.
        """
        if self.planned and (plan := self.plan()).steps() == 0:
            raise ValueError(_nothing_left(plan))

    @property
    def order(self) -> str:
        """How the samples are ordered, as a state says it."""
        return "stream" if self._options.iterable else "sampler" if self._options.sampled else self.plan().order

    def plan(self) -> Plan:
        """Who gets what of a map dataset, in gpuload's own order."""
        rank, world_size = self._rank()
        return Plan(
            samples=len(self._options.dataset),
            batch_size=self._options.batch_size,
            shuffle=self._shuffle,
            seed=self._options.seed,
            drop_last=self._drop_last,
            rank=rank,
            world_size=world_size,
            uneven=self._uneven,
            weights=self._weights,
            repeats=self._repeats,
            pairs=self._options.chain.mixing is not None,
        )

    def schedule(self) -> Schedule:
        """What is in which batch."""
        if self.planned:
            return PlanSchedule(self.plan())
        rank, world_size = self._rank()
        if self._options.iterable:
            return IterableSchedule(
                batch_size=self._options.batch_size,
                drop_last=self._drop_last,
                workers=max(1, self._options.num_workers),
                rank=rank,
                world_size=world_size,
            )
        return SamplerSchedule(
            sampler=self._sampler,
            batch_sampler=self._batch_sampler,
            batch_size=self._options.batch_size,
            drop_last=self._drop_last,
            seed=self._options.seed,
            rank=rank,
            world_size=world_size,
        )

    def __len__(self) -> int:
        """Batches in a whole epoch.

        Raises:
            TypeError: an iterable dataset, or a sampler, without a length.
        """
        if self._options.iterable:
            samples = len(self._options.dataset)  # a TypeError that names its class where it has none
            size = self._options.batch_size
            return samples // size if self._drop_last else -(-samples // size)
        steps = self.schedule().steps(Place(0, 0))
        if steps is None:
            sampler = self._sampler if self._batch_sampler is None else self._batch_sampler
            raise TypeError(f"the Loader has no length: its sampler, a {type(sampler).__name__}, has none")
        return steps

    def _rank(self) -> tuple[int, int]:
        """Which of how many, as far as is known now: told together, or found out together."""
        rank, world_size = self._given_rank
        return find_rank() if rank is None or world_size is None else (rank, world_size)


def _nothing_left(plan: Plan) -> str:
    """Why an epoch has no batch."""
    if plan.samples == 0:
        return "the dataset is empty: len(dataset) is 0"
    ranks = f" for {plan.world_size} ranks" if plan.world_size > 1 else ""
    if plan.drop_last:
        return (
            f"drop_last=True leaves no batch: the dataset has {plan.samples} samples{ranks}, "
            f"batch_size is {plan.batch_size}"
        )
    return f"uneven='drop' leaves no batch: the dataset has {plan.samples} samples{ranks}; use uneven='pad'"
