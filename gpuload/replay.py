"""One sample of an epoch made once more, by the code that made its batch: bit for bit the same.

Runs in the main process, without workers, in a session of its own that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from gpuload import rng
from gpuload.batch import unflatten
from gpuload.errors import SampleError
from gpuload.faults import ErrorLog, Faults
from gpuload.harvest import Harvest
from gpuload.options import Options
from gpuload.packing import ImageColumn, TensorBits
from gpuload.session import Session
from gpuload.workers.parts import Batch

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One sample, made once more.

    Attributes:
        epoch, position: where it stands.
        index: its index, or key, in the dataset.
        sample: as the dataset gives it (tensors as arrays), with its images augmented: C×H×W on the device, the same
            bits as in its batch.
        draws: for each transform its name, and what was drawn for this sample, by name.
    """

    epoch: int
    position: int
    index: Any
    sample: Any
    draws: tuple[tuple[str, dict[str, Any]], ...]


def replay(options: Options, epoch: int, positions: np.ndarray, indices: np.ndarray | list[Any]) -> Replay:
    """Make one sample: `positions` and `indices` have one entry.

    Raises:
        SampleError: it cannot be loaded.
    """
    session = Session(
        replace(options, num_workers=0, batch_size=1, chunk_size=1, faults=Faults(), collate_fn=None, single=False),
        ErrorLog(),
    )
    try:
        batch = Batch(0, epoch, positions, indices)
        session.begin(iter([batch]))
        session.feed.take()
        if batch.errors:
            raise SampleError(batch.errors[0])
        return _finished(session, batch, Harvest(batch))
    finally:
        session.close()


def _finished(session: Session, batch: Batch, rows: Harvest) -> Replay:
    places, images, draws = rows.places[0], [], ()
    rows.spread_blocks()
    with torch.inference_mode(False), session.transfer.stream(after_consumer=True):
        if places:
            pixels, starts = session.transfer.load(batch, lambda: session.feed.release(batch))
            draws = _draws(session.options, batch.epoch, rows, starts)
            made = [session.assembly.images(batch.epoch, rows, leaf, pixels, starts) for leaf in range(len(places))]
            # ragged="pad" gives (images, sizes), ragged="list" a list.
            images = [(result[0] if isinstance(result, tuple) else result)[0].clone() for result in made]
        ticket = session.transfer.finish()
    session.transfer.hand_over(ticket, images)
    ready, others = dict(zip(places, images, strict=True)), iter(rows.values[0])
    count, index = len(images) + len(rows.values[0]), rows.indices[0]
    leaves = [ready[place] if place in ready else _plain(next(others)) for place in range(count)]
    return Replay(
        epoch=batch.epoch,
        position=int(rows.positions[0]),
        index=int(index) if isinstance(index, np.integer) else index,
        sample=unflatten(rows.structures[0], leaves),
        draws=draws,
    )


def _plain(value: Any) -> Any:
    """A tensor as an array, where numpy has its type."""
    if not isinstance(value, TensorBits):
        return value
    return value.tensor() if value.dtype else value.array


def _draws(options: Options, epoch: int, rows: Harvest, starts: list[int]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """What was drawn for the sample's first image; all its images share what does not hang on their sizes."""
    drawn = options.chain.draw(
        rng.epoch_key(options.seed, epoch), rows.positions, ImageColumn(rows.table(0, starts)).sizes_hw
    )
    return tuple(
        (type(transform).__name__, {f.name: getattr(params, f.name)[0].tolist() for f in fields(params)})
        for transform, params in zip(drawn.transforms, drawn.params, strict=True)
        if params is not None
    )
