"""Errors of targets that do not match their images or the transforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.peers import torchvision
from targets.samples import boxes, image, only_batch, pixels, png

import gpuload as gl
from gpuload import transforms as T

MASK = np.zeros((40, 50), np.uint8)
SANITIZE = [T.SanitizeBoundingBoxes()]


@pytest.mark.parametrize(
    ("make", "transforms", "text"),
    [
        (lambda: (image(), gl.Mask(MASK[:30])), [], r"have the size of its image, 40×50 .*mask sample\[1\] has 30×50"),
        (lambda: (image(), gl.Mask(png(MASK[:, :20]))), [], r"size of its image, 40×50 .*mask sample\[1\] has 40×20"),
        (lambda: {"x": image(), "y": [{"masks": gl.Mask(MASK[:30])}]}, [],
         r'40×50 \(height × width\), but the mask sample\["y"\]\[0\]\["masks"\] has 30×50'),
        (lambda: (image(), gl.Mask(MASK[..., None])), [],
         r"the mask sample\[1\] has shape 40 × 50 × 1, and its image is 40 × 50: the last axis looks like channels.*"
         "return H×W"),
        (lambda: (image(), gl.Mask(pixels())), [],
         r"mask sample\[1\] has shape 40 × 50 × 3.*last axis looks like channels"),
        (lambda: (image(), gl.Mask(np.zeros((2, 30, 50)))), [],
         r"size of its image, 40×50 .*mask sample\[1\] has 30×50"),
        (lambda: (image(), gl.Mask(png(pixels()))), [],
         r"one value per pixel .*mode of this .* is 'RGB'.*gpuload.Mask\(array\)"),
        (lambda: (image(), gl.Boxes([[1, 2, np.nan, 4]])), [], r"finite numbers, but box 0 is \[1.0, 2.0, nan, 4.0\]"),
        (lambda: (image(), gl.Boxes([[9, 2, 3, 4]])), [], r"box 0 ends before it begins.*'xyxy'; is the format right"),
        (lambda: (image(), gl.Boxes([[9, 2, 3, -4]], "xywh")), [], "box 0 has a negative width or height"),
        (lambda: (image(), gl.Boxes([[9, 2, 3]])), [], r"boxes must be an \(n, 4\) array.*got shape \(1, 3\)"),
        (lambda: (image(), gl.Boxes([[1, 2, 3, 4]], "ltrb")), [], "'xyxy', 'xywh', 'cxcywh', got 'ltrb'"),
        (lambda: (image(), gl.Keypoints([[1, 2, 3]])), [], r"keypoints must be a \(…, 2\) array.*got shape \(1, 3\)"),
        (lambda: (image(), gl.Mask(np.zeros(5))), [], r"H×W, or N×H×W .*got shape \(5,\)"),
        (lambda: (image(), gl.Mask(np.array(["a"]))), [], r"Mask\(\) takes an array of numbers, got <U1"),
        (lambda: {"boxes": gl.Boxes(boxes(1)), "y": 1}, [], "boxes or keypoints, but no image to which they belong"),
        (lambda: (gl.Image(pixels()), gl.Image(pixels(20)), gl.Boxes(boxes(1))), [],
         r"must have the same size, but sample\[0\] has 40×50 and sample\[1\] has 20×50"),
        (lambda: (image(), gl.Boxes(boxes(1))), [T.AutoAugment()], "AutoAugment moves only the pixels of the image"),
        (lambda: (image(), gl.Mask(MASK)), [T.RandAugment()],
         "RandAugment moves only the pixels.*remove RandAugment, or return no"),
        (lambda: (image(), gl.Mask(MASK)), [T.RandomApply([T.TrivialAugmentWide()])],
         "TrivialAugmentWide moves only the pixels"),
        (lambda: (image(), 3), [T.RandomIoUCrop()],
         r"RandomIoUCrop needs samples with one set of boxes.*this sample has 0"),
        (lambda: (image(), gl.Mask(MASK)), SANITIZE,
         "SanitizeBoundingBoxes needs samples with one set.*this sample has 0"),
        (lambda: (image(), {"boxes": gl.Boxes(boxes(1))}), SANITIZE, "no labels were found under 'boxes'; give Sanit"),
        (lambda: (image(), gl.Boxes(boxes(1))), SANITIZE, "no labels were found: they are expected in a dict, got Box"),
        (lambda: (image(), {"boxes": gl.Boxes(boxes(2)), "labels": np.arange(3)}), SANITIZE,
         r"there are 2 boxes, but their labels have shape \(3,\)"),
        (lambda: (image(), {"boxes": gl.Boxes(boxes(2)), "labels": [1, 2]}), SANITIZE,
         r"must be arrays or tensors with one entry for each, got list: \[1, 2\]"),
        (lambda: (image(), {"boxes": gl.Boxes(boxes(2)), "labels": np.arange(2)}),
         [T.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["labels"] + 1)],
         "must return arrays of the sample itself"),
        (lambda: (image(), {"boxes": gl.Boxes(boxes(2)), "labels": np.arange(2)}), [T.MultiView([SANITIZE, SANITIZE])],
         "different boxes in each view of a MultiView"),
        (lambda: (image(), gl.Mask(MASK), 1),
         [T.Resize((8, 8)), T.ToDtype("float32", scale=True), T.MixUp(num_classes=3)], "MixUp mixes images"),
    ],
)  # fmt: skip
def test_an_error_of_unsuitable_targets_says_what_is_wrong(make, transforms, text):
    with pytest.raises(gl.SampleError, match=text) as caught:
        only_batch(lambda i: make(), 2, transforms=transforms)
    assert "sample 0" in str(caught.value)


def test_on_error_skip_skips_a_sample_with_a_mask_of_another_size():
    sample = lambda i: (image(), gl.Mask(MASK if i else MASK[:30]))  # noqa: E731
    with pytest.warns(RuntimeWarning, match="a mask must have the size of its image.*it was skipped"):
        images, masks = only_batch(sample, 4, on_error="skip")
    assert len(images) == len(masks) == 3


def test_boxes_beyond_the_image_are_clipped_by_a_crop_and_dropped_by_sanitize():
    def sample(i):
        return image(), {"boxes": gl.Boxes([[-10.0, 5, 20, 60], [1, 1, 9, 9]]), "labels": np.arange(2)}

    _, targets = only_batch(sample, transforms=[T.CenterCrop((40, 50)), T.Pad(0), T.CenterCrop((36, 50))])
    assert targets[0]["boxes"].tolist() == [[0, 3, 20, 36], [1, 0, 9, 7]]
    _, targets = only_batch(sample, transforms=SANITIZE)
    assert targets[0]["labels"].tolist() == [1]
    _, targets = only_batch(sample, transforms=[T.ClampBoundingBoxes(), *SANITIZE])
    assert targets[0]["boxes"].tolist() == [[0, 5, 20, 40], [1, 1, 9, 9]]


def test_pad_refuses_a_fill_outside_the_dtype_of_a_mask():
    transforms = [T.Pad(2, fill={gl.Image: 0, gl.Mask: 300})]
    with pytest.raises(ValueError, match=r"Pad\(.*fills masks with 300, which a mask of dtype uint8 cannot hold"):
        only_batch(lambda i: (image(), gl.Mask(MASK)), transforms=transforms)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (lambda i: (image(), gl.Mask(np.zeros((i + 1, 40, 50), bool))),
         r"sample\[1\] of sample 0 has \(1, 40, 50\), sample\[1\] of sample 1 has \(2, 40, 50\).*ragged='list'"),
        (lambda i: (image(), gl.Mask(MASK), *([i] if i != 1 else [])),
         r"sample 0 is \(·, ·, ·\) with .*, but sample 1 is \(·, ·\) with .*same structure"),
    ],
)  # fmt: skip
def test_collate_error_names_samples_with_different_masks_or_structure(sample, text):
    with pytest.raises(gl.CollateError, match=text):
        only_batch(sample)


def test_loader_refuses_torchvisions_unclamped_and_rotated_boxes():
    tv_tensors = torchvision().tv_tensors
    unclamped = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(40, 50), clamping_mode=None)
    with pytest.raises(gl.SampleError, match="clamping_mode=None, but gpuload clips boxes"):
        only_batch(lambda i: (image(), unclamped), transforms=[T.CenterCrop(20)])
    rotated = tv_tensors.BoundingBoxes(torch.ones(1, 5), format="XYWHR", canvas_size=(40, 50))
    with pytest.raises(gl.SampleError, match="rotated boxes are not supported"):
        only_batch(lambda i: (image(), rotated), transforms=[T.CenterCrop(20)])
