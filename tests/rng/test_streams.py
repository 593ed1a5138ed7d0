"""The lanes and positions that are registered are disjoint, so that no two users draw the same number."""

from __future__ import annotations

import itertools

import pytest

from gpuload import transforms as T
from gpuload.order.permutation import LENGTH_MAX
from gpuload.rng import streams

LANES = (
    *("TRANSFORMS", "GENERATORS", "SUBSTITUTES", "SAMPLE_RNG", "SHARDS", "SHUFFLE_BUFFER", "WINDOWS", "WITHIN_WINDOWS"),
    *("SHORT_BLOCK", "MIXED_BLOCKS", "MIXED_DATASETS", "MIXED_PERMUTATIONS", "BUCKETS", "BATCHES", "MODULE", "ORDER"),
)
OFFSETS = ("DRAWS",)  # of lanes of `TRANSFORMS` and `MODULE`
POSITIONS = ("SAMPLE_POSITIONS", "WORKER_INIT_POSITIONS", "SAMPLER_POSITIONS")


def test_lanes_and_positions_above_are_all_that_are_registered():
    names = LANES + OFFSETS + POSITIONS
    assert sorted(streams.__all__) == sorted(names), "add the new name to LANES, OFFSETS or POSITIONS above"


@pytest.mark.parametrize(("names", "count"), [(LANES, 2**32), (POSITIONS, 2**63)])
def test_registered_lanes_and_positions_are_disjoint(names, count):
    ranges = {}
    for name in names:
        value = getattr(streams, name)
        ranges[name] = value if isinstance(value, range) else range(value, value + 1)
    for name, values in ranges.items():
        assert 0 <= values.start < values.stop <= count, name
    for (name, values), (other_name, other_values) in itertools.combinations(ranges.items(), 2):
        assert values.stop <= other_values.start or other_values.stop <= values.start, (name, other_name)


@pytest.mark.parametrize("name", ["TRANSFORMS", "MODULE"])
def test_lanes_of_different_draws_are_disjoint_and_within_their_range(name):
    lanes, draws = getattr(streams, name), streams.DRAWS
    first_lanes = [lanes.start + offset for offset in (draws[0], draws[1], draws[-1])]
    spans = [range(first, first + min(draws.step, lanes.stop - first)) for first in first_lanes]
    assert draws[0] == 0
    assert all(min(span) in lanes and max(span) in lanes and len(span) > 2**15 for span in spans)
    for span, other in itertools.combinations(spans, 2):
        assert span.stop <= other.start


def test_sample_positions_end_at_the_maximum_length_of_a_dataset():
    assert range(LENGTH_MAX) == streams.SAMPLE_POSITIONS


def test_transforms_of_a_nested_chain_draw_from_disjoint_lanes_of_transforms():
    inner = [T.RandomHorizontalFlip(), T.RandomApply([T.ColorJitter(0.4), T.GaussianBlur(3)]), T.RandAugment()]
    nested = T.RandomChoice([T.RandomOrder([*inner, T.RandomInvert()]), T.Compose(inner)])
    chain = T.Chain([T.Resize(64), T.MultiView([[T.RandomResizedCrop(32), nested]] * 3), T.RandomErasing()])
    lanes = []
    for number, line in enumerate(chain.lines):
        first_lanes = list(zip(line.lanes, line.transforms, strict=True))[number > 0 :]  # all views share Resize
        lanes += [lane for first, transform in first_lanes for lane in range(first, first + transform.lanes)]
    assert len(lanes) == len(set(lanes)) == max(lanes) + 1 < 100 < len(streams.TRANSFORMS)
