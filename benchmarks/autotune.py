"""num_workers="auto" beside every fixed number of workers, on recipes with different bottlenecks.

    python -m benchmarks.autotune [--rounds 3] [--only NAME] [--json FILE]

Each recipe runs in rounds: in a round, each fixed number and "auto" in turn give the same batches, so that what else
the machine does meets all of them. A rate is that of the batches after the first ones, in which "auto" settles; the
steps that it took then are shown, with their batches. The ratio is that of the medians over the rounds, "auto" to the
best fixed number; in brackets, the lowest and highest ratio of a round to the same fixed number.

- decode: photographs of 500×375, decoded and cropped; the loop does nothing. More workers than CPUs do not help.
- step: the same, and a loop that takes `STEP_S` for a batch without a CPU, as behind a GPU. Few workers suffice.
- sleep: a dataset that waits `SAMPLE_S` for each sample, as for a store far away. Many more workers than CPUs help.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import gpuload as gl
from benchmarks.machine import cpu_model, versions
from benchmarks.photos import make_up
from gpuload import transforms as T
from gpuload.loader.limits import usable_cpus

__all__ = ["RECIPES", "Recipe", "main", "measure"]

BATCH: Final = 64
STEP_S: Final = 0.15
SAMPLE_S: Final = 0.01
GOAL: Final = 0.95
PHOTOS: Final = 200


class Sleeping:
    """Samples that take their time, and no CPU."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        time.sleep(SAMPLE_S)
        return gl.Image(np.full((32, 32, 3), index % 251, np.uint8)), index


@dataclass(frozen=True)
class Recipe:
    """What is loaded and done: `settle` batches before the rate is taken, and `batches` for it."""

    name: str
    dataset: Callable[[Path, int], Any]
    transforms: tuple[Any, ...]
    settle: int
    batches: int
    fixed: tuple[int, ...]
    step_s: float = 0.0


class Repeated:
    """The samples of a dataset, again and again."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self.dataset = dataset
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def _photos(root: Path, samples: int) -> Any:
    return Repeated(gl.ImageFiles(make_up(root, count=PHOTOS)), samples)


def _sleeping(root: Path, samples: int) -> Any:
    return Sleeping(samples)


def recipes(cpus: int) -> tuple[Recipe, ...]:
    """The recipes, with the fixed numbers that can be best with so many CPUs."""
    few, many = sorted({1, max(1, cpus - 1), cpus, 2 * cpus}), sorted({4 * cpus, 8 * cpus, 16 * cpus})
    crop = (T.RandomResizedCrop(64), T.RandomHorizontalFlip())
    return (
        Recipe("decode", _photos, crop, 40, 40, tuple(few)),
        Recipe("step", _photos, crop, 40, 20, tuple(few[:-1]), STEP_S),
        Recipe("sleep", _sleeping, (T.RandomHorizontalFlip(),), 80, 80, tuple(many)),
    )


RECIPES: Final = ("decode", "step", "sleep")


@dataclass
class Result:
    """By number of workers, or "auto": images a second, in each round. Of "auto", its steps, and where it settled."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    steps: list[list[str]] = field(default_factory=list)
    settled_after: list[int] = field(default_factory=list)  # batches
    workers: list[int] = field(default_factory=list)

    @property
    def best(self) -> str:
        fixed = {name: statistics.median(rates) for name, rates in self.rates.items() if name != "auto"}
        return max(fixed, key=fixed.__getitem__)

    @property
    def ratio(self) -> float:
        return statistics.median(self.rates["auto"]) / statistics.median(self.rates[self.best])

    @property
    def ratios(self) -> list[float]:
        """Of the rounds."""
        return [auto / best for auto, best in zip(self.rates["auto"], self.rates[self.best], strict=True)]


