"""Deferred signals: a ctrl-C takes effect only after code that must not be interrupted half-way has completed.

Python runs a signal's handler between any two instructions of the main thread, and an exception from the handler
interrupts the program there. For example, if this happened between starting a process and storing it, nobody would end
the process. Blocking the signal in the main thread does not help: the kernel delivers it to another thread, perhaps one
of torch's, and Python still runs the handler in the main thread. So `deferred_signals` replaces the handlers by a
function that records the signals, and raises the recorded signals again afterwards.

The contexts can be used in any thread. Outside the main thread, where handlers never run, they do nothing. If
`deferred_signals` ends within a finalizer, Python only prints an exception from a handler, so such a ctrl-C is lost.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["deferred_signals", "signals_enabled"]

# Signals for which programs set handlers that raise exceptions: ctrl-C, a scheduler's warnings, time limits.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
# Only the main thread uses these.
_handlers: dict[int, Any] = {}  # the program's handlers, keyed by signal; empty while signals are not deferred
_deferred_signals: list[Any] = []  # the numbers of the signals that have arrived while signals were deferred


@contextlib.contextmanager
def deferred_signals(*, drop_sigint: bool = False) -> Iterator[None]:
    """Defer signals within this context. They are raised at its end or, if contexts are nested, at the end of the
    outermost context.

    Args:
        drop_sigint: whether to drop a ctrl-C that would raise `KeyboardInterrupt`, for use while another
            `KeyboardInterrupt` is being raised or the program is ending.
    """
    if threading.current_thread() is not threading.main_thread() or _handlers:
        yield
        return
    _deferred_signals.clear()
    try:
        _replace_handlers()
        yield
    finally:
        try:
            _restore_handlers()
        finally:
            if drop_sigint and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                _deferred_signals[:] = [number for number in _deferred_signals if number != signal.SIGINT]
            _raise_deferred()


@contextlib.contextmanager
def signals_enabled() -> Iterator[None]:
    """Enable the handlers again within `deferred_signals`, for code that may take long and can be interrupted
    safely."""
    if threading.current_thread() is not threading.main_thread() or not _handlers:
        yield
        return
    try:
        _restore_handlers()
        _raise_deferred()
        yield
    finally:
        _replace_handlers()


def _replace_handlers() -> None:
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            with contextlib.suppress(ValueError):  # raised in a subinterpreter, which cannot handle signals
                _handlers[number] = handler
                signal.signal(number, _record_signal)


def _restore_handlers() -> None:
    """Restore all handlers, even if a restored handler raises an exception immediately."""
    try:
        for number, handler in list(_handlers.items()):
            if signal.getsignal(number) is _record_signal:  # if not, the program has set another handler
                signal.signal(number, handler)
            del _handlers[number]
    finally:
        if _handlers:
            _restore_handlers()


def _record_signal(number: int, frame: object) -> None:
    if number not in _deferred_signals:
        _deferred_signals.append(number)


def _raise_deferred() -> None:
    """Raise the deferred signals; an exception from one handler does not prevent the next one."""
    if _deferred_signals:
        try:
            signal.raise_signal(_deferred_signals.pop(0))
        finally:
            _raise_deferred()
