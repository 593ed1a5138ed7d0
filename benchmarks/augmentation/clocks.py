"""How time is taken: CPU seconds of this process, or CUDA events around many batches; and what copying memory takes.

On the CPU all work on one thread, so CPU seconds are those of one core, and other programs on the machine count little.
On CUDA the figure is what a batch takes from one to the next, the host's work included where it is the slower part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "Reading", "copy_bandwidth", "upload_bandwidth"]

COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes: far more than any cache holds
COPIES = {"cpu": 7, "cuda": 20}


@dataclass(frozen=True)
class Reading:
    """Milliseconds for a batch: `ms` is what the tables show. `peak_mb`: device memory beyond what was held before, of
    torch's allocator; None on the CPU."""

    ms: float
    wall_ms: float
    peak_mb: float | None = None


class Clock(Protocol):
    """Runs a contender in a turn, and says what a batch took."""

    def __call__(self, run: Callable[[int], Any], turn: int) -> Reading: ...


class CpuClock:
    """One batch, in CPU milliseconds of this process."""

    def __call__(self, run: Callable[[int], Any], turn: int) -> Reading:
        wall, spent = time.perf_counter(), time.process_time()
        run(turn)
        spent = time.process_time() - spent
        return Reading(1000 * spent, 1000 * (time.perf_counter() - wall))


class CudaClock:
    """As many batches as fill a tenth of a second, between two events on the current stream.

    Args:
        round_s: how long a round is to take, about.
        most: batches in a round, at most.
    """

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


def copy_bandwidth(device: torch.device, clock: Clock) -> float:
    """Bytes a second that a plain copy moves, those that it reads and those that it writes; the best of several."""
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best_ms = min(clock(lambda turn: target.copy_(source), turn).ms for turn in range(COPIES[device.type]))
    return 2 * len(source) / (best_ms / 1000)


def upload_bandwidth(device: torch.device, clock: Clock) -> float:
    """Bytes a second from page-locked memory of the host to the device, the best of several; on the CPU, of a copy."""
    source = torch.ones(COPIED[device.type] // 4, dtype=torch.uint8)
    if device.type != "cpu":
        source = source.pin_memory()
    target = torch.zeros(len(source), dtype=torch.uint8, device=device)
    upload = partial(target.copy_, source, non_blocking=True)
    best_ms = min(clock(lambda turn: upload(), turn).ms for turn in range(COPIES[device.type]))
    return len(source) / (best_ms / 1000)
