"""`Augment`: the transforms of a `Loader` as a module, for batches of any loader.

It runs in the caller's process on the caller's current stream, starts no process, thread or stream, and never waits for
the device (CopyPaste, which has to see which instances are left, apart): what is on a device is told by its type and
shape alone. A compiled stage is kept for each device that batches were on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_map

from gpuload.batches.assemble import draw_programs, module_seed
from gpuload.batches.collate import BatchOptions, Finished, stacked_masks
from gpuload.batches.gathering import target_stage
from gpuload.batches.leaves import BatchTree, Leaf, Sample
from gpuload.batches.mixing import Pairing, partners_of, soften
from gpuload.batches.targets import TargetStage, left_behind
from gpuload.datasets.sample import Boxes, Encoded, Keypoints, Mask
from gpuload.datasets.strays import find_strays
from gpuload.order.options import check_integer
from gpuload.order.ranks import find_rank
from gpuload.ring.columns import Columns, ImageColumn, ValueColumn, one_for_all
from gpuload.stage import Plan, RaggedImages, Stage, check_stage, compile_stage
from gpuload.stage import device as devices
from gpuload.stage.masks import ragged_masks
from gpuload.stage.plan import StageOptions
from gpuload.transforms import Chain, Compose, Program
from gpuload.transforms.base import DrawError
from gpuload.workers.box_fields import check_transforms, find_fields

__all__ = ["Augment"]

MOST: Final = 2**63 - 1


class Augment(torch.nn.Module):
    """Augment and normalize batches of any loader, with draws of its own for each sample.

    Call it with a batch: a tensor N×C×H×W or N×T×C×H×W (clips, with one draw for all frames of each), a list of N
    tensors C×H×W, or tuples and dicts of these, whose images share a sample's draws. Images are uint8, uint16, or
    floats of 0 … 1, on the CPU or on a GPU, in any memory format. It is a module without parameters; ``eval()`` changes
    nothing.

    Masks, boxes and keypoints move with the images if they are declared: as torchvision's TVTensors, as `Mask` N×H×W,
    or as a list with a `Mask`, `Boxes` or `Keypoints` for each image; also in a list with one dict for each image.
    Masks may be on the device, boxes and keypoints are given on the CPU; all come back as tensors, where the images
    are. `MixUp` and `CutMix` make the labels soft. All else passes through as it is.

    What is drawn is a function of (seed, epoch, position) and equal to what a `Loader` draws. Positions count on from
    batch to batch, over all ranks of ``torch.distributed``; epoch and position are in ``state_dict()``.

    Args:
        transforms, dtype, memory_format, ragged, pad_to, backend: as for `Loader`.
        seed: 0 ≤ seed < 2**64.
        device: where images are augmented and come back: batches on the CPU are copied there, asynchronously from
            page-locked memory. Default: where each batch is.

    Raises:
        TypeError, ValueError: an argument is wrong; or when called, a batch; the message says what was expected.
        BackendError: the backend that was asked for cannot be used here.

    Example:
        >>> from gpuload import transforms as T
        >>> augment = Augment([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToDtype("float32", scale=True)])
        >>> augment(torch.zeros(8, 3, 48, 64, dtype=torch.uint8)).shape
        torch.Size([8, 3, 32, 32])
        >>> images, labels = augment(torch.rand(8, 3, 48, 64), torch.arange(8))
        >>> images.dtype, labels.shape
        (torch.float32, torch.Size([8]))
    """

    def __init__(
        self,
        transforms: Sequence[Any] | Compose,
        *,
        seed: int = 0,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        memory_format: str | torch.memory_format = "contiguous_format",
        ragged: Literal["error", "list", "pad"] = "error",
        pad_to: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        transforms = list(transforms) if isinstance(transforms, list | tuple) else transforms
        self._arguments = transforms, seed, device, dtype, memory_format, ragged, pad_to, backend
        self._set_up()
        self._epoch = self._position = 0
        self._loaded = False  # whether the place is one of a state, which the next `set_epoch` keeps
        self._warned = False  # whether the first batch was searched for what the user should know

    def _set_up(self) -> None:
        """Make what follows from the arguments, and is neither copied nor pickled with the module."""
        transforms, seed, device, dtype, memory_format, ragged, pad_to, backend = self._arguments
        self._stage_options = stage = StageOptions(
            transforms=transforms, device=device, dtype=dtype, memory_format=memory_format, backend=backend
        )
        self._chain: Chain = stage.transforms
        self._options = BatchOptions(
            collate_fn=None,
            ragged=ragged,
            pad_to=pad_to,
            pin_memory=False,
            chain=self._chain,
            seed=check_integer("seed", seed, 0, 2**64 - 1),
            single=False,
            planned=True,
        )
        check_stage(self._chain, stage.device, backend, stage.dtype, stage.memory_format, ragged, pad_to)
        if self._chain.frames:
            raise ValueError(
                "UniformTemporalSubsample chooses frames before they are decoded, in a Loader's workers, and Augment "
                "gets decoded clips; leave it out, and index the clips before, as in clips[:, ::2]"
            )
        self._stages: dict[torch.device, Stage] = {}
        self._targets: dict[torch.device, TargetStage] = {}

    def __getstate__(self) -> dict[str, Any]:
        made = ("_stage_options", "_chain", "_options", "_stages", "_targets")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_up()

    def extra_repr(self) -> str:
        return f"{list(self._chain.transforms)!r}, seed={self._options.seed}"

    @property
    def epoch(self) -> int:
        """The number of the epoch that positions are counted in."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: positions count from 0 again. A place in that epoch that ``load_state_dict()`` went to is
        kept, so a training loop may call this before each epoch, even the first one after resuming.

        Raises:
            TypeError, ValueError: `epoch` is no integer of at least 0.
        """
        epoch = check_integer("epoch", epoch, 0, MOST)
        if not (self._loaded and epoch == self._epoch):
            self._position = 0
        self._epoch, self._loaded = epoch, False

    def get_extra_state(self) -> torch.Tensor:
        """Return the epoch and the next position, int64 (2,): what ``state_dict()`` keeps."""
        return torch.tensor([self._epoch, self._position], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Go on from a state."""
        self._epoch, self._position = state.tolist()
        self._loaded = True

    def plan(self) -> Plan:
        """Which backend runs which transform on the `device`, or else where the last batch was:
        ``print(augment.plan())``.

        Raises:
            BackendError: the backend that was asked for cannot be used here.
        """
        latest = next(reversed(self._stages), None)
        stage = self._stage_on(_indexed(self._stage_options.device or latest or torch.device(devices.usual_type())))
        how = "read where they are" if stage.reads_planes else "copied once, to N×H×W×C, unless they are channels_last"
        return replace(stage.plan, images=how)

    @torch.compiler.disable  # what is drawn depends on more than the arguments
    def forward(self, *batch: Any, positions: Any = None, epoch: int | None = None) -> Any:
        """Augment a batch.

        Args:
            batch: images, alone or in a tree; several arguments are a tuple, and come back as one, such as
                ``images, targets = augment(images, targets)``.
            positions: int64 (N,), on the CPU: of the samples in their epoch's order. Default: on from the last batch.
            epoch: of these positions. Default: that of `set_epoch`.

        Returns:
            The batch, with images N×C×H×W, or as `ragged` says; a list of them for a `MultiView`.

        Raises:
            TypeError, ValueError: there are no images, or of another type, range, layout or device than expected, or
                they require gradients; targets do not fit them; positions are not N integers.
            CollateError: labels are missing, or cannot be mixed; samples cannot be put together.
        """
        tree = BatchTree(batch[0] if len(batch) == 1 else batch)
        device = self._device_of(tree)
        for leaf in tree.images:
            _check_values(leaf)
        if (mixing := self._chain.mixing) is not None and tree.count % 2:
            raise ValueError(
                f"{type(mixing).__name__} mixes pairs of images, but there are {tree.count} in this batch; give an even "
                "number, as with drop_last=True"
            )
        rank, world_size = find_rank()
        numbers = self._positions(tree.count, rank, positions)
        epoch = self._epoch if epoch is None else check_integer("epoch", epoch, 0, MOST)
        with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
            result = self._augmented(tree, epoch, numbers, self._stage_on(device))
        if positions is None:
            self._position += world_size * tree.count
        return result

    def _device_of(self, tree: BatchTree) -> torch.device:
        """Return where a batch is augmented, with its index."""
        wanted, first = self._stage_options.device, None
        for leaf in tree.leaves:
            for tensor in leaf.value if isinstance(leaf.value, list) else (leaf.value,):
                tensor = tensor.array if isinstance(tensor, Mask) else tensor
                if leaf.kind not in ("images", "mask") or not isinstance(tensor, torch.Tensor):
                    continue
                first = first or tensor.device
                same = tensor.device.type == "cpu" or tensor.device == (first if wanted is None else _indexed(wanted))
                if not same or (leaf.kind == "images" and tensor.device != first):
                    where = f"the first images are on {first}" if wanted is None else f"this Augment works on {wanted}"
                    raise ValueError(
                        f"{leaf.place} is on {tensor.device}, but {where}; bring all images to one device, and give "
                        "Augment(device=…) that one or none"
                    )
        assert first is not None
        return first if wanted is None else _indexed(wanted)

    def _positions(self, count: int, rank: int, positions: Any) -> np.ndarray:
        if positions is None:
            start = self._position + rank * count
            return np.arange(start, start + count, dtype=np.int64)
        if isinstance(positions, torch.Tensor) and not positions.is_cpu:
            raise ValueError(f"positions are on {positions.device}; give them on the CPU, so that nothing waits for it")
        numbers = np.asarray(positions)
        if numbers.shape != (count,) or numbers.dtype.kind not in "iu" or (numbers < 0).any():
            raise ValueError(
                f"positions must be {count} integers of at least 0, one for each image, got {numbers.dtype} of shape "
                f"{numbers.shape}"
            )
        return numbers.astype(np.int64)

    def _stage_on(self, device: torch.device) -> Stage:
        stage = self._stages.pop(device, None)
        if stage is None:
            options = self._stage_options
            stage = compile_stage(
                self._chain,
                device=device,
                backend=options.backend,
                dtype=options.dtype,
                memory_format=options.memory_format,
                ragged=self._options.ragged,
                pad_to=self._options.pad_to,
            )
            stage.prepare()
        self._stages[device] = stage  # behind the others, see `plan`
        return stage

    # -- one batch -----------------------------------------------------------------------------------------------------

    def _augmented(self, tree: BatchTree, epoch: int, positions: np.ndarray, stage: Stage) -> Any:
        count, chain = tree.count, self._chain
        images = [_Images(leaf, stage.device, several=len(tree.images) > 1) for leaf in tree.images]
        columns = Columns(range(count), positions=positions, indices=np.arange(count), sources=[None] * count)
        columns.images = [ImageColumn(one.planes.table[:: one.frames], [-1]) for one in images]
        finished = Finished(chain.views, [{} for _ in range(count)], np.arange(count))
        samples, masks = self._add_targets(tree, columns, stage.device) if tree.has_targets else ([], {})
        self._warn(tree, columns)
        try:
            finished.programs = draw_programs(chain.at(epoch), self._options.seed, epoch, columns, whole=True)
        except DrawError as error:
            raise ValueError(f"image {error.row} of the batch: {error.message}") from None
        if chain.mixing is not None:
            finished.pairing = Pairing(chain.mixing, partners_of(finished.numbers, positions))
        if columns.has_targets:
            if stage.device not in self._targets:
                self._targets[stage.device] = target_stage(chain, stage.device)
            self._targets[stage.device](columns, finished, lambda column: masks[id(column)])
        seeds = [module_seed(self._options.seed, epoch, columns, view) for view in range(len(chain.lines))]
        for one, column, programs in zip(images, columns.images, finished.programs, strict=True):
            if finished.pairing is not None:
                finished.pairing.take(programs[0], columns, column)
            views = [
                self._view(stage, one, program, view, finished.pairing, seeds[view])
                for view, program in enumerate(programs)
            ]
            finished.images.append(views)
        results = {leaf: finished.of_views(views) for leaf, views in zip(tree.images, finished.images, strict=True)}
        values = [results[leaf] if leaf in results else leaf.value for leaf in tree.leaves]
        if samples:
            self._put_targets(tree, samples, columns, finished, values, stage.device)
        result = tree.rebuilt(values)
        return result if finished.pairing is None else soften(result, finished.pairing, columns.name)

    def _view(
        self, stage: Stage, images: _Images, program: Program, view: int, pairing: Pairing | None, seed: int
    ) -> Any:
        """Return the images of a leaf for one view: N×C×H×W, N×T×C×H×W, or as `ragged` says."""
        frames, partners = images.frames, None if pairing is None else pairing.partners
        if frames > 1:
            each = np.tile(np.arange(frames), len(program))
            program = program.take(np.repeat(np.arange(len(program)), frames))
            partners = None if partners is None else np.repeat(partners, frames) * frames + each
        result: Any = stage(images.planes, program, view=view, partners=partners)
        if self._chain.module is not None and not images.is_clip:
            return stage.call_last(result, seed)
        if not images.is_clip:
            return result
        if isinstance(result, list):
            return [torch.stack(result[at : at + frames]) for at in range(0, len(result), frames)]
        if isinstance(result, tuple):
            return result[0].unflatten(0, (-1, frames)), result[1][::frames]
        clips = result.unflatten(0, (-1, frames))
        if self._chain.module is None:
            return clips
        return torch.stack([stage.call_last(frame, seed) for frame in clips.unbind(1)], 1)  # as in a Loader

    def _add_targets(
        self, tree: BatchTree, columns: Columns, device: torch.device
    ) -> tuple[list[Sample], dict[int, RaggedImages]]:
        """Add the targets of a batch to its columns; returns the batch as samples, and the pixels of each column of
        masks, by the column's id.

        Raises:
            ValueError: the transforms do not go with targets, or targets do not fit their images.
        """
        if (why := check_transforms(self._chain)) is not None:
            raise ValueError(why)
        sizes = columns.images[0].table["size_hw"]
        for leaf, images in zip(tree.images, columns.images, strict=True):
            if not np.array_equal(images.table["size_hw"], sizes):
                raise ValueError(
                    "masks, boxes and keypoints belong to all images of their sample, which must be of one size, but "
                    f"those of {leaf.place} differ from those of {tree.images[0].place}"
                )
        samples = [tree.sample(row) for row in range(tree.count)]
        columns.structures = one_for_all([sample.structure for sample in samples])
        masks: list[dict[int, Any]] = [{} for _ in samples]
        points: dict[int, dict[int, Any]] = {}
        values: dict[int, dict[int, Any]] = {}
        fields = []
        for row, sample in enumerate(samples):
            targets: dict[int, Any] = {}
            for at, number in enumerate(sample.numbers):
                leaf, value = tree.leaves[number], sample.leaves[at]
                if leaf.kind == "mask":
                    targets[at] = sample.leaves[at] = _mask(value, leaf, row, sizes[row].tolist())
                    masks[row][at] = targets[at].array
                elif leaf.kind == "points":
                    targets[at] = points.setdefault(at, {})[row] = value
                elif leaf.kind == "value":
                    values.setdefault(at, {})[row] = value
            fields.append(find_fields(sample.tree, sample.leaves, targets, self._chain))
        columns.points = {at: _column(rows, tree.count) for at, rows in sorted(points.items())}
        columns.values = {at: _column(rows, tree.count) for at, rows in values.items()}
        columns.fields = one_for_all(fields) if any(fields) else []
        pixels: dict[int, RaggedImages] = {}
        for number in range(max(map(len, masks), default=0)):
            rows = [row for row, own in enumerate(masks) if len(own) > number]
            at = [list(masks[row])[number] for row in rows]
            sources = [tree.leaves[samples[row].numbers[own]] for row, own in zip(rows, at, strict=True)]
            dense = _tensor(sources[0].value)
            if dense is None or any(leaf is not sources[0] for leaf in sources) or sources[0].row is not None:
                dense = [_placed(_tensor(masks[row][own]), device) for row, own in zip(rows, at, strict=True)]
            else:
                dense = _placed(dense, device)
            ragged, kinds = ragged_masks(dense)
            every = None if len(rows) == tree.count else np.array(rows)
            columns.masks.append(column := ImageColumn(ragged.table, one_for_all(at), every, one_for_all(kinds)))
            pixels[id(column)] = ragged
        return samples, pixels

    def _put_targets(
        self,
        tree: BatchTree,
        samples: Sequence[Sample],
        columns: Columns,
        finished: Finished,
        values: list[Any],
        device: torch.device,
    ) -> None:
        """Put what became of targets, and of what belongs to boxes, into the leaves of the batch."""
        places: dict[int, list[tuple[int, int]]] = {}  # of each leaf the rows, and its number in each
        changed = set()
        for row, sample in enumerate(samples):
            for at, number in enumerate(sample.numbers):
                places.setdefault(number, []).append((row, at))
                if at in finished.cells[row] or at in finished.whole:
                    changed.add(number)
        to_device = partial(_placed, device=device, lock=True)
        for number in changed:
            entries = places[number]
            leaf, (_, at) = tree.leaves[number], entries[0]
            if leaf.row is not None:
                row = leaf.row
                values[number] = tree_map(to_device, finished.cells[row][at])
                continue
            if leaf.kind == "mask" and self._options.ragged == "error" and at in finished.whole:
                values[number] = finished.whole[at]
                continue
            cells = [finished.cells[row].get(own, samples[row].leaves[own]) for row, own in entries]
            views = [cells] if finished.views is None else [list(view) for view in zip(*cells, strict=True)]
            if leaf.kind == "mask":
                names = [partial(columns.name, row, own) for row, own in entries]
                ragged, pad_to = self._options.ragged, self._options.pad_to
                views = [stacked_masks(view, names, ragged, pad_to) for view in views]
            elif isinstance(leaf.value, Keypoints) or isinstance(leaf.value, torch.Tensor) and leaf.kind == "points":
                views = [torch.stack(view) if len({one.shape for one in view}) == 1 else view for view in views]
            values[number] = tree_map(to_device, finished.of_views(views))

    def _warn(self, tree: BatchTree, columns: Columns) -> None:
        """Warn, with the first batch, of what looks as if it belonged to an image but does not move with it."""
        if self._warned:
            return
        self._warned = True
        sample = tree.sample(0)
        kinds = [tree.leaves[number].kind for number in sample.numbers]
        size = tuple(columns.images[0].table["size_hw"][0].tolist())
        images = {at: size for at, kind in enumerate(kinds) if kind == "images"}
        targets = {at: None for at, kind in enumerate(kinds) if kind in ("mask", "points")}
        moves = self._chain.moves_pixels
        text = find_strays(sample.structure, sample.leaves, images, {}, targets, moves=moves)
        for remark in (text, left_behind(self._chain, columns) if columns.has_targets else ""):
            if remark:
                warnings.warn(remark, RuntimeWarning, stacklevel=7)


