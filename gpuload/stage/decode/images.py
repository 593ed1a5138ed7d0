"""Decodes a batch's encoded images on the device, crops them and turns them upright. The result is the same as if
workers had decoded them: one tensor of pixels on the device per chunk, and entries in the chunk's tables.

An `ImageDecoder` begins to decode a batch when all of its chunks have arrived, in a thread of `DecodingThreads`, and
ends that in the main process when the batch is due. It owns the device's decoders, and a `gpuload.decode.Decoder`,
which decodes one by one the images that the device refuses. A sample that neither can decode is removed from its
chunk, and becomes the error that a worker would have reported.

**Memory.** The device's decoder returns either entire images, which are cropped afterwards, or only their regions. It
decodes a few images at a time, and `DecodedMemory` limits how much they take. The crops of a batch need additional
memory. If the device still runs out of memory, half as many images are decoded at a time from then on. A single image
that is too large goes to the CPU.

**Time.** Python code that runs once per image is what delays the training loop, so sizes, destinations and crops
are stored in columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from gpuload.datasets import sample
from gpuload.datasets.tree import key_paths_of
from gpuload.decode import Decode, Decoder
from gpuload.decode.decoder import DECODERS
from gpuload.decode.header import is_transposed, stored_region
from gpuload.errors import ErrorRecord, one_line
from gpuload.ring.columns import EncodedImage, entry
from gpuload.stage.decode.backend import DESTINATION, EncodedRegion
from gpuload.stage.decode.nvimagecodec import NvImageCodec
from gpuload.stage.decode.threads import DecodedMemory, DecodingCall, DecodingThreads
from gpuload.stage.device import DECODE, profiler_range
from gpuload.workers.protocol import record_of

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch, BatchPart

__all__ = ["ImageDecoder"]

MAX_REASONS, MAX_REASON = 10, 100  # distinct reasons that are counted separately; characters per reason


class _ColumnImages(NamedTuple):
    """The encoded images of a batch, as columns.

    Attributes:
        entries: each image's part, and its `EncodedImage` as a plain tuple.
        parts: the parts that have such images.
        part_bytes: the number of decoded bytes of each of these parts.
        call: decodes the images.
    """

    entries: list[tuple[BatchPart, Sequence[Any]]]
    parts: list[BatchPart]
    part_bytes: list[int]
    call: DecodingCall

    @property
    def is_done(self) -> bool:
        """Return whether the thread has decoded the images."""
        return self.call.is_done


class ImageDecoder:
    """A decoder for the images that workers left to the device. `begin` and `end` are called by one thread at a time.

    Args:
        decoders: the device's decoders, one for each thread.
        options: the loader's decoding options.
        device: the device of the pixels.
        transfer: the transfer whose stream reads the pixels.

    Attributes:
        counts: the number of images per decoder, with the names of `Stats.decode.counts`.
        refusals: the number of images that the device's decoder refused, by reason; the CPU then decoded or refused
            them.
        seconds: host time that the iterating thread spent on decoding, without waiting for the other threads.
        image_count: the number of images processed so far.
    """

    def __init__(self, decoders: Sequence[NvImageCodec], options: Decode, device: torch.device, transfer: Any) -> None:
        self._decodes_regions, self._device, self._transfer = decoders[0].decodes_regions, device, transfer
        self._cpu = Decoder(options)
        self._device_counts = Counter(dict.fromkeys(decoders[0].names, 0))
        self._memory = DecodedMemory(options.device_memory)
        self._threads = DecodingThreads(decoders, device, self._memory)
        self.refusals: dict[str, int] = {}
        self.image_count = 0
        self.seconds = 0.0
        self.wait, self.cancel, self.close = self._threads.wait, self._threads.cancel, self._threads.close

    @property
    def counts(self) -> dict[str, int]:
        return self._device_counts | {name: self._cpu.counts[name] for name in DECODERS}

    @property
    def peak_bytes(self) -> int:
        """Return the largest size so far of decoded images in memory, before cropping."""
        return self._memory.peak_bytes

    def begin(self, batch: Batch) -> None:
        """Have a thread decode the batch's images. Until `batch.decoding.is_done`, its slots must not be released."""
        start = perf_counter()
        batch.decoding = images = _collect_images(
            [part for part in batch.parts if part.waits_for_device], decodes_regions=self._decodes_regions
        )
        self._threads.submit(images.call)
        self.seconds += perf_counter() - start

    def finish(self, batch: Batch) -> None:
        """Wait until a thread has decoded the batch's images, and the device no longer reads the batch's slots."""
        assert batch.decoding is not None
        self._threads.finish(batch.decoding.call)

    def end(self, batch: Batch) -> list[tuple[BatchPart, list[ErrorRecord]]]:
        """Complete a batch whose images a thread has decoded: decode those that the device refused. Return the samples
        that failed, by part."""
        start = perf_counter()
        images, batch.decoding = batch.decoding, None
        assert images is not None
        with profiler_range(DECODE), torch.inference_mode(False), torch.no_grad(), self._transfer.side_stream():
            failures = self._end(images, must_synchronize=bool(batch.errors))
        self.seconds += perf_counter() - start
        return failures

    def _end(self, images: _ColumnImages, *, must_synchronize: bool) -> list[tuple[BatchPart, list[ErrorRecord]]]:
        call, failures = images.call, dict[int, dict[int, ErrorRecord]]()
        if call.error is not None:
            call.synchronize()
            raise call.error
        assert call.memory is not None
        if call.event is not None:
            self._transfer.wait_for(call.event)
        self._device_counts.update(call.decoders)
        for row, reason in call.refusals:
            self._count_refusal(reason)
            if (error := self._decode_on_cpu(images, row, call.memory)) is not None:
                failures.setdefault(id(images.entries[row][0]), {}).setdefault(*error)
        self.image_count += len(call.sources)
        if failures or must_synchronize:
            call.synchronize()  # the batch's slots may be freed before anything else waits for the device
        for part, part_pixels in zip(images.parts, call.memory.split(images.part_bytes), strict=True):
            part.decoded = part_pixels
        return [(part, _remove_samples(part, failures[id(part)])) for part in images.parts if id(part) in failures]

    def _count_refusal(self, reason: str) -> None:
        reason = one_line(reason, MAX_REASON)
        if reason not in self.refusals and len(self.refusals) == MAX_REASONS:
            reason = "other"
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def _decode_on_cpu(self, images: _ColumnImages, row: int, memory: torch.Tensor) -> tuple[int, ErrorRecord] | None:
        """Decode an image as a worker would; if that fails, return the sample's index in the chunk and the error."""
        part, encoded = images.entries[row][0], EncodedImage._make(images.entries[row][1])
        content = part.content
        assert content is not None
        column = content.images[encoded.column]
        sample_row, leaf = int(column.row_indices[encoded.row]), entry(column.leaves, encoded.row)
        source = encoded.source or content.source_list[sample_row]
        assert part.data is not None  # which may no longer be in the slot that `EncodedRegion.data` is a view of
        data = part.data[encoded.offset : encoded.offset + encoded.nbytes]
        file = sample.Encoded(data.tobytes(), "L" if encoded.grey else "RGB", source)
        region = column.table["region_tlhw"][encoded.row].tolist()
        try:
            pixels = self._cpu.decode(file, self._cpu.header(file), tuple(region))
        except Exception as error:
            row_in_part = content.rows[sample_row]
            location = part.batch.spec.epoch, part.positions[row_in_part], part.indices[row_in_part]
            return sample_row, record_of(*location, source, error, key_paths_of(content.structure(sample_row))[leaf])
        start = int(images.call.destinations["start"][row])
        memory[start : start + pixels.size].view(pixels.shape).copy_(torch.from_numpy(pixels))
        return None


