"""BatchTree recognizes the leaves of a batch of any loader by their types and shapes."""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.peers import torchvision

import gpuload as gl
from gpuload.batches.leaves import BatchTree

IMAGES = torch.zeros(2, 3, 8, 9, dtype=torch.uint8)
MASK = np.zeros((8, 9), np.uint8)
BOXES = gl.Boxes([[1, 2, 3, 4]])
Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Scene:
    image: torch.Tensor
    text: str


def leaf_kinds(batch: Any) -> list[str]:
    return [leaf.kind for leaf in BatchTree(batch).leaves]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IMAGES, ["images"]),
        (torch.zeros(2, 4, 3, 8, 9), ["images"]),
        ([IMAGES[0], IMAGES[0, :, :5]], ["images"]),
        ((IMAGES, IMAGES), ["images", "images"]),
        ([IMAGES, torch.zeros(2)], ["images", "value"]),
        ({"image": IMAGES, "pair": [torch.zeros(2, 4, 4), torch.zeros(2)]}, ["images", "value"]),
        ((IMAGES, ("a", "b"), (IMAGES, 1)), ["images", "value", "images", "value"]),
        (Pair(IMAGES, torch.zeros(2, 5)), ["images", "value"]),
        (Scene(IMAGES, "a"), ["images", "value"]),
        ({"state": torch.zeros(2, 7), "image": IMAGES, "task": ["a", "b"]}, ["images", "value", "value"]),
        ((IMAGES, gl.Mask(np.zeros((2, 8, 9)))), ["images", "mask"]),
        ((IMAGES, [BOXES, BOXES], gl.Keypoints(np.zeros((2, 5, 2)))), ["images", "points", "points"]),
        ((IMAGES, [{"boxes": BOXES, "name": "a"}] * 2), ["images", "points", "value"]),
        ((IMAGES, [{"labels": torch.zeros(3)}, {"labels": torch.zeros(4)}, {"labels": 1}]), ["images", "value"]),
        ((IMAGES, [{"a": 1}, {"b": 2}]), ["images", "value", "value"]),
        ([OrderedDict(image=IMAGES), OrderedDict(image=IMAGES)], ["images", "images"]),
    ],
)
def test_batch_tree_recognizes_leaves_by_type_and_shape(batch, expected):
    assert leaf_kinds(batch) == expected


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, [{"labels": 1, "boxes": BOXES}] * 2),
        [IMAGES, ({"labels": 1}, {"labels": 2})],
        Pair(IMAGES, {"a": [torch.zeros(3), torch.zeros(4)], "b": (1, [2, 3])}),
        (IMAGES, ("a", "b"), ["c", None]),
        [OrderedDict(image=IMAGES), OrderedDict(image=IMAGES)],
        Scene(IMAGES, "a"),
    ],
)
def test_rebuild_of_a_batch_tree_returns_an_equal_batch(batch):
    tree = BatchTree(batch)
    rebuilt = tree.rebuild([leaf.value for leaf in tree.leaves])
    assert type(rebuilt) is type(batch)
    assert repr(rebuilt) == repr(batch)


def test_sample_of_a_batch_tree_holds_the_entries_of_its_image():
    masks, labels = torch.stack([torch.zeros(8, 9), torch.ones(8, 9)]), [torch.zeros(3), torch.ones(4)]
    batch = {"image": IMAGES, "mask": gl.Mask(masks), "labels": labels, "boxes": [BOXES, BOXES], "id": 7}
    sample = BatchTree(batch).sample(1)
    assert isinstance(sample["image"], gl.Image)
    assert sample["image"].hwc.shape[:2] == (8, 9)
    assert sample["mask"].array.shape == (8, 9)
    assert sample["labels"] is labels[1]
    assert sample["boxes"] is BOXES
    assert sample["id"] == 7


def test_sample_of_a_batch_tree_takes_entries_of_tuples():
    sample = BatchTree({"image": IMAGES, "names": ("a", "b"), "labels": (torch.zeros(3), torch.ones(4))}).sample(1)
    assert sample["names"] == "b"
    assert len(sample["labels"]) == 4


@pytest.mark.parametrize("scalar", [torch.tensor(3), np.array(3)])
def test_sample_of_a_batch_tree_holds_scalars_unchanged(scalar):
    assert BatchTree({"image": IMAGES, "step": scalar}).sample(1)["step"] is scalar


def test_batch_tree_recognizes_torchvisions_tensors():
    torchvision()
    from torchvision import tv_tensors

    boxes = tv_tensors.BoundingBoxes(torch.zeros(3, 4), format="XYXY", canvas_size=(8, 9))
    batch = tv_tensors.Image(IMAGES), tv_tensors.Mask(torch.zeros(2, 1, 8, 9)), [boxes, boxes]
    assert leaf_kinds(batch) == ["images", "mask", "points"]


