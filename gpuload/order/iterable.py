"""The batches of an iterable dataset: each from one worker, the workers in turn.

In round b each worker gives its batch number b, in the order of the workers, without those whose iterators have ended.
So the order does not depend on how fast they are; unless the user asks for ``in_order=False``, where each batch comes
when it is done. How far each worker has come is counted when a batch is due; a state is made from it, and is exact
either way. Runs in the main process, in the thread that iterates.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpuload.order.place import DIGESTS, IterablePlace, IterableStart, Place
from gpuload.order.ranks import first_rank_with
from gpuload.order.spec import BatchSpec

__all__ = ["IterableSchedule", "has_sharding_filter"]

_runs = itertools.count(1)  # the numbers of passes, by which workers tell them apart
_compared = itertools.count(1)  # loaders whose samples were compared with other ranks'


class IterableSchedule:
    """Asks each worker for a batch of its samples at a time. Sample n of worker w has the position
    (n × workers + w) × ranks + rank.

    Args:
        batch_size, drop_last: whether a worker's last samples are dropped if they are fewer than a batch.
        workers: how many there are; 1 if the main process does the work.
        rank, world_size: of this process; the dataset decides what it gives on each.
        warned: what the user was warned of already.
        promised: the last entry is the dataset's length, if the user relies on it.
        in_order: workers take turns; else a slow one holds up no other.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        drop_last: bool,
        workers: int,
        rank: int,
        world_size: int,
        warned: set[str] | None = None,
        promised: Sequence[int] = (),
        in_order: bool = True,
    ) -> None:
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._workers = workers
        self._rank = rank
        self._world_size = world_size
        self._pass: _Pass | None = None
        self._warned = set() if warned is None else warned
        self._promised = promised
        self._in_order = in_order

    def steps(self, place: Place) -> None:
        """Return None means the number of batches is unknown."""

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        self._pass = _Pass(self, next(_runs), place)
        return self._pass.batches()

    def end(self, epoch: int) -> Place:
        """Return the place behind an epoch: only states of datasets count, as the next epoch's iterators are new."""
        assert self._pass is not None
        return Place(epoch + 1, 0, iterable=self._pass.remains())


