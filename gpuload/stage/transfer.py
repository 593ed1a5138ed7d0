"""Slots → device: where the pixels of a batch go, and when its slots are free again.

On the CPU nothing moves: the stage reads the ring, and the slots are free when it is done. A batch of plain arrays in
one slot may be lent from that slot, until the user lets go of it.

Where the device decodes images, their files stay in the slots, and only what lies behind them is copied; the decoded
images come behind each chunk's own bytes, in a batch's one flat memory.

On a GPU the ring's slots are page-locked when they are made, and one side stream of high priority does everything: it
copies the used bytes of each slot into one buffer on the device, runs the stage, and records two events: after the
copies (then the slots are free again) and after the stage (the consumer's stream waits for it, the host does not). The
finished tensors are recorded on the consumer's stream, so that their memory is not handed out again while it still
reads them.

That memory comes back when the consumer is done with it, so a host that ran ahead without an end would take more with
each batch. It waits, in `hold_back`, for what the consumer's stream had been given two batches ago.

Runs in the main process, without a thread of its own.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import Ring, Slot, align
from gpuload.stage import device as devices
from gpuload.stage.device import DeviceTimes

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch, Part

__all__ = ["CpuTransfer", "CudaTransfer", "make_transfer", "rounded"]

# How many batches the consumer may have been handed whose work is not done when the next one is asked for. With one,
# a training step of a few milliseconds would wait for the host whenever this is interrupted.
STEPS_BEHIND: Final = 2
LEAST_GRAIN_BYTES: Final = 512  # of torch's allocator


class CpuTransfer:
    """The batch stays where it is."""

    asynchronous = False  # whether a batch may be issued while the previous one is in use
    held_s = 0.0  # how long the host has waited for the device
    pinned_bytes = 0  # of the ring
    pinning_refused = False
    times: DeviceTimes | None = None

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._release: Callable[[], None] | None = None
        self.loading: Batch | None = None  # the batch in hand, once its slots are given back here

    @contextlib.contextmanager
    def stream(self, *, after_consumer: bool) -> Iterator[None]:
        """Issue a batch within this; `after_consumer`: it waits for what the consumer has issued so far."""
        yield

    def follow(self) -> None:
        """All batches that are issued from now on wait for what the consumer has issued so far."""

    def side(self) -> contextlib.AbstractContextManager[None]:
        """The current stream is that of batches within this."""
        return contextlib.nullcontext()

    def mark(self) -> Any:
        """An event after all that was issued on that stream; it has ``synchronize()``. None means nothing is waited
        for."""

    def starts(self, batch: Batch) -> list[int]:
        """Where each part will be in the tensor that `load` gives."""
        return _offsets(batch) if not self.asynchronous and _in_slots(batch) else self._starts(batch)[:-1]

    def _starts(self, batch: Batch) -> list[int]:
        """Where each part begins in one memory, and the end: aligned, as images and blocks are viewed as their own
        type. A part whose first bytes are files begins before the memory that it takes."""
        starts, at = [], 0
        for part in batch.copied_parts:
            starts.append(begin := at - part.encoded_bytes)
            at = begin + align(part.used_bytes, ALIGN)
            if part.decoded is not None:
                at += align(len(part.decoded), ALIGN)
        return [*starts, at]

    def _fill(self, memory: torch.Tensor, batch: Batch, starts: Sequence[int]) -> None:
        """Copy the parts of a batch, and what the device decoded of them, to their places."""
        for part, start in zip(batch.copied_parts, starts, strict=True):
            if part.data is not None and part.used_bytes > part.encoded_bytes:
                source = part.data[part.encoded_bytes : part.used_bytes]
                target = memory[start + part.encoded_bytes : start + part.used_bytes]
                if self.asynchronous:
                    locked = not self.pinning_refused and part.slot is not None
                    target.copy_(torch.from_numpy(source), non_blocking=locked)
                else:  # by numpy, since in a fork torch would wait for threads that it lacks
                    target.numpy()[:] = source
            if (decoded := part.decoded) is not None:
                begin = start + align(part.used_bytes, ALIGN)
                memory[begin : begin + len(decoded)].copy_(decoded)

    def load(self, batch: Batch, release: Callable[[], None]) -> tuple[torch.Tensor, list[int]]:
        """The pixels as one flat uint8 tensor on the device, and each part's offset in it. From here on the transfer
        calls `release`, when the slots are free."""
        self._release, self.loading = release, batch
        if _in_slots(batch):
            return torch.from_numpy(self._ring.bytes), _offsets(batch)
        *starts, end = self._starts(batch)
        whole = torch.empty(end, dtype=torch.uint8)
        self._fill(whole, batch, starts)
        return whole, starts

    def finish(self) -> Any:
        """End a batch, issued or given up. Returns a ticket for `hand_over`."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def hold_back(self) -> None:
        """Wait until the consumer has not more than `STEPS_BEHIND` batches that it is not done with."""

    def hand_over(self, ticket: Any, tensors: list[torch.Tensor]) -> None:
        """Make the tensors safe to use on the caller's current stream."""

    def consumer(self) -> contextlib.AbstractContextManager[None]:
        """The caller's current stream is that of the batch within this."""
        return contextlib.nullcontext()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a small tensor of the batch (labels) to the device."""
        return tensor

    def lend(self, part: Part, arrays: Sequence[np.ndarray]) -> bool:
        """Lend a part's slot to arrays in it for as long as they live; whether that was possible."""
        if part.slot is None or not self._ring.lend(part.slot, arrays):
            return False
        part.slot = None
        return True

    def reclaim(self, wait: bool) -> bool:
        """Free slots that were copied, or whose users have let go; whether there were any. `wait`: for the oldest
        copy."""
        return self._ring.collect()

    def close(self) -> None:
        """Let go of the ring, which no worker writes to any more."""


