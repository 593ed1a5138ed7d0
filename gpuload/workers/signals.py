"""Signals put off: work that must not be left half done is completed before a ctrl-C takes effect.

Python runs a signal's handler between any two instructions of the main thread, and an exception from it leaves the
program there: between starting a process and the line that stores it, say. Blocking the signal in the thread does not
help: the kernel gives it to another thread, one of torch's say, and Python still runs the handler in the main thread.
So for a while the handlers are replaced by one that takes a note, and afterwards the signals are raised again.

Works in any thread; outside the main one, where no handler ever runs, it does nothing. What a handler raises at the end
of a deferral within a finalizer, Python prints and forgets: such a ctrl-C is lost.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["deferred_signals", "signals_enabled"]

# Signals whose handlers may raise, if a program sets one: ctrl-C, warnings of a scheduler, time limits.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# Of the main thread, which alone touches them.
_handlers: dict[int, Any] = {}  # those that were replaced, by signal; empty: nothing is deferred
_came: list[Any] = []  # signal numbers


@contextlib.contextmanager
def deferred_signals(*, drop_sigint: bool = False) -> Iterator[None]:
    """Run no signal handler within this context; signals that came are raised at its end, or at that of the outer one.

    Args:
        drop_sigint: forget a ctrl-C that would raise `KeyboardInterrupt`: one is being raised already, or the program
            ends.
    """
    if threading.current_thread() is not threading.main_thread() or _handlers:
        yield
        return
    _came.clear()
    try:
        _replace_handlers()
        yield
    finally:
        try:
            _restore_handlers()
        finally:
            if drop_sigint and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                _came[:] = [number for number in _came if number != signal.SIGINT]
            _raise_all()


@contextlib.contextmanager
def signals_enabled() -> Iterator[None]:
    """Run handlers again, within a deferral: around code that may take long and can be interrupted."""
    if threading.current_thread() is not threading.main_thread() or not _handlers:
        yield
        return
    try:
        _restore_handlers()
        _raise_all()
        yield
    finally:
        _replace_handlers()


def _replace_handlers() -> None:
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            with contextlib.suppress(ValueError):  # in a subinterpreter, which has no signals
                _handlers[number] = handler
                signal.signal(number, _take_note)


def _restore_handlers() -> None:
    """Put the handlers back. One that is back may raise at once: the others come back all the same."""
    try:
        for number, handler in list(_handlers.items()):
            if signal.getsignal(number) is _take_note:  # else another one was set meanwhile
                signal.signal(number, handler)
            del _handlers[number]
    finally:
        if _handlers:
            _restore_handlers()


def _take_note(number: int, frame: object) -> None:
    if number not in _came:
        _came.append(number)


def _raise_all() -> None:
    """Raise what came; an exception from one handler does not stop the next one."""
    if _came:
        try:
            signal.raise_signal(_came.pop(0))
        finally:
            _raise_all()
