"""Doing one chunk: samples → regions → pixels in a slot. The same code in a worker and, with num_workers=0, at home.

A chunk is done in three passes over its few samples: take them from the dataset and read the headers; draw all their
decode regions at once; decode each region to its place in the slot. A sample that fails is recorded and left out; it
never fails the chunk. Nothing is kept from one chunk to the next but the decoder and the read-only dataset.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.datasets.box_formats import to_xyxy
from gpuload.datasets.recognise import find_leaves
from gpuload.datasets.sample import Boxes, Encoded, Image, Mask, Target
from gpuload.datasets.tree import describe, dtype_of, flatten, is_tensor
from gpuload.decode import Decoder
from gpuload.errors import ErrorRecord, one_line
from gpuload.order.place import IterablePlace
from gpuload.ring.chunk import Belongings, ChunkContent, Collated, ImageColumn
from gpuload.ring.packing import ALIGN, write_content
from gpuload.ring.ring import align
from gpuload.rng.generators import kept
from gpuload.rng.philox import epoch_key
from gpuload.workers.belongings import check_transforms, droppers, find_belongings, mask_misfit
from gpuload.workers.job import Job
from gpuload.workers.protocol import MAX_INLINE_BYTES, Reply, Request, Status
from gpuload.workers.source import Ended, Source

__all__ = ["ChunkRunner"]

# Of an error's text so many characters are kept: thousands of records may be.
MAX_CAUSE, MAX_TRACEBACK = 1000, 8000
KEPT_BATCHES = 8  # that a collate_fn made and that wait for a larger slot; another worker may get that


@dataclass(slots=True)
class _Loaded:
    """One sample on its way: the row it belongs to, its structure, its images, and its other leaves.

    An image is (leaf, header or None, height, width, channels of the result). Masks stand behind the images, with the
    bytes of all their numbers as channels. `belongings` is None where there are no targets.
    """

    row: int
    sample: Any
    structure: Any
    places: tuple[int, ...]
    images: list[tuple[Encoded | Image | Mask, Any, int, int, int]]
    values: list[Any]
    source: str | None
    belongings: Belongings | None = None

    @property
    def masks(self) -> int:
        """How many of the images are masks."""
        return 0 if self.belongings is None else len(self.belongings.masks)


Box = list[int]  # top, left, height, width


class ChunkRunner:
    """Does chunks, one after the other.

    Args:
        job: dataset, transforms, options.
        guard_generators: put the global random generators back after each chunk (in the user's own process).

    Attributes:
        source: gives the samples.
    """

    def __init__(self, job: Job, *, guard_generators: bool) -> None:
        self.job = job
        self.decoder = Decoder(job.decode)
        self.source = Source(job.dataset, job.seed)
        self._guard = guard_generators and self.source.seeds
        # A batch of plain data is collated where it is made; images are put together after the stage.
        self._collates = job.collate_fn is not None and not len(job.chain)
        self._needs_boxes = job.chain.reads_boxes or bool(droppers(job.chain))
        self._no_targets = check_transforms(job.chain)
        self._made: dict[Any, Collated] = {}  # collated, and not yet in a slot that is large enough
        self._sends = False  # whether a collated batch could be sent

    def run(
        self,
        request: Request,
        slot: np.ndarray,
        note: Callable[[int], None],
        wanted: Callable[[], bool],
    ) -> Reply:
        """Do the chunk; `note` is told each row before it is touched, `wanted` ends the work between two rows."""
        loaded: list[_Loaded] = []
        errors: list[tuple[int, ErrorRecord]] = []
        collated = None
        rows = len(request.positions)
        with kept() if self._guard else contextlib.nullcontext():
            samples = self.source.open(request, lambda: note(min(len(loaded) + len(errors), rows - 1)))
            for row in range(rows):
                if not wanted():
                    return Reply(request.chunk, request.attempt, Status.UNWANTED, 0, b"")
                note(row)
                try:
                    loaded.append(self._load(row, samples(row)))
                except Ended:
                    rows = row
                    break
                except Exception as error:
                    errors.append((row, _record(request, row, None, error)))
                    if self.source.broken:
                        rows = row + 1
                        break
            place = self.source.place(request, rows)
            if self._collates and request.whole and loaded and not errors and not any(s.images for s in loaded):
                note(0)
                collated = self._collated(request, [sample.sample for sample in loaded])
        reply = None
        if collated is not None:
            content = ChunkContent([s.row for s in loaded], sources=[None] * rows, collated=collated, stream=place)
            try:
                reply = _pack(request, slot, 0, content, keep_types=True)
                self._sends = True
            except Exception:
                # It cannot be sent (a generator, say, or what holds a lock): it is made where it stays. The samples
                # may have been changed, so they are taken from the dataset once more; of an iterator there is a copy.
                self._collates = False
                if request.iterable is None:
                    return self.run(request, slot, note, wanted)
        if reply is None:
            reply = self._finish(request, slot, note, wanted, loaded, errors, place)
        if reply.status is Status.DONE:
            self._made.pop(_made_key(request), None)
        return reply

    def _finish(
        self,
        request: Request,
        slot: np.ndarray,
        note: Callable[[int], None],
        wanted: Callable[[], bool],
        loaded: list[_Loaded],
        errors: list[tuple[int, ErrorRecord]],
        place: IterablePlace | None,
    ) -> Reply:
        """From the samples to what lies in the slot."""
        regions = self._regions(request, loaded, errors)
        # What fits into the slot is decided before any pixel is decoded.
        nbytes = 0
        for sample, boxes in zip(loaded, regions, strict=True):
            for image, box in zip(sample.images, boxes, strict=True):
                nbytes += align(box[2] * box[3] * image[4], ALIGN)
        if nbytes > len(slot):
            return Reply(request.chunk, request.attempt, Status.TOO_LARGE, nbytes, b"")
        kept_: list[_Loaded] = []
        table: list[list[int]] = []  # for each image of each sample that is kept, a row of an `ImageColumn`
        at = 0
        for sample, boxes in zip(loaded, regions, strict=True):
            if not wanted():
                return Reply(request.chunk, request.attempt, Status.UNWANTED, 0, b"")
            note(sample.row)
            before = len(table)
            try:
                at = self._decode(sample, boxes, slot, at, table)
            except Exception as error:
                del table[before:]
                errors.append((sample.row, _record(request, sample.row, sample.source, error)))
            else:
                kept_.append(sample)
        return self._reply(request, slot, at, kept_, table, errors, place)

    def _load(self, row: int, sample: Any) -> _Loaded:
        if sample is None and self.job.collate_fn is None:
            raise TypeError(
                "the dataset returned None; return a sample, raise an error, or pass a collate_fn that leaves None out"
            )
        leaves: list[Any] = []
        structure = flatten(sample, leaves)
        found, targets = find_leaves(leaves)
        if not found and len(self.job.chain) and self.job.collate_fn is None:
            raise TypeError(
                f"the sample, {one_line(describe(structure, leaves))}, has no image for the transforms"
                f"{_nearly_an_image(leaves)}; return gpuload.Encoded(bytes), gpuload.Image, a PIL image, or a uint8 "
                "array H×W×C or tensor C×H×W; or leave the transforms out"
            )
        images = []
        source = None
        for leaf in found.values():
            if isinstance(leaf, Encoded):
                source = source or leaf.source
                try:
                    header = self.decoder.header(leaf)
                    height, width = self.decoder.size_hw(header)
                    images.append((leaf, header, height, width, self.decoder.channels(header, leaf.mode)))
                except Exception as error:
                    raise _Sourced(source) from error
            else:
                images.append((leaf, None, *leaf.hwc.shape))
        if not targets and not self._needs_boxes:
            values = [leaf for place, leaf in enumerate(leaves) if place not in found]
            return _Loaded(row, sample, structure, tuple(found), images, values, source)
        return self._with_targets(_Loaded(row, sample, structure, tuple(found), images, [], source), leaves, targets)

    def _with_targets(self, loaded: _Loaded, leaves: list[Any], targets: dict[int, Target]) -> _Loaded:
        """The rest of a sample that has masks, boxes or keypoints."""
        images = loaded.images
        if not images:
            raise TypeError(
                f"the sample, {one_line(describe(loaded.structure, leaves))}, has masks, boxes or keypoints, but no "
                "image that they are in; return it in the same sample"
            )
        if targets and self._no_targets is not None:
            raise ValueError(self._no_targets)
        size = images[0][2:4]
        for _, _, *other, _ in images[1:]:
            if tuple(other) != size:
                raise ValueError(
                    "masks, boxes and keypoints belong to all images of their sample, which must be of one size, but "
                    f"there are {_size(size)} and {_size(other)} (height × width)"
                )
        masks, specs = {place: mask for place, mask in targets.items() if isinstance(mask, Mask)}, []
        for place, mask in masks.items():
            header, dtype, axes = None, "", 2
            if isinstance(mask.array, Encoded):
                loaded.source = loaded.source or mask.array.source
                try:
                    header = self.decoder.header(mask.array)
                    dtype = self.decoder.mask_dtype(header)
                except Exception as error:
                    raise _Sourced(mask.array.source) from error
                shape, count = self.decoder.size_hw(header), 1
            else:
                dtype, axes, shape = mask.array.dtype.name, mask.array.ndim, mask.array.shape
                count = len(mask.array) if axes == 3 else 1
            if (misfit := mask_misfit(place, shape, size)) is not None:
                raise ValueError(misfit)
            specs.append((dtype, axes))
            images.append((mask, header, *size, count * np.dtype(dtype).itemsize))
        loaded.belongings = find_belongings(loaded.sample, leaves, targets, specs, self.job.chain)
        loaded.places += tuple(masks)
        away = set(loaded.places)
        loaded.values = [targets.get(place, leaf) for place, leaf in enumerate(leaves) if place not in away]
        return loaded

    def _collated(self, request: Request, samples: list[Any]) -> Collated:
        """What `collate_fn` makes of a batch, once: it may change the samples, so a chunk that is done again, in a
        larger slot, gets what was made before."""
        key = _made_key(request)
        if key not in self._made:
            if request.iterable is not None and not self._sends:
                with contextlib.suppress(Exception):  # what cannot be copied is not
                    samples = copy.deepcopy(samples)
            self._made[key] = self._collate(samples)
            if len(self._made) > KEPT_BATCHES:
                self._made.pop(next(iter(self._made)))
        return self._made[key]

    def _collate(self, samples: list[Any]) -> Collated:
        """Run the user's `collate_fn`."""
        assert self.job.collate_fn is not None
        try:
            return Collated(self.job.collate_fn(samples[0] if self.job.single else samples))
        except Exception as error:
            return Collated(
                error=one_line(f"{type(error).__name__}: {_text(error)}", MAX_CAUSE),
                traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK:],
            )

    def _regions(
        self, request: Request, loaded: list[_Loaded], errors: list[tuple[int, ErrorRecord]]
    ) -> list[list[Box]]:
        """For each sample the regions of its images; a sample whose draw fails is taken out of `loaded`."""
        try:
            return self._draw_regions(request, loaded)
        except ValueError:
            # One image that a transform cannot take: find out whose it is, one sample at a time.
            results: list[list[Box]] = []
            for sample in list(loaded):
                try:
                    results += self._draw_regions(request, [sample])
                except ValueError as error:
                    errors.append((sample.row, _record(request, sample.row, sample.source, error)))
                    loaded.remove(sample)
            return results

    def _draw_regions(self, request: Request, loaded: list[_Loaded]) -> list[list[Box]]:
        counts = [len(sample.images) - sample.masks for sample in loaded]
        rows = [sample.row for sample, count in zip(loaded, counts, strict=True) for _ in range(count)]
        if not rows:
            return [[] for _ in loaded]
        chosen = zip(loaded, counts, strict=True)
        sizes = np.array([image[2:4] for sample, count in chosen for image in sample.images[:count]], np.int64)
        key = epoch_key(self.job.seed, request.epoch)
        targets = None
        if self.job.chain.reads_boxes:
            chosen = zip(loaded, counts, strict=True)
            targets = [boxes for sample, count in chosen for boxes in [_boxes(sample)] * count]
        found = iter(self.job.chain.regions(key, request.positions[rows], sizes, targets).tolist())
        regions = [[next(found) for _ in range(count)] for count in counts]
        for sample, own in zip(loaded, regions, strict=True):
            own += own[:1] * sample.masks
        return regions

    def _decode(self, sample: _Loaded, boxes: list[Box], slot: np.ndarray, at: int, table: list[list[int]]) -> int:
        """Put the pixels of a sample into the slot from `at` on; returns where they end."""
        first = len(table) + len(sample.images) - sample.masks  # the row of the first mask
        for (leaf, header, full_height, full_width, channels), box in zip(sample.images, boxes, strict=True):
            top, left, height, width = box
            nbytes = height * width * channels
            out = slot[at : at + nbytes].reshape(height, width, channels)
            try:
                if isinstance(leaf, Mask):
                    dtype = np.dtype(sample.belongings.masks[len(table) - first][0])  # pyright: ignore
                    self._decode_mask(leaf, header, (top, left, height, width), slot[at : at + nbytes].view(dtype))
                elif header is not None:
                    self.decoder.decode(leaf, header, (top, left, height, width), out)  # pyright: ignore[reportArgumentType]
                else:
                    out[...] = leaf.hwc[top : top + height, left : left + width]  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as error:
                file = leaf.array if isinstance(leaf, Mask) else leaf
                raise _Sourced(getattr(file, "source", None) or sample.source) from error
            table.append([at, height, width, channels, full_height, full_width, *box])
            at = align(at + nbytes, ALIGN)
        return at

    def _decode_mask(self, mask: Mask, header: Any, region_tlhw: tuple[int, int, int, int], out: np.ndarray) -> None:
        """A region of a mask, to H×W×N in the slot."""
        top, left, height, width = region_tlhw
        if header is not None:
            self.decoder.decode_mask(mask.array, header, region_tlhw, out.reshape(height, width))
            return
        part = mask.array[..., top : top + height, left : left + width]
        out = out.reshape(height, width, 1 if part.ndim == 2 else len(part))
        out[...] = part[:, :, None] if part.ndim == 2 else part.transpose(1, 2, 0)

    def _reply(
        self,
        request: Request,
        slot: np.ndarray,
        used_bytes: int,
        kept_: list[_Loaded],
        table: list[list[int]],
        errors: list[tuple[int, ErrorRecord]],
        place: IterablePlace | None,
    ) -> Reply:
        structures = [sample.structure for sample in kept_]
        places = [sample.places for sample in kept_]
        belongings = [sample.belongings for sample in kept_]
        if all(b == belongings[0] for b in belongings):
            belongings = belongings[:1] if belongings and belongings[0] is not None else []
        if all(s == structures[0] for s in structures) and all(p == places[0] for p in places):
            structures, places = structures[:1], places[:1]
        # One column for each image leaf; where the samples differ in their structure, one with all.
        every = np.array(table, np.int64).reshape(-1, 10)
        leaves = len(places[0]) if len(places) == 1 else 1
        content = ChunkContent(
            [sample.row for sample in kept_],
            structures,
            places,
            [ImageColumn(every[number::leaves]) for number in range(leaves)],
            [sample.values for sample in kept_],
            [sample.source for sample in kept_],
            sorted(errors, key=lambda entry: entry[0]),
            stream=place,
            belongings=belongings,
        )
        keep_types = self.job.collate_fn is not None
        try:
            return _pack(request, slot, used_bytes, content, keep_types=keep_types)
        except Exception as error:
            # A leaf that cannot be sent. Which one is not worth the search: the dataset gives the same kind for each
            # sample.
            failed = [(sample.row, _record(request, sample.row, sample.source, _unsendable(error))) for sample in kept_]
            errors = sorted(failed + errors, key=lambda entry: entry[0])
            return _pack(request, slot, 0, ChunkContent(errors=errors, stream=place))


