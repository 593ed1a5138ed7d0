"""How long workers take to start, and what takes it, for `stats()` and the log.

The interpreter that unpickles the dataset (the template, or a worker that was not forked) measures it with `Stopwatch`,
and sends it with its first message. The main process keeps the slowest, and knows the time since ``iter()``.
"""

from __future__ import annotations

import contextlib
import importlib
import marshal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["SLOW_START_S", "Start", "Stopwatch"]

SLOW_START_S: Final = 5.0  # a start that takes longer gets a line in the log
NAMED_FROM: Final = 0.1  # the share of the start from which on a module is what it waited for
SHOWN, SHOWN_FROM_S = 3, 0.005  # modules
SENT: Final = 100
LIBRARIES: Final = frozenset({"site-packages", "dist-packages"})
_TORCH: Final = (
    "the transforms of gpuload.transforms, which run in the main process, and gpuload.read spare workers torch and "
    "torchvision"
)
REMEDIES: Final = {
    "torch": _TORCH,
    "torchvision": _TORCH,
    "datasets": "with gpuload.wrap(…) of plain columns workers read its table without it",
}
OTHERWISE: Final = (
    "if workers have no use for it, import it in the function that has; persistent_workers=True, the default, starts "
    "workers once"
)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of workers.

    Attributes:
        seconds: from ``iter()`` until each of them could take a chunk; 0.0: they cannot yet, or there are none.
        interpreter_s: loading Python, NumPy and gpuload.
        imports_s: importing what the dataset needs, by module, the slowest first. A library has what it imports
            itself, unless that was there before; the dataset's own modules do not have the libraries that they import.
        unpickling_s: unpickling the dataset, without imports. What is left of the seconds are `worker_init_fn`, and
            what the main process does: it pickles the dataset, and compiles kernels.
    """

    seconds: float = 0.0
    interpreter_s: float = 0.0
    imports_s: dict[str, float] = field(default_factory=dict)
    unpickling_s: float = 0.0

    @property
    def before_workers_s(self) -> float:
        """Seconds that the interpreter took that unpickled the dataset."""
        return self.interpreter_s + sum(self.imports_s.values()) + self.unpickling_s

    @classmethod
    def unpack(cls, message: bytes, started_at: float) -> Start:
        """Read what a `Stopwatch` packed in a process that was started at this time, monotonic seconds."""
        began_at, imports_s, unpickling_s = marshal.loads(message)  # of this session's own process
        return cls(0.0, max(0.0, began_at - started_at), imports_s, unpickling_s)

    def describe(self) -> str:
        """Say what took how long."""
        shown_s = {name: seconds for name, seconds in list(self.imports_s.items())[:SHOWN] if seconds >= SHOWN_FROM_S}
        imports_s = sum(self.imports_s.values())
        if (others_s := imports_s - sum(shown_s.values())) >= SHOWN_FROM_S:
            shown_s["others"] = others_s
        modules = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in shown_s.items())
        return (
            f"interpreter {self.interpreter_s:.2f} s, imports {imports_s:.2f} s"
            f"{f' ({modules})' if modules else ''}, unpickling {self.unpickling_s:.2f} s"
        )

    def advise(self) -> str:
        """Say which module took longest, and what would avoid that; "" if no module took much of the time."""
        name, seconds = max(self.imports_s.items(), key=lambda item: item[1], default=("", 0.0))
        if not name or seconds < NAMED_FROM * self.seconds:
            return ""
        return f"{name} took longest: {REMEDIES.get(name, OTHERWISE)}"


class Stopwatch:
    """Measures imports, and all else, while the dataset is unpickled.

    It takes the place of the function that Python calls for each module that is not imported yet, which is where
    ``-X importtime`` measures too: finders, specs and loaders are as without it. Other threads are not measured.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._imports_s: dict[str, float] = {}
        self._unpickling_s = 0.0
        self._within_s = 0.0  # of imports within the present one
        self._owner = ""  # the module that the present import counts for

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure what is done within this context."""
        importlib_, thread = importlib._bootstrap, threading.get_ident()  # pyright: ignore[reportAttributeAccessIssue]
        if not hasattr(importlib_, "_find_and_load"):  # a later Python may lack it: nothing is measured
            yield
            return
        find_and_load = importlib_._find_and_load

        def _find_and_load(name: str, import_: Callable[..., Any]) -> Any:
            if threading.get_ident() != thread:
                return find_and_load(name, import_)
            owner, before_s, begun = self._owner, self._within_s, self._clock()
            self._owner, self._within_s = _owner_of(name, owner), 0.0
            try:
                return find_and_load(name, import_)
            finally:
                seconds = self._clock() - begun
                self._imports_s[self._owner] = self._imports_s.get(self._owner, 0.0) + seconds - self._within_s
                self._owner, self._within_s = owner, before_s + seconds

        # Python leaves frames of importlib out of tracebacks, and of what `warnings` counts: this is one of them.
        _find_and_load.__code__ = _find_and_load.__code__.replace(co_filename=find_and_load.__code__.co_filename)
        importlib_._find_and_load = _find_and_load
        begun = self._clock()
        try:
            yield
        finally:
            importlib_._find_and_load = find_and_load
            self._unpickling_s += self._clock() - begun - self._within_s
            self._within_s = 0.0

    def pack(self) -> bytes:
        """Return what was measured, for `Start.unpack`."""
        slowest = sorted(self._imports_s.items(), key=lambda item: -item[1])[:SENT]
        return marshal.dumps((self._began_at, dict(slowest), self._unpickling_s))


def _owner_of(name: str, importer: str) -> str:
    """Return the top-level module that an import counts for, where it was called for within that of another one."""
    top = name.partition(".")[0]
    if importer and (top in sys.stdlib_module_names or _is_library(importer)):
        return importer
    return top


def _is_library(top: str) -> bool:
    """Whether a module that is imported, or about to be, was installed: gpuload itself imports for the user."""
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top != "gpuload" and not LIBRARIES.isdisjoint(file.split("/"))
