"""From a chain of transforms to the stage that applies it: options checked, a backend chosen, memory and threads kept.

A `Stage` is made once for a loader, in its process, and called once for each batch. It owns the pool that the batches'
memory comes from on the CPU, and the scratch memory of its backend; it starts no thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from gpuload.backends.batched import BatchRunner
from gpuload.backends.finish import Finish
from gpuload.backends.memory import OutputPool
from gpuload.backends.ragged import RaggedImages
from gpuload.backends.results import check_erasing
from gpuload.backends.single import SingleRunner
from gpuload.backends.upload import upload
from gpuload.transforms import Chain, Draws
from gpuload.transforms.arguments import dtype_name
from gpuload.transforms.base import Transform
from gpuload.transforms.composite import flat
from gpuload.transforms.params import Branches, Mixture, Ops

__all__ = ["Backend", "MemoryFormat", "Ragged", "Result", "Stage", "compile_stage"]

Backend = Literal["auto", "torch"]
MemoryFormat = Literal["contiguous_format", "channels_last"]
Ragged = Literal["error", "list", "pad", "views"]
Result = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]


def compile_stage(
    chain: Chain,
    *,
    device: str | torch.device,
    backend: str = "auto",
    dtype: Any = None,
    memory_format: Any = "contiguous_format",
    ragged: str = "error",
    cpu_threads: int | None = None,
) -> Stage:
    """Make the stage that applies a chain of transforms to batches.

    Args:
        chain: the transforms.
        device: where batches are made: a CPU or a CUDA device.
        backend: ``"torch"``, the reference; ``"auto"`` is the fastest there is for the device.
        dtype: of images that `ToDtype` or `Normalize` makes floats of: ``"float32"``, ``"float16"`` or
            ``"bfloat16"``, or torch's objects. None: what `ToDtype` says, float32 without it. Images that stay levels
            are uint8 in any case.
        memory_format: ``"contiguous_format"`` (N×C×H×W) or ``"channels_last"``, or torch's objects.
        ragged: what becomes of images whose sizes differ in the end: ``"error"``, ``"list"`` (a list of tensors, in
            any case) or ``"pad"`` (zeros on the right and at the bottom, and the sizes beside it, in any case);
            ``"views"`` is a list too, of views of one tensor where all sizes are the same.
        cpu_threads: how many threads torch uses within a call; None: as many as it is set to.

    Raises:
        TypeError, ValueError: an option is not one of these.
    """
    _one_of("backend", backend, get_args(Backend))
    _one_of("ragged", ragged, get_args(Ragged))
    layout = str(memory_format).removeprefix("torch.")
    _one_of("memory_format", layout, get_args(MemoryFormat))
    if dtype is not None:
        dtype = dtype_name("dtype", dtype)
        if dtype == "uint8":
            raise ValueError(
                "dtype='uint8' is not a dtype of float images; leave Normalize and ToDtype out to get uint8 ones"
            )
    if cpu_threads is not None and cpu_threads < 1:
        raise ValueError(f"cpu_threads must be at least 1, got {cpu_threads}")
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, got {device}")
    if chain.module is not None and ragged in ("list", "pad"):
        raise ValueError(
            f"ragged={ragged!r} does not go with the module {type(chain.module).__name__} at the end of the "
            "transforms, which needs one tensor for the batch"
        )
    if chain.mixing is not None and ragged in ("list", "pad"):
        raise ValueError(
            f"ragged={ragged!r} does not go with {type(chain.mixing).__name__}, which mixes images of one size; end "
            "the transforms with a crop or a Resize((height, width)) before it, and leave ragged out"
        )
    finishes = [Finish.of(line.transforms, dtype) for line in chain.lines]
    return Stage(chain, device, finishes, layout, ragged, cpu_threads)


class Stage:
    """Applies a chain to batches; made by `compile_stage`.

    Attributes:
        device: where the results are.
        dtype: of the results; of the first view's, where there are several.
    """

    def __init__(
        self,
        chain: Chain,
        device: torch.device,
        finishes: Sequence[Finish],
        memory_format: str,
        ragged: str,
        cpu_threads: int | None,
    ) -> None:
        self.device = device
        self.dtype = finishes[0].dtype
        self._chain = chain
        self._finishes = finishes
        self._channels_last = memory_format == "channels_last"
        self._ragged = ragged
        self._cpu_threads = cpu_threads
        self._pool = OutputPool() if device.type == "cpu" else None
        self._runs: list[SingleRunner | BatchRunner] = [
            SingleRunner(finish) if device.type == "cpu" else BatchRunner(finish, device) for finish in finishes
        ]

    def __call__(
        self, images: RaggedImages, draws: Draws, *, view: int = 0, partners: np.ndarray | None = None
    ) -> Result:
        """Make a batch.

        Args:
            images: the decoded regions, on the stage's device.
            draws: from the chain's `draw`, for these images.
            view: which of the chain's views they are for.
            partners: int64 (N,), with which row each is mixed, where a transform mixes images; its own for none. Two
                are each other's. None: rows 2k and 2k + 1.

        Returns:
            N×C×H×W; or, by `ragged`, a list of C×H×W tensors, or (N×C×H×W, sizes int64 (N, 2)).

        Raises:
            ValueError: the images do not go together: in channels, or in size with ``ragged="error"``.
        """
        channels = self._check(images, draws, self._finishes[view])
        run, dtype, sizes = self._runs[view], self._finishes[view].dtype, draws.sizes_hw[-1]
        threads = _intra_op_threads(self._cpu_threads if self.device.type == "cpu" else None)
        # A batch may be made within a user's inference_mode and used outside it; scratch memory lives on in any case.
        with torch.inference_mode(False), torch.no_grad(), threads:
            equal = bool((sizes == sizes[0]).all())
            if self._ragged == "list" or (self._ragged == "views" and not equal):
                outputs = self._empty_list(channels, sizes, dtype)
                run(images, draws, outputs)
                return outputs
            batch = self._empty((len(images), channels, *sizes.max(axis=0).tolist()), dtype)
            if self._ragged == "pad":
                batch.zero_()
                outputs = [
                    image[:, :height, :width]
                    for image, (height, width) in zip(batch.unbind(), sizes.tolist(), strict=True)
                ]
                run(images, draws, outputs)
                return batch, upload(np.array(sizes), self.device)
            run(images, draws, batch, partners)
            result = batch if self._chain.module is None else self._chain.module(batch)
            return self._views(result, len(images)) if self._ragged == "views" else result

    def _views(self, result: Any, count: int) -> list[torch.Tensor]:
        if not isinstance(result, torch.Tensor) or result.dim() == 0 or len(result) != count:
            described = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ValueError(
                f"the module {type(self._chain.module).__name__} at the end of the transforms was given {count} images "
                f"and returned {described}; with a collate_fn, or batch_size=None, it must return a tensor with a row "
                "for each image"
            )
        return list(result.unbind())

    def _check(self, images: RaggedImages, draws: Draws, finish: Finish) -> int:
        """How many channels the results have, if the images fit the chain and each other."""
        if len(images) == 0 or len(images) != len(draws):
            raise ValueError(f"a batch needs images and as many draws, got {len(images)} and {len(draws)}")
        counts = images.shapes[:, 2]
        if (counts != counts[0]).any():
            other = int((counts != counts[0]).argmax())
            raise ValueError(
                f"the images of a batch must have the same number of channels, but {images.labels[0]} has {counts[0]} "
                f"and {images.labels[other]} has {counts[other]}; give Encoded(…, mode='RGB') for all of them"
            )
        channels = int(counts[0])
        check_erasing(draws, channels, images.labels[0])
        if channels not in (1, 3) and (name := _coloring(draws)):
            raise ValueError(
                f"{name} takes images of 1 or 3 channels, but {images.labels[0]} has {channels}; "
                "decode to mode 'RGB' or 'L'"
            )
        given, channels = channels, _channels_after(draws, channels, images.labels[0])
        finish.check(channels, images.labels[0] if channels == given else f"{images.labels[0]} after all transforms")
        sizes = draws.sizes_hw[-1]
        needs_one = self._chain.module is not None or self._chain.mixing is not None
        dense = self._ragged == "error" or (self._ragged == "views" and needs_one)
        if dense and (sizes != sizes[0]).any():
            other = int((sizes != sizes[0]).any(axis=1).argmax())
            first, second = ("×".join(map(str, sizes[row].tolist())) for row in (0, other))
            raise ValueError(
                "the images of a batch have different sizes (height × width) after all transforms: "
                f"{images.labels[0]} has {first}, {images.labels[other]} has {second}; end with a crop or a "
                "Resize((height, width)), or use ragged='list' or ragged='pad'"
            )
        return channels

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for N×C×H×W results."""
        n, channels, height, width = shape
        inner = (n, height, width, channels) if self._channels_last else tuple(shape)
        if self._pool is not None:
            batch = self._pool.empty(inner, dtype)
        else:
            batch = torch.empty(inner, dtype=dtype, device=self.device)
        return batch.permute(0, 3, 1, 2) if self._channels_last else batch

    def _empty_list(self, channels: int, sizes_hw: np.ndarray, dtype: torch.dtype) -> list[torch.Tensor]:
        """Memory for results of different sizes."""
        return [self._empty((1, channels, *size), dtype)[0] for size in sizes_hw.tolist()]


def _channels_after(draws: Draws, channels: int, label: str) -> int:
    """How many channels images of so many have after all transforms, if those fit."""
    for transform in draws.transforms:
        for inner in _with_children(transform):
            if len(fill := inner.outside(masks=False)) not in (1, channels):
                raise ValueError(
                    f"{type(inner).__name__}({inner.fill_argument}={fill}) has {len(fill)} numbers, one for each "
                    f"channel, but {label} has {channels} there; give one number, or {channels}"
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


def _coloring(draws: Draws) -> str | None:
    """The name of a transform that changes colours."""
    for transform, params in zip(draws.transforms, draws.params, strict=True):
        if isinstance(params, Ops | Mixture):
            return type(transform).__name__
        if isinstance(params, Branches) and (name := next(filter(None, map(_coloring, params.draws)), None)):
            return name
    return None


@contextlib.contextmanager
def _intra_op_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads for an operation; afterwards as many as before."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
