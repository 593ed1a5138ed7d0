"""Moves the pixels of a batch from the ring's slots to the device, and frees the slots.

On the CPU nothing is copied: the stage reads the ring, and the slots are free when the stage is done. A batch of plain
arrays in one slot can be lent directly from that slot, until the user releases the arrays.

If the device decodes images, their files stay in the slots, and only the bytes after the files are copied. The decoded
images follow each chunk's own bytes, in one flat tensor per batch.

On a GPU the ring's slots are page-locked when they are created, and one high-priority side stream does all the work: it
copies the used bytes of each slot into one buffer on the device, runs the stage, and records two events: one after the
copies (from then on the slots are free) and one after the stage (the consumer's stream waits for it, the host does
not). The finished tensors are recorded on the consumer's stream, so that the allocator does not reuse their memory
while that stream still reads them.

The memory of a batch becomes reusable only when the consumer is done with the batch, so a host that ran ahead without
limit would allocate more with each batch. In `hold_back`, the host therefore waits until the consumer's stream has
finished the work that was queued two batches ago.

This module runs in the main process, in the thread that iterates. Images that the device decodes come from other
threads and streams (`gpuload.stage.decode.threads`).
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import Ring, Slot, align
from gpuload.stage import device as devices
from gpuload.stage.device import DeviceTimes, HostEvent

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch, BatchPart

__all__ = ["CpuTransfer", "CudaTransfer", "make_transfer", "round_up_bytes"]

# How many batches may be unfinished on the consumer's stream when the next batch is requested. With one, a training
# step of a few milliseconds would wait for the host whenever the host is interrupted.
STEPS_BEHIND: Final = 2
MIN_GRAIN_BYTES: Final = 512  # granularity of torch's allocator


class CpuTransfer:
    """A transfer that does not move batches. This class also defines the interface of all transfers."""

    is_asynchronous = False  # whether a batch can be issued while the previous batch is in use
    host_wait_s = 0.0  # how long the host has waited for the device
    pinned_bytes = 0  # page-locked bytes of the ring
    pinning_refused = False
    times: DeviceTimes | None = None

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._release: Callable[[], None] | None = None
        self.loading: Batch | None = None  # the current batch, once this transfer is responsible for freeing its slots

    @contextlib.contextmanager
    def stream(self, *, after_consumer: bool) -> Iterator[None]:
        """Issue a batch within the ``with`` block. With `after_consumer`, the batch waits for all work that the
        consumer has issued so far."""
        yield

    def follow_consumer(self) -> None:
        """Make all batches issued from now on wait for the work that the consumer has issued so far."""

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Make the stream on which batches are made current within the ``with`` block."""
        return contextlib.nullcontext()

    def wait_for(self, event: torch.Event) -> None:
        """Make the stream of `side_stream` wait for an event of another stream."""

    def part_offsets(self, batch: Batch) -> list[int]:
        """Return the offset that each part will have in the tensor returned by `load`."""
        return (
            _slot_offsets(batch)
            if not self.is_asynchronous and _is_in_slots(batch)
            else self._packed_offsets(batch)[:-1]
        )

    def _packed_offsets(self, batch: Batch) -> list[int]:
        """Return the offset of each part in one flat tensor, and the tensor's size. Offsets are aligned, because images
        and blocks are viewed as their own dtype. Files at the beginning of a part are not copied, so the offset of a
        part with files is smaller than the offset of the part's first copied byte, and can be negative."""
        starts, offset = [], 0
        for part in batch.copied_parts:
            starts.append(begin := offset - part.encoded_bytes)
            offset = begin + align(part.used_bytes, ALIGN)
            if part.decoded is not None:
                offset += align(len(part.decoded), ALIGN)
        return [*starts, offset]

    def _fill(self, memory: torch.Tensor, batch: Batch, starts: Sequence[int]) -> None:
        """Copy the parts of a batch, and the images that the device decoded for them, to their offsets."""
        for part, start in zip(batch.copied_parts, starts, strict=True):
            if part.data is not None and part.used_bytes > part.encoded_bytes:
                source = part.data[part.encoded_bytes : part.used_bytes]
                target = memory[start + part.encoded_bytes : start + part.used_bytes]
                if self.is_asynchronous:
                    is_locked = not self.pinning_refused and part.slot is not None
                    target.copy_(torch.from_numpy(source), non_blocking=is_locked)
                else:  # with numpy, because torch in a forked process would wait for threads that do not exist there
                    target.numpy()[:] = source
            if (decoded := part.decoded) is not None:
                begin = start + align(part.used_bytes, ALIGN)
                memory[begin : begin + len(decoded)].copy_(decoded)

    def load(self, batch: Batch, release: Callable[[], None]) -> tuple[torch.Tensor, list[int]]:
        """Return the pixels as one flat uint8 tensor on the device, and each part's offset in it. From here on,
        the transfer is responsible for calling `release` when the slots are free."""
        self._release, self.loading = release, batch
        if _is_in_slots(batch):
            return torch.from_numpy(self._ring.bytes), _slot_offsets(batch)
        *starts, end = self._packed_offsets(batch)
        flat = torch.empty(end, dtype=torch.uint8)
        self._fill(flat, batch, starts)
        return flat, starts

    def finish(self) -> torch.Event | None:
        """End a batch, whether it was issued or abandoned. Return a ticket for `hand_over`."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def hold_back(self) -> None:
        """Wait until at most `STEPS_BEHIND` batches are unfinished on the consumer's stream."""

    def hand_over(self, ticket: torch.Event | None, tensors: list[torch.Tensor]) -> None:
        """Make the tensors safe to use on the caller's current stream."""

    def consumer_stream(self) -> contextlib.AbstractContextManager[None]:
        """Make the batch's device, and the caller's current stream on it, current within the ``with`` block."""
        return contextlib.nullcontext()

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of a small tensor, such as labels; on the CPU, return the tensor itself."""
        return tensor

    def lend(self, part: BatchPart, arrays: Sequence[np.ndarray]) -> bool:
        """Lend a part's slot to the arrays in it until they are collected; return whether that was possible."""
        if part.slot is None or not self._ring.lend(part.slot, arrays):
            return False
        part.slot = None
        return True

    def reclaim(self, wait: bool) -> bool:
        """Free the slots that have been copied, or whose users have released them; return whether any slots were freed.
        With `wait`, wait for the oldest copy first."""
        return self._ring.collect()

    def close(self) -> None:
        """Release the ring, after all workers have stopped writing to it."""


