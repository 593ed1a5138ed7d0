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
columns.
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
from gpuload.datasets.tree import places_of
from gpuload.decode import Decode, Decoder
from gpuload.decode.decoder import DECODERS
from gpuload.decode.header import is_transposed, stored_region
from gpuload.errors import ErrorRecord, one_line
from gpuload.ring.columns import EncodedImage, entry
from gpuload.stage.decode.backend import PLACE, NoRoom, Pixels, Refused, Source, copy_crops
from gpuload.stage.decode.nvimagecodec import NvImageCodec
from gpuload.stage.device import DECODE, named
from gpuload.workers.protocol import record_of

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch, Part

__all__ = ["ImageDecoder"]

MOST_IMAGES: Final = 512  # at once, however small they are
MOST_REASONS, MAX_REASON = 10, 100  # that are told apart; characters


class _Images(NamedTuple):
    """The encoded images of a batch, as columns.

    Attributes:
        sources: what is decoded.
        entries: each image's part, and its `EncodedImage` as a plain tuple.
        places: `gpuload.stage.decode.backend.PLACE`, of each region in the batch's decoded memory.
        nbytes: that the decoder takes for each.
        part_bytes: the decoded bytes of each part.
    """

    sources: list[Source]
    entries: list[tuple[Part, Sequence[Any]]]
    places: np.ndarray
    nbytes: np.ndarray
    part_bytes: list[int]


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

    def __init__(self, decoder: NvImageCodec, options: Decode, device: torch.device, transfer: Any) -> None:
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
            rows = [row for row, one in enumerate(decoded, at) if isinstance(one, Pixels)]
            pixels = [one for one in decoded if isinstance(one, Pixels)]
            copy_crops(pixels, images.places[rows], memory)
            self._on_device.update(one.decoder for one in pixels)
            if (event := self._transfer.mark()) is not None:
                self._copying.append((event, nbytes, pixels))
            for row, one in enumerate(decoded, at):
                if isinstance(one, Refused):
                    self._refuse(one.reason)
                    if (error := self._by_cpu(images, row, memory)) is not None:
                        failed.setdefault(id(images.entries[row][0]), {}).setdefault(*error)
            at += count
        self.images += len(images.sources)
        if failed or batch.errors:
            self._free(0)  # its slots may be given back before anything else waits for the device
        for part, piece in zip(parts, memory.split(images.part_bytes), strict=True):
            part.decoded = piece
        return [(part, _leave_out(part, failed[id(part)])) for part in parts if id(part) in failed]

    def _by_device(self, sources: Sequence[Source], nbytes: int) -> Sequence[Pixels | Refused] | None:
        """Return what the device makes of images; None means it had no room for all of them, and it may now."""
        if nbytes > self.limit_bytes:  # it is one
            return [Refused(f"more than device_memory={self.limit_bytes:,} bytes")]
        bytes_in_use = self._free(self.limit_bytes - nbytes)
        try:
            decoded = self._decoder.decode(sources)
        except NoRoom as error:
            if bytes_in_use:
                self._free(0)
                return None
            self.halved += 1
            if len(sources) == 1:
                return [Refused(str(error))]
            self._piece_bytes = min(self._piece_bytes, nbytes) // 2
            return None
        self.peak_bytes = max(self.peak_bytes, bytes_in_use + nbytes)
        return decoded

    def _free(self, limit_bytes: int) -> int:
        """Free the images whose crops are copied; wait for others until what is left takes no more than this. Return
        how much that is."""
        bytes_in_use = sum(nbytes for _, nbytes, _ in self._copying)
        while self._copying and (bytes_in_use > limit_bytes or self._copying[0][0].query()):
            event, nbytes, _ = self._copying[0]
            event.synchronize()
            bytes_in_use -= nbytes
            self._copying.popleft()
        return bytes_in_use

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
            row_of_sample = content.rows[of_sample]
            where = part.batch.spec.epoch, part.positions[row_of_sample], part.indices[row_of_sample]
            return of_sample, record_of(*where, source, error, places_of(content.structure(of_sample))[leaf])
        start = int(images.places["start"][row])
        memory[start : start + pixels.size].view(pixels.shape).copy_(torch.from_numpy(pixels))
        return None


def _gather(parts: Sequence[Part], *, regions: bool) -> _Images:
    """Collect the encoded images of a batch, and enter into the tables of their parts where the stage will find them:
    one after the other, as if behind the part's own bytes. `regions`: the decoder takes memory for regions alone."""
    sources, entries, part_bytes, end = [], [], [], 0
    places, image_bytes = [], []
    for part in parts:
        begin = end
        assert part.content is not None
        for number, column in enumerate(part.content.images):
            column.table = column.table.copy()  # what was read from a message is read-only
            encoded = [one for one in part.content.encoded if one[0] == number]
            if not encoded:
                continue
            rows = [row for _, row, *_ in encoded]
            table = column.table[rows]
            nbytes = table["shape"].prod(axis=1)
            place = np.empty(len(rows), PLACE)
            place["shape"], place["start"] = table["shape"], end + nbytes.cumsum() - nbytes
            place["orientation"] = [orientation for *_, orientation, _, _ in encoded]
            column.table["offset"][rows] = part.host_end + place["start"] - begin
            end += int(nbytes.sum())
            sources += _sources(part.data, encoded, table)
            entries += zip(repeat(part), encoded)
            places.append(place)
            image_bytes.append(nbytes if regions else table["size_hw"].prod(axis=1) * table["shape"][:, 2])
        part_bytes.append(end - begin)
    return _Images(sources, entries, np.concatenate(places), np.concatenate(image_bytes), part_bytes)


def _sources(data: Any, encoded: Sequence[Sequence[Any]], table: Any) -> Iterator[Source]:
    """Yield what is decoded for each image: the tables have upright sizes and regions."""
    rows = zip(encoded, table["size_hw"].tolist(), table["region_tlhw"].tolist(), strict=True)
    for (_, _, offset, nbytes, orientation, grey, _), (height, width), region in rows:
        if orientation != 1:
            region = stored_region(tuple(region), orientation, (height, width))
            height, width = (width, height) if is_transposed(orientation) else (height, width)
        yield Source(data[offset : offset + nbytes], height, width, bool(grey), region)


def _leave_out(part: Part, failed: dict[int, ErrorRecord]) -> list[ErrorRecord]:
    """Take failed samples out of a part's content."""
    content = part.content
    assert content is not None
    errors = [*content.errors, *((content.rows[row], record) for row, record in failed.items())]
    content.spread(list(content.blocks), part.data)
    part.content = content.take(np.setdiff1d(np.arange(len(content)), list(failed)))
    part.content.errors = sorted(errors, key=lambda entry: entry[0])
    return [failed[row] for row in sorted(failed)]
