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

from gpuload.batches.collate import collate, converted, outline_of, row_of, unwrapped
from gpuload.batches.columns import Columns, Finished, Images
from gpuload.batches.gathering import GatheredTargets
from gpuload.batches.lending import lent_blocks, lent_images, stacked
from gpuload.batches.mixing import Pairing, partners_of, soften
from gpuload.batches.options import BatchOptions
from gpuload.batches.targets import TargetStage, left_behind
from gpuload.datasets.tree import mapping_like
from gpuload.errors import CollateError, kinds_of, one_line
from gpuload.rng import philox, streams
from gpuload.stage import OutputPool, RaggedImages, accelerator
from gpuload.stage.gathering import Gathered
from gpuload.stage.ranges import COPY, named
from gpuload.stage.upload import views_of
from gpuload.transforms import Program
from gpuload.transforms.program.draws import IMAGE
from gpuload.workers.batch import Batch
from gpuload.workers.plans import to_plan

__all__ = ["Assembly", "BatchInfo", "Made"]

DEPTH = 3  # how deep objects of a user's own class are searched for tensors
NOTHING = contextlib.nullcontext()
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
    """

    value: Any
    tensors: list[torch.Tensor]
    rest: Callable[[], Any] | None = None


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
        self._told = False  # whether it was said that something does not move targets, if so

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
        columns, chain = batch.columns or Columns(batch), self._options.chain
        batch.columns = None  # they refer to each other
        later, finished = False, None
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
        if columns.has_targets and not (self._told or batch.warning):
            self._told, batch.warning = True, left_behind(chain, columns)
        told = None
        if info:
            with _on_the_cpu():
                told = self._info(batch, columns)
        if finished is None or not later:
            value = put() if told is None else (put(), told)
            return Made(value, _tensors(value, DEPTH))
        epoch, held = batch.spec.epoch, _tensors([finished.results, told], DEPTH)

        def rest() -> Any:
            start = perf_counter()
            self._end(epoch, columns, finished, by_row=self._by_row)
            ended = perf_counter()
            self.stage_s += ended - start
            try:
                return put() if told is None else (put(), told)
            finally:
                self.collate_s += perf_counter() - ended

        return Made(None, held, rest)

    def _reads_state(self, columns: Columns) -> bool:
        """Whether code of the user's own may read what the consumer's stream is still writing: a `collate_fn`, or what
        ends the transforms."""
        if self._options.collate_fn is not None:
            return True
        return self._options.chain.ends_in_state and bool(columns.images)

    def told_of(self, batch: Batch) -> bytes | None:
        """Of a complete batch that workers may plan, what they are told; None: it is planned here."""
        chunks = [part.told for part in batch.parts]
        if all(chunks):
            batch.starts = self._transfer.starts(batch)
            return to_plan(batch.starts, chunks)
        batch.columns = columns = Columns(batch)
        images = columns.images
        if columns.has_targets or len(images) != 1 or images[0].kinds or len(images[0].rows) != len(columns):
            return None
        batch.starts = self._transfer.starts(batch)
        return to_plan(batch.starts, (), columns.table(images[0], batch.starts))

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
        if by_row or columns.has_targets:
            columns.spread_blocks()
        lends = self._lends and columns.images and not (columns.has_targets or batch.on_device)
        loads = bool(columns.images and not lends) or bool(columns.blocks and self._pool is None)
        start = perf_counter()
        with named(COPY):
            pixels, starts = self._transfer.load(batch, release) if loads else (None, [])
        loaded = perf_counter()
        self.copy_s += loaded - start

        def bytes_of(images: Images) -> RaggedImages:
            return _ragged(columns, images, columns.table(images, starts) if loads else images.table, pixels)

        def pixels_of(images: Images) -> RaggedImages:
            return _typed(columns, images, bytes_of(images)) if images.kinds else bytes_of(images)

        gathered: list[Gathered] | None = None
        made = batch.made
        if made is not None and pixels is not None and batch.starts == starts[:-1]:
            made.arrays = views_of(pixels, made.spans, starts[-1])
            leaves = {name: made.arrays.pop(name) for name in made.spans if isinstance(name, int)}
            if self._transfer.asynchronous and not by_row:  # copied, or whoever keeps labels would keep the pixels
                finished.placed.update((leaf, array.clone()) for leaf, array in leaves.items())
        elif made is not None:  # a part was moved since
            made = batch.together = None
            columns = Columns(batch)
        for number, images in enumerate(columns.images):
            if made is not None:
                finished.images.append(self._stage(pixels_of(images), made, last=False))
                continue
            first = columns.images[0]
            if number and np.array_equal(images.rows, first.rows) and np.array_equal(images.sizes_hw, first.sizes_hw):
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
            finished.images = lent_images(self._transfer, batch, columns, self._pool)
        if last:
            self._end(batch.spec.epoch, columns, finished, by_row=by_row)
        if columns.has_targets and gathered is None:
            self._targets = self._targets or TargetStage(self._options.chain, self._stage.device)
            self._targets(columns, finished, finished.drawn, bytes_of)
        self.stage_s += perf_counter() - loaded
        if not loads and not lends:
            finished.whole |= lent_blocks(self._transfer, columns)
        for leaf in columns.blocks.keys() - finished.whole.keys():
            finished.whole[leaf] = stacked(columns.blocks[leaf], columns, pixels, starts, self._pool)
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
                for at, (row, leaf) in enumerate(zip(images.rows.tolist(), images.leaves, strict=True)):
                    finished.cells[row][leaf] = row_of(made, views, at, sizes)

    def _images(
        self,
        columns: Columns,
        images: Images,
        pixels_of: Callable[[Images], RaggedImages],
        drawn: Sequence[Program],
        pairing: Pairing | None,
        gathered: list[Gathered] | None,
    ) -> Any:
        """The images of a column, finished but for `_end`; `pairing`, if they are mixed, gives partners and takes
        shares; `gathered`, if they are put together, says of what."""
        if pairing is not None:
            self._pair(drawn[0], columns, images.rows, pairing)
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

    def _drawn(self, epoch: int, columns: Columns, images: Images) -> list[Program]:
        """The programs for images, one for each view."""
        chain, key = self._options.chain.at(epoch), philox.epoch_key(self._options.seed, epoch)
        boxes = columns.boxes(images.rows.tolist()) if chain.reads_boxes else None
        positions, sizes, regions = columns.positions[images.rows], images.sizes_hw, images.table[:, 6:]
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
        planned = np.argsort(batch.spec.positions, kind="stable")  # the rows of the batch as it was asked for
        return planned[np.searchsorted(batch.spec.positions[planned], columns.positions)]

    def _module_seed(self, epoch: int, columns: Columns, view: int) -> int:
        """The seed of torch's generators for the module at the end of the transforms, from the batch's first position,
        which is the same when an epoch is resumed."""
        key = philox.epoch_key(self._options.seed, epoch)
        return int(philox.uniforms(key, columns.positions[:1], streams.MODULE[view], 2)[0, 0] * 2.0**32)

    def _pair(self, draws: Program, columns: Columns, which: np.ndarray, pairing: Pairing) -> None:
        """Give `pairing` the shares drawn for the images of rows `which`."""
        if len(which) != len(columns):
            missing = int(np.setdiff1d(np.arange(len(columns)), which)[0])
            raise CollateError(
                f"{type(pairing.mixing).__name__} mixes the images of all samples of a batch, but "
                f"{columns.name(missing)} has fewer images than {columns.name(int(which[0]))}; let all samples have "
                "the same number"
            )
        pairing.take(draws, columns.name)

    def _collated(self, columns: Columns, finished: Finished) -> Any:
        """The samples, through the `collate_fn` if there is one."""
        samples = columns.samples(finished.cells, unwrapped)
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
            place(torch.from_numpy(columns.valid)),
        )


def _on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """New tensors are the CPU's within this, whatever torch's default device is: a new tensor says it soonest."""
    return NOTHING if torch.empty(0).device.type == "cpu" else torch.device("cpu")


def _ragged(columns: Columns, images: Images, table: np.ndarray, pixels: Any) -> RaggedImages:
    return RaggedImages(pixels, table.view(IMAGE)[:, 0], _Names(columns, images))


def _typed(columns: Columns, images: Images, found: RaggedImages) -> RaggedImages:
    """Images that are not uint8, whose channels came as their bytes."""
    dtypes = ["uint8" if kind is None else kind[0] for kind in images.kinds]
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

    def __init__(self, columns: Columns, images: Images) -> None:
        self._columns = columns
        self._images = images

    def __len__(self) -> int:
        return len(self._images.rows)

    def __getitem__(self, row: Any) -> Any:
        return self._columns.name(int(self._images.rows[row]), self._images.leaves[row])
