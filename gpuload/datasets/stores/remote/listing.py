"""The image files below a URL, in the order that `Scanner` has them in on a disk."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from gpuload.datasets.litter import LeftOut, is_litter
from gpuload.datasets.stores.remote.client import Client

__all__ = ["RemoteScanner"]


class RemoteScanner:
    """Lists a folder once; see `Scanner`.

    Args:
        client, root: where.
        extensions: the endings of image files' names, lower case, with the dot.

    Attributes:
        left_out: what other programs keep there.
    """

    def __init__(self, client: Client, root: str, *, extensions: Iterable[str]) -> None:
        endings = tuple(extensions)
        self._folders: set[bytes] = set()
        self.left_out = LeftOut()
        found: list[tuple[bytes, bytes, bytes]] = []  # folder, name, and how the URL goes on
        for url, shown in client.files(root):
            name = os.fsencode(shown)
            if is_litter(name):
                if shown.lower().endswith(endings):
                    self.left_out.add(name)
                continue
            folder, _, own = name.rpartition(b"/")
            if folder:
                self._folders.add(folder.partition(b"/")[0])
            if shown.lower().endswith(endings):
                found.append((folder, own, os.fsencode(url)))
        found.sort()
        self._found = found

    def folders(self) -> list[bytes]:
        """The names of the folders directly in the root, sorted."""
        return sorted(self._folders)

    def images(self, start: bytes = b"") -> tuple[bytes, np.ndarray]:
        """The images at any depth below `start`: how their URLs go on after the root, joined without a separator, and
        the length of each."""
        urls = [
            url for folder, _, url in self._found if not start or folder == start or folder.startswith(start + b"/")
        ]
        return b"".join(urls), np.fromiter(map(len, urls), np.uint32, len(urls))
