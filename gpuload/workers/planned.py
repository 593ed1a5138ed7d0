"""Plans of batches, made by workers: what the fused kernels are told of a batch depends on nothing that only the main
process has, and would take most of its time there.

Once all chunks of a batch are done, `Planner` (main process) writes their descriptions to a slot and sends a request
like that for a chunk. `make_plan` (worker) joins the chunks, draws, and leaves in that slot the arrays that kernels
read. So the slot comes to the device with the batch's others. The reply describes the whole batch: the main process
reads no chunk's description. Where a chunk is unusual the main process does read them, and sends the table of all
images; then the reply has only what launches need. `PlannedBatch` holds all of it, from the request to the launch.

A batch does without where it is waited for, or where anything is unusual: then the stage plans it, by the same code.
So a plan that is lost is never made again.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import LimitError
from gpuload.ring.columns import Columns
from gpuload.ring.packing import Span, read_content, spans_of, write_arrays, write_content
from gpuload.ring.ring import Ring, Slot
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.draws import IMAGE
from gpuload.workers.protocol import MAX_INLINE_BYTES, Engine, Event, Reply, Request, Status

if TYPE_CHECKING:
    from gpuload.transforms.program.fusing.plan import Plan
    from gpuload.workers.batch import Batch
    from gpuload.workers.job import Job

__all__ = ["PlannedBatch", "Planner", "make_plan"]

INTEGERS = {int}, {np.int64}
RING_SHARE = 8  # a plan takes at most this part of the ring
NO_BYTES = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch's plan, asked for or made. Once it is made, the stage takes it in a program's place.

    Attributes:
        starts: where each chunk's bytes were to be in the batch's memory on the device.
        columns: the batch's columns, by these starts; None until the worker has joined them.
        chunk: the number of the request, while it is not answered.
        slot: what holds the arrays; data: its bytes.
        plan: how the passes are launched.
        spans: where the arrays are in the slot, by name, and leaves that are an integer in each sample, int64 (N,), by
            number.
        size_hw: the size of all results.
        arrays: the arrays with a name, on the device.
    """

    starts: list[int]
    columns: Columns | None = None
    chunk: int | None = None
    slot: Slot | None = None
    data: np.ndarray | None = None
    plan: Plan | None = None
    spans: dict[str | int, Span] = field(default_factory=dict)
    size_hw: tuple[int, int] = (0, 0)
    arrays: Any = None

    encoded_bytes, decoded = 0, None  # as a `Part` has them: nothing of it is decoded on the device

    def __len__(self) -> int:
        return 0 if self.columns is None else len(self.columns.images[0].table)

    @property
    def used_bytes(self) -> int:
        """Return how many bytes the arrays take."""
        return 0 if self.data is None else len(self.data)

    @property
    def results_hw(self) -> np.ndarray:
        """Return the size of all results as a program has it, but once for all: int64 (1, 2)."""
        return np.array([self.size_hw])

    def request(self, chunks: Sequence[bytes]) -> bytes:
        """Return what the worker reads: where chunks begin and their descriptions or, if there are none of these, the
        table of the batch's images."""
        table = None if self.columns is None else self.columns.images[0].table.tobytes()
        return pickle.dumps((self.starts, chunks, table), 5)

    def take(self, columns: Columns, slot: Slot, data: np.ndarray) -> None:
        """Take what a worker made, whose arrays are all of `data`, in that slot."""
        self.plan, self.spans, self.size_hw = columns.plan
        self.columns = columns if self.columns is None else self.columns
        self.chunk, self.slot, self.data = None, slot, data


