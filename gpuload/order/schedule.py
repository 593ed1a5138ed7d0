"""Creates the schedule of an epoch, which yields the epoch's batches, from the options. Runs in the main process.

The rank is looked up for each epoch, since `torch.distributed` may be initialized after the loader is created.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from gpuload.order.buckets import BucketShares
from gpuload.order.iterable import IterableSchedule, has_sharding_filter
from gpuload.order.mixture import Steps
from gpuload.order.options import OrderOptions
from gpuload.order.place import Place
from gpuload.order.ranks import exchange, find_group, find_rank
from gpuload.order.sampler import SamplerSchedule
from gpuload.order.shares import Shares
from gpuload.order.spec import BatchSpec

__all__ = [
    "Schedule",
    "check_has_batches",
    "order_name",
    "ranks_of",
    "schedule_of",
    "shares_of",
    "start_warnings",
    "steps_of",
]


class Schedule(Protocol):
    """A source of the batches of an epoch."""

    def steps(self, place: Place) -> int | None:
        """Return the number of batches that remain from a place; None if it is not known."""
        ...

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        """Yield the batches. Each has the place of the next batch, from which the loader's state is created."""
        ...

    def place_after(self, epoch: int) -> Place:
        """Return the place after an epoch, for schedules that do not know in advance which batch is the last."""
        ...


class SharesSchedule:
    """A schedule of the batches of a rank's shares."""

    def __init__(self, shares: Shares | BucketShares) -> None:
        self._shares = shares

    def steps(self, place: Place) -> int:
        division = self._shares.division
        if place.position and place.division != division:
            other_order = "an order without Buckets or Mix(per=…)"
            raise ValueError(
                f"the state was saved in the middle of epoch {place.epoch}, with {place.division or other_order}, but "
                f"this loader has {division or other_order}. The batches of an epoch with Buckets or Mix(per=…) depend "
                "on these; resume with the same, or from a state that was saved at the end of an epoch"
            )
        return self._shares.steps(place.position)

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        shares, start = self._shares, place.position
        last_i = shares.steps(start) - 1
        for i, rank_batch in enumerate(shares.batches(place.epoch, start)):
            after = Place(place.epoch, start + (i + 1) * shares.global_batch_size, division=shares.division)
            yield BatchSpec(
                start // shares.global_batch_size + i,
                place.epoch,
                rank_batch.positions,
                rank_batch.indices,
                None if rank_batch.valid.all() else rank_batch.valid,
                after=after if i < last_i else Place(place.epoch + 1, 0),
                size_hw=rank_batch.size_hw,
            )

    def place_after(self, epoch: int) -> Place:
        return Place(epoch + 1, 0)


def schedule_of(order: OrderOptions, workers: int) -> Schedule:
    """Return the schedule for these options and this number of worker processes."""
    if order.is_planned:
        return SharesSchedule(shares_of(order))
    if not order.iterable:
        return SamplerSchedule(order, **ranks_of(order))
    return IterableSchedule(
        batch_size=order.size,
        drop_last=order.drop_last,
        workers=max(1, workers),
        issued_warnings=order.issued_warnings,
        promised_lengths=order.promised_lengths,
        in_order=order.in_order,
        **ranks_of(order),
    )


def shares_of(order: OrderOptions) -> Shares | BucketShares:
    """Return the shares of a map dataset in gpuload's own order."""
    options: dict[str, Any] = {
        "batch_size": order.size,
        "seed": order.seed,
        "drop_last": order.drop_last,
        "uneven": order.uneven,
        "group_size": order.group_size,
        **ranks_of(order),
    }
    if (buckets := order.buckets) is not None:
        return BucketShares(buckets, **options)
    mixture, samples = order.mixture, len(order.dataset) if order.mixture is None else order.mixture.length
    if mixture is not None and mixture.per != "sample":
        undivided = Shares(samples=samples, **options)
        samples = undivided.samples_per_rank * undivided.world_size
        mixture = replace(mixture, steps=Steps(order.size, undivided.world_size, samples))
    return Shares(
        samples=samples,
        shuffle=bool(order.shuffle),
        blocks=order.blocks,
        mixture=mixture,
        weights=order.cumulative_weights,
        repeats=order.repeats,
        **options,
    )


def check_has_batches(order: OrderOptions) -> None:
    """Refuse to start an epoch without batches.

    Raises:
        ValueError: the dataset has too few samples for a batch on each of the current ranks.
    """
    if order.is_planned and shares_of(order).steps() == 0:
        raise ValueError(_explain_no_batches(order, ranks_of(order)["world_size"]))


