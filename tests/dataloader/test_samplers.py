"""Which samples come in which batch: a user's samplers, batch samplers, whole batches by one key, generators."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from dataloader.common import Made, Many, alike, gpuload_batches, torch_batches
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


def loader(dataset, *args, **options) -> gl.Loader:
    return gl.Loader(dataset, *args, **{"device": "cpu", "num_workers": 0, **options})


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


def keys(batches) -> list:
    return [batch.tolist() if hasattr(batch, "tolist") else batch for batch in batches]


class Numbers:
    """Keys that stand here, each pass the same; `drawn` counts what was taken."""

    def __init__(self, *numbers):
        self.numbers = numbers
        self.drawn = 0

    def __iter__(self):
        for number in self.numbers:
            self.drawn += 1
            yield number


class Sized(Numbers):
    def __len__(self):
        return len(self.numbers)


# -- sampler ----------------------------------------------------------------------------------------------------------

SAMPLERS = {
    "a list": lambda: [3, 1, 4, 1, 5, 9, 2, 6],
    "a range": lambda: range(9, 0, -2),
    "an array": lambda: np.array([3, 1, 4, 1, 5]),
    "a tensor": lambda: torch.tensor([3, 1, 4, 1, 5]),
    "an iterable without a length": lambda: Numbers(3, 1, 4, 1, 5),
    "negative keys": lambda: [-1, -2],
    "an empty list": list,
    "sequential": lambda: SequentialSampler(range(10)),
    "random": lambda: RandomSampler(range(10), generator=seeded()),
    "random with replacement": lambda: RandomSampler(range(10), True, 25, generator=seeded()),
    "random beyond the end": lambda: RandomSampler(range(10), num_samples=25, generator=seeded()),
    "of a subset": lambda: SubsetRandomSampler([3, 1, 4], generator=seeded()),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.0, 5.0], 7, generator=seeded()),
    "of one rank of three": lambda: DistributedSampler(range(10), 3, 1, shuffle=True, seed=4),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_says_the_same_as_in_dataloader(name, drop_last):
    dataset = Made(lambda key: list(range(10))[key])
    options = {"batch_size": 3, "drop_last": drop_last}
    expected = torch_batches(dataset, sampler=SAMPLERS[name](), epochs=2, **options)
    assert alike(gpuload_batches(dataset, sampler=SAMPLERS[name](), epochs=2, **options), expected)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_length_is_dataloaders(name):
    given = SAMPLERS[name]()
    ours = loader(Made(), 3, sampler=given)
    theirs = torch.utils.data.DataLoader(Made(), 3, sampler=given)
    if hasattr(given, "__len__"):
        assert len(ours) == len(theirs) == len(iter(ours))
    else:
        with pytest.raises(TypeError):
            len(theirs)
        with pytest.raises(TypeError, match="no length, since its sampler, a Numbers, has no length"):
            len(ours)
        with pytest.raises(TypeError, match="is unknown"):
            len(iter(ours))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["random", "weighted", "an iterable without a length"])
def test_a_sampler_says_the_same_with_workers(name):
    expected = torch_batches(Made(), 3, sampler=SAMPLERS[name]())
    assert alike(gpuload_batches(Made(), 3, sampler=SAMPLERS[name](), num_workers=2, chunk_size=1), expected)


@pytest.mark.processes
def test_keys_may_be_anything_that_can_be_sent():
    names = ["a", ("b", 2), None, 2**70, 1.5]
    dataset = Made(repr)
    assert gpuload_batches(dataset, 2, sampler=names) == torch_batches(dataset, 2, sampler=names)
    assert gpuload_batches(dataset, 2, sampler=names, num_workers=1) == torch_batches(dataset, 2, sampler=names)
    [(_, info), *_] = gpuload_batches(dataset, 2, sampler=names, info=True)
    assert info.indices == ["a", ("b", 2)]


def test_a_dataset_without_a_length_will_do_with_a_sampler():
    class Endless:
        def __getitem__(self, key):
            return key * 2

    assert keys(gpuload_batches(Endless(), 2, sampler=[10**12, 3])) == [[2 * 10**12, 6]]


@pytest.mark.processes
def test_a_sampler_is_read_no_further_than_batches_are_in_work():
    given = Numbers(*range(1000))
    with loader(Made(samples=1000), 4, sampler=given, num_workers=1, prefetch_factor=2) as loader_:
        next(iter(loader_))
        assert given.drawn < 50
    endless = Made(lambda key: key)
    assert keys(itertools.islice(loader(endless, 2, sampler=Endless()), 3)) == [[0, 1], [2, 3], [4, 5]]


class Endless:
    def __iter__(self):
        return itertools.count()


def test_what_a_sampler_draws_is_a_function_of_seed_and_epoch():
    """Of the global generators; whatever the dataset and the training loop draw between."""

    class Drawn:
        def __iter__(self):
            for _ in range(6):
                yield random.randrange(10) * 100 + int(np.random.randint(10)) * 10 + int(torch.randint(10, ()))

    def noisy(key):
        random.random()
        return key

    torch.manual_seed(77)
    options = {"sampler": Drawn(), "batch_size": 2}
    first = keys(gpuload_batches(Made(noisy), epochs=2, **options))
    torch.manual_seed(78)
    random.seed(1)
    with loader(Made(noisy), **options) as loader_:
        again = []
        for batch in itertools.chain(loader_, loader_):
            again.append(batch.tolist())
            random.random()
            torch.rand(())
    assert again == first
    assert first[:3] != first[3:]
    assert keys(gpuload_batches(Made(noisy), seed=1, **options)) != first[:3]


def test_a_sampler_leaves_the_global_generators_as_they_were():
    before = random.getstate(), torch.get_rng_state()
    gpuload_batches(Made(), sampler=RandomSampler(range(10)))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_random_sampler_without_a_generator_gives_another_order_each_epoch():
    batches = keys(gpuload_batches(Made(), 10, sampler=RandomSampler(range(10)), epochs=3))
    assert len({tuple(batch) for batch in batches}) == 3
    assert keys(gpuload_batches(Made(), 10, sampler=RandomSampler(range(10)), epochs=3)) == batches


# -- batch sampler ----------------------------------------------------------------------------------------------------

BATCH_SAMPLERS = {
    "lists": lambda: [[0, 1, 2], [5], [3, 3]],
    "rows of a tensor": lambda: torch.arange(6).view(3, 2),
    "arrays": lambda: [np.array([4, 2]), np.array([0])],
    "tuples of a generator's": lambda: Numbers((1, 2), (3,)),
    "torch's": lambda: BatchSampler(RandomSampler(range(10), generator=seeded()), 4, drop_last=False),
    "torch's that drops the rest": lambda: BatchSampler(SequentialSampler(range(10)), 4, drop_last=True),
}


@pytest.mark.processes
@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in BATCH_SAMPLERS), ("lists", 2), ("torch's", 2)])
def test_a_batch_sampler_says_the_same_as_in_dataloader(name, workers):
    expected = torch_batches(Made(), batch_sampler=BATCH_SAMPLERS[name](), epochs=2)
    assert alike(gpuload_batches(Made(), batch_sampler=BATCH_SAMPLERS[name](), num_workers=workers, epochs=2), expected)


def test_the_length_with_a_batch_sampler_is_its_own():
    assert len(loader(Made(), batch_sampler=BATCH_SAMPLERS["torch's"]())) == 3
    with pytest.raises(TypeError, match="no length"):
        len(loader(Made(), batch_sampler=BATCH_SAMPLERS["tuples of a generator's"]()))


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="batch_sampler yielded an empty batch"):
        gpuload_batches(Made(), batch_sampler=[[0], []])


# -- samples one by one, and whole batches by one key -----------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_a_batch_size_samples_come_one_by_one(shuffle):
    options = {"batch_size": None, "shuffle": shuffle}
    assert len(loader(Made(), **options)) == 10
    found = gpuload_batches(Made(), **options)
    assert all(type(sample) is int for sample in found)
    assert sorted(found) == torch_batches(Made(), None)
    assert (found == sorted(found)) is not shuffle


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_whole_batches_with_no_batch_size_asks_the_dataset_for_lists(workers):
    rows = TensorDataset(torch.arange(20).view(10, 2), torch.arange(10))
    options = {"batch_size": None, "sampler": BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)}
    found = gpuload_batches(rows, num_workers=workers, **options)
    assert alike(found, torch_batches(rows, **options))
    assert [len(column) for column, _ in found] == [4, 4, 2]


def test_a_collate_fn_with_no_batch_size_gets_one_sample():
    options = {"batch_size": None, "collate_fn": lambda sample: (sample, sample * 2)}
    assert gpuload_batches(Made(), **options) == torch_batches(Made(), **options)


# -- generators, seeds, ranks -----------------------------------------------------------------------------------------


def test_a_generator_gives_its_initial_seed_and_is_not_drawn_from():
    generator = seeded(11)
    state = generator.get_state()
    with_generator = keys(gpuload_batches(Made(), 10, shuffle=True, generator=generator, epochs=2))
    assert torch.equal(generator.get_state(), state)
    assert with_generator == keys(gpuload_batches(Made(), 10, shuffle=True, seed=11, epochs=2))
    torch.rand(5, generator=generator)
    assert keys(gpuload_batches(Made(), 10, shuffle=True, generator=generator, epochs=2)) == with_generator


def test_the_global_seed_of_torch_does_not_matter():
    """Where DataLoader's order depends on it."""
    orders, torchs = set(), set()
    for seed in range(4):
        torch.manual_seed(seed)
        orders.add(str(keys(gpuload_batches(Made(), 10, shuffle=True))))
        torchs.add(str(keys(torch_batches(Made(), 10, shuffle=True))))
    assert (len(orders), len(torchs)) == (1, 4)


