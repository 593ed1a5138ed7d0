"""`gl.Augment` with the boxes and keypoints of a batch in padded form, compared with a list for each image.

The tensors are on the CPU here; on a device, the same functions run (tests/cuda/test_padded_targets.py).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.augment_batches import image_batch
from helpers.padded_batches import CHAINS, as_lists, assert_equal_targets, make_padded

import gpuload as gl
from gpuload import transforms as T

COUNT = 6


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    ("box_format", "dtype"), [("xyxy", np.float32), ("xywh", np.float64), ("cxcywh", np.float32), ("xyxy", np.int64)]
)
@pytest.mark.filterwarnings("ignore:.*lie outside their image")
def test_padded_targets_equal_targets_in_lists(name, box_format, dtype):
    targets, augment = make_padded(COUNT, box_format, dtype), gl.Augment(CHAINS[name], ragged="list")
    images, padded = augment(image_batch(COUNT), targets, positions=range(COUNT))
    list_images, lists = augment(image_batch(COUNT), as_lists(targets), positions=range(COUNT))
    assert all(map(torch.equal, images, list_images))
    assert_equal_targets(padded, lists, steps=4 if name == "elastic" else 0)  # sums are rounded in another order


def test_padded_boxes_and_instance_masks_move_together():
    images, boxes = image_batch(4), np.array([[[8, 6, 30, 20], [1, 2, 9, 30]]] * 4, np.int64)
    masks = torch.zeros(4, 2, 40, 56, dtype=torch.uint8)
    for row, box in np.ndindex(4, 2):
        left, top, right, bottom = boxes[row, box]
        masks[row, box, top:bottom, left:right] = 1 + box
    chain = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomCrop(24, padding=2)]
    batch = {"boxes": gl.Boxes(boxes, valid=[2, 1, 0, 2]), "masks": gl.Mask(masks)}
    _, moved = gl.Augment(chain)(images, batch)
    assert moved["masks"].shape == (4, 2, 24, 24)
    assert moved["boxes"].valid.sum(dim=1).tolist() == [2, 1, 0, 2]
    for row, box in np.ndindex(4, 2):
        left, top, right, bottom = moved["boxes"].array[row, box].tolist()
        expected = torch.zeros(24, 24, dtype=torch.uint8)
        expected[top:bottom, left:right] = 1 + box
        assert torch.equal(moved["masks"][row, box], expected)


def test_padded_boxes_leave_labels_and_other_values_unchanged():
    targets = {**make_padded(COUNT), "labels": torch.arange(15).expand(COUNT, 15)[:, :5], "name": "x"}
    _, moved = gl.Augment([T.SanitizeBoundingBoxes(min_size=9)])(image_batch(COUNT), targets)
    assert moved["labels"] is targets["labels"]
    assert moved["name"] == "x"
    assert not torch.equal(moved["boxes"].valid, torch.as_tensor(targets["boxes"].valid))


def test_padded_boxes_do_not_change_the_tensors_of_the_user():
    boxes = torch.tensor([[[1.0, 2, 3, 4]]] * 2)
    gl.Augment([T.RandomHorizontalFlip(1.0)])(image_batch(2), {"boxes": gl.Boxes(boxes, "cxcywh")})
    assert boxes.tolist() == [[[1, 2, 3, 4]]] * 2


@pytest.mark.parametrize("valid", [None, [2, 0], torch.tensor([2, 0]), np.array([[True, True], [False, False]])])
def test_boxes_accept_lengths_a_mask_or_nothing_as_valid(valid):
    boxes = gl.Boxes(torch.full((2, 2, 4), 3), valid=valid)
    _, moved = gl.Augment([T.CenterCrop(30)])(image_batch(2), boxes)
    assert moved.valid.tolist() == [[True, True], [valid is None] * 2]
    assert moved.array.dtype == torch.int64


def test_augmented_boxes_can_be_augmented_again():
    images, targets = image_batch(COUNT), make_padded(COUNT)
    first, second = gl.Augment([T.RandomCrop(34)]), gl.Augment([T.SanitizeBoundingBoxes(min_size=9)])
    _, twice = second(*first(images, targets))
    _, once = gl.Augment([T.RandomCrop(34), T.SanitizeBoundingBoxes(min_size=9)])(images, targets)
    assert torch.equal(twice["boxes"].array, once["boxes"].array)
    assert torch.equal(twice["boxes"].valid, once["boxes"].valid)


def test_views_of_padded_boxes_are_a_list():
    views = T.MultiView([[T.RandomHorizontalFlip(1.0)], [T.CenterCrop(20)]])
    _, moved = gl.Augment([views])(image_batch(2), gl.Boxes([[[1, 2, 5, 7]]] * 2))
    assert [view.array.tolist() for view in moved] == [[[[51, 2, 55, 7]]] * 2, [[[0, 0, 0, 0]]] * 2]


def test_keypoints_of_dropped_padded_boxes_become_invalid():
    boxes = gl.Boxes([[[1, 1, 30, 30], [1, 1, 2, 2]]] * 2, valid=[2, 1])
    points = gl.Keypoints(torch.ones(2, 2, 3, 2), valid=[2, 2])
    batch = {"boxes": boxes, "labels": torch.zeros(2, 2), "keypoints": points}
    _, moved = gl.Augment([T.SanitizeBoundingBoxes(min_size=5)])(image_batch(2), batch)
    assert moved["boxes"].valid.tolist() == [[True, False]] * 2
    assert moved["keypoints"].valid.tolist() == [[True, False]] * 2
    _, moved = gl.Augment([T.SanitizeBoundingBoxes(5, labels_getter=None)])(image_batch(2), batch)
    assert moved["keypoints"].valid.tolist() == [[True, True]] * 2


def test_keypoints_without_valid_are_returned_as_a_tensor_beside_padded_boxes():
    batch = {"boxes": gl.Boxes([[[1, 1, 30, 30]]] * 2), "keypoints": gl.Keypoints(torch.ones(2, 1, 3, 2))}
    _, moved = gl.Augment([T.RandomHorizontalFlip(1.0)])(image_batch(2), batch)
    assert moved["keypoints"].tolist() == [[[[54, 1]] * 3]] * 2


@pytest.mark.parametrize("chain", [CHAINS["sanitized"], CHAINS["converted"]], ids=["sanitized", "converted"])
@pytest.mark.filterwarnings("ignore:.*lie outside their image")
def test_padded_targets_with_different_draws_equal_targets_in_lists(chain):
    images, first, second = image_batch(COUNT), make_padded(COUNT), make_padded(COUNT, "xywh")
    draws = {f'batch["{name}"]["{key}"]': int(name == "b") for name in "ab" for key in ("image", "boxes", "points")}
    augment = gl.Augment(chain, draws=draws, ragged="list")
    padded = augment({"a": {"image": images, **first}, "b": {"image": images, **second}}, positions=range(COUNT))
    lists = augment(
        {
            name: {"image": images, **{key: [target[key] for target in as_lists(targets)] for key in targets}}
            for name, targets in (("a", first), ("b", second))
        },
        positions=range(COUNT),
    )
    for name in "ab":
        assert all(map(torch.equal, padded[name]["image"], lists[name]["image"]))
        rows = zip(*(lists[name][key] for key in first), strict=True)
        assert_equal_targets(padded[name], [dict(zip(first, row, strict=True)) for row in rows])
    assert not all(map(torch.equal, padded["a"]["image"], padded["b"]["image"]))


def test_mask_with_draws_of_its_own_follows_the_image_with_these_draws():
    pixels = torch.randint(0, 255, (COUNT, 3, 40, 56), dtype=torch.uint8)
    batch = {"anchor": pixels, "positive": pixels, "mask": gl.Mask(pixels[:, 0], draws=1)}
    augment = gl.Augment([T.RandomHorizontalFlip(), T.RandomCrop(30)], draws={"positive": 1})
    moved = augment(batch)
    assert torch.equal(moved["mask"], moved["positive"][:, 0])
    assert not torch.equal(moved["mask"], moved["anchor"][:, 0])


def test_padded_targets_may_be_read_only_and_have_negative_strides():
    points_yx = np.ones((2, 1, 3, 2)) * [20, 10]
    points = gl.Keypoints(points_yx[..., ::-1], valid=[1, 1])
    boxes = gl.Boxes(np.broadcast_to(np.float32([1, 2, 3, 4]), (2, 1, 4)))
    _, moved = gl.Augment([T.CenterCrop((40, 50))])(image_batch(2), {"boxes": boxes, "points": points})
    assert moved["points"].array.tolist() == [[[[7, 20]] * 3]] * 2
    assert moved["boxes"].array.tolist() == [[[0, 2, 0, 4]]] * 2


@pytest.mark.parametrize("sanitize", [T.SanitizeBoundingBoxes(), T.SanitizeKeyPoints()])
def test_padded_targets_without_any_box_or_keypoint_are_moved(sanitize):
    boxes = gl.Boxes(torch.zeros(2, 0, 4, dtype=torch.int64))
    points = gl.Keypoints(torch.zeros(2, 0, 3, 2), pairs=[(0, 1)], valid=[0, 0])
    batch = {"boxes": boxes, "labels": torch.zeros(2, 0), "points": points}
    chain = [T.RandomHorizontalFlip(1.0), T.RandomRotation(30), T.ElasticTransform(), sanitize]
    _, moved = gl.Augment(chain)(image_batch(2), batch)
    assert (moved["boxes"].array.shape, moved["boxes"].array.dtype) == ((2, 0, 4), torch.int64)
    assert (moved["boxes"].valid.shape, moved["points"].valid.shape) == ((2, 0), (2, 0))
    assert moved["points"].array.shape == (2, 0, 3, 2)


def test_keypoints_without_valid_get_one_from_a_transform_that_drops_them():
    points = torch.tensor([[[3.0, 4], [99, 4]]] * 4)
    batch = {"boxes": gl.Boxes([[[1, 1, 30, 30]]] * 4), "points": gl.Keypoints(points)}
    _, moved = gl.Augment([T.SanitizeKeyPoints()])(image_batch(4), batch)
    assert moved["points"].valid.tolist() == [[True, False]] * 4
    _, moved = gl.Augment([T.RandomApply([T.SanitizeKeyPoints()], p=0.0)])(image_batch(4), batch)
    assert moved["points"].valid.all()


class Shift(T.Custom):
    moves_pixels = True

    def apply(self, images, params):
        return images

    def apply_boxes(self, boxes, params, size_hw, /):
        return boxes + 1


TARGETS = {"boxes": gl.Boxes([[[1, 2, 3, 4]]] * 4)}


@pytest.mark.parametrize(
    ("chain", "batch", "text"),
    [
        ([T.RandomIoUCrop()], TARGETS,
         "RandomIoUCrop draws its crop from the boxes on the CPU, but boxes and keypoints of a batch, such as "
         "Boxes(N×M×4), are transformed on the device without waiting for it; remove RandomIoUCrop, use it in the "
         "Loader that makes the batch, or pass a list with the boxes or keypoints of each image on the CPU"),
        ([T.Mosaic(20)], TARGETS, "Mosaic moves boxes from image to image on the CPU"),
        ([T.CopyPaste()], TARGETS, "CopyPaste moves boxes from image to image on the CPU"),
        ([Shift()], TARGETS, "Shift.apply_boxes gets arrays on the CPU, but boxes and keypoints of a batch, such as"),
        ([Shift()], TARGETS, "waiting for it; remove Shift, use it in the Loader that makes the batch, or pass"),
        ([T.RandomApply([T.RandomIoUCrop()])], TARGETS, "RandomIoUCrop draws its crop from the boxes on the CPU"),
        ([T.RandomApply([T.ConvertBoundingBoxFormat("xywh")])], TARGETS,
         "ConvertBoundingBoxFormat inside another transform may convert the boxes of only some images"),
        ([T.CenterCrop(9)], {**TARGETS, "points": [gl.Keypoints([[1, 2]])] * 4},
         'batch[1]["boxes"] has the boxes of all images together, but batch[1]["points"] is list'),
        ([T.CenterCrop(9)], {"boxes": gl.Boxes([[[1, 2, 3, 4]]] * 3)}, 'batch[1]["boxes"] has 3 entries'),
        ([T.AutoAugment()], TARGETS, "AutoAugment moves only the pixels of the image"),
        ([T.SanitizeBoundingBoxes()], TARGETS, "SanitizeBoundingBoxes: no labels were found"),
    ],
)  # fmt: skip
def test_padded_targets_are_refused_with_reason_and_remedy(chain, batch, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        gl.Augment(chain)(image_batch(4), batch)


def test_padded_targets_on_another_device_than_the_images_are_refused():
    boxes = gl.Boxes(torch.zeros(2, 1, 4, device="meta"))
    text = "batch[1] is on meta, but batch[0] is on cpu; move images and targets to one device"
    with pytest.raises(ValueError, match=re.escape(text)):
        gl.Augment([T.CenterCrop(9)])(image_batch(2), boxes)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (gl.Boxes([[[1, 2, 3, 4]]]), r"the boxes of one image must be \(n, 4\) on the CPU, got boxes of a batch"),
        (gl.Keypoints([[[1, 2]]], valid=[1]), r"the keypoints of one image must be \(…, 2\) on the CPU"),
        (gl.Mask(np.zeros((2, 2, 40, 56))), "a mask must be H×W, or N×H×W for the N masks of an image, got shape"),
    ],
)
def test_loader_refuses_targets_of_a_batch_in_a_sample(sample, text):
    image = gl.Image(np.zeros((40, 56, 3), np.uint8))
    with gl.Loader([(image, sample)], num_workers=0, device="cpu") as loader, pytest.raises(gl.SampleError, match=text):
        next(iter(loader))


BOXES = np.zeros((2, 3, 4))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: gl.Boxes(np.zeros((2, 4)), valid=[1, 2]), ValueError, "for the boxes N×M×4 of a batch, got shape"),
        (lambda: gl.Boxes(BOXES, valid=[1]), ValueError, "must be bool of shape (2, 3), or 2 integers"),
        (lambda: gl.Boxes(BOXES, valid=[1, 4]), ValueError, "the number of rows of each image, 0 … 3, got [1, 4]"),
        (lambda: gl.Boxes(BOXES, valid=[[1, 1, 0]] * 2), ValueError, "got int64 of shape (2, 3)"),
        (lambda: gl.Boxes(BOXES + np.nan, valid=[1, 0]), ValueError, "boxes must be finite numbers, but box 0 is [nan"),
        (lambda: gl.Boxes(torch.zeros(2, 3, 4, 4)), ValueError, "or N×M×4 for a batch, got shape (2, 3, 4, 4)"),
        (lambda: gl.Keypoints(np.zeros((3, 2)), valid=[1]), ValueError, "keypoints N×M×…×2 of a batch, got shape"),
    ],
)
def test_boxes_and_keypoints_refuse_a_valid_that_does_not_match(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_boxes_and_keypoints_become_tensors_on_a_device():
    boxes = gl.Boxes([[[1, 2, 3, 4]]], "xywh", valid=[1]).to("cpu")
    assert (boxes.array.tolist(), boxes.valid.tolist(), boxes.format) == ([[[1, 2, 3, 4]]], [[True]], "xywh")
    points = gl.Keypoints(np.ones((1, 3, 2)), pairs=[(0, 1)]).to("cpu")
    assert (points.array.dtype, points.pairs, points.valid) == (torch.float64, ((0, 1),), None)


def test_padding_may_hold_any_values():
    array: Any = torch.full((2, 3, 4), float("nan"))
    array[0, 0] = 3.0
    assert gl.Boxes(array, valid=[1, 0]).valid.tolist() == [[True, False, False], [False] * 3]