class CudaTransfer(CpuTransfer):
    """A transfer by asynchronous copies on a side stream, from page-locked slots."""

    is_asynchronous = True

    def __init__(self, ring: Ring, device: torch.device) -> None:
        super().__init__(ring)
        self._device = devices.Accelerator(device)
        self._stream = self._device.new_stream()
        self._copies: deque[tuple[HostEvent, Callable[[], None]]] = (
            deque()
        )  # events, and the functions that free the slots
        self._hand_overs: deque[HostEvent] = (
            deque()
        )  # for each of the last batches, an event recorded before its hand-over
        self._locked_offsets: set[int] = set()  # offsets of page-locked slots
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
            self.follow_consumer()
        with self._device.make_current(self._stream):
            self._times.begin(self._stream)
            yield

    def follow_consumer(self) -> None:
        self._device.wait(self._stream, self._device.record(self._device.current_stream()))

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        return self._device.make_current(self._stream)

    def wait_for(self, event: torch.Event) -> None:
        self._device.wait(self._stream, event)

    def load(self, batch: Batch, release: Callable[[], None]) -> tuple[torch.Tensor, list[int]]:
        *starts, used_bytes = self._packed_offsets(batch)
        flat = torch.empty(round_up_bytes(used_bytes), dtype=torch.uint8, device=self.device)[:used_bytes]
        try:
            self._fill(flat, batch, starts)
        finally:
            # Whatever happens next, the slots become free after this event and not earlier.
            self._copies.append((self._device.record_for_host(self._stream), release))
            self.loading = batch
            self._times.mark(self._stream)
        return flat, starts

    def finish(self) -> torch.Event | None:
        """Record an event after all work of the batch, including the copies of its labels."""
        self._times.end(self._stream)
        return self._device.record(self._stream)

    def hold_back(self) -> None:
        if len(self._hand_overs) < STEPS_BEHIND:
            return
        oldest = self._hand_overs.popleft()
        if not oldest.query():
            start = time.perf_counter()
            oldest.synchronize()
            self.host_wait_s += time.perf_counter() - start

    def hand_over(self, ticket: torch.Event | None, tensors: list[torch.Tensor]) -> None:
        assert ticket is not None
        consumer = self._device.current_stream()
        self._hand_overs.append(self._device.record_for_host(consumer))
        self._device.wait(consumer, ticket)
        for tensor in tensors:
            self._device.keep(tensor, consumer)

    def consumer_stream(self) -> contextlib.AbstractContextManager[None]:
        return self._device.make_current(self._device.current_stream())

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            tensor = tensor.pin_memory()
        except RuntimeError:
            if tensor.layout is torch.strided and not tensor.is_nested:
                raise
            # torch cannot page-lock this layout, so the host waits for the copy, and for all work issued before it.
        return tensor.to(self.device, non_blocking=True)

    def reclaim(self, wait: bool) -> bool:
        has_freed = False
        try:
            if wait and self._copies:
                start = time.perf_counter()
                self._copies[0][0].synchronize()
                self.host_wait_s += time.perf_counter() - start
            while self._copies and self._copies[0][0].query():
                self._copies.popleft()[1]()
                has_freed = True
        except RuntimeError:
            self._free_all()
            raise
        return has_freed

    def _free_all(self) -> None:
        """Free all slots. No copy may be reading them: the device is broken, or has finished its work."""
        while self._copies:
            self._copies.popleft()[1]()

    def close(self) -> None:
        """Wait for the copies, and unlock every slot, because memory must not be unmapped while it is registered."""
        with contextlib.suppress(RuntimeError):  # an earlier error may have broken the device's context
            self._device.synchronize(self._stream)
        self._free_all()
        self._hand_overs.clear()
        self._ring.on_new = self._ring.on_retire = None
        for offset in self._locked_offsets:
            with contextlib.suppress(RuntimeError):
                self._device.unlock(self._base + offset)
        self._locked_offsets.clear()
        self.pinned_bytes = 0

    def _lock(self, slot: Slot) -> None:
        if self.pinning_refused:
            return
        code = self._device.lock(self._base + slot.offset, slot.capacity_bytes)
        if code == 0:
            self._locked_offsets.add(slot.offset)
            self.pinned_bytes += slot.capacity_bytes
            return
        self.pinning_refused = True
        if code != devices.CANNOT_LOCK:
            warnings.warn(
                f"the CUDA driver refused to page-lock {slot.capacity_bytes:,} bytes (cudaHostRegister: error {code}); "
                "batches are copied from pageable memory, which is slower and not asynchronous. Raise the limit of "
                "locked memory: ulimit -l unlimited in the shell, docker run --ulimit memlock=-1 for a container",
                RuntimeWarning,
                stacklevel=2,
            )

    def _unlock(self, slot: Slot) -> None:
        if slot.offset in self._locked_offsets:
            self._locked_offsets.discard(slot.offset)
            self.pinned_bytes -= slot.capacity_bytes
            self._device.unlock(self._base + slot.offset)


def _is_in_slots(batch: Batch) -> bool:
    """Return whether all parts are in slots: no part was moved out of a full ring, or has images that the device
    decoded."""
    return all((part.slot is not None or part.used_bytes == 0) and part.decoded is None for part in batch.copied_parts)


def _slot_offsets(batch: Batch) -> list[int]:
    """Return each part's offset in the ring."""
    return [part.slot.offset if part.slot else 0 for part in batch.copied_parts]


def round_up_bytes(nbytes: int) -> int:
    """Round up the size of a buffer, by at most an eighth. Sizes that vary a little from batch to batch then become
    equal for most batches, so that torch's allocator reuses the same memory instead of asking the driver for more."""
    return align(nbytes, max(MIN_GRAIN_BYTES, 1 << max(0, nbytes.bit_length() - 4)))


def make_transfer(ring: Ring, device: torch.device) -> CpuTransfer:
    """Return the transfer for a device."""
    return CpuTransfer(ring) if device.type == "cpu" else CudaTransfer(ring, device)
