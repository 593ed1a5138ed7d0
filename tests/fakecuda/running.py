"""Runs tests on fake devices: queues operations and Triton's launches, and fails a test for faults below torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Final

import torch
from fakecuda import operations
from fakecuda.kernels import compile_without_ptxas, queue_kernels
from fakecuda.operations import Operations
from fakecuda.runtime import GARBAGE, runtime

from benchmarks.interpreter import speed_up_interpreter

__all__ = ["on_fake_devices", "spoil_free_memory"]

NOT_RUN: Final = "not run: "
SLEEP: Final = "spin_kernel"  # of `torch.cuda._sleep`, which needs no effect here


@cache
def _prepare() -> None:
    torch.backends.cudnn.enabled = False
    if os.environ.get("TRITON_INTERPRET") == "1":
        speed_up_interpreter()
        queue_kernels()
    else:
        compile_without_ptxas()


@contextlib.contextmanager
def on_fake_devices(policy: str = "", *, seed: int = 1) -> Iterator[Operations]:
    """Queue operations within a context, in this thread and in threads that start within it, under a policy, by default
    that of ``FAKECUDA_POLICY``.

    Raises:
        AssertionError: queued work failed, memory was misused, or torch launched kernels of its own, which are not run.
    """
    _prepare()
    forget()
    torch.cuda.empty_cache()
    spoil_free_memory()  # its contents may be right by chance, as the same batch of an earlier test
    mode, run_now = Operations(), threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with mode:
            run_now(thread)

    with runtime().policy(policy or os.environ.get("FAKECUDA_POLICY", "eager"), seed), mode:
        threading.Thread.run = run
        try:
            yield mode
        finally:
            threading.Thread.run = run_now
    gc.collect()
    messages = faults()
    forget()
    assert not messages, "\n".join(messages)


def spoil_free_memory() -> None:
    """Overwrite unused memory of torch's allocator immediately, regardless of the streams."""
    for segment in torch.cuda.memory_snapshot() if torch.cuda.get_allocator_backend() == "native" else ():
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                address = runtime().reachable(block["address"], block["size"])
                assert address is not None
                ctypes.memset(address, GARBAGE, block["size"])


def faults() -> list[str]:
    """Return the texts of all faults since `forget`."""
    counts = runtime().counts()
    unrun = [name for name in counts if name.startswith(NOT_RUN) and SLEEP not in name]
    return [*operations.failures, *runtime().violations(), *unrun]


def forget() -> None:
    """Clear all faults, and repair broken devices."""
    runtime().mend()
    operations.failures.clear()
    runtime().violations()
    runtime().forget_counts()
