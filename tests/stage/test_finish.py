"""Erasing, flips after erasing, and mixing of resampled and converted images give the same results on both runners."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy import stats

from gpuload import transforms as T
from gpuload.batches.mixing import partners_of
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.finish import _mix, _mix_batched, random_numbers
from gpuload.stage.masks import MaskStage
from gpuload.stage.noise import batch_normals

KEY = epoch_key(3, 1)
NORMALIZE = T.Normalize((0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
TO_FLOAT = T.ToDtype("float32", scale=True)
TWO_VALUES_ERROR = "RandomErasing(value=(1.0, 2.0)) has 2 values, but image 0 has "
ERASING = T.RandomErasing(1.0, (0.5, 0.6), value=(1, 2, 3))


def draw(chain: T.Chain, images: list[np.ndarray]) -> tuple[RaggedImages, T.Program]:
    ragged = RaggedImages.from_arrays(images)
    return ragged, chain.draw(KEY, np.arange(len(images)), ragged.sizes_hw)


def run_both_runners(chain: T.Chain, ragged: RaggedImages, draws: T.Program, **options) -> torch.Tensor:
    """Return the stage's result, and check that both runners give the same result."""
    result = compile_stage(chain, device="cpu", **options)(ragged, draws)
    assert isinstance(result, torch.Tensor)
    result_batched = compile_stage(chain, device="cpu", runner="batched", **options)(ragged, draws)
    torch.testing.assert_close(result_batched, result, rtol=0, atol=0)
    return result


@pytest.mark.parametrize(
    "transforms",
    [
        [T.CenterCrop((38, 40)), T.RandomErasing(0.9, value=(1, 2, 3), max_count=3), T.RandomCrop((20, 24)), NORMALIZE],
        [T.CenterCrop((38, 40)), T.RandomErasing(0.9, value=7), T.RandomHorizontalFlip(), T.RandomCrop(16)],
        [T.RandomCrop(26), T.RandomApply([T.RandomErasing(0.9, value=200)], 0.6), TO_FLOAT],
        [T.RandomCrop(26), T.RandomOrder([T.RandomErasing(0.9, value=200), T.ColorJitter(0.5), T.RandomCrop(20)])],
        [T.RandomCrop(26), TO_FLOAT, T.RandomErasing(0.9, value=0.25), T.CenterCrop(18), NORMALIZE],
        [T.RandomCrop(26), NORMALIZE, T.RandomErasing(0.9, value="random"), T.RandomHorizontalFlip()],
        [T.RandomCrop(26), NORMALIZE, T.RandomOrder([T.RandomErasing(0.8), T.RandomVerticalFlip(), T.Identity()])],
        [T.RandomCrop(26), NORMALIZE, T.RandomChoice([T.RandomErasing(1, mode="rand"), T.RandomErasing(1, value=3)])],
    ],
)
@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_erased_image_has_the_same_bits_decoded_as_a_region_in_a_batch_or_alone(
    make_images, make_batch, transforms, layout
):
    chain = T.Chain(transforms)
    images = make_images(5, 9, low=40)
    ragged, draws = make_batch(chain, images, key=KEY)
    pixels_before = ragged.pixels.clone()
    result = run_both_runners(chain, ragged, draws, memory_format=layout)
    assert torch.equal(ragged.pixels, pixels_before)  # the ring is only read
    uncut = make_batch(chain, images, uncut=True, key=KEY)
    assert torch.equal(run_both_runners(chain, *uncut), result)
    for row, image in enumerate(images):
        draws_alone = chain.draw(KEY, np.array([row]), np.array([image.shape[:2]]))
        assert torch.equal(run_both_runners(chain, RaggedImages.from_arrays([image]), draws_alone)[0], result[row])


def test_flips_after_erasing_move_the_erased_boxes():
    chain = T.Chain([NORMALIZE, T.RandomErasing(1, value=9), T.RandomHorizontalFlip(1), T.RandomVerticalFlip(1)])
    ragged, draws = draw(chain, [np.zeros((20, 30, 3), np.uint8)] * 4)
    result = run_both_runners(chain, ragged, draws)
    for row, (top, left, height, width) in enumerate(draws.records[1].boxes_tlhw[:, 0].tolist()):
        expected = np.zeros((20, 30), bool)
        expected[top : top + height, left : left + width] = True
        np.testing.assert_array_equal((result[row] == 9).all(dim=0), expected[::-1, ::-1])


def test_erasing_with_random_values_draws_independent_normal_numbers():
    images = [np.full((64, 64, 3), 99, np.uint8)] * 40
    chain = T.Chain([NORMALIZE, T.RandomErasing(1, (0.3, 0.4), (1, 1), "random")])
    ragged, draws = draw(chain, images)
    result = run_both_runners(chain, ragged, draws)
    boxes = draws.records[1].boxes_tlhw[:, 0].tolist()
    patches = [result[row, :, t : t + h, left : left + w].numpy() for row, (t, left, h, w) in enumerate(boxes)]
    numbers = np.concatenate([patch.ravel() for patch in patches])
    assert stats.kstest(numbers, "norm").pvalue > 0.01
    assert len(np.unique(numbers)) > 0.99 * len(numbers)
    # The correlation of 3000 independent pairs has a standard deviation of 0.018.
    assert abs(np.corrcoef(patches[0].ravel()[:3000], patches[1].ravel()[:3000])[0, 1]) < 0.06
    chain = T.Chain([NORMALIZE, T.RandomErasing(1, mode="rand")])
    result = run_both_runners(chain, *draw(chain, images))
    assert [len(np.unique(channel)) for channel in result[0].numpy()] == [2, 2, 2]  # one color and the image


