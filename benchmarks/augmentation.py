"""What augmenting a batch costs, on one core: gpuload's stage beside torchvision v2 called for each sample.

    python -m benchmarks.augmentation --photos DIR

All start from the same decoded photographs in memory and end with one normalised float32 batch. Everything runs in this
process with one thread, one after the other in every round, in an order that changes; figures are CPU milliseconds for
an image, medians over the rounds, and ratios within them. Reading and decoding are no part of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

import gpuload
from benchmarks.peers.torchvision_import import torchvision, v2
from gpuload import transforms as T
from gpuload.backends import RaggedImages, compile_stage
from gpuload.rng import epoch_key

__all__ = ["main"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 64
# CPU milliseconds for an image, at most.
GOALS_MS = {"classic": 0.25, "classic + ColorJitter": 0.5}


def recipes() -> dict[str, tuple[list[Any], list[Any]]]:
    """For each its transforms as gpuload's and as torchvision's; both go on to floats and Normalize."""
    crop = [T.RandomResizedCrop(224), T.RandomHorizontalFlip()]
    their_crop = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]
    found = {
        "classic": (crop, their_crop),
        "classic + ColorJitter": ([*crop, T.ColorJitter(0.4, 0.4, 0.4)], [*their_crop, v2.ColorJitter(0.4, 0.4, 0.4)]),
        "classic + ColorJitter with hue": (
            [*crop, T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
            [*their_crop, v2.ColorJitter(0.4, 0.4, 0.4, 0.1)],
        ),
        "evaluation": ([T.Resize(256), T.CenterCrop(224)], [v2.Resize(256), v2.CenterCrop(224)]),
        "TrivialAugmentWide": (
            [*crop, T.TrivialAugmentWide(interpolation="bilinear")],
            [*their_crop, v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR)],
        ),
        "RandAugment": (
            [*crop, T.RandAugment(interpolation="bilinear")],
            [*their_crop, v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR)],
        ),
        "SimCLR": (
            [
                *crop,
                T.RandomApply([T.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
                T.RandomGrayscale(0.2),
                T.RandomApply([T.GaussianBlur(23, (0.1, 2.0))], p=0.5),
            ],
            [
                *their_crop,
                v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], p=0.5),
            ],
        ),
    }
    return found


def ours(transforms: list[Any], arrays: list[np.ndarray]) -> Callable[[int], torch.Tensor]:
    """A function that makes the batch of a round with gpuload, its draws included."""
    chain = T.Chain([*transforms, T.Normalize(MEAN, STD)])
    stage = compile_stage(chain, device="cpu", cpu_threads=1)
    images, positions = RaggedImages.from_arrays(arrays), np.arange(len(arrays))

    def run(turn: int) -> Any:
        return stage(images, chain.draw(epoch_key(0, turn), positions, images.sizes_hw))

    return run


def theirs(transforms: list[Any], images: list[Any], start: list[Any]) -> Callable[[int], torch.Tensor]:
    """The same with torchvision, one sample after the other; `start` brings an image to the form that is measured."""
    compose = v2.Compose([*start, *transforms, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    normalize = v2.Normalize(MEAN, STD)
    return lambda turn: torch.stack([normalize(compose(image)) for image in images])


def measure(contenders: dict[str, Callable[[int], Any]], images: int, rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds for an image of each contender, round by round; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            before = time.process_time()
            contenders[name](turn)
            spent = time.process_time() - before
            if turn:
                found[name].append(1000 * spent / images)
    return found


def table(results: dict[str, dict[str, list[float]]]) -> Table:
    """A row for each recipe and contender."""
    made = Table(title="CPU ms for an image, one core; ratio: the row's over gpuload's", box=box.SIMPLE)
    made.add_column("recipe", no_wrap=True)
    made.add_column("made by", no_wrap=True)
    made.add_column("CPU ms", justify="right")
    made.add_column("ratio (least … greatest)", justify="right")
    for recipe, contenders in results.items():
        own = contenders["gpuload"]
        for name, times in contenders.items():
            ratios = [theirs / mine for mine, theirs in zip(own, times, strict=True)]
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})" if times != own else ""
            made.add_row(recipe if name == "gpuload" else "", name, f"{statistics.median(times):.3f}", shown)
    return made


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=Path, required=True, help="folder of JPEGs")
    parser.add_argument("--rounds", type=int, default=9, help="how often each is run (default 9)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    paths = sorted(path for path in options.photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"no JPEGs (*.jpg, *.jpeg) in {options.photos}")
    paths = [paths[number % len(paths)] for number in range(BATCH)]
    pictures = [Image.open(path).convert("RGB") for path in paths]
    arrays = [np.asarray(picture) for picture in pictures]
    tensors = [v2.functional.pil_to_tensor(picture) for picture in pictures]
    results = {}
    for name, (mine, their) in recipes().items():
        contenders = {
            "gpuload": ours(mine, arrays),
            "torchvision v2, Pillow images": theirs(their, pictures, []),
            "torchvision v2, tensors": theirs(their, tensors, [v2.ToImage()]),
        }
        results[name] = measure(contenders, BATCH, options.rounds)
    console = Console(width=max(100, Console().width))
    console.print(table(results))
    for name, most in GOALS_MS.items():
        spent = statistics.median(results[name]["gpuload"])
        console.print(f"{'met   ' if spent <= most else 'MISSED'} {name}: at most {most} ms: {spent:.3f} ms")
    if options.json:
        versions = {
            "gpuload": gpuload.__version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"versions": versions, "batch": BATCH, "cpu_ms": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
