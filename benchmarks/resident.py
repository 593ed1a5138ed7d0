"""A dataset of CIFAR-10's size that stays on the training device: `gpuload.DeviceCached` against the stage alone.

    python -m benchmarks.resident [--device cuda] [--samples N] [--json]

The recipe is RandomCrop(32, padding=4), flip, Normalize; batches of 512. "The stage alone" repeats the stage calls
recorded from one epoch of the loader, with the same pixel values and random parameters: it computes no order, no random
parameters, no copies and no labels. The share is the loader's rate divided by that of the stage alone. For comparison,
the same loader also runs without the cache, over the same PNGs. Every round runs all of them for an epoch; the first
round is not counted.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch
from PIL import Image

import gpuload as gl
from benchmarks.running import make_parser
from gpuload import transforms as T
from gpuload.stage.ragged import RaggedImages

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


class RecordingStage:
    """A wrapper around a stage that records the arguments of each call."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.calls: list[tuple[RaggedImages, Any, dict[str, Any]]] = []

    def __call__(self, images: RaggedImages, program: Any, **options: Any) -> Any:
        snapshot = images
        if images.pixels.device.type == "cpu":  # the pixels are in slots, which are reused
            ends = np.cumsum(nbytes := images.shapes.prod(axis=1))
            spans = zip(images.offsets.tolist(), nbytes.tolist(), strict=True)
            snapshot = copy(images)
            snapshot.pixels = torch.cat([images.pixels[start : start + count] for start, count in spans])
            snapshot.table = images.table.copy()
            snapshot.table["offset"] = ends - nbytes
        self.calls.append((snapshot, program, options))
        return self.stage(images, program, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)


def measure(samples: int, batch_size: int, device: str, rounds: int) -> dict[str, Any]:
    """Measure the images per second of each way in each round."""
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": True,
        "drop_last": True,
        "transforms": CHAIN,
        "device": device,
    }
    data = make_pngs(samples)
    with gl.Loader(gl.DeviceCached(data), **options) as loader, gl.Loader(data, **options) as uncached_loader:
        started_s = time.perf_counter()
        iterator = iter(loader)
        filled_s = time.perf_counter() - started_s
        session: Any = loader._session
        session.assembly._stage = recorder = RecordingStage(session.stage)
        for _ in iterator:
            pass
        session.assembly._stage = stage = recorder.stage

        def stage_alone() -> int:
            for images, program, stage_options in recorder.calls:
                stage(images, program, **stage_options)
            return len(recorder.calls)

        def epoch_of(any_loader: gl.Loader) -> Callable[[], int]:
            return lambda: sum(1 for _ in any_loader)

        ways = {"stage": stage_alone, "resident": epoch_of(loader), "uncached": epoch_of(uncached_loader)}
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
        stats = loader.stats()
    resident_rate, stage_rate = (statistics.median(rates[name]) for name in ("resident", "stage"))
    share_cpu = statistics.median(cpu_s["stage"]) / statistics.median(cpu_s["resident"])
    all_rates = {"images_per_s": rates["resident"], "stage": rates["stage"], "uncached": rates["uncached"]}
    return {
        **all_rates,
        "share": resident_rate / stage_rate,
        "share_cpu": share_cpu,
        "filled_s": filled_s,
        "resident_bytes": stats.resident_bytes,
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
    print(f"read and cached in {results['filled_s']:.1f} s, {results['resident_bytes'] / 1e6:.1f} MB")
    for name, words in (("stage", "the stage alone"), ("images_per_s", "DeviceCached"), ("uncached", "without it")):
        rates = results[name]
        print(f"{words:16} {statistics.median(rates):10,.0f} images/s ({min(rates):,.0f} … {max(rates):,.0f})")
    print(f"DeviceCached reaches {results['share']:.0%} of the rate of the stage alone; the stage takes")
    print(f"{results['share_cpu']:.0%} of this process's CPU time, a share that other programs do not affect")


if __name__ == "__main__":
    main()
