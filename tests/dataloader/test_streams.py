"""Iterable datasets: their batches, the order of the batches, and the division among workers."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from dataloader.streams import Counting, Undivided, worker_share
from helpers.both_loaders import alike, as_lists, cpu_loader, gpuload_batches, torch_batches
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

import gpuload as gl

pytestmark = pytest.mark.usefixtures("warm")


class Numbers(Undivided, IterableDataset):
    """A stream of 0 … n−1, which torch recognizes."""


class Sized(Numbers):
    def __len__(self):
        return self.samples


# -- without workers: the same as DataLoader --------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 10])
@pytest.mark.parametrize(("batch_size", "drop_last"), [*itertools.product([1, 3, 5, 20], [False, True]), (None, False)])
def test_stream_gives_the_same_batches_as_in_dataloader(samples, batch_size, drop_last):
    options = {"batch_size": batch_size, "drop_last": drop_last, "epochs": 2}
    assert alike(gpuload_batches(Numbers(samples), **options), torch_batches(Numbers(samples), **options))


def test_chained_streams_are_concatenated():
    chained = ChainDataset([Numbers(3), Numbers(0), Numbers(4)])
    assert alike(gpuload_batches(chained, 2), torch_batches(chained, 2))
    assert alike(gpuload_batches(Numbers(3) + Numbers(4), 2), torch_batches(Numbers(3) + Numbers(4), 2))


def test_nested_samples_of_a_stream_are_collated_as_in_dataloader():
    class Pictures(IterableDataset):
        def __iter__(self):
            for number in range(3):
                yield {"image": np.full((4, 5, 3), number, np.uint8), "name": f"n{number}", "more": (number, [1.5])}

    assert alike(gpuload_batches(Pictures(), 3), torch_batches(Pictures(), 3))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_endless_stream_gives_batches_on_demand(workers):
    class Endless:
        def __iter__(self):
            worker, count = worker_share()
            return itertools.count(worker, count)

    with cpu_loader(Endless(), 2, num_workers=workers) as loader:
        batches = as_lists(itertools.islice(loader, 4))
    assert batches == ([[0, 2], [1, 3], [4, 6], [5, 7]] if workers else [[0, 1], [2, 3], [4, 5], [6, 7]])


@pytest.mark.parametrize(("batch_size", "drop_last"), [(3, False), (3, True), (10, False), (None, False)])
def test_length_of_a_stream_is_that_of_dataloader(batch_size, drop_last):
    options = {"batch_size": batch_size, "drop_last": drop_last}
    assert len(gl.Loader(Sized(), device="cpu", **options)) == len(DataLoader(Sized(), **options))
    for loader in (gl.Loader(Numbers(), device="cpu", **options), DataLoader(Numbers(), **options)):
        with pytest.raises(TypeError, match="Numbers"):
            len(loader)


def test_stream_longer_than_its_length_is_read_completely_and_warns_once():
    """DataLoader warns with each extra batch, if `len(loader)` was called before; gpuload warns once."""

    class TooShort(Sized):
        def __len__(self):
            return self.samples - 3

    torch_loader = DataLoader(TooShort(), 1)
    assert len(torch_loader) == 7
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        expected = list(torch_loader)
    loader = cpu_loader(TooShort(), 1)
    assert alike([batch for batch in loader], expected)  # noqa: C416 (list() asks for the length)
    assert len(loader) == 7
    batches = iter(loader)
    first_batches = [next(batches) for _ in range(7)]
    with pytest.warns(RuntimeWarning, match=r"len\(\) is 7, .* but the dataset yielded 8 samples in epoch 1$"):
        first_batches.append(next(batches))
    assert alike([*first_batches, *batches], expected)
    assert alike(list(loader), expected)  # a second warning would be an error


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_stream_as_long_as_its_length_does_not_warn(workers):
    """The loader counts samples: two workers give a batch more than `len(loader)`, as each has an incomplete batch."""

    class SizedAmongWorkers(Counting):
        def __len__(self):
            return self.samples

    with cpu_loader(SizedAmongWorkers(8), 3, num_workers=workers) as loader:
        assert len(loader) == 3
        sizes = [len(batch) for batch in loader]
    assert len(sizes) == (4 if workers == 2 else 3)
    assert sum(sizes) == 8


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}])
def test_shuffle_and_samplers_with_a_stream_raise_as_in_dataloader(options):
    for make in (DataLoader, gl.Loader):
        with pytest.raises(ValueError, match=r"[Ii]terable ?[Dd]ataset"):
            make(Numbers(), **options)


def test_on_error_replace_with_a_stream_raises():
    with pytest.raises(ValueError, match="it has no other samples to choose from"):
        gl.Loader(Numbers(), on_error="replace")


def test_iterator_as_dataset_raises():
    with pytest.raises(TypeError, match="can be iterated over only once"):
        gl.Loader(iter(range(3)))


def test_exception_in_a_stream_raises_sample_error_after_earlier_batches():
    class Breaks(Numbers):
        def __iter__(self):
            yield from (0, 1, 2)
            raise ZeroDivisionError("three is too many")

    with cpu_loader(Breaks(), 2) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(gl.SampleError, match=r"ZeroDivisionError: three is too many"):
            next(batches)
    with pytest.raises(ZeroDivisionError):
        torch_batches(Breaks(), 2)


def test_exception_in_dataset_iter_raises_sample_error():
    class FailsInIter(Numbers):
        def __iter__(self):
            raise OSError("no such stream")

    with pytest.raises(gl.SampleError, match="OSError: no such stream"):
        gpuload_batches(FailsInIter(), 2)


def test_stream_without_workers_runs_in_the_main_thread_with_its_environment():
    class Threaded(IterableDataset):
        def __iter__(self):
            queue, filled = [], threading.Event()

            def fill():
                queue.extend(range(6))
                filled.set()

            thread = threading.Thread(target=fill)
            thread.start()
            assert filled.wait(60)
            thread.join()
            for number in queue:
                observed.append((os.getpid(), threading.get_ident(), torch.get_num_threads(), dict(os.environ)))
                yield number

    observed = []
    main_thread = (os.getpid(), threading.get_ident(), torch.get_num_threads(), dict(os.environ))
    before = set(threading.enumerate())
    assert as_lists(gpuload_batches(Threaded(), 2)) == [[0, 1], [2, 3], [4, 5]]
    assert observed == [main_thread] * 6
    assert (torch.get_num_threads(), dict(os.environ)) == main_thread[2:]
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may have ended


def test_num_workers_defaults_to_0_for_a_stream_and_worker_info_is_none():
    class YieldsWorkerInfo(IterableDataset):
        def __iter__(self):
            yield str(get_worker_info())

    loader = gl.Loader(YieldsWorkerInfo(), device="cpu")
    assert loader.num_workers == 0
    assert list(loader) == [["None"]]


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_workers_of_a_stream_take_turns_by_batch_as_in_dataloader():
    expected = [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9]]
    with cpu_loader(Counting(11), 3, num_workers=2) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning that the stream is not divided
        assert as_lists(loader) == as_lists(loader) == expected
    assert as_lists(gpuload_batches(Counting(11), 3, num_workers=2, drop_last=True)) == expected[:3]


@pytest.mark.processes
def test_stream_not_divided_among_workers_warns():
    with cpu_loader(Undivided(6), 2, num_workers=2) as loader:
        message = "workers 0 and 1 yielded the same .* every sample appears 2 times.* yield only the worker's share"
        with pytest.warns(RuntimeWarning, match=message):
            batches = as_lists(loader)
        assert sorted(number for batch in batches for number in batch) == sorted([*range(6)] * 2)  # as in DataLoader


@pytest.mark.processes
def test_worker_init_fn_can_divide_a_stream_among_workers():
    """The function changes the worker's copy of the dataset, as in torch's documentation."""

    class Bounds(Undivided):
        start = 0

        def __iter__(self):
            return iter(range(self.start, self.samples))

    def set_bounds(worker):
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        assert worker == info.id
        share = -(-info.dataset.samples // info.num_workers)
        info.dataset.start = worker * share
        info.dataset.samples = min((worker + 1) * share, info.dataset.samples)

    batches = as_lists(gpuload_batches(Bounds(7), 2, num_workers=2, worker_init_fn=set_bounds))
    assert batches == [[0, 1], [4, 5], [2, 3], [6]]


@pytest.mark.processes
def test_worker_killed_by_its_stream_loses_and_repeats_no_sample(tmp_path):
    undisturbed = [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11], [12, 14, 16], [13, 15, 17], [18], [19]]
    marker = tmp_path / "killed"
    dataset = Counting(20, kill_at=9, marker=str(marker))
    assert as_lists(gpuload_batches(dataset, 3, num_workers=2, chunk_size=1, prefetch_factor=4)) == undisturbed
    assert marker.exists()


@pytest.mark.processes
def test_worker_killed_between_batches_loses_and_repeats_no_sample():
    with cpu_loader(Counting(60), 3, num_workers=2) as loader:
        undisturbed = as_lists(loader)
        loader.set_epoch(0)
        batches = []
        for batch in loader:
            batches += as_lists([batch])
            if len(batches) in (2, 9):  # first worker 0, later worker 1
                os.kill(loader._session.engine.pids[len(batches) % 2], 9)
    assert batches == undisturbed


@pytest.mark.processes
def test_in_order_false_does_not_wait_for_a_slow_worker_and_resumes_exactly(tmp_path):
    class WaitsForFile:
        """A stream of 100·w … 100·w + 5 in worker w; worker 0 waits for a file before its second number."""

        def __iter__(self):
            worker, _ = worker_share()
            for number in range(6):
                while worker == 0 and number == 1 and not (tmp_path / "go").exists():
                    time.sleep(0.01)
                yield 100 * worker + number

    options = {"num_workers": 2, "in_order": False}
    with cpu_loader(WaitsForFile(), 1, **options) as loader:
        batches = iter(loader)
        seen = []
        while not ([0] in seen and [103] in seen):  # the slow worker may also start last
            seen += as_lists(itertools.islice(batches, 1))
        assert [1] not in seen
        state = loader.state_dict()
        (tmp_path / "go").touch()
        all_batches = [[100 * worker + number] for worker in (0, 1) for number in range(6)]
        assert sorted(seen + as_lists(batches)) == all_batches
    with cpu_loader(WaitsForFile(), 1, **options) as loader:
        loader.load_state_dict(state)
        resumed = as_lists(loader)
    # The numbers of each worker come in order.
    assert sorted(seen + resumed, key=lambda batch: batch[0] // 100) == all_batches


@pytest.mark.processes
def test_worker_whose_stream_ends_early_leaves_its_turns_to_the_second_worker():
    class Uneven:
        def __iter__(self):
            worker, _ = worker_share()
            return iter(range(100 * worker, 100 * worker + (2, 7)[worker]))

    assert as_lists(gpuload_batches(Uneven(), 2, num_workers=2)) == [[0, 1], [100, 101], [102, 103], [104, 105], [106]]


def test_shuffling_datapipe_gives_a_different_order_each_epoch():
    """DataLoader configures the shuffling and sharding of datapipes; gpuload only iterates over them."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    first, second = gpuload_batches(IterableWrapper(range(8)).shuffle(), 8, epochs=2, collate_fn=list)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
