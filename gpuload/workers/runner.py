"""Doing one chunk: samples → regions → pixels in a slot. The same code in a worker and, with num_workers=0, at home.

A chunk is done in three passes over its few samples: take them from the dataset and read the headers; draw all their
decode regions at once; decode each region to its place in the slot. A sample that fails is recorded and left out; it
never fails the chunk. Nothing is kept from one chunk to the next but the decoder and the read-only dataset.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.batch import ALIGN, ChunkContent, ImageColumn, find_images, flatten, write_content
from gpuload.decode import Decode, Decoder
from gpuload.errors import ErrorRecord
from gpuload.ring import align
from gpuload.rng import epoch_key, uniforms
from gpuload.sample import Encoded, Image
from gpuload.transforms import Chain
from gpuload.workers.protocol import MAX_INLINE_BYTES, Reply, Request, Status

__all__ = ["ChunkRunner", "Job"]

GENERATOR_STREAM = 2**31  # the counter stream that keys the generators of users' own datasets


@dataclass(frozen=True)
class Job:
    """What a worker needs to know, once: sent to each at its start."""

    dataset: Any
    chain: Chain
    decode: Decode
    seed: int


@dataclass(slots=True)
class _Loaded:
    """One sample on its way: the row it belongs to, its structure, its images, and its other leaves.

    An image is (leaf, header or None, height, width, channels of the result).
    """

    row: int
    structure: Any
    places: tuple[int, ...]
    images: list[tuple[Encoded | Image, Any, int, int, int]]
    values: list[Any]
    source: str | None


Box = list[int]  # top, left, height, width


class ChunkRunner:
    """Does chunks, one after the other.

    Args:
        job: dataset, transforms, options.
        guard_generators: put the global random generators back after each chunk (in the user's own process).
    """

    def __init__(self, job: Job, *, guard_generators: bool) -> None:
        self.job = job
        self.decoder = Decoder(job.decode)
        self._guard = guard_generators
        # Datasets of gpuload draw nothing; any other may use the global generators of random, numpy or torch.
        self._seeds = not type(job.dataset).__module__.startswith("gpuload.datasets")

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
        with _generators_kept() if self._guard and self._seeds else contextlib.nullcontext():
            for row in range(len(request.positions)):
                if not wanted():
                    return Reply(request.chunk, request.attempt, Status.UNWANTED, 0, b"")
                note(row)
                try:
                    loaded.append(self._load(request, row))
                except Exception as error:
                    errors.append((row, _record(request, row, None, error)))
        regions = self._regions(request, loaded, errors)
        # What fits into the slot is decided before any pixel is decoded.
        nbytes = 0
        for sample, boxes in zip(loaded, regions, strict=True):
            for image, box in zip(sample.images, boxes, strict=True):
                nbytes += align(box[2] * box[3] * image[4], ALIGN)
        if nbytes > len(slot):
            return Reply(request.chunk, request.attempt, Status.TOO_LARGE, nbytes, b"")
        kept: list[_Loaded] = []
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
                kept.append(sample)
        return _reply(request, slot, at, kept, table, errors)

    def _load(self, request: Request, row: int) -> _Loaded:
        index = request.indices[row]
        if isinstance(index, np.integer):
            index = int(index)
        if self._seeds:
            _seed_generators(self.job.seed, request.epoch, int(request.positions[row]))
        leaves: list[Any] = []
        structure = flatten(self.job.dataset[index], leaves)
        found = find_images(leaves)
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
        values = [leaf for place, leaf in enumerate(leaves) if place not in found]
        return _Loaded(row, structure, tuple(found), images, values, source)

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
        rows = [sample.row for sample in loaded for _ in sample.images]
        if not rows:
            return [[] for _ in loaded]
        sizes = np.array([image[2:4] for sample in loaded for image in sample.images], np.int64)
        key = epoch_key(self.job.seed, request.epoch)
        boxes = iter(self.job.chain.regions(key, request.positions[rows], sizes).tolist())
        return [[next(boxes) for _ in sample.images] for sample in loaded]

    def _decode(self, sample: _Loaded, boxes: list[Box], slot: np.ndarray, at: int, table: list[list[int]]) -> int:
        """Put the pixels of a sample into the slot from `at` on; returns where they end."""
        for (leaf, header, full_height, full_width, channels), box in zip(sample.images, boxes, strict=True):
            top, left, height, width = box
            nbytes = height * width * channels
            out = slot[at : at + nbytes].reshape(height, width, channels)
            if header is not None:
                self.decoder.decode(leaf, header, (top, left, height, width), out)  # pyright: ignore[reportArgumentType]
            else:
                out[...] = leaf.hwc[top : top + height, left : left + width]  # pyright: ignore[reportAttributeAccessIssue]
            table.append([at, height, width, channels, full_height, full_width, *box])
            at = align(at + nbytes, ALIGN)
        return at


class _Sourced(Exception):
    """Carries the source of the image whose header failed; the error itself is the cause."""

    def __init__(self, source: str | None) -> None:
        super().__init__(source)
        self.source = source


def _record(request: Request, row: int, source: str | None, error: BaseException) -> ErrorRecord:
    if isinstance(error, _Sourced) and error.__cause__ is not None:
        source, error = error.source, error.__cause__
    if source is None and isinstance(error, OSError) and isinstance(error.filename, str):
        source = error.filename
    index = request.indices[row]
    return ErrorRecord(
        position=int(request.positions[row]),
        index=int(index) if isinstance(index, np.integer) else index,
        source=source,
        cause=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def _reply(
    request: Request,
    slot: np.ndarray,
    used_bytes: int,
    kept: list[_Loaded],
    table: list[list[int]],
    errors: list[tuple[int, ErrorRecord]],
) -> Reply:
    structures = [sample.structure for sample in kept]
    places = [sample.places for sample in kept]
    if all(s == structures[0] for s in structures) and all(p == places[0] for p in places):
        structures, places = structures[:1], places[:1]
    # One column for each image leaf. Where the samples differ in their structure there is none that holds, and none is
    # needed: the parent refuses them.
    every = np.array(table, np.int64).reshape(-1, 10)
    images = (
        [ImageColumn(every[number :: len(places[0])]) for number in range(len(places[0]))] if len(places) == 1 else []
    )
    content = ChunkContent(
        [sample.row for sample in kept],
        structures,
        places,
        images,
        [sample.values for sample in kept],
        [sample.source for sample in kept],
        sorted(errors, key=lambda entry: entry[0]),
    )
    try:
        packed = write_content(content, slot, used_bytes, inline_bytes=MAX_INLINE_BYTES)
    except Exception as error:
        # A leaf that cannot be sent. Which one is not worth the search: the dataset gives the same kind for each
        # sample.
        failed = [(sample.row, _record(request, sample.row, sample.source, _unsendable(error))) for sample in kept]
        content = ChunkContent(errors=sorted(failed + errors, key=lambda entry: entry[0]))
        packed = write_content(content, slot, 0, inline_bytes=MAX_INLINE_BYTES)
    status = Status.DONE if packed.fits else Status.TOO_LARGE
    return Reply(request.chunk, request.attempt, status, packed.nbytes, packed.meta, packed.meta_at)


def _unsendable(error: Exception) -> TypeError:
    return TypeError(
        f"the sample cannot be sent to the main process ({type(error).__name__}: {error}); "
        "return images, arrays, numbers and strings"
    )


def _seed_generators(seed: int, epoch: int, position: int) -> None:
    """Seed the global generators that a user's dataset may draw from, as a function of the sample's position."""
    words = uniforms(epoch_key(seed, epoch), np.asarray([position], np.int64), GENERATOR_STREAM, 2)[0]
    import random  # here and below: most workers never need it

    value = int(words[0] * 2**32)
    random.seed(value)
    np.random.seed(value)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(value)  # of the CPU alone: torch.manual_seed would touch CUDA's too


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    import random

    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
