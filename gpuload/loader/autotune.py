"""The controller behind ``num_workers="auto"`` and ``prefetch_factor="auto"``. It runs in the main process.

`Autotune` is the tuning rule alone, without clock, processes or randomness. It belongs to a `Loader` and outlives its
sessions. For each batch, it receives the duration and how long the loop waited. Once a *window* of batches is large
enough for meaningful means, `decide` evaluates it. Each step is a *trial*: the next window shows whether the step had
the intended effect. If not, the step is reverted, and its direction is *barred* for many batches. docs/autotuning.md
describes the rule and its limits.

A `Tuner` measures while a session runs, applies the decisions, and logs them. It is called once per batch; a call takes
a few microseconds, and a little longer at the end of a window.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from gpuload.loader.limits import (
    SPARE_DESCRIPTORS,
    START_DESCRIPTORS,
    WORKER_BYTES,
    WORKER_DESCRIPTORS,
    descriptors_left,
    memory_left_bytes,
    processes_left,
    usable_cpus,
)
from gpuload.loader.options import DEFAULT_PREFETCH, Options
from gpuload.stage import Stage
from gpuload.workers.feed import Feed
from gpuload.workers.pool import WorkerPool

__all__ = ["MAX_AHEAD", "MAX_WORKER_GROWTH", "Autotune", "Load", "Room", "Setting", "Step", "Tuner", "autotune_for"]

# The share of the time that matters. If the loop waits for a larger share, and a step up would save that much, step up.
# Otherwise step down, as long as that does not cost more.
THRESHOLD: Final = 0.03
SATURATED: Final = 0.75  # if workers are busier than this, they are the reason for waiting
MIN_EFFECT: Final = 1 / 3  # keep a step up if it achieved this fraction of its expected effect
MAX_WORKER_GROWTH: Final = 4  # the maximum growth factor for workers in one step
MAX_AHEAD: Final = 16
# A window has at least MIN_BATCHES batches and MIN_S seconds. It ends once its two halves agree, once it has
# MAX_STRETCH times the minimum number of batches, or immediately if the loop waits so much (OBVIOUS_WAIT) that the
# result is clear.
MIN_BATCHES, MIN_S, MAX_DISAGREEMENT, MAX_STRETCH, OBVIOUS_WAIT = 4, 0.1, 0.1, 3, 0.5
RARE_BATCHES: Final = 12  # the minimum where waits are rare, and once tuning has settled
BAR_BATCHES, MAX_BAR_BATCHES = 500, 16_000  # how long a direction is barred, at first and at most
RELATIVE_CHANGE: Final = 0.3  # if a batch's time changes this much in two windows, the loop or the data have changed
PAUSE = 5, 0.005  # cap a batch's own time at 5 times the median + 5 ms: the loop may pause, e.g. for validation
MEMORY_SHARE: Final = 2  # a step uses at most 1/MEMORY_SHARE of the free memory, since a step's usage is only estimated

Direction = Literal["more workers", "fewer workers", "more ahead", "less ahead"]
logger = logging.getLogger("gpuload")


class Setting(NamedTuple):
    """The number of `workers`, and of batches to prepare `ahead` of the one in use."""

    workers: int
    ahead: int


class Load(NamedTuple):
    """Means over a window: the number of busy workers, and the number of CPUs that workers used or waited for."""

    busy: float
    cpus: float


class Room(NamedTuple):
    """The machine's current limits; `limited_by` names the resource that limits the workers."""

    workers: int
    ahead: int
    limited_by: str


class Step(NamedTuple):
    """A change of the setting, and the reason; the first `skip` batches after it are not representative."""

    before: Setting
    after: Setting
    reason: str
    skip: int

    def __str__(self) -> str:
        numbers = zip(("num_workers", "prefetch_factor"), self.before, self.after, strict=True)
        return f"{', '.join(f'{name} {old} → {new}' for name, old, new in numbers if old != new)}: {self.reason}"


