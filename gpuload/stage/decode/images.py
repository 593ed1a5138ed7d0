"""A batch's encoded images become what workers' pixels would have been: decoded, cropped, turned upright, in one memory
on the device for each chunk, and in the tables of its content.

Runs in the main process, on the transfer's stream, once a batch is complete and before it goes to the stage. It owns
the decoders: the device's, and `gpuload.decode.Decoder` for what that refuses, one image after the other. A sample that
neither decodes is taken out of its chunk and becomes the error that a worker would have made of it.

**Memory.** The device's decoder gives whole images, which are only then cropped, or their regions alone. They are
decoded a few at a time, so that these take at most `limit_bytes`; the crops of a batch come on top of that. Where the
device has no room even so, half as many are tried, and no more from then on. An image that is too large alone goes to
the CPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from gpuload.datasets import sample
from gpuload.datasets.tree import places_of
from gpuload.decode import Decode, Decoder
from gpuload.decode.decoder import DECODERS
from gpuload.decode.orientation import FLIPPED_X, FLIPPED_Y, is_transposed, stored_region
from gpuload.errors import ErrorRecord, one_line
from gpuload.ring.columns import EncodedImage, entry
from gpuload.stage.decode.backend import DeviceDecoder, NoRoom, Pixels, Refused, Source
from gpuload.stage.device import DECODE, named
from gpuload.workers.protocol import record_of

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch, Part

__all__ = ["ImageDecoder"]

MOST_IMAGES: Final = 512  # at once, however small they are
MOST_REASONS, MAX_REASON = 10, 100  # that are told apart; characters


@dataclass(slots=True)
class _Image:
    """One image: where it is, and the part of it that is wanted."""

    part: Part
    entry: EncodedImage
    table: np.ndarray  # its row of `ImageColumn.table`
    source: Source
    at: int = 0  # in the part's decoded memory

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self.table["shape"].tolist()
        return height, width, channels

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)


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
        limit_bytes: that what the decoder gives may take at a time; peak_bytes: the most that they took.
    """

    def __init__(self, decoder: DeviceDecoder, options: Decode, device: torch.device, transfer: Any) -> None:
        self._decoder, self._device, self._transfer = decoder, device, transfer
        self._cpu = Decoder(options)
        self._on_device = dict.fromkeys(decoder.names, 0)
        self._used: Any = None  # an event after the last use of what the decoder gave
        self.limit_bytes = self._piece_bytes = options.device_memory
        self.refused: dict[str, int] = {}
        self.halved = self.images = self.peak_bytes = 0
        self.seconds = 0.0

    @property
    def counts(self) -> dict[str, int]:
        return self._on_device | {name: self._cpu.counts[name] for name in DECODERS}

    def __call__(self, batch: Batch) -> list[tuple[Part, list[ErrorRecord]]]:
        """Decode the batch's images; returns the samples that failed, by part."""
        start = perf_counter()
        with named(DECODE), torch.inference_mode(False), torch.no_grad(), self._transfer.side():
            found = self._decode(batch)
        self.seconds += perf_counter() - start
        return found

    def close(self) -> None:
        """Give memory back; nothing reads it any more."""
        self._used = None
        self._decoder.close()

    def _decode(self, batch: Batch) -> list[tuple[Part, list[ErrorRecord]]]:
        parts = [part for part in batch.parts if part.waits_for_device]
        images = [image for part in parts for image in _images_of(part)]
        memory = self._memory_for(parts, images)
        failed: dict[int, dict[int, ErrorRecord]] = {}
        waiting = deque(images)
        while waiting:
            some = self._piece(waiting)
            if (found := self._by_device(some)) is None:  # fewer of them are tried
                waiting.extendleft(reversed(some))
                continue
            for image, pixels in zip(some, found, strict=True):
                place = memory[id(image.part)][image.at : image.at + image.nbytes].view(image.shape)
                if isinstance(pixels, Pixels):
                    _crop(pixels, image, place)
                    self._on_device[pixels.decoder] += 1
                    continue
                self._refuse(pixels.why)
                if (error := self._by_cpu(image, place)) is not None:
                    row, record = error
                    failed.setdefault(id(image.part), {}).setdefault(row, record)
            self._used = self._transfer.mark()
        self.images += len(images)
        if (failed or batch.errors) and self._used is not None:
            self._used.synchronize()  # its slots may be given back before anything else waits for the device
        for part in parts:
            part.decoded = memory[id(part)]
        return [(part, _leave_out(part, failed[id(part)])) for part in parts if id(part) in failed]

    def _memory_for(self, parts: list[Part], images: list[_Image]) -> dict[int, torch.Tensor]:
        """Where each image of each part goes, one after the other; and in the tables, where the stage finds it."""
        sizes = dict.fromkeys(map(id, parts), 0)
        for image in images:
            image.at = sizes[id(image.part)]
            image.table["offset"] = image.part.host_end + image.at
            sizes[id(image.part)] += image.nbytes
        whole = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=self._device)
        return dict(zip(sizes, whole.split(list(sizes.values())), strict=True))

    def _piece(self, waiting: deque[_Image]) -> list[_Image]:
        """The next images that fit into memory together, at least one."""
        some = [waiting.popleft()]
        nbytes = self._nbytes(some[0])
        while waiting and len(some) < MOST_IMAGES and nbytes + self._nbytes(waiting[0]) <= self._piece_bytes:
            nbytes += self._nbytes(waiting[0])
            some.append(waiting.popleft())
        return some

    def _nbytes(self, image: _Image) -> int:
        """That the decoder takes for what it gives."""
        return image.source.region_nbytes if self._decoder.regions else image.source.nbytes

    def _by_device(self, images: list[_Image]) -> Sequence[Pixels | Refused] | None:
        """What the device makes of images; None: it has no room for all of them."""
        nbytes = sum(map(self._nbytes, images))
        if nbytes > self.limit_bytes:  # it is one
            return [Refused(f"more than device_memory={self.limit_bytes:,} bytes")]
        # The memory that is written now may still be read by what was issued before. The host waits for that, and not
        # the stream: a GPU's JPEG engine writes when it is called, whatever its stream still has to do.
        if self._decoder.takes_freed_memory:
            self._used = self._transfer.mark()
        if self._used is not None:
            self._used.synchronize()
            self._used = None
        try:
            found = self._decoder.decode([image.source for image in images])
        except NoRoom as error:
            self.halved += 1
            if len(images) == 1:
                return [Refused(str(error))]
            self._piece_bytes = min(self._piece_bytes, nbytes) // 2
            return None
        self.peak_bytes = max(self.peak_bytes, nbytes)
        return found

    def _refuse(self, why: str) -> None:
        why = one_line(why, MAX_REASON)
        if why not in self.refused and len(self.refused) == MOST_REASONS:
            why = "other"
        self.refused[why] = self.refused.get(why, 0) + 1

    def _by_cpu(self, image: _Image, place: torch.Tensor) -> tuple[int, ErrorRecord] | None:
        """Decode an image as a worker would; if that fails, its row and the error."""
        part, encoded, content = image.part, image.entry, image.part.content
        assert content is not None
        column = content.images[encoded.column]
        row, leaf = int(column.row_numbers[encoded.row]), entry(column.leaves, encoded.row)
        source = encoded.source or content.names[row]
        given = sample.Encoded(image.source.data.tobytes(), "L" if encoded.grey else "RGB", source)
        region = image.table["region_tlhw"].tolist()
        try:
            pixels = self._cpu.decode(given, self._cpu.header(given), tuple(region))
        except Exception as error:
            asked = content.rows[row]
            where = part.batch.spec.epoch, part.positions[asked], part.indices[asked]
            return row, record_of(*where, source, error, places_of(content.structure(row))[leaf])
        place.copy_(torch.from_numpy(pixels))
        return None


