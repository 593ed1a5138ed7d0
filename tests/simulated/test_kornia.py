"""Kornia on the simulated device: the numbers of the CPU, in the orders that find most, and no wait of the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from bits.cases import CASES
from bits.samples import Samples
from parity.usable import needs
from simulated.running import assert_equal, epochs, on_cpu, on_device
from simulated.test_orders import options, samples

from gpuload import transforms as T

ORDERS = ("lazy", "side first")
NORMALIZE = T.Normalize((0.5,) * 3, (0.5,) * 3)
# Each of its operations is in one of these, or in the recipes below.
CHAINS: dict[str, list[Any]] = {
    "flipped crops": [T.RandomCrop(12), T.RandomHorizontalFlip(), NORMALIZE],
    "mixing": [T.RandomCrop(12), NORMALIZE, T.MixUp(num_classes=30)],
    "sharpness": [T.RandomCrop(12), T.RandomAdjustSharpness(2.0, p=1.0)],
    "colour": [T.RandomCrop(12), T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomGrayscale(0.5)],
    "noise": [T.RandomCrop(12), T.GaussianNoise()],
    "blur": [T.RandomCrop(12), T.GaussianBlur(5)],
    "levels": [T.RandomCrop(12), T.RandomInvert(0.5), T.RandomSolarize(100), T.RandomPosterize(3)],
    "histograms": [T.RandomCrop(12), T.RandomEqualize(0.5), T.RandomAutocontrast(0.5)],
    "warp": [T.RandomCrop(12), T.RandomAffine(30, translate=(0.1, 0.1)), T.RandomPerspective(p=1.0)],
    "erasing": [T.RandomCrop(12), NORMALIZE, T.RandomErasing(1.0)],
    "erasing levels": [T.RandomCrop(12), T.RandomErasing(1.0, value=9), T.RandomHorizontalFlip()],
    "erasing pixels": [T.RandomCrop(12), NORMALIZE, T.RandomErasing(1.0, mode="pixel")],
}
RECIPES = ("randaugment", "trivialaugment", "autoaugment", "augmix", "timm", "timm_strings", "timm_policies")


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_batches_are_as_on_the_cpu_without_a_wait(chain):
    needs("kornia")
    given = options(dataset=samples(6), batch_size=2, transforms=CHAINS[chain], backend="kornia")
    expected = on_cpu(given)
    for policy in ORDERS:
        found = on_device(given, policy)
        assert_equal(found.values, expected)
        assert found.hidden == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_as_on_the_cpu_without_a_wait(name):
    needs("kornia")
    case = CASES[name]
    given, drive = case.make(Samples(small=True)) | {"backend": "kornia"}, partial(epochs, count=case.epochs)
    found = on_device(given, ORDERS[RECIPES.index(name) % 2], drive)
    assert_equal(found.values, on_cpu(given, drive))
    assert found.hidden == []
