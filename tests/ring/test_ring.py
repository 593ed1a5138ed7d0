"""The ring of slots that a process shares with its workers, callbacks on collected objects, and CPU affinity."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import mmap
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import lacking
from helpers.file_descriptors import descriptors
from helpers.programs import run_python

import gpuload as gl
from gpuload.ring import ring as ring_module
from gpuload.ring.ring import (
    GRANULE_BYTES,
    MARGIN_BYTES,
    Ring,
    Slot,
    WorkerRing,
    map_ring,
    move_processes,
    on_collected,
    run_on_cpus,
)

ALLOWED_CPUS = frozenset(os.sched_getaffinity(0))
LAST_CPU = frozenset({max(ALLOWED_CPUS)})
needs_two_cpus = lacking.mark_missing("two CPUs", len(ALLOWED_CPUS) < 2)
POPULATE = 23  # MADV_POPULATE_WRITE
PAGE = mmap.PAGESIZE


def can_populate() -> bool:
    with contextlib.suppress(OSError), mmap.mmap(-1, PAGE) as memory:
        memory.madvise(POPULATE)
        return True
    return False


needs_populate = lacking.mark_missing("MADV_POPULATE_WRITE", not can_populate())


@pytest.fixture
def ring():
    ring = Ring(1 << 20)
    yield ring
    ring.close()


def resident_bytes(ring: Ring) -> int:
    return os.fstat(ring.fd).st_blocks * 512


def test_a_slot_is_shared_by_all_mappings_of_the_descriptor(ring: Ring):
    slot = ring.acquire(100)
    ring.view(slot)[:3] = (1, 2, 3)
    second_mapping = map_ring(ring.fd, ring.ring_bytes)
    assert second_mapping[slot.offset : slot.offset + 3] == b"\x01\x02\x03"
    second_mapping.close()


def test_a_slot_takes_memory_only_where_it_is_written(ring: Ring):
    slot = ring.acquire(512 * 1024)
    assert resident_bytes(ring) == 0
    ring.view(slot)[: 256 * 1024] = 1
    assert resident_bytes(ring) == 256 * 1024


class FakeMapping:
    """A mapping that records the calls of `madvise`, which raise `error` if it is given."""

    def __init__(self, error: OSError | None = None):
        self.calls: list[tuple[int, int]] = []
        self.error = error

    def madvise(self, advice: int, start: int, nbytes: int) -> None:
        assert advice == POPULATE
        self.calls.append((start, nbytes))
        if self.error is not None:
            raise self.error


@pytest.fixture
def worker_ring(ring: Ring):
    return WorkerRing(ring.fd, ring.ring_bytes)


@pytest.fixture
def fake_mapping(worker_ring: WorkerRing, monkeypatch):
    monkeypatch.setattr(worker_ring, "_map", mapping := FakeMapping())
    return mapping


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@needs_populate
def test_writing_to_a_populated_slot_faults_no_page(ring: Ring, worker_ring: WorkerRing):
    slot = ring.acquire(1 << 20)
    ring.view(slot)[: 1 << 19] = 1  # the other half was never written
    worker_ring.populate(slot, 1 << 20)
    faults_before = page_faults()
    worker_ring.view(slot)[::PAGE] = 2
    assert page_faults() - faults_before < (1 << 20) / PAGE / 8  # far fewer than one for each page
    assert (ring.view(slot)[::PAGE] == 2).all()


@needs_populate
def test_the_headroom_of_a_populated_slot_takes_no_memory(ring: Ring, worker_ring: WorkerRing):
    ring.acquire(1000)
    slot = ring.acquire(512 * 1024)
    worker_ring.populate(slot, 3 * PAGE + 1)
    assert resident_bytes(ring) == 4 * PAGE


def test_a_page_of_a_slot_is_populated_once(worker_ring: WorkerRing, fake_mapping: FakeMapping):
    first, second = Slot(0, GRANULE_BYTES), Slot(GRANULE_BYTES, GRANULE_BYTES)
    for slot, nbytes in ((first, 0), (first, PAGE + 1), (first, 2 * PAGE), (second, 1), (first, 2 * PAGE + 1)):
        worker_ring.populate(slot, nbytes)
    assert fake_mapping.calls == [(0, 2 * PAGE), (GRANULE_BYTES, PAGE), (2 * PAGE, PAGE)]


def test_a_slot_in_the_place_of_a_retired_slot_is_populated_again(worker_ring: WorkerRing, fake_mapping: FakeMapping):
    for capacity_bytes in (GRANULE_BYTES, 2 * GRANULE_BYTES, GRANULE_BYTES):
        worker_ring.populate(Slot(0, capacity_bytes), PAGE)
    assert fake_mapping.calls == [(0, PAGE)] * 3


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, errno.EFAULT])
def test_a_slot_that_the_system_cannot_populate_can_be_written(ring: Ring, worker_ring, monkeypatch, code):
    slot = ring.acquire(1000)
    with monkeypatch.context() as patched:
        patched.setattr(worker_ring, "_map", mapping := FakeMapping(OSError(code, os.strerror(code))))
        for _ in range(2):
            worker_ring.populate(slot, 1000)
    assert len(mapping.calls) == 1
    worker_ring.view(slot)[:1000] = 3
    assert ring.view(slot)[:1000].tolist() == [3] * 1000


def test_populate_raises_errors_that_do_not_mean_unsupported(worker_ring: WorkerRing, fake_mapping: FakeMapping):
    fake_mapping.error = OSError(errno.EPERM, "not permitted")
    with pytest.raises(PermissionError, match="not permitted"):
        worker_ring.populate(Slot(0, GRANULE_BYTES), 1)


def test_the_slot_released_last_is_handed_out_first(ring: Ring):
    first, second = ring.acquire(1000), ring.acquire(1000)
    ring.release(first)
    ring.release(second)
    assert ring.acquire(1000) is second
    assert ring.acquire(1000) is first


def test_slots_in_use_never_overlap_and_never_exceed_the_ring():
    rng = np.random.default_rng(0)
    ring = Ring(4 << 20)
    used: list[Slot] = []
    for _ in range(3000):
        if used and rng.random() < 0.5:
            ring.release(used.pop(rng.integers(len(used))))
        elif (slot := ring.acquire(int(rng.integers(1, 1 << 20)))) is not None:
            used.append(slot)
        spans = sorted((used_slot.offset, used_slot.offset + used_slot.capacity_bytes) for used_slot in used)
        for (_, end), (next_start, _) in itertools.pairwise(spans):
            assert end <= next_start
        assert max((end for _, end in spans), default=0) <= ring.ring_bytes
        assert ring.slot_bytes <= ring.ring_bytes
    ring.close()


@pytest.mark.parametrize("ring_bytes", [1 << 20, 1 << 30], ids=["full", "with room"])
def test_small_free_slots_are_retired_for_a_larger_slot_and_free_their_pages(ring_bytes):
    ring = Ring(ring_bytes)
    slots = [ring.acquire(256 * 1024) for _ in range(4)]
    for slot in slots:
        ring.view(slot)[:] = 7
        ring.release(slot)
    large = ring.acquire(1 << 20)
    assert (ring.slots, ring.slot_bytes, large.offset, resident_bytes(ring)) == (1, 1 << 20, 0, 0)
    ring.view(large)[:] = 1
    assert ring._allocated_bytes() == 1 << 20
    ring.release(large)
    assert ring.acquire(10) is large
    ring.close()


def test_acquire_of_more_than_ring_bytes_raises_value_error(ring: Ring):
    with pytest.raises(ValueError, match=r"^1048577 bytes do not fit into a ring of 1048576 bytes$"):
        ring.acquire((1 << 20) + 1)


def test_on_new_and_on_retire_are_called_once_for_each_slot():
    events: list[tuple[str, int]] = []
    ring = Ring(2 * GRANULE_BYTES)
    ring.on_new = lambda slot: events.append(("new", slot.offset))
    ring.on_retire = lambda slot: events.append(("retired", slot.offset))
    ring.release(ring.acquire(10))
    ring.release(ring.acquire(10))
    assert events == [("new", 0)]
    ring.release(ring.acquire(2 * GRANULE_BYTES))
    ring.close()
    assert events == [("new", 0), ("retired", 0), ("new", 0), ("retired", 0)]


def test_close_frees_descriptor_and_mapping():
    def count_mappings():
        return Path("/proc/self/maps").read_text().count("gpuload-ring")

    gc.collect()  # frees descriptors of earlier tests
    descriptors_before, mappings_before = descriptors(), count_mappings()
    ring = Ring(1 << 20)
    ring.release(ring.acquire(10))
    ring.close()
    ring.close()
    assert descriptors() <= descriptors_before
    assert count_mappings() == mappings_before


def test_a_forked_child_neither_maps_the_ring_nor_frees_its_pages(ring: Ring):
    slot = ring.acquire(1000)
    ring.view(slot)[:] = 5
    ring.release(slot)
    inode = os.fstat(ring.fd).st_ino  # other tests' rings may still exist
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/maps") as maps:
            mapped = any(line.split()[4] == str(inode) for line in maps)
        ring.close()
        os._exit(1 if mapped else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ring.view(slot)[0] == 5


class Machine:
    """A ring on a machine with a memory limit, against which the written pages of the ring count."""

    def __init__(self, limit: int):
        self.limit = limit
        self.memory_calls = 0
        self.ring = Ring(64 << 20, memory_left=self.memory_left)

    def memory_left(self) -> int:
        self.memory_calls += 1
        return self.limit - resident_bytes(self.ring)

    def write(self, slot: Slot) -> Slot:
        self.ring.view(slot)[:] = 1
        return slot


@pytest.fixture
def machine():
    """A machine that has 8 MiB for slots in addition to the margin for other parts of the program."""
    machine = Machine(MARGIN_BYTES + (8 << 20))
    yield machine
    machine.ring.close()


def test_acquire_without_memory_left_returns_none_until_a_slot_is_released(machine: Machine):
    slots = [machine.write(machine.ring.acquire(4 << 20)) for _ in range(2)]
    assert machine.ring.acquire(1) is None
    machine.ring.release(slots[0])
    assert machine.ring.acquire(1) is slots[0]


def test_slots_that_are_not_yet_written_count_against_the_memory_limit(machine: Machine):
    slot = machine.ring.acquire(4 << 20)
    assert machine.ring.acquire(6 << 20) is None
    assert machine.ring.slot_bytes == slot.capacity_bytes
    assert machine.ring.acquire(4 << 20) is not None


def test_memory_left_is_called_only_for_a_new_slot(machine: Machine):
    slot = machine.ring.acquire(1000)
    memory_calls = machine.memory_calls
    for _ in range(100):
        machine.ring.release(slot)
        assert machine.ring.acquire(1000) is slot
    assert machine.memory_calls == memory_calls == 1


def test_free_slots_are_retired_if_a_larger_slot_needs_their_memory(machine: Machine):
    slots = [machine.write(machine.ring.acquire(2 << 20)) for _ in range(4)]
    for slot in slots[1:]:
        machine.ring.release(slot)
    assert machine.ring.acquire(6 << 20) is not None
    assert machine.ring.slots == 2


def test_a_slot_that_exceeds_the_memory_limit_raises_limit_error_with_the_figures(machine: Machine):
    machine.ring.release(machine.write(machine.ring.acquire(4 << 20)))
    with pytest.raises(gl.LimitError) as refusal:
        machine.ring.acquire(9 << 20)
    assert str(refusal.value) == (
        "decoded images need 9,437,184 more bytes of memory, in addition to 16,777,216 for the rest of the program, "
        "but the program's control group has only 25,165,824 bytes left. Use a smaller batch_size or chunk_size, use "
        "fewer workers, start the transforms with a crop, or raise the memory limit of the container or job"
    )
    assert machine.ring.slots == machine.ring.slot_bytes == 0
    assert machine.ring.acquire(8 << 20) is not None  # the refused call has lost nothing


def test_acquire_with_min_bytes_returns_a_smaller_slot_instead_of_an_error(machine: Machine):
    slot = machine.ring.acquire(30 << 20, min_bytes=1)
    assert slot.capacity_bytes == 30 << 18  # 30 MiB were halved twice, until they fit into 8 MiB
    # While a slot can be released, a smaller one is not acquired.
    assert machine.ring.acquire(30 << 20, min_bytes=1) is None
    machine.ring.release(slot)
    with pytest.raises(gl.LimitError, match="decoded images need 9,437,184 more bytes"):
        machine.ring.acquire(30 << 20, min_bytes=9 << 20)
    machine.limit = 0
    with pytest.raises(gl.LimitError, match="decoded images need 65,536 more bytes"):
        machine.ring.acquire(30 << 20, min_bytes=0)


def test_spare_bytes_is_at_most_ring_bytes_and_at_most_the_memory_left(machine: Machine, monkeypatch):
    monkeypatch.setattr(ring_module, "SPARE_S", -1.0)  # the result is never cached
    machine.limit = 3 * machine.ring.ring_bytes + MARGIN_BYTES
    assert machine.ring.spare_bytes() == machine.ring.ring_bytes
    machine.limit = machine.ring.ring_bytes + MARGIN_BYTES + 1000
    assert machine.ring.spare_bytes() == 1000
    machine.write(machine.ring.acquire(4 << 20))  # counts against the limit and the ring
    assert machine.ring.spare_bytes() == 1000
    machine.limit = 5 << 20
    assert machine.ring.spare_bytes() == 0
    without_limit = Ring(1 << 20, memory_left=lambda: None)
    assert without_limit.acquire(1 << 20) is not None
    assert without_limit.spare_bytes() == 1 << 20
    without_limit.close()


def test_spare_bytes_calls_memory_left_once_within_spare_s(machine: Machine):
    assert len({machine.ring.spare_bytes() for _ in range(100)}) == 1
    assert machine.memory_calls == 1


def test_full_s_adds_up_the_times_from_a_first_refusal_to_the_next_release(ring: Ring, monkeypatch):
    now_s = [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=lambda: now_s[0])
    monkeypatch.setattr(ring_module, "time", clock)
    for seconds, total_s in ((3.0, 5.0), (4.0, 11.0)):
        slot = ring.acquire(1 << 20)
        now_s[0] += 10
        assert ring.acquire(1) is None
        now_s[0] += seconds
        assert ring.acquire(1) is None
        now_s[0] += 2
        ring.release(slot)
        assert ring.full_s == total_s
        now_s[0] += 10
        ring.release(ring.acquire(1))
        assert ring.full_s == total_s
    assert ring.refusals == 2


def test_move_out_returns_a_copy_and_releases_the_slot(machine: Machine):
    slot = machine.write(machine.ring.acquire(1 << 20))
    copy = machine.ring.move_out(slot, 1000)
    assert machine.ring.acquire(1 << 20) is slot
    machine.ring.view(slot)[:] = 9
    assert copy.tolist() == [1] * 1000


def test_move_out_without_memory_left_raises_limit_error(machine: Machine):
    slot = machine.write(machine.ring.acquire(5 << 20))
    with pytest.raises(gl.LimitError, match="decoded images need 4,194,304 more bytes of memory"):
        machine.ring.move_out(slot, 4 << 20)
    assert machine.ring.acquire(1) is not slot
    assert machine.ring.move_out(slot, 2 << 20).nbytes == 2 << 20


def test_move_in_copies_data_to_a_slot_if_slots_are_page_locked(machine: Machine):
    data, locked = np.arange(200, dtype=np.uint8), []
    assert machine.ring.move_in(data) is None  # slots are not page-locked
    machine.ring.on_new = locked.append
    slot = machine.ring.move_in(data)
    assert locked == [slot]
    assert machine.ring.view(slot)[:200].tolist() == data.tolist()
    machine.write(machine.ring.acquire(7 << 20))
    assert machine.ring.move_in(np.zeros(4 << 20, np.uint8)) is None  # exceeds the memory limit
    assert machine.ring.move_in(np.zeros(65 << 20, np.uint8)) is None  # exceeds the ring


def test_on_collected_calls_each_function_once_with_its_arguments():
    calls, array = [], np.zeros(3)
    on_collected(array, calls.append, 1)
    on_collected(array, calls.append, 2)
    assert calls == []
    del array
    assert sorted(calls) == [1, 2]


def test_on_collected_can_be_canceled():
    calls, arrays = [], [np.zeros(3), np.zeros(3)]
    cancels = [on_collected(array, calls.append, number) for number, array in enumerate(arrays)]
    cancels[0]()
    cancels[0]()
    arrays.clear()
    assert calls == [1]
    cancels[1]()  # has no effect after the call


def test_on_collected_keeps_no_entry_of_collected_objects():
    gc.collect()  # objects of earlier tests would leave the list meanwhile
    watched_before = len(ring_module._watched)
    for _ in range(100):
        on_collected(np.zeros(3), list)
    gc.collect()
    assert len(ring_module._watched) == watched_before


def test_on_collected_calls_nothing_once_the_interpreter_exits():
    calls, array, watched = [], np.zeros(3), dict(ring_module._watched)
    on_collected(array, calls.append, 1)
    ring_module._watched.clear()  # as at exit
    ring_module._watched.update(watched)
    del array
    assert calls == []


@needs_two_cpus
def test_run_on_cpus_moves_the_thread_and_restores_its_affinity():
    with run_on_cpus(LAST_CPU):
        assert os.sched_getaffinity(0) == LAST_CPU
        child_cpus, _ = run_python("import os; print(*os.sched_getaffinity(0))", flags=("-S",))
        with run_on_cpus(frozenset()):
            assert os.sched_getaffinity(0) == LAST_CPU
    assert os.sched_getaffinity(0) == ALLOWED_CPUS
    assert child_cpus.split() == [str(max(ALLOWED_CPUS))]
    with pytest.raises(KeyError), run_on_cpus(LAST_CPU):
        raise KeyError
    assert os.sched_getaffinity(0) == ALLOWED_CPUS


def test_run_on_cpus_changes_nothing_if_the_system_rejects_the_cpus():
    with run_on_cpus(frozenset({1 << 12})):  # no such CPU
        assert os.sched_getaffinity(0) == ALLOWED_CPUS
    assert os.sched_getaffinity(0) == ALLOWED_CPUS


@needs_two_cpus
def test_move_processes_moves_all_threads_of_a_process():
    code = (
        "import os, sys, threading\n"
        "done = threading.Event()\n"
        "threading.Thread(target=done.wait).start()\n"
        "print('up', flush=True); input()\n"
        "here = {int(sys.argv[1])}\n"
        "print(*[os.sched_getaffinity(int(thread)) == here for thread in os.listdir('/proc/self/task')])\n"
        "done.set()\n"
    )
    command = [sys.executable, "-Sc", code, str(max(ALLOWED_CPUS))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "up\n"
        move_processes([child.pid, 1 << 29], LAST_CPU)  # no process has the second pid
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "True True\n"


@needs_two_cpus
def test_on_new_is_called_on_the_cpus_near_the_ring():
    calls = []
    ring = Ring(1 << 20, near=LAST_CPU)
    ring.on_new = lambda slot: calls.append((threading.get_ident(), os.sched_getaffinity(0)))
    slot = ring.acquire(1 << 16)
    ring.release(slot)
    ring.acquire(1 << 16)  # the same slot again
    assert calls == [(threading.get_ident(), LAST_CPU)]
    assert os.sched_getaffinity(0) == ALLOWED_CPUS
    ring.close()
