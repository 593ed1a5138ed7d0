"""What is sent to workers, and how: arrays, files, tensors and functions; and which part is named where that fails."""

from __future__ import annotations

import functools
import os
import subprocess
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.decode import Decode
from gpuload.ring.ring import Ring
from gpuload.transforms import Chain
from gpuload.transforms.base import Transform
from gpuload.workers.job import Job, receive
from gpuload.workers.pool import WorkerPool
from gpuload.workers.shipping import find_lists, ship


def trip(obj):
    fds = ship(obj, {"path": []})
    try:
        return receive(fds[0]), os.fstat(fds[0]).st_size
    finally:
        list(map(os.close, fds))


def test_arrays_arrive_writable_and_without_changing_the_original():
    original = np.arange(100_000)
    (arrived,), _ = trip([original])
    assert np.array_equal(arrived, original)
    arrived[0] = 99
    assert original[0] == 0


def test_an_array_is_stored_once_however_many_workers_map_it():
    fds = ship({"a": np.zeros(10_000_000, np.uint8)}, {})
    try:
        assert os.fstat(fds[0]).st_size < 10_010_000
        first, second = receive(fds[0]), receive(fds[0])
        assert first["a"].nbytes == second["a"].nbytes == 10_000_000
    finally:
        list(map(os.close, fds))


def test_classes_functions_and_lambdas_of_the_moment_are_sent_by_value():
    class Local:
        def __init__(self):
            self.f = lambda x: x + 1

    arrived, _ = trip(Local())
    assert arrived.f(1) == 2


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_memmap_is_sent_as_its_place_in_the_file(tmp_path, mode):
    path = tmp_path / "data.bin"
    data = np.arange(3_000_000, dtype=np.int32)
    path.write_bytes(b"\0" * 5000 + data.tobytes())
    array = np.memmap(path, np.int32, mode, offset=5000, shape=(3000, 1000))
    arrived, size = trip(
        {"whole": array, "rows": array[17:2000:3], "column": array[:, 5], "empty": array[:0], "view": np.asarray(array)}
    )
    assert size < 20_000
    expected = data.reshape(3000, 1000)
    assert np.array_equal(arrived["whole"], expected)
    assert np.array_equal(arrived["rows"], expected[17:2000:3])
    assert np.array_equal(arrived["column"], expected[:, 5])
    assert np.array_equal(arrived["view"], expected)
    assert arrived["empty"].shape == (0, 1000)
    arrived["whole"][0, 0] = 99  # private: the file keeps its values
    assert np.fromfile(path, np.int32, 1, offset=5000)[0] == 0


def test_a_memmap_with_negative_strides_arrives_too(tmp_path):
    path = tmp_path / "data.bin"
    np.arange(100, dtype=np.int32).tofile(path)
    arrived, _ = trip(np.memmap(path, np.int32, "r")[::-1])
    assert np.array_equal(arrived, np.arange(100)[::-1])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
)
def test_a_large_tensor_is_sent_out_of_band(dtype):
    tensor = torch.arange(300_000).reshape(300, 1000).to(dtype)
    (whole, part), size = trip((tensor, tensor[::2, :10]))
    assert torch.equal(whole, tensor)
    assert torch.equal(part, tensor[::2, :10])
    assert size < tensor.nbytes + 50_000


def test_what_cannot_be_sent_is_refused_with_the_remedy():
    with pytest.raises(TypeError) as refusal:
        ship(threading.Lock(), {})
    assert str(refusal.value) == (
        "a _thread.lock cannot be sent to the worker processes: TypeError: cannot pickle '_thread.lock' object. "
        "Open files, locks, connections and the like when they are first used in the worker, not before; "
        "or use num_workers=0"
    )


class Node:
    """An object with the attributes that a test gives it."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("lock",)

    def __init__(self, lock):
        self.lock = lock


class Fussy:
    def __getstate__(self):
        raise RuntimeError("not me")


class Stated(Node):
    """Has a lock that is not sent, and a reader that is."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "own_lock"}


@dataclass(frozen=True)
class Blur(Transform):
    fn: Any = None


