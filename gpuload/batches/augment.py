"""`Augment`: the transforms of a `Loader` as a module, for batches of any loader.

It runs in the caller's process on the caller's current stream, and starts no process, thread or stream. It never waits
for the device, since it inspects only the types and shapes of tensors on a device; the exception is CopyPaste, which
has to find out which instances remain visible. A compiled stage is kept for each device that has run batches.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_map

from gpuload.batches.collate import FinishedColumns, move_merged, stack_masks
from gpuload.batches.leaves import BatchTree, Leaf
from gpuload.batches.mixing import soften
from gpuload.batches.padded_targets import check_padded
from gpuload.batches.targets import target_warning
from gpuload.batches.transform import BatchTransform
from gpuload.checks import integer, mapping, string, strings
from gpuload.datasets.sample import Boxes, Keypoints, explain_float_range, with_values
from gpuload.decode import Decode
from gpuload.order.ranks import find_rank
from gpuload.order.spec import BatchSpec
from gpuload.ring.columns import Columns, ImageColumn
from gpuload.rng.streams import DRAWS
from gpuload.stage import Plan, RaggedImages, check_stage, compile_stage
from gpuload.stage import device as devices
from gpuload.stage.masks import pack_masks
from gpuload.stage.plan import check_device
from gpuload.stage.stage import BACKENDS, explain_backend_change
from gpuload.transforms import Chain, Compose
from gpuload.transforms.base import DrawError
from gpuload.transforms.chain import find_varying, variants_of
from gpuload.transforms.convert import Window, entry_conversion
from gpuload.transforms.varying import BucketSize, ByBatch
from gpuload.workers.box_fields import box_droppers, leaf_transforms
from gpuload.workers.job import Job
from gpuload.workers.sample import SampleReader, make_columns

__all__ = ["Augment"]

MAX_EPOCH: Final = 2**63 - 1
UNKNOWN: Final = -1  # the number of the backend in a state from before the first batch


class Augment(torch.nn.Module):
    """A module that augments and normalizes batches of any loader, with separate random parameters for each sample.

    Call it with a batch: an N×C×H×W or N×T×C×H×W tensor (clips, whose frames share random parameters), a list of N
    C×H×W tensors, or tuples and dicts of these; the images of a sample share random parameters, except with `draws`.
    Images are uint8, uint16, or floats from 0 to 1, on the CPU or on a GPU, in any memory format. The module has no
    parameters; ``eval()`` has no effect.

    Masks, boxes and keypoints are transformed like the images if their type declares them: torchvision's TVTensors, an
    N×H×W or N×M×H×W `Mask`, N×M×4 `Boxes`, N×M×…×2 `Keypoints`, or a list with a `Mask`, `Boxes` or `Keypoints` per
    image, also within a list of one dict per image. All can be on the device, except for boxes and keypoints in a list.
    All targets are returned on the device of the images, as tensors, except that N×M×4 `Boxes`, and `Keypoints` with
    `valid`, remain of their type: boxes and keypoints that a transform drops become invalid there. `MixUp` and `CutMix`
    make the labels soft. Everything else passes through unchanged.

    Random parameters depend only on (seed, epoch, position), as in a `Loader`. Positions continue from batch to batch,
    across all ranks of ``torch.distributed``; ``state_dict()`` contains the epoch, the position and the backend. For
    `by_batch`, batches are counted in the same way.

    Args:
        transforms, dtype, memory_format, ragged, pad_to, backend: as for `Loader`.
        seed: 0 ≤ seed < 2**64.
        images: the names of the images in the batch: dict keys, fields of dataclasses, or paths as in messages, such as
            ``"batch[0]"``. Everything else that is not a target passes through unchanged. Default: all tensors that can
            be images; a warning names a leaf of floats that probably is none, such as a heat map beside images.
        draws: a dict of such names of images and targets, with the number of their random parameters: those of a sample
            with the same number share random parameters, and others are independent. By default, the number is 0.
        device: the device that augments and returns images. Batches on the CPU are copied to it, asynchronously if they
            are in page-locked memory. Default: the device of each batch.

    Raises:
        TypeError, ValueError: an argument is invalid, or the module is called with an invalid batch; the message says
            what was expected.
        BackendError: the requested backend cannot be used here.

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
        images: Sequence[str] | None = None,
        draws: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        options = {
            "dtype": dtype,
            "memory_format": memory_format,
            "ragged": ragged,
            "pad_to": pad_to,
            "backend": backend,
        }
        self._images = None if images is None else frozenset(strings("images", images))
        self._draws = {
            string("draws, in its names,", name): integer(f"draws[{name!r}]", number, minimum=0, maximum=len(DRAWS) - 1)
            for name, number in mapping("draws", {} if draws is None else draws).items()
        }
        self._arguments = transforms, integer("seed", seed, minimum=0, maximum=2**64 - 1), device, options
        self._set_up()
        self._epoch = self._position = self._step = 0
        self._saved_backend: str | None = None  # the backend of a loaded state, until the first batch
        self._loaded = False  # whether epoch and position come from a state, so that the next `set_epoch` keeps them
        self._warned_of_images = False  # whether a leaf was reported that is probably not an image
        self._warned = False  # whether the transforms were checked for targets that they do not move

    def _set_up(self) -> None:
        """Create the attributes that are derived from the arguments, and are neither copied nor pickled."""
        transforms, self._seed, device, self._options = self._arguments
        self._chain = chain = Chain(transforms)
        if argument := find_varying(chain, BucketSize):
            raise ValueError(
                f"{argument} is bucket_size, but batches that are passed to Augment have no such size; pass a fixed "
                "size or T.by_batch, or use a Loader with shuffle=gpuload.Buckets(…)"
            )
        self._device = None if device is None else check_device(device)
        check_stage(chain, self._device, **self._options)
        if chain.frames:
            raise ValueError(
                "UniformTemporalSubsample chooses frames before they are decoded, in a Loader's workers, but Augment "
                "gets decoded clips; remove it, and index the clips first, as in clips[:, ::2]"
            )
        searches = chain.moves_pixels and self._images is None  # for targets that are not declared
        conversion = entry_conversion(chain)
        self._has_window = isinstance(conversion, Window)
        self._convert: Any = _widen_floats if conversion is None else conversion.levels
        self._needs_boxes = chain.reads_boxes or bool(box_droppers(chain))
        self._drops_points = any(transform.drops_points for transform in leaf_transforms(chain))
        self._reader = SampleReader(Job(None, chain, Decode(), self._seed, moves_pixels=searches))
        self._compiled: dict[torch.device, BatchTransform] = {}
        self._lock = threading.RLock()  # stages reuse memory across calls, so calls from several threads take turns

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_chain", "_reader", "_compiled", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_up()

    def extra_repr(self) -> str:
        return f"{list(self._chain.transforms)!r}, seed={self._seed}"

    @property
    def epoch(self) -> int:
        """The number of the current epoch."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at position 0. A position in this epoch that ``load_state_dict()`` has loaded is kept, so a
        training loop can call this before each epoch, even before the first one after resuming.

        Raises:
            TypeError, ValueError: `epoch` is not an integer of at least 0, or an argument from `by_epoch` is invalid in
                this epoch.
        """
        epoch = integer("epoch", epoch, minimum=0, maximum=MAX_EPOCH)
        variants_of(self._chain, epoch)  # an invalid value raises an error here, not in the training step
        if not (self._loaded and epoch == self._epoch):
            self._position = self._step = 0
        self._epoch, self._loaded = epoch, False

    def get_extra_state(self) -> torch.Tensor:
        """Return the epoch, the next position and a number for the backend, int64 (3,), for ``state_dict()``. If the
        transforms use `by_batch`, the number of the epoch's next batch follows."""
        names = [*(compiled.stage.plan.backend for compiled in self._compiled.values()), self._saved_backend]
        last_name = next(filter(None, reversed(names)), None)
        backend = UNKNOWN if last_name is None else list(BACKENDS).index(last_name)
        steps = [self._step] if find_varying(self._chain, ByBatch) else []
        return torch.tensor([self._epoch, self._position, backend, *steps], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Resume from a state. The first batch warns if another backend augments it."""
        if getattr(state, "shape", None) not in ((2,), (3,), (4,)):  # 2 in earlier versions
            raise ValueError(
                "the state of an Augment must be a tensor of shape (3,), the epoch, the next position and the backend, "
                f"got {state!r}"
            )
        self._epoch, self._position, *backends = state.tolist()
        self._step, self._loaded = backends.pop() if len(backends) > 1 else 0, True
        self._saved_backend = next((name for index, name in enumerate(BACKENDS) if index in backends), None)

    def plan(self) -> Plan:
        """Return which backend runs each transform on `device`, or else on the device of the last batch:
        ``print(augment.plan())``.

        Raises:
            BackendError: the requested backend cannot be used here.
        """
        device = self._device or next(reversed(self._compiled), torch.device(devices.default_device_type()))
        stage = self._compile_on(_add_index(device)).stage
        access = "read in place, if uint8" if stage.reads_planes else "copied once, to N×H×W×C, unless channels_last"
        return replace(stage.plan, images=access)

    @torch.compiler.disable  # random parameters depend on the module's state, not only on the arguments
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *batch: object, positions: object = None, epoch: int | None = None, step: int | None = None
    ) -> Any:
        """Augment a batch.

        Args:
            batch: images, or a tree that contains images. Several arguments form a tuple, and a tuple is returned, as
                in ``images, targets = augment(images, targets)``.
            positions: int64 (N,) on the CPU, the samples' positions in their epoch's order. Default: positions continue
                from the last batch.
            epoch: the epoch of these positions. Default: the epoch of `set_epoch`.
            step: the number of this batch in the epoch, on which `by_batch` depends; required with `positions` if the
                transforms use `by_batch`. Default: batches without `positions` are counted.

        Returns:
            The batch, with N×C×H×W images, or as defined by `ragged`; for a `MultiView`, with a list of one result per
            view.

        Raises:
            TypeError, ValueError: the batch has no images, or the images have an unexpected type, range, layout or
                device, or require gradients; targets do not match the images; positions are not N integers.
            CollateError: labels are missing, or cannot be mixed; samples cannot be combined.
            RuntimeError: called in a worker of a DataLoader without `positions`.
        """
        tree = BatchTree(batch[0] if len(batch) == 1 else batch, self._images, self._draws)
        device = self._device_of(tree)
        for leaf in tree.images:
            _check_images(leaf, self._has_window)
        name, size = self._chain.group
        if tree.count % size:
            raise ValueError(
                f"{name} needs images in groups of {size}, but this batch has {tree.count}; pass a multiple of {size}, "
                "for example with drop_last=True"
            )
        if positions is None and torch.utils.data.get_worker_info() is not None:
            raise RuntimeError(
                "Augment counts positions in its own process, so it would draw the same values in each worker of a "
                "DataLoader; call it on the batches in the training loop, or pass positions=…"
            )
        epoch = self._epoch if epoch is None else integer("epoch", epoch, minimum=0, maximum=MAX_EPOCH)
        argument = find_varying(self._chain, ByBatch)
        if argument and positions is not None and step is None:
            raise ValueError(
                f"{argument} depends on the batch, whose number in the epoch cannot be derived from positions=…; also "
                "pass step=…, such as BatchInfo.step"
            )
        rank, world_size = find_rank()
        with self._lock, torch.accelerator.device_index(None if device.type == "cpu" else device.index):
            start = self._position + rank * tree.count
            batch_positions = _check_positions(positions, tree.count, range(start, start + tree.count))
            compiled = self._compile_on(device)
            saved_backend, self._saved_backend = self._saved_backend, None
            backend = compiled.stage.plan.backend
            if saved_backend not in (None, backend):
                warnings.warn(explain_backend_change(saved_backend, backend), RuntimeWarning, stacklevel=5)
            step = self._step if step is None else integer("step", step, minimum=0, maximum=MAX_EPOCH)
            result = self._augment_tree(tree, BatchSpec(step, epoch, batch_positions, np.arange(tree.count)), compiled)
            if positions is None:
                self._position, self._step = self._position + world_size * tree.count, step + 1
        return result

    def _device_of(self, tree: BatchTree) -> torch.device:
        """Return the device that augments a batch; a GPU with its index."""
        requested, first_images = self._device, tree.images[0]
        device = first_images.entries[0][1].device if requested is None else _add_index(requested)
        for leaf in tree.leaves:
            if leaf.kind == "value" or (leaf.kind == "points" and not leaf.is_padded):
                continue  # boxes and keypoints of single images are refused later, on any GPU
            other_device = torch.device("cpu") if requested is not None or leaf.kind != "images" else device
            for path, pixels in leaf.entries:
                if isinstance(pixels, torch.Tensor) and pixels.device not in (device, other_device):
                    subject = f"{first_images.path} is" if requested is None else "Augment works"
                    raise ValueError(
                        f"{path} is on {pixels.device}, but {subject} on {device}; move images and targets to one "
                        "device, and pass this device as Augment(device=…), or leave the argument out"
                    )
        return device

    def _compile_on(self, device: torch.device) -> BatchTransform:
        compiled = self._compiled.pop(device, None)
        if compiled is None:
            stage = compile_stage(self._chain, device=device, **self._options)
            stage.prepare()
            compiled = BatchTransform(self._chain, stage, self._seed, draws_regions=True)
        self._compiled[device] = compiled  # the last entry belongs to the latest batch
        return compiled

    # -- one batch -----------------------------------------------------------------------------------------------------

    def _augment_tree(self, tree: BatchTree, spec: BatchSpec, compiled: BatchTransform) -> Any:
        device = compiled.stage.device
        sources = [_Images(leaf, device, self._convert, has_siblings=len(tree.images) > 1) for leaf in tree.images]
        padded = [_move_target(value, device, self._drops_points) for value in tree.padded]
        if padded:
            check_padded(self._chain, padded)
        columns = self._read_columns(tree, sources, spec.positions, is_padded=bool(padded))

        def read(column: ImageColumn) -> RaggedImages:
            for source, images in zip(sources, columns.images, strict=True):
                if images is column:
                    return source.planes
            return _mask_pixels(tree, device, column)

        try:
            finished = compiled(spec, columns, np.arange(tree.count), read, padded)
        except DrawError as error:
            raise ValueError(f"image {error.row} of the batch: {error.message}") from None
        finished.images = [
            list(map(source.join_frames, views)) for source, views in zip(sources, finished.images, strict=True)
        ]
        if self._chain.modules:
            compiled.call_modules(spec.epoch, finished)
        results = iter(finished.images)
        values = [
            finished.combine_views(next(results)) if leaf.kind == "images" else leaf.value for leaf in tree.leaves
        ]
        for number, target in self._collate_targets(tree, finished, device).items():
            values[number] = target
        result = tree.rebuild(values)
        return result if finished.pairing is None else soften(result, finished.pairing, columns.name)

    def _read_columns(
        self, tree: BatchTree, sources: Sequence[_Images], positions: np.ndarray, *, is_padded: bool
    ) -> Columns:
        """Return the batch as columns, with the same leaf indices as in the tree. Padded boxes and keypoints are only
        placeholders in it.

        Raises:
            TypeError, ValueError: the transforms do not support the targets, or targets do not match their images.
        """
        count, reader = tree.count, self._reader
        columns = Columns(range(count), sources=[None] * count)
        if tree.has_targets or self._needs_boxes:
            samples = []
            # If no leaf is a list, all samples have the same shapes.
            is_ragged = any(leaf.kind != "value" and isinstance(leaf.value, list) for leaf in tree.leaves)
            is_uniform = is_padded and not is_ragged
            for row in range(1 if is_uniform else count):
                try:
                    samples.append(reader.read(row, tree.sample(row)))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"image {row} of the batch: {error}") from None
            for picture in (picture for sample in samples for picture in sample.pictures):
                picture.region = [0, 0, picture.height, picture.width]
            columns = make_columns(samples)
            columns = columns.take(np.zeros(count, np.int64)) if is_uniform else columns
        elif not reader.is_search_over:
            reader.read(0, tree.sample(0))
        columns.positions, columns.indices = positions, np.arange(count)
        columns.images = [
            ImageColumn(source.planes.table[:: source.frames], [-1], draws=[leaf.draws or 0])
            for source, leaf in zip(sources, tree.images, strict=True)
        ]
        messages = [reader.warning]
        reader.clear_warning()
        if columns.has_targets and not self._warned:
            self._warned, messages = True, [*messages, target_warning(self._chain, columns)]
        if self._images is None and not self._warned_of_images:
            messages.append(tree.warning)
            self._warned_of_images = bool(messages[-1])
        for message in filter(None, messages):
            warnings.warn(message, RuntimeWarning, stacklevel=7)
        return columns

    def _collate_targets(self, tree: BatchTree, finished: FinishedColumns, device: torch.device) -> dict[int, Any]:
        """Return the transformed targets and the values that belong to boxes, keyed by leaf index. The targets are on
        the device."""
        collated: dict[int, Any] = {}
        columns, ragged, pad_to = finished.columns, self._options["ragged"], self._options["pad_to"]
        fields = {leaf for row_fields in columns.fields for leaves in row_fields.values() for leaf in leaves}
        points = {} if finished.padded else columns.points
        has_boxes = any(isinstance(value, Boxes) for column in points.values() for value in column.values)
        for index, leaf in enumerate(tree.leaves):
            if leaf.kind != "mask" and index in finished.full_columns:  # in padded form
                collated[index] = finished.full_columns[index]
                continue
            if leaf.kind == "images" or not (index in finished.full_columns or index in finished.cells):
                continue
            collated[index] = cells = [
                finished.cells[index].get(row, leaf.entry(row, tree.count)) for row in range(tree.count)
            ]
            if leaf.per_image:
                continue
            views = finished.split_views(cells)
            is_instances = has_boxes and leaf.kind == "mask" and isinstance(leaf.value, list) and views[0][0].ndim > 2
            if index in finished.full_columns and ragged == "error" and not is_instances:
                collated[index] = finished.full_columns[index]
                continue
            if leaf.kind == "mask" and not is_instances:
                names = [partial(columns.name, row, index) for row in range(tree.count)]
                views = [stack_masks(view, names, ragged, pad_to) for view in views]
            elif leaf.kind == "points" and not isinstance(leaf.value, list):  # keypoints, if none were dropped
                views = [torch.stack(view) if len({points.shape for points in view}) == 1 else view for view in views]
            elif leaf.kind == "value" and not isinstance(leaf.value, list) and index not in fields:  # a visibility
                views = [torch.stack(list(map(torch.as_tensor, view))) for view in views]
            collated[index] = finished.combine_views(views)
        targets = {index: target for index, target in collated.items() if tree.leaves[index].kind != "value"}
        return collated | move_merged(targets, partial(_to_device, device=device, pins_memory=True))


class _Images:
    """A leaf of images on the stage's device, converted by `convert`: `planes`, and the number of `frames` per clip."""

    def __init__(self, leaf: Leaf, device: torch.device, convert: Any, *, has_siblings: bool) -> None:
        self.is_clip = isinstance(leaf.value, torch.Tensor) and leaf.value.dim() == 5
        self.frames = leaf.value.shape[1] if self.is_clip else 1
        tensors = [convert(_to_device(tensor, device)) for _, tensor in leaf.entries]
        planes: Any = tensors if isinstance(leaf.value, list) else tensors[0]
        leaf_note = f" of {leaf.path}" if has_siblings else ""
        frames = [f", frame {frame}" for frame in range(self.frames)] if self.is_clip else [""]
        labels = [f"image {row}{leaf_note}{frame}" for row in range(len(planes)) for frame in frames]
        self.planes = RaggedImages.from_planes(planes.flatten(0, 1) if self.is_clip else planes, labels)

    def join_frames(self, result: Any) -> Any:
        """Return the stage's result for all frames as clips, N×T×C×H×W; any other result unchanged."""
        if not self.is_clip:
            return result
        if isinstance(result, list):
            starts = range(0, len(result), self.frames)
            return [torch.stack(result[start : start + self.frames]) for start in starts]
        if isinstance(result, tuple):
            return result[0].unflatten(0, (-1, self.frames)), result[1][:: self.frames]
        return result.unflatten(0, (-1, self.frames))


def _check_images(leaf: Leaf, has_window: bool) -> None:
    """Reject images that require gradients, lists whose images differ in dtype or channels, and (on the CPU) NaN and,
    without a `Window`, floats outside 0 … 1. A `Window` does not take uint8."""
    _, first_image = leaf.entries[0]
    for path, tensor in leaf.entries:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{path} requires gradients, but augmentation is not differentiable; pass {path}.detach(), or call "
                "it within torch.no_grad()"
            )
        if has_window and tensor.dtype == torch.uint8:
            raise TypeError(f"{path} has 8 bits, but Window takes intensities: uint16, or floats of any range")
        if isinstance(leaf.value, list) and (tensor.dtype, len(tensor)) != (first_image.dtype, len(first_image)):
            expected, actual = (
                f"{str(image.dtype).removeprefix('torch.')} of shape {tuple(image.shape)}"
                for image in (first_image, tensor)
            )
            raise ValueError(
                f"the images of a batch must have the same dtype and number of channels, but {leaf.path}[0] is "
                f"{expected} and {path} is {actual} (C×H×W); convert them first"
            )
        if tensor.is_floating_point() and tensor.is_cpu:
            low, high = (float(end) for end in tensor.detach().aminmax())
            if low != low or (not has_window and not (low >= 0 and high <= 1)):
                raise ValueError(
                    f"{path} {explain_float_range(low, high)}; if it is not an image, select the images with "
                    "Augment(images=…)"
                )


