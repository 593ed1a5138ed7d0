"""Main-thread CPU time per batch with the fused backend ("host ms per batch"). No GPU is needed.

    python -m benchmarks.host [--json FILE] [--without-plans]
    FAKECUDA_POLICY=never TRITON_INTERPRET=0 python tests/fakecuda/build.py -m benchmarks.host --device cuda

The loader reads small JPEGs and does everything that it does on CUDA, except for the device's own work: kernels are not
launched, no pixel is copied, and large buffers are reused, as by torch's allocator on a device. Before each batch the
main thread sleeps until the workers are idle, as during a training step; in the "starved" runs it waits in `next()`
while chunks arrive one by one. Figures are processor time of the main thread: the mean over an epoch's batches (one
`next()` can do work that an earlier one postponed), and the median or the minimum over epochs. More epochs run under a
profiler, which splits the time among gpuload's packages; libraries count for the package that calls them.
benchmarks/README.md ("Host time of a batch") has results.

With ``--without-plans`` workers plan no batches, for comparison. ``--device cuda`` is for the fake CUDA runtime
(`tests/fakecuda`; run `make test-cuda-fake` first, and use the Python of `.venv-cuda-fake`): the CUDA builds of torch
and Triton issue copies, events and launches as on a GPU, and the runtime counts these calls but executes nothing.

The benchmark checks that it measures what it says: that batches are launched ahead of the loop, as on a device, and
that workers plan them, or none with ``--without-plans``. If not, it raises RuntimeError.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from gpuload.loader import session
from gpuload.loader.stats import Stats
from gpuload.stage import Stage
from gpuload.stage.transfer import CpuTransfer, round_up_bytes
from gpuload.workers.feed import LAUNCHED_AHEAD

_CROP_AND_FLIP = (T.RandomResizedCrop(224), T.RandomHorizontalFlip())
RECIPES: Final[dict[str, tuple[Any, ...]]] = {
    "classic": (*_CROP_AND_FLIP, T.Normalize(MEAN, STD)),
    "classic + ColorJitter": (*_CROP_AND_FLIP, T.ColorJitter(0.4, 0.4, 0.4), T.Normalize(MEAN, STD)),
    "RandAugment": (*_CROP_AND_FLIP, T.RandAugment(), T.Normalize(MEAN, STD)),
}
GOALS_MS: Final = {"classic + ColorJitter": 1.5, "RandAugment": 3.0}  # for 256 images, with the workers ahead
BATCH: Final = 256
FILL_BATCHES: Final = 6  # batches of an epoch before the pipeline is full
DRAIN_BATCHES: Final = 3 + LAUNCHED_AHEAD  # batches already launched or planned once all work is handed out
PAIR: Final = LAUNCHED_AHEAD  # batches that one `next()` launches; the `next()` after it launches none
MIN_BATCHES: Final = FILL_BATCHES + DRAIN_BATCHES + PAIR  # batches in the shortest epoch that has a pair to measure
IDLE_S: Final = 0.004  # workers that are idle for so long have no chunk left to do
LIMIT_S: Final = 60
MAPPED_BYTES: Final = 1 << 17  # from this size on, the CPU's allocator maps fresh memory for each allocation
PACKAGES: Final = ("loader", "batches", "stage", "workers", "ring", "transforms")  # other packages are in "other"
OTHER: Final = "other"


class _HostTransfer(CpuTransfer):
    """A transfer that issues batches as on a device, and copies nothing."""

    is_asynchronous = True


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


@contextlib.contextmanager
def _skip_device_work() -> Iterator[Callable[[], Counter[str]]]:
    """Skip all work of the device within a context. Yield a function that returns the launches so far."""
    from triton.runtime.interpreter import InterpretedFunction

    counts: Counter[str] = Counter()

    def launch(*arguments: Any, **options: Any) -> None:
        counts["launches"] += 1

    with (
        mock.patch.object(session, "make_transfer", lambda ring, device: _HostTransfer(ring)),
        mock.patch.object(torch, "empty", _CachedMemory()),
        mock.patch.object(InterpretedFunction, "run", launch),
    ):
        yield counts.copy


@contextlib.contextmanager
def use_fake_cuda() -> Iterator[Callable[[], Counter[str]]]:
    """Have Triton compile kernels only to its first stage. Yield a function that returns the copies, events and
    launches that the fake runtime has counted so far."""
    if "FAKECUDA" not in os.environ:
        raise SystemExit("--device cuda needs the fake CUDA runtime: see the docstring of benchmarks/host.py")
    sys.path.insert(0, str(REPOSITORY / "tests"))
    kernels: Any = importlib.import_module("fakecuda.kernels")
    runtime: Any = importlib.import_module("fakecuda.runtime").runtime()
    kernels.compile_without_ptxas()
    kinds = {"copies": "copy ", "events": "cudaEventRecord", "launches": "kernel of "}

    def count() -> Counter[str]:
        counts = runtime.counts().items()
        return Counter({kind: sum(n for name, n in counts if name.startswith(kinds[kind])) for kind in kinds})

    yield count


@dataclass(slots=True)
class _Run:
    """The measured epochs: for each, the mean seconds of a `next()`; and for each measured `next()`, how many kernels
    it launched. `stats` covers all batches of these epochs."""

    seconds: list[float] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    stats: Stats = field(default_factory=Stats)

    @property
    def planned_share(self) -> float:
        """The share of batches that workers planned."""
        return self.stats.part("plan", "workers").count / self.stats.batches

    @property
    def ahead_share(self) -> float:
        """The share of `next()` calls that launched nothing, since the call before had launched their batch."""
        return self.launches.count(0) / len(self.launches)


def measure(transforms: Sequence[Any], root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a recipe: ms per batch with the workers ahead, and its parts; ms per batch when starved; and the workers'
    CPU µs per image.

    Raises:
        RuntimeError: batches were not launched or planned as the options say.
    """
    with contextlib.ExitStack() as setup:
        count_calls = setup.enter_context(use_fake_cuda() if options.device == "cuda" else _skip_device_work())
        if options.without_plans:
            setup.enter_context(mock.patch.object(Stage, "batch_planner", return_value=None))
        loader = setup.enter_context(
            gl.Loader(
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
        )
        _run(loader, PAIR, count_calls, ahead=True)  # starts the workers and imports everything
        ahead = _run(loader, options.batches, count_calls, ahead=True)
        starved = _run(loader, options.batches, count_calls, ahead=False)
        profile = cProfile.Profile(time.thread_time)
        _run(loader, options.batches, count_calls, ahead=True, profile=profile)
    _check_path(ahead, without_plans=options.without_plans)
    batches, host_ms, shares = ahead.stats.batches, 1000 * statistics.median(ahead.seconds), _package_shares(profile)
    return {
        "host_ms": host_ms,
        "least_ms": 1000 * min(ahead.seconds),
        "starved_ms": 1000 * statistics.median(starved.seconds),
        "parts_ms": {package: host_ms * shares[package] for package in (*PACKAGES, OTHER)},
        "worker_us_per_image": 1e6 * ahead.stats.cpu.workers_s / ahead.stats.images,
        "calls": {kind: count / batches for kind, count in ahead.calls.items()},
        "planned_by_workers": {"ahead": ahead.planned_share, "starved": starved.planned_share},
        "launched_ahead": ahead.ahead_share,
    }


def _check_path(ahead: _Run, *, without_plans: bool) -> None:
    """Raise RuntimeError unless batches were launched ahead of the loop, and planned by workers or not, as asked."""
    if ahead.ahead_share < 1 / 3:
        raise RuntimeError(
            f"this is not a device's path: of {len(ahead.launches)} calls of next(), "
            f"{ahead.launches.count(0)} found their batch launched; every other call should"
        )
    if without_plans != (ahead.planned_share == 0) or (not without_plans and ahead.planned_share < 0.5):
        expected = "none" if without_plans else "most"
        raise RuntimeError(f"workers planned {ahead.planned_share:.0%} of the batches, and should plan {expected}")


def _package_shares(profile: cProfile.Profile) -> dict[str, float]:
    """Return the share of the profiled time in each package, and in functions that no package called."""
    profile.create_stats()
    functions: dict[Any, Any] = vars(profile)["stats"]
    seconds: Counter[str] = Counter()
    for (file, *_), (_, _, own_s, _, callers) in functions.items():
        if (package := _package_of(file)) is not None:
            seconds[package] += own_s
        else:
            for (caller_file, *_), (_, _, share_s, _) in callers.items():
                seconds[_package_of(caller_file) or OTHER] += share_s
    total_s = seconds.total()
    return {package: seconds[package] / total_s for package in (*PACKAGES, OTHER)}


def _package_of(file: str) -> str | None:
    """Return the package of gpuload that a file belongs to, or None."""
    _, is_own, path = file.rpartition(f"{Path(gl.__file__).parent}/")
    package = path.split("/")[0]
    return (package if package in PACKAGES else OTHER) if is_own else None


def _run(
    loader: gl.Loader,
    count: int,
    count_calls: Callable[[], Counter[str]],
    *,
    ahead: bool,
    profile: cProfile.Profile | None = None,
) -> _Run:
    """Run epochs until the CPU time of `count` calls of `next()` is measured. The first `FILL_BATCHES` of an epoch,
    during which the pipeline fills, and the last, prepared in advance, are not measured."""
    run, before = _Run(), loader.stats()
    stop = FILL_BATCHES + (len(loader) - DRAIN_BATCHES - FILL_BATCHES) // PAIR * PAIR
    calls_before = count_calls()
    while len(run.launches) < count:
        batches, seconds = iter(loader), []
        for step in range(len(loader)):
            if ahead and step:  # no worker has anything to do before the first `next()`
                _wait_for_workers(loader)
            is_measured = FILL_BATCHES <= step < stop
            launched, started = count_calls()["launches"], time.thread_time()
            with profile if profile is not None and is_measured else contextlib.nullcontext():
                value = next(batches)
            elapsed = time.thread_time() - started
            if is_measured:
                seconds.append(elapsed)
                run.launches.append(count_calls()["launches"] - launched)
            del value
        next(batches, None)
        run.seconds.append(statistics.mean(seconds))
    run.calls, run.stats = count_calls() - calls_before, loader.stats(since=before)
    return run


def _wait_for_workers(loader: gl.Loader) -> None:
    """Sleep until no worker has a chunk left to do. Raise RuntimeError if that takes a minute."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        before = loader.stats()
        time.sleep(IDLE_S)
        stats = loader.stats(since=before)
        if stats.part("idle").seconds > 0.9 * stats.seconds * stats.num_workers:
            return
    raise RuntimeError(f"the workers were not idle within {LIMIT_S} s: {stats.advice}")


def report(results: dict[str, dict[str, Any]]) -> str:
    """Format a table with a row for each recipe."""
    rows = []
    for name, result in results.items():
        figures = [result["host_ms"], result["least_ms"], result["starved_ms"], *result["parts_ms"].values()]
        planned = f"{result['planned_by_workers']['ahead']:.0%}"
        calls = [f"{result['calls'].get(kind, 0):.1f}" for kind in ("copies", "events", "launches")]
        workers_us = f"{result['worker_us_per_image']:.0f}"
        rows.append([name, *(f"{figure:.2f}" for figure in figures), planned, *calls, workers_us])
    headings = ["recipe", "ms", "least", "starved", *PACKAGES, OTHER, "planned by workers", "copies", "events"]
    title = f"host ms per batch of {BATCH} (main thread's processor time), and calls of the device per batch"
    return format_table([*headings, "launches", "workers, µs per image"], rows, title)


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