LOOKS_NHWC = "which looks like channels last, but images must be"
NO_IMAGES = (
    "Augment needs N×C×H×W tensors, N×T×C×H×W clips, or lists of N C×H×W tensors, of dtype uint8, uint16, or floats "
    "from 0 to 1"
)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (torch.zeros(4, 40, 56, 3), ValueError,
         f"batch has shape (4, 40, 56, 3), {LOOKS_NHWC} N×C×H×W; use images.permute(0, 3, 1, 2), which does not copy"),
        (torch.zeros(4, 2, 40, 56, 3), ValueError, f"{LOOKS_NHWC} N×T×C×H×W; use images.permute(0, 1, 4, 2, 3)"),
        ([torch.zeros(40, 56, 3)] * 2, ValueError, f"{LOOKS_NHWC} C×H×W; use images.permute(2, 0, 1)"),
        (torch.zeros(4, 3, 8, 9, dtype=torch.int64), TypeError,
         "batch is int64 of shape (4, 3, 8, 9), but images must be uint8, uint16, or floats from 0 to 1; convert it, "
         "or declare a mask as gpuload.Mask(tensor) or torchvision's Mask"),
        (torch.zeros(4, 3, 8, 9, dtype=torch.float8_e5m2), TypeError,
         "batch is float8_e5m2 of shape (4, 3, 8, 9), but images must be uint8, uint16, or floats from 0 to 1"),
        ({"image": IMAGES, "masks": torch.zeros(2, 1, 8, 9)}, ValueError, 'batch["masks"] is named like a mask, but '
         "would be resampled and normalized like an image; declare it as gpuload.Mask(tensor), N×H×W, or rename it "
         "if it contains images"),
        (torch.zeros(4, 0, 8, 9), ValueError, "batch has no pixels: its shape is (4, 0, 8, 9)"),
        (torch.zeros(0, 3, 8, 9), ValueError, "batch has no images: its shape is (0, 3, 8, 9)"),
        (torch.zeros(3, 8, 9), TypeError,
         "Augment needs a batch, got one image of shape (3, 8, 9); use augment(image[None])[0]"),
        ({"image": np.zeros((4, 8, 9, 3))}, TypeError, "there are no images in {'image': float64 array 4×8×9×3}: "
         f"{NO_IMAGES}; convert arrays with torch.from_numpy"),
        ((), TypeError, "there are no images in (): "),
        ({"a": torch.zeros(4, 3, 9, 9), "b": torch.zeros(3, 3, 9, 9)}, ValueError, 'batch["b"] has 3 images, but '
         'batch["a"] has 4 images; pass one entry per image, along the first axis or in a list'),
        ((IMAGES, gl.Mask(np.zeros((3, 8, 9)))), ValueError,
         "batch[1] has 3 entries, but batch[0] has 2 images; pass one entry per image"),
        ((IMAGES, [gl.Mask(MASK)] * 3), ValueError, "batch[1] has 3 entries, but batch[0] has 2"),
        ((IMAGES, BOXES), TypeError,
         "batch[1] is the Boxes of a single image; pass a list with one Boxes per image, empty for images "),
    ],
)  # fmt: skip
def test_batch_tree_of_an_unusable_batch_raises(batch, error, message):
    with pytest.raises(error, match=re.escape(message)):
        BatchTree(batch)


def test_sample_with_an_encoded_mask_raises():
    tree = BatchTree((IMAGES, [gl.Mask(gl.Encoded(b"", mode="L"))] * 2))
    message = "batch[1] is an encoded file, but Augment needs decoded masks; gpuload.Loader decodes files"
    with pytest.raises(TypeError, match=re.escape(message)):
        tree.sample(0)


HEAT_MAP = torch.rand(2, 2, 8, 9)


def test_batch_tree_with_selected_images_has_no_other_images():
    masks = gl.Mask(np.zeros((2, 8, 9)))
    batch = {"image": IMAGES, "heat": HEAT_MAP, "scenes": [{"image": IMAGES[0]}] * 2, "mask": masks}
    kinds_by_path = {leaf.path: leaf.kind for leaf in BatchTree(batch, {"image", 'batch["heat"]'}).leaves}
    assert kinds_by_path == {
        'batch["heat"]': "images",
        'batch["image"]': "images",
        'batch["mask"]': "mask",
        'batch["scenes"]["image"]': "images",
    }
    assert [leaf.kind for leaf in BatchTree((IMAGES, HEAT_MAP), {"batch[0]"}).leaves] == ["images", "value"]


def test_batch_tree_with_unusable_selected_images_raises():
    batch = {"image": IMAGES, "action": torch.zeros(2, 7)}
    with pytest.raises(ValueError, match=re.escape("has 'img', but the batch has only 'action', 'image'")):
        BatchTree(batch, {"img"})
    with pytest.raises(TypeError, match=re.escape('selects batch["action"], float32 tensor 2×7, but Augment needs')):
        BatchTree(batch, {"image", "action"})


@pytest.mark.parametrize(
    ("batch", "warning_start"),
    [
        ({"image": IMAGES, "heat": HEAT_MAP}, 'batch["heat"], float32 tensor 2×2×8×9, is transformed and normalized as '
         "an image, like batch[\"image\"]; select the images by name, as in Augment(…, images=('image',))"),
        ((IMAGES.float(), torch.rand(2, 1, 8, 9)), "batch[1], float32 tensor 2×1×8×9, is transformed"),
        ((IMAGES, [HEAT_MAP[0], HEAT_MAP[1]]), "batch[1], float32 tensor 2×8×9, is transformed"),
        ({"image": IMAGES, "normals": torch.rand(2, 3, 8, 9)}, ""),
        ((IMAGES, IMAGES[:, :1]), ""),
        ((HEAT_MAP, HEAT_MAP), ""),
    ],
)  # fmt: skip
def test_batch_tree_warns_about_floats_that_are_probably_targets(batch, warning_start):
    warning = BatchTree(batch).warning
    assert warning.startswith(warning_start)
    assert bool(warning) == bool(warning_start)
