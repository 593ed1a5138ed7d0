"""A batch's encoded images become what workers' pixels would have been: decoded, cropped, turned upright, in one memory
on the device for each chunk, and in the tables of its content.

Runs in the main process, on the transfer's stream, once a batch is complete and before it goes to the stage. It owns
the decoders: the device's, and `gpuload.decode.Decoder` for what that refuses, one image after the other. A sample that
neither decodes is taken out of its chunk and becomes the error that a worker would have made of it.

**Memory.** The device's decoder gives whole images, which are only then cropped, or their regions alone. They are
decoded a few at a time, and kept until the device has copied their crops: a GPU's JPEG engine writes when it is called,
whatever its stream still has to do, so their memory must not be free before. The host does not wait for that unless
`limit_bytes` would not hold what is kept and what comes; the crops of a batch come on top of that. Where the device has
no room even so, half as many are tried, and no more from then on. An image that is too large alone goes to the CPU.

**Time.** What is done for each image in Python is what decoding costs the training loop: so sizes, places and crops are
columns, and `benchmarks/device_decode.py` measures the rest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from gpuload.datasets import sample
from gpuload.datasets.tree import places_of
from gpuload.decode import Decode, Decoder
from gpuload.decode.decoder import DECODERS
from gpuload.decode.header import is_transposed, stored_region
from gpuload.errors import ErrorRecord, one_line
from gpuload.ring.columns import EncodedImage, ImageColumn, entry
from gpuload.stage.decode.backend import DeviceDecoder, NoRoom, Pixels, Refused, Source, copy_crops
from gpuload.stage.device import DECODE, named
from gpuload.workers.protocol import record_of

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch, Part

__all__ = ["ImageDecoder"]

MOST_IMAGES: Final = 512  # at once, however small they are
MOST_REASONS, MAX_REASON = 10, 100  # that are told apart; characters


@dataclass(slots=True)
class _Images:
    """The encoded images of a batch, as columns.

    Attributes:
        sources: what is decoded.
        entries: each image's part, and its `EncodedImage` as a plain tuple.
        shapes_hwc: of the wanted regions, upright.
        orientations: of EXIF, those that are to be undone.
        starts: where each region goes in the batch's decoded memory.
        nbytes: that the decoder takes for each.
        part_bytes: the decoded bytes of each part.
    """

    sources: list[Source] = field(default_factory=list)
    entries: list[tuple[Part, Sequence[Any]]] = field(default_factory=list)
    shapes_hwc: Any = field(default_factory=list)
    orientations: Any = field(default_factory=list)
    starts: Any = field(default_factory=list)
    nbytes: Any = field(default_factory=list)
    part_bytes: list[int] = field(default_factory=list)


class ImageDecoder:
    """Decodes what workers left to the device.

    Args:
        decoder: the device's.
        options: the loader's.
        device: where pixels go.
        transfer: whose stream it is.

    Attributes:
        counts: images by decoder, by the names of `Stats.decoders`.
        refused: how many the device's decoder refused, by its reasons; the CPU decoded them, or refused them too.
        halved: how often the device had no room.
        seconds: host time.
        images: how many came.
        limit_bytes: that what the decoder gives may take at a time; peak_bytes: the most that it took.
    """

    def __init__(self, decoder: DeviceDecoder, options: Decode, device: torch.device, transfer: Any) -> None:
        self._decoder, self._device, self._transfer = decoder, device, transfer
        self._cpu = Decoder(options)
        self._on_device = Counter(dict.fromkeys(decoder.names, 0))
        self._copying: deque[tuple[Any, int, Any]] = deque()  # event, bytes and owners of what crops are copied from
        self.limit_bytes = self._piece_bytes = options.device_memory
        self.refused: dict[str, int] = {}
        self.halved = self.images = self.peak_bytes = 0
        self.seconds = 0.0

    @property
    def counts(self) -> dict[str, int]:
        return self._on_device | {name: self._cpu.counts[name] for name in DECODERS}

    def __call__(self, batch: Batch) -> list[tuple[Part, list[ErrorRecord]]]:
        """Decode the batch's images; return the samples that failed, by part."""
        start = perf_counter()
        with named(DECODE), torch.inference_mode(False), torch.no_grad(), self._transfer.side():
            failed = self._decode(batch)
        self.seconds += perf_counter() - start
        return failed

    def close(self) -> None:
        """Give memory back; nothing reads it any more."""
        self._copying.clear()
        self._decoder.close()

    def _decode(self, batch: Batch) -> list[tuple[Part, list[ErrorRecord]]]:
        parts = [part for part in batch.parts if part.waits_for_device]
        images = _gather(parts, regions=self._decoder.regions)
        memory = torch.empty(sum(images.part_bytes), dtype=torch.uint8, device=self._device)
        failed: dict[int, dict[int, ErrorRecord]] = {}
        ends, at = images.nbytes.cumsum(), 0
        while at < len(images.sources):
            before = ends[at - 1] if at else 0
            count = max(1, int(ends[at : at + MOST_IMAGES].searchsorted(before + self._piece_bytes, "right")))
            nbytes = int(ends[at + count - 1] - before)
            if (decoded := self._by_device(images.sources[at : at + count], nbytes)) is None:
                continue
            rows = np.array([row for row, one in enumerate(decoded, at) if type(one) is Pixels], np.int64)
            pixels: Any = decoded if len(rows) == count else [decoded[row - at] for row in rows]
            copy_crops(pixels, images.shapes_hwc[rows], images.orientations[rows], images.starts[rows], memory)
            self._on_device.update(one.decoder for one in pixels)
            if (event := self._transfer.mark()) is not None:
                self._copying.append((event, nbytes, pixels))
            for row in sorted({*range(at, at + count)}.difference(rows.tolist())) if len(rows) < count else ():
                self._refuse(decoded[row - at].why)  # pyright: ignore[reportAttributeAccessIssue]
                if (error := self._by_cpu(images, row, memory)) is not None:
                    failed.setdefault(id(images.entries[row][0]), {}).setdefault(*error)
            at += count
        self.images += len(images.sources)
        if failed or batch.errors:
            self._free(0)  # its slots may be given back before anything else waits for the device
        for part, own in zip(parts, memory.split(images.part_bytes), strict=True):
            part.decoded = own
        return [(part, _leave_out(part, failed[id(part)])) for part in parts if id(part) in failed]

    def _by_device(self, sources: Sequence[Source], nbytes: int) -> Sequence[Pixels | Refused] | None:
        """Return what the device makes of images; None: it had no room for all of them, and it may now."""
        if nbytes > self.limit_bytes:  # it is one
            return [Refused(f"more than device_memory={self.limit_bytes:,} bytes")]
        kept = self._free(self.limit_bytes - nbytes)
        try:
            decoded = self._decoder.decode(sources)
        except NoRoom as error:
            if kept:
                self._free(0)
                return None
            self.halved += 1
            if len(sources) == 1:
                return [Refused(str(error))]
            self._piece_bytes = min(self._piece_bytes, nbytes) // 2
            return None
        self.peak_bytes = max(self.peak_bytes, kept + nbytes)
        return decoded

    def _free(self, limit_bytes: int) -> int:
        """Free the images whose crops are copied; wait for others until what is left takes no more than this. Return
        how much that is."""
        kept = sum(nbytes for _, nbytes, _ in self._copying)
        while self._copying and (kept > limit_bytes or self._copying[0][0].query()):
            event, nbytes, _ = self._copying[0]
            event.synchronize()
            kept -= nbytes
            self._copying.popleft()
        return kept

    def _refuse(self, why: str) -> None:
        why = one_line(why, MAX_REASON)
        if why not in self.refused and len(self.refused) == MOST_REASONS:
            why = "other"
        self.refused[why] = self.refused.get(why, 0) + 1

    def _by_cpu(self, images: _Images, row: int, memory: torch.Tensor) -> tuple[int, ErrorRecord] | None:
        """Decode an image as a worker would; if that fails, return its sample's row and the error."""
        part, encoded = images.entries[row][0], EncodedImage._make(images.entries[row][1])
        content = part.content
        assert content is not None
        column = content.images[encoded.column]
        of_sample, leaf = int(column.row_numbers[encoded.row]), entry(column.leaves, encoded.row)
        source = encoded.source or content.names[of_sample]
        file = sample.Encoded(images.sources[row].data.tobytes(), "L" if encoded.grey else "RGB", source)
        region = column.table["region_tlhw"][encoded.row].tolist()
        try:
            pixels = self._cpu.decode(file, self._cpu.header(file), tuple(region))
        except Exception as error:
            asked = content.rows[of_sample]
            where = part.batch.spec.epoch, part.positions[asked], part.indices[asked]
            return of_sample, record_of(*where, source, error, places_of(content.structure(of_sample))[leaf])
        start = int(images.starts[row])
        memory[start : start + pixels.size].view(pixels.shape).copy_(torch.from_numpy(pixels))
        return None


