"""Colour against Pillow, on random images and extremes: the batched arithmetic and the one for single images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from gpuload import transforms as T
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.color import ADJUST, single_colors
from gpuload.transforms.program.ops import VALUES, Ops, code

FACTORS = {
    "brightness": [0.0, 0.37, 0.5, 1.0, 1.4, 3.0],
    "contrast": [0.0, 0.37, 0.5, 1.0, 1.4, 3.0],
    "saturation": [0.0, 0.37, 0.5, 1.0, 1.4, 3.0],
    "hue": [-0.5, -0.13, 0.0, 0.1, 0.25, 0.5],
}
# The most that a level may be away from Pillow's, and on how many of them. A mean or a product that falls on a whole
# number within rounding can go to either side; the hue and the saturation that Pillow rounds down to 8 bits likewise,
# and a step of the hue is up to 6 levels.
LIMITS = {"brightness": (0, 0), "contrast": (3, 0.002), "saturation": (1, 0.001), "hue": (6, 0.01)}


def pillow(image: np.ndarray, name: str, factor: float) -> np.ndarray:
    picture = Image.fromarray(image)
    if name == "hue":
        hue, saturation, value = picture.convert("HSV").split()
        turned = (np.asarray(hue).astype(np.int32) + int(factor * 255)).astype(np.uint8)
        return np.asarray(Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB"))
    enhancer = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}[name]
    return np.asarray(getattr(ImageEnhance, enhancer)(picture).enhance(factor))


def pictures(make_images) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)
    few = rng.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), (64, 48, 3))
    grey = np.repeat(noise[..., :1], 3, axis=2)
    return [*make_images(0, 3), noise, few, grey]


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("tuned", [False, True])
def test_against_pillow(make_images, name, tuned):
    single = single_colors()
    for image in pictures(make_images):
        for factor in FACTORS[name]:
            canvas = Canvas()
            canvas.set(image)
            if tuned:
                single[name](canvas, [factor])
            else:
                ADJUST[name](canvas.floats().tensor[None], torch.full((1, 1, 1, 1), factor))
            difference = abs(canvas.floats().array.transpose(1, 2, 0) - pillow(image, name, factor).astype(np.float32))
            most, share = LIMITS[name]
            assert difference.max() <= most
            assert (difference > 0).mean() <= share


def test_levels_stay_whole_numbers_in_range(make_images):
    single = single_colors()
    for image in pictures(make_images):
        canvas = Canvas()
        canvas.set(image)
        for name, factor in (("hue", 0.3), ("contrast", 2.0), ("saturation", 2.0), ("brightness", 1.7), ("hue", -0.2)):
            single[name](canvas, [factor])
            floats = canvas.floats()
            assert (floats.array == np.floor(floats.array)).all()
            assert 0 <= floats.array.min() <= floats.array.max() <= 255


def test_grey_images_keep_their_colour(make_images):
    image = make_images(1, 1, 1)[0]
    canvas = Canvas()
    canvas.set(image)
    for name in ("saturation", "hue"):
        single_colors()[name](canvas, [0.3])
        np.testing.assert_array_equal(canvas.image(), image)
    single_colors()["contrast"](canvas, [1.4])
    expected = np.asarray(ImageEnhance.Contrast(Image.fromarray(image[..., 0])).enhance(1.4))
    assert abs(canvas.floats().array[0] - expected.astype(np.float32)).max() <= 1


def test_a_batch_is_its_images(make_images):
    images = torch.stack([torch.from_numpy(image[:30, :30]) for image in make_images(2, 6)]).permute(0, 3, 1, 2).float()
    for name, (low, *_, high) in FACTORS.items():
        factors = torch.linspace(low, high, 6).view(6, 1, 1, 1)
        together = images.clone()
        ADJUST[name](together, factors)
        for row in range(6):
            alone = images[row : row + 1].clone()
            ADJUST[name](alone, factors[row : row + 1])
            assert torch.equal(alone[0], together[row])


def test_contrast_at_the_edge_of_a_level_is_the_same_on_both_runners():
    """What is added to a level is worked out alike: a last bit decides here between 79 and 80."""
    image = np.repeat(np.array([[79, 91]], np.uint8), 3, axis=0)[:, :, None].repeat(3, axis=2)  # its mean is 85
    factors = (5 + 1e-4) / 6 + np.arange(-200, 200) * 1e-8  # 85 + (79 - 85) · factor, and the guard, is about 80
    transform = T.ColorJitter(contrast=0.5)
    values = np.zeros((len(factors), 1, VALUES))
    values[:, 0, 0] = factors
    sizes = np.broadcast_to(np.array(image.shape[:2], np.int64), (len(factors), 2))
    record = Ops(np.full((len(factors), 1), code("contrast"), np.int64), values, sizes_hw=sizes)
    draws = T.Program((record,), sizes, sizes)
    images = RaggedImages.from_arrays([image] * len(factors))
    chain = T.Chain([transform])
    one, other = (compile_stage(chain, device="cpu", runner=runner)(images, draws) for runner in ("single", "batched"))
    assert set(one[:, 0, 0, 0].tolist()) == {79, 80}
    assert torch.equal(one, other)
