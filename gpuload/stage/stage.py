"""A compiled stage: makes batches from decoded images and programs.

Made once for a loader, in its process, by `gpuload.stage.compile_stage`, and called once for each batch. It owns the
pool that the batches' memory comes from on the CPU, and the scratch memory of its runners; it starts no thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from gpuload.stage.backend import Backend
from gpuload.stage.device import upload
from gpuload.stage.finish import TOPS, Finish
from gpuload.stage.gathering import Gathered
from gpuload.stage.memory import OutputPool
from gpuload.stage.plan import Plan
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.segments import SegmentRunner
from gpuload.stage.user_code import apply_module, note_input
from gpuload.transforms import Chain, RandomErasing
from gpuload.transforms.base import Transform
from gpuload.transforms.composite import flat
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing.plan import Fusing
from gpuload.transforms.program.ops import Mixture, Ops
from gpuload.workers.planned import PlannedBatch

__all__ = ["Result", "Stage"]

NOTHING = contextlib.nullcontext()
USUAL_CHANNELS = 4  # images of uint8 with more of them are left to the reference

_forked = False  # whether this process was forked after this module was imported


def _in_child() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_in_child)

Result = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]


class Stage:
    """Applies a chain to batches; made by `compile_stage`.

    Attributes:
        device: where the results are.
        dtype: of the results of the first view.
        plan: which backend runs which transform.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        device: torch.device,
        finishes: Sequence[Finish],
        runs: Sequence[SegmentRunner],
        by_reference: Callable[[int, str], tuple[Finish, SegmentRunner]],
        plan: Plan,
        backends: Mapping[str, Backend],
        memory_format: str,
        ragged: str,
        cpu_threads: int | None,
    ) -> None:
        self.device = device
        self.dtype = finishes[0].dtype
        self.plan = plan
        self._backends = backends
        self._chain = chain
        self._finishes = finishes
        self._channels_last = memory_format == "channels_last"
        self._ragged = ragged
        self.cpu_threads = cpu_threads
        self._pool = OutputPool() if device.type == "cpu" else None
        self._runs = runs
        # For images that only the reference takes, made when there are some: by view and dtype.
        self._by_reference = by_reference
        self._others: dict[tuple[int, str], tuple[Finish, SegmentRunner]] = {}
        self._fitting: dict[tuple[int, int, str], int] = {}  # of images that fit: view, channels, dtype; and after it
        outlines = ([outline for one in line.transforms for outline in one.outline] for line in chain.lines)
        self._coloring = [next((o.name for o in own if issubclass(o.kind, Ops | Mixture)), None) for own in outlines]

    def prepare(self) -> None:
        """Compile what batches may need, so that none waits for it; for images of three channels, unless `Normalize`
        says otherwise. Others are compiled for when they come."""
        wanted: dict[str, set[Any]] = {}
        for view, run in enumerate(self._runs):
            line, finish = self._chain.lines[view].transforms, self._finishes[view]
            for channels in (3, 1):
                if finish.channels in (None, reduce(lambda count, one: one.output_channels(count), line, channels)):
                    found = run.kernels(channels, channels_last=self._channels_last)
                    for name, kernels in found.items():
                        wanted.setdefault(name, set()).update(kernels)
                    break
        for name, kernels in wanted.items():
            if kernels:
                self._backends[name].compile(kernels)

    def __call__(
        self,
        images: RaggedImages,
        program: Program | PlannedBatch,
        *,
        view: int = 0,
        partners: np.ndarray | None = None,
        gathered: Sequence[Gathered] | None = None,
        seed: int | None = None,
        last: bool = True,
    ) -> Result:
        """Make a batch.

        Args:
            images: the decoded regions, on the stage's device.
            program: from the chain's `draw`, for these images; or what `fusing()` made of it.
            view: the number of the chain's view that they are for.
            partners: int64 (N,), the row that each image is mixed with, its own if it has none; partners are mutual.
                None: rows 2k and 2k + 1.
            gathered: as for `gpuload.stage.segments.SegmentRunner`.
            seed: of torch's generators while a module at the end of the chain runs; None leaves them alone.
            last: call that module; False: leave it to `call_last`.

        Returns:
            N×C×H×W; or, by `ragged`, a list of C×H×W tensors, or (N×C×H×W, sizes int64 (N, 2)).

        Raises:
            ValueError: the images differ in channels, or, with ``ragged="error"``, in size; or they do not fit the
                program, the transforms (of which those of colour take uint8 alone), a view or the partners.
        """
        channels = self.check(images, program, view, partners)
        finish, run = self._way(images, view)
        dtype, sizes = finish.dtype, program.results_hw
        threads = _intra_op_threads(self._threads)
        # A batch may be made within a user's inference_mode and used outside it, and scratch memory lives on. Nor do
        # results depend on the user's autocast, which would make convolutions bfloat16.
        kind = self.device.type
        exact = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING
        usable = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING
        with usable, torch.no_grad(), exact, threads:
            if self._ragged == "list" or (self._ragged == "views" and (sizes != sizes[0]).any()):
                outputs = self._empty_list(channels, sizes, dtype)
                run(images, program, outputs, gathered=gathered)
                return outputs
            largest = sizes.max(axis=0) if self._ragged == "pad" else sizes[0]
            batch = self._empty((len(images), channels, *largest.tolist()), dtype)
            if self._ragged == "pad":
                batch.zero_()
                parts = [image[:, :h, :w] for image, (h, w) in zip(batch, sizes.tolist(), strict=True)]
                run(images, program, parts, gathered=gathered)
                return batch, upload(np.array(sizes), self.device)
            run(images, program, batch, partners, gathered)
            if self._chain.module is None:
                return list(batch.unbind()) if self._ragged == "views" else batch
        return self.call_last(batch, seed) if last else batch

    def call_last(self, batch: torch.Tensor, seed: int | None) -> Result:
        """Call the module, or the function, at the end of the chain with a batch, on the current stream.

        Raises:
            ValueError: it returned something else than a row for each image.
        """
        # The user's autocast applies to the user's module.
        with torch.inference_mode(False), torch.no_grad(), _intra_op_threads(self._threads):
            try:
                result = apply_module(self._chain.module, batch, seed)
            except Exception as error:
                note_input(error, str(self._chain.last), batch)
                raise
            self._check_last(result, len(batch))
            return list(result.unbind()) if self._ragged == "views" else result

    def fusing(self) -> Fusing | None:
        """What plans batches elsewhere, if fused kernels do all of this chain to one dense batch; else None."""
        chain, [run, *views] = self._chain, self._runs
        apart = views or chain.mixing is not None or chain.gathers or chain.reads_boxes or chain.calls
        return None if apart or self._ragged != "error" else run.fusing(channels_last=self._channels_last)

    def _way(self, images: RaggedImages, view: int) -> tuple[Finish, SegmentRunner]:
        """What becomes of images of this dtype and number of channels, and who does it."""
        if images.dtype == "uint8" and images.shapes[0, 2] <= USUAL_CHANNELS:
            return self._finishes[view], self._runs[view]
        if (view, images.dtype) not in self._others:
            self._others[view, images.dtype] = self._by_reference(view, images.dtype)
        return self._others[view, images.dtype]

    @property
    def _threads(self) -> int | None:
        return self.cpu_threads if self.device.type == "cpu" else None

    def _check_last(self, result: Any, count: int) -> None:
        """Refuse what a module at the end returned, unless it has an entry for each image; but it may be anything
        else than a tensor, if it is not taken apart."""
        tensor = isinstance(result, torch.Tensor)
        if (tensor and result.dim() and len(result) == count) or not (
            tensor or result is None or self._ragged == "views"
        ):
            return
        got = f"shape {tuple(result.shape)}" if tensor else "None" if result is None else type(result).__name__
        raise ValueError(
            f"{self._chain.last} at the end of the transforms was given {count} images and returned {got}; it must "
            "return a tensor with a row for each image"
        )

    def check(
        self, images: RaggedImages, program: Program | PlannedBatch, view: int = 0, partners: np.ndarray | None = None
    ) -> int:
        """Check that the images fit the chain and each other; returns how many channels the results have."""
        if len(images) == 0 or len(images) != len(program):
            raise ValueError(f"a batch needs images and as many draws, got {len(images)} and {len(program)}")
        if not 0 <= view < len(self._finishes):
            raise ValueError(f"view must be from 0 to {len(self._finishes) - 1}, as the chain has them, got {view}")
        if partners is not None:
            _check_partners(partners, len(images))
        counts, planned = images.shapes[:, 2], isinstance(program, PlannedBatch)  # of images that are alike
        if not planned and (counts != counts[0]).any():
            other = int((counts != counts[0]).argmax())
            raise ValueError(
                f"the images of a batch must have the same number of channels, but {images.labels[0]} has {counts[0]} "
                f"and {images.labels[other]} has {counts[other]}; drop or convert channels in the dataset, or give "
                "Encoded(…, mode='RGB') for all of them"
            )
        channels = int(counts[0])
        coloring = self._coloring[view]
        if coloring is not None and images.dtype != "uint8":
            raise ValueError(
                f"{coloring} takes images of uint8, but {images.labels[0]} is {images.dtype}; leave it out, write a "
                "transform of your own in its place, or convert the images in the dataset"
            )
        if coloring is not None and channels not in (1, 3):
            raise ValueError(
                f"{coloring} takes images of 1 or 3 channels, but {images.labels[0]} has {channels}; "
                "drop or convert channels in the dataset, or decode to mode 'RGB' or 'L'"
            )
        transforms = self._chain.lines[view].transforms
        given, kind = channels, (view, channels, images.dtype)
        if kind not in self._fitting:
            self._fitting[kind] = _channels_after(transforms, channels, images.labels[0], images.dtype)
        channels = self._fitting[kind]
        if self._finishes[view].channels not in (None, channels):
            where = images.labels[0] if channels == given else f"{images.labels[0]} after all transforms"
            self._finishes[view].check(channels, where)
        needs_one = self._chain.module is not None or self._chain.mixing is not None
        dense = self._ragged == "error" or (self._ragged == "views" and needs_one)
        if dense and not planned and ((sizes := program.results_hw) != sizes[0]).any():
            other = int((sizes != sizes[0]).any(axis=1).argmax())
            first, second = ("×".join(map(str, sizes[row].tolist())) for row in (0, other))
            raise ValueError(
                "the images of a batch have different sizes (height × width) after all transforms: "
                f"{images.labels[0]} has {first}, {images.labels[other]} has {second}; end with a crop or a "
                "Resize((height, width)), or use ragged='list' or ragged='pad'"
            )
        return channels

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        n, channels, height, width = shape
        if self._pool is None:
            order = torch.channels_last if self._channels_last else torch.contiguous_format
            return torch.empty(tuple(shape), dtype=dtype, device=self.device, memory_format=order)
        if self._channels_last:
            return self._pool.empty((n, height, width, channels), dtype).permute(0, 3, 1, 2)
        return self._pool.empty(tuple(shape), dtype)

    def _empty_list(self, channels: int, sizes_hw: np.ndarray, dtype: torch.dtype) -> list[torch.Tensor]:
        return [self._empty((1, channels, *size), dtype)[0] for size in sizes_hw.tolist()]


