"""Main-thread CPU time per batch with the fused backend ("host ms per batch"). No GPU is needed.

    python -m benchmarks.host [--json FILE] [--without-plans]
    FAKECUDA_POLICY=never TRITON_INTERPRET=0 python tests/fakecuda/build.py -m benchmarks.host --device cuda

The loader reads small JPEGs and does everything that it does on CUDA, except for the device's own work: kernels are not
launched, no pixel is copied, and large buffers are reused, as by torch's allocator on a device. Before each batch the
main thread sleeps until the workers are idle, as during a training step; in the "starved" runs it waits in `next()`
while chunks arrive one by one. Figures are processor time of the main thread: the mean over an epoch's batches (one
`next()` can do work that an earlier one postponed), and the median or the minimum over epochs. The total is measured
without the clocks that split it into parts. benchmarks/README.md ("Host time of a batch") has results and explains the
parts.

With ``--without-plans`` workers plan no batches, for comparison. ``--device cuda`` is for the fake CUDA runtime
(`tests/fakecuda`; run `make test-cuda-fake` first, and use the Python of `.venv-cuda-fake`): the CUDA builds of torch
and Triton issue copies, events and launches as on a GPU, and the runtime counts these calls but executes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

if "torch" not in sys.modules and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the fused backend is built on the CPU, though it never runs

import torch

import gpuload as gl
from benchmarks.machine import versions
from benchmarks.peers.protocol import MEAN, STD
from benchmarks.photos import copy_photos, make_synthetic_photos
from benchmarks.running import (
    REPOSITORY,
    Verdict,
    check_minimums,
    describe_machine,
    format_table,
    make_parser,
    print_verdicts,
    write_results,
)
from gpuload import transforms as T
from gpuload.batches import assemble
from gpuload.cli.processes import cpu_seconds
from gpuload.loader import session
from gpuload.stage import Stage, segments
from gpuload.stage.fused import runner, separable
from gpuload.stage.transfer import CpuTransfer, round_up_bytes
from gpuload.workers import feed, planned
from gpuload.workers.protocol import peek_request

_CROP_AND_FLIP = (T.RandomResizedCrop(224), T.RandomHorizontalFlip())
RECIPES: Final[dict[str, tuple[Any, ...]]] = {
    "classic": (*_CROP_AND_FLIP, T.Normalize(MEAN, STD)),
    "classic + ColorJitter": (*_CROP_AND_FLIP, T.ColorJitter(0.4, 0.4, 0.4), T.Normalize(MEAN, STD)),
    "RandAugment": (*_CROP_AND_FLIP, T.RandAugment(), T.Normalize(MEAN, STD)),
}
GOALS_MS: Final = {"classic + ColorJitter": 1.5, "RandAugment": 3.0}  # for 256 images, with the workers ahead
BATCH: Final = 256
FILL_BATCHES: Final = 6  # batches of an epoch before the pipeline is full
DRAIN_BATCHES: Final = 3 + feed.LAUNCHED_AHEAD  # batches already launched or planned once all work is handed out
PAIR: Final = feed.LAUNCHED_AHEAD  # batches that one `next()` launches; the `next()` after it launches none
MIN_BATCHES: Final = FILL_BATCHES + DRAIN_BATCHES + PAIR  # batches in the shortest epoch that has a pair to measure
SMALL_BYTES: Final = 1 << 20  # labels are smaller; larger tensors are already on the device
MAPPED_BYTES: Final = 1 << 17  # from this size on, the CPU's allocator maps fresh memory for each allocation
# The timed functions: owner, attribute, and the part that each belongs to. Nested calls count for the inner part.
PARTS: Final = (
    (feed.Feed, "take", "feed"),
    (feed.Feed, "take_if_ready", "feed"),
    (feed.Feed, "pump", "feed"),
    (feed, "read_content", "descriptions"),
    (planned, "read_content", "descriptions"),
    (assemble, "columns_of", "columns"),
    (T.Chain, "draw", "draws"),
    (segments.SegmentRunner, "__call__", "jobs"),
    (runner.FusedRunner, "launch", "launches"),
    (assemble, "outline_of", "collation"),
    (assemble, "collate", "collation"),
)
OTHER: Final = "other"
NAMES: Final = (*dict.fromkeys(part for _, _, part in PARTS), OTHER)


class _FakeKernel:
    """A stand-in for a kernel: launching it does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


class _FakeTransfer(CpuTransfer):
    """A transfer that issues batches as on a device, and copies nothing."""

    asynchronous = True

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.nbytes < SMALL_BYTES else tensor