def _mask_pixels(tree: BatchTree, device: torch.device, column: ImageColumn) -> RaggedImages:
    """Return the pixels of a column of masks, on the device."""
    leaf = tree.leaves[column.leaves[0]]
    masks = [mask for _, mask in leaf.entries] if isinstance(leaf.value, list) else leaf.entries[0][1]
    return pack_masks(tree_map(partial(_to_device, device=device), masks))[0]


def _check_positions(positions: object, count: int, default: range) -> np.ndarray:
    """Return validated positions, int64 (N,)."""
    if isinstance(positions, torch.Tensor) and not positions.is_cpu:
        raise ValueError(f"positions are on {positions.device}; pass them on the CPU, to avoid waiting for the device")
    array = np.asarray(default if positions is None else positions)
    if array.shape != (count,) or array.dtype.kind not in "iu" or (array.astype(np.int64) < 0).any():
        raise ValueError(
            f"positions must be {count} integers of at least 0, one per image, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def _add_index(device: torch.device) -> torch.device:
    return device if device.type == "cpu" or device.index is not None else devices.current_device()


def _to_device(value: object, device: torch.device, *, pins_memory: bool = False) -> Any:
    """Return a tensor or an array as a plain tensor on the device; anything else unchanged. The copy is asynchronous if
    the memory is page-locked; with `pins_memory`, the memory is page-locked first."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.require(value, requirements=["C", "W"]))  # torch has no negative strides
    if not isinstance(value, torch.Tensor):
        return value
    if value.device != device:
        value = value.pin_memory() if pins_memory and value.is_cpu else value
        value = value.to(device, non_blocking=value.is_pinned())
    return value.detach().as_subclass(torch.Tensor)


def _move_target(value: Any, device: torch.device, drops_points: bool) -> Any:
    """Return padded boxes or keypoints with their tensors on the device; anything else unchanged. Boxes get a `valid`,
    and keypoints if they can be dropped."""
    if not isinstance(value, Boxes | Keypoints):
        return value
    array, valid = (_to_device(part, device, pins_memory=True) for part in (value.array, value.valid))
    if valid is None and (drops_points or isinstance(value, Boxes)):
        valid = torch.ones(array.shape[:2], dtype=torch.bool, device=device)
    return with_values(value, array=array, valid=valid)


def _widen_floats(images: torch.Tensor) -> torch.Tensor:
    return images.to(torch.float32) if images.is_floating_point() else images
