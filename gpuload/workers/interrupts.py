"""Holding interrupts off: what must not be left half done is finished before a ctrl-C is heard.

Python runs the handler of a signal between any two instructions of the main thread, and what the handler raises leaves
the program there: between a process that was started and the line that remembers it. Blocking the signal in the thread
does not help: the kernel gives it to another thread, of torch's say, and Python runs the handler in the main thread all
the same. So for a while the handlers are replaced by one that remembers, and afterwards the signals are raised again.

Used in any thread; outside of the main one, where no handler ever runs, it changes nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["finalizing", "held", "let_through"]

# Those whose handlers, where a program sets one, may raise: ctrl-C, the ends that schedulers announce, time limits.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
LATER_S = 0.01
_in_force: list[held] = []  # of the main thread, the innermost last


class held:
    """A context in which no handler of a signal runs. Those that came are raised at its end.

    Args:
        deaf: forget a ctrl-C that would raise `KeyboardInterrupt`: one is on its way already, or the program ends.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        self._deaf = deaf
        self._handlers: dict[int, Any] = {}
        self._came: list[Any] = []  # of signal numbers

    def __enter__(self) -> held:
        if threading.current_thread() is threading.main_thread():
            try:
                _in_force.append(self)
                self.install()
            except BaseException:  # of a handler that ran before it was replaced
                self.leave()
                raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        _raise_each(self.leave())

    def leave(self) -> list[Any]:
        """End it; returns the signals that came."""
        if self in _in_force:
            try:
                self.restore()
            finally:
                _in_force.remove(self)
        if self._deaf and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._came = [number for number in self._came if number != signal.SIGINT]
        return self.take()

    def take(self) -> list[Any]:
        """The signals that came, to be remembered no longer."""
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
            if signal.getsignal(number) == self._remember:  # else somebody has set another one meanwhile
                signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        if number not in self._came:
            self._came.append(number)


@contextlib.contextmanager
def let_through() -> Iterator[None]:
    """Inside of `held`, a context in which handlers run as ever: around code that may take long, and can be left."""
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
    """Do the work of a finalizer, a `__del__` say; what comes meanwhile is raised in the program behind it.

    What a handler raises in a finalizer is printed and forgotten, and the ctrl-C is lost. It is the same in all others
    that run until the last object is gone that goes with this one. So the signal is sent anew a moment later, by a
    thread that does nothing else: the only one that this package starts, and only if a signal came.
    """
    hold = held().__enter__()
    try:
        work()
    finally:
        for number in hold.leave():
            timer = threading.Timer(LATER_S, signal.pthread_kill, (threading.get_ident(), number))
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no more threads
                timer.start()


def _raise_each(numbers: list[int]) -> None:
    """Raise these signals; what the handler of one raises does not keep the next one from running."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_each(numbers[1:])
