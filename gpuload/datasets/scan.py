"""Finds the image files below a folder, in an order that is the same on every machine.

Runs once, in the main process, when a dataset is made. Names are handled as bytes, so the locale and the order of
`os.scandir` do not matter, and names that are not UTF-8 work. A folder's names are packed as soon as they are read:
only one folder's names exist as objects. What a long scan finds is kept for the next time (`scanned`).

The order is that of torchvision's ImageFolder: folders sorted by path (`a-b` before `a/b`, since "-" comes before "/"),
files of one folder by name. torchvision compares text, not bytes; for UTF-8 names the order is the same.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from gpuload.datasets.litter import STARTS, LeftOut, is_litter

__all__ = ["Scanner", "scanned"]

SETTLED_NS: Final = 2_000_000_000  # a folder that was changed later than this before a scan may change unseen


class _Folder(NamedTuple):
    path: bytes
    joined: bytes  # the paths of its images, one after the other
    lengths: np.ndarray


class Scanner:
    """Scans below one root.

    Args:
        root: an existing folder.
        extensions: the endings of image files' names, lower case, with the dot.
        follow_links: whether links may lead out of the root.

    Attributes:
        left_out: what other programs keep there, see `gpuload.datasets.litter`.
    """

    def __init__(self, root: str, *, extensions: Iterable[str], follow_links: bool) -> None:
        self._root = os.fsencode(root)
        self._real_root = os.path.realpath(self._root)
        self._extensions = tuple(os.fsencode(extension) for extension in extensions)
        self._follow_links = follow_links
        self.left_out = LeftOut()
        self._seen: dict[bytes, int] = {}  # when each folder was changed last, before it was read

    def folders(self) -> list[bytes]:
        """The names of the folders directly in the root, sorted."""
        with self._entries(b"") as entries:
            return sorted(
                entry.name for entry in entries if not self._is_left_out(entry, b"") and self._is_folder(entry, b"")
            )

    def images(self, start: bytes = b"") -> tuple[bytes, np.ndarray]:
        """The images at any depth below `start`, a path relative to the root.

        Returns:
            Their paths relative to the root, joined without a separator, and the length of each (uint32).

        Raises:
            OSError: a folder cannot be read.
            ValueError: a link leaves the root, or leads in a circle.
        """
        found: list[_Folder] = []
        waiting = [start]
        while waiting:
            folder = waiting.pop()
            names: list[bytes] = []
            with self._entries(folder) as entries:
                for entry in entries:
                    if self._is_left_out(entry, folder):
                        continue
                    if self._is_folder(entry, folder):
                        waiting.append(os.path.join(folder, entry.name))
                    elif entry.name.lower().endswith(self._extensions) and self._is_readable(entry):
                        names.append(entry.name)
            if names:
                found.append(_pack(folder, names))
        found.sort(key=lambda folder: folder.path)
        lengths = [folder.lengths for folder in found] or [np.empty(0, np.uint32)]
        return b"".join(folder.joined for folder in found), np.concatenate(lengths)

    def _entries(self, folder: bytes) -> Any:
        path = os.path.join(self._root, folder)
        self._seen[folder] = os.stat(path).st_mtime_ns
        return os.scandir(path)

    def times(self) -> dict[str, np.ndarray]:
        """The folders that were read, and when each was changed last."""
        folders = np.frombuffer(b"\0".join(self._seen), np.uint8)
        return {"folders": folders, "times": np.array(list(self._seen.values()), np.int64)}

    def is_fresh(self, arrays: dict[str, np.ndarray]) -> bool:
        """Whether the folders of an earlier scan are as they were: a file that comes, goes or is renamed changes its
        folder's time."""
        folders = arrays["folders"].tobytes().split(b"\0")
        times = [os.stat(os.path.join(self._root, folder)).st_mtime_ns for folder in folders]
        return times == arrays["times"].tolist()

    def _is_left_out(self, entry: os.DirEntry[bytes], folder: bytes) -> bool:
        if entry.name[0] not in STARTS or not is_litter(entry.name):
            return False
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder or entry.name.lower().endswith(self._extensions):
            self.left_out.add(os.path.join(folder, entry.name), folder=is_folder)
        return True

    def _is_folder(self, entry: os.DirEntry[bytes], folder: bytes) -> bool:
        try:
            if not entry.is_dir():
                return False
        except OSError as error:
            raise self._circle(entry.path) if error.errno == errno.ELOOP else error from None
        if entry.is_symlink():
            self._check_inside(entry)
            self._check_no_circle(entry, folder)
        return True

    def _is_readable(self, entry: os.DirEntry[bytes]) -> bool:
        """Whether an entry that is no folder is a file to read. A pipe is not: reading it waits for ever."""
        if not entry.is_symlink():
            return entry.is_file(follow_symlinks=False)
        self._check_inside(entry)
        try:
            return stat.S_ISREG(entry.stat().st_mode)
        except FileNotFoundError:
            return True  # the link's target is missing: an error of this sample, when it is read

    def _check_inside(self, link: os.DirEntry[bytes]) -> None:
        if self._follow_links:
            return
        target = os.path.realpath(link.path)
        if target != self._real_root and not target.startswith(self._real_root.rstrip(b"/") + b"/"):
            raise ValueError(
                f"{os.fsdecode(link.path)!r} is a link that leaves {os.fsdecode(self._root)!r}: it leads to "
                f"{os.fsdecode(target)!r}. To follow it write follow_links=True"
            )

    def _check_no_circle(self, link: os.DirEntry[bytes], folder: bytes) -> None:
        """Refuse a link to a folder on the way to it: every circle has one."""
        target = link.stat()
        above = self._root
        for name in [b"", *folder.split(b"/")]:
            above = os.path.join(above, name)
            if os.path.samestat(target, os.stat(above)):
                raise self._circle(link.path)

    def _circle(self, link: bytes) -> ValueError:
        return ValueError(
            f"{os.fsdecode(link)!r} is a link that leads in a circle (to {os.fsdecode(os.readlink(link))!r}); remove it"
        )


def scanned(
    scanner: Scanner, root: str, asked: list[Any], build: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """What `build` makes with a scanner of a folder, and what was left out; that of a large one is kept, until a folder
    changes.

    Args:
        root: the scanner's, an absolute path.
        asked: what else it depends on, as JSON.
    """
    from gpuload.datasets.stores.cached import cached  # slow to import, and not needed by workers

    started = time.time_ns()
    return cached(
        root,
        ["scan without litter", *asked],
        lambda: {**build(), **scanner.left_out.arrays(), **scanner.times()},
        is_fresh=scanner.is_fresh,
        is_kept=lambda arrays: int(arrays["times"].max()) < started - SETTLED_NS,
    )


def _pack(folder: bytes, names: list[bytes]) -> _Folder:
    names.sort()
    prefix = os.path.join(folder, b"")
    lengths = np.fromiter(map(len, names), np.uint32, len(names)) + np.uint32(len(prefix))
    return _Folder(folder, prefix + prefix.join(names), lengths)
