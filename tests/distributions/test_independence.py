"""Draws are independent of the draws of other samples, epochs, seeds and views, and of the same transform at another
place of a chain."""

from __future__ import annotations

import numpy as np
import pytest
from distributions.joint import MIN_P_VALUE, independence_p_value

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

SAMPLES = 20_000
SIZES = np.tile([[61, 83]], (SAMPLES, 1))
KEY = epoch_key(8, 0)

# Transforms, each with a function that reduces its draws to one number per sample.
REDUCED_DRAWS = {
    "RandomResizedCrop": (T.RandomResizedCrop(32), lambda params: params.box_tlhw[:, 3] + params.box_tlhw[:, 1] / 100),
    "ColorJitter": (T.ColorJitter(0.4), lambda params: params.values[:, 0, 0]),
    "RandomRotation": (T.RandomRotation(90), lambda params: params.coefficients[:, 1]),
    "RandomErasing": (T.RandomErasing(1), lambda params: params.boxes_tlhw[:, 0, 0] + params.boxes_tlhw[:, 0, 2] / 100),
    "noise": (T.GaussianNoise(), lambda params: params.values[:, 0, 2]),
}


def draw(transforms, record_index, key=KEY, positions=None, view=0):
    positions = np.arange(SAMPLES) if positions is None else positions
    return T.Chain(transforms).draw(key, positions, SIZES, view=view).records[record_index]


@pytest.mark.parametrize("name", REDUCED_DRAWS)
def test_draws_of_samples_epochs_seeds_and_lanes_are_independent(name):
    transform, reduce = REDUCED_DRAWS[name]
    reference = reduce(draw([transform], 0))
    other_draws = {
        "of the next sample": reduce(draw([transform], 0, positions=np.arange(1, SAMPLES + 1))),
        "of the partner": reduce(draw([transform], 0, positions=np.arange(SAMPLES) ^ 1)),
        "2³² positions later": reduce(draw([transform], 0, positions=np.arange(SAMPLES) + 2**32)),
        "of the next epoch": reduce(draw([transform], 0, epoch_key(8, 1))),
        "of the next seed": reduce(draw([transform], 0, epoch_key(9, 0))),
        "at the next place": reduce(draw([T.RandomHorizontalFlip(), transform], 1)),
        "within a RandomApply": reduce(draw([T.RandomApply([transform], 1)], 0)),
    }
    for description, numbers in other_draws.items():
        assert independence_p_value(reference, numbers) > MIN_P_VALUE, f"depends on the draw {description}"


def test_draws_of_views_are_independent():
    chain = [T.MultiView([[T.RandomRotation(90)]] * 2), T.ColorJitter(0.4)]
    for number, column in ((0, lambda params: params.coefficients[:, 1]), (1, lambda params: params.values[:, 0, 0])):
        assert independence_p_value(column(draw(chain, number)), column(draw(chain, number, view=1))) > MIN_P_VALUE


def test_independence_p_value_of_dependent_columns_is_small():
    factors = draw([T.ColorJitter(0.4)], 0).values[:, 0, 0]
    assert independence_p_value(factors, factors**2) < MIN_P_VALUE
