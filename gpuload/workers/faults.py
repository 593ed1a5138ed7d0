"""Failed samples and dead workers: the options, substitutes, counts, and the log. Runs in the main process, and imports
no torch.

A `Tally` and a `Deaths` last for an epoch, an `ErrorLog` for the lifetime of a `Loader`.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from logging import getLogger
from typing import Any, Final, Literal, get_args, overload

import numpy as np

from gpuload.errors import ErrorRecord, TooManyErrors, WorkerError
from gpuload.rng import streams
from gpuload.rng.philox import epoch_key, uniforms

__all__ = ["Deaths", "ErrorLog", "Faults", "OnError", "Tally", "substitutes"]

OnError = Literal["raise", "skip", "replace"]

RATE_OVER_SAMPLES: Final = 1000  # the least number of samples in a rate: a bad file among a few would be a high rate
SUBSTITUTES: Final = 64  # candidates per sample: if nine files in ten are bad, all 64 candidates are bad once in 800
LOG_RECORDS: Final = 10_000
logger = getLogger("gpuload.workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Options for failures: samples that fail and workers that die.

    Args:
        on_error: what happens to a sample that cannot be read, decoded or transformed, or that kills its workers:
            ``"raise"`` raises a `SampleError` when its batch is due; ``"skip"`` drops it, which makes its batch
            smaller; ``"replace"`` replaces it with another sample, drawn from its position in the epoch. A batch that
            would be empty is filled as with ``"replace"``, so the number of batches stays the same.
        max_restarts: the maximum number of worker restarts in one epoch; one more death raises a `WorkerError`.
        max_error_rate: from 0 to 1, the fraction of an epoch's samples that may be skipped or replaced before
            `TooManyErrors` is raised, which detects causes such as a missing mount. The rate is computed over at least
            1,000 samples, so the default of 1% always allows 10 failures.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> Faults(on_error="skip")
        Faults(on_error='skip', max_restarts=10, max_error_rate=0.01)
    """

    on_error: OnError = "raise"
    max_restarts: int = 10
    max_error_rate: float = 0.01

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise ValueError(
                f"on_error must be one of {', '.join(map(repr, get_args(OnError)))}, got {self.on_error!r}"
            )
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int):
            raise TypeError(f"Faults(max_restarts=…) must be an integer, got {self.max_restarts!r}")
        if self.max_restarts < 0:
            raise ValueError(f"Faults(max_restarts=…) must be at least 0, got {self.max_restarts}")
        if isinstance(self.max_error_rate, bool) or not isinstance(self.max_error_rate, int | float):
            raise TypeError(f"Faults(max_error_rate=…) must be a number from 0 to 1, got {self.max_error_rate!r}")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"Faults(max_error_rate=…) must be from 0 to 1, got {self.max_error_rate}")


def substitutes(seed: int, epoch: int, position: int, index: Any, samples: int) -> Iterator[int]:
    """Yield the indices of substitutes to try, one after another, for a failed sample.

    The indices depend only on the arguments, so the substitute is the same on resume and with any number of workers.

    Args:
        seed, epoch, position: the seed of the loader, and the epoch and position of the failed sample.
        index: the index of the failed sample, which is not yielded.
        samples: the size of the dataset.
    """
    numbers = uniforms(epoch_key(seed, epoch), np.array([position], np.int64), streams.SUBSTITUTES, SUBSTITUTES)[0]
    candidates = (int(number * samples) for number in numbers)
    # In a small dataset, draws repeat, so all other samples are tried in turn after them.
    all_samples = range(samples) if samples <= SUBSTITUTES else ()
    seen = {index} if isinstance(index, int) else set[int]()
    for candidate in (*candidates, *all_samples):
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


class Tally:
    """The number of samples that an epoch has requested, and the number of failures among them."""

    def __init__(self, max_error_rate: float) -> None:
        self._max_error_rate = max_error_rate
        self._samples = 0
        self._last: deque[ErrorRecord] = deque(maxlen=3)
        self.errors = 0

    def add(self, samples: int, errors: Sequence[ErrorRecord]) -> None:
        """Count the samples and failures of a chunk."""
        self._samples += samples
        self.errors += len(errors)
        self._last.extend(errors)

    @property
    def exceeded(self) -> bool:
        return self.errors > self._max_error_rate * max(self._samples, RATE_OVER_SAMPLES)

    def check(self) -> None:
        """Raise `TooManyErrors` if too many samples have failed; the message shows the last failures."""
        if self.exceeded:
            base = max(self._samples, RATE_OVER_SAMPLES)
            shown = "; ".join(record.describe() for record in self._last)
            raise TooManyErrors(
                f"{self.errors} of {self._samples:,} samples of this epoch could not be loaded, more than "
                f"max_error_rate={self._max_error_rate:g} of {base:,} allows; the last failures: {shown}. "
                "Check whether the files can still be reached; loader.errors lists the failures, and "
                "Faults(max_error_rate=…) allows more of them"
            )


class Deaths:
    """The deaths of workers in an epoch; more than `max_restarts` of them are an error.

    Attributes:
        causes: the cause of each death, with the sample that the worker was processing, if any.
        stack: the stack of the worker that died last, if it is known.
    """

    def __init__(self, max_restarts: int = 10) -> None:
        self._max_restarts = max_restarts
        self.causes: list[str] = []
        self.stack = ""

    def add(self, cause: str, stack: str = "", process_name: str = "") -> None:
        """Count and log a death; give `process_name` if `cause` does not name the process.

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
            f"max_restarts={self._max_restarts} allows: {causes}. Load these samples with "
            "num_workers=0, and check the machine's memory; Faults(max_restarts=…) allows more"
            + (f"\n\nThe stack of the last worker:\n{stack}" if stack else "")
        )


class ErrorLog(Sequence[ErrorRecord]):
    """The failed samples, in the order of their batches; the latest 10,000 are kept.

    Attributes:
        total: the number of failed samples, including those no longer kept.
    """

    def __init__(self) -> None:
        self.total = 0
        self._records: deque[ErrorRecord] = deque(maxlen=LOG_RECORDS)
        self._warned = False

    def extend(self, records: Sequence[ErrorRecord], *, loud: bool) -> None:
        """Add the failures of a batch; with `loud`, warn about the first failure, but only once."""
        self.total += len(records)
        self._records.extend(records)
        if loud and records and not self._warned:
            self._warned = True
            first = records[0]
            fate = "skipped" if first.replaced_by is None else f"replaced by sample {first.replaced_by!r}"
            warnings.warn(
                f"{first.describe()}; it was {fate}. Further failures are only recorded, in loader.errors",
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
        shown = "".join(f"\n  {record.describe()}" for record in islice(self._records, 20))
        omitted = f"\n  … and {len(self) - 20:,} more" if len(self) > 20 else ""
        return (
            f"<{self.total:,} failed sample{'' if self.total == 1 else 's'}{':' if self.total else ''}{shown}{omitted}>"
        )
