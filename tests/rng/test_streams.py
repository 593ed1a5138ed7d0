"""The register of lanes and positions: no two of those who draw ever see the same number."""

from __future__ import annotations

import itertools

import pytest

from gpuload import transforms as T
from gpuload.order.permutation import LENGTH_MAX
from gpuload.rng import streams

LANES = (
    *("TRANSFORMS", "GENERATORS", "SUBSTITUTES", "SAMPLE_RNG", "SHARDS", "SHUFFLE_BUFFER", "WINDOWS", "WITHIN_WINDOWS"),
    *("SHORT_BLOCK", "MIXED_BLOCKS", "MIXED_DATASETS", "MIXED_PERMUTATIONS", "MODULE", "ORDER"),
)
POSITIONS = ("SAMPLE_POSITIONS", "WORKER_INIT_POSITIONS", "SAMPLER_POSITIONS")


def test_all_that_is_registered_is_compared_here():
    assert sorted(streams.__all__) == sorted(LANES + POSITIONS)


@pytest.mark.parametrize(("names", "count"), [(LANES, 2**32), (POSITIONS, 2**63)])
def test_lanes_are_disjoint_and_so_are_positions(names, count):
    ranges = {}
    for name in names:
        value = getattr(streams, name)
        ranges[name] = value if isinstance(value, range) else range(value, value + 1)
    for name, values in ranges.items():
        assert 0 <= values.start < values.stop <= count, name
    for (one, first), (other, second) in itertools.combinations(ranges.items(), 2):
        assert first.stop <= second.start or second.stop <= first.start, (one, other)


def test_a_dataset_of_the_largest_length_has_positions_of_samples_alone():
    assert range(LENGTH_MAX) == streams.SAMPLE_POSITIONS


def test_a_chain_with_every_kind_of_nesting_draws_from_lanes_of_transforms():
    """A lane is taken by each transform that is written down, so a chain would have to hold 2**31 of them."""
    inner = [T.RandomHorizontalFlip(), T.RandomApply([T.ColorJitter(0.4), T.GaussianBlur(3)]), T.RandAugment()]
    nested = T.RandomChoice([T.RandomOrder([*inner, T.RandomInvert()]), T.Compose(inner)])
    chain = T.Chain([T.Resize(64), T.MultiView([[T.RandomResizedCrop(32), nested]] * 3), T.RandomErasing()])
    taken = []
    for number, line in enumerate(chain.lines):
        own = zip(line.lanes, line.transforms, strict=True)
        taken += [lane for first, one in list(own)[number > 0 :] for lane in range(first, first + one.lanes)]
    assert len(taken) == len(set(taken)) == max(taken) + 1 < 100 < len(streams.TRANSFORMS)
