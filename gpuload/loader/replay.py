"""Reproducing one sample of an epoch, bit for bit, with the same code that builds batches.

This module runs in the main process, without workers, in a temporary session.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpuload.batches.mixing import half_batch_numbers
from gpuload.checks import integer
from gpuload.errors import SampleError
from gpuload.loader.options import Options
from gpuload.loader.session import Session
from gpuload.order.buckets import BucketShares
from gpuload.order.options import OrderOptions
from gpuload.order.schedule import ranks_of, shares_of
from gpuload.order.shares import RankBatch
from gpuload.order.spec import BatchSpec
from gpuload.ring.columns import Columns, TensorBits
from gpuload.transforms import Program
from gpuload.transforms.chain import find_varying
from gpuload.transforms.program.ops import NOTHING, OPS, Call, Ops, PartnerMix, map_params
from gpuload.transforms.varying import BucketSize, ByBatch
from gpuload.workers.batch import Batch
from gpuload.workers.faults import ErrorLog, Faults

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A reproduced sample.

    Attributes:
        epoch, position: the sample's epoch, and its position in the epoch's order.
        index: the sample's index or key in the dataset.
        sample: the dataset's sample (with tensors as arrays), whose images are augmented, C×H×W on the device, and
            bit-identical to those in the batch; with `MultiView`, a list of images. Masks, boxes and keypoints are
            tensors, transformed as in the batch.
        draws: the name of each transform, and a dict of the values drawn for this sample; with several numbers of
            ``draws=``, all transforms of the first number, then of the next.
    """

    epoch: int
    position: int
    index: Any
    sample: Any
    draws: tuple[tuple[str, dict[str, Any]], ...]


def replay(options: Options, epoch: int, position: int, index: object = None) -> Replay:
    """Reproduce one sample of an epoch; arguments and errors as for `Loader.replay`."""
    order = options.order
    if order.iterable:
        raise TypeError("replay() needs a map-style dataset: an iterable dataset cannot return a sample twice")
    epoch = integer("epoch", epoch, minimum=0, maximum=2**63 - 1)
    last_position = shares_of(order).samples - 1 if order.is_planned else 2**63 - 1
    position = integer("position", position, minimum=0, maximum=last_position)
    if index is None and not order.is_planned:
        raise ValueError(
            f"replay(epoch={epoch}, position={position}) needs index=…, since a sampler decides which sample is "
            "at a position; take it from BatchInfo.indices or ErrorRecord.index"
        )
    indices: Any = np.array([index], np.int64) if isinstance(index, int | np.integer) else [index]
    positions, row, size_hw = np.array([position]), 0, None
    if order.batch_sampler is not None and (argument := find_varying(options.chain, ByBatch, BucketSize)):
        raise ValueError(
            f"{argument} depends on the batch, but only the batch_sampler knows the batch of position {position}; "
            "replay() needs a sampler or gpuload's own order"
        )
    step = position // (order.size * ranks_of(order)["world_size"])  # if the epoch has only full batches
    if order.is_planned and (index is None or order.combining_transform or order.buckets is not None):
        positions, indices, _, size_hw = _mixing_group(order, epoch, position)
        row = int((positions == position).argmax())
        if index is not None:
            indices = indices.copy()
            indices[row] = index
    session = _open_session(options, indices)
    try:
        session.begin(iter([BatchSpec(step, epoch, positions, indices, size_hw=size_hw)]))
        batch = session.feed.pop_batch()
        assert batch is not None
        for error in batch.errors:
            if error.position == positions[row]:
                raise SampleError(error)
        columns = batch.join_columns(session.transfer.part_offsets(batch), splits_blocks=True)
        return _finish_replay(session, batch, columns, int(np.flatnonzero(columns.positions == positions[row])[0]))
    finally:
        session.close()


