"""Access to a device's runtime beyond torch's operations: streams, events, page-locking, the last error, timing, small
uploads, and profiler ranges.

All of this goes through torch's generic interface (`torch.accelerator`, `torch.Stream`, `torch.Event`), so CUDA, ROCm
(which torch calls CUDA) and XPU share the same code. Calls that only CUDA and ROCm support are confined to this file
and to DALI's engine, which supports no other devices.

Streams, and events that streams wait for, are always torch's generic types: an event of `torch.cuda` does not accept a
generic stream (torch 2.11 raises an error; on XPU the process crashes). No stream is entered with ``with stream:``,
because that stores the previous stream on the stream object itself, so neither two threads nor nested blocks of one
thread could use the same stream.

A host that waits for a generic CUDA event spins, which takes a CPU from the workers, and torch ignores the option
`blocking` of such an event. So events that only the host waits for come from `Accelerator.record_for_host`.

Times are measured with events on the transfer's stream, for one batch in `TIMED_EVERY`, because a timing event costs
the host a few µs. Nothing waits for these events; they are read after they have passed.

A copy from pageable memory makes the host wait for all work issued on the stream before it, and a stage uploads dozens
of small arrays per batch. So `upload` goes through torch's cache of page-locked memory, which records the stream that
reads the memory, and does not reuse the memory until the copy is done.

A profiler range (`profiler_range`) costs microseconds even when nothing records it, so ranges are created only while a
profiler runs. There are four names, each used at most a few times per batch, in the iterating thread. NVIDIA's tools
see them through ``emit_nvtx``.

This module runs in the main process.
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
    "CANNOT_LOCK",
    "COPY",
    "DECODE",
    "DEVICE_TYPES",
    "STAGE",
    "TIMED_EVERY",
    "WAIT",
    "Accelerator",
    "DeviceTimes",
    "HostEvent",
    "capability",
    "current_device",
    "default_device_type",
    "generator_of",
    "is_available",
    "pci_address",
    "profiler_range",
    "shares_memory_pool",
    "supported_type",
    "upload",
    "upload_arrays",
    "use_device_of",
    "view_arrays",
]

DEVICE_TYPES: Final = ("cuda", "xpu")  # torch device types with streams that gpuload supports
CANNOT_LOCK: Final = -1  # returned by `Accelerator.lock` if torch cannot page-lock the ring's memory for this device
# Runtime errors that concern only the memory: invalid value, out of memory, already locked, not locked, not supported.
# After any other error the device is broken and nothing may be allocated there, because torch's allocator ends the
# process at the second error.
LOCK_ERRORS: Final = (1, 2, 712, 713, 801)
HIGH_PRIORITY: Final = -1
TIMED_EVERY: Final = 8  # one of this many batches is timed
# Names of profiler ranges.
WAIT: Final = "gpuload::wait"  # waiting for the chunks of the next batch
DECODE: Final = "gpuload::decode"  # in this process: reading and decoding with num_workers=0; decoding on the device
STAGE: Final = "gpuload::stage"  # drawing, transforms and collation; includes the copy
COPY: Final = "gpuload::copy"  # copying slots to the device

Name = TypeVar("Name")
HostEvent = torch.Event | torch.cuda.Event
_NO_RANGE: Final = contextlib.nullcontext()


class Accelerator:
    """The runtime of one device, which must have an index. Streams and events are opaque to callers.

    Raises:
        RuntimeError: torch cannot use the device here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._has_timing = True
        torch.empty(0, device=device)  # creates the device's context, or raises torch's own error

    def new_stream(self) -> torch.Stream:
        """Create a side stream, whose work the device schedules ahead of other streams' work."""
        return torch.Stream(self.device, priority=HIGH_PRIORITY)

    def current_stream(self) -> torch.Stream:
        """Return the caller's current stream on this device."""
        return torch.accelerator.current_stream(self.device)

    @contextlib.contextmanager
    def make_current(self, stream: torch.Stream) -> Iterator[None]:
        """Make the device and one of its streams current in this thread, within the ``with`` block."""
        with torch.accelerator.device_index(self.device.index):
            previous_stream = torch.accelerator.current_stream(self.device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(previous_stream)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Record an event that streams can `wait` for. It passes when all work issued on the stream so far is done."""
        return stream.record_event()  # without timing, unlike `torch.Event()`

    def record_for_host(self, stream: torch.Stream) -> HostEvent:
        """Record an event for which only the host waits. Its ``query()`` returns whether it has passed; its
        ``synchronize()`` waits until it passes, asleep on CUDA."""
        if self.device.type != "cuda":
            return self.record(stream)
        event = torch.cuda.Event(blocking=True)
        place = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
        event.record(torch.cuda.Stream(**place))
        return event

    def record_time(self, stream: torch.Stream) -> torch.Event | None:
        """Record a timing event: ``a.elapsed_time(b)`` returns the milliseconds between two passed events. Return None
        if this runtime has no timing events."""
        if self._has_timing:
            with contextlib.suppress(RuntimeError):
                event = torch.Event(self.device, enable_timing=True)
                event.record(stream)
                return event
            self._has_timing = False
        return None

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make all work issued on the stream from now on wait for the event; the host does not wait."""
        stream.wait_event(event)

    def keep(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Keep torch from reusing a tensor's memory until all work issued on the stream before the tensor is freed is
        done. Accepts any layout, and skips parts on other devices (a jagged tensor stores the lengths of its longest
        and shortest row on the CPU)."""
        for part in _strided_parts(tensor):
            if part.device.type == self.device.type:
                part.record_stream(stream)

    def synchronize(self, stream: torch.Stream) -> None:
        """Make the host wait for all work issued on a stream."""
        self.record_for_host(stream).synchronize()

    def free_bytes(self) -> int | None:
        """Return how much of the device's memory torch can still use: free memory, and memory that torch's
        allocator reserves but does not use. Return None if this runtime does not report these sizes."""
        module = torch.get_device_module(self.device)
        if not hasattr(module, "mem_get_info"):
            return None
        unused_bytes = module.memory_reserved(self.device) - module.memory_allocated(self.device)
        return int(module.mem_get_info(self.device)[0]) + int(unused_bytes)

    def lock(self, address: int, nbytes: int) -> int:
        """Page-lock memory, so that copies from it are asynchronous.

        Returns:
            0 on success, `CANNOT_LOCK`, or the runtime's error code. An error in `LOCK_ERRORS` is also cleared as the
            runtime's last error.
        """
        if self.device.type != "cuda":
            return CANNOT_LOCK
        with torch.accelerator.device_index(self.device.index):
            code = int(_runtime().cudaHostRegister(address, nbytes, 0))
            if code in LOCK_ERRORS:
                self._clear_last_error()
        return code

    def unlock(self, address: int) -> None:
        """Undo `lock`; no copy from the memory may be in flight."""
        with torch.accelerator.device_index(self.device.index):
            if int(_runtime().cudaHostUnregister(address)) in LOCK_ERRORS:
                self._clear_last_error()

    def _clear_last_error(self) -> None:
        """Make torch find and clear the runtime's last error now. Otherwise torch would find it after its next launch,
        and blame that launch. This works however torch is linked: if torch does not see this runtime's
        errors here, it does not see them after launches either."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(1)


def supported_type() -> str | None:
    """Return the device type, one of `DEVICE_TYPES`, that this torch build supports, even if no such device is present;
    None if this build supports neither type."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and accelerator.type in DEVICE_TYPES else None


def is_available() -> bool:
    """Return whether a device of the `supported_type` is present. Does not create a context on the device."""
    return supported_type() is not None and torch.accelerator.is_available()


def default_device_type() -> str:
    """Return the default device type: the accelerator's if one is available, else ``"cpu"``."""
    return str(supported_type()) if is_available() else "cpu"


def current_device() -> torch.device:
    """Return the current device, with its index; an accelerator must be available."""
    return torch.device(str(supported_type()), torch.accelerator.current_device_index())


def use_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Make a tensor's device current within the ``with`` block; do nothing for CPU tensors."""
    return torch.accelerator.device_index(None if tensor.device.type == "cpu" else tensor.device.index)


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return a device's CUDA compute capability; None if it is not a CUDA device. ROCm devices return the
    version of their AMD architecture."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def shares_memory_pool(device: torch.device) -> bool:
    """Return whether torch allocates from the driver's memory pool of a device, from which other libraries can get
    memory that torch has freed."""
    if device.type != "cuda" or not hasattr(torch._C, "_cuda_getAllocatorBackend"):
        return False
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def pci_address(device: torch.device) -> str | None:
    """Return a device's PCI address, in the format of ``/sys/bus/pci/devices``; None if torch does not report it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    ids = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return None if None in ids else "{:04x}:{:02x}:{:02x}.0".format(*ids)


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that a tensor of any layout consists of."""
    if is_traceable_wrapper_subclass(tensor):  # such as a jagged tensor
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _strided_parts(getattr(tensor, name))]
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
    """Times of copies and stages on a device, measured for one batch in `TIMED_EVERY`.

    Attributes:
        batches: the number of measured batches.
        copy_s, stage_s: the total times of the measured batches' copies and stages.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._batches_begun = 0
        self._marks: list[torch.Event] | None = None  # the events of the current batch, if it is measured
        self._pending: deque[list[torch.Event]] = deque()  # the events of measured batches that have not passed yet
        self.batches = 0
        self.copy_s = self.stage_s = 0.0

    def begin(self, stream: torch.Stream) -> None:
        """Begin a batch."""
        is_measured = self._batches_begun % TIMED_EVERY == 0
        self._batches_begun += 1
        self._marks = [] if is_measured else None
        self.mark(stream)

    def mark(self, stream: torch.Stream) -> None:
        """Record a timing event. Called at the beginning of a batch, after its copies, and at its end."""
        if self._marks is None:
            return
        event = self._device.record_time(stream)
        self._marks = None if event is None else [*self._marks, event]

    def end(self, stream: torch.Stream) -> None:
        """End a batch whose work has all been issued; add the times of the batches that have passed."""
        self.mark(stream)
        marks, self._marks = self._marks, None
        if marks is not None and len(marks) == 3:
            self._pending.append(marks)
        while self._pending and self._pending[0][-1].query():
            start, copy_end, end = self._pending.popleft()
            self.copy_s += start.elapsed_time(copy_end) / 1e3
            self.stage_s += copy_end.elapsed_time(end) / 1e3
            self.batches += 1


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device, asynchronously; on the CPU, return a view of it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_arrays(arrays: Sequence[np.ndarray | Sequence[np.ndarray]], device: torch.device) -> list[torch.Tensor]:
    """Upload arrays in a single copy, because each copy takes about ten microseconds, however small it is. An entry can
    be a sequence of arrays of one dtype, which are concatenated into one flat tensor."""
    entries = {index: entry if isinstance(entry, Sequence) else [entry] for index, entry in enumerate(arrays)}
    spans, nbytes = spans_of(entries)
    flat = np.empty(nbytes, np.uint8)
    write_arrays(entries, spans, flat)
    tensors = view_arrays(upload(flat, device), spans)
    return [
        tensor if isinstance(entry, Sequence) or entry.ndim == 1 else tensor.view(entry.shape)
        for entry, tensor in zip(arrays, tensors.values(), strict=True)
    ]


def view_arrays(memory: torch.Tensor, spans: Mapping[Name, Span], begin: int = 0) -> dict[Name, torch.Tensor]:
    """Return the arrays stored in a uint8 tensor, starting at byte `begin`, as flat tensors. `spans` has each array's
    position."""
    views, typed_memory = {}, {}  # creating a view with another dtype takes microseconds, so there is one per dtype
    memory = memory[begin : begin + align(max([start + nbytes for start, nbytes, _ in spans.values()]), ALIGNMENT)]
    for name, (start, nbytes, dtype_name) in spans.items():
        if dtype_name not in typed_memory:
            dtype: torch.dtype = getattr(torch, dtype_name)
            typed_memory[dtype_name] = memory.view(dtype), dtype.itemsize
        tensor, size = typed_memory[dtype_name]
        views[name] = tensor[start // size : (start + nbytes) // size]
    return views


def profiler_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a profiler range with this name while a profiler runs, else a context that does nothing."""
    # If torch stops reporting whether a profiler runs, ranges are always created, as in torch's own DataLoader.
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _NO_RANGE
