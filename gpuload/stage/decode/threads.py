"""The threads that decode images on the device, next to the loop.

nvImageCodec releases the GIL while it decodes, but its call waits for the JPEG engine by spinning, for tens of
milliseconds per batch. So the calls are made in threads: two on a GPU, each with its own decoder and its own stream, so
that one batch can be prepared on the host while the device decodes another; and one on the CPU, where the calls could
not overlap, since each captures the C library's messages. The threads start with the first batch to decode.

**Who owns what.** A `DecodingCall` is made by the main process's iterating thread, which must not move or release the
files of the call, or rewrite the tables that its `destinations` come from, until the call is `done`: the files are
views of slots, and workers would overwrite them while the decoder reads. A thread owns `memory`, the decoded images,
until the call is done. The transfer's stream waits for `event` before it reads the memory, and the batch keeps the
memory until this stream has read it, so torch does not reuse it for the thread's stream too early. A thread changes
nothing else: which samples failed, what replaces them, and all counts are the main process's business, since they must
not depend on timing.

Images stay in the decoder's memory until the device has copied their crops, because a GPU's JPEG engine writes as soon
as it is called, regardless of work pending on its stream. `DecodedMemory` limits their size, for both threads together.

A thread that has finished a call writes to an eventfd, for which the main process polls together with its workers'
sockets. Threads are daemons, since `threading` would otherwise wait for them at the interpreter's exit, before any
session is closed; every session is closed at exit, which waits for a running call. A forked child has no threads, and
uses none of the objects in this module.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from gpuload.ring.ring import reserve_standard_streams
from gpuload.stage.decode.backend import EncodedRegion, OutOfDeviceMemory, Pixels, Refusal, copy_crops
from gpuload.stage.decode.nvimagecodec import NvImageCodec
from gpuload.stage.device import Accelerator, HostEvent

__all__ = ["DecodedMemory", "DecodingCall", "DecodingThreads"]

MAX_IMAGES: Final = 512  # images decoded at a time, however small they are


@dataclass(slots=True, eq=False)
class DecodingCall:
    """The images of a batch to decode, and the result.

    Attributes:
        sources: the files and their regions.
        destinations: `gpuload.stage.decode.backend.DESTINATION`, where to write each region in `memory`.
        nbytes: the memory that the decoder needs for each image, in bytes.
        memory_bytes: the size of `memory`.
        memory: the decoded images, a uint8 tensor on the device.
        refusals: the images that the decoder refused, each with its row and the reason.
        decoders: the decoder of every other image.
        event: passes when `memory` is complete, for streams; `host_event` is the same for the host; None on the CPU.
        error: the exception that ended the call.
        is_done: whether the thread has finished, successfully or not.
        is_cancelled: whether a thread that has not begun yet must skip the call.
    """

    sources: list[EncodedRegion]
    destinations: np.ndarray
    nbytes: np.ndarray
    memory_bytes: int
    memory: torch.Tensor | None = None
    refusals: list[tuple[int, str]] = field(default_factory=list)
    decoders: list[str] = field(default_factory=list)
    event: torch.Event | None = None
    host_event: HostEvent | None = None
    error: BaseException | None = None
    is_done: bool = False
    is_cancelled: bool = False

    def synchronize(self) -> None:
        """Wait until the device no longer reads the files of a call that is done."""
        if self.host_event is not None:
            self.host_event.synchronize()


class DecodedMemory:
    """The memory of the decoded images whose crops have not been copied yet, for all threads together.

    Args:
        limit_bytes: the maximum size.

    Attributes:
        piece_bytes: the size of the images to decode at a time. If the device runs out of memory although no other
            images are in memory, this is halved.
        peak_bytes: the largest size so far.
        out_of_memory_count: how often the device ran out of memory although no other images were in memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = self.piece_bytes = limit_bytes
        self.peak_bytes = self.out_of_memory_count = 0
        self._call_bytes = 0  # of the calls in progress
        # An event after a copy, the bytes of its images, and the objects that own them.
        self._copies: deque[tuple[HostEvent, int, Sequence[Pixels] | None]] = deque()
        self._changed = threading.Condition()

    def reserve(self, nbytes: int, *, is_alone: bool = False) -> int:
        """Wait until the images of a call fit, or until no other images are in memory, and reserve memory for them.
        Return the size of the other images."""
        limit_bytes = nbytes if is_alone else self.limit_bytes
        with self._changed:
            while (bytes_in_use := self._free(limit_bytes - nbytes)) + nbytes > limit_bytes:
                self._changed.wait()  # for a call of another thread
            self._call_bytes += nbytes
            return bytes_in_use

    def release(self, nbytes: int) -> None:
        """Release the memory of a call that failed."""
        self.keep(nbytes, None, None)

    def keep(self, nbytes: int, event: HostEvent | None, owners: Sequence[Pixels] | None) -> None:
        """Keep the images of a call until `event` passes; None means that they are no longer needed."""
        with self._changed:
            if owners is not None:
                self.peak_bytes = max(self.peak_bytes, self._call_bytes + sum(size for _, size, _ in self._copies))
            self._call_bytes -= nbytes
            if event is not None:
                self._copies.append((event, nbytes, owners))
            self._changed.notify_all()

    def halve_pieces(self, nbytes: int) -> None:
        """Decode fewer images at a time from now on, since `nbytes` were too many."""
        with self._changed:
            self.piece_bytes = min(self.piece_bytes, nbytes) // 2

    def _free(self, limit_bytes: int) -> int:
        """Free images whose crops have been copied, and wait for further copies until the remaining images take at most
        `limit_bytes`. Return the size of the remaining images."""
        bytes_in_use = self._call_bytes + sum(nbytes for _, nbytes, _ in self._copies)
        while self._copies and (bytes_in_use > limit_bytes or self._copies[0][0].query()):
            event, nbytes, _ = self._copies[0]
            event.synchronize()
            bytes_in_use -= nbytes
            self._copies.popleft()
        return bytes_in_use

    def clear(self) -> None:
        """Wait for all copies, and free the images. No call may be in progress."""
        with self._changed:
            self._free(-1)


