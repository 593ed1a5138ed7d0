"""The stage applies chains with containers, such as RandomApply, independently of batches and regions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage

KEY = epoch_key(3, 1)
SMALL_CROP = T.RandomResizedCrop(16, (0.1, 0.3))


@pytest.mark.parametrize(
    "transforms",
    [
        [T.RandomApply([T.RandomResizedCrop(24)], p=0.5), T.Resize((16, 16))],
        [T.RandomChoice([T.RandomCrop(24), T.Compose([T.Resize(30), T.CenterCrop(24)])]), T.ColorJitter(0.4, 0.4)],
        [T.Resize((40, 44)), T.RandomOrder([T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomHorizontalFlip()])],
        [T.RandomOrder([T.RandomCrop(26), T.RandomHorizontalFlip(), T.RandomVerticalFlip()]), T.RandomCrop((20, 24))],
        [T.RandomApply([T.ColorJitter(contrast=0.5)]), T.CenterCrop(20)],
        [T.RandomApply([T.RandomApply([T.ColorJitter(0.5)]), T.RandomVerticalFlip()], 0.7), T.RandomResizedCrop(20)],
    ],
)
def test_image_in_containers_has_the_same_bits_decoded_as_a_region_in_a_batch_or_alone(
    make_images, make_batch, transforms
):
    chain = T.Chain(transforms)
    images = make_images(4, 12)
    ragged, draws = make_batch(chain, images, key=KEY)
    stage = compile_stage(chain, device="cpu")
    results = stage(ragged, draws)
    uncut, uncut_draws = make_batch(chain, images, uncut=True, key=KEY)
    np.testing.assert_array_equal(results, stage(uncut, uncut_draws))
    batched = compile_stage(chain, device="cpu", runner="batched")(ragged, draws)
    # The two resize kernels differ by a level, which color transforms, above all hue, amplify in a few places.
    difference = (batched.int() - results.int()).abs()
    assert difference.max() <= 8
    assert (difference > 1).float().mean() < 0.01
    for row, image in enumerate(images):
        image_draws = chain.draw(KEY, np.array([row]), np.array([image.shape[:2]]))
        alone = stage(RaggedImages.from_arrays([image]), image_draws)
        np.testing.assert_array_equal(alone[0], results[row])


@pytest.mark.parametrize(
    "transforms",
    [
        [T.RandomApply([T.RandomZoomOut(0, (1, 3), 1.0), T.RandomAffine(20), T.Resize((24, 24))], 1.0)],
        [T.Resize((20, 20)), T.RandomApply([T.RandomRotation(40, expand=True), T.Resize((20, 20))], 1.0)],
        [T.RandomApply([T.RandomResize(20, 40), T.GaussianBlur(3), T.Resize((24, 24))], 1.0)],
        [T.RandomApply([T.RandomRotation(0), T.RandomChoice([SMALL_CROP, T.Resize((16, 16))])], 1.0)],
        [T.RandomApply([T.RandomCrop(20), T.RandomPerspective(0.5), SMALL_CROP], 0.9), T.Resize((16, 16))],
    ],
)
def test_batched_runner_applies_a_branch_within_which_sizes_differ(transforms):
    chain = T.Chain(transforms)
    noise = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3), np.uint8)
    images = [np.ascontiguousarray(image.repeat(5, axis=0).repeat(5, axis=1)) for image in noise]
    ragged = RaggedImages.from_arrays(images)
    draws = chain.draw(KEY, np.arange(8), ragged.sizes_hw)
    results = compile_stage(chain, device="cpu")(ragged, draws)
    assert isinstance(results, torch.Tensor)
    batched = compile_stage(chain, device="cpu", runner="batched")(ragged, draws)
    assert (batched.int() - results.int()).abs().max() <= 2


@pytest.mark.parametrize("flip", [T.RandomVerticalFlip, T.RandomHorizontalFlip])
@pytest.mark.parametrize("size_hw", [(1, 30), (30, 1), (1, 1)])
def test_resize_of_a_flipped_thin_image_equals_resizing_the_mirrored_image(flip, size_hw):
    image = np.random.default_rng(0).integers(0, 256, (*size_hw, 3), np.uint8)
    mirrored = image[::-1] if flip is T.RandomVerticalFlip else image[:, ::-1]

    def run(transforms, array):
        chain, ragged = T.Chain(transforms), RaggedImages.from_arrays([np.ascontiguousarray(array)])
        return compile_stage(chain, device="cpu")(ragged, chain.draw(KEY, np.arange(1), ragged.sizes_hw))

    np.testing.assert_array_equal(run([flip(1.0), T.Resize((8, 8))], image), run([T.Resize((8, 8))], mirrored))


def test_noise_of_a_pixel_does_not_depend_on_the_region_needed():
    image = np.full((30, 40, 3), 100, np.uint8)
    ragged = RaggedImages.from_arrays([image])

    def run(transforms, view=0):
        chain = T.Chain(transforms)
        draws = chain.draw(KEY, np.arange(1), ragged.sizes_hw, view=view)
        return np.asarray(compile_stage(chain, device="cpu")(ragged, draws, view=view))

    entire = run([T.GaussianNoise()])
    np.testing.assert_array_equal(run([T.GaussianNoise(), T.CenterCrop(10)]), entire[:, :, 10:20, 15:25])
    views = [T.GaussianNoise(), T.MultiView([[T.CenterCrop(10)], [T.CenterCrop(20)]])]
    np.testing.assert_array_equal(run(views, 0), run(views, 1)[:, :, 5:15, 5:15])
