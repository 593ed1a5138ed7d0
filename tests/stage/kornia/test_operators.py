"""Kornia's operators are bit-identical to Kornia's functions, and do not change their input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kornia import enhance
from kornia.color import rgb_to_grayscale
from kornia.filters import gaussian_blur2d, motion_blur

from gpuload.stage.kornia.operators import OPERATORS, forward_matrices
from gpuload.transforms.program.ops import VALUES


def make_values(name: str, count: int, seed: int = 1) -> np.ndarray:
    """Return random values of an operation, float64 (count, `VALUES`)."""
    rng = np.random.default_rng(seed)
    values = np.zeros((count, VALUES))
    match name:
        case "hue":
            values[:, 0] = rng.uniform(-0.5, 0.5, count)
        case "solarize" | "solarize_add":
            values[:, 0] = rng.choice([0, 34, 127.5, 255, 256], count)
            values[:, 1] = rng.integers(0, 129, count)
        case "posterize":
            values[:, 0] = rng.integers(0, 9, count)
        case "gamma":
            values[:, 0] = rng.uniform(0.2, 3, count)
        case "white_balance":
            values[:, :2] = rng.uniform(0.1, 1.7, (count, 2))
        case "motion_blur":
            values[:, :2] = 7
            values[:, 2:4] = rng.uniform((0, -1), (360, 1), (count, 2))
        case "clahe":
            values[:, :2] = 4, 3
            values[:, 2] = rng.uniform(1, 6, count)
        case "blur":
            values[:, :2] = 9, 5
            values[:, 2:4] = rng.uniform(0.1, 3, (count, 2))
        case _:
            values[:, 0] = rng.choice([0, 0.3, 0.9, 1, 1.5, 2], count)
    return values


def call_kornia(name: str, images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Apply Kornia's function to the images, as Kornia's documentation shows."""
    factors = torch.tensor(values[:, 0], dtype=torch.float32)
    match name:
        case "brightness":
            return enhance.adjust_brightness_accumulative(images, factors)
        case "contrast":
            return enhance.adjust_contrast_with_mean_subtraction(images, factors)
        case "saturation":
            return enhance.adjust_saturation_with_gray_subtraction(images, factors)
        case "hue":
            return enhance.adjust_hue(images, torch.tensor(values[:, 0] * 2 * math.pi, dtype=torch.float32))
        case "sharpness":
            return enhance.sharpness(images.double(), factors.double()).float()
        case "solarize":
            return enhance.solarize(images, torch.tensor(values[:, 0] / 255, dtype=torch.float32))
        case "solarize_add":
            thresholds, amounts = torch.tensor(values[:, :2] / 255, dtype=torch.float32).T.contiguous()
            return enhance.solarize(images, thresholds, amounts.clamp(max=0.5))
        case "posterize":
            return enhance.posterize(images, factors.to(torch.int64))
        case "equalize":
            return enhance.equalize(images)
        case "autocontrast":
            return enhance.normalize_min_max(images).clamp(0, 1)
        case "invert":
            return enhance.invert(images)
        case "gamma":
            return enhance.adjust_gamma(images, factors)
        case "white_balance":
            red_blue = torch.tensor(values[:, :2], dtype=torch.float32)
            return images * torch.stack([red_blue[:, 0], torch.ones(len(images)), red_blue[:, 1]], 1)[..., None, None]
        case "clahe":
            limits = torch.tensor(values[:, 2], dtype=torch.float32)
            return torch.cat(
                [enhance.equalize_clahe(images[[n]], float(limit), (3, 4)) for n, limit in enumerate(limits)]
            )
        case "grayscale":
            return rgb_to_grayscale(images).expand(-1, 3, -1, -1)
    raise AssertionError(f"this test does not call Kornia for {name!r}")


def random_images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)) / 255


@pytest.mark.parametrize("name", sorted({*OPERATORS} - {"blur", "motion_blur"}))
def test_operators_are_bit_identical_to_kornias_functions(name):
    images, values = random_images(7, 3, 31, 37), make_values(name, 7)
    original = images.clone()
    assert torch.equal(OPERATORS[name](images, values), call_kornia(name, images, values).clamp(0, 1))
    assert torch.equal(images, original)


