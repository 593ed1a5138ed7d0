"""A batch in progress, its parts and its plan: plain data, used only in the main process.

The feed owns a batch until the batch is complete. Then the consumer owns the batch, and releases it in the end.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import ErrorRecord
from gpuload.order.spec import BatchSpec
from gpuload.ring.columns import Columns, leaves_with_mismatched_blocks
from gpuload.ring.packing import ALIGN, Span, read_content
from gpuload.ring.ring import Slot, align
from gpuload.workers.protocol import Request

if TYPE_CHECKING:
    from gpuload.transforms.program.fusing.plan import LaunchPlan

__all__ = ["NO_BYTES", "Batch", "BatchPart", "PlannedBatch"]

NO_BYTES = np.empty(0, np.uint8)

# A sample counts as bad once SOLO_CRASHES workers have crashed, or SOLO_DEATHS have died for any reason, while it was
# alone in a chunk. SIGKILL is not counted as a crash: it comes from outside (memory ran out, or somebody killed the
# worker) and can hit any sample.
SOLO_CRASHES, SOLO_DEATHS = 2, 3


@dataclass(slots=True, eq=False)
class BatchPart:
    """A chunk of a batch: the samples to load and, once they are loaded, the result.

    `data` is a view of the chunk's bytes, which are in its slot or, if the chunk was moved out of the ring or did not
    fit in a slot, in other memory (`slot` is then None). `description` is the packed description of a plain chunk (see
    `Reply`) until `content` is first read. `decoded` is a uint8 tensor on the device that holds the images that the
    device decoded, one after another; their offsets continue from `host_end`, as if they followed the chunk's bytes.
    `spare_bytes` is the size of the separate memory that a worker may use for the chunk or, once it is loaded, uses.
    """

    batch: Batch
    positions: np.ndarray
    indices: np.ndarray | list[object]
    need_bytes: int = 0
    was_lost: bool = False  # whether a worker died while processing it, with other samples
    solo_deaths: int = 0
    solo_crashes: int = 0
    has_substitutes: bool = False  # whether its samples replace failed samples
    slot: Slot | None = None
    data: np.ndarray | None = None
    used_bytes: int = 0
    spare_bytes: int = 0
    description: bytes = b""
    decoded: Any = None
    _content: Columns | None = None

    @property
    def content(self) -> Columns | None:
        """Return the chunk's columns; None if the chunk is not loaded yet."""
        if self.description:
            self.content = read_content(NO_BYTES, self.description, None)
        return self._content

    @content.setter
    def content(self, content: Columns | None) -> None:
        self._content, self.description = content, b""

    @property
    def sample_count(self) -> int:
        """Return the number of samples that were loaded without an error."""
        return len(self.positions) if self.description else 0 if self._content is None else len(self._content)

    @property
    def encoded_bytes(self) -> int:
        """Return the total size of the image files at the start of `data`. The device's decoder reads these files, so
        they are not copied to the device with the pixels."""
        return 0 if self._content is None else self._content.encoded_bytes

    @property
    def host_end(self) -> int:
        """Return `used_bytes`, aligned."""
        return align(self.used_bytes, ALIGN)

    @property
    def waits_for_device(self) -> bool:
        """Return whether the device still has to decode some of the chunk's images."""
        return self.decoded is None and self._content is not None and len(self._content.encoded) > 0

    def subset(self, rows: slice) -> BatchPart:
        """Return a new part with the samples at these rows."""
        positions, indices = self.positions[rows], self.indices[rows]
        return BatchPart(self.batch, positions, indices, has_substitutes=self.has_substitutes)

    def count_solo_death(self, *, killed_externally: bool) -> bool:
        """Count the death of a worker that was processing this part, which has a single sample. Return whether the
        sample now counts as bad."""
        self.solo_deaths += 1
        self.solo_crashes += not killed_externally
        return self.solo_crashes >= SOLO_CRASHES or self.solo_deaths >= SOLO_DEATHS

    def make_request(self, chunk_number: int, slot: Slot, epoch_sent: int, changes: int = 0) -> Request:
        """Return the request to send to a worker; the arguments are fields of `Request`."""
        spec, is_only_part = self.batch.spec, len(self.batch.parts) == 1
        chunk = chunk_number, spec.epoch, slot.offset, slot.capacity_bytes, self.positions, self.indices
        options: dict[str, Any] = {"step": spec.step, "size_hw": spec.size_hw, "epoch_sent": epoch_sent}
        options |= {"changes": changes, "spare_bytes": self.spare_bytes}
        return Request(*chunk, is_complete_batch=is_only_part, iterable=spec.iterable, **options)

    def make_failed_content(self, cause: str, stack: str) -> Columns:
        """Return the result of a chunk whose samples all failed with the same cause and stack."""
        epoch, errors = self.batch.spec.epoch, []
        for row, (position, index) in enumerate(zip(self.positions.tolist(), self.indices, strict=True)):
            index = int(index) if isinstance(index, np.integer) else index
            record = ErrorRecord(epoch=epoch, position=position, index=index, source=None, cause=cause, traceback=stack)
            errors.append((row, record))
        return Columns(errors=errors)


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch's plan (see `gpuload.workers.planned`), requested or finished. The stage uses a finished plan in place of
    a program.

    Attributes:
        starts: the planned offset of each chunk's bytes in the batch's memory on the device.
        columns: the batch's columns, with offsets that count from `starts`; None until the worker has merged them.
        chunk: the chunk number of the request; None once it has been answered.
        slot: the slot that holds the arrays.
        data: the bytes of that slot.
        plan: the parameters for launching the passes; None until the plan is finished.
        spans: the locations in the slot of the arrays, keyed by name, and of the leaves that are an integer in each
            sample, as int64 (N,), keyed by leaf index.
        size_hw: the size of all result images.
        arrays: the named arrays, once they are on the device.
    """

    starts: list[int]
    columns: Columns | None = None
    chunk: int | None = None
    slot: Slot | None = None
    data: np.ndarray | None = None
    plan: LaunchPlan | None = None
    spans: dict[str | int, Span] = field(default_factory=dict)
    size_hw: tuple[int, int] = (0, 0)
    arrays: Any = None

    encoded_bytes, decoded = 0, None  # as in a `BatchPart` without images for the device to decode

    def __len__(self) -> int:
        return 0 if self.columns is None else len(self.columns.images[0].table)

    @property
    def used_bytes(self) -> int:
        """Return the size of the arrays."""
        return 0 if self.data is None else len(self.data)

    @property
    def results_hw(self) -> np.ndarray:
        """Return the size of all result images, int64 (1, 2); in a program, this array has one row per image."""
        return np.array([self.size_hw])

    def pack_input(self, chunks: Sequence[bytes]) -> bytes:
        """Return the input for the worker: the chunks' starts and, if `columns` is None, the chunks' descriptions, or
        else the table of the batch's images."""
        table = None if self.columns is None else self.columns.images[0].table.tobytes()
        return pickle.dumps((self.starts, chunks, table), 5)

    def store(self, columns: Columns, slot: Slot, data: np.ndarray) -> None:
        """Store a worker's result; its arrays fill `data`, a view of `slot`."""
        self.plan, self.spans, self.size_hw = columns.plan
        self.columns = columns if self.columns is None else self.columns
        self.chunk, self.slot, self.data = None, slot, data


