"""Which leaves are images: one rule, for samples of all kinds."""

from __future__ import annotations

import re
from collections import namedtuple

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
Labelled = namedtuple("Labelled", ["label", "mask"])


def flattened(sample) -> list:
    leaves = []
    flatten(sample, leaves)
    return leaves


def images_of(sample, *, plain: bool = False) -> list[int]:
    leaves = []
    structure = flatten(sample, leaves)
    return list(find_leaves(structure, leaves, plain=plain)[0])


FLOATS = torch.zeros(3, 20, 30)
MASKS = torch.zeros((2, 20, 30), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("sample", "images"),
    [
        ((SAID, ARRAY, SAID), [0, 2]),
        ((ARRAY, gl.Encoded(b"")), [1]),
        ((7, ARRAY, np.arange(9)), [1]),
        ((7, TENSOR), [1]),
        ({"a": ARRAY[..., 0], "b": ARRAY, "c": np.zeros((20, 30))}, [1]),
        ((7, [ARRAY, ARRAY, ARRAY]), [1, 2, 3]),
        ([TENSOR, TENSOR], [0, 1]),
        ({"a": 1, "b": ({"c": [ARRAY, ARRAY]}, [7])}, [1, 2]),
        ((7, CLIP), [1]),
        ((gl.Mask(CLIP[..., 0]), CLIP), [1]),
        ((7, np.zeros((2, 3, 20, 30), np.uint8)), []),
        ((7, np.zeros((20, 30, 3), np.int16)), []),
        ((7, np.zeros((20, 30, 5), np.uint8), ARRAY), [2]),
        ((7, torch.zeros((5, 20, 30), dtype=torch.uint8), TENSOR), [2]),
        ((7, np.zeros((20, 30, 4), np.uint8)), [1]),
        ((7, torch.zeros((1, 20, 30), dtype=torch.uint8)), [1]),
        ((7, np.zeros((0, 30, 3), np.uint8)), []),
        ((TENSOR, {"masks": MASKS}), [0]),
        ((TENSOR, torch.zeros(3, 10, 15)), [0]),
        ((TENSOR, torch.zeros(17, 20, 30)), [0]),
        ((TENSOR, torch.zeros(20, 30)), [0]),
        ((TENSOR, torch.zeros((3, 20, 30), dtype=torch.int64)), [0]),
    ],
)
def test_images_are_what_is_declared_or_for_transforms_the_one_array_that_can_be(sample, images):
    assert images_of(sample) == images


@pytest.mark.parametrize(
    ("sample", "first", "second"),
    [
        ((7, ARRAY, ARRAY), "sample[1], uint8 array 20×30×3", "sample[2], uint8 array 20×30×3"),
        ((ARRAY, ARRAY[..., :1]), "sample[0], uint8 array 20×30×3", "sample[1], uint8 array 20×30×1"),
        ((FLOATS, ARRAY[..., :1]), "sample[1], uint8 array 20×30×1", "sample[0], float32 tensor 3×20×30"),
        ({"x": TENSOR, "y": {"z": FLOATS.half()}}, 'sample["x"], uint8', 'sample["y"]["z"], float16 tensor 3×20×30'),
        ((TENSOR, ARRAY.astype(np.uint16)), "sample[0], uint8", "sample[1], uint16 array 20×30×3"),
        ([7, ARRAY, ARRAY], "sample[1], uint8", "sample[2], uint8"),
        ([ARRAY, (ARRAY, ARRAY)], "sample[0], uint8", "sample[1][0], uint8"),
        ([ARRAY, ARRAY, FLOATS], "sample[0], uint8", "sample[1], uint8"),
        (([ARRAY, ARRAY], FLOATS), "sample[0][0], uint8", "sample[1], float32"),
        ((CLIP, CLIP), "sample[0], uint8 array 5×20×30×3", "sample[1], uint8 array 5×20×30×3"),
        ((CLIP, CLIP.astype(np.float32)), "sample[0], uint8", "sample[1], float32 array 5×20×30×3"),
        ((CLIP, ARRAY), "sample[0], uint8", "sample[1], uint8"),
    ],
)
def test_where_two_leaves_can_be_the_image_transforms_refuse_to_guess(sample, first, second):
    with pytest.raises(TypeError) as caught:
        images_of(sample)
    assert f"{first}" in str(caught.value).split(", may be the image, and so may ")[0]
    assert f", may be the image, and so may {second}" in str(caught.value)
    assert str(caught.value).endswith(
        ": gpuload does not guess what the transforms are for; return gpuload.Image(array), or "
        "gpuload.Image(tensor, layout='CHW'), for the image, and gpuload.Mask(…) for a mask"
    )


@pytest.mark.parametrize(
    ("sample", "place"),
    [
        ((FLOATS, {"masks": MASKS}), 'sample[1]["masks"], uint8 tensor 2×20×30'),
        ({"image": FLOATS, "segmentation": ARRAY[..., :1]}, 'sample["segmentation"], uint8 array 20×30×1'),
        ({"image": 7, "gt_masks": [ARRAY[..., :1]]}, 'sample["gt_masks"][0], uint8 array 20×30×1'),
        (Labelled(7, MASKS), "sample.mask, uint8 tensor 2×20×30"),
        ({'"mask"': MASKS}, "sample['\"mask\"'], uint8"),
    ],
)
def test_an_array_with_the_name_of_a_mask_is_never_taken_for_the_image(sample, place):
    with pytest.raises(TypeError, match=re.escape(f"{place}") + ".*has the name of a mask: gpuload does not guess"):
        images_of(sample)
    assert images_of((SAID, sample)) == [0]


@pytest.mark.parametrize(
    "sample", [(ARRAY, 1), (7, TENSOR), ([ARRAY, ARRAY], 1), (CLIP, 1), (FLOATS, {"masks": MASKS}), (ARRAY, FLOATS)]
)
def test_without_transforms_only_what_is_declared_is_an_image(sample):
    assert images_of(sample, plain=True) == []
    assert images_of((sample, SAID), plain=True) == [len(flattened(sample))]
    assert images_of((sample, gl.Image(CLIP)), plain=True) == [len(flattened(sample))]


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
