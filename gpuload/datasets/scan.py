"""Finds the image files below a folder, in an order that is the same on every machine.

Runs once, in the main process, when a dataset is made. Names are handled as bytes, so the locale and the order of
`os.scandir` do not matter, and names that are not UTF-8 work. A folder's names are packed as soon as they are read:
only one folder's names exist as objects. What a long scan finds is kept for the next time.

The order is that of torchvision's ImageFolder: folders sorted by path (`a-b` before `a/b`, since "-" comes before "/"),
files of one folder by name. torchvision compares text, not bytes; for UTF-8 names the order is the same.

Memory layout of `Paths`, millions of which are one byte buffer: `data` is uint8, all paths (relative to the root, in
the file system's bytes) one after the other; path i is `data[offsets[i] : offsets[i + 1]]`, with `offsets` in uint32,
or int64 from 4 GiB of paths. Both are plain arrays, so pickle protocol 5 sends them out-of-band, and all workers map
one copy.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, SupportsIndex, TypeVar, overload

import numpy as np

from gpuload.datasets.litter import STARTS, LeftOut, is_litter

__all__ = ["Lazy", "Paths", "Scanner", "from_start", "full_path"]

Entry = TypeVar("Entry")

ENCODING: Final = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # what os.fsdecode takes
WIDE_BYTES: Final = 1 << 32  # from here offsets no longer fit uint32
SETTLED_NS: Final = 2_000_000_000  # a folder that was changed later than this before a scan may change unseen


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
        self.root, self._root = root, os.fsencode(root)
        self._real_root = os.path.realpath(self._root)
        self._extensions = tuple(os.fsencode(extension) for extension in extensions)
        self._follow_links = follow_links
        self.left_out = LeftOut()
        self._times: dict[bytes, int] = {}  # when each folder was changed last, before it was read

    def folders(self) -> list[bytes]:
        """Return the names of the folders directly in the root, sorted."""
        return sorted(entry.name for entry, is_folder in self._entries(b"") if is_folder)

    def images(self, start: bytes = b"") -> Paths:
        """Return the paths of the images at any depth below `start`, a path relative to the root.

        Raises:
            OSError: a folder cannot be read.
            ValueError: a link leaves the root, or leads in a circle.
        """
        images: dict[bytes, tuple[bytes, np.ndarray]] = {}  # of each folder: names, and the length of each
        waiting = [start]
        while waiting:
            folder = waiting.pop()
            prefix, names = os.path.join(folder, b""), []
            for entry, is_folder in self._entries(folder):
                if is_folder:
                    waiting.append(prefix + entry.name)
                elif entry.name.lower().endswith(self._extensions) and self._is_readable(entry):
                    names.append(prefix + entry.name)
            if names:
                names.sort()
                images[folder] = b"".join(names), np.fromiter(map(len, names), np.uint32, len(names))
        parts = [images[folder] for folder in sorted(images)]
        lengths = [np.zeros(0, np.uint32), *(lengths for _, lengths in parts)]
        return Paths.pack(self.root, b"".join(names for names, _ in parts), np.concatenate(lengths))

    def cached(self, selection: list[Any], build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return what `build` makes with this scanner. For a large root it is kept, under the `selection`, until a
        folder changes: a file that comes, goes or is renamed changes its folder's time."""
        from gpuload.datasets.stores.cached import cached  # slow to import, and not needed by workers

        started = time.time_ns()

        def scan() -> dict[str, np.ndarray]:
            arrays = build()
            folders = np.frombuffer(b"\0".join(self._times), np.uint8)
            return {**arrays, "folders": folders, "times": np.array(list(self._times.values()), np.int64)}

        def is_fresh(arrays: dict[str, np.ndarray]) -> bool:
            folders = arrays["folders"].tobytes().split(b"\0")
            return arrays["times"].tolist() == [self._time_of(folder) for folder in folders]

        def is_kept(arrays: dict[str, np.ndarray]) -> bool:
            return int(arrays["times"].max()) < started - SETTLED_NS

        return cached(self.root, ["scan 2", *selection], scan, is_fresh=is_fresh, is_kept=is_kept)

    def _time_of(self, folder: bytes) -> int:
        return os.stat(os.path.join(self._root, folder)).st_mtime_ns

    def _entries(self, folder: bytes) -> Iterator[tuple[os.DirEntry[bytes], bool]]:
        """Yield what is in a folder, without litter, and whether each entry is a folder."""
        self._times[folder] = self._time_of(folder)
        with os.scandir(os.path.join(self._root, folder)) as entries:
            for entry in entries:
                if entry.name[0] in STARTS and is_litter(entry.name):
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if is_folder or entry.name.lower().endswith(self._extensions):
                        self.left_out.add(os.path.join(folder, entry.name), folder=is_folder)
                else:
                    yield entry, self._is_folder(entry, folder)

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
        """Return whether an entry that is not a folder is a file to read. A pipe is not: it may never end."""
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


