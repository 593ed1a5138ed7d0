"""`run_and_capture`: the messages that C libraries print to standard error."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import pytest
from helpers import lacking

from gpuload.decode.native_messages import native_messages, one_line, run_and_capture

pytestmark = lacking.mark_missing("glibc", native_messages() is None)


def print_in_c(text: bytes) -> None:
    """Print to standard error like a C library."""
    libc = ctypes.CDLL(None)
    libc.fputs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    libc.fputs(text, ctypes.c_void_p.in_dll(libc, "stderr"))


def test_run_and_capture_returns_c_output_once_as_one_line(capfd):
    def call() -> int:
        print_in_c(b"Premature end of JPEG file\n")
        print_in_c(b"Corrupt JPEG data\n")
        return 3

    assert run_and_capture(call) == (3, "Premature end of JPEG file; Corrupt JPEG data")
    assert run_and_capture(int) == (0, "")
    assert capfd.readouterr().err == ""


def test_run_and_capture_appends_the_exception_to_the_c_output(capfd):
    def call() -> None:
        print_in_c(b"bad Huffman code\n")
        raise OSError("broken data stream")

    assert run_and_capture(call) == (None, "bad Huffman code; OSError: broken data stream")
    assert capfd.readouterr().err == ""


def test_run_and_capture_leaves_sys_stderr_and_descriptor_2_alone(capfd):
    def call() -> None:
        print("from Python", file=sys.stderr)
        os.write(2, b"from descriptor 2\n")

    assert run_and_capture(call) == (None, "")
    print_in_c(b"from C, afterwards\n")
    assert capfd.readouterr().err == "from Python\nfrom descriptor 2\nfrom C, afterwards\n"


def test_run_and_capture_restores_stderr_after_an_interrupt(capfd):
    def call() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_and_capture(call)
    print_in_c(b"after the interrupt\n")
    assert capfd.readouterr().err == "after the interrupt\n"


def test_run_and_capture_separates_threads():
    messages: dict[int, set[str]] = {0: set(), 1: set()}

    def run(number: int) -> None:
        for _ in range(200):
            messages[number].add(run_and_capture(print_in_c, b"thread %d\n" % number)[1])

    threads = [threading.Thread(target=run, args=(number,)) for number in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages == {0: {"thread 0"}, 1: {"thread 1"}}


def test_run_and_capture_truncates_long_output():
    _, message = run_and_capture(print_in_c, b"x" * 100_000)
    assert len(message) == 300
    assert message.endswith("…")
    assert run_and_capture(int) == (0, "")


def test_one_line_joins_lines_with_semicolons():
    assert one_line(" a \n\n b\n") == "a; b"
