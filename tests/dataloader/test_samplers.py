"""Which samples are in which batch: samplers, batch samplers, batch_size=None, generators, ranks."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike, as_lists, cpu_loader, gpuload_batches, torch_batches
from helpers.map_datasets import BatchedMapDataset, MapDataset
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import gpuload as gl

pytestmark = pytest.mark.usefixtures("warm")


def seeded_generator(seed=5):
    return torch.Generator().manual_seed(seed)


class CountingSampler:
    """A sampler of fixed keys, which counts the keys that it `yielded`."""

    def __init__(self, *numbers):
        self.numbers = numbers
        self.yielded = 0

    def __iter__(self):
        for number in self.numbers:
            self.yielded += 1
            yield number


# -- sampler ----------------------------------------------------------------------------------------------------------

SAMPLERS = {
    "a list": lambda: [3, 1, 4, 1, 5, 9, 2, 6],
    "a range": lambda: range(9, 0, -2),
    "an array": lambda: np.array([3, 1, 4, 1, 5]),
    "a tensor": lambda: torch.tensor([3, 1, 4, 1, 5]),
    "an iterable without a length": lambda: CountingSampler(3, 1, 4, 1, 5),
    "negative keys": lambda: [-1, -2],
    "an empty list": list,
    "sequential": lambda: SequentialSampler(range(10)),
    "random": lambda: RandomSampler(range(10), generator=seeded_generator()),
    "random with replacement": lambda: RandomSampler(range(10), True, 25, generator=seeded_generator()),
    "random beyond the end": lambda: RandomSampler(range(10), num_samples=25, generator=seeded_generator()),
    "of a subset": lambda: SubsetRandomSampler([3, 1, 4], generator=seeded_generator()),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.0, 5.0], 7, generator=seeded_generator()),
    "of one rank of three": lambda: DistributedSampler(range(10), 3, 1, shuffle=True, seed=4),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_gives_the_same_batches_as_in_dataloader(name, drop_last):
    dataset = MapDataset(lambda key: list(range(10))[key])
    options = {"batch_size": 3, "drop_last": drop_last, "epochs": 2}
    expected = torch_batches(dataset, sampler=SAMPLERS[name](), **options)
    assert alike(gpuload_batches(dataset, sampler=SAMPLERS[name](), **options), expected)


@pytest.mark.parametrize("name", SAMPLERS)
def test_length_with_a_sampler_is_that_of_dataloader(name):
    sampler = SAMPLERS[name]()
    ours = cpu_loader(MapDataset(), 3, sampler=sampler)
    theirs = torch.utils.data.DataLoader(MapDataset(), 3, sampler=sampler)
    if hasattr(sampler, "__len__"):
        assert len(ours) == len(theirs) == len(iter(ours))
    else:
        with pytest.raises(TypeError):
            len(theirs)
        with pytest.raises(TypeError, match="no length, since its sampler, a CountingSampler, has no length"):
            len(ours)
        with pytest.raises(TypeError, match="is unknown"):
            len(iter(ours))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["random", "weighted", "an iterable without a length"])
def test_sampler_gives_the_same_batches_with_workers(name):
    expected = torch_batches(MapDataset(), 3, sampler=SAMPLERS[name]())
    assert alike(gpuload_batches(MapDataset(), 3, sampler=SAMPLERS[name](), num_workers=2, chunk_size=1), expected)


@pytest.mark.processes
def test_sampler_keys_may_be_any_picklable_objects():
    keys = ["a", ("b", 2), None, 2**70, 1.5]
    dataset = MapDataset(repr)
    assert gpuload_batches(dataset, 2, sampler=keys) == torch_batches(dataset, 2, sampler=keys)
    assert gpuload_batches(dataset, 2, sampler=keys, num_workers=1) == torch_batches(dataset, 2, sampler=keys)
    [(_, info), *_] = gpuload_batches(dataset, 2, sampler=keys, info=True)
    assert info.indices == ["a", ("b", 2)]


def test_dataset_without_length_is_accepted_with_a_sampler():
    class Endless:
        def __getitem__(self, key):
            return key * 2

    assert as_lists(gpuload_batches(Endless(), 2, sampler=[10**12, 3])) == [[2 * 10**12, 6]]


@pytest.mark.processes
def test_sampler_is_read_no_further_than_the_batches_in_progress():
    class Endless:
        def __iter__(self):
            return itertools.count()

    sampler = CountingSampler(*range(1000))
    with cpu_loader(MapDataset(samples=1000), 4, sampler=sampler, num_workers=1, prefetch_factor=2) as loader:
        next(iter(loader))
        assert sampler.yielded < 50
    assert as_lists(itertools.islice(cpu_loader(MapDataset(), 2, sampler=Endless()), 3)) == [[0, 1], [2, 3], [4, 5]]


def test_random_numbers_of_a_sampler_depend_only_on_seed_and_epoch():
    """The dataset and the training loop draw from the global generators while the sampler is read."""

    class RandomKeys:
        def __iter__(self):
            for _ in range(6):
                yield random.randrange(10) * 100 + int(np.random.randint(10)) * 10 + int(torch.randint(10, ()))

    def noisy(key):
        random.random()
        return key

    torch.manual_seed(77)
    options = {"sampler": RandomKeys(), "batch_size": 2}
    keys = as_lists(gpuload_batches(MapDataset(noisy), epochs=2, **options))
    torch.manual_seed(78)
    random.seed(1)
    with cpu_loader(MapDataset(noisy), **options) as loader:
        keys_amid_draws = []
        for batch in itertools.chain(loader, loader):
            keys_amid_draws.append(batch.tolist())
            random.random()
            torch.rand(())
    assert keys_amid_draws == keys
    assert keys[:3] != keys[3:]
    assert as_lists(gpuload_batches(MapDataset(noisy), seed=1, **options)) != keys[:3]


# -- batch sampler ----------------------------------------------------------------------------------------------------

BATCH_SAMPLERS = {
    "lists": lambda: [[0, 1, 2], [5], [3, 3]],
    "rows of a tensor": lambda: torch.arange(6).view(3, 2),
    "arrays": lambda: [np.array([4, 2]), np.array([0])],
    "tuples from a generator": lambda: CountingSampler((1, 2), (3,)),
    "torch's": lambda: BatchSampler(RandomSampler(range(10), generator=seeded_generator()), 4, drop_last=False),
    "torch's that drops the last batch": lambda: BatchSampler(SequentialSampler(range(10)), 4, drop_last=True),
}


@pytest.mark.processes
@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in BATCH_SAMPLERS), ("lists", 2), ("torch's", 2)])
def test_batch_sampler_gives_the_same_batches_as_in_dataloader(name, workers):
    expected = torch_batches(MapDataset(), batch_sampler=BATCH_SAMPLERS[name](), epochs=2)
    options = {"batch_sampler": BATCH_SAMPLERS[name](), "epochs": 2}
    assert alike(gpuload_batches(MapDataset(), num_workers=workers, **options), expected)


def test_length_with_a_batch_sampler_is_that_of_the_batch_sampler():
    assert len(cpu_loader(MapDataset(), batch_sampler=BATCH_SAMPLERS["torch's"]())) == 3
    with pytest.raises(TypeError, match="no length"):
        len(cpu_loader(MapDataset(), batch_sampler=BATCH_SAMPLERS["tuples from a generator"]()))


def test_empty_batch_of_a_batch_sampler_raises():
    with pytest.raises(ValueError, match="batch_sampler yielded an empty batch"):
        gpuload_batches(MapDataset(), batch_sampler=[[0], []])


# -- batch_size=None --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_batch_size_none_gives_single_samples(shuffle):
    options = {"batch_size": None, "shuffle": shuffle}
    assert len(cpu_loader(MapDataset(), **options)) == 10
    samples = gpuload_batches(MapDataset(), **options)
    assert {type(sample) for sample in samples} == {int}
    assert sorted(samples) == torch_batches(MapDataset(), None)
    assert (samples == sorted(samples)) is not shuffle


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_batch_size_none_with_a_sampler_of_lists_indexes_the_dataset_by_lists(workers):
    rows = TensorDataset(torch.arange(20).view(10, 2), torch.arange(10))
    options = {"batch_size": None, "sampler": BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)}
    batches = gpuload_batches(rows, num_workers=workers, **options)
    assert alike(batches, torch_batches(rows, **options))
    assert [len(column) for column, _ in batches] == [4, 4, 2]


def test_batch_size_none_passes_one_sample_to_collate_fn():
    options = {"batch_size": None, "collate_fn": lambda sample: (sample, sample * 2)}
    assert gpuload_batches(MapDataset(), **options) == torch_batches(MapDataset(), **options)


# -- generators, seeds, ranks -----------------------------------------------------------------------------------------


def test_generator_provides_its_initial_seed_and_is_not_advanced():
    generator = seeded_generator(11)
    state = generator.get_state()
    with_generator = as_lists(gpuload_batches(MapDataset(), 10, shuffle=True, generator=generator, epochs=2))
    assert torch.equal(generator.get_state(), state)
    assert with_generator == as_lists(gpuload_batches(MapDataset(), 10, shuffle=True, seed=11, epochs=2))
    torch.rand(5, generator=generator)
    assert as_lists(gpuload_batches(MapDataset(), 10, shuffle=True, generator=generator, epochs=2)) == with_generator


def test_shuffled_order_does_not_depend_on_torchs_global_seed():
    """The order of DataLoader does depend on it."""
    orders, torch_orders = set(), set()
    for seed in range(4):
        torch.manual_seed(seed)
        orders.add(str(as_lists(gpuload_batches(MapDataset(), 10, shuffle=True))))
        torch_orders.add(str(as_lists(torch_batches(MapDataset(), 10, shuffle=True))))
    assert (len(orders), len(torch_orders)) == (1, 4)


@pytest.mark.parametrize("has_batch_sampler", [False, True])
def test_distributed_sampler_is_not_divided_among_ranks_again(has_batch_sampler):
    """Each rank's sampler selects its keys, whatever rank the loader has."""
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(range(12), 2, rank, shuffle=True)
        batch_sampler = {"batch_sampler": BatchSampler(sampler, 3, False)}
        options = batch_sampler if has_batch_sampler else {"sampler": sampler, "batch_size": 3}
        loader = cpu_loader(MapDataset(samples=12), rank=rank, world_size=2, info=True, **options)
        assert len(loader) == 2
        batches = list(loader)
        assert as_lists(batch for batch, _ in batches) == as_lists(torch_batches(MapDataset(), **options))
        seen += [(info.positions.tolist(), batch.tolist()) for batch, info in batches]
    assert sorted(key for _, batch in seen for key in batch) == list(range(12))
    assert sorted(position for positions, _ in seen for position in positions) == list(range(12))