def test_random_numbers_equal_batch_normals():
    keys = np.random.default_rng(0).integers(0, 2**32, (5, 2), np.uint64)
    numbers = random_numbers(keys, 333, torch.device("cpu"))
    assert torch.equal(numbers, batch_normals(torch.from_numpy(keys.astype(np.int64)), 333))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_erasing_in_a_half_dtype_rounds_the_float32_result(dtype):
    chain = T.Chain([NORMALIZE, T.RandomErasing(1, value="random")])
    batch = draw(chain, [np.full((20, 30, 3), 99, np.uint8)] * 6)
    full, half = run_both_runners(chain, *batch), run_both_runners(chain, *batch, dtype=dtype)
    assert half.dtype == getattr(torch, dtype)
    assert torch.equal(half, full.to(half.dtype))


@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_erasing_images_of_several_sizes_equals_erasing_each_alone(make_images, ragged):
    chain = T.Chain([NORMALIZE, T.RandomErasing(1, value="random"), T.RandomHorizontalFlip(1)])
    images = make_images(2, 4)
    batch, draws = draw(chain, images)
    results = compile_stage(chain, device="cpu", ragged=ragged)(batch, draws)
    for row, image in enumerate(images):
        alone = compile_stage(chain, device="cpu")(RaggedImages.from_arrays([image]), draws.take(np.array([row])))
        result = results[row] if ragged == "list" else results[0][row, :, : image.shape[0], : image.shape[1]]
        assert torch.equal(result, alone[0])


def test_masks_are_flipped_but_not_erased():
    chain = T.Chain([T.RandomErasing(1, value=9), NORMALIZE, T.RandomErasing(1, value=9), T.RandomHorizontalFlip(1)])
    mask = np.arange(30 * 20, dtype=np.int64).reshape(20, 30, 1).astype(np.uint8)
    for runner in ("single", "batched"):
        [result], _ = MaskStage(torch.device("cpu"), runner)(*draw(chain, [mask]), [("uint8", 2)])
        np.testing.assert_array_equal(result, mask[:, ::-1, 0])


@pytest.mark.parametrize(
    ("transforms", "channels", "text"),
    [
        ([T.RandomErasing(value=(1, 2))], 3, TWO_VALUES_ERROR),
        ([T.RandomApply([T.RandomErasing(value=(1, 2))], 1)], 3, TWO_VALUES_ERROR),
        ([T.Grayscale(1), ERASING], 3, "image 0 has 1 channel at that point; give one value, or one for"),
        ([T.RandomApply([ERASING], 1.0), T.Grayscale(3)], 1, "has 3 values, but image 0 has 1 channel at that point"),
    ],
)
def test_erasing_with_a_wrong_number_of_values_raises(transforms, channels, text):
    chain = T.Chain(transforms)
    with pytest.raises(ValueError, match=re.escape(text)):
        compile_stage(chain, device="cpu")(*draw(chain, [np.zeros((9, 9, channels), np.uint8)]))


MIXING = T.RandomChoice([T.MixUp(), T.CutMix(), T.Identity()])


def result_before_mixing(transforms: list, images: list[np.ndarray], **options) -> tuple[torch.Tensor, T.Program]:
    """Return the result of a chain without its last transform, which mixes, and the draws of the entire chain."""
    chain_before_mixing = T.Chain(transforms[:-1])
    result = compile_stage(chain_before_mixing, device="cpu", **options)(*draw(chain_before_mixing, images))
    assert isinstance(result, torch.Tensor)
    return result, draw(T.Chain(transforms), images)[1]


def mix_by_formula(images: np.ndarray, draws: T.Program, partners: np.ndarray) -> np.ndarray:
    """Mix the images by the definitions of MixUp and CutMix, in float64."""
    mix, results = draws.mix, images.copy()
    for row, partner in enumerate(partners.tolist()):
        top, left, height, width = mix.box_tlhw[row].tolist()
        if partner == row:
            continue
        if height:
            box = np.s_[:, top : top + height, left : left + width]
            results[row][box] = images[partner][box]
        else:
            results[row] = mix.share[row] * images[row] + (1 - mix.share[row]) * images[partner]
    return results