def _check_partners(partners: np.ndarray, count: int) -> None:
    expected = f"partners must be an int64 array of shape ({count},)"
    if not isinstance(partners, np.ndarray):
        raise ValueError(f"{expected}, got {type(partners).__name__}")
    if partners.dtype != np.int64 or partners.shape != (count,):
        raise ValueError(f"{expected}, got {partners.dtype} of shape {partners.shape}")
    outside = (partners < 0) | (partners >= count)
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(f"partners must be rows of the batch, 0 to {count - 1}, but row {row} has {partners[row]}")
    alone = partners[partners] != np.arange(count)
    if alone.any():
        row = int(alone.argmax())
        raise ValueError(
            f"two partners must be each other's, but row {row} has {partners[row]}, and row {partners[row]} has "
            f"{partners[partners[row]]}; an image that is not mixed has its own row"
        )


def _channels_after(transforms: Sequence[Transform], channels: int, label: str, dtype: str) -> int:
    """Check that the transforms fit images of this many channels; returns how many these have afterwards."""
    top = TOPS[dtype]
    for transform in transforms:
        for inner in _with_children(transform):
            if isinstance(inner, RandomErasing) and not inner.fits(channels):
                raise ValueError(
                    f"{inner!r} has {len(inner.numbers)} values, but {label} has {channels} "
                    f"channel{'s' if channels > 1 else ''} there; give one value, or one for each channel"
                )
            if len(fill := inner.outside(masks=False)) not in (1, channels):
                raise ValueError(
                    f"{type(inner).__name__}({inner.fill_argument}={fill}) has {len(fill)} numbers, one for each "
                    f"channel, but {label} has {channels} there; give one number, or {channels}"
                )
            if top is not None and not all(0 <= number <= top and number == int(number) for number in fill):
                raise ValueError(
                    f"{type(inner).__name__}({inner.fill_argument}={fill[0] if len(fill) == 1 else fill}) is given in "
                    f"levels, which are whole numbers in 0 … {top} for {dtype} images, such as {label}"
                )
        for inner in flat(transform.children):
            if inner.output_channels(channels) != channels:
                raise ValueError(
                    f"{type(transform).__name__} holds {inner!r}, which would change the number of channels of some "
                    f"images of a batch only: {label} has {channels} there; put it outside"
                )
        channels = transform.output_channels(channels)
    return channels


def _with_children(transform: Transform) -> Iterator[Transform]:
    yield transform
    for child in transform.children:
        yield from _with_children(child)


@contextlib.contextmanager
def _intra_op_threads(count: int | None) -> Iterator[None]:
    """Let torch use this many threads for an operation; afterwards as many as before."""
    before = torch.get_num_threads()
    count = 1 if _forked else count  # a fork has none of torch's other threads, and torch would wait for them
    if count in (None, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
