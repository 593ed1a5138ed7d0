"""A stream of bytes read from its beginning on, unpacked if it is compressed: what a pass over archives reads from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from gpuload.datasets.stores.opening import open_stream
from gpuload.datasets.stores.tar.headers import Damage

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote

__all__ = ["COMPRESSED", "Sequential"]

COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
PIECE: Final = 1 << 20


class Sequential:
    """Reads at offsets that never decrease; what lies between is passed over.

    Args:
        path: a file, a FIFO, a URL, or ``"-"``.
        remote: how a URL is read.

    Attributes:
        position: how far it has come, in bytes that are unpacked.

    Raises:
        OSError: it cannot be opened.
        ImportError: it is compressed by zstd, and there is nothing to unpack that with.
    """

    def __init__(self, path: str, remote: Remote | None = None) -> None:
        self.path = path
        self.position = 0
        self._file = open_stream(path, remote)
        self._stream: Any = self._file
        try:
            start = self._file.peek(6)[:6]
            kind = next((kind for magic, kind in COMPRESSED.items() if start.startswith(magic)), None)
            self._seeks = kind is None and self._file.seekable()
            if kind is not None:
                self._stream = _unpacked(kind, self._file, path)
        except BaseException:
            self._file.close()
            raise

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """These bytes; fewer only where it ends.

        Raises:
            Damage: it cannot be unpacked.
        """
        try:
            if self._seeks and offset > self.position:
                end = self._size()
                self.position = self._file.seek(min(offset, end))
            while self.position < offset and (skipped := self._stream.read(min(PIECE, offset - self.position))):
                self.position += len(skipped)
            if self.position < offset:
                return b""
            parts, left = [], nbytes
            while left and (part := self._stream.read(min(PIECE, left))):
                parts.append(part)
                left -= len(part)
        except Exception as error:  # each library has errors of its own
            raise Damage(
                f"{self.path!r} cannot be read on after {self.position:,} bytes: {type(error).__name__}: {error}",
                self.position,
            ) from error
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.position += len(data)
        return data

    def _size(self) -> int:
        """The bytes of what is not compressed."""
        raw = self._file.raw
        return raw.size if hasattr(raw, "size") else os.fstat(self._file.fileno()).st_size

    def finish(self) -> None:
        """Read what cannot be passed over to its end: sums are checked there, and who writes to a pipe may end.

        Raises:
            Damage: it cannot be unpacked.
        """
        while not self._seeks and self.read_at(self.position, PIECE):
            pass

    def close(self) -> None:
        """Close the file."""
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()


def _unpacked(kind: str, file: Any, path: str) -> Any:
    if kind == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=file)
    if kind == "bzip2":
        import bz2

        return bz2.BZ2File(file)
    if kind == "xz":
        import lzma

        return lzma.LZMAFile(file)
    try:
        from compression import zstd  # from Python 3.14 on # pyright: ignore[reportMissingImports]

        return zstd.ZstdFile(file)
    except ModuleNotFoundError:
        pass
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ImportError(
            f"{path!r} is compressed by zstd, which Python unpacks from 3.14 on; before, it takes the package "
            "zstandard: pip install 'gpuload[zstd]'"
        ) from None
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
