from __future__ import annotations

import functools
import os
import subprocess
import threading
from collections import UserList, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.decode import Decode
from gpuload.ring.ring import Ring
from gpuload.transforms import Chain
from gpuload.transforms.base import Transform
from gpuload.workers.job import Job, receive, ship
from gpuload.workers.pool import WorkerPool


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


@dataclass(frozen=True, slots=True)
class Slotted:
    count: int
    lock: Any


class Old:
    __slots__ = ("lock",)

    def __init__(self, lock):
        self.lock = lock


class Fussy:
    def __getstate__(self):
        raise RuntimeError("not me")


class Stated(Node):
    def __getstate__(self):
        return ("version 2", self.inner)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (Node(paths=["a"], reader=Node(lock=LOCK)), "dataset.reader.lock"),
        (Node(readers=[Node(), Node(lock=LOCK)]), "dataset.readers[1].lock"),
        (Node(readers={"train": (1, Node(lock=LOCK))}), "dataset.readers['train'][1].lock"),
        (Node(seen={LOCK}), "dataset.seen (an element)"),
        (Node(seen={LOCK: 1}), "dataset.seen (the key <"),
        (Node(inner=Slotted(1, LOCK)), "dataset.inner.lock"),
        (Node(inner=Old(LOCK)), "dataset.inner.lock"),
        (Node(lazy=functools.partial(max, key=LOCK)), "dataset.lazy.keywords['key']"),
        (Node(table=defaultdict(list, {5: LOCK})), "dataset.table[5]"),
        (Node(table=UserList([1, LOCK])), "dataset.table.data[1]"),
        (Node(call=Node(lock=LOCK).__init__), "dataset.call.__self__.lock"),
        (Node(names=np.array(["a", LOCK], object)), "dataset.names[1]"),
        (Node(state=Stated(inner=Node(lock=LOCK))), "dataset.state.__getstate__()[1].lock"),
        ([0, LOCK], "dataset[1]"),
        ([0] * 1_000_000 + [LOCK], "dataset[1000000]"),
    ],
)
def test_the_attribute_that_cannot_be_sent_is_named(dataset, path):
    found = where(job(dataset))
    assert found.startswith(path)
    assert found.endswith(" (a _thread.lock)")


def test_a_function_that_is_sent_by_value_is_looked_into():
    lock = threading.Lock()
    assert where(job(Node(fn=lambda i: lock))) == "dataset.fn.<closure>.lock (a _thread.lock)"
    made = {"__name__": "__main__", "guard": lock}
    exec("def f(i):\n    def g():\n        return guard\n    return g", made)
    assert where(job(Node(fn=made["f"]))) == "dataset.fn.<globals>.guard (a _thread.lock)"


def test_a_class_that_is_sent_by_value_is_looked_into():
    class Local:
        lock = threading.Lock()

    assert where(job(Node(inner=Local()))) == "dataset.inner.__class__.lock (a _thread.lock)"


def test_a_transform_is_named_by_its_place_in_the_chain(tmp_path):
    with open(tmp_path / "log", "w") as file:
        found = where(job([1], [T.Resize(8), T.CenterCrop(8), Blur(fn=functools.partial(print, file=file))]))
    assert found == "transforms[2].fn.keywords['file'] (an _io.TextIOWrapper)"


def test_an_object_that_refuses_by_itself_is_named_with_its_reason():
    with pytest.raises(
        TypeError, match=r"^dataset\.inner \(a .*Fussy\) cannot be sent .*: RuntimeError: not me\. Open"
    ):
        ship(job(Node(inner=Fussy())), {})


def test_the_part_at_fault_is_found_among_references_back_to_the_whole():
    dataset = Node(a=Node(), lock=LOCK)
    dataset.a.owner = dataset
    assert where(job(dataset)) == "dataset.lock (a _thread.lock)"


def test_what_is_nested_too_deep_ends_the_search_and_not_the_program():
    deep: list = [LOCK]
    for _ in range(100):
        deep = [deep]
    assert where(job(deep)).startswith("dataset[0][0][0]")
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match="recursion"):
        ship(job(deep), {})
    while deep:  # one by one, or freeing it recurses too
        deep = deep[0] if isinstance(deep[0], list) else []


def test_nothing_was_started_when_the_refusal_comes(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    ring = Ring(1 << 20)
    with pytest.raises(TypeError, match=r"^dataset\.lock \(a _thread\.lock\) cannot be sent"):
        WorkerPool(job(Node(lock=LOCK)), 2, ring)
    ring.close()
