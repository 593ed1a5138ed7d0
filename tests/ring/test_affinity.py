from __future__ import annotations

import os
import subprocess
import sys
import threading

import lacking
import pytest

from gpuload.ring.affinity import cpu_list, cpus_in, move, running_on
from gpuload.ring.ring import Ring

OWN = frozenset(os.sched_getaffinity(0))
LAST = frozenset({max(OWN)})
several = lacking.mark("two CPUs", len(OWN) < 2)


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5-6,9-10", {5, 6, 9, 10})]
)
def test_lists_of_cpus_as_the_kernel_writes_them(text, cpus):
    assert cpus_in(f"{text}\n") == cpus
    assert cpu_list(cpus) == text


@several
def test_a_thread_goes_there_and_comes_back():
    with running_on(LAST):
        assert os.sched_getaffinity(0) == LAST
        child = subprocess.run(
            [sys.executable, "-Sc", "import os; print(*os.sched_getaffinity(0))"], capture_output=True, check=True
        )
        with running_on(frozenset()):
            assert os.sched_getaffinity(0) == LAST
    assert os.sched_getaffinity(0) == OWN
    assert child.stdout.split() == [str(max(OWN)).encode()]
    with pytest.raises(KeyError), running_on(LAST):
        raise KeyError
    assert os.sched_getaffinity(0) == OWN


def test_cpus_that_the_system_refuses_change_nothing():
    with running_on(frozenset({1 << 12})):
        assert os.sched_getaffinity(0) == OWN
    assert os.sched_getaffinity(0) == OWN


@several
def test_all_threads_of_a_process_are_moved():
    code = (
        "import os, threading\n"
        "done = threading.Event()\n"
        "threading.Thread(target=done.wait).start()\n"
        "print('up', flush=True); input()\n"
        "here = {int(os.environ['CPU'])}\n"
        "print(*[os.sched_getaffinity(int(thread)) == here for thread in os.listdir('/proc/self/task')])\n"
        "done.set()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-Sc", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CPU": str(max(OWN))},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        move([child.pid, 1 << 29], LAST)  # the other one has ended
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "True True\n"


@several
def test_new_slots_are_touched_near_the_cpus_of_the_ring():
    seen = []
    ring = Ring(1 << 20, near=LAST, on_new=lambda slot: seen.append((threading.get_ident(), os.sched_getaffinity(0))))
    slot = ring.acquire(1 << 16)
    assert slot is not None
    ring.release(slot)
    ring.acquire(1 << 16)  # the same again
    assert seen == [(threading.get_ident(), LAST)]
    assert os.sched_getaffinity(0) == OWN
    ring.close()
