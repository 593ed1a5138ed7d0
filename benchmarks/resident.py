"""A dataset that stays decoded in memory: the recipe of docs/howto/dataset_in_memory.md against the stage alone.

    python -m benchmarks.resident [--many] [--device cuda] [--samples N] [--json]

The images have CIFAR-10's size, with RandomCrop(32, padding=4), flip and Normalize, in batches of 512; or, with
``--many``, sides of 200 to 300 pixels, with RandomResizedCrop(128), flip and Normalize, in batches of 64. "The stage
alone" repeats the stage calls recorded from one epoch, with the same pixel values and random parameters: it computes no
order, no random parameters, no copies and no labels. The share is the recipe's rate divided by that of the stage alone.
For comparison, a loader decodes the same PNGs in every epoch. Every round runs all of them for an epoch; the first
round is not counted.
"""

from __future__ import annotations

import gc
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image

import gpuload as gl
from benchmarks.running import make_parser
from gpuload import transforms as T

FLIP_AND_NORMALIZE = [T.RandomHorizontalFlip(), T.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))]
CHAIN = [T.RandomCrop(32, padding=4), *FLIP_AND_NORMALIZE]
CHAIN_OF_MANY = [T.RandomResizedCrop(128), *FLIP_AND_NORMALIZE]


def make_pngs(samples: int, *, many: bool) -> list[tuple[gl.Encoded, int]]:
    """Make encoded images with labels, of one size or of many."""
    rng = np.random.default_rng(0)
    files = []
    for i in range(samples):
        small_image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        width, height = rng.integers(200, 301, 2).tolist() if many else (32, 32)
        file = io.BytesIO()
        Image.fromarray(small_image).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
        files.append((gl.Encoded(file.getvalue()), i % 10))
    return files


class InMemory:
    """The images and labels of a dataset on a device, and batches of them: the recipe."""

    def __init__(self, data: Any, chain: list[Any], device: str, *, many: bool, batch_size: int) -> None:
        self.images: Any = (
            [None] * len(data) if many else torch.empty(len(data), 32, 32, 3, dtype=torch.uint8, device=device)
        )
        self.labels = torch.empty(len(data), dtype=torch.int64, device=device)
        self.device, self.many = device, many
        with gl.Loader(data, batch_size=256, ragged="list" if many else "error", device=device, info=True) as reader:
            for (images, labels), info in reader:
                self.labels[info.indices] = labels
                if many:
                    for index, image in zip(info.indices.tolist(), images, strict=True):
                        self.images[index] = image.clone()
                else:
                    self.images[info.indices] = images.permute(0, 2, 3, 1)
        indices = np.arange(len(data))
        self.order = gl.Loader(
            indices, batch_size, shuffle=True, drop_last=True, num_workers=0, device="cpu", info=True
        )
        self.augment = gl.Augment(chain)

    @property
    def nbytes(self) -> int:
        """The size of the pixels."""
        return sum(image.nbytes for image in self.images) if self.many else self.images.nbytes

    def __iter__(self) -> Iterator[Any]:
        for indices, info in self.order:
            if self.many:
                images = [self.images[index] for index in indices.tolist()]
            else:
                images = self.images.index_select(0, indices.to(self.device)).permute(0, 3, 1, 2)
            images = self.augment(images, positions=info.positions, epoch=info.epoch)
            yield images, self.labels[indices.to(self.device)]


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
    """Return a function that repeats the stage calls of one epoch, and returns their number."""
    stages: Any = dataset.augment._stages
    next(iter(dataset))  # compiles the stage
    [(device, (stage, targets))] = stages.items()
    recorder = RecordingStage(stage)
    stages[device] = recorder, targets
    for _ in dataset:
        pass
    stages[device] = stage, targets

    def repeat() -> int:
        for images, program, options in recorder.calls:
            stage(images, program, **options)
        return len(recorder.calls)

    return repeat


def measure(samples: int, batch_size: int, device: str, rounds: int, *, many: bool = False) -> dict[str, Any]:
    """Measure the images per second of each way in each round."""
    data, chain = make_pngs(samples, many=many), CHAIN_OF_MANY if many else CHAIN
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "transforms": chain, "device": device}
    started_s = time.perf_counter()
    dataset = InMemory(data, chain, device, many=many, batch_size=batch_size)
    filled_s = time.perf_counter() - started_s
    with (
        dataset.order,
        gl.Loader(gl.DeviceCached(data), batch_size, **options) as cached,
        gl.Loader(data, batch_size, **options) as uncached,
    ):

        def epoch_of(batches: Any) -> Callable[[], int]:
            return lambda: sum(1 for _ in batches)

        ways = {
            "stage": record_stage_calls(dataset),
            "cached": epoch_of(cached),
            "images_per_s": epoch_of(dataset),
            "uncached": epoch_of(uncached),
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
                    cpu_s[name].append((time.process_time() - cpu_started_s) / batches)
                    rates[name].append(batches * batch_size / (time.perf_counter() - started_s))
            if not round_index:
                gc.freeze()  # the PNGs are millions of objects, which a collection would visit in one way or another

    def ratio_to(name: str) -> dict[str, float]:
        pairs = zip(rates["images_per_s"], rates[name], strict=True)
        cpu_pairs = zip(cpu_s[name], cpu_s["images_per_s"], strict=True)
        return {
            suffix: statistics.median(a / b for a, b in both) for suffix, both in (("", pairs), ("_cpu", cpu_pairs))
        }

    ratios = {
        f"{key}{suffix}": ratio
        for key, name in (("share", "stage"), ("of_cached", "cached"))
        for suffix, ratio in ratio_to(name).items()
    }
    return {**rates, **ratios, "filled_s": filled_s, "resident_bytes": dataset.nbytes}


def main() -> None:
    parser = make_parser("resident", __doc__, rounds=5, batch_size=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--many", action="store_true", help="images of many sizes")
    parser.add_argument("--json", action="store_true", help="print only one line of JSON")
    options = parser.parse_args()
    results = measure(options.samples, options.batch_size, options.device, options.rounds, many=options.many)
    if options.json:
        print(json.dumps(results))
        return
    print(f"torch {torch.__version__}, {options.device}")
    sizes = "many sizes" if options.many else "32×32"
    print(f"{options.samples:,} PNGs of {sizes}, batches of {options.batch_size}")
    print(f"read in {results['filled_s']:.1f} s, {results['resident_bytes'] / 1e6:.1f} MB")
    texts = {"stage": "the stage alone", "images_per_s": "in memory", "cached": "DeviceCached", "uncached": "from PNGs"}
    for name, text in texts.items():
        rates = results[name]
        print(f"{text:16} {statistics.median(rates):10,.0f} images/s ({min(rates):,.0f} … {max(rates):,.0f})")
    print(
        f"in memory: {results['share']:.0%} of the rate of the stage alone; the stage takes {results['share_cpu']:.0%}"
    )
    print("of this process's CPU time, a share that other programs do not affect")
    print(
        f"relative to DeviceCached: {results['of_cached']:.0%} of its rate, {results['of_cached_cpu']:.0%} by CPU time"
    )


if __name__ == "__main__":
    main()