def start_warnings(order: OrderOptions, workers: int) -> Iterator[str]:
    """Yield the warnings for the start of an epoch, each once per loader."""
    ranks = ranks_of(order)
    rank, world_size = ranks["rank"], ranks["world_size"]
    if (
        order.is_planned
        and order.rank is None
        and world_size > 1
        and find_group() is None
        and "rank from environment" not in order.issued_warnings
    ):
        order.issued_warnings.add("rank from environment")
        yield (
            f"this epoch is split among {world_size} ranks, and rank {rank} gets only its share, because the "
            f"environment has RANK={rank} and WORLD_SIZE={world_size}, although torch.distributed is not initialized. "
            f"Pass rank={rank}, world_size={world_size} to the Loader if this is intended; pass rank=0, world_size=1 "
            "to get all samples in this process, for example for an evaluation on the first rank only"
        )
    if order.is_planned and world_size > 1 and "other ranks" not in order.issued_warnings:
        order.issued_warnings.add("other ranks")
        yield from _compare_ranks(order, rank, world_size)
    if (buckets := order.buckets) is not None and "unused buckets" not in order.issued_warnings:
        order.issued_warnings.add("unused buckets")
        shares = shares_of(order)
        if isinstance(shares, BucketShares) and shares.unused_samples:
            option = "drop_last=True" if order.drop_last else f"uneven={order.uneven!r}"
            yield (
                f"{shares.unused_samples:,} of {len(buckets.sizes):,} samples are in no batch of any epoch, since "
                f"{option} drops the only batch of their bucket; use fewer shapes, or leave {option} out"
            )
    readers = max(1, workers) * world_size
    if order.iterable and readers > 1 and "workers" not in order.issued_warnings and has_sharding_filter(order.dataset):
        order.issued_warnings.add("workers")
        yield (
            f"the datapipe has a sharding_filter(), which DataLoader configures and gpuload does not: each of "
            f"{readers} workers on all ranks iterates over the entire pipe, so every sample appears "
            f"{readers} times. Use num_workers=1 on a single rank, or an IterableDataset that selects its share "
            "with gpuload.get_worker_info()"
        )


def _compare_ranks(order: OrderOptions, rank: int, world_size: int) -> Iterator[str]:
    """Compare the options with those of the same call on ranks that have begun an epoch before. Yield a warning if the
    datasets have different lengths.

    Raises:
        ValueError: the ranks would not divide the samples among them, or would have different numbers of batches.
    """
    name = "" if shares_of(order).division is None else f" and {order_name(order)}"
    settings = {"order": f"seed={order.seed}{name}", "length": order.samples, "batches": steps_of(order)}
    for other_rank, text in exchange(order.caller, json.dumps(settings), rank, world_size).items():
        others = json.loads(text)
        at = f"on rank {other_rank}, and {{}} on rank {rank} (created at {order.caller})"
        if others["order"] != settings["order"]:
            raise ValueError(
                f"the Loader has {others['order']} {at.format(settings['order'])}: each rank would take its share "
                "of another order, so samples would be missing or come twice. Pass the same seed and order on all ranks"
            )
        lengths = f"the dataset has {others['length']} samples {at.format(settings['length'])}"
        if others["batches"] != settings["batches"]:
            raise ValueError(
                f"{lengths}, which gives {others['batches']} and {settings['batches']} batches, so training would wait "
                "forever at the end. Pass the same dataset and batch_size on all ranks, or rank=0, world_size=1 if "
                "each rank has its own samples"
            )
        if others["length"] != settings["length"]:
            yield (
                f"{lengths}: each rank takes its share of an order of another length, so samples are missing or come "
                "twice. Pass the same dataset on all ranks"
            )
            return


def steps_of(order: OrderOptions) -> int:
    """Return the number of batches in an epoch.

    Raises:
        TypeError: the iterable dataset or the sampler does not have a length.
    """
    if order.iterable:
        samples = len(order.dataset)  # a dataset without a length raises a TypeError that names its class
        order.promised_lengths.append(samples)
        return samples // order.size if order.drop_last else -(-samples // order.size)
    steps = schedule_of(order, 0).steps(Place(0, 0))
    if steps is None:
        sampler = order.sampler if order.batch_sampler is None else order.batch_sampler
        raise TypeError(f"the Loader has no length, since its sampler, a {type(sampler).__name__}, has no length")
    return steps


def order_name(order: OrderOptions) -> str:
    """Return the name that identifies the order in a loader's state."""
    return "stream" if order.iterable else "sampler" if order.has_sampler else shares_of(order).name


def ranks_of(order: OrderOptions) -> dict[str, int]:
    """Return rank and world_size from the options, or the discovered values if the options do not have them."""
    are_given = order.rank is not None and order.world_size is not None
    rank, world_size = (order.rank, order.world_size) if are_given else find_rank()
    return {"rank": rank, "world_size": world_size}  # pyright: ignore[reportReturnType]


def _explain_no_batches(order: OrderOptions, world_size: int) -> str:
    """Explain why an epoch has no batches."""
    if order.samples == 0:
        return "the dataset is empty: len(dataset) is 0"
    buckets = "" if order.buckets is None else f" in {len(order.buckets.shapes)} buckets"
    ranks = f" for {world_size} ranks" if world_size > 1 else ""
    count = f"the dataset has {order.samples} samples{buckets}{ranks}"
    if order.drop_last:
        return (
            f"drop_last=True leaves no batch: {count}, but batch_size is {order.size}; reduce it, or use "
            "drop_last=False"
        )
    return f"uneven='drop' leaves no batch: {count}; use uneven='pad'"
