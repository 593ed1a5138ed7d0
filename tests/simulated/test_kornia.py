"""Kornia on the simulated device gives the numbers of the CPU, under two policies that find errors, without a wait."""

from __future__ import annotations

from typing import Any

import pytest
from parity.usable import needs
from simulated.running import assert_equal, on_cpu, on_device
from simulated.samples import options, samples

from gpuload import transforms as T

POLICIES = ("lazy", "side first")
NORMALIZE = T.Normalize((0.5,) * 3, (0.5,) * 3)
# Kornia's operators, with transforms of the reference between them; not CLAHE, for which Kornia copies two tables of
# indices from pageable memory.
CHAINS: dict[str, list[Any]] = {
    "flipped crops": [T.RandomCrop(12), T.RandomHorizontalFlip(), NORMALIZE],
    "mixing": [T.RandomCrop(12), NORMALIZE, T.MixUp(num_classes=30)],
    "colour": [T.RandomCrop(12), T.ColorJitter(0.4), T.RandomGrayscale(0.5)],
    "two backends": [T.RandomCrop(12), T.RandomInvert(0.5), T.ColorJitter(0.4, 0.4), T.RandomVerticalFlip()],
    "blur": [T.RandomCrop(12), T.GaussianBlur(5)],
    "levels": [T.RandomCrop(12), T.RandomInvert(0.5), T.RandomSolarize(100), T.RandomPosterize(3)],
    "histograms": [T.RandomCrop(12), T.RandomEqualize(0.5), T.RandomAutocontrast(0.5)],
    "sharpness": [T.RandomCrop(12), T.RandomAdjustSharpness(2.0), T.MotionBlur(5, p=1.0)],
    "light": [T.RandomCrop(12), T.RandomGamma((50, 200), p=1.0), T.PlanckianJitter(p=1.0)],
    "warp": [T.RandomCrop(12), T.RandomAffine(30, translate=(0.1, 0.1)), T.RandomPerspective(p=1.0)],
    "bilinear warp": [T.RandomCrop(12), T.RandomAffine(30, interpolation="bilinear")],
    "erasing": [T.RandomCrop(12), NORMALIZE, T.RandomErasing(1.0)],
    "erasing levels": [T.RandomCrop(12), T.RandomErasing(1.0, value=9), T.RandomHorizontalFlip()],
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_kornia_batches_on_the_device_equal_those_of_the_cpu_without_a_wait(chain):
    needs("kornia")
    loader_options = options(dataset=samples(6), batch_size=2, transforms=CHAINS[chain], backend="kornia")
    expected = on_cpu(loader_options)
    for policy in POLICIES:
        run = on_device(loader_options, policy)
        assert_equal(run.values, expected)
        assert run.unexpected_waits == []
