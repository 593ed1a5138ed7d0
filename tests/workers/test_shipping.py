"""Objects that are sent to workers: arrays, memmaps, tensors and functions, and memory that processes share. An error
names the object that cannot be sent."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import multiprocessing
import os
import re
import signal
import subprocess
import threading
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset
from helpers.programs import run_python
from helpers.warm_interpreters import WARM_CHILDREN_VARIABLE

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets import file_id
from gpuload.decode import Decode
from gpuload.ring.ring import Ring
from gpuload.transforms import Chain
from gpuload.transforms.base import Transform
from gpuload.workers import shipping
from gpuload.workers.job import Job, receive
from gpuload.workers.pool import WorkerPool
from gpuload.workers.shipping import find_lists, ship

SPAWN = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def shipped(obj):
    """Ship an object, and yield the descriptor of its pickle."""
    fds = ship(obj, {"path": []})
    try:
        yield fds[0]
    finally:
        list(map(os.close, fds))


def ship_and_receive(obj):
    with shipped(obj) as fd:
        return receive(fd), os.fstat(fd).st_size


@pytest.fixture
def memmap(tmp_path) -> np.memmap:
    path = tmp_path / "data.bin"
    np.arange(100_000, dtype=np.int32).tofile(path)
    return np.memmap(path, np.int32, "r")


def test_a_shipped_array_is_stored_once_and_received_as_writable_copies():
    original = np.arange(100_000)
    with shipped([original]) as fd:
        assert os.fstat(fd).st_size < original.nbytes + 10_000
        [copy], [other_copy] = receive(fd), receive(fd)
    copy[0] = 99
    assert np.array_equal(other_copy, original)
    assert original[0] == 0


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_memmap_is_sent_as_its_location_in_the_file(tmp_path, mode):
    path = tmp_path / "data.bin"
    data = np.arange(3_000_000, dtype=np.int32)
    path.write_bytes(b"\0" * 5000 + data.tobytes())
    array = np.memmap(path, np.int32, mode, offset=5000, shape=(3000, 1000))
    reverse = array[0, ::-1]  # sent as its contents, since its strides are negative
    views = (array, array[17:2000:3], array[:, 5], array[:0], np.asarray(array), reverse)
    received, size = ship_and_receive(views)
    assert size < 20_000
    for view, expected in zip(received, views, strict=True):
        np.testing.assert_array_equal(view, expected)
    received[0][0, 0] = 99  # the mapping is private, so the file keeps its values
    assert np.fromfile(path, np.int32, 1, offset=5000)[0] == 0


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_memmap_whose_file_was_replaced_or_deleted_is_sent_as_its_contents(tmp_path, memmap, change):
    (tmp_path / "data.bin").unlink()
    if change == "replaced":
        np.zeros(100_000, np.int32).tofile(tmp_path / "data.bin")
    (entire, part), size = ship_and_receive((memmap, memmap[10:20:3]))
    assert np.array_equal(entire, np.arange(100_000))
    assert np.array_equal(part, [10, 13, 16, 19])
    assert memmap.nbytes < size < memmap.nbytes + 20_000, "the values are in memory that workers share"


def test_a_memmap_whose_file_was_replaced_is_refused_if_it_is_large(tmp_path, memmap, monkeypatch):
    monkeypatch.setattr(file_id, "MAX_REPLACED_BYTES", 399_999)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(TypeError) as caught:
        ship_and_receive(make_job([memmap]))
    assert str(caught.value) == (
        f"dataset (a list) cannot be sent to the worker processes: ValueError: '{tmp_path}/data.bin' was replaced or "
        "deleted after it was mapped, so workers cannot open it, and its 400,000 bytes are more than the 399,999 that "
        "are sent instead. Open the file that is there now, before you create the Loader; or use num_workers=0"
    )


@pytest.mark.parametrize("kind", ["memmap", "shared tensor"])
def test_a_file_that_is_replaced_before_a_worker_opens_it_is_refused(tmp_path, memmap, kind):
    path = tmp_path / "data.bin"
    tensor = torch.from_file(str(path), shared=True, size=100_000, dtype=torch.int32)
    with shipped([memmap if kind == "memmap" else tensor.numpy()]) as fd:
        assert np.array_equal(receive(fd)[0], memmap)
        (tmp_path / "other").write_bytes(path.read_bytes())
        os.replace(tmp_path / "other", path)
        with pytest.raises(gl.DecodeError, match=r"data.bin': it was replaced by another file after the dataset"):
            receive(fd)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
)
def test_a_large_tensor_is_sent_out_of_band(dtype):
    tensor = torch.arange(300_000).reshape(300, 1000).to(dtype)
    (entire, part), size = ship_and_receive((tensor, tensor[::2, :10]))
    assert torch.equal(entire, tensor)
    assert torch.equal(part, tensor[::2, :10])
    assert size < tensor.nbytes + 50_000


@pytest.mark.parametrize("bit", ["conjugate", "negative"])
def test_values_of_a_large_conjugate_or_negative_tensor_are_sent_out_of_band(bit):
    """torch would pickle the memory, which does not contain these values, and the bit."""
    conjugate = torch.complex(torch.arange(300_000.0), torch.arange(300_000.0)).conj()
    tensor = conjugate if bit == "conjugate" else conjugate.imag
    arrived, size = ship_and_receive(tensor)
    assert torch.equal(arrived, tensor)
    assert not arrived.is_conj()
    assert not arrived.is_neg()
    assert size < tensor.nbytes + 50_000


def test_an_object_that_cannot_be_pickled_is_refused_with_the_remedy():
    with pytest.raises(TypeError) as caught:
        ship(threading.Lock(), {})
    assert str(caught.value) == (
        "a _thread.lock cannot be sent to the worker processes: TypeError: cannot pickle '_thread.lock' object. "
        "Create locks, and open files and connections, in the worker when they are first used, not before; "
        "or use num_workers=0"
    )


class Attributes:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("lock",)

    def __init__(self, lock):
        self.lock = lock


class Fussy:
    def __getstate__(self):
        raise RuntimeError("not me")


class DropsItsLock(Attributes):
    """An object whose lock is not sent, but whose other attributes are."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "own_lock"}


