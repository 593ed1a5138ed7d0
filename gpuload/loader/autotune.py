"""How many workers, and how many batches ahead: the rule of ``"auto"``, without clock, processes or randomness.

Runs in the main process. `Autotune` belongs to a `Loader`, and outlives its sessions. It is fed once a batch with how
long the batch took and how much of that the loop waited for it. From time to time these make a *window*, long enough
for its means to say something, and `decide` looks at it:

- The loop waits, and workers are busy: more workers. It waits although they are not, for single slow samples, say: more
  batches ahead, which are begun earlier. It never waits, and workers are idle: fewer.
- Each such step is a *trial*: the next window says whether it did what it was for. If not, it is taken back, and that
  direction is *barred* for many batches, each time for twice as many; unless the loop or the data become others.
- No more workers than CPUs, unless they want little of these (they wait for a disk, or for other machines; a worker
  that waits for a CPU wants one), and no more than memory, open files and processes allow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

__all__ = ["Autotune", "Load", "Room", "Setting", "Step"]

# Of the time, that the loop waits. Between the two nothing is done: no swinging.
MUCH: Final = 0.03
LITTLE: Final = 0.01
AT_MOST: Final = 0.02  # after a step back; or by so much a batch may take longer
# A window's length: batches and seconds at least, then until its halves agree, but at most so many times as many. If
# the loop waits for this part of the time, or a trial does twice what it has to, it is clear before.
LEAST_BATCHES, LEAST_S, CLEAR = 4, 0.1, 0.5
AGREE, MOST_TIMES = 0.1, 3
RARE_BATCHES: Final = 12  # a window for waits that are rare
CALM_BATCHES: Final = 16  # a window when nothing is to be found out
# Of the workers' time: above, they are the reason for waiting; they should be busy this much after a step up, at most
# that much after one down.
TIGHT, FULL, EASY = 0.75, 0.9, 0.7
WORTH: Final = 0.03  # a step is tried if it would make a batch quicker by so much,
KEPT: Final = 1 / 3  # and kept if it did by this part of it
HELD: Final = 0.7  # more batches ahead are kept if the waits are this much of what they were
MOST_AHEAD: Final = 16
LEAP: Final = 4  # times as many workers at most, in one step;
SHORT: Final = 0.6  # if a batch is quicker only as if this part of them had come, the others are tried without
BARRED, MOST_BARRED = 500, 16_000  # batches
OTHER: Final = 0.3  # by so much the time of a batch changes, in two windows, if the loop or the data are others
PAUSE = 5, 0.005  # the loop's own time counts up to so many times its median, and seconds: it may validate in between

Way = Literal["more workers", "fewer workers", "more ahead", "less ahead"]


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


@dataclass(frozen=True, slots=True)
class _Seen:
    """The means of a window: seconds of a batch, seconds of these that the loop waited, and the workers' load."""

    seconds: float
    waited_s: float
    load: Load

    @property
    def share(self) -> float:
        """Of the time, that the loop waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def own_s(self) -> float:
        """What the loop itself needs for a batch."""
        return self.seconds - self.waited_s

    def with_workers(self, workers: int) -> float:
        """The seconds of a batch if so many workers share the work."""
        return max(self.own_s, self.load.busy * self.seconds / workers)

    def is_like(self, other: _Seen) -> bool:
        most = OTHER * max(self.seconds, other.seconds)
        return abs(self.seconds - other.seconds) <= most and abs(self.own_s - other.own_s) <= most


@dataclass(frozen=True, slots=True)
class _Trial:
    way: Way
    before: Setting
    seen: _Seen
    least_gain: float = 0.0  # of the seconds of a batch


@dataclass(slots=True)
class _Bar:
    until: int
    seen: _Seen
    unlike: int = 0  # windows in a row


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
        self._bar_for: dict[Way, int] = {}

    def watch(self, seconds: float, waited_s: float) -> bool:
        """A batch came, so long after the one before. True: the window is long enough for `decide`."""
        self._batches += 1
        self._window.append((max(0.0, seconds - waited_s), waited_s))
        self._total_s += seconds
        count, least = len(self._window), self._least
        if count < least or self._total_s < LEAST_S or (count - least) % (least // 4):
            return False
        if count >= MOST_TIMES * least or self._is_clear(self._total_s / count):
            return True
        first, second = (sum(map(sum, half)) for half in (self._window[: count // 2], self._window[-(count // 2) :]))
        return abs(first - second) <= AGREE * (first + second) / 2

    def _is_clear(self, seconds: float) -> bool:
        if self.settled:
            return False
        if (trial := self._trial) is not None:
            return trial.way == "more workers" and seconds <= (1 - 2 * trial.least_gain) * trial.seen.seconds
        return sum(waited for _, waited in self._window) > CLEAR * seconds * len(self._window)

    @property
    def _least(self) -> int:
        # Chunks that are begun together end together: all workers' chunks are a wave.
        least = max(LEAST_BATCHES, 4 * self._wave)
        if self._trial is not None and self._trial.before.ahead != self.setting.ahead:
            return max(least, RARE_BATCHES)
        return max(least, CALM_BATCHES) if self.settled else least

    @property
    def _wave(self) -> int:
        return -(-self.setting.workers // max(1, self.chunks))

    def forget(self) -> None:
        """What was seen in this window says nothing."""
        self._window.clear()
        self._total_s = 0.0

    def refused(self, workers: int) -> None:
        """No more than so many workers could be started."""
        self.setting = replace(self.setting, workers=workers)
        self._trial = None
        self.forget()

    def decide(self, load: Load, room: Callable[[], Room]) -> Step | None:
        """What to change after this window, if anything; it is in `setting` already. `room` is asked only if more of
        something would help."""
        own = [own for own, _ in self._window]
        most = PAUSE[0] * statistics.median(own) + PAUSE[1]
        waited_s = statistics.fmean(waited for _, waited in self._window)
        seen = _Seen(statistics.fmean(min(each, most) for each in own) + waited_s, waited_s, load)
        self.forget()
        self._bars = {way: bar for way, bar in self._bars.items() if self._still(bar, seen)}
        trial, self._trial = self._trial, None
        if trial is not None and not _helped(trial, seen):
            return self._with_more_ahead(trial, seen, room) or self._take_back(trial, seen)
        step = None
        if trial is not None and trial.way == "more workers":
            step = self._without_those_in_vain(trial, seen)
        step = step or self._propose(seen, room)
        self.settled = step is None
        return step

    def _still(self, bar: _Bar, seen: _Seen) -> bool:
        bar.unlike = 0 if seen.is_like(bar.seen) else bar.unlike + 1
        return self._batches < bar.until and bar.unlike < 2

    # -- steps ------------------------------------------------------------------------------------------------------

    def _propose(self, seen: _Seen, room: Callable[[], Room]) -> Step | None:
        if seen.share > MUCH:
            tight = seen.load.busy > TIGHT * self.setting.workers
            ways = (self._more_workers, self._more_ahead) if tight else (self._more_ahead, self._more_workers)
            self.verdict = f"the loop waits {seen.share:.0%} of the time, and more do not help"
            return ways[0](seen, room) or ways[1](seen, room)
        self.verdict = f"the loop waits {seen.share:.1%} of the time"
        return (self._fewer_workers(seen) or self._less_ahead(seen)) if seen.share < LITTLE else None

    def _more_workers(self, seen: _Seen, room: Callable[[], Room]) -> Step | None:
        now = self.setting.workers
        if not self._may("more workers"):
            return None
        # More than there are CPUs, only as far as workers leave these idle.
        most, by = max(self._cpus, int(EASY * self._cpus * now / max(seen.load.cpus, 1e-3))), "CPUs"
        if most > now and (allowed := room()).workers < most:
            most, by = allowed.workers, allowed.by
        if most <= now:
            self.verdict = f"the loop waits {seen.share:.0%} of the time, and more are not possible, limited by {by}"
            return None
        needed = seen.load.busy * seen.seconds / (FULL * seen.own_s) if seen.own_s else math.inf
        workers = min(most, max(now + 1, math.ceil(min(needed, LEAP * now))))
        tight = seen.load.busy > TIGHT * now
        gain = 1 - seen.with_workers(workers) / seen.seconds if tight else seen.share
        if gain < WORTH:
            return None
        return self._try("more workers", replace(self.setting, workers=workers), seen, KEPT * gain)

    def _fewer_workers(self, seen: _Seen) -> Step | None:
        workers = max(1, math.ceil(seen.load.busy / EASY))
        if workers >= self.setting.workers or not self._may("fewer workers"):
            return None
        return self._try("fewer workers", replace(self.setting, workers=workers), seen)

    def _with_more_ahead(self, trial: _Trial, seen: _Seen, room: Callable[[], Room]) -> Step | None:
        """A step up did not help, and workers are not busy: more ahead may do it. The same trial goes on."""
        tight = seen.load.busy > TIGHT * self.setting.workers
        if not trial.way.startswith("more") or tight or (step := self._more_ahead(seen, room)) is None:
            return None
        self._trial = trial
        return step

    def _without_those_in_vain(self, trial: _Trial, seen: _Seen) -> Step | None:
        """After a leap that helped, but less than so many workers should: another limit was met on the way."""
        worth = trial.before.workers * trial.seen.seconds / seen.seconds
        workers = math.ceil(worth / FULL)
        if seen.share > MUCH and worth < SHORT * self.setting.workers and workers < self.setting.workers:
            return self._try("fewer workers", replace(self.setting, workers=workers), seen)
        self._bar("fewer workers", seen)  # they are needed: not so soon
        return None

    def _more_ahead(self, seen: _Seen, room: Callable[[], Room]) -> Step | None:
        if self.setting.ahead >= MOST_AHEAD or not self._may("more ahead"):
            return None
        ahead = min(2 * self.setting.ahead, MOST_AHEAD, room().ahead)
        if ahead <= self.setting.ahead:
            return None
        return self._try("more ahead", replace(self.setting, ahead=ahead), seen)

    def _less_ahead(self, seen: _Seen) -> Step | None:
        ahead = max(self._start.ahead, self.setting.ahead // 2)
        long = self._batches - self._changed_at >= BARRED
        if ahead >= self.setting.ahead or not long or not self._may("less ahead"):
            return None
        return self._try("less ahead", replace(self.setting, ahead=ahead), seen)

    def _may(self, way: Way) -> bool:
        return self._tunes["workers" if "workers" in way else "ahead"] and way not in self._bars

    # -- trials -----------------------------------------------------------------------------------------------------

    def _try(self, way: Way, after: Setting, seen: _Seen, least_gain: float = 0.0) -> Step:
        self._trial = _Trial(way, self.setting, seen, least_gain)
        return self._step(
            after,
            f"the loop waits {seen.share:.0%} of the time ({_ms(seen.waited_s)} of {_ms(seen.seconds)} ms a batch), "
            f"and {seen.load.busy:.1f} of {self.setting.workers} workers are busy",
        )

    def _take_back(self, trial: _Trial, seen: _Seen) -> Step:
        self.settled = False
        if trial.way.startswith("more"):
            why = (
                f"{trial.way} did not help: a batch took {_ms(trial.seen.seconds)} ms with a wait of "
                f"{_ms(trial.seen.waited_s)}, and then {_ms(seen.seconds)} with {_ms(seen.waited_s)}"
            )
        else:
            why = f"{trial.way} cost time: the loop waited {trial.seen.share:.1%} of it, and then {seen.share:.1%}"
        batches = self._bar(trial.way, trial.seen)
        return self._step(trial.before, f"{why}; not tried again for {batches} batches")

    def _step(self, after: Setting, why: str) -> Step:
        before, self.setting, self._changed_at = self.setting, after, self._batches
        skip = 2 * self._wave - 1
        if after.workers < before.workers or after.ahead != before.ahead:
            skip += max(before.ahead, after.ahead)  # what is ready already hides for a while what has changed
        return Step(before, after, why, skip)

    def _bar(self, way: Way, seen: _Seen) -> int:
        """Do not go this way for a while; returns for how many batches."""
        batches = self._bar_for.get(way, BARRED)
        self._bar_for[way] = min(2 * batches, MOST_BARRED)
        self._bars[way] = _Bar(self._batches + batches, seen)
        return batches


def _helped(trial: _Trial, seen: _Seen) -> bool:
    """Whether a step did what it was for."""
    if trial.way == "more workers":
        return seen.seconds <= (1 - trial.least_gain) * trial.seen.seconds
    if trial.way == "more ahead":
        return seen.waited_s <= HELD * trial.seen.waited_s
    return seen.share <= AT_MOST or seen.seconds <= (1 + AT_MOST) * trial.seen.seconds


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
