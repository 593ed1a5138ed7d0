"""Runs a parity case: draws for images, what each backend makes of them on the CPU, and what the oracle says.

The images of a batch are cut to the regions that the chain asks for, as a worker would decode them; the oracle gets
them whole. All backends are given the same draws.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from parity.case import BATCHES, BOUNDED, RUNS, Case
from parity.images import SETS, image_set
from parity.usable import why_not
from transforms.specs import SPECS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.base import Transform

__all__ = [
    "Measured",
    "all_cases",
    "bounded_runs_of",
    "measure",
    "named",
    "operations",
    "pairs_of",
    "runs_natively",
    "runs_of",
    "sets_of",
    "topics",
]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Measured:
    """The worst that was found, in levels: the greatest mean of an image, the greatest difference of a number, and the
    greatest from what another run made of the same image."""

    mean: float = 0.0
    max: float = 0.0
    apart: float = 0.0

    def __or__(self, other: Measured) -> Measured:
        return Measured(*(max(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)))


@cache
def topics() -> dict[str, tuple[Case, ...]]:
    """The cases of all transforms, by topic."""
    cases_by_topic: dict[str, list[Case]] = {}
    for spec in SPECS.values():
        for case in spec.parity:
            cases_by_topic.setdefault(case.topic, []).append(case)
    return {topic: tuple(cases_by_topic[topic]) for topic in sorted(cases_by_topic)}


@cache
def all_cases() -> tuple[Case, ...]:
    """The cases of all topics."""
    return tuple(case for cases in topics().values() for case in cases)


@cache
def operations() -> tuple[Case, ...]:
    """The first case of each set of transforms that cases name."""
    first_cases: dict[frozenset[str], Case] = {}
    for case in all_cases():
        first_cases.setdefault(frozenset(type(inner).__name__ for inner in case.transforms if named(case, inner)), case)
    return tuple(first_cases.values())


def sets_of(run: str) -> tuple[str, ...]:
    """The images that a run is tried on, of those that there are: where kernels are interpreted, small ones."""
    names = ("small",) if run == "fused" else ("photographs", "random", "one")
    return tuple(name for name in names if image_set(name, 3))


def runs_of(case: Case) -> list[str]:
    """The runs that can be used here, and have any of the transforms that a case names."""
    return [run for run in RUNS if why_not(run) is None and runs_natively(case, run)]


def bounded_runs_of(case: Case) -> list[str]:
    """Those of `runs_of` whose differences from the oracle and from each other are bounded."""
    return [run for run in runs_of(case) if run in BOUNDED]


def pairs_of(case: Case) -> Iterator[tuple[str, str, str]]:
    """The pairs of a case's bounded runs, each with the images to compare them on: those that both are tried on, and
    small ones."""
    for other, run in combinations(bounded_runs_of(case), 2):
        for images in sorted({*sets_of(run), "small"} & {*sets_of(other), "small"}):
            yield run, other, images


@dataclass(frozen=True)
class Batch:
    """What all runs of a case are given, and what the oracle says: in levels, H×W×C each."""

    ragged: RaggedImages
    draws: T.Program
    expected: list[np.ndarray]


@lru_cache(maxsize=16)
def _batch(number: int, set_name: str, draw_round: int) -> Batch:
    case = all_cases()[number]
    arrays = image_set(set_name, case.channels)
    chain, sizes = T.Chain(case.transforms), np.array([image.shape[:2] for image in arrays], np.int64)
    positions, key = np.arange(len(arrays)), epoch_key(3, draw_round)
    regions = chain.regions(key, positions, sizes)
    ragged = RaggedImages.from_arrays(
        [
            image[top : top + height, left : left + width]
            for image, (top, left, height, width) in zip(arrays, regions.tolist(), strict=True)
        ]
    )
    ragged.table["size_hw"], ragged.table["region_tlhw"] = sizes, regions
    draws = chain.draw(key, positions, sizes)
    # Each transform, and what it drew.
    by_step = {record.step: record for record in draws.records}
    steps = [(transform, by_step.get(step)) for step, transform in enumerate(chain.lines[0].transforms)]
    expected = []
    for row, image in enumerate(arrays):
        partner = arrays[row ^ 1] if row ^ 1 < len(arrays) else image
        expected.append(_levels(case, case.oracle((image, partner) if case.pairs else image, steps, row)))
    return Batch(ragged, draws, expected)


@lru_cache(maxsize=2)
def _stage(number: int, run: str) -> Any:
    case = all_cases()[number]
    backend, runner = ("torch", "batched") if run == BATCHES else (run, None)
    ragged = "error" if case.pairs else "list"
    return compile_stage(T.Chain(case.transforms), device=CPU, backend=backend, ragged=ragged, runner=runner)


def named(case: Case, transform: Transform) -> bool:
    """Whether a case's name names a transform of its chain; others, such as a crop before it, prepare the images."""
    return re.search(rf"\b{type(transform).__name__}\b", case.name) is not None


def runs_natively(case: Case, run: str) -> bool:
    """Whether any transform that a case names runs on that backend; else it is the reference that is run in its place.

    One of several is enough: that a backend hands images over to the reference and gets them back is tested there too.
    """
    if run in ("torch", BATCHES):
        return True
    steps = _stage(all_cases().index(case), run).plan.steps
    return any(step.backend == run for step in steps if named(case, step.transform))


@lru_cache(maxsize=64)
def _results(number: int, run: str, set_name: str, draw_round: int) -> list[np.ndarray]:
    """What a run makes of a batch, in levels, H×W×C each."""
    case, batch = all_cases()[number], _batch(number, set_name, draw_round)
    results = _stage(number, run)(batch.ragged, batch.draws)
    return [_levels(case, image.permute(1, 2, 0).numpy()) for image in results]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine, threads of torch that wait for each other take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def measure(case: Case, run: str, set_name: str, *, compared_with: tuple[str, ...] = ("torch",)) -> Measured:
    """How far a run's results lie from the oracle's, and from those of other runs, for one of the sets of images."""
    number, worst = all_cases().index(case), Measured()
    for draw_round in SETS[set_name]:
        batch, results = _batch(number, set_name, draw_round), _results(number, run, set_name, draw_round)
        other_results = [_results(number, other, set_name, draw_round) for other in compared_with]
        for row, (levels, expected) in enumerate(zip(results, batch.expected, strict=True)):
            assert levels.shape == expected.shape, (levels.shape, expected.shape)
            difference = abs(levels - expected)
            apart = [float(abs(levels - other[row]).max()) for other in other_results]
            worst |= Measured(float(difference.mean()), float(difference.max()), max(apart, default=0.0))
    return worst


def _levels(case: Case, numbers: np.ndarray) -> np.ndarray:
    levels = np.asarray(numbers, np.float64)
    return levels if case.to_levels is None else case.to_levels(levels)
