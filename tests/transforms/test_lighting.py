"""Exposure, colour temperature, light and shadow: what the parity table and the distributions do not show."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from helpers import lacking
from transforms.drawing import draw

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.reference.color import gamma_table, shadow, shadow_vertices
from gpuload.transforms.program.ops import VALUES

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)


def apply(transform: object, image: np.ndarray = IMAGE) -> np.ndarray:
    return T.apply(transform, image).permute(1, 2, 0).numpy()


def test_gamma_of_100_percent_changes_nothing():
    assert np.array_equal(apply(T.RandomGamma((100, 100), p=1)), IMAGE)
    assert gamma_table(1.0).tolist() == list(range(256))


def test_gamma_above_100_percent_darkens_and_below_brightens():
    assert apply(T.RandomGamma((200, 200), p=1)).mean() < IMAGE.mean() < apply(T.RandomGamma((50, 50), p=1)).mean()


@lacking.needs("kornia")
@pytest.mark.parametrize("mode", ["blackbody", "cied"])
def test_factors_of_planckian_jitter_are_those_of_kornia(mode):
    """Factors lie between those of neighbouring rows of Kornia's table, in which blue falls as red rises."""
    from kornia.augmentation._2d.intensity.planckian_jitter import get_planckian_coeffs

    table = get_planckian_coeffs(mode).double().numpy()
    factors = draw(T.PlanckianJitter(mode, p=1), count=2000).records[0].values[:, 0, :2]
    for column, sign in ((0, -1), (1, 1)):
        assert table[0, column] * sign <= (factors[:, column] * sign).min()
        assert (factors[:, column] * sign).max() <= table[-1, column] * sign
    rows = np.interp(-factors[:, 0], -table[:, 0], np.arange(len(table)))
    np.testing.assert_allclose(np.interp(rows, np.arange(len(table)), table[:, 1]), factors[:, 1], atol=0.004)