class _CachedMemory:
    """A stand-in for `torch.empty` that imitates the device's caching allocator: large buffers are reused, even for
    slightly smaller requests, for which the CPU's allocator would have the system map fresh pages for each batch."""

    def __init__(self) -> None:
        self._cached: dict[Any, torch.Tensor] = {}
        self._empty = torch.empty

    def __call__(self, *size: Any, **options: Any) -> torch.Tensor:
        flat = len(size) == 1 and isinstance(size[0], int)
        shape = (round_up_bytes(size[0]),) if flat else size
        key = shape, options.get("dtype")
        memory = self._cached.get(key)
        if memory is None:
            memory = self._empty(*shape, **options)
            if memory.nbytes < MAPPED_BYTES:
                return self._empty(*size, **options)
            self._cached[key] = memory
        return memory[: size[0]] if flat else memory.detach()


@contextmanager
def _skip_device_work() -> Iterator[None]:
    """Replace all functions that work on the device, within a context, by functions that do nothing."""
    with ExitStack() as stack:
        for owner, name, value in (
            (session, "make_transfer", lambda ring, device: _FakeTransfer(ring)),
            (torch, "empty", _CachedMemory()),
            (runner, "one_pass", _FakeKernel()),
            (separable, "_weigh", _FakeKernel()),
            (runner, "make_level_tables", lambda _p, _a, factors, _m, _c: torch.empty(len(factors), 3, 256)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class _Clocks:
    """Clocks that split the processor time of a thread among parts; a part's time excludes the parts nested in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open_parts: list[str] = [OTHER]
        self._credited_at = time.thread_time()

    def credit(self) -> None:
        """Credit the time since the last call to the part that is running."""
        now = time.thread_time()
        self.seconds[self._open_parts[-1]] += now - self._credited_at
        self._credited_at = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        self.credit()
        seconds, self.seconds = self.seconds, defaultdict(float)
        return seconds

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function that calls `function` and credits its time to `part`."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self.credit()
            self._open_parts.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self.credit()
                self._open_parts.pop()

        return timed


def _prepare_fake_cuda() -> None:
    """Make Triton compile kernels only to its first stage and launch them on the fake runtime."""
    if "FAKECUDA" not in os.environ:
        raise SystemExit("--device cuda needs the fake CUDA runtime: see the docstring of benchmarks/host.py")
    sys.path.insert(0, str(REPOSITORY / "tests"))
    kernels: Any = importlib.import_module("fakecuda.kernels")
    kernels.compile_without_ptxas()


def _count_calls() -> dict[str, int]:
    """Return how many copies, events and launches the fake runtime has counted since the last call."""
    runtime: Any = importlib.import_module("fakecuda.runtime").runtime()
    counts = runtime.counts()
    runtime.forget_counts()
    kinds = {"copies": "copy ", "events": "cudaEventRecord", "launches": "kernel of "}
    return {kind: sum(counts[name] for name in counts if name.startswith(prefix)) for kind, prefix in kinds.items()}


def measure(transforms: Sequence[Any], root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a recipe: ms per batch with the workers ahead, and its parts; ms per batch when starved; and the workers'
    CPU µs per image."""
    on_cuda, calls = options.device == "cuda", {}
    with ExitStack() as setup:
        if on_cuda:
            _prepare_fake_cuda()
        else:
            setup.enter_context(_skip_device_work())
        if options.without_plans:
            setup.enter_context(mock.patch.object(Stage, "fusing", return_value=None))
        loader = gl.Loader(
            gl.ImageFolder(root),
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            transforms=list(transforms),
            num_workers=options.workers,
            device=options.device,
            backend="fused",
            dtype="float16",
            memory_format="channels_last",
        )
        with loader:
            _batch_times(loader, 4, ahead=True)  # starts the workers and imports everything
            active_session: Any = loader._session
            if not on_cuda:
                active_session.stage.cpu_threads = active_session.stage._pool = None  # as on a device
            cpu_s_before = sum(map(cpu_seconds, active_session.engine.pids))
            if on_cuda:
                _count_calls()
            ahead = _batch_times(loader, options.batches, ahead=True)
            images = len(ahead) * len(loader) * BATCH
            if on_cuda:
                calls = {kind: count * BATCH / images for kind, count in _count_calls().items()}
            cpu_us = 1e6 * (sum(map(cpu_seconds, active_session.engine.pids)) - cpu_s_before) / images
            starved = _batch_times(loader, options.batches, ahead=False)
            clocks = _Clocks()
            with ExitStack() as stack:
                for owner, name, part in PARTS:
                    stack.enter_context(mock.patch.object(owner, name, clocks.wrap(getattr(owner, name), part)))
                parts = _batch_times(loader, options.batches, ahead=True, clocks=clocks)
    return {
        "host_ms": 1000 * statistics.median(seconds[OTHER] for seconds in ahead),
        "least_ms": 1000 * min(seconds[OTHER] for seconds in ahead),
        "starved_ms": 1000 * statistics.median(seconds[OTHER] for seconds in starved),
        "parts_ms": {name: 1000 * statistics.median(seconds[name] for seconds in parts) for name in NAMES},
        "worker_us_per_image": cpu_us,
        "calls": calls,
    }


def _batch_times(
    loader: gl.Loader, count: int, *, ahead: bool, clocks: _Clocks | None = None
) -> list[dict[str, float]]:
    """Return the main thread's mean seconds in a `next()` by part, for each epoch, until `count` batches are measured.
    The first `FILL_BATCHES` of an epoch, during which the pipeline fills, and the last, prepared in advance, are
    skipped.
    """
    clocks, means, measured = clocks or _Clocks(), [], 0
    stop = FILL_BATCHES + (len(loader) - DRAIN_BATCHES - FILL_BATCHES) // PAIR * PAIR
    while measured < count:
        batches, timings = iter(loader), []
        for step in range(len(loader)):
            if ahead:
                _wait_for_workers(loader._session)
            clocks.take()
            value = next(batches)
            seconds = clocks.take()
            if FILL_BATCHES <= step < stop:
                timings.append(seconds)
            del value
        next(batches, None)
        measured += len(timings)
        parts = {*NAMES, *timings[0]}
        means.append({part: sum(timing.get(part, 0.0) for timing in timings) / len(timings) for part in parts})
    return means


def _wait_for_workers(active: Any) -> None:
    """Sleep until no worker has a chunk left to do."""
    while (active.feed._in_flight or active.feed.plans.in_flight) and not (
        peek_request(active.engine._queues[0].read_end, active.engine._memory) is None
        and all(_is_idle(active.engine, worker) for worker in active.engine._team)
    ):
        time.sleep(0.002)
    time.sleep(0.002)


def _is_idle(engine: Any, worker: int) -> bool:
    status = engine._board.read(worker)
    return (engine._team[worker].ready and status.chunk not in engine._in_flight) or status.chunk < 0


def report(results: dict[str, dict[str, Any]]) -> str:
    """Format a table with a row for each recipe."""
    rows = []
    for name, result in results.items():
        figures = [result["host_ms"], result["least_ms"], result["starved_ms"], *result["parts_ms"].values()]
        rows.append([name, *(f"{figure:.2f}" for figure in figures), f"{result['worker_us_per_image']:.0f}"])
    headings = ["recipe", "ms", "least", "starved", *NAMES, "workers, µs per image"]
    return format_table(headings, rows, f"host ms per batch of {BATCH} (main thread's processor time)")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("host", __doc__, "json", files=20 * BATCH, workers=2)
    parser.add_argument("--batches", type=int, default=60, help="batches to measure per recipe (default 60)")
    parser.add_argument("--only", help="measure only recipes whose names contain this text")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the fake CUDA runtime")
    parser.add_argument("--without-plans", action="store_true", help="workers plan no batches")
    options = parser.parse_args(arguments)
    check_minimums(parser, options, batches=1, files=MIN_BATCHES * BATCH)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report. Return the exit status: 1 if a goal is missed."""
    options = parse(arguments)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        photos = make_synthetic_photos(Path(folder) / "small", count=16, height=72, width=96)
        root = copy_photos(photos, Path(folder), options.files)
        for name, transforms in RECIPES.items():
            if options.only is None or options.only in name:
                results[name] = measure(transforms, root, options)
    print(f"{describe_machine()}; {versions()}\n\n{report(results)}\n")
    for name, result in results.items():
        if result["calls"]:
            calls = ", ".join(f"{count:.1f} {kind}" for kind, count in result["calls"].items())
            print(f"{name}: {calls} per batch")
    verdicts = []
    for name in results.keys() & GOALS_MS.keys():
        host_ms = results[name]["host_ms"]
        verdicts.append(Verdict(f"{name}: at most {GOALS_MS[name]} ms: {host_ms:.2f}", host_ms <= GOALS_MS[name]))
    print_verdicts(verdicts)
    settings = {"batch": BATCH, "workers": options.workers, "batches": options.batches, "device": options.device}
    figures = {**settings, "plans": not options.without_plans, "versions": versions(), "results": results}
    write_results(options.json, figures, verdicts)
    return 0 if all(verdict.met for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
