"""Warps equal Pillow to the last bit, in batches and one by one, in windows and entire images, and for masks."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.masks import MaskStage
from gpuload.stage.reference.warp import warp_batch, warp_image
from gpuload.transforms.warps import rotation_coefficients

FILTERS = {"nearest": Image.NEAREST, "bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC}
KEY = epoch_key(5, 2)
CPU = torch.device("cpu")


def random_coefficients(rng: np.random.Generator, kind: str, count: int, height: int, width: int) -> np.ndarray:
    angle, scale = rng.uniform(-4, 4, count), rng.uniform(0.3, 3, count)
    coefficients = np.zeros((count, 8))
    coefficients[:, 0] = coefficients[:, 4] = np.cos(angle) * scale
    coefficients[:, 1], coefficients[:, 3] = np.sin(angle) * scale, -np.sin(angle) * scale
    coefficients[:, 2], coefficients[:, 5] = rng.uniform(-width, width, count), rng.uniform(-height, height, count)
    if kind == "scaling":
        coefficients[:, [1, 3]] = 0
    elif kind == "shift":
        coefficients[:] = [1, 0, 0, 0, 1, 0, 0, 0]
        coefficients[:, [2, 5]] = rng.integers(-9, 10, (count, 2)) + rng.choice([0, 0.5], (count, 2))
    elif kind == "projective":
        coefficients[:, 6:] = rng.normal(0, 0.01, (count, 2))
    elif kind == "mixed":
        coefficients[::3, 6:] = rng.normal(0, 0.01, (len(coefficients[::3]), 2))
        coefficients[1::3, [1, 3]] = 0
        coefficients[2, 0] *= 3000  # too far for fixed point
    return coefficients


def to_nchw(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@pytest.mark.parametrize("interpolation", list(FILTERS))
@pytest.mark.parametrize("kind", ["affine", "scaling", "shift", "projective", "mixed"])
def test_warp_of_batches_and_of_single_images_equals_pillow(kind, interpolation):
    rng = np.random.default_rng(len(kind))
    for trial in range(12):
        height, width, out_height, out_width = rng.integers(1, 60, 4).tolist()
        images = rng.integers(0, 256, (6, height, width, 3 if trial % 2 else 1), np.uint8)
        coefficients, size = random_coefficients(rng, kind, 6, height, width), (out_height, out_width)
        fill = tuple(rng.integers(0, 256, images.shape[3]).tolist())
        batched = warp_batch(to_nchw(images), coefficients, size, interpolation, fill).permute(0, 2, 3, 1).numpy()
        for row, image in enumerate(images):
            is_affine = not coefficients[row, 6:].any()
            expected = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).transform(
                size[::-1],
                Image.Transform.AFFINE if is_affine else Image.Transform.PERSPECTIVE,
                coefficients[row, : 6 if is_affine else 8].tolist(),
                FILTERS[interpolation],
                fillcolor=fill[0] if len(fill) == 1 else fill,
            )
            single = warp_image(image, coefficients[row].tolist(), size, interpolation, fill)
            np.testing.assert_array_equal(single, np.asarray(expected).reshape(single.shape))
            np.testing.assert_array_equal(batched[row], single)
        corners = rng.integers(0, size, (6, 2))
        part_hw = (out_height - int(corners[:, 0].max()), out_width - int(corners[:, 1].max()))
        parts = warp_batch(to_nchw(images), coefficients, part_hw, interpolation, fill, corners=corners)
        for row, (top, left) in enumerate(corners.tolist()):
            expected_part = batched[row, top : top + part_hw[0], left : left + part_hw[1]]
            np.testing.assert_array_equal(parts[row].permute(1, 2, 0).numpy(), expected_part)


@pytest.mark.parametrize("interpolation", list(FILTERS))
@pytest.mark.parametrize("channels", [2, 4, 5, 130])
def test_warp_of_many_channels_equals_each_channel_alone(channels, interpolation):
    rng = np.random.default_rng(channels)
    images = rng.integers(0, 256, (3, 23, 31, channels), np.uint8)
    coefficients = random_coefficients(rng, "mixed", 3, 23, 31)
    batched = warp_batch(to_nchw(images), coefficients, (20, 40), interpolation, 7).permute(0, 2, 3, 1).numpy()
    for row, image in enumerate(images):
        arguments = coefficients[row].tolist(), (20, 40), interpolation, 7
        single = warp_image(image, *arguments)
        channels_alone = [warp_image(image[:, :, [channel]], *arguments) for channel in range(channels)]
        np.testing.assert_array_equal(single, np.concatenate(channels_alone, axis=2))
        np.testing.assert_array_equal(batched[row], single)


def test_warp_batch_fills_pixels_on_the_horizon():
    image = np.full((8, 8, 3), 200, np.uint8)
    horizon = [1.0, 0, 0, 0, 1, 0, -1 / 4.5, 0]  # w is 0 in the middle of column 4
    for interpolation in FILTERS:
        result = warp_batch(to_nchw(image[None]), np.array([horizon]), (8, 8), interpolation, 9)
        assert (result[0, :, :, 4] == 9).all()


@pytest.mark.parametrize("angle", [0, 90, 180, 270, -90, 450])
@pytest.mark.parametrize("interpolation", list(FILTERS))
def test_rotation_by_right_angles_only_moves_pixels(angle, interpolation):
    image = np.random.default_rng(0).integers(0, 256, (31, 44, 3), np.uint8)
    coefficients, sizes = rotation_coefficients(np.array([angle]), None, np.array([[31, 44]]), expand=True)
    size = tuple(sizes[0].tolist())
    np.testing.assert_array_equal(
        warp_image(image, coefficients[0].tolist(), size, interpolation, 0), np.rot90(image, angle // 90)
    )


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [T.Pad, T.RandomRotation, T.RandomZoomOut])
def test_fill_with_a_wrong_number_of_values_raises(kind, channels, nested, run_stage):
    transform = kind(fill=(1, 2, 3)) if kind is T.RandomZoomOut else kind(30, fill=(1, 2, 3))
    transforms = [T.RandomApply([T.RandomOrder([transform])]) if nested else transform]
    text = f"{type(transform).__name__}(fill=(1, 2, 3)) has 3 values, one for each channel, but image 0 has {channels} "
    with pytest.raises(ValueError, match=re.escape(text)):
        run_stage(transforms, [np.zeros((9, 9, channels), np.uint8)], ragged="list")


CHAINS = [
    [T.RandomRotation(40, "bilinear", expand=True, fill=(9, 99, 199)), T.CenterCrop((30, 40)), T.RandomVerticalFlip()],
    [T.RandomAffine(40, (0.2, 0.2), (0.5, 2), 20, "bicubic", fill=50), T.RandomCrop(28), T.RandomHorizontalFlip()],
    [T.RandomPerspective(0.6), T.Pad((3, 4), fill=7), T.RandomResizedCrop(24, interpolation="nearest")],
    [T.RandomChoice([T.RandomRotation(90), T.RandomPerspective(p=1.0)]), T.CenterCrop(21)],
    [T.RandomZoomOut(fill=(1, 2, 3)), T.RandomRotation(9), T.Resize((20, 24), "nearest")],
]


@pytest.mark.parametrize("number", range(len(CHAINS)))
@pytest.mark.parametrize("same_size", [True, False])
def test_window_of_a_warp_equals_the_window_of_the_entire_result(number, same_size, make_images, make_batch):
    chain = T.Chain(CHAINS[number])
    images = make_images(3, 10, low=50)
    if same_size:
        images = [np.ascontiguousarray(image[:50, :50]) for image in images]
    ragged, draws = make_batch(chain, images, key=KEY)
    results = compile_stage(chain, device="cpu")(ragged, draws)
    batched = compile_stage(chain, device="cpu", runner="batched")(ragged, draws)
    np.testing.assert_array_equal(batched, results)
    # Apply each transform to the complete result of the transform before it.
    for row, image in enumerate(images):
        for index, transform in enumerate(chain.transforms):
            step_draws = draws.part(draws.place_of(index), draws.place_of(index + 1)).take(np.array([row]))
            step_draws = replace(step_draws, records=tuple(replace(record, step=0) for record in step_draws.records))
            result = compile_stage(T.Chain([transform]), device="cpu")(RaggedImages.from_arrays([image]), step_draws)
            image = result[0].permute(1, 2, 0).contiguous().numpy()
        np.testing.assert_array_equal(results[row].permute(1, 2, 0), image)


MASK_CHAINS = [
    [T.RandomAffine(40, scale=(0.5, 2), interpolation="bilinear", fill={"Mask": 255}), T.RandomCrop(28)],
    [T.RandomResizedCrop(24, interpolation="bicubic"), T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
    [T.Resize((33, 20)), T.RandomRotation(80, "bicubic", expand=True, fill=(1, 2, 3)), T.CenterCrop(40)],
    [T.Resize((30, 30), "random"), T.RandomCrop(40, padding=9, padding_mode="reflect", pad_if_needed=True)],
    [T.RandomPerspective(p=1.0), T.Pad((5, 1), fill={"Mask": 7}), T.ScaleJitter((40, 50)), T.CenterCrop(30)],
    [T.RandomZoomOut(fill=(1, 2, 3)), T.RandomShortestSize([20, 30]), T.RandomCrop(33, pad_if_needed=True, fill=4)],
]


@pytest.mark.parametrize("number", range(len(MASK_CHAINS)))
@pytest.mark.parametrize("channels", [1, 3, 300])
def test_masks_of_many_channels_move_by_the_nearest_pixel_on_both_runners(number, channels):
    """Each channel moves as if it were the only channel, and no new value appears."""
    chain = T.Chain(MASK_CHAINS[number])
    rng = np.random.default_rng(number)
    masks = [rng.integers(100, 130, (rng.integers(40, 60), 50, channels), np.uint8) for _ in range(4)]
    sizes = np.array([mask.shape[:2] for mask in masks])
    draws = chain.draw(KEY, np.arange(4), sizes)
    single, batched = (MaskStage(CPU, runner) for runner in ("single", "batched"))
    dtypes_and_axes = [("uint8", 3)] * 4
    results = [
        torch.stack(stage(RaggedImages.from_arrays(masks), draws, dtypes_and_axes)[0]) for stage in (single, batched)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    possible_values = {transform.outside.mask for transform in chain.transforms} | set(range(100, 130))
    assert set(results[0].unique().tolist()) <= possible_values
    for channel in {0, channels // 2, channels - 1}:
        channel_masks = [np.ascontiguousarray(mask[:, :, [channel]]) for mask in masks]
        alone = torch.stack(single(RaggedImages.from_arrays(channel_masks), draws, dtypes_and_axes)[0])
        np.testing.assert_array_equal(alone[:, 0], results[0][:, channel])
