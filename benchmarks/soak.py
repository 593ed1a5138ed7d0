"""A soak test: processes of a Loader are killed at random, over three kinds of dataset, and some files are damaged.

    make soak ARGS="--photos DIR"        or   python -m benchmarks.soak --photos DIR --minutes 10

The datasets are a folder of photographs, a map dataset of arrays whose class needs torch, and an iterable dataset. Each
has a third of the time. Every second, a worker is killed; one time in five the template too, and one time in ten also
the fork server. Each epoch is checked: every good sample must arrive exactly once with its own value, and every damaged
file must either decode (a crop above the point of truncation is intact) or be listed in `loader.errors`, once. Memory,
descriptors and processes are measured at the same point of each epoch; the rate includes the cold start. The run ends
by itself, with exit status 1 if a guarantee was violated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch.utils.data import Dataset

import gpuload as gl
from benchmarks.memory import proportional_mb
from benchmarks.photos import copy_photos, find_photos, warm_page_cache
from benchmarks.running import Verdict, make_parser, print_verdicts, write_json
from gpuload import transforms as T
from gpuload.cli.processes import tree
from gpuload.workers import fork_server

RESTART_LIMIT_S = 0.5
ROWS_PER_FILE = 20  # arrays take less time than files
TEMPLATE_SHARE, SERVER_SHARE = 0.2, 0.1
FLAT_MB = 24  # allowed growth of mean memory from the second quarter of a dataset's time to the last


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


class Table(Dataset[tuple[int, np.ndarray]]):
    """A map dataset of arrays: sample `index` is the index and `value_of(index)`."""

    def __init__(self, count: int) -> None:
        self.values = value_of(np.arange(count))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        return index, self.values[index]


class Stream:
    """An iterable dataset with the samples of `Table`, of which each worker yields its share."""

    def __init__(self, count: int) -> None:
        self.values = value_of(np.arange(count))

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        info = gl.get_worker_info()
        assert info is not None
        for index in range(info.id, len(self.values), info.num_workers):
            yield index, self.values[index]


def value_of(indices: Any) -> np.ndarray:
    return np.asarray(indices, np.int64) * 7919 % 104729


class Killer(threading.Thread):
    """A thread that kills a random worker at intervals and then waits for its replacement; some of the time it kills
    the template first, or the fork server and the template."""

    def __init__(self, loader: gl.Loader, every_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.restarts_s: list[float] = []
        self.kills = self.template_kills = self.server_kills = 0
        self.ran_to_end = False  # an error in this thread would otherwise only end the kills
        self._loader, self._every_s, self._random = loader, every_s, random.Random(seed)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._every_s):
            pool: Any = self._loader._session and self._loader._session.engine
            worker_index = self._random.choice(list(pool._team))
            worker, template, server, chance = (
                pool._team[worker_index],
                pool._template,
                fork_server._server,
                self._random.random(),
            )
            with contextlib.suppress(ProcessLookupError):
                if server is not None and server.pid is not None and chance < SERVER_SHARE:
                    os.kill(server.pid, signal.SIGKILL)
                    self.server_kills += 1
            with contextlib.suppress(ProcessLookupError):
                if template is not None and template.pid is not None and chance < TEMPLATE_SHARE:
                    os.kill(template.pid, signal.SIGKILL)
                    self.template_kills += 1
            try:
                if worker.pid is None:
                    continue
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
    wrong: int = 0  # samples with the value of another
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
    rows, damages = ROWS_PER_FILE * options.files, ", ".join(sorted(set(kinds.values())))
    print(
        f"{len(dataset) - len(damaged):,} good files, {len(damaged)} damaged ({damages}); "
        f"{options.workers} workers, one killed every {options.kill_every:g} s for {options.minutes:g} minutes"
    )
    loaders: dict[str, Callable[[], gl.Loader]] = {
        "files": lambda: make_loader(
            dataset,
            options,
            shuffle=True,
            transforms=[T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.25,) * 3)],
        ),
        "table": lambda: make_loader(Table(rows), options, shuffle=True),
        "stream": lambda: make_loader(Stream(rows), options),
    }
    exit_status, records = 0, dict[str, Any]()
    for name, make in loaders.items():
        bad = damaged if name == "files" else set[int]()
        good = set(range(len(dataset) if name == "files" else rows)) - bad
        run = Run(name, make(), good, bad)
        run.run(options)
        records[name] = run.report(options)
        exit_status |= not all(verdict.met for verdict in run.verdicts)
    fork_server.close()
    leftover = Verdict(f"nothing left behind: {(count := len(tree(os.getpid())) - 1)} processes", count == 0)
    print_verdicts([leftover])
    write_json(options.json, {**records, "promises": {leftover.text: leftover.met}, "python": sys.version.split()[0]})
    return exit_status | (not leftover.met)


def make_loader(dataset: Any, options: argparse.Namespace, **arguments: Any) -> gl.Loader:
    return gl.Loader(
        dataset,
        options.batch_size,
        num_workers=options.workers,
        device="cpu",
        info=True,
        faults=gl.Faults(on_error="skip", max_error_rate=4 * options.damaged, max_restarts=10**9),
        **arguments,
    )


class Run:
    """The epochs of one loader, with kills."""

    def __init__(self, name: str, loader: gl.Loader, good: set[int], damaged: set[int]) -> None:
        self.name, self.loader, self.good, self.damaged = name, loader, good, damaged
        self.figures, self.verdicts, self.seconds = Figures(), list[Verdict](), 0.0

    def run(self, options: argparse.Namespace) -> None:
        loader, figures = self.loader, self.figures
        self.killer = killer = Killer(loader, options.kill_every, options.seed)
        started = reported_at = time.monotonic()
        with loader:
            while time.monotonic() - started < 20 * options.minutes or figures.epochs < 4:
                seen: Counter[int] = Counter()
                errors_before = loader.errors.total
                middle = len(self.good | self.damaged) // options.batch_size // 2
                for step, (batch, info) in enumerate(loader):
                    indices = info.indices.tolist()
                    if self.name != "files":
                        indices, values = batch[0].tolist(), batch[1].numpy()
                        figures.wrong += int((values != value_of(indices)).sum())
                    seen.update(indices)
                    if not killer.ident:  # the workers exist by now
                        killer.start()
                    if step == middle:
                        figures.measure()
                records = loader.errors[len(loader.errors) - (loader.errors.total - errors_before) :]
                refused: Counter[int] = Counter(int(record.index) for record in records)  # type: ignore[arg-type]
                figures.count_epoch(seen, refused, self.good, self.damaged)
                if time.monotonic() - reported_at > 60:
                    reported_at = time.monotonic()
                    print(
                        f"{self.name}, {(reported_at - started) / 60:.0f} min: {figures.epochs} epochs, "
                        f"{killer.kills} kills, {figures.memory_mb[-1]:.0f} MB, {figures.descriptors[-1]} descriptors",
                        flush=True,
                    )
            killer.stop()
            figures.slots_away = count_lost_slots(loader)
        self.seconds = time.monotonic() - started

    def report(self, options: argparse.Namespace) -> dict[str, Any]:
        """Print the verdicts, and return the figures."""
        figures, killer = self.figures, self.killer
        restarts_s = killer.restarts_s or [float("nan")]
        restart_s, slowest_s = statistics.median(restarts_s), max(restarts_s)
        quarter = len(figures.descriptors) // 4
        most, first_most = max(figures.descriptors[quarter:]), max(figures.descriptors[: quarter + 1])
        growth_mb = figures.growth_mb()
        self.verdicts = [
            Verdict(
                f"every good sample exactly once in each epoch: {figures.lost} lost, {figures.repeated} repeated, "
                f"{figures.wrong} wrong",
                figures.lost == figures.repeated == figures.wrong == 0,
            ),
            Verdict(f"every damaged file decoded or listed, once: {figures.unaccounted} not", figures.unaccounted == 0),
            Verdict(f"workers killed to the end: {killer.kills} times", killer.ran_to_end and killer.kills > 0),
            Verdict(f"every slot of the ring usable at the end: {figures.slots_away} not", figures.slots_away == 0),
            Verdict(f"memory flat: {growth_mb:+.0f} MB from the second to the last quarter", growth_mb < FLAT_MB),
            Verdict(f"descriptors flat: {most} at most, {first_most} in the first quarter", most <= first_most),
            Verdict(f"processes: {max(figures.processes)} at most", max(figures.processes) <= options.workers + 3),
            Verdict(
                f"a worker is back in under {RESTART_LIMIT_S} s: median {restart_s:.2f} s, slowest {slowest_s:.2f} s",
                restart_s < RESTART_LIMIT_S,
            ),
        ]
        print(
            f"\n{self.name}: {self.seconds / 60:.1f} minutes: {figures.epochs} epochs, {figures.samples:,} samples "
            f"({figures.samples / self.seconds:,.0f}/s), {killer.kills} kills, {killer.template_kills} of the template "
            f"and {killer.server_kills} of the fork server, {figures.refused:,} samples refused\n"
            f"memory of all processes: first {figures.memory_mb[0]:.0f}, median "
            f"{statistics.median(figures.memory_mb):.0f}, last {figures.memory_mb[-1]:.0f} MB\n"
        )
        print_verdicts(self.verdicts)
        return {
            "minutes": self.seconds / 60,
            "kills": killer.kills,
            "template_kills": killer.template_kills,
            "server_kills": killer.server_kills,
            "restart_s": {"median": restart_s, "slowest": slowest_s},
            "figures": vars(figures),
            "promises": dict(self.verdicts),
        }


def count_lost_slots(loader: gl.Loader) -> int:
    """Return how many slots of the ring are lost after an epoch, once no worker can write to any slot."""
    session: Any = loader._session
    while not session.feed.is_idle() or session.engine.recover_slots():
        session.feed.pump(0.01)
    return len(session.ring._busy)


if __name__ == "__main__":
    sys.exit(main())