class _Means(NamedTuple):
    """The means of a window: seconds per batch, how many of these the loop waited, and the workers' load."""

    seconds: float
    waited_s: float
    load: Load
    workers: int

    @property
    def waiting(self) -> float:
        """Return the share of the time that the loop waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def own_s(self) -> float:
        """Return the seconds per batch that the loop itself needs."""
        return self.seconds - self.waited_s

    @property
    def work_s(self) -> float:
        """Return the seconds per batch that all workers together need."""
        return self.load.busy * self.seconds

    @property
    def is_busy(self) -> bool:
        """Whether workers were busy most of the time."""
        return self.load.busy > SATURATED * self.workers

    def gain(self, workers: int) -> float:
        """Return the share of the time that this many workers are expected to save."""
        return 1 - max(self.own_s, self.work_s / workers) / self.seconds if self.is_busy else self.waiting

    def is_like(self, other: _Means) -> bool:
        tolerance = RELATIVE_CHANGE * max(self.seconds, other.seconds)
        return abs(self.seconds - other.seconds) <= tolerance and abs(self.own_s - other.own_s) <= tolerance


class _Trial(NamedTuple):
    """A step that the next window evaluates against the `means` before the step."""

    direction: Direction
    before: Setting
    after: Setting
    means: _Means

    def was_effective(self, means: _Means) -> bool:
        """Return whether the step had the intended effect."""
        if self.direction == "more workers":
            min_gain = MIN_EFFECT * self.means.gain(self.after.workers)
            if means.waiting <= THRESHOLD:  # there was less to gain, because a device worked while the loop waited
                min_gain = min(min_gain, THRESHOLD)
            return means.seconds <= (1 - min_gain) * self.means.seconds
        if self.direction == "more ahead":
            return means.waited_s <= (1 - MIN_EFFECT) * self.means.waited_s
        return means.waiting <= THRESHOLD or means.seconds <= (1 + THRESHOLD) * self.means.seconds

    def describe_failure(self, means: _Means) -> str:
        if self.direction.startswith("more"):
            return (
                f"{self.direction} did not help: a batch took {_ms(self.means.seconds)} ms, including a wait of "
                f"{_ms(self.means.waited_s)} ms, before, and {_ms(means.seconds)} ms, including {_ms(means.waited_s)} "
                "ms, after"
            )
        return (
            f"{self.direction} cost time: the loop waited {self.means.waiting:.1%} of the time before, and "
            f"{means.waiting:.1%} after"
        )


@dataclass(slots=True)
class _Bar:
    """A direction that is not tried for this many `batches`, or until two consecutive windows differ from `means`."""

    batches: int
    until: int
    means: _Means
    different_windows: int = 0


class Autotune:
    """The tuning rule. It only decides; a `Tuner` applies its decisions.

    Args:
        start: the initial setting.
        cpus: how many CPUs workers may use.
        workers, ahead: which of the two numbers to tune.

    Attributes:
        setting: the desired setting.
        chunks: the number of chunks per batch; set by the `Tuner`.
        is_settled: whether no trial is running, and there is nothing left to try.
        verdict: why the rule has settled.
    """

    def __init__(self, start: Setting, *, cpus: int, workers: bool = True, ahead: bool = True) -> None:
        self.setting = self._start = start
        self.chunks = 1
        self.is_settled = False
        self.verdict = ""
        self._cpus = cpus
        self._tunes = {"workers": workers, "ahead": ahead}
        self._batches = self._changed_at = 0
        self._window: list[tuple[float, float]] = []  # per batch: the loop's own seconds, and the seconds it waited
        self._trial: _Trial | None = None
        self._bars: dict[Direction, _Bar] = {}

    # -- windows ----------------------------------------------------------------------------------------------------

    def add_batch(self, seconds: float, waited_s: float) -> bool:
        """Add a batch, `seconds` after the previous batch; return whether the window is ready for `decide`."""
        self._batches += 1
        self._window.append((max(0.0, seconds - waited_s), waited_s))
        count, minimum = len(self._window), self._min_batches
        if count < minimum or (count - minimum) % (minimum // 4) or (total_s := sum(map(sum, self._window))) < MIN_S:
            return False
        is_obvious = not self.is_settled and sum(waited_s for _, waited_s in self._window) > OBVIOUS_WAIT * total_s
        if is_obvious or count >= MAX_STRETCH * minimum:
            return True
        early_s, late_s = (sum(map(sum, half)) for half in (self._window[: count // 2], self._window[-(count // 2) :]))
        return abs(early_s - late_s) <= MAX_DISAGREEMENT * (early_s + late_s) / 2

    @property
    def _min_batches(self) -> int:
        needs_more_batches = self.is_settled or (
            self._trial is not None and self._trial.before.ahead != self.setting.ahead
        )
        return max(RARE_BATCHES if needs_more_batches else MIN_BATCHES, 4 * self._concurrent_batches)

    @property
    def _concurrent_batches(self) -> int:
        """Return how many batches the workers process at a time: chunks that begin together also end together."""
        return -(-self.setting.workers // max(1, self.chunks))

    def discard_window(self) -> None:
        """Discard the batches of this window, since they are not representative."""
        self._window.clear()

    def _means(self, load: Load) -> _Means:
        step_times = [own_s for own_s, _ in self._window]
        maximum_s = PAUSE[0] * statistics.median(step_times) + PAUSE[1]
        waited_s = statistics.fmean(waited_s for _, waited_s in self._window)
        own_s = statistics.fmean(min(own_s, maximum_s) for own_s in step_times)
        seconds = own_s + waited_s
        # Workers are idle for most of a pause: time that does not count as the loop's does not count as theirs either.
        scale = (statistics.fmean(step_times) + waited_s) / seconds
        load = Load(min(load.busy * scale, self.setting.workers), load.cpus * scale)
        return _Means(seconds, waited_s, load, self.setting.workers)

    # -- trials -----------------------------------------------------------------------------------------------------

    def accept_limit(self, workers: int) -> None:
        """Set the number of workers to the number that could be started, and end the trial."""
        self.setting = self.setting._replace(workers=workers)
        self._trial = None
        self.discard_window()

    def decide(self, load: Load, room: Callable[[], Room]) -> Step | None:
        """Return the change to make after this window, if any, which `setting` already includes. `room` is only called
        if a larger number would help."""
        means = self._means(load)
        self.discard_window()
        for bar in self._bars.values():
            bar.different_windows = 0 if means.is_like(bar.means) else bar.different_windows + 1
            if bar.different_windows == 2:
                bar.until = 0
        trial, self._trial = self._trial, None
        if trial is not None and not trial.was_effective(means):
            if (
                trial.direction.startswith("more")
                and not means.is_busy
                and (step := self._try("more ahead", means, room))
            ):
                self._trial = trial  # continue the trial: raising both numbers may help where raising one does not
                return step
            batches = self._bar(trial.direction, trial.means)
            return self._change_setting(
                trial.before, f"{trial.describe_failure(means)}; not tried again for {batches} batches"
            )
        if trial is not None and trial.direction == "more workers":
            self._bar("fewer workers", means)  # the new workers helped, so do not remove them soon
        directions: tuple[Direction, ...] = ("fewer workers", "less ahead")
        self.verdict = f"the loop waits {means.waiting:.1%} of the time"
        if means.waiting > THRESHOLD:
            directions = ("more workers", "more ahead") if means.is_busy else ("more ahead", "more workers")
            self.verdict = f"the loop waits {means.waiting:.0%} of the time, and larger numbers do not help"
        step = self._try(directions[0], means, room) or self._try(directions[1], means, room)
        self.is_settled = step is None
        return step

    def _bar(self, direction: Direction, means: _Means) -> int:
        """Bar this direction, each time for twice as long; return the number of batches for which it is barred."""
        batches = min(2 * self._bars[direction].batches, MAX_BAR_BATCHES) if direction in self._bars else BAR_BATCHES
        self._bars[direction] = _Bar(batches, self._batches + batches, means)
        return batches

    def _try(self, direction: Direction, means: _Means, room: Callable[[], Room]) -> Step | None:
        """Begin a trial in this direction, unless the direction is barred or the step would change nothing."""
        is_barred = direction in self._bars and self._batches < self._bars[direction].until
        if is_barred or not self._tunes["workers" if "workers" in direction else "ahead"]:
            return None
        before = self.setting
        if direction == "more workers":
            after = before._replace(workers=self._next_workers(means, room))
        elif direction == "fewer workers":
            after = before._replace(workers=min(before.workers, max(1, math.ceil(means.load.busy / SATURATED))))
        elif direction == "more ahead":
            after = before._replace(ahead=self._next_ahead(room))
        else:
            is_stable = self._batches - self._changed_at >= BAR_BATCHES
            after = before._replace(ahead=max(self._start.ahead, before.ahead // 2)) if is_stable else before
        if after == before:
            return None
        self._trial = _Trial(direction, before, after, means)
        return self._change_setting(
            after,
            f"the loop waits {means.waiting:.0%} of the time ({_ms(means.waited_s)} of {_ms(means.seconds)} ms per "
            f"batch), and {means.load.busy:.1f} of {before.workers} workers are busy",
        )

    def _next_workers(self, means: _Means, room: Callable[[], Room]) -> int:
        """Return the number of workers that the work needs, within the limits; the current number if more workers would
        not save enough time."""
        current = self.setting.workers
        # Exceed the number of CPUs only as far as workers leave them idle.
        maximum, limit_name = (
            max(self._cpus, int(SATURATED * self._cpus * current / max(means.load.cpus, 1e-3))),
            "CPUs",
        )
        if maximum > current and (limits := room()).workers < maximum:
            maximum, limit_name = limits.workers, limits.limited_by
        if maximum <= current:
            self.verdict = f"the loop waits {means.waiting:.0%} of the time, and workers are limited by {limit_name}"
            return current
        required_workers = means.work_s / (SATURATED * means.own_s) if means.own_s else math.inf
        workers = min(maximum, max(current + 1, math.ceil(min(required_workers, MAX_WORKER_GROWTH * current))))
        return current if means.gain(workers) < THRESHOLD else workers

    def _next_ahead(self, room: Callable[[], Room]) -> int:
        current = self.setting.ahead
        return current if current >= MAX_AHEAD else max(current, min(2 * current, MAX_AHEAD, room().ahead))

    def _change_setting(self, after: Setting, reason: str) -> Step:
        before, self.setting, self._changed_at = self.setting, after, self._batches
        skip = 2 * self._concurrent_batches - 1
        if after.workers < before.workers or after.ahead != before.ahead:
            skip += max(before.ahead, after.ahead)  # batches that are already prefetched hide the effect at first
        return Step(before, after, reason, skip)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def autotune_for(options: Options) -> Autotune | None:
    """Return the tuning rule for a loader; None if neither number is "auto"."""
    workers = options.workers
    if not workers.count or "auto" not in (workers.num_workers, workers.prefetch_factor):
        return None
    tunes = {"workers": workers.num_workers == "auto", "ahead": workers.prefetch_factor == "auto"}
    return Autotune(Setting(workers.count, workers.prefetch), cpus=workers.cpus, **tunes)


class Tuner:
    """The measurements of one session, and the controls that apply the decisions of its `Autotune`."""

    def __init__(self, autotune: Autotune, options: Options, pool: WorkerPool, feed: Feed, stage: Stage) -> None:
        self._autotune, self._options, self._pool, self._feed, self._stage = autotune, options, pool, feed, stage
        self._last_yielded_at: float | None = None  # when the last batch was yielded
        self._skip = 0
        self._update_chunks()
        self._begin_window()
        self._set_cpu_threads()

    def begin(self) -> None:
        """Begin an epoch, whose first batch is ignored: its time does not depend on the number of workers."""
        self._add_to_totals()
        self._last_yielded_at = None

    def record_batch(self, waited_s: float) -> None:
        """Record that a batch is about to be yielded after the loop waited `waited_s` for it."""
        now = time.perf_counter()
        last_yielded_at, self._last_yielded_at = self._last_yielded_at, now
        if last_yielded_at is None:
            self._start_clocks = None
        elif not self._pool.is_steady:
            if self._pool.max_workers < self._autotune.setting.workers:
                self._autotune.accept_limit(self._pool.size)
                self._apply()
            self._begin_window()
        elif self._skip > 0:
            self._skip -= 1
        elif self._start_clocks is None:
            self._start_clocks = self._pool.busy_s(), self._pool.wanted_cpu_s()
        else:
            self._seconds += now - last_yielded_at
            if self._autotune.add_batch(now - last_yielded_at, waited_s):
                self._decide()

    def _begin_window(self) -> None:
        """Begin a new window."""
        self._start_clocks: tuple[float, dict[int, float]] | None = None  # the workers' clocks at the beginning
        self._busy_s = self._cpu_s = self._seconds = 0.0  # the window's totals before its last interruption
        self._autotune.discard_window()

    def _add_to_totals(self) -> None:
        """Add the workers' times since the window began or resumed to its totals."""
        if self._start_clocks is not None:
            (busy_s, cpu_s), self._start_clocks = self._start_clocks, None
            self._busy_s += self._pool.busy_s() - busy_s
            self._cpu_s += sum(after - cpu_s[pid] for pid, after in self._pool.wanted_cpu_s().items() if pid in cpu_s)

    def _decide(self) -> None:
        self._add_to_totals()
        busy = self._busy_s / self._seconds
        load = Load(busy, self._cpu_s / self._seconds or busy)  # without CPU times, assume that busy workers compute
        self._update_chunks()
        was_settled = self._autotune.is_settled
        step = self._autotune.decide(load, self._room)
        self._begin_window()
        if step is not None:
            self._skip = step.skip
            self._apply()
            logger.info("%s", step)
        elif not was_settled:
            setting, verdict = self._autotune.setting, self._autotune.verdict
            logger.info("settled at num_workers=%d, prefetch_factor=%d: %s", *setting, verdict)

    def _update_chunks(self) -> None:
        self._autotune.chunks = -(-self._options.order.size // self._feed.chunk_size)

    def _apply(self) -> None:
        setting = self._autotune.setting
        self._pool.resize(setting.workers)
        self._feed.workers = setting.workers
        self._feed.min_ahead, self._feed.ahead = self._options.batches_ahead(setting.workers, setting.ahead)
        self._set_cpu_threads()

    def _set_cpu_threads(self) -> None:
        """Give the stage the CPUs that workers do not use."""
        self._stage.cpu_threads = max(1, usable_cpus() - self._autotune.setting.workers)

    def _room(self) -> Room:
        """Return the machine's current limits."""
        current, memory = self._autotune.setting, memory_left_bytes()
        worker_limits = [(self._pool.max_workers, f"the maximum of {self._pool.max_workers}")]
        if memory is not None:
            worker_limits.append((current.workers + memory // MEMORY_SHARE // self._worker_bytes(), "memory"))
        if (descriptors := descriptors_left()) is not None:
            additional_workers = (descriptors - START_DESCRIPTORS - SPARE_DESCRIPTORS) // WORKER_DESCRIPTORS
            worker_limits.append((current.workers + additional_workers, "open files"))
        if (processes := processes_left()) is not None:
            worker_limits.append((current.workers + processes[0] // MEMORY_SHARE, "processes"))
        workers, limit_name = min(worker_limits)
        # Estimate a batch's memory in the ring from the batches in flight.
        ring = self._feed.ring
        batch_bytes = max(1, ring.slot_bytes // (len(self._feed.batches) + 1))
        ahead = ring.ring_bytes // batch_bytes - 2
        if memory is not None:
            ahead = min(ahead, current.ahead + memory // MEMORY_SHARE // batch_bytes)
        if self._options.order.iterable:  # then `ahead` is the number of batches per worker
            ahead //= current.workers
        return Room(workers, max(DEFAULT_PREFETCH, ahead), limit_name)

    def _worker_bytes(self) -> int:
        """Return the memory to expect for another worker: the largest private memory of the current workers."""
        private_bytes = [WORKER_BYTES]
        for pid in self._pool.pids:
            try:
                with open(f"/proc/{pid}/statm") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
            except OSError:  # the worker has ended
                continue
            private_bytes.append((resident - shared) * os.sysconf("SC_PAGE_SIZE"))
        return max(private_bytes)