class _Pass:
    """An epoch of an `IterableSchedule`."""

    def __init__(self, schedule: IterableSchedule, run: int, place: Place) -> None:
        entry = place.iterable or {}
        self._schedule = schedule
        self._run = run
        self._epoch = place.epoch
        self._turn = entry.get("turn", 0)
        self._step = entry.get("step", 0)
        # How far each worker has come, by the batches that were given.
        self._places = [IterablePlace(**worker) for worker in entry.get("workers", ())] or [
            IterablePlace(0, False) for _ in range(schedule._workers)
        ]
        self._digests: dict[int, tuple[bytes, ...]] = {}
        self._pending = [0] * len(self._places)  # batches of each worker that are not due yet
        self._warning = ""  # for the next batch that is given

    def batches(self) -> Iterator[BatchSpec]:
        schedule = self._schedule
        workers, size = schedule._workers, schedule._batch_size
        stride, offset = workers * schedule._world_size, schedule._world_size
        planned = [place.samples for place in self._places]
        worker = self._turn
        steps = itertools.count()  # of all batches asked for; `_due` counts those that are given
        while not all(place.ended for place in self._places):
            if not schedule._in_order:  # the one with the least to do, else the next
                active = (number for number, place in enumerate(self._places) if not place.ended)
                worker = min(active, key=lambda number: (self._pending[number], (number - worker) % workers))
            if not self._places[worker].ended:
                self._pending[worker] += 1
                numbers = np.arange(size, dtype=np.int64) + planned[worker]
                planned[worker] += size
                place = self._places[worker]
                start = IterableStart(
                    self._run, worker, place.samples, place.state, stride, worker * offset + schedule._rank
                )
                positions = numbers * stride + start.offset
                yield BatchSpec(
                    next(steps),
                    self._epoch,
                    positions,
                    numbers,
                    iterable=start,
                    queue=0 if schedule._in_order else worker,
                    on_due=self._due,
                )
            worker = (worker + 1) % workers

    def _due(self, spec: BatchSpec, samples: int, empty: bool, places: Sequence[IterablePlace]) -> BatchSpec | None:
        assert spec.iterable is not None
        worker = spec.iterable.worker
        self._pending[worker] -= 1
        latest = max(places, key=lambda place: place.samples, default=None)
        self._places[worker] = IterablePlace(
            self._places[worker].samples + samples,
            any(place.ended or place.broken for place in places),
            state=None if latest is None else latest.state,
        )
        if latest is not None:
            remark = self._same_samples(worker, latest) or self._same_on_ranks(worker, latest)
            self._warning = self._warning or remark
        self._warning = self._warning or self._more_than_promised()
        self._turn = (worker + 1) % len(self._places)
        if empty or (self._schedule._drop_last and samples < self._schedule._batch_size):
            return None
        step, self._step = self._step, self._step + 1
        warning, self._warning = self._warning, ""
        positions, numbers = spec.positions[:samples], spec.indices[:samples]
        return replace(spec, step=step, positions=positions, indices=numbers, after=self._place(), warning=warning)

    def _same_samples(self, worker: int, place: IterablePlace) -> str:
        """A warning if this worker gave the same first samples as another, although it could ask for its number.

        Identical samples alone prove nothing: zeros may be shared out correctly.
        """
        if len(self._places) < 2 or "workers" in self._schedule._warned:
            return ""
        self._digests[worker] = place.digests
        for other, digests in self._digests.items():
            count = min(len(digests), len(place.digests))
            both = place.ended and self._places[other].ended and len(digests) == len(place.digests)
            if other == worker or count < (1 if both else 2):
                continue
            same = digests[:count] == place.digests[:count] and b"" not in digests[:count]
            if same and (not place.knows_workers or len(set(digests[:count])) > 1):
                self._schedule._warned.add("workers")
                return (
                    f"workers {min(worker, other)} and {max(worker, other)} gave the same first {count} samples: each "
                    f"of the {len(self._places)} workers iterates over the whole dataset, so every sample comes "
                    f"{len(self._places)} times. Let its __iter__ ask torch.utils.data.get_worker_info() for `id` and "
                    "`num_workers` and give only its share, or use num_workers=1"
                )
        return ""

    def _same_on_ranks(self, worker: int, place: IterablePlace) -> str:
        """A warning if this rank's first worker gave the same first samples as another rank's."""
        schedule, digests = self._schedule, place.digests
        if worker or schedule._world_size < 2 or "ranks" in schedule._warned:
            return ""
        if len(digests) < DIGESTS and not place.ended:
            return ""
        schedule._warned.add("ranks")  # compared, for this loader
        if b"" in digests or len(set(digests)) < 2:  # zeros may be shared out correctly
            return ""
        content = f"{next(_compared)}/{self._epoch}/{b''.join(digests).hex()}"
        other = first_rank_with(content, schedule._rank)
        if other == schedule._rank:
            return ""
        return (
            f"ranks {other} and {schedule._rank} of {schedule._world_size} gave the same first {len(digests)} samples: "
            "each rank iterates over the whole dataset, so every sample comes once on each. Let its __iter__ ask "
            "gpuload.get_worker_info() for `rank` and `world_size`, or torch.distributed, and give only its share; if "
            "each rank is to read all of it, pass rank=0, world_size=1"
        )

    def _more_than_promised(self) -> str:
        """A warning if there are more samples than ``len(loader)`` went by."""
        schedule, samples = self._schedule, sum(place.samples for place in self._places)
        if not schedule._promised or samples <= schedule._promised[-1] or schedule._warned & {"length", "workers"}:
            return ""
        schedule._warned.add("length")
        shared = "; each worker has to give only its share, see get_worker_info()" if len(self._places) > 1 else ""
        return (
            f"the dataset's len() is {schedule._promised[-1]}, which len(loader) went by, but it has given {samples} "
            f"samples in epoch {self._epoch}{shared}"
        )

    def remains(self) -> dict[str, Any] | None:
        """Return the entry for a state between two epochs; None if no dataset has a state."""
        states = [(place.state or {}).get("dataset") for place in self._places]
        if all(state is None for state in states):
            return None
        workers = [
            {"samples": 0, "ended": False, "state": None if state is None else {"dataset": state}} for state in states
        ]
        return {"turn": 0, "step": 0, "workers": workers}

    def _place(self) -> Place:
        workers = [{"samples": place.samples, "ended": place.ended, "state": place.state} for place in self._places]
        return Place(self._epoch, 0, iterable={"turn": self._turn, "step": self._step, "workers": workers})


def has_sharding_filter(dataset: Any) -> bool:
    """Whether it is torch's datapipe, with a ``sharding_filter()`` that nobody has set."""
    if not any(cls.__module__ == "torch.utils.data.datapipes.datapipe" for cls in type(dataset).__mro__):
        return False
    from torch.utils.data import graph, graph_settings

    with contextlib.suppress(Exception):  # a pipe that cannot be traversed
        for pipe in graph_settings.get_all_graph_pipes(graph.traverse_dps(dataset)):
            if callable(getattr(pipe, "apply_sharding", None)) and getattr(pipe, "num_of_instances", 1) == 1:
                return True
    return False
