"""`find_leaves`, which finds the images in a sample, and the Loader's warnings of leaves that may be masks or boxes."""

from __future__ import annotations

import re
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from helpers.both_loaders import gpuload_batches
from helpers.generated_images import encode
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.recognise import find_leaves, unfold_clips
from gpuload.datasets.tree import describe, flatten, unflatten

ARRAY = np.zeros((20, 30, 3), np.uint8)
CLIP = np.zeros((5, 20, 30, 3), np.uint8)
TENSOR = torch.zeros(3, 20, 30, dtype=torch.uint8)
DECLARED = gl.Image(ARRAY)
Labelled = namedtuple("Labelled", ["label", "mask"])


def image_leaves(sample, *, plain: bool = False) -> list[int]:
    leaves = []
    structure = flatten(sample, leaves)
    images, _ = find_leaves(structure, leaves, plain=plain)
    return list(images)


FLOATS = torch.zeros(3, 20, 30)
MASKS = torch.zeros((2, 20, 30), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("sample", "images"),
    [
        ((DECLARED, ARRAY, DECLARED), [0, 2]),
        ((ARRAY, gl.Encoded(b"")), [1]),
        ((7, ARRAY, np.arange(9)), [1]),
        ((7, TENSOR), [1]),
        (ARRAY, [0]),
        (TENSOR, [0]),
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
def test_find_leaves_returns_declared_images_or_the_only_candidate(sample, images):
    assert image_leaves(sample) == images


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
def test_find_leaves_refuses_to_choose_between_two_candidates(sample, first, second):
    end = (
        ": gpuload does not guess which leaf to transform; return gpuload.Image(array), or "
        "gpuload.Image(tensor, layout='CHW'), for the image, and gpuload.Mask(…) for a mask"
    )
    pattern = f"{re.escape(first)}.*, may be the image, and so may {re.escape(second)}.*{re.escape(end)}$"
    with pytest.raises(TypeError, match=pattern):
        image_leaves(sample)


@pytest.mark.parametrize(
    ("sample", "leaf"),
    [
        ((FLOATS, {"masks": MASKS}), 'sample[1]["masks"], uint8 tensor 2×20×30'),
        ({"image": FLOATS, "segmentation": ARRAY[..., :1]}, 'sample["segmentation"], uint8 array 20×30×1'),
        ({"image": 7, "gt_masks": [ARRAY[..., :1]]}, 'sample["gt_masks"][0], uint8 array 20×30×1'),
        (Labelled(7, MASKS), "sample.mask, uint8 tensor 2×20×30"),
        ({'"mask"': MASKS}, "sample['\"mask\"'], uint8"),
    ],
)
def test_find_leaves_refuses_an_array_named_like_a_mask(sample, leaf):
    with pytest.raises(TypeError, match=re.escape(leaf) + ".*has the name of a mask: gpuload does not guess"):
        image_leaves(sample)
    assert image_leaves((DECLARED, sample)) == [0]


@pytest.mark.parametrize(
    "sample", [(ARRAY, 1), (7, TENSOR), ([ARRAY, ARRAY], 1), (CLIP, 1), (FLOATS, {"masks": MASKS}), (ARRAY, FLOATS)]
)
def test_find_leaves_without_transforms_returns_declared_images_only(sample):
    assert image_leaves(sample, plain=True) == []
    assert image_leaves((DECLARED, sample), plain=True) == image_leaves((gl.Image(CLIP), sample), plain=True) == [0]


def test_unfold_clips_makes_each_frame_a_leaf():
    sample = {"clip": gl.Image(CLIP), "image": DECLARED, "mask": gl.Mask(ARRAY[..., 0]), "name": "a"}
    leaves = []
    structure = flatten(sample, leaves)
    images, targets = find_leaves(structure, leaves, plain=False)
    structure, leaves, images, targets = unfold_clips(structure, leaves, images, targets)
    assert describe(structure) == "{'clip': clip of 5 frames, 'image': ·, 'mask': ·, 'name': ·}"
    assert list(images) == [0, 1, 2, 3, 4, 5]
    assert list(targets) == [6]
    assert leaves[7] == "a"  # after five frames, the image and the mask
    finished = [torch.full((3, 4, 6), frame) for frame in range(5)]
    restored = unflatten(structure, [*finished, *leaves[5:]])
    assert restored["clip"].shape == (5, 3, 4, 6)
    assert restored["clip"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


RGB = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
LEVELS = RGB[..., 0]
BOXES = np.array([[1, 2, 10, 12], [3, 4, 9, 9]], np.float32)
FLIP, COLOUR = [T.RandomHorizontalFlip()], [T.ColorJitter(0.4)]
Pair = namedtuple("Pair", ["image", "gt_mask"])


JPEG = gl.Encoded(encode(RGB))


def pillow_image(mode: str) -> PILImage.Image:
    return PILImage.fromarray(RGB).convert(mode)


def warnings_of(sample, transforms, *, epochs: int = 1, **options) -> list[str]:
    options = {"num_workers": 0, "device": "cpu", "ragged": "list", **options}
    with (
        warnings.catch_warnings(record=True) as caught,
        gl.Loader([sample] * 40, 8, transforms=transforms, **options) as loader,
    ):
        warnings.simplefilter("always")
        for _ in range(epochs):
            for _ in loader:
                pass
    assert {(warning.category, warning.filename) for warning in caught} <= {(RuntimeWarning, __file__)}
    return [str(warning.message) for warning in caught]


STAYS_TEXT = "stays unchanged while the transforms move the image's pixels; if it"
MASK_TEXT = f"of the image's size, {STAYS_TEXT} is a mask, return gpuload.Mask"
BOXES_TEXT = f"{STAYS_TEXT} belongs to the image, return gpuload."
SAMPLES_WITH_WARNING = {
    "a mask": ((RGB, LEVELS), f"sample[1], uint8 array 20×30 {MASK_TEXT}(array)"),
    "a mask by name": (
        {"image": RGB, "mask": LEVELS.astype(np.int64)},
        f'sample["mask"], int64 array 20×30 {MASK_TEXT}(array)',
    ),
    "a mask that was read as a picture": (
        {"image": RGB, "mask": RGB},
        f'sample["mask"], uint8 array 20×30×3 {MASK_TEXT}(array[..., 0])',
    ),
    "masks next to bytes": (
        Pair(JPEG, torch.zeros(7, 20, 30, dtype=torch.bool)),
        f"sample.gt_mask, bool tensor 7×20×30 {MASK_TEXT}(tensor)",
    ),
    "boxes": (
        (RGB, {"boxes": BOXES, "labels": np.arange(2)}),
        f"sample[1][\"boxes\"], float32 array 2×4, {BOXES_TEXT}Boxes(array, format='xyxy')",
    ),
    "lists of boxes": (
        {"bboxes": BOXES.tolist(), "image": RGB},
        f"sample[\"bboxes\"], a list, {BOXES_TEXT}Boxes(boxes, format='xyxy')",
    ),
    "boxes by COCO's name": (
        {"image": RGB, "bbox": BOXES},
        f"sample[\"bbox\"], float32 array 2×4, {BOXES_TEXT}Boxes(array, format='xyxy'), with 'xywh' if they are COCO's",
    ),
    "COCO's annotations": (
        (RGB, [{"bbox": [1, 2, 3, 4], "id": 7}, {"bbox": [5, 6, 7, 8], "id": 8}]),
        f'sample[1][0]["bbox"], a list, {STAYS_TEXT} belongs to the image, return all boxes of the image as one '
        "gpuload.Boxes([o['bbox'] for o in objects], format='xywh')",
    ),
    "keypoints": (
        {"image": RGB, "keypoints": torch.zeros(2, 17, 3)},
        f'sample["keypoints"], float32 tensor 2×17×3, {BOXES_TEXT}Keypoints(tensor[..., :2])',
    ),
    "both": (
        {"image": RGB, "mask": LEVELS, "boxes": BOXES},
        f"return gpuload.Boxes(array, format='xyxy'); sample[\"mask\"], uint8 array 20×30 {MASK_TEXT}",
    ),
    "floats of three channels": (
        (gl.Image(RGB), RGB.astype(np.float32)),
        f"sample[1], float32 array 20×30×3 {MASK_TEXT}(array[..., 0]); if it is an image, gpuload.Image(array)",
    ),
    "a second image": (
        (gl.Image(RGB), torch.from_numpy(RGB).permute(2, 0, 1)),
        f"sample[1], uint8 tensor 3×20×30 {MASK_TEXT}(tensor); if it is an image, gpuload.Image(tensor, layout='CHW')",
    ),
    "a clip of its size": ((gl.Image(RGB), np.stack([RGB, RGB])), "sample[1], uint8 array 2×20×30×3 of the image's"),
    "three masks": (
        (RGB, torch.zeros(3, 20, 30, dtype=torch.bool)),
        f"sample[1], bool tensor 3×20×30 {MASK_TEXT}(tensor)",
    ),
    "many": ((JPEG, [RGB] * 9), "if it is an image, gpuload.Image(array); and 6 more"),
}


@pytest.mark.parametrize("kind", SAMPLES_WITH_WARNING)
def test_loader_warns_of_a_leaf_that_does_not_move_with_the_image(kind):
    sample, text = SAMPLES_WITH_WARNING[kind]
    [warning] = warnings_of(sample, FLIP)
    assert text in warning


@pytest.mark.parametrize("transforms", [FLIP, COLOUR, []])
@pytest.mark.parametrize(
    ("sample", "leaf", "mode"),
    [
        ((pillow_image("RGB"), pillow_image("P")), "sample[1]", "P"),
        ({"a": pillow_image("1"), "b": pillow_image("RGB")}, 'sample["a"]', "1"),
        ((pillow_image("RGB"), pillow_image("L")), "sample[1]", "L"),
        ((JPEG, gl.Encoded(encode(RGB, "PNG", "P"))), "sample[1]", "P"),
        ((JPEG, gl.Encoded(encode(RGB, "PNG", "L"))), "sample[1]", "L"),
        ({"image": pillow_image("L"), "mask": pillow_image("L")}, 'sample["mask"]', "L"),
        ({"image": JPEG, "masks": [gl.Encoded(encode(RGB, "PNG", "RGB"))]}, 'sample["masks"][0]', "RGB"),
    ],
)
def test_loader_warns_of_a_picture_that_looks_like_a_mask(sample, leaf, mode, transforms):
    [warning] = warnings_of(sample, transforms)
    assert warning == (
        f"{leaf}, with Pillow mode '{mode}', is treated as a photograph, and its values as colours; if it is a mask, "
        "return gpuload.Mask(picture)"
    )


SAMPLES_WITHOUT_WARNING = {
    "targets": ({"image": RGB, "mask": gl.Mask(LEVELS), "boxes": gl.Boxes(BOXES)}, FLIP),
    "numbers": ((RGB, 3, "a", np.arange(4), np.zeros((2, 4)), torch.zeros(20)), FLIP),
    "images that say so": ((gl.Image(RGB), gl.Image(RGB)), FLIP),
    "a list of frames": (([RGB, RGB], 1), FLIP),
    "a clip": ((np.stack([RGB, RGB]), 1), FLIP),
    "a mask, and colours alone": ({"image": RGB, "mask": LEVELS, "boxes": BOXES}, COLOUR),
    "another image, and colours alone": ((gl.Image(RGB), RGB[..., :1]), COLOUR),
    "an array of another size": ((gl.Image(RGB), np.zeros((9, 9, 3), np.uint8)), FLIP),
    "no transforms": ((RGB, RGB, LEVELS), []),
    "grey photographs": ((pillow_image("L"), pillow_image("L")), FLIP),
    "a grey JPEG": ((JPEG, gl.Encoded(encode(LEVELS))), FLIP),
    "a palette of another size": ((pillow_image("RGB"), pillow_image("P").resize((8, 9))), FLIP),
    "a palette by itself": ((pillow_image("P"), 1), FLIP),
    "a mode that was asked for": ((JPEG, gl.Encoded(encode(RGB, "PNG", "L"), mode="L")), FLIP),
}


@pytest.mark.parametrize("kind", SAMPLES_WITHOUT_WARNING)
def test_loader_does_not_warn_of_correct_samples(kind):
    assert warnings_of(*SAMPLES_WITHOUT_WARNING[kind]) == []


@pytest.mark.parametrize(
    "transform",
    [T.Resize((8, 8)), T.Pad(2), T.RandomRotation(9), T.RandAugment(), T.RandomApply(FLIP), T.ElasticTransform()],
    ids=repr,
)
def test_loader_warns_for_each_transform_that_moves_pixels(transform):
    assert len(warnings_of((RGB, LEVELS), [transform])) == 1


@pytest.mark.processes
def test_loader_warns_once_for_all_workers_and_epochs():
    assert len(warnings_of((RGB, LEVELS), FLIP, epochs=3, num_workers=2, persistent_workers=False)) == 1


def test_loader_warns_if_only_later_samples_have_a_mask():
    samples = [{"image": gl.Image(RGB), "mask": LEVELS if index == 9 else None} for index in range(40)]
    with pytest.warns(RuntimeWarning, match="Mask"):
        gpuload_batches(samples, 2, transforms=FLIP, collate_fn=list)


def test_loader_warns_if_the_first_chunk_does_not_fit_in_its_slot():
    large = np.zeros((900, 900, 3), np.uint8)  # 2.4 MB; the first slots allow 320 KiB per sample
    assert len(warnings_of((large, large[..., 0]), FLIP)) == 1
