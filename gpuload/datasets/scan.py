"""Finds the image files below a folder, in an order that is the same on every machine.

The scan runs once, in the main process, when a dataset is created. Names are handled as bytes, so the locale and the
order of `os.scandir` do not matter, and names that are not UTF-8 work. A folder's names are packed as soon as they are
read, so only one folder's names exist as objects at a time. For a large root, the result is cached on disk.

The order is the same as in torchvision's ImageFolder: folders are sorted by path (`a-b` before `a/b`, since "-" comes
before "/"), and files in a folder by name. torchvision compares text instead of bytes, which gives the same order for
UTF-8 names.

Memory layout of `Paths`, which packs millions of paths into one byte buffer: `data` is uint8 and contains all paths
(relative to the root, in the file system's encoding) one after the other. Path i is
`data[offsets[i] : offsets[i + 1]]`; `offsets` is uint32, or int64 if the paths take 4 GiB or more. Both are plain
arrays, so pickle protocol 5 sends them out-of-band, and all workers map one copy.
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

from gpuload.checks import integer
from gpuload.datasets.litter import STARTS, SkippedFiles, is_litter
from gpuload.errors import one_line

__all__ = ["LazySequence", "Paths", "Scanner", "full_path", "normalize_index", "path_text"]

Entry = TypeVar("Entry")

ENCODING: Final = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # as in os.fsdecode
WIDE_BYTES: Final = 1 << 32  # offsets into this many bytes or more do not fit into uint32
SETTLED_NS: Final = 2_000_000_000  # a folder modified this recently could be modified again without changing its mtime


class Scanner:
    """A scanner for the files below one root.

    Args:
        root: an existing folder.
        extensions: the endings of image files' names, lower case, with the dot.
        follow_links: whether links may point outside the root.

    Attributes:
        skipped_files: the number of skipped files of other programs, see `gpuload.datasets.litter`.
    """

    def __init__(self, root: str, *, extensions: Iterable[str], follow_links: bool) -> None:
        self.root, self._root_bytes = root, os.fsencode(root)
        self._real_root = os.path.realpath(self._root_bytes)
        self._extensions = tuple(os.fsencode(extension) for extension in extensions)
        self._follow_links = follow_links
        self.skipped_files = SkippedFiles()
        self._mtimes_ns: dict[bytes, int] = {}  # each folder's modification time before its entries were listed

    def find_folders(self) -> list[bytes]:
        """Return the names of the folders directly in the root, sorted."""
        return sorted(entry.name for entry, is_folder in self._list_entries(b"") if is_folder)

    def find_images(self, start: bytes = b"") -> Paths:
        """Return the paths of the images at any depth below `start`, a path relative to the root.

        Raises:
            OSError: a folder cannot be read.
            ValueError: a link points outside the root, or is circular.
        """
        # For each folder: the paths of its images in one buffer, and the lengths of these paths.
        images: dict[bytes, tuple[bytes, np.ndarray]] = {}
        pending = [start]
        while pending:
            folder = pending.pop()
            prefix, names = os.path.join(folder, b""), []
            for entry, is_folder in self._list_entries(folder):
                if is_folder:
                    pending.append(prefix + entry.name)
                elif entry.name.lower().endswith(self._extensions) and self._is_file_or_broken_link(entry):
                    names.append(prefix + entry.name)
            if names:
                names.sort()
                images[folder] = b"".join(names), np.fromiter(map(len, names), np.uint32, len(names))
        parts = [images[folder] for folder in sorted(images)]
        lengths = [np.zeros(0, np.uint32), *(lengths for _, lengths in parts)]
        return Paths.pack(self.root, b"".join(names for names, _ in parts), np.concatenate(lengths))

    def load_or_build(self, cache_key: list[Any], build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the result of `build`, which uses this scanner. For a large root, the result is cached under
        `cache_key` until a folder changes: adding, removing or renaming a file changes its folder's modification
        time."""
        from gpuload.datasets.stores.cached import load_or_build  # slow to import, and not needed by workers

        start_ns = time.time_ns()

        def scan() -> dict[str, np.ndarray]:
            arrays = build()
            folders = np.frombuffer(b"\0".join(self._mtimes_ns), np.uint8)
            return {**arrays, "folders": folders, "times": np.array(list(self._mtimes_ns.values()), np.int64)}

        def is_fresh(arrays: dict[str, np.ndarray]) -> bool:
            folders = arrays["folders"].tobytes().split(b"\0")
            return arrays["times"].tolist() == [self._mtime_ns_of(folder) for folder in folders]

        def is_cacheable(arrays: dict[str, np.ndarray]) -> bool:
            return int(arrays["times"].max()) < start_ns - SETTLED_NS

        return load_or_build(self.root, ["scan 2", *cache_key], scan, is_fresh=is_fresh, is_cacheable=is_cacheable)

    def _mtime_ns_of(self, folder: bytes) -> int:
        return os.stat(os.path.join(self._root_bytes, folder)).st_mtime_ns

    def _list_entries(self, folder: bytes) -> Iterator[tuple[os.DirEntry[bytes], bool]]:
        """Yield each entry of a folder and whether it is a folder; skip litter."""
        self._mtimes_ns[folder] = self._mtime_ns_of(folder)
        with os.scandir(os.path.join(self._root_bytes, folder)) as entries:
            for entry in entries:
                if entry.name[0] in STARTS and is_litter(entry.name):
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if is_folder or entry.name.lower().endswith(self._extensions):
                        self.skipped_files.add(os.path.join(folder, entry.name), folder=is_folder)
                else:
                    yield entry, self._is_folder(entry, folder)

    def _is_folder(self, entry: os.DirEntry[bytes], folder: bytes) -> bool:
        try:
            if not entry.is_dir():
                return False
        except OSError as error:
            raise self._circular_link(entry.path) if error.errno == errno.ELOOP else error from None
        if entry.is_symlink():
            self._check_inside(entry)
            self._check_no_cycle(entry, folder)
        return True

    def _is_file_or_broken_link(self, entry: os.DirEntry[bytes]) -> bool:
        """Return whether an entry is a regular file or a broken link. Other entries are skipped: reading a pipe might
        never end."""
        if not entry.is_symlink():
            return entry.is_file(follow_symlinks=False)
        self._check_inside(entry)
        try:
            return stat.S_ISREG(entry.stat().st_mode)
        except FileNotFoundError:
            return True  # keep the broken link, so that reading this sample raises the error

    def _check_inside(self, link: os.DirEntry[bytes]) -> None:
        if self._follow_links:
            return
        target = os.path.realpath(link.path)
        if target != self._real_root and not target.startswith(self._real_root.rstrip(b"/") + b"/"):
            raise ValueError(
                f"{os.fsdecode(link.path)!r} is a link that points outside {os.fsdecode(self._root_bytes)!r}, to "
                f"{os.fsdecode(target)!r}. To follow such links, pass follow_links=True"
            )

    def _check_no_cycle(self, link: os.DirEntry[bytes], folder: bytes) -> None:
        """Refuse a link to one of its parent folders: every cycle contains such a link."""
        target = link.stat()
        ancestor = self._root_bytes
        for name in [b"", *folder.split(b"/")]:
            ancestor = os.path.join(ancestor, name)
            if os.path.samestat(target, os.stat(ancestor)):
                raise self._circular_link(link.path)

    def _circular_link(self, link: bytes) -> ValueError:
        return ValueError(
            f"{os.fsdecode(link)!r} is a circular link (to {os.fsdecode(os.readlink(link))!r}); remove it"
        )


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as a str; raise a TypeError for anything else, such as a list of paths."""
    if not isinstance(path, str | bytes | os.PathLike):
        hint = "; create one dataset per path, and join them with +" if isinstance(path, list | tuple) else ""
        got = f"{one_line(repr(path))} ({type(path).__name__})"
        raise TypeError(f"expected a path, a str or pathlib.Path, got {got}{hint}")
    return os.fsdecode(path)


def full_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path; ``~`` is the user's home directory.

    Raises:
        FileNotFoundError: the home directory is unknown: HOME is not set, and the user has no passwd entry.
        TypeError: `path` is not a path.
    """
    full = os.path.expanduser(path_text(path))
    if full == "~" or full.startswith("~/"):  # otherwise abspath would use a folder named "~" in the working directory
        raise FileNotFoundError(
            f"the home directory for {path!r} is unknown: HOME is not set, and this user (uid {os.getuid()}) has no "
            "passwd entry; set HOME, or give the full path"
        )
    return os.path.abspath(full)


