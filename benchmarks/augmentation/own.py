"""The command that compares the cost of a user-defined transform and a built-in one, in the same chain, on the CPU.

    python -m benchmarks.augmentation.own [--rounds N] [--batch-size N]

The transforms are the ones of docs/transforms.md, and a flip. Each chain begins with RandomResizedCrop(224) and ends
with floats. All chains run in this process, one after another in every round, in an order that changes. The figures are
CPU milliseconds per image on one thread, the minimum over all rounds, which a busy machine disturbs least. gpuload has
no built-in grid mask, so its baseline is the chain without it, plus the same tensor operations called in a plain loop
over as many images. A built-in flip of levels costs nothing: the resampling writes its result in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.augmentation.contenders import Contender
from benchmarks.augmentation.measuring import cpu_clock, measure
from benchmarks.peers.protocol import MEAN, STD
from benchmarks.running import format_table, make_parser
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.program.ops import map_params

SIZE = (375, 500, 3)
CROP, NORMALIZE = T.RandomResizedCrop(224), T.Normalize(MEAN, STD)


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


# By name: the chain with the built-in transform, or the dtype of the images if the operations are called alone; and the
# chain with the user-defined transform.
JITTER = [CROP, T.ColorJitter(brightness=0.4), NORMALIZE]
CASES: dict[str, tuple[Any, list[Any]]] = {
    "colour cast on levels, ColorJitter(brightness)": (JITTER, [CROP, ColourCast(), NORMALIZE]),
    "colour cast on finished images, ColorJitter": (JITTER, [CROP, NORMALIZE, ColourCast()]),
    "grid mask on levels, its operations alone": (torch.uint8, [CROP, GridMask(), NORMALIZE]),
    "grid mask on finished images, its operations alone": (torch.float32, [CROP, NORMALIZE, GridMask()]),
    "flip on levels": ([CROP, T.RandomHorizontalFlip(), NORMALIZE], [CROP, Flip(), NORMALIZE]),
    "flip of finished images": ([CROP, NORMALIZE, T.RandomHorizontalFlip()], [CROP, NORMALIZE, Flip()]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = make_parser("augmentation.own", __doc__, rounds=15, batch_size=64)
    options = parser.parse_args(arguments)
    count = options.batch_size
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = []
    try:
        rng = np.random.default_rng(0)
        arrays = [rng.integers(0, 256, SIZE, np.uint8) for _ in range(count)]
        for name, (built_in, own_chain) in CASES.items():
            is_alone = isinstance(built_in, torch.dtype)
            baseline = _alone(GridMask(), built_in, count) if is_alone else _run(built_in, arrays)
            runs = [_run([CROP, NORMALIZE], arrays), baseline, _run(own_chain, arrays)]
            contenders = {str(number): Contender(run) for number, run in enumerate(runs)}
            rows = measure(contenders, cpu_clock, options.rounds).values()
            neither_ms, built_in_ms, own_ms = (min(reading.ms for reading in row.readings) / count for row in rows)
            built_in_ms += neither_ms if is_alone else 0
            figures = (neither_ms, built_in_ms, own_ms)
            lines.append([name, *(f"{ms:.3f}" for ms in figures), f"{own_ms / built_in_ms:.2f}"])
    finally:
        torch.set_num_threads(threads)
    print(
        format_table(
            ["own, built in; CPU ms per image", "neither", "built in", "own", "own / built in, full chains"], lines
        )
    )
    return 0


def _alone(transform: T.Custom, dtype: torch.dtype, count: int) -> Callable[[int], Any]:
    """Make a function that draws, and applies the transform to one image after another."""
    images, sizes_hw = torch.zeros(count, 3, 224, 224).to(dtype), np.full((count, 2), 224)
    positions = np.arange(count)

    def run(turn: int) -> None:
        params = transform.draw(T.Uniforms(epoch_key(0, turn), positions, 0), sizes_hw)
        tensors = map_params(params, lambda array: torch.from_numpy(array.astype(np.float32)))
        for row in range(count):
            transform.apply(images[row : row + 1], map_params(tensors, lambda tensor, row=row: tensor[row : row + 1]))

    return run


def _run(transforms: list[Any], arrays: list[np.ndarray]) -> Callable[[int], Any]:
    chain, images, positions = T.Chain(transforms), RaggedImages.from_arrays(arrays), np.arange(len(arrays))
    stage = compile_stage(chain, device="cpu", backend="torch")
    return lambda turn: stage(images, chain.draw(epoch_key(0, turn), positions, images.sizes_hw))


if __name__ == "__main__":
    raise SystemExit(main())
