"""What is changed of a dataset after workers got their copies of it: which changes are seen, sent and applied."""

from __future__ import annotations

import logging

import pytest
import torch

import gpuload as gl
from gpuload.workers.changes import DatasetChanges, apply_changes, objects_in


class Resize:
    def __init__(self):
        self.size = (32, 32)


class Compose:
    def __init__(self):
        self.transforms = [Resize(), Resize()]


class Data:
    """Its samples say what it is like in the process that makes them."""

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
        return [self.mosaic, self.epoch, self.transform.transforms[1].size, self.read > 0]


def test_only_what_changed_is_sent_and_applied():
    data, copy, applied = Data(), Data(), {}
    changes = DatasetChanges(data)
    assert changes.look() == []
    assert changes.packed == b""
    data.mosaic, data.transform.transforms[1].size, data.new = False, (64, 64), {"a": 1}
    data.handle, data.paths = object(), []
    assert changes.look() == [
        "dataset.mosaic = False",
        "dataset.paths = []",
        "dataset.new = {'a': 1}",
        "dataset.transform.transforms[1].size = (64, 64)",
    ]
    copy.read = 5
    apply_changes(copy, changes.packed, applied)
    assert (copy.mosaic, copy.transform.transforms[1].size, copy.new) == (False, (64, 64), {"a": 1})
    assert (copy.read, copy.transform.transforms[0].size) == (5, (32, 32))
    assert changes.look() == []


def test_a_list_that_is_changed_in_place_is_seen():
    data = Data()
    data.sizes = [1, 2]
    changes = DatasetChanges(data)
    data.sizes.append(3)
    assert changes.look() == ["dataset.sizes = [1, 2, 3]"]


def test_what_the_copy_changed_itself_stays_until_the_user_changes_it_again():
    data, copy, applied = Data(), Data(), {}
    changes = DatasetChanges(data)
    data.mosaic = False
    changes.look()
    apply_changes(copy, changes.packed, applied)
    copy.mosaic = "its own"
    data.epoch = 3
    changes.look()
    apply_changes(copy, changes.packed, applied)
    assert (copy.mosaic, copy.epoch) == ("its own", 3)


def test_what_changes_during_each_epoch_is_left_out_from_the_second_on():
    data = Data()
    changes, seen = DatasetChanges(data), []
    for epoch in range(4):
        seen.append(changes.look())
        changes.skip()
        data.read += 1  # by a collate_fn that is a method of the dataset
        changes.end_epoch()
        data.epoch = epoch + 1  # by the user
    assert seen == [[], ["dataset.epoch = 1", "dataset.read = 1"], ["dataset.epoch = 2"], ["dataset.epoch = 3"]]


def test_datasets_and_transforms_are_looked_into():
    subset = torch.utils.data.Subset(Data(), [0])
    both = torch.utils.data.ConcatDataset([subset, Data()])
    found = {path for path, _ in objects_in(both)}
    assert ("datasets", 0, "dataset", "transform") in found
    assert ("datasets", 1, "transform", "transforms", 1) in found


def test_modules_are_no_part_of_a_dataset():
    data = Data()
    data.transforms = torch.utils.data
    assert ("transforms",) not in dict(objects_in(data))


def test_changes_that_are_too_large_are_refused():
    data = Data()
    changes = DatasetChanges(data)
    data.texts = {number: f"{number}" * 500 for number in range(64)}
    with pytest.raises(ValueError, match=r"more than 32,768; call loader\.close\(\)"):
        changes.look()


def values(loader) -> set:
    return {tuple(map(str, sample)) for batch in loader for sample in batch}


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_have_what_was_changed_between_epochs(num_workers, caplog):
    data = Data()
    with gl.Loader(data, 2, num_workers=num_workers, device="cpu", collate_fn=list) as loader:
        assert values(loader) == {("True", "0", "(32, 32)", "True")}
        with caplog.at_level(logging.INFO, "gpuload"):
            loader.dataset.mosaic = False
            data.transform.transforms[1].size = (64, 64)
            data.set_epoch(4)
            assert values(loader) == {("False", "40", "(64, 64)", "True")}
        assert ("dataset.mosaic = False: workers apply it" in caplog.text) == bool(num_workers)
        loader.set_epoch(7)
        assert values(loader) == {("False", "70", "(64, 64)", "True")}
        loader.dataset.mosaic = 1
        assert values(loader) == {("1", "70", "(64, 64)", "True")}


@pytest.mark.processes
def test_an_epoch_that_is_broken_off_has_no_effect_on_the_changes_of_the_next():
    data = Data()
    with gl.Loader(data, 1, num_workers=2, device="cpu", collate_fn=list, prefetch_factor=4) as loader:
        next(iter(loader))
        data.mosaic = "second"
        next(iter(loader))
        data.mosaic = "third"
        assert {mosaic for mosaic, *_ in values(loader)} == {"third"}


@pytest.mark.processes
def test_a_worker_that_is_restarted_has_the_changes(tmp_path):
    class Dies(Data):
        def __getitem__(self, index):
            import os

            if self.mosaic == "dies" and index == 3 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), 9)
            return super().__getitem__(index)

    data = Dies()
    with gl.Loader(data, 1, num_workers=1, device="cpu", collate_fn=list) as loader:
        list(loader)
        data.mosaic = "dies"
        assert {mosaic for mosaic, *_ in values(loader)} == {"dies"}
    assert (tmp_path / "died").exists()


@pytest.mark.processes
def test_an_iterable_dataset_has_the_changes():
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self):
            self.size = 1

        def __iter__(self):
            yield from [self.size] * 4

    data = Stream()
    with gl.Loader(data, 2, num_workers=1, device="cpu", collate_fn=list) as loader:
        assert list(loader) == [[1, 1], [1, 1]]
        data.size = 2
        assert list(loader) == [[2, 2], [2, 2]]
