"""How much of the workers' work reaches the loop with up to 63 workers, measured on any machine.

    python -m benchmarks.scale [--json FILE]
    FAKECUDA_POLICY=never TRITON_INTERPRET=0 python tests/fakecuda/build.py -m benchmarks.scale --backends torch fused

The samples take as long as photographs take to decode, but workers sleep for this time (`benchmarks.sleeping`), so two
CPUs can run 63 of them. What is left is the scheduling of chunks, and the main process's own work. After each batch the
loop is busy for a while: it sleeps, as during a training step that waits for a device, or computes, and holds the GIL.
The throughput is compared with that of as many processes that only sleep, without a loader.

The second command measures a loader that feeds a GPU, on the fake CUDA runtime (`tests/fakecuda`; run `make
test-cuda-fake` first, and use the Python of `.venv-cuda-fake`): the main process issues all copies, events and
launches, and nothing is executed. Every cell is measured after a complete epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch

import gpuload as gl
from benchmarks.host import use_fake_cuda
from benchmarks.machine import versions
from benchmarks.peers.protocol import MEAN, STD
from benchmarks.running import (
    Verdict,
    describe_machine,
    format_table,
    make_parser,
    print_verdicts,
    run_module,
    write_results,
)
from benchmarks.sleeping import SAMPLE_MS, SIDE, SleepingImages
from gpuload import transforms as T

WORKERS: Final = (4, 15, 31, 63)
BATCH_SIZES: Final = (16, 32, 64, 128, 256, 512)
LOOPS: Final = ("0", "1", "9", "20", "9 GIL")  # how long the loop is busy for each batch, ms, and what it holds
# Batches that are not measured: the first of an epoch, while the pipeline fills, and the last, prepared in advance.
FILL_BATCHES, REST_BATCHES = 20, 50
MIN_BATCHES, MAX_BATCHES, MAX_S = 40, 300, 4.0
GOAL, MAX_LOAD, MAX_BATCHES_PER_S = 0.95, 0.8, 250  # the goal, and the cells to which it applies
HEADINGS: Final = (
    "backend", "workers", "batch", "loop busy, ms", "ahead", "delivered / ideal", "idle", "next(), ms", "95%", "CPU",
    "planned by workers", "in the goal",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """The result of one combination.

    Attributes:
        ahead: the look-ahead, in batches.
        delivered: samples per second, relative to processes that only sleep.
        idle: the share of the time that workers have no chunk.
        next_ms, next_p95_ms, next_cpu_ms: mean, 95th percentile and mean CPU time of the main thread's ``next()``.
        planned: the share of the batches that workers planned.
        counts: whether the goal applies: the loop and ``next()`` leave enough of a batch's time, and batches are not
            too small for their rate.
    """

    backend: str
    workers: int
    batch_size: int
    loop: str
    ahead: int
    delivered: float
    idle: float
    next_ms: float
    next_p95_ms: float
    next_cpu_ms: float
    planned: float
    counts: bool

    def format(self) -> list[str]:
        names = self.backend, str(self.workers), str(self.batch_size), self.loop, str(self.ahead)
        shares = f"{self.delivered:.1%}", f"{self.idle:.0%}"
        times = (f"{ms:.2f}" for ms in (self.next_ms, self.next_p95_ms, self.next_cpu_ms))
        return [*names, *shares, *times, f"{self.planned:.0%}", "yes" if self.counts else ""]


def measure(backend: str, workers: int, batch_size: int, options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of a loader, one for each loop."""
    count = round(options.seconds * workers / (batch_size * SAMPLE_MS / 1000))
    count = min(max(count, MIN_BATCHES), MAX_BATCHES)
    transforms = [
        T.RandomResizedCrop(SIDE),
        T.RandomHorizontalFlip(),
        T.ColorJitter(0.4, 0.4, 0.4),
        T.Normalize(MEAN, STD),
    ]
    loader = gl.Loader(
        SleepingImages((FILL_BATCHES + count + REST_BATCHES) * batch_size),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=options.prefetch_factor,
        device="cpu" if backend == "cpu" else "cuda",
        backend="torch" if backend == "cpu" else backend,
        transforms=[] if backend == "cpu" else transforms,  # on the CPU, they would take the workers' CPUs
    )
    with loader:
        for _ in loader:
            pass
        chunk = str(loader.stats().chunk_size)
        ideal = run_module(["benchmarks.sleeping", str(workers), chunk], 60.0)["samples_per_s"]
        for loop in options.loops:
            yield _measure_loop(loader, backend, loop, count, ideal)


