"""The command: what a transform of the user's own costs beside one that is built in, within the same chain, on the CPU.

    python -m benchmarks.augmentation.own [--rounds N] [--batch-size N]

The transforms are those of docs/transforms.md, and a flip. Each chain begins with RandomResizedCrop(224) and ends with
floats. All run in this process, one after the other in every round, in an order that changes: CPU milliseconds for an
image on one thread, the least of all rounds, which a busy machine disturbs least. No grid mask is built in: it is
compared with the chain without it, and beside that the same tensor operations on as many images, called by nobody else
than a loop. A flip that is built in costs nothing on levels: the resampling writes its result in the other direction.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.program.ops import in_params

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


# A name; the chain with what is built in, or the transform whose operations are called alone; the chain with the own.
JITTER = [CROP, T.ColorJitter(brightness=0.4), NORMALIZE]
CASES = (
    ("colour cast on levels, ColorJitter(brightness)", JITTER, [CROP, ColourCast(), NORMALIZE]),
    ("colour cast on finished images, ColorJitter", JITTER, [CROP, NORMALIZE, ColourCast()]),
    ("grid mask on levels, its operations alone", torch.uint8, [CROP, GridMask(), NORMALIZE]),
    ("grid mask on finished images, its operations alone", torch.float32, [CROP, NORMALIZE, GridMask()]),
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
            alone = isinstance(built_in, torch.dtype)
            second = _alone(GridMask(), built_in, len(arrays)) if alone else _run(T.Chain(built_in), arrays)
            runs = [_run(T.Chain([CROP, NORMALIZE]), arrays), second, _run(T.Chain(own), arrays)]
            neither, one, two = (1000 * least / len(arrays) for least in _least(runs, options.rounds))
            one += neither if alone else 0
            print(f"{name:50}  {neither:.3f}    {one:.3f}     {two:.3f}  {'':19}{two / one:.2f}", flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def _least(runs: Sequence[Callable[[int], Any]], rounds: int) -> list[float]:
    """The least CPU seconds of each."""
    least = [float("inf")] * len(runs)
    for turn in range(rounds):
        for at in range(len(runs)):
            number = (at + turn) % len(runs)
            before = time.process_time()
            runs[number](turn)
            least[number] = min(least[number], time.process_time() - before)
    return least


def _alone(own: T.Custom, dtype: torch.dtype, count: int) -> Callable[[int], Any]:
    """Its draws, and its operations on one image after the other."""
    images, sizes_hw = torch.zeros(count, 3, 224, 224).to(dtype), np.full((count, 2), 224)
    positions = np.arange(count)

    def run(turn: int) -> None:
        params = own.draw(T.Uniforms(epoch_key(0, turn), positions, 0), sizes_hw)
        tensors = in_params(params, lambda array: torch.from_numpy(array.astype(np.float32)))
        for row in range(count):
            own.apply(images[row : row + 1], in_params(tensors, lambda tensor, row=row: tensor[row : row + 1]))

    return run


def _run(chain: T.Chain, arrays: list[np.ndarray]) -> Callable[[int], Any]:
    stage, images = compile_stage(chain, device="cpu", backend="torch"), RaggedImages.from_arrays(arrays)
    positions = np.arange(len(arrays))
    return lambda turn: stage(images, chain.draw(epoch_key(0, turn), positions, images.sizes_hw))


if __name__ == "__main__":
    raise SystemExit(main())
