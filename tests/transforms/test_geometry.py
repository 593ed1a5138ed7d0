"""Borders around images, and quarter turns: their arguments, sizes and windows, and what is drawn."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import DrawError
from gpuload.transforms.program.windows import padded_indices, padded_windows

N = 10_000
KEY = epoch_key(8, 0)


def draw(transform, height: int, width: int, n: int = N):
    return T.Chain([transform]).draw(KEY, np.arange(n), np.tile([[height, width]], (n, 1)))


def test_sides_are_torchvisions():
    assert T.Pad(3) == T.Pad([3]) == T.Pad((3, 3, 3, 3))
    assert T.Pad((1, 2)) == T.Pad((1, 2, 1, 2))
    draws = draw(T.Pad((1, 2, 30, 400)), 50, 60, 1)
    np.testing.assert_array_equal(draws.records[0].box_tlhw, [[-2, -1, 452, 91]])
    np.testing.assert_array_equal(draws.results_hw, [[452, 91]])
    assert T.Chain([T.Resize((8, 9)), T.Pad((1, 2, 30, 400))]).output_size_hw == (410, 40)
    assert T.Chain([T.Pad(1)]).output_size_hw is None
    assert T.Chain([T.Resize((8, 8)), T.RandomZoomOut()]).output_size_hw is None


def test_negative_padding_cuts_off():
    chain = T.Chain([T.Pad((-3, 2, -4, -5))])
    draws = chain.draw(KEY, np.arange(1), np.array([[50, 60]]))
    np.testing.assert_array_equal(draws.results_hw, [[47, 53]])
    np.testing.assert_array_equal(chain.regions(KEY, np.arange(1), np.array([[50, 60]])), [[0, 3, 45, 53]])
    text = "Pad((-3, 2, -4, -5)) has negative padding that would remove an entire image of 50×7 (height × width)"
    with pytest.raises(DrawError, match=re.escape(text)) as caught:
        chain.draw(KEY, np.arange(3), np.array([[50, 60], [50, 7], [3, 3]]))
    assert caught.value.row == 1
    with pytest.raises(DrawError, match="remove an entire image"):  # where it is read, not later
        chain.regions(KEY, np.arange(1), np.array([[50, 7]]))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_a_window_holds_every_pixel_that_is_shown(mode):
    rng = np.random.default_rng(0)
    for _ in range(300):
        size, box = rng.integers(1, 20, 2), np.append(rng.integers(-60, 40, 2), rng.integers(1, 80, 2))
        window = np.append(rng.integers(0, box[2:]), 0)
        window = np.concatenate([window[:2], rng.integers(1, box[2:] - window[:2] + 1)])
        top_left, height_width = np.split(padded_windows(box[None], window[None], size[None], mode)[0], 2)
        for axis in (0, 1):
            places = box[axis] + window[axis] + np.arange(window[axis + 2])
            if mode == "constant":
                places = places[(places >= 0) & (places < size[axis])]
            shown = padded_indices(places, size[axis], mode)
            assert (shown >= top_left[axis]).all()
            assert (shown < top_left[axis] + height_width[axis]).all()
            assert 0 <= top_left[axis] < top_left[axis] + height_width[axis] <= size[axis]


def test_a_crop_behind_padding_decodes_no_more_than_it_shows():
    chain = T.Chain([T.Pad(10), T.CenterCrop(20)])
    np.testing.assert_array_equal(chain.regions(KEY, np.arange(1), np.array([[100, 80]])), [[40, 30, 20, 20]])


@pytest.mark.parametrize("turn", [T.RandomRotate90, T.RandomTranspose])
def test_height_and_width_change_places(turn):
    drawn = draw(turn(0.5), 50, 60)
    sizes = np.where(drawn.records[0].transposed[:, None], [60, 50], [50, 60])
    np.testing.assert_array_equal(drawn.results_hw, sizes)
    assert 0 < (sizes[:, 0] == 60).sum() < N
    assert T.Chain([T.CenterCrop(8), turn()]).output_size_hw == (8, 8)
    assert T.Chain([T.CenterCrop((8, 9)), turn()]).output_size_hw is None
    assert T.Chain([turn()]).output_size_hw is None
    assert T.Chain([turn(), T.Resize((8, 9))]).output_size_hw == (8, 9)


def test_a_crop_behind_a_turn_decodes_no_more_than_it_shows():
    chain, n = T.Chain([T.RandomRotate90(1.0), T.RandomTranspose(), T.RandomCrop((8, 5))]), 400
    regions = chain.regions(KEY, np.arange(n), np.tile([[40, 30]], (n, 1)))
    assert {tuple(size) for size in regions[:, 2:].tolist()} == {(8, 5), (5, 8)}
    assert regions[:, :2].min() == 0
    assert (regions[:, :2] + regions[:, 2:]).max(axis=0).tolist() == [40, 30]


@pytest.mark.parametrize("turn", [T.RandomRotate90, T.RandomTranspose])
def test_a_turn_comes_before_images_are_finished(turn):
    name = turn.__name__
    T.Chain([T.ToDtype("float32", scale=True), turn(), T.Normalize([0.5], [0.5]), T.RandomErasing()])
    with pytest.raises(ValueError, match=f"{name} \\(number 2\\) cannot come after Normalize"):
        T.Chain([T.Normalize([0.5], [0.5]), turn()])
    with pytest.raises(ValueError, match=f"{name} \\(number 3\\) cannot come after Lambda"):
        T.Chain([T.ToDtype("float32", scale=True), T.Lambda(abs), turn()])


def test_images_that_a_turn_leaves_of_different_sizes_are_named():
    images = [gl.Image(np.zeros((8, 6, 3), np.uint8))] * 16
    with (
        gl.Loader(images, 16, transforms=[T.RandomRotate90(1.0)], num_workers=0, device="cpu") as loader,
        pytest.raises(ValueError, match=r"has 6×8, sample 2 has 8×6 \(RandomRotate90 swaps .* end with a crop or a"),
    ):
        next(iter(loader))
    with gl.Loader(
        images, 16, transforms=[T.RandomRotate90(1.0)], ragged="list", num_workers=0, device="cpu"
    ) as loader:
        assert {tuple(image.shape) for image in next(iter(loader))} == {(3, 8, 6), (3, 6, 8)}
