"""What other programs leave in folders of images: copies by Jupyter, thumbnails of network drives, macOS's notes, bins.

It is never a sample, nor a class: `ImageFolder` and `ImageFiles`, patterns of file names and tar archives leave it out,
and say in one line of the log how much there was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

__all__ = ["STARTS", "LeftOut", "is_litter", "without_litter"]

LITTER: Final = re.compile(
    rb"(?:^|/)(?:"
    rb"(?:\.ipynb_checkpoints|@eaDir|\.@__thumb|#recycle|\$RECYCLE\.BIN|__MACOSX|\.AppleDouble|\.Trashes|\.Trash(?:-\d+)?)"
    rb"(?:/|$)|\._[^/]*$)"
)
STARTS: Final = frozenset(b".@#$_")  # the first characters of such names: looking at these costs less
SHOWN: Final = 3


def is_litter(name: bytes) -> bool:
    """Whether a file or folder is litter, by its name, or by that of a folder in its path.

    Example:
        >>> [is_litter(name) for name in (b"a/.ipynb_checkpoints/b.jpg", b"__MACOSX", b"a/._b.jpg", b"a/b.jpg")]
        [True, True, True, False]
    """
    return LITTER.search(name) is not None


@dataclass
class LeftOut:
    """How many files and folders were left out, and the first of them."""

    files: int = 0
    folders: int = 0
    first: list[bytes] = field(default_factory=list)

    def add(self, path: bytes, *, folder: bool = False) -> None:
        """Count a file, or a folder with whatever is in it."""
        self.files, self.folders = self.files + (not folder), self.folders + folder
        if len(self.first) < SHOWN:
            self.first.append(path)

    def arrays(self) -> dict[str, np.ndarray]:
        """The same, as an index is kept."""
        return {
            "left_out": np.array([self.files, self.folders], np.int64),
            "left_out_first": np.frombuffer(b"\0".join(self.first), np.uint8),
        }

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> LeftOut:
        """What such arrays say."""
        files, folders = arrays["left_out"].tolist()
        return cls(files, folders, arrays["left_out_first"].tobytes().split(b"\0"))

    def log(self, where: Any) -> None:
        """Say it in one line, if there is anything to say."""
        if not self.files + self.folders:
            return
        import logging  # slow to import, and seldom needed

        counts = [f"{n:,} {one}{'s' * (n != 1)}" for n, one in ((self.folders, "folder"), (self.files, "file")) if n]
        first = ", ".join(repr(os.fsdecode(path)) for path in self.first)
        more = ", …" if self.files + self.folders > len(self.first) else ""
        logging.getLogger("gpuload.datasets").info(
            "%r: left out what other programs keep there: %s (%s%s)", where, " and ".join(counts), first, more
        )


def without_litter(paths: Iterable[str], pattern: str) -> list[str]:
    """The paths that a pattern stands for, but for litter. The folders that it names are searched whatever they are
    called."""
    named = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    kept, left_out = [], LeftOut()
    for path in paths:
        if is_litter(os.fsencode(path.removeprefix(named))):
            left_out.add(os.fsencode(path))
        else:
            kept.append(path)
    left_out.log(pattern)
    return kept
