"""Colour transforms, blur and noise: what they refuse, and how their draws are distributed."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from scipy import stats

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.ops import NOTHING, OPS

N = 10_000


def draw(transform, n: int = N, seed: int = 8):
    return T.Chain([transform]).draw(epoch_key(seed, 0), np.arange(n), np.tile([[30, 40]], (n, 1))).records[0]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.Grayscale(2), ValueError, "Grayscale(num_output_channels=…) must be 1 or 3, got 2"),
        (lambda: T.Grayscale("1"), TypeError, "Grayscale(num_output_channels=…) must be an integer, got '1' (str)"),
        (lambda: T.RandomGrayscale(1.5), ValueError, "RandomGrayscale(p=…) is a probability and must lie in 0 … 1"),
        (lambda: T.RandomInvert(-0.1), ValueError, "RandomInvert(p=…) is a probability and must lie in 0 … 1"),
        (lambda: T.RandomEqualize("x"), TypeError, "RandomEqualize(p=…) must be a number, got 'x' (str)"),
        (lambda: T.RandomAutocontrast(2), ValueError, "RandomAutocontrast(p=…) is a probability"),
        (lambda: T.RandomSolarize(256), ValueError, "RandomSolarize(threshold=…) must be a pixel value in 0 … 255"),
        (lambda: T.RandomSolarize(128, 7), ValueError, "RandomSolarize(p=…) is a probability and must lie in 0 … 1"),
        (
            lambda: T.Chain([T.RandomSolarize(0.5)]),
            ValueError,
            "RandomSolarize(threshold=0.5) is used where pixel values are in 0 … 255; write threshold=127.5, or "
            "put it",
        ),
        (lambda: T.RandomPosterize(9), ValueError, "RandomPosterize(bits=…) must lie in 0 … 8, got 9: pixel"),
        (lambda: T.RandomPosterize(-1), ValueError, "RandomPosterize(bits=…) must be at least 0, got -1"),
        (lambda: T.RandomPosterize(2.0), TypeError, "RandomPosterize(bits=…) must be an integer, got 2.0 (float)"),
        (lambda: T.RandomAdjustSharpness(-1), ValueError, "(sharpness_factor=…) must not be negative, got -1"),
        (lambda: T.RandomPhotometricDistort(0.5), TypeError, "(brightness=…) must be a pair (low, high), got 0.5"),
        (lambda: T.RandomPhotometricDistort(hue=(-1, 0)), ValueError, "(hue=…) must lie in -0.5 … 0.5, got (-1, 0)"),
        (lambda: T.RandomPhotometricDistort(contrast=(-1, 1)), ValueError, "(contrast=…) must lie in 0 … inf, got"),
        (lambda: T.RandomPhotometricDistort(p=2), ValueError, "RandomPhotometricDistort(p=…) is a probability"),
        (lambda: T.GaussianBlur(4), ValueError, "GaussianBlur(kernel_size=…) must be odd, so that the kernel has"),
        (lambda: T.GaussianBlur(0), ValueError, "GaussianBlur(kernel_size=…) must be at least 1, got 0"),
        (lambda: T.GaussianBlur(3, -1), ValueError, "GaussianBlur(sigma=…) must be greater than 0, got (-1.0, -1.0)"),
        (lambda: T.GaussianBlur(3, (2, 1)), ValueError, "GaussianBlur(sigma=…) must be (low, high) with low ≤ high"),
        (lambda: T.GaussianBlur(3, (0, 1)), ValueError, "GaussianBlur(sigma=…) must be greater than 0, got (0.0, 1.0)"),
        (lambda: T.GaussianNoise(sigma=-0.1), ValueError, "GaussianNoise(sigma=…) must not be negative, got -0.1"),
        (lambda: T.GaussianNoise("0"), TypeError, "GaussianNoise(mean=…) must be a number, got '0' (str)"),
        (lambda: T.GaussianNoise(clip=0), TypeError, "GaussianNoise(clip=…) must be True or False, got 0"),
        (
            lambda: T.RandomApply([T.Grayscale()]),
            ValueError,
            "RandomApply cannot hold Grayscale(), which would reduce three channels to one for only some",
        ),
    ],
)  # fmt: skip
def test_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_arguments_take_one_form():
    assert T.GaussianBlur(3) == T.GaussianBlur([3]) == T.GaussianBlur((3, 3), [0.1, 2.0])
    assert T.GaussianBlur(3, 2) == T.GaussianBlur(3, (2.0,)) == T.GaussianBlur(3, (2, 2))
    assert T.RandomSolarize(128) == T.RandomSolarize(128.0, 0.5)
    assert repr(T.RandomSolarize(128, 0.2)) == "RandomSolarize(threshold=128.0, p=0.2)"
    assert repr(T.RandomGrayscale(p=0.1)) == "RandomGrayscale()"


@pytest.mark.parametrize(
    ("transform", "name", "values"),
    [
        (T.RandomGrayscale(), "grayscale", ()),
        (T.RandomInvert(0.3), "invert", ()),
        (T.RandomEqualize(0.3), "equalize", ()),
        (T.RandomAutocontrast(0.3), "autocontrast", ()),
        (T.RandomSolarize(99, 0.3), "solarize", (99,)),
        (T.RandomPosterize(3, 0.3), "posterize", (3,)),
        (T.RandomAdjustSharpness(1.7, 0.3), "sharpness", (1.7,)),
    ],
)
def test_coins(transform, name, values):
    drawn = draw(transform)
    done = drawn.codes[:, 0] != NOTHING
    assert drawn.codes.shape == (N, 1)
    assert stats.binomtest(int(done.sum()), N, transform.p).pvalue > 0.01
    assert set(drawn.codes[done, 0].tolist()) == {OPS.index(name)}
    np.testing.assert_array_equal(drawn.values[:, 0, : len(values)], np.tile(values, (N, 1)))
    always, never = (draw(type(transform)(*values, p), 100).codes[:, 0] for p in (1.0, 0.0))
    assert (always != NOTHING).all()
    assert (never == NOTHING).all()


def test_channels_stand_in_each_order_as_often():
    drawn = draw(T.RandomChannelPermutation())
    assert drawn.codes.tolist() == [[OPS.index("permute")]] * N
    orders, counts = np.unique(drawn.values[:, 0, :3], axis=0, return_counts=True)
    assert orders.tolist() == [list(order) for order in itertools.permutations(range(3))]
    assert stats.chisquare(counts).pvalue > 0.01


def simulate_photometric_distort(transform, rng: np.random.Generator) -> list[tuple[str, object]]:
    """torchvision's definition, for one image: what is done, in order."""
    factor = {
        name: rng.uniform(*getattr(transform, name)) if rng.random() < transform.p else None
        for name in ("brightness", "contrast", "saturation", "hue")
    }
    early = rng.random() < 0.5
    order = rng.permutation(3) if rng.random() < transform.p else None
    done = [("brightness", factor["brightness"])]
    done += [("contrast", factor["contrast"])] if early else []
    done += [("saturation", factor["saturation"]), ("hue", factor["hue"])]
    done += [] if early else [("contrast", factor["contrast"])]
    done += [("permute", order)]
    return [(name, value) for name, value in done if value is not None]


