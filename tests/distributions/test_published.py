"""The joint distributions of draws equal those of the published definitions, which are simulated directly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from distributions.definitions import SAMPLES, SIZE_HW
from distributions.joint import assert_same_distribution
from transforms.specs import SPECS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

DEFINITIONS = [
    (name, definition) for name, spec in SPECS.items() if not isinstance(spec.draws, str) for definition in spec.draws
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "definition"), DEFINITIONS, ids=[name for name, _ in DEFINITIONS])
def test_draws_are_distributed_as_published(name, definition):
    transforms = definition.transform if isinstance(definition.transform, list) else [definition.transform]
    assert name in {type(transform).__name__ for transform in transforms}
    draws = T.Chain(transforms).draw(epoch_key(8, 0), np.arange(SAMPLES), np.tile([SIZE_HW], (SAMPLES, 1)))
    assert_same_distribution(definition.columns_of(draws), definition.simulate(np.random.default_rng(1)))


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if isinstance(spec.draws, str)])
def test_file_that_a_spec_names_for_draws_contains_the_transform(name):
    path = Path(__file__).parents[1] / str(SPECS[name].draws)
    assert name in path.read_text(), f"{path} does not test {name}"