def _gather(parts: Sequence[Part], *, regions: bool) -> _Images:
    """Collect the encoded images of a batch, and enter into the tables of their parts where the stage will find them:
    one after the other, as if behind the part's own bytes. `regions`: the decoder takes memory for regions alone."""
    images, base = _Images(), 0
    for part in parts:
        assert part.content is not None
        begin = base
        for number, column in enumerate(part.content.images):
            column.table = column.table.copy()  # what was read from a message is read-only
            entries = [encoded for encoded in part.content.encoded if encoded[0] == number]
            if entries:
                nbytes = _gather_column(images, part, column, entries, base, regions)
                column.table["offset"][[row for _, row, *_ in entries]] = part.host_end + nbytes[:-1] + (base - begin)
                base += int(nbytes[-1])
        images.part_bytes.append(base - begin)
    for name in ("shapes_hwc", "orientations", "starts", "nbytes"):
        setattr(images, name, np.concatenate(getattr(images, name)))
    return images


def _gather_column(
    images: _Images, part: Part, column: ImageColumn, entries: Sequence[Sequence[Any]], base: int, regions: bool
) -> np.ndarray:
    """Collect the images of a column, from byte `base` on; return where each begins behind that, and the end."""
    _, rows, offsets, lengths, orientations, greys, _ = zip(*entries, strict=True)
    table = column.table[list(rows)]
    sizes_hw, regions_tlhw, shapes = table["size_hw"], table["region_tlhw"].tolist(), table["shape"]
    stored_hw = sizes_hw.tolist()
    orientation = np.array(orientations, np.int64)
    for row in np.flatnonzero(orientation != 1).tolist():
        upright_hw = tuple(stored_hw[row])
        regions_tlhw[row] = stored_region(tuple(regions_tlhw[row]), orientations[row], upright_hw)
        stored_hw[row] = upright_hw[::-1] if is_transposed(orientations[row]) else upright_hw
    data: Any = part.data
    images.sources += [
        Source(data[offset : offset + nbytes], height, width, bool(grey), tuple(region))
        for offset, nbytes, (height, width), grey, region in zip(
            offsets, lengths, stored_hw, greys, regions_tlhw, strict=True
        )
    ]
    images.entries += zip(repeat(part), entries)
    region_bytes = shapes.prod(axis=1)
    ends = np.concatenate([[0], region_bytes.cumsum()])
    images.shapes_hwc.append(shapes)
    images.orientations.append(orientation)
    images.starts.append(base + ends[:-1])
    images.nbytes.append(region_bytes if regions else sizes_hw.prod(axis=1) * shapes[:, 2])
    return ends


def _leave_out(part: Part, failed: dict[int, ErrorRecord]) -> list[ErrorRecord]:
    """Take failed samples out of a part's content."""
    content = part.content
    assert content is not None
    errors = [*content.errors, *((content.rows[row], record) for row, record in failed.items())]
    content.spread(list(content.blocks), part.data)
    part.content = content.take(np.setdiff1d(np.arange(len(content)), list(failed)))
    part.content.errors = sorted(errors, key=lambda entry: entry[0])
    return [failed[row] for row in sorted(failed)]
