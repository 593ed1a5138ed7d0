"""Fields that are dropped with their boxes: values that labels_getter returns, and fields next to the boxes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset
from helpers.peers import torchvision
from targets.samples import image, only_batch, pixels

import gpuload as gl
from gpuload import transforms as T

# CROP drops some of these boxes, and SanitizeBoundingBoxes the middle one, which is too narrow.
BOXES = np.array([[1, 2, 12, 14], [30, 5, 30.5, 30], [35, 25, 49, 39]], np.float32)
CROP = T.RandomIoUCrop(sampler_options=[0.0], max_scale=0.6)
LABELS = (1, 2, 3)


def make_target(**fields: Any) -> dict[str, Any]:
    return {"boxes": gl.Boxes(BOXES), **fields}


def make_masks() -> gl.Mask:
    return gl.Mask(np.array(LABELS, np.uint8)[:, None, None] * np.ones((40, 50), np.uint8))


def make_labels() -> np.ndarray:
    return np.array(LABELS)


def load_batch(sample, transforms, length=12) -> Any:
    return only_batch(lambda i: sample(), length, transforms=transforms, ragged="list")


# -- fields that labels_getter returns --------------------------------------------------------------------------------


def make_detection_sample():
    points = np.array(LABELS, np.float32)[:, None, None] * np.ones((4, 2), np.float32)
    return image(), make_target(
        labels=make_labels(),
        area=np.array(LABELS, np.float32),
        iscrowd=make_labels(),
        visibility=np.ones((3, 4)),
        keypoints=gl.Keypoints(points),
        masks=make_masks(),
        semantic=gl.Mask(np.zeros((40, 50), np.uint8)),
        scores=np.ones((3, 4)),
    )


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_sanitize_drops_the_values_that_labels_getter_returns(workers):
    def sample(i):
        return *make_detection_sample(), make_masks(), gl.Mask(np.zeros((3, 40, 50), np.uint8))

    def getter(sample):
        return *(sample[1][key] for key in ("labels", "area", "keypoints", "scores")), sample[2]

    chain = [T.SanitizeBoundingBoxes(labels_getter=getter)]
    options = {"transforms": chain, "ragged": "list", "num_workers": workers}
    _, targets, instance_masks, semantic = only_batch(sample, 2, **options)
    for target, masks in zip(targets, instance_masks, strict=True):
        assert target["boxes"].tolist() == BOXES[[0, 2]].tolist()
        assert target["labels"].tolist() == target["area"].tolist() == target["keypoints"][:, 0, 0].tolist() == [1, 3]
        assert target["masks"].amax(dim=(1, 2)).tolist() == masks.amax(dim=(1, 2)).tolist() == [1, 3]
        assert (target["keypoints"].shape, target["scores"].shape) == ((2, 4, 2), (2, 4))
    assert [tuple(mask.shape) for mask in semantic] == [(3, 40, 50)] * 2


@pytest.mark.parametrize("chain", [[T.SanitizeBoundingBoxes()], [CROP], [CROP, T.SanitizeBoundingBoxes()]])
def test_coco_fields_next_to_boxes_are_dropped_with_them(chain):
    _, targets = load_batch(make_detection_sample, chain)
    assert min(len(target["boxes"]) for target in targets) < 3, "no box was dropped"
    for target in targets:
        labels = target["labels"].tolist()
        assert len(labels) == len(target["boxes"])
        assert target["area"].tolist() == target["iscrowd"].tolist() == labels
        assert target["masks"].amax(dim=(1, 2)).tolist() == labels
        assert target["visibility"].shape == (len(labels), 4)
        assert target["keypoints"].shape == (len(labels), 4, 2)
        assert target["semantic"].shape == target["masks"].shape[1:]
        assert len(target["scores"]) == 3  # not a COCO field, so it is left alone


def test_sanitize_refuses_a_labels_getter_without_the_keypoints_of_the_boxes():
    chain = [T.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["labels"])]
    text = "the keypoints next to them have one entry for each of the 3 boxes, but labels_getter= does not return them"
    with pytest.raises(gl.SampleError, match=text):
        load_batch(make_detection_sample, chain, 1)
    _, (target,) = load_batch(make_detection_sample, [T.SanitizeBoundingBoxes(labels_getter=None)], 1)
    assert [len(target[name]) for name in ("boxes", "masks", "keypoints", "labels")] == [2, 2, 3, 3]


@pytest.mark.parametrize("sanitize", [True, False])
def test_iou_crop_drops_the_values_that_a_later_labels_getter_returns(sanitize):
    getter = lambda sample: [sample[1][key] for key in ("labels", "area", "keypoints")]  # noqa: E731
    later_transforms = [T.Resize((30, 30)), T.SanitizeBoundingBoxes(labels_getter=getter)] if sanitize else []
    _, targets = load_batch(make_detection_sample, [T.RandomIoUCrop(), *later_transforms], 40)
    counts = [len(target["boxes"]) for target in targets]
    # the crop leaves at least one box, but SanitizeBoundingBoxes may leave none
    assert (0 if sanitize else 1) <= min(counts) < max(counts)
    for target, count in zip(targets, counts, strict=True):
        assert len(target["labels"]) == len(target["masks"]) == count
        assert len(target["area"]) == len(target["keypoints"]) == count
        assert target["masks"].amax(dim=(1, 2)).tolist() == target["labels"].tolist()


def test_sanitize_retains_keypoints_that_do_not_belong_to_boxes():
    def sample():
        return (
            image(),
            make_target(labels=make_labels(), corners=gl.Keypoints(np.ones((3, 2)))),
            gl.Keypoints(np.ones((3, 1, 2))),
        )

    _, targets, keypoints = load_batch(sample, [T.SanitizeBoundingBoxes()], 2)
    assert [(len(target["labels"]), len(target["corners"])) for target in targets] == [(2, 3)] * 2
    assert [len(points) for points in keypoints] == [3, 3]


def test_labels_getter_may_return_torchvisions_keypoints_and_masks():
    tv_tensors = torchvision().tv_tensors

    def sample():
        return tv_tensors.Image(torch.zeros(3, 40, 50, dtype=torch.uint8)), {
            "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(BOXES), format="XYXY", canvas_size=(40, 50)),
            "labels": torch.tensor(LABELS),
            "points": tv_tensors.KeyPoints(torch.tensor(LABELS).float()[:, None].expand(3, 2), canvas_size=(40, 50)),
            "masks": tv_tensors.Mask(torch.from_numpy(make_masks().array)),
        }

    getter = lambda sample: [sample[1][key] for key in ("labels", "points", "masks")]  # noqa: E731
    _, targets = load_batch(sample, [T.SanitizeBoundingBoxes(labels_getter=getter)], 2)
    for target in targets:
        assert target["labels"].tolist() == [1, 3]
        assert target["points"].tolist() == [[1, 1], [3, 3]]
        assert target["masks"].amax(dim=(1, 2)).tolist() == [1, 3]


def test_sanitize_refuses_a_semantic_mask_from_labels_getter():
    boxes = gl.Boxes(np.tile(BOXES[:1], (40, 1)))  # as many as the mask has rows: only its two axes show its kind
    sample = lambda i: (image(), {"boxes": boxes, "m": gl.Mask(pixels()[..., 0])})  # noqa: E731
    chain = [T.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["m"])]
    with pytest.raises(gl.SampleError, match=r"must have shape N×H×W, got shape \(40, 50\); do not return"):
        only_batch(sample, 2, transforms=chain)


# -- labels that no labels_getter returns -----------------------------------------------------------------------------


@dataclasses.dataclass
class Target:
    boxes: Any
    class_labels: Any


class Row(NamedTuple):
    image: Any
    boxes: Any
    label_ids: Any


@pytest.mark.parametrize(
    ("sample", "boxes_and_labels"),
    [
        (lambda: (image(), make_target(labels=make_labels())), lambda b, n: (b[1][n]["boxes"], b[1][n]["labels"])),
        (lambda: (image(), 7, make_target(Labels=make_labels())), lambda b, n: (b[2][n]["boxes"], b[2][n]["Labels"])),
        # There happen to be as many image labels as boxes.
        (lambda: (image(), make_labels(), make_target(labels=make_labels())),
         lambda b, n: (b[2][n]["boxes"], b[2][n]["labels"])),
        (lambda: {"image": gl.Image(pixels()), "label": 5, "target": make_target(labels=torch.tensor(LABELS))},
         lambda b, n: (b["target"][n]["boxes"], b["target"][n]["labels"])),
        (lambda: (image(), Target(gl.Boxes(BOXES), make_labels())), lambda b, n: (b[1][n].boxes, b[1][n].class_labels)),
        (lambda: Row(image(), gl.Boxes(BOXES), make_labels()), lambda b, n: (b.boxes[n], b.label_ids[n])),
        (lambda: (image(), make_target(label_name="cat", label_ids=make_labels(), area=np.ones(3))),
         lambda b, n: (b[1][n]["boxes"], b[1][n]["label_ids"])),
        # torchvision finds labels in this place, too.
        (lambda: (image(), make_labels(), gl.Boxes(BOXES)), lambda b, n: (b[2][n], b[1][n])),
    ],
)  # fmt: skip
def test_iou_crop_drops_the_labels_of_dropped_boxes(sample, boxes_and_labels):
    batch = load_batch(sample, [CROP])
    counts = set()
    for number in range(12):
        boxes, labels = boxes_and_labels(batch, number)
        assert len(labels) == len(boxes)
        assert set(labels.tolist()) <= set(LABELS)
        counts.add(len(boxes))
    assert min(counts) < 3


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (lambda: (image(), gl.Boxes(BOXES), make_labels()),
         r"unclear whether 2, of shape \(3,\), next to the boxes belongs to"),
        (lambda: (image(), make_target(classes=make_labels())),
         r"'classes', of shape \(3,\).*SanitizeBoundingBoxes\(labels_get"),
        (lambda: (image(), make_target(scores=torch.ones(3, 2))),
         r"no labels were found, .*'scores', of shape \(3, 2\)"),
        (lambda: (image(), make_target(labels=[1, 2, 3])), r"RandomIoUCrop: the labels of .*got list: \[1, 2, 3\]"),
        (lambda: (image(), 7, make_target(labels=[1, 2, 3])),
         r"must be arrays or tensors with one entry.*got list: \[1, 2, 3\]"),
    ],
)  # fmt: skip
def test_iou_crop_raises_an_error_with_a_remedy_for_ambiguous_labels(sample, text):
    with pytest.raises(gl.SampleError, match=text):
        load_batch(sample, [T.Resize((40, 50)), CROP])


@pytest.mark.parametrize("getter", [lambda sample: sample[2], None])
def test_a_labels_getter_resolves_ambiguous_labels(getter):
    batch = only_batch(
        lambda i: (image(), gl.Boxes(BOXES), make_labels()),
        12,
        transforms=[CROP, T.SanitizeBoundingBoxes(labels_getter=getter)],
        collate_fn=lambda samples: [(len(boxes), len(labels)) for _, boxes, labels in samples],
    )
    assert min(boxes for boxes, _ in batch) < 3
    for boxes, labels in batch:
        assert labels == (3 if getter is None else boxes)  # None means that there are no labels


@pytest.mark.parametrize(
    "sample",
    [
        lambda: (image(), gl.Boxes(BOXES)),
        lambda: (image(), make_target(image_id=7, name="a", size=np.array([40, 50]))),
        lambda: {"image": np.zeros((3, 40, 3), np.uint8), "boxes": gl.Boxes(BOXES / 20)},  # the image has three rows
    ],
)
def test_iou_crop_accepts_samples_with_boxes_but_without_labels(sample):
    load_batch(sample, [T.RandomIoUCrop()])


@pytest.mark.parametrize("getters", [(None, "default"), ("default", None)])
def test_labels_of_one_transform_are_dropped_by_all_transforms_that_drop_boxes(getters):
    chain = [
        CROP,
        T.SanitizeBoundingBoxes(labels_getter=getters[0]),
        T.RandomChoice([T.CenterCrop(12), T.RandomIoUCrop()]),
        T.SanitizeBoundingBoxes(min_size=3, labels_getter=getters[1]),
    ]
    _, targets = load_batch(lambda: (image(), make_target(labels=make_labels(), masks=make_masks())), chain, 40)
    for target in targets:
        assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"])
        assert target["masks"].amax(dim=(1, 2)).tolist() == target["labels"].tolist()
    assert {len(target["boxes"]) for target in targets} >= {0, 1}


# -- masks of instances -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", ["error", "list"])
def test_a_mask_outside_the_dict_of_a_single_box_is_semantic(ragged):
    def sample(i):
        box = [[1, 2, 30, 30]] if i % 2 else [[44, 34, 49, 39]]
        fields = {"boxes": gl.Boxes(box), "labels": np.array([1]), "masks": gl.Mask(np.ones((1, 40, 50), np.uint8))}
        return image(), fields, gl.Mask(np.full((1, 40, 50), i, np.int64))

    _, targets, semantic = only_batch(
        sample, 4, transforms=[T.CenterCrop(20), T.SanitizeBoundingBoxes(min_size=6)], ragged=ragged
    )
    assert [len(target["boxes"]) for target in targets] == [0, 1, 0, 1]
    assert [len(target["masks"]) for target in targets] == [0, 1, 0, 1]
    assert [tuple(mask.shape) for mask in semantic] == [(1, 20, 20)] * 4
    assert [int(mask.max()) for mask in semantic] == [0, 1, 2, 3]


def test_sanitize_drops_instance_masks_that_are_nested_deeper_than_boxes():
    sample = lambda: (image(), make_target(labels=make_labels(), more={"masks": [make_masks()]}))  # noqa: E731
    _, targets = load_batch(sample, [T.SanitizeBoundingBoxes()], 2)
    assert [target["more"]["masks"][0].amax(dim=(1, 2)).tolist() for target in targets] == [[1, 3]] * 2


def test_iou_crop_drops_masks_of_boxes_without_a_batch_size():
    sample = lambda i: (image(), 7, make_target(labels=make_labels(), masks=make_masks()))  # noqa: E731
    with gl.Loader(MapDataset(sample, 12), None, transforms=[CROP], num_workers=0, device="cpu") as loader:
        targets = [target for _, _, target in loader]
    assert min(len(target["boxes"]) for target in targets) < 3
    for target in targets:
        assert target["masks"].amax(dim=(1, 2)).tolist() == target["labels"].tolist()
