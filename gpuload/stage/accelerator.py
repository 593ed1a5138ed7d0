"""What gpuload asks of a device's runtime beside torch's operations: streams, events, page-locking, the last error.

All of it goes through torch's generic interface (`torch.accelerator`, `torch.Stream`, `torch.Event`), so it serves
CUDA, ROCm (which torch calls CUDA) and XPU alike. What is CUDA's and ROCm's alone is named in this file, and nowhere
else but in DALI's engine, which knows no other devices.

Streams and events are torch's generic ones throughout: an event of `torch.cuda` takes no generic stream (2.11: an
error, on XPU a crash). No stream is entered with ``with stream:``, which notes on the stream itself what was current
before, so that neither two threads nor one thread twice can be within it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "KINDS",
    "NO_LOCKS",
    "Accelerator",
    "accelerator",
    "capability",
    "current_device",
    "device_count",
    "device_of",
    "generator_of",
    "is_available",
    "kind",
    "pci_address",
    "shares_its_memory",
    "usual_type",
]

KINDS: Final = ("cuda", "xpu")  # of torch's devices, those with streams that gpuload is written for
NO_LOCKS: Final = -1  # what `Accelerator.lock` returns where torch cannot page-lock memory of others
# The runtime's errors that are about the memory: invalid value, no memory, locked already, not locked, not supported.
# After others the device is broken, and nothing is allocated there: torch's allocator ends the process at the second
# error.
OF_LOCKS: Final = (1, 2, 712, 713, 801)
HIGH_PRIORITY: Final = -1


class Accelerator:
    """The runtime of one device; made by `accelerator`. Streams and events are opaque to all who use it.

    Attributes:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._keeps_time = True
        torch.empty(0, device=device)  # the device's context, or torch's own words why there can be none

    def new_stream(self, *, urgent: bool = False) -> Any:
        """A stream of its own beside the default one; `urgent`: the device prefers its work to that of other streams,
        whenever it has to choose."""
        return torch.Stream(self.device, priority=HIGH_PRIORITY if urgent else 0)

    def current_stream(self) -> Any:
        """The caller's current stream on this device."""
        return torch.accelerator.current_stream(self.device)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """The device and one of its streams are current within this, in this thread."""
        with torch.accelerator.device_index(self.device.index):
            before = torch.accelerator.current_stream(self.device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def record(self, stream: Any) -> Any:
        """A new event, which passes when all that was issued on the stream is done. ``query()``: whether it has;
        ``synchronize()``: the host waits for it."""
        return stream.record_event()  # one that keeps no time; that of `torch.Event()` does

    def record_time(self, stream: Any) -> Any:
        """The same, and ``a.elapsed_time(b)`` gives the milliseconds between two that have passed; None where this
        runtime has no such events."""
        if self._keeps_time:
            with contextlib.suppress(RuntimeError):
                event = torch.Event(self.device, enable_timing=True)
                event.record(stream)
                return event
            self._keeps_time = False
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Whatever is issued on the stream from now on waits for the event; the host does not."""
        stream.wait_event(event)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do not use a tensor's memory again before what the stream has been given by the tensor's end is done. Of
        any layout; what is elsewhere is left alone (a jagged tensor keeps its longest and shortest row on the CPU)."""
        for part in _parts(tensor):
            if part.device.type == self.device.type:
                part.record_stream(stream)

    def synchronize(self, stream: Any) -> None:
        """The host waits for all that was issued on a stream."""
        stream.synchronize()

    def free_bytes(self) -> int | None:
        """Memory of the device that torch may still take: free, or held by its allocator without use; None: this
        runtime does not say."""
        module = torch.get_device_module(self.device)
        if not hasattr(module, "mem_get_info"):
            return None
        held = module.memory_reserved(self.device) - module.memory_allocated(self.device)
        return int(module.mem_get_info(self.device)[0]) + int(held)

    def lock(self, address: int, nbytes: int) -> int:
        """Page-lock memory, so that it can be copied from while the host goes on.

        Returns:
            0; `NO_LOCKS`; or the runtime's error, which is no longer its last one.
        """
        if self.device.type != "cuda":
            return NO_LOCKS
        with torch.accelerator.device_index(self.device.index):
            code = int(_runtime().cudaHostRegister(address, nbytes, 0))
            if code in OF_LOCKS:
                self._drop_last_error()
        return code

    def unlock(self, address: int) -> None:
        """Undo `lock`; nothing may be reading the memory."""
        with torch.accelerator.device_index(self.device.index):
            if int(_runtime().cudaHostUnregister(address)) in OF_LOCKS:
                self._drop_last_error()

    def _drop_last_error(self) -> None:
        """Let torch find the runtime's last error now, and not after its next launch, where it would be taken for that
        launch's. What it finds is no longer the last error, however torch is linked: a runtime whose error torch does
        not find here is one that it does not ask there either."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(1)


def accelerator(device: torch.device) -> Accelerator:
    """The runtime of a device.

    Raises:
        RuntimeError: torch cannot use it here.
    """
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return Accelerator(device)


def kind() -> str | None:
    """The type of the devices that this build of torch is for, one of `KINDS`, whether there are any; else None."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and found.type in KINDS else None


def is_available() -> bool:
    """Whether there is such a device. Makes no context on it."""
    return kind() is not None and torch.accelerator.is_available()


def usual_type() -> str:
    """The type of device for those who name none: that of the accelerator if one is available, else ``"cpu"``."""
    return str(kind()) if is_available() else "cpu"


def device_count() -> int:
    """How many there are."""
    return torch.accelerator.device_count() if kind() is not None else 0


def current_device() -> torch.device:
    """The current device, with its index; only where one is available."""
    return torch.device(str(kind()), torch.accelerator.current_device_index())


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A tensor's device is current within this; that of the CPU changes nothing."""
    return torch.accelerator.device_index(None if tensor.device.type == "cpu" else tensor.device.index)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that torch draws from on a device when none is given."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA's compute capability of a device; None for others. ROCm gives numbers of its own."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def shares_its_memory(device: torch.device) -> bool:
    """Whether torch allocates from the driver's own pool of a device, from which other libraries get what it frees."""
    if device.type != "cuda" or not hasattr(torch._C, "_cuda_getAllocatorBackend"):
        return False
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def pci_address(device: torch.device) -> str | None:
    """Where a device is on the PCI bus, as ``/sys/bus/pci/devices`` names it; None for one that torch does not say."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return None if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a tensor of any layout consists of."""
    if is_traceable_wrapper_subclass(tensor):  # a jagged one, say
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    tensor = tensor.detach()
    match tensor.layout:
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values()] if tensor.is_nested else [tensor]


def _runtime() -> Any:
    return torch.cuda.cudart()
