"""The samples of a `DeviceCached`, as columns over the whole dataset, and the chunks that are cut out of them.

`KeptSamples` is filled once, from chunks of whole images, and then only read. The pixels lie elsewhere, one image after
the other, in a `Memory`: numbers here say where. Everything else is here, in the main process's memory.

A chunk's pixels are described by *windows*, int64 (M, 5), one for each image and mask: the first byte in the memory,
rows, bytes in a row, bytes from one row to the next, and the first byte where the chunk's pixels are put together. They
are laid out there as a worker lays them into a slot, so all that follows sees the same bytes.

Runs in the main process. It imports no torch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final, Protocol

import numpy as np

from gpuload.datasets.box_formats import to_xyxy
from gpuload.datasets.sample import Boxes
from gpuload.datasets.tree import any_of
from gpuload.errors import ErrorRecord
from gpuload.ring.chunk import SEPARATOR, ChunkContent, ImageColumn, TensorBits, ValueColumn
from gpuload.ring.packing import ALIGN

__all__ = ["KeptSamples", "Memory", "ReadMemory", "copy_windows", "span_of"]

ABSENT: Final = object()  # the value of a leaf that a sample does not have
PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, complex})  # nobody can change these
POINTER_BYTES: Final = 8


class Memory(Protocol):
    """Where the pixels lie."""

    @property
    def nbytes(self) -> int: ...
    def add(self, data: np.ndarray) -> int: ...  # copies bytes there; returns where the first one is


class ReadMemory(Memory, Protocol):
    """The same, once it is filled."""

    @property
    def on_host(self) -> bool: ...
    def write(self, windows: np.ndarray, out: np.ndarray) -> None: ...  # copies windows to `out`, if it is on the host


class Choice:
    """One of few different values for each sample."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = []
        self.number = np.zeros(count, np.int32)

    def put(self, numbers: list[int], values: Sequence[Any]) -> None:
        """The values of some samples, or one for all of them."""
        if len(values) == 1:
            self.number[numbers] = self._find(values[0])
        else:
            self.number[numbers] = [self._find(value) for value in values]

    def _find(self, value: Any) -> int:
        for number, own in enumerate(self.values):
            if own == value:
                return number
        self.values.append(value)
        return len(self.values) - 1

    def take(self, numbers: np.ndarray) -> list[Any]:
        """The values of some samples; one, if they have the same."""
        if len(self.values) == 1:
            return self.values[:1]
        found = self.number[numbers]
        return [self.values[number] for number in (found[:1] if (found == found[0]).all() else found).tolist()]


class Pictures:
    """The first images (or masks) of all samples, or the second ones …: `table` has offset, height, width, and the
    channels, or bytes, of a pixel; an offset of -1 where a sample has none."""

    def __init__(self, count: int) -> None:
        self.table = np.full((count, 4), -1, np.int64)
        self.leaves, self.kinds = Choice(count), Choice(count)