@dataclass(frozen=True)
class Blur(Transform):
    fn: Any = None


def make_job(dataset, transforms=()) -> Job:
    return Job(dataset, Chain(transforms), Decode(), 0)


LOCK = threading.Lock()
CIRCULAR = Attributes(inner=Attributes(), lock=LOCK)
CIRCULAR.inner.owner = CIRCULAR
BLUR = Blur(fn=functools.partial(max, key=LOCK))


@pytest.mark.parametrize(("sent", "named"), [
    (make_job(Attributes(paths=["a"], lock=LOCK)), "dataset.lock (a _thread.lock)"),
    (make_job(Attributes(paths=["a"], reader=Attributes(lock=LOCK))), "dataset.reader (a "),
    (make_job(Attributes(readers={"train": [LOCK]})), "dataset.readers (a dict)"),
    (make_job(Attributes(lazy=functools.partial(max, key=LOCK))), "dataset.lazy (a functools.partial)"),
    (make_job(Attributes(fn=lambda index: LOCK)), "dataset.fn (a function)"),
    (make_job(Slotted(LOCK)), "dataset.lock (a _thread.lock)"),
    (make_job(DropsItsLock(own_lock=LOCK, reader=Attributes(lock=LOCK))), "dataset.reader (a "),
    (make_job([0, LOCK]), "dataset (a list)"),
    (make_job(CIRCULAR), "dataset.lock (a _thread.lock)"),
    (make_job([1], [T.Resize(8), T.CenterCrop(8), BLUR]), "transforms[2].fn (a functools.partial)"),
    (replace(make_job([1]), collate_fn=lambda samples: LOCK), "collate_fn (a function)"),
    (Attributes(parts=[LOCK]), "parts (a list)"),
])  # fmt: skip
def test_the_attribute_that_cannot_be_sent_is_named(sent, named):
    message = rf"^{re.escape(named)}.* cannot be sent to the worker processes: .*; or use num_workers=0$"
    with pytest.raises(TypeError, match=message):
        ship(sent, {})


def test_an_object_whose_getstate_raises_is_named_with_the_error():
    message = r"^dataset\.inner \(a .*Fussy\) cannot be sent .*: RuntimeError: not me\. Create"
    with pytest.raises(TypeError, match=message):
        ship(make_job(Attributes(inner=Fussy())), {})


def test_a_list_nested_too_deep_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match=r"^dataset \(a list\) cannot be sent .*recursion"):
        ship(make_job(deep), {})
    while deep:  # freeing the nested lists at once would recurse too
        deep = deep[0]


def test_a_dataset_that_cannot_be_sent_raises_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    ring = Ring(1 << 20)
    with pytest.raises(TypeError, match=r"^dataset\.lock \(a _thread\.lock\) cannot be sent"):
        WorkerPool(make_job(Attributes(lock=LOCK)), 2, ring)
    ring.close()


# -- large lists ------------------------------------------------------------------------------------------------------


def test_find_lists_returns_only_large_lists_of_bytes():
    class Data:
        pass

    data, large = Data(), [b"a" * 600_000] * 2
    data.images, data.same_images, data.in_dict = large, large, {"train": [b"b" * 2_000_000]}
    data.small, data.mixed, data.texts = [b"a"], [b"a" * 2_000_000, "a"], ["a"] * 9
    lists = find_lists(data)
    assert lists.keys() == {id(large), id(data.in_dict["train"])}


