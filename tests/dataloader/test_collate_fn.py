"""A user's collate_fn: in which process it runs, its arguments, and the batches that it returns."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike, gpuload_batches, torch_batches
from helpers.map_datasets import BatchedMapDataset, MapDataset
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import device as devices

pytestmark = pytest.mark.usefixtures("warm")


def padded(samples):
    from torch import tensor
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([tensor(sample) for sample in samples], batch_first=True)


# A collate_fn, and the function that makes its samples.
COLLATES = {
    "the list itself": (list, int),
    "an array and a number": (lambda samples: (np.array(samples), len(samples)), int),
    "a string": (repr, int),
    "a dict": (lambda samples: {"sum": sum(samples), "all": samples}, int),
    "padded sequences": (padded, lambda i: list(range(i))),
    "default_collate": (default_collate, lambda i: {"a": i, "b": (f"n{i}", np.full(700, i))}),
    "a filter": (lambda samples: [s for s in samples if s is not None], lambda i: i if i % 3 else None),
    "nothing": (lambda samples: None, int),
}


@pytest.mark.parametrize("name", COLLATES)
def test_collate_fn_makes_the_same_batches_as_in_dataloader(name):
    collate_fn, make = COLLATES[name]
    options = {"batch_size": 4, "collate_fn": collate_fn}
    assert alike(gpuload_batches(MapDataset(make), **options), torch_batches(MapDataset(make), **options))


def all_collates(samples):
    return {name: collate_fn([sample[name] for sample in samples]) for name, (collate_fn, _) in COLLATES.items()}


def all_samples(index):
    return {name: make(index) for name, (_, make) in COLLATES.items()}


@pytest.mark.processes
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_collate_fn_makes_the_same_batches_in_workers(chunk_size):
    """The function runs in the worker if a chunk is a complete batch, else in the main process."""
    options = {"batch_size": 4, "collate_fn": all_collates}
    expected = torch_batches(MapDataset(all_samples), **options)
    assert alike(gpuload_batches(MapDataset(all_samples), num_workers=1, chunk_size=chunk_size, **options), expected)


@pytest.mark.processes
def test_collate_fn_draws_the_same_for_a_list_as_for_any_dataset():
    """The numbers continue the sequence of the batch's last sample, although the samples of a list draw nothing."""

    def add_random_numbers(samples):
        return samples, torch.rand(2).tolist(), random.random()

    expected = gpuload_batches(list(range(64)), 16, collate_fn=add_random_numbers)
    assert gpuload_batches(MapDataset(int, 64), 16, collate_fn=add_random_numbers) == expected
    assert gpuload_batches(list(range(64)), 16, collate_fn=add_random_numbers, num_workers=2, chunk_size=16) == expected
    assert len({number for _, _, number in expected}) == 4


@pytest.mark.processes
def test_collate_fn_runs_in_the_worker_or_for_images_in_the_main_process():
    def process_ids(samples):
        return [os.getpid()] * len(samples)

    assert os.getpid() not in gpuload_batches(MapDataset(), 5, num_workers=1, collate_fn=process_ids)[0]
    images = MapDataset(lambda i: gl.Image(np.zeros((4, 4, 3), np.uint8)))
    assert gpuload_batches(images, 5, num_workers=1, collate_fn=process_ids) == [[os.getpid()] * 5] * 2


