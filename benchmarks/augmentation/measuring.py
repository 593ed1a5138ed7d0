"""How time is taken: contenders in rounds, in an order that changes, by CPU seconds or between CUDA events.

On the CPU all work is on one thread, so CPU seconds are those of one core, and other programs on the machine count
little. On CUDA the figure is what a batch takes from one to the next, including the host's work if that is the slower
part. The results are plain values, for tables and JSON.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.augmentation.contenders import Contender

COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes: far more than any cache holds
COPIES = {"cpu": 7, "cuda": 20}


@dataclass(frozen=True)
class Reading:
    """Milliseconds for a batch: `ms` is what the tables show. `peak_mb`: device memory beyond what was held before, of
    torch's allocator; None on the CPU."""

    ms: float
    wall_ms: float
    peak_mb: float | None = None


Clock = Callable[[Callable[[int], Any], int], Reading]
"""Runs a contender in a turn, and returns what a batch took."""


@dataclass
class Row:
    """What was measured of a contender: a reading for each round; or why there is none.

    `failed`: it should have run, and raised this.
    """

    readings: list[Reading] = field(default_factory=list)
    falls_back: tuple[str, ...] = ()
    missing: str | None = None
    failed: str | None = None


@dataclass
class CaseResult:
    """A case: the bytes that must move for a batch, how long a plain copy takes for as many, and a row for each
    contender."""

    name: str
    section: str
    least_bytes: int
    roofline_ms: float
    rows: dict[str, Row]


def cpu_clock(run: Callable[[int], Any], turn: int) -> Reading:
    """Time one batch, in CPU milliseconds of this process."""
    wall, spent = time.perf_counter(), time.process_time()
    run(turn)
    spent = time.process_time() - spent
    return Reading(1000 * spent, 1000 * (time.perf_counter() - wall))


class CudaClock:
    """Times as many batches as fill `round_s` seconds, `most` at most, between two events on the current stream."""

    def __init__(self, *, round_s: float = 0.1, most: int = 1000) -> None:
        self._round_s = round_s
        self._most = most

    def __call__(self, run: Callable[[int], Any], turn: int) -> Reading:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        single = self._timed(run, turn * self._most, 1)
        peak_mb = (torch.cuda.max_memory_allocated() - held) / 1e6
        count = max(1, min(self._most - 1, int(1000 * self._round_s / max(single.wall_ms, 1e-3))))
        reading = self._timed(run, turn * self._most + 1, count) if count > 1 else single
        return Reading(reading.ms, reading.wall_ms, peak_mb)

    def _timed(self, run: Callable[[int], Any], turn: int, count: int) -> Reading:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        wall = time.perf_counter()
        start.record()
        for number in range(count):
            run(turn + number)
        end.record()
        torch.cuda.synchronize()
        wall = time.perf_counter() - wall
        return Reading(start.elapsed_time(end) / count, 1000 * wall / count)


def clock_of(device: torch.device) -> Clock:
    return cpu_clock if device.type == "cpu" else CudaClock()


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that a plain copy on the device moves, those that it reads and those that it writes."""
    return 2 * _copied(torch.ones(COPIED[device.type], dtype=torch.uint8, device=device), device)


def upload_bandwidth(device: torch.device) -> float:
    """Return the bytes a second from page-locked memory of the host to the device; on the CPU, of a copy."""
    source = torch.ones(COPIED[device.type] // 4, dtype=torch.uint8)
    return _copied(source if device.type == "cpu" else source.pin_memory(), device)


def _copied(source: torch.Tensor, device: torch.device) -> float:
    """Copy to the device several times. Returns the bytes a second of the fastest copy."""
    target, clock = torch.zeros(len(source), dtype=torch.uint8, device=device), clock_of(device)
    copy = partial(target.copy_, source, non_blocking=True)
    best_ms = min(clock(lambda turn: copy(), turn).ms for turn in range(COPIES[device.type]))
    return len(source) / (best_ms / 1000)


def measure(
    contenders: Mapping[str, Contender | str], clock: Clock, rounds: int, *, deadline: float | None = None
) -> dict[str, Row]:
    """Measure all that can run, `rounds` times; the round before the first is not counted.

    A contender that raises is left out from there on, and its row says why. After `deadline`, by `time.monotonic`, no
    round is begun.
    """
    able = {name: contender for name, contender in contenders.items() if not isinstance(contender, str)}
    rows = {
        name: Row(missing=contender) if isinstance(contender, str) else Row(falls_back=contender.falls_back)
        for name, contender in contenders.items()
    }
    order = list(able)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in list(order):
            if deadline is not None and time.monotonic() > deadline:
                for late in (rows[other] for other in order if not rows[other].readings):
                    late.missing = "the time was up"
                return rows
            try:
                reading = clock(able[name].run, turn)
            except Exception as error:  # a peer, or a backend, that cannot do it: all others are still measured
                traceback.print_exc(file=sys.stderr)
                rows[name] = Row(failed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                order.remove(name)
                continue
            if turn:
                rows[name].readings.append(reading)
    return rows
