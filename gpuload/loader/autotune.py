"""How many workers, and how many batches ahead: what ``"auto"`` decides, and does. Runs in the main process.

`Autotune` is the rule, without clock, processes or randomness. It belongs to a `Loader`, and outlives its sessions. It
is fed once a batch with how long the batch took and how much of that the loop waited for it. From time to time these
make a *window*, long enough for its means to say something, and `decide` looks at it:

- The loop waits, and workers are busy: more workers. It waits although they are not, for single slow samples, say: more
  batches ahead, which are begun earlier. It does not wait, and workers are idle: fewer.
- Each such step is a *trial*: the next window says whether it did what it was for. If not, it is taken back, and that
  direction is *barred* for many batches, each time for twice as many; unless the loop or the data become others.
- No more workers than CPUs, unless they want little of these (they wait for a disk, or for other machines; a worker
  that waits for a CPU wants one), and no more than memory, open files and processes allow.

A `Tuner` measures for it while a session runs, does what it says, and logs it. It is called once a batch, which costs
some microseconds, and some more at the end of a window.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

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
from gpuload.workers.protocol import Engine

__all__ = ["LEAP", "MOST_AHEAD", "Autotune", "Load", "Room", "Setting", "Step", "Tuner", "autotune_for", "tuner_for"]

# The share of the time that matters: the loop waits for more, or a step up would save so much: up. Else, down, as long
# as it costs no more.
THRESHOLD: Final = 0.03
TIGHT: Final = 0.75  # the share of the workers' time above which they are the reason for waiting
KEPT: Final = 1 / 3  # a step up is kept if it brought this part of what was expected
LEAP: Final = 4  # times as many workers at most, in one step
MOST_AHEAD: Final = 16
# A window's length: batches and seconds at least, then until its halves agree, but at most so many times as many. If
# the loop waits for more than this part of the time, it is clear before.
MIN_BATCHES, MIN_S, AGREE, MOST_TIMES, CLEAR = 4, 0.1, 0.1, 3, 0.5
RARE_BATCHES: Final = 12  # at least, for waits that are rare, and when nothing is to be found out
BARRED, MOST_BARRED = 500, 16_000  # batches
OTHER: Final = 0.3  # by so much the time of a batch changes, in two windows, if the loop or the data are others
PAUSE = 5, 0.005  # the loop's own time counts up to so many times its median, and seconds: it may validate in between
MEMORY_SHARE: Final = 2  # a step takes at most 1/MEMORY_SHARE of the memory left: a guess has to be far from the limit

Way = Literal["more workers", "fewer workers", "more ahead", "less ahead"]
logger = logging.getLogger("gpuload")


@dataclass(frozen=True, slots=True)
class Setting:
    """`workers` processes; `ahead` batches in work besides the one in use."""

    workers: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Load:
    """Means over a window: how many workers were at chunks, and how many CPUs they all used or waited for."""

    busy: float
    cpus: float


@dataclass(frozen=True, slots=True)
class Room:
    """What the machine allows now; `by` is what limits the workers."""

    workers: int
    ahead: int
    by: str


@dataclass(frozen=True, slots=True)
class Step:
    """A change, and why; the first `skip` batches after it say nothing yet."""

    before: Setting
    after: Setting
    why: str
    skip: int

    def __str__(self) -> str:
        before, after = self.before, self.after
        numbers = [
            ("num_workers", before.workers, after.workers),
            ("prefetch_factor", before.ahead, after.ahead),
        ]
        changes = ", ".join(f"{name} {old} → {new}" for name, old, new in numbers if old != new)
        return f"{changes}: {self.why}"


@dataclass(frozen=True, slots=True)
class _Means:
    """The means of a window: seconds of a batch, seconds of these that the loop waited, and the workers' load."""

    seconds: float
    waited_s: float
    load: Load
    workers: int

    @property
    def waiting(self) -> float:
        """The share of the time that the loop waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def own_s(self) -> float:
        """What the loop itself needs for a batch."""
        return self.seconds - self.waited_s

    @property
    def is_tight(self) -> bool:
        """Whether workers had enough to do."""
        return self.load.busy > TIGHT * self.workers

    def is_like(self, other: _Means) -> bool:
        most = OTHER * max(self.seconds, other.seconds)
        return abs(self.seconds - other.seconds) <= most and abs(self.own_s - other.own_s) <= most


@dataclass(frozen=True, slots=True)
class _Trial:
    """A step that the next window judges by the means before it; `min_gain` is a share of the seconds of a batch."""

    way: Way
    before: Setting
    means: _Means
    min_gain: float

    def helped(self, means: _Means) -> bool:
        """Whether the step did what it was for."""
        if self.way == "more workers":
            return means.seconds <= (1 - self.min_gain) * self.means.seconds
        if self.way == "more ahead":
            return means.waited_s <= (1 - KEPT) * self.means.waited_s
        return means.waiting <= THRESHOLD or means.seconds <= (1 + THRESHOLD) * self.means.seconds


@dataclass(slots=True)
class _Bar:
    """A direction that is not tried for so many `batches`, or until two windows in a row are unlike `means`."""

    batches: int
    until: int
    means: _Means
    unlike: int = 0


class Autotune:
    """Decides; others do it.

    Args:
        start: what it begins with.
        cpus: how many CPUs workers may use.
        workers, ahead: which of the two it may change.

    Attributes:
        setting: what should be.
        chunks: that a batch is cut into; for somebody who knows to set.
        settled: nothing is being tried, and nothing is left to try.
        verdict: why it is settled.
    """

    def __init__(self, start: Setting, *, cpus: int, workers: bool = True, ahead: bool = True) -> None:
        self.setting = start
        self.chunks = 1
        self.settled = False
        self.verdict = ""
        self._start = start
        self._cpus = cpus
        self._tunes = {"workers": workers, "ahead": ahead}
        self._batches = 0
        self._changed_at = 0
        self._window: list[tuple[float, float]] = []  # of each batch: the loop's own seconds, and those it waited
        self._total_s = 0.0  # of the window
        self._trial: _Trial | None = None
        self._bars: dict[Way, _Bar] = {}

    def watch(self, seconds: float, waited_s: float) -> bool:
        """Take in that a batch came, so long after the one before. True: the window is long enough for `decide`."""
        self._batches += 1
        self._window.append((max(0.0, seconds - waited_s), waited_s))
        self._total_s += seconds
        count, least = len(self._window), self._min_batches
        if count < least or self._total_s < MIN_S or (count - least) % (least // 4):
            return False
        is_clear = not self.settled and sum(waited_s for _, waited_s in self._window) > CLEAR * self._total_s
        if is_clear or count >= MOST_TIMES * least:
            return True
        first, second = (sum(map(sum, half)) for half in (self._window[: count // 2], self._window[-(count // 2) :]))
        return abs(first - second) <= AGREE * (first + second) / 2

    @property
    def _min_batches(self) -> int:
        is_rare = self.settled or (self._trial is not None and self._trial.before.ahead != self.setting.ahead)
        return max(RARE_BATCHES if is_rare else MIN_BATCHES, 4 * self._wave)

    @property
    def _wave(self) -> int:
        """How many batches the workers' chunks are: chunks that are begun together end together."""
        return -(-self.setting.workers // max(1, self.chunks))

    def forget(self) -> None:
        """Forget the batches of this window: they say nothing."""
        self._window.clear()
        self._total_s = 0.0

    def refused(self, workers: int) -> None:
        """Accept that no more than so many workers could be started."""
        self.setting = replace(self.setting, workers=workers)
        self._trial = None
        self.forget()

    def decide(self, load: Load, room: Callable[[], Room]) -> Step | None:
        """Return what to change after this window, if anything; it is in `setting` already. `room` is asked only if
        more of something would help."""
        means = self._means(load)
        self.forget()
        for bar in self._bars.values():
            bar.unlike = 0 if means.is_like(bar.means) else bar.unlike + 1
            if bar.unlike == 2:
                bar.until = 0
        trial, self._trial = self._trial, None
        if trial is not None and not trial.helped(means):
            if trial.way.startswith("more") and not means.is_tight and (step := self._more_ahead(means, room)):
                self._trial = trial  # goes on: more of both may help where one alone does not
                return step
            return self._take_back(trial, means)
        if trial is not None and trial.way == "more workers":
            self._bar("fewer workers", means)  # they are needed: not so soon
        step = self._propose(means, room)
        self.settled = step is None
        return step

    def _means(self, load: Load) -> _Means:
        own = [own_s for own_s, _ in self._window]
        most = PAUSE[0] * statistics.median(own) + PAUSE[1]
        waited_s = statistics.fmean(waited_s for _, waited_s in self._window)
        own_s = statistics.fmean(min(own_s, most) for own_s in own)
        return _Means(own_s + waited_s, waited_s, load, self.setting.workers)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _propose(self, means: _Means, room: Callable[[], Room]) -> Step | None:
        if means.waiting > THRESHOLD:
            ways = (self._more_workers, self._more_ahead) if means.is_tight else (self._more_ahead, self._more_workers)
            self.verdict = f"the loop waits {means.waiting:.0%} of the time, and more do not help"
            return ways[0](means, room) or ways[1](means, room)
        self.verdict = f"the loop waits {means.waiting:.1%} of the time"
        return self._fewer_workers(means) or self._less_ahead(means)

    def _more_workers(self, means: _Means, room: Callable[[], Room]) -> Step | None:
        now = self.setting.workers
        if not self._may("more workers"):
            return None
        # More than there are CPUs, only as far as workers leave these idle.
        most, by = max(self._cpus, int(TIGHT * self._cpus * now / max(means.load.cpus, 1e-3))), "CPUs"
        if most > now and (allowed := room()).workers < most:
            most, by = allowed.workers, allowed.by
        if most <= now:
            self.verdict = f"the loop waits {means.waiting:.0%} of the time, and more are not possible, limited by {by}"
            return None
        work_s = means.load.busy * means.seconds  # of all workers, for a batch
        needed = work_s / (TIGHT * means.own_s) if means.own_s else math.inf
        workers = min(most, max(now + 1, math.ceil(min(needed, LEAP * now))))
        gain = 1 - max(means.own_s, work_s / workers) / means.seconds if means.is_tight else means.waiting
        if gain < THRESHOLD:
            return None
        return self._try("more workers", replace(self.setting, workers=workers), means, KEPT * gain)

    def _fewer_workers(self, means: _Means) -> Step | None:
        workers = max(1, math.ceil(means.load.busy / TIGHT))
        if workers >= self.setting.workers or not self._may("fewer workers"):
            return None
        return self._try("fewer workers", replace(self.setting, workers=workers), means)

    def _more_ahead(self, means: _Means, room: Callable[[], Room]) -> Step | None:
        if self.setting.ahead >= MOST_AHEAD or not self._may("more ahead"):
            return None
        ahead = min(2 * self.setting.ahead, MOST_AHEAD, room().ahead)
        if ahead <= self.setting.ahead:
            return None
        return self._try("more ahead", replace(self.setting, ahead=ahead), means)

    def _less_ahead(self, means: _Means) -> Step | None:
        ahead = max(self._start.ahead, self.setting.ahead // 2)
        is_calm = self._batches - self._changed_at >= BARRED
        if ahead >= self.setting.ahead or not is_calm or not self._may("less ahead"):
            return None
        return self._try("less ahead", replace(self.setting, ahead=ahead), means)

    def _may(self, way: Way) -> bool:
        is_barred = way in self._bars and self._batches < self._bars[way].until
        return self._tunes["workers" if "workers" in way else "ahead"] and not is_barred

    # -- trials -----------------------------------------------------------------------------------------------------

    def _try(self, way: Way, after: Setting, means: _Means, min_gain: float = 0.0) -> Step:
        self._trial = _Trial(way, self.setting, means, min_gain)
        return self._step(
            after,
            f"the loop waits {means.waiting:.0%} of the time ({_ms(means.waited_s)} of {_ms(means.seconds)} ms a "
            f"batch), and {means.load.busy:.1f} of {self.setting.workers} workers are busy",
        )

    def _take_back(self, trial: _Trial, means: _Means) -> Step:
        self.settled = False
        if trial.way.startswith("more"):
            why = (
                f"{trial.way} did not help: a batch took {_ms(trial.means.seconds)} ms with a wait of "
                f"{_ms(trial.means.waited_s)}, and then {_ms(means.seconds)} with {_ms(means.waited_s)}"
            )
        else:
            why = (
                f"{trial.way} cost time: the loop waited {trial.means.waiting:.1%} of it, and then {means.waiting:.1%}"
            )
        batches = self._bar(trial.way, trial.means)
        return self._step(trial.before, f"{why}; not tried again for {batches} batches")

    def _step(self, after: Setting, why: str) -> Step:
        before, self.setting, self._changed_at = self.setting, after, self._batches
        skip = 2 * self._wave - 1
        if after.workers < before.workers or after.ahead != before.ahead:
            skip += max(before.ahead, after.ahead)  # what is ready already hides for a while what has changed
        return Step(before, after, why, skip)

    def _bar(self, way: Way, means: _Means) -> int:
        """Do not go this way for a while; return for how many batches: each time for twice as many."""
        batches = min(2 * self._bars[way].batches, MOST_BARRED) if way in self._bars else BARRED
        self._bars[way] = _Bar(batches, self._batches + batches, means)
        return batches


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def autotune_for(options: Options) -> Autotune | None:
    """Return what decides a loader's numbers; None if both were given."""
    workers = options.workers
    if not workers.count or "auto" not in (workers.num_workers, workers.prefetch_factor):
        return None
    start = Setting(workers.count, workers.prefetch)
    return Autotune(
        start, cpus=workers.cpus, workers=workers.num_workers == "auto", ahead=workers.prefetch_factor == "auto"
    )


def tuner_for(autotune: Autotune | None, options: Options, engine: Engine, feed: Feed, stage: Stage) -> Tuner | None:
    """Return the tuner of a session; None if there is nothing to tune."""
    if autotune is None or not isinstance(engine, WorkerPool):
        return None
    return Tuner(autotune, options, engine, feed, stage)


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
        """Begin an epoch: its first batch takes as long as one takes, however many workers there are."""
        self._bank()
        self._last = None

    def batch(self, waited_s: float) -> None:
        """Take in that a batch is about to be given, for which the loop waited so long."""
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
            logger.info("%s", step)
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
        """Let the stage have the CPUs that workers leave."""
        self._stage.cpu_threads = max(1, usable_cpus() - self._autotune.setting.workers)

    def _room(self) -> Room:
        """Return what the machine allows now."""
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
        """Return what one more worker takes: what the largest of these has to itself."""
        sizes = [WORKER_BYTES]
        for pid in self._pool.pids:
            try:
                with open(f"/proc/{pid}/statm") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
            except OSError:  # it is gone
                continue
            sizes.append((resident - shared) * os.sysconf("SC_PAGE_SIZE"))
        return max(sizes)
