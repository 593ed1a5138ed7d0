"""Deferred signals: a ctrl-C takes effect only after code that must not be interrupted half-way has completed.

Python runs a signal's handler between any two instructions of the main thread, and an exception from the handler
interrupts the program there: between starting a process and storing it, for example, so that nobody would end it.
Blocking the signal in the main thread does not help: the kernel delivers it to another thread, perhaps one of torch's,
and Python still runs the handler in the main thread. So for a while the handlers are replaced by a function that
records the signal, and afterwards the recorded signals are raised again.

These contexts can be used in any thread; outside the main thread, where no handler ever runs, they do nothing. If a
deferral ends within a finalizer, Python only prints an exception from a handler: such a ctrl-C is lost.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["deferred_signals", "signals_enabled"]

# Signals for which programs set handlers that raise exceptions: ctrl-C, a scheduler's warnings, time limits.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# Only the main thread uses these.
_handlers: dict[int, Any] = {}  # the program's handlers, keyed by signal; empty if signals are not deferred
_deferred: list[Any] = []  # the numbers of the signals that have arrived


@contextlib.contextmanager
def deferred_signals(*, drop_sigint: bool = False) -> Iterator[None]:
    """Defer signals within this context; they are raised at its end or, if contexts are nested, at the outermost end.

    Args:
        drop_sigint: drop a ctrl-C that would raise `KeyboardInterrupt`, for use while another `KeyboardInterrupt` is
            being raised or the program is ending.
    """
    if threading.current_thread() is not threading.main_thread() or _handlers:
        yield
        return
    _deferred.clear()
    try:
        _replace_handlers()
        yield
    finally:
        try:
            _restore_handlers()
        finally:
            if drop_sigint and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                _deferred[:] = [number for number in _deferred if number != signal.SIGINT]
            _raise_all()


@contextlib.contextmanager
def signals_enabled() -> Iterator[None]:
    """Enable handlers within `deferred_signals`, for code that may take long and can be interrupted safely."""
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
                signal.signal(number, _record)


def _restore_handlers() -> None:
    """Restore all handlers, even if a restored handler raises an exception immediately."""
    try:
        for number, handler in list(_handlers.items()):
            if signal.getsignal(number) is _record:  # otherwise the program has set another handler in the meantime
                signal.signal(number, handler)
            del _handlers[number]
    finally:
        if _handlers:
            _restore_handlers()


def _record(number: int, frame: object) -> None:
    if number not in _deferred:
        _deferred.append(number)


def _raise_all() -> None:
    """Raise the deferred signals; an exception from one handler does not prevent the next one."""
    if _deferred:
        try:
            signal.raise_signal(_deferred.pop(0))
        finally:
            _raise_all()
