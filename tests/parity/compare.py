"""Runs a parity case: draws for real photographs and for random images, both runners, and the oracle.

The images of a batch are cut to the regions that the chain asks for, as a worker would decode them; the oracle gets
them whole. Both runners go through the same draws on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from parity.case import Case
from PIL import Image

from gpuload import transforms as T
from gpuload.backends import RaggedImages, compile_stage
from gpuload.backends.batched import BatchRunner
from gpuload.rng import epoch_key

__all__ = ["Measured", "all_cases", "measure", "photographs", "random_images"]

SHIPPED = ("astronaut.png", "chelsea.png", "coffee.png")  # photographs that scikit-image has in its package


@dataclass(frozen=True)
class Measured:
    """The worst that was found, in levels: the greatest mean of an image, the greatest difference of a number, and the
    greatest between both runners."""

    mean: float
    max: float
    between: float

    def __or__(self, other: Measured) -> Measured:
        return Measured(max(self.mean, other.mean), max(self.max, other.max), max(self.between, other.between))


@cache
def all_cases() -> tuple[Case, ...]:
    """The cases of all modules ``cases_*.py`` beside this one, by topic."""
    found = []
    for module in sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if module.startswith("cases_"):
            found += importlib.import_module(f"parity.{module}").CASES
    return tuple(found)


def photographs(paths: Sequence[Path]) -> list[np.ndarray]:
    """Real photographs, uint8 H×W×3: some of those at `paths`, and scikit-image's where it is installed."""
    paths = list(paths[:: max(1, len(paths) // 5)][:5])
    spec = importlib.util.find_spec("skimage")
    if spec is not None and spec.origin is not None:
        paths += [Path(spec.origin).parent / "data" / name for name in SHIPPED]
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]


def random_images() -> list[np.ndarray]:
    """Noise of several kinds and sizes, uint8 H×W×3: over all levels, over a few, nearly black, of one colour, thin."""
    rng = np.random.default_rng(12)
    return [
        rng.integers(0, 256, (97, 120, 3), np.uint8),
        rng.integers(100, 140, (64, 31, 3), np.uint8),
        np.minimum(rng.exponential(4, (50, 77, 3)), 255).astype(np.uint8),
        np.repeat(rng.integers(0, 256, (90, 60, 1), np.uint8), 3, axis=2),
        np.full((40, 40, 3), (255, 0, 77), np.uint8),
        rng.integers(0, 2, (33, 70, 3), np.uint8) * np.uint8(255),
        np.linspace(0, 255, 80 * 96 * 3).reshape(80, 96, 3).astype(np.uint8),
    ]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine, threads of torch that wait for each other take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def measure(case: Case, images: Sequence[np.ndarray], *, seed: int = 3, key_epoch: int = 0) -> Measured:
    """How far our results lie from the oracle's for these images, each with draws of its own."""
    if case.channels == 1:
        images = [np.asarray(Image.fromarray(image).convert("L"))[:, :, None] for image in images]
    chain = T.Chain(case.transforms)
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    positions, key = np.arange(len(images)), epoch_key(seed, key_epoch)
    regions = chain.regions(key, positions, sizes)
    ragged = RaggedImages.from_arrays(
        [
            image[top : top + h, left : left + w]
            for image, (top, left, h, w) in zip(images, regions.tolist(), strict=True)
        ]
    )
    ragged.sizes_hw, ragged.regions_tlhw = sizes, regions
    draws = chain.draw(key, positions, sizes)
    stage = compile_stage(chain, device="cpu", ragged="error" if case.pairs else "list")
    single = stage(ragged, draws)
    batched = torch.empty_like(single) if case.pairs else [torch.empty_like(image) for image in single]
    BatchRunner(stage._finishes[0], torch.device("cpu"))(ragged, draws, batched)
    drawn = list(zip(draws.transforms, draws.params, strict=True))
    worst = Measured(0.0, 0.0, 0.0)
    for row, image in enumerate(images):
        partner = images[row ^ 1] if row ^ 1 < len(images) else image
        expected = _levels(case, case.oracle((image, partner) if case.pairs else image, drawn, row))
        one, other = (_levels(case, result[row].permute(1, 2, 0).numpy()) for result in (single, batched))
        assert one.shape == other.shape == expected.shape, (one.shape, other.shape, expected.shape)
        for result in (one, other):
            difference = abs(result - expected)
            worst |= Measured(float(difference.mean()), float(difference.max()), float(abs(one - other).max()))
    return worst


def _levels(case: Case, numbers: np.ndarray) -> np.ndarray:
    levels = np.asarray(numbers, np.float64)
    return levels if case.to_levels is None else case.to_levels(levels)
