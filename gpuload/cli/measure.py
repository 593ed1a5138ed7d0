"""Runs loaders without a training step, and measures their cost (by `gpuload.cli.processes`): over whole epochs, or in
rounds of some seconds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpuload.cli.processes import cpu_seconds, proportional_mb, tree

__all__ = ["Cost", "Round", "forever", "images_of", "measure", "one_round"]


@dataclass(frozen=True)
class Cost:
    """The cost of loading."""

    images_per_s: float
    cpu_s_per_1000: float
    first_batch_s: float
    worker_mb: float | None  # proportional; None without workers


@dataclass(frozen=True)
class Round:
    """The rate of some seconds of loading, and the processor time of all processes meanwhile."""

    images_per_s: float
    cpu_s_per_1000: float


def images_of(batch: Any) -> torch.Tensor:
    """The images of a batch: its first tensor of images, or else its first tensor.

    Raises:
        ValueError: there is none.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    found = next((tensor for tensor in tensors if tensor.ndim >= 4), next(iter(tensors), None))
    if found is None:
        raise ValueError(f"a batch has no tensors, but is a {type(batch).__name__}")
    return found


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other. ValueError if an epoch has none."""
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if not count:
            raise ValueError("an epoch has no batches")


def one_round(batches: Iterator[Any], seconds: float, device: torch.device, *, skip: int = 0) -> Round:
    """Take batches for so many seconds, and at least one, after `skip` that do not count: workers start, and batches
    lie there that were made before."""
    for _ in range(skip):
        next(batches)
    _await(device)
    images, cpu_before, started = 0, cpu_seconds(os.getpid()), time.perf_counter()
    while not images or time.perf_counter() - started < seconds:
        images += len(images_of(next(batches)).to(device, non_blocking=True))
    _await(device)
    wall_s = time.perf_counter() - started
    return Round(images / wall_s, 1000 * (cpu_seconds(os.getpid()) - cpu_before) / images)


def _await(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(loader: Iterable[Any], epochs: int, device: torch.device, on_batch: Callable[[int], None]) -> Cost:
    """Iterate over the loader `epochs` times; `on_batch` gets the number of images in each batch.

    Images per second and CPU time are of all epochs, without the wait for the very first batch, while workers start.
    """
    before = set(tree(os.getpid()))
    images, wall_s, cpu_s, first_batch_s = 0, 0.0, 0.0, 0.0
    memory: list[float] = []
    for epoch in range(epochs):
        started, cpu_started = time.perf_counter(), cpu_seconds(os.getpid())
        for step, batch in enumerate(loader):
            count = len(images_of(batch).to(device))
            if epoch == 0 and step == 0:
                first_batch_s = time.perf_counter() - started
                started, cpu_started = time.perf_counter(), cpu_seconds(os.getpid())
            else:
                images += count
            on_batch(count)
            if epoch == epochs - 1 and not memory:
                wall_before, cpu_before = time.perf_counter(), cpu_seconds(os.getpid())
                memory = [proportional_mb(pid) for pid in set(tree(os.getpid())) - before]
                # Reading memory is not loading.
                started += time.perf_counter() - wall_before
                cpu_started += cpu_seconds(os.getpid()) - cpu_before
        _await(device)
        wall_s += time.perf_counter() - started
        cpu_s += cpu_seconds(os.getpid()) - cpu_started
    return Cost(
        images_per_s=images / wall_s if images else float("nan"),
        cpu_s_per_1000=1000 * cpu_s / images if images else float("nan"),
        first_batch_s=first_batch_s,
        worker_mb=statistics.mean(memory) if memory else None,
    )