def full_path(path: str | os.PathLike[str]) -> str:
    """Return a path that does not depend on the working directory; ``~`` is the user's home.

    Raises:
        FileNotFoundError: there is no home: HOME is not set, and the user is in no table.
    """
    full = os.path.expanduser(os.fsdecode(path))
    if full == "~" or full.startswith("~/"):  # else it would be a folder of that name, wherever the program is started
        raise FileNotFoundError(
            f"{path!r} is in a home that is not known: HOME is not set, and this user (number {os.getuid()}) is not in "
            "the table of users; set HOME, or name the whole path"
        )
    return os.path.abspath(full)


def from_start(index: SupportsIndex, count: int, text: str) -> int:
    """Return an index that may count from the end as one from 0; `text` says in an error how many there are."""
    try:
        number = index.__index__()
    except AttributeError:
        raise TypeError(f"an index must be an integer, got {index!r} ({type(index).__name__})") from None
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of range: {text}")
    return number % count


class Lazy(Sequence[Entry]):
    """A sequence that makes each entry when it is asked for: `_entry` of its number, 0 ≤ number < length."""

    _entries = "paths"  # what errors call them

    def _entry(self, number: int) -> Entry:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self._entry(number) for number in range(*index.indices(len(self)))]
        count = len(self)
        if type(index) is int and 0 <= index < count:  # each sample's: no text is made for nothing
            return self._entry(index)
        return self._entry(from_start(index, count, f"there are {count} {self._entries}"))


class Paths(Lazy[str]):
    """The paths of a dataset: a sequence that makes each str when it is asked for.

    Args:
        root: the folder that all paths are relative to.
        data: uint8, the relative paths one after the other.
        offsets: n + 1 integers, where each path begins and the last one ends.

    Example:
        >>> paths = Paths.of("/data", [b"a.jpg", b"sub/b.jpg"])
        >>> paths[-1], len(paths)
        ('/data/sub/b.jpg', 2)
    """

    def __init__(self, root: str, data: np.ndarray, offsets: np.ndarray) -> None:
        self.root = root
        self.data = data
        self.offsets = offsets
        self._prefix = os.path.join(root, "")

    @classmethod
    def pack(cls, root: str, data: Any, lengths: Any) -> Paths:
        """Return paths from a buffer of them one after the other, and the length of each."""
        data = np.frombuffer(data, np.uint8)
        offsets = np.zeros(1 + len(lengths), np.uint32 if len(data) < WIDE_BYTES else np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(root, data, offsets)

    @classmethod
    def of(cls, root: str, paths: Sequence[bytes]) -> Paths:
        """Return paths that are relative to the root."""
        return cls.pack(root, bytearray().join(paths), np.fromiter(map(len, paths), np.int64, len(paths)))

    @classmethod
    def joined(cls, root: str, parts: Sequence[Paths]) -> Paths:
        """Return the paths of several parts, one part after the other, all below one root."""
        lengths = [np.diff(part.offsets) for part in parts]
        return cls.pack(
            root, bytearray().join(part.data.data for part in parts), np.concatenate([np.zeros(0, np.int64), *lengths])
        )

    @classmethod
    def below(cls, root: str | os.PathLike[str], paths: Iterable[str | os.PathLike[str]]) -> Paths:
        """Pack paths, relative ones to the working directory, below the root if all are in it, else below ``/``."""
        names = [os.fsencode(path) for path in paths]
        prefix = os.path.join(os.fsencode(root), b"")
        if prefix and all(name.startswith(prefix) for name in names):
            return cls.of(os.path.abspath(os.fsdecode(root)), [name[len(prefix) :] for name in names])
        return cls.of("/", [os.path.abspath(name)[1:] for name in names])

    @property
    def nbytes(self) -> int:
        """How many bytes of memory the paths take."""
        return self.data.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _entry(self, number: int) -> str:
        start, end = self.offsets[number : number + 2].tolist()
        return self._prefix + str(self.data[start:end].data, *ENCODING)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Paths):
            return NotImplemented
        return (
            self.root == other.root
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.data, other.data)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} paths in {self.root!r}>"