def test_set_epoch_reaches_the_sampler():
    sampler = DistributedSampler(range(12), 2, 0, shuffle=True)
    orders = []
    for options in ({"sampler": sampler, "batch_size": 6}, {"batch_sampler": BatchSampler(sampler, 6, False)}):
        with cpu_loader(MapDataset(samples=12), **options) as loader:
            for epoch in (0, 1, 0):
                loader.set_epoch(epoch)
                assert sampler.epoch == epoch
                orders += as_lists(loader)
    assert orders[0] == orders[2] == orders[3] == orders[5] != orders[1] == orders[4]


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "dataloader_raises"), [
    ({"sampler": [1], "shuffle": True}, True),
    ({"sampler": [1], "batch_sampler": [[1]]}, True),
    ({"batch_sampler": [[1]], "batch_size": 2}, True),
    ({"batch_sampler": [[1]], "shuffle": True}, True),
    ({"batch_sampler": [[1]], "drop_last": True}, True),
    ({"batch_size": None, "drop_last": True}, True),
    ({"sampler": [1], "uneven": "drop"}, False),
    ({"sampler": [1], "repeats": 2}, False),
])  # fmt: skip
def test_mutually_exclusive_arguments_raise_as_in_dataloader(options, dataloader_raises):
    if dataloader_raises:
        with pytest.raises(ValueError, match=r"."):
            torch.utils.data.DataLoader(MapDataset(), **options)
    with pytest.raises(ValueError, match=r"cannot be combined|does not apply|both given"):
        cpu_loader(MapDataset(), **options)


@pytest.mark.processes
def test_exception_in_the_sampler_is_raised_by_the_loader():
    class Breaks:
        def __iter__(self):
            yield from (0, 1)
            raise ZeroDivisionError("two is too far")

    for workers in (0, 1):
        with pytest.raises(ZeroDivisionError, match="two is too far"):
            gpuload_batches(MapDataset(), sampler=Breaks(), num_workers=workers)


def test_sampler_that_is_not_iterable_raises():
    with pytest.raises(TypeError, match="not iterable"):
        list(cpu_loader(MapDataset(), sampler=3))


def test_key_that_the_dataset_lacks_raises_sample_error():
    with pytest.raises(gl.SampleError, match=r"sample 30, at position 1.*IndexError"):
        gpuload_batches(list(range(10)), 3, sampler=[0, 30, 1])


def test_getitems_is_called_with_the_keys_of_the_sampler():
    assert as_lists(gpuload_batches(BatchedMapDataset(), 4, sampler=[3, 1, 4, 1, 5])) == [[3, 1, 4, 1], [5]]
