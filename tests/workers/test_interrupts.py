"""Signals whose handlers wait: for the end of a piece of work, never longer, and none is lost."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from gpuload.workers.interrupts import LATER_S, finalizing, held, let_through

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def handlers():
    """Each test ends with the handlers that it began with."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before or after[signal.SIGINT] is signal.SIG_IGN


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)  # Python runs the handler before this returns


def interrupted(work) -> None:
    with pytest.raises(KeyboardInterrupt):
        work()


def test_what_comes_is_raised_when_the_work_is_done():
    done = []

    def work():
        with held():
            interrupt()
            interrupt()
            done.append("work")
        done.append("not reached")

    interrupted(work)
    assert done == ["work"]


def test_an_error_of_the_work_is_the_context_of_the_interrupt():
    def work():
        with held():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_handlers_of_several_signals_run_once_each_although_one_raises():
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))

    def work():
        with held():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
                interrupt(number)
            assert seen == []

    interrupted(work)
    assert seen == [signal.SIGTERM, signal.SIGUSR1]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_held_within_held_waits_for_the_outer_one():
    done = []

    def work():
        with held():
            with held():
                interrupt()
            done.append("outer")

    interrupted(work)
    assert done == ["outer"]


def test_a_handler_that_is_set_in_the_meantime_stays():
    with held():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held():
        interrupt()


def test_deaf_forgets_a_ctrl_c_but_no_handler_of_the_programs_own():
    with held(deaf=True):
        interrupt()
    seen = []
    original = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with held(deaf=True):
        interrupt()
    signal.signal(signal.SIGINT, original)
    assert seen == [signal.SIGINT]


def test_let_through_hears_what_came_and_what_comes():
    done = []
    with held():
        interrupt()
        with pytest.raises(KeyboardInterrupt), let_through():
            done.append("not reached")
        with pytest.raises(KeyboardInterrupt), let_through():
            interrupt()
        with let_through():
            done.append("inside")
        with held(), pytest.raises(KeyboardInterrupt), let_through():
            interrupt()
        done.append("behind")
    assert done == ["inside", "behind"]


def test_let_through_outside_of_held_changes_nothing():
    with pytest.raises(KeyboardInterrupt), let_through():
        interrupt()


def test_in_another_thread_nothing_is_held():
    handlers = []

    def work():
        with held(), let_through():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("times", [1, 2])
def test_what_comes_in_a_finalizer_is_raised_in_the_program_behind_it(times):
    """What a `__del__` raises itself would be printed and forgotten; a warning that is an error here."""
    done = []

    class Thing:
        def work(self):
            for _ in range(times):
                interrupt()
            done.append("work")

        def __del__(self):
            finalizing(self.work)
            time.sleep(10 * LATER_S)
            done.append("finalizer")

        @staticmethod
        def drop(thing):
            del thing
            time.sleep(LIMIT_S)

    interrupted(lambda: Thing.drop(Thing()))
    assert done == ["work", "finalizer"]
