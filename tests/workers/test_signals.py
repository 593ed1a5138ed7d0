"""Signals whose handlers are deferred to the end of a block."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gpuload.workers import signals
from gpuload.workers.signals import deferred_signals, signals_enabled


@pytest.fixture(autouse=True)
def handlers():
    """Check that the test has restored the signal handlers, and restore them if not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before or after[signal.SIGINT] is signal.SIG_IGN  # two tests leave SIGINT ignored


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)  # Python runs the handler before this returns


def test_deferred_signals_raise_an_interrupt_after_the_block():
    done = []

    def work():
        with deferred_signals():
            interrupt()
            interrupt()
            done.append("work")
        done.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        work()
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

    with pytest.raises(KeyboardInterrupt):
        work()
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

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["outer"]


def test_a_handler_that_is_set_in_deferred_signals_stays():
    with deferred_signals():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_ignored_signal_stays_ignored_in_deferred_signals():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


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
        done.append("after")
    assert done == ["inside", "after"]


def test_signals_enabled_outside_of_deferred_signals_changes_nothing():
    with pytest.raises(KeyboardInterrupt), signals_enabled():
        interrupt()


def test_deferred_signals_change_nothing_in_another_thread():
    seen = []

    def work():
        with deferred_signals(), signals_enabled():
            seen.append((signal.getsignal(signal.SIGINT), dict(signals._handlers)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGINT), {})]


def test_a_handler_that_raises_while_it_is_restored_leaves_no_handler_replaced(monkeypatch):
    set_handler = signal.signal

    def set_and_interrupt(number, handler):
        set_handler(number, handler)
        if handler is signal.default_int_handler:
            interrupt()

    def work():
        with deferred_signals():
            monkeypatch.setattr(signal, "signal", set_and_interrupt)

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        work()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