def test_a_large_list_that_each_worker_copies_is_warned_of(monkeypatch):
    dataset: Any = MapDataset(samples=2)
    dataset.records = [{"number": number} for number in range(1000)]
    dataset.shared = np.zeros(1000)
    monkeypatch.setattr(shipping, "MAX_COPIED_BYTES", 5_000)
    message = r"dataset\.records \(a list\) has 0 MB, and each of 2 workers may end up with a copy"
    with (
        gl.Loader(dataset, 2, num_workers=2, device="cpu") as loader,
        pytest.warns(RuntimeWarning, match=message),
    ):
        list(loader)


# -- shared memory -----------------------------------------------------------------------------------------------------


class Cache:
    """Sample i is read from `store`, before i + 1 is written to it. With a `folder`, sample 3 kills its worker once."""

    def __init__(self, store, read, write, folder=None):
        self.store, self.read, self.write, self.folder = store, read, write, folder

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3 and self.folder is not None and not os.path.exists(f"{self.folder}/once"):
            open(f"{self.folder}/once", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        value = self.read(self.store)
        self.write(self.store, index + 1)
        return value


def read_first(store):
    return int(store[0])


def write_first(store, value):
    store[0] = value


def check_sharing(store, read=read_first, write=write_first, folder=None):
    """Check that workers see what this process writes between epochs, and that this process sees what workers write."""
    write(store, 0)
    with gl.Loader(Cache(store, read, write, folder), 2, num_workers=1, device="cpu") as loader:
        list(loader)  # with a folder, the worker dies in this epoch
        write(store, 100)
        assert torch.cat(list(loader)).tolist() == [100, 1, 2, 3, 4, 5]
        assert read(store) == 6
        write(store, 200)
        assert torch.cat(list(loader)).tolist() == [200, 1, 2, 3, 4, 5]
    assert read(store) == 6


TENSORS = {
    "a tensor": lambda: torch.zeros(5000).share_memory_(),
    "a view of a tensor": lambda: torch.zeros(50, 100).share_memory_()[7:, 3],
    "a bfloat16 tensor": lambda: torch.zeros(5000, dtype=torch.bfloat16).share_memory_(),
    "a parameter": lambda: torch.nn.Linear(1, 2).share_memory().bias.requires_grad_(False),
}


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_in_shared_memory_is_shared_with_workers_and_their_replacements(tmp_path, name):
    tensor = TENSORS[name]()
    assert tensor.is_shared()
    check_sharing(tensor, folder=tmp_path)
    assert (tmp_path / "once").exists()


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_two_tensors_that_share_memory_share_it_in_workers():
    tensor = torch.zeros(10).share_memory_()
    check_sharing((tensor, tensor[:5]), lambda pair: int(pair[0][2]), lambda pair, value: pair[1][2].fill_(value))


@pytest.mark.processes
def test_tensors_of_the_file_system_sharing_strategy_are_shared(tmp_path):
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.zeros(5000).share_memory_()
        check_sharing(tensor, folder=tmp_path)
        check_sharing(tensor)
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_tensor_that_is_not_in_shared_memory_is_a_copy():
    tensor = torch.zeros(5000)
    with gl.Loader(Cache(tensor, read_first, write_first), 6, num_workers=1, device="cpu") as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3, 4, 5]
    assert tensor[0] == 0
    assert not tensor.is_shared()


def read_value(store):
    return store.value


def write_value(store, value):
    store.value = value


