"""What the user's processes share on purpose is the same memory in workers; what cannot be is refused by name."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
from warm import TOO

import gpuload as gl

pytestmark = pytest.mark.processes
SPAWN = multiprocessing.get_context("spawn")


class Cache:
    """Sample i is what `read` finds in `store`, and `write` puts i + 1 there. Sample 3 kills its worker, once."""

    def __init__(self, store, read, write, folder=None):
        self.store, self.read, self.write, self.folder = store, read, write, folder

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3 and self.folder is not None and not os.path.exists(f"{self.folder}/once"):
            open(f"{self.folder}/once", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        found = self.read(self.store)
        self.write(self.store, index + 1)
        return found


def first(store):
    return int(store[0])


def set_first(store, value):
    store[0] = value


def both_ways(store, read=first, write=set_first, folder=None):
    """Whether workers see what is changed here, from epoch to epoch, and this process what they change."""
    write(store, 0)
    with gl.Loader(Cache(store, read, write, folder), 2, num_workers=1, device="cpu") as loader:
        list(loader)  # the worker dies in this one
        write(store, 100)
        assert torch.cat(list(loader)).tolist() == [100, 1, 2, 3, 4, 5]
        assert read(store) == 6
        write(store, 200)
        assert torch.cat(list(loader)).tolist() == [200, 1, 2, 3, 4, 5]
    assert read(store) == 6


TENSORS = {
    "a tensor": lambda: torch.zeros(5000).share_memory_(),
    "a part of one": lambda: torch.zeros(50, 100).share_memory_()[7:, 3],
    "of bfloat16": lambda: torch.zeros(5000, dtype=torch.bfloat16).share_memory_(),
    "a parameter": lambda: torch.nn.Linear(1, 2).share_memory().bias.requires_grad_(False),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_in_shared_memory_is_shared_also_with_a_worker_that_was_restarted(tmp_path, name):
    tensor = TENSORS[name]()
    assert tensor.is_shared()
    both_ways(tensor, folder=tmp_path)
    assert (tmp_path / "once").exists()


@pytest.mark.usefixtures("warm")
def test_two_tensors_of_one_memory_are_so_in_the_worker_too():
    whole = torch.zeros(10).share_memory_()
    both_ways((whole, whole[:5]), lambda pair: int(pair[0][2]), lambda pair, value: pair[1][2].fill_(value))


def test_the_other_sharing_strategy_of_torch(tmp_path):
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.zeros(5000).share_memory_()
        both_ways(tensor, folder=tmp_path)
        both_ways(tensor)
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


@pytest.mark.usefixtures("warm")
def test_a_tensor_that_is_not_in_shared_memory_is_a_copy():
    tensor = torch.zeros(5000)
    with gl.Loader(Cache(tensor, first, set_first), 6, num_workers=1, device="cpu") as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3, 4, 5]
    assert tensor[0] == 0
    assert not tensor.is_shared()


def value_of(store):
    return store.value


def set_value(store, value):
    store.value = value


OF_MULTIPROCESSING = {
    "Value": (lambda: SPAWN.Value("i"), value_of, set_value),
    "Value without a lock": (lambda: multiprocessing.Value("d", lock=False), lambda v: int(v.value), set_value),
    "RawValue": (lambda: multiprocessing.RawValue(ctypes.c_long), value_of, set_value),
    "Array": (lambda: SPAWN.Array("i", 10), first, set_first),
    "RawArray": (lambda: multiprocessing.RawArray("i", 10), first, set_first),
    "an array over an Array": (lambda: np.frombuffer(SPAWN.Array("i", 10).get_obj(), np.int32)[4:], first, set_first),
    "a tensor over an Array": (
        lambda: torch.from_numpy(np.frombuffer(SPAWN.Array("i", 10).get_obj(), np.int32))[1::2],
        first,
        set_first,
    ),
}


@pytest.mark.parametrize("name", OF_MULTIPROCESSING)
def test_what_multiprocessing_shares(tmp_path, name):
    make, read, write = OF_MULTIPROCESSING[name]
    both_ways(make(), read, write, tmp_path)


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


def test_a_lock_of_the_fork_context_is_refused_with_what_to_write():
    for shared in (multiprocessing.get_context("fork").Value("i"), multiprocessing.get_context("fork").Lock()):
        expected = (
            r'dataset\.store.* cannot be sent to the worker processes: .*\. A lock of multiprocessing\'s "fork" context'
            r' exists only in forks .*: make it .* with multiprocessing\.get_context\("spawn"\), .*lock=False; or use'
        )
        with pytest.raises(TypeError, match=expected):
            iter(gl.Loader(Cache(shared, first, set_first), num_workers=1, device="cpu"))


def test_a_managers_dict_and_one_within_it():
    with SPAWN.Manager() as manager:
        outer = manager.dict()
        outer["inner"] = manager.dict()

        def write(store, value):
            store["number"] = store["inner"]["number"] = value

        both_ways(outer, lambda store: min(store["number"], store["inner"]["number"]), write)
        held = manager.dict(number=0)
        both_ways(held, lambda store: store["number"], lambda store, value: store.update(number=value))


def read_block(memory):
    return memory.buf[0]


def write_block(memory, value):
    memory.buf[0] = value


def by_name(function):
    def called(name, *args):
        memory = shared_memory.SharedMemory(name)
        try:
            return function(memory, *args)
        finally:
            memory.close()

    return called


BLOCKS = {
    "the block": (lambda memory: memory, read_block, write_block),
    "an array over it": (lambda memory: np.ndarray(16, np.uint8, memory.buf)[3:], first, set_first),
    "a tensor over it": (lambda memory: torch.frombuffer(memory.buf, dtype=torch.uint8)[3:], first, set_first),
    "its name": (lambda memory: memory.name, by_name(read_block), by_name(write_block)),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_shared_memory_outlives_the_workers(tmp_path, name):
    of, read, write = BLOCKS[name]
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        both_ways(of(memory), read, write, tmp_path)
        again = shared_memory.SharedMemory(memory.name)  # it has not been unlinked
        again.close()
    finally:
        memory.unlink()


def test_a_mapping_without_a_name_is_refused():
    array = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    with pytest.raises(TypeError, match=r"(?s)dataset\.store \(a numpy\.ndarray\) .*a mapping that.*forks share"):
        iter(gl.Loader(Cache(array, first, set_first), num_workers=1, device="cpu"))


@pytest.mark.usefixtures("warm")
def test_a_tensor_over_a_mapping_without_a_name_is_copied():
    """It may be a batch that somebody kept."""
    tensor = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 4096), np.int64)).fill_(7)
    with gl.Loader(Cache(tensor, lambda tensor: int(tensor.sum()), set_first), num_workers=1, device="cpu") as loader:
        assert next(iter(loader)).item() == 7 * 512


@pytest.mark.usefixtures("warm")
def test_no_descriptor_stays_and_the_tracker_says_nothing():
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
for _ in range(3):
    with gl.Loader(Sum(tensor, memory, array), num_workers=2, device="cpu") as loader:
        assert torch.cat(list(loader)).tolist() == [7] * 4
    now = len(os.listdir("/proc/self/fd"))
    before = now if _ == 0 else before
assert now == before, (now, before)
assert memory.buf[0] == 2
memory.close()
memory.unlink()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={**os.environ, TOO: "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")
