"""Reads complete image files. Refuses special files, files that are too large, and large files that do not start like
an image.

Runs in any process that reads a dataset. While a loader reads samples, `size_limits` applies the
loader's limits (`Decode.max_bytes` and `max_pixels`) to file sizes and to the sizes that files declare. Elsewhere, and
in threads that a dataset starts, the limits are `MAX_BYTES` and `MAX_PIXELS`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from gpuload.errors import DecodeError

__all__ = [
    "EXTENSIONS",
    "FORMAT_BY_ENDING",
    "MAX_BYTES",
    "MAX_PIXELS",
    "DiskReads",
    "byte_limit",
    "check_expanded",
    "check_large",
    "check_pixels",
    "check_size",
    "decode_error_at",
    "explain_large_file",
    "explain_non_image",
    "is_complete",
    "prefetch",
    "read_file",
    "read_starts",
    "size_limits",
    "sniff",
    "start_bytes",
]

# The same extensions as torchvision's, so that both libraries assign the same indices to the same files.
EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
MAX_BYTES: Final = 1 << 30
MAX_PIXELS: Final = 178_956_970  # Pillow's own limit
THREAD: Final = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
LARGE_BYTES = 16 << 20  # the first bytes of larger files are checked before the remaining bytes are read
FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # do not wait for a FIFO's writer
KINDS: Final[dict[int, str]] = {
    stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device",
}  # fmt: skip

FORMATS: Final = "JPEG, PNG, GIF, BMP, TIFF, WebP, AVIF, JPEG 2000, PNM and QOI"
STARTS: Final[dict[str, tuple[bytes, ...]]] = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "JPEG2000": (b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n"),
    "QOI": (b"qoif",),
}

# The format that each file name ending implies. Endings are compared in lower case.
FORMAT_BY_ENDING: Final = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".gif": "GIF", ".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF",
    ".webp": "WEBP", ".avif": "AVIF", ".jp2": "JPEG2000", ".ppm": "PPM", ".pgm": "PPM", ".qoi": "QOI",
}  # fmt: skip

# Files that are often found in place of images: the first bytes, then the kind of file and a remedy. Text is compared
# in lower case, without leading whitespace.
SERVER_PAGE: Final = "such as a server sends when it refuses a request; download the file again"
IN_THE_DATASET: Final = "decode it in the dataset and return gpuload.Image(array)"
NON_IMAGES: Final[tuple[tuple[bytes, str], ...]] = (
    (b"version https://git-lfs.github.com", "a Git LFS pointer, not the file itself; run `git lfs pull` there"),
    (b"<!doctype html", f"an HTML page, {SERVER_PAGE}"),
    (b"<html", f"an HTML page, {SERVER_PAGE}"),
    (b"<svg", "an SVG drawing, which has no pixels; render it to PNG"),
    (b"<?xml", f"XML, {SERVER_PAGE}, or render it to PNG if it is an SVG drawing"),
    (b"{", f"JSON or other text, {SERVER_PAGE}"),
    (b"%pdf-", "a PDF document; render its pages to PNG"),
    (b"%!ps", "a PostScript drawing; render it to PNG"),
    (b"pk\3\4", "a ZIP archive; unpack it"),
    (b"\x1f\x8b", "compressed by gzip; unpack it"),
    (b"\x93numpy", "a NumPy array; return gpuload.Image(numpy.load(path)), or read it with gpuload.ArrayFile"),
    (b"8bps", f"a Photoshop document; {IN_THE_DATASET}"),
    (b"\xff\n", f"JPEG XL; {IN_THE_DATASET} (pillow-jxl-plugin reads it)"),
    (b"\0\0\0\x0cjxl ", f"JPEG XL; {IN_THE_DATASET} (pillow-jxl-plugin reads it)"),
    (b"\0\x05\x16\x07", "a metadata file that macOS created (its name starts with ._), not the image; remove it"),
)
HEIF: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")

_limits: ContextVar[tuple[float, float]] = ContextVar("gpuload_limits", default=(MAX_BYTES, MAX_PIXELS))
_start_bytes: ContextVar[int | None] = ContextVar("gpuload_start_bytes", default=None)


@contextlib.contextmanager
def size_limits(max_bytes: int | None, max_pixels: int | None = MAX_PIXELS) -> Iterator[None]:
    """Limit the files that datasets read in this context to `max_bytes`, and masks to `max_pixels`; None means no
    limit."""
    token = _limits.set((math.inf if max_bytes is None else max_bytes, math.inf if max_pixels is None else max_pixels))
    try:
        yield
    finally:
        _limits.reset(token)


@contextlib.contextmanager
def read_starts(nbytes: int | None) -> Iterator[None]:
    """Have datasets read only the first `nbytes` bytes of image files in this context, where that saves time; None
    means complete files."""
    token = _start_bytes.set(nbytes)
    try:
        yield
    finally:
        _start_bytes.reset(token)


def start_bytes() -> int | None:
    """Return the number of bytes that suffice of each image file; None means all."""
    return _start_bytes.get()


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a complete file, or in the context `read_starts` its start. For 130 KB in the page cache, this takes 25 µs;
    `open(buffering=0)` takes 32, `open` 40.

    Raises:
        OSError: the file is missing, or is not a regular file.
        ValueError: no file can have this name.
        DecodeError: the file is larger than 16 MiB and exceeds the limit, or does not start like an image.
    """
    name, descriptors = os.fspath(path), []
    try:
        # ``descriptor = os.open(…)`` could leak: Python checks for ctrl-C between the call and the assignment, and the
        # exception would lose the descriptor. `map` puts it into the list without such a check. A context manager would
        # take 1 µs more.
        try:
            descriptors.extend(map(os.open, (path,), (FLAGS,)))
        except ValueError as error:  # a NUL byte, or half of a surrogate pair
            raise ValueError(f"no file can have the name {name!r} ({error}); correct the path") from error
        descriptor = descriptors[0]
        status = os.fstat(descriptor)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise _not_a_file_error(status.st_mode, name)
        if size > LARGE_BYTES:
            check_large(size, os.pread(descriptor, 32, 0), name)
        start = _start_bytes.get()
        if start is not None and size > start:
            return os.read(descriptor, start)
        data = os.read(descriptor, size)
        return data if len(data) == size and size else _read_rest(descriptor, data, name)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def prefetch(path: str | os.PathLike[str]) -> None:
    """Have the kernel prefetch a file. A file that cannot be read is ignored here: reading it raises the error."""
    descriptors: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        try:
            descriptors.extend(map(os.open, (path,), (FLAGS,)))  # as in `read_file`
            os.posix_fadvise(descriptors[0], 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _read_rest(descriptor: int, data: bytes, path: str) -> bytes:
    """Read the remaining bytes of a file, and return them after `data`, the bytes read so far. One call reads at most
    2 GiB, and some file systems report a size of 0 bytes."""
    parts, nbytes = [data], len(data)
    while part := os.read(descriptor, LARGE_BYTES):
        parts.append(part)
        nbytes += len(part)
        check_size(nbytes, path)
    return b"".join(parts)


def byte_limit() -> float:
    """Return the limit that `check_size` applies; infinity if there is no limit."""
    return _limits.get()[0]


def check_size(nbytes: int, source: str) -> None:
    """Check a number of bytes against the limit for file sizes.

    Raises:
        DecodeError: `nbytes` exceeds the limit; the error's `filename` is `source`.
    """
    if nbytes > byte_limit():
        raise decode_error_at(source, explain_large_file(nbytes, byte_limit()))


def check_large(nbytes: int, start: bytes, source: str) -> None:
    """Refuse a file of more than 16 MiB that exceeds the limit, or does not start like an image."""
    check_size(nbytes, source)
    if sniff(start) is None:
        raise decode_error_at(source, explain_non_image(start, nbytes))


def check_expanded(nbytes: int, what: str, remedy: str = "", path: str | None = None) -> None:
    """Check the size that a file declares for its content, before memory is allocated for it.

    Args:
        nbytes: the bytes of memory to allocate.
        what: the part of the file, such as ``"row group 3"``.
        remedy: an additional remedy, which starts with a comma.
        path: the file's path for the message; None if `what` identifies the file.

    Raises:
        DecodeError: `nbytes` exceeds `Decode.max_bytes`.
    """
    if nbytes > byte_limit():
        raise decode_error_at(
            path,
            f"{what} takes {nbytes:,} bytes of memory, more than max_bytes={byte_limit():,}: perhaps a "
            f"decompression bomb; if it is not, pass Loader(decode=Decode(max_bytes=…)){remedy}",
        )


def check_pixels(height: int, width: int, what: str, remedy: str = "") -> None:
    """Check an image size that does not come from the image's own header.

    Raises:
        DecodeError: the size exceeds `Decode.max_pixels`.
    """
    limit = _limits.get()[1]
    if height * width > limit:
        raise DecodeError(
            f"{what} has {width:,}×{height:,} = {width * height:,} pixels, more than max_pixels={limit:,}: perhaps a "
            f"decompression bomb; if it is not, pass Loader(decode=Decode(max_pixels=…)){remedy}"
        )


def decode_error_at(path: str | None, complaint: str) -> DecodeError:
    """Return a DecodeError with this complaint, preceded by the file's path if it is known."""
    error = DecodeError(complaint if path is None else f"{path!r}: {complaint}")
    error.filename = path
    return error


def _not_a_file_error(mode: int, path: str) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return OSError(errno.EINVAL, f"{KINDS.get(stat.S_IFMT(mode), 'a special file')}; expected a regular file", path)


def explain_large_file(nbytes: int, limit: float) -> str:
    """Return the message for a file of more than `Decode.max_bytes` bytes."""
    return (
        f"the file has {nbytes:,} bytes, more than max_bytes={limit:,}: perhaps it is not an image; if it is, pass "
        "Loader(decode=Decode(max_bytes=…))"
    )


def explain_non_image(start: bytes, nbytes: int) -> str:
    """Return the message for a file that does not start like an image."""
    if kind := _describe_kind(start):
        return f"not an image that gpuload decodes: {nbytes} bytes that start with {start[:16]!r}, {kind}"
    return (
        f"not an image that gpuload decodes: {nbytes} bytes that start with {start[:16]!r}; "
        f"expected one of {FORMATS}, recognised by its content"
    )


def _describe_kind(start: bytes) -> str | None:
    """Return the kind of a file that is not an image, with a remedy; None if the kind is unknown."""
    if start[4:8] == b"ftyp":
        if _brands(start) & {*HEIF, b"mif1", b"msf1"}:
            return f"a HEIC photograph; save it as JPEG, or {IN_THE_DATASET} (pillow-heif reads it)"
        return "a video; decode its frames in the dataset, and return a list of gpuload.Image(array)"
    if len(start) >= 16 and not start[:32].strip(b"\0"):
        return "zeros, as in a file that was never written; copy it again"
    text = start[:64].removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
    return next((kind for begin, kind in NON_IMAGES if text.startswith(begin) or start.lower().startswith(begin)), None)


def _brands(start: bytes) -> set[bytes]:
    """Return the major brand and the first compatible brands of an ISO base media file."""
    end = min(int.from_bytes(start[:4], "big"), 64, len(start))
    return {start[8:12], *(start[at : at + 4] for at in range(16, end - 3, 4))}


def sniff(data: bytes) -> str | None:
    """Return the format that the first bytes indicate, or None; the file's name does not matter."""
    for name, starts in STARTS.items():
        if data.startswith(starts):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"):
        return "AVIF"
    if data[4:8] == b"ftyp" and data[8:12] in (b"mif1", b"msf1"):  # brands that AVIF and HEIC share
        brands = _brands(data)
        return None if brands & set(HEIF) and not brands & {b"avif", b"avis"} else "AVIF"
    return "PPM" if data[:1] == b"P" and b"1" <= data[1:2] <= b"6" else None


def is_complete(data: bytes) -> bool:
    """Return whether a file starts like an image and, if its format marks its end, is not truncated. Any bytes after
    the end are ignored."""
    match sniff(data):
        case "JPEG":  # the end marker must follow the last scan: a thumbnail in the header has both, too
            return data.endswith(b"\xff\xd9") or data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda")
        case "PNG":
            return b"IEND\xaeB`\x82" in data
        case "WEBP":
            return len(data) >= 8 + int.from_bytes(data[4:8], "little")
        case kind:
            return kind is not None


class DiskReads:
    """A monitor of this thread's reads from this machine's disks, including read-ahead. The kernel does not count reads
    from network file systems."""

    def __init__(self) -> None:
        self._blocks = 0
        self.was_read()

    def was_read(self) -> bool:
        """Return whether anything was read since the last call."""
        previous_blocks, self._blocks = self._blocks, resource.getrusage(THREAD).ru_inblock
        return self._blocks != previous_blocks
