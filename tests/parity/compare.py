"""Runs parity cases: draws for images, the results of each backend on the CPU, and the results of the oracle.

The images of a batch are cut to the regions that the chain needs, as a worker would decode them; the oracle gets
complete images. All backends get the same draws.
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
from helpers.cut_batches import cut_batch
from parity.case import BATCHES, BOUNDED, RUNS, Case
from parity.images import DRAW_ROUNDS, image_set
from parity.usable import unusable_reason
from transforms.specs import SPECS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.base import Transform

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Measured:
    """The largest differences, in levels: the mean of an image, any value, and any value from another run."""

    mean: float = 0.0
    max: float = 0.0
    apart: float = 0.0

    def __or__(self, other: Measured) -> Measured:
        return Measured(*(max(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)))


@cache
def topics() -> dict[str, tuple[Case, ...]]:
    """Return the cases of all transforms, by topic."""
    cases_by_topic: dict[str, list[Case]] = {}
    for spec in SPECS.values():
        for case in spec.parity:
            cases_by_topic.setdefault(case.topic, []).append(case)
    return {topic: tuple(cases_by_topic[topic]) for topic in sorted(cases_by_topic)}


@cache
def all_cases() -> tuple[Case, ...]:
    return tuple(case for cases in topics().values() for case in cases)


@cache
def first_cases() -> tuple[Case, ...]:
    """Return the first case for each set of transforms named by a case."""
    cases: dict[frozenset[str], Case] = {}
    for case in all_cases():
        cases.setdefault(frozenset(type(inner).__name__ for inner in case.transforms if is_named(case, inner)), case)
    return tuple(cases.values())


def sets_of(run: str) -> tuple[str, ...]:
    """Return the sets of images that exist for a run: small ones if kernels are interpreted."""
    names = ("small",) if run == "fused" else ("photographs", "random", "one")
    return tuple(name for name in names if image_set(name, 3))


def runs_of(case: Case) -> list[str]:
    """Return the runs that are possible on this machine and run a transform that the case names."""
    return [run for run in RUNS if unusable_reason(run) is None and runs_natively(case, run)]


def bounded_runs_of(case: Case) -> list[str]:
    """Return the runs whose differences from the oracle and from each other are bounded."""
    return [run for run in runs_of(case) if run in BOUNDED]


def pairs_of(case: Case) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of a case's bounded runs, with each set of images that both run, and the small set."""
    for other, run in combinations(bounded_runs_of(case), 2):
        for images in sorted({*sets_of(run), "small"} & {*sets_of(other), "small"}):
            yield run, other, images


@dataclass(frozen=True)
class Batch:
    """The input of all runs of a case, and the oracle's results, in levels, H×W×C."""

    ragged: RaggedImages
    draws: T.Program
    expected: list[np.ndarray]


@lru_cache(maxsize=16)
def _batch(case_index: int, set_name: str, draw_round: int) -> Batch:
    case = all_cases()[case_index]
    arrays = image_set(set_name, case.channels)
    chain = T.Chain(case.transforms)
    ragged, draws = cut_batch(chain, arrays, key=epoch_key(3, draw_round))
    by_step = {record.step: record for record in draws.records}
    steps = [(transform, by_step.get(step)) for step, transform in enumerate(chain.lines[0].transforms)]
    expected = []
    for row, image in enumerate(arrays):
        partner = arrays[row ^ 1] if row ^ 1 < len(arrays) else image
        expected.append(_levels(case, case.oracle((image, partner) if case.mixes_images else image, steps, row)))
    return Batch(ragged, draws, expected)


@lru_cache(maxsize=2)
def _stage(case_index: int, run: str) -> Any:
    case = all_cases()[case_index]
    backend, runner = ("torch", "batched") if run == BATCHES else (run, None)
    ragged = "error" if case.mixes_images else "list"
    return compile_stage(T.Chain(case.transforms), device=CPU, backend=backend, ragged=ragged, runner=runner)


def is_named(case: Case, transform: Transform) -> bool:
    """Return whether a case's name contains a transform; all others, such as a crop, only prepare the images."""
    return re.search(rf"\b{type(transform).__name__}\b", case.name) is not None


def runs_natively(case: Case, run: str) -> bool:
    """Return whether a backend runs at least one transform that a case names, so that the reference does not run all.

    If a backend runs only some of the transforms, the case tests that images are handed to the reference and back.
    """
    if run in ("torch", BATCHES):
        return True
    steps = _stage(all_cases().index(case), run).plan.steps
    return any(step.backend == run for step in steps if is_named(case, step.transform))


@lru_cache(maxsize=64)
def _results(case_index: int, run: str, set_name: str, draw_round: int) -> list[np.ndarray]:
    """Return the results of a run, in levels, H×W×C."""
    case, batch = all_cases()[case_index], _batch(case_index, set_name, draw_round)
    results = _stage(case_index, run)(batch.ragged, batch.draws)
    return [_levels(case, image.permute(1, 2, 0).numpy()) for image in results]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, because on a busy machine torch's threads wait for each other, and take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def measure(case: Case, run: str, set_name: str, *, compared_with: tuple[str, ...] = ("torch",)) -> Measured:
    """Return how much a run's results differ from the oracle's, and from those of other runs, for a set of images."""
    case_index, worst = all_cases().index(case), Measured()
    for draw_round in DRAW_ROUNDS[set_name]:
        batch, results = _batch(case_index, set_name, draw_round), _results(case_index, run, set_name, draw_round)
        other_results = [_results(case_index, other, set_name, draw_round) for other in compared_with]
        for row, (levels, expected) in enumerate(zip(results, batch.expected, strict=True)):
            assert levels.shape == expected.shape, (levels.shape, expected.shape)
            difference = abs(levels - expected)
            apart = [float(abs(levels - other[row]).max()) for other in other_results]
            worst |= Measured(float(difference.mean()), float(difference.max()), max(apart, default=0.0))
    return worst


def _levels(case: Case, numbers: np.ndarray) -> np.ndarray:
    levels = np.asarray(numbers, np.float64)
    return levels if case.to_levels is None else case.to_levels(levels)