def _pack(
    request: Request, slot: np.ndarray, used_bytes: int, content: ChunkContent, *, keep_types: bool = False
) -> Reply:
    packed = write_content(content, slot, used_bytes, inline_bytes=MAX_INLINE_BYTES, keep_types=keep_types)
    status = Status.DONE if packed.fits else Status.TOO_LARGE
    return Reply(request.chunk, request.attempt, status, packed.nbytes, packed.meta, packed.meta_at)


def _made_key(request: Request) -> tuple[Any, ...]:
    return request.epoch, int(request.positions[0]), request.iterable and request.iterable.run


class _Sourced(Exception):
    """Carries the source of the image whose header failed; the error itself is the cause."""

    def __init__(self, source: str | None) -> None:
        super().__init__(source)
        self.source = source


def _nearly_an_image(leaves: Sequence[Any]) -> str:
    """What to do about the first leaf that may be meant as an image and is taken for none."""
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray) and not is_tensor(leaf):
            continue
        axes, dtype = len(leaf.shape), dtype_of(leaf)
        if axes == 2 and dtype == "uint8":
            return ": if the array H×W is one, write gpuload.Image(array)"
        if axes == 3 and dtype.startswith(("float", "bfloat")):
            return f": images must be uint8, not {dtype}; leave out the dataset's ToTensor, or what else scales them"
    return ""


def _boxes(sample: _Loaded) -> np.ndarray:
    """The boxes that a sample's draws hang on."""
    boxes = next(value for value in sample.values if isinstance(value, Boxes))
    return to_xyxy(boxes.array, boxes.format)


def _size(size_hw: Sequence[int]) -> str:
    return "×".join(map(str, size_hw))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # an exception class of the user's own
        return f"(its text cannot be had: {type(worse).__name__})"


def _record(request: Request, row: int, source: str | None, error: BaseException) -> ErrorRecord:
    if isinstance(error, _Sourced) and error.__cause__ is not None:
        source, error = error.source, error.__cause__
    if source is None and isinstance(error, OSError) and isinstance(error.filename, str):
        source = error.filename
    index = request.indices[row]
    return ErrorRecord(
        epoch=request.epoch,
        position=int(request.positions[row]),
        index=int(index) if isinstance(index, np.integer) else index,
        source=source,
        cause=one_line(f"{type(error).__name__}: {_text(error)}", MAX_CAUSE),
        traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK:],
    )


def _unsendable(error: Exception) -> TypeError:
    return TypeError(
        f"the sample cannot be sent to the main process ({type(error).__name__}: {error}); "
        "return images, arrays, numbers and strings"
    )