class _Steps(logging.Handler):
    """Keeps what the tuner logs, with the number of the batch."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.batch = 0
        self.found: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((self.batch, record.getMessage()))


def measure(recipe: Recipe, root: Path, rounds: int) -> Result:
    """Run a recipe."""
    result = Result()
    dataset = recipe.dataset(root, BATCH * (recipe.settle + recipe.batches))
    for number in range(rounds):
        names: list[int | str] = [*recipe.fixed, "auto"]
        for workers in names if number % 2 == 0 else reversed(names):
            rate, steps = _run(recipe, dataset, workers)
            result.rates.setdefault(str(workers), []).append(rate)
            if workers == "auto":
                moves = [(batch, text) for batch, text in steps.found if "→" in text]
                result.steps.append([f"batch {batch}: {text}" for batch, text in steps.found])
                result.settled_after.append(max((batch for batch, _ in moves), default=0))
                result.workers.append(steps.workers)
    return result


def _run(recipe: Recipe, dataset: Any, workers: Any) -> tuple[float, Any]:
    steps: Any = _Steps()
    logger = logging.getLogger("gpuload")
    level = logger.level
    logger.addHandler(steps)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more workers than CPUs
            made = gl.Loader(
                dataset, BATCH, shuffle=True, transforms=list(recipe.transforms), num_workers=workers, device="cpu"
            )
        with made as loader:
            began = 0.0
            for steps.batch, _ in enumerate(loader, 1):
                if recipe.step_s:
                    time.sleep(recipe.step_s)
                if steps.batch == recipe.settle:
                    began = time.perf_counter()
            seconds = time.perf_counter() - began
            steps.workers = loader.num_workers
    finally:
        logger.removeHandler(steps)
        logger.setLevel(level)
    return BATCH * recipe.batches / seconds, steps


def table(results: dict[str, Result]) -> Table:
    """A row for each recipe."""
    made = Table(title="images/s, medians over the rounds", title_justify="left", box=box.SIMPLE)
    for heading in ("recipe", "fixed numbers of workers", '"auto"', "of the best", "workers", "last step at batch"):
        made.add_column(heading, no_wrap=True)
    for name, result in results.items():
        medians = {key: statistics.median(rates) for key, rates in result.rates.items()}
        fixed = ", ".join(f"{key}: {rate:.0f}" for key, rate in medians.items() if key != "auto")
        spread = f"{result.ratio:.3f} ({min(result.ratios):.2f} to {max(result.ratios):.2f})"
        settled = f"{statistics.median(result.settled_after):.0f}, at most {max(result.settled_after)}"
        numbers = ", ".join(map(str, sorted(set(result.workers))))
        made.add_row(name, fixed, f"{medians['auto']:.0f}", spread, numbers, settled)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 where "auto" is below the goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each number runs (default 3)")
    parser.add_argument("--batches", type=int, help="in which it settles, and as many that are measured")
    parser.add_argument("--only", choices=RECIPES, help="one recipe")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes(usable_cpus()):
            if options.only in (None, recipe.name):
                if options.batches:
                    recipe = replace(recipe, settle=options.batches, batches=options.batches)
                results[recipe.name] = measure(recipe, Path(folder), options.rounds)
    console = Console(highlight=False)
    console.width = max(130, console.width if console.is_terminal else 0)
    load = os.getloadavg()[0]
    console.print(f"{cpu_model()}, {usable_cpus()} CPUs, load {load:.1f}; {versions()}", soft_wrap=True)
    console.print(table(results))
    for name, result in results.items():
        console.print(f"{name}, the steps of the last round:", *result.steps[-1:][0], sep="\n  ", soft_wrap=True)
    met = True
    for name, result in results.items():
        reached = result.ratio >= GOAL
        met &= reached
        verdict = "met   " if reached else "missed"
        console.print(f'{verdict} {name}: "auto" at least {GOAL} of {result.best} workers: {result.ratio:.3f}')
    if options.json:
        everything = {
            "batch": BATCH,
            "rounds": options.rounds,
            "machine": {"cpu": cpu_model(), "cpus": usable_cpus(), "load": load},
            "versions": versions(),
            "results": {
                name: {**vars(result), "best": result.best, "ratio": result.ratio} for name, result in results.items()
            },
        }
        options.json.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
