"""Schedules the batches of an iterable dataset: each batch comes from one worker, and the workers take turns.

In round b each worker whose iterator has not ended returns its batch number b, in the order of the workers. So the
order of batches does not depend on the speed of the workers, unless the user chooses ``in_order=False``: then each
batch is returned as soon as it is ready. The progress of each worker is updated when one of its batches is due, so a
saved state is exact in both cases. Runs in the main process, in the thread that iterates.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpuload.order.place import DIGESTED_SAMPLES, IterablePlace, IterableStart, Place
from gpuload.order.ranks import announce
from gpuload.order.spec import BatchSpec

__all__ = ["IterableSchedule", "has_sharding_filter"]

_pass_numbers = itertools.count(1)  # identify passes for the workers
_comparison_numbers = itertools.count(1)  # identify comparisons with other ranks, one per loader


@dataclass(kw_only=True)
class IterableSchedule:
    """A schedule that requests batches from the workers in turn. Sample n of worker w has the position
    (n × workers + w) × ranks + rank.

    Args:
        batch_size: the number of samples in a batch.
        drop_last: whether to drop a worker's last samples if they do not fill a batch.
        workers: the number of workers; 1 if the main process does the work.
        rank, world_size: this process's rank and the number of ranks; the dataset decides which samples each rank gets.
        issued_warnings: the subjects of warnings that were already issued.
        promised_lengths: the dataset's length at the last ``len(loader)`` call; empty before the first.
        in_order: if True, workers take turns; if False, a slow worker does not delay the others.
    """

    batch_size: int
    drop_last: bool
    workers: int
    rank: int
    world_size: int
    issued_warnings: set[str] = field(default_factory=set)
    promised_lengths: Sequence[int] = ()
    in_order: bool = True
    _pass: _Pass | None = field(default=None, init=False)

    def steps(self, place: Place) -> None:
        """Return None: the number of batches is unknown."""

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        self._pass = _Pass(self, next(_pass_numbers), place)
        return self._pass.batches()

    def place_after(self, epoch: int) -> Place:
        """Return the place after an epoch. It has only the states of datasets, because the next epoch has new
        iterators."""
        assert self._pass is not None
        return Place(epoch + 1, 0, iterable_progress=self._pass.progress_at_end())


class _Pass:
    """An epoch of an `IterableSchedule`."""

    def __init__(self, schedule: IterableSchedule, pass_number: int, place: Place) -> None:
        entry = place.iterable_progress or {}
        self._schedule = schedule
        self._pass_number = pass_number
        self._epoch = place.epoch
        self._turn = entry.get("turn", 0)
        self._step = entry.get("step", 0)
        # The progress of each worker, up to the last of its batches that was due.
        self._progress = [IterablePlace(**worker) for worker in entry.get("workers", ())] or [
            IterablePlace(0, False) for _ in range(schedule.workers)
        ]
        self._digests: dict[int, tuple[bytes, ...]] = {}
        self._pending = [0] * len(self._progress)  # batches of each worker that are not due yet
        self._warning = ""  # issued with the next batch

    def batches(self) -> Iterator[BatchSpec]:
        schedule = self._schedule
        workers, batch_size = schedule.workers, schedule.batch_size
        stride, offset = workers * schedule.world_size, schedule.world_size
        requested_samples = [place.samples for place in self._progress]
        worker = self._turn
        # Step numbers of all requested batches. `_on_due` numbers again, counting only batches that reach the user.
        step_numbers = itertools.count()
        while not all(place.ended for place in self._progress):
            if not schedule.in_order:  # choose the worker with the fewest pending batches, or the next one of several
                active = (i for i, place in enumerate(self._progress) if not place.ended)
                worker = min(active, key=lambda i: (self._pending[i], (i - worker) % workers))
            if not self._progress[worker].ended:
                self._pending[worker] += 1
                sample_numbers = np.arange(batch_size, dtype=np.int64) + requested_samples[worker]
                requested_samples[worker] += batch_size
                place = self._progress[worker]
                start = IterableStart(
                    self._pass_number, worker, place.samples, place.state, stride, worker * offset + schedule.rank
                )
                positions = sample_numbers * stride + start.offset
                yield BatchSpec(
                    next(step_numbers),
                    self._epoch,
                    positions,
                    sample_numbers,
                    iterable=start,
                    queue=0 if schedule.in_order else worker,
                    on_due=self._on_due,
                )
            worker = (worker + 1) % workers

    def _on_due(
        self, spec: BatchSpec, samples: int, is_empty: bool, chunk_progress: Sequence[IterablePlace]
    ) -> BatchSpec | None:
        assert spec.iterable is not None
        worker = spec.iterable.worker
        self._pending[worker] -= 1
        latest = max(chunk_progress, key=lambda place: place.samples, default=None)
        self._progress[worker] = IterablePlace(
            self._progress[worker].samples + samples,
            any(place.ended or place.broken for place in chunk_progress),
            state=None if latest is None else latest.state,
        )
        if latest is not None:
            warning = self._duplicate_workers_warning(worker, latest) or self._duplicate_ranks_warning(worker, latest)
            self._warning = self._warning or warning
        self._warning = self._warning or self._length_warning()
        self._turn = (worker + 1) % len(self._progress)
        if is_empty or (self._schedule.drop_last and samples < self._schedule.batch_size):
            return None
        step, self._step = self._step, self._step + 1
        warning, self._warning = self._warning, ""
        positions, sample_numbers = spec.positions[:samples], spec.indices[:samples]
        return replace(
            spec, step=step, positions=positions, indices=sample_numbers, after=self._current_place(), warning=warning
        )

    def _duplicate_workers_warning(self, worker: int, place: IterablePlace) -> str:
        """Return a warning if the first samples of this worker equal those of another worker.

        Identical samples alone prove nothing: each worker may have a different share of a dataset of zeros.
        """
        if len(self._progress) < 2 or "workers" in self._schedule.issued_warnings:
            return ""
        self._digests[worker] = place.digests
        for other_worker, digests in self._digests.items():
            count = min(len(digests), len(place.digests))
            is_complete = place.ended and self._progress[other_worker].ended and len(digests) == len(place.digests)
            if other_worker == worker or count < (1 if is_complete else 2):
                continue
            are_equal = digests[:count] == place.digests[:count] and b"" not in digests[:count]
            if are_equal and (not place.read_worker_info or len(set(digests[:count])) > 1):
                self._schedule.issued_warnings.add("workers")
                return (
                    f"workers {min(worker, other_worker)} and {max(worker, other_worker)} yielded the same first "
                    f"{count} samples: each of the {len(self._progress)} workers iterates over the entire dataset, so "
                    f"every sample appears {len(self._progress)} times. In __iter__ call "
                    "torch.utils.data.get_worker_info() and yield only the worker's share according to `id` and "
                    "`num_workers`, or use num_workers=1"
                )
        return ""

    def _duplicate_ranks_warning(self, worker: int, place: IterablePlace) -> str:
        """Return a warning if the first samples of this rank's first worker equal those of another rank."""
        schedule, digests = self._schedule, place.digests
        if worker or schedule.world_size < 2 or "ranks" in schedule.issued_warnings:
            return ""
        if len(digests) < DIGESTED_SAMPLES and not place.ended:
            return ""
        schedule.issued_warnings.add("ranks")  # one comparison per loader
        if b"" in digests or len(set(digests)) < 2:  # identical samples prove nothing; see `_duplicate_workers_warning`
            return ""
        announcement = f"{next(_comparison_numbers)}/{self._epoch}/{b''.join(digests).hex()}"
        other_rank = announce(announcement, schedule.rank)
        if other_rank == schedule.rank:
            return ""
        return (
            f"ranks {other_rank} and {schedule.rank} of {schedule.world_size} yielded the same first {len(digests)} "
            "samples: each rank iterates over the entire dataset, so every sample appears once on each rank. In "
            "__iter__ get `rank` and `world_size` from gpuload.get_worker_info() or torch.distributed and yield only "
            "the rank's share; if each rank should read the entire dataset, pass rank=0, world_size=1"
        )

    def _length_warning(self) -> str:
        """Return a warning if there are more samples than the dataset's len(), on which ``len(loader)`` was based."""
        schedule, samples = self._schedule, sum(place.samples for place in self._progress)
        if (
            not schedule.promised_lengths
            or samples <= schedule.promised_lengths[-1]
            or schedule.issued_warnings & {"length", "workers"}
        ):
            return ""
        schedule.issued_warnings.add("length")
        hint = "; each worker must yield only its share, see get_worker_info()" if len(self._progress) > 1 else ""
        return (
            f"the dataset's len() is {schedule.promised_lengths[-1]}, on which len(loader) is based, but the dataset "
            f"yielded {samples} samples in epoch {self._epoch}{hint}"
        )

    def progress_at_end(self) -> dict[str, Any] | None:
        """Return the workers' progress for a state that is saved between two epochs; None if no dataset has a state."""
        states = [(place.state or {}).get("dataset") for place in self._progress]
        if all(state is None for state in states):
            return None
        workers = [
            {"samples": 0, "ended": False, "state": None if state is None else {"dataset": state}} for state in states
        ]
        return {"turn": 0, "step": 0, "workers": workers}

    def _current_place(self) -> Place:
        workers = [{"samples": place.samples, "ended": place.ended, "state": place.state} for place in self._progress]
        return Place(self._epoch, 0, iterable_progress={"turn": self._turn, "step": self._step, "workers": workers})


def has_sharding_filter(dataset: Any) -> bool:
    """Return whether a dataset is a torch datapipe with a ``sharding_filter()`` that has not been configured."""
    if not any(cls.__module__ == "torch.utils.data.datapipes.datapipe" for cls in type(dataset).__mro__):
        return False
    from torch.utils.data import graph, graph_settings

    with contextlib.suppress(Exception):  # some pipes cannot be traversed
        for pipe in graph_settings.get_all_graph_pipes(graph.traverse_dps(dataset)):
            if callable(getattr(pipe, "apply_sharding", None)) and getattr(pipe, "num_of_instances", 1) == 1:
                return True
    return False
