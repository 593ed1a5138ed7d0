"""Color operations are equal or close to Pillow's on random images and extreme levels, in batches and one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity.color import PILLOW_OPERATIONS
from PIL import Image

from gpuload import transforms as T
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.color import ADJUST, single_colors
from gpuload.stage.reference.operations import OPERATIONS, image_operations
from gpuload.transforms.program.ops import VALUES, Ops, code

# Round factors, which users write, and RandAugment's factors. Their products with differences of levels are close to
# integers, so that truncation reveals an error in the last bit, which random factors hardly ever reveal.
TENTHS = [tenth / 10 for tenth in range(41)]
RANDAUGMENT_FACTORS = [1 + sign * strength for strength in torch.linspace(0, 0.9, 31).tolist() for sign in (1, -1)]
BLENDING = ("brightness", "contrast", "saturation", "sharpness")
FACTORS = {name: [*TENTHS, *RANDAUGMENT_FACTORS] for name in BLENDING} | {"hue": [step / 20 for step in range(-10, 11)]}
# The greatest difference of a level from Pillow's, and the greatest share of an image's levels that differ. Contrast's
# mean may round to another level, and its guard moves blends that are just below an integer: 2% of an image's levels
# with a factor of 1.2, fewer with 2.4, and none with all other factors. Pillow rounds hue and saturation to 8 bits in
# between, and a step of the hue is up to 6 levels.
LIMITS = {"contrast": (1, 0.03), "hue": (6, 0.01)}
EXACT = (0, 0)


def apply_pillow(image: np.ndarray, name: str, factor: float) -> np.ndarray:
    return np.asarray(PILLOW_OPERATIONS[name](Image.fromarray(image), [factor]))


def gray_and_blue_pairs() -> np.ndarray:
    """Return an image with almost all pairs of a gray level and a level of blue that a color can have."""
    blue, gray = np.meshgrid(np.arange(256), np.arange(256))
    red = np.clip(np.rint((gray - 0.114 * blue) / 0.886), 0, 255)
    return np.stack([red, red, blue], axis=-1).astype(np.uint8)


def varied_images(make_images) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)
    few_levels = rng.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), (64, 48, 3))
    gray = np.repeat(noise[..., :1], 3, axis=2)
    return [*make_images(0, 3), noise, few_levels, gray, gray_and_blue_pairs()]


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("runner", ["single", "batched"])
def test_round_factors_give_the_levels_of_pillow(make_images, name, runner):
    operations = image_operations()[code(name)]
    max_difference, max_share = LIMITS.get(name, EXACT)
    for image in varied_images(make_images):
        canvas = Canvas()
        for factor in FACTORS[name]:
            values = np.array([[factor] + [0.0] * (VALUES - 1)])
            canvas.set(image)
            if runner == "single":
                operations(canvas, values[0].tolist())
                levels = canvas.floats().array
            else:
                levels = OPERATIONS[name](canvas.floats().tensor[None], values)[0].numpy()
            difference = abs(levels.transpose(1, 2, 0) - apply_pillow(image, name, factor).astype(np.float32))
            assert difference.max() <= max_difference, factor
            assert (difference > 0).mean() <= max_share, factor


@pytest.mark.exhaustive
def test_saturation_with_any_round_factor_gives_the_levels_of_pillow():
    """Factors are all hundredths up to 4.2, and RandAugment's: each color is blended with its gray level."""
    image = gray_and_blue_pairs()
    for factor in [*(step / 100 for step in range(421)), *RANDAUGMENT_FACTORS]:
        levels = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None].contiguous()
        ADJUST["saturation"](levels, factor)
        np.testing.assert_array_equal(
            levels[0].permute(1, 2, 0), apply_pillow(image, "saturation", factor), str(factor)
        )


def test_color_operations_keep_levels_integers_in_range(make_images):
    operations = single_colors()
    for image in varied_images(make_images):
        canvas = Canvas()
        canvas.set(image)
        for name, factor in (("hue", 0.3), ("contrast", 2.0), ("saturation", 2.0), ("brightness", 1.7), ("hue", -0.2)):
            operations[name](canvas, [factor])
            floats = canvas.floats()
            assert (floats.array == np.floor(floats.array)).all()
            assert 0 <= floats.array.min() <= floats.array.max() <= 255


def test_saturation_and_hue_keep_gray_images_and_contrast_changes_them_like_pillow(make_images):
    image = make_images(1, 1, 1)[0]
    canvas = Canvas()
    canvas.set(image)
    for name in ("saturation", "hue"):
        single_colors()[name](canvas, [0.3])
        np.testing.assert_array_equal(canvas.image(), image)
    single_colors()["contrast"](canvas, [1.4])
    expected = apply_pillow(image[..., 0], "contrast", 1.4)
    assert abs(canvas.floats().array[0] - expected.astype(np.float32)).max() <= 1


def test_adjust_of_a_batch_is_bit_identical_to_each_image(make_images):
    images = torch.stack([torch.from_numpy(image[:30, :30]) for image in make_images(2, 6)]).permute(0, 3, 1, 2).float()
    for name in ADJUST:
        factors = torch.linspace(min(FACTORS[name]), max(FACTORS[name]), 6).view(6, 1, 1, 1)
        batch = images.clone()
        ADJUST[name](batch, factors)
        for row in range(6):
            alone = images[row : row + 1].clone()
            ADJUST[name](alone, factors[row : row + 1])
            assert torch.equal(alone[0], batch[row])


def test_contrast_at_the_edge_of_a_level_is_the_same_on_both_runners():
    """Both runners must compute the sum in the same order, because its last bit decides between 79 and 80."""
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
    single, batched = (
        compile_stage(chain, device="cpu", runner=runner)(images, draws) for runner in ("single", "batched")
    )
    assert set(single[:, 0, 0, 0].tolist()) == {79, 80}
    assert torch.equal(single, batched)