def where(obj) -> str:
    """What the refusal names first."""
    with pytest.raises(
        TypeError, match=r" cannot be sent to the worker processes: .*; or use num_workers=0$"
    ) as refusal:
        ship(obj, {})
    return str(refusal.value).split(" cannot be sent")[0]


def job(dataset, transforms=()) -> Job:
    return Job(dataset, Chain(transforms), Decode(), 0)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (Node(paths=["a"], lock=LOCK), "dataset.lock (a _thread.lock)"),
        (Node(paths=["a"], reader=Node(lock=LOCK)), "dataset.reader (a "),
        (Node(readers={"train": [LOCK]}), "dataset.readers (a dict)"),
        (Node(lazy=functools.partial(max, key=LOCK)), "dataset.lazy (a functools.partial)"),
        (Node(fn=lambda index: LOCK), "dataset.fn (a function)"),
        (Slotted(LOCK), "dataset.lock (a _thread.lock)"),
        (Stated(own_lock=LOCK, reader=Node(lock=LOCK)), "dataset.reader (a "),
        ([0, LOCK], "dataset (a list)"),
    ],
)
def test_the_attribute_that_cannot_be_sent_is_named(dataset, named):
    assert where(job(dataset)).startswith(named)


def test_what_is_beside_the_dataset_is_named():
    lock = threading.Lock()
    assert where(replace(job([1]), collate_fn=lambda samples: lock)) == "collate_fn (a function)"
    assert where(Node(parts=[LOCK])) == "parts (a list)"


def test_a_transform_is_named_by_its_place_in_the_chain(tmp_path):
    with open(tmp_path / "log", "w") as file:
        found = where(job([1], [T.Resize(8), T.CenterCrop(8), Blur(fn=functools.partial(print, file=file))]))
    assert found == "transforms[2].fn (a functools.partial)"


def test_an_object_that_refuses_by_itself_is_named_with_its_reason():
    with pytest.raises(
        TypeError, match=r"^dataset\.inner \(a .*Fussy\) cannot be sent .*: RuntimeError: not me\. Open"
    ):
        ship(job(Node(inner=Fussy())), {})


def test_the_part_at_fault_is_found_among_references_back_to_the_whole():
    dataset = Node(a=Node(), lock=LOCK)
    dataset.a.owner = dataset
    assert where(job(dataset)) == "dataset.lock (a _thread.lock)"


def test_what_is_nested_too_deep_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match=r"^dataset \(a list\) cannot be sent .*recursion"):
        ship(job(deep), {})
    while deep:  # one by one, or freeing it recurses too
        deep = deep[0]


def test_nothing_was_started_when_the_refusal_comes(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    ring = Ring(1 << 20)
    with pytest.raises(TypeError, match=r"^dataset\.lock \(a _thread\.lock\) cannot be sent"):
        WorkerPool(job(Node(lock=LOCK)), 2, ring)
    ring.close()


# -- lists of bytes, and what is not shared ---------------------------------------------------------------------------


def test_large_lists_of_bytes_are_found_and_others_are_not():
    class Data:
        pass

    data, large = Data(), [b"a" * 600_000] * 2
    data.images, data.again, data.in_dict = large, large, {"train": [b"b" * 2_000_000]}
    data.small, data.mixed, data.texts = [b"a"], [b"a" * 2_000_000, "a"], ["a"] * 9
    found = find_lists(data)
    assert found.keys() == {id(large), id(data.in_dict["train"])}


def test_a_warning_names_what_each_worker_has_a_copy_of(monkeypatch):
    import gpuload as gl
    from gpuload.workers import shipping

    class Data:
        def __init__(self):
            self.records = [{"number": number} for number in range(1000)]
            self.shared = np.zeros(1000)

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

    monkeypatch.setattr(shipping, "MAX_COPIED_BYTES", 5_000)
    with (
        gl.Loader(Data(), 2, num_workers=2, device="cpu") as loader,
        pytest.warns(RuntimeWarning, match=r"dataset\.records \(a list\), and each of 2 workers unpickles a copy"),
    ):
        list(loader)
