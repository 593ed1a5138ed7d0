"""sample_rng: a generator for the current sample, for libraries that keep their own generators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dataloader.streams import Counting
from helpers import lacking
from helpers.both_loaders import gpuload_batches
from helpers.map_datasets import MapDataset

import gpuload as gl


def two_draws(key):
    return [int(gl.sample_rng().integers(2**62)) for _ in range(2)]


def first_draws(**options) -> list[int]:
    batches = gpuload_batches(MapDataset(two_draws), **{"batch_size": 4, "collate_fn": list, **options})
    for batch in batches:
        for first, second in batch:
            assert first == second, "each call must return a new generator"
    return [first for batch in batches for first, _ in batch]


@pytest.mark.processes
def test_sample_rng_depends_only_on_seed_epoch_and_position():
    expected = first_draws(epochs=2)
    assert len(set(expected)) == 20
    assert first_draws(batch_size=3, epochs=2) == expected
    assert first_draws(num_workers=2, chunk_size=1, epochs=2) == expected
    assert not set(first_draws(seed=1)) & set(expected)


def test_sample_rng_depends_on_the_position_not_the_key():
    assert first_draws(shuffle=True) == first_draws(shuffle=False) == first_draws(sampler=range(9, -1, -1))


def test_sample_rng_differs_from_the_global_generators():
    import random

    def three_draws(key):
        return random.random(), np.random.rand(), gl.sample_rng().random()

    [batch] = gpuload_batches(MapDataset(three_draws, 10), 10, collate_fn=list)
    assert len({number for row in batch for number in row}) == 30


def test_seeds_recommended_instead_of_get_state_differ_for_each_sample():
    """The state that `get_state` returns repeats, as docs/dataloader.md explains."""

    def count(seed_of):
        batches = gpuload_batches(MapDataset(lambda key: seed_of(), 128), 32)
        return len({int(seed) for batch in batches for seed in batch})

    assert count(lambda: int(np.random.get_state()[1][0])) < 64
    assert count(lambda: int(gl.sample_rng().integers(2**62))) == 128
    assert count(lambda: int(np.random.default_rng(np.random.randint(2**32)).integers(2**62))) == 128
    assert count(lambda: torch.initial_seed() % 2**62) == 128


def test_sample_rng_of_a_stream_differs_between_samples_not_between_runs():
    class Noisy(Counting):
        def __iter__(self):
            for number in super().__iter__():
                yield number, int(gl.sample_rng().integers(2**62))

    first_run, second_run = (gpuload_batches(Noisy(7), 3, collate_fn=list) for _ in range(2))
    assert first_run == second_run
    assert len({value for batch in first_run for _, value in batch}) == 7


def test_sample_rng_outside_of_a_sample_raises():
    gpuload_batches(MapDataset(two_draws), 4, collate_fn=list)
    with pytest.raises(RuntimeError, match=r"gpuload.sample_rng\(\) was called while no Loader is reading a sample"):
        gl.sample_rng()


class SelfSeededTransform:
    """A transform that draws from a generator created once, as in Albumentations."""

    def __init__(self):
        self.generator = np.random.default_rng()

    def set_random_seed(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, image):
        return image + self.generator.normal()


def augmented(image, transform, **options):
    """Return a batch of 8 copies of the image, each transformed with the seed of its sample."""

    def make(key):
        transform.set_random_seed(int(gl.sample_rng().integers(2**31)))
        return transform(image=image)

    return gpuload_batches(MapDataset(make, 8), 8, **options)[0]


@pytest.mark.processes
def test_sample_rng_seeds_a_library_that_has_its_own_generator():
    expected = augmented(np.zeros(3), SelfSeededTransform())
    assert len(expected[:, 0].unique()) == 8
    assert (augmented(np.zeros(3), SelfSeededTransform(), num_workers=2, chunk_size=1) == expected).all()


@lacking.needs("albumentations")
@pytest.mark.filterwarnings("ignore")  # Albumentations asks the network for a newer version
def test_sample_rng_seeds_albumentations(monkeypatch):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations

    image = np.arange(192, dtype=np.float32).reshape(8, 8, 3)

    def make():
        return albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.RandomCrop(4, 4)])

    expected = augmented(image, make())["image"]
    assert len({sample.numpy().tobytes() for sample in expected}) > 4
    assert (augmented(image, make(), num_workers=1, chunk_size=1)["image"] == expected).all()
