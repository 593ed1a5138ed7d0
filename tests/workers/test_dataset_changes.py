"""Changes to a dataset after workers received it: which changes are noticed, and how they reach the workers' copies."""

from __future__ import annotations

import logging
import os
import threading
import warnings

import numpy as np
import pytest
import torch
from helpers import lacking

import gpuload as gl
from gpuload.workers.dataset_changes import CHECKSUM_BYTES, DatasetChanges, apply_changes, find_objects, name_attribute

pytestmark = pytest.mark.processes


class Resize:
    def __init__(self):
        self.size = (32, 32)


class Compose:
    def __init__(self):
        self.transforms = [Resize(), Resize()]


class Data:
    """A dataset whose samples are its attributes in the process that loads them."""

    def __init__(self):
        self.mosaic, self.epoch, self.read = True, 0, 0
        self.transform = Compose()
        self.handle = None
        self.paths = ["a"] * 1000

    def __len__(self):
        return 8

    def set_epoch(self, epoch):
        self.epoch = 10 * epoch

    def __getitem__(self, index):
        self.read += 1
        return [self.mosaic, self.epoch, self.transform.transforms[1].size]


def record_changed_data(changes):
    changes.record()
    names = [name_attribute(path) for path in changes.changed_data]
    changes.pending = {}
    return names


# -- simple attributes ------------------------------------------------------------------------------------------------


def test_changed_simple_attributes_are_sent_once_and_applied():
    data, copy = Data(), Data()
    data.sizes = [1, 2]
    changes = DatasetChanges(data)
    assert changes.record() == []
    assert changes.pending == {}
    data.mosaic, data.transform.transforms[1].size, data.new = False, (64, 64), {"a": 1}
    data.sizes.append(3)
    data.handle = threading.Lock()  # handles are not compared
    assert changes.record() == [
        "dataset.mosaic = False",
        "dataset.sizes = [1, 2, 3]",
        "dataset.new = {'a': 1}",
        "dataset.transform.transforms[1].size = (64, 64)",
    ]
    assert changes.changed_data == []
    copy.read = 5
    first_changes = changes.pop()
    data.epoch = 3
    changes.record()
    apply_changes(copy, first_changes + changes.pop())
    assert (copy.mosaic, copy.transform.transforms[1].size, copy.new, copy.epoch) == (False, (64, 64), {"a": 1}, 3)
    assert (copy.read, copy.transform.transforms[0].size) == (5, (32, 32))
    assert changes.record() == []


def test_attributes_that_change_during_each_epoch_are_ignored_from_the_second_epoch_on():
    data = Data()
    data.cache = {"first": np.zeros(4)}
    changes, pending_names = DatasetChanges(data), []
    for epoch in range(4):
        changes.record()
        pending_names.append(sorted(name_attribute(path) for path in changes.pending))
        changes.pending = {}
        changes.ignore(only_simple=True)
        data.read += 1  # by a collate_fn that is a method of the dataset
        data.cache[epoch] = np.zeros(4)
        changes.end_epoch()
        data.epoch = epoch + 1  # by the user
    assert pending_names[:2] == [[], ["dataset.cache", "dataset.epoch", "dataset.read"]]
    assert pending_names[2:] == [["dataset.epoch"]] * 2


def test_attributes_that_change_during_some_epochs_are_changes():
    data = Data()
    data.seen = data.best = 0
    changes = DatasetChanges(data)
    for name in ("seen", "best", "seen"):
        setattr(data, name, getattr(data, name) + 1)
        changes.end_epoch()
        changes.record()
    assert changes.pending == {("seen",): 2, ("best",): 1}


def test_find_objects_returns_inner_datasets_transforms_and_instances_of_user_classes():
    inner = Data()
    inner.config, inner.handle, inner.step, inner.module = Resize(), threading.Lock(), torch.nn.ReLU(), torch.utils.data
    subset = torch.utils.data.Subset(inner, [0])
    joined = torch.utils.data.ConcatDataset([subset, Data()])
    assert {path for path, _ in find_objects(joined)} >= {
        ("datasets", 0, "dataset", "transform"),
        ("datasets", 1, "transform", "transforms", 1),
    }
    assert {path for path, _ in find_objects(inner)} == {
        (),
        ("config",),
        ("transform",),
        ("transform", "transforms", 0),
        ("transform", "transforms", 1),
    }


def test_find_objects_returns_objects_that_refer_to_each_other_once():
    first, second = Resize(), Resize()
    first.other, second.other = second, first
    data = Data()
    data.config = first
    paths = [path for path, owner in find_objects(data) if owner is first or owner is second]
    assert paths == [("config",), ("config", "other")]


# -- data -------------------------------------------------------------------------------------------------------------


def shuffle_in_place(values):
    np.random.default_rng(0).shuffle(values)


