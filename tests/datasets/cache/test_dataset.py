"""`Cached`: the samples of the dataset, read once, shared by workers and runs, never of another version."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from descriptors import open_of
from stored import COUNT, LABELS, Held, equal, jpegs

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.cache import dataset as module
from gpuload.datasets.cache.dataset import Cached
from gpuload.datasets.kinds import draws_nothing, fetches_many

LIMIT = 4 << 20
SETTLED_S = module.SETTLED_NS / 1e9


class Counted(Held):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__(jpegs(), LABELS)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self[index] for index in indices]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    for number, data in enumerate(jpegs()):
        path = tmp_path / "images" / str(LABELS[number]) / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "images"


def test_samples_are_read_once_and_those_that_lack_together() -> None:
    inner = Counted()
    dataset = Cached(inner, LIMIT)
    first = dataset.__getitems__([3, 1, 3, -1])
    assert inner.asked == [[3, 1, 11]]
    assert dataset.__getitems__([1, 2, 11]) == [first[1], inner[2], first[3]]
    assert inner.asked == [[3, 1, 11], [2]]
    assert dataset[2] == inner[2]
    found = dataset.statistics()
    assert (found.hits, found.misses, found.entries, found.hit_rate) == (3, 4, 4, 3 / 7)
    assert (found.bytes_allowed, found.bytes_limit) == (LIMIT, LIMIT)
    with pytest.raises(AttributeError):
        found.hits = 3
    with pytest.raises(IndexError, match="index 12 is out of range: the cached dataset has 12 samples"):
        dataset[12]


def epochs(dataset: Any, workers: int, count: int = 2) -> list[Any]:
    steps = [T.RandomResizedCrop(16), T.RandomHorizontalFlip()]
    with gl.Loader(dataset, 5, shuffle=True, transforms=steps, num_workers=workers, device="cpu") as loader:
        return [batch for _ in range(count) for batch in loader]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_all_workers_and_loaders_share_it_and_batches_are_the_same(where: str, folder: Path) -> None:
    plain = gl.ImageFolder(folder)
    expected = epochs(plain, 0)
    time.sleep(SETTLED_S)  # workers know nothing of what the fixture changed
    dataset = Cached(plain, LIMIT, where=where, **({"path": folder.parent / "cache"} if where == "disk" else {}))
    assert equal(epochs(dataset, 2), expected)
    found = dataset.statistics()
    assert (found.hits, found.misses, found.entries) == (COUNT, COUNT, COUNT)
    assert equal(epochs(dataset, 0), expected)
    assert dataset.statistics().hits == 3 * COUNT


@pytest.mark.processes
@pytest.mark.slow
def test_a_worker_that_is_killed_does_no_harm(tmp_path: Path) -> None:
    class Deadly(Held):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and not os.path.exists(mark):
                Path(mark).touch()
                os.kill(os.getpid(), 9)
            return super().__getitem__(index)

    mark = str(tmp_path / "killed")
    dataset = Cached(Deadly(jpegs(), LABELS), LIMIT)
    found = epochs(dataset, 1)
    assert os.path.exists(mark)
    assert equal(found, epochs(Held(jpegs(), LABELS), 0))
    assert dataset.statistics().entries == COUNT


def test_a_copy_elsewhere_begins_empty_and_holds_no_descriptor() -> None:
    dataset = Cached(Counted(), LIMIT)
    dataset[1]
    copy = pickle.loads(cloudpickle.dumps(dataset))
    assert copy._backing.fd != dataset._backing.fd
    assert copy[1] == dataset[1]
    assert (copy.statistics().hits, copy.statistics().misses) == (0, 1)
    memory = os.fstat(copy._backing.fd)
    assert open_of(memory) == 3  # the memory, its own, and the mapping's
    del copy
    assert open_of(memory) == 0


def test_a_changed_file_is_read_again(folder: Path) -> None:
    dataset = Cached(gl.ImageFolder(folder), LIMIT)
    old = [dataset[0], dataset[0]][1][0]
    path = Path(dataset.paths[0])
    os.utime(path, (1, 1))  # the same bytes, but who knows
    assert dataset[0][0].data == old.data
    assert dataset.statistics().hits == 1
    other = path.with_name("new")
    other.write_bytes(jpegs()[5])
    os.replace(other, path)
    assert dataset[0][0].data == jpegs()[5] != old.data
    assert dataset[0][0].data == jpegs()[5]
    assert dataset.statistics().hits == 2


def test_a_file_that_was_changed_while_it_was_read_is_not_kept(folder: Path) -> None:
    dataset = Cached(gl.ImageFolder(folder), LIMIT)
    module.SETTLED_NS = 10**15
    assert dataset[0] == dataset[0]
    assert (dataset.statistics().hits, dataset.statistics().entries) == (0, 0)


@pytest.mark.processes
def test_a_cache_on_disk_is_there_for_the_next_run_and_for_no_other_version(folder: Path) -> None:
    program = """
        import sys, gpuload as gl
        from gpuload.datasets.cache import dataset as module
        module.SETTLED_NS = 0
        dataset = gl.Cached(gl.ImageFolder(sys.argv[1]), 4 << 20, where="disk", path=sys.argv[2])
        samples = dataset.__getitems__(range(len(dataset)))
        print(dataset.statistics().hits, len(dataset), "torch" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder), str(folder.parent / "cache")]

    def run() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert run() == "0 12 False"
    assert run() == "12 12 False"
    os.unlink(next(folder.rglob("*.jpg")))  # another dataset
    assert run() == "0 11 False"
    assert sorted(os.listdir(folder.parent / "cache")) == ["in-use", "samples.gpuload-cache"]


