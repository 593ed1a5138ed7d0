"""What counting costs: epochs with the counters behind `loader.stats()`, and without them, one after the other.

    python -m benchmarks.stats_cost [--against TREE] [--seconds 150 | --instructions]

Without them is a checkout of gpuload that has none: TREE, or the commit before counters came, which is checked out for
the time. So whatever else came since is in the ratio too. Both are open at the same time, each in a process with its
own workers, and take turns: an epoch here, an epoch there, in changing order. While one works, the other waits for its
turn, with nothing in work. What counts is the median of the ratios of neighbours, of the time of an epoch and of the
CPU time of all its processes, which other work on the machine disturbs less.

At the end: what a call of `loader.stats()` takes, beside a busy loader.

``--instructions`` counts the instructions of each image with valgrind (Debian's package) in the place of its time: the
same on a busy machine. It takes minutes for each count, and there are no worker processes: one process does it all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["LOADS", "main", "ratios"]

ROOT: Final = Path(__file__).parents[1]
# Name: samples in an epoch, batch size, workers.
LOADS: Final = {
    "photographs 500×375, decoded, 2 workers": (1024, 64, 2),
    "the same, num_workers=0": (512, 64, 0),
    "arrays 32×32, 2 workers": (16_384, 256, 2),
}
CALLS: Final = 200
COUNTED: Final = {"photographs 500×375, decoded": (64, 1, 3), "arrays 32×32": (256, 2, 8)}  # batch size, batches


class Photos:
    """One JPEG."""

    def __init__(self, samples: int) -> None:
        import io

        import numpy as np
        from PIL import Image

        noise = np.random.default_rng(0).integers(0, 255, (75, 100, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        self.data, self.samples = file.getvalue(), samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import gpuload as gl

        return gl.Encoded(self.data), index


class Arrays:
    """Small arrays."""

    def __init__(self, samples: int) -> None:
        import numpy as np

        import gpuload as gl

        self.image, self.samples = gl.Image(np.zeros((32, 32, 3), np.uint8)), samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.image, index


def _loader(name: str) -> Any:
    import gpuload as gl
    from gpuload import transforms as T

    samples, batch_size, workers = LOADS[name]
    photos = "photographs" in name or "same" in name
    dataset = Photos(samples) if photos else Arrays(samples)
    chain = [T.CenterCrop(64)] if photos else []
    return gl.Loader(dataset, batch_size, transforms=chain, num_workers=workers, device="cpu")


def serve() -> None:
    """In a process of its own: an epoch of the load that each line names, and what it took."""
    loaders: dict[str, Any] = {}
    for line in sys.stdin:
        name, _, calls = line.strip().partition("\t")
        if name not in loaders:
            loaders[name] = _loader(name)
        loader = loaders[name]
        if calls:
            print(json.dumps(_calls(loader)), flush=True)
            continue
        before, start = _cpu_s(loader), time.perf_counter()
        for _ in loader:
            pass
        took = time.perf_counter() - start
        print(json.dumps([took, _cpu_s(loader) - before]), flush=True)


def _cpu_s(loader: Any) -> float:
    """CPU seconds of this process and its workers so far."""
    pids = getattr(getattr(loader._session, "engine", None), "pids", [])
    total = time.process_time()
    for pid in pids:
        total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9  # finer than the ticks of `stat`
    return total


def _calls(loader: Any) -> float:
    """Microseconds of a call of `stats()` within an epoch: the median."""
    iterator, took = iter(loader), []
    for _ in range(4):
        next(iterator)
    for _ in range(CALLS):
        start = time.perf_counter()
        loader.stats()
        took.append(time.perf_counter() - start)
    return 1e6 * statistics.median(took)


def take(name: str, batches: int) -> None:
    """Take some batches: what valgrind counts."""
    import torch

    import gpuload as gl
    from gpuload import transforms as T

    torch.set_num_threads(1)
    batch_size, _, most = COUNTED[name]
    photos = "photographs" in name
    dataset = (Photos if photos else Arrays)(batch_size * (most + 4))
    chain = [T.CenterCrop(64)] if photos else []
    iterator = iter(gl.Loader(dataset, batch_size, transforms=chain, num_workers=0, device="cpu"))
    for _ in range(batches):
        next(iterator)


def _instructions(tree: Path, name: str) -> float:
    """Instructions for an image."""
    batch_size, few, many = COUNTED[name]
    found = []
    for batches in (few, many):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable]
        command += [str(Path(__file__).resolve()), "--take", name, str(batches)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
        said = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True).stderr
        found.append(int(said.rpartition("Collected :")[2].split()[0]))
    return (found[1] - found[0]) / (many - few) / batch_size


class Side:
    """A process that loads with the gpuload of a tree."""

    def __init__(self, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, cwd=tree, **pipes)  # pyright: ignore

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {line!r} ended: its standard error says why")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def _without_counters(given: str | None) -> Iterator[Path]:
    """A tree without counters."""
    if given is not None:
        yield Path(given).resolve()
        return
    log = ["git", "log", "--diff-filter=A", "--format=%H", "--", "gpuload/workers/counters.py"]
    came = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    if not came:
        raise SystemExit(
            "no commit here brought gpuload/workers/counters.py: give a checkout without it, --against TREE"
        )
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), f"{came[-1]}^"], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def ratios(pairs: list[tuple[list[float], list[float]]], which: int) -> tuple[float, float, float]:
    """Of pairs (with, without) of measurements: the median ratio less 1, and its quartiles."""
    found = [own[which] / other[which] - 1 for own, other in pairs]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return middle, low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="TREE", help="a checkout of gpuload without counters")
    parser.add_argument("--seconds", type=float, default=150, help="how long to measure, all loads together")
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--take", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    if given.take:
        take(given.take[0], int(given.take[1]))
        return
    from benchmarks.machine import cpu_model, versions

    print(f"{cpu_model()}, {len(os.sched_getaffinity(0))} CPUs")
    print(", ".join(f"{name} {number}" for name, number in versions().items()))
    with _without_counters(given.against) as tree:
        if given.instructions:
            for name in COUNTED:
                own, other = _instructions(ROOT, name), _instructions(tree, name)
                print(
                    f"{name}: {own:,.0f} instructions an image, {other:,.0f} without counters: {own / other - 1:+.2%}"
                )
            return
        sides = Side(ROOT), Side(tree)
        try:
            for name, (samples, batch_size, _) in LOADS.items():
                for side in sides:  # workers start, the ring grows
                    side.ask(name)
                pairs: list[tuple[list[float], list[float]]] = []
                end = time.monotonic() + given.seconds / len(LOADS)
                while time.monotonic() < end or len(pairs) < 3:
                    order = (0, 1) if len(pairs) % 2 else (1, 0)
                    found = {number: sides[number].ask(name) for number in order}
                    pairs.append((found[0], found[1]))
                each_us = 1e6 * statistics.median(own[0] for own, _ in pairs) / samples
                print(f"\n{name}: {each_us:,.1f} µs an image, batches of {batch_size}; {len(pairs)} pairs")
                for which, what in enumerate(("time", "CPU time")):
                    middle, low, high = ratios(pairs, which)
                    print(f"  {what:<9} {middle:+.2%} (quartiles {low:+.2%} … {high:+.2%})")
                each_us = sides[0].ask(f"{name}\tcalls")
                print(f"  stats()   {each_us:,.0f} µs a call")
        finally:
            for side in sides:
                side.close()


if __name__ == "__main__":
    main()
