"""The simulated device in place of CUDA.

gpuload runs unchanged. Besides operations, it uses a few functions of `torch.accelerator`, `torch.Stream`, events of
`torch.cuda` and the CUDA runtime's page-locking, all in `gpuload.stage.device`; the model replaces these.
`simulated.tensors` replaces torch's operations, and launches of Triton's kernels are queued like operations.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import lacking
from simulated.machine import HostWait, Machine, Stream
from simulated.memory import DeviceMemory, HostMemory
from simulated.tensors import DeviceTensor, Operations

__all__ = ["SimulatedCuda", "simulated"]

NO_LIMIT = 1 << 30
MEMORY_BYTES = 16 << 30  # always free


class SimulatedCuda:
    """A host with devices, as tests use them.

    Attributes:
        machine: the streams and their order.
        memory: the memory of the devices.
        host: the page-locked memory.
        operations: the mode that queues torch's operations in each thread.
    """

    def __init__(self, policy: str, *, seed: int = 0, most_locks: int = NO_LIMIT) -> None:
        self.machine = Machine(policy, seed=seed)
        self.memory = DeviceMemory(self.machine)
        self.host = HostMemory(most_locks)
        self.operations = Operations(self.machine, self.memory, self.host)

    @property
    def waits(self) -> list[HostWait]:
        return self.machine.waits

    def stream(self, device: int = 0) -> Stream:
        """Create a stream of the consumer."""
        return self.machine.new_stream(device)

    def default_stream(self, device: int = 0) -> Stream:
        return self.machine.defaults[device]

    def current_stream(self) -> Stream:
        return self.machine.current_stream()

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return self.machine.on(stream)

    def synchronize(self) -> None:
        self.machine.synchronize()

    def locked_ranges(self) -> int:
        return len(self.host.locked)

    def reserved_bytes(self) -> int:
        return self.memory.reserved_bytes

    def used_bytes(self) -> int:
        return self.memory.used_bytes

    def fail(self) -> None:
        """Queue an operation that fails on the current stream."""
        self.machine.issue(self.current_stream(), lambda: 1 // 0)

    def on_host(self, leaf: Any) -> Any:
        """Run all operations, and return the values of a tensor; return other objects unchanged."""
        self.machine.synchronize()
        return leaf.inner.clone() if isinstance(leaf, DeviceTensor) else leaf


@contextlib.contextmanager
def simulated(policy: str, *, seed: int = 0, most_locks: int = NO_LIMIT) -> Iterator[Any]:
    """Use a simulated device within a context, in this thread and in threads that start within it. If fakecuda/build.py
    started Python, use the fake CUDA runtime instead.

    Args:
        policy: a key of `simulated.machine.POLICIES`.
        seed: the seed of the policy ``"random"``.
        most_locks: how many ranges of memory can be page-locked at once.
    """
    if lacking.IS_FAKE:
        from simulated.fake import fake

        with fake(policy, seed=seed, most_locks=most_locks) as cuda:
            yield cuda
        return
    cuda = SimulatedCuda(policy, seed=seed, most_locks=most_locks)
    with pytest.MonkeyPatch.context() as patch:
        _replace_runtime(patch, cuda)
        _queue_launches(patch, cuda)
        run_now = threading.Thread.run

        def run(thread: threading.Thread) -> None:
            with cuda.operations:
                run_now(thread)

        patch.setattr(threading.Thread, "run", run)
        with cuda.operations:
            yield cuda


def _replace_runtime(patch: pytest.MonkeyPatch, cuda: SimulatedCuda) -> None:
    machine, host = cuda.machine, cuda.host

    def index_of(device: Any = None) -> int:
        if device is None or isinstance(device, int):
            return machine.current_device if device is None else device
        index = torch.device(device).index
        return machine.current_device if index is None else index

    def synchronize(device: Any = None) -> None:
        for stream in machine.streams:
            if stream.device.index == index_of(device):
                stream.synchronize()

    accelerator = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "is_available": lambda: True,
        "device_count": lambda: len(machine.defaults),
        "current_device_index": lambda: machine.current_device,
        "device_index": machine.on_device,
        "current_stream": lambda device=None: machine.current_stream(index_of(device)),
        "set_stream": machine.set_stream,
        "synchronize": synchronize,
    }
    for name, stand_in in accelerator.items():
        patch.setattr(torch.accelerator, name, stand_in)

    class GpuloadsStream(Stream):
        def __init__(self, device: Any, priority: int = 0) -> None:
            super().__init__(machine, index_of(device), side=True, priority=priority)
            machine.streams.append(self)

    class CudaEvent:
        """With the methods of `torch.cuda.Event`."""

        def __init__(self, *, blocking: bool) -> None:
            self._is_blocking = blocking

        def record(self, stream: Stream) -> None:
            recorded = machine.record(stream, is_blocking=self._is_blocking)
            self.query, self.synchronize = recorded.query, recorded.synchronize

    def cuda_stream(*, stream_id: int, device_index: int, device_type: int) -> Stream:
        key = stream_id, device_index, device_type
        return next(s for s in machine.streams if (s.stream_id, s.device_index, s.device_type) == key)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: host.lock(address, nbytes), cudaHostUnregister=host.unlock
    )
    patch.setattr(torch, "Stream", GpuloadsStream)
    patch.setattr(torch.cuda, "Event", CudaEvent)
    patch.setattr(torch.cuda, "Stream", cuda_stream)
    patch.setattr(torch.cuda, "cudart", lambda: runtime)
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)  # it raises, since this build has no CUDA
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "default_generators", (torch.default_generator,) * len(machine.defaults))
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (MEMORY_BYTES, MEMORY_BYTES))
    patch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    patch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x10, pci_device_id=0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: place)


def _queue_launches(patch: pytest.MonkeyPatch, cuda: SimulatedCuda) -> None:
    """Queue launches of kernels in Triton's interpreter as operations on their stream."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    launch = interpreter.GridExecutor.__call__

    def queued(executor: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(arg, DeviceTensor) for arg in args):
            cuda.operations.launch(lambda *arguments, **named: launch(executor, *arguments, **named), args, kwargs)
        else:
            launch(executor, *args, **kwargs)

    patch.setattr(interpreter.GridExecutor, "__call__", queued)
