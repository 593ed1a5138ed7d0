"""How large a slot a chunk will need, before it is known.

Guessed for the first chunks, and learned from them: a slot that is made in mid-epoch stops the loop, since its memory
has to be page-locked. Main process only.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SlotSize"]

FIRST_GUESS_BYTES: Final = 320 * 1024  # for one sample, until one has come
HEADROOM: Final = 1.4
LEAST_HEADROOM: Final = 1.2  # with less, slots grow: by so much at once that few have to be made anew
FIRST_CHUNKS: Final = 64  # they say how large a slot has to be: later growth costs a new slot for each chunk in work


class SlotSize:
    """The bytes of a slot for so many rows, in a ring of `ring_bytes` and chunks of up to `chunk_size` samples."""

    def __init__(self, ring_bytes: int, chunk_size: int) -> None:
        self._ring_bytes = ring_bytes
        self._learning = FIRST_CHUNKS
        self._limit(chunk_size)
        self._row_bytes = min(FIRST_GUESS_BYTES, self._most)

    def of(self, rows: int) -> int:
        """The bytes for a chunk of so many samples."""
        return min(rows * self._row_bytes, self._ring_bytes)

    def learn(self, nbytes: int, rows: int) -> None:
        """A chunk took so much: one of the first counts."""
        if self._learning:
            self._learning -= 1
            if nbytes * LEAST_HEADROOM > self.of(rows):
                self.expect(nbytes, rows)

    def expect(self, nbytes: int, rows: int) -> None:
        """From now on, slots are large enough for chunks that take more than this one does."""
        self._row_bytes = max(self._row_bytes, min(int(nbytes * HEADROOM / rows), self._most))

    def restart(self, chunk_size: int, nbytes: int, rows: int) -> None:
        """Chunks are larger from now on, and of samples like those that took so much."""
        self._limit(chunk_size)
        self._row_bytes = 0
        self.expect(nbytes, rows)

    def _limit(self, chunk_size: int) -> None:
        self._most = max(1, self._ring_bytes // (4 * chunk_size))  # of typical chunks at least four fit a small ring
