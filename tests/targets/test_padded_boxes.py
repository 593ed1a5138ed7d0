"""`Loader(boxes="padded")`: boxes as N×M×4, and the values that belong to boxes padded like them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from targets.samples import boxes, image, only_batch

import gpuload as gl
from gpuload import transforms as T

BOX_FIELDS = ("labels", "area", "masks", "visibility")


def sample(index: int) -> Any:
    count, random = (0, 3, 1, 2)[index % 4], np.random.default_rng(index)
    return image(), {
        "boxes": gl.Boxes(boxes(count) + index),
        "labels": np.arange(count) + 10 * index,
        "area": torch.arange(count, dtype=torch.float64),
        "masks": gl.Mask(np.ones((count, 40, 50), np.uint8)),
        "keypoints": gl.Keypoints(random.uniform(0, 40, (count, 3, 2)).astype(np.float32), pairs=[(0, 2)]),
        "visibility": random.integers(0, 3, (count, 3)),
        "image_id": index,
        "size": np.array([40, 50]),
    }


CHAIN = [T.RandomHorizontalFlip(), T.RandomCrop(30), T.SanitizeBoundingBoxes(min_size=9)]


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("chain", [[], CHAIN, [T.Mosaic(40), *CHAIN]], ids=["none", "sanitized", "Mosaic"])
def test_padded_boxes_hold_the_values_of_the_lists(chain, workers):
    options = {"transforms": chain, "num_workers": workers}
    _, lists = only_batch(sample, 8, **options)
    _, padded = only_batch(sample, 8, boxes="padded", **options)
    assert padded["boxes"].array.shape == (8, max(len(target["boxes"]) for target in lists), 4)
    for row, target in enumerate(lists):
        valid = padded["boxes"].valid[row]
        assert valid.tolist() == sorted(valid.tolist(), reverse=True)
        assert torch.equal(padded["boxes"].array[row][valid], target["boxes"])
        assert torch.equal(padded["keypoints"].array[row][valid], target["keypoints"])
        assert torch.equal(padded["keypoints"].valid[row], valid)
        for name in BOX_FIELDS:
            assert torch.equal(padded[name][row][valid], torch.as_tensor(target[name]))
            assert not padded[name][row][~valid].any()
    assert padded["image_id"].tolist() == list(range(8))
    assert padded["size"].shape == (8, 2)


def test_padded_boxes_may_be_anywhere_in_a_sample():
    _, padded, labels = only_batch(lambda i: (image(), gl.Boxes(boxes(i)), np.arange(i)), boxes="padded")
    assert padded.valid.tolist() == [[False] * 2, [True, False], [True] * 2]
    assert labels.tolist() == [[0, 0], [0, 0], [0, 1]]


def test_batch_without_any_box_is_padded_to_no_boxes():
    def empty(i):
        fields = {"boxes": gl.Boxes([]), "labels": np.zeros(0, np.int64), "masks": gl.Mask(np.zeros((0, 40, 50), bool))}
        return image(), fields

    _, padded = only_batch(empty, boxes="padded", transforms=[T.CenterCrop(20)])
    assert (padded["boxes"].array.shape, padded["boxes"].valid.shape) == ((3, 0, 4), (3, 0))
    assert (padded["labels"].shape, padded["masks"].shape) == ((3, 0), (3, 0, 20, 20))


def test_empty_values_take_the_dtype_and_shape_of_nonempty_values():
    make = lambda i: (image(), {"boxes": gl.Boxes(boxes(i)), "scores": np.ones((i, 2)) if i else np.zeros(0, np.int32)})  # noqa: E731
    _, padded = only_batch(make, boxes="padded")
    assert (padded["scores"].shape, padded["scores"].dtype) == ((3, 2, 2), torch.float64)


@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_masks_of_padded_boxes_follow_ragged(ragged):
    def make(i):
        count, height = i % 3, 40 + i
        masks = gl.Mask(np.ones((count, height, 50), np.uint8))
        return image(height), {"boxes": gl.Boxes(boxes(count)), "masks": masks}

    _, target = only_batch(make, 3, boxes="padded", ragged=ragged)
    if ragged == "list":
        assert [tuple(mask.shape) for mask in target["masks"]] == [(0, 40, 50), (1, 41, 50), (2, 42, 50)]
    else:
        masks, sizes = target["masks"]
        assert masks.shape == (3, 2, 42, 50)
        assert sizes.tolist() == [[40, 50], [41, 50], [42, 50]]
        assert masks.sum(dim=(1, 2, 3)).tolist() == [0, 41 * 50, 2 * 42 * 50]


def test_padded_boxes_of_a_loader_are_the_input_of_augment():
    images, target = only_batch(sample, 8, boxes="padded")
    target["masks"] = gl.Mask(target["masks"])
    images, target = gl.Augment([T.RandomHorizontalFlip(1.0), T.SanitizeBoundingBoxes(min_size=9)])(images, target)
    _, lists = only_batch(sample, 8, transforms=[T.RandomHorizontalFlip(1.0), T.SanitizeBoundingBoxes(min_size=9)])
    assert images.shape == (8, 3, 40, 50)
    for row, expected in enumerate(lists):
        valid = target["boxes"].valid[row]
        assert torch.equal(target["keypoints"].valid[row], valid)
        assert torch.equal(target["boxes"].array[row][valid], expected["boxes"])
        assert torch.equal(target["keypoints"].array[row][valid], expected["keypoints"])
        assert torch.equal(target["visibility"][row][valid], torch.as_tensor(expected["visibility"]))


def test_views_of_padded_boxes_in_a_loader_are_a_list():
    views = T.MultiView([[T.RandomHorizontalFlip(1.0)], [T.CenterCrop(20)]])
    _, padded = only_batch(lambda i: (image(), gl.Boxes(boxes(i))), boxes="padded", transforms=[views])
    assert [view.array.shape for view in padded] == [(3, 2, 4)] * 2
    assert padded[0].array[2, 0].tolist() == [35, 5, 45, 20]


def test_each_view_of_padded_boxes_has_its_own_format():
    views = T.MultiView([[T.ConvertBoundingBoxFormat("xywh")], [T.CenterCrop(20)]])
    _, padded = only_batch(lambda i: (image(), gl.Boxes([[12, 15, 22, 18]])), boxes="padded", transforms=[views])
    assert [view.format for view in padded] == ["xywh", "xyxy"]
    assert [view.array[0].tolist() for view in padded] == [[[12, 15, 10, 3]], [[0, 5, 7, 8]]]


def test_views_pad_the_visibility_of_keypoints_next_to_boxes():
    views = T.MultiView([[T.RandomHorizontalFlip(1.0)], [T.CenterCrop(20)]])
    _, padded = only_batch(sample, boxes="padded", transforms=[views])
    _, lists = only_batch(sample, transforms=[views])
    assert [view.shape for view in padded["visibility"]] == [(3, 3, 3)] * 2
    for row, target in enumerate(lists):
        for view, expected in zip(padded["visibility"], target["visibility"], strict=True):
            assert torch.equal(view[row, : len(expected)], torch.as_tensor(expected))
            assert not view[row, len(expected) :].any()


def test_boxes_of_images_with_different_draws_are_padded_each_with_the_values_next_to_them():
    def make(index):
        views = {}
        for draws, count in ((0, index % 3), (1, (index + 1) % 3)):
            views[f"view {draws}"] = {
                "image": gl.Image(image().hwc, draws=draws),
                "boxes": gl.Boxes(boxes(count) + index, draws=draws),
                "labels": np.arange(count),
            }
        return views

    options = {"transforms": CHAIN, "batch_size": 8}
    padded, lists = only_batch(make, 8, boxes="padded", **options), only_batch(make, 8, **options)
    for name, target in padded.items():
        assert target["boxes"].draws == int(name[-1])
        for row, expected in enumerate(lists[name]):
            valid = target["boxes"].valid[row]
            assert torch.equal(target["boxes"].array[row][valid], expected["boxes"])
            assert torch.equal(target["labels"][row][valid], torch.as_tensor(expected["labels"]))
            assert torch.equal(target["image"][row], expected["image"])
    assert not torch.equal(padded["view 0"]["image"], padded["view 1"]["image"])


def test_boxes_of_several_formats_are_padded_after_a_conversion():
    make = lambda i: (image(), gl.Boxes([[1, 2, 7, 9]], ("xyxy", "xywh")[i % 2]))  # noqa: E731
    text = r"must have one format, but sample\[1\] of sample 0 is 'xyxy', and sample\[1\] of sample 1 is 'xywh'; put a"
    with pytest.raises(gl.CollateError, match=text):
        only_batch(make, boxes="padded")
    _, padded = only_batch(make, boxes="padded", transforms=[T.ConvertBoundingBoxFormat("xyxy")])
    assert padded.array[:, 0].tolist() == [[1, 2, 7, 9], [1, 2, 8, 11], [1, 2, 7, 9]]
    assert padded.format == "xyxy"


def test_keypoints_of_an_image_are_stacked_next_to_as_many_padded_boxes():
    make = lambda i: (image(), {"boxes": gl.Boxes(boxes(3)), "pose": gl.Keypoints(boxes(3)[:, :2], pairs=())})  # noqa: E731
    _, padded = only_batch(make, boxes="padded")
    assert isinstance(padded["pose"], torch.Tensor)
    assert padded["boxes"].array.shape == (3, 3, 4)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (lambda i: {"boxes": gl.Boxes(boxes(1)), "labels": [1] * i}, "all samples of a batch must have the same"),
        (lambda i: {"boxes": gl.Boxes(boxes(1).astype(("float32", "int32")[i]))},
         'are stacked, but sample[1]["boxes"] of sample 0 is float32 tensor 1×4, and sample[1]["boxes"] of sample 1 is '
         "int32 tensor 1×4; return one dtype"),
        (lambda i: {"boxes": gl.Boxes(boxes(1)), "keypoints": gl.Keypoints(np.zeros((1, 3 + i, 2)))},
         'sample[1]["keypoints"] of sample 0 is float64 tensor 1×3×2, and sample[1]["keypoints"] of sample 1 is'),
    ],
)  # fmt: skip
def test_values_that_cannot_be_padded_are_refused(target, text):
    with pytest.raises(gl.CollateError, match=re.escape(text)):
        only_batch(lambda i: (image(), target(i)), 2, boxes="padded")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"boxes": "pad"}, "boxes must be one of 'list', 'padded', got 'pad'"),
        (
            {"boxes": "padded", "collate_fn": list},
            "boxes='padded' cannot be combined with a collate_fn, which gets",
        ),
        (
            {"boxes": "padded", "transforms": [T.RandomApply([T.ConvertBoundingBoxFormat("xywh")])]},
            "ConvertBoundingBoxFormat inside another transform may convert the boxes of only some images",
        ),
        ({"boxes": "padded", "batch_size": None}, "boxes='padded' cannot be combined with batch_size=None, which gets"),
    ],
)
def test_invalid_uses_of_boxes_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        gl.Loader([], **options)
