"""From the parts of a batch to what the user gets: its columns finished, and put together.

Runs in the main process, within the transfer's stream. The columns of the batch are read, its images go through the
stage, masks, boxes and keypoints follow them, and blocks of arrays are joined by one copy. Then all of it is collated
as torch's `default_collate` does; or, for a user's `collate_fn`, samples are put together again row by row, unless a
worker has run it already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpuload.batches.collate import BatchOptions, collate, converted, outline_of, row_of, samples_of
from gpuload.batches.columns import Finished, columns_of, planned_rows
from gpuload.batches.gathering import GatheredTargets
from gpuload.batches.mixing import Pairing, partners_of, soften
from gpuload.batches.targets import TargetStage, left_behind
from gpuload.datasets.tree import mapping_like
from gpuload.errors import CollateError, kinds_of, one_line
from gpuload.ring.columns import Block, Columns, ImageColumn, entry
from gpuload.rng import philox, streams
from gpuload.stage import OutputPool, RaggedImages, accelerator
from gpuload.stage.gathering import Gathered
from gpuload.stage.ranges import COPY, named
from gpuload.stage.upload import upload, views_of
from gpuload.transforms import Program
from gpuload.workers.batch import Batch, Part
from gpuload.workers.planned import PlannedBatch

__all__ = ["Assembly", "BatchInfo", "Made"]

DEPTH = 3  # how deep objects of a user's own class are searched for tensors
NOTHING = contextlib.nullcontext()
LEND_BYTES = 1 << 20  # less is copied
NO_TENSORS = (int, float, str, bytes, type, type(None))  # there are none in these


class BatchInfo(NamedTuple):
    """Which samples a batch holds, given beside it with ``info=True``: a named tuple, which trainers can move.

    Attributes:
        epoch: the epoch's number.
        step: the batch's number in the epoch, from 0.
        positions: int64 (N,), each sample's position in the epoch's order.
        indices: int64 (N,), its index in the dataset; a list if a sampler gives keys that are not integers. For an
            iterable dataset, how many samples its worker gave before it.
        valid: bool (N,), False for rows that only fill up a batch.
    """

    epoch: int
    step: int
    positions: torch.Tensor
    indices: torch.Tensor | list[Any]
    valid: torch.Tensor


class Made(NamedTuple):
    """A batch that was made.

    Attributes:
        value: what the user gets, unless there is a `rest`.
        tensors: all tensors in it; with a `rest`, all that it reads.
        rest: makes the value, on the consumer's stream.
        warning: to be given with it.
    """

    value: Any
    tensors: list[torch.Tensor]
    rest: Callable[[], Any] | None
    warning: str


class Assembly:
    """Makes batches.

    Args:
        options: the loader's.
        stage: the compiled transforms.
        transfer: brings slots and tensors to the device.

    Attributes:
        copy_s, stage_s, collate_s: host time of issuing copies, of the transforms with their draws, and of the rest.
    """

    def __init__(self, options: BatchOptions, stage: Any, transfer: Any) -> None:
        self._options = options
        self._stage = stage
        self._transfer = transfer
        self.copy_s = self.stage_s = self.collate_s = 0.0
        self._by_row = options.by_row
        self._pool = None if transfer.asynchronous else OutputPool()
        chain = options.chain
        changes = len(chain) or chain.module is not None or chain.views is not None
        self._lends = self._pool is not None and options.ragged == "list" and not changes and not self._by_row
        self._targets: TargetStage | None = None  # made once a sample has targets
        self._gathering: GatheredTargets | None = None
        self._warned = False  # whether it was looked for what does not move targets

    def make(self, batch: Batch, info: bool, release: Callable[[], None]) -> Made:
        """Make a batch, or all of it that may be made ahead: what is at the end of the transforms, and a `collate_fn`,
        may depend on what the consumer is still doing.

        Args:
            batch: complete; its slots are given back when they have been read.
            info: give `BatchInfo` too.
            release: gives the slots back.

        Raises:
            CollateError: the samples cannot be put together.
        """
        start, before = perf_counter(), self.copy_s + self.stage_s
        made = self._made(batch, info, release)
        self.collate_s += perf_counter() - start - (self.copy_s + self.stage_s - before)
        return made

    def _made(self, batch: Batch, info: bool, release: Callable[[], None]) -> Made:
        starts = self._transfer.starts(batch)
        columns, later, finished = columns_of(batch, starts, spread=self._by_row), False, None
        if columns.collated is not None:
            release()  # it was copied when it was unpickled
            if (found := columns.collated).error:
                raise _collate_error(columns, found.error, found.traceback, found.kinds)
            put = partial(self._on_device, columns.collated.value)
        else:
            later = self._transfer.asynchronous and self._reads_state(columns)
            outline = None if self._by_row else outline_of(columns)
            finished = self.finish(batch, columns, release, by_row=self._by_row, last=not later)
            put = partial(self._put_together, columns, outline, finished)
        warning = batch.spec.warning
        if columns.has_targets and not (self._warned or warning):
            self._warned, warning = True, left_behind(self._options.chain, columns)
        batch_info = None
        if info:
            with _on_the_cpu():
                batch_info = self._info(batch, columns)
        if finished is None or not later:
            value = put() if batch_info is None else (put(), batch_info)
            return Made(value, _tensors(value, DEPTH), None, warning)
        epoch, held = batch.spec.epoch, _tensors([finished.results, batch_info], DEPTH)

        def rest() -> Any:
            start = perf_counter()
            self._end(epoch, columns, finished, by_row=self._by_row)
            ended = perf_counter()
            self.stage_s += ended - start
            try:
                return put() if batch_info is None else (put(), batch_info)
            finally:
                self.collate_s += perf_counter() - ended

        return Made(None, held, rest, warning)

    def _reads_state(self, columns: Columns) -> bool:
        """Whether code of the user's own may read what the consumer's stream is still writing: a `collate_fn`, or what
        ends the transforms."""
        if self._options.collate_fn is not None:
            return True
        return self._options.chain.ends_in_state and bool(columns.images)

    def plan_inputs(self, batch: Batch) -> tuple[PlannedBatch, bytes] | None:
        """For a complete batch, return a plan to be made and what a worker reads for it; None: it is planned here."""
        planned = PlannedBatch(self._transfer.starts(batch))
        chunks = [part.description for part in batch.parts]
        if not all(chunks):
            chunks = []
            planned.columns = columns = columns_of(batch, planned.starts, spread=self._by_row)
            images = columns.images
            if columns.has_targets or len(images) != 1 or images[0].kinds or images[0].rows is not None:
                return None
        return planned, planned.request(chunks)

    def _put_together(self, columns: Columns, outline: Any, finished: Finished) -> Any:
        """The batch that the user gets, of its finished columns; `outline` None: row by row."""
        if outline is None:
            return self._on_device(self._collated(columns, finished))
        pairing, options = finished.pairing, self._options
        # Labels are checked and mixed before they go to the device, to avoid waiting for it.
        first = self._placed if pairing is None else lambda tensor: tensor
        with _on_the_cpu():
            views, ragged = options.chain.views, options.ragged
            value = collate(columns, outline, finished, views=views, ragged=ragged, to_device=first)
            return value if pairing is None else self._on_device(soften(value, pairing, columns.name))

    def finish(
        self, batch: Batch, columns: Columns, release: Callable[[], None], *, by_row: bool, last: bool = True
    ) -> Finished:
        """Finish the columns of a batch, and give its slots back; `by_row`: images become cells, and blocks values;
        `last`: also do what `_end` does."""
        one_by_one = by_row or columns.has_targets or self._options.chain.gathers  # else no row has a cell of its own
        cells = [{} for _ in range(len(columns))] if one_by_one else [{}] * len(columns)
        finished = Finished(cells, pairing=self._pairing(batch, columns))
        lends = self._lends and columns.images and not (columns.has_targets or batch.on_device)
        loads = bool(columns.blocks or (columns.images and not lends))
        start = perf_counter()
        with named(COPY):
            pixels, starts = self._transfer.load(batch, release) if loads else (None, [])
        loaded = perf_counter()
        self.copy_s += loaded - start

        def bytes_of(images: ImageColumn) -> RaggedImages:
            return RaggedImages(pixels, images.table, _Names(columns, images))  # pyright: ignore[reportArgumentType]

        def pixels_of(images: ImageColumn) -> RaggedImages:
            return _typed(images, bytes_of(images)) if images.kinds else bytes_of(images)

        gathered: list[Gathered] | None = None
        planned = batch.planned
        if planned is not None and pixels is not None:
            planned.arrays = views_of(pixels, planned.spans, starts[-1])
            leaves = {name: planned.arrays.pop(name) for name in planned.spans if isinstance(name, int)}
            if self._transfer.asynchronous and not by_row:  # copied, or whoever keeps labels would keep the pixels
                finished.placed.update((leaf, array.clone()) for leaf, array in leaves.items())
        for number, images in enumerate(columns.images):
            if planned is not None:
                finished.images.append(self._stage(pixels_of(images), planned, last=False))
                continue
            if number and _of_one_size(images, columns.images[0]):
                drawn = finished.drawn
            else:
                drawn = self._drawn(batch.spec.epoch, columns, images)
            finished.drawn = finished.drawn or drawn
            finished.sizes_hw.append([program.results_hw for program in drawn])
            if self._options.chain.gathers and gathered is None:
                self._gathering = self._gathering or GatheredTargets(self._options.chain, self._stage.device)
                gathered = self._gathering(columns, finished, drawn[0], self._numbers(batch, columns), bytes_of)
            if lends:
                self._stage.check(pixels_of(images), drawn[0])
            else:
                finished.images.append(self._images(columns, images, pixels_of, drawn, finished.pairing, gathered))
        if lends:
            assert self._pool is not None
            finished.images = _lent_images(self._transfer, batch, columns, self._pool)
        if last:
            self._end(batch.spec.epoch, columns, finished, by_row=by_row)
        if columns.has_targets and gathered is None:
            self._targets = self._targets or TargetStage(self._options.chain, self._stage.device)
            self._targets(columns, finished, finished.drawn, bytes_of)
        self.stage_s += perf_counter() - loaded
        if columns.blocks and not columns.images and self._pool is not None:
            finished.whole |= _lent_blocks(self._transfer, batch, columns)
        for leaf in columns.blocks.keys() - finished.whole.keys():
            assert pixels is not None
            finished.whole[leaf] = _stacked(columns.blocks[leaf], pixels, self._pool)
        if not loads:
            release()  # all that is in the slots is copied or lent
        return finished

    def _end(self, epoch: int, columns: Columns, finished: Finished, *, by_row: bool) -> None:
        """Call the module at the end of the transforms with the images, on the current stream, and give rows theirs."""
        views = self._options.chain.views
        if self._options.chain.module is not None:
            for number, made in enumerate(finished.images):
                ended = [
                    self._stage.call_last(one, self._module_seed(epoch, columns, view))
                    for view, one in enumerate([made] if views is None else made)
                ]
                finished.images[number] = ended[0] if views is None else ended
        if by_row or columns.has_targets:
            for images, made, sizes in zip(columns.images, finished.images, finished.sizes_hw, strict=True):
                for at, (row, leaf) in enumerate(images.places()):
                    finished.cells[row][leaf] = row_of(made, views, at, sizes)

    def _images(
        self,
        columns: Columns,
        images: ImageColumn,
        pixels_of: Callable[[ImageColumn], RaggedImages],
        drawn: Sequence[Program],
        pairing: Pairing | None,
        gathered: list[Gathered] | None,
    ) -> Any:
        """The images of a column, finished but for `_end`; `pairing`, if they are mixed, gives partners and takes
        shares; `gathered`, if they are put together, says of what."""
        if pairing is not None:
            self._pair(drawn[0], columns, images, pairing)
        partners, pixels = None if pairing is None else pairing.partners, pixels_of(images)
        views = [
            self._stage(
                *pixels.through(draws),
                view=view,
                partners=partners,
                gathered=gathered,
                last=False,
            )
            for view, draws in enumerate(drawn)
        ]
        return views[0] if self._options.chain.views is None else views

    def _drawn(self, epoch: int, columns: Columns, images: ImageColumn) -> list[Program]:
        """The programs for images, one for each view."""
        chain, key = self._options.chain.at(epoch), philox.epoch_key(self._options.seed, epoch)
        boxes = columns.boxes(images.row_numbers.tolist()) if chain.reads_boxes else None
        positions = columns.positions if images.rows is None else columns.positions[images.rows]
        sizes, regions = images.table["size_hw"], images.table["region_tlhw"]
        return [
            chain.draw(key, positions, sizes, boxes, view=view, regions_tlhw=regions)
            for view in range(len(chain.lines))
        ]

    def _pairing(self, batch: Batch, columns: Columns) -> Pairing | None:
        """The partners of a batch, if the transforms mix images."""
        mixing = self._options.chain.mixing
        return None if mixing is None else Pairing(mixing, partners_of(self._numbers(batch, columns)))

    def _numbers(self, batch: Batch, columns: Columns) -> np.ndarray:
        """The numbers that say which samples are neighbours."""
        if self._options.planned:
            return columns.positions
        return planned_rows(batch, columns)

    def _module_seed(self, epoch: int, columns: Columns, view: int) -> int:
        """The seed of torch's generators for the module at the end of the transforms, from the batch's first position,
        which is the same when an epoch is resumed."""
        key = philox.epoch_key(self._options.seed, epoch)
        return int(philox.uniforms(key, columns.positions[:1], streams.MODULE[view], 2)[0, 0] * 2.0**32)

    def _pair(self, draws: Program, columns: Columns, images: ImageColumn, pairing: Pairing) -> None:
        """Give `pairing` the shares drawn for images."""
        if (which := images.rows) is not None:
            missing = int(np.setdiff1d(np.arange(len(columns)), which)[0])
            raise CollateError(
                f"{type(pairing.mixing).__name__} mixes the images of all samples of a batch, but "
                f"{columns.name(missing)} has fewer images than {columns.name(int(which[0]))}; let all samples have "
                "the same number"
            )
        pairing.take(draws, columns.name)

    def _collated(self, columns: Columns, finished: Finished) -> Any:
        """The samples, through the `collate_fn` if there is one."""
        samples = samples_of(columns, finished.cells)
        collate_fn, pairing = self._options.collate_fn, finished.pairing
        given = samples[0] if self._options.single else samples
        if collate_fn is None:
            with torch.device("cpu"):
                return converted(given, partial(columns.name, 0))
        try:
            value = collate_fn(given)
        except Exception as error:
            raise _collate_error(columns, one_line(f"{type(error).__name__}: {error}"), "", kinds_of(error)) from error
        return value if pairing is None else soften(value, pairing, columns.name)

    def _on_device(self, value: Any) -> Any:
        """A collated batch with its tensors on the device; other objects stay, pinned by their own ``pin_memory()`` if
        that was asked for."""
        return tree_map(self._moved, value)

    def _moved(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._placed(leaf)
        own: Any = getattr(leaf, "pin_memory", None)
        if callable(own):
            return own() if self._options.pin_memory and accelerator.is_available() else leaf
        if isinstance(leaf, Mapping):  # of a class of the user's own
            return mapping_like(type(leaf), {key: tree_map(self._moved, item) for key, item in leaf.items()})
        return leaf

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if self._options.pin_memory and not self._transfer.asynchronous and accelerator.is_available():
            return tensor.pin_memory()
        return self._transfer.place(tensor)

    def _info(self, batch: Batch, columns: Columns) -> BatchInfo:
        plain, place = all(isinstance(index, int | np.integer) for index in columns.indices), self._placed
        return BatchInfo(
            batch.spec.epoch,
            batch.spec.step,
            place(torch.from_numpy(columns.positions.copy())),
            place(torch.from_numpy(np.array(columns.indices, np.int64))) if plain else list(columns.indices),
            place(torch.from_numpy(_valid(batch, columns))),
        )


def _on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """New tensors are the CPU's within this, whatever torch's default device is: a new tensor says it soonest."""
    return NOTHING if torch.empty(0).device.type == "cpu" else torch.device("cpu")


def _valid(batch: Batch, columns: Columns) -> np.ndarray:
    """Return, for each row, False if it only fills up the batch, bool (N,)."""
    positions = columns.positions
    valid = np.ones(len(positions), np.bool_)
    if batch.spec.valid is not None:
        # Rows that fill up repeat a position, after the row that counts, if this batch has that one.
        valid[1:] = positions[1:] != positions[:-1]
        valid &= np.isin(positions, batch.spec.positions[batch.spec.valid])
    return valid


def _of_one_size(images: ImageColumn, others: ImageColumn) -> bool:
    """Whether the same rows have both images, in one size, so that both have the same draws."""
    return np.array_equal(images.row_numbers, others.row_numbers) and np.array_equal(
        images.table["size_hw"], others.table["size_hw"]
    )


def _typed(images: ImageColumn, found: RaggedImages) -> RaggedImages:
    """Return images that are not uint8, whose channels came as their bytes."""
    dtypes = ["uint8" if kind is None else kind[0] for kind in images.each_kind]
    other = next((row for row, dtype in enumerate(dtypes) if dtype != dtypes[0]), None)
    if other is not None:
        raise ValueError(
            f"the images of a batch must be of one dtype, but {found.labels[0]} is {dtypes[0]} and "
            f"{found.labels[other]} {dtypes[other]}; convert them in the dataset"
        )
    return found.viewed(dtypes[0])


def _collate_error(columns: Columns, what: str, traceback: str, kinds: Sequence[str]) -> CollateError:
    return CollateError(
        f"collate_fn raised {what}, for a batch of {len(columns)} samples from {columns.name(0)} on"
        + (f"\n\nWhere it happened:\n{traceback.rstrip()}" if traceback else ""),
        kinds,
    )


def _tensors(value: Any, depth: int) -> list[torch.Tensor]:
    """All tensors in a batch, also in attributes of a user's own objects."""
    found = []
    if type(value) is list:  # as nearly all batches are; to take one apart as a tree takes longer
        for own in value:
            if isinstance(own, torch.Tensor):
                found.append(own)
            elif not isinstance(own, NO_TENSORS):
                found += _tensors(own, depth)
        return found
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping | list | tuple | set):  # of a class of the user's own
            inner = list(leaf.values()) if isinstance(leaf, Mapping) else list(leaf)
            found += _tensors(inner, depth - 1) if depth else []
        elif depth and not isinstance(leaf, NO_TENSORS):
            inner: Any = getattr(leaf, "__dict__", None)
            if isinstance(inner, Mapping):
                found += _tensors(list(inner.values()), depth - 1)
            elif slots := getattr(type(leaf), "__slots__", None):
                names = (slots,) if isinstance(slots, str) else slots
                found += _tensors([getattr(leaf, name, None) for name in names], depth - 1)
    return found