class _Images:
    """A leaf of images on the stage's device: `planes`, and how many `frames` each clip has."""

    def __init__(self, leaf: Leaf, device: torch.device, *, several: bool) -> None:
        value = leaf.value
        self.is_clip = not isinstance(value, list) and value.dim() == 5
        self.frames = value.shape[1] if self.is_clip else 1
        tensors = [_plain(_placed(tensor, device)) for tensor in (value if isinstance(value, list) else [value])]
        planes = tensors if isinstance(value, list) else tensors[0].flatten(0, 1) if self.is_clip else tensors[0]
        where = f" of {leaf.place}" if several else ""
        frames = [""] if not self.is_clip else [f", frame {frame}" for frame in range(self.frames)]
        labels = [f"image {row}{where}{frame}" for row in range(len(value)) for frame in frames]
        self.planes = RaggedImages.of_planes(planes, labels)


def _tensors(leaf: Leaf) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the tensors of a leaf of images, each with its place."""
    if not isinstance(leaf.value, list):
        yield leaf.place, leaf.value
        return
    for number, tensor in enumerate(leaf.value):
        yield f"{leaf.place}[{number}]", tensor


def _check_values(leaf: Leaf) -> None:
    """Refuse images that require gradients, lists of several kinds, and on the CPU floats beyond 0 … 1."""
    first: torch.Tensor | None = None
    for place, tensor in _tensors(leaf):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{place} requires gradients, but augmentation is not differentiable; pass {place}.detach(), or call "
                "it within torch.no_grad()"
            )
        first = tensor if first is None else first
        if (tensor.dtype, len(tensor)) != (first.dtype, len(first)) and isinstance(leaf.value, list):
            raise ValueError(
                f"the images of a batch must be of one dtype and have the same number of channels, but {leaf.place}[0] "
                f"is {_shown(first)} and {place} {_shown(tensor)} (C×H×W); convert them before"
            )
        if tensor.is_floating_point() and tensor.is_cpu:
            low, high = (float(end) for end in tensor.detach().aminmax())
            if not (low >= 0 and high <= 1):
                raise ValueError(
                    f"{place} holds floats from {low:g} to {high:g}, but images of floats are 0 … 1; pass levels 0 … "
                    "255 as uint8, and normalize by T.Normalize among the transforms, not before"
                )


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _plain(images: torch.Tensor) -> torch.Tensor:
    """Return images in a dtype that stages take, as tensors of no subclass."""
    images = images.detach().as_subclass(torch.Tensor)
    return images.to(torch.float32) if images.is_floating_point() else images


def _indexed(device: torch.device) -> torch.device:
    return device if device.type == "cpu" or device.index is not None else devices.current_device()


def _placed(value: Any, device: torch.device, *, lock: bool = False) -> Any:
    """Return a tensor on the device, copied asynchronously if it is page-locked, or `lock` makes it so; anything else
    as it is."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    value = value.pin_memory() if lock and value.is_cpu else value
    return value.to(device, non_blocking=value.is_pinned())