def _collect_images(parts: Sequence[BatchPart], *, decodes_regions: bool) -> _ColumnImages:
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
    call = DecodingCall(sources, np.concatenate(destinations), np.concatenate(image_bytes), sum(part_bytes))
    return _ColumnImages(entries, [*parts], part_bytes, call)


def _make_sources(data: Any, encoded: Sequence[Sequence[Any]], table: Any) -> Iterator[EncodedRegion]:
    """Yield the decoder's input for each image. The tables have sizes and regions of upright images."""
    rows = zip(encoded, table["size_hw"].tolist(), table["region_tlhw"].tolist(), strict=True)
    for (_, _, offset, nbytes, orientation, grey, _), (height, width), region in rows:
        if orientation != 1:
            region = stored_region(tuple(region), orientation, (height, width))
            height, width = (width, height) if is_transposed(orientation) else (height, width)
        yield EncodedRegion(data[offset : offset + nbytes], height, width, bool(grey), region)


def _remove_samples(part: BatchPart, failures: dict[int, ErrorRecord]) -> list[ErrorRecord]:
    """Remove failed samples from a part's content; return their errors."""
    content = part.content
    assert content is not None
    errors = [*content.errors, *((content.rows[row], record) for row, record in failures.items())]
    content.unstack(list(content.blocks), part.data)
    part.content = content.take(np.setdiff1d(np.arange(len(content)), list(failures)))
    part.content.errors = sorted(errors, key=lambda entry: entry[0])
    return [failures[row] for row in sorted(failures)]