def normalize_index(index: SupportsIndex, count: int, describe: Callable[[], str]) -> int:
    """Convert an index that may be negative to an index that counts from 0; `describe` returns the end of the
    IndexError's message.

    Raises:
        TypeError: the index is not an integer.
        IndexError: the index is out of range.
    """
    if type(index) is int and 0 <= index < count:  # the fast path for samples
        return index
    number = integer("an index", index)
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of range: {describe()}")
    return number % count


class LazySequence(Sequence[Entry]):
    """A sequence that builds each entry on access, by calling `_build_entry(index)` with 0 ≤ index < length."""

    _entry_noun = "paths"  # the noun for the entries in error messages

    def _build_entry(self, index: int) -> Entry:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self._build_entry(i) for i in range(*index.indices(len(self)))]
        count = len(self)
        return self._build_entry(normalize_index(index, count, lambda: f"there are {count} {self._entry_noun}"))


class Paths(LazySequence[str]):
    """The paths of a dataset, in a sequence that builds each str on access.

    Args:
        root: the folder that all paths are relative to.
        data: uint8, the relative paths one after the other.
        offsets: n + 1 integers: the start of each path, and the end of the last path.

    Example:
        >>> paths = Paths.pack_relative("/data", [b"a.jpg", b"sub/b.jpg"])
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
        """Build paths from a buffer with all paths one after the other, and the length of each."""
        data = np.frombuffer(data, np.uint8)
        offsets = np.zeros(1 + len(lengths), np.uint32 if len(data) < WIDE_BYTES else np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(root, data, offsets)

    @classmethod
    def pack_relative(cls, root: str, paths: Sequence[bytes]) -> Paths:
        """Pack paths that are relative to the root."""
        return cls.pack(root, bytearray().join(paths), np.fromiter(map(len, paths), np.int64, len(paths)))

    @classmethod
    def concatenate(cls, root: str, parts: Sequence[Paths]) -> Paths:
        """Concatenate several `Paths` with the same root."""
        lengths = [np.diff(part.offsets) for part in parts]
        return cls.pack(
            root, bytearray().join(part.data.data for part in parts), np.concatenate([np.zeros(0, np.int64), *lengths])
        )

    @classmethod
    def pack_absolute(cls, root: str | os.PathLike[str], paths: Iterable[str | os.PathLike[str]]) -> Paths:
        """Pack paths that are absolute or relative to the working directory. The packed paths are relative to the root
        if all are inside it, and otherwise relative to ``/``."""
        names = [os.fsencode(path) for path in paths]
        prefix = os.path.join(os.fsencode(root), b"")
        if prefix and all(name.startswith(prefix) for name in names):
            return cls.pack_relative(os.path.abspath(os.fsdecode(root)), [name[len(prefix) :] for name in names])
        return cls.pack_relative("/", [os.path.abspath(name)[1:] for name in names])

    @property
    def nbytes(self) -> int:
        """The number of bytes of memory that the paths use."""
        return self.data.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _build_entry(self, index: int) -> str:
        start, end = self.offsets[index : index + 2].tolist()
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