class DecodingThreads:
    """One thread for each decoder.

    Args:
        decoders: decoders of the same device.
        device: the device, with its index unless it is the CPU.
        memory: limits the size of the decoded images.
    """

    def __init__(self, decoders: Sequence[NvImageCodec], device: torch.device, memory: DecodedMemory) -> None:
        self._decoders, self._device, self._memory = decoders, device, memory
        self._accelerator = None if device.type == "cpu" else Accelerator(device)
        self._queue: queue.SimpleQueue[DecodingCall | None] = queue.SimpleQueue()
        self._unfinished: list[DecodingCall] = []
        self._threads: list[threading.Thread] = []
        with reserve_standard_streams():
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def submit(self, call: DecodingCall) -> None:
        """Have a thread decode images. Start the threads if this is the first call."""
        if not self._threads:
            for number, decoder in enumerate(self._decoders):
                name = f"gpuload-decode-{number}"
                self._threads.append(threading.Thread(target=self._work, args=[decoder], name=name, daemon=True))
                self._threads[-1].start()
        self._unfinished = [*(earlier for earlier in self._unfinished if not earlier.is_done), call]
        self._queue.put(call)

    def wait(self, timeout_s: float, engine_fd: int | None = None) -> None:
        """Wait until a call is done or, with `engine_fd`, until this descriptor is readable."""
        poll = select.poll()
        for fd in {self._wake_fd, engine_fd} - {None}:
            poll.register(fd, select.POLLIN)
        poll.poll(1000 * timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._unfinished = [call for call in self._unfinished if not call.is_done]

    def finish(self, call: DecodingCall) -> None:
        """Wait until a call is done, and the device no longer reads its files."""
        while not call.is_done:
            self.wait(1.0)
        call.synchronize()

    def cancel(self) -> None:
        """Skip all calls that no thread has begun, and wait for the others."""
        for call in self._unfinished:
            call.is_cancelled = True
        for call in self._unfinished:
            self.finish(call)

    def close(self) -> None:
        """End the threads, after their calls, and free the decoders and the images. Idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        if threading.current_thread() in self._threads:
            return  # the garbage collector can run, and close a session, in any thread; this one cannot wait for itself
        self.cancel()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._memory.clear()
        for decoder in self._decoders:
            decoder.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _work(self, decoder: NvImageCodec) -> None:
        """Process calls, in a thread."""
        stream = None if self._accelerator is None else self._accelerator.new_stream()
        while (call := self._queue.get()) is not None:
            try:
                if not call.is_cancelled:
                    self._decode(decoder, call, stream)
            except BaseException as error:
                call.error = error
            call.is_done = True
            del call  # otherwise this thread would keep the batch's memory while it waits
            os.eventfd_write(self._wake_fd, 1)

    def _decode(self, decoder: NvImageCodec, call: DecodingCall, stream: Any) -> None:
        accelerator = self._accelerator
        current = contextlib.nullcontext() if accelerator is None else accelerator.make_current(stream)
        with torch.inference_mode(False), torch.no_grad(), current:
            call.memory = torch.empty(call.memory_bytes, dtype=torch.uint8, device=self._device)
            try:
                self._decode_pieces(decoder, call, stream)
            finally:  # even if it failed, the device may still read the files
                if accelerator is not None:
                    call.event, call.host_event = accelerator.record(stream), accelerator.record_for_host(stream)

    def _decode_pieces(self, decoder: NvImageCodec, call: DecodingCall, stream: Any) -> None:
        """Decode as many images at a time as fit in memory, and copy their crops."""
        assert call.memory is not None
        ends, start = call.nbytes.cumsum(), 0
        while start < len(call.sources):
            start_bytes = ends[start - 1] if start else 0
            piece_end_bytes = start_bytes + self._memory.piece_bytes
            count = max(1, int(ends[start : start + MAX_IMAGES].searchsorted(piece_end_bytes, "right")))
            nbytes = int(ends[start + count - 1] - start_bytes)
            if nbytes > self._memory.limit_bytes:  # only possible for a single image
                call.refusals.append((start, f"more than device_memory={self._memory.limit_bytes:,} bytes"))
                start += 1
                continue
            results = self._decode_piece(decoder, call.sources[start : start + count], nbytes)
            if results is None:
                continue
            event, pixels = None, [result for result in results if isinstance(result, Pixels)]
            try:
                rows = [row for row, result in enumerate(results, start) if isinstance(result, Pixels)]
                copy_crops(pixels, call.destinations[rows], call.memory)
                event = None if self._accelerator is None else self._accelerator.record_for_host(stream)
            finally:
                self._memory.keep(nbytes, event, pixels)
            call.decoders += [region.decoder for region in pixels]
            call.refusals += [
                (row, result.reason) for row, result in enumerate(results, start) if type(result) is Refusal
            ]
            start += count

    def _decode_piece(
        self, decoder: NvImageCodec, sources: Sequence[EncodedRegion], nbytes: int
    ) -> Sequence[Pixels | Refusal] | None:
        """Decode images, whose memory stays reserved. None means that the device ran out of memory, that nothing is
        reserved, and that fewer images may fit."""
        other_bytes = self._memory.reserve(nbytes)
        while True:
            try:
                return decoder.decode(sources)
            except OutOfDeviceMemory as error:
                self._memory.release(nbytes)
                if not other_bytes:
                    self._memory.out_of_memory_count += 1
                    if len(sources) > 1:
                        self._memory.halve_pieces(nbytes)
                        return None
                    self._memory.reserve(nbytes)
                    return [Refusal(str(error))]
                other_bytes = self._memory.reserve(nbytes, is_alone=True)
            except BaseException:
                self._memory.release(nbytes)
                raise
