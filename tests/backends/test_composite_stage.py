"""Chains with transforms that hold others, as the stage applies them."""

from __future__ import annotations

import numpy as np
import pytest

from gpuload import transforms as T
from gpuload.backends import RaggedImages, compile_stage
from gpuload.backends.batched import BatchRunner
from gpuload.backends.finish import Finish
from gpuload.rng import epoch_key

KEY = epoch_key(3, 1)


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
def test_regions_and_batches_give_what_each_image_gives_alone(make_images, make_batch, transforms):
    chain = T.Chain(transforms)
    images = make_images(4, 12)
    ragged, draws = make_batch(chain, images, key=KEY)
    stage = compile_stage(chain, device="cpu")
    results = stage(ragged, draws)
    whole, whole_draws = make_batch(chain, images, whole=True, key=KEY)
    np.testing.assert_array_equal(results, stage(whole, whole_draws))
    batched = results.clone().zero_()
    BatchRunner(Finish.of(chain.lines[0].transforms, None), results.device)(ragged, draws, batched)
    # A level of the two resize kernels is what colours, hue above all, make more of in a few places.
    off = (batched.int() - results.int()).abs()
    assert off.max() <= 8
    assert (off > 1).float().mean() < 0.01
    for row, image in enumerate(images):
        drawn = chain.draw(KEY, np.array([row]), np.array([image.shape[:2]]))
        alone = stage(RaggedImages.from_arrays([image]), drawn)
        np.testing.assert_array_equal(alone[0], results[row])
