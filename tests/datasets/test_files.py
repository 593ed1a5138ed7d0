"""`read_file`, `sniff` and `prefetch`: size limits, files that are not images, and descriptors."""

from __future__ import annotations

import opcode
import os
import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from helpers import lacking
from helpers.both_loaders import gpuload_batches
from helpers.file_descriptors import open_below
from PIL import Image

import gpuload as gl
from gpuload.datasets.files import MAX_BYTES, DiskReads, prefetch, read_file, size_limits, sniff
from gpuload.datasets.joined import Mapped
from gpuload.datasets.stores.opening import OpenFile
from gpuload.errors import DecodeError

PACKAGE = os.path.dirname(gl.__file__)


@pytest.fixture
def jpeg(tmp_path) -> Path:
    path = tmp_path / "class" / "good.jpg"
    path.parent.mkdir()
    Image.new("RGB", (30, 20), (9, 99, 200)).save(path)
    return path


def write_sparse(path: Path, nbytes: int, start: bytes = b"") -> Path:
    path.write_bytes(start)
    os.truncate(path, nbytes)
    return path


def test_read_file_returns_all_bytes_even_of_a_file_without_a_size(jpeg):
    assert read_file(jpeg) == jpeg.read_bytes() == gl.read(jpeg).data
    command = Path("/proc/self/cmdline")
    assert command.stat().st_size == 0
    assert read_file(command) == command.read_bytes() != b""


@pytest.mark.parametrize("read", [read_file, gl.read])
def test_read_refuses_fifos_devices_folders_and_missing_files(tmp_path, read):
    fifo = tmp_path / "a.jpg"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match=re.escape(f"[Errno 22] a FIFO; expected a regular file: '{fifo}'")):
        read(fifo)
    with pytest.raises(OSError, match="a character device; expected a regular file: '/dev/zero'"):
        read("/dev/zero")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        read(tmp_path / "missing")
    assert open_below(tmp_path) == 0


