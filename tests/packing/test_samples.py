"""`read_samples`: order, errors in place of samples, and the samples that `will_need` announces."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from gpuload.packing.samples import CHUNK, read_samples

COUNT = 5 * CHUNK + 3


class RecordingDataset:
    def __init__(self) -> None:
        self.keys: list[int] = []
        self.announced: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.keys.append(index)
        if index == 7:
            raise ValueError("seven")
        return index

    def will_need(self, indices: Iterable[int]) -> None:
        self.announced += indices


class BatchedRecordingDataset(RecordingDataset):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [RecordingDataset, BatchedRecordingDataset])
def test_read_samples_yields_samples_in_order_and_errors_in_their_place(kind: type[RecordingDataset]) -> None:
    dataset = kind()
    samples = dict(read_samples(dataset, range(2, COUNT)))
    assert list(samples) == list(range(2, COUNT))
    assert isinstance(samples.pop(7), ValueError)
    assert list(samples.keys()) == list(samples.values())
    assert dataset.announced[:CHUNK] == list(range(2, 2 + CHUNK)), "the first chunk was not announced"
    assert max(dataset.announced) < COUNT, "samples beyond the part were announced"


def test_read_samples_raises_errors_that_are_not_about_a_sample() -> None:
    class BrokenDataset(RecordingDataset):
        def __getitem__(self, index: int) -> int:
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        dict(read_samples(BrokenDataset(), range(3)))


def test_read_samples_does_not_seed_the_dataset() -> None:
    class RandomDataset(RecordingDataset):
        def __getitem__(self, index: int) -> float:
            return random.random()

    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    assert [sample for _, sample in read_samples(RandomDataset(), range(3))] == expected
