"""Draws are independent of those of other samples, epochs and seeds, of the same transform at another place of a chain,
and of other views."""

from __future__ import annotations

import numpy as np
import pytest
from distributions.joint import MIN_P_VALUE, independence_p_value

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

N = 20_000
SIZES = np.tile([[61, 83]], (N, 1))
KEY = epoch_key(8, 0)

# By name, a transform, and a function that reduces its draws to one number per sample.
NUMBERS = {
    "RandomResizedCrop": (T.RandomResizedCrop(32), lambda params: params.box_tlhw[:, 3] + params.box_tlhw[:, 1] / 100),
    "ColorJitter": (T.ColorJitter(0.4), lambda params: params.values[:, 0, 0]),
    "RandomRotation": (T.RandomRotation(90), lambda params: params.coefficients[:, 1]),
    "RandomErasing": (T.RandomErasing(1), lambda params: params.boxes_tlhw[:, 0, 0] + params.boxes_tlhw[:, 0, 2] / 100),
    "noise": (T.GaussianNoise(), lambda params: params.values[:, 0, 2]),
}


def draw(transforms, number, key=KEY, positions=None, view=0):
    positions = np.arange(N) if positions is None else positions
    return T.Chain(transforms).draw(key, positions, SIZES, view=view).records[number]


@pytest.mark.parametrize("name", NUMBERS)
def test_draws_of_samples_epochs_seeds_and_lanes_are_independent(name):
    transform, number = NUMBERS[name]
    reference = number(draw([transform], 0))
    others = {
        "of the next sample": number(draw([transform], 0, positions=np.arange(1, N + 1))),
        "of its partner": number(draw([transform], 0, positions=np.arange(N) ^ 1)),
        "far behind": number(draw([transform], 0, positions=np.arange(N) + 2**32)),
        "of the next epoch": number(draw([transform], 0, epoch_key(8, 1))),
        "of the next seed": number(draw([transform], 0, epoch_key(9, 0))),
        "at the next place": number(draw([T.RandomHorizontalFlip(), transform], 1)),
        "within another": number(draw([T.RandomApply([transform], 1)], 0)),
    }
    for description, numbers in others.items():
        assert independence_p_value(reference, numbers) > MIN_P_VALUE, description


def test_draws_of_views_are_independent():
    chain = [T.MultiView([[T.RandomRotation(90)]] * 2), T.ColorJitter(0.4)]
    for number, column in ((0, lambda params: params.coefficients[:, 1]), (1, lambda params: params.values[:, 0, 0])):
        assert independence_p_value(column(draw(chain, number)), column(draw(chain, number, view=1))) > MIN_P_VALUE


def test_independence_p_value_of_dependent_columns_is_small():
    factors = draw([T.ColorJitter(0.4)], 0).values[:, 0, 0]
    assert independence_p_value(factors, factors**2) < MIN_P_VALUE
