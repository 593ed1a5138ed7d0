"""`Loader.sampler` and other attributes of a DataLoader that scripts use."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import gpuload as gl
from gpuload import transforms as T


def make_loader(**options):
    return gl.Loader(list(range(10)), options.pop("batch_size", 3), num_workers=0, device="cpu", **options)


def read_indices(loader) -> list[int]:
    info = getattr(loader, "info", False)
    return [number for batch in loader for number in (batch[0] if info else batch).tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("options", [
    {},
    {"shuffle": True},
    {"shuffle": True, "drop_last": True, "batch_size": 2},
    {"shuffle": True, "uneven": "drop"},
    {"uneven": "exact", "info": True},
    {"weights": np.arange(10)},
    {"shuffle": True, "repeats": 3},
    {"batch_size": None},
])  # fmt: skip
def test_sampler_lists_the_samples_of_this_rank_in_the_next_epoch(world_size, options):
    lengths = set()
    for rank in range(world_size):
        batch_size = options.get("batch_size", 3)
        with make_loader(**{**options, "batch_size": batch_size}, rank=rank, world_size=world_size) as loader:
            for _ in range(2):
                expected = list(loader.sampler)
                indices = [int(x) for x in loader] if batch_size is None else read_indices(loader)
                assert indices == expected
                assert len(loader.sampler) == len(expected)
            lengths.add(len(loader.sampler))
    assert len(lengths) == 1


def test_set_epoch_of_the_sampler_sets_the_epoch_of_the_loader():
    with make_loader(shuffle=True) as loader, make_loader(shuffle=True) as reference:
        loader.sampler.set_epoch(5)
        reference.set_epoch(5)
        assert list(loader.sampler) == list(reference.sampler) == read_indices(reference) == read_indices(loader)
        assert loader.epoch == 5
        iterator = iter(loader)
        assert list(loader.sampler) == list(reference.sampler), "no batch was read: the next iter() begins again"
        next(iterator)
        expected = list(loader.sampler)
        assert expected != list(reference.sampler)
        assert read_indices(loader) == expected
        assert loader.epoch == 7


def test_set_epoch_after_iter_restarts_the_epoch_if_no_batch_was_read():
    """Lightning calls `iter()`, then `set_epoch()`, and then reads batches; its checkpoints contain the next epoch."""
    with make_loader(shuffle=True) as loader, make_loader(shuffle=True) as reference:
        for epoch in (0, 1):
            iterator = iter(loader)
            loader.sampler.set_epoch(epoch)
            assert read_indices(iterator) == read_indices(reference)
            assert loader.state_dict() == reference.state_dict()
            assert loader.state_dict()["epoch"] == epoch + 1


def test_length_of_the_sampler_fits_the_aux_loader_of_pytorchs_imagenet_example():
    with make_loader(world_size=4, rank=1, uneven="drop") as loader:
        assert len(loader.sampler) * 4 < len(loader.dataset)
        assert range(len(loader.sampler) * 4, len(loader.dataset)) == range(8, 10)
    with make_loader(world_size=4, rank=1) as loader:
        assert len(loader.sampler) * 4 >= len(loader.dataset)


def test_sampler_and_batch_sampler_return_the_users_objects():
    dataset, sampler = list(range(10)), RandomSampler(range(10))
    assert make_loader(sampler=sampler).sampler is sampler
    inner_sampler = SequentialSampler(range(10))
    batch_sampler = BatchSampler(inner_sampler, 3, False)
    loader = gl.Loader(dataset, batch_sampler=batch_sampler, num_workers=0, device="cpu")
    assert (loader.batch_sampler, loader.sampler) == (batch_sampler, inner_sampler)
    assert gl.Loader(dataset, batch_sampler=[[1], [2]], num_workers=0, device="cpu").sampler is None


def test_sampler_of_an_iterable_dataset_passes_set_epoch_on_and_has_no_indices():
    class Stream(IterableDataset):
        epoch = None

        def __iter__(self):
            return iter(range(3))

        def set_epoch(self, epoch):
            self.epoch = epoch

    stream = Stream()
    loader = gl.Loader(stream, num_workers=0, device="cpu")
    loader.sampler.set_epoch(4)
    assert stream.epoch == 4
    for ask in (len, iter):
        with pytest.raises(TypeError, match="an iterable dataset defines its own order"):
            ask(loader.sampler)


def test_arguments_of_a_loader_can_be_read_but_not_set():
    chain = [T.CenterCrop(8), T.ToDtype("float32", scale=True)]
    with gl.Loader([np.zeros((9, 9, 3), np.uint8)], transforms=chain, num_workers=0, device="cpu") as loader:
        assert list(loader.transforms) == chain
        assert (loader.device, type(loader.device)) == (torch.device("cpu"), torch.device)
        assert next(iter(loader)).device == loader.device
        for name in inspect.signature(gl.Loader).parameters:
            with pytest.raises(ValueError, match=f"{name} cannot be changed after the Loader has been created"):
                setattr(loader, name, None)
        loader.note = "of a framework"
    if torch.cuda.is_available():
        assert gl.Loader([1], num_workers=0).device == torch.device("cuda", 0)


def test_loader_has_every_public_attribute_of_a_dataloader():
    dataloader = DataLoader([1])
    public = {name for name in dir(dataloader) if not name.startswith("_")}
    # The first is deprecated by torch, and the second is a check of DataLoader's own arguments.
    exempt = {"pin_memory_device", "check_worker_number_rationality"}
    missing = {name for name in public - exempt if not hasattr(gl.Loader([1], num_workers=0, device="cpu"), name)}
    assert missing == set(), "add these attributes to gpuload/loader/loader.py, or exempt them here"