def _measure_loop(loader: gl.Loader, backend: str, loop: str, count: int, ideal: float) -> Cell:
    """Measure at most `count` batches of an epoch, in a loop that is busy as described in `LOOPS`."""
    busy_s, batches = float(loop.split()[0]) / 1000, iter(loader)
    for _ in range(FILL_BATCHES):
        next(batches)
        _keep_busy(busy_s, holds_gil="GIL" in loop)
    before, began_s, next_s, cpu_s = loader.stats(), time.perf_counter(), [], []
    while len(next_s) < count and (len(next_s) < MIN_BATCHES or time.perf_counter() - began_s < MAX_S):
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        next(batches)
        next_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.thread_time() - start_cpu_s)
        _keep_busy(busy_s, holds_gil="GIL" in loop)
    seconds, stats = time.perf_counter() - began_s, loader.stats(since=before)
    batch_size, workers = stats.images // stats.batches, stats.num_workers
    period_s, cpu = batch_size / ideal, float(np.mean(cpu_s))
    return Cell(
        backend,
        workers,
        batch_size,
        loop,
        stats.prefetch_factor,
        delivered=len(next_s) * batch_size / seconds / ideal,
        idle=stats.part("idle").seconds / stats.seconds / workers,
        next_ms=1000 * float(np.mean(next_s)),
        next_p95_ms=1000 * float(np.percentile(next_s, 95)),
        next_cpu_ms=1000 * cpu,
        planned=min(1.0, stats.part("plan").count / stats.batches),
        counts=busy_s + cpu < MAX_LOAD * period_s and 1 / period_s <= MAX_BATCHES_PER_S,
    )


def _keep_busy(seconds: float, *, holds_gil: bool) -> None:
    end_s = time.perf_counter() + seconds
    if not holds_gil:
        time.sleep(seconds)
    while time.perf_counter() < end_s:
        pass


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("scale", __doc__, "json")
    names = {"workers": WORKERS, "batch-sizes": BATCH_SIZES, "loops": LOOPS, "backends": ("cpu",)}
    for name, values in names.items():
        kind, text = type(values[0]), " ".join(map(str, values))
        parser.add_argument(f"--{name}", nargs="+", type=kind, default=values, help=f"default: {text}")
    parser.add_argument("--prefetch-factor", type=int, help="batches ahead, instead of the default")
    parser.add_argument("--seconds", type=float, default=1.5, help="measure a cell for this long (default 1.5)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report. Return the exit status: 1 if the goal is missed in a cell to which it applies."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", r"num_workers=\d+, but this process may use only", RuntimeWarning)
    torch.set_num_threads(1)
    cells: list[Cell] = []
    with contextlib.nullcontext() if set(options.backends) == {"cpu"} else use_fake_cuda():
        for backend in options.backends:
            for workers in options.workers:
                for batch_size in options.batch_sizes:
                    for cell in measure(backend, workers, batch_size, options):
                        cells.append(cell)
                        print("  ".join(cell.format()), flush=True)
    print(f"\n{describe_machine()}; {versions()}\n\n{format_table(HEADINGS, map(Cell.format, cells))}\n")
    relevant = [cell for cell in cells if cell.counts]
    met = [cell for cell in relevant if cell.delivered >= GOAL]
    text = f"at least {GOAL:.0%} of the ideal where the goal applies: {len(met)} of {len(relevant)} cells"
    verdict = Verdict(text, len(met) == len(relevant) if relevant else None)
    print_verdicts([verdict])
    write_results(options.json, {"versions": versions(), "cells": [asdict(cell) for cell in cells]}, [verdict])
    return int(verdict.met is False)


if __name__ == "__main__":
    sys.exit(main())
