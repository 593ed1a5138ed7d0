"""The errors that users catch: each is a `GpuloadError`, and says what came, what was expected, where, and what to do.

Text from data (names of files, members, columns and classes, what libraries say of them) reaches a terminal through
`visible` alone: all text of a `GpuloadError` goes through it, as does what commands print; in other errors it is quoted
by `repr`, or goes through it where it is put in.

The error of a sample travels between processes as a value (`ErrorRecord`), never as an exception. It names the classes
of the exception behind it, and the `SampleError` that is raised is of that type too, as are a `CollateError` and a
`WorkerError`: so what a training loop catches from a DataLoader, it catches here.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = [
    "BackendError",
    "CollateError",
    "CompilerError",
    "DecodeError",
    "ErrorRecord",
    "GpuloadError",
    "LimitError",
    "SampleError",
    "TooManyErrors",
    "WorkerError",
    "closest",
    "import_optional",
    "kinds_of",
    "knows_arguments",
    "one_line",
    "visible",
]

LINES = "\n\t"  # what a text of several lines keeps
Function = TypeVar("Function", bound=Callable[..., Any])


class GpuloadError(Exception):
    """Base class of gpuload's errors, except for bad arguments, which are a `ValueError` or `TypeError`."""

    def __str__(self) -> str:
        return visible(super().__str__(), LINES)


class BackendError(GpuloadError, ImportError):
    """The chosen backend cannot be used here; the message says what is missing and how to get it."""


class CompilerError(BackendError):
    """Triton cannot compile kernels on this machine. Inside a `Loader` it becomes a warning, and the reference runs."""


class DecodeError(GpuloadError):
    """The bytes of an image cannot be decoded; the message says why, in the decoders' own words.

    Raised by `gpuload.decode`, and for files that are not read at all. Inside a `Loader` it becomes the cause of a
    `SampleError`.

    Attributes:
        filename: the file that was not read; else None.
    """

    filename: str | None = None


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """The names of an exception's classes, its own first, as ``"module:name"``; without those that all have."""
    classes = [kind for kind in type(error).__mro__ if issubclass(kind, Exception) and kind is not Exception]
    return tuple(f"{kind.__module__}:{kind.__qualname__}" for kind in classes)


class _Kind(GpuloadError):
    """An error that is also of the type of the exception behind it, as far as this process knows that type."""

    def __new__(cls, text: Any = "", kinds: Iterable[str] = ()) -> Any:
        for name in kinds:
            try:
                mixed = _mixed(cls, name)
                return super(_Kind, mixed).__new__(mixed, text)  # pyright: ignore[reportCallIssue]
            except Exception:  # not known here, or such that nothing else can be of that type
                continue
        return super().__new__(cls)

    def __init__(self, text: str = "", kinds: Iterable[str] = ()) -> None:
        Exception.__init__(self, text)  # not that type's own, which may want other arguments

    def __str__(self) -> str:
        return visible(str(self.args[0]), LINES)

    def __reduce__(self) -> tuple[Any, ...]:
        return CollateError, self.args


def _mixed(base: type[_Kind], name: str) -> Any:
    module, _, path = name.partition(":")
    kind: Any = functools.reduce(getattr, path.split("."), sys.modules[module])
    # A StopIteration from `__next__` would be a quiet end of the epoch.
    if (
        not issubclass(kind, Exception)
        or issubclass(kind, StopIteration | StopAsyncIteration)
        or issubclass(base, kind)
    ):
        raise TypeError(name)
    return type(base.__name__, (base, kind), {"__module__": base.__module__, "__qualname__": base.__qualname__})


class CollateError(_Kind):
    """Samples do not fit into one batch; the message names two that differ. Where a `collate_fn` or torch's own
    collation raised an exception, it is of that type too."""


class LimitError(GpuloadError):
    """A limit of the machine (open files, the control group's memory) would be exceeded; raised before it is."""


