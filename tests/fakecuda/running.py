"""A test on fake devices: its operations and Triton's launches are queued, and what went wrong below it fails it."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from functools import cache
from typing import Final

import torch
from fakecuda import operations
from fakecuda.kernels import compile_without_ptxas, queue_kernels
from fakecuda.operations import Operations
from fakecuda.runtime import runtime

from benchmarks.interpreter import hasten

__all__ = ["IS_FAKE", "on_fake_devices"]

IS_FAKE: Final = "FAKECUDA" in os.environ
NOT_RUN: Final = "not run: "
SLEEP: Final = "spin_kernel"  # of `torch.cuda._sleep`: an operation without an effect is enough of it


@cache
def _prepare() -> None:
    torch.backends.cudnn.enabled = False
    if os.environ.get("TRITON_INTERPRET") == "1":
        hasten()
        queue_kernels()
    else:
        compile_without_ptxas()


@contextlib.contextmanager
def on_fake_devices(policy: str = "", *, seed: int = 1) -> Iterator[Operations]:
    """Operations are queued within this, under a policy, by default that of ``FAKECUDA_POLICY``.

    Raises:
        AssertionError: queued work failed, memory was misused, or torch launched kernels of its own, which are not run.
    """
    _prepare()
    runtime().mend()
    forget()
    with runtime().policy(policy or os.environ.get("FAKECUDA_POLICY", "eager"), seed), Operations() as mode:
        yield mode
    runtime().set_policy("eager")
    gc.collect()
    found = faults()
    forget()
    runtime().mend()
    assert not found, "\n".join(found)


def faults() -> list[str]:
    """What went wrong since `forget`, a text each."""
    counts = runtime().counts()
    unrun = [name for name in counts if name.startswith(NOT_RUN) and SLEEP not in name]
    return [*operations.failures, *runtime().violations(), *unrun]


def forget() -> None:
    operations.failures.clear()
    runtime().violations()
    runtime().forget_counts()
