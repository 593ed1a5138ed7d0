"""`memory_file`: shared memory, and the errors of kernels, sandboxes and limits that do not allow it."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from helpers.programs import run_python

import gpuload as gl
from gpuload.datasets.memory import memory_file

MISSING_ERROR = r"^shared memory cannot be created \(.*\): gpuload needs the system call memfd_create, which requires"


def test_memory_file_has_its_size_and_is_not_inheritable():
    descriptor = memory_file("a-test", 5000)
    try:
        assert os.fstat(descriptor).st_size == 5000
        assert not os.get_inheritable(descriptor)
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:gpuload-a-test")
    finally:
        os.close(descriptor)


def raise_enosys(name, flags=0):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("missing_in", ["kernel", "python"])
def test_loader_and_cached_name_memfd_create_if_it_is_missing(workers, missing_in, monkeypatch):
    loader = gl.Loader([np.zeros(3)] * 4, num_workers=workers, device="cpu")
    if missing_in == "kernel":
        monkeypatch.setattr(os, "memfd_create", raise_enosys)
    else:
        monkeypatch.delattr(os, "memfd_create")
    with loader, pytest.raises(gl.LimitError, match=MISSING_ERROR):
        iter(loader)
    with pytest.raises(gl.LimitError, match=MISSING_ERROR):
        gl.Cached([1], 1 << 20)


def test_memory_file_raises_emfile_unchanged(monkeypatch):
    def raise_emfile(name, flags=0):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", raise_emfile)
    with pytest.raises(OSError, match="Too many open files"):
        memory_file("a-test")


ITERATE_WITH_A_FILE_SIZE_LIMIT = """
import resource
import numpy as np
import gpuload as gl

resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
for workers in (0, 1):
    with gl.Loader([np.zeros(3)] * 4, num_workers=workers, device="cpu") as loader:
        try:
            iter(loader)
        except gl.LimitError as error:
            print(error)
    with gl.Loader([np.zeros(3)] * 4, num_workers=workers, device="cpu", ring_bytes=16 << 20) as loader:
        print(len(list(loader)))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_loader_names_the_file_size_limit_and_a_ring_size_that_works():
    message = (
        "shared memory of 2,147,483,648 bytes (ring) exceeds this process's file size limit of 16,777,216 bytes; "
        "raise the limit (`ulimit -f unlimited`, or resource.RLIMIT_FSIZE in the program), or pass "
        "Loader(ring_bytes=16777216)"
    )
    assert run_python(ITERATE_WITH_A_FILE_SIZE_LIMIT)[0].splitlines() == [message, "4"] * 2
