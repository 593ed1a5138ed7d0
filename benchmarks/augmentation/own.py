"""The command: what a transform of the user's own costs beside one that is built in, within the same chain, on the CPU.

    python -m benchmarks.augmentation.own [--rounds N] [--batch-size N]

The transforms are those of docs/transforms.md, and a flip. Each chain begins with RandomResizedCrop(224) and ends with
floats. All run in this process, one after the other in every round, in an order that changes: CPU milliseconds for an
image on one thread, medians over the rounds, and ratios within them. There is no grid mask to compare with: it changes
all of an image, RandomErasing a box.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage

__all__ = ["main"]

SIZE = (375, 500, 3)
CROP, NORMALIZE = T.RandomResizedCrop(224), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class ColourCast(T.Custom):
    sigma: float = 0.1
    float_levels = True

    def draw(self, uniforms: T.Uniforms, sizes_hw: np.ndarray) -> np.ndarray:
        u = uniforms(6)
        return np.exp(self.sigma * np.sqrt(-2 * np.log(u[:, :3])) * np.cos(2 * np.pi * u[:, 3:]))

    def apply(self, images: torch.Tensor, gains: Any) -> torch.Tensor:
        return images.mul_(gains[:, :, None, None])


@dataclass(frozen=True)
class GridMask(T.Custom):
    low: int = 32
    high: int = 96
    ratio: float = 0.5

    def draw(self, uniforms: T.Uniforms, sizes_hw: np.ndarray) -> Any:
        u = uniforms(3)
        step = np.floor(self.low + u[:, :1] * (self.high - self.low + 1))
        return {"step": step, "start": np.floor(u[:, 1:] * step)}

    def apply(self, images: torch.Tensor, drawn: Any) -> torch.Tensor:
        height, width = (torch.arange(size, device=images.device) for size in images.shape[2:])
        step, start = drawn["step"], drawn["start"]
        down = (height + start[:, :1]) % step < self.ratio * step
        across = (width + start[:, 1:]) % step < self.ratio * step
        return images.mul_(1 - down[:, None, :, None].to(images.dtype) * across[:, None, None, :].to(images.dtype))


@dataclass(frozen=True)
class Flip(T.Custom):
    def draw(self, uniforms: T.Uniforms, sizes_hw: np.ndarray) -> np.ndarray:
        return uniforms(1)[:, 0] < 0.5

    def apply(self, images: torch.Tensor, flipped: Any) -> torch.Tensor:
        rows = flipped.nonzero()[:, 0]
        images[rows] = images[rows].flip(-1)
        return images


# A name; the chain with what is built in; and with the user's own.
JITTER = [CROP, T.ColorJitter(brightness=0.4), NORMALIZE]
CASES = (
    ("colour cast on levels, ColorJitter(brightness)", JITTER, [CROP, ColourCast(), NORMALIZE]),
    ("colour cast on finished images, ColorJitter", JITTER, [CROP, NORMALIZE, ColourCast()]),
    ("grid mask on levels, RandomErasing", [CROP, NORMALIZE, T.RandomErasing(1.0)], [CROP, GridMask(), NORMALIZE]),
    ("grid mask on finished images, RandomErasing", [CROP, NORMALIZE, T.RandomErasing(1.0)],
     [CROP, NORMALIZE, GridMask()]),
    ("flip on levels", [CROP, T.RandomHorizontalFlip(), NORMALIZE], [CROP, Flip(), NORMALIZE]),
    ("flip of finished images", [CROP, NORMALIZE, T.RandomHorizontalFlip()], [CROP, NORMALIZE, Flip()]),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.augmentation.own")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rng = np.random.default_rng(0)
        arrays = [rng.integers(0, 256, SIZE, np.uint8) for _ in range(options.batch_size)]
        print(f"{'own, built in':50}  neither  built in  own    ms an image, CPU   own / built in, whole chains")
        for name, built_in, own in CASES:
            neither, one, two = _measured([[CROP, NORMALIZE], built_in, own], arrays, options.rounds)
            ratio = statistics.median(second / first for first, second in zip(one, two, strict=True))
            shown = [1000 * statistics.median(times) / len(arrays) for times in (neither, one, two)]
            print(f"{name:50}  {shown[0]:.3f}    {shown[1]:.3f}     {shown[2]:.3f}  {'':19}{ratio:.2f}", flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def _measured(chains: Sequence[list[Any]], arrays: list[np.ndarray], rounds: int) -> list[list[float]]:
    """CPU seconds of each round of each chain; the first two are not counted."""
    runs = [_run(T.Chain(chain), arrays) for chain in chains]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 2):
        for at in range(len(runs)):
            number = (at + turn) % len(runs)
            before = time.process_time()
            runs[number](turn)
            times[number].append(time.process_time() - before)
    return [some[2:] for some in times]


def _run(chain: T.Chain, arrays: list[np.ndarray]) -> Callable[[int], Any]:
    stage, images = compile_stage(chain, device="cpu", backend="torch"), RaggedImages.from_arrays(arrays)
    positions = np.arange(len(arrays))
    return lambda turn: stage(images, chain.draw(epoch_key(0, turn), positions, images.sizes_hw))


if __name__ == "__main__":
    raise SystemExit(main())
