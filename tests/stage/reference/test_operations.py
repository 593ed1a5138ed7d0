"""Color transforms give the same results on both runners, for images of any size with one or three channels."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from chains.bounds import bound, steps_on_cuda
from PIL import Image, ImageOps
from scipy import stats
from transforms.specs import SPECS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.reference.blur import WEIGHT_SCALE, blur_weights, mirrored_indices
from gpuload.stage.reference.color import equalize_table, stretch_table

RUNNERS = ("single", "batched")
TO_FLOAT = T.ToDtype("float32", scale=True)


@pytest.fixture
def run_both(run_stage):
    def run(transforms, images) -> list[list[np.ndarray]]:
        """Return the results of both runners, lists of C×H×W arrays."""
        results = (run_stage(transforms, images, ragged="list", runner=runner) for runner in RUNNERS)
        return [[image.numpy() for image in result] for result in results]

    return run


@pytest.mark.parametrize("runner", [0, 1], ids=["single", "batched"])
@pytest.mark.parametrize(("mean", "sigma"), [(0.0, 0.1), (0.08, 0.03)])
def test_noise_has_the_distribution_of_torchvisions(run_both, runner, mean, sigma):
    images = [np.full((100, 120, 3), 128, np.uint8)] * 2
    first_image, second_image = run_both([T.GaussianNoise(mean, sigma)], images)[runner]
    [[_, correlation], _] = np.corrcoef(first_image.ravel(), second_image.ravel())
    assert abs(correlation) < 4 / first_image.size**0.5  # four standard deviations
    # torchvision truncates the noise to integers before it adds it to uint8 images.
    numbers = np.random.default_rng(0).standard_normal(first_image.size)
    expected = np.clip(128 + np.trunc(mean * 255 + numbers * sigma * 255), 0, 255)
    table = np.array([np.bincount(levels.astype(int).ravel(), minlength=256) for levels in (first_image, expected)])
    assert stats.chi2_contingency(table[:, table.min(axis=0) >= 5]).pvalue > 0.01


@pytest.mark.parametrize(
    "transform",
    [T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomGrayscale(1), T.RandomPhotometricDistort(p=1), T.GaussianNoise()],
    ids=lambda transform: type(transform).__name__,
)
def test_color_transform_of_a_gray_image_keeps_one_channel(make_images, run_both, transform):
    """As in torchvision, saturation, hue and the order of channels do not change a gray image."""
    images = make_images(2, 3, channels=1)
    single_images, batched_images = run_both([transform], images)
    for image, single, batched in zip(images, single_images, batched_images, strict=True):
        assert single.shape == (1, *image.shape[:2])
        np.testing.assert_array_equal(single, batched)
    if isinstance(transform, T.RandomGrayscale):
        np.testing.assert_array_equal(single_images[0][0], images[0][:, :, 0])


def test_color_transform_of_four_channels_raises(make_images, run_both):
    text = r"Grayscale takes images with 1 or 3 channels, but .* has 4; drop or convert channels"
    with pytest.raises(ValueError, match=text):
        run_both([T.Grayscale()], make_images(0, 2, channels=4))


@pytest.mark.parametrize("channels_before", [1, 3])
@pytest.mark.parametrize("channels_after", [1, 3])
def test_grayscale_gives_the_requested_number_of_channels(
    make_images, run_both, run_stage, channels_before, channels_after
):
    images, normalize = make_images(3, 4, channels_before), T.Normalize([0.5] * channels_after, [0.2] * channels_after)
    resized = [T.Grayscale(channels_after), T.RandomHorizontalFlip(1), T.Resize((20, 24)), T.ColorJitter(0.4, 0.4)]
    for transforms in ([T.Grayscale(channels_after)], resized):
        single_images, batched_images = run_both([*transforms, normalize], images)
        assert {image.shape[0] for image in single_images} == {channels_after}
        for single, batched in zip(single_images, batched_images, strict=True):
            assert abs(single - batched).max() * 0.2 * 255 <= 2 + 1e-3  # resized within a level, which jitter amplifies
            assert (single == single[:1]).all()
    result = run_stage(resized, images, memory_format="channels_last")
    assert isinstance(result, torch.Tensor)
    assert result.shape == (4, channels_after, 20, 24)
    np.testing.assert_array_equal(result[1].numpy(), run_both(resized, images)[0][1])


def test_normalize_that_does_not_match_the_channels_after_grayscale_raises(make_images, run_both):
    text = r"Normalize has 3 means and stds, but .* after all transforms has 1 channel; give a mean and a std for each"
    with pytest.raises(ValueError, match=text):
        run_both([T.Grayscale(), T.Normalize([0.5] * 3, [0.5] * 3)], make_images(0, 2))


def test_grayscale_within_random_apply_that_would_change_channels_raises(make_images, run_both):
    chain = [T.RandomApply([T.Grayscale(3)], p=1.0)]
    assert run_both(chain, make_images(0, 1))[0][0].shape[0] == 3
    text = "RandomApply contains Grayscale(num_output_channels=3), which would change the number of channels of"
    with pytest.raises(ValueError, match=re.escape(text)):
        run_both(chain, make_images(0, 1, channels=1))


def test_solarize_threshold_is_on_the_scale_of_its_image(make_images, run_both):
    chains = (
        [T.RandomSolarize(127.5, 1), TO_FLOAT],
        [TO_FLOAT, T.RandomSolarize(0.5, 1)],
        [TO_FLOAT, T.RandomApply([T.RandomSolarize(0.5, 1)], 1.0)],
    )
    results = [run_both(chain, make_images(5, 4))[0] for chain in chains]
    for levels, scaled, nested in zip(*results, strict=True):
        np.testing.assert_array_equal(levels, scaled)
        np.testing.assert_array_equal(levels, nested)


COLOR_TRANSFORMS = [
    eval(spec.code) for spec in SPECS.values() if spec.code and spec.parity and spec.parity[0].topic == "color"
]


@pytest.mark.parametrize("transform", COLOR_TRANSFORMS, ids=lambda transform: type(transform).__name__)
def test_color_transform_gives_the_same_bits_in_regions_and_alone(make_images, make_batch, transform):
    chain = T.Chain([T.RandomResizedCrop(40), transform, T.RandomHorizontalFlip(), T.RandomCrop((25, 31))])
    for images in (make_images(1, 6), make_images(1, 3, channels=1)):
        stage = compile_stage(chain, device="cpu")
        result = stage(*make_batch(chain, images))
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, stage(*make_batch(chain, images, uncut=True)))
        alone = stage(*make_batch(chain, images[2:3], first=2))
        assert torch.equal(alone[0], result[2])


@pytest.mark.parametrize("transform", COLOR_TRANSFORMS, ids=lambda transform: type(transform).__name__)
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 2), (3, 1), (3, 3)])
def test_color_transform_of_tiny_images_is_the_same_on_both_runners(run_both, transform, size):
    images = [np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8) for seed in range(12)]
    single_images, batched_images = run_both([transform], images)
    for single, batched in zip(single_images, batched_images, strict=True):
        assert single.shape[1:] == size
        np.testing.assert_array_equal(single, batched)


@pytest.mark.slow
def test_stretch_table_equals_pillows_autocontrast_for_all_ranges():
    for lowest in range(256):
        highest = np.arange(lowest, 256)
        ends = torch.from_numpy(np.stack([np.full_like(highest, lowest), highest]).astype(np.float64))
        tables = stretch_table(*ends).numpy()
        for row, level in enumerate(highest.tolist()):
            ramp = np.arange(lowest, level + 1, dtype=np.uint8)[None]
            expected = np.asarray(ImageOps.autocontrast(Image.fromarray(ramp)))[0]
            np.testing.assert_array_equal(tables[row, lowest : level + 1], expected)


@pytest.mark.parametrize("seed", range(40))
def test_equalize_table_equals_pillows_table_for_any_histogram(seed):
    rng = np.random.default_rng(seed)
    size = tuple(rng.integers(1, 60, 2))
    deviation = rng.choice([0.5, 5, 50, 500])
    image = np.clip(rng.normal(rng.uniform(0, 255), deviation, size), 0, 255).astype(np.uint8)
    table = equalize_table(torch.from_numpy(np.bincount(image.ravel(), minlength=256))).numpy()
    np.testing.assert_array_equal(table[image], np.asarray(ImageOps.equalize(Image.fromarray(image))))


@pytest.mark.parametrize(
    ("width", "sigma"), [(1, 2.0), (3, 0.1), (3, 0.8), (23, 0.1), (23, 2.0), (101, 30.0), (7, 1e6)]
)
def test_blur_weights_are_integers_that_sum_to_weight_scale(width, sigma):
    weights = blur_weights(width, sigma)
    assert weights.sum() == WEIGHT_SCALE
    assert (weights == np.floor(weights)).all()
    assert (weights == weights[::-1]).all()
    assert len(weights) <= width
    density = np.exp(-0.5 * ((np.arange(width) - width // 2) / sigma) ** 2)
    density = density[(width - len(weights)) // 2 :][: len(weights)] / density.sum()
    # Each weight is rounded, and the weight in the middle compensates for the sum of the rounding errors.
    assert abs(np.delete(weights / WEIGHT_SCALE - density, len(weights) // 2)).max(initial=0) <= 0.5 / WEIGHT_SCALE
    assert abs(weights / WEIGHT_SCALE - density).max() <= 0.5 * width / WEIGHT_SCALE


def test_mirrored_indices_reflect_repeatedly():
    assert mirrored_indices(4, 3).tolist() == [3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    assert mirrored_indices(2, 3).tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert mirrored_indices(1, 2).tolist() == [0] * 5


def test_blurs_with_different_kernels_in_a_batch_are_the_same_on_both_runners(make_images, run_both):
    blurs = [T.GaussianBlur(3, 0.8), T.GaussianBlur((9, 5), (1, 4)), T.GaussianBlur(21, 6)]
    images = make_images(4, 10)
    single_images, batched_images = run_both([T.RandomChoice(blurs)], images)
    for image, single, batched in zip(images, single_images, batched_images, strict=True):
        np.testing.assert_array_equal(single, batched)
        assert (single != image.transpose(2, 0, 1)).any()


@pytest.mark.cuda
@pytest.mark.parametrize("transform", COLOR_TRANSFORMS, ids=lambda transform: type(transform).__name__)
def test_color_levels_on_cuda_differ_from_the_cpus_within_bounds(make_images, make_batch, transform):
    chain = T.Chain([T.CenterCrop((50, 40)), transform])
    ragged, draws = make_batch(chain, make_images(6, 70))
    expected = compile_stage(chain, device="cpu")(ragged, draws)
    stage = compile_stage(chain, device="cuda")
    result = stage(replace(ragged, pixels=ragged.pixels.cuda()), draws)
    assert isinstance(expected, torch.Tensor)
    assert isinstance(result, torch.Tensor)
    difference = (result.cpu().int() - expected.int()).abs()
    steps = steps_on_cuda(stage.plan.backend_of(type(transform).__name__))
    allowed = torch.tensor([bound(steps, draws, row) for row in range(70)])
    assert (difference.amax(dim=(1, 2, 3)) <= allowed).all()
    assert difference.float().mean() <= 0.05


@pytest.mark.parametrize("turns", [0.2, np.nextafter(0.2, 0), -0.2, np.nextafter(-0.2, 0), 51 / 255, 0.1])
def test_hue_next_to_an_integer_step_is_the_same_on_both_runners(turns):
    image = np.random.default_rng(0).integers(0, 256, (9, 11, 3), np.uint8)
    chain = T.Chain([T.ColorJitter(hue=(turns, turns))])
    ragged = RaggedImages.from_arrays([image, image])
    draws = chain.draw(epoch_key(0, 0), np.arange(2), ragged.sizes_hw)
    draws.records[0].values[:, 0, 0] = turns  # low + u (high - low) may round
    single, batched = (compile_stage(chain, device="cpu", runner=runner)(ragged, draws) for runner in RUNNERS)
    assert torch.equal(single, batched)
