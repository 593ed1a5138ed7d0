"""The errors that users catch: each is a `GpuloadError`, and says what came, what was expected, where, and what to do.

The error of a sample travels between processes as a value (`ErrorRecord`), never as an exception.
"""

from __future__ import annotations

from dataclasses import dataclass

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
]


class GpuloadError(Exception):
    """Base class of gpuload's errors, except for bad arguments, which are a `ValueError` or `TypeError`."""


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


class CollateError(GpuloadError):
    """Samples do not fit into one batch; the message names two that differ."""


class LimitError(GpuloadError):
    """A limit of the machine (open files, the control group's memory) would be exceeded; raised before it is."""


class WorkerError(GpuloadError):
    """A worker process could not be started, or died more often than is allowed."""


class TooManyErrors(GpuloadError):
    """More samples failed than `Faults.max_error_rate` allows, or every substitute for a sample failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """What went wrong with one sample, as plain values that travel from a worker to the main process.

    Attributes:
        epoch: the epoch's number.
        position: the sample's position in the epoch's global order.
        index: its index (or key) in the dataset.
        source: its path or other origin, if known.
        cause: one line, such as ``"DecodeError: not an image: …"``.
        traceback: of the process where it happened, as text.
        replaced_by: the index of the sample that was tried instead, or None.
    """

    epoch: int
    position: int
    index: object
    source: str | None
    cause: str
    traceback: str
    replaced_by: object = None

    def describe(self) -> str:
        """Which sample failed, and why, in one line."""
        origin = f" ({self.source})" if self.source else ""
        return f"sample {self.index!r}{origin}, at position {self.position} of epoch {self.epoch}: {self.cause}"


class SampleError(GpuloadError):
    """One sample could not be read, decoded or collated.

    Attributes:
        index: the sample's index (or key) in the dataset.
        position: its position in the epoch's global order.
        source: its path or other origin, if known.
        cause: one line that names the exception and its message.
        worker_traceback: the traceback of the process where it happened, as text.
    """

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


def one_line(text: str, limit: int = 300) -> str:
    """A message's lines joined into one of at most `limit` characters."""
    joined = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"
