"""A dataset of CIFAR-10's size that stays decoded on the training device: the recipe of
docs/howto/dataset_in_memory.md against the stage alone.

    python -m benchmarks.resident [--device cuda] [--samples N] [--json]

The transforms are RandomCrop(32, padding=4), flip and Normalize, on batches of 512. "The stage alone" repeats the stage
calls recorded from one epoch, with the same pixel values and random parameters: it computes no order, no random
parameters, no copies and no labels. The share is the recipe's rate divided by that of the stage alone. For comparison,
a loader decodes the same PNGs in every epoch. Every round runs all of them for an epoch; the first round is not
counted.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image

import gpuload as gl
from benchmarks.running import make_parser
from gpuload import transforms as T

SIZE = 32
CHAIN = [
    T.RandomCrop(SIZE, padding=4),
    T.RandomHorizontalFlip(),
    T.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
]


def make_pngs(samples: int) -> list[tuple[gl.Encoded, int]]:
    """Make small encoded images with labels."""
    rng = np.random.default_rng(0)
    files = []
    for i in range(samples):
        small_image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small_image).resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(file, "PNG")
        files.append((gl.Encoded(file.getvalue()), i % 10))
    return files


class InMemory:
    """The images and labels of a dataset on a device. Iterating yields the batches of an epoch."""

    def __init__(self, data: list[tuple[gl.Encoded, int]], batch_size: int, device: str) -> None:
        count, self.device = len(data), device
        self.images = torch.empty(count, SIZE, SIZE, 3, dtype=torch.uint8, device=device)
        self.labels = torch.empty(count, dtype=torch.int64, device=device)
        with gl.Loader(data, batch_size=256, device=device, info=True) as reader:
            for (images, labels), info in reader:
                self.images[info.indices] = images.permute(0, 2, 3, 1)
                self.labels[info.indices] = labels
        options: dict[str, Any] = {"shuffle": True, "drop_last": True, "num_workers": 0, "device": "cpu", "info": True}
        self.order = gl.Loader(np.arange(count), batch_size, **options)
        self.augment = gl.Augment(CHAIN)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for indices, info in self.order:
            indices = indices.to(self.device)
            images = self.images.index_select(0, indices).permute(0, 3, 1, 2)
            yield self.augment(images, positions=info.positions, epoch=info.epoch), self.labels[indices]


class RecordingStage:
    """A wrapper around a stage that records the arguments of each call."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def __call__(self, images: Any, program: Any, **options: Any) -> Any:
        self.calls.append((images, program, options))
        return self.stage(images, program, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)


def record_stage_calls(dataset: InMemory) -> Callable[[], int]:
    """Return a function that repeats the stage calls of an epoch, and returns their number."""
    next(iter(dataset))  # compiles the stage
    [compiled] = dataset.augment._compiled.values()
    stage: Any = compiled.stage
    compiled.stage = recorder = RecordingStage(stage)  # pyright: ignore[reportAttributeAccessIssue]
    for _ in dataset:
        pass
    compiled.stage = stage

    def repeat() -> int:
        for images, program, options in recorder.calls:
            stage(images, program, **options)
        return len(recorder.calls)

    return repeat


def measure(samples: int, batch_size: int, device: str, rounds: int) -> dict[str, Any]:
    """Measure the images per second of each way in each round."""
    data = make_pngs(samples)
    started_s = time.perf_counter()
    dataset = InMemory(data, batch_size, device)
    filled_s = time.perf_counter() - started_s
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "transforms": CHAIN, "device": device}
    with dataset.order, gl.Loader(data, batch_size, **options) as uncached_loader:

        def epoch_of(batches: Iterable[Any]) -> Callable[[], int]:
            return lambda: sum(1 for _ in batches)

        ways = {
            "stage": record_stage_calls(dataset),
            "resident": epoch_of(dataset),
            "uncached": epoch_of(uncached_loader),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        cpu_s: dict[str, list[float]] = {name: [] for name in ways}  # of this process
        for round_index in range(rounds + 1):
            for name, way in ways.items():
                started_s, cpu_started_s = time.perf_counter(), time.process_time()
                batches = way()
                if device != "cpu":
                    torch.accelerator.synchronize()
                if round_index:  # the first round warms up
                    cpu_s[name].append(time.process_time() - cpu_started_s)
                    rates[name].append(batches * batch_size / (time.perf_counter() - started_s))
    resident_rate, stage_rate = (statistics.median(rates[name]) for name in ("resident", "stage"))
    share_cpu = statistics.median(cpu_s["stage"]) / statistics.median(cpu_s["resident"])
    all_rates = {"images_per_s": rates["resident"], "stage": rates["stage"], "uncached": rates["uncached"]}
    return {
        **all_rates,
        "share": resident_rate / stage_rate,
        "share_cpu": share_cpu,
        "filled_s": filled_s,
        "resident_bytes": dataset.images.nbytes,
    }


def main() -> None:
    parser = make_parser("resident", __doc__, rounds=5, batch_size=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--json", action="store_true", help="print only one line of JSON")
    options = parser.parse_args()
    results = measure(options.samples, options.batch_size, options.device, options.rounds)
    if options.json:
        print(json.dumps(results))
        return
    print(f"torch {torch.__version__}, {options.device}")
    print(f"{options.samples:,} PNGs of 32×32, batches of {options.batch_size}")
    print(f"read in {results['filled_s']:.1f} s, {results['resident_bytes'] / 1e6:.1f} MB")
    for name, words in (("stage", "the stage alone"), ("images_per_s", "in memory"), ("uncached", "from PNGs")):
        rates = results[name]
        print(f"{words:16} {statistics.median(rates):10,.0f} images/s ({min(rates):,.0f} … {max(rates):,.0f})")
    print(f"The dataset in memory reaches {results['share']:.0%} of the rate of the stage alone; the stage takes")
    print(f"{results['share_cpu']:.0%} of this process's CPU time, a share that other programs do not affect")


if __name__ == "__main__":
    main()
