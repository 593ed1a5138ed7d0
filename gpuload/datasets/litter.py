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

__all__ = ["STARTS", "LeftOut", "is_litter", "log_left_out", "without_litter"]

LITTER: Final = re.compile(
    rb"(?:^|/)(?:"
    rb"(?:\.ipynb_checkpoints|@eaDir|\.@__thumb|#recycle|\$RECYCLE\.BIN|__MACOSX|\.AppleDouble|\.Trashes|\.Trash(?:-\d+)?)"
    rb"(?:/|$)|\._[^/]*$)"
)
STARTS: Final = frozenset(b".@#$_")  # the first characters of such names: looking at these costs less
SHOWN: Final = 3


def is_litter(name: bytes) -> bool:
    """Return whether a file or folder is litter, by its name, or by that of a folder in its path.

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

    def __str__(self) -> str:
        counts = [f"{n:,} {one}{'s' * (n != 1)}" for n, one in ((self.folders, "folder"), (self.files, "file")) if n]
        names = [repr(os.fsdecode(path)) for path in self.first]
        more = ["…"] * (self.files + self.folders > len(names))
        return f"{' and '.join(counts)} ({', '.join(names + more)})" if counts else ""

    def log(self, where: Any) -> None:
        log_left_out(where, str(self))


def log_left_out(where: Any, text: str) -> None:
    """Log in one line what was left out, if anything was; `text` is a `LeftOut` as str."""
    if text:
        import logging  # slow to import, and seldom needed

        logging.getLogger("gpuload.datasets").info("%r: left out what other programs keep there: %s", where, text)


def without_litter(paths: Iterable[str], pattern: str) -> list[str]:
    """Return the paths that match a pattern, without litter. The folders that the pattern names are searched whatever
    they are called."""
    folder = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    clean, left_out = [], LeftOut()
    for path in paths:
        if is_litter(os.fsencode(path.removeprefix(folder))):
            left_out.add(os.fsencode(path))
        else:
            clean.append(path)
    left_out.log(pattern)
    return clean
