"""Worker processes as users of DataLoader know them: worker info, start and end, random numbers, errors, arguments."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import time

import pytest
import torch
from helpers.both_loaders import as_lists, gpuload_batches, torch_batches
from helpers.map_datasets import MapDataset
from helpers.processes import is_alive, wait_until

import gpuload as gl


def worker_info(key):
    """Return this worker's process and torch's `get_worker_info`."""
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if info is None else (os.getpid(), info.id, info.num_workers, info.seed, type(info.dataset).__name__)


def global_random_numbers(key):
    import numpy as np

    return random.random(), float(np.random.rand()), float(torch.rand(()))


def import_torch_first(worker):
    import torch.utils.data  # noqa: F401


@pytest.mark.processes
@pytest.mark.parametrize("worker_init_fn", [import_torch_first, None])
def test_get_worker_info_describes_each_worker(worker_init_fn, tmp_path):
    def info_once_both_workers_run(key):
        (tmp_path / str(os.getpid())).touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both workers run")
        return worker_info(key)

    options = {"batch_size": 1, "collate_fn": list, "num_workers": 2, "seed": 5, "worker_init_fn": worker_init_fn}
    infos = {info for [info] in gpuload_batches(MapDataset(info_once_both_workers_run, 20), **options)}
    assert {(worker, *numbers) for _, worker, *numbers, _, _ in infos} == {(0, 2), (1, 2)}
    assert {kind for *_, kind in infos} == {"MapDataset"}
    assert len({seed for _, _, _, seed, _ in infos}) == 2
    assert len({pid for pid, *_ in infos}) == 2
    assert worker_info(0) is None


def test_get_worker_info_is_none_without_workers():
    assert gpuload_batches(MapDataset(worker_info, 2), 2, collate_fn=list) == [[None, None]]


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [True, False])
def test_worker_init_fn_is_called_once_in_each_worker_with_its_number(tmp_path, persistent):
    def note(worker):
        open(tmp_path / f"{worker} {os.getpid()}", "x").close()

    gpuload_batches(MapDataset(), num_workers=2, worker_init_fn=note, persistent_workers=persistent, epochs=3)
    workers_and_pids = [path.name.split() for path in tmp_path.iterdir()]
    call_count = 1 if persistent else 3
    assert sorted(worker for worker, _ in workers_and_pids) == ["0"] * call_count + ["1"] * call_count
    assert len({pid for _, pid in workers_and_pids}) == 2 * call_count
    assert [pid for _, pid in workers_and_pids if is_alive(int(pid))] == []


@pytest.mark.processes
def test_worker_init_fn_can_change_affinity_and_environment():
    cpu = min(os.sched_getaffinity(0))

    def change(worker):
        os.sched_setaffinity(0, {cpu})
        os.environ["CHANGED"] = "yes"

    def observe(key):
        return str(sorted(os.sched_getaffinity(0))), os.environ.get("CHANGED", "no")

    assert gpuload_batches(MapDataset(observe, 1), num_workers=1, worker_init_fn=change) == [[(str([cpu]),), ("yes",)]]
    assert "CHANGED" not in os.environ


def test_worker_init_fn_is_not_called_without_workers():
    gpuload_batches(MapDataset(), worker_init_fn=lambda worker: 1 // 0)
    torch_batches(MapDataset(), worker_init_fn=lambda worker: 1 // 0)


@pytest.mark.processes
def test_exception_in_worker_init_fn_is_raised_by_iter_and_keeps_its_type():
    def fails(worker):
        raise ZeroDivisionError("not on my watch")

    expected = r"(?s)^worker 0 is not usable: worker_init_fn raised an exception:.*ZeroDivisionError: not on my watch"
    with gl.Loader(MapDataset(), num_workers=1, worker_init_fn=fails, device="cpu") as loader:
        for kind in (gl.WorkerError, ZeroDivisionError):
            with pytest.raises(kind, match=expected) as caught:
                iter(loader)  # before the first batch
            assert type(pickle.loads(pickle.dumps(caught.value))) is gl.WorkerError


# -- randomness -------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("worker_init_fn", [import_torch_first, None])
def test_random_numbers_of_samples_do_not_depend_on_num_workers(worker_init_fn):
    """The random numbers of DataLoader do depend on it."""
    dataset = MapDataset(global_random_numbers)
    options = {"batch_size": 4, "collate_fn": list, "epochs": 2, "shuffle": True}
    expected = gpuload_batches(dataset, **options)
    in_workers = {"num_workers": 2, "chunk_size": 1, "worker_init_fn": worker_init_fn}
    assert gpuload_batches(dataset, **in_workers, **options) == expected
    assert expected[:3] != expected[3:]
    assert gpuload_batches(dataset, seed=1, **options) != expected


@pytest.mark.processes
def test_random_numbers_of_worker_init_fn_differ_between_workers_not_between_runs(tmp_path):
    def note(worker):
        (tmp_path / f"{worker}").write_text(str(random.random()))

    runs = []
    for _ in range(2):
        gpuload_batches(MapDataset(), num_workers=2, worker_init_fn=note)
        runs.append(sorted(path.read_text() for path in tmp_path.iterdir()))
    assert runs[0] == runs[1]
    number_of_worker_0, number_of_worker_1 = runs[0]
    assert number_of_worker_0 != number_of_worker_1


# -- changes of the dataset -------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(("new_values", "options"), [
    ([100, 100], {"num_workers": 1, "persistent_workers": True}),
    ([100, 100], {"num_workers": 1, "persistent_workers": False}),
    ([100, 100, 100], {"num_workers": 0}),
])  # fmt: skip
def test_list_that_changed_between_epochs_is_read_as_changed(new_values, options):
    dataset = [1, 1]
    with gl.Loader(dataset, 2, device="cpu", **options) as loader:
        assert as_lists(loader) == [[1, 1]]
        dataset[:] = new_values
        expected = [new_values[start : start + 2] for start in range(0, len(new_values), 2)]
        assert (len(loader), as_lists(loader)) == (len(expected), expected)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [None, "spawn", "forkserver", multiprocessing.get_context("spawn")])
def test_multiprocessing_context_other_than_fork_is_accepted(context):
    assert as_lists(gpuload_batches(MapDataset(samples=2), 2, multiprocessing_context=context)) == [[0, 1]]


@pytest.mark.processes
@pytest.mark.parametrize("context", ["fork", multiprocessing.get_context("fork")])
def test_multiprocessing_context_fork_is_accepted_with_a_warning(context):
    """Programs written for DataLoader still run; without workers, there is no warning."""
    text = r"multiprocessing_context=.*[Ff]ork.* has no effect: gpuload's workers are not forks of this process"
    with pytest.warns(RuntimeWarning, match=text) as warned:
        loader = gl.Loader(MapDataset(samples=2), 2, num_workers=1, device="cpu", multiprocessing_context=context)
    with loader:
        assert as_lists(loader) == as_lists(loader) == [[0, 1]]
    assert [warning.filename for warning in warned] == [__file__]
    assert as_lists(gpuload_batches(MapDataset(samples=2), 2, multiprocessing_context=context)) == [[0, 1]]


@pytest.mark.parametrize("context", ["thread", 3])
def test_multiprocessing_context_of_unknown_type_raises(context):
    message = f"multiprocessing_context must be None, 'spawn', .* got {context!r}; it has no"
    with pytest.raises(ValueError, match=message):
        gl.Loader(MapDataset(), multiprocessing_context=context)


@pytest.mark.processes
@pytest.mark.parametrize("in_order", [True, False])
def test_batches_come_in_order_despite_a_slow_sample(in_order):
    def slow_at_0(key):
        if key == 0:
            time.sleep(0.1)
        return key

    batches = gpuload_batches(MapDataset(slow_at_0, 8), 2, num_workers=2, chunk_size=1, in_order=in_order)
    assert as_lists(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.processes
def test_prefetch_factor_is_the_number_of_batches_read_ahead(tmp_path):
    def note(key):
        (tmp_path / str(key)).touch()
        return key

    with gl.Loader(MapDataset(note, 100), 2, num_workers=1, prefetch_factor=3, device="cpu") as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 8, "8 samples are read")
        assert len(list(tmp_path.iterdir())) == 8  # the first 2, and 3 batches of 2
    gpuload_batches(MapDataset(), prefetch_factor=2)  # accepted without workers, unlike in DataLoader
    with pytest.raises(ValueError, match="prefetch_factor"):
        torch.utils.data.DataLoader(MapDataset(), prefetch_factor=2)


class ErrorWithIndex(KeyError):
    """An error whose attribute `index` raises."""

    index = property(lambda self: 1 // 0)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [KeyError, NotImplementedError, FileNotFoundError, ErrorWithIndex, UnicodeDecodeError])
def test_exception_of_a_sample_is_a_sample_error_and_keeps_its_type(kind, workers):
    def fails(key):
        raise kind("utf-8", b"", 0, 1, "bad") if kind is UnicodeDecodeError else kind(f"no {key}")

    with pytest.raises(kind) as caught:
        gpuload_batches(MapDataset(fails), num_workers=workers)
    error = caught.value
    assert isinstance(error, gl.SampleError)
    assert (error.index, error.position, error.source) == (0, 0, None)
    assert "in fails\n    raise kind(" in error.worker_traceback
    assert str(error).startswith(f"sample 0, at position 0 of the epoch, could not be loaded: {kind.__name__}: ")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied).__mro__[1:], str(copied)) == (type(error).__mro__[1:], str(error))


@pytest.mark.parametrize("kind", [StopIteration, ExceptionGroup])
def test_stop_iteration_and_exception_group_of_a_sample_become_sample_errors_only(kind):
    def fails(key):
        raise StopIteration if kind is StopIteration else ExceptionGroup("two", [ValueError()])

    with pytest.raises(gl.SampleError) as caught:
        gpuload_batches(MapDataset(fails))
    assert not isinstance(caught.value, kind)


def test_exception_in_collate_fn_is_a_collate_error_and_keeps_its_type():
    def fails(samples):
        raise ZeroDivisionError("here")

    for options in ({"collate_fn": fails, "num_workers": 1}, {"collate_fn": fails}):
        with pytest.raises(ZeroDivisionError, match="collate_fn raised ZeroDivisionError: here") as caught:
            gpuload_batches(MapDataset(), **options)
        assert isinstance(caught.value, gl.CollateError)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), gl.CollateError)
    with pytest.raises(RuntimeError, match="the samples cannot be collated"):
        gpuload_batches(MapDataset(lambda key: torch.zeros(key)), 2)


def test_second_iterator_of_a_loader_ends_the_first():
    """DataLoader lets both iterators continue."""
    with gl.Loader(MapDataset(), 5, num_workers=0, device="cpu") as loader:
        first, second = iter(loader), iter(loader)
        assert len(list(second)) == 2
        text = r"a newer iter\(\) of its Loader was started\. .* zip\(.*\) or nested loops, create a second Loader"
        with pytest.raises(RuntimeError, match=text):
            next(first)
    torch_loader = torch.utils.data.DataLoader(MapDataset(), 5)
    assert len(list(zip(torch_loader, torch_loader, strict=True))) == 2


def test_dataset_that_gives_no_batch_raises_where_dataloader_is_empty():
    assert torch_batches([]) == torch_batches(MapDataset(), 20, drop_last=True) == []
    with pytest.raises(ValueError, match="the dataset is empty"):
        gl.Loader([])
    with pytest.raises(ValueError, match="drop_last=True leaves no batch"):
        gl.Loader(MapDataset(), 20, drop_last=True)


def test_arguments_after_shuffle_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        gl.Loader(MapDataset(), 2, False, [1, 2])  # a sampler, to DataLoader
    with pytest.raises(TypeError, match="pin_memory_device"):
        gl.Loader(MapDataset(), pin_memory_device="cuda")


@pytest.mark.parametrize(
    "name", ["batch_size", "sampler", "batch_sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_setting_an_attribute_of_a_loader_raises_as_in_dataloader(name):
    for loader in (torch.utils.data.DataLoader(MapDataset()), gl.Loader(MapDataset(), device="cpu")):
        with pytest.raises(ValueError, match=name):
            setattr(loader, name, 2)


class Epochs(MapDataset):
    """A dataset whose samples are the epoch that was set."""

    epoch = -1

    def __getitem__(self, index):
        return self.epoch

    def set_epoch(self, epoch):
        if epoch == 13:
            raise ValueError("unlucky")
        self.epoch = epoch


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_reaches_the_dataset_in_every_process(workers):
    with gl.Loader(Epochs(samples=8), 4, num_workers=workers, device="cpu") as loader:
        assert [batch.tolist() for batch in loader] == [[-1] * 4] * 2
        for epoch in (3, 7):
            loader.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == [[epoch] * 4] * 2
        loader.close()  # new workers get the same epoch
        assert [batch.tolist() for batch in loader] == [[7] * 4] * 2


@pytest.mark.processes
def test_exception_in_set_epoch_of_the_dataset_in_a_worker_raises_sample_error():
    class FailsInWorkers(Epochs):
        def set_epoch(self, epoch):
            if torch.utils.data.get_worker_info() is not None:
                super().set_epoch(epoch)

    with gl.Loader(FailsInWorkers(samples=8), 4, num_workers=1, device="cpu") as loader:
        loader.set_epoch(13)
        with pytest.raises(gl.SampleError, match="ValueError: unlucky"):
            next(iter(loader))
