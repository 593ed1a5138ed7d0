"""Masks through both runners: by the nearest pixel, the same on any device, whatever their dtype and number."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from targets.test_parity import CHAINS, SIZES, made

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import RaggedImages
from gpuload.stage.masks import MaskStage

FILL = {gl.Image: 3, gl.Mask: 100}
MORE = {
    "fills": [T.RandomZoomOut(fill=FILL, p=0.8), T.RandomRotation(30, fill=FILL), T.Resize((40, 40))],
    "a branch": [
        T.RandomApply([T.RandomAffine(20, fill=FILL)]),
        T.RandomChoice([T.Pad(3, fill=FILL), T.CenterCrop(30)]),
    ],
    "whole images": [T.RandomApply([T.ColorJitter(contrast=0.5)]), T.RandomEqualize(), T.RandomCrop(28)],
    "erasing": [T.RandomErasing(p=1), T.RandomHorizontalFlip(), T.CenterCrop(40)],
}


def both(masks, draws):
    """By the runner of single images, and by that of batches."""
    three = [mask if mask.ndim == 3 else mask[None] for mask in masks]
    arrays = [np.ascontiguousarray(mask.transpose(1, 2, 0)).view(np.uint8) for mask in three]
    kinds = [(mask.dtype.name, mask.ndim) for mask in masks]
    stages = [MaskStage(torch.device("cpu"), runner) for runner in ("single", "batched")]
    return [stage(RaggedImages.from_arrays(arrays), draws, kinds) for stage in stages]


@pytest.mark.parametrize("name", [*CHAINS, *MORE])
@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_both_runners_move_masks_alike(name, dtype):
    draws = made({**CHAINS, **MORE}[name])
    random = np.random.default_rng(0)
    shapes = [tuple(size) if row % 2 else (1 + row, *size) for row, size in enumerate(SIZES.tolist())]
    masks = [random.integers(0, 120, shape).astype(dtype) for shape in shapes]
    (single, _), (batched, _) = both(masks, draws)
    for row, (one, other) in enumerate(zip(single, batched, strict=True)):
        assert one.shape == (*masks[row].shape[:-2], *draws.results_hw[row])
        assert one.dtype == getattr(torch, dtype)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_each_of_several_masks_is_moved_as_it_would_be_alone():
    draws = made(CHAINS["several"])
    random = np.random.default_rng(0)
    masks = [random.integers(-9, 9, (3, *size)).astype(np.int64) for size in SIZES.tolist()]
    (together, _), _ = both(masks, draws)
    for number in range(3):
        (alone, whole), _ = both([mask[number] for mask in masks], draws)
        assert whole is not None
        for row, mask in enumerate(together):
            assert torch.equal(mask[number], alone[row])
            assert torch.equal(whole[row], alone[row])


def test_no_new_values_come_into_being():
    draws = made(MORE["fills"])
    masks = [np.random.default_rng(1).choice([0, 50, 2**40], size).astype(np.int64) for size in SIZES.tolist()]
    (moved, _), _ = both(masks, draws)
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
def test_what_is_filled_in_is_any_number_that_the_type_has(dtype, fill):
    fills = {gl.Image: 0, gl.Mask: fill}
    chain = [T.Pad(2, fill=fills), T.RandomApply([T.RandomRotation((45, 45), fill=fills)], p=1.0)]
    masks = [
        np.zeros((3, *size), dtype) if row % 2 else np.zeros(size, dtype) for row, size in enumerate(SIZES.tolist())
    ]
    expected = np.array([0, fill]).astype(dtype) if dtype != "int64" else np.array([0, fill], dtype)
    for moved, _ in both(masks, made(chain)):
        for mask in moved:
            assert str(mask.dtype) == f"torch.{dtype}"
            assert mask.flatten()[0].numpy() == expected[1] or math.isnan(fill)  # a corner, outside
            centre = mask[..., mask.shape[-2] // 2, mask.shape[-1] // 2]
            assert not centre.any()
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
def test_what_is_filled_in_must_be_a_number_that_the_type_has(dtype, fill):
    draws = made([T.Pad(2, fill={gl.Image: 0, gl.Mask: fill})])
    text = re.escape(f"fills masks with {fill}, which a mask of dtype {dtype} cannot hold; use masks of another dtype")
    with pytest.raises(ValueError, match=text):
        both([np.zeros(size, dtype) for size in SIZES.tolist()], draws)


@pytest.mark.parametrize("fill", ["255", True, 1j, np.bool_(True)])
def test_what_is_filled_in_must_be_a_number(fill):
    with pytest.raises(TypeError, match=r"Pad\(fill=…\) for masks must be a number, got "):
        T.Pad(2, fill={gl.Image: 0, gl.Mask: fill})


def test_colours_and_erasing_leave_masks_alone():
    masks = [np.random.default_rng(1).integers(0, 9, size).astype(np.uint8) for size in SIZES.tolist()]
    (moved, _), _ = both(
        masks, made([T.ColorJitter(0.5, 0.5), T.GaussianBlur(3), T.RandomErasing(p=1), T.RandomInvert(1)])
    )
    for mask, found in zip(masks, moved, strict=True):
        np.testing.assert_array_equal(found.numpy(), mask)
