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
        self.suspects: dict[tuple[int, int], set[int]] = {}  # by chunk and attempt; nearly always empty

    def add(self, chunk: int, attempt: int, suspects: Iterable[int]) -> list[Freed]:
        """A chunk was lost, and one of these workers may have it."""
        self.suspects[chunk, attempt] = set(suspects)
        return self._freed()

    def clear(self, worker: int, done: tuple[int, int] | None = None) -> list[Freed]:
        """A worker is gone, or has said something: that a chunk is `done`, whose slot is freed by whoever is told."""
        if done is not None:
            self.suspects.pop(done, None)
        for suspects in self.suspects.values():
            suspects.discard(worker)
        return self._freed()

    def _freed(self) -> list[Freed]:
        freed = [key for key, suspects in self.suspects.items() if not suspects]
        for key in freed:
            del self.suspects[key]
        return [Freed(*key) for key in freed]
