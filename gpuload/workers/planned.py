"""Plans of batches, made by workers. A plan contains the arguments of the fused kernels. Workers make the plans because
they have all the inputs, and because computing plans in the main process would take most of its time.

Once all chunks of a batch are done, `Planner` (main process) writes their descriptions to a slot and sends a request,
like the request for a chunk. `make_plan` (worker) merges the chunks, draws the random parameters, and writes the arrays
that the kernels read to that slot. The slot is copied to the device together with the batch's other slots. The reply
describes the entire batch, so the main process never reads the description of a chunk. If a chunk is unusual, the main
process does read the descriptions, and sends the table of all images instead; the reply then holds only the arguments
of the launches. `PlannedBatch` (`gpuload.workers.batch`) holds this data, from the request to the launch.

If the loop already waits for the batch, the main process makes the plan with the same code (`plan_images`), in a slot
too. A worker would not be sooner, since it first has to finish a chunk. Nor would it help if workers drew the
parameters of their own chunks: drawing takes as long for 17 images as for 256 (0.2 ms), so all workers together would
spend 15 times what the main process saves. Since the main process can plan any batch, a lost plan is never requested
again. If a batch is unusual, or no slot is free for its plan, the stage plans it.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import LimitError
from gpuload.ring.columns import Columns, ValueColumn
from gpuload.ring.packing import read_content, spans_of, write_arrays, write_content
from gpuload.ring.ring import Ring, Slot
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.draws import IMAGE
from gpuload.workers.batch import NO_BYTES, Batch, PlannedBatch
from gpuload.workers.protocol import MAX_INLINE_BYTES, Engine, Event, Reply, Request, Status

if TYPE_CHECKING:
    from gpuload.order.spec import BatchSpec
    from gpuload.transforms.program.fusing.plan import LaunchPlan
    from gpuload.workers.job import Job

__all__ = ["Planner", "make_plan"]

INTEGER_TYPES = {int}, {np.int64}  # a column that has only one of these types is sent as an int64 array
RING_SHARE = 8  # a plan may take at most 1/RING_SHARE of the ring


class Planner:
    """A manager of the plans of a feed's batches.

    Args:
        engine, ring: the engine and the ring of the feed.
        job: the workers' job, whose transforms are planned; its dataset is not used. None if batches are not planned.
        part_offsets: returns the offset of each part of a batch in the batch's memory on the device.

    Attributes:
        in_flight: the slot and batch of each request that is not answered yet, keyed by chunk number.
    """

    def __init__(
        self, engine: Engine, ring: Ring, job: Job | None, part_offsets: Callable[[Batch], list[int]] | None
    ) -> None:
        self._engine = engine
        self._ring = ring
        self._job: Any = job
        self._part_offsets: Any = part_offsets
        self._need_bytes = 0
        self.in_flight: dict[int, tuple[Slot, Batch]] = {}

    def submit(self, batch: Batch, chunk: int, usual_bytes: int) -> None:
        """Request the plan of a complete batch, with `chunk` as its chunk number, in a slot of at least `usual_bytes`
        bytes. Request no plan if the batch is unusual or no slot is free."""
        if self._job is None or batch.errors or batch.dropped or batch.spec.on_due or batch.planned is not None:
            return
        planned = PlannedBatch(self._part_offsets(batch))
        chunks = [part.description for part in batch.parts]
        if not all(chunks):
            chunks, planned.columns = [], batch.join_columns(planned.starts)
            if not _is_plannable(planned.columns):
                return
        packed = planned.pack_input(chunks)
        slot = self.allocate(max(self._need_bytes, len(packed)), usual_bytes)
        if slot is None:
            return
        self._ring.view(slot)[: len(packed)] = np.frombuffer(packed, np.uint8)
        spec = batch.spec
        place = chunk, spec.epoch, slot.offset, slot.capacity_bytes
        request = Request(*place, spec.positions, spec.positions, spec.step, spec.size_hw, is_planning=True)
        if self._engine.submit(request):
            planned.chunk, batch.planned = chunk, planned
            self.in_flight[chunk] = (slot, batch)

    def plan(self, batch: Batch, columns: Columns, usual_bytes: int) -> None:
        """Plan a batch that no worker has planned, unless the batch is unusual or no slot is free. The plan goes to a
        slot, as a worker's does, and is copied with the batch's other slots, which takes less time than uploading the
        plan and each column of integers from memory that torch page-locks."""
        if self._job is None or not _is_plannable(columns):
            return
        try:
            plan, entries, size_hw = plan_images(
                self._job, batch.spec, columns.positions, columns.images[0].table, columns.values
            )
        except Exception:  # the stage will raise it again, and can name the image
            return
        spans, nbytes = spans_of(entries)
        slot = self.allocate(nbytes, usual_bytes)
        if slot is None:
            return
        data = self._ring.view(slot)[:nbytes]
        write_arrays(entries, spans, data)
        batch.planned = PlannedBatch([], columns, None, slot, data, plan, spans, size_hw)

    def allocate(self, nbytes: int, usual_bytes: int) -> Slot | None:
        """Return a free slot for a plan of `nbytes` bytes, of at least `usual_bytes` bytes, so that chunks can use it
        later; None if no slot is free, or if the plan would take too much of the ring."""
        if nbytes > self._ring.ring_bytes // RING_SHARE:
            return None
        with contextlib.suppress(LimitError):
            return self._ring.acquire(max(nbytes, usual_bytes))
        return None

    def receive(self, event: Event) -> bool:
        """Process an event that ends the request for a plan. Return whether it was such an event."""
        if event.chunk not in self.in_flight:
            return False
        slot, batch = self.in_flight.pop(event.chunk)
        planned, reply = batch.planned, event if isinstance(event, Reply) else None
        if planned is not None and planned.chunk != event.chunk:
            planned = None  # the plan was dropped
        if planned is not None and reply is not None and reply.status is Status.DONE:
            view = self._ring.view(slot)
            # A worker wrote this: plain values, and classes of gpuload.
            planned.store(read_content(view, reply.meta, reply.meta_at), slot, view[: reply.nbytes])
            return True
        if planned is not None:
            batch.planned = None
        if reply is not None:  # the engine releases the slot of a lost plan
            self._ring.release(slot)
            if reply.status is Status.TOO_LARGE:
                self._need_bytes = max(self._need_bytes, reply.nbytes)
        return True

    def drop(self, batch: Batch) -> bool:
        """Drop the plan of a batch, finished or not. Return whether this freed a slot."""
        planned, batch.planned = batch.planned, None
        if planned is None or planned.slot is None:
            return False
        self._ring.release(planned.slot)
        planned.slot = planned.data = None
        return True


def make_plan(job: Job, request: Request, slot: np.ndarray) -> Reply:
    """Plan a batch from the input in its slot, and write the plan to the slot. Return the reply, whose status is
    UNWANTED if the batch cannot be planned."""

    def make_reply(status: Status, nbytes: int = 0, meta: bytes = b"", meta_at: tuple[int, int] | None = None) -> Reply:
        return Reply(request.chunk, status, nbytes, meta, meta_at)

    try:
        starts, chunks, table = pickle.loads(slot.data)  # the main process wrote this
        if table is None:
            columns = Columns.concat([read_content(NO_BYTES, description, None) for description in chunks], starts)
            if not columns.is_plain(len(request.positions)):
                raise ValueError("the chunks of the batch have different structures")
            images = columns.images[0].table
        else:
            columns, images = Columns(), np.frombuffer(table, IMAGE)
        plan, entries, size_hw = plan_images(job, request, request.positions, images, columns.values)
    except Exception:  # the main process will raise it again, and can name the batch
        return make_reply(Status.UNWANTED)
    spans, end = spans_of(entries)
    columns.plan = plan, spans, size_hw
    packed = write_content(columns, slot, end, inline_bytes=MAX_INLINE_BYTES)
    if not packed.is_written:
        return make_reply(Status.TOO_LARGE, packed.nbytes)
    write_arrays(entries, spans, slot)
    return make_reply(Status.DONE, packed.nbytes, packed.meta, packed.meta_at)


def plan_images(
    job: Job, batch: Request | BatchSpec, positions: np.ndarray, images: np.ndarray, values: dict[int, ValueColumn]
) -> tuple[LaunchPlan, dict[str | int, list[np.ndarray]], tuple[int, int]]:
    """Draw the random parameters of a batch, and plan it.

    Args:
        job, batch: the job with the planner and the transforms, and the request for the batch.
        positions: the samples' positions in the epoch, int64 (N,).
        images: the table of the batch's images, `IMAGE` (N,).
        values: the batch's values, keyed by leaf.

    Returns:
        (plan, entries, size_hw): the plan, `PlannedBatch.size_hw`, and the pieces of the arrays in
        `PlannedBatch.spans`.

    Raises:
        Exception: the batch has to be planned by the stage, or cannot be planned at all.
    """
    assert job.fusing is not None
    chain, key = job.chain_of(batch), epoch_key(job.seed, batch.epoch)
    program = chain.draw(key, positions, images["size_hw"], regions_tlhw=images["region_tlhw"])
    program, images = program.of_decoded(images)
    plan, arrays = job.fusing(images, program)
    entries: dict[str | int, list[np.ndarray]] = {**arrays}
    for leaf, column in values.items():
        # A column of integers that exceed int64 becomes an object array or an unsigned array.
        if set(map(type, column.values)) in INTEGER_TYPES and (array := np.array(column.values)).dtype == np.int64:
            entries[leaf] = [array]
    return plan, entries, tuple(program.results_hw[0].tolist())


def _is_plannable(columns: Columns) -> bool:
    """Return whether each sample has one uint8 image, of a number of channels that the fused kernels support, no
    ``draws=``, and no targets."""
    from gpuload.transforms.program.fusing.plan import CHANNELS

    if columns.has_targets or len(columns.images) != 1 or columns.draws != [0]:
        return False
    [images] = columns.images
    return not images.kinds and images.rows is None and int(images.table["shape"][0, 2]) in CHANNELS
