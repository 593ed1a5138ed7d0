"""Litter: files that other programs leave in image folders, such as Jupyter checkpoints, thumbnails on network drives,
macOS metadata, and recycle bins.

Litter is never a sample or a class: `ImageFolder`, `ImageFiles`, file name patterns and tar archives skip it, and log
one line with the number of skipped files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["STARTS", "SkippedFiles", "is_litter", "log_skipped_files", "remove_litter"]

LITTER: Final = re.compile(
    rb"(?:^|/)(?:"
    rb"(?:\.ipynb_checkpoints|@eaDir|\.@__thumb|#recycle|\$RECYCLE\.BIN|__MACOSX|\.AppleDouble|\.Trashes|\.Trash(?:-\d+)?)"
    rb"(?:/|$)|\._[^/]*$)"
)
STARTS: Final = frozenset(b".@#$_")  # the first characters of litter's names, for a cheap check before the regex
MAX_SHOWN: Final = 3  # maximum number of paths in the log line


def is_litter(name: bytes) -> bool:
    """Return whether a file or folder is litter, judging by its name and the folders in its path.

    Example:
        >>> [is_litter(name) for name in (b"a/.ipynb_checkpoints/b.jpg", b"__MACOSX", b"a/._b.jpg", b"a/b.jpg")]
        [True, True, True, False]
    """
    return LITTER.search(name) is not None


@dataclass
class SkippedFiles:
    """The number of skipped files and folders, and the paths of the first few."""

    files: int = 0
    folders: int = 0
    first: list[bytes] = field(default_factory=list)

    def add(self, path: bytes, *, folder: bool = False) -> None:
        """Count a file, or a folder with everything inside."""
        self.files, self.folders = self.files + (not folder), self.folders + folder
        if len(self.first) < MAX_SHOWN:
            self.first.append(path)

    def __str__(self) -> str:
        counts = [f"{n:,} {noun}{'s' * (n != 1)}" for n, noun in ((self.folders, "folder"), (self.files, "file")) if n]
        names = [repr(os.fsdecode(path)) for path in self.first]
        ellipsis = ["…"] * (self.files + self.folders > len(names))
        return f"{' and '.join(counts)} ({', '.join(names + ellipsis)})" if counts else ""

    def log(self, where: object) -> None:
        log_skipped_files(where, str(self))


def log_skipped_files(where: object, text: str) -> None:
    """Log the skipped litter in one line; `text` is the str of a `SkippedFiles`, "" for none."""
    if text:
        import logging  # slow to import, and seldom needed

        logging.getLogger("gpuload.datasets").info("%r: skipped files of other programs: %s", where, text)


def remove_litter(paths: Iterable[str], pattern: str) -> list[str]:
    """Remove litter from the paths that match a pattern, and log it. Folders that the pattern itself names do
    not count as litter."""
    folder = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    clean_paths, skipped_files = [], SkippedFiles()
    for path in paths:
        if is_litter(os.fsencode(path.removeprefix(folder))):
            skipped_files.add(os.fsencode(path))
        else:
            clean_paths.append(path)
    skipped_files.log(pattern)
    return clean_paths
