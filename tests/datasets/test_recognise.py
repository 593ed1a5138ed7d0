"""Which leaves are images: one rule, for samples of all kinds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload.datasets.recognise import find_leaves, unfold_clips
from gpuload.datasets.tree import describe, flatten, unflatten

ARRAY = np.zeros((20, 30, 3), np.uint8)
CLIP = np.zeros((5, 20, 30, 3), np.uint8)
TENSOR = torch.zeros(3, 20, 30, dtype=torch.uint8)
SAID = gl.Image(ARRAY)


def images_of(sample, *, plain: bool = False) -> list[int]:
    leaves = []
    structure = flatten(sample, leaves)
    return list(find_leaves(structure, leaves, plain=plain)[0])


@pytest.mark.parametrize(
    ("sample", "images"),
    [
        ((SAID, ARRAY, SAID), [0, 2]),
        ((ARRAY, gl.Encoded(b"")), [1]),
        ((7, ARRAY, ARRAY), [1]),
        ((7, TENSOR, TENSOR), [1]),
        ({"a": ARRAY[..., 0], "b": ARRAY, "c": ARRAY}, [1]),
        ((7, [ARRAY, ARRAY, ARRAY]), [1, 2, 3]),
        ([TENSOR, TENSOR], [0, 1]),
        ({"a": 1, "b": ({"c": [ARRAY, ARRAY]}, [ARRAY])}, [1, 2]),
        ([ARRAY, ARRAY, 7], [0]),
        ([7, ARRAY, ARRAY], [1]),
        ([ARRAY, (ARRAY, ARRAY)], [0]),
        ([ARRAY, ARRAY[..., 0]], [0]),
        ((CLIP, ARRAY, CLIP), [1]),
        ((7, CLIP, CLIP), [1]),
        ((gl.Mask(CLIP[..., 0]), CLIP), [1]),
        ((7, np.zeros((2, 3, 20, 30), np.uint8)), []),
        ((7, np.zeros((20, 30, 3), np.int16)), []),
        ((7, np.zeros((20, 30, 5), np.uint8), ARRAY), [2]),
        ((7, torch.zeros((5, 20, 30), dtype=torch.uint8), TENSOR), [2]),
        ((7, np.zeros((20, 30, 4), np.uint8)), [1]),
        ((7, torch.zeros((1, 20, 30), dtype=torch.uint8)), [1]),
        ((7, np.zeros((0, 30, 3), np.uint8)), []),
    ],
)
def test_images_are_what_says_so_or_the_first_array_with_its_list_or_the_first_clip(sample, images):
    assert images_of(sample) == images


def test_a_clip_that_nothing_is_applied_to_stays_as_it_is_unless_it_says_what_it_is():
    assert images_of((CLIP, 1), plain=True) == []
    assert images_of((gl.Image(CLIP), 1), plain=True) == [0]
    assert images_of((ARRAY, 1), plain=True) == [0]


def test_frames_of_clips_become_leaves_of_their_own():
    given = {"clip": gl.Image(CLIP), "image": SAID, "mask": gl.Mask(ARRAY[..., 0]), "name": "a"}
    leaves = []
    structure = flatten(given, leaves)
    found, targets, clips = find_leaves(structure, leaves, plain=False)
    assert clips
    structure, leaves, found, targets = unfold_clips(structure, leaves, found, targets)
    assert describe(structure) == "{'clip': clip of 5 frames, 'image': ·, 'mask': ·, 'name': ·}"
    assert list(found) == [0, 1, 2, 3, 4, 5]
    assert list(targets) == [6]
    assert leaves[7] == "a"
    finished = [torch.full((3, 4, 6), frame) for frame in range(5)]
    again = unflatten(structure, [*finished, *leaves[5:]])
    assert again["clip"].shape == (5, 3, 4, 6)
    assert again["clip"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_an_image_of_four_axes_is_a_clip():
    assert gl.Image(CLIP).hwc.shape == (5, 20, 30, 3)
    assert gl.Image(CLIP.transpose(0, 3, 1, 2), layout="CHW").hwc.shape == (5, 20, 30, 3)
