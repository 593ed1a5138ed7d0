"""Chains are close to their transforms applied one by one, by Pillow, to the complete image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity.color import operations_oracle
from parity.geometry import geometry_oracle
from PIL import Image

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import compile_stage
from gpuload.transforms.program.ops import Ops

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def apply_by_pillow(transform, params, row: int, image: np.ndarray) -> np.ndarray:
    """Apply one transform to one image, by Pillow if the image is uint8, and otherwise in float64."""
    if isinstance(transform, T.ToDtype):
        return image / (255 if transform.scale else 1)
    if isinstance(transform, T.Normalize):
        return (image / (255 if image.dtype == np.uint8 else 1) - transform.mean) / transform.std
    if image.dtype != np.uint8:  # after a conversion to float, chains have only flips
        return image[:, ::-1] if params.flipped[row] else image
    oracle = operations_oracle if isinstance(params, Ops) else geometry_oracle
    return oracle(image, [(transform, params)], row)


def results_by_pillow(chain: T.Chain, draws: T.Program, images) -> list[np.ndarray]:
    results = []
    for row, array in enumerate(images):
        image = array
        for index, transform in enumerate(chain):
            image = apply_by_pillow(transform, draws.records[index], row, image)
        results.append(np.asarray(image, np.float64))
    return results


def to_float64_hwc(tensor: torch.Tensor) -> np.ndarray:
    return tensor.permute(1, 2, 0).to(torch.float64).numpy()


@pytest.mark.slow
def test_evaluation_recipe_on_photographs_is_within_two_levels_of_pillow(photo_arrays, make_batch):
    chain = T.Chain([T.Resize(256), T.CenterCrop(224)])
    ragged, draws = make_batch(chain, photo_arrays)
    result = compile_stage(chain, device="cpu")(ragged, draws)
    for row, array in enumerate(photo_arrays):
        height, width = draws.records[0].output_hw[row].tolist()
        top, left = round((height - 224) / 2), round((width - 224) / 2)
        resized = Image.fromarray(array).resize((width, height), Image.BILINEAR)
        expected = np.asarray(resized)[top : top + 224, left : left + 224].astype(int)
        assert abs(to_float64_hwc(result[row]) - expected).max() <= 2
    assert (ragged.shapes[:, :2] < ragged.sizes_hw).any(axis=1).all(), "an entire image was decoded"


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_recipe_on_photographs_is_within_two_levels_of_pillow(photo_arrays, make_batch, interpolation):
    chain = T.Chain([T.RandomResizedCrop(224, interpolation=interpolation), T.RandomHorizontalFlip()])
    ragged, draws = make_batch(chain, photo_arrays[:48])
    result = compile_stage(chain, device="cpu")(ragged, draws)
    for image, expected in zip(result, results_by_pillow(chain, draws, photo_arrays[:48]), strict=True):
        assert abs(to_float64_hwc(image) - expected).max() <= 2


def random_chain(rng: np.random.Generator) -> T.Chain:
    """Make a chain of one to five random transforms, a conversion, and sometimes a flip after it."""
    interpolation = str(rng.choice(["nearest", "bilinear", "bicubic"]))
    side, other_side = (int(number) for number in rng.integers(8, 70, 2))
    mode = str(rng.choice(["constant", "edge", "reflect", "symmetric"]))
    candidates = [
        T.Resize(side, interpolation),
        T.Resize((side, other_side), interpolation),
        T.CenterCrop((side, other_side)),
        T.RandomCrop(side, padding=int(rng.integers(0, 9)), pad_if_needed=True, fill=(9, 99, 199), padding_mode=mode),
        T.RandomResizedCrop((side, other_side), interpolation=interpolation),
        T.RandomHorizontalFlip(),
        T.RandomVerticalFlip(),
        T.ColorJitter(0.3),
        T.ColorJitter(0.3, 0.3, 0.3),
    ]
    chosen = [candidates[i] for i in rng.choice(len(candidates), rng.integers(1, 6))]
    conversions = [[], [NORMALIZE], [T.ToDtype("float32")], [T.ToDtype("float32", scale=True), NORMALIZE]]
    return T.Chain(
        [*chosen, *conversions[rng.integers(4)], *([T.RandomHorizontalFlip()] if rng.random() < 0.2 else [])]
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_chains_are_close_to_pillow_and_identical_for_decoded_regions(seed, make_images, make_batch):
    rng = np.random.default_rng(seed)
    chain, images = random_chain(rng), make_images(seed, 5)
    ragged, draws = make_batch(chain, images, key=epoch_key(seed, 0))
    stage = compile_stage(chain, device="cpu", ragged="list")
    results = stage(ragged, draws)
    level_size = np.ptp(values_of_0_and_1(chain))
    # Each resampling is within a level of Pillow's, and later transforms may amplify the difference.
    resizes = sum(isinstance(transform, T.Resize | T.RandomResizedCrop) for transform in chain)
    jitters = sum(isinstance(transform, T.ColorJitter) for transform in chain)
    limit = (1 + resizes) * 1.7**jitters + jitters
    for image, expected in zip(results, results_by_pillow(chain, draws, images), strict=True):
        difference = abs(to_float64_hwc(image) - expected) / level_size
        assert difference.shape == expected.shape
        assert difference.max() <= limit, chain
        assert difference.mean() <= 0.03 * (1 + resizes) * (1 + jitters), chain

    # The results of decoded regions are bit-identical to those of complete images.
    results_uncut = stage(*make_batch(chain, images, uncut=True, key=epoch_key(seed, 0)))
    torch.testing.assert_close(results, results_uncut, rtol=0, atol=0)

    # Batched operations, which run on CUDA, are within the same limit.
    results_batched = compile_stage(chain, device="cpu", ragged="list", runner="batched")(ragged, draws)
    for image, expected in zip(results_batched, results_by_pillow(chain, draws, images), strict=True):
        assert abs(to_float64_hwc(image) - expected).max() / level_size <= limit, chain


def values_of_0_and_1(chain: T.Chain) -> np.ndarray:
    """Return the values of the levels 0 and 1 after the chain's conversions, in the first channel."""
    image = np.array([[[0] * 3], [[1] * 3]], np.uint8)
    for transform in chain:
        if isinstance(transform, T.ToDtype | T.Normalize):
            image = apply_by_pillow(transform, None, 0, image)
    return np.asarray(image, np.float64)[:, 0, 0]
