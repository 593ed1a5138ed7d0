"""Failed samples and dead workers: the options, substitutes, counts, and the log. This module runs in the main process,
and does not import torch.

A `Tally` and a `Deaths` exist for one epoch, an `ErrorLog` for the lifetime of a `Loader`.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from logging import getLogger
from typing import Final, Literal, get_args, overload

import numpy as np

from gpuload.checks import argument, check_fields, finite_number, integer, one_of
from gpuload.errors import ErrorRecord, TooManyErrors, WorkerError
from gpuload.rng import streams
from gpuload.rng.philox import epoch_key, uniforms

__all__ = ["Deaths", "ErrorLog", "Faults", "OnError", "Tally", "substitutes"]

OnError = Literal["raise", "skip", "replace"]

# Rates are computed over at least this many samples: otherwise one bad file among the first few would be a high rate.
RATE_OVER_SAMPLES: Final = 1000
SUBSTITUTES: Final = 64  # candidates per sample: even if 9 in 10 files are bad, all 64 are bad only once in 800 samples
LOG_RECORDS: Final = 10_000
logger = getLogger("gpuload.workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Options for failures: samples that fail and workers that die.

    Args:
        on_error: what happens to a sample that cannot be read, decoded or transformed, or that kills its workers:
            ``"raise"`` raises a `SampleError` when its batch is due; ``"skip"`` drops it, which makes its batch
            smaller; ``"replace"`` replaces it with another sample, drawn at random for its position in the epoch. With
            ``"skip"``, a batch that would be empty is filled as with ``"replace"``, so the number of batches stays the
            same.
        max_restarts: the maximum number of worker restarts in one epoch; one more death raises a `WorkerError`.
        max_error_rate: from 0 to 1, the fraction of an epoch's samples that may be skipped or replaced. Beyond it,
            `TooManyErrors` is raised, since the cause may be general, such as a missing mount. The rate is computed
            over at least 1,000 samples, so the default of 1% always allows 10 failures.

    Example:
        >>> Faults(on_error="skip")
        Faults(on_error='skip', max_restarts=10, max_error_rate=0.01)
    """

    on_error: OnError = argument(one_of, default="raise", choices=get_args(OnError))
    max_restarts: int = argument(integer, default=10, minimum=0)
    max_error_rate: float = argument(finite_number, default=0.01, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check_fields(self, "Faults")


def substitutes(seed: int, epoch: int, position: int, index: object, samples: int) -> Iterator[int]:
    """Yield the indices of the samples to try, one after another, in place of a failed sample.

    The indices depend only on the arguments, so the substitute is the same on resume and with any number of workers.

    Args:
        seed, epoch, position: the seed of the loader, and the epoch and position of the failed sample.
        index: the index of the failed sample, which itself is not yielded.
        samples: the size of the dataset.
    """
    fractions = uniforms(epoch_key(seed, epoch), np.array([position], np.int64), streams.SUBSTITUTES, SUBSTITUTES)[0]
    candidates = (int(fraction * samples) for fraction in fractions)
    # In a small dataset, the candidates repeat, so after them, all other samples are tried in turn.
    all_samples = range(samples) if samples <= SUBSTITUTES else ()
    seen = {index} if isinstance(index, int) else set[int]()
    for candidate in (*candidates, *all_samples):
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


class Tally:
    """A count of the samples that an epoch has requested, and of the failures among them."""

    def __init__(self, max_error_rate: float) -> None:
        self._max_error_rate = max_error_rate
        self._sample_count = 0
        self._last_errors: deque[ErrorRecord] = deque(maxlen=3)
        self.errors = 0

    def add(self, samples: int, errors: Sequence[ErrorRecord]) -> None:
        """Count the samples and failures of a chunk."""
        self._sample_count += samples
        self.errors += len(errors)
        self._last_errors.extend(errors)

    @property
    def is_exceeded(self) -> bool:
        """Return whether there are more failures than `max_error_rate` allows."""
        return self.errors > self._max_error_rate * max(self._sample_count, RATE_OVER_SAMPLES)

    def check(self) -> None:
        """Raise `TooManyErrors` if too many samples have failed; the message shows the last failures."""
        if self.is_exceeded:
            base = max(self._sample_count, RATE_OVER_SAMPLES)
            last_failures = "; ".join(record.describe() for record in self._last_errors)
            raise TooManyErrors(
                f"{self.errors} of {self._sample_count:,} samples of this epoch could not be loaded, more than "
                f"max_error_rate={self._max_error_rate:g} of {base:,} allows; the last failures: {last_failures}. "
                "Check that the files can still be reached; loader.errors lists the failures. To allow more of them, "
                "raise Faults(max_error_rate=…)"
            )


class Deaths:
    """The deaths of workers in an epoch. More than `max_restarts` deaths are an error.

    Attributes:
        causes: the cause of each death, with the sample that the worker was processing, if any.
        stack: the stack of the worker that died last; "" if it is not known.
    """

    def __init__(self, max_restarts: int = 10) -> None:
        self._max_restarts = max_restarts
        self.causes: list[str] = []
        self.stack = ""

    def add(self, cause: str, stack: str = "", process_name: str = "") -> None:
        """Count and log a death. Pass `process_name` if `cause` does not name the process.

        Raises:
            WorkerError: there were more than `max_restarts` deaths.
        """
        self.causes.append(cause)
        self.stack = stack
        if len(self.causes) <= self._max_restarts:
            logger.warning(
                "a worker died: %s; a new worker replaces it (death %d of this epoch, max_restarts=%d)",
                f"{process_name}: {cause}" if process_name else cause,
                len(self.causes),
                self._max_restarts,
            )
            return
        counts = Counter(self.causes).items()
        causes = "; ".join(f"{cause} ({count} times)" if count > 1 else cause for cause, count in counts)
        raise WorkerError(
            f"worker processes died {len(self.causes)} times in this epoch, more than "
            f"max_restarts={self._max_restarts} allows: {causes}. To find the cause, load these samples with "
            "num_workers=0, and check the machine's memory. To allow more deaths, raise Faults(max_restarts=…)"
            + (f"\n\nThe stack of the last worker:\n{stack}" if stack else "")
        )


class ErrorLog(Sequence[ErrorRecord]):
    """The records of the failed samples, in the order of their batches; only the latest 10,000 are stored.

    Attributes:
        total: the number of failed samples, including samples whose records are no longer stored.
    """

    def __init__(self) -> None:
        self.total = 0
        self._records: deque[ErrorRecord] = deque(maxlen=LOG_RECORDS)
        self._has_warned = False

    def extend(self, records: Sequence[ErrorRecord], *, warn: bool) -> None:
        """Add the failures of a batch. With `warn`, issue a warning for the first failure of this log, and only for
        this one."""
        self.total += len(records)
        self._records.extend(records)
        if warn and records and not self._has_warned:
            self._has_warned = True
            first = records[0]
            outcome = "skipped" if first.replaced_by is None else f"replaced by sample {first.replaced_by!r}"
            warnings.warn(
                f"{first.describe()}; it was {outcome}. Further failures are only recorded, in loader.errors",
                RuntimeWarning,
                stacklevel=5,  # the user's loop over the Loader
            )

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> ErrorRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[ErrorRecord]: ...
    def __getitem__(self, index: int | slice) -> ErrorRecord | list[ErrorRecord]:
        if isinstance(index, slice):
            return list(self._records)[index]
        return self._records[index]

    def __repr__(self) -> str:
        lines = "".join(f"\n  {record.describe()}" for record in islice(self._records, 20))
        omitted = f"\n  … and {len(self) - 20:,} more" if len(self) > 20 else ""
        return (
            f"<{self.total:,} failed sample{'' if self.total == 1 else 's'}{':' if self.total else ''}{lines}{omitted}>"
        )
