"""Counters of workers: what a row says, also of a worker that is at something, or dead."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from gpuload.workers import counters as module
from gpuload.workers.counters import FIELDS, ROW_BYTES, CounterTable, WorkerCounters, field_indices
from gpuload.workers.protocol import Board


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [1_000]
    monkeypatch.setattr(module, "_clock", lambda: now[0])

    def set_to(moment: int) -> None:
        now[0] = moment

    return set_to


def told(table: CounterTable, worker: int = 0) -> dict[str, int]:
    return dict(zip(FIELDS, table.read()[worker].tolist(), strict=True))


def test_worker_counters_add_up_times_and_counts(clock):
    mine = WorkerCounters()
    clock(1_500)
    mine.begin()
    mine.read_ns += 70
    mine.samples += 4
    mine.decoded["Pillow"] += 3
    clock(1_800)
    mine.end()
    found = told(mine.table)
    assert (found["idle_ns"], found["busy_ns"], found["read_ns"], found["samples"]) == (500, 300, 70, 4)
    assert (found["Pillow"], found["simplejpeg"]) == (3, 0)


def test_busy_ns_includes_a_chunk_in_progress(clock):
    mine = WorkerCounters()
    mine.begin()
    clock(5_000)
    assert told(mine.table)["busy_ns"] == 4_000
    mine.decode_ns = 3_000
    assert told(mine.table)["decode_ns"] == 0  # written down when the chunk ends
    mine.flush()
    clock(6_000)
    assert (told(mine.table)["busy_ns"], told(mine.table)["decode_ns"]) == (5_000, 3_000)
    mine.end()
    clock(9_000)
    assert (told(mine.table)["busy_ns"], told(mine.table)["idle_ns"]) == (5_000, 3_000)
    mine.stop()
    clock(20_000)
    assert (told(mine.table)["busy_ns"], told(mine.table)["idle_ns"]) == (5_000, 3_000)


def test_a_replaced_workers_row_continues_and_counts_a_restart(clock):
    with mmap.mmap(-1, 3 * ROW_BYTES) as memory:
        table = CounterTable(memory, ROW_BYTES, 2, first=6)
        before = table.open_row(7)
        before.begin()
        before.samples += 5
        before.decoded["cut"] += 2
        before.flush()
        clock(2_000)
        table.close_worker(7)
        clock(9_000)  # nobody is there
        after = table.open_row(7)
        after.begin()
        after.samples += 1
        clock(9_500)
        after.end()
        found = told(table, 1)
        assert (found["busy_ns"], found["idle_ns"], found["restarts"]) == (1_500, 0, 1)
        assert (found["samples"], found["cut"]) == (6, 2)
        assert not table.read()[0].any()
        table.close()
        assert told(table, 1) == found


def test_start_ns_is_neither_busy_nor_idle_time(clock):
    with mmap.mmap(-1, 2 * ROW_BYTES) as memory:
        table = CounterTable(memory, 0, 2)
        table.mark_starting(1)
        clock(4_000)
        assert told(table, 1)["start_ns"] == 3_000  # so far
        mine = table.open_row(1)
        clock(5_000)
        mine.begin()
        clock(7_000)
        found = told(table, 1)
        assert (found["start_ns"], found["busy_ns"], found["idle_ns"]) == (4_000, 2_000, 0)
        mine.end()
        clock(8_000)
        found = told(table, 1)
        assert (found["start_ns"], found["busy_ns"], found["idle_ns"]) == (4_000, 2_000, 1_000)
        table.close_worker(1)
        table.mark_starting(1)
        clock(9_000)
        table.close_worker(1, died=False)  # it could not be started
        clock(20_000)
        found = told(table, 1)
        assert (found["start_ns"], found["idle_ns"], found["restarts"]) == (5_000, 1_000, 1)
        table.close()


def test_queued_ns_counts_waiting_for_a_cpu_only_while_a_worker_is_busy():
    """Of a process that has to share its CPU with another one."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    spin = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with mmap.mmap(-1, ROW_BYTES) as memory, subprocess.Popen(spin, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            mine = WorkerCounters(memory)
            mine.start_queue_time()
            mine.begin()
            deadline = time.monotonic() + 60
            while mine.queued_ns < 20_000_000 and time.monotonic() < deadline:
                sum(range(100_000))
                mine.flush()
            assert mine.queued_ns >= 20_000_000
            mine.end()
            queued_ns, so_far = mine.queued_ns, mine._read_queued_ns()
            while mine._read_queued_ns() < so_far + 20_000_000 and time.monotonic() < deadline:
                sum(range(100_000))  # it waits for a CPU, though it is not a worker's work that does
            mine.begin()
            assert mine.queued_ns == queued_ns
            os.close(mine._queue_fd)
        finally:
            other.kill()
            os.sched_setaffinity(0, allowed)


def test_cpu_ns_is_counted_in_worker_processes_only():
    with mmap.mmap(-1, ROW_BYTES) as memory:
        mine = WorkerCounters(memory)
        mine.begin()
        sum(range(200_000))
        mine.end()
        assert mine.cpu_ns > 0
    home = WorkerCounters()
    home.end()
    assert home.cpu_ns == 0


def test_board_row_writer_and_wanted_check_agree_with_write_and_cancel_before():
    board = Board(2, first=3)
    note, wanted = board.make_row_writer(4, 7), board.make_wanted_check(7)
    note(5)
    found = board.read(4)
    assert (found.chunk, found.row) == (7, 5)
    board.write(4, 7, 5)
    assert 0 <= board.read(4).since_ns - found.since_ns < 10**10
    assert board.read(3).chunk == 0
    answers = []
    for limit in (0, 7, 8):
        board.cancel_before(limit)
        answers.append(wanted())
    assert answers == [True, True, False]
    board.close()


def test_board_counters_do_not_overlap_its_notes():
    board = Board(2, first=3)
    theirs = Board(2, board.fd, first=3)
    try:
        board.write(4, 11, 2)
        theirs.counters.open_row(4).end()
        mine = theirs.counters.open_row(4)
        mine.plans = 9
        mine.end()
        board.write(4, 12, 1)
        assert board.read(4).chunk == 12
        assert board.counters.read()[:, field_indices["plans"]].tolist() == [0, 9]
    finally:
        theirs._map.close()
        board.close()
    assert board.counters.read()[:, field_indices["plans"]].tolist() == [0, 9]
    assert board.counters.read().dtype == np.int64
