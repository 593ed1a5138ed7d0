"""A few small JPEGs with labels, and a check that a store of them gives the same batches as the files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl
from gpuload import transforms as T

COUNT = 12
LABELS = [number % 3 for number in range(COUNT)]


@cache
def jpegs() -> list[bytes]:
    """Return small JPEGs of two sizes."""
    return [jpeg_bytes(smooth_image(24 + 8 * (number % 2), 32, number)) for number in range(COUNT)]


class InMemoryDataset:
    """A dataset of samples in memory."""

    def __init__(self, images: Sequence[Any], labels: Sequence[Any]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = self.images[index]
        return gl.Encoded(image) if isinstance(image, bytes) else image, self.labels[index]


def assert_batches_equal(batches: list[Any], expected_batches: list[Any]) -> None:
    for (images, labels), (expected_images, expected_labels) in zip(batches, expected_batches, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(torch.as_tensor(labels), torch.as_tensor(expected_labels))


def check_loader(dataset: Any, images: Sequence[Any] | None = None, labels: Sequence[Any] = LABELS) -> None:
    """Check that a dataset's batches equal those of the images in memory, bit by bit: without workers, with two, and
    when a run of two workers is resumed without workers."""

    def make_loader(source: Any, workers: int) -> gl.Loader:
        transforms = [T.RandomResizedCrop(16), T.RandomHorizontalFlip()]
        return gl.Loader(source, 5, shuffle=True, transforms=transforms, num_workers=workers, device="cpu")

    expected = list(make_loader(InMemoryDataset(jpegs() if images is None else images, labels), 0))
    assert_batches_equal(list(make_loader(dataset, 0)), expected)
    with make_loader(dataset, 2) as loader:
        iterator = iter(loader)
        first_batch = next(iterator)
        state = loader.state_dict()
        assert_batches_equal([first_batch, *iterator], expected)
    resumed = make_loader(dataset, 0)
    resumed.load_state_dict(state)
    assert_batches_equal(list(resumed), expected[1:])
