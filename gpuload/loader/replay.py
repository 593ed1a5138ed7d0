"""One sample of an epoch made once more, by the code that made its batch: bit for bit the same.

Runs in the main process, without workers, in a session of its own that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpuload.batches.columns import Columns
from gpuload.errors import SampleError
from gpuload.loader.options import Options
from gpuload.loader.session import Session
from gpuload.ring.chunk import TensorBits
from gpuload.transforms import Draws
from gpuload.transforms.program.ops import NOTHING, OPS, Branches, Ops
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
    faults = Faults(on_error=options.faults.on_error, max_error_rate=1.0) if len(positions) > 1 else Faults()
    session = Session(
        replace(
            options,
            num_workers=0,
            batch_size=len(positions),
            chunk_size=1,
            faults=faults,
            collate_fn=None,
            single=False,
        ),
        ErrorLog(),
    )
    try:
        batch = Batch(0, epoch, positions, indices)
        session.begin(iter([batch]))
        session.feed.take()
        position = int(positions[row])
        for error in batch.errors:
            if error.position == position:
                raise SampleError(error)
        columns = Columns(batch)
        return _finished(session, batch, columns, int(np.flatnonzero(columns.positions == position)[0]))
    finally:
        session.close()


def _finished(session: Session, batch: Batch, columns: Columns, row: int) -> Replay:
    with torch.inference_mode(False), session.transfer.stream(after_consumer=True):
        finished = session.assembly.finish(batch, columns, lambda: session.feed.release(batch), by_row=True)
        cells = finished.cells[row]
        for images in columns.images:  # not in the memory of a whole batch
            for at in np.flatnonzero(images.rows == row).tolist():
                cells[images.leaves[at]] = tree_map(torch.clone, cells[images.leaves[at]])
        sample = columns.samples(finished.cells, _plain)[row]
        ticket = session.transfer.finish()
    session.transfer.hand_over(ticket, [leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor)])
    index = columns.indices[row]
    return Replay(
        epoch=batch.epoch,
        position=int(columns.positions[row]),
        index=int(index) if isinstance(index, np.integer) else index,
        sample=sample,
        # Of the first image; all images share what does not depend on their sizes.
        draws=tuple(entry for view in finished.drawn for entry in _told(view.take(np.array([row])))),
    )


def _plain(value: Any) -> Any:
    """A tensor as an array, where numpy has its type."""
    if not isinstance(value, TensorBits):
        return value
    return value.tensor() if value.dtype else value.array


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