@dataclass(slots=True, eq=False)
class Batch:
    """A batch in progress: the samples of a step (`spec`), and the result.

    `parts` are in the order of their positions, followed by the parts with substitutes. `errors` are the records of the
    failed samples. `unreplaced_error` is the first failure without a substitute. `fatal_error` is a failure after which
    the dataset can yield no more samples. A `dropped` batch is not returned to the user. While the device decodes
    images of the batch, `decoding` has an attribute `is_done`, and the batch's slots must not be released.
    """

    spec: BatchSpec
    parts: list[BatchPart] = field(default_factory=list)
    open_part_count: int = 0
    errors: list[ErrorRecord] = field(default_factory=list)
    unreplaced_error: ErrorRecord | None = None
    fatal_error: ErrorRecord | None = None
    dropped: bool = False
    candidates: dict[int, Iterator[Any]] = field(default_factory=dict)  # substitutes to try, keyed by position
    planned: PlannedBatch | None = None
    decoding: Any = None

    @property
    def done_part_count(self) -> int:
        """Return the number of parts whose chunks have ended."""
        return len(self.parts) - self.open_part_count

    @property
    def copied_parts(self) -> Sequence[BatchPart | PlannedBatch]:
        """Return everything whose bytes are copied to the device: the parts and, if there is one, the plan."""
        planned = self.planned
        return self.parts if planned is None or planned.data is None else [*self.parts, planned]

    @property
    def waits_for_device(self) -> bool:
        """Return whether the device still has to decode some of the batch's images."""
        return any(part.waits_for_device for part in self.parts)

    @property
    def is_decoded(self) -> bool:
        """Return whether the device has decoded the batch's images, or has nothing to decode."""
        return self.decoding.is_done if self.decoding is not None else not self.waits_for_device

    @property
    def has_device_images(self) -> bool:
        """Return whether the device has decoded some of the batch's images."""
        return any(part.decoded is not None for part in self.parts)

    @property
    def is_empty(self) -> bool:
        """Return whether the batch has no samples, so far or because all of them failed."""
        return not any(part.sample_count for part in self.parts)

    @property
    def warning(self) -> str:
        """Return the first warning that a worker sent with a part (`Columns.warning`), or ""."""
        contents = (part.content for part in self.parts if not part.description)
        return next((content.warning for content in contents if content is not None and content.warning), "")

    def join_columns(self, starts: Sequence[int], *, splits_blocks: bool = False) -> Columns:
        """Return the successfully loaded samples, concatenated from the chunks, in the order of their positions.

        If no sample failed, this is the order of the chunks. In the chunks, substitutes for failed samples come after
        the other samples. Skipped samples are missing. The batch must be complete.

        Args:
            starts: the offset of each part's bytes in the batch's memory.
            splits_blocks: whether to split all blocks into values, one array per sample. If the batch has targets or
                failed samples, all blocks are split in any case; leaves whose blocks differ between chunks are always
                split.
        """
        if self.planned is not None and self.planned.columns is not None:
            columns = self.planned.columns
        else:
            chunks = [(part, start) for part, start in zip(self.parts, starts, strict=False) if part.sample_count]
            contents: list[Any] = [part.content for part, _ in chunks]
            if splits_blocks or self.errors or any(content.has_targets for content in contents):
                leaves = {leaf for content in contents for leaf in content.blocks}
            else:
                leaves = leaves_with_mismatched_blocks(contents)
            for (part, _), content in zip(chunks, contents, strict=True):
                content.unstack(leaves & content.blocks.keys(), part.data)
            columns = Columns.concat(contents, [start for _, start in chunks])
            if self.errors:
                parts = [(part, content.rows) for (part, _), content in zip(chunks, contents, strict=True)]
                columns.positions = np.concatenate([part.positions[rows] for part, rows in parts])
                columns.indices = [part.indices[row] for part, rows in parts for row in rows]
                return columns.take(np.argsort(self.find_rows(columns.positions), kind="stable"))
        columns.positions, columns.indices = self.spec.positions, self.spec.indices
        return columns

    def find_rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the row of each position in the requested batch, int64 (N,). In a batch that wraps around, positions
        are not ascending."""
        order = np.argsort(self.spec.positions, kind="stable")
        return order[np.searchsorted(self.spec.positions[order], positions)]

    def substitute(self, errors: list[ErrorRecord], find_candidates: Callable[..., Iterator[Any]]) -> BatchPart | None:
        """Record failed samples, each with its next substitute to try. Return a new part with the substitutes, or None
        if there are none. `find_candidates` is `Consumer.substitute_candidates`."""
        positions, indices = [], []
        for record in errors:
            if record.position not in self.candidates:
                self.candidates[record.position] = find_candidates(self, record.position, record.index)
            index = next(self.candidates[record.position], None)
            self.errors.append(replace(record, replaced_by=index))
            if index is None:
                self.unreplaced_error = self.unreplaced_error or record
            else:
                positions.append(record.position)
                indices.append(index)
        if not positions:
            return None
        indices = np.array(indices, np.int64) if isinstance(self.spec.indices, np.ndarray) else indices
        part = BatchPart(self, np.array(positions, np.int64), indices, has_substitutes=True)
        self.parts.append(part)
        self.open_part_count += 1
        return part

    def finalize_spec(self) -> None:
        """Have the order decide which samples to return for this step, or to drop the batch. Call this once the batch
        and the earlier batches of its queue are complete."""
        if self.spec.on_due is None:
            return
        contents = [part.content for part in self.parts if part.content is not None]
        sample_count = sum(len(content.rows) + len(content.errors) for content in contents)
        passes = [content.iterable for content in contents if content.iterable is not None]
        spec = self.spec.on_due(self.spec, sample_count, self.is_empty, passes)
        if spec is None:
            self.dropped = True
        else:
            self.spec = spec