@pytest.mark.parametrize("batched", [False, True])
def test_a_distributed_sampler_is_not_shared_out_again(batched):
    """The ranks' own samplers say what is whose, whichever rank the loader is told."""
    seen = []
    for rank in range(2):
        given = DistributedSampler(range(12), 2, rank, shuffle=True)
        how = {"batch_sampler": BatchSampler(given, 3, False)} if batched else {"sampler": given, "batch_size": 3}
        loader_ = loader(Made(samples=12), rank=rank, world_size=2, info=True, **how)
        assert len(loader_) == 2
        batches = list(loader_)
        assert keys(batch for batch, _ in batches) == keys(torch_batches(Made(), **how))
        seen += [(info.positions.tolist(), batch.tolist()) for batch, info in batches]
    assert sorted(key for _, batch in seen for key in batch) == list(range(12))
    assert sorted(position for positions, _ in seen for position in positions) == list(range(12))


def test_set_epoch_reaches_the_sampler():
    given = DistributedSampler(range(12), 2, 0, shuffle=True)
    orders = []
    for options in ({"sampler": given, "batch_size": 6}, {"batch_sampler": BatchSampler(given, 6, False)}):
        with loader(Made(samples=12), **options) as loader_:
            for epoch in (0, 1, 0):
                loader_.set_epoch(epoch)
                assert given.epoch == epoch
                orders += keys(loader_)
    assert orders[0] == orders[2] == orders[3] == orders[5] != orders[1] == orders[4]


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"sampler": [1], "shuffle": True}, True),
        ({"sampler": [1], "batch_sampler": [[1]]}, True),
        ({"batch_sampler": [[1]], "batch_size": 2}, True),
        ({"batch_sampler": [[1]], "shuffle": True}, True),
        ({"batch_sampler": [[1]], "drop_last": True}, True),
        ({"batch_size": None, "drop_last": True}, True),
        ({"sampler": [1], "uneven": "drop"}, False),
        ({"sampler": [1], "repeats": 2}, False),
    ],
)
def test_arguments_that_exclude_each_other_are_refused_as_dataloader_does(options, theirs):
    if theirs:
        with pytest.raises(ValueError, match=r"."):
            torch.utils.data.DataLoader(Made(), **options)
    with pytest.raises(ValueError, match=r"cannot be combined|does not apply|both given"):
        loader(Made(), **options)


@pytest.mark.processes
def test_an_error_of_the_sampler_comes_out_of_next():
    class Breaks:
        def __iter__(self):
            yield from (0, 1)
            raise ZeroDivisionError("two is too far")

    for options in ({"sampler": Breaks()}, {"sampler": Breaks(), "num_workers": 1}):
        with loader(Made(), **options) as loader_, pytest.raises(ZeroDivisionError, match="two is too far"):
            list(loader_)


def test_what_is_no_sampler_is_refused():
    with pytest.raises(TypeError):
        list(loader(Made(), sampler=3))


def test_a_key_that_the_dataset_lacks_is_an_error_of_that_sample():
    with pytest.raises(gl.SampleError, match=r"sample 30, at position 1.*IndexError"):
        gpuload_batches(list(range(10)), 3, sampler=[0, 30, 1])


def test_many_at_a_time_with_a_sampler():
    assert keys(gpuload_batches(Many(), 4, sampler=[3, 1, 4, 1, 5])) == [[3, 1, 4, 1], [5]]