def _tensor(mask: Any) -> torch.Tensor | None:
    """Return a mask, or masks of a batch, as a tensor; None for a list."""
    mask = mask.array if isinstance(mask, Mask) else mask
    if isinstance(mask, np.ndarray):
        return torch.from_numpy(mask if mask.flags.writeable else mask.copy())
    return mask.as_subclass(torch.Tensor) if isinstance(mask, torch.Tensor) else None


def _mask(value: Any, leaf: Leaf, row: int, size_hw: Sequence[int]) -> Mask:
    """Return the mask of an image, which it has to fit."""
    mask = value if isinstance(value, Mask) else Mask(value)
    if isinstance(mask.array, Encoded):
        raise TypeError(f"{leaf.place} holds a file, but Augment takes decoded masks; gpuload.Loader decodes files")
    if list(mask.array.shape[-2:]) != list(size_hw):
        got, wanted = ("×".join(map(str, size)) for size in (mask.array.shape[-2:], size_hw))
        raise ValueError(
            f"a mask must have the size of its image, but image {row} has {wanted} and its mask in {leaf.place} {got} "
            "(height × width); give each image its own mask, not resized before it"
        )
    return mask


def _column(rows: dict[int, Any], count: int) -> ValueColumn:
    return ValueColumn(list(rows.values()), None if len(rows) == count else np.array(list(rows)))