class WorkerError(_Kind, RuntimeError):
    """A worker process could not be started, or died more often than is allowed. Where the user's code raised an
    exception at its start (`worker_init_fn`, or while the dataset was unpacked), it is of that type too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerError, self.args


class TooManyErrors(GpuloadError):
    """More samples failed than `Faults.max_error_rate` allows, or every substitute for a sample failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """A failure of one sample, as plain values that travel from a worker to the main process.

    Attributes:
        epoch: the epoch's number.
        position: the sample's position in the epoch's global order.
        index: its index (or key) in the dataset.
        source: its path or other origin, if known.
        cause: one line, such as ``"DecodeError: not an image: …"``.
        traceback: of the process where it happened, as text.
        replaced_by: the index of the sample that was tried instead, or None.
        kinds: the names of the exception's classes, its own first, as ``"module:name"``.
    """

    epoch: int
    position: int
    index: object
    source: str | None
    cause: str
    traceback: str
    replaced_by: object = None
    kinds: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return which sample failed, and why, in one line."""
        origin = f" ({self.source})" if self.source else ""
        return visible(
            f"sample {self.index!r}{origin}, at position {self.position} of epoch {self.epoch}: {self.cause}"
        )


class SampleError(_Kind):
    """A sample could not be read, decoded or collated. It is of the type of the exception behind it too:
    ``except FileNotFoundError`` catches that of a file that is missing.

    Attributes:
        index: the sample's index (or key) in the dataset.
        position: its position in the epoch's global order.
        source: its path or other origin, if known.
        cause: one line that names the exception and its message.
        worker_traceback: the traceback of the process where it happened, as text.
    """

    # Also on the class, so that no property of that type is in the way.
    index: object = None
    position: int = -1
    source: str | None = None
    cause: str = ""
    worker_traceback: str = ""
    record: Any = None

    def __new__(cls, record: ErrorRecord) -> Any:
        return super().__new__(cls, record, record.kinds)

    def __init__(self, record: ErrorRecord) -> None:
        self.index = record.index
        self.position = record.position
        self.source = record.source
        self.cause = record.cause
        self.worker_traceback = record.traceback
        self.record = record
        where = f"sample {record.index!r}" + (f" ({record.source})" if record.source else "")
        text = f"{where}, at position {record.position} of the epoch, could not be loaded: {record.cause}"
        if record.traceback:
            text += f"\n\nWhere it happened:\n{record.traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type[SampleError], tuple[ErrorRecord]]:
        return (SampleError, (self.record,))


def visible(text: str | bytes, keep: str = "") -> str:
    r"""A text that a terminal may be given: what it would not print, or take for a command, is written out.

    Args:
        text: from anywhere; bytes are taken as UTF-8, as names of files are.
        keep: characters that stay, such as line breaks.

    Example:
        >>> print(visible("a\nb\udcff\x1b[31m\u202ec"), visible(b"\xff"))
        a\nb\xff\x1b[31m\u202ec \xff
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable() or c in keep
        else f"\\x{ord(c) - 0xDC00:02x}"
        if "\udc80" <= c <= "\udcff"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def one_line(text: str, limit: int = 300) -> str:
    """A message's lines joined into one of at most `limit` characters, which a terminal may be given."""
    joined = visible("; ".join(line.strip() for line in text.splitlines() if line.strip()))
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"


def knows_arguments(instead: Callable[[str], str | None]) -> Callable[[Function], Function]:
    """Decorate an ``__init__``, so that the error for an argument that it does not have says what to write.

    Args:
        instead: gives what takes the place of an argument of another library; None where nothing is known.
    """

    def decorate(init: Any) -> Any:
        code = init.__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        known = frozenset(names)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **arguments: Any) -> None:
            if not arguments.keys() <= known:
                unknown = next(name for name in arguments if name not in known)
                hint = instead(unknown) or closest(unknown, names) or f"its arguments: {', '.join(names) or 'none'}"
                raise TypeError(f"{init.__qualname__.split('.')[-2]} has no argument {unknown!r}; {hint}")
            init(self, *args, **arguments)

        return checked

    return decorate


def import_optional(module: str, called: str, extra: str) -> Any:
    """Import a module of an optional library, for what is `called` so.

    Raises:
        ModuleNotFoundError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"gpuload.{called} needs {library}, which is not installed: pip install 'gpuload[{extra}]'", name=library
        ) from error


def closest(name: str, names: Iterable[str]) -> str | None:
    """The question whether a name that is nearly the same was meant; None if no name is near."""
    import difflib

    plain = {known.lower().replace("_", ""): known for known in names}
    wanted = name.lower().replace("_", "")
    near = difflib.get_close_matches(wanted, plain, 1, 0.75)
    if not near and len(wanted) > 3:  # Solarize, for RandomSolarize
        near = [known for known in plain if known.endswith(wanted)]
    return f"did you mean {plain[near[0]]}?" if len(near) == 1 else None
