"""Clocks and rounds: contenders run in a changing order, timed in CPU seconds or between CUDA events.

On the CPU all work is on one thread, so CPU seconds are those of one core, and other programs on the machine matter
little. On CUDA the figure is the time from one batch to the next, including the host's work if that is the bottleneck.
The results are plain values, for tables and JSON.
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
    """The milliseconds for a batch; the tables show `ms`. `peak_mb`: growth of the device memory of torch's allocator;
    None on the CPU."""

    ms: float
    wall_ms: float
    peak_mb: float | None = None


Clock = Callable[[Callable[[int], Any], int], Reading]
"""A function that runs a contender in a turn and returns the reading for a batch."""


@dataclass
class Row:
    """The readings of a contender, one per round, or the reason why there are none.

    `failed`: the error of a contender that should have run.
    """

    readings: list[Reading] = field(default_factory=list)
    falls_back: tuple[str, ...] = ()
    missing: str | None = None
    failed: str | None = None


@dataclass
class CaseResult:
    """The results of a case: the minimum bytes to move for a batch, the time of a plain copy of as many bytes, and one
    row per contender."""

    name: str
    section: str
    least_bytes: int
    roofline_ms: float
    rows: dict[str, Row]


def cpu_clock(run: Callable[[int], Any], turn: int) -> Reading:
    """Time one batch, in CPU milliseconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(turn)
    cpu = time.process_time() - cpu
    return Reading(1000 * cpu, 1000 * (time.perf_counter() - wall))


class CudaClock:
    """A clock that times as many batches as fill `round_s` seconds, at most `most`, between two events on the current
    stream."""

    def __init__(self, *, round_s: float = 0.1, most: int = 1000) -> None:
        self._round_s = round_s
        self._most = most

    def __call__(self, run: Callable[[int], Any], turn: int) -> Reading:
        allocated_before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        single = self._timed(run, turn * self._most, 1)
        peak_mb = (torch.cuda.max_memory_allocated() - allocated_before) / 1e6
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
    """Return the bytes per second that a plain copy on the device reads and writes in total."""
    return 2 * _copied(torch.ones(COPIED[device.type], dtype=torch.uint8, device=device), device)


def upload_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of copies from pinned host memory to the device; on the CPU, of a plain copy."""
    source = torch.ones(COPIED[device.type] // 4, dtype=torch.uint8)
    return _copied(source if device.type == "cpu" else source.pin_memory(), device)


def _copied(source: torch.Tensor, device: torch.device) -> float:
    """Copy to the device `COPIES` times. Returns the bytes per second of the fastest copy."""
    target, clock = torch.zeros(len(source), dtype=torch.uint8, device=device), clock_of(device)
    copy = partial(target.copy_, source, non_blocking=True)
    best_ms = min(clock(lambda turn: copy(), turn).ms for turn in range(COPIES[device.type]))
    return len(source) / (best_ms / 1000)


def measure(
    contenders: Mapping[str, Contender | str], clock: Clock, rounds: int, *, deadline: float | None = None
) -> dict[str, Row]:
    """Measure all contenders that can run, in `rounds` rounds after a warm-up round.

    A contender that raises is skipped from then on, and its row has the error. After `deadline`, a time of
    `time.monotonic`, no contender is started.
    """
    runnable = {name: contender for name, contender in contenders.items() if not isinstance(contender, str)}
    rows = {
        name: Row(missing=contender) if isinstance(contender, str) else Row(falls_back=contender.falls_back)
        for name, contender in contenders.items()
    }
    order = list(runnable)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in list(order):
            if deadline is not None and time.monotonic() > deadline:
                for row in (rows[other] for other in order if not rows[other].readings):
                    row.missing = "the time was up"
                return rows
            try:
                reading = clock(runnable[name].run, turn)
            except Exception as error:  # whatever a peer or backend raises, all others are still measured
                traceback.print_exc(file=sys.stderr)
                rows[name] = Row(failed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                order.remove(name)
                continue
            if turn:
                rows[name].readings.append(reading)
    return rows
