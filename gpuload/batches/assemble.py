"""From the parts of a batch to what the user gets: images through the stage, all other leaves beside them.

Runs in the main process, within the transfer's stream. Without a `collate_fn` of the user's, image leaves become one
tensor each, blocks of arrays are put together by one copy, and the rest is `default_collate`'s. With one, that runs
here on samples whose images are finished, unless a worker has run it already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_convert

from gpuload.batches.collate import collate, common_structure
from gpuload.batches.mixing import Pairing, partners_of, soften
from gpuload.batches.options import BatchOptions
from gpuload.batches.rows import Harvest
from gpuload.batches.targets import TargetStage, collate_targets, others, unwrapped
from gpuload.datasets.tree import mapping_like, unflatten
from gpuload.errors import CollateError, one_line
from gpuload.ring.chunk import Block, ImageColumn
from gpuload.rng import philox, streams
from gpuload.stage import OutputPool, RaggedImages
from gpuload.transforms import Chain, Program
from gpuload.workers.batch import Batch, Part

__all__ = ["Assembly", "BatchInfo"]

LEND_BYTES = 1 << 20  # a smaller batch is copied
DEPTH = 3  # so deep tensors are looked for in objects of a user's own class


class BatchInfo(NamedTuple):
    """Where a batch stands, given beside it with ``info=True``: a named tuple, as trainers can move it.

    Attributes:
        epoch: the epoch's number.
        step: the batch's number in the epoch, from 0.
        positions: int64 (N,), the place of each sample in the epoch's order.
        indices: int64 (N,), its index in the dataset; a list, where a sampler gives keys that are no integers. Of an
            iterable dataset, how many samples its worker's stream gave before it.
        valid: bool (N,), False for rows that only fill up a batch.
    """

    epoch: int
    step: int
    positions: torch.Tensor
    indices: torch.Tensor | list[Any]
    valid: torch.Tensor


class Assembly:
    """Makes batches.

    Args:
        options: the loader's.
        stage: the compiled transforms.
        transfer: brings what is in the slots, and all else, to the device.
    """

    def __init__(self, options: BatchOptions, stage: Any, transfer: Any) -> None:
        self._options = options
        self._stage = stage
        self._transfer = transfer
        # Whether images come as a batch; or one by one, for a user's rules.
        self._batched = options.collate_fn is None and not options.single
        self._pool = None if transfer.asynchronous else OutputPool()
        self._targets: TargetStage | None = None  # made where a sample has targets
        self._told = False  # that a module does not move them

    def make(self, batch: Batch, info: bool, release: Callable[[], None]) -> tuple[Any, list[torch.Tensor]]:
        """The batch, and its tensors.

        Args:
            batch: done; its slots are given back when they have been read.
            info: give `BatchInfo` too.
            release: gives them back.

        Raises:
            CollateError: the samples cannot be put together.
        """
        rows, options = Harvest(batch), self._options
        if rows.collated is not None:
            release()  # it was copied out as it was unpickled
            if rows.collated.error:
                raise _collate_error(rows, rows.collated.error, rows.collated.traceback)
            value = self._on_device(rows.collated.value)
        elif options.collate_fn is not None or options.single:
            value = self._on_device(self._collated(batch, rows, release))
        else:
            value = self._default(batch, rows, release)
        if rows.has_targets and options.chain.module is not None and not (self._told or batch.warning):
            self._told, batch.warning = True, _images_alone(options.chain)
        if info:
            with torch.device("cpu"):
                value = (value, self._info(batch, rows))
        return value, _tensors(value, DEPTH)

    def images(
        self,
        epoch: int,
        rows: Harvest,
        leaf: int,
        pixels: torch.Tensor,
        starts: list[int],
        pairing: Pairing | None = None,
        drawn: Sequence[Program] | None = None,
    ) -> Any:
        """The finished images of a leaf of a batch, from what the transfer loaded; `pairing` says how they are mixed,
        where they are, and is told their shares. `drawn` is what `drawn` gave for this leaf, where that is known."""
        which = rows.images(leaf)
        images = _ragged(rows, which, ImageColumn(rows.table(leaf, starts)), pixels)
        drawn = drawn or self.drawn(epoch, rows, leaf, starts)
        if pairing is not None:
            self._pair(drawn[0], rows, which, pairing)
        partners = None if pairing is None else pairing.partners
        views = [
            self._stage(images, draws, view=view, partners=partners, seed=self._module_seed(epoch, rows, view))
            for view, draws in enumerate(drawn)
        ]
        if self._options.chain.views is None:
            return views[0]
        return views if self._batched else [list(image) for image in zip(*views, strict=True)]

    def targets(
        self, rows: Harvest, pixels: torch.Tensor, starts: list[int], drawn: Sequence[Program]
    ) -> tuple[list[dict[int, Any]], dict[int, Any]]:
        """The finished masks, boxes and keypoints of a batch, by the draws of the first image leaf; see
        `gpuload.batches.targets.TargetStage`."""
        if self._targets is None:
            self._targets = TargetStage(self._options.chain, self._stage.device)
        return self._targets(
            rows,
            drawn,
            lambda number, which: _ragged(rows, which, ImageColumn(rows.table(number, starts, masks=True)), pixels),
        )

    def drawn(self, epoch: int, rows: Harvest, leaf: int, starts: list[int]) -> list[Program]:
        """What is drawn for the rows that have an image leaf, for each view."""
        which, sizes_hw = rows.images(leaf), ImageColumn(rows.table(leaf, starts)).sizes_hw
        chain, key = self._options.chain, philox.epoch_key(self._options.seed, epoch)
        boxes = [rows.boxes(row) for row in which.tolist()] if chain.reads_boxes else None
        return [chain.draw(key, rows.positions[which], sizes_hw, boxes, view=view) for view in range(len(chain.lines))]

    def pairing(self, batch: Batch, rows: Harvest) -> Pairing | None:
        """Whose image is mixed with whose, where the transforms do that."""
        mixing = self._options.chain.mixing
        if mixing is None:
            return None
        numbers = rows.positions
        if not self._options.planned:  # the rows of the batch as it was asked for
            planned = np.argsort(batch.spec.positions, kind="stable")
            numbers = planned[np.searchsorted(batch.spec.positions[planned], numbers)]
        return Pairing(mixing, partners_of(numbers))

    def _module_seed(self, epoch: int, rows: Harvest, view: int) -> int | None:
        """What torch's generators are seeded with for the module at the end of the transforms: the batch is named by
        its first position, which stays the same when an epoch is resumed."""
        if self._options.chain.module is None:
            return None
        key = philox.epoch_key(self._options.seed, epoch)
        return int(philox.uniforms(key, rows.positions[:1], streams.MODULE[view], 2)[0, 0] * 2.0**32)

    def _pair(self, draws: Program, rows: Harvest, which: np.ndarray, pairing: Pairing) -> None:
        """Tell who is mixed with whom, and how much."""
        if len(which) != len(rows):
            missing = int(np.setdiff1d(np.arange(len(rows)), which)[0])
            raise CollateError(
                f"{type(pairing.mixing).__name__} mixes the images of all samples of a batch, but {rows.name(missing)} "
                f"has fewer images than {rows.name(int(which[0]))}; let all samples have as many"
            )
        pairing.take(draws, rows.name)

    # -- torch's rules ----------------------------------------------------------------------------------------------

    def _with_targets(self, batch: Batch, rows: Harvest, release: Callable[[], None]) -> Any:
        """A batch whose samples have masks, boxes or keypoints."""
        rows.spread_blocks()
        counts = [rows.count(row) for row in range(len(rows))]
        if min(counts) != max(counts):
            row = counts.index(min(counts))
            raise CollateError(
                f"{rows.name(counts.index(max(counts)))} has {max(counts)} images, but {rows.name(row)} has "
                f"{counts[row]}; let all samples of a batch have as many"
            )
        pixels, starts = self._transfer.load(batch, release)
        drawn = self.drawn(batch.spec.epoch, rows, 0, starts)  # of all leaves: such images are of one size
        images = [self.images(batch.spec.epoch, rows, leaf, pixels, starts, drawn=drawn) for leaf in range(counts[0])]
        finished, whole = self.targets(rows, pixels, starts, drawn)
        chain, ragged = self._options.chain, self._options.ragged
        with torch.device("cpu"):
            return collate_targets(rows, images, finished, whole, views=chain.views, ragged=ragged, place=self._placed)

    def _default(self, batch: Batch, rows: Harvest, release: Callable[[], None]) -> Any:
        if rows.has_targets:
            return self._with_targets(batch, rows, release)
        structure, places = common_structure(rows.structures, rows.places, rows.name)
        blocks = rows.blocks()
        ready: dict[int, Any] = {}
        pixels: Any = None
        starts: list[int] = []
        loads = bool(places) or (bool(blocks) and self._transfer.asynchronous)
        if loads:
            pixels, starts = self._transfer.load(batch, release)
        pairing = self.pairing(batch, rows)
        for leaf, place in enumerate(places):
            ready[place] = self.images(batch.spec.epoch, rows, leaf, pixels, starts, pairing)
        count = len(places) + len(rows.values[0])
        others = [leaf for leaf in range(count) if leaf not in ready]
        if loads or not self._lent(blocks, others, ready):
            for leaf, entries in blocks.items():
                ready[others[leaf]] = self._stacked(entries, len(rows), rows.order, pixels, starts)
        values: Sequence[Sequence[Any]] = rows.values
        if blocks:
            values = [[value for leaf, value in enumerate(row) if leaf not in blocks] for row in values]
        if not loads:
            release()  # all that was in the slots has been copied
        if self._options.pin_memory:
            ready = {leaf: self._on_device(value) for leaf, value in ready.items()}
        with torch.device("cpu"):  # whatever torch's default device is
            if pairing is None:
                return collate(structure, ready, values, self._placed, rows.name)
            # Labels are checked and mixed before they go to the device, which would have to be waited for.
            value = collate(structure, ready, values, lambda tensor: tensor, rows.name)
            return self._on_device(soften(value, pairing, rows.name))

    def _lent(self, blocks: Mapping[int, Any], others: Sequence[int], ready: dict[int, Any]) -> bool:
        """Let the batch's blocks be what lies in its slot, where it is all in one and worth it."""
        entries = {leaf: found[0] for leaf, found in blocks.items() if len(found) == 1}
        if not entries or len(entries) < len(blocks):
            return False
        part = next(iter(entries.values()))[1]
        if part.data is None or part.slot is None or part.used_bytes < max(LEND_BYTES, part.slot.capacity_bytes // 4):
            return False
        arrays = {leaf: block.array(part.data) for leaf, (_, _, block) in entries.items()}
        if not self._transfer.lend(part, list(arrays.values())):
            return False
        for leaf, (_, _, block) in entries.items():
            tensor = torch.from_numpy(arrays[leaf])  # which keeps this very array
            ready[others[leaf]] = tensor.view(getattr(torch, block.torch_dtype)) if block.torch_dtype else tensor
        return True

    def _stacked(
        self,
        entries: Sequence[tuple[int, Part, Block]],
        rows: int,
        order: list[int] | None,
        pixels: Any,
        starts: Sequence[int],
    ) -> torch.Tensor:
        """A leaf that lies in blocks: N×… on the device."""
        first = entries[0][2]
        dtype = getattr(torch, first.torch_dtype or first.dtype)
        if pixels is not None and self._transfer.asynchronous:
            views = []
            for number, _, block in entries:
                at = starts[number] + block.offset
                nbytes = dtype.itemsize * int(np.prod(block.shape, dtype=np.int64))
                views.append(pixels[at : at + nbytes].view(dtype).view(block.shape))
            whole = torch.cat(views) if len(views) > 1 else views[0]
            return whole if order is None else whole[torch.tensor(order, device=whole.device)]
        assert self._pool is not None
        whole = self._pool.empty((rows, *first.shape[1:]), dtype)
        out = whole.view(getattr(torch, first.dtype)).numpy()
        at = 0
        for _, part, block in entries:
            assert part.data is not None
            array = block.array(part.data)
            out[at : at + len(array)] = array
            at += len(array)
        return whole if order is None else whole[torch.tensor(order)]

    # -- the user's rules -------------------------------------------------------------------------------------------

    def _collated(self, batch: Batch, rows: Harvest, release: Callable[[], None]) -> Any:
        most = max((len(places) for places in rows.places), default=0)
        made: list[dict[int, Any]] = [{} for _ in range(len(rows))]  # for each row its images, by their leaf
        rows.spread_blocks()
        pairing = self.pairing(batch, rows)
        if most:
            pixels, starts = self._transfer.load(batch, release)
            first = self.drawn(batch.spec.epoch, rows, 0, starts)
            for leaf in range(max(rows.count(row) for row in range(len(rows)))):
                drawn = first if leaf == 0 else None  # fewer samples may have the next one, of another size
                finished = self.images(batch.spec.epoch, rows, leaf, pixels, starts, pairing, drawn)
                for row, image in zip(rows.images(leaf).tolist(), finished, strict=True):
                    made[row][rows.places[row][leaf]] = image
            if rows.has_targets:
                for images, targets in zip(made, self.targets(rows, pixels, starts, first)[0], strict=True):
                    images.update(targets)
        else:
            release()
        samples = []
        for row, (structure, images) in enumerate(zip(rows.structures, made, strict=True)):
            leaves = {leaf: unwrapped(value) for leaf, value in zip(others(rows, row), rows.values[row], strict=True)}
            leaves.update(images)
            samples.append(unflatten(structure, [leaves[leaf] for leaf in range(len(leaves))]))
        collate_fn = self._options.collate_fn
        given = samples[0] if self._options.single else samples
        if collate_fn is None:
            with torch.device("cpu"):
                return default_convert(given)
        try:
            value = collate_fn(given)
        except Exception as error:
            raise _collate_error(rows, one_line(f"{type(error).__name__}: {error}"), "") from error
        return value if pairing is None else soften(value, pairing, rows.name)

    def _on_device(self, value: Any) -> Any:
        """What a `collate_fn` made, its tensors on the device; objects of other classes than containers stay, pinned by
        their own ``pin_memory()`` where that was asked for."""
        return tree_map(self._moved, value)

    def _moved(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._placed(leaf)
        own: Any = getattr(leaf, "pin_memory", None)
        if callable(own):
            return own() if self._options.pin_memory and torch.cuda.is_available() else leaf
        if isinstance(leaf, Mapping):  # of a class of the user's own
            return mapping_like(type(leaf), {key: tree_map(self._moved, item) for key, item in leaf.items()})
        return leaf

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if self._options.pin_memory and not self._transfer.asynchronous and torch.cuda.is_available():
            return tensor.pin_memory()
        return self._transfer.place(tensor)

    def _info(self, batch: Batch, rows: Harvest) -> BatchInfo:
        plain = all(isinstance(index, int | np.integer) for index in rows.indices)
        place = self._placed
        return BatchInfo(
            batch.spec.epoch,
            batch.spec.step,
            place(torch.from_numpy(rows.positions.copy())),
            place(torch.from_numpy(np.array(rows.indices, np.int64))) if plain else list(rows.indices),
            place(torch.from_numpy(rows.valid)),
        )


def _ragged(rows: Harvest, which: np.ndarray, table: ImageColumn, pixels: torch.Tensor) -> RaggedImages:
    return RaggedImages(
        pixels=pixels,
        offsets=table.offsets,
        shapes=table.shapes,
        sizes_hw=table.sizes_hw,
        regions_tlhw=table.regions_tlhw,
        labels=_Names(rows, which),
    )


def _images_alone(chain: Chain) -> str:
    return (
        f"the module {chain.module_name} at the end of the transforms gets the images alone; the masks, boxes and "
        "keypoints beside them stay where they are. Where it moves pixels, use transforms of gpuload in its place, "
        "which move both"
    )


def _collate_error(rows: Harvest, what: str, traceback: str) -> CollateError:
    return CollateError(
        f"collate_fn raised {what}, for a batch of {len(rows)} samples from {rows.name(0)} on"
        + (f"\n\nWhere it happened:\n{traceback.rstrip()}" if traceback else "")
    )


def _tensors(value: Any, depth: int) -> list[torch.Tensor]:
    """All tensors in a batch, those in the attributes of a user's own objects too."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping | list | tuple | set):  # of a class of the user's own
            inner = list(leaf.values()) if isinstance(leaf, Mapping) else list(leaf)
            found += _tensors(inner, depth - 1) if depth else []
        elif depth and not isinstance(leaf, int | float | str | bytes | type) and leaf is not None:
            inner: Any = getattr(leaf, "__dict__", None)
            if isinstance(inner, Mapping):
                found += _tensors(list(inner.values()), depth - 1)
            elif slots := getattr(type(leaf), "__slots__", None):
                names = (slots,) if isinstance(slots, str) else slots
                found += _tensors([getattr(leaf, name, None) for name in names], depth - 1)
    return found


class _Names(Sequence[str]):
    """How to name each image of a batch in an error, made up when one is asked for."""

    def __init__(self, rows: Harvest, which: np.ndarray) -> None:
        self._rows = rows
        self._which = which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, row: Any) -> Any:
        return self._rows.name(int(self._which[row]))
