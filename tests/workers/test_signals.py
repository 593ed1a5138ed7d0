"""Signals whose handlers wait: for the end of a piece of work, never longer, and none is lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gpuload.workers.signals import deferred_signals, signals_enabled


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


def test_deferred_signals_raise_an_interrupt_after_the_block():
    done = []

    def work():
        with deferred_signals():
            interrupt()
            interrupt()
            done.append("work")
        done.append("not reached")

    interrupted(work)
    assert done == ["work"]


def test_an_error_in_deferred_signals_is_the_context_of_the_interrupt():
    def work():
        with deferred_signals():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_deferred_handlers_of_several_signals_run_once_each_although_one_raises():
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))

    def work():
        with deferred_signals():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
                interrupt(number)
            assert seen == []

    interrupted(work)
    assert seen == [signal.SIGTERM, signal.SIGUSR1]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_nested_deferred_signals_wait_for_the_outer_block():
    done = []

    def work():
        with deferred_signals():
            with deferred_signals():
                interrupt()
            done.append("outer")

    interrupted(work)
    assert done == ["outer"]


def test_a_handler_that_is_set_in_deferred_signals_stays():
    with deferred_signals():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_ignored_signal_stays_ignored_in_deferred_signals():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals():
        interrupt()


def test_drop_sigint_drops_a_ctrl_c_but_calls_the_programs_handler():
    with deferred_signals(drop_sigint=True):
        interrupt()
    seen = []
    original = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with deferred_signals(drop_sigint=True):
        interrupt()
    signal.signal(signal.SIGINT, original)
    assert seen == [signal.SIGINT]


def test_signals_enabled_raises_earlier_and_new_interrupts():
    done = []
    with deferred_signals():
        interrupt()
        with pytest.raises(KeyboardInterrupt), signals_enabled():
            done.append("not reached")
        with pytest.raises(KeyboardInterrupt), signals_enabled():
            interrupt()
        with signals_enabled():
            done.append("inside")
        with deferred_signals(), pytest.raises(KeyboardInterrupt), signals_enabled():
            interrupt()
        done.append("behind")
    assert done == ["inside", "behind"]


def test_signals_enabled_outside_of_deferred_signals_changes_nothing():
    with pytest.raises(KeyboardInterrupt), signals_enabled():
        interrupt()


def test_deferred_signals_change_nothing_in_another_thread():
    handlers = []

    def work():
        with deferred_signals(), signals_enabled():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_handler_that_raises_while_it_is_restored_leaves_no_other_handler_replaced(monkeypatch):
    put_back = signal.signal

    def interrupted(number, handler):
        put_back(number, handler)
        if handler is signal.default_int_handler:
            interrupt()

    def work():
        with deferred_signals():
            monkeypatch.setattr(signal, "signal", interrupted)

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    ours = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        work()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is ours
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