@lacking.needs("albumentations")
@pytest.mark.parametrize("mode", ["blackbody", "cied"])
def test_factors_of_planckian_jitter_are_those_of_albumentations_at_each_temperature(mode):
    from parity.lighting import library

    library()
    from albumentations.augmentations.pixel.functional import planckian_jitter

    transform, white = T.PlanckianJitter(mode, p=1), np.full((1, 1, 3), 255, np.uint8)
    lowest, highest = transform.temperature_limit or (0, 0)
    for number, temperature in enumerate(np.linspace(lowest + 1, highest - 1, 40).astype(int).tolist()):
        is_warm = temperature < 6000
        share = (6000 - temperature) / (6000 - lowest) if is_warm else (temperature - 6000) / (highest - 6000)
        # Whether it is applied, the side of 6000 K, the share of the way to the limit, and a number that is not used.
        uniforms = np.array([[0.0, 0.1 if is_warm else 0.9, np.nextafter(share, 0 if is_warm else 1), 0.5]])
        record = transform.draw(lambda count, uniforms=uniforms: uniforms, np.array([[1, 1]]))
        red, blue = record.values[0, 0, :2].tolist()
        expected = planckian_jitter(white // (2 + number % 2), temperature, mode).ravel().tolist()
        level = 255 // (2 + number % 2)
        assert [int(min(level * np.float32(red), 255)), level, int(min(level * np.float32(blue), 255))] == expected


def test_light_is_brightest_at_its_center():
    gray = np.full((41, 61, 3), 100, np.uint8)
    result = apply(T.GaussianIllumination((0.5, 0.5), "brighten", (0.5, 0.5), (0.1, 0.1), p=1), gray)
    assert np.unravel_index(result[:, :, 0].argmax(), (41, 61)) == (20, 30)
    assert result.max() == 149  # the center is half a pixel away
    assert result[0, 0, 0] == 100
    assert apply(T.GaussianIllumination((0.5, 0.5), "darken", p=1), gray).max() < 100


def test_a_shadow_leaves_a_share_of_the_light_in_its_region():
    bright = np.full((60, 80, 3), 200, np.uint8)
    transform = T.RandomShadow((0.25, 0.5, 0.75, 1), (2, 2), 5, (0.3, 0.3), p=1)
    result = apply(transform, bright)[:, :, 0]
    assert set(np.unique(result)) <= {200, 140, 98}  # a shadow takes 30 % of the light, and two overlap
    assert (result == 140).any()
    rows, columns = np.nonzero(result < 200)
    assert rows.min() >= 30
    assert 20 <= columns.min() <= columns.max() < 60


@lacking.needs("cv2")
@pytest.mark.parametrize("dimension", [3, 5, 8])
def test_a_shadow_covers_the_pixels_of_opencvs_polygon(dimension):
    import cv2

    levels, values = torch.full((50, 1, 61, 83), 100.0), np.zeros((50, VALUES))
    values[:, :6] = 0.5, 0, 0, 83, 61, dimension
    values[:, 6] = np.arange(50)
    is_dark = (shadow(levels, values) < 100)[:, 0].numpy()
    differing = 0
    for mask, row in zip(is_dark, values.tolist(), strict=True):
        expected = np.zeros(mask.shape, np.uint8)
        cv2.fillPoly(expected, [shadow_vertices(row).astype(np.int32)], 1)
        differing += int((mask != expected.astype(bool)).sum())
    assert differing < 0.002 * is_dark.size


def test_number_of_shadows_is_within_its_limits():
    counts = (draw(T.RandomShadow(num_shadows_limit=(2, 4), p=0.5), count=500).records[0].codes >= 0).sum(axis=1)
    assert set(counts.tolist()) == {0, 2, 3, 4}


@pytest.mark.parametrize("size", [(1, 1), (3, 40), (8, 8), (17, 23)])
@pytest.mark.parametrize("channels", [1, 3])
def test_clahe_accepts_sizes_that_are_not_multiples_of_its_grid(size, channels):
    image = np.random.default_rng(1).integers(0, 256, (*size, channels), np.uint8)
    assert apply(T.CLAHE(4, (5, 3), p=1), image).shape == image.shape


@pytest.mark.parametrize(
    "transform",
    [
        T.MotionBlur(p=0.8),
        T.RandomGamma((50, 200), p=0.8),
        T.PlanckianJitter(p=0.8),
        T.GaussianIllumination(p=0.8),
        T.RandomShadow(p=0.8),
        T.CLAHE(p=0.8),
    ],
    ids=lambda transform: type(transform).__name__,
)
@pytest.mark.processes
def test_batches_are_the_same_with_any_number_of_workers_and_after_a_resume(transform):
    images = [gl.Image(np.roll(IMAGE, number, axis=1)) for number in range(12)]
    options = {"transforms": [transform], "device": "cpu", "shuffle": True, "seed": 4}
    expected = list(gl.Loader(images, 4, num_workers=0, **options))
    assert len({image.numpy().tobytes() for batch in expected for image in batch}) == 12
    with gl.Loader(images, 4, num_workers=2, **options) as loader:
        torch.testing.assert_close(list(loader), expected, rtol=0, atol=0)
    loader = gl.Loader(images, 4, num_workers=0, **options)
    iterator = iter(loader)
    next(iterator)
    resumed = gl.Loader(images, 4, num_workers=0, **options)
    resumed.load_state_dict(loader.state_dict())
    torch.testing.assert_close(list(resumed), expected[1:], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: T.PlanckianJitter(temperature_limit=(7000, 9000)),
            "PlanckianJitter(temperature_limit=…) must contain 6000 and lie within 3000 … 15000 for mode='blackbody', "
            "got (7000, 9000)",
        ),
        (lambda: T.PlanckianJitter("cied", (3000, 9000)), "lie within 4000 … 15000 for mode='cied', got (3000, 9000)"),
        (
            lambda: T.RandomShadow((0.5, 0, 0.5, 1)),
            "RandomShadow(shadow_roi=…) must be a box (left, top, right, bottom) with left < right and top < bottom",
        ),
        (lambda: T.RandomGamma(0.5), "RandomGamma(gamma_limit=…) must be (low, high) with low ≤ high, got (1.0, 0.5)"),
        (
            lambda: T.RandomShadow(num_shadows_limit=(3, 1)),
            "RandomShadow(num_shadows_limit=…) must be (low, high) with",
        ),
        (lambda: T.GaussianIllumination(effect_type="dim"), "must be one of 'brighten', 'darken', 'both', got 'dim'"),
    ],
)
def test_lighting_transforms_refuse_invalid_arguments(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()
