"""Each sample is read once, even while the size of samples is unknown."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataloader.streams import worker_share
from helpers.both_loaders import alike
from torch.utils.data import IterableDataset, default_collate

import gpuload as gl
from gpuload import transforms as T
from gpuload.workers import feed as feed_module
from gpuload.workers.feed import Feed, SlotSize

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.processes]

COUNT = 26


class ReadLog:
    """The part of a dataset that logs each read in a file, which processes share."""

    def __init__(self, make: Any, path: Path) -> None:
        self.make, self.path = make, str(path)

    def read(self, index: int) -> Any:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b"%d\n" % index)
        os.close(file)
        return self.make(index)

    def take_log(self) -> list[int]:
        numbers = sorted(map(int, Path(self.path).read_text().split()))
        os.unlink(self.path)
        return numbers


class Mapped(ReadLog):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class Batched(Mapped):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.read(index) for index in indices]


class Streamed(ReadLog, IterableDataset):
    def __iter__(self):
        worker, workers = worker_share()
        return map(self.read, range(worker, COUNT, workers))


def photograph(index: int) -> Any:
    return gl.Image(np.random.default_rng(index).integers(0, 256, (500, 500, 3), np.uint8)), index


def array(index: int) -> Any:
    return np.full(200_000, index, np.float32), index


def image_and_array(index: int) -> Any:
    """Return a sample whose pixels fit in a chunk's slot, but whose array does not."""
    return gl.Image(np.full((300, 300, 3), index, np.uint8)), np.full((index % 3 + 1) * 60_000, index, np.float32)


# The dataset, the function that makes its samples, and options of the loader.
SAMPLE_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "images": (Mapped, photograph, {}),
    "crops of images": (Mapped, photograph, {"transforms": [T.RandomCrop(400)]}),
    "arrays": (Mapped, array, {}),
    "arrays, several at a time": (Batched, array, {}),
    "images, and arrays of any length": (Mapped, image_and_array, {"collate_fn": list}),
    "a collate_fn": (Mapped, array, {"collate_fn": default_collate}),
    "a collate_fn for images": (Mapped, photograph, {"collate_fn": default_collate}),
    "long texts": (Mapped, lambda index: f"{index:02}" * 300_000, {}),
    "a stream": (Streamed, array, {}),
    "a stream of images": (Streamed, photograph, {}),
    "a stream with a collate_fn": (Streamed, array, {"collate_fn": default_collate}),
}


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", SAMPLE_KINDS)
def test_each_sample_is_read_once_while_slot_sizes_are_unknown(name, workers, tmp_path, monkeypatch):
    dataset_class, make, options = SAMPLE_KINDS[name]
    dataset, epochs = dataset_class(make, tmp_path / "log"), []
    enlarged = []
    monkeypatch.setattr(Feed, "_enlarge", lambda feed, part, need_bytes: enlarged.append(need_bytes))
    shuffle = {} if dataset_class is Streamed else {"shuffle": True}
    for slot_size in (SlotSize, partial(SlotSize, guess_bytes=4 << 20)):
        monkeypatch.setattr(feed_module, "SlotSize", slot_size)
        with gl.Loader(dataset, 8, num_workers=workers, device="cpu", seed=3, **shuffle, **options) as loader:
            epochs.append(list(loader))
            assert dataset.take_log() == list(range(COUNT))
    assert alike(*epochs)
    assert enlarged == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset_class", [Mapped, Streamed])
def test_chunk_too_large_for_its_slot_and_for_separate_memory_is_repeated(
    dataset_class, workers, tmp_path, monkeypatch
):
    enlarged, enlarge = [], Feed._enlarge
    monkeypatch.setattr(Feed, "_enlarge", lambda *args: enlarged.append(args) or enlarge(*args))
    dataset = dataset_class(array, tmp_path / "log")
    with gl.Loader(dataset, 8, num_workers=workers, device="cpu", chunk_size=4, ring_bytes=6 << 20) as loader:
        rows_by_label = {int(label): row for rows, labels in loader for row, label in zip(rows, labels, strict=True)}
    assert sorted(rows_by_label) == list(range(COUNT))
    for label, row in rows_by_label.items():
        assert (row == label).all(), label
    assert enlarged, "no chunk was too large"


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_larger_than_their_slots_leave_no_descriptors_or_mappings(workers, tmp_path, monkeypatch):
    """Slots keep the size that was guessed first."""
    monkeypatch.setattr(SlotSize, "grow_for", lambda size, nbytes, rows: None)
    dataset, counts = Mapped(array, tmp_path / "log"), []

    def count() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:gpuload-chunk")

    with gl.Loader(dataset, 8, num_workers=workers, device="cpu") as loader:
        for _ in range(8):
            for _ in loader:
                pass
            counts.append(count())
    assert dataset.take_log() == sorted([*range(COUNT)] * 8)
    (descriptor_count, _), *_ = counts
    assert counts == [(descriptor_count, 0)] * 8
