"""`transforms.apply()` and calls of a transform: results for one image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.generated_images import encode
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

ARRAY = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
PLANES = torch.from_numpy(ARRAY).permute(2, 0, 1)


@pytest.mark.parametrize(
    "image",
    [ARRAY, PLANES, Image.fromarray(ARRAY), gl.Image(ARRAY), gl.Encoded(encode(ARRAY, "PNG"))],
    ids=["array", "tensor", "pillow", "gl.Image", "gl.Encoded"],
)
def test_transform_called_with_any_kind_of_image_returns_a_uint8_tensor(image):
    inverted = T.RandomInvert(1.0)(image)
    assert torch.equal(inverted, 255 - PLANES)
    assert inverted.dtype == torch.uint8


def test_transform_called_with_a_grey_array_returns_one_channel():
    assert torch.equal(T.RandomHorizontalFlip(1.0)(ARRAY[..., 0]), PLANES[:1].flip(-1))


def test_apply_returns_what_a_loader_yields_for_its_first_sample():
    chain = [T.RandomResizedCrop(9), T.ColorJitter(0.5), T.Normalize([0.5] * 3, [0.5] * 3)]
    with gl.Loader([ARRAY], transforms=chain, seed=5, num_workers=0, device="cpu") as loader:
        [expected] = loader
    image = T.apply(chain, ARRAY, seed=5)
    assert torch.equal(image, expected[0])
    assert not torch.equal(T.apply(chain, ARRAY, seed=6), image)


def test_apply_does_not_depend_on_the_rank_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    expected = T.apply([], np.zeros((8, 8, 3), np.uint8))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert torch.equal(T.apply([], np.zeros((8, 8, 3), np.uint8)), expected)


def test_apply_moves_masks_and_boxes_with_the_image():
    image, mask, boxes = T.apply(
        T.RandomHorizontalFlip(1.0), (ARRAY, gl.Mask(ARRAY[..., 0]), gl.Boxes([[0, 0, 3, 4]], "xyxy"))
    )
    assert torch.equal(mask, image[0])
    assert boxes.tolist() == [[27, 0, 30, 4]]


def test_apply_of_multiview_returns_one_image_per_view():
    views = T.apply([T.MultiView([[T.CenterCrop(8)], [T.CenterCrop(6)]])], ARRAY)
    assert [tuple(view.shape) for view in views] == [(3, 8, 8), (3, 6, 6)]
