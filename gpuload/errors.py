"""The errors that users can catch. Each is a `GpuloadError` whose message gives the actual and the expected value,
the location, and a remedy.

Text from data (names of files, members, columns and classes, messages of libraries) must be escaped before it reaches a
terminal. `visible` does this for the text of every `GpuloadError` and for the output of commands. Other errors quote
such text with `repr` or escape it with `visible`.

The error of a sample travels between processes as a value (`ErrorRecord`), never as an exception. It contains
the name of the original exception's class, and the raised `SampleError` is also an instance of that class. The same
holds for `CollateError` and `WorkerError`, so a training loop's `except` clauses work as with a DataLoader.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
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
    "did_you_mean",
    "error_class_names",
    "explain_unknown_arguments",
    "import_optional",
    "list_some",
    "one_line",
    "short_repr",
    "visible",
]

UNESCAPED_WHITESPACE = "\n\t"  # characters that are not escaped in a multi-line text
Function = TypeVar("Function", bound=Callable[..., Any])


class GpuloadError(Exception):
    """Base class of gpuload's errors. Invalid arguments raise a `ValueError` or `TypeError` instead."""

    def __str__(self) -> str:
        return visible(super().__str__(), UNESCAPED_WHITESPACE)


class BackendError(GpuloadError, ImportError):
    """The requested backend cannot be used here; the message says what is missing and how to install it."""


class CompilerError(BackendError):
    """Triton cannot compile kernels on this machine. A `Loader` only warns, and runs the reference implementation."""


class DecodeError(GpuloadError):
    """The bytes of an image cannot be decoded; the message contains the decoders' messages.

    `gpuload.decode` raises this error, also for files that gpuload refuses to read. In a `Loader`, it becomes the cause
    of a `SampleError`.

    Attributes:
        filename: the path of the file that could not be read, or None.
    """

    filename: str | None = None


def error_class_names(error: BaseException) -> tuple[str, ...]:
    """Return the names of an exception's class and its base classes, as ``"module:name"``, without `Exception` and its
    bases."""
    classes = [base for base in type(error).__mro__ if issubclass(base, Exception) and base is not Exception]
    return tuple(f"{base.__module__}:{base.__qualname__}" for base in classes)


class _ForwardedError(GpuloadError):
    """An error that is also an instance of the original exception's class, if this process has imported that class."""

    def __new__(cls, text: Any = "", class_names: Iterable[str] = ()) -> Any:
        for class_name in class_names:
            try:
                combined = _combine_classes(cls, class_name)
                return super(_ForwardedError, combined).__new__(combined, text)  # pyright: ignore[reportCallIssue]
            except Exception:  # this process has not imported the class, or the class cannot be combined with others
                continue
        return super().__new__(cls)

    def __init__(self, text: str = "", class_names: Iterable[str] = ()) -> None:
        Exception.__init__(self, text)  # the original class's __init__ may need other arguments

    def __str__(self) -> str:
        return visible(str(self.args[0]), UNESCAPED_WHITESPACE)

    def __reduce__(self) -> tuple[Any, ...]:
        return CollateError, self.args


def _combine_classes(base: type[_ForwardedError], class_name: str) -> Any:
    module, _, path = class_name.partition(":")
    original: Any = functools.reduce(getattr, path.split("."), sys.modules[module])
    # A StopIteration from `__next__` would silently end the epoch.
    if (
        not issubclass(original, Exception)
        or issubclass(original, StopIteration | StopAsyncIteration)
        or issubclass(base, original)
    ):
        raise TypeError(class_name)
    return type(base.__name__, (base, original), {"__module__": base.__module__, "__qualname__": base.__qualname__})


class CollateError(_ForwardedError):
    """Samples do not fit into one batch; the message names two samples that differ. If a `collate_fn` or torch's
    collation raised an exception, this error is also an instance of its class."""


class LimitError(GpuloadError):
    """A limit of the machine (open files, processes, memory) would be exceeded; raised before that happens."""


