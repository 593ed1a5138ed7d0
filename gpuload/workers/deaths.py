"""How often workers died in an epoch, and of what. Runs wherever workers are watched; plain values."""

from __future__ import annotations

import logging
from collections import Counter

from gpuload.errors import WorkerError

__all__ = ["Deaths"]

logger = logging.getLogger("gpuload.workers")


class Deaths:
    """The deaths of workers between two calls of `forgive`; more than `max_restarts` of them are an error.

    Attributes:
        causes: of each, with the sample that its worker was at.
        stack: where the last one was, if that is known.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.causes: list[str] = []
        self.stack = ""

    def add(self, cause: str, stack: str = "", who: str = "") -> None:
        """Count one, and log it; `who` it was, where `cause` does not say so.

        Raises:
            WorkerError: it was one too many.
        """
        self.causes.append(cause)
        self.stack = stack
        if len(self.causes) <= self.max_restarts:
            logger.warning(
                "a worker died: %s; another takes its place (death %d of this epoch, max_restarts=%d)",
                f"{who}: {cause}" if who else cause,
                len(self.causes),
                self.max_restarts,
            )
            return
        counted = Counter(self.causes)
        told = "; ".join(f"{cause} ({count} times)" if count > 1 else cause for cause, count in counted.items())
        raise WorkerError(
            f"worker processes died {len(self.causes)} times in this epoch, more than "
            f"max_restarts={self.max_restarts} allows: {told}. Look at these samples with "
            "num_workers=0, and at the machine's memory; Faults(max_restarts=…) allows more"
            + (f"\n\nWhere the last one was:\n{stack}" if stack else "")
        )

    def forgive(self) -> None:
        """Begin to count anew."""
        self.causes, self.stack = [], ""