def test_photometric_distort():
    transform = T.RandomPhotometricDistort((0.5, 1.2), (0.4, 0.9), (1.1, 3), (-0.3, 0.1), p=0.4)
    drawn, rng = draw(transform), np.random.default_rng(1)
    ours = []
    for codes, values in zip(drawn.codes.tolist(), drawn.values, strict=True):
        done = [(OPS[code], numbers) for code, numbers in zip(codes, values, strict=True) if code != NOTHING]
        ours.append([(name, numbers[:3] if name == "permute" else numbers[0]) for name, numbers in done])
    theirs = [simulate_photometric_distort(transform, rng) for _ in range(N)]

    # Which operations in which order: all 44 possible ones, as often.
    orders = [[tuple(name for name, _ in done) for done in all_done] for all_done in (ours, theirs)]
    kinds = sorted(set(orders[0]) | set(orders[1]))
    assert len(kinds) == 44
    table = np.array([[found.count(kind) for kind in kinds] for found in orders])
    assert stats.chi2_contingency(table).pvalue > 0.01

    # By which factors.
    for name in ("brightness", "contrast", "saturation", "hue"):
        one, other = ([value for done in all_done for key, value in done if key == name] for all_done in (ours, theirs))
        assert stats.ks_2samp(one, other).pvalue > 0.01, name
        low, high = getattr(transform, name)
        assert stats.kstest(one, stats.uniform(low, high - low).cdf).pvalue > 0.01, name
    permutations = [tuple(value) for done in ours for key, value in done if key == "permute"]
    _, counts = np.unique(permutations, axis=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 0.01


def test_blur_has_one_sigma_for_both_axes_and_it_is_uniform():
    drawn = draw(T.GaussianBlur((5, 9), (0.3, 1.7)))
    np.testing.assert_array_equal(drawn.values[:, 0, :2], np.tile([5, 9], (N, 1)))
    np.testing.assert_array_equal(drawn.values[:, 0, 2], drawn.values[:, 0, 3])
    assert stats.kstest(drawn.values[:, 0, 2], stats.uniform(0.3, 1.4).cdf).pvalue > 0.01
    assert (draw(T.GaussianBlur(3, 0.7), 10).values[:, 0, 2] == 0.7).all()


def test_noise_keys_are_words_of_their_own():
    drawn = draw(T.GaussianNoise(0.1, 0.2))
    keys = drawn.values[:, 0, 2:4]
    assert (keys == np.floor(keys)).all()
    assert keys.min() >= 0
    assert keys.max() < 2**32
    assert len(np.unique(keys, axis=0)) == N
    assert stats.kstest(keys.ravel() / 2**32, "uniform").pvalue > 0.01
    np.testing.assert_allclose(drawn.values[0, 0, :2], [25.5, 51.0])
