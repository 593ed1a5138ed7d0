"""How long workers take to start, by phase, for `stats()` and the log.

The interpreter that unpickles the dataset (the template, or a worker that was not forked) measures its start with a
`Stopwatch`, and sends the times with its first message. The main process records the slowest start, and adds the total
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

__all__ = ["LIBRARIES", "SLOW_START_S", "Start", "Stopwatch"]

SLOW_START_S: Final = 5.0  # a start that takes longer gets a line in the log
MIN_ADVISED_SHARE: Final = 0.1  # there is no advice on modules that took a smaller share of the start time
MAX_SHOWN, MIN_SHOWN_S = 3, 0.005  # the maximum number of modules in the log, and their minimum time
MAX_SENT: Final = 100  # the maximum number of modules that are sent to the main process
LIBRARIES: Final = frozenset({"site-packages", "dist-packages"})
_TORCH: Final = (
    "use gpuload.read and the transforms in gpuload.transforms, which run in the main process, so that workers need "
    "neither torch nor torchvision"
)
REMEDIES: Final = {
    "torch": _TORCH,
    "torchvision": _TORCH,
    "datasets": "use gpuload.wrap(…) with plain columns, so that workers read the table without this package",
}
DEFAULT_REMEDY: Final = (
    "if workers do not need it, import it in the function that uses it; use persistent_workers=True, the default, to "
    "start workers only once"
)


@dataclass(frozen=True, slots=True)
class Start:
    """How long workers took to start, in seconds.

    Attributes:
        seconds: the time from ``iter()`` until every worker could take a chunk; 0.0 if not all are ready, or if there
            are no workers.
        interpreter_s: the time for loading Python, NumPy and gpuload.
        imports_s: the times for importing the modules that the dataset needs, keyed by module, the slowest first. A
            library's time includes the modules that the library imports, unless they were loaded before. The time of
            the user's modules does not include the libraries that these modules import.
        unpickling_s: the time spent unpickling the dataset, excluding imports. The rest of `seconds` is the time of
            `worker_init_fn` and of the main process, which pickles the dataset and compiles kernels.
    """

    seconds: float = 0.0
    interpreter_s: float = 0.0
    imports_s: dict[str, float] = field(default_factory=dict)
    unpickling_s: float = 0.0

    @property
    def interpreter_start_s(self) -> float:
        """The start time of the interpreter that unpickled the dataset, in seconds."""
        return self.interpreter_s + sum(self.imports_s.values()) + self.unpickling_s

    @classmethod
    def unpack(cls, message: bytes, started_at: float) -> Start:
        """Unpack the times from the `Stopwatch` of a process that was started at `started_at`, in monotonic seconds."""
        stopwatch_started_at, imports_s, unpickling_s = marshal.loads(message)  # sent by this session's own process
        return cls(0.0, max(0.0, stopwatch_started_at - started_at), imports_s, unpickling_s)

    def describe(self) -> str:
        """Return the time of each part, as text."""
        shown_s = {
            name: seconds for name, seconds in list(self.imports_s.items())[:MAX_SHOWN] if seconds >= MIN_SHOWN_S
        }
        imports_s = sum(self.imports_s.values())
        if (other_modules_s := imports_s - sum(shown_s.values())) >= MIN_SHOWN_S:
            shown_s["others"] = other_modules_s
        modules = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in shown_s.items())
        return (
            f"interpreter {self.interpreter_s:.2f} s, imports {imports_s:.2f} s"
            f"{f' ({modules})' if modules else ''}, unpickling {self.unpickling_s:.2f} s"
        )

    def advise(self) -> str:
        """Return the slowest module and a remedy, as text; "" if no module took a large share of the time."""
        name, seconds = max(self.imports_s.items(), key=lambda item: item[1], default=("", 0.0))
        if not name or seconds < MIN_ADVISED_SHARE * self.seconds:
            return ""
        return f"{name} took longest: {REMEDIES.get(name, DEFAULT_REMEDY)}"


class Stopwatch:
    """A stopwatch that measures how long it takes to unpickle the dataset, and how long each import takes meanwhile.

    It wraps the function that Python calls for each module that is not imported yet, and that ``-X importtime``
    measures too. So finders, specs and loaders are not affected. Other threads are not measured.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._imports_s: dict[str, float] = {}
        self._unpickling_s = 0.0
        self._nested_s = 0.0  # the time of imports within the current import
        self._owner = ""  # the module to which the time of the current import is added

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the code within this context."""
        bootstrap, thread = importlib._bootstrap, threading.get_ident()  # pyright: ignore[reportAttributeAccessIssue]
        if not hasattr(bootstrap, "_find_and_load"):  # a later Python may lack this function: measure nothing
            yield
            return
        find_and_load = bootstrap._find_and_load

        def _find_and_load(name: str, import_: Callable[..., object]) -> Any:
            if threading.get_ident() != thread:
                return find_and_load(name, import_)
            outer_owner, outer_nested_s, start = self._owner, self._nested_s, self._clock()
            self._owner, self._nested_s = _owner_of(name, outer_owner), 0.0
            try:
                return find_and_load(name, import_)
            finally:
                seconds = self._clock() - start
                self._imports_s[self._owner] = self._imports_s.get(self._owner, 0.0) + seconds - self._nested_s
                self._owner, self._nested_s = outer_owner, outer_nested_s + seconds

        # Python hides importlib's frames in tracebacks and from `stacklevel`. This hides the wrapper's frame too.
        _find_and_load.__code__ = _find_and_load.__code__.replace(co_filename=find_and_load.__code__.co_filename)
        bootstrap._find_and_load = _find_and_load
        start = self._clock()
        try:
            yield
        finally:
            bootstrap._find_and_load = find_and_load
            self._unpickling_s += self._clock() - start - self._nested_s
            self._nested_s = 0.0

    def add(self, other: Stopwatch, ended_at: float, began_at: float) -> None:
        """Add what another stopwatch, which ended at `ended_at`, has measured since `began_at`, in monotonic seconds;
        the share of each import is an estimate."""
        share = (ended_at - max(began_at, other._began_at)) / (ended_at - other._began_at)
        for owner, seconds in other._imports_s.items():
            self._imports_s[owner] = self._imports_s.get(owner, 0.0) + share * seconds
            self._began_at -= share * seconds

    def pack(self) -> bytes:
        """Return the measured times, for `Start.unpack`."""
        slowest = sorted(self._imports_s.items(), key=lambda item: -item[1])[:MAX_SENT]
        return marshal.dumps((self._began_at, dict(slowest), self._unpickling_s))


def _owner_of(name: str, importer: str) -> str:
    """Return the top-level module to which the time of an import is added. `importer` is the result of this
    function for the enclosing import; "" if there is none."""
    top = name.partition(".")[0]
    if importer and (top in sys.stdlib_module_names or _is_library(importer)):
        return importer
    return top


def _is_library(top: str) -> bool:
    """Return whether a module belongs to an installed package. gpuload does not count, since it imports modules on
    behalf of the user."""
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top != "gpuload" and not LIBRARIES.isdisjoint(file.split("/"))
