"""One sample of an epoch made once more, by the code that made its batch: bit for bit the same.

Runs in the main process, without workers, in a session of its own that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from gpuload import rng
from gpuload.batch import unflatten
from gpuload.errors import SampleError
from gpuload.faults import ErrorLog, Faults
from gpuload.harvest import Harvest
from gpuload.options import Options
from gpuload.packing import ImageColumn, TensorBits
from gpuload.session import Session
from gpuload.transforms import Draws
from gpuload.transforms.params import NOTHING, OPS, Branches, Ops
from gpuload.workers.parts import Batch

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One sample, made once more.

    Attributes:
        epoch, position: where it stands.
        index: its index, or key, in the dataset.
        sample: as the dataset gives it (tensors as arrays), with its images augmented: C×H×W on the device, the same
            bits as in its batch; a list of them where a `MultiView` makes several.
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
            images = [_first(result, session.options.chain.views) for result in made]
        ticket = session.transfer.finish()
    session.transfer.hand_over(ticket, tree_leaves(images))
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
    key, sizes = rng.epoch_key(options.seed, epoch), ImageColumn(rows.table(0, starts)).sizes_hw
    chain = options.chain
    return tuple(
        entry for view in range(len(chain.lines)) for entry in _told(chain.draw(key, rows.positions, sizes, view=view))
    )


def _told(drawn: Draws) -> tuple[tuple[str, dict[str, Any]], ...]:
    """What was drawn for the first image, in plain values; transforms that hold others are told as what they chose."""
    told = []
    for transform, params in zip(drawn.transforms, drawn.params, strict=True):
        if isinstance(params, Branches):
            for rows, draws in zip(params.rows, params.draws, strict=True):
                if len(rows) and rows[0] == 0:
                    told += _told(draws)
        elif params is not None:
            values = ((field.name, getattr(params, field.name)) for field in fields(params))
            plain = {name: value[0].tolist() for name, value in values if isinstance(value, np.ndarray)}
            if isinstance(params, Ops):
                plain["operations"] = [OPS[code] for code in plain.pop("codes") if code != NOTHING]
            told.append((type(transform).__name__, plain))
    return tuple(told)


def _first(result: Any, views: int | None) -> Any:
    """The first image of a batch; ragged="pad" gives (images, sizes), ragged="list" a list; views are a list."""
    if views is not None:
        return [_first(view, None) for view in result]
    return (result[0] if isinstance(result, tuple) else result)[0].clone()
