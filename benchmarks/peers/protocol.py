"""How one peer is measured, the same way for all of them.

A peer's module gives a function that builds it from the `Recipe`, and calls `main`. It runs in a process of its own,
which prints one line of JSON, the last on its standard output:

- the first epoch warms everything up; its `iter()` to first batch is `first_batch_s`;
- the next epochs are measured, one rate each, from `iter()` to the last batch, with the CPU time of the process tree;
- memory is read in the middle of one more epoch, when everything is in flight.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.memory import proportional_mb, shared_mb
from benchmarks.peers.recipe import MEAN, STD, Recipe
from gpuload.cli.processes import cpu_seconds, tree

__all__ = ["MEAN", "STD", "Peer", "Recipe", "looks_of", "main"]


@dataclass(frozen=True)
class Peer:
    """A loader ready to run: `epoch()` starts one and yields (images, labels). `falls_back`: the transforms that
    gpuload's reference runs in the place of the backend that was asked for. `stats()` is what gpuload's loader took."""

    epoch: Callable[[], Iterable[Any]]
    versions: dict[str, str]
    falls_back: tuple[str, ...] = ()
    stats: Callable[[], str] = str


def main(build: Callable[[Recipe], Peer], dtype: torch.dtype = torch.float32) -> None:
    """Measure the peer that `build` makes from the recipe on the command line, and print the result.

    `dtype` is that of its images: floats are to be normalised, uint8 as they were.
    """
    recipe = Recipe(**json.loads(sys.argv[1]))
    started = time.perf_counter()
    peer = build(recipe)
    build_s = time.perf_counter() - started

    started = time.perf_counter()
    batches = iter(peer.epoch())
    first = next(batches)
    first_batch_s = time.perf_counter() - started
    looks = looks_of(first, recipe, dtype)
    del first
    for _ in batches:
        pass

    rates, cpus, count = [], [], 0
    for _ in range(recipe.epochs - 1):
        count = 0
        cpu_before = cpu_seconds(os.getpid())
        started = time.perf_counter()
        for images, _labels in peer.epoch():
            count += len(images)
        wall_s = time.perf_counter() - started
        cpus.append(1000 * (cpu_seconds(os.getpid()) - cpu_before) / count)
        rates.append(count / wall_s)

    memory: dict[str, float] = {}
    seen = 0
    for images, _labels in peer.epoch():
        seen += len(images)
        if not memory and seen >= count / 2:
            pids = tree(os.getpid())
            memory = {
                "pss_mb": sum(map(proportional_mb, pids)),
                "worker_mb": max((proportional_mb(pid) - shared_mb(pid) for pid in pids[1:]), default=0.0),
                "worker_share_mb": max(map(shared_mb, pids[1:]), default=0.0),
                "processes": len(pids),
            }
    result = {
        "build_s": build_s,
        "first_batch_s": first_batch_s,
        "images_per_s": rates,
        "cpu_s_per_1000": cpus,
        "images_per_epoch": count,
        "looks": looks,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, **peer.versions},
        **memory,
    }
    print(json.dumps(result), flush=True)


def looks_of(batch: Any, recipe: Recipe, dtype: torch.dtype) -> dict[str, float]:
    """Check a batch: AssertionError where it is not what the recipe says. Returns what its values look like.

    `dtype` is that of its images: floats are to be normalised, uint8 as they were.
    """
    images, labels = batch
    whole = isinstance(images, list)  # photographs of many sizes
    if whole:
        assert len(images) == recipe.batch_size, len(images)
        images = torch.cat([image.reshape(-1) for image in images])
    else:
        expected = (recipe.batch_size, 3, recipe.size, recipe.size)
        assert isinstance(images, torch.Tensor), type(images)
        assert tuple(images.shape) == expected, images.shape
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        assert images.is_contiguous(memory_format=layout)
        assert images.device.type == labels.device.type == torch.device(recipe.device).type
    assert images.dtype == dtype, images.dtype
    assert tuple(labels.shape) == (recipe.batch_size,), labels.shape
    assert labels.dtype == torch.int64, labels.dtype
    values = images.float()
    looks = {"mean": values.mean().item(), "std": values.std().item(), "label_mean": labels.float().mean().item()}
    low, high, least, most = (-1.5, 1.5, 0.5, 2) if dtype.is_floating_point else (120, 135, 70, 78)
    if whole:
        low, high, least, most = 90, 140, 40, 90
    elif dtype.is_floating_point and recipe.batch_size < 16:  # crops of a few images may be of one colour
        low, high, least, most = -2.5, 2.5, 0.02, 3
    assert low < looks["mean"] < high, looks
    assert least < looks["std"] < most, looks
    return looks