class Planner:
    """Has plans made.

    Args:
        engine, ring: the feed's.
        plan_inputs: for a complete batch, a new `PlannedBatch` and what is written for the worker; None means it is
            planned where it is made.
    """

    def __init__(
        self, engine: Engine, ring: Ring, plan_inputs: Callable[[Batch], tuple[PlannedBatch, bytes] | None]
    ) -> None:
        self._engine = engine
        self._ring = ring
        self._plan_inputs = plan_inputs
        self._need_bytes = 0
        self.flying: dict[int, tuple[Slot, Batch]] = {}  # by chunk

    @property
    def working(self) -> int:
        """Return how many plans the engine has and will report on."""
        return len(self.flying)

    def ask(self, batch: Batch, chunk: int, usual_bytes: int) -> None:
        """Ask for the plan of a complete batch, as chunk number `chunk`, in a slot of the usual size if that does."""
        if batch.errors or batch.dropped or batch.spec.on_due is not None or batch.planned is not None:
            return
        inputs = self._plan_inputs(batch)
        if inputs is None:
            return
        planned, text = inputs
        size, slot = max(usual_bytes, self._need_bytes, len(text)), None
        if max(self._need_bytes, len(text)) <= self._ring.ring_bytes // RING_SHARE:
            with contextlib.suppress(LimitError):
                slot = self._ring.acquire(size)
        if slot is None:
            return
        self._ring.view(slot)[: len(text)] = np.frombuffer(text, np.uint8)
        positions = batch.spec.positions
        request = Request(chunk, batch.spec.epoch, slot.offset, slot.capacity_bytes, positions, positions, plans=True)
        if self._engine.submit(request):
            planned.chunk, batch.planned = chunk, planned
            self.flying[chunk] = (slot, batch)

    def take(self, event: Event) -> bool:
        """Return whether an event is the end of a plan; then its batch has it, or does without."""
        if event.chunk not in self.flying:
            return False
        slot, batch = self.flying.pop(event.chunk)
        planned, reply = batch.planned, event if isinstance(event, Reply) else None
        if planned is not None and planned.chunk != event.chunk:
            planned = None  # nobody waits for it any more
        if planned is not None and reply is not None and reply.status is Status.DONE:
            view = self._ring.view(slot)
            # A worker wrote this: plain values, and classes of gpuload's own.
            planned.take(read_content(view, reply.meta, reply.meta_at), slot, view[: reply.nbytes])
            return True
        if planned is not None:
            batch.planned = None
        if reply is not None:  # the engine gives back what is lost
            self._ring.release(slot)
            if reply.status is Status.TOO_LARGE:
                self._need_bytes = max(self._need_bytes, reply.nbytes)
        return True

    def drop(self, batch: Batch) -> bool:
        """Forget the plan of a batch, made or not; whether a slot is free now."""
        planned, batch.planned = batch.planned, None
        if planned is None or planned.slot is None:
            return False
        self._ring.release(planned.slot)
        planned.slot = planned.data = None
        return True


def make_plan(job: Job, request: Request, slot: np.ndarray) -> Reply:
    """Plan a batch, of which the slot tells, and leave the plan there; UNWANTED if that cannot be done here."""

    def reply(status: Status, nbytes: int = 0, meta: bytes = b"", meta_at: tuple[int, int] | None = None) -> Reply:
        return Reply(request.chunk, status, nbytes, meta, meta_at)

    assert job.fusing is not None
    try:
        starts, chunks, table = pickle.loads(slot.data)  # the main process wrote it
        if table is None:
            columns = Columns.concat([read_content(NO_BYTES, chunk, None) for chunk in chunks], starts)
            if not columns.is_plain(len(request.positions)):
                raise ValueError("chunks of a batch are not alike")
            images = columns.images[0].table
        else:
            columns, images = Columns(), np.frombuffer(table, IMAGE)
        key, chain = epoch_key(job.seed, request.epoch), job.chain.at(request.epoch)
        program = chain.draw(key, request.positions, images["size_hw"], regions_tlhw=images["region_tlhw"])
        program, images = program.of_decoded(images)
        plan, arrays = job.fusing(images, program)
    except Exception:  # the main process meets it again, where it can say of which batch
        return reply(Status.UNWANTED)
    entries: dict[str | int, list[np.ndarray]] = {**arrays}
    for leaf, column in columns.values.items():
        # An integer of more bits is an object, or unsigned.
        if set(map(type, column.values)) in INTEGERS and (values := np.array(column.values)).dtype == np.int64:
            entries[leaf] = [values]
    spans, end = spans_of(list(entries.values()))
    columns.plan = plan, dict(zip(entries, spans, strict=True)), tuple(program.results_hw[0].tolist())
    packed = write_content(columns, slot, end, inline_bytes=MAX_INLINE_BYTES)
    if not packed.fits:
        return reply(Status.TOO_LARGE, packed.nbytes)
    write_arrays(list(entries.values()), spans, slot)
    return reply(Status.DONE, packed.nbytes, packed.meta, packed.meta_at)