@pytest.mark.parametrize("transform", [T.MixUp(alpha=0.4), T.CutMix(), MIXING, T.RandomApply([MIXING], 0.7)])
@pytest.mark.parametrize("options", [{}, {"memory_format": "channels_last"}, {"dtype": "float16"}])
@pytest.mark.parametrize("conversion", [NORMALIZE, TO_FLOAT])
def test_mixing_equals_its_formula_in_float64(make_images, transform, options, conversion):
    images = make_images(3, 11)
    transforms = [T.Resize((24, 32)), conversion, T.RandomErasing(0.5, value=2), transform]
    unmixed, draws = result_before_mixing(transforms, images, **options)
    assert (draws.mix.share < 1).sum() > 3, "too few of the 11 images are mixed"
    ragged = RaggedImages.from_arrays(images)
    for partners in (None, np.array([0, 10, 3, 2, 9, 5, 6, 8, 7, 4, 1])):
        result = compile_stage(T.Chain(transforms), device="cpu", **options)(ragged, draws, partners=partners)
        # By default, neighbors are partners, and the last of eleven has none.
        expected_partners = np.array([1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 10]) if partners is None else partners
        expected = mix_by_formula(unmixed.to(torch.float64).numpy(), draws, expected_partners)
        assert result.dtype == unmixed.dtype
        assert result.stride() == unmixed.stride()
        tolerance = 1e-3 if result.dtype == torch.float16 else 1e-6
        np.testing.assert_allclose(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_mix_batched_equals_mix_bit_for_bit(dtype, memory_format):
    draws = T.Chain([NORMALIZE, MIXING]).draw(KEY, np.arange(64), np.tile([[24, 32]], (64, 1)))
    pairing_numbers = np.random.default_rng(0).permutation(70)[:64]  # without 6 of 70, so that some have no partner
    mix, partners = draws.mix, partners_of(pairing_numbers, pairing_numbers)
    assert (partners == np.arange(64)).any(), "every row has a partner"
    batch = torch.randn(64, 3, 24, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    mixed, mixed_batched = (batch.clone(memory_format=memory_format) for _ in range(2))
    _mix(mixed, mix, partners)
    _mix_batched(mixed_batched, mix, partners)
    assert torch.equal(mixed, mixed_batched)
    assert not torch.equal(mixed, batch)


def test_transforms_after_mixing_are_applied_to_the_mixed_images(make_images):
    images = make_images(3, 4)
    mixing = [T.Resize((24, 32)), NORMALIZE, T.MixUp()]
    after = [T.RandomErasing(1, value=5), T.RandomVerticalFlip(1), torch.nn.Threshold(0, -9)]
    chain, ragged = T.Chain([*mixing, *after]), RaggedImages.from_arrays(images)
    draws = chain.draw(KEY, np.arange(4), ragged.sizes_hw)
    draws_up_to_mixup = draws.part(0, 3)
    expected = compile_stage(T.Chain(mixing), device="cpu")(ragged, draws_up_to_mixup)
    for row, (top, left, height, width) in enumerate(draws.records[3].boxes_tlhw[:, 0].tolist()):
        expected[row, :, top : top + height, left : left + width] = 5
    expected = torch.nn.functional.threshold(expected.flip(2), 0, -9)
    stage = compile_stage(chain, device="cpu")
    assert torch.equal(stage.call_modules(stage(ragged, draws), [0]), expected)


def test_views_are_erased_with_separate_draws():
    erasing = [T.RandomErasing(1, value=5), T.RandomHorizontalFlip()]
    chain = T.Chain([T.MultiView([[T.RandomCrop(20), NORMALIZE, *erasing], [T.RandomCrop(20), NORMALIZE, *erasing]])])
    ragged = RaggedImages.from_arrays([np.zeros((30, 30, 3), np.uint8)] * 3)
    stage = compile_stage(chain, device="cpu")
    views = [stage(ragged, chain.draw(KEY, np.arange(3), ragged.sizes_hw, view=view), view=view) for view in (0, 1)]
    for row in range(3):
        is_erased = [view[row] == 5 for view in views]
        assert not torch.equal(*is_erased), f"both views of image {row} have the same erased box"


@pytest.mark.cuda
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize(
    "erasing", [T.RandomErasing(0.9, value=(1, 2, 3), max_count=3), T.RandomErasing(0.9, mode="rand")]
)
def test_erasing_and_mixing_on_cuda_equal_the_cpu(make_images, memory_format, erasing):
    flips = [T.RandomHorizontalFlip(), T.RandomVerticalFlip()]
    noise = T.RandomApply([T.RandomErasing(0.9, value="random")], 0.5)
    chain = T.Chain([T.CenterCrop((40, 44)), NORMALIZE, erasing, *flips, noise, MIXING])
    images = make_images(3, 70, low=44)
    ragged, draws = draw(chain, images)
    expected = compile_stage(chain, device="cpu", memory_format=memory_format)(ragged, draws)
    result = compile_stage(chain, device="cuda", memory_format=memory_format)(
        RaggedImages.from_arrays(images, "cuda"), draws
    )
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_erasing_values_may_match_the_channels_after_grayscale():
    chain = T.Chain([T.Grayscale(3), ERASING])
    result = compile_stage(chain, device="cpu")(*draw(chain, [np.zeros((9, 9, 1), np.uint8)]))
    assert result.amax(dim=(0, 2, 3)).tolist() == [1, 2, 3]
