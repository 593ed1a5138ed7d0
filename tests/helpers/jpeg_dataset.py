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


class Held:
    """A dataset of samples in memory."""

    def __init__(self, images: Sequence[Any], labels: Sequence[Any]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = self.images[index]
        return gl.Encoded(image) if isinstance(image, bytes) else image, self.labels[index]


def equal(batches: list[Any], others: list[Any]) -> bool:
    return len(batches) == len(others) and all(
        torch.equal(mine[0], other[0]) and torch.equal(torch.as_tensor(mine[1]), torch.as_tensor(other[1]))
        for mine, other in zip(batches, others, strict=True)
    )


def check_loader(dataset: Any, images: Sequence[Any] | None = None, labels: Sequence[Any] = LABELS) -> None:
    """Check that a dataset's batches equal those of the images in memory, bit by bit: without workers, with two, and
    when a run of two workers is resumed without workers."""

    def loader(source: Any, workers: int) -> gl.Loader:
        steps = [T.RandomResizedCrop(16), T.RandomHorizontalFlip()]
        return gl.Loader(source, 5, shuffle=True, transforms=steps, num_workers=workers, device="cpu")

    expected = list(loader(Held(jpegs() if images is None else images, labels), 0))
    assert equal(list(loader(dataset, 0)), expected)
    with loader(dataset, 2) as working:
        iterator = iter(working)
        first = [next(iterator)]
        state = working.state_dict()
        assert equal(first + list(iterator), expected)
    resumed = loader(dataset, 0)
    resumed.load_state_dict(state)
    assert equal(list(resumed), expected[1:])
