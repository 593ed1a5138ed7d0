"""Whether samples come from a disk, or from the page cache. Runs where datasets do."""

from __future__ import annotations

import resource
from typing import Final

__all__ = ["Disk"]

THREAD: Final = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class Disk:
    """What this thread has had read from disks of this machine, also where it named something to be read ahead.

    Of network file systems the kernel counts nothing.
    """

    def __init__(self) -> None:
        self._blocks = resource.getrusage(THREAD).ru_inblock

    def was_read(self) -> bool:
        """Whether there was anything since it was asked last."""
        before, self._blocks = self._blocks, resource.getrusage(THREAD).ru_inblock
        return self._blocks != before