def test_blur_is_close_to_gaussian_blur2d():
    """The bits differ, because `gaussian_blur2d` convolves several images in another order."""
    images, values = random_images(4, 3, 31, 37), make_values("blur", 4)
    sigmas = torch.tensor(values[:, [3, 2]])
    expected = gaussian_blur2d(images.double(), (5, 9), sigmas).float()
    torch.testing.assert_close(OPERATORS["blur"](images, values), expected, rtol=0, atol=1e-6)


def test_motion_blur_gives_the_numbers_of_kornias_motion_blur():
    """Kornia's angle is counterclockwise."""
    images, values = random_images(4, 3, 31, 37), make_values("motion_blur", 4)
    angles, directions = torch.tensor(values[:, 2:4].T)
    expected = motion_blur(images.double(), 7, -angles, directions, "reflect").float()
    torch.testing.assert_close(OPERATORS["motion_blur"](images, values), expected, rtol=0, atol=1e-6)


@pytest.fixture
def restored_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", OPERATORS)
def test_bits_of_an_operator_do_not_depend_on_its_batch_or_threads(name, restored_threads):
    images, values = random_images(9, 3, 40, 44), make_values(name, 9)
    expected = OPERATORS[name](images, values)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        alone = [OPERATORS[name](images[[row]], values[[row]]) for row in range(9)]
        assert torch.equal(torch.cat(alone), expected)


def test_contrast_of_a_large_image_does_not_depend_on_torchs_threads(restored_threads):
    """torch divides the sum of a single large image among its threads."""
    image, values = random_images(1, 3, 512, 512), make_values("contrast", 2)
    values[:] = 1.7
    torch.set_num_threads(2)
    alone = OPERATORS["contrast"](image, values[:1])
    torch.set_num_threads(1)
    assert torch.equal(OPERATORS["contrast"](image.expand(2, -1, -1, -1), values)[:1], alone)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("size", [(1, 1), (2, 9), (9, 2), (3, 3)])
def test_operators_on_small_images_return_finite_values_in_range(name, size):
    result = OPERATORS[name](random_images(4, 3, *size), make_values(name, 4))
    assert result.shape == (4, 3, *size)
    assert result.isfinite().all()
    assert 0 <= result.min() <= result.max() <= 1


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_gray_images_return_one_channel(name):
    images, values = random_images(4, 1, 12, 13), make_values(name, 4)
    result = OPERATORS[name](images, values)
    assert result.shape == images.shape
    if name in ("hue", "saturation", "grayscale", "white_balance"):
        assert torch.equal(result, images)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_an_image_of_one_level_return_one_level(name):
    result = OPERATORS[name](torch.full((2, 3, 8, 9), 77 / 255), make_values(name, 2))
    assert result.isfinite().all()
    first_channels = slice(None) if name == "white_balance" else slice(1)
    assert ((result - result[:, first_channels, :1, :1]).abs() < 1e-6).all()
    if name == "autocontrast":
        assert (result == 0).all()


def test_blur_wider_than_the_image_mirrors_it_repeatedly():
    images, values = torch.arange(24.0).view(2, 1, 3, 4) / 24, np.zeros((2, VALUES))
    values[:, :4] = 31, 23, 6.0, 4.0
    tiles = torch.cat([images, images.flip(2)[:, :, 1:-1]], 2).repeat(1, 1, 9, 1)
    tiles = torch.cat([tiles, tiles.flip(3)[:, :, :, 1:-1]], 3).repeat(1, 1, 1, 9)
    expected = OPERATORS["blur"](tiles, values)[:, :, 16:19, 24:28]  # the tile in the middle
    torch.testing.assert_close(OPERATORS["blur"](images, values), expected, rtol=0, atol=1e-6)


def test_forward_matrices_invert_the_maps():
    """A shift by 2 pixels to the right and a doubled height move pixel (3, 4) of the image to (5, 8½) of the result."""
    coefficients = np.array([[1.0, 0, -2, 0, 0.5, 0, 0, 0]])
    [matrix] = forward_matrices(coefficients, np.zeros((1, 2), np.int64))
    np.testing.assert_allclose(matrix @ [3, 4, 1], [5, 8.5, 1])
    [matrix] = forward_matrices(coefficients, np.array([[6, 1]]))  # of a window whose top is 6 and whose left is 1
    np.testing.assert_allclose(matrix @ [3, 4, 1], [4, 2.5, 1])
