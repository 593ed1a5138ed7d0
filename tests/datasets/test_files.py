"""Files that are none, or too large, are refused before they are read."""

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
from descriptors import open_below
from PIL import Image

import gpuload as gl
from gpuload.datasets.files import MAX_BYTES, limited, read_file, sniff, will_read
from gpuload.datasets.stores.opening import OpenFile
from gpuload.errors import DecodeError

PACKAGE = os.path.dirname(gl.__file__)


@pytest.fixture
def jpeg(tmp_path) -> Path:
    path = tmp_path / "class" / "good.jpg"
    path.parent.mkdir()
    Image.new("RGB", (30, 20), (9, 99, 200)).save(path)
    return path


def sparse(path: Path, nbytes: int, start: bytes = b"") -> Path:
    path.write_bytes(start)
    os.truncate(path, nbytes)
    return path


def test_a_file_is_read_whole(jpeg):
    assert read_file(jpeg) == jpeg.read_bytes() == gl.read(jpeg).data
    command = Path("/proc/self/cmdline")
    assert command.stat().st_size == 0
    assert read_file(command) == command.read_bytes() != b""


@pytest.mark.parametrize("read", [read_file, gl.read])
def test_what_is_no_file_is_refused_at_once(tmp_path, read):
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


def test_a_sparse_file_is_refused_unread(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = sparse(tmp_path / "a.jpg", 3 << 30, b"\xff\xd8\xff\xe0")
    text = (
        f"{str(path)!r}: the file has 3,221,225,472 bytes, more than max_bytes=1,073,741,824: perhaps it is no image; "
        "if it is one, pass Loader(decode=Decode(max_bytes=…))"
    )
    with pytest.raises(DecodeError, match=re.escape(text)) as caught:
        read_file(path)
    assert caught.value.filename == str(path)
    text = f"{str(path)!r}: not an image that gpuload decodes: 900000000 bytes that start with b'\\x00"
    with pytest.raises(DecodeError, match=re.escape(text)):
        read_file(sparse(path, 900_000_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert len(read_file(sparse(path, 20 << 20, b"\xff\xd8\xff\xe0"))) == 20 << 20


def test_the_limit_holds_where_it_is_set(tmp_path):
    path = sparse(tmp_path / "a.jpg", 17 << 20, b"\xff\xd8\xff")
    with limited(17 << 20):
        with limited(1 << 20), pytest.raises(DecodeError, match="17,825,792 bytes, more than max_bytes=1,048,576"):
            read_file(path)
        assert len(read_file(path)) == 17 << 20
    assert gl.Decode().max_bytes == MAX_BYTES


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_says_which_file_and_which_option(tmp_path, jpeg, num_workers):
    (fifo := jpeg.parent / "fifo.jpg").touch()
    large = sparse(jpeg.parent / "large.jpg", 17 << 20, jpeg.read_bytes())
    other = sparse(jpeg.parent / "other.jpg", 17 << 20)
    dataset = gl.ImageFolder(tmp_path)
    fifo.unlink()
    os.mkfifo(fifo)

    def epoch(**options) -> tuple[int, dict[str, str]]:
        loader = gl.Loader(dataset, 4, num_workers=num_workers, device="cpu", on_error="skip", ragged="list", **options)
        with pytest.warns(RuntimeWarning, match="left out"), loader:
            images = sum(len(labels) for _, labels in loader)
        return images, {os.path.basename(error.source): error.cause for error in loader.errors}

    images, causes = epoch(decode=gl.Decode(max_bytes=1000))
    assert images == 1
    assert causes.keys() == {"fifo.jpg", "large.jpg", "other.jpg"}
    assert causes["fifo.jpg"].startswith("OSError: [Errno 22] a FIFO; expected a regular file")
    assert causes["large.jpg"].startswith(
        f"DecodeError: {str(large)!r}: the file has 17,825,792 bytes, more than max_b"
    )
    images, causes = epoch(decode=gl.Decode(max_bytes=None))
    assert images == 2
    assert causes["other.jpg"].startswith(f"DecodeError: {str(other)!r}: not an image that gpuload decodes")


def test_bytes_in_memory_have_the_same_limit(jpeg):
    from gpuload.decode import Decoder

    nbytes = jpeg.stat().st_size
    assert Decoder(gl.Decode(max_bytes=nbytes)).header(gl.read(jpeg)).width == 30
    with pytest.raises(DecodeError, match=f"the file has {nbytes} bytes, more than max_bytes={nbytes - 1}"):
        Decoder(gl.Decode(max_bytes=nbytes - 1)).header(gl.read(jpeg))


@pytest.mark.parametrize(
    ("start", "expected"),
    [(b"P7 wrong", None), (b"P5 3 3 255\n", "PPM"), (b"RIFF1234WAVE", None), (b"\0\0\0\x1cftypavif", "AVIF"),
     (b"\0\0\0\x1cftypmp42", None), (b"BM", "BMP"), (b"", None), (b"P", None)],
)  # fmt: skip
def test_sniffing(start, expected):
    assert sniff(start) == expected


def interrupted_after(call: int, use: Callable[[], object]) -> bool:
    """Whether there was such a call of a function of gpuload, right after which a ctrl-C was raised: where Python looks
    for one, before what the call returned is assigned."""
    made, was_call = 0, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal made, was_call
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if was_call and (made := made + 1) == call:
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
        sys.settrace(None)
    return False


@pytest.mark.parametrize("what", ["read_file", "will_read", "OpenFile"])
def test_a_ctrl_c_loses_no_descriptor(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"\xff\xd8\xff" * 9)
    functions: dict[str, Callable[[str], object]] = {
        "read_file": read_file,
        "will_read": will_read,
        "OpenFile": OpenFile,
    }
    use = partial(functions[what], str(path))
    use()
    before, call = open_below(tmp_path), 1
    assert before == 0
    while interrupted_after(call, use):
        assert open_below(tmp_path) == 0, call
        call += 1
    assert call > 3