class WorkerError(_ForwardedError, RuntimeError):
    """A worker process could not be started, or workers died too often. If the user's code raised an exception during
    the start (in `worker_init_fn`, or while the dataset was unpickled), this error is also an instance of its class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerError, self.args


class TooManyErrors(GpuloadError):
    """More samples failed than `Faults.max_error_rate` allows, or every substitute for a sample failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """The failure of one sample, as plain values that a worker can send to the main process.

    Attributes:
        epoch: the epoch's number.
        position: the sample's position in the epoch's global order.
        index: the sample's index (or key) in the dataset.
        source: the sample's path or other origin, if known.
        cause: one line, such as ``"DecodeError: not an image: …"``.
        traceback: the traceback in the process where the exception was raised, as text.
        replaced_by: the index of the sample that was tried instead, or None.
        kinds: the names of the exception's class and its base classes, as ``"module:name"``.
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
        """Describe the failed sample and the cause in one line."""
        origin = f" ({self.source})" if self.source else ""
        return visible(
            f"sample {self.index!r}{origin}, at position {self.position} of epoch {self.epoch}: {self.cause}"
        )


class SampleError(_ForwardedError):
    """A sample could not be read, decoded or collated. The error is also an instance of the original exception's class:
    ``except FileNotFoundError`` catches the error for a missing file.

    Attributes:
        index: the sample's index (or key) in the dataset.
        position: the sample's position in the epoch's global order.
        source: the sample's path or other origin, if known.
        cause: one line with the exception's class and message.
        worker_traceback: the traceback in the process where the exception was raised, as text.
    """

    # These defaults are set on the class, so that a property of the original class cannot shadow the attributes.
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
        sample = f"sample {record.index!r}" + (f" ({record.source})" if record.source else "")
        text = f"{sample}, at position {record.position} of the epoch, could not be loaded: {record.cause}"
        if record.traceback:
            text += f"\n\nWhere it happened:\n{record.traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type[SampleError], tuple[ErrorRecord]]:
        return (SampleError, (self.record,))


def visible(text: str | bytes, keep: str = "") -> str:
    r"""Escape all characters that are not printable, including terminal control sequences.

    Args:
        text: untrusted text; bytes are decoded as UTF-8, like file names.
        keep: characters that are not escaped, such as line breaks.

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
    """Join a message's lines into one escaped line of at most `limit` characters."""
    joined = visible("; ".join(line.strip() for line in text.splitlines() if line.strip()))
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"


def short_repr(value: Any, limit: int = 100) -> str:
    """Return the repr of a value for a message, in at most `limit` characters."""
    return one_line(repr(value), limit)


def list_some(
    items: Sequence[Any],
    limit: int,
    separator: str = ", ",
    last: str = " and ",
    describe: Callable[[Any], str] = str,
) -> str:
    """Join the texts of the first items for a message, with the number of the remaining items: ``a, b and 7 more``."""
    text = separator.join(map(describe, items[:limit]))
    return text if len(items) <= limit else f"{text}{last}{len(items) - limit:,} more"


def explain_unknown_arguments(
    suggest: Callable[[str], str | None], find_remedy: Callable[[tuple[Any, ...]], str | None] = lambda args: None
) -> Callable[[Function], Function]:
    """Return a decorator for an ``__init__`` whose error for an unknown argument suggests the right name.

    Args:
        suggest: returns advice for an argument name of another library; None if it does not know the name.
        find_remedy: returns the end of the message for an invalid argument, given the positional arguments, or None.
    """

    def decorate(init: Any) -> Any:
        code = init.__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        known_names = frozenset(names)

        @functools.wraps(init)
        def checked_init(self: Any, *args: Any, **arguments: Any) -> None:
            if not arguments.keys() <= known_names:
                unknown = next(name for name in arguments if name not in known_names)
                hint = (
                    suggest(unknown) or did_you_mean(unknown, names) or f"its arguments: {', '.join(names) or 'none'}"
                )
                raise TypeError(f"{init.__qualname__.split('.')[-2]} has no argument {unknown!r}; {hint}")
            try:
                init(self, *args, **arguments)
            except (TypeError, ValueError) as error:
                if (remedy := find_remedy(args)) is None:
                    raise
                raise type(error)(f"{error}; {remedy}") from None

        return checked_init

    return decorate


def import_optional(module: str, feature: str, extra: str) -> Any:
    """Import a module of an optional library that ``gpuload.{feature}`` needs.

    Raises:
        ModuleNotFoundError: the library is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"gpuload.{feature} needs {library}, which is not installed: pip install 'gpuload[{extra}]'", name=library
        ) from error


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Return the question "did you mean …?" for the most similar of `names`; None if no name is similar."""
    import difflib

    names_by_key = {candidate.lower().replace("_", ""): candidate for candidate in names}
    key = name.lower().replace("_", "")
    similar_keys = difflib.get_close_matches(key, names_by_key, 1, 0.75)
    if not similar_keys and len(key) > 3:  # Solarize matches RandomSolarize
        similar_keys = [candidate for candidate in names_by_key if candidate.endswith(key)]
    return f"did you mean {names_by_key[similar_keys[0]]}?" if len(similar_keys) == 1 else None
