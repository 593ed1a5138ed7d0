"""One sample of an epoch made once more, by the code that made its batch: bit for bit the same.

Runs in the main process, without workers, in a session of its own that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from gpuload.batches.rows import Harvest
from gpuload.batches.targets import others
from gpuload.datasets.tree import unflatten
from gpuload.errors import SampleError
from gpuload.loader.options import Options
from gpuload.loader.session import Session
from gpuload.order.options import OrderOptions
from gpuload.order.spec import BatchSpec
from gpuload.ring.chunk import TensorBits
from gpuload.transforms import Program
from gpuload.transforms.program.ops import NOTHING, OPS, Mix, Ops
from gpuload.workers.batch import Batch
from gpuload.workers.faults import ErrorLog, Faults

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One sample, made once more.

    Attributes:
        epoch, position: where it stands.
        index: its index, or key, in the dataset.
        sample: as the dataset gives it (tensors as arrays), with its images augmented: C×H×W on the device, the same
            bits as in its batch; a list of them where a `MultiView` makes several. Masks, boxes and keypoints are
            tensors, moved as in the batch.
        draws: for each transform its name, and what was drawn for this sample, by name.
    """

    epoch: int
    position: int
    index: Any
    sample: Any
    draws: tuple[tuple[str, dict[str, Any]], ...]


def replay(
    options: Options, epoch: int, positions: np.ndarray, indices: np.ndarray | list[Any], row: int = 0
) -> Replay:
    """Make one sample.

    Args:
        options: the loader's.
        epoch: its epoch.
        positions, indices: of the sample, or of all that its image is mixed with.
        row: which of these it is.

    Raises:
        SampleError: it cannot be loaded.
    """
    # A neighbour that was replaced is so again.
    faults = Faults(on_error=options.workers.faults.on_error, max_error_rate=1.0) if len(positions) > 1 else Faults()
    order = options.order
    sampler = indices if order.sampled else None  # which says it
    session = Session(
        replace(
            options,
            order=OrderOptions(dataset=order.dataset, batch_size=len(positions), sampler=sampler, seed=order.seed),
            batches=replace(options.batches, collate_fn=None, single=False),
            workers=replace(options.workers, num_workers=0, chunk_size=1, faults=faults),
        ),
        ErrorLog(),
    )
    try:
        session.begin(iter([BatchSpec(0, epoch, positions, indices)]))
        batch = session.feed.take()
        assert batch is not None
        position = int(positions[row])
        for error in batch.errors:
            if error.position == position:
                raise SampleError(error)
        rows = Harvest(batch)
        return _finished(session, batch, rows, int(np.flatnonzero(rows.positions == position)[0]))
    finally:
        session.close()


def _finished(session: Session, batch: Batch, rows: Harvest, row: int) -> Replay:
    epoch = batch.spec.epoch
    places, images, targets, draws = rows.places[row], [], {}, ()
    rows.spread_blocks()
    pairing = session.assembly.pairing(batch, rows)
    with torch.inference_mode(False), session.transfer.stream(after_consumer=True):
        if places:
            pixels, starts = session.transfer.load(batch, lambda: session.feed.release(batch))
            drawn = session.assembly.drawn(epoch, rows, 0, starts)
            # Of the first image; all images share what does not hang on their sizes.
            draws = tuple(entry for view in drawn for entry in _told(view.take(np.array([row]))))
            made = [
                session.assembly.images(epoch, rows, leaf, pixels, starts, pairing, drawn if leaf == 0 else None)
                for leaf in range(rows.count(row))
            ]
            images = [_one(result, session.options.chain.views, row) for result in made]
            if rows.has_targets:
                targets = session.assembly.targets(rows, pixels, starts, drawn)[0][row]
        ticket = session.transfer.finish()
    session.transfer.hand_over(ticket, tree_leaves((images, targets)))
    ready: dict[int, Any] = dict(zip(others(rows, row), map(_plain, rows.values[row]), strict=True))
    ready.update(zip(places, images, strict=False))  # behind the images stand the masks
    ready.update(targets)
    leaves, index = [ready[place] for place in range(len(ready))], rows.indices[row]
    return Replay(
        epoch=epoch,
        position=int(rows.positions[row]),
        index=int(index) if isinstance(index, np.integer) else index,
        sample=unflatten(rows.structures[row], leaves),
        draws=draws,
    )


def _plain(value: Any) -> Any:
    """A tensor as an array, where numpy has its type."""
    if not isinstance(value, TensorBits):
        return value
    return value.tensor() if value.dtype else value.array


def _told(program: Program) -> tuple[tuple[str, dict[str, Any]], ...]:
    """What was drawn for one image, in plain values; transforms that hold others are told as what they chose."""
    told = []
    for record in program.records:
        values = ((field, getattr(record, field)) for field in record.told)
        plain = {field: value[0].tolist() for field, value in values if isinstance(value, np.ndarray)}
        if isinstance(record, Ops):
            plain["operations"] = [OPS[code] for code in plain.pop("codes") if code != NOTHING]
        name = record.name if not isinstance(record, Mix) or record.names is None else record.names[0]
        if plain and name:
            told.append((name, plain))
    return tuple(told)


def _one(result: Any, views: int | None, row: int) -> Any:
    """One image of a batch; ragged="pad" gives (images, sizes), ragged="list" a list; views are a list."""
    if views is not None:
        return [_one(view, None, row) for view in result]
    return (result[0] if isinstance(result, tuple) else result)[row].clone()
