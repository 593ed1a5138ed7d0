"""torchvision's reference for detection: SSD on images with boxes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from helpers import peers
from helpers.both_loaders import alike, cpu_loader
from recipes.comparison import SEED, first_batch, shape_of
from recipes.replay import apply_record
from torch.utils.data import DataLoader

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.ops import Reformat, Tidy

vision = peers.torchvision()
v2, tv_tensors = vision.transforms.v2, vision.tv_tensors
FILL = (123, 117, 104)  # ImageNet's mean color, as in torchvision's reference

ORIGINAL = v2.Compose(
    [
        v2.RandomPhotometricDistort(),
        v2.RandomZoomOut(fill=defaultdict(lambda: FILL, {tv_tensors.Mask: 0})),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(0.5),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.ConvertBoundingBoxFormat("XYXY"),
        v2.SanitizeBoundingBoxes(),
        v2.ToPureTensor(),
    ]
)
RECIPE = [
    T.RandomPhotometricDistort(),
    T.RandomZoomOut(fill={gl.Image: FILL, gl.Mask: 0}),
    T.RandomIoUCrop(),
    T.RandomHorizontalFlip(0.5),
    T.ToDtype("float32", scale=True),
    T.ConvertBoundingBoxFormat("XYXY"),
    T.SanitizeBoundingBoxes(),
]
EVALUATION = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])


class Scenes:
    """A dataset of photographs with random boxes, with the types of torchvision's wrapped CocoDetection."""

    def __init__(self, images, transform=None, format_name: str = "XYXY") -> None:
        self.images, self.transform, self.format_name = images, transform, format_name

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image, rng = self.images[index], np.random.default_rng(index)
        count = int(rng.integers(1, 6))
        start = rng.uniform(0, 0.7, (count, 2))
        end = np.minimum(start + rng.uniform(0.02, 0.5, (count, 2)), 1)
        corners = torch.from_numpy(np.hstack([start, end]) * np.tile([image.width, image.height], 2)).float()
        size = (image.height, image.width)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size)
        boxes = v2.functional.convert_bounding_box_format(boxes, new_format=self.format_name)
        labels = torch.from_numpy(rng.integers(1, 91, count))
        sample = image, {"boxes": boxes, "labels": labels, "image_id": index}
        return sample if self.transform is None else self.transform(*sample)


def collate_lists(batch):
    return tuple(zip(*batch, strict=True))


def detection_batch(images, transforms, backend="torch", **options):
    return first_batch(Scenes(images, **options), len(images), transforms, ragged="list", backend=backend)


def test_from_torchvision_converts_the_detection_preset():
    assert T.from_torchvision(ORIGINAL) == RECIPE


@pytest.mark.parametrize("format_name", ["XYWH", "CXCYWH"])
def test_detection_training_equals_torchvisions_for_boxes_with_width_and_height(images, format_name):
    dropped = check_training(images, "torch", format_name)
    assert dropped > 0, "no box was dropped, so dropping was not tested"


def test_detection_training_equals_torchvisions_for_the_same_draws(pictures, backend):
    dropped = check_training(pictures, backend, "XYXY")
    if backend != "fused":  # for "fused", `pictures` are two small images, which lose no box
        assert dropped > 0, "no box was dropped, so dropping was not tested"


def check_training(images, backend: str, format_name: str) -> int:
    """Compare a batch with torchvision's functions for the same draws, and return the number of dropped boxes."""
    batch_images, targets = detection_batch(images, RECIPE, backend, format_name=format_name)
    scenes, chain = Scenes(images, format_name=format_name), T.Chain(RECIPE)
    corners = [
        v2.functional.convert_bounding_box_format(scenes[row][1]["boxes"], new_format="XYXY").double().numpy()
        for row in range(len(images))
    ]
    sizes = np.array([(image.height, image.width) for image in images], np.int64)
    draws = chain.draw(epoch_key(SEED, 0), np.arange(len(images)), sizes, corners)
    dropped = 0
    for row, image in enumerate(images):
        _, target = scenes[row]
        boxes = target["boxes"]
        for record in draws.records:
            if isinstance(record, Reformat):
                boxes = v2.functional.convert_bounding_box_format(boxes, new_format="XYXY")
            elif isinstance(record, Tidy):
                image, tidied = v2.SanitizeBoundingBoxes()(image, {**target, "boxes": boxes})
            else:
                image, boxes = apply_record(record, row, [image, boxes])
        torch.testing.assert_close(targets[row]["boxes"], tidied["boxes"].as_subclass(torch.Tensor), atol=2e-3, rtol=0)
        assert torch.equal(targets[row]["labels"], tidied["labels"])
        dropped += len(target["labels"]) - len(tidied["labels"])
        assert batch_images[row].shape == image.shape
        errors_in_levels = (batch_images[row].double() - image).abs() * 255
        # Nothing is resampled, but hues have 8 bits, and contrast enlarges their rounding.
        assert errors_in_levels.max() <= 20
        assert errors_in_levels.mean() <= 0.6
    return dropped


def test_detection_batch_has_the_types_and_shapes_of_torchvisions(images):
    loader = DataLoader(Scenes(images, ORIGINAL), len(images), collate_fn=collate_lists)
    expected_images, expected_targets = next(iter(loader))
    batch_images, targets = detection_batch(images, RECIPE)
    assert [type(image) for image in batch_images] == [type(image) for image in expected_images]
    assert [image.dtype for image in batch_images] == [image.dtype for image in expected_images]
    assert [list(target) for target in targets] == [list(target) for target in expected_targets]
    for target, expected_target in zip(targets, expected_targets, strict=True):
        for name in ("boxes", "labels"):
            assert target[name].dtype == expected_target[name].dtype
            assert target[name].shape[1:] == expected_target[name].shape[1:]
        assert int(target["image_id"]) == expected_target["image_id"]


def test_detection_evaluation_equals_torchvisions(pictures, backend):
    loader = DataLoader(Scenes(pictures, EVALUATION), len(pictures), collate_fn=collate_lists)
    expected_images, expected_targets = next(iter(loader))
    batch_images, targets = detection_batch(pictures, T.from_torchvision(EVALUATION), backend)
    assert shape_of(list(batch_images)) == shape_of(list(expected_images))
    for image, expected_image in zip(batch_images, expected_images, strict=True):
        torch.testing.assert_close(image, expected_image)
    for target, expected_target in zip(targets, expected_targets, strict=True):
        assert torch.equal(target["boxes"], expected_target["boxes"].as_subclass(torch.Tensor))
        assert torch.equal(target["labels"], expected_target["labels"])


@pytest.mark.usefixtures("warm_torchvision")
def test_detection_batches_are_the_same_with_workers_and_after_resume(images):
    def make_loader(workers) -> gl.Loader:
        options = {"shuffle": True, "transforms": RECIPE, "ragged": "list", "seed": SEED, "num_workers": workers}
        return cpu_loader(Scenes(images), 2, **options)

    expected = list(make_loader(0))
    with make_loader(2) as interrupted, make_loader(1) as resumed:
        batch = next(iter(interrupted))
        resumed.load_state_dict(interrupted.state_dict())
        assert alike([batch, *resumed], expected)
