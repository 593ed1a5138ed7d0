"""Holding interrupts off: work that must not be left half done is completed before a ctrl-C takes effect.

Python runs a signal's handler between any two instructions of the main thread, and an exception from it leaves the
program there: between starting a process and the line that stores it, say. Blocking the signal in the thread does not
help: the kernel gives it to another thread, one of torch's say, and Python still runs the handler in the main thread.
So for a while the handlers are replaced by one that takes a note, and afterwards the signals are raised again.

Works in any thread; outside the main one, where no handler ever runs, it does nothing.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["finalizing", "held", "let_through"]

# Signals whose handlers may raise, if a program sets one: ctrl-C, warnings of a scheduler, time limits.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
LATER_S = 0.01
_in_force: list[held] = []  # in the main thread, the innermost last


class held:
    """A context in which no signal handler runs. Signals that came are raised at its end.

    Args:
        deaf: forget a ctrl-C that would raise `KeyboardInterrupt`: one is being raised already, or the program ends.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        self._deaf = deaf
        self._handlers: dict[int, Any] = {}
        self._came: list[Any] = []  # signal numbers

    def __enter__(self) -> held:
        if threading.current_thread() is threading.main_thread():
            try:
                _in_force.append(self)
                self.install()
            except BaseException:  # from a handler that ran before it was replaced
                self.leave()
                raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        _raise_each(self.leave())

    def leave(self) -> list[Any]:
        """End the context; returns the signals that came."""
        if self in _in_force:
            try:
                self.restore()
            finally:
                _in_force.remove(self)
        if self._deaf and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._came = [number for number in self._came if number != signal.SIGINT]
        return self.take()

    def take(self) -> list[Any]:
        """Return the signals that came, and forget them."""
        came, self._came = self._came, []
        return came

    def install(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                with contextlib.suppress(ValueError):  # in a subinterpreter, which has no signals
                    self._handlers[number] = handler
                    signal.signal(number, self._remember)

    def restore(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._remember:  # else another one was set meanwhile
                signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        if number not in self._came:
            self._came.append(number)


@contextlib.contextmanager
def let_through() -> Iterator[None]:
    """A context inside `held` in which handlers run: around code that may take long and can be interrupted."""
    holds = list(_in_force) if threading.current_thread() is threading.main_thread() else []
    came = [number for hold in holds for number in hold.take()]
    try:
        for hold in reversed(holds):
            hold.restore()
        _raise_each(came)
        yield
    finally:
        for hold in holds:
            hold.install()


def finalizing(work: Callable[[], object]) -> None:
    """Do the work of a finalizer, such as `__del__`; signals that come meanwhile are raised after it.

    Python prints what a handler raises in a finalizer and forgets it, and the ctrl-C is lost; the same happens in the
    finalizers of all objects that are freed along with this one. So the signal is sent again when no finalizer runs,
    by a thread that does nothing else: the only one that this package starts, and only if a signal came.
    """
    hold = held().__enter__()
    try:
        work()
    finally:
        if came := hold.leave():
            thread = threading.Thread(target=_send_later, args=(threading.get_ident(), came), daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
                thread.start()


def _send_later(thread: int, numbers: list[int]) -> None:
    """Send these signals to a thread, when it is in no finalizer."""
    time.sleep(LATER_S)
    while _is_finalizing(thread):
        time.sleep(LATER_S)
    for number in numbers:
        signal.pthread_kill(thread, number)


def _is_finalizing(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not finalizing.__code__ and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _raise_each(numbers: list[int]) -> None:
    """Raise these signals; an exception from one handler does not stop the next one."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_each(numbers[1:])
