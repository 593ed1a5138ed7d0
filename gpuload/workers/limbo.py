"""Lost chunks whose slots a living worker may still write to. Main process only; plain values."""

from __future__ import annotations

from collections.abc import Iterable

from gpuload.workers.engine import Freed

__all__ = ["Limbo"]


class Limbo:
    """Chunks, each with the workers that may be at it: one that has said something since is not.

    Its methods return the chunks whose slots are free now.
    """

    def __init__(self) -> None:
        self._suspects: dict[tuple[int, int], set[int]] = {}  # by chunk and attempt

    def add(self, chunk: int, attempt: int, suspects: Iterable[int]) -> list[Freed]:
        """A chunk was lost, and one of these workers may have it."""
        self._suspects[chunk, attempt] = set(suspects)
        return self._freed()

    def done(self, chunk: int, attempt: int) -> None:
        """Its reply came after all: whoever gets that frees the slot."""
        self._suspects.pop((chunk, attempt), None)

    def clear(self, worker: int) -> list[Freed]:
        """A worker has said something, or is gone."""
        if not self._suspects:
            return []
        for suspects in self._suspects.values():
            suspects.discard(worker)
        return self._freed()

    def _freed(self) -> list[Freed]:
        freed = [key for key, suspects in self._suspects.items() if not suspects]
        for key in freed:
            del self._suspects[key]
        return [Freed(*key) for key in freed]
