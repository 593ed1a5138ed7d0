"""The recipe of docs/howto/dataset_in_memory.md equals a loader of the dataset bit for bit, also when resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T

COUNT = 14
OPTIONS: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "device": "cpu", "info": True}
ORDER: dict[str, Any] = {"shuffle": True, "seed": 5}
IMAGE_CHAIN = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.5,) * 3)]
BOX_CHAIN = [
    T.RandomIoUCrop(),
    T.RandomHorizontalFlip(),
    T.Resize((16, 16)),
    T.SanitizeBoundingBoxes(labels_getter=None),
]


def make_image(index: int, *, sizes_differ: bool) -> np.ndarray:
    size = (20 + index, 40 - index) if sizes_differ else (24, 32)
    return np.random.default_rng(index).integers(0, 256, (*size, 3), dtype=np.uint8)


def labeled_samples(*, sizes_differ: bool) -> list[tuple[gl.Image, int]]:
    return [(gl.Image(make_image(index, sizes_differ=sizes_differ)), index % 3) for index in range(COUNT)]


def samples_with_targets(*, sizes_differ: bool) -> list[dict[str, Any]]:
    samples = []
    for index in range(COUNT):
        image = make_image(index, sizes_differ=sizes_differ)
        boxes = np.array([[1, 2, 12, 14], [4, 3, 10 + index % 5, 15]], np.float32)[: 1 + index % 2]
        samples.append({"image": gl.Image(image), "mask": gl.Mask(image[:, :, 0] // 32), "boxes": gl.Boxes(boxes)})
    return samples


def order_loader() -> gl.Loader:
    return gl.Loader(np.arange(COUNT), **OPTIONS, **ORDER)


def in_memory_batches(order: Iterable[Any], images: Any, labels: torch.Tensor) -> Iterator[Any]:
    augment = gl.Augment(IMAGE_CHAIN, seed=5)
    for indices, info in order:
        if isinstance(images, list):
            batch = [images[index] for index in indices.tolist()]
        else:
            batch = images.index_select(0, indices).permute(0, 3, 1, 2)
        yield augment(batch, positions=info.positions, epoch=info.epoch), labels[indices]


def read_into_memory(*, sizes_differ: bool) -> tuple[Any, torch.Tensor]:
    """Return all images, N×H×W×C or a list of C×H×W, and labels."""
    images: Any = [None] * COUNT if sizes_differ else torch.empty(COUNT, 24, 32, 3, dtype=torch.uint8)
    labels = torch.empty(COUNT, dtype=torch.int64)
    with gl.Loader(
        labeled_samples(sizes_differ=sizes_differ), ragged="list" if sizes_differ else "error", **OPTIONS
    ) as reader:
        for (batch, batch_labels), info in reader:
            labels[info.indices] = batch_labels
            if sizes_differ:
                for index, image in zip(info.indices.tolist(), batch, strict=True):
                    images[index] = image.clone()
            else:
                images[info.indices] = batch.permute(0, 2, 3, 1)
    return images, labels


def check_equal(batches: Iterable[Any], expected: Iterable[Any]) -> None:
    for (images, labels), ((expected_images, expected_labels), _info) in zip(batches, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


@pytest.mark.parametrize("sizes_differ", [False, True], ids=["one size", "many sizes"])
def test_in_memory_recipe_equals_two_epochs_of_a_loader(sizes_differ):
    images, labels = read_into_memory(sizes_differ=sizes_differ)
    with (
        gl.Loader(labeled_samples(sizes_differ=sizes_differ), transforms=IMAGE_CHAIN, **OPTIONS, **ORDER) as loader,
        order_loader() as order,
    ):
        for _ in range(2):
            check_equal(in_memory_batches(order, images, labels), loader)


@pytest.mark.parametrize("sizes_differ", [False, True], ids=["one size", "many sizes"])
def test_in_memory_recipe_equals_masks_and_boxes_of_a_loader(sizes_differ):
    samples: list[Any] = [None] * COUNT
    with gl.Loader(samples_with_targets(sizes_differ=sizes_differ), ragged="list", **OPTIONS) as reader:
        for batch, info in reader:
            for index, sample in zip(info.indices.tolist(), batch, strict=True):
                mask, boxes = gl.Mask(sample["mask"].clone()), gl.Boxes(sample["boxes"].numpy().copy())
                samples[index] = {"image": sample["image"].clone(), "mask": mask, "boxes": boxes}
    augment = gl.Augment(BOX_CHAIN, seed=5)
    with (
        gl.Loader(samples_with_targets(sizes_differ=sizes_differ), transforms=BOX_CHAIN, **OPTIONS, **ORDER) as loader,
        order_loader() as order,
    ):
        for (indices, info), (expected, _info) in zip(order, loader, strict=True):
            batch = [samples[index] for index in indices.tolist()]
            batch = augment(batch, positions=info.positions, epoch=info.epoch)
            for sample, expected_sample in zip(batch, expected, strict=True):
                for name in ("image", "mask", "boxes"):
                    assert torch.equal(sample[name], expected_sample[name])


@pytest.mark.parametrize("step", [1, 4, 6])
def test_state_of_the_order_resumes_the_recipe_and_a_loader(step):
    images, labels = read_into_memory(sizes_differ=False)
    options = OPTIONS | ORDER | {"transforms": IMAGE_CHAIN}
    with gl.Loader(labeled_samples(sizes_differ=False), **options) as loader:
        expected = [*loader, *loader]
    with order_loader() as order:
        epochs = (batch for _ in range(2) for batch in in_memory_batches(order, images, labels))
        check_equal(islice(epochs, step), expected[:step])
        state = order.state_dict()
    remaining_epochs = range(2 - step // 4)  # an epoch has 4 batches
    with order_loader() as order:
        order.load_state_dict(state)
        batches = (batch for _ in remaining_epochs for batch in in_memory_batches(order, images, labels))
        check_equal(batches, expected[step:])
    with gl.Loader(labeled_samples(sizes_differ=False), **options) as loader:
        with pytest.warns(RuntimeWarning, match="transforms"):
            loader.load_state_dict(state, strict=False)
        batches = [batch for _ in remaining_epochs for batch, _info in loader]
        check_equal(batches, expected[step:])
