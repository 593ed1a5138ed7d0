"""Combinations of features: images with arrays, failing or modified samples, reference cycles, samplers' states."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import numpy as np
import pytest
import torch
from dataloader.streams import worker_share
from helpers.both_loaders import as_lists, cpu_loader, gpuload_batches
from helpers.map_datasets import MapDataset
from helpers.processes import is_alive
from torch.utils.data import IterableDataset, RandomSampler

import gpuload as gl

pytestmark = pytest.mark.usefixtures("warm")


class Streamed(IterableDataset):
    def __init__(self, make, length: int = 24) -> None:
        self.make, self.length = make, length

    def __iter__(self):
        worker, workers = worker_share()
        return map(self.make, range(worker, self.length, workers))


def image_array_number(index):
    return gl.Image(np.full((16, 16, 3), index, np.uint8)), np.full(1024, index, np.float32), index


def dataset_failing_at(*bad, make=image_array_number):
    """Return a dataset of 24 samples, of which the samples in `bad` raise."""

    def make_or_fail(index):
        if index in bad:
            raise ValueError("bad")
        return make(index)

    return MapDataset(make_or_fail, 24)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"collate_fn": torch.utils.data.default_collate}, {"chunk_size": 3}])
def test_samples_of_image_array_and_number_are_batched_together(workers, options):
    batches = gpuload_batches(dataset_failing_at(), 8, num_workers=workers, **options)
    assert [numbers.tolist() for _, _, numbers in batches] == [list(range(start, start + 8)) for start in (0, 8, 16)]
    for images, arrays, numbers in batches:
        assert images.shape == (8, 3, 16, 16)
        assert (images == numbers[:, None, None, None]).all()
        assert arrays.shape == (8, 1024)
        assert arrays.dtype == torch.float32
        assert (arrays == numbers[:, None]).all()


@pytest.mark.processes
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_stay_with_their_images_when_samples_fail(workers, on_error):
    faults = gl.Faults(on_error=on_error, max_error_rate=1)
    with pytest.warns(RuntimeWarning, match="bad"):
        batches = gpuload_batches(dataset_failing_at(2, 9, 10), 8, num_workers=workers, chunk_size=3, faults=faults)
    for images, arrays, numbers in batches:
        assert (images[:, 0, 0, 0] == numbers).all()
        assert (arrays[:, 5] == numbers).all()


def add_100(samples):
    for sample in samples:
        sample["x"] += 100
    return torch.stack([sample["x"] for sample in samples])


def add_100_unsendable(samples):
    return add_100(samples), threading.Lock()


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [MapDataset, Streamed])
@pytest.mark.parametrize("collate_fn", [add_100, add_100_unsendable])
def test_collate_fn_that_modifies_its_samples_is_applied_once(workers, kind, collate_fn):
    dataset = kind(lambda index: {"x": torch.full((400_000,), index)}, 6)  # larger than a slot's first size
    batches = gpuload_batches(dataset, 2, num_workers=workers, collate_fn=collate_fn)
    tensors = [batch if isinstance(batch, torch.Tensor) else batch[0] for batch in batches]
    assert [tensor[:, 0].tolist() for tensor in tensors] == [[100, 101], [102, 103], [104, 105]]


@pytest.mark.processes
def test_stream_continues_after_chunks_that_did_not_fit_in_the_ring():
    dataset = Streamed(lambda index: np.full(600_000 if index < 2 else 100, index, np.uint8), 40)
    batches = gpuload_batches(dataset, 1, num_workers=2, ring_bytes=1 << 20)
    assert [int(batch[0, 0]) for batch in batches] == list(range(40))


@pytest.mark.processes
def test_memmaps_of_a_dataset_arrive_from_workers(tmp_path):
    path = tmp_path / "numbers"
    np.arange(40_000, dtype=np.float32).tofile(path)

    def make(index):
        return np.memmap(path, np.float32, "r", index * 4000, (1000,))

    batches = gpuload_batches(MapDataset(make, 6), 2, num_workers=1)
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1000], [2000, 3000], [4000, 5000]]


class RaisesStopIteration(torch.nn.Module):
    def forward(self, images):
        raise StopIteration


def test_stop_iteration_in_a_transform_raises_instead_of_ending_the_epoch():
    with pytest.raises(RuntimeError, match="making a batch raised StopIteration"):
        gpuload_batches(dataset_failing_at(), 8, transforms=[RaisesStopIteration()])


@pytest.mark.parametrize("batch_size", [1, None])
def test_batch_whose_only_sample_fails_is_dropped(batch_size):
    with pytest.warns(RuntimeWarning, match="bad"):
        batches = gpuload_batches(dataset_failing_at(3, make=int), batch_size, sampler=range(6), on_error="skip")
    assert [int(batch) for batch in batches] == [0, 1, 2, 4, 5]


class Holder:
    """An object with a loader and the collate_fn of that loader, like a LightningDataModule."""

    def __init__(self, workers):
        self.loader = cpu_loader(MapDataset(int, 24), 8, num_workers=workers, collate_fn=self.collate)

    def collate(self, samples):
        return torch.tensor(samples)

    def __getstate__(self):
        return {}


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_loader_in_a_cycle_with_its_collate_fn_is_collected_with_its_workers(workers):
    holder = Holder(workers)
    assert next(iter(holder.loader)).tolist() == list(range(8))
    reference = weakref.ref(holder)
    pids = list(holder.loader._session.engine.pids) if workers else []  # pyright: ignore
    del holder
    gc.collect()
    assert reference() is None
    assert [pid for pid in pids if is_alive(pid)] == []


def test_state_between_epochs_resumes_with_the_next_epoch_of_the_sampler():
    def make():
        sampler = RandomSampler(range(24), generator=torch.Generator().manual_seed(1))
        return cpu_loader(MapDataset(int, 24), 8, sampler=sampler)

    loader = make()
    list(loader)
    states = [loader.state_dict()]
    loader.set_epoch(1)
    states.append(loader.state_dict())
    batches = iter(loader)
    states.append(loader.state_dict())
    expected = as_lists(batches)
    for state in states:
        resuming = make()
        resuming.load_state_dict(json.loads(json.dumps(state)))
        assert as_lists(resuming) == expected


@pytest.mark.processes
def test_feed_has_a_batch_in_progress_for_each_worker():
    with cpu_loader(MapDataset(int, 24), 2, num_workers=3, collate_fn=torch.tensor) as loader:
        batches = iter(loader)
        next(batches)
        assert len(loader._session.feed._batches) >= 3  # pyright: ignore[reportOptionalMemberAccess]
