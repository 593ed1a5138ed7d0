"""Plans of batches, made by workers: what the fused kernels are told of a batch depends on nothing that only the main
process has, and would take most of its time there.

Once all chunks of a batch are done, `Planner` (main process) writes what they told of themselves to a slot and sends a
request like that for a chunk; `make_plan` (worker) puts their descriptions together, draws, and leaves in that slot the
arrays that kernels read. So the slot becomes a part of the batch, and comes to the device with the others. The reply
describes the whole batch: the main process reads no chunk's description. Where a chunk is unusual it does, and sends
the table of all images; then the reply has only what launches need.

A batch does without where it is waited for, or where anything is unusual: then the stage plans it, by the same code.
So a plan that is lost is never made again.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import LimitError
from gpuload.ring.arrays import spans_of, write
from gpuload.ring.chunk import ChunkContent, together
from gpuload.ring.packing import read_content, write_content
from gpuload.ring.ring import Ring, Slot
from gpuload.rng.philox import epoch_key
from gpuload.workers.protocol import MAX_INLINE_BYTES, Engine, Event, Reply, Request, Status

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch
    from gpuload.workers.job import Job

__all__ = ["Planner", "make_plan", "to_plan"]

COLUMNS = 10  # of a table of images, see `gpuload.ring.chunk.ImageColumn`
INTEGERS = {int}, {np.int64}
RING_SHARE = 8  # a plan takes at most this part of the ring


class Planner:
    """Has plans made.

    Args:
        engine, ring: the feed's.
        told_of: of a complete batch, what `to_plan` gives; None: it is planned where it is made.
    """

    def __init__(self, engine: Engine, ring: Ring, told_of: Callable[[Batch], bytes | None]) -> None:
        self._engine = engine
        self._ring = ring
        self._told_of = told_of
        self._need_bytes = 0
        self.flying: dict[int, tuple[Slot, Batch]] = {}  # by chunk

    @property
    def working(self) -> int:
        """How many the engine has and will report on."""
        return len(self.flying)

    def ask(self, batch: Batch, chunk: int, usual_bytes: int) -> None:
        """Ask for the plan of a complete batch, as chunk number `chunk`, in a slot of the usual size if that does."""
        if batch.errors or batch.dropped or batch.spec.on_due is not None or batch.made is not None:
            return
        told = self._told_of(batch)
        if told is None:
            return
        size, slot = max(usual_bytes, self._need_bytes, len(told)), None
        if max(self._need_bytes, len(told)) <= self._ring.ring_bytes // RING_SHARE:
            with contextlib.suppress(LimitError):
                slot = self._ring.acquire(size)
        if slot is None:
            return
        self._ring.view(slot)[: len(told)] = np.frombuffer(told, np.uint8)
        positions = batch.spec.positions
        request = Request(
            chunk, 0, batch.spec.epoch, slot.offset, slot.capacity_bytes, positions, positions, plans=True
        )
        sent = False
        try:
            sent = self._engine.submit(request)
        finally:
            if not sent:
                self._ring.release(slot)
        if sent:
            self.flying[chunk], batch.planning = (slot, batch), chunk

    def take(self, event: Event) -> bool:
        """Whether an event is the end of a plan; then its batch has it, or does without."""
        if event.chunk not in self.flying:
            return False
        slot, batch = self.flying.pop(event.chunk)
        wanted = batch.planning == event.chunk
        if wanted:
            batch.planning = None
        if not isinstance(event, Reply):  # lost with its slot, which the engine gives back
            return True
        if event.status is Status.TOO_LARGE:
            self._need_bytes = max(self._need_bytes, event.nbytes)
        if wanted and event.status is Status.DONE:
            view = self._ring.view(slot)
            # A worker wrote this: plain values, and classes of gpuload's own.
            batch.plan_with(read_content(view, event.meta, event.meta_at), slot, view[: event.nbytes])
        else:
            self._ring.release(slot)
        return True


def to_plan(starts: Sequence[int], chunks: Sequence[bytes], table: np.ndarray | None = None) -> bytes:
    """What is told of a batch to whoever plans it: where its parts begin on the device, and their descriptions; or, in
    place of these, the table of its images, with offsets there."""
    return pickle.dumps((starts, chunks, None if table is None else table.tobytes()), 5)


def make_plan(job: Job, request: Request, slot: np.ndarray) -> Reply:
    """Plan a batch, of which the slot tells, and leave the plan there; UNWANTED if that cannot be done here."""
    from gpuload.transforms.program.fusing.plan import Images, Made  # few workers need it

    def reply(status: Status, nbytes: int = 0, meta: bytes = b"", meta_at: tuple[int, int] | None = None) -> Reply:
        return Reply(request.chunk, request.attempt, status, nbytes, meta, meta_at)

    assert job.fusing is not None
    try:
        starts, chunks, given = pickle.loads(slot.data)  # the main process wrote it
        if given is None:
            content = together([read_content(slot, chunk, None) for chunk in chunks], starts)
            table = content.images[0].table
        else:
            content, table = ChunkContent(), np.frombuffer(given, np.int64).reshape(-1, COLUMNS)
        images = Images(table[:, 0], table[:, 1:4], table[:, 6:])
        key, chain = epoch_key(job.seed, request.epoch), job.chain.at(request.epoch)
        program = chain.draw(key, request.positions, table[:, 4:6], regions_tlhw=images.regions_tlhw)
        program, regions = program.of_decoded(images.shapes, images.regions_tlhw)
        plan, arrays = job.fusing(images._replace(regions_tlhw=regions), program)
    except Exception:  # the main process meets it again, where it can say of which batch
        return reply(Status.UNWANTED)
    entries: dict[str | int, list[np.ndarray]] = {**arrays}
    for column in content.values:
        # An integer of more bits is an object, or unsigned.
        if set(map(type, column.values)) in INTEGERS and (leaf := np.array(column.values)).dtype == np.int64:
            entries[column.leaf] = [leaf]
    spans, end = spans_of(list(entries.values()))
    height, width = program.results_hw[0].tolist()
    content.made = Made(plan, dict(zip(entries, spans, strict=True)), (height, width), len(table)).told()
    packed = write_content(content, slot, end, inline_bytes=MAX_INLINE_BYTES)
    if not packed.fits:
        return reply(Status.TOO_LARGE, packed.nbytes)
    write(list(entries.values()), spans, slot)
    return reply(Status.DONE, packed.nbytes, packed.meta, packed.meta_at)
