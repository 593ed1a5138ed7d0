"""From an exception to the record of a failed sample: plain values, which a worker can send. Keeps nothing."""

from __future__ import annotations

import traceback
from typing import Any, Final

import numpy as np

from gpuload.errors import LINES, DecodeError, ErrorRecord, kinds_of, one_line, visible

__all__ = ["MAX_CAUSE", "MAX_TRACEBACK", "record_of", "text_of", "traceback_of"]

# How many characters of an error's text are kept: there may be thousands of records.
MAX_CAUSE: Final = 1000
MAX_TRACEBACK: Final = 8000


def record_of(
    epoch: int, position: Any, index: Any, source: str | None, error: BaseException, place: str = ""
) -> ErrorRecord:
    """The record of the sample at a position, whose images came from `source`; `place` is where in the sample the image
    is that failed."""
    if source is None and isinstance(error, OSError | DecodeError) and isinstance(error.filename, str):
        source = error.filename
    return ErrorRecord(
        epoch=epoch,
        position=int(position),
        index=int(index) if isinstance(index, np.integer) else index,
        source=source,
        cause=one_line(f"{type(error).__name__}: {text_of(error)}", MAX_CAUSE)
        + (f" (in {place})" if place not in ("", "sample") else ""),
        traceback=traceback_of(error),
        kinds=kinds_of(error),
    )


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception, with the exceptions behind it, which a terminal may be given."""
    return visible("".join(traceback.format_exception(error)), LINES)[-MAX_TRACEBACK:]


def text_of(error: BaseException) -> str:
    """What an exception says; it may be of a class of the user's own, which cannot."""
    try:
        return str(error)
    except Exception as worse:
        return f"(its text is not available: {type(worse).__name__})"
