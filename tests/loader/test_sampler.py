"""`loader.sampler`, and what else scripts ask of a DataLoader."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import gpuload as gl
from gpuload import transforms as T


def made(**options):
    return gl.Loader(list(range(10)), options.pop("batch_size", 3), num_workers=0, device="cpu", **options)


def given(loader) -> list[int]:
    info = getattr(loader, "info", False)
    return [number for batch in loader for number in (batch[0] if info else batch).tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "drop_last": True, "batch_size": 2},
        {"shuffle": True, "uneven": "drop"},
        {"uneven": "exact", "info": True},
        {"weights": np.arange(10)},
        {"shuffle": True, "repeats": 3},
        {"batch_size": None},
    ],
)
def test_it_says_which_samples_the_next_epoch_gives_this_rank(world_size, options):
    lengths = set()
    for rank in range(world_size):
        batch_size = options.get("batch_size", 3)
        with made(**{**options, "batch_size": batch_size}, rank=rank, world_size=world_size) as loader:
            for _ in range(2):
                expected = list(loader.sampler)
                found = [int(x) for x in loader] if batch_size is None else given(loader)
                assert found == expected
                assert len(loader.sampler) == len(expected)
            lengths.add(len(loader.sampler))
    assert len(lengths) == 1


def test_set_epoch_is_that_of_the_loader():
    with made(shuffle=True) as loader, made(shuffle=True) as other:
        loader.sampler.set_epoch(5)
        other.set_epoch(5)
        assert list(loader.sampler) == list(other.sampler) == given(other) == given(loader)
        assert loader.epoch == 5
        iterator = iter(loader)
        assert list(loader.sampler) == list(other.sampler), "nothing was taken: the next iter() begins it anew"
        next(iterator)
        expected = list(loader.sampler)
        assert expected != list(other.sampler)
        assert given(loader) == expected
        assert loader.epoch == 7


def test_an_epoch_of_which_nothing_was_taken_may_be_given_its_number_again():
    """Lightning calls `iter()`, then `set_epoch()`, then takes batches; its checkpoints name the epoch that follows."""
    with made(shuffle=True) as loader, made(shuffle=True) as other:
        for epoch in (0, 1):
            iterator = iter(loader)
            loader.sampler.set_epoch(epoch)
            assert given(iterator) == given(other)
            assert loader.state_dict() == other.state_dict()
            assert loader.state_dict()["epoch"] == epoch + 1


def test_the_aux_loader_of_pytorchs_imagenet_example_has_what_is_left_out():
    with made(world_size=4, rank=1, uneven="drop") as loader:
        assert len(loader.sampler) * 4 < len(loader.dataset)
        assert range(len(loader.sampler) * 4, len(loader.dataset)) == range(8, 10)
    with made(world_size=4, rank=1) as loader:
        assert len(loader.sampler) * 4 >= len(loader.dataset)


def test_a_sampler_of_the_users_own_is_what_was_given():
    dataset, mine = list(range(10)), RandomSampler(range(10))
    assert made(sampler=mine).sampler is mine
    inner = SequentialSampler(range(10))
    batches = BatchSampler(inner, 3, False)
    loader = gl.Loader(dataset, batch_sampler=batches, num_workers=0, device="cpu")
    assert (loader.batch_sampler, loader.sampler) == (batches, inner)
    assert gl.Loader(dataset, batch_sampler=[[1], [2]], num_workers=0, device="cpu").sampler is None


def test_an_iterable_dataset_has_no_indices_but_takes_the_epoch():
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


def test_what_was_given_can_be_asked_for_and_not_set():
    chain = [T.CenterCrop(8), T.ToDtype("float32", scale=True)]
    with gl.Loader([np.zeros((9, 9, 3), np.uint8)], transforms=chain, num_workers=0, device="cpu") as loader:
        assert list(loader.transforms) == chain
        assert (loader.device, type(loader.device)) == (torch.device("cpu"), torch.device)
        assert next(iter(loader)).device == loader.device
        for name in inspect.signature(gl.Loader).parameters:
            with pytest.raises(ValueError, match=f"{name} cannot be changed after the Loader has been created"):
                setattr(loader, name, None)
        loader.note = "of a framework"
    assert gl.Loader([1], num_workers=0).device == torch.device("cuda", 0) if torch.cuda.is_available() else True


def test_every_attribute_of_a_dataloader_is_there():
    theirs = DataLoader([1])
    public = {name for name in dir(theirs) if not name.startswith("_")}
    # Deprecated by torch; and a check of its own arguments.
    without = {"pin_memory_device", "check_worker_number_rationality"}
    missing = {name for name in public - without if not hasattr(gl.Loader([1], num_workers=0, device="cpu"), name)}
    assert missing == set()
