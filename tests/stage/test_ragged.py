"""Batches of images of all sizes, from arrays."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gpuload.stage import RaggedImages


def test_images_lie_one_after_the_other():
    arrays = [np.full((2, 3, 3), 7, np.uint8), np.full((4, 1, 1), 9, np.uint8)[:, ::-1]]
    images = RaggedImages.from_arrays(arrays)
    assert len(images) == 2
    assert images.pixels.tolist() == [7] * 18 + [9] * 4
    assert images.offsets.tolist() == [0, 18]
    assert images.shapes.tolist() == [[2, 3, 3], [4, 1, 1]]
    assert images.sizes_hw.tolist() == [[2, 3], [4, 1]]
    assert images.regions_tlhw.tolist() == [[0, 0, 2, 3], [0, 0, 4, 1]]
    assert images.labels == ["image 0", "image 1"]


def test_no_images():
    images = RaggedImages.from_arrays([])
    assert len(images) == 0
    assert images.shapes.shape == (0, 3)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((4, 6), np.float32), "float32 of shape (4, 6)"),
        (np.zeros((4, 6), np.uint8), "uint8 of shape (4, 6)"),
        (np.zeros((4, 6, 3)), "float64 of shape (4, 6, 3)"),
        ([[[1, 2, 3]]], "list"),
    ],
)
def test_other_arrays_are_refused(array, got):
    with pytest.raises(TypeError, match=re.escape(f"image 1 must be a uint8 array H×W×C, got {got}")):
        RaggedImages.from_arrays([np.zeros((2, 2, 3), np.uint8), array])
