"""What is left out with boxes: found by a `labels_getter`, beside the boxes, or else an error; never out of step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset
from helpers.peers import torchvision
from targets.test_batches import image, only_batch, pixels

import gpuload as gl
from gpuload import transforms as T

# Of three boxes a crop by overlap leaves out some; the middle one is too narrow for a SanitizeBoundingBoxes.
BOXES = np.array([[1, 2, 12, 14], [30, 5, 30.5, 30], [35, 25, 49, 39]], np.float32)
CROP = T.RandomIoUCrop(sampler_options=[0.0], max_scale=0.6)
NUMBERS = (1, 2, 3)


def target(**more: Any) -> dict[str, Any]:
    return {"boxes": gl.Boxes(BOXES), **more}


def instances() -> gl.Mask:
    return gl.Mask(np.array(NUMBERS, np.uint8)[:, None, None] * np.ones((40, 50), np.uint8))


def labels() -> np.ndarray:
    return np.array(NUMBERS)


def batch_of(sample, transforms, length=12) -> Any:
    return only_batch(lambda i: sample(), length, transforms=transforms, ragged="list")


# -- what labels_getter names -----------------------------------------------------------------------------------------


def named():
    points = np.array(NUMBERS, np.float32)[:, None, None] * np.ones((4, 2), np.float32)
    return image(), target(labels=labels(), keypoints=gl.Keypoints(points), visible=np.ones((3, 4)), masks=instances())


def test_keypoints_that_the_getter_names_go_with_their_boxes():
    getter = lambda sample: (sample[1]["labels"], sample[1]["keypoints"], sample[1]["visible"])  # noqa: E731
    _, targets = batch_of(named, [T.SanitizeBoundingBoxes(labels_getter=getter)], 2)
    for found in targets:
        assert found["labels"].tolist() == [1, 3]
        assert found["keypoints"][:, 0, 0].tolist() == [1, 3]
        assert found["keypoints"].shape == (2, 4, 2)
        assert found["visible"].shape == (2, 4)


def test_masks_that_the_getter_names_go_with_their_boxes_wherever_they_stand():
    def sample():
        first, own = named()
        return first, own, instances(), gl.Mask(np.zeros((3, 40, 50), np.uint8))

    getter = lambda sample: (sample[1]["labels"], sample[1]["keypoints"], sample[2])  # noqa: E731
    _, targets, far, semantic = batch_of(sample, [T.SanitizeBoundingBoxes(labels_getter=getter)], 2)
    assert [mask.amax(dim=(1, 2)).tolist() for mask in far] == [[1, 3]] * 2
    assert [found["masks"].amax(dim=(1, 2)).tolist() for found in targets] == [[1, 3]] * 2
    assert [tuple(mask.shape) for mask in semantic] == [(3, 40, 50)] * 2


def coco():
    own = target(labels=labels(), area=np.array(NUMBERS, np.float32), iscrowd=labels(), visibility=np.ones((3, 4)))
    points = np.array(NUMBERS, np.float32)[:, None, None] * np.ones((4, 2), np.float32)
    return image(), {**own, "keypoints": gl.Keypoints(points), "others": np.ones(3)}


@pytest.mark.parametrize("chain", [[T.SanitizeBoundingBoxes()], [CROP], [CROP, T.SanitizeBoundingBoxes()]])
def test_what_coco_has_of_each_object_goes_with_its_box_without_being_named(chain):
    _, targets = batch_of(coco, chain)
    assert any(len(found["boxes"]) < 3 for found in targets)
    for found in targets:
        kept = found["labels"].tolist()
        assert len(kept) == len(found["boxes"])
        assert found["area"].tolist() == found["iscrowd"].tolist() == kept
        assert found["visibility"].shape == (len(kept), 4)
        assert found["keypoints"].shape == (len(kept), 4, 2)
        assert len(found["others"]) == 3


def test_a_getter_that_forgets_the_keypoints_of_the_boxes_is_refused():
    chain = [T.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["labels"])]
    text = "the keypoints next to them have one entry for each of the 3 boxes, but labels_getter= does not return them"
    with pytest.raises(gl.SampleError, match=text):
        batch_of(coco, chain, 1)
    _, (found,) = batch_of(coco, [T.SanitizeBoundingBoxes(labels_getter=None)], 1)
    assert (len(found["boxes"]), len(found["keypoints"])) == (2, 3)


def test_points_that_are_not_of_the_boxes_stay():
    def sample():
        return image(), target(labels=labels(), corners=gl.Keypoints(np.ones((3, 2)))), gl.Keypoints(np.ones((3, 1, 2)))

    _, targets, far = batch_of(sample, [T.SanitizeBoundingBoxes()], 2)
    assert [(len(found["labels"]), len(found["corners"])) for found in targets] == [(2, 3)] * 2
    assert [len(points) for points in far] == [3, 3]


def test_torchvisions_keypoints_and_masks_may_be_named():
    torchvision()
    from torchvision import tv_tensors

    def sample():
        return tv_tensors.Image(torch.zeros(3, 40, 50, dtype=torch.uint8)), {
            "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(BOXES), format="XYXY", canvas_size=(40, 50)),
            "labels": torch.tensor(NUMBERS),
            "points": tv_tensors.KeyPoints(torch.tensor(NUMBERS).float()[:, None].expand(3, 2), canvas_size=(40, 50)),
            "masks": tv_tensors.Mask(torch.from_numpy(instances().array)),
        }

    getter = lambda sample: [sample[1][key] for key in ("labels", "points", "masks")]  # noqa: E731
    _, targets = batch_of(sample, [T.SanitizeBoundingBoxes(labels_getter=getter)], 2)
    for found in targets:
        assert found["labels"].tolist() == [1, 3]
        assert found["points"].tolist() == [[1, 1], [3, 3]]
        assert found["masks"].amax(dim=(1, 2)).tolist() == [1, 3]


def test_a_mask_of_the_whole_image_cannot_be_named():
    sample = lambda i: (image(), {"boxes": gl.Boxes(np.tile(BOXES[:1], (40, 1))), "m": gl.Mask(pixels()[..., 0])})  # noqa: E731
    chain = [T.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["m"])]
    with pytest.raises(gl.SampleError, match=r"must have shape N×H×W, got shape \(40, 50\); do not return"):
        only_batch(sample, 2, transforms=chain)


# -- labels that nothing names ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Target:
    boxes: Any
    class_labels: Any


class Row(NamedTuple):
    image: Any
    boxes: Any
    label_ids: Any


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (lambda: (image(), target(labels=labels())), lambda b, n: (b[1][n]["boxes"], b[1][n]["labels"])),
        (lambda: (image(), 7, target(Labels=labels())), lambda b, n: (b[2][n]["boxes"], b[2][n]["Labels"])),
        # By chance there are as many image labels as boxes.
        (lambda: (image(), labels(), target(labels=labels())), lambda b, n: (b[2][n]["boxes"], b[2][n]["labels"])),
        (
            lambda: {"image": gl.Image(pixels()), "label": 5, "target": target(labels=torch.tensor(NUMBERS))},
            lambda b, n: (b["target"][n]["boxes"], b["target"][n]["labels"]),
        ),
        (lambda: (image(), Target(gl.Boxes(BOXES), labels())), lambda b, n: (b[1][n].boxes, b[1][n].class_labels)),
        (lambda: Row(image(), gl.Boxes(BOXES), labels()), lambda b, n: (b.boxes[n], b.label_ids[n])),
        (
            lambda: (image(), target(label_name="cat", label_ids=labels(), area=np.ones(3))),
            lambda b, n: (b[1][n]["boxes"], b[1][n]["label_ids"]),
        ),
        # At the place where torchvision looks, though not beside the boxes.
        (lambda: (image(), labels(), gl.Boxes(BOXES)), lambda b, n: (b[2][n], b[1][n])),
    ],
)
def test_a_crop_that_leaves_boxes_out_finds_their_labels(sample, found):
    batch = batch_of(sample, [CROP])
    counts = set()
    for number in range(12):
        boxes, own = found(batch, number)
        assert len(own) == len(boxes)
        assert set(own.tolist()) <= set(NUMBERS)
        counts.add(len(boxes))
    assert min(counts) < 3


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (
            lambda: (image(), gl.Boxes(BOXES), labels()),
            r"unclear whether 2, of shape \(3,\), next to the boxes belongs to",
        ),
        (lambda: (image(), target(classes=labels())), r"'classes', of shape \(3,\).*SanitizeBoundingBoxes\(labels_get"),
        (lambda: (image(), target(scores=torch.ones(3, 2))), r"no labels were found, .*'scores', of shape \(3, 2\)"),
        (lambda: (image(), target(labels=[1, 2, 3])), r"RandomIoUCrop: the labels of .*got list: \[1, 2, 3\]"),
        (
            lambda: (image(), 7, target(labels=[1, 2, 3])),
            r"must be arrays or tensors with one entry.*got list: \[1, 2, 3\]",
        ),
    ],
)
def test_labels_that_may_be_or_not_are_an_error_with_a_way_out(sample, text):
    with pytest.raises(gl.SampleError, match=text):
        batch_of(sample, [T.Resize((40, 50)), CROP])


@pytest.mark.parametrize("getter", [lambda sample: sample[2], None])
def test_the_way_out_of_the_error_is_one(getter):
    batch = only_batch(
        lambda i: (image(), gl.Boxes(BOXES), labels()),
        12,
        transforms=[CROP, T.SanitizeBoundingBoxes(labels_getter=getter)],
        collate_fn=lambda samples: [(len(boxes), len(own)) for _, boxes, own in samples],
    )
    assert min(boxes for boxes, _ in batch) < 3
    for boxes, own in batch:
        assert own == (3 if getter is None else boxes)  # None: the user says that there are no labels


@pytest.mark.parametrize(
    "sample",
    [
        lambda: (image(), gl.Boxes(BOXES)),
        lambda: (image(), target(image_id=7, name="a", size=np.array([40, 50]))),
        lambda: {"image": np.zeros((3, 40, 3), np.uint8), "boxes": gl.Boxes(BOXES / 20)},  # an image of as many rows
    ],
)
def test_samples_that_hold_boxes_only_are_fine(sample):
    assert len(batch_of(sample, [T.RandomIoUCrop()]))


@pytest.mark.parametrize("order", [(None, "default"), ("default", None)])
def test_what_one_transform_names_goes_with_all_that_leave_boxes_out(order):
    chain = [
        CROP,
        T.SanitizeBoundingBoxes(labels_getter=order[0]),
        T.RandomChoice([T.CenterCrop(12), T.RandomIoUCrop()]),
        T.SanitizeBoundingBoxes(min_size=3, labels_getter=order[1]),
    ]
    _, targets = batch_of(lambda: (image(), target(labels=labels(), masks=instances())), chain, 40)
    for found in targets:
        assert len(found["boxes"]) == len(found["labels"]) == len(found["masks"])
        assert found["masks"].amax(dim=(1, 2)).tolist() == found["labels"].tolist()
    assert {len(found["boxes"]) for found in targets} >= {0, 1}


# -- masks of instances -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", ["error", "list"])
def test_a_mask_outside_is_of_the_whole_image_though_there_is_one_box(ragged):
    def sample(i):
        box = [[1, 2, 30, 30]] if i % 2 else [[44, 34, 49, 39]]
        own = {"boxes": gl.Boxes(box), "labels": np.array([1]), "masks": gl.Mask(np.ones((1, 40, 50), np.uint8))}
        return image(), own, gl.Mask(np.full((1, 40, 50), i, np.int64))

    _, targets, semantic = only_batch(
        sample, 4, transforms=[T.CenterCrop(20), T.SanitizeBoundingBoxes(min_size=6)], ragged=ragged
    )
    assert [len(found["boxes"]) for found in targets] == [0, 1, 0, 1]
    assert [len(found["masks"]) for found in targets] == [0, 1, 0, 1]
    assert [tuple(mask.shape) for mask in semantic] == [(1, 20, 20)] * 4
    assert [int(mask.max()) for mask in semantic] == [0, 1, 2, 3]


def test_masks_of_instances_may_lie_deeper_than_their_boxes():
    sample = lambda: (image(), target(labels=labels(), more={"masks": [instances()]}))  # noqa: E731
    _, targets = batch_of(sample, [T.SanitizeBoundingBoxes()], 2)
    assert [found["more"]["masks"][0].amax(dim=(1, 2)).tolist() for found in targets] == [[1, 3]] * 2


def test_single_samples_leave_out_the_same():
    sample = lambda i: (image(), 7, target(labels=labels(), masks=instances()))  # noqa: E731
    with gl.Loader(MapDataset(sample, 12), None, transforms=[CROP], num_workers=0, device="cpu") as loader:
        targets = [found for _, _, found in loader]
    assert min(len(found["boxes"]) for found in targets) < 3
    for found in targets:
        assert found["masks"].amax(dim=(1, 2)).tolist() == found["labels"].tolist()
