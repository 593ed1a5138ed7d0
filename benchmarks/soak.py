"""A soak test: every second a random worker is killed, sometimes the template too, and some files are damaged.

    make soak ARGS="--photos DIR"        or   python -m benchmarks.soak --photos DIR --minutes 10

Each epoch is checked: every good file must arrive exactly once, and every damaged file must either decode (a crop above
the point of truncation is intact) or be listed in `loader.errors`, once. Memory, descriptors and processes are measured
at the same point of each epoch. The run ends by itself, with exit status 1 if a guarantee was violated.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gpuload as gl
from benchmarks.memory import proportional_mb
from benchmarks.photos import copy_photos, find_photos, warm_page_cache
from benchmarks.running import Verdict, make_parser, print_verdicts, write_json
from gpuload import transforms as T
from gpuload.cli.processes import tree

RESTART_LIMIT_S = 0.5
TEMPLATE_SHARE = 0.2
FLAT_MB = 24  # allowed growth of mean memory from the second quarter of the run to the last


DAMAGES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "cut": lambda data: data[:-100],
    "text": lambda data: b"<html><body>404 Not Found</body></html>",
    "headless": lambda data: data[2:],
}


def copy_with_damage(source: Path, target: Path, fraction: float, seed: int) -> dict[str, str]:
    """Copy the tree `source` to `target`, which is replaced, and damage a `fraction` of the files.

    Return the kind of damage of each damaged file, keyed by path.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    files = sorted(target.rglob("*.jpg"))
    damaged_files = random.Random(seed).sample(files, round(fraction * len(files)))
    damaged = {}
    for i, path in enumerate(sorted(damaged_files)):
        damage = list(DAMAGES)[i % len(DAMAGES)]
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
        damaged[str(path)] = damage
    return damaged


