"""Decodes a batch's encoded images on the device, crops them and turns them upright. The result is the same as if
workers had decoded them: one tensor of pixels on the device per chunk, and entries in the chunk's tables.

This module runs in the main process, on the transfer's stream, when a batch is complete and before it goes to the
stage. An `ImageDecoder` owns two decoders: the device's decoder, and `gpuload.decode.Decoder`, which decodes one by one
the images that the device refuses. A sample that neither decoder can decode is removed from its chunk, and becomes the
error that a worker would have reported.

**Memory.** The device's decoder returns either entire images, which are cropped afterwards, or only their regions. It
decodes a few images at a time, and their memory is kept until the device has copied their crops. The memory must not be
freed earlier, because a GPU's JPEG engine writes as soon as it is called, regardless of work pending on its stream. The
host waits for these copies only if the images in memory and the next images together would exceed `limit_bytes`. The
crops of a batch need additional memory. If the device still runs out of memory, half as many images are decoded at a
time from then on. A single image that is too large goes to the CPU.

**Time.** Python code that runs once per image is what delays the training loop, so sizes, destinations and crops
are stored in columns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from gpuload.datasets import sample
from gpuload.datasets.tree import key_paths_of
from gpuload.decode import Decode, Decoder
from gpuload.decode.decoder import DECODERS
from gpuload.decode.header import is_transposed, stored_region
from gpuload.errors import ErrorRecord, one_line
from gpuload.ring.columns import EncodedImage, entry
from gpuload.stage.decode.backend import DESTINATION, OutOfDeviceMemory, Pixels, Refusal, Source, copy_crops
from gpuload.stage.decode.nvimagecodec import NvImageCodec
from gpuload.stage.device import DECODE, profiler_range
from gpuload.workers.protocol import record_of

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch, Part

__all__ = ["ImageDecoder"]

MAX_IMAGES: Final = 512  # images decoded at a time, however small they are
MAX_REASONS, MAX_REASON = 10, 100  # distinct reasons that are counted separately; characters per reason


class _Images(NamedTuple):
    """The encoded images of a batch, as columns.

    Attributes:
        sources: the decoder's inputs.
        entries: each image's part, and its `EncodedImage` as a plain tuple.
        destinations: `gpuload.stage.decode.backend.DESTINATION`, where to write each region in the batch's decoded
            memory.
        nbytes: the memory that the decoder needs for each image, in bytes.
        part_bytes: the number of decoded bytes of each part.
    """

    sources: list[Source]
    entries: list[tuple[Part, Sequence[Any]]]
    destinations: np.ndarray
    nbytes: np.ndarray
    part_bytes: list[int]


class ImageDecoder:
    """A decoder for the images that workers left to the device.

    Args:
        decoder: the device's decoder.
        options: the loader's decoding options.
        device: the device of the pixels.
        transfer: the transfer whose stream is used for decoding.

    Attributes:
        counts: the number of images per decoder, with the names of `Stats.decoders`.
        refusals: the number of images that the device's decoder refused, by reason; the CPU then decoded or refused
            them.
        out_of_memory_count: how often the device ran out of memory although no earlier images were in memory.
        seconds: host time spent on decoding.
        image_count: the number of images processed so far.
        limit_bytes: the maximum total size of the decoded images that are in memory at the same time.
        peak_bytes: the largest such total size so far.
    """

    def __init__(self, decoder: NvImageCodec, options: Decode, device: torch.device, transfer: Any) -> None:
        self._decoder, self._device, self._transfer = decoder, device, transfer
        self._cpu = Decoder(options)
        self._device_counts = Counter(dict.fromkeys(decoder.names, 0))
        # Decoded images whose crops are being copied: an event after the copy, the images' bytes, and their owners.
        self._pending_copies: deque[tuple[Any, int, Any]] = deque()
        self.limit_bytes = self._piece_bytes = options.device_memory
        self.refusals: dict[str, int] = {}
        self.out_of_memory_count = self.image_count = self.peak_bytes = 0
        self.seconds = 0.0

    @property
    def counts(self) -> dict[str, int]:
        return self._device_counts | {name: self._cpu.counts[name] for name in DECODERS}

    def __call__(self, batch: Batch) -> list[tuple[Part, list[ErrorRecord]]]:
        """Decode the batch's images; return the samples that failed, by part."""
        start = perf_counter()
        with profiler_range(DECODE), torch.inference_mode(False), torch.no_grad(), self._transfer.side_stream():
            failures = self._decode(batch)
        self.seconds += perf_counter() - start
        return failures

    def close(self) -> None:
        """Free all memory, which must no longer be in use."""
        self._pending_copies.clear()
        self._decoder.close()

    def _decode(self, batch: Batch) -> list[tuple[Part, list[ErrorRecord]]]:
        parts = [part for part in batch.parts if part.waits_for_device]
        images = _collect_images(parts, decodes_regions=self._decoder.decodes_regions)
        memory = torch.empty(sum(images.part_bytes), dtype=torch.uint8, device=self._device)
        failures: dict[int, dict[int, ErrorRecord]] = {}
        ends, start = images.nbytes.cumsum(), 0
        while start < len(images.sources):
            start_bytes = ends[start - 1] if start else 0
            count = max(1, int(ends[start : start + MAX_IMAGES].searchsorted(start_bytes + self._piece_bytes, "right")))
            nbytes = int(ends[start + count - 1] - start_bytes)
            if (results := self._decode_on_device(images.sources[start : start + count], nbytes)) is None:
                continue
            rows = [row for row, result in enumerate(results, start) if isinstance(result, Pixels)]
            pixels = [result for result in results if isinstance(result, Pixels)]
            copy_crops(pixels, images.destinations[rows], memory)
            self._device_counts.update(region.decoder for region in pixels)
            if (event := self._transfer.mark()) is not None:
                self._pending_copies.append((event, nbytes, pixels))
            for row, result in enumerate(results, start):
                if isinstance(result, Refusal):
                    self._count_refusal(result.reason)
                    if (error := self._decode_on_cpu(images, row, memory)) is not None:
                        failures.setdefault(id(images.entries[row][0]), {}).setdefault(*error)
            start += count
        self.image_count += len(images.sources)
        if failures or batch.errors:
            self._free(0)  # the batch's slots may be freed before anything else waits for the device
        for part, part_pixels in zip(parts, memory.split(images.part_bytes), strict=True):
            part.decoded = part_pixels
        return [(part, _remove_samples(part, failures[id(part)])) for part in parts if id(part) in failures]

    def _decode_on_device(self, sources: Sequence[Source], nbytes: int) -> Sequence[Pixels | Refusal] | None:
        """Decode images on the device. None means that the device ran out of memory, and that a retry may succeed."""
        if nbytes > self.limit_bytes:  # only possible for a single image
            return [Refusal(f"more than device_memory={self.limit_bytes:,} bytes")]
        bytes_in_use = self._free(self.limit_bytes - nbytes)
        try:
            decoded = self._decoder.decode(sources)
        except OutOfDeviceMemory as error:
            if bytes_in_use:
                self._free(0)
                return None
            self.out_of_memory_count += 1
            if len(sources) == 1:
                return [Refusal(str(error))]
            self._piece_bytes = min(self._piece_bytes, nbytes) // 2
            return None
        self.peak_bytes = max(self.peak_bytes, bytes_in_use + nbytes)
        return decoded

    def _free(self, limit_bytes: int) -> int:
        """Free images whose crops have been copied, and wait for further copies until the remaining images take at most
        `limit_bytes`. Return the size of the remaining images."""
        bytes_in_use = sum(nbytes for _, nbytes, _ in self._pending_copies)
        while self._pending_copies and (bytes_in_use > limit_bytes or self._pending_copies[0][0].query()):
            event, nbytes, _ = self._pending_copies[0]
            event.synchronize()
            bytes_in_use -= nbytes
            self._pending_copies.popleft()
        return bytes_in_use

    def _count_refusal(self, reason: str) -> None:
        reason = one_line(reason, MAX_REASON)
        if reason not in self.refusals and len(self.refusals) == MAX_REASONS:
            reason = "other"
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def _decode_on_cpu(self, images: _Images, row: int, memory: torch.Tensor) -> tuple[int, ErrorRecord] | None:
        """Decode an image as a worker would; if that fails, return the sample's index in the chunk and the error."""
        part, encoded = images.entries[row][0], EncodedImage._make(images.entries[row][1])
        content = part.content
        assert content is not None
        column = content.images[encoded.column]
        sample_row, leaf = int(column.row_indices[encoded.row]), entry(column.leaves, encoded.row)
        source = encoded.source or content.source_list[sample_row]
        file = sample.Encoded(images.sources[row].data.tobytes(), "L" if encoded.grey else "RGB", source)
        region = column.table["region_tlhw"][encoded.row].tolist()
        try:
            pixels = self._cpu.decode(file, self._cpu.header(file), tuple(region))
        except Exception as error:
            row_in_part = content.rows[sample_row]
            location = part.batch.spec.epoch, part.positions[row_in_part], part.indices[row_in_part]
            return sample_row, record_of(*location, source, error, key_paths_of(content.structure(sample_row))[leaf])
        start = int(images.destinations["start"][row])
        memory[start : start + pixels.size].view(pixels.shape).copy_(torch.from_numpy(pixels))
        return None