class _Names(Sequence[str]):
    """The name of each image of a batch, for errors; made when asked for."""

    def __init__(self, columns: Columns, images: ImageColumn) -> None:
        self._columns = columns
        self._images = images

    def __len__(self) -> int:
        return len(self._images.table)

    def __getitem__(self, row: Any) -> Any:
        return self._columns.name(int(self._images.row_numbers[row]), entry(self._images.leaves, row))


# -- what a batch may leave in its slots -----------------------------------------------------------------------------
# On the CPU the user gets tensors that are views of a slot, which is free again when the last of them is gone; if the
# transfer refuses that, and on other devices, the bytes are copied.


def _lent_blocks(transfer: Any, batch: Batch, columns: Columns) -> dict[int, torch.Tensor]:
    """Return the batch's blocks as views of its slot, if one slot has them all and lending is worth it; else none."""
    parts = [(part, start) for part, start in zip(batch.parts, transfer.starts(batch), strict=False) if part.samples]
    if len(parts) != 1 or any(block.rows is not None for block in columns.blocks.values()):
        return {}
    [(part, start)] = parts
    if not _worth_lending(part):
        return {}
    assert part.data is not None
    arrays = {leaf: block.arrays(part.data, start)[0] for leaf, block in columns.blocks.items()}
    if not transfer.lend(part, list(arrays.values())):
        return {}
    return {leaf: _as_tensor(array, columns.blocks[leaf]) for leaf, array in arrays.items()}