def test_collate_fn_that_draws_leaves_torchs_global_generator_unchanged():
    before = torch.get_rng_state()
    gpuload_batches(MapDataset(), 4, collate_fn=lambda samples: torch.rand(len(samples)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_exception_in_collate_fn_names_its_samples_and_line(workers):
    def fails(samples):
        if 4 in samples:
            raise KeyError("no four")
        return samples

    with gl.Loader(MapDataset(), 3, num_workers=workers, collate_fn=fails, device="cpu") as loader:
        batches = iter(loader)
        assert next(batches) == [0, 1, 2]
        message = r"collate_fn raised KeyError: 'no four' for a batch of 3 .*sample 3"
        with pytest.raises(gl.CollateError, match=message) as caught:
            next(batches)
        assert "raise KeyError" in str(caught.value)
        assert next(batches) == [6, 7, 8]
    with pytest.raises(KeyError):
        torch_batches(MapDataset(), 3, collate_fn=fails)


def test_get_collate_fn_of_the_dataset_is_used_unless_collate_fn_is_passed():
    class WithCollateFn(MapDataset):
        def _get_collate_fn(self):
            return lambda samples: ("by default", samples)

    assert gpuload_batches(WithCollateFn(), 5)[0] == ("by default", [0, 1, 2, 3, 4])
    assert gpuload_batches(WithCollateFn(), 5, collate_fn=sum)[0] == 10


def test_collate_fn_gets_the_samples_of_getitems_as_a_list():
    assert gpuload_batches(BatchedMapDataset(), 4, collate_fn=tuple) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


def test_none_as_sample_raises_without_collate_fn():
    with pytest.raises(gl.SampleError, match=r"the dataset returned None; .* pass a collate_fn that drops None"):
        gpuload_batches(MapDataset(lambda i: None), 2)


# -- images -----------------------------------------------------------------------------------------------------------


def pictured(index):
    return gl.Image(np.full((20 + index, 30, 3), index, np.uint8)), index


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_collate_fn_gets_finished_images_each_of_its_own_size(workers):
    [samples] = gpuload_batches(MapDataset(pictured, 4), 4, collate_fn=list, num_workers=workers)
    assert [label for _, label in samples] == [0, 1, 2, 3]
    assert [tuple(image.shape) for image, _ in samples] == [(3, 20, 30), (3, 21, 30), (3, 22, 30), (3, 23, 30)]
    assert [image.unique().tolist() for image, _ in samples] == [[0], [1], [2], [3]]
    assert {image.dtype for image, _ in samples} == {torch.uint8}


def test_collate_fn_gets_images_of_one_size_as_views_of_one_storage():
    [samples] = gpuload_batches(MapDataset(pictured, 3), 3, transforms=[T.CenterCrop(8)], collate_fn=list)
    assert [image.shape for image, _ in samples] == [(3, 8, 8)] * 3
    assert len({image.untyped_storage().data_ptr() for image, _ in samples}) == 1
    assert [int(image.unique()) for image, _ in samples] == [0, 1, 2]


def test_default_collate_as_collate_fn_gives_the_same_batch_of_transformed_images():
    chain = [T.RandomResizedCrop(16), T.Normalize((0.5,) * 3, (0.5,) * 3)]
    batches = gpuload_batches(MapDataset(pictured, 8), 4, transforms=chain, collate_fn=default_collate)
    assert alike(batches, gpuload_batches(MapDataset(pictured, 8), 4, transforms=chain))


def test_collate_fn_without_batch_size_gets_one_finished_sample():
    options = {"transforms": [T.CenterCrop(8)], "collate_fn": lambda sample: (sample[0].shape, sample[1])}
    assert gpuload_batches(MapDataset(pictured, 2), None, **options) == [((3, 8, 8), 0), ((3, 8, 8), 1)]


# -- batches of a user's type -----------------------------------------------------------------------------------------


class Batch:
    def __init__(self, samples):
        self.values = torch.tensor(samples)
        self.pins = 0

    def pin_memory(self):
        self.pins += 1
        return self


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory_of_a_custom_batch_is_called_if_cuda_is_available(monkeypatch, workers):
    unpinned = gpuload_batches(MapDataset(), 5, collate_fn=Batch, pin_memory=True)
    assert [batch.pins for batch in unpinned] == [0, 0]  # no effect without CUDA, as in DataLoader
    monkeypatch.setattr(devices, "is_available", lambda: True)
    pinned = gpuload_batches(MapDataset(), 5, collate_fn=Batch, num_workers=workers, pin_memory=True)
    assert [(batch.pins, batch.values.tolist()) for batch in pinned] == [(1, [0, 1, 2, 3, 4]), (1, [5, 6, 7, 8, 9])]
    assert gpuload_batches(MapDataset(), 5, collate_fn=Batch)[0].pins == 0


def test_pin_memory_locks_all_nested_tensors_if_cuda_is_available(monkeypatch):
    locked = []

    class Locking(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.pin_memory:  # which needs CUDA
                locked.append(args[0].tolist())
                return args[0]
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(devices, "is_available", lambda: True)
    with Locking():
        [batch] = gpuload_batches(MapDataset(lambda i: {"a": i, "b": [(f"n{i}", i / 2)]}, 2), 2, pin_memory=True)
    assert locked == [[0, 1], [0.0, 0.5]]
    [(names, _)] = batch["b"]
    assert list(names) == ["n0", "n1"]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_collate_fn_runs_in_the_main_process_if_its_batch_cannot_be_pickled(workers, capfd):
    def unsendable(samples):
        return samples, threading.Lock()

    with gl.Loader(MapDataset(), 5, num_workers=workers, collate_fn=unsendable, device="cpu") as loader:
        assert [samples for samples, _ in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert capfd.readouterr().err == ""


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_nested_tensor_of_a_collate_fn_arrives(workers):
    def nested(samples):
        import warnings

        from torch import ones
        from torch.nested import as_nested_tensor

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return as_nested_tensor([ones(sample + 1) for sample in samples])

    [batch] = gpuload_batches(MapDataset(samples=3), 3, collate_fn=nested, num_workers=workers)
    assert batch.is_nested
    assert [len(row) for row in batch.unbind()] == [1, 2, 3]