def set_item(index, value):
    return lambda values: values.__setitem__(index, value)


LARGE = CHECKSUM_BYTES // 8 + 1000  # float64 values, more than a checksum covers
# Functions that create a value and change it in place.
IN_PLACE = {
    "list, longer": (lambda: [f"{i}.jpg" for i in range(100_000)], lambda values: values.append("new")),
    "list, first entry": (lambda: [f"{i}.jpg" for i in range(100_000)], set_item(0, "new")),
    "list, last entry": (lambda: [f"{i}.jpg" for i in range(100_000)], set_item(-1, "new")),
    "list, shuffled": (lambda: [f"{i}.jpg" for i in range(100_000)], shuffle_in_place),
    "list of arrays": (lambda: [np.zeros(3), np.zeros(3)], lambda values: values[1].fill(1)),
    "list of lists": (lambda: [["a" * 2000, np.zeros(3)], 1], lambda values: values[0][1].fill(1)),
    "dict": (lambda: {i: str(i) for i in range(5000)}, set_item(2500, "new")),
    "dict, new key": (lambda: dict.fromkeys(range(5), "a" * 2000), lambda values: values.__setitem__(9, values.pop(4))),
    "set": (lambda: set(range(100)), lambda values: (values.discard(3), values.add(300))),
    "bytearray": (lambda: bytearray(5000), set_item(7, 1)),
    "array": (lambda: np.arange(1000), set_item(500, -1)),
    "array, shuffled": (lambda: np.arange(1000), shuffle_in_place),
    "array in reverse": (lambda: np.arange(1000)[::-1], set_item(500, -1)),
    "array beyond its checksum": (lambda: np.zeros(LARGE), lambda values: values.fill(1)),
    "array of objects": (lambda: np.array(["a", "b"] * 500, object), set_item(1, "new")),
    "array of strings": (lambda: np.array(["a", "b"] * 500), set_item(1, "c")),
    "tensor": (lambda: torch.zeros(1000), lambda values: values.fill_(1)),
    "tensor, past its version counter": (lambda: torch.zeros(1000), lambda values: values.numpy().fill(1)),
    "tensor, bfloat16": (lambda: torch.zeros(10, dtype=torch.bfloat16), lambda values: values.data.fill_(1)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_data_that_is_changed_in_place_or_replaced_by_an_equal_object_is_seen(name):
    make, change = IN_PLACE[name]
    data = Data()
    data.values = make()
    changes = DatasetChanges(data)
    assert record_changed_data(changes) == []
    change(data.values)
    assert record_changed_data(changes) == ["dataset.values"]
    assert record_changed_data(changes) == []
    changes = DatasetChanges(data)
    data.values = make()
    assert record_changed_data(changes) == ["dataset.values"]


@lacking.needs("pandas")
def test_columns_of_a_frame_that_are_changed_or_replaced_are_seen():
    import pandas

    data = Data()
    data.frame = pandas.DataFrame({"path": ["a", "b"], "label": [0, 1]})
    changes = DatasetChanges(data)
    assert record_changed_data(changes) == []
    data.frame.loc[1, "label"] = 5
    assert record_changed_data(changes) == ["dataset.frame"]
    data.frame["label"] = [3, 4]
    assert record_changed_data(changes) == ["dataset.frame"]
    data.frame["path"] = ["c", "d"]
    assert record_changed_data(changes) == ["dataset.frame"]
    data.frame.index = [4, 5]
    assert record_changed_data(changes) == ["dataset.frame"]
    assert record_changed_data(changes) == []


@lacking.needs("pyarrow")
def test_arrow_table_that_is_replaced_is_seen():
    import pyarrow

    data = Data()
    data.table = pyarrow.table({"label": [0, 1]})
    changes = DatasetChanges(data)
    assert record_changed_data(changes) == []
    data.table = data.table.slice(1)
    assert record_changed_data(changes) == ["dataset.table"]


def test_locks_modules_functions_and_shared_memory_are_not_compared(tmp_path):
    data = Data()
    np.save(tmp_path / "a.npy", np.zeros(100))

    def set_all(number):
        data.lock, data.module, data.function = threading.Lock(), (os, np)[number], (len, max)[number]
        data.mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
        data.shared = torch.full((100,), float(number)).share_memory_()
        data.view = data.shared.numpy()

    set_all(0)
    changes = DatasetChanges(data)
    set_all(1)
    assert record_changed_data(changes) == []


def test_instance_of_the_users_class_that_is_replaced_is_seen():
    data = Data()
    changes = DatasetChanges(data)
    data.transform.transforms[1] = Resize()
    assert record_changed_data(changes) == ["dataset.transform.transforms"]
    data.transform = Compose()
    assert record_changed_data(changes) == ["dataset.transform", "dataset.transform.transforms"]


class ListWithOddMethods(list):
    """A list whose methods do not return its entries."""

    def __getitem__(self, index):
        return index

    def __iter__(self):
        raise AssertionError("only the entries count")


@pytest.mark.parametrize("count", [3, 200])
def test_entries_of_a_subclass_are_compared_whatever_its_methods_do(count):
    data = ListWithOddMethods([np.zeros(3)] * count)
    changes = DatasetChanges(data)
    assert record_changed_data(changes) == []
    list.__setitem__(data, 0, np.zeros(3))
    assert record_changed_data(changes) == ["dataset"]


def test_nested_and_sparse_tensors_that_are_replaced_are_seen():
    data = Data()
    data.nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    data.sparse = torch.eye(3).to_sparse()
    changes = DatasetChanges(data)
    assert record_changed_data(changes) == []
    data.sparse = torch.eye(3).to_sparse()
    assert record_changed_data(changes) == ["dataset.sparse"]


def test_length_and_contents_of_a_dataset_that_is_a_list_are_seen():
    data = [np.zeros(3)] * 200
    changes = DatasetChanges(data)
    data.append(np.zeros(3))
    assert record_changed_data(changes) == ["dataset", "len(dataset)"]
    data[0] = np.zeros(3)
    assert record_changed_data(changes) == ["dataset"]


# -- workers ----------------------------------------------------------------------------------------------------------


def loaded_values(loader) -> set:
    return {tuple(map(str, sample)) for batch in loader for sample in batch}


def loaded_mosaics(loader) -> set[str]:
    return {mosaic for mosaic, *_ in loaded_values(loader)}


def make_loader(data, num_workers=2, **options):
    return gl.Loader(data, 2, num_workers=num_workers, device="cpu", collate_fn=list, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_have_simple_attributes_that_were_changed_between_epochs(num_workers, caplog):
    data = Data()
    with make_loader(data, num_workers) as loader:
        assert loaded_values(loader) == {("True", "0", "(32, 32)")}
        with caplog.at_level(logging.INFO, "gpuload"):
            loader.dataset.mosaic = False
            data.transform.transforms[1].size = (64, 64)
            data.set_epoch(4)
            assert loaded_values(loader) == {("False", "40", "(64, 64)")}
        assert ("dataset.mosaic = False: workers apply the change" in caplog.text) == bool(num_workers)
        assert "sent again" not in caplog.text
        loader.set_epoch(7)
        assert loaded_values(loader) == {("False", "70", "(64, 64)")}
        loader.dataset.mosaic = 1
        assert loaded_values(loader) == {("1", "70", "(64, 64)")}


def test_simple_changes_of_a_megabyte_reach_the_workers():
    data = Data()
    with make_loader(data, 2, prefetch_factor=4) as loader:
        loaded_values(loader)
        for number in range(20):
            setattr(data, f"texts{number}", {key: f"{key}" * 500 for key in range(64)})
        data.mosaic = "last"
        assert loaded_mosaics(loader) == {"last"}


def test_abandoned_epoch_has_no_effect_on_the_changes_of_the_next_epoch():
    data = Data()
    with make_loader(data, prefetch_factor=4) as loader:
        next(iter(loader))
        data.mosaic = "second"
        next(iter(loader))
        data.mosaic = "third"
        assert loaded_mosaics(loader) == {"third"}


def test_worker_that_is_restarted_has_the_changes(tmp_path):
    class Dies(Data):
        def __getitem__(self, index):
            if self.mosaic == "dies" and index == 3 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), 9)
            return super().__getitem__(index)

    data = Dies()
    with make_loader(data, 1) as loader:
        list(loader)
        data.mosaic = "dies"
        assert loaded_mosaics(loader) == {"dies"}
    assert (tmp_path / "died").exists()


class Pairs:
    """Pairs of a path and the number in it as the label."""

    def __init__(self, count=200):
        self.paths = [str(number) for number in range(count)]
        self.labels = np.arange(count)
        self.name = "first"

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.paths[index], int(self.labels[index]), self.name, os.getpid()

    def reorder(self, order):
        self.paths, self.labels = [self.paths[i] for i in order], self.labels[order]


def read_epoch(loader):
    """Return an epoch's samples and the pids of the workers, even if one worker has loaded all samples."""
    samples = [sample for batch in loader for sample in batch]
    pids = set(loader._session.engine.pids)
    assert {pid for *_, pid in samples} <= pids
    return [(path, label, name) for path, label, name, _ in samples], pids


@pytest.mark.parametrize("count", [8, 200])
def test_dataset_whose_data_and_simple_attribute_change_reaches_new_workers_consistently(count):
    data = Pairs(count)
    with make_loader(data) as loader:
        _, pids = read_epoch(loader)
        data.reorder(np.random.default_rng(0).permutation(count))
        data.name = "second"
        second_epoch, new_pids = read_epoch(loader)
        paths, labels, names = zip(*second_epoch, strict=True)
        assert list(map(int, paths)) == list(labels) == data.labels.tolist()
        assert set(names) == {"second"}
        assert not pids & new_pids
        unchanged_epoch, later_pids = read_epoch(loader)
        assert unchanged_epoch == second_epoch
        assert new_pids <= later_pids  # a worker that had not started in the second epoch may have been added
        assert loader.stats().faults.restarts == 0


def test_dataset_that_gets_shorter_is_loaded_with_its_new_length():
    data = Pairs()
    with make_loader(data) as loader:
        read_epoch(loader)
        data.reorder(np.arange(150, 200))
        assert len(loader) == 25
        assert [label for _, label, _ in read_epoch(loader)[0]] == list(range(150, 200))


@pytest.mark.filterwarnings("ignore:dataset.labels has changed between epochs")
def test_dataset_that_is_sent_again_in_mid_epoch_loses_no_batch_of_the_next_epoch():
    data = Pairs()
    with make_loader(data, prefetch_factor=8) as loader:
        batches = iter(loader)
        next(batches)
        data.labels[:] = -1
        assert [label for _, label, _ in read_epoch(loader)[0]] == [-1] * 200
        stats = loader.stats()
        assert stats.faults.restarts == 0
        slots = stats.ring.slots
        for number in range(3):
            data.labels[:] = number
            assert {label for _, label, _ in read_epoch(loader)[0]} == {number}
        assert loader.stats().ring.slots <= slots + 2


def test_worker_init_fn_runs_again_in_new_workers():
    data = Pairs()

    def init(worker):
        torch.utils.data.get_worker_info().dataset.name = f"worker {worker}"

    with make_loader(data, worker_init_fn=init) as loader:
        assert {name for *_, name in read_epoch(loader)[0]} <= {"worker 0", "worker 1"}
        data.labels[:] = 3
        samples, _ = read_epoch(loader)
        assert {label for _, label, _ in samples} == {3}
        assert {name for *_, name in samples} <= {"worker 0", "worker 1"}


def test_arrays_that_set_epoch_replaces_are_not_changes():
    class Folds(Pairs):
        def set_epoch(self, epoch):
            self.labels = np.arange(epoch, epoch + 200)

    with make_loader(Folds()) as loader:
        pids = set()
        for epoch in range(3):
            loader.set_epoch(epoch)
            samples, epoch_pids = read_epoch(loader)
            pids |= epoch_pids
            assert [label for _, label, _ in samples] == list(range(epoch, epoch + 200))
    assert len(pids) <= 2, "workers were replaced"


def test_dataset_that_cannot_be_sent_again_stays_as_it_is_with_one_warning():
    data = Pairs()
    with make_loader(data) as loader:
        first_epoch, pids = read_epoch(loader)
        data.handle, data.labels, data.name = threading.Lock(), -data.labels, "second"
        message = r"dataset\.labels has changed, but the dataset cannot be sent"
        with pytest.warns(RuntimeWarning, match=message) as caught:
            assert read_epoch(loader) == (first_epoch, pids)
        assert "loader.close()" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert read_epoch(loader) == (first_epoch, pids)
        del data.handle
        assert {name for *_, name in read_epoch(loader)[0]} == {"second"}


def test_array_that_changes_between_epochs_repeatedly_is_warned_of_once():
    data = Pairs(8)
    with make_loader(data, 1) as loader:
        read_epoch(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(3):
                data.labels[:] = number
                assert {label for _, label, _ in read_epoch(loader)[0]} == {number}
        [warning] = caught
        assert str(warning.message).startswith("dataset.labels has changed between epochs for the second time. ")


def test_iterable_dataset_has_the_changes():
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self):
            self.size, self.table = 1, np.arange(1000)

        def __iter__(self):
            yield from [self.size + int(self.table[0])] * 4

    data = Stream()
    with make_loader(data, 1) as loader:
        assert list(loader) == [[1, 1], [1, 1]]
        data.size = 2
        assert list(loader) == [[2, 2], [2, 2]]
        data.table[0] = 10
        assert list(loader) == [[12, 12], [12, 12]]


@pytest.mark.parametrize("wrap", [
    lambda data: gl.Mix([data], [1.0]).map(lambda sample: sample),
    lambda data: gl.Mix([data], [1.0]),
    lambda data: torch.utils.data.Subset(data, range(200)),
], ids=["map", "mix", "subset"])  # fmt: skip
def test_labels_that_are_written_in_place_reach_the_workers_through_a_wrapper(wrap):
    data = Pairs()
    with make_loader(wrap(data)) as loader:
        read_epoch(loader)
        data.labels[:] = 5
        assert {label for _, label, _ in read_epoch(loader)[0]} == {5}
