"""RandomErasing checks its arguments and its place in a chain, and draws keys for each sample."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import stats
from transforms.drawing import NORMALIZE, SAMPLES, TO_FLOAT, draw

from gpuload import transforms as T


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"value": "noise"}, ValueError, "RandomErasing(value=…) must be one of 'random', got 'noise'"),
        ({"value": (1, "a")}, TypeError, "RandomErasing(value=…) must be a number, got 'a' (str)"),
        ({"mode": "const", "value": "random"}, ValueError, "(value='random') cannot be combined with mode='const'"),
        ({"mode": "rand", "value": 3}, ValueError, "RandomErasing(value=3.0) cannot be combined with mode='rand'"),
        ({"min_count": 3, "max_count": 2}, ValueError, "RandomErasing(max_count=…) must be at least 3, got 2"),
    ],
)
def test_random_erasing_refuses_invalid_arguments(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        T.RandomErasing(**arguments)


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        ([T.RandomErasing(value="random"), NORMALIZE],
         "RandomErasing(value='random') draws normal numbers, which need float images, but is before ToDtype "
         "or Normalize; put it after Normalize"),
        ([T.RandomErasing(mode="rand")], "RandomErasing(mode='rand') draws normal numbers, which need float images"),
        ([TO_FLOAT, T.RandomErasing(value="random"), NORMALIZE],
         "but is before a transform that needs pixel values in 0 … 255; put it last, after Normalize"),
        ([TO_FLOAT, T.RandomApply([T.RandomErasing(value="random")]), T.CenterCrop(3)], "which need float images"),
        ([T.RandomErasing(value=0.5), NORMALIZE],
         "RandomErasing(value=0.5) is used where images are uint8, so value must be an integer in 0 … 255; "
         "to use normalized values, put it after Normalize"),
        ([T.RandomErasing(value=(1, 2, 256))], "RandomErasing(value=(1.0, 2.0, 256.0)) is used where images are uint8"),
        ([TO_FLOAT, T.RandomErasing(value=2), NORMALIZE],
         "is used where images are floats that later transforms change, so value must be a number in 0 … 1; to"),
        ([T.ToDtype("float32"), T.RandomErasing(value=-1), NORMALIZE],
         "so value must be a number in 0 … 255; to use normalized values, put it after Normalize"),
    ],
)  # fmt: skip
def test_chain_refuses_random_erasing_where_its_value_is_invalid(transforms, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        T.Chain(transforms)


def test_random_erasing_is_compared_by_its_arguments_without_inplace():
    assert repr(T.RandomErasing(0.25, value="random")) == "RandomErasing(p=0.25, value='random')"
    assert T.RandomErasing(value=[1, 2, 3]) == T.RandomErasing(value=(1.0, 2.0, 3.0), inplace=True)
    chain = T.Chain([NORMALIZE, T.RandomErasing(0.25)])
    assert chain == T.Chain([NORMALIZE, T.RandomErasing(0.25)])
    assert chain.fingerprint() != T.Chain([NORMALIZE, T.RandomErasing(0.25, value="random")]).fingerprint()
    assert repr(chain.lines[0].transforms[1]) == "RandomErasing(p=0.25)"


def test_random_erasing_draws_different_keys_for_each_sample():
    [record] = draw(T.RandomErasing()).records
    assert len(np.unique(record.keys[:, 0] << np.uint64(32) | record.keys[:, 1])) == SAMPLES
    assert stats.kstest(record.keys.ravel() / 2.0**32, "uniform").pvalue > 0.01
