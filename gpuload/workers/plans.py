"""Plans of batches, made by workers: what the fused kernels are told of a batch depends on nothing that only the main
process has, and would take most of its time there.

Once all chunks of a batch are done, `Planner` (main process) writes the table of its images to a slot and sends a
request like that for a chunk; `make_plan` (worker) draws, and leaves in that slot the arrays that kernels read and,
behind them, what launches need. So the slot becomes a part of the batch, and comes to the device with the others.

A batch does without where it is waited for, or where anything is unusual: then the stage plans it, by the same code.
So a plan that is lost is never made again.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import LimitError
from gpuload.ring.arrays import ALIGNMENT, spans_of, write
from gpuload.ring.ring import Ring, Slot, align
from gpuload.rng.philox import epoch_key
from gpuload.workers.protocol import Reply, Request, Status

if TYPE_CHECKING:
    from gpuload.workers.batch import Batch
    from gpuload.workers.engine import Engine, Event
    from gpuload.workers.job import Job

__all__ = ["Planner", "make_plan"]

COLUMNS = 10  # of a table of images, see `gpuload.ring.chunk.ImageColumn`
RING_SHARE = 8  # a plan takes at most this part of the ring


class Planner:
    """Has plans made.

    Args:
        engine, ring: the feed's.
        table_of: of a complete batch, the table of its images, with offsets in its memory on the device; None: it is
            planned where it is made.
    """

    def __init__(self, engine: Engine, ring: Ring, table_of: Callable[[Batch], np.ndarray | None]) -> None:
        self._engine = engine
        self._ring = ring
        self._table_of = table_of
        self._need_bytes = 0
        self.flying: dict[int, tuple[Slot, Batch | None]] = {}  # by chunk; None: it is lost, but may still be written

    @property
    def working(self) -> int:
        """How many the engine has and will report on."""
        return sum(batch is not None for _, batch in self.flying.values()) if self.flying else 0

    def ask(self, batch: Batch, chunk: int, usual_bytes: int) -> None:
        """Ask for the plan of a complete batch, as chunk number `chunk`, in a slot of the usual size if that does."""
        if batch.errors or batch.dropped or batch.spec.on_due is not None or batch.made is not None:
            return
        table = self._table_of(batch)
        if table is None:
            return
        size, slot = max(usual_bytes, self._need_bytes, table.nbytes), None
        if max(self._need_bytes, table.nbytes) <= self._ring.ring_bytes // RING_SHARE:
            with contextlib.suppress(LimitError):
                slot = self._ring.acquire(size)
        if slot is None:
            return
        self._ring.view(slot)[: table.nbytes].view(np.int64)[:] = table.reshape(-1)
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
        wanted = batch is not None and batch.planning == event.chunk
        if batch is not None and wanted:
            batch.planning = None
        if isinstance(event, Reply):
            if event.status is Status.TOO_LARGE:
                self._need_bytes = max(self._need_bytes, event.nbytes)
            if batch is not None and wanted and event.status is Status.DONE and event.meta_at is not None:
                start, length = event.meta_at
                view = self._ring.view(slot)
                # A worker wrote this: numbers, and classes of gpuload's own.
                batch.plan_with(pickle.loads(view[start : start + length].data), slot, view[: event.nbytes])
                return True
        elif getattr(event, "slot_is_free", True) is False:
            self.flying[event.chunk] = (slot, None)  # a `Freed` or its reply comes
            return True
        self._ring.release(slot)
        return True


def make_plan(job: Job, request: Request, slot: np.ndarray) -> Reply:
    """Plan a batch, whose table is in the slot, and leave the plan there; UNWANTED if that cannot be done here."""
    from gpuload.transforms.program.fusing.plan import Images, Made  # few workers need it

    def reply(status: Status, nbytes: int, meta_at: tuple[int, int] | None = None) -> Reply:
        return Reply(request.chunk, request.attempt, status, nbytes, b"", meta_at)

    assert job.fusing is not None
    count = len(request.positions)
    table = slot[: 8 * COLUMNS * count].view(np.int64).reshape(count, COLUMNS).copy()
    images = Images(table[:, 0], table[:, 1:4], table[:, 6:])
    try:
        key, chain = epoch_key(job.seed, request.epoch), job.chain.at(request.epoch)
        program = chain.draw(key, request.positions, table[:, 4:6], regions_tlhw=images.regions_tlhw)
        program, regions = program.of_decoded(images.shapes, images.regions_tlhw)
        plan, arrays = job.fusing(images._replace(regions_tlhw=regions), program)
    except Exception:  # the main process meets it again, where it can say of which batch
        return reply(Status.UNWANTED, 0)
    spans, end = spans_of(list(arrays.values()))
    made = Made(plan, dict(zip(arrays, spans, strict=True)), program.results_hw[:1], count)
    described = pickle.dumps(made, 5)
    if end + len(described) > len(slot):
        return reply(Status.TOO_LARGE, align(end + len(described), ALIGNMENT))
    write(list(arrays.values()), spans, slot)
    slot[end : end + len(described)] = np.frombuffer(described, np.uint8)
    return reply(Status.DONE, end, (end, len(described)))
