"""Loaders end to end on a GPU, in three commands; the most important one comes first.

    python -m benchmarks.gpu why       where the time of a session goes: workers, main process, device
    python -m benchmarks.gpu decoding  decoding on the device, in workers and in both, and feeding ResNets
    python -m benchmarks.gpu peers     gpuload next to DALI, timm, Kornia, CV-CUDA and torchvision

    make bench-gpu ARGS="why --photos DIR --json FILE"    the same in the project's environment
    python -m benchmarks.gpu why --simulate               runs every row on the CPU, small; figures mean nothing

The recipe is RandomResizedCrop(224), flip, ColorJitter(0.4, 0.4, 0.4), Normalize; float16, channels last. Each row runs
in its own process with a time limit, so that a failing row does not affect the others. The results are written after
each row. This process does not load CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import BATCH, COMMANDS, FEEDS, FILES, ROWS, SESSIONS, SIMULATED_PACE, Files, Pace
from benchmarks.gpu.tables import Results, device_share, judge, report
from benchmarks.machine import cpu_model, missing_packages, versions
from benchmarks.peers.protocol import Recipe
from benchmarks.photos import (
    copy_photos,
    find_photos,
    light_copy,
    make_synthetic_photos,
    packed_copy,
    warm_page_cache,
)
from benchmarks.running import REPOSITORY, check_minimums, make_parser, write_json

ROW_LIMIT_S = 75.0
LEAST_S = 8.0  # with less time left, a row could not even warm up
JITTER = 0.4
ARRAYS, ARRAY_FILE = 20_000, 262_144
# Parts of error messages where a package or a driver is absent; a row with any other error should have run.
ABSENT = ("No module named", "not installed", "cannot be imported here")
ENDING = threading.Event()  # set: start no more rows
# The line of a traceback that names the error; more lines may follow it, such as messages of threads.
ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exit|Exception)\b")
OWN = ("No module named 'gpuload", "No module named 'benchmarks")  # these exist, so the error is a bug
RUNNING: set[int] = set()  # the process groups of rows


@dataclass(frozen=True)
class Work:
    """The settings of all rows.

    Attributes:
        roots: the folder of each kind of files; missing_files: why there is none.
        traces: the folder for the traces of sessions.
        share: the share of images that the GPU decodes where both CPU and GPU decode.
    """

    recipe: Recipe
    pace: Pace
    cpus: int
    traces: Path
    environment: dict[str, str] = field(default_factory=dict)
    roots: dict[Files, str] = field(default_factory=dict)
    missing_files: dict[Files, str] = field(default_factory=dict)
    share: float = 0.5

    def command(self, name: str) -> list[str]:
        """Return the command of a row."""
        recipe, pace = self.recipe, self.pace
        planar = replace(recipe, channels_last=False)
        # FFCV's image size, and an epoch of a second or two at the target rate; less in a simulation.
        file_recipe = planar if pace.small else replace(planar, size=256, samples=ARRAY_FILE)
        peers = {
            "decoder": ("decoder_alone", replace(recipe, workers=self.cpus)),
            "workers": ("workers_only", recipe),
            "arrays": ("arrays_gpuload", planar),
            "array_file": ("array_file", file_recipe),
        }
        if name in peers:
            return _module("peers.protocol", peers[name][0], peers[name][1].to_json())
        if name == "resident":
            small = ["--samples", "64", "--batch-size", "16", "--rounds", "1"] if pace.small else []
            return _module("resident", "--device", recipe.device, "--json", *small)
        if name in ("device", "device_decoder"):
            return _module("gpu.rows", name, recipe.to_json(), pace.to_json())
        if name in SESSIONS:
            session = SESSIONS[name]
            recipe = self._reading(session.files, session.batch_size, variant="fused", prefetch=session.prefetch)
            trace = str(self.traces / f"{name}.json")
            return _module("gpu.rows", "session", recipe.to_json(), pace.to_json(), trace)
        feed = FEEDS[name]
        # gpuload leaves one CPU to the training process; its peers get all CPUs, since they may not need to.
        workers = recipe.workers if feed.is_gpuload else self.cpus
        variant = f"{feed.variant}/{self.share}" if feed.variant.endswith("/both") else feed.variant
        recipe = self._reading(feed.files, feed.batch_size, variant=variant, workers=workers)
        return _module("gpu.rows", "feeding", recipe.to_json(), pace.to_json(), feed.peer, str(int(feed.feeds)))

    def _reading(self, files: Files, batch_size: int, **changes: Any) -> Recipe:
        """Return the recipe with other files and batches. A simulation's batches are smaller in proportion, and without
        jitter for the fused kernels, which take 0.1 s an image for it in Triton's interpreter."""
        size = max(2, self.recipe.batch_size * batch_size // BATCH)
        recipe = replace(self.recipe, root=self.roots[files], batch_size=size, **changes)
        return replace(recipe, jitter=0.0) if self.pace.small and recipe.variant.startswith("fused") else recipe


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", *arguments]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; `rows` lists the names of the rows to measure, in order."""
    parser = make_parser("gpu", __doc__, "photos", "cache", "json", files=25_600, batch_size=BATCH)
    parser.add_argument("command", choices=COMMANDS, help="which rows to measure")
    parser.add_argument("--budget-s", type=float, default=440, help="limit of the entire run, in seconds (default 440)")
    parser.add_argument("--only", help=f"instead, comma-separated, any of {', '.join(ROWS)}")
    parser.add_argument("--simulate", action="store_true", help="run every row on the CPU, with small sizes")
    options = parser.parse_args(arguments)
    options.rows = list(COMMANDS[options.command]) if options.only is None else options.only.split(",")
    for name in options.rows:
        if name not in ROWS:
            parser.error(f"--only takes any of {', '.join(ROWS)}, comma-separated; got {name!r}")
    options.device = "cuda"
    if options.simulate:
        options.device, options.batch_size, options.files = "cpu", 2, 8
    check_minimums(parser, options, batch_size=2, files=options.batch_size)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if a row failed that should have run."""
    options = parse(arguments)
    deadline = time.monotonic() + options.budget_s
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) if options.simulate else options.cache
        photos, described = _photos(options, cache)
        root = copy_photos(photos, cache, options.files)
        files, mean_kb = warm_page_cache(root)
        results: dict[str, Any] = {
            "command": options.command,
            "simulated": options.simulate,
            "machine": {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0)), "device": _device(options.device)},
            "versions": versions(),
            "absent": missing_packages(),
            "photos": {"source": described, "files": files, "mean_kb": {"plain": mean_kb}},
            "rows": {},
        }
        work = _work(options, root, Path(folder) / "traces" if options.json is None else options.json.parent / "traces")
        results["recipe"] = {key: value for key, value in vars(work.recipe).items() if key not in ("root", "variant")}
        _write(results, options.json)
        for kind in _other_files(options.rows):
            try:
                work.roots[kind], results["photos"]["mean_kb"][kind] = COPIES[kind](root)
            except Exception as error:  # only the rows that read these files fail
                work.missing_files[kind] = f"no files ({FILES[kind]}): {type(error).__name__}: {error}"
        results_lock = threading.Lock()

        def run(name: str) -> None:
            row = _row(name, replace(work, share=device_share(results)), options, deadline)
            with results_lock:
                results["rows"][name] = row
                print(f"{ROWS[name]}: {row.get('missing') or row.get('failed') or 'measured'}", flush=True)
                _write(results, options.json)

        # A simulation measures nothing, so it saves time by running two rows in parallel.
        with ThreadPoolExecutor(2 if options.simulate else 1) as rows:
            running = [rows.submit(run, name) for name in options.rows]
            # The kernel may deliver a signal to another thread; the handler runs only when this thread wakes up.
            while wait(running, timeout=1).not_done:
                pass
            for row in running:
                row.result()
    print(f"\n{report(results)}", flush=True)
    _write(results, options.json)
    return 1 if any(row.get("failed") for row in results["rows"].values()) else 0


def _light(root: Path) -> tuple[str, float]:
    light = light_copy(root)
    return str(light), warm_page_cache(light)[1]


def _packed(root: Path, *, cuttable: bool) -> tuple[str, float]:
    folder, mean_kb = packed_copy(root, cuttable=cuttable)
    return str(folder), mean_kb


# Functions that copy the photographs, and return the folder and the mean size in KB.
COPIES: dict[Files, Callable[[Path], tuple[str, float]]] = {
    "light": _light,
    "packed": lambda root: _packed(root, cuttable=False),
    "packed_cuttable": lambda root: _packed(root, cuttable=True),
}


def _other_files(rows: Sequence[str]) -> list[Files]:
    """Return the kinds of files that rows read, except the plain ones."""
    read = set(map(_files_of, rows))
    return [kind for kind in FILES if kind in read and kind != "plain"]


def _files_of(name: str) -> Files:
    """Return the kind of files that a row reads."""
    return FEEDS[name].files if name in FEEDS else SESSIONS[name].files if name in SESSIONS else "plain"


def _photos(options: argparse.Namespace, cache: Path) -> tuple[Path, str]:
    """Return the folder of photographs and a description. A simulation gets tiny images: for a batch of full-size
    photographs, Triton's interpreter takes a minute."""
    if options.simulate:
        return make_synthetic_photos(
            cache / "small", count=options.files, height=24, width=32
        ), "small synthetic images"
    return find_photos(cache, options.photos)


def _work(options: argparse.Namespace, root: Path, traces: Path) -> Work:
    cpus = len(os.sched_getaffinity(0))
    recipe = Recipe(
        root=str(root),
        batch_size=options.batch_size,
        workers=max(1, cpus - 1),
        samples=ARRAYS,
        jitter=JITTER,
        device=options.device,
        dtype="float16",
        channels_last=True,
    )
    roots: dict[Files, str] = {"plain": str(root)}
    if not options.simulate:
        return Work(recipe, Pace(), cpus, traces, roots=roots)
    recipe = replace(recipe, size=16, workers=1, samples=4 * options.batch_size, epochs=2)
    # Triton's kernels run in its interpreter, even if there is a GPU.
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return Work(recipe, SIMULATED_PACE, 1, traces, environment, roots)


def _row(name: str, work: Work, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Run a row. Returns its results, with the reason if it is `missing`, and the error if it `failed` or timed out."""
    if options.simulate and name in FEEDS and FEEDS[name].needs_gpu:
        return {"missing": "needs a GPU"}
    if (failure := work.missing_files.get(_files_of(name))) is not None:
        return {"failed": failure}
    left_s = deadline - time.monotonic()
    if left_s < LEAST_S or ENDING.is_set():
        return {"missing": "the time was up"}
    limit_s = left_s if options.simulate else min(left_s, ROW_LIMIT_S)
    started = time.monotonic()
    process = subprocess.Popen(
        work.command(name),
        cwd=REPOSITORY,
        env=os.environ | work.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = False
    RUNNING.add(process.pid)
    if ENDING.is_set():
        _end(process.pid)
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        RUNNING.discard(process.pid)
        _end(process.pid)
    if timed_out:
        printed, errors = process.communicate()
    row: dict[str, Any] = {"took_s": time.monotonic() - started}
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(phase := json.loads(line), dict):
                row |= phase
    if timed_out:
        row["failed"] = f"not finished after {limit_s:.0f} s"
    elif process.returncode:
        lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        error = next(filter(ERROR.match, reversed(lines)), lines[-1])
        is_missing = any(text in error for text in ABSENT) and not any(text in error for text in OWN)
        row["missing" if is_missing else "failed"] = error
    if row.get("failed"):
        row["stderr"] = errors[-4000:]
    return row


def _end(group: int) -> None:
    """Kill a row and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _ended(signum: int, frame: Any) -> None:
    """Kill the running rows, each of which is its own session, and start no more; main() then reports what it has."""
    ENDING.set()
    for group in list(RUNNING):
        _end(group)


def _device(device: str) -> str:
    """Describe the device in words. This runs in another process, since this one does not load CUDA."""
    if device == "cpu":
        return "the CPU"
    program = "from benchmarks.machine import cuda_device; print(cuda_device())"
    command = [sys.executable, "-c", program]
    try:
        process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, errors="replace", timeout=60)
    except subprocess.TimeoutExpired:
        return "none: no answer within 60 s"
    return process.stdout.strip() or f"none: {(process.stderr.strip().splitlines() or ['no answer'])[-1]}"


def _write(results: Results, path: Path | None) -> None:
    write_json(path, {**results, "aims": [aim._asdict() for aim in judge(results)]})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    sys.exit(main())
