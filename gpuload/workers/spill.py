"""Making room in a full ring, for a batch that is waited for. Runs in the main process; keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

from gpuload.errors import LimitError
from gpuload.ring.ring import Ring
from gpuload.workers.batch import Batch, Part

__all__ = ["spill"]


def spill(ring: Ring, batches: Sequence[Batch]) -> Part | None:
    """Move the latest done chunk out of the ring; if memory is short, it keeps its slot, and is to be done again. None:
    there is no such chunk.

    Raises:
        LimitError: there is no memory, and the chunk is one of the first batch.
    """
    for batch in reversed(batches):
        for part in reversed(batch.parts):
            if part.slot is None or part.data is None:
                continue
            try:
                part.data, part.slot = ring.move_out(part.slot, part.used_bytes), None
            except LimitError:
                if batch is batches[0]:
                    raise  # it is waited for
                failed = not part.description and (part.content is None or part.content.errors)
                if failed or batch.spec.iterable is not None:
                    continue  # its failures are already settled, or its iterator cannot give the samples again
            return part
    return None
