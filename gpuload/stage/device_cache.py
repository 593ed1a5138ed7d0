"""Memory for the pixels of a `DeviceCached` on the device, from which the windows of each batch are copied.

Memory layout: images and masks, each H×W×C and aligned to 64 bytes, are stored in the order in which they were read, in
*segments* of uint8. Most datasets have one segment, whose size is estimated from samples spread over the dataset;
images that do not fit go to additional segments. An image is never split between segments. Byte offsets run through
all segments, in order.

On the CPU, windows are copied to the slots of the ring, where workers would write other datasets' images. On a
device, pixels stay on the device: `ResidentTransfer` gathers the windows there instead of copying slots. The memory is
used only in the main process, and lives as long as the `DeviceCached`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import Ring, align
from gpuload.stage.device import upload_arrays
from gpuload.stage.transfer import CpuTransfer, CudaTransfer
from gpuload.workers.batch import Batch
from gpuload.workers.device_cache import WINDOW, CachedSamples, total_pixel_bytes

__all__ = ["PixelMemory", "ResidentTransfer", "make_cached_transfer"]

MIN_SEGMENT_BYTES = 16 << 20
# Windows of at most this average size are copied with a single gather, because a copy per window costs the host a few
# microseconds. Larger windows are copied one by one, because the indices of a gather take eight bytes per byte.
SMALL_BYTES = 16 << 10
GATHER_BYTES = 8 << 20  # bytes copied by one gather
NO_WINDOWS = np.empty(0, WINDOW)


class PixelMemory:
    """Growable memory for pixels on a device.

    Args:
        device: where to allocate the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on_host = device.type == "cpu"
        self._segments: list[torch.Tensor] = []
        self._starts: list[int] = []  # offset of each segment's first byte
        self._last_used_bytes = 0  # bytes used in the last segment
        self.used_bytes = 0  # bytes used in all segments

    @property
    def nbytes(self) -> int:
        """The total size of all segments, in bytes."""
        return sum(map(len, self._segments))

    def reserve(self, nbytes: int) -> None:
        """Allocate a segment of this many bytes, which `add` fills next."""
        self._starts.append(self._starts[-1] + len(self._segments[-1]) if self._segments else 0)
        with torch.inference_mode(False):
            self._segments.append(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self._last_used_bytes = 0

    def add(self, data: np.ndarray) -> int:
        """Append the bytes of aligned images; return the offset of the first byte."""
        nbytes = align(len(data), ALIGN)
        if not self._segments or self._last_used_bytes + nbytes > len(self._segments[-1]):
            self.reserve(max(nbytes, MIN_SEGMENT_BYTES, self.nbytes // 16 // ALIGN * ALIGN))
        start = self._last_used_bytes
        self._segments[-1][start : start + len(data)].copy_(torch.from_numpy(data))
        self._last_used_bytes = start + nbytes
        self.used_bytes += nbytes
        return self._starts[-1] + start

    def copy(self, windows: np.ndarray, out: Any) -> None:
        """Copy windows (see `gpuload.workers.device_cache`) to an array on the host, or to a tensor on the same device,
        on its current stream. The bytes between windows in `out` are undefined."""
        on_host = isinstance(out, np.ndarray)
        is_single = len(self._segments) == 1
        if is_single and not on_host and len(windows) and total_pixel_bytes(windows) <= SMALL_BYTES * len(windows):
            for piece in np.array_split(windows, -(-total_pixel_bytes(windows) // GATHER_BYTES)):
                _gather(self._segments[0], piece, out)
            return
        segment_indices = None if is_single else np.searchsorted(self._starts, windows["start"], side="right") - 1
        for segment_index, (segment, begin) in enumerate(zip(self._segments, self._starts, strict=True)):
            memory: Any = segment.numpy() if on_host else segment
            segment_windows = windows if segment_indices is None else windows[segment_indices == segment_index]
            for start, rows, row_bytes, step, out_start in segment_windows.tolist():
                if on_host:  # creating an array takes under a microsecond, half as long as slicing and reshaping
                    window = np.ndarray((rows, row_bytes), np.uint8, memory, start - begin, (step, 1))
                    np.ndarray((rows, row_bytes), np.uint8, out, out_start)[...] = window
                else:
                    window = memory.as_strided((rows, row_bytes), (step, 1), start - begin)
                    out[out_start : out_start + rows * row_bytes].view(rows, row_bytes).copy_(window)


def _gather(memory: torch.Tensor, windows: np.ndarray, out: torch.Tensor) -> None:
    """Copy windows that are consecutive in `out` with one gather, which has an index for each byte."""
    start, rows, row_bytes, step, out_start = (windows[name] for name in WINDOW.names or ())
    row = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)  # row index within the window
    sources = np.repeat(start, rows) + row * np.repeat(step, rows)
    lengths = np.repeat(row_bytes, rows)
    lengths[np.cumsum(rows) - 1] += -(rows * row_bytes) % ALIGN  # the padding before the next window
    ends = np.cumsum(lengths)
    total, begin = int(ends[-1]), int(out_start[0])
    # Source indices increase by 1 from byte to byte, except at the first byte of a row.
    jumps = np.diff(sources + lengths - 1, prepend=0) - lengths + 1
    row_starts, jumps = upload_arrays([ends - lengths, jumps], memory.device)
    index = torch.ones(total, dtype=torch.int64, device=memory.device).index_copy_(0, row_starts, jumps).cumsum_(0)
    torch.index_select(memory, 0, index.clamp_(max=len(memory) - 1), out=out[begin : begin + total])


class ResidentTransfer(CudaTransfer):
    """A transfer for pixels that are already on the device; it gathers the windows of each batch there.

    Args:
        ring: the ring, whose slots hold no pixels.
        memory: the memory that holds the pixels.
    """

    def __init__(self, ring: Ring, memory: PixelMemory) -> None:
        super().__init__(ring, memory.device)
        ring.on_new = ring.on_retire = None  # nothing is copied from the slots, so they need not be page-locked
        self._memory = memory

    def close(self) -> None:
        super().close()
        del self._memory

    def _packed_offsets(self, batch: Batch) -> list[int]:
        return [*accumulate((total_pixel_bytes(windows) for windows in _windows(batch)), initial=0)]

    def _fill(self, memory: torch.Tensor, batch: Batch, starts: Sequence[int]) -> None:
        for windows, start in zip(_windows(batch), starts, strict=True):
            if len(windows):
                self._memory.copy(windows, memory[start:])


def _windows(batch: Batch) -> list[np.ndarray]:
    contents = [part.content for part in batch.parts]
    return [NO_WINDOWS if content is None or content.windows is None else content.windows for content in contents]


def make_cached_transfer(samples: CachedSamples, ring: Ring) -> CpuTransfer:
    """Create the transfer for batches of cached samples."""
    memory: PixelMemory = samples.memory
    return CpuTransfer(ring) if memory.is_on_host else ResidentTransfer(ring, memory)