def _images_of(part: Part) -> Iterator[_Image]:
    content, data = part.content, part.data
    assert content is not None
    assert data is not None
    for column in content.images:  # what was read from a message is read-only
        column.table = column.table.copy()
    for encoded in map(EncodedImage._make, content.encoded):
        table = content.images[encoded.column].table[encoded.row]
        upright_hw, region = tuple(table["size_hw"].tolist()), tuple(table["region_tlhw"].tolist())
        height, width = upright_hw[::-1] if is_transposed(encoded.orientation) else upright_hw
        stored = stored_region(region, encoded.orientation, upright_hw)
        file = data[encoded.offset : encoded.offset + encoded.nbytes]
        yield _Image(part, encoded, table, Source(file, height, width, bool(encoded.grey), stored))


def _crop(pixels: Pixels, image: _Image, place: torch.Tensor) -> None:
    """Copy the wanted part of a decoded image to its place, upright."""
    found = pixels.tensor
    if pixels.whole:
        top, left, height, width = image.source.region_tlhw
        found = found[top : top + height, left : left + width]
    orientation = image.entry.orientation
    if orientation != 1:
        found = found.transpose(0, 1) if is_transposed(orientation) else found
        axes = [axis for axis, flipped in enumerate((FLIPPED_Y, FLIPPED_X)) if orientation in flipped]
        found = found.flip(axes)
    place.copy_(found)


def _leave_out(part: Part, failed: dict[int, ErrorRecord]) -> list[ErrorRecord]:
    """Take failed samples out of a part's content."""
    content = part.content
    assert content is not None
    errors = [*content.errors, *((content.rows[row], record) for row, record in failed.items())]
    content.spread(list(content.blocks), part.data)
    part.content = content.take(np.setdiff1d(np.arange(len(content)), list(failed)))
    part.content.errors = sorted(errors, key=lambda entry: entry[0])
    return [failed[row] for row in sorted(failed)]
