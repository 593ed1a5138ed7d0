"""Transforms that hold others: what is drawn for which sample, sizes, windows, and where they may stand."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import stats

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

N = 6000
KEY = epoch_key(3, 1)
NORMALIZE = T.Normalize((0.5,) * 3, (0.5,) * 3)


def draw(transform, n: int = N, height: int = 40, width: int = 60, first: int = 0):
    return T.Chain([transform]).draw(KEY, np.arange(first, first + n), np.tile([[height, width]], (n, 1)))


def test_random_apply_applies_all_or_none_with_its_probability():
    drawn = draw(T.RandomApply([T.RandomHorizontalFlip(1), T.RandomVerticalFlip(1)], p=0.3))[0]
    assert len(drawn.rows) == 1
    assert stats.binomtest(len(drawn.rows[0]), N, 0.3).pvalue > 0.01
    assert [type(t).__name__ for t in drawn.draws[0].transforms] == ["RandomHorizontalFlip", "RandomVerticalFlip"]
    assert len(draw(T.RandomApply([T.Identity()], p=0))[0].rows) == 0
    assert len(draw(T.RandomApply([T.Identity()], p=1))[0].rows[0]) == N


def test_random_choice_takes_one_as_often_as_its_share_says():
    choices = [T.RandomCrop(8), T.CenterCrop(8), T.Identity()]
    drawn = draw(T.RandomChoice(choices, p=[2, 1, 1]))[0]
    assert sorted(np.concatenate(drawn.rows).tolist()) == list(range(N))
    assert [draws.transforms for draws in drawn.draws] == [(choice,) for choice in choices]
    assert stats.chisquare([len(rows) for rows in drawn.rows], np.array([0.5, 0.25, 0.25]) * N).pvalue > 0.01
    even = draw(T.RandomChoice(choices))[0]
    assert stats.chisquare([len(rows) for rows in even.rows]).pvalue > 0.01
    assert [len(rows) for rows in draw(T.RandomChoice(choices, p=[0, 1, 0]))[0].rows] == [N]


def test_random_order_takes_every_order_equally_often():
    three = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.ColorJitter(0.4)]
    drawn = draw(T.RandomOrder(three))[0]
    assert {draws.transforms for draws in drawn.draws} == {
        (three[a], three[b], three[c]) for a in range(3) for b in range(3) for c in range(3) if len({a, b, c}) == 3
    }
    assert stats.chisquare([len(rows) for rows in drawn.rows]).pvalue > 0.01


def test_what_a_sample_draws_does_not_hang_on_its_batch_nor_on_its_way():
    order = T.RandomOrder([T.RandomCrop(20), T.RandomApply([T.ColorJitter(0.4), T.RandomHorizontalFlip()])])
    chain = T.Chain([T.RandomResizedCrop(32), T.RandomChoice([order, T.Identity()]), T.RandomVerticalFlip()])
    positions = np.random.default_rng(0).permutation(200)
    sizes = np.random.default_rng(1).integers(30, 90, (200, 2))
    whole = chain.draw(KEY, positions, sizes)
    for row in (0, 7, 199):
        one = chain.draw(KEY, positions[row : row + 1], sizes[row : row + 1])
        taken = whole.take(np.array([row]))
        for ours, theirs in zip(one.windows_tlhw, taken.windows_tlhw, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(one.sizes_hw[-1], taken.sizes_hw[-1])


def test_compose_is_the_same_as_writing_its_transforms_in_the_chain():
    plain = [T.RandomResizedCrop(32), T.ColorJitter(0.4), NORMALIZE]
    chain = T.Chain([T.Compose([T.Compose(plain[:1]), plain[1]]), NORMALIZE])
    assert chain == T.Chain(plain)
    assert chain.fingerprint() == T.Chain(plain).fingerprint()
    assert chain.lines[0].streams == (0, 1, 2)


def test_transforms_inside_draw_from_streams_of_their_own():
    chain = T.Chain([T.RandomApply([T.RandomHorizontalFlip(), T.Compose([T.RandomVerticalFlip()])], p=1), NORMALIZE])
    assert chain.lines[0].streams == (0, 4)
    drawn = chain.draw(KEY, np.arange(N), np.tile([[8, 8]], (N, 1)))[0].draws[0]
    assert abs(np.corrcoef(drawn[0].flipped, drawn[1].flipped)[0, 1]) < 0.05
    assert not np.array_equal(drawn[0].flipped, draw(T.RandomHorizontalFlip())[0].flipped)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.RandomApply([T.Identity()], p=1.5), ValueError, "RandomApply(p=…) is a probability and must lie in"),
        (lambda: T.RandomApply(T.Identity()), TypeError, "RandomApply(transforms=…) must be a list of transforms"),
        (lambda: T.RandomApply([]), ValueError, "RandomApply(transforms=…) is empty; give at least one transform"),
        (
            lambda: T.RandomOrder([len]),
            TypeError,
            "RandomOrder(transforms=…)[0] is no transform of gpuload: got",
        ),
        (lambda: T.RandomChoice([T.Identity()], p=[1, 2]), ValueError, "must have one number for each of the 1 transf"),
        (
            lambda: T.RandomChoice([T.Identity()], p=[0]),
            ValueError,
            "numbers that are not negative, with a sum",
        ),
        (
            lambda: T.RandomChoice([T.Identity()], p=[-1]),
            ValueError,
            "numbers that are not negative, with a sum",
        ),
        (
            lambda: T.RandomApply([NORMALIZE]),
            ValueError,
            "RandomApply cannot hold Normalize, which makes floats of",
        ),
        (
            lambda: T.RandomChoice([T.Compose([T.ToDtype("float32")])]),
            ValueError,
            "RandomChoice cannot hold Compose, which makes floats",
        ),
        (lambda: T.RandomApply([T.MultiView([[T.Identity()]])]), ValueError, "RandomApply cannot hold a MultiView"),
        (
            lambda: T.Chain([NORMALIZE, T.RandomApply([T.RandomHorizontalFlip(), T.ColorJitter(0.4)])]),
            ValueError,
            "RandomApply (number 2) cannot come after Normalize (number 1)",
        ),
    ],
)
def test_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_flips_in_a_choice_may_stand_behind_normalize():
    T.Chain([NORMALIZE, T.RandomChoice([T.RandomHorizontalFlip(), T.Identity()])])


def test_an_image_that_a_transform_inside_refuses_is_named_by_its_row():
    chain = T.Chain([T.RandomChoice([T.RandomCrop(50), T.RandomCrop(50)])])
    assert chain.lines[0].lead == 1
    with pytest.raises(T.base.DrawError, match="image is smaller than the crop, 40×60") as caught:
        chain.draw(KEY, np.arange(5), np.array([[60, 60], [70, 60], [60, 80], [40, 60], [60, 60]]))
    assert caught.value.row == 3