def test_ranks_share_a_folder_and_others_are_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"where": "disk", "path": tmp_path / "cache"}
    one = Cached(Counted(), LIMIT, version="1", **given)
    two = Cached(Counted(), LIMIT, version="1", **given)
    assert one[3] == two[3]
    assert (two.dataset.asked, one.statistics().hits, two.statistics().hits) == ([], 1, 1)
    where = re.escape(repr(str(tmp_path / "cache")))
    with pytest.raises(ValueError, match=f"^the cache in {where} is in use for another dataset, or another version"):
        Cached(Counted(), LIMIT, version="2", **given)
    with pytest.raises(ValueError, match=f"^the cache in {where} is in use with bytes_limit=4194304, got 5242880"):
        Cached(Counted(), 5 << 20, version="1", **given)
    del one, two
    three = Cached(Counted(), 5 << 20, version="1", **given)
    assert three[3] == three.dataset[3]
    assert (three.statistics().hits, three.statistics().bytes_allowed) == (1, 5 << 20)
    del three
    assert Cached(Counted(), LIMIT, version="2", **given).statistics().entries == 0


def test_it_is_as_the_dataset_for_all_else(folder: Path) -> None:
    plain = gl.ImageFolder(folder)
    dataset = Cached(plain, LIMIT)
    assert (len(dataset), dataset.classes, dataset.blocks()) == (COUNT, ["0", "1", "2"], None)
    assert (draws_nothing(dataset), fetches_many(dataset)) == (True, True)
    own = Held(jpegs(), LABELS)
    assert (draws_nothing(Cached(own, LIMIT)), fetches_many(Cached(own, LIMIT))) == (False, False)
    assert len(dataset + dataset) == 2 * COUNT
    assert repr(dataset) == f"Cached({plain!r}, bytes_limit=4194304, where='memory')"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dataset.nothing


class Epochs(Held):
    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("dataset", "options", "error", "text"),
    [
        (
            iter([]),
            {},
            TypeError,
            "Cached() takes a map-style dataset, with a length and an index for each sample, got",
        ),
        (Epochs([], []), {}, TypeError, "Epochs has set_epoch(), so its samples change from epoch to epoch"),
        ([], {"bytes_limit": "4GB"}, TypeError, "bytes_limit must be a number of bytes, such as 64 << 30, got '4GB'"),
        ([], {"bytes_limit": 1000}, ValueError, "bytes_limit must be at least 1048576 bytes (1 MiB), got 1000"),
        ([], {"bytes_limit": 1 << 60}, ValueError, "of memory of this machine; use where='disk'"),
        ([], {"where": "gpu"}, ValueError, "where must be 'memory' or 'disk', got 'gpu'"),
        ([], {"where": "disk"}, ValueError, "where='disk' needs path=, a folder for this dataset alone"),
        ([], {"path": "a"}, ValueError, "path= is for where='disk'; memory ends with the program"),
        ([], {"where": "disk", "path": "/tmp"}, TypeError, "whether a list gives the same samples the next time: pass"),
    ],
)
def test_wrong_arguments_are_refused(dataset: Any, options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Cached(dataset, **{"bytes_limit": LIMIT, **options})


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_are_kept_and_are_tensors_again(workers: int) -> None:
    dataset = Cached([(torch.full((3, 2, 2), i / 4), torch.tensor(i)) for i in range(4)], LIMIT)
    with gl.Loader(dataset, 4, num_workers=workers, device="cpu") as loader:
        for _ in range(2):
            [(images, numbers)] = loader
            assert torch.equal(images, torch.arange(4)[:, None, None, None] / 4 * torch.ones(4, 3, 2, 2))
            assert numbers.tolist() == [0, 1, 2, 3]
    assert (dataset.statistics().hits, dataset.statistics().misses) == (4, 4)


def test_a_sample_that_cannot_be_kept_is_named() -> None:
    dataset = Cached([(gl.Encoded(b"x"), torch.ones(3, requires_grad=True))], LIMIT)
    with pytest.raises(
        TypeError, match=re.escape("[1] of the sample is a torch.Tensor, which gpuload.Cached does not")
    ):
        dataset[0]


@pytest.mark.processes
def test_a_fork_shares_it() -> None:
    dataset = Cached([np.arange(5), 1], LIMIT)
    dataset[0]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(dataset[0], np.arange(5)) and dataset.statistics().hits == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert dataset.statistics().hits == 1
