"""Whether samples come from a disk, or from the page cache. Runs where datasets do."""

from __future__ import annotations

try:
    import resource
except ModuleNotFoundError:  # Windows has none
    resource = None

__all__ = ["Disk"]


class Disk:
    """What this thread has had read from disks of this machine, also where it named something to be read ahead.

    Of network file systems the kernel counts nothing.
    """

    def __init__(self) -> None:
        self._blocks = _blocks()

    def was_read(self) -> bool:
        """Whether there was anything since it was asked last."""
        before, self._blocks = self._blocks, _blocks()
        return self._blocks != before


def _blocks() -> int:
    if resource is None:
        return 0
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_inblock
