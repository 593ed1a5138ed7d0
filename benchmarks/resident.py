"""A data set of CIFAR-10's size that stays where it is trained on: `gpuload.DeviceCached` beside the stage alone.

    python -m benchmarks.resident [--device cuda] [--samples N] [--json]

RandomCrop(32, padding=4), flip, Normalize; batches of 512. The stage alone gets the same levels and the same draws,
again and again, from one epoch of the loader: no order, no draws, no copies, no labels. What the loader reaches of that
is the share. Beside it: the same loader without the cache, over the same PNGs. The rounds of all take turns.
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


def pngs(samples: int) -> list[tuple[gl.Encoded, int]]:
    """Small images with labels, as files."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(samples):
        coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(file, "PNG")
        made.append((gl.Encoded(file.getvalue()), number % 10))
    return made


class Listening:
    """Takes the place of a stage, and notes what it is given."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.calls: list[tuple[RaggedImages, Any, dict[str, Any]]] = []

    def __call__(self, images: RaggedImages, program: Any, **options: Any) -> Any:
        kept = images
        if images.pixels.device.type == "cpu":  # the levels lie in slots, which are written to again
            ends = np.cumsum(nbytes := images.shapes.prod(axis=1))
            spans = zip(images.offsets.tolist(), nbytes.tolist(), strict=True)
            kept = copy(images)
            kept.pixels = torch.cat([images.pixels[start : start + count] for start, count in spans])
            kept.table = images.table.copy()
            kept.table["offset"] = ends - nbytes
        self.calls.append((kept, program, options))
        return self.stage(images, program, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)


def measure(samples: int, batch_size: int, device: str, rounds: int) -> dict[str, Any]:
    """Images a second of each way, in each round."""
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": True,
        "drop_last": True,
        "transforms": CHAIN,
        "device": device,
    }
    data = pngs(samples)
    with gl.Loader(gl.DeviceCached(data), **options) as loader, gl.Loader(data, **options) as without:
        began = time.perf_counter()
        iterator = iter(loader)
        filled_s = time.perf_counter() - began
        session: Any = loader._session
        session.assembly._stage = listening = Listening(session.stage)
        for _ in iterator:
            pass
        session.assembly._stage = stage = listening.stage

        def stage_alone() -> int:
            for images, program, given in listening.calls:
                stage(images, program, **given)
            return len(listening.calls)

        def epoch_of(one: gl.Loader) -> Callable[[], int]:
            return lambda: sum(1 for _ in one)

        ways = {"stage": stage_alone, "resident": epoch_of(loader), "uncached": epoch_of(without)}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        cpu_s: dict[str, list[float]] = {name: [] for name in ways}  # of this process
        for number in range(rounds + 1):
            for name, way in ways.items():
                began, cpu_began = time.perf_counter(), time.process_time()
                batches = way()
                if device != "cpu":
                    torch.accelerator.synchronize()
                if number:  # the first one warms up
                    cpu_s[name].append(time.process_time() - cpu_began)
                    rates[name].append(batches * batch_size / (time.perf_counter() - began))
        stats = loader.stats()
    ours, alone = (statistics.median(rates[name]) for name in ("resident", "stage"))
    share_cpu = statistics.median(cpu_s["stage"]) / statistics.median(cpu_s["resident"])
    found = {"images_per_s": rates["resident"], "stage": rates["stage"], "uncached": rates["uncached"]}
    return {
        **found,
        "share": ours / alone,
        "share_cpu": share_cpu,
        "filled_s": filled_s,
        "resident_bytes": stats.resident_bytes,
    }


def main() -> None:
    parser = make_parser("resident", __doc__, rounds=5, batch_size=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--json", action="store_true", help="print a line of JSON and nothing else")
    given = parser.parse_args()
    found = measure(given.samples, given.batch_size, given.device, given.rounds)
    if given.json:
        print(json.dumps(found))
        return
    print(f"torch {torch.__version__}, {given.device}, {given.samples:,} PNGs of 32×32, batches of {given.batch_size}")
    print(f"read and kept in {found['filled_s']:.1f} s, {found['resident_bytes'] / 1e6:.1f} MB")
    for name, words in (("stage", "the stage alone"), ("images_per_s", "DeviceCached"), ("uncached", "without it")):
        rates = found[name]
        print(f"{words:16} {statistics.median(rates):10,.0f} images/s ({min(rates):,.0f} … {max(rates):,.0f})")
    print(f"DeviceCached reaches {found['share']:.0%} of the stage alone; of this process's CPU time, the stage has")
    print(f"{found['share_cpu']:.0%}, which other programs do not change")


if __name__ == "__main__":
    main()
