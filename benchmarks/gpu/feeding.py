"""A row: one loader by itself, then feeding each network.

    python -m benchmarks.gpu.feeding PEER RECIPE PACE

Prints a line of JSON after each phase, so that a phase that fails, or that the time is up for, loses no other. Epochs
follow each other without end; a round is what fits into its seconds, and ends when the device has done all of it.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import torch

from benchmarks.gpu.networks import training_step
from benchmarks.gpu.plan import NETWORKS, Pace
from benchmarks.gpu.runtime import Runtime
from benchmarks.interpreter import hasten
from benchmarks.peers.protocol import Peer, looks_of
from benchmarks.peers.recipe import Recipe

__all__ = ["main", "measured"]

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], None]


def endless(peer: Peer) -> Iterator[Batch]:
    """The batches of one epoch after the other."""
    while True:
        count = 0
        for count, batch in enumerate(peer.epoch(), 1):  # noqa: B007
            yield batch
        if not count:
            raise RuntimeError("an epoch without batches: there are fewer files than a batch has images")


def measured(
    batches: Iterator[Batch], step: Step | None, runtime: Runtime, pace: Pace, ahead: int = 0
) -> dict[str, Any]:
    """Rounds after a warm-up; each value is a list with one of each round.

    A step is first run on one batch again and again, which lets cuDNN search; meanwhile the loader makes batches
    `ahead`, at most so many, and these are then taken without a step: what is left over from a time without a need
    for batches would hide that the step has to wait for them.

    Returns:
        images_per_s; next_ms, the median of what a ``next()`` took of the host's time, and next_cpu_ms, of the main
        thread's CPU time. With a step: idle_ms, the median of the device's time from the end of one step to the
        beginning of the next, and waiting, the share of the device's time that was so.
    """
    if step is not None:
        kept = next(batches)
        for _ in range(pace.steps):
            step(*kept)
        runtime.synchronize()
        for _ in islice(batches, ahead):
            pass
    if pace.warm_s:
        _round(batches, step, runtime, pace.warm_s, pace.steps)
    rounds = [_round(batches, step, runtime, pace.round_s, pace.steps) for _ in range(pace.rounds)]
    return {key: [one[key] for one in rounds] for key in rounds[0]}


def _round(
    batches: Iterator[Batch], step: Step | None, runtime: Runtime, limit_s: float, least: int
) -> dict[str, float]:
    images, marks = 0, []
    next_ms: list[float] = []
    next_cpu_ms: list[float] = []
    runtime.synchronize()
    started = time.perf_counter()
    while len(next_ms) < least or time.perf_counter() - started < limit_s:
        wall, cpu = time.perf_counter(), time.thread_time()
        batch = next(batches)
        next_ms.append(1000 * (time.perf_counter() - wall))
        next_cpu_ms.append(1000 * (time.thread_time() - cpu))
        images += len(batch[0])
        if step is not None:
            begin = runtime.mark()
            step(*batch)
            marks.append((begin, runtime.mark()))
    runtime.synchronize()
    found = {
        "images_per_s": images / (time.perf_counter() - started),
        "next_ms": statistics.median(next_ms),
        "next_cpu_ms": statistics.median(next_cpu_ms),
    }
    if marks:
        idle = [runtime.ms(end, begin) for (_, end), (begin, _) in pairwise(marks)]
        whole = runtime.ms(marks[0][0], marks[-1][1])
        found |= {"idle_ms": statistics.median(idle), "waiting": sum(idle) / whole}
    return found


def main() -> None:
    name, recipe, pace = sys.argv[1], Recipe(**json.loads(sys.argv[2])), Pace(**json.loads(sys.argv[3]))
    warnings.simplefilter("ignore", FutureWarning)  # peers warn of their own futures
    warnings.simplefilter("ignore", DeprecationWarning)
    if (recipe.variant.split("/")[0], recipe.device) == ("fused", "cpu"):
        hasten()
    runtime = Runtime(recipe.device)
    peer: Peer = importlib.import_module(f"benchmarks.peers.{name}").build(recipe)
    started = time.perf_counter()
    batches = endless(peer)
    first = next(batches)
    runtime.synchronize()
    tell({"first_batch_s": time.perf_counter() - started, "falls_back": peer.falls_back, "versions": peer.versions})
    looks_of(first, recipe, getattr(torch, recipe.dtype))
    del first
    # DataLoader keeps two batches for each worker, and hands over what a worker makes all at once: no round is shorter.
    ahead = 0 if pace.small else 2 * recipe.workers + 2
    cycles = replace(pace, steps=max(pace.steps, 0 if pace.small else recipe.workers))
    tell({"alone": measured(batches, None, runtime, cycles), "stats": peer.stats(), **runtime.memory()})
    for network in () if pace.alone else NETWORKS:
        step = training_step(
            network, runtime.device, small=pace.small, channels_last=recipe.channels_last, light=pace.small
        )
        tell({network: measured(batches, step, runtime, cycles, ahead), **runtime.memory()})


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