class CudaTransfer(CpuTransfer):
    """Asynchronous copies on a side stream, from page-locked slots."""

    asynchronous = True

    def __init__(self, ring: Ring, device: torch.device) -> None:
        super().__init__(ring)
        self._device = devices.Accelerator(device)
        self._stream = self._device.new_stream(urgent=True)
        self._copied: deque[tuple[Any, Callable[[], None]]] = deque()  # events, and what gives the slots back
        self._steps: deque[Any] = deque()  # events: what was issued before the latest batches were handed over
        self._locked: set[int] = set()
        self.times = self._times = DeviceTimes(self._device)
        self._base = ring.bytes.ctypes.data
        ring.on_new = self._lock
        ring.on_retire = self._unlock

    @property
    def device(self) -> torch.device:
        return self._device.device

    @contextlib.contextmanager
    def stream(self, *, after_consumer: bool) -> Iterator[None]:
        if after_consumer:
            self.follow()
        with self._device.on(self._stream):
            self._times.begin(self._stream)
            yield

    def follow(self) -> None:
        self._device.wait(self._stream, self._device.record(self._device.current_stream()))

    def side(self) -> contextlib.AbstractContextManager[None]:
        return self._device.on(self._stream)

    def mark(self) -> Any:
        return self._device.record(self._stream)

    def load(self, batch: Batch, release: Callable[[], None]) -> tuple[torch.Tensor, list[int]]:
        *starts, used = self._starts(batch)
        flat = torch.empty(rounded(used), dtype=torch.uint8, device=self.device)[:used]
        try:
            self._fill(flat, batch, starts)
        finally:
            # Whatever happens next, the slots are free after this event, and not before.
            self._copied.append((self._device.record(self._stream), release))
            self.loading = batch
            self._times.mark(self._stream)
        return flat, starts

    def finish(self) -> Any:
        """An event after everything that the batch needs, its labels included."""
        self._times.end(self._stream)
        return self._device.record(self._stream)

    def hold_back(self) -> None:
        if len(self._steps) < STEPS_BEHIND:
            return
        oldest = self._steps.popleft()
        if not oldest.query():
            start = time.perf_counter()
            oldest.synchronize()
            self.held_s += time.perf_counter() - start

    def hand_over(self, ticket: Any, tensors: list[torch.Tensor]) -> None:
        consumer = self._device.current_stream()
        self._steps.append(self._device.record(consumer))
        self._device.wait(consumer, ticket)
        for tensor in tensors:
            self._device.keep(tensor, consumer)

    def consumer(self) -> contextlib.AbstractContextManager[None]:
        return self._device.on(self._device.current_stream())

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            tensor = tensor.pin_memory()
        except RuntimeError:
            if tensor.layout is torch.strided and not tensor.is_nested:
                raise
            # torch cannot page-lock this layout: the copy waits for what was issued before it.
        return tensor.to(self.device, non_blocking=True)

    def reclaim(self, wait: bool) -> bool:
        freed = False
        try:
            if wait and self._copied:
                start = time.perf_counter()
                self._copied[0][0].synchronize()
                self.held_s += time.perf_counter() - start
            while self._copied and self._copied[0][0].query():
                self._copied.popleft()[1]()
                freed = True
        except RuntimeError:
            self._give_up()
            raise
        return freed

    def _give_up(self) -> None:
        """Give all slots back: the device is broken, or has done all that it was given, so nothing reads them."""
        while self._copied:
            self._copied.popleft()[1]()

    def close(self) -> None:
        """Wait for the copies, and unlock every slot: memory must not be unmapped while it is registered."""
        with contextlib.suppress(RuntimeError):  # an earlier error may have broken the device's context
            self._device.synchronize(self._stream)
        self._give_up()
        self._steps.clear()
        self._ring.on_new = self._ring.on_retire = None
        for offset in self._locked:
            with contextlib.suppress(RuntimeError):
                self._device.unlock(self._base + offset)
        self._locked.clear()
        self.pinned_bytes = 0

    def _lock(self, slot: Slot) -> None:
        if self.pinning_refused:
            return
        code = self._device.lock(self._base + slot.offset, slot.capacity_bytes)
        if code == 0:
            self._locked.add(slot.offset)
            self.pinned_bytes += slot.capacity_bytes
            return
        self.pinning_refused = True
        if code != devices.NO_LOCKS:
            warnings.warn(
                f"the CUDA driver refused to page-lock {slot.capacity_bytes:,} bytes (cudaHostRegister: error {code}); "
                "batches are copied from pageable memory, which is slower and not asynchronous",
                RuntimeWarning,
                stacklevel=2,
            )

    def _unlock(self, slot: Slot) -> None:
        if slot.offset in self._locked:
            self._locked.discard(slot.offset)
            self.pinned_bytes -= slot.capacity_bytes
            self._device.unlock(self._base + slot.offset)


def _in_slots(batch: Batch) -> bool:
    """Whether no part was moved out of a full ring, and none has images that the device decoded."""
    return all((part.slot is not None or part.used_bytes == 0) and part.decoded is None for part in batch.copied_parts)


def _offsets(batch: Batch) -> list[int]:
    """Where each part begins in the ring."""
    return [part.slot.offset if part.slot else 0 for part in batch.copied_parts]


def rounded(nbytes: int) -> int:
    """A size for a buffer that differs little from batch to batch: at most an eighth more than `nbytes`, and the same
    for most batches, so that torch's allocator gives the same memory again instead of asking the driver for more."""
    return align(nbytes, max(LEAST_GRAIN_BYTES, 1 << max(0, nbytes.bit_length() - 4)))


def make_transfer(ring: Ring, device: torch.device) -> CpuTransfer:
    """Return the transfer for a device."""
    return CpuTransfer(ring) if device.type == "cpu" else CudaTransfer(ring, device)
