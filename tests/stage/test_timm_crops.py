"""CenterCropOrPad and TrimBorder give the pixels of timm's transforms."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import peers
from PIL import Image

from gpuload import transforms as T


@pytest.fixture(scope="module")
def timm_transforms():
    peers.timm()
    from timm.data import transforms

    return transforms


@pytest.mark.parametrize("size_hw", [(20, 30), (10, 30), (30, 11), (9, 12), (16, 16)])
@pytest.mark.parametrize("padding_mode", ["constant", "reflect", "edge"])
def test_center_crop_or_pad_equals_timms(timm_transforms, size_hw, padding_mode, run_stage):
    image = np.random.default_rng(0).integers(0, 256, (*size_hw, 3), np.uint8)
    fill = (1, 2, 3) if padding_mode == "constant" else 0
    for size in ((16, 16), (15, 17)):
        [result] = run_stage([T.CenterCropOrPad(size, fill=fill, padding_mode=padding_mode)], [image])
        expected = timm_transforms.CenterCropOrPad(size, fill=fill, padding_mode=padding_mode)(Image.fromarray(image))
        np.testing.assert_array_equal(result.permute(1, 2, 0).numpy(), np.asarray(expected))


def test_trim_border_equals_timms(timm_transforms, run_stage, make_images):
    images = make_images(1, 4)
    for image, result in zip(images, run_stage([T.TrimBorder(7)], images, ragged="list"), strict=True):
        expected = np.asarray(timm_transforms.TrimBorder(7)(Image.fromarray(image)))
        np.testing.assert_array_equal(result.permute(1, 2, 0).numpy(), expected)
