"""The fake CUDA runtime with the interface of the simulated device, for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from fakecuda.operations import Operations
from fakecuda.running import on_fake_devices
from fakecuda.runtime import runtime
from simulated.machine import HostWait, where_the_host_waits

__all__ = ["FakeCuda", "fake"]


class FakeCuda:
    """The methods of `simulated.runtime.SimulatedCuda`, on the fake runtime."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.waits: list[HostWait] = []

    def stream(self, device: int = 0) -> Any:
        return torch.cuda.Stream(device)

    def default_stream(self, device: int = 0) -> Any:
        return torch.cuda.default_stream(device)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream()

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)

    def on_host(self, leaf: Any) -> Any:
        self.synchronize()
        return leaf.cpu() if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" else leaf

    def locked_ranges(self) -> int:
        return runtime().locked_ranges()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_stats()["active_bytes.all.peak"]

    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated()


@contextlib.contextmanager
def fake(policy: str, *, seed: int = 0, most_locks: int = -1) -> Iterator[FakeCuda]:
    """Use fake devices within a context; see `simulated.runtime.simulated`."""
    with on_fake_devices(policy, seed=seed) as operations:
        cuda = FakeCuda(operations)
        torch.cuda.reset_peak_memory_stats()

        def note_wait(what: str) -> None:
            cuda.waits.append(HostWait(what, *where_the_host_waits()))

        runtime().watch_waits(note_wait)
        operations.note_wait = note_wait
        try:
            with runtime().most_locks(most_locks):
                yield cuda
        finally:
            runtime().watch_waits(None)
