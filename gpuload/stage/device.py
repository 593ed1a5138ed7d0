"""What gpuload asks of a device's runtime besides torch's operations: streams, events, page-locking, the last error,
how long the device takes, small arrays to the device, and names in the profiler.

All of this goes through torch's generic interface (`torch.accelerator`, `torch.Stream`, `torch.Event`), so it serves
CUDA, ROCm (which torch calls CUDA) and XPU alike. What belongs to CUDA and ROCm alone is named in this file, and
nowhere else but in DALI's engine, which knows no other devices.

Streams and events are torch's generic ones throughout: an event of `torch.cuda` takes no generic stream (2.11: an
error, on XPU a crash). No stream is entered with ``with stream:``, which notes on the stream itself what was current
before, so that neither two threads nor one thread twice can be within it.

Times are measured by events on the transfer's stream, of one batch in `EVERY`, as an event that keeps the time costs
the host a few µs. Nothing waits for these events: they are looked at when they have passed.

A copy from pageable memory makes the host wait for all that was issued on the stream before, and a stage uploads dozens
of small arrays for each batch. So `upload` goes through torch's cache of page-locked memory, which knows the stream
that reads it and keeps the memory until then.

A range of the profiler (`named`) costs microseconds even where nobody records it, so there is one only while a profiler
runs: four names, each at most a few times a batch, in the thread that iterates. NVIDIA's tools get them by
``emit_nvtx``. Runs in the main process.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuload.ring.packing import ALIGNMENT, Span, spans_of, write_arrays
from gpuload.ring.ring import align

__all__ = [
    "COPY",
    "DECODE",
    "EVERY",
    "KINDS",
    "NO_LOCKS",
    "STAGE",
    "WAIT",
    "Accelerator",
    "DeviceTimes",
    "capability",
    "current_device",
    "device_of",
    "generator_of",
    "is_available",
    "kind",
    "named",
    "pci_address",
    "shares_its_memory",
    "upload",
    "upload_together",
    "usual_type",
    "views_of",
]

KINDS: Final = ("cuda", "xpu")  # of torch's devices, those with streams that gpuload is written for
NO_LOCKS: Final = -1  # what `Accelerator.lock` returns where torch cannot page-lock memory of others
# The runtime's errors that are about the memory: invalid value, no memory, locked already, not locked, not supported.
# After others the device is broken, and nothing is allocated there: torch's allocator ends the process at the second
# error.
OF_LOCKS: Final = (1, 2, 712, 713, 801)
HIGH_PRIORITY: Final = -1
EVERY: Final = 8  # of this many batches, one is timed
# Names in the profiler.
WAIT: Final = "gpuload::wait"  # for the chunks of the batch that is due
DECODE: Final = "gpuload::decode"  # in this process: reading and decoding with num_workers=0; decoding on the device
STAGE: Final = "gpuload::stage"  # draws, transforms, collation; the copy is within it
COPY: Final = "gpuload::copy"  # slots → device

Name = TypeVar("Name")
_NOTHING: Final = contextlib.nullcontext()


class Accelerator:
    """The runtime of one device, which has an index. Streams and events are opaque to all who use it.

    Raises:
        RuntimeError: torch cannot use it here.
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
        """Record an event with a time: ``a.elapsed_time(b)`` gives the milliseconds between two that have passed; None
        where this runtime has no such events."""
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
        """Memory of the device that torch may still take: free, or held by its allocator without use; None means this
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


def kind() -> str | None:
    """The type of the devices that this build of torch is for, one of `KINDS`, whether there are any; else None."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and accelerator.type in KINDS else None


def is_available() -> bool:
    """Whether there is such a device. Makes no context on it."""
    return kind() is not None and torch.accelerator.is_available()


def usual_type() -> str:
    """The type of device for those who name none: that of the accelerator if one is available, else ``"cpu"``."""
    return str(kind()) if is_available() else "cpu"


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
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
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


class DeviceTimes:
    """Times of copies and stages on a device, measured for one batch in `EVERY`.

    Attributes:
        batches: how many were measured; copy_s and stage_s: what they took.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._coming = 0  # batches
        self._marks: list[Any] | None = None  # of the batch in work, if it is measured
        self._measured: deque[list[Any]] = deque()
        self.batches = 0
        self.copy_s = self.stage_s = 0.0

    def begin(self, stream: Any) -> None:
        """A batch begins."""
        measure = self._coming % EVERY == 0
        self._coming += 1
        self._marks = [] if measure else None
        self.mark(stream)

    def mark(self, stream: Any) -> None:
        """Mark a step of the batch as issued: nothing yet, its copies, all of it."""
        if self._marks is None:
            return
        event = self._device.record_time(stream)
        self._marks = None if event is None else [*self._marks, event]

    def end(self, stream: Any) -> None:
        """All of it was issued."""
        self.mark(stream)
        marks, self._marks = self._marks, None
        if marks is not None and len(marks) == 3:
            self._measured.append(marks)
        while self._measured and self._measured[0][-1].query():
            begun, copied, ended = self._measured.popleft()
            self.copy_s += begun.elapsed_time(copied) / 1e3
            self.stage_s += copied.elapsed_time(ended) / 1e3
            self.batches += 1


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on the device; on the CPU a view of the array."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray | Sequence[np.ndarray]], device: torch.device) -> list[torch.Tensor]:
    """Upload several arrays in one copy: a copy takes some ten microseconds, however small it is. Where several
    arrays of one type are given for one, they become one flat tensor, one after the other."""
    entries = [entry if isinstance(entry, Sequence) else [entry] for entry in arrays]
    spans, nbytes = spans_of(entries)
    flat = np.empty(nbytes, np.uint8)
    write_arrays(entries, spans, flat)
    tensors = views_of(upload(flat, device), dict(enumerate(spans)))
    return [
        tensor if isinstance(entry, Sequence) or entry.ndim == 1 else tensor.view(entry.shape)
        for entry, tensor in zip(arrays, tensors.values(), strict=True)
    ]


def views_of(memory: torch.Tensor, spans: Mapping[Name, Span], at: int = 0) -> dict[Name, torch.Tensor]:
    """The arrays that lie in a memory, uint8, from byte `at` on: flat tensors."""
    views, typed = {}, {}  # each view of a type takes some microseconds
    memory = memory[at : at + align(max([start + nbytes for start, nbytes, _ in spans.values()]), ALIGNMENT)]
    for name, (start, nbytes, kind) in spans.items():
        if kind not in typed:
            dtype: torch.dtype = getattr(torch, kind)
            typed[kind] = memory.view(dtype), dtype.itemsize
        tensor, size = typed[kind]
        views[name] = tensor[start // size : (start + nbytes) // size]
    return views


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of this name while a profiler runs, else nothing."""
    # Where torch no longer says whether one does, the range is always there, as are those of torch's own DataLoader.
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _NOTHING
