"""Images that are there more than once: by their files' bytes, by their pixels, by their looks.

Looks are 2 × 64 bits, and images are alike if at most `APART` of them differ. No pair is missed: of `BANDS` parts of
the bits, one is equal in such a pair, so only images that share a part are held against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["Groups", "equal", "looking_alike"]

# Bits of 128. Of 48 photographs, copies at half and three quarters of the size and at quality 50 had at most 4 others,
# copies at a quarter of it and quality 85 at most 6, two different photographs at least 40.
APART: Final = 7
BANDS: Final = 8  # of 16 bits each
BLOCK: Final = 1024  # images that are held against others at a time

# How many bits each byte has; numpy counts them itself from 2.0 on only.
BITS: Final = np.array([byte.bit_count() for byte in range(256)], np.uint8)


@dataclass
class Groups:
    """Rows in groups of two or more.

    Attributes:
        rows: of all groups, one group after the other.
        starts: where each group begins in `rows`.
    """

    rows: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(np.split(self.rows, self.starts[1:]) if len(self) else [])

    @property
    def surplus(self) -> int:
        """How many images are there beside the first of each group."""
        return len(self.rows) - len(self.starts)

    def differ(self, values: np.ndarray) -> np.ndarray:
        """For each group, whether `values`, of all rows, differ among its rows; negative ones do not count."""
        if not len(self):
            return np.zeros(0, bool)
        own = values[self.rows].astype(np.int64)
        high = np.maximum.reduceat(own, self.starts)
        low = np.minimum.reduceat(np.where(own < 0, np.iinfo(np.int64).max, own), self.starts)
        return (high >= 0) & (low < high)

    def keep(self, which: np.ndarray) -> Groups:
        """Those groups for which `which` is true."""
        sizes = np.diff([*self.starts, len(self.rows)])
        kept = sizes[which]
        return Groups(self.rows[np.repeat(which, sizes)], np.cumsum(kept) - kept)


def equal(keys: np.ndarray, rows: np.ndarray) -> Groups:
    """Groups of rows with equal keys (n × k integers)."""
    if not len(rows):
        return Groups(rows, np.zeros(0, np.int64))
    order = np.lexsort(keys.T)
    changes = np.any(np.diff(keys[order], axis=0), axis=1)
    starts = np.flatnonzero(np.r_[True, changes])
    found = Groups(rows[order], starts)
    return found.keep(np.diff([*starts, len(rows)]) > 1)


def looking_alike(looks: np.ndarray, rows: np.ndarray) -> Groups:
    """Groups of rows whose looks (n × 2 int64) differ in few bits, directly or by way of others."""
    if not len(rows):
        return equal(looks, rows)
    unique, inverse = np.unique(looks, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    root = list(range(len(unique)))

    def top(one: int) -> int:
        while root[one] != one:
            root[one] = root[root[one]]
            one = root[one]
        return one

    bands = unique.view(np.uint16).reshape(len(unique), -1)
    for band in range(bands.shape[1]):
        order = np.argsort(bands[:, band], kind="stable")
        ends = np.flatnonzero(np.r_[np.diff(bands[order, band]) != 0, True]) + 1
        begin = 0
        for end in ends.tolist():
            for one, other in _near(unique, order[begin:end]):
                root[top(one)] = top(other)
            begin = end
    tops = np.array([top(one) for one in range(len(unique))], np.int64)
    return equal(tops[inverse][:, None], rows)


def _near(looks: np.ndarray, members: np.ndarray) -> Iterator[Any]:
    """Pairs of members whose bits differ little."""
    if len(members) < 2:
        return
    own = looks[members].view(np.uint64)
    for begin in range(0, len(own), BLOCK):
        for other in range(begin, len(own), BLOCK):
            apart = own[begin : begin + BLOCK, None, :] ^ own[None, other : other + BLOCK, :]
            near = np.argwhere(BITS[apart.view(np.uint8)].sum(axis=2) <= APART)
            for i, j in near.tolist():
                if begin + i < other + j:
                    yield int(members[begin + i]), int(members[other + j])