def _as_tensor(array: np.ndarray, block: Block) -> torch.Tensor:
    tensor = torch.from_numpy(array)  # it keeps this array object alive
    return tensor.view(getattr(torch, block.torch_dtype)) if block.torch_dtype else tensor


def _lent_images(transfer: Any, batch: Batch, columns: Columns, pool: OutputPool) -> list[list[torch.Tensor]]:
    """Return the images of a batch as decoded, C×H×W: views of slots, H×W×C, if those are lent, else of copies."""
    starts = np.array(transfer.starts(batch))
    memory: list[torch.Tensor | None] = []
    for part in batch.parts:
        if part.data is None:
            memory.append(None)
            continue
        bytes_ = part.data[: part.used_bytes]
        tensor = torch.from_numpy(bytes_)  # it keeps this array object alive
        if not (_worth_lending(part) and transfer.lend(part, [bytes_])):
            tensor = pool.empty((len(bytes_),), torch.uint8).copy_(tensor)
        memory.append(tensor)
    return [_views(memory, starts, images) for images in columns.images]


def _views(memory: Sequence[torch.Tensor | None], starts: np.ndarray, images: ImageColumn) -> list[torch.Tensor]:
    """Return images as views; `starts` are where the memory of each part begins, as offsets count."""
    views, size, offsets = [], 1, images.table["offset"]
    if images.kinds:
        dtype = getattr(torch, images.kinds[0][0])  # pyright: ignore[reportOptionalSubscript]
        size = dtype.itemsize
        memory = [None if whole is None else whole[: len(whole) // size * size].view(dtype) for whole in memory]
    order = starts.argsort(kind="stable")
    parts = order[starts[order].searchsorted(offsets, "right") - 1]
    columns = (offsets - starts[parts]).tolist(), images.table["shape"].tolist()
    for part, offset, (height, width, pixel) in zip(parts.tolist(), *columns, strict=True):
        whole: Any = memory[part]
        channels = pixel // size
        strides = (1, width * channels, channels)
        views.append(whole.as_strided((channels, height, width), strides, offset // size))
    return views


def _worth_lending(part: Part) -> bool:
    if part.data is None or part.slot is None:
        return False
    return part.used_bytes >= max(LEND_BYTES, part.slot.capacity_bytes // 4)


def _stacked(block: Block, pixels: torch.Tensor, pool: OutputPool | None) -> torch.Tensor:
    """Return a leaf in blocks as one tensor, N×…, from the batch's memory: on the CPU in memory of the `pool`."""
    dtype = getattr(torch, block.torch_dtype or block.dtype)
    views = [
        pixels[at : at + count * block.row_bytes].view(dtype).view(count, *block.shape) for at, count in block.pieces
    ]
    if pool is None:
        whole = torch.cat(views) if len(views) > 1 else views[0]
        return whole if block.rows is None else whole[upload(block.rows, whole.device)]
    whole, at = pool.empty((sum(map(len, views)), *block.shape), dtype), 0
    for view in views:
        whole[at : at + len(view)] = view
        at += len(view)
    return whole if block.rows is None else whole[torch.from_numpy(block.rows)]
