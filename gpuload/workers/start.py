"""The start time of workers and its parts, for `stats()` and the log.

The interpreter that unpickles the dataset (the template, or a worker that was not forked) measures its start with a
`Stopwatch`, and sends the times with its first message. The main process keeps the slowest start, and adds the total
time since ``iter()``.
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
MIN_ADVISED_SHARE: Final = 0.1  # of the start time; there is no advice for modules that took less
SHOWN, MIN_SHOWN_S = 3, 0.005  # the modules in the log: their number, and their minimum time
MAX_SENT: Final = 100  # the number of modules that are sent to the main process
LIBRARIES: Final = frozenset({"site-packages", "dist-packages"})
_TORCH: Final = (
    "with the transforms of gpuload.transforms, which run in the main process, and gpuload.read, workers need no torch "
    "and torchvision"
)
REMEDIES: Final = {
    "torch": _TORCH,
    "torchvision": _TORCH,
    "datasets": "with gpuload.wrap(…) of plain columns, workers read the table without this package",
}
DEFAULT_REMEDY: Final = (
    "if workers do not need it, import it in the function that does; persistent_workers=True, the default, starts "
    "workers only once"
)


@dataclass(frozen=True, slots=True)
class Start:
    """The start time of workers, in seconds.

    Attributes:
        seconds: the time from ``iter()`` until every worker could take a chunk; 0.0 if not all are ready, or if there
            are no workers.
        interpreter_s: the time for loading Python, NumPy and gpuload.
        imports_s: the times for importing the modules that the dataset needs, keyed by module, the slowest first. The
            time of a library includes its own imports, unless they were loaded before. The time of the dataset's own
            modules does not include the libraries that they import.
        unpickling_s: the time for unpickling the dataset, without imports. The remaining time is `worker_init_fn` and
            the work of the main process, which pickles the dataset and compiles kernels.
    """

    seconds: float = 0.0
    interpreter_s: float = 0.0
    imports_s: dict[str, float] = field(default_factory=dict)
    unpickling_s: float = 0.0

    @property
    def before_workers_s(self) -> float:
        """The start time of the interpreter that unpickled the dataset, in seconds."""
        return self.interpreter_s + sum(self.imports_s.values()) + self.unpickling_s

    @classmethod
    def unpack(cls, message: bytes, started_at: float) -> Start:
        """Unpack the times from the `Stopwatch` of a process that was started at `started_at`, in monotonic seconds."""
        began_at, imports_s, unpickling_s = marshal.loads(message)  # sent by this session's own process
        return cls(0.0, max(0.0, began_at - started_at), imports_s, unpickling_s)

    def describe(self) -> str:
        """Return a text with the time of each part."""
        shown_s = {name: seconds for name, seconds in list(self.imports_s.items())[:SHOWN] if seconds >= MIN_SHOWN_S}
        imports_s = sum(self.imports_s.values())
        if (other_modules_s := imports_s - sum(shown_s.values())) >= MIN_SHOWN_S:
            shown_s["others"] = other_modules_s
        modules = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in shown_s.items())
        return (
            f"interpreter {self.interpreter_s:.2f} s, imports {imports_s:.2f} s"
            f"{f' ({modules})' if modules else ''}, unpickling {self.unpickling_s:.2f} s"
        )

    def advise(self) -> str:
        """Return a text with the slowest module and a remedy; "" if no module took much of the time."""
        name, seconds = max(self.imports_s.items(), key=lambda item: item[1], default=("", 0.0))
        if not name or seconds < MIN_ADVISED_SHARE * self.seconds:
            return ""
        return f"{name} took longest: {REMEDIES.get(name, DEFAULT_REMEDY)}"


class Stopwatch:
    """A stopwatch for the unpickling of the dataset and the imports during it.

    It wraps the function that Python calls for each module that is not imported yet, which ``-X importtime`` also
    measures. So finders, specs and loaders are unaffected. Other threads are not measured.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._imports_s: dict[str, float] = {}
        self._unpickling_s = 0.0
        self._nested_s = 0.0  # the time of imports within the current import
        self._owner = ""  # the module that the current import counts for

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure the code within this context."""
        importlib_, thread = importlib._bootstrap, threading.get_ident()  # pyright: ignore[reportAttributeAccessIssue]
        if not hasattr(importlib_, "_find_and_load"):  # if a later Python lacks it, measure nothing
            yield
            return
        find_and_load = importlib_._find_and_load

        def _find_and_load(name: str, import_: Callable[..., Any]) -> Any:
            if threading.get_ident() != thread:
                return find_and_load(name, import_)
            owner, before_s, start = self._owner, self._nested_s, self._clock()
            self._owner, self._nested_s = _owner_of(name, owner), 0.0
            try:
                return find_and_load(name, import_)
            finally:
                seconds = self._clock() - start
                self._imports_s[self._owner] = self._imports_s.get(self._owner, 0.0) + seconds - self._nested_s
                self._owner, self._nested_s = owner, before_s + seconds

        # Python hides frames of importlib in tracebacks and from `stacklevel`; this hides the function's frame too.
        _find_and_load.__code__ = _find_and_load.__code__.replace(co_filename=find_and_load.__code__.co_filename)
        importlib_._find_and_load = _find_and_load
        start = self._clock()
        try:
            yield
        finally:
            importlib_._find_and_load = find_and_load
            self._unpickling_s += self._clock() - start - self._nested_s
            self._nested_s = 0.0

    def pack(self) -> bytes:
        """Return the measured times, for `Start.unpack`."""
        slowest = sorted(self._imports_s.items(), key=lambda item: -item[1])[:MAX_SENT]
        return marshal.dumps((self._began_at, dict(slowest), self._unpickling_s))


def _owner_of(name: str, importer: str) -> str:
    """Return the top-level module that an import counts for, given the importer that it is nested in, or ""."""
    top = name.partition(".")[0]
    if importer and (top in sys.stdlib_module_names or _is_library(importer)):
        return importer
    return top


def _is_library(top: str) -> bool:
    """Return whether a module belongs to an installed package other than gpuload, which imports for the user."""
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top != "gpuload" and not LIBRARIES.isdisjoint(file.split("/"))
