"""Masks of any dtype and number are moved equally by both runners."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from targets.geometric_chains import GEOMETRIC_CHAINS, SIZES, draw

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import RaggedImages
from gpuload.stage.masks import MaskStage

FILL = {gl.Image: 3, gl.Mask: 100}
FURTHER_CHAINS = {
    "fills": [T.RandomZoomOut(fill=FILL, p=0.8), T.RandomRotation(30, fill=FILL), T.Resize((40, 40))],
    "a branch": [
        T.RandomApply([T.RandomAffine(20, fill=FILL)]),
        T.RandomChoice([T.Pad(3, fill=FILL), T.CenterCrop(30)]),
    ],
    "complete images": [T.RandomApply([T.ColorJitter(contrast=0.5)]), T.RandomEqualize(), T.RandomCrop(28)],
    "erasing": [T.RandomErasing(p=1), T.RandomHorizontalFlip(), T.CenterCrop(40)],
}


def move_in_both_runners(masks, draws):
    """Move masks with the runner of single images, and with the batched runner."""
    masks_nhw = [mask if mask.ndim == 3 else mask[None] for mask in masks]
    arrays = [np.ascontiguousarray(mask.transpose(1, 2, 0)).view(np.uint8) for mask in masks_nhw]
    kinds = [(mask.dtype.name, mask.ndim) for mask in masks]
    stages = [MaskStage(torch.device("cpu"), runner) for runner in ("single", "batched")]
    return [stage(RaggedImages.from_arrays(arrays), draws, kinds) for stage in stages]


@pytest.mark.parametrize("name", [*GEOMETRIC_CHAINS, *FURTHER_CHAINS])
@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_both_runners_move_masks_equally(name, dtype):
    draws = draw({**GEOMETRIC_CHAINS, **FURTHER_CHAINS}[name])
    random = np.random.default_rng(0)
    shapes = [tuple(size) if row % 2 else (1 + row, *size) for row, size in enumerate(SIZES.tolist())]
    masks = [random.integers(0, 120, shape).astype(dtype) for shape in shapes]
    (single, _), (batched, _) = move_in_both_runners(masks, draws)
    for row, (mask_single, mask_batched) in enumerate(zip(single, batched, strict=True)):
        assert mask_single.shape == (*masks[row].shape[:-2], *draws.results_hw[row])
        assert mask_single.dtype == getattr(torch, dtype)
        torch.testing.assert_close(mask_single, mask_batched, rtol=0, atol=0)


def test_instance_masks_are_moved_like_single_masks():
    draws = draw(GEOMETRIC_CHAINS["several"])
    random = np.random.default_rng(0)
    masks = [random.integers(-9, 9, (3, *size)).astype(np.int64) for size in SIZES.tolist()]
    (moved_together, _), _ = move_in_both_runners(masks, draws)
    for number in range(3):
        (moved_alone, single_tensor), _ = move_in_both_runners([mask[number] for mask in masks], draws)
        assert single_tensor is not None
        for row, mask in enumerate(moved_together):
            assert torch.equal(mask[number], moved_alone[row])
            assert torch.equal(single_tensor[row], moved_alone[row])


def test_moved_masks_contain_only_their_values_and_the_fill():
    draws = draw(FURTHER_CHAINS["fills"])
    masks = [np.random.default_rng(1).choice([0, 50, 2**40], size).astype(np.int64) for size in SIZES.tolist()]
    (moved, _), _ = move_in_both_runners(masks, draws)
    assert {value for mask in moved for value in mask.unique().tolist()} == {0, 50, 100, 2**40}


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("int64", -100),
        ("int64", 2**53 + 1),
        ("int16", -1),
        ("int8", -128),
        ("uint8", 255.0),
        ("bool", 255),
        ("float32", -1),
        ("float32", 0.1),
        ("float64", 0.1),
        ("float16", 0.1),
        ("float32", np.float32(0.1)),
        ("float32", math.nan),
        ("float64", -math.inf),
        ("float32", 2**70),
    ],
)
def test_masks_are_filled_with_any_number_of_their_dtype(dtype, fill):
    fills = {gl.Image: 0, gl.Mask: fill}
    chain = [T.Pad(2, fill=fills), T.RandomApply([T.RandomRotation((45, 45), fill=fills)], p=1.0)]
    masks = [
        np.zeros((3, *size), dtype) if row % 2 else np.zeros(size, dtype) for row, size in enumerate(SIZES.tolist())
    ]
    expected = np.array([0, fill]).astype(dtype)
    for moved, _ in move_in_both_runners(masks, draw(chain)):
        for mask in moved:
            assert str(mask.dtype) == f"torch.{dtype}"
            center = mask[..., mask.shape[-2] // 2, mask.shape[-1] // 2]
            assert not center.any()
            np.testing.assert_array_equal(mask.flatten()[0].numpy(), expected[1])  # a corner, outside of the image
            np.testing.assert_array_equal(np.unique(mask.numpy()), np.unique(expected))


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("uint8", -100),
        ("uint8", 256),
        ("int8", -129),
        ("int64", 2**63),
        ("int64", 0.1),
        ("int32", math.nan),
        ("bool", 0.5),
        ("float16", 70_000),
        pytest.param("float32", 10**400, id="huge"),
    ],
)
def test_mask_stage_refuses_a_fill_outside_the_dtype_of_the_mask(dtype, fill):
    draws = draw([T.Pad(2, fill={gl.Image: 0, gl.Mask: fill})])
    text = re.escape(f"fills masks with {fill}, which a mask of dtype {dtype} cannot hold; use masks of another dtype")
    with pytest.raises(ValueError, match=text):
        move_in_both_runners([np.zeros(size, dtype) for size in SIZES.tolist()], draws)


@pytest.mark.parametrize("fill", ["255", True, 1j, np.bool_(True)])
def test_pad_refuses_a_fill_of_masks_that_is_not_a_number(fill):
    with pytest.raises(TypeError, match=r"Pad\(fill=…\) for masks must be a number, got "):
        T.Pad(2, fill={gl.Image: 0, gl.Mask: fill})


def test_colour_transforms_and_erasing_do_not_change_masks():
    masks = [np.random.default_rng(1).integers(0, 9, size).astype(np.uint8) for size in SIZES.tolist()]
    (moved, _), _ = move_in_both_runners(
        masks, draw([T.ColorJitter(0.5, 0.5), T.GaussianBlur(3), T.RandomErasing(p=1), T.RandomInvert(1)])
    )
    for mask, moved_mask in zip(masks, moved, strict=True):
        np.testing.assert_array_equal(moved_mask.numpy(), mask)
