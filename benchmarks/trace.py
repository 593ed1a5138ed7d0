"""A loader's run as one Chrome trace: torch's profiler in the main process, and a row for what each worker did.

    python -m benchmarks.trace --photos DIR --out trace.json

runs a loader over JPEGs for some batches. A program of your own is traced with ``GPULOAD_SPANS=FOLDER`` in its
environment and torch's profiler around its loop; then

    python -m benchmarks.trace --join trace.json --spans FOLDER --out joined.json

Open the result at https://ui.perfetto.dev. Workers note CLOCK_MONOTONIC, and how far the system's clock
(CLOCK_REALTIME) was ahead of it; the profiler's timestamps are the latter, in microseconds since
``baseTimeNanoseconds`` of the trace.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import gpuload as gl
from benchmarks.photos import find_photos
from gpuload import transforms as T

__all__ = ["joined", "main", "record"]

REPOSITORY: Final = Path(__file__).parent.parent
SPANS: Final = "GPULOAD_SPANS"


def joined(trace: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A Chrome trace of torch's profiler with the spans of the workers of its process; chunks that no event of that
    process is at the same time as are left out.

    Raises:
        ValueError: the folder has no spans of such workers.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    parents = {event["pid"] for event in events}
    begin = min((event["ts"] for event in events), default=0.0)
    end = max((event["ts"] + event["dur"] for event in events), default=0.0)
    added: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl")):
        head, *lines = map(json.loads, path.read_text().splitlines())
        if head["parent"] not in parents:
            continue
        to_trace_ns = head["unix_minus_monotonic_ns"] - trace.get("baseTimeNanoseconds", 0)
        row = {"pid": head["pid"], "tid": head["pid"]}
        name = f"gpuload worker {head['worker']}"
        added += [
            {"ph": "M", "name": "process_name", **row, "ts": 0, "args": {"name": name}},
            {"ph": "M", "name": "process_labels", **row, "ts": 0, "args": {"labels": f"process {head['pid']}"}},
            {"ph": "M", "name": "thread_name", **row, "ts": 0, "args": {"name": name}},
            # Behind the main process, which the profiler gives its own number.
            {"ph": "M", "name": "process_sort_index", **row, "ts": 0, "args": {"sort_index": head["parent"]}},
        ]
        for line in lines:
            spans = line.pop("spans")
            found = [
                {
                    "ph": "X",
                    "cat": "gpuload",
                    "name": span,
                    **row,
                    "ts": (start + to_trace_ns) / 1e3,
                    "dur": (stop - start) / 1e3,
                    "args": line if span == line["name"] else {"chunk": line["chunk"]},
                }
                for span, start, stop in spans
            ]
            whole = next(event for event in found if event["name"] == line["name"])
            if begin <= whole["ts"] + whole["dur"] and whole["ts"] <= end:
                added += found
    if not added:
        raise ValueError(
            f"{folder} has no spans of workers of the traced process ({', '.join(map(str, sorted(parents, key=str)))}"
            f"): start the program with {SPANS}={folder}, and num_workers of at least 1"
        )
    return {**trace, "traceEvents": [*trace["traceEvents"], *added]}


def record(loader: gl.Loader, batches: int) -> dict[str, Any]:
    """The trace of so many batches, over epochs, with the workers' spans. The loader has not begun; it is closed."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {SPANS: folder}):
        with profile(activities=activities) as profiler, loader:
            for _ in islice(chain.from_iterable(repeat(loader)), batches):
                pass
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return joined(json.loads(path.read_text()), Path(folder))


def summary(trace: dict[str, Any]) -> Iterator[str]:
    """A line for each of gpuload's ranges and each worker: how long, how often."""
    ranges: dict[str, list[float]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and (event["name"].startswith("gpuload::") or event.get("cat") == "gpuload"):
            whose = "main process" if event.get("cat") != "gpuload" else f"process {event['pid']}"
            ranges.setdefault(f"{whose}: {event['name']}", []).append(event["dur"])
    for name, durations in sorted(ranges.items()):
        yield f"{name:<40}{sum(durations) / 1e3:>10.1f} ms{len(durations):>8} times"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=Path, help="folder of JPEGs (default: scikit-image's photographs, varied)")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="the trace (default trace.json)")
    parser.add_argument("--batches", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--join", type=Path, metavar="TRACE", help="join spans into this trace, and run nothing")
    parser.add_argument("--spans", type=Path, metavar="FOLDER", help=f"the folder that {SPANS} named, for --join")
    options = parser.parse_args(arguments)
    if (options.join is None) != (options.spans is None):
        parser.error("--join TRACE and --spans FOLDER go together")
    for name in ("batches", "batch_size", "workers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a trace, or join two parts of one. Returns the exit status."""
    options = parse(arguments)
    if options.join is not None:
        try:
            trace = joined(json.loads(options.join.read_text()), options.spans)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
    else:
        photos = options.photos or find_photos(REPOSITORY / ".data")[0]
        loader = gl.Loader(
            gl.ImageFiles(photos),
            options.batch_size,
            shuffle=True,
            transforms=[T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.25,) * 3)],
            num_workers=options.workers,
        )
        trace = record(loader, options.batches)
    options.out.write_text(json.dumps(trace))
    print("\n".join(summary(trace)))
    print(f"{options.out}: open it at https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