FROM_MULTIPROCESSING = {
    "Value": (lambda: SPAWN.Value("i"), read_value, write_value),
    "Value without a lock": (lambda: multiprocessing.Value("d", lock=False), lambda v: int(v.value), write_value),
    "RawValue": (lambda: multiprocessing.RawValue(ctypes.c_long), read_value, write_value),
    "Array": (lambda: SPAWN.Array("i", 10), read_first, write_first),
    "RawArray": (lambda: multiprocessing.RawArray("i", 10), read_first, write_first),
    "an array over an Array": (
        lambda: np.frombuffer(SPAWN.Array("i", 10).get_obj(), np.int32)[4:],
        read_first,
        write_first,
    ),
    "a tensor over an Array": (
        lambda: torch.from_numpy(np.frombuffer(SPAWN.Array("i", 10).get_obj(), np.int32))[1::2],
        read_first,
        write_first,
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", FROM_MULTIPROCESSING)
def test_values_and_arrays_of_multiprocessing_are_shared(tmp_path, name):
    make, read, write = FROM_MULTIPROCESSING[name]
    check_sharing(make(), read, write, tmp_path)


@pytest.mark.processes
def test_a_lock_and_a_queue_work_across_workers():
    def add(store, value):
        with store[0].get_lock():
            store[0].value += 1
        store[1].put(value)

    counter, queue = SPAWN.Value("i"), SPAWN.Queue()
    with gl.Loader(Cache((counter, queue), lambda store: 0, add), 1, num_workers=2, device="cpu") as loader:
        assert len(list(loader)) == 6
        assert sorted(queue.get(timeout=60) for _ in range(6)) == [1, 2, 3, 4, 5, 6]
    assert counter.value == 6
    queue.close()
    queue.join_thread()


@pytest.mark.processes
def test_a_lock_of_the_fork_context_is_refused_with_the_remedy():
    for shared in (multiprocessing.get_context("fork").Value("i"), multiprocessing.get_context("fork").Lock()):
        expected = (
            r'dataset\.store.* cannot be sent to the worker processes: .*\. A lock of multiprocessing\'s "fork" context'
            r' exists only in forks .* Create .* with multiprocessing\.get_context\("spawn"\), .*lock=False; or use'
        )
        with pytest.raises(TypeError, match=expected):
            iter(gl.Loader(Cache(shared, read_first, write_first), num_workers=1, device="cpu"))


@pytest.mark.processes
def test_dicts_of_a_manager_are_shared():
    with SPAWN.Manager() as manager:
        outer = manager.dict()
        outer["inner"] = manager.dict()

        def write(store, value):
            store["number"] = store["inner"]["number"] = value

        check_sharing(outer, lambda store: min(store["number"], store["inner"]["number"]), write)
        flat = manager.dict(number=0)
        check_sharing(flat, lambda store: store["number"], lambda store, value: store.update(number=value))


def read_block(memory):
    return memory.buf[0]


def write_block(memory, value):
    memory.buf[0] = value


def by_name(function):
    """Let a function of a block of shared memory take the block's name."""

    def call_with_block(name, *args):
        memory = shared_memory.SharedMemory(name)
        try:
            return function(memory, *args)
        finally:
            memory.close()

    return call_with_block


BLOCKS = {
    "the block": (lambda memory: memory, read_block, write_block),
    "an array over it": (lambda memory: np.ndarray(16, np.uint8, memory.buf)[3:], read_first, write_first),
    "a tensor over it": (lambda memory: torch.frombuffer(memory.buf, dtype=torch.uint8)[3:], read_first, write_first),
    "its name": (lambda memory: memory.name, by_name(read_block), by_name(write_block)),
}


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_shared_memory_outlives_the_workers(tmp_path, name):
    get_store, read, write = BLOCKS[name]
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        check_sharing(get_store(memory), read, write, tmp_path)
        shared_memory.SharedMemory(memory.name).close()  # raises FileNotFoundError if the block was unlinked
    finally:
        memory.unlink()


@pytest.mark.processes
def test_an_array_over_an_anonymous_mapping_is_refused():
    array = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    with pytest.raises(TypeError, match=r"(?s)dataset\.store \(a numpy\.ndarray\) .*a mapping that.*forks share"):
        iter(gl.Loader(Cache(array, read_first, write_first), num_workers=1, device="cpu"))


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_tensor_over_an_anonymous_mapping_is_copied():
    """Such a tensor can be a batch that the user keeps."""
    tensor = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 4096), np.int64)).fill_(7)
    with gl.Loader(Cache(tensor, lambda tensor: int(tensor.sum()), write_first), num_workers=1, device="cpu") as loader:
        assert next(iter(loader)).item() == 7 * 512


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_shared_memory_leaves_no_descriptor_and_no_warning_of_the_resource_tracker():
    program = """
import os, torch, multiprocessing, gpuload as gl, numpy as np
from multiprocessing import shared_memory

class Sum:
    def __init__(self, *stores): self.stores = stores
    def __len__(self): return 4
    def __getitem__(self, index): return int(self.stores[0][0]) + self.stores[1].buf[0] + self.stores[2][0]

tensor = torch.ones(4).share_memory_()
memory = shared_memory.SharedMemory(create=True, size=64)
array = multiprocessing.get_context("spawn").Array("i", 4)
memory.buf[0], array[0] = 2, 4
for epoch in range(3):
    with gl.Loader(Sum(tensor, memory, array), num_workers=2, device="cpu") as loader:
        assert torch.cat(list(loader)).tolist() == [7] * 4
    now = len(os.listdir("/proc/self/fd"))
    before = now if epoch == 0 else before
assert now == before, (now, before)
assert memory.buf[0] == 2
memory.close()
memory.unlink()
"""
    _, stderr = run_python(program, env={**os.environ, WARM_CHILDREN_VARIABLE: "1"})
    assert stderr == ""
