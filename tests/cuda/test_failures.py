"""Loaders on a GPU when memory runs out, when a kernel fails, and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import lacking

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda

TESTS = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}


class LargeImages:
    """Images so large that torch's allocator does not take their batches from larger blocks."""

    def __len__(self) -> int:
        return 10 * 64

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full((256, 256, 3), index // 64, np.uint8)


@pytest.fixture
def limit_memory():
    """Return a function that limits torch to a fraction of the device's memory."""

    def limit(fraction: float) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(fraction)

    yield limit
    limit(1.0)


def test_out_of_memory_is_an_error_only_of_its_batch(limit_memory):
    options = {"transforms": [T.RandomHorizontalFlip()], "num_workers": 1, "device": "cuda", "backend": "torch"}
    with gl.Loader(LargeImages(), 64, **options) as loader:
        batches, levels, errors = iter(loader), [], 0
        levels.append(int(next(batches)[0, 0, 0, 0]))
        limit_memory(1e-6)  # the allocator gets no more memory
        while True:
            try:
                levels.append(int(next(batches)[0, 0, 0, 0]))
            except StopIteration:
                break
            except torch.OutOfMemoryError:
                errors += 1
                limit_memory(1.0)  # the later batches succeed
        assert errors >= 1
        assert len(levels) == 10 - errors
        assert levels == sorted(levels)
        torch.cuda.synchronize()
        loader._session.transfer.reclaim(False)
        assert not loader._session.ring._busy


# Makes a program queue its operations on fake devices, like a test (fakecuda/running.py).
BEGIN_FAKE_DEVICES = """
from fakecuda.running import on_fake_devices

devices = on_fake_devices()
devices.__enter__()
"""


def run(program: str) -> str:
    program = textwrap.dedent(program)
    if lacking.IS_FAKE:
        program = BEGIN_FAKE_DEVICES + program
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=180
    )
    assert "closed" in result.stdout, result.stdout + result.stderr
    return result.stdout


@pytest.mark.processes
def test_failed_kernel_ends_the_epoch_and_close_returns():
    output = run(
        """
        import torch
        import gpuload as gl
        from gpuload import transforms as T
        from helpers.labelled_images import Pictures

        loader = gl.Loader(Pictures(400), 4, transforms=[T.RandomResizedCrop(16)], num_workers=2, device="cuda")
        batches = iter(loader)
        next(batches)
        torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]  # an assertion on the device
        try:
            for _ in batches:
                pass
        except RuntimeError as error:
            print(type(error).__name__, flush=True)
        transfer = loader._session.transfer
        loader.close()
        assert not transfer._copies and not transfer._locked_offsets
        print("closed", flush=True)
        """
    )
    assert "Error" in output


@pytest.mark.processes
def test_fork_of_a_process_with_cuda_can_create_loaders_on_the_cpu():
    output = run(
        """
        import os
        import gpuload as gl
        from gpuload import transforms as T
        from helpers.labelled_images import Pictures

        def loader(device):
            return gl.Loader(Pictures(40), 4, transforms=[T.RandomResizedCrop(16)], num_workers=1, device=device)

        outer = loader("cuda")
        batches = iter(outer)
        next(batches)
        child = os.fork()
        if child == 0:
            try:
                next(batches)
            except RuntimeError as error:
                print("parent's:", error, flush=True)
            print(len(list(loader("cpu"))), "on the CPU", flush=True)
            try:
                list(loader("cuda"))
            except (RuntimeError, ValueError) as error:
                print("on the GPU:", error, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(batches)) == 9
        outer.close()
        print("closed", flush=True)
        """
    )
    assert "create a new Loader in the child" in output
    assert "10 on the CPU" in output
    assert "forked subprocess" in output or "finds no CUDA device" in output