@dataclass(slots=True)
class KeptSamples:
    """Samples of a dataset.

    Attributes:
        count: how many samples the dataset has.
        memory: where their pixels are: a `Memory`, and to give samples a `ReadMemory`.
        errors: those that failed, by their number.
        host_bytes: of values, about: arrays, bytes and texts.
        strays: as in `gpuload.ring.chunk.ChunkContent`.
    """

    count: int
    memory: Any
    errors: dict[int, ErrorRecord] = field(default_factory=dict)
    host_bytes: int = 0
    strays: str = ""
    _images: list[Pictures] = field(default_factory=list)
    _masks: list[Pictures] = field(default_factory=list)
    _values: dict[int, list[Any]] = field(default_factory=dict)
    _points: dict[int, list[Any]] = field(default_factory=dict)
    _unplain: set[int] = field(default_factory=set)  # leaves with values that are copied when they are given
    _gaps: set[int] = field(default_factory=set)  # leaves that some samples do not have
    _structures: Choice = field(init=False)
    _fields: Choice = field(init=False)
    _sources: list[str | None] = field(init=False)

    def __post_init__(self) -> None:
        self._structures, self._fields = Choice(self.count), Choice(self.count)
        self._sources = [None] * self.count

    @property
    def nbytes(self) -> int:
        """What all of it takes, about."""
        return self.memory.nbytes + self.host_bytes

    # -- filling ----------------------------------------------------------------------------------------------------

    def add(self, content: ChunkContent, numbers: Sequence[int], data: np.ndarray) -> None:
        """Keep the samples of a chunk, whose images are whole. `numbers` are those of the chunk's rows; `data` are its
        bytes, which are copied."""
        own = [int(numbers[row]) for row in content.rows]
        columns = [*content.images, *content.masks]
        ends = [int((c.offsets + c.shapes.prod(axis=1)).max()) for c in columns if len(c.table)]
        base = self.memory.add(data[: max(ends)]) if ends else 0
        for kept, given in ((self._images, content.images), (self._masks, content.masks)):
            for number, column in enumerate(given):
                if number == len(kept):
                    kept.append(Pictures(self.count))
                _keep_pictures(kept[number], column, own, base)
        for kept, given in (
            (self._values, [*content.values, *_unstacked(content, data)]),
            (self._points, content.points),
        ):
            for column in given:
                self._keep_values(kept, column, own)
        self._structures.put(own, content.structures)
        self._fields.put(own, content.fields or [()])
        sources = content.sources.split(SEPARATOR) if isinstance(content.sources, str) else content.sources
        for number, source in zip(own, sources, strict=True):
            self._sources[number] = source
            self.host_bytes += POINTER_BYTES + (0 if source is None else sys.getsizeof(source))
        self.strays = self.strays or content.strays

    def _keep_values(self, kept: dict[int, list[Any]], column: ValueColumn, own: list[int]) -> None:
        values = kept.setdefault(column.leaf, [ABSENT] * self.count)
        for row, value in column.items():
            values[own[row]] = value
            if type(value) not in PLAIN:
                self._unplain.add(column.leaf)
            self.host_bytes += POINTER_BYTES + _size(value)

    def end(self) -> None:
        """All samples have come."""
        for leaf, values in (*self._values.items(), *self._points.items()):
            if any(value is ABSENT for value in values):
                self._gaps.add(leaf)

    # -- giving -----------------------------------------------------------------------------------------------------

    def sizes(self, numbers: np.ndarray, column: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the samples with such an image: their rows among these, and the sizes of the images, int64 (M, 2)."""
        table = self._images[column].table[numbers]
        rows = np.flatnonzero(table[:, 0] >= 0)
        return rows, table[rows, 1:3]

    @property
    def columns(self) -> int:
        """How many images the sample with the most of them has."""
        return len(self._images)

    def source(self, number: int) -> str | None:
        """The file that a sample's image came from."""
        return self._sources[number]

    def place(self, number: int) -> str:
        """Where in a sample its images are, for errors."""
        own = np.array([number])
        leaves = [pictures.leaves.take(own)[0] for pictures in self._images if pictures.table[number, 0] >= 0]
        return any_of(self._structures.take(own)[0], leaves)

    def boxes(self, numbers: np.ndarray) -> list[np.ndarray]:
        """The boxes that the draws of samples depend on: left, top, right, bottom."""
        found = []
        for number in numbers.tolist():
            values = (self._points[leaf][number] for leaf in sorted(self._points))
            boxes = next(value for value in values if isinstance(value, Boxes))
            found.append(to_xyxy(boxes.array, boxes.format))
        return found

    def content(self, rows: list[int], numbers: np.ndarray, regions_tlhw: Sequence[np.ndarray]) -> ChunkContent:
        """Samples as a chunk. `rows` are those of the request that they have; `regions_tlhw` are, for each column of
        images, the regions of those that have one. Masks get those of the first."""
        content = ChunkContent(rows, self._structures.take(numbers))
        windows: list[np.ndarray] = []
        end = 0
        for pictures, regions in zip(self._images, regions_tlhw, strict=True):
            end = _cut(pictures, numbers, regions, content.images, windows, end)
        if self._masks:
            of_row = np.zeros((len(numbers), 4), np.int64)
            of_row[self.sizes(numbers, 0)[0]] = regions_tlhw[0]
            for pictures in self._masks:
                having = np.flatnonzero(pictures.table[numbers, 0] >= 0)
                end = _cut(pictures, numbers, of_row[having], content.masks, windows, end)
        content.windows = np.concatenate(windows) if windows else np.empty((0, 5), np.int64)
        pick: Callable[[Any], Any] = itemgetter(*numbers.tolist())
        single = len(numbers) == 1
        for kept, columns in ((self._values, content.values), (self._points, content.points)):
            for leaf in sorted(kept):
                values = [pick(kept[leaf])] if single else list(pick(kept[leaf]))
                own = None
                if leaf in self._gaps:
                    own = [row for row, value in enumerate(values) if value is not ABSENT]
                    values = [values[row] for row in own]
                    own = None if len(own) == len(numbers) else own
                if leaf in self._unplain:
                    values = list(map(_copied, values))
                if values:
                    columns.append(ValueColumn(leaf, values, own))
        content.sources = [pick(self._sources)] if single else list(pick(self._sources))
        fields = self._fields.take(numbers)
        content.fields = fields if any(fields) else []
        content.strays = self.strays
        return content

    def error(self, number: int, epoch: int, position: int, index: Any) -> ErrorRecord | None:
        """Why a sample failed, if it did, as an error of this place."""
        found = self.errors.get(number)
        return None if found is None else replace(found, epoch=epoch, position=position, index=index)


def span_of(windows: np.ndarray) -> int:
    """The bytes of a chunk's pixels, put together."""
    return 0 if not len(windows) else -(-int(windows[-1, 4] + windows[-1, 1] * windows[-1, 2]) // ALIGN) * ALIGN


def copy_windows(memory: np.ndarray, windows: np.ndarray, out: np.ndarray) -> None:
    """Copy windows out of a memory, on the host."""
    for start, rows, row_bytes, step, at in windows.tolist():
        # Each view takes part of a microsecond; slices, reshaped, would take twice as long.
        window = np.ndarray((rows, row_bytes), np.uint8, memory, start, (step, 1))
        np.ndarray((rows, row_bytes), np.uint8, out, at)[...] = window


def _keep_pictures(kept: Pictures, column: ImageColumn, own: list[int], base: int) -> None:
    rows = own if column.rows is None else [own[row] for row in column.rows]
    kept.table[rows] = column.table[:, :4] + [base, 0, 0, 0]
    kept.leaves.put(rows, column.leaves)
    kept.kinds.put(rows, column.kinds or [None])


def _cut(
    pictures: Pictures,
    numbers: np.ndarray,
    regions_tlhw: np.ndarray,
    columns: list[ImageColumn],
    windows: list[np.ndarray],
    at: int,
) -> int:
    """Add the column of the images that samples have, and the windows of these regions, put together from byte `at` on;
    returns where they end."""
    whole = pictures.table[numbers]
    rows = None
    if (whole[:, 0] < 0).any():
        rows = np.flatnonzero(whole[:, 0] >= 0)
        numbers, whole = numbers[rows], whole[rows]
    if not len(numbers):
        return at
    start, _, width, pixel = whole.T
    top, left, height, cut = regions_tlhw.T
    row_bytes, step = cut * pixel, width * pixel
    taken = -(-height * row_bytes // ALIGN) * ALIGN
    ends = at + np.cumsum(taken)
    windows.append(np.stack([start + top * step + left * pixel, height, row_bytes, step, ends - taken], axis=1))
    table = np.concatenate(
        [(ends - taken)[:, None], height[:, None], cut[:, None], pixel[:, None], whole[:, 1:3], regions_tlhw], axis=1
    )
    kinds = pictures.kinds.take(numbers)
    columns.append(
        ImageColumn(
            table,
            pictures.leaves.take(numbers),
            None if rows is None else rows.tolist(),
            kinds if any(kinds) else [],
        )
    )
    return int(ends[-1])


def _unstacked(content: ChunkContent, data: np.ndarray) -> list[ValueColumn]:
    """Blocks as values, in memory of their own."""
    columns = []
    for block in content.blocks:
        rows = block.array(data).copy()
        arrays = [row if row.ndim else row[()] for row in rows]
        columns.append(ValueColumn(block.leaf, list(map(block.value, arrays))))
    return columns


def _copied(value: Any) -> Any:
    """The user may change what a batch holds."""
    if type(value) in PLAIN:
        return value
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    return copy.deepcopy(value)


def _size(value: Any) -> int:
    """The bytes of a value, about."""
    if isinstance(value, TensorBits):
        value = value.array
    if isinstance(value, np.ndarray):
        return value.nbytes
    inner = getattr(value, "array", None)
    if isinstance(inner, np.ndarray):
        return inner.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return 0 if isinstance(value, int | float | type(None)) else sys.getsizeof(value)
