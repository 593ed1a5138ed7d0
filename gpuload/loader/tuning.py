"""Tuning while a session runs: measures for an `Autotune`, does what it says, and logs it.

One for a session, in the main process; called once a batch, which costs some microseconds, and some more at the end of
a window. What is decided outlives it, in the `Autotune`.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from gpuload.loader.autotune import Autotune, Load, Room, Setting, Step
from gpuload.loader.cpus import usable_cpus
from gpuload.loader.limits import (
    SPARE_DESCRIPTORS,
    START_DESCRIPTORS,
    WORKER_BYTES,
    WORKER_DESCRIPTORS,
    descriptors_left,
    memory_left_bytes,
    processes_left,
)
from gpuload.loader.options import DEFAULT_PREFETCH, Options
from gpuload.stage import Stage
from gpuload.workers.feed import Feed
from gpuload.workers.pool import WorkerPool

if TYPE_CHECKING:
    from gpuload.workers.protocol import Engine

__all__ = ["Tuner", "autotune_for", "tuner_for"]

MEMORY_SHARE = (
    2  # at most 1/MEMORY_SHARE of the memory that is left, for one step: a guess has to be far from the limit
)
logger = logging.getLogger("gpuload")


def autotune_for(options: Options) -> Autotune | None:
    """What a loader's numbers are decided by; None if both were given."""
    workers = options.workers
    if not workers.count or "auto" not in (workers.num_workers, workers.prefetch_factor):
        return None
    start = Setting(workers.count, workers.prefetch)
    return Autotune(
        start, cpus=workers.cpus, workers=workers.num_workers == "auto", ahead=workers.prefetch_factor == "auto"
    )


def tuner_for(autotune: Autotune | None, options: Options, engine: Engine, feed: Feed, stage: Stage) -> Tuner | None:
    """The tuner of a session; None if there is nothing to tune."""
    return (
        None
        if autotune is None or not isinstance(engine, WorkerPool)
        else Tuner(autotune, options, engine, feed, stage)
    )


class Tuner:
    """Sets the number of workers and of batches ahead of one session."""

    def __init__(self, autotune: Autotune, options: Options, pool: WorkerPool, feed: Feed, stage: Stage) -> None:
        self._autotune = autotune
        self._options = options
        self._pool = pool
        self._feed = feed
        self._stage = stage
        self._last: float | None = None  # when the last batch was given
        self._skip = 0
        self._since: tuple[float, dict[int, float]] | None = None  # the workers' clocks when the window (re)began
        self._busy_s = self._cpu_s = self._seconds = 0.0  # of the window, before that
        autotune.chunks = -(-options.order.size // feed.chunk_size)
        autotune.forget()
        self._leave_cpus()

    def begin(self) -> None:
        """An epoch begins: its first batch takes as long as one takes, however many workers there are."""
        self._bank()
        self._last = None

    def batch(self, waited_s: float) -> None:
        """A batch is about to be given, for which the loop waited so long."""
        now = time.perf_counter()
        last, self._last = self._last, now
        if last is None:
            self._since = None
        elif not self._pool.is_steady:
            if self._pool.most < self._autotune.setting.workers:
                self._autotune.refused(self._pool.size)
                self._apply()
            self._restart()
        elif self._skip > 0:
            self._skip -= 1
        elif self._since is None:
            self._since = self._pool.busy_s(), self._pool.wanted_cpu_s()
        else:
            self._seconds += now - last
            if self._autotune.watch(now - last, waited_s):
                self._decide()

    def _restart(self) -> None:
        self._since = None
        self._busy_s = self._cpu_s = self._seconds = 0.0
        self._autotune.forget()

    def _bank(self) -> None:
        """Add up what workers did since the window (re)began."""
        if self._since is not None:
            (busy_s, cpu_s), self._since = self._since, None
            self._busy_s += self._pool.busy_s() - busy_s
            self._cpu_s += sum(after - cpu_s[pid] for pid, after in self._pool.wanted_cpu_s().items() if pid in cpu_s)

    def _decide(self) -> None:
        self._bank()
        busy = self._busy_s / self._seconds
        load = Load(busy, self._cpu_s / self._seconds or busy)  # not known: as if they did nothing but compute
        was_settled = self._autotune.settled
        self._autotune.chunks = -(-self._options.order.size // self._feed.chunk_size)
        step = self._autotune.decide(load, self._room)
        self._restart()
        if step is not None:
            self._skip = step.skip
            self._apply()
            logger.info("%s: %s", _told(step), step.why)
        elif not was_settled:
            setting = self._autotune.setting
            logger.info(
                "settled at num_workers=%d, prefetch_factor=%d: %s",
                setting.workers,
                setting.ahead,
                self._autotune.verdict,
            )

    def _apply(self) -> None:
        setting = self._autotune.setting
        self._pool.resize(setting.workers)
        self._feed.workers = setting.workers
        self._feed.ahead = self._options.ahead_for(setting.workers, setting.ahead)
        self._leave_cpus()

    def _leave_cpus(self) -> None:
        """The stage has the CPUs that workers leave."""
        self._stage.cpu_threads = max(1, usable_cpus() - self._autotune.setting.workers)

    def _room(self) -> Room:
        """What the machine allows now."""
        now, memory = self._autotune.setting, memory_left_bytes()
        allowed = [(self._pool.most, f"{self._pool.most} in all")]
        if memory is not None:
            allowed.append((now.workers + memory // MEMORY_SHARE // self._worker_bytes(), "memory"))
        if (descriptors := descriptors_left()) is not None:
            more = (descriptors - START_DESCRIPTORS - SPARE_DESCRIPTORS) // WORKER_DESCRIPTORS
            allowed.append((now.workers + more, "open files"))
        if (processes := processes_left()) is not None:
            allowed.append((now.workers + processes[0] // MEMORY_SHARE, "processes"))
        workers, by = min(allowed)
        # What a batch takes of the ring, by what those in work take.
        ring = self._feed.ring
        a_batch = max(1, ring.slot_bytes // (self._feed.ahead + 1))
        ahead = ring.ring_bytes // a_batch - 2
        if memory is not None:
            ahead = min(ahead, now.ahead + memory // MEMORY_SHARE // a_batch)
        if self._options.order.iterable:  # for each worker
            ahead //= now.workers
        return Room(workers, max(DEFAULT_PREFETCH, ahead), by)

    def _worker_bytes(self) -> int:
        """What one more worker takes: what the largest of these has to itself."""
        sizes = [WORKER_BYTES]
        for pid in self._pool.pids:
            try:
                with open(f"/proc/{pid}/statm") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
            except OSError:  # it is gone
                continue
            sizes.append((resident - shared) * os.sysconf("SC_PAGE_SIZE"))
        return max(sizes)


def _told(step: Step) -> str:
    told = []
    if step.before.workers != step.after.workers:
        told.append(f"num_workers {step.before.workers} → {step.after.workers}")
    if step.before.ahead != step.after.ahead:
        told.append(f"prefetch_factor {step.before.ahead} → {step.after.ahead}")
    return ", ".join(told)
