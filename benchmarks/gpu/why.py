"""Where the time of one session goes: windows of several ways in turn, over the same loader.

Each window drives the session in one way for a few seconds:

- workers: batches are taken from the workers and discarded: no stage, no tensors.
- alone: `next()` only.
- device: `next()`, then work that keeps the device busy for as long as ResNet-18's training step.
- host: `next()`, then the main thread is busy without the GIL, as while it launches a training step.

The first epoch comes before all windows and has figures of its own, since workers touch their memory for the first time
in it. CPU times, faults and switches are the kernel's, from /proc; who was busy and who planned is from
`loader.stats()`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import torch
from torch.autograd.profiler import profile

import gpuload as gl
from benchmarks.peers.gpuload import discard_batches, recipe_loader
from benchmarks.peers.protocol import Recipe
from gpuload.cli.processes import tree
from gpuload.loader.stats import Stats

__all__ = ["WAYS", "Snapshot", "Window", "busy_device", "busy_host", "explain"]

WAYS: Final = ("workers", "alone", "device", "host")
# ResNet-18's training step on an H200 for a batch of 256, and the host's part of it.
DEVICE_MS: Final = 19.3 / 256  # per image
HOST_MS: Final = 15 / 256
BUSY_BYTES: Final = 1 << 18  # hashing as much takes 0.1 to 0.3 ms, and releases the GIL
MATRIX: Final = 8192  # a product takes 1.4 ms on an H200
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
TABLE_ROWS: Final = 20


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that processes have used so far, by the kernel's count: CPU seconds, page faults without and with
    a read from disk, and the number of involuntary context switches."""

    user_s: float = 0.0
    system_s: float = 0.0
    minor_faults: int = 0
    major_faults: int = 0
    involuntary_switches: int = 0

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read the usage of a process; zeros if it has ended."""
        try:
            numbers = _stat_fields(Path(f"/proc/{pid}/stat"))
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return cls()
        switches = int(status.partition("nonvoluntary_ctxt_switches:")[2].split()[0])
        return cls(int(numbers[11]) * TICK_S, int(numbers[12]) * TICK_S, int(numbers[7]), int(numbers[9]), switches)

    def since(self, earlier: Usage) -> Usage:
        return Usage(
            *(max(0, getattr(self, item.name) - getattr(earlier, item.name)) for item in fields(self)),
        )

    def per_image(self, images: int) -> dict[str, float]:
        figures = {item.name: getattr(self, item.name) / max(1, images) for item in fields(self)}
        figures["user_us"], figures["system_us"] = 1e6 * figures.pop("user_s"), 1e6 * figures.pop("system_s")
        return figures


def _stat_fields(path: Path) -> list[str]:
    """Return the fields of a /proc stat file from the third on."""
    text = path.read_text()
    return text[text.rindex(")") + 2 :].split()  # the name, in parentheses, can contain spaces and parentheses


def _thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of each thread of this process, by id and name."""
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            numbers, name = _stat_fields(task / "stat"), (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        seconds[f"{task.name} {name}"] = (int(numbers[11]) + int(numbers[12])) * TICK_S
    return seconds


def _machine_ticks() -> tuple[int, int, int]:
    """Return the ticks of all CPUs together, of idle CPUs, and of CPUs that the hypervisor gave to others."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4], ticks[7]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters of a session, its workers and the machine at one moment."""

    time_s: float
    stats: Stats
    workers: dict[int, Usage]
    threads: dict[str, float]
    machine: tuple[int, int, int]

    @classmethod
    def take(cls, loader: gl.Loader, since: Snapshot | None = None) -> Snapshot:
        """Read all counters; `stats` counts from an earlier snapshot."""
        stats = loader.stats(since=None if since is None else since.stats)
        workers = {pid: Usage.of(pid) for pid in tree(os.getpid())[1:]}
        return cls(time.perf_counter(), stats, workers, _thread_seconds(), _machine_ticks())


@dataclass(slots=True)
class Window:
    """A window: its images, and the wall and CPU milliseconds of each `next()` in it."""

    images: int = 0
    next_ms: list[float] = field(default_factory=list)
    next_cpu_ms: list[float] = field(default_factory=list)

    def timed(self, batches: Iterator[Any]) -> None:
        """Take and count the next batch."""
        wall, cpu = time.perf_counter(), time.thread_time()
        images, _ = next(batches)
        self.next_ms.append(1000 * (time.perf_counter() - wall))
        self.next_cpu_ms.append(1000 * (time.thread_time() - cpu))
        self.images += len(images)

    def figures(self, before: Snapshot, after: Snapshot) -> dict[str, Any]:
        """Return the figures of the window between two snapshots."""
        stats, seconds = after.stats, after.time_s - before.time_s
        total, idle, stolen = (now - then for now, then in zip(after.machine, before.machine, strict=True))
        used = [usage.since(before.workers.get(pid, Usage())) for pid, usage in after.workers.items()]
        usage = Usage(*(sum(getattr(each, item.name) for each in used) for item in fields(Usage)))
        worker_s = max(stats.seconds * stats.num_workers, 1e-9)
        threads = {name: (used_s - before.threads.get(name, 0.0)) / seconds for name, used_s in after.threads.items()}
        return {
            "seconds": seconds,
            "images": self.images,
            "images_per_s": self.images / seconds,
            "worker_per_image": usage.per_image(self.images),
            "workers_busy": stats.busy / max(1, stats.num_workers),
            "workers_idle": stats.part("idle").seconds / worker_s,
            "workers_queued": stats.cpu.queued_s / worker_s,
            "machine_idle": idle / max(1, total),
            "steal": stolen / max(1, total),
            "main_cpu": sum(threads.values()),
            "main_threads": {name: share for name, share in threads.items() if share >= 0.005},
            "look_ahead": stats.prefetch_factor,
            "batches": stats.batches,
            "planned_by_workers": stats.part("plan", "workers").count,
            "slots": stats.ring.slots,
            "new_slots": stats.ring.grown,
            **_distribution("next", self.next_ms),
            **_distribution("next_cpu", self.next_cpu_ms),
        }


def _distribution(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"{name}_mean_ms": statistics.mean(values),
        f"{name}_median_ms": statistics.median(values),
        f"{name}_p95_ms": ordered[round(0.95 * (len(ordered) - 1))],
    }


def busy_device(device: torch.device, busy_ms: float, *, small: bool) -> Callable[[], None]:
    """Make a function that issues work of `busy_ms` for the device: matrix products on all its multiprocessors."""
    side = 16 if small else MATRIX
    matrices = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    result = torch.empty_like(matrices[0])
    repeats = 1 if small else _repeats(matrices, result, busy_ms)

    def work() -> None:
        for _ in range(repeats):
            torch.mm(matrices[0], matrices[1], out=result)

    return work


def _repeats(matrices: torch.Tensor, result: torch.Tensor, busy_ms: float) -> int:
    """Return how many products take `busy_ms` on the device."""
    module, trials = torch.get_device_module(matrices.device), 50
    for _ in range(trials):  # until the clocks have risen
        torch.mm(matrices[0], matrices[1], out=result)
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(trials):
        torch.mm(matrices[0], matrices[1], out=result)
    end.record()
    end.synchronize()
    return max(1, round(busy_ms * trials / start.elapsed_time(end)))


def busy_host(busy_ms: float) -> Callable[[], None]:
    """Make a function that keeps the calling thread busy for `busy_ms`, nearly always without the GIL."""
    data = bytes(BUSY_BYTES)

    def work() -> None:
        end = time.perf_counter() + busy_ms / 1000
        while time.perf_counter() < end:
            hashlib.sha256(data)

    return work


@dataclass
class Explained:
    """A session that is driven in different ways, one window at a time."""

    loader: gl.Loader
    busy: dict[str, Callable[[], None]]
    window_s: float
    min_steps: int

    def __post_init__(self) -> None:
        self.batches = self._endless()
        self._numbers = count(1_000_000)  # epochs of discarded batches

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def first_epoch(self) -> dict[str, Any]:
        """Run the first epoch, after its first batch, and return its figures."""
        window, before = Window(), Snapshot.take(self.loader)
        for _ in range(len(self.loader) - 1):
            window.timed(self.batches)
        return window.figures(before, Snapshot.take(self.loader, before))

    def window(self, way: str) -> dict[str, Any]:
        """Drive the session in one way for a window, and return its figures."""
        window = Window()
        if way == "workers":
            figures = self._discarded(window)
            self.batches = self._endless()
            next(self.batches)
        else:
            work, before = self.busy.get(way), Snapshot.take(self.loader)
            end = before.time_s + self.window_s
            while time.perf_counter() < end or len(window.next_ms) < self.min_steps:
                window.timed(self.batches)
                if work is not None:
                    work()
            _synchronize()
            figures = window.figures(before, Snapshot.take(self.loader, before))
        return {"way": way, **figures}

    def _discarded(self, window: Window) -> dict[str, Any]:
        """Discard the workers' batches for a window. The current epoch of the loop is over then."""
        discarded = discard_batches(self.loader, next(self._numbers))
        for images in islice(discarded, 2):  # the pipeline fills
            del images
        batch_count, before = 0, Snapshot.take(self.loader)
        end = before.time_s + self.window_s
        while time.perf_counter() < end or batch_count < self.min_steps:
            images = next(discarded, None)
            if images is None:
                discarded = discard_batches(self.loader, next(self._numbers))
                continue
            window.images += images
            batch_count += 1
        return window.figures(before, Snapshot.take(self.loader, before))

    def trace(self, path: Path, batches: int) -> dict[str, Any]:
        """Trace batches with torch's profiler, write the trace for Chrome, and return the functions that took most of
        the main thread's time, ms per batch."""
        next(self.batches)
        device = self.loader.stats().stage.device.partition(":")[0]
        # `torch.profiler.profile` is the same and imports torch's compiler, which takes seconds.
        recorded = profile(use_kineto=True, use_device=None if device == "cpu" else device)
        with recorded:
            for _ in range(batches):
                next(self.batches)
            _synchronize()
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
        with open(path, "rb") as source, gzip.open(f"{path}.gz", "wb", 6) as target:
            shutil.copyfileobj(source, target)
        path.unlink()
        averages = sorted(recorded.key_averages(), key=lambda item: -item.self_cpu_time_total)[:TABLE_ROWS]
        functions = [
            {
                "name": item.key,
                "calls": item.count / batches,
                "self_cpu_ms": item.self_cpu_time_total / 1000 / batches,
                "device_ms": item.self_device_time_total / 1000 / batches,
            }
            for item in averages
        ]
        return {"file": f"{path.name}.gz", "batches": batches, "functions": functions}


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def explain(
    recipe: Recipe, pace: Any, trace: Path, tell: Callable[[dict[str, Any]], None], runtime_device: torch.device
) -> None:
    """Explain one session; `tell` gets the figures after each window. The trace is written to `trace`."""
    busy = {
        "device": busy_device(runtime_device, DEVICE_MS * recipe.batch_size, small=pace.small),
        "host": busy_host(0.1 if pace.small else HOST_MS * recipe.batch_size),
    }
    loader = recipe_loader(recipe)
    with loader:
        started = time.perf_counter()
        session = Explained(loader, busy, pace.window_s, pace.steps)
        next(session.batches)
        _synchronize()
        tell({"first_batch_s": time.perf_counter() - started})
        tell({"first_epoch": session.first_epoch()})
        windows: list[dict[str, Any]] = []
        for number in range(pace.window_rounds):
            start = number % len(WAYS)
            for way in (*WAYS[start:], *WAYS[:start]):
                windows.append(session.window(way))
                tell({"windows": windows})
        tell({"stats": str(loader.stats())})
        tell({"trace": session.trace(trace, pace.traced_batches)})
