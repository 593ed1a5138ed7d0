"""Chunks of decoded images of one shape, which lie in a file as rows of an array: done without taking samples apart.

What comes of such a chunk is what the ordinary way (`gpuload.workers.runner`) gives, to the last bit. Only the work in
Python for each sample is left out: for 256×256 pixels it took as long as their copy. Whatever is not quite ordinary, an
error above all, is left to the ordinary way. Runs in workers and, with ``num_workers=0``, in the main process.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from gpuload.datasets.kinds import row_bytes
from gpuload.datasets.tree import flatten
from gpuload.ring.columns import Columns, ImageColumn, ValueColumn
from gpuload.ring.packing import ALIGN
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.draws import image_table
from gpuload.workers.box_fields import droppers
from gpuload.workers.counters import FLUSH_BYTES, Counters
from gpuload.workers.job import Job
from gpuload.workers.protocol import Reply, Request, Status

__all__ = ["RowCopier", "row_copier"]


class RowCopier:
    """Copies rows of an `ArrayFile` to slots.

    Attributes:
        counters: where it counts what it does.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._dataset: Any = job.dataset
        self.counters = Counters()
        leaves: list[Any] = []
        self._structure = flatten(0 if self._dataset.labels is None else (0, 0), leaves)

    def fill(
        self, request: Request, slot: np.ndarray, note: Callable[[int], None], wanted: Callable[[], bool]
    ) -> tuple[Columns, int] | Reply | None:
        """Copy the samples of a chunk to its slot; arguments as for `ChunkRunner.run`.

        Returns:
            What the chunk came to, and how many bytes its pixels take; a reply that says why not; or None: the ordinary
            way has to do it.
        """
        counters, start = self.counters, clock()
        try:
            numbers = self._numbers(request.indices)
            images = None if numbers is None else self._dataset._image_rows(numbers.tolist())
            if numbers is None or images is None:
                return None
            table = self._table(request, images)
        except Exception:  # the ordinary way finds out of which sample it is
            return None
        nbytes = int(table["offset"][-1]) + _aligned(int(table["shape"][-1].prod()))
        if nbytes > len(slot):
            return Reply(request.chunk, Status.TOO_LARGE, nbytes, b"")
        counters.bytes_read += len(numbers) * images[0].nbytes
        counters.bytes_decoded += nbytes
        before, start = start, clock()
        counters.header_ns += start - before
        flat = images.reshape(len(images), -1).view(np.uint8)  # the file's own memory
        whole, due = bool((table["region_tlhw"][:, 2:] == table["size_hw"]).all()), 0
        columns = (table[name].tolist() for name in ("offset", "shape", "region_tlhw"))
        for row, (number, at, shape, region) in enumerate(zip(numbers.tolist(), *columns, strict=True)):
            (height, width, channels), (top, left, _, _) = shape, region
            if at >= due:
                before, start, due = start, clock(), at + FLUSH_BYTES
                counters.decode_ns += start - before
                counters.flush()
                if not wanted():
                    return Reply(request.chunk, Status.UNWANTED, 0, b"")
            note(row)
            out = slot[at : at + height * width * channels]
            if whole:
                out[...] = flat[number]
            else:
                region = images[number, top : top + height, left : left + width]
                out.view(images.dtype).reshape(region.shape)[...] = region
        counters.samples += len(numbers)
        counters.decode_ns += clock() - start
        return self._content(numbers, table, images.dtype), nbytes

    def _numbers(self, indices: Any) -> np.ndarray | None:
        """The samples of a chunk, unless their keys are of another kind."""
        if not isinstance(indices, np.ndarray) or indices.dtype.kind not in "iu" or not len(indices):
            return None
        return indices if indices.min() >= 0 and indices.max() < len(self._dataset) else None

    def _table(self, request: Request, images: np.ndarray) -> np.ndarray:
        """Return the table of the `ImageColumn`."""
        _, height, width, channels = images.shape
        sizes = np.empty((len(request.positions), 2), np.int64)
        sizes[:] = height, width
        chain = self._job.chain.at(request.epoch)
        regions = chain.regions(epoch_key(self._job.seed, request.epoch), request.positions, sizes)
        shapes = np.column_stack([regions[:, 2:], np.full(len(sizes), channels * images.itemsize)])
        nbytes = _aligned(shapes.prod(axis=1))
        return image_table(nbytes.cumsum() - nbytes, shapes, sizes, regions)

    def _content(self, numbers: np.ndarray, table: np.ndarray, dtype: np.dtype[Any]) -> Columns:
        labels, count = self._dataset.labels, len(numbers)
        values = {}
        if labels is not None:
            own = labels[numbers]
            values[1] = ValueColumn(own.tolist() if own.ndim == 1 else list(own))
        kinds: list[Any] = [(dtype.name, 3)] if dtype.itemsize > 1 else []
        return Columns(
            list(range(count)),
            [self._structure],
            [ImageColumn(table, [0], None, kinds)],
            values,
            [None] * count,
        )


def _aligned(nbytes: Any) -> Any:
    return -(-nbytes // ALIGN) * ALIGN


def row_copier(job: Job) -> RowCopier | None:
    """A `RowCopier`, for jobs that it can do: images of an `ArrayFile`, which no user's code sees one by one."""
    chain = job.chain
    if not row_bytes(job.dataset):
        return None
    special = job.collate_fn is not None or chain.frames or chain.reads_boxes or droppers(chain)
    return None if special else RowCopier(job)