def _mixing_group(order: OrderOptions, epoch: int, position: int) -> RankBatch:
    """Return a sample and the partners whose images are mixed into it, as a batch."""
    shares = shares_of(order)
    if order.repeats == 1 or order.group_size == 1 or isinstance(shares, BucketShares):
        return shares.group_at(epoch, position)
    shares = replace(shares, drop_last=False, rank=position % shares.world_size)
    start = position // shares.global_batch_size * shares.global_batch_size
    batch = next(shares.batches(epoch, start), None)
    if batch is None or position not in batch.positions:  # uneven="drop" removed it from all batches
        batch = next(replace(shares, uneven="pad").batches(epoch, start))
    pair_indices = half_batch_numbers(np.arange(len(batch.positions)), len(batch.positions)) // 2
    is_member = pair_indices == pair_indices[(batch.positions == position).argmax()]
    return RankBatch(batch.positions[is_member], batch.indices[is_member], batch.valid[is_member])


def _open_session(options: Options, indices: np.ndarray | list[Any]) -> Session:
    """Return a session without workers for one batch, of a sample and its mixing partners, if any."""
    order, count = options.order, len(indices)
    # If a bad partner was replaced in the original batch, replace it here too.
    faults = Faults(on_error=options.workers.faults.on_error, max_error_rate=1.0) if count > 1 else Faults()
    sampler = indices if order.has_sampler else None
    options = replace(
        options,
        order=OrderOptions(dataset=order.dataset, batch_size=count, sampler=sampler, seed=order.seed),
        batches=replace(options.batches, collate_fn=None, single=False),
        workers=replace(options.workers, num_workers=0, ray_workers=None, chunk_size=1, faults=faults),
    )
    return Session(options, ErrorLog())


def _finish_replay(session: Session, batch: Batch, columns: Columns, row: int) -> Replay:
    with torch.inference_mode(False), session.transfer.stream(after_consumer=True):
        finished = session.assembly.finish(batch, columns, lambda: session.feed.release(batch))
        session.assembly.end_images(batch.spec.epoch, finished, splits_images=True)
        for images in columns.images:  # clone, so that the result does not keep an entire batch alive
            for leaf in (leaf for image_row, leaf in images.rows_and_leaves() if image_row == row):
                finished.cells[leaf][row] = tree_map(torch.clone, finished.cells[leaf][row])
        sample = finished.samples(_convert_to_array)[row]
        ticket = session.transfer.finish()
    session.transfer.hand_over(ticket, [leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor)])
    index = columns.indices[row]
    return Replay(
        epoch=batch.spec.epoch,
        position=int(columns.positions[row]),
        index=int(index) if isinstance(index, np.integer) else index,
        sample=sample,
        # The random parameters of the first image with each `draws`; those of its other images differ only where they
        # depend on image size.
        draws=tuple(
            draw
            for part in finished.parts()
            for view in part.first_programs
            for draw in _list_draws(view.take(np.array([row])))
        ),
    )


def _convert_to_array(value: object) -> Any:
    """Convert a tensor to an array if numpy supports its dtype."""
    if not isinstance(value, TensorBits):
        return value
    return value.tensor() if value.dtype or value.tv is not None else value.array


def _list_draws(program: Program) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return the random parameters of one image as plain values; a container transform is listed as the transforms it
    chose."""
    draws = []
    for record in program.records:
        values = ((field, getattr(record, field)) for field in record.drawn_fields)
        plain_values = {field: value[0].tolist() for field, value in values if isinstance(value, np.ndarray)}
        if isinstance(record, Call) and record.params is not None:
            plain_values["params"] = map_params(record.params, lambda array: array[0].tolist())
        if isinstance(record, Ops):
            plain_values["operations"] = [OPS[code] for code in plain_values.pop("codes") if code != NOTHING]
        name = record.name if not isinstance(record, PartnerMix) or record.names is None else record.names[0]
        if plain_values and name:
            draws.append((name, plain_values))
    return tuple(draws)