def test_read_file_refuses_a_huge_sparse_file_without_reading_it(tmp_path):
    rss_before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = write_sparse(tmp_path / "a.jpg", 3 << 30, b"\xff\xd8\xff\xe0")
    text = (
        f"{str(path)!r}: the file has 3,221,225,472 bytes, more than max_bytes=1,073,741,824: perhaps it is not an "
        "image; if it is, pass Loader(decode=Decode(max_bytes=…))"
    )
    with pytest.raises(DecodeError, match=re.escape(text)) as caught:
        read_file(path)
    assert caught.value.filename == str(path)
    text = f"{str(path)!r}: not an image that gpuload decodes: 900000000 bytes that start with b'\\x00"
    with pytest.raises(DecodeError, match=re.escape(text)):
        read_file(write_sparse(path, 900_000_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_before_kib < 64 << 10


def test_size_limits_apply_inside_their_block(tmp_path):
    path = write_sparse(tmp_path / "a.jpg", 17 << 20, b"\xff\xd8\xff")  # more than LARGE_BYTES, 16 MiB
    with size_limits(max_bytes=17 << 20):
        with size_limits(1 << 20), pytest.raises(DecodeError, match="17,825,792 bytes, more than max_bytes=1,048,576"):
            read_file(path)
        assert len(read_file(path)) == 17 << 20
    assert gl.Decode().max_bytes == MAX_BYTES


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_errors_name_the_file_and_max_bytes(tmp_path, jpeg, num_workers):
    (fifo := jpeg.parent / "fifo.jpg").touch()
    large = write_sparse(jpeg.parent / "large.jpg", 17 << 20, jpeg.read_bytes())
    zeros = write_sparse(jpeg.parent / "zeros.jpg", 17 << 20)
    dataset = gl.ImageFolder(tmp_path)
    fifo.unlink()
    os.mkfifo(fifo)

    def load_epoch(**options) -> tuple[int, dict[str, str]]:
        loader = gl.Loader(dataset, 4, num_workers=num_workers, device="cpu", on_error="skip", ragged="list", **options)
        with pytest.warns(RuntimeWarning, match="it was skipped"), loader:
            images = sum(len(labels) for _, labels in loader)
        return images, {os.path.basename(error.source): error.cause for error in loader.errors}

    images, causes = load_epoch(decode=gl.Decode(max_bytes=1000))
    assert images == 1
    assert causes.keys() == {"fifo.jpg", "large.jpg", "zeros.jpg"}
    assert causes["fifo.jpg"].startswith("OSError: [Errno 22] a FIFO; expected a regular file")
    assert causes["large.jpg"].startswith(
        f"DecodeError: {str(large)!r}: the file has 17,825,792 bytes, more than max_b"
    )
    images, causes = load_epoch(decode=gl.Decode(max_bytes=None))
    assert images == 2
    assert causes["zeros.jpg"].startswith(f"DecodeError: {str(zeros)!r}: not an image that gpuload decodes")


def test_decoder_applies_max_bytes_to_bytes_in_memory(jpeg):
    from gpuload.decode import Decoder

    nbytes = jpeg.stat().st_size
    assert Decoder(gl.Decode(max_bytes=nbytes)).header(gl.read(jpeg)).width == 30
    with pytest.raises(DecodeError, match=f"the file has {nbytes} bytes, more than max_bytes={nbytes - 1}"):
        Decoder(gl.Decode(max_bytes=nbytes - 1)).header(gl.read(jpeg))


def ftyp(*brands: bytes) -> bytes:
    """Make the beginning of an ISO base media file."""
    content = b"ftyp" + brands[0] + bytes(4) + b"".join(brands[1:])
    return (4 + len(content)).to_bytes(4, "big") + content + b"\0\0\x01\xffmeta"


@pytest.mark.parametrize(
    ("expected", "starts"),
    [
        ("PPM", [b"P5 3 3 255\n"]),
        ("BMP", [b"BM"]),
        ("AVIF", [b"\0\0\0\x1cftypavif", ftyp(b"avif"), ftyp(b"avis", b"mif1"), ftyp(b"mif1", b"avif", b"heic")]),
        ("AVIF", [ftyp(b"mif1", b"miaf")]),
        (None, [b"P7 wrong", b"RIFF1234WAVE", b"\0\0\0\x1cftypmp42", b"", b"P"]),
    ],
)
def test_sniff_recognizes_the_first_bytes(expected, starts):
    assert [sniff(start) for start in starts] == [expected] * len(starts)


NOT_IMAGES = {
    "a HEIC photograph": ftyp(b"heic", b"mif1", b"heic"),
    "a HEIC photograph; save it as JPEG": ftyp(b"mif1", b"mif1", b"miaf", b"heic"),
    "a video; decode its frames in the dataset": ftyp(b"isom", b"isom", b"mp41"),
    "a Git LFS pointer, not the file itself; run `git lfs pull`": b"version https://git-lfs.github.com/spec/v1\n",
    "an HTML page": b"\r\n<!DOCTYPE html><html>",
    "XML": b"\xef\xbb\xbf<?xml version='1.0'?><Error><Code>AccessDenied",
    "JSON or other text": b'{"message": "not found"}',
    "an SVG drawing": b"<svg xmlns='http://www.w3.org/2000/svg'>",
    "a PDF document": b"%PDF-1.7\n",
    "a ZIP archive": b"PK\x03\x04\x14\0",
    "compressed by gzip": b"\x1f\x8b\x08\0",
    "a NumPy array": b"\x93NUMPY\x01\0v\0",
    "a Photoshop document": b"8BPS\0\1",
    "JPEG XL": b"\xff\n\xfa\x7f",
    "JPEG XL; decode it in the dataset": b"\0\0\0\x0cJXL \r\n\x87\n",
    "a metadata file that macOS created": b"\0\x05\x16\x07\0\2\0\0",
    "zeros, as in a file that was never written": bytes(100),
}


@pytest.mark.parametrize("kind", NOT_IMAGES)
def test_decode_error_names_the_format_of_a_file_that_is_not_an_image(kind, tmp_path):
    path, content = tmp_path / "photo.jpg", NOT_IMAGES[kind]
    path.write_bytes(content)
    with pytest.raises(gl.SampleError, match=re.escape(str(path))) as caught:
        gpuload_batches([gl.read(path)])
    start = f"DecodeError: not an image that gpuload decodes: {len(content)} bytes that start with {content[:16]!r}"
    assert caught.value.cause.startswith(f"{start}, {kind}")


@pytest.mark.parametrize("name", ["\ud800.jpg", "a\0b.jpg"])  # which JSON and tables may contain
def test_read_file_and_loader_name_a_path_that_no_file_can_have(name, tmp_path):
    path = os.path.join(tmp_path, name)
    text = re.escape(f"no file can have the name {path!r} (")
    with pytest.raises(ValueError, match=text):
        read_file(path)
    prefetch(path)  # prefetching ignores the error, which the sample raises
    with pytest.raises(gl.SampleError, match=text):
        gpuload_batches(Mapped([path], gl.read))


def is_interrupted_after(call: int, use: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt right after this call in gpuload, before its result is assigned, where Python checks for
    signals. Return whether there was such a call."""
    calls, was_call, tracer = 0, False, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal calls, was_call
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if was_call and (calls := calls + 1) == call:
                sys.settrace(None)
                raise KeyboardInterrupt
            was_call = opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
        return trace

    sys.settrace(trace)
    try:
        use()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracer)  # of a measurement of coverage
    return False


@pytest.mark.parametrize("read", [read_file, prefetch, OpenFile])
def test_interrupted_reads_close_their_descriptor(tmp_path: Path, read: Callable[[str], object]) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"\xff\xd8\xff" * 9)
    use, call = partial(read, str(path)), 1
    use()
    assert open_below(tmp_path) == 0
    while is_interrupted_after(call, use):
        assert open_below(tmp_path) == 0, call
        call += 1
    assert call > 3


def test_was_read_is_false_for_pages_in_the_page_cache_and_true_once(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        disk_reads = DiskReads()
        for advice in (os.POSIX_FADV_NORMAL, os.POSIX_FADV_DONTNEED):
            os.posix_fadvise(descriptor, 0, 0, advice)
            os.pread(descriptor, 1 << 20, 0)
            was_read = disk_reads.was_read()
            assert not (was_read and advice == os.POSIX_FADV_NORMAL)
    finally:
        os.close(descriptor)
    assert not disk_reads.was_read(), "a read must be reported only once"
    if not was_read:
        lacking.skip("a disk")