class Killer(threading.Thread):
    """A thread that kills a random worker at intervals and then waits for its replacement; one time in five it kills
    the template first."""

    def __init__(self, loader: gl.Loader, every_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.restarts_s: list[float] = []
        self.kills = self.template_kills = 0
        self.ran_to_end = False  # an error in this thread would otherwise only end the kills
        self._loader, self._every_s, self._random = loader, every_s, random.Random(seed)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._every_s):
            pool: Any = self._loader._session and self._loader._session.engine
            worker_index = self._random.choice(list(pool._team))
            worker, template = pool._team[worker_index], pool._template
            try:
                if template is not None and self._random.random() < TEMPLATE_SHARE:
                    os.kill(template.pid, signal.SIGKILL)
                    self.template_kills += 1
                os.kill(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed_at = time.perf_counter()
            self.kills += 1
            while not self._stopped.is_set():
                replacement = pool._team.get(worker_index)
                if replacement is not None and replacement is not worker and replacement.ready:
                    self.restarts_s.append(time.perf_counter() - killed_at)
                    break
                time.sleep(0.002)

    def stop(self) -> None:
        self.ran_to_end = self.is_alive()
        self._stopped.set()
        self.join()


@dataclass
class Figures:
    """The counts of a run; lists have one entry per epoch."""

    epochs: int = 0
    samples: int = 0
    refused: int = 0
    lost: int = 0
    repeated: int = 0
    unaccounted: int = 0
    slots_away: int = 0  # ring slots that are lost at the end
    memory_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)

    def count_epoch(self, seen: Counter[int], refused: Counter[int], good: set[int], damaged: set[int]) -> None:
        """Count an epoch: `seen` and `refused` are the numbers of times that each index arrived or was listed as an
        error."""
        self.epochs += 1
        self.samples += seen.total()
        self.refused += refused.total()
        self.lost += sum(seen[index] == 0 for index in good)
        self.repeated += sum(seen[index] > 1 for index in good | damaged)
        self.unaccounted += sum(seen[index] + refused[index] != 1 for index in damaged)
        self.unaccounted += sum(refused[index] for index in good)

    def measure(self) -> None:
        """Record the current memory, descriptors and processes."""
        pids = tree(os.getpid())
        self.memory_mb.append(sum(map(proportional_mb, pids)))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))
        self.processes.append(len(pids))

    def growth_mb(self) -> float:
        quarter = max(1, len(self.memory_mb) // 4)
        return statistics.mean(self.memory_mb[-quarter:]) - statistics.mean(self.memory_mb[quarter : 2 * quarter])


def main(arguments: list[str] | None = None) -> int:
    """Run and report. Return the exit status: 1 if a guarantee was violated."""
    parser = make_parser("soak", __doc__, "photos", "cache", "json", files=2000, workers=2, batch_size=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-every", type=float, default=1.0, help="seconds between kills (default 1)")
    parser.add_argument("--damaged", type=float, default=0.05, help="fraction of files to damage (default 0.05)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    source, _ = find_photos(options.cache, options.photos)
    root = options.cache / "soak"
    kinds = copy_with_damage(copy_photos(source, options.cache, options.files), root, options.damaged, options.seed)
    warm_page_cache(root)
    dataset = gl.ImageFolder(root)
    damaged = {index for index in range(len(dataset)) if dataset.paths[index] in kinds}
    good = set(range(len(dataset))) - damaged
    print(
        f"{len(good):,} good files, {len(damaged)} damaged ({', '.join(sorted(set(kinds.values())))}); "
        f"{options.workers} workers, one killed every {options.kill_every:g} s for {options.minutes:g} minutes"
    )
    normalize = T.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    loader = gl.Loader(
        dataset,
        options.batch_size,
        shuffle=True,
        transforms=[T.RandomResizedCrop(224), T.RandomHorizontalFlip(), normalize],
        num_workers=options.workers,
        device="cpu",
        info=True,
        faults=gl.Faults(on_error="skip", max_error_rate=4 * options.damaged, max_restarts=10**9),
    )
    figures, killer = Figures(), Killer(loader, options.kill_every, options.seed)
    started = reported_at = time.monotonic()
    with loader:
        while time.monotonic() - started < 60 * options.minutes or figures.epochs < 4:
            seen: Counter[int] = Counter()
            errors_before = loader.errors.total
            for step, (_, info) in enumerate(loader):
                seen.update(info.indices.tolist())
                if not killer.ident:  # the workers exist by now
                    killer.start()
                if step == len(loader) // 2:
                    figures.measure()
            records = loader.errors[len(loader.errors) - (loader.errors.total - errors_before) :]
            figures.count_epoch(seen, Counter(record.index for record in records), good, damaged)  # type: ignore[arg-type]
            if time.monotonic() - reported_at > 60:
                reported_at = time.monotonic()
                print(
                    f"{(reported_at - started) / 60:.0f} min: {figures.epochs} epochs, {killer.kills} kills, "
                    f"{figures.memory_mb[-1]:.0f} MB, {figures.descriptors[-1]} descriptors",
                    flush=True,
                )
        killer.stop()
        figures.slots_away = count_lost_slots(loader)
    return report(figures, killer, options, time.monotonic() - started)


def count_lost_slots(loader: gl.Loader) -> int:
    """Return how many slots of the ring are lost after an epoch, once no worker can write to any slot."""
    session: Any = loader._session
    while not session.feed.is_idle() or session.engine.recover_slots():
        session.feed.pump(0.01)
    return len(session.ring._busy)


def report(figures: Figures, killer: Killer, options: argparse.Namespace, seconds: float) -> int:
    restarts_s = killer.restarts_s or [float("nan")]
    restart_s, slowest_s = statistics.median(restarts_s), max(restarts_s)
    quarter = len(figures.descriptors) // 4
    most, first_most = max(figures.descriptors[quarter:]), max(figures.descriptors[: quarter + 1])
    growth_mb, leftover_count = figures.growth_mb(), len(tree(os.getpid())) - 1
    verdicts = [
        Verdict(
            f"every good sample exactly once in each epoch: {figures.lost} lost, {figures.repeated} repeated",
            figures.lost == figures.repeated == 0,
        ),
        Verdict(f"every damaged file decoded or listed, once: {figures.unaccounted} not", figures.unaccounted == 0),
        Verdict(f"workers killed to the end: {killer.kills} times", killer.ran_to_end and killer.kills > 0),
        Verdict(f"every slot of the ring usable at the end: {figures.slots_away} not", figures.slots_away == 0),
        Verdict(f"memory flat: {growth_mb:+.0f} MB from the second to the last quarter", growth_mb < FLAT_MB),
        Verdict(f"descriptors flat: {most} at most, {first_most} in the first quarter", most <= first_most),
        Verdict(f"processes: {max(figures.processes)} at most", max(figures.processes) <= options.workers + 2),
        Verdict(
            f"a worker is back in under {RESTART_LIMIT_S} s: median {restart_s:.2f} s, slowest {slowest_s:.2f} s",
            restart_s < RESTART_LIMIT_S,
        ),
        Verdict(f"nothing left behind: {leftover_count} processes", leftover_count == 0),
    ]
    print(
        f"\n{seconds / 60:.1f} minutes: {figures.epochs} epochs, {figures.samples:,} samples "
        f"({figures.samples / seconds:,.0f}/s), {killer.kills} kills and {killer.template_kills} of the template, "
        f"{figures.refused:,} samples refused\n"
        f"memory of all processes: first {figures.memory_mb[0]:.0f}, median "
        f"{statistics.median(figures.memory_mb):.0f}, last {figures.memory_mb[-1]:.0f} MB\n"
    )
    print_verdicts(verdicts)
    counts = {"minutes": seconds / 60, "kills": killer.kills, "template_kills": killer.template_kills}
    restart = {"restart_s": {"median": restart_s, "slowest": slowest_s}}
    run_details = {"figures": vars(figures), "promises": dict(verdicts), "python": sys.version.split()[0]}
    write_json(options.json, {**counts, **restart, **run_details})
    return 0 if all(verdict.met for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
