"""Counters of workers, including workers that process a chunk or have died."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from gpuload.workers import counters as counters_module
from gpuload.workers.counters import FIELDS, ROW_BYTES, CounterTable, WorkerCounters, field_indices
from gpuload.workers.protocol import Board

MIN_QUEUED_NS = 20_000_000  # a wait for a CPU that is long enough to be noticed


@pytest.fixture
def set_clock(monkeypatch):
    """Stop the clock of the counters, and return a function that sets it."""
    now = [1_000]
    monkeypatch.setattr(counters_module, "_clock", lambda: now[0])

    def set_to(moment: int) -> None:
        now[0] = moment

    return set_to


def read_row(table: CounterTable, worker: int = 0) -> dict[str, int]:
    return dict(zip(FIELDS, table.read()[worker].tolist(), strict=True))


def test_worker_counters_add_up_times_and_counts(set_clock):
    counters = WorkerCounters()
    set_clock(1_500)
    counters.begin()
    counters.read_ns += 70
    counters.samples += 4
    counters.decoded["Pillow"] += 3
    set_clock(1_800)  # the clock starts at 1,000
    counters.end()
    row = read_row(counters.table)
    assert (row["idle_ns"], row["busy_ns"], row["read_ns"], row["samples"]) == (500, 300, 70, 4)
    assert (row["Pillow"], row["simplejpeg"]) == (3, 0)


def test_busy_ns_includes_a_chunk_in_progress(set_clock):
    counters = WorkerCounters()
    counters.begin()
    set_clock(5_000)
    assert read_row(counters.table)["busy_ns"] == 4_000
    counters.decode_ns = 3_000
    assert read_row(counters.table)["decode_ns"] == 0  # written to the table when the chunk ends
    counters.flush()
    set_clock(6_000)
    assert (read_row(counters.table)["busy_ns"], read_row(counters.table)["decode_ns"]) == (5_000, 3_000)
    counters.end()
    set_clock(9_000)
    assert (read_row(counters.table)["busy_ns"], read_row(counters.table)["idle_ns"]) == (5_000, 3_000)
    counters.stop()
    set_clock(20_000)
    assert (read_row(counters.table)["busy_ns"], read_row(counters.table)["idle_ns"]) == (5_000, 3_000)


def test_a_replaced_workers_row_continues_and_counts_a_restart(set_clock):
    with mmap.mmap(-1, 3 * ROW_BYTES) as memory:
        table = CounterTable(memory, ROW_BYTES, 2, first=6)
        counters = table.open_row(7)
        counters.begin()
        counters.samples += 5
        counters.decoded["cut"] += 2
        counters.flush()
        set_clock(2_000)
        table.close_worker(7)
        set_clock(9_000)  # no worker has the row
        new_counters = table.open_row(7)
        new_counters.begin()
        new_counters.samples += 1
        set_clock(9_500)
        new_counters.end()
        row = read_row(table, 1)
        assert (row["busy_ns"], row["idle_ns"], row["restarts"]) == (1_500, 0, 1)
        assert (row["samples"], row["cut"]) == (6, 2)
        assert not table.read()[0].any()
        table.close()
        assert read_row(table, 1) == row


def test_start_ns_is_neither_busy_nor_idle_time(set_clock):
    with mmap.mmap(-1, 2 * ROW_BYTES) as memory:
        table = CounterTable(memory, 0, 2)
        table.mark_starting(1)
        set_clock(4_000)
        assert read_row(table, 1)["start_ns"] == 3_000  # so far
        counters = table.open_row(1)
        set_clock(5_000)
        counters.begin()
        set_clock(7_000)
        row = read_row(table, 1)
        assert (row["start_ns"], row["busy_ns"], row["idle_ns"]) == (4_000, 2_000, 0)
        counters.end()
        set_clock(8_000)
        row = read_row(table, 1)
        assert (row["start_ns"], row["busy_ns"], row["idle_ns"]) == (4_000, 2_000, 1_000)
        table.close_worker(1)
        table.mark_starting(1)
        set_clock(9_000)
        table.close_worker(1, died=False)  # the worker could not be started
        set_clock(20_000)
        row = read_row(table, 1)
        assert (row["start_ns"], row["idle_ns"], row["restarts"]) == (5_000, 1_000, 1)
        table.close()


def test_queued_ns_counts_waiting_for_a_cpu_only_while_a_worker_is_busy():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    spin = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with mmap.mmap(-1, ROW_BYTES) as memory, subprocess.Popen(spin, stdout=subprocess.PIPE) as program:
        try:
            program.stdout.readline()
            counters = WorkerCounters(memory)
            counters.start_queue_time()
            counters.begin()
            deadline = time.monotonic() + 60
            while counters.queued_ns < MIN_QUEUED_NS and time.monotonic() < deadline:
                sum(range(100_000))
                counters.flush()
            assert counters.queued_ns >= MIN_QUEUED_NS
            counters.end()
            queued_ns, idle_from_ns = counters.queued_ns, counters._read_queued_ns()
            while counters._read_queued_ns() < idle_from_ns + MIN_QUEUED_NS and time.monotonic() < deadline:
                sum(range(100_000))  # the process waits for a CPU between two chunks
            assert counters._read_queued_ns() >= idle_from_ns + MIN_QUEUED_NS
            counters.begin()
            assert counters.queued_ns == queued_ns
            os.close(counters._queue_fd)
        finally:
            program.kill()
            os.sched_setaffinity(0, allowed)


def test_cpu_ns_is_counted_in_worker_processes_only():
    with mmap.mmap(-1, ROW_BYTES) as memory:
        counters = WorkerCounters(memory)
        counters.begin()
        sum(range(200_000))
        counters.end()
        assert counters.cpu_ns > 0
    in_process = WorkerCounters()
    in_process.end()
    assert in_process.cpu_ns == 0


def test_board_row_writer_and_wanted_check_agree_with_write_and_cancel_before():
    board = Board(2, first=3)
    write_row, is_wanted = board.make_row_writer(4, 7), board.make_wanted_check(7)
    write_row(5)
    noted = board.read(4)
    assert (noted.chunk, noted.row) == (7, 5)
    board.write(4, 7, 5)
    assert 0 <= board.read(4).since_ns - noted.since_ns < 10**10  # 10 s
    assert board.read(3).chunk == 0
    answers = []
    for limit in (0, 7, 8):
        board.cancel_before(limit)
        answers.append(is_wanted())
    assert answers == [True, True, False]
    board.close()


def test_board_counters_do_not_overlap_its_notes():
    board = Board(2, first=3)
    worker_board = Board(2, board.fd, first=3)
    try:
        board.write(4, 11, 2)
        worker_board.counters.open_row(4).end()
        counters = worker_board.counters.open_row(4)
        counters.plans = 9
        counters.end()
        board.write(4, 12, 1)
        assert board.read(4).chunk == 12
        assert board.counters.read()[:, field_indices["plans"]].tolist() == [0, 9]
    finally:
        worker_board._map.close()
        board.close()
    assert board.counters.read()[:, field_indices["plans"]].tolist() == [0, 9]
    assert board.counters.read().dtype == np.int64
