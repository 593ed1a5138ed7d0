"""How many workers, and how many batches ahead: what ``"auto"`` decides, and does. Runs in the main process.

`Autotune` is the rule, without clock, processes or randomness. It belongs to a `Loader`, and outlives its sessions. It
is fed once a batch with how long the batch took and how much of that the loop waited for it. From time to time these
make a *window*, long enough for its means to say something, and `decide` looks at it. Each step is a *trial*: the next
window says whether it did what it was for. If not, it is taken back, and that direction is *barred* for many batches.
docs/autotuning.md has the rule, and its limits.

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

__all__ = ["LEAP", "MOST_AHEAD", "Autotune", "Load", "Room", "Setting", "Step", "Tuner", "autotune_for"]

# The share of the time that matters: the loop waits for more, or a step up would save so much: up. Else, down, as long
# as it costs no more.
THRESHOLD: Final = 0.03
TIGHT: Final = 0.75  # the share of the workers' time above which they are the reason for waiting
KEPT: Final = 1 / 3  # a step up is kept if it brought this part of what was expected
LEAP: Final = 4  # times as many workers at most, in one step
MOST_AHEAD: Final = 16
# A window's length: batches and seconds at least, then until its halves agree, but at most this many times as many. If
# the loop waits for more than this part of the time, it is clear before.
MIN_BATCHES, MIN_S, AGREE, MOST_TIMES, CLEAR = 4, 0.1, 0.1, 3, 0.5
RARE_BATCHES: Final = 12  # at least, for waits that are rare, and when nothing is to be found out
BARRED, MOST_BARRED = 500, 16_000  # batches
OTHER: Final = 0.3  # by so much the time of a batch changes, in two windows, if the loop or the data are others
PAUSE = 5, 0.005  # the loop's own time counts up to this many times its median, and seconds: it may validate in between
MEMORY_SHARE: Final = 2  # a step takes at most 1/MEMORY_SHARE of the memory left: a guess has to be far from the limit

Way = Literal["more workers", "fewer workers", "more ahead", "less ahead"]
logger = logging.getLogger("gpuload")


class Setting(NamedTuple):
    """`workers` processes; `ahead` batches in work besides the one in use."""

    workers: int
    ahead: int


class Load(NamedTuple):
    """Means over a window: how many workers were at chunks, and how many CPUs they all used or waited for."""

    busy: float
    cpus: float


class Room(NamedTuple):
    """Limits of the machine now; `by` is what limits the workers."""

    workers: int
    ahead: int
    by: str


class Step(NamedTuple):
    """A change, and why; the first `skip` batches after it say nothing yet."""

    before: Setting
    after: Setting
    why: str
    skip: int

    def __str__(self) -> str:
        numbers = zip(("num_workers", "prefetch_factor"), self.before, self.after, strict=True)
        return f"{', '.join(f'{name} {old} → {new}' for name, old, new in numbers if old != new)}: {self.why}"


class _Means(NamedTuple):
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
        """Seconds that the loop itself needs for a batch."""
        return self.seconds - self.waited_s

    @property
    def work_s(self) -> float:
        """Seconds that all workers together need for a batch."""
        return self.load.busy * self.seconds

    @property
    def is_tight(self) -> bool:
        """Whether workers had enough to do."""
        return self.load.busy > TIGHT * self.workers

    def gain(self, workers: int) -> float:
        """Return the share of the time that more workers are expected to save."""
        return 1 - max(self.own_s, self.work_s / workers) / self.seconds if self.is_tight else self.waiting

    def is_like(self, other: _Means) -> bool:
        most = OTHER * max(self.seconds, other.seconds)
        return abs(self.seconds - other.seconds) <= most and abs(self.own_s - other.own_s) <= most


class _Trial(NamedTuple):
    """A step that the next window judges by the `means` before it."""

    way: Way
    before: Setting
    after: Setting
    means: _Means

    def helped(self, means: _Means) -> bool:
        """Whether the step did what it was for."""
        if self.way == "more workers":
            return means.seconds <= (1 - KEPT * self.means.gain(self.after.workers)) * self.means.seconds
        if self.way == "more ahead":
            return means.waited_s <= (1 - KEPT) * self.means.waited_s
        return means.waiting <= THRESHOLD or means.seconds <= (1 + THRESHOLD) * self.means.seconds

    def in_vain(self, means: _Means) -> str:
        """Say that it did not."""
        if self.way.startswith("more"):
            return (
                f"{self.way} did not help: a batch took {_ms(self.means.seconds)} ms with a wait of "
                f"{_ms(self.means.waited_s)}, and then {_ms(means.seconds)} with {_ms(means.waited_s)}"
            )
        return f"{self.way} cost time: the loop waited {self.means.waiting:.1%} of it, and then {means.waiting:.1%}"


@dataclass(slots=True)
class _Bar:
    """A direction that is not tried for this many `batches`, or until two windows in a row are unlike `means`."""

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
        self.setting = self._start = start
        self.chunks = 1
        self.settled = False
        self.verdict = ""
        self._cpus = cpus
        self._tunes = {"workers": workers, "ahead": ahead}
        self._batches = self._changed_at = 0
        self._window: list[tuple[float, float]] = []  # of each batch: the loop's own seconds, and those it waited
        self._trial: _Trial | None = None
        self._bars: dict[Way, _Bar] = {}

    # -- windows ----------------------------------------------------------------------------------------------------

    def watch(self, seconds: float, waited_s: float) -> bool:
        """Take in that a batch came, so long after the one before. True: the window is long enough for `decide`."""
        self._batches += 1
        self._window.append((max(0.0, seconds - waited_s), waited_s))
        count, minimum = len(self._window), self._min_batches
        if count < minimum or (count - minimum) % (minimum // 4) or (total_s := sum(map(sum, self._window))) < MIN_S:
            return False
        is_clear = not self.settled and sum(waited_s for _, waited_s in self._window) > CLEAR * total_s
        if is_clear or count >= MOST_TIMES * minimum:
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

    def _means(self, load: Load) -> _Means:
        step_times = [own_s for own_s, _ in self._window]
        most = PAUSE[0] * statistics.median(step_times) + PAUSE[1]
        waited_s = statistics.fmean(waited_s for _, waited_s in self._window)
        own_s = statistics.fmean(min(own_s, most) for own_s in step_times)
        return _Means(own_s + waited_s, waited_s, load, self.setting.workers)

    # -- trials -----------------------------------------------------------------------------------------------------

    def refused(self, workers: int) -> None:
        """Accept that no more than this many workers could be started."""
        self.setting = self.setting._replace(workers=workers)
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
            if trial.way.startswith("more") and not means.is_tight and (step := self._try("more ahead", means, room)):
                self._trial = trial  # goes on: more of both may help where one alone does not
                return step
            batches = self._bar(trial.way, trial.means)
            return self._step(trial.before, f"{trial.in_vain(means)}; not tried again for {batches} batches")
        if trial is not None and trial.way == "more workers":
            self._bar("fewer workers", means)  # they are needed: not so soon
        ways: tuple[Way, ...] = ("fewer workers", "less ahead")
        self.verdict = f"the loop waits {means.waiting:.1%} of the time"
        if means.waiting > THRESHOLD:
            ways = ("more workers", "more ahead") if means.is_tight else ("more ahead", "more workers")
            self.verdict = f"the loop waits {means.waiting:.0%} of the time, and more do not help"
        step = self._try(ways[0], means, room) or self._try(ways[1], means, room)
        self.settled = step is None
        return step

    def _bar(self, way: Way, means: _Means) -> int:
        """Do not go this way for a while; return for how many batches: each time for twice as many."""
        batches = min(2 * self._bars[way].batches, MOST_BARRED) if way in self._bars else BARRED
        self._bars[way] = _Bar(batches, self._batches + batches, means)
        return batches

    def _try(self, way: Way, means: _Means, room: Callable[[], Room]) -> Step | None:
        """Go a way, if it may be gone, and leads anywhere."""
        is_barred = way in self._bars and self._batches < self._bars[way].until
        if is_barred or not self._tunes["workers" if "workers" in way else "ahead"]:
            return None
        before = self.setting
        if way == "more workers":
            after = before._replace(workers=self._more_workers(means, room))
        elif way == "fewer workers":
            after = before._replace(workers=min(before.workers, max(1, math.ceil(means.load.busy / TIGHT))))
        elif way == "more ahead":
            after = before._replace(ahead=self._more_ahead(room))
        else:
            is_calm = self._batches - self._changed_at >= BARRED
            after = before._replace(ahead=max(self._start.ahead, before.ahead // 2)) if is_calm else before
        if after == before:
            return None
        self._trial = _Trial(way, before, after, means)
        return self._step(
            after,
            f"the loop waits {means.waiting:.0%} of the time ({_ms(means.waited_s)} of {_ms(means.seconds)} ms a "
            f"batch), and {means.load.busy:.1f} of {before.workers} workers are busy",
        )

    def _more_workers(self, means: _Means, room: Callable[[], Room]) -> int:
        """Return how many workers the work needs, as far as they are allowed, and if that saves enough."""
        now = self.setting.workers
        # More than there are CPUs, only as far as workers leave these idle.
        most, by = max(self._cpus, int(TIGHT * self._cpus * now / max(means.load.cpus, 1e-3))), "CPUs"
        if most > now and (allowed := room()).workers < most:
            most, by = allowed.workers, allowed.by
        if most <= now:
            self.verdict = f"the loop waits {means.waiting:.0%} of the time, and more are not possible, limited by {by}"
            return now
        needed = means.work_s / (TIGHT * means.own_s) if means.own_s else math.inf
        workers = min(most, max(now + 1, math.ceil(min(needed, LEAP * now))))
        return now if means.gain(workers) < THRESHOLD else workers

    def _more_ahead(self, room: Callable[[], Room]) -> int:
        now = self.setting.ahead
        return now if now >= MOST_AHEAD else max(now, min(2 * now, MOST_AHEAD, room().ahead))

    def _step(self, after: Setting, why: str) -> Step:
        before, self.setting, self._changed_at = self.setting, after, self._batches
        skip = 2 * self._wave - 1
        if after.workers < before.workers or after.ahead != before.ahead:
            skip += max(before.ahead, after.ahead)  # what is ready already hides for a while what has changed
        return Step(before, after, why, skip)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def autotune_for(options: Options) -> Autotune | None:
    """Return what decides a loader's numbers; None if both were given."""
    workers = options.workers
    if not workers.count or "auto" not in (workers.num_workers, workers.prefetch_factor):
        return None
    tunes = {"workers": workers.num_workers == "auto", "ahead": workers.prefetch_factor == "auto"}
    return Autotune(Setting(workers.count, workers.prefetch), cpus=workers.cpus, **tunes)


class Tuner:
    """Sets the number of workers and of batches ahead of one session."""

    def __init__(self, autotune: Autotune, options: Options, pool: WorkerPool, feed: Feed, stage: Stage) -> None:
        self._autotune, self._options, self._pool, self._feed, self._stage = autotune, options, pool, feed, stage
        self._last: float | None = None  # when the last batch was given
        self._skip = 0
        self._look_at_chunks()
        self._restart()
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
        """Begin a window."""
        self._since: tuple[float, dict[int, float]] | None = None  # the workers' clocks when the window (re)began
        self._busy_s = self._cpu_s = self._seconds = 0.0  # of the window, before that
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
        self._look_at_chunks()
        was_settled = self._autotune.settled
        step = self._autotune.decide(load, self._room)
        self._restart()
        if step is not None:
            self._skip = step.skip
            self._apply()
            logger.info("%s", step)
        elif not was_settled:
            setting, verdict = self._autotune.setting, self._autotune.verdict
            logger.info("settled at num_workers=%d, prefetch_factor=%d: %s", *setting, verdict)

    def _look_at_chunks(self) -> None:
        self._autotune.chunks = -(-self._options.order.size // self._feed.chunk_size)

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
