"""Rounds of loading, and what counts as the images of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpuload.cli.measure import forever, images_of, one_round

CPU = torch.device("cpu")


def test_the_images_of_a_batch_are_found() -> None:
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4)
    for batch in (images, (images, labels), {"cls": labels, "jpg": images}, [labels, [images, images]]):
        assert images_of(batch) is images
    assert images_of({"cls": labels, "text": ["a"]}) is labels
    with pytest.raises(ValueError, match="a batch has no tensors, but is a list"):
        images_of(["a", "b"])


def test_one_epoch_comes_after_the_other() -> None:
    batches = forever([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(ValueError, match="an epoch has no batches"):
        next(forever([]))


def test_a_round_leaves_its_first_batches_out() -> None:
    taken: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        while True:
            taken.append(1)
            yield torch.zeros(8, 3, 4, 4)

    found = one_round(batches(), 0.0, CPU, skip=3)
    assert len(taken) == 4
    assert found.images_per_s > 0
    assert found.cpu_s_per_1000 >= 0
