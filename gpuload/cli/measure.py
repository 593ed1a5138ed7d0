"""Runs a loader for some epochs, without a training step, and measures its cost (by `gpuload.cli.processes`)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpuload.cli.processes import cpu_seconds, proportional_mb, tree

__all__ = ["Cost", "images_of", "measure"]


@dataclass(frozen=True)
class Cost:
    """The cost of loading."""

    images_per_s: float
    cpu_s_per_1000: float
    first_batch_s: float
    worker_mb: float | None  # proportional; None without workers


def images_of(batch: Any) -> torch.Tensor:
    """The images of a batch that is (images, labels), or images alone."""
    return batch[0] if isinstance(batch, tuple | list) else batch


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
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        wall_s += time.perf_counter() - started
        cpu_s += cpu_seconds(os.getpid()) - cpu_started
    return Cost(
        images_per_s=images / wall_s if images else float("nan"),
        cpu_s_per_1000=1000 * cpu_s / images if images else float("nan"),
        first_batch_s=first_batch_s,
        worker_mb=statistics.mean(memory) if memory else None,
    )
