"""Transforms applied to one image, to look at them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

ARRAY = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
PLANES = torch.from_numpy(ARRAY).permute(2, 0, 1)


def encoded() -> gl.Encoded:
    stream = io.BytesIO()
    Image.fromarray(ARRAY).save(stream, "PNG")
    return gl.Encoded(stream.getvalue())


@pytest.mark.parametrize(
    "image", [ARRAY, PLANES, Image.fromarray(ARRAY), gl.Image(ARRAY), encoded()], ids=lambda image: type(image).__name__
)
def test_a_transform_is_called_with_an_image(image):
    found = T.RandomInvert(1.0)(image)
    assert torch.equal(found, 255 - PLANES)
    assert found.dtype == torch.uint8


def test_a_grey_array():
    assert torch.equal(T.RandomHorizontalFlip(1.0)(ARRAY[..., 0]), PLANES[:1].flip(-1))


def test_a_chain_is_what_a_loader_makes_of_the_first_sample():
    chain = [T.RandomResizedCrop(9), T.ColorJitter(0.5), T.Normalize([0.5] * 3, [0.5] * 3)]
    with gl.Loader([ARRAY], transforms=chain, seed=5, num_workers=0, device="cpu") as loader:
        [expected] = loader
    found = T.apply(chain, ARRAY, seed=5)
    assert torch.equal(found, expected[0])
    assert not torch.equal(T.apply(chain, ARRAY, seed=6), found)


def test_what_moves_with_the_image():
    image, mask, boxes = T.apply(
        T.RandomHorizontalFlip(1.0), (ARRAY, gl.Mask(ARRAY[..., 0]), gl.Boxes([[0, 0, 3, 4]], "xyxy"))
    )
    assert torch.equal(mask, image[0])
    assert boxes.tolist() == [[27, 0, 30, 4]]


def test_views():
    views = T.apply([T.MultiView([[T.CenterCrop(8)], [T.CenterCrop(6)]])], ARRAY)
    assert [tuple(view.shape) for view in views] == [(3, 8, 8), (3, 6, 6)]