def _collect_images(parts: Sequence[Part], *, decodes_regions: bool) -> _Images:
    """Collect the encoded images of a batch, and enter the offsets of their decoded pixels into the tables of their
    parts: the pixels are stored in order, after the part's own bytes. With `decodes_regions`, the decoder needs memory
    only for regions."""
    sources, entries, part_bytes, end = [], [], [], 0
    destinations, image_bytes = [], []
    for part in parts:
        begin = end
        assert part.content is not None
        for column_index, column in enumerate(part.content.images):
            column.table = column.table.copy()  # arrays read from a message are read-only
            encoded = [image for image in part.content.encoded if image[0] == column_index]
            if not encoded:
                continue
            rows = [row for _, row, *_ in encoded]
            table = column.table[rows]
            nbytes = table["shape"].prod(axis=1)
            destination = np.empty(len(rows), DESTINATION)
            destination["shape"], destination["start"] = table["shape"], end + nbytes.cumsum() - nbytes
            destination["orientation"] = [orientation for *_, orientation, _, _ in encoded]
            column.table["offset"][rows] = part.host_end + destination["start"] - begin
            end += int(nbytes.sum())
            sources += _make_sources(part.data, encoded, table)
            entries += zip(repeat(part), encoded)
            destinations.append(destination)
            image_bytes.append(nbytes if decodes_regions else table["size_hw"].prod(axis=1) * table["shape"][:, 2])
        part_bytes.append(end - begin)
    return _Images(sources, entries, np.concatenate(destinations), np.concatenate(image_bytes), part_bytes)


def _make_sources(data: Any, encoded: Sequence[Sequence[Any]], table: Any) -> Iterator[Source]:
    """Yield the decoder's input for each image. The tables have sizes and regions of upright images."""
    rows = zip(encoded, table["size_hw"].tolist(), table["region_tlhw"].tolist(), strict=True)
    for (_, _, offset, nbytes, orientation, grey, _), (height, width), region in rows:
        if orientation != 1:
            region = stored_region(tuple(region), orientation, (height, width))
            height, width = (width, height) if is_transposed(orientation) else (height, width)
        yield Source(data[offset : offset + nbytes], height, width, bool(grey), region)


def _remove_samples(part: Part, failures: dict[int, ErrorRecord]) -> list[ErrorRecord]:
    """Remove failed samples from a part's content; return their errors."""
    content = part.content
    assert content is not None
    errors = [*content.errors, *((content.rows[row], record) for row, record in failures.items())]
    content.unstack(list(content.blocks), part.data)
    part.content = content.take(np.setdiff1d(np.arange(len(content)), list(failures)))
    part.content.errors = sorted(errors, key=lambda entry: entry[0])
    return [failures[row] for row in sorted(failures)]
