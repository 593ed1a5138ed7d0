"""Padding and quarter turns have the right sizes and windows, and are refused in invalid places."""

from __future__ import annotations

import re

import numpy as np
import pytest
from transforms.drawing import KEY, NORMALIZE, SAMPLES, TO_FLOAT, draw

import gpuload as gl
from gpuload import transforms as T
from gpuload.transforms.base import DrawError
from gpuload.transforms.program.windows import padded_indices, padded_windows


def test_pad_has_torchvisions_order_of_sides():
    assert T.Pad(3) == T.Pad([3]) == T.Pad((3, 3, 3, 3))
    assert T.Pad((1, 2)) == T.Pad((1, 2, 1, 2))
    program = draw(T.Pad((1, 2, 30, 400)), size_hw=(50, 60), count=1)
    np.testing.assert_array_equal(program.records[0].box_tlhw, [[-2, -1, 452, 91]])
    np.testing.assert_array_equal(program.results_hw, [[452, 91]])
    assert T.Chain([T.Resize((8, 9)), T.Pad((1, 2, 30, 400))]).output_size_hw == (410, 40)
    assert T.Chain([T.Pad(1)]).output_size_hw is None
    assert T.Chain([T.Resize((8, 8)), T.RandomZoomOut()]).output_size_hw is None


def test_pad_with_negative_padding_crops():
    chain = T.Chain([T.Pad((-3, 2, -4, -5))])
    program = chain.draw(KEY, np.arange(1), np.array([[50, 60]]))
    np.testing.assert_array_equal(program.results_hw, [[47, 53]])
    np.testing.assert_array_equal(chain.regions(KEY, np.arange(1), np.array([[50, 60]])), [[0, 3, 45, 53]])
    text = "Pad((-3, 2, -4, -5)) has negative padding that would remove an entire image of 50×7 (height × width)"
    with pytest.raises(DrawError, match=re.escape(text)) as caught:
        chain.draw(KEY, np.arange(3), np.array([[50, 60], [50, 7], [3, 3]]))
    assert caught.value.row == 1
    with pytest.raises(DrawError, match="remove an entire image"):
        chain.regions(KEY, np.arange(1), np.array([[50, 7]]))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_padded_windows_contain_every_pixel_that_is_shown(mode):
    rng = np.random.default_rng(0)
    for _ in range(300):
        size, box = rng.integers(1, 20, 2), np.append(rng.integers(-60, 40, 2), rng.integers(1, 80, 2))
        window = np.append(rng.integers(0, box[2:]), 0)
        window = np.concatenate([window[:2], rng.integers(1, box[2:] - window[:2] + 1)])
        top_left, height_width = np.split(padded_windows(box[None], window[None], size[None], mode)[0], 2)
        for axis in (0, 1):
            positions = box[axis] + window[axis] + np.arange(window[axis + 2])
            if mode == "constant":
                positions = positions[(positions >= 0) & (positions < size[axis])]
            shown = padded_indices(positions, size[axis], mode)
            assert (shown >= top_left[axis]).all()
            assert (shown < top_left[axis] + height_width[axis]).all()
            assert 0 <= top_left[axis] < top_left[axis] + height_width[axis] <= size[axis]


@pytest.mark.parametrize("kind", [T.RandomRotate90, T.RandomTranspose])
def test_rotate90_and_transpose_swap_height_and_width(kind):
    program = draw(kind(0.5), size_hw=(50, 60))
    sizes = np.where(program.records[0].transposed[:, None], [60, 50], [50, 60])
    np.testing.assert_array_equal(program.results_hw, sizes)
    assert 0 < (sizes[:, 0] == 60).sum() < SAMPLES
    assert T.Chain([T.CenterCrop(8), kind()]).output_size_hw == (8, 8)
    assert T.Chain([T.CenterCrop((8, 9)), kind()]).output_size_hw is None
    assert T.Chain([kind()]).output_size_hw is None
    assert T.Chain([kind(), T.Resize((8, 9))]).output_size_hw == (8, 9)


def test_crop_after_rotate90_decodes_only_the_pixels_that_it_shows():
    chain, count = T.Chain([T.RandomRotate90(1.0), T.RandomTranspose(), T.RandomCrop((8, 5))]), 400
    regions = chain.regions(KEY, np.arange(count), np.tile([[40, 30]], (count, 1)))
    assert {tuple(size) for size in regions[:, 2:].tolist()} == {(8, 5), (5, 8)}
    assert regions[:, :2].min() == 0
    assert (regions[:, :2] + regions[:, 2:]).max(axis=0).tolist() == [40, 30]


@pytest.mark.parametrize("kind", [T.RandomRotate90, T.RandomTranspose])
def test_chain_refuses_rotate90_and_transpose_after_normalize(kind):
    name = kind.__name__
    T.Chain([TO_FLOAT, kind(), NORMALIZE, T.RandomErasing()])
    with pytest.raises(ValueError, match=f"{name} \\(number 2\\) cannot come after Normalize"):
        T.Chain([NORMALIZE, kind()])
    with pytest.raises(ValueError, match=f"{name} \\(number 3\\) cannot come after Lambda"):
        T.Chain([TO_FLOAT, T.Lambda(abs), kind()])


def test_loader_names_rotate90_as_the_reason_for_images_of_different_sizes():
    images = [gl.Image(np.zeros((8, 6, 3), np.uint8))] * 16
    options = {"batch_size": 16, "transforms": [T.RandomRotate90(1.0)], "num_workers": 0, "device": "cpu"}
    with (
        gl.Loader(images, **options) as loader,
        pytest.raises(ValueError, match=r"has 6×8, sample 2 has 8×6 \(RandomRotate90 swaps .* end with a crop or a"),
    ):
        next(iter(loader))
    with gl.Loader(images, ragged="list", **options) as loader:
        assert {tuple(image.shape) for image in next(iter(loader))} == {(3, 8, 6), (3, 6, 8)}
