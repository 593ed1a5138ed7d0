"""Weighted sampling and repeated augmentation: frequencies, ranks and resuming."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import gpuload as gl
from gpuload import transforms as T
from gpuload.order.permutation import Weighted, cumulate
from gpuload.order.shares import Shares
from gpuload.rng import philox


def indices_by_position_of_ranks(ranks: int, start: int = 0, **options) -> dict[int, int]:
    indices_by_position = {}
    for rank in range(ranks):
        for batch in Shares(rank=rank, world_size=ranks, **options).batches(0, start):
            assert not indices_by_position.keys() & set(batch.positions.tolist())
            indices_by_position |= dict(zip(batch.positions.tolist(), batch.indices.tolist(), strict=True))
    return indices_by_position


def test_weighted_draws_samples_in_proportion_to_their_weights():
    weights = np.array([3.0, 0.0, 1.0, 0.5, 0.0, 5.5, 0.0])
    indices = Weighted(cumulate(weights, 7), philox.epoch_key(1, 2))(np.arange(200_000))
    counts = np.bincount(indices, minlength=7)
    assert (counts[weights == 0] == 0).all()
    is_positive = weights > 0
    assert stats.chisquare(counts[is_positive], 200_000 * weights[is_positive] / weights.sum()).pvalue > 1e-4


def test_weighted_draws_differ_between_epochs():
    epoch_0, epoch_1 = (Weighted(cumulate(np.ones(1000), 1000), philox.epoch_key(1, epoch)) for epoch in (0, 1))
    positions = np.arange(1000)
    assert (epoch_0(positions) == epoch_1(positions)).mean() < 0.02


@given(
    samples=st.integers(4, 300),
    batch_size=st.integers(1, 5),
    steps_done=st.integers(0, 30),
    repeats=st.integers(1, 4),
    weighted=st.booleans(),
)
def test_index_at_a_position_does_not_depend_on_ranks_or_start(samples, batch_size, steps_done, repeats, weighted):
    weights = cumulate(np.arange(samples) % 3 + 1, samples) if weighted else None
    options = {"samples": samples, "shuffle": not weighted, "weights": weights, "repeats": repeats, "drop_last": True}
    expected = indices_by_position_of_ranks(1, batch_size=4 * batch_size, **options)
    assert indices_by_position_of_ranks(4, batch_size=batch_size, **options) == expected
    start = min(steps_done * 4 * batch_size, samples // (4 * batch_size) * 4 * batch_size)
    resumed = indices_by_position_of_ranks(2, start, batch_size=2 * batch_size, **options)
    assert resumed == {position: index for position, index in expected.items() if position >= start}


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeats_of_a_sample_are_adjacent_and_on_different_ranks(repeats):
    options = {"samples": 240, "batch_size": 6, "shuffle": True, "repeats": repeats}
    indices_by_position = indices_by_position_of_ranks(1, **options)
    for position, index in indices_by_position.items():
        assert index == indices_by_position[position // repeats * repeats]
    assert set(Counter(indices_by_position.values()).values()) == {repeats}
    indices_of_ranks = [
        {int(index) for batch in Shares(rank=rank, world_size=repeats, **options).batches(0) for index in batch.indices}
        for rank in range(repeats)
    ]
    for rank, indices in enumerate(indices_of_ranks):
        assert indices == indices_of_ranks[0], f"rank {rank} lacks a repeat of some samples"


class Noise:
    images = np.random.default_rng(0).integers(0, 256, (50, 12, 12, 3), np.uint8)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index):
        return self.images[index], index


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"repeats": 3, "shuffle": True}, {"weights": np.arange(50)}])
@settings(max_examples=8, deadline=None)
@given(stop=st.integers(0, 13))
def test_loader_with_repeats_or_weights_resumes(options, stop):
    def make_loader():
        return gl.Loader(Noise(), 7, transforms=[T.RandomResizedCrop(8)], num_workers=0, device="cpu", **options)

    with make_loader() as undisturbed_loader, make_loader() as first_loader, make_loader() as second_loader:
        expected = [*undisturbed_loader, *undisturbed_loader]
        batches = []
        while len(batches) < stop:
            for batch in first_loader:
                batches.append(batch)
                if len(batches) == stop:
                    break
        second_loader.load_state_dict(json.loads(json.dumps(first_loader.state_dict())))
        while len(batches) < len(expected):
            batches += list(second_loader)
    assert len(batches) == len(expected) == 2 * 8  # epochs × batches
    for (images, numbers), (expected_images, expected_numbers) in zip(batches, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(numbers, expected_numbers)


def test_repeats_of_a_sample_are_transformed_differently():
    loader = gl.Loader(Noise(), 3, shuffle=True, repeats=3, transforms=[T.RandomCrop(6)], num_workers=0, device="cpu")
    different_crops = 0
    for images, numbers in loader:
        if len(numbers) == 3:
            assert len(set(numbers.tolist())) == 1
            different_crops += not torch.equal(images[0], images[1])
    assert different_crops > 10  # of 16 samples


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": [1, 2]}, r"weights must have one value for each of the 50 samples, got shape \(2,\)"),
        ({"weights": [1] * 49 + [-1]}, r"1 are not; the first is weights\[49\] = -1"),
        ({"weights": [0] * 50}, "the sum of weights must be finite and greater than 0, got 0"),
        ({"weights": [float("nan")] * 50}, r"50 are not; the first is weights\[0\] = nan"),
        ({"weights": [1] * 50, "shuffle": True}, "leave shuffle out"),
        ({"repeats": 2}, "repeats=2 needs shuffle=True or weights"),
        ({"weights": [1] * 50, "uneven": "exact", "info": True}, "cannot be combined with weights or repeats"),
        ({"repeats": 2, "sampler": range(4)}, "repeats=2 cannot be combined with a sampler"),
    ],
)
def test_invalid_weights_and_repeats_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        gl.Loader(Noise(), 5, num_workers=0, device="cpu", **options)


def test_weights_that_are_not_numbers_are_refused():
    with pytest.raises(TypeError, match="weights must be numbers, one per sample, got list"):
        gl.Loader(Noise(), 5, num_workers=0, device="cpu", weights=["a"] * 50)


def test_state_saved_with_different_weights_is_refused():
    equal_weights = gl.Loader(Noise(), 5, num_workers=0, device="cpu", weights=np.ones(50))
    rising_weights = gl.Loader(Noise(), 5, num_workers=0, device="cpu", weights=np.arange(50))
    with pytest.raises(ValueError, match=r"order was 'weighted-[0-9a-f]{8}' and is 'weighted-"):
        rising_weights.load_state_dict(equal_weights.state_dict())
