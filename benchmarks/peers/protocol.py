"""The measurement of a peer, the same for all peers: ``python -m benchmarks.peers.protocol NAME RECIPE``.

A peer is a function in one of `MODULES`, named like the peer, which builds a `Peer` from the `Recipe`. Its process
prints one line of JSON, the last on its standard output:

- The first epoch warms everything up; its time from `iter()` to the first batch is `first_batch_s`.
- The next epochs are measured, one rate each, from `iter()` to the last batch, with the CPU time of the process tree.
- Memory is read in the middle of one more epoch, when all buffers are in use.

This module imports nothing heavy, since drivers, which do not load torch, import it too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks.memory import proportional_mb, shared_mb
from gpuload.cli.processes import cpu_seconds, tree

if TYPE_CHECKING:
    import torch

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
MODULES: Final = {  # the modules of `benchmarks.peers`, and the peers in each
    "gpuload": (
        "gpuload", "gpuload_cuttable", "arrays_gpuload", "arrays_torch", "whole_gpuload", "array_file", "workers_only",
    ),
    "torch_loader": ("torch_pillow", "torch_simplejpeg", "torch_device", "timm_prefetch"),
    "dali": ("dali", "arrays_dali", "whole_dali"),
    "turboloader": ("turboloader",),
    "decoder_alone": ("decoder_alone",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The work of each peer: RandomResizedCrop(`size`), flip, ColorJitter, normalise; batches N×C×H×W.

    Batches are full: all peers drop the last, smaller batch.

    Attributes:
        samples: the number of samples of the array benchmark, which reads no files.
        jitter: the strength of brightness, contrast and saturation; 0 means no ColorJitter.
        device, dtype, channels_last: the device and format of the final batches.
        cuttable: the folder of cuttable copies of the photographs; "" if there are none.
        variant: the peer's variant; for gpuload its backend.
        prefetch: gpuload's `prefetch_factor`; None means that it is not given.
    """

    root: str
    cuttable: str = ""
    batch_size: int = 64
    workers: int = 2
    epochs: int = 3
    size: int = 224
    samples: int = 0
    jitter: float = 0.0
    device: str = "cpu"
    dtype: str = "float32"
    channels_last: bool = False
    variant: str = "auto"
    prefetch: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Peer:
    """A loader ready to run: `epoch()` starts an epoch and yields (images, labels).

    Attributes:
        levels: whether images are uint8, not normalised floats of the recipe's dtype.
        falls_back: the transforms that gpuload's torch backend runs instead of the requested backend.
        stats: returns the statistics of gpuload's loader as text.
    """

    epoch: Callable[[], Iterable[Any]]
    versions: dict[str, str]
    levels: bool = False
    falls_back: tuple[str, ...] = ()
    stats: Callable[[], str] = str


def find_peer(name: str) -> Callable[[Recipe], Any]:
    """Return the function that builds the peer of this name, or, if the peer makes no batches, measures it."""
    module = next(module for module, peers in MODULES.items() if name in peers)
    return getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)


def rates_of(epoch: Callable[[], int], epochs: int) -> dict[str, list[float]]:
    """Run `epoch`, which returns its number of images, `epochs` times. Returns the rates and the CPU times."""
    rates, cpus = [], []
    for _ in range(epochs):
        cpu_before, started = cpu_seconds(os.getpid()), time.perf_counter()
        count = epoch()
        rates.append(count / (time.perf_counter() - started))
        cpus.append(1000 * (cpu_seconds(os.getpid()) - cpu_before) / count)
    return {"images_per_s": rates, "cpu_s_per_1000": cpus}


def measure(name: str, recipe: Recipe) -> dict[str, Any]:
    """Measure a peer in this process."""
    import torch

    build, started = find_peer(name), time.perf_counter()
    peer = build(recipe)
    if isinstance(peer, dict):  # the peer makes no batches and has measured itself
        return peer
    build_s = time.perf_counter() - started
    started = time.perf_counter()
    batches = iter(peer.epoch())
    first = next(batches)
    first_batch_s = time.perf_counter() - started
    looks = looks_of(first, recipe, torch.uint8 if peer.levels else getattr(torch, recipe.dtype))
    del first
    count = recipe.batch_size + sum(len(images) for images, _ in batches)
    rates = rates_of(lambda: sum(len(images) for images, _ in peer.epoch()), recipe.epochs - 1)
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
    return {
        "build_s": build_s,
        "first_batch_s": first_batch_s,
        **rates,
        "images_per_epoch": count,
        "looks": looks,
        "stats": peer.stats(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, **peer.versions},
        **memory,
    }


def looks_of(batch: Any, recipe: Recipe, dtype: torch.dtype) -> dict[str, float]:
    """Check that a batch is as the recipe requires; AssertionError if not. Returns statistics of its values.

    `dtype` is the expected type of the images: floats must be normalised, uint8 must not.
    """
    import torch

    images, labels = batch
    is_ragged = isinstance(images, list)  # photographs of many sizes
    if is_ragged:
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
    low, high, min_std, max_std = (-1.5, 1.5, 0.5, 2) if dtype.is_floating_point else (120, 135, 70, 78)
    if is_ragged:
        low, high, min_std, max_std = 90, 140, 40, 90
    elif dtype.is_floating_point and recipe.batch_size < 16:  # crops of a few images may be of one colour
        low, high, min_std, max_std = -2.5, 2.5, 0.02, 3
    assert low < looks["mean"] < high, looks
    assert min_std < looks["std"] < max_std, looks
    return looks


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Recipe(**json.loads(sys.argv[2])))), flush=True)
