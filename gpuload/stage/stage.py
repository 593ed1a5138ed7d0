"""Compiles a chain of transforms into a stage, which turns decoded images and programs into batches.

`compile_stage` checks the options, chooses a backend and creates its runners. A stage is created once per loader, in
the loader's process, and called once per batch. It owns the scratch memory of its runners and, on the CPU, the pool
from which batches are allocated; it starts no threads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
import torch

from gpuload.checks import integer, one_of
from gpuload.errors import BackendError, CompilerError
from gpuload.stage import device as devices
from gpuload.stage.backend import Backend
from gpuload.stage.device import upload
from gpuload.stage.finish import MAX_LEVELS, Finish
from gpuload.stage.memory import OutputPool
from gpuload.stage.plan import PlanStep, make_plan
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.backend import Runner, TorchBackend
from gpuload.stage.segments import SegmentRunner
from gpuload.stage.user_code import apply_module, note_input
from gpuload.transforms import Chain, RandomErasing
from gpuload.transforms.arguments import dtype_name, is_module
from gpuload.transforms.base import Transform
from gpuload.transforms.composite import flatten
from gpuload.transforms.convert import Normalize
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing.plan import Fusing
from gpuload.transforms.program.ops import ChainMixture, Ops, Turn
from gpuload.workers.batch import PlannedBatch

__all__ = [
    "BACKENDS",
    "Stage",
    "check_ragged",
    "check_stage",
    "compile_stage",
    "explain_backend_change",
    "padded_hw",
    "resolve_backend",
]

LAYOUTS: Final = ("contiguous_format", "channels_last")
FLOAT_DTYPES: Final = ("float16", "bfloat16", "float32")
# Module and class of each backend. They are imported on first use, because Kornia, DALI and Triton take seconds. The
# states of Augment contain indices of this table, so entries keep their place.
BACKENDS: Final = {
    "torch": ("gpuload.stage.reference.backend", "TorchBackend"),
    "kornia": ("gpuload.stage.kornia", "KorniaBackend"),
    "dali": ("gpuload.stage.dali", "DaliBackend"),
    "fused": ("gpuload.stage.fused", "FusedBackend"),
}

NO_CONTEXT = contextlib.nullcontext()
MAX_BACKEND_CHANNELS = 4  # the reference processes uint8 images with more channels

_forked = False  # whether this process was forked after this module was imported


def _mark_forked() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_mark_forked)

Result = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]


class Stage:
    """A compiled chain that can be applied to batches; created by `compile_stage`.

    Attributes:
        device: the device of the results.
        plan: the backend that runs each transform.
        reads_planes: whether planar or strided images are read in place, without being copied first.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        reference: Backend,
        backend: Backend,
        note: str | None,
        dtype: str | None,
        memory_format: str,
        ragged: str,
        pad_to: int | None,
        cpu_threads: int | None,
    ) -> None:
        self.device = reference.device
        self.plan = make_plan(chain, backend, note=note)
        self.cpu_threads = cpu_threads
        self._chain = chain
        self._backend, self._backends = backend, {reference.name: reference, backend.name: backend}
        self._float_dtype = dtype
        self._runners = [
            SegmentRunner(steps, Finish.of(line.transforms, dtype), self._backends)
            for line, steps in zip(chain.lines, self.plan.views, strict=True)
        ]
        self.reads_planes = all(runner.reads_planes for runner in self._runners)
        self._channels_last = memory_format == "channels_last"
        self._ragged, self._pad_to = ragged, pad_to
        self._pool = OutputPool() if self.device.type == "cpu" else None
        # Runners for images other than uint8 with at most four channels, by view, dtype and whether the backend takes
        # them; created on first use.
        self._other_runners: dict[tuple[int, str, bool], SegmentRunner] = {}
        # The number of output channels for each (view, input channels, dtype) that has passed the checks.
        self._output_channels: dict[tuple[int, int, str], int] = {}

    def prepare(self) -> None:
        """Compile the kernels that batches may need, so that no batch waits for the compiler. They are compiled for
        three channels, and for one if a `Normalize` has one mean; for other images, kernels are compiled on first
        use."""
        kernels: set[Any] = set()
        for line, runner in zip(self._chain.lines, self._runners, strict=True):
            for channels in (3, 1):
                out_channels = reduce(lambda n, transform: transform.output_channels(n), line.transforms, channels)
                if runner.finish.channels in (None, out_channels):
                    kernels |= runner.kernels(channels, channels_last=self._channels_last)
                    if not any(isinstance(t, Normalize) and len(t.mean) == 1 for t in line.transforms):
                        break
        if kernels:
            self._backend.compile(kernels)

    def __call__(
        self,
        images: RaggedImages,
        program: Program | PlannedBatch,
        *,
        view: int = 0,
        partners: np.ndarray | None = None,
    ) -> Result:
        """Make a batch, without applying the modules at the end of the chain.

        Args:
            images: the decoded regions, on the stage's device.
            program: the result of the chain's `draw` for these images, or the batch planned from it.
            view: which of the chain's views to make.
            partners: int64 (N,), the index of the image with which each image is mixed, or the image's own index if it
                is not mixed; partners are mutual. None pairs images 2k and 2k + 1.

        Returns:
            An N×C×H×W tensor; or, depending on `ragged`, a list of C×H×W tensors, or an N×C×H×W tensor and the sizes as
            int64 (N, 2).

        Raises:
            ValueError: the images differ in their number of channels, or, with ``ragged="error"``, in size; or they do
                not fit the program or the transforms (colour transforms accept only uint8).
        """
        if len(images) == 0 or len(images) != len(program):
            raise ValueError(
                "a batch must have at least one image, and a program for the same number of images, got "
                f"{len(images)} images and a program for {len(program)}"
            )
        channels = self.check(images, view)
        self._check_sizes(images, program.results_hw, view)
        runner = self._runner(images, view)
        dtype, sizes = runner.finish.dtype, program.results_hw
        threads = _set_threads(self._thread_count)
        # Batches and scratch memory must also be usable outside the user's inference_mode. Results must not depend on
        # the user's autocast, which would make convolutions bfloat16.
        device_type = self.device.type
        without_autocast = (
            torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else NO_CONTEXT
        )
        without_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NO_CONTEXT
        with without_inference, torch.no_grad(), without_autocast, threads:
            if self._ragged == "list" or (self._ragged == "views" and (sizes != sizes[0]).any()):
                outputs = [self._empty((1, channels, *size), dtype)[0] for size in sizes.tolist()]
                runner(images, program, outputs)
                return outputs
            size = padded_hw(sizes, self._pad_to) if self._ragged == "pad" else sizes[0].tolist()
            batch = self._empty((len(images), channels, *size), dtype)
            if self._ragged == "pad":
                batch.zero_()
                unpadded_views = [image[:, :h, :w] for image, (h, w) in zip(batch, sizes.tolist(), strict=True)]
                runner(images, program, unpadded_views)
                return batch, upload(np.array(sizes), self.device)
            runner(images, program, batch, partners)
            return list(batch.unbind()) if self._ragged == "views" and not self._chain.modules else batch

    def call_modules(self, batch: torch.Tensor, seeds: Sequence[int]) -> Result:
        """Apply the modules and functions at the end of the chain to a batch, one after the other, on the current
        stream. `seeds` seed torch's generators, one for each call.

        Raises:
            ValueError: a module did not return one result per image.
        """
        result: Any = batch
        modules = list(zip(self._chain.modules, self._chain.module_names, seeds, strict=True))
        # The user's autocast applies to the user's modules.
        with torch.inference_mode(False), torch.no_grad(), _set_threads(self._thread_count):
            for index, (module, name, seed) in enumerate(modules):
                images = result
                try:
                    result = apply_module(module, images, seed)
                except Exception as error:
                    note_input(error, name, images)
                    raise
                self._check_result(result, name, len(batch), needs_tensor=index < len(modules) - 1)
            return list(result.unbind()) if self._ragged == "views" else result

    def batch_planner(self) -> Fusing | None:
        """Return the planner with which workers can plan batches, if fused kernels run this entire chain on a dense
        batch; else None."""
        chain, [runner, *other_views] = self._chain, self._runners
        needs_stage = other_views or chain.mixing is not None or chain.is_combining or chain.reads_boxes or chain.calls
        return (
            None if needs_stage or self._ragged != "error" else runner.batch_planner(channels_last=self._channels_last)
        )

    def _runner(self, images: RaggedImages, view: int) -> SegmentRunner:
        """Return the runner for images of this dtype and number of channels."""
        is_taken = images.shapes[0, 2] <= MAX_BACKEND_CHANNELS and self._takes(images.dtype)
        if images.dtype == "uint8" and is_taken:
            return self._runners[view]
        key = view, images.dtype, is_taken
        if key not in self._other_runners:
            transforms = self._chain.lines[view].transforms
            finish = Finish.of(transforms, self._float_dtype, images.dtype)
            steps = self.plan.views[view] if is_taken else [PlanStep(transform, "torch") for transform in transforms]
            self._other_runners[key] = SegmentRunner(steps, finish, self._backends)
        return self._other_runners[key]

    def _takes(self, dtype: str) -> bool:
        """Return whether the backend takes images of this dtype; the reference takes all others."""
        return dtype == "uint8" or (dtype == "float32" and self._backend.takes_floats)

    @property
    def _thread_count(self) -> int | None:
        return self.cpu_threads if self.device.type == "cpu" else None

    def _check_result(self, result: object, name: str, count: int, *, needs_tensor: bool) -> None:
        """Raise unless a module at the end returned a tensor with one entry per image. From the last module, a result
        that is neither a tensor nor None is also accepted, unless it has to be split into images."""
        is_tensor = isinstance(result, torch.Tensor)
        if (is_tensor and result.dim() and len(result) == count) or not (
            is_tensor or result is None or needs_tensor or self._ragged == "views"
        ):
            return
        got = f"shape {tuple(result.shape)}" if is_tensor else "None" if result is None else type(result).__name__
        raise ValueError(
            f"{name} at the end of the transforms was called with {count} images and returned {got}; "
            "it must return a tensor whose first axis has one entry per image"
        )

    def check(self, images: RaggedImages, view: int = 0) -> int:
        """Check that the channels of the images fit the chain and each other; return the number of channels of the
        results."""
        channel_counts = images.shapes[:, 2]
        if (channel_counts != channel_counts[0]).any():
            other_row = int((channel_counts != channel_counts[0]).argmax())
            raise ValueError(
                f"the images of a batch must have the same number of channels, but {images.labels[0]} has "
                f"{channel_counts[0]} and {images.labels[other_row]} has {channel_counts[other_row]}; drop or convert "
                "channels in the dataset, or use Encoded(…, mode='RGB') for all images"
            )
        channels = int(channel_counts[0])
        key = view, channels, images.dtype
        if key not in self._output_channels:
            label = images.labels[0]
            backend_name = self._backend.name if self._takes(images.dtype) else None
            out_channels = _channels_after(self.plan.views[view], channels, label, images.dtype, backend_name)
            self._runners[view].finish.check(
                out_channels, label if out_channels == channels else f"{label} after all transforms"
            )
            self._output_channels[key] = out_channels
        return self._output_channels[key]

    def _check_sizes(self, images: RaggedImages, sizes: np.ndarray, view: int) -> None:
        """Check that all results have one size, if they become one tensor."""
        needs_tensor = bool(self._chain.modules) or self._chain.mixing is not None
        is_dense = self._ragged == "error" or (self._ragged == "views" and needs_tensor)
        if is_dense and len(sizes) > 1 and (sizes != sizes[0]).any():  # of a plan, there is one size
            other_row = int((sizes != sizes[0]).any(axis=1).argmax())
            first_size, other_size = ("×".join(map(str, sizes[row].tolist())) for row in (0, other_row))
            transforms = self._chain.lines[view].transforms
            turns = [outline.name for transform in transforms for outline in transform.outline if outline.kind is Turn]
            is_turned = turns and (sizes[0] == sizes[other_row, ::-1]).all()
            hint = f" ({turns[-1]} swaps height and width)" if is_turned else ""
            raise ValueError(
                "the images of a batch have different sizes (height × width) after all transforms: "
                f"{images.labels[0]} has {first_size}, {images.labels[other_row]} has {other_size}{hint}; end with a "
                "crop or a Resize((height, width)), or (with shuffle=Buckets) a Resize(T.bucket_size), or use "
                "ragged='list' or ragged='pad'"
            )

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        n, channels, height, width = shape
        if self._pool is None:
            order = torch.channels_last if self._channels_last else torch.contiguous_format
            return torch.empty(tuple(shape), dtype=dtype, device=self.device, memory_format=order)
        if self._channels_last:
            return self._pool.empty((n, height, width, channels), dtype).permute(0, 3, 1, 2)
        return self._pool.empty(tuple(shape), dtype)


def _channels_after(steps: Sequence[PlanStep], channels: int, label: str, dtype: str, backend_name: str | None) -> int:
    """Check that the transforms fit images with this many channels; return the number of channels afterwards.
    `backend_name` is None if the backend does not take images of this dtype."""
    transforms = [step.transform for step in steps]
    colours = [
        (step.backend, outline.name)
        for step in steps
        for outline in step.transform.outline
        if issubclass(outline.kind, Ops | ChainMixture)
    ]
    refused_name = next((name for backend, name in colours if dtype != "uint8" and backend != backend_name), None)
    if refused_name is not None:
        raise ValueError(
            f"{refused_name} takes uint8 images, but {label} is {dtype}; put T.ToDtype('uint8', scale=True) first, "
            "which converts floats in 0 … 1 and uint16, replace it with a custom transform, or remove it"
        )
    if colours and channels not in (1, 3):
        raise ValueError(
            f"{colours[0][1]} takes images with 1 or 3 channels, but {label} has {channels}; drop or convert channels "
            "in the dataset, or decode to mode 'RGB' or 'L'"
        )
    max_level = MAX_LEVELS[dtype]
    for transform in transforms:
        for node in _iterate_tree(transform):
            if isinstance(node, RandomErasing) and not node.fits(channels):
                raise ValueError(
                    f"{node!r} has {len(node.written_values)} values, but {label} has {channels} "
                    f"channel{'s' if channels > 1 else ''} at that point; give one value, or one for each channel"
                )
            if len(fill := node.outside.image) not in (1, channels):
                raise ValueError(
                    f"{type(node).__name__}({node.fill_argument}={fill}) has {len(fill)} values, one for each "
                    f"channel, but {label} has {channels} channels at that point; give one value, or {channels}"
                )
            if max_level is not None and not all(0 <= n <= max_level and n == int(n) for n in fill):
                raise ValueError(
                    f"{type(node).__name__}({node.fill_argument}={fill[0] if len(fill) == 1 else fill}): all values "
                    f"must be integers in 0 … {max_level} for {dtype} images, such as {label}"
                )
        for child in flatten(transform.children):
            if child.output_channels(channels) != channels:
                raise ValueError(
                    f"{type(transform).__name__} contains {child!r}, which would change the number of channels of only "
                    f"some images of a batch: {label} has {channels} at that point; move it out of the "
                    f"{type(transform).__name__}"
                )
        channels = transform.output_channels(channels)
    return channels


def _iterate_tree(transform: Transform) -> Iterator[Transform]:
    yield transform
    for child in transform.children:
        yield from _iterate_tree(child)


@contextlib.contextmanager
def _set_threads(count: int | None) -> Iterator[None]:
    """Make torch use this many threads within the ``with`` block; None keeps the current number."""
    previous_count = torch.get_num_threads()
    count = 1 if _forked else count  # a forked process lacks torch's other threads, and torch would wait for them
    if count in (None, previous_count):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous_count)


def compile_stage(
    chain: Chain,
    *,
    device: str | torch.device,
    backend: str = "auto",
    dtype: object = None,
    memory_format: object = "contiguous_format",
    ragged: str = "error",
    pad_to: int | None = None,
    cpu_threads: int | None = None,
    runner: Runner | None = None,
) -> Stage:
    """Create the stage that applies a chain of transforms to batches.

    Args:
        chain: the transforms.
        device: the CPU, CUDA or XPU device on which batches are made.
        backend, dtype, memory_format, pad_to: as for `Loader`.
        ragged: as for `Loader`; or ``"views"``, which returns a list of images: views of one tensor if all sizes are
            equal.
        cpu_threads: the number of threads that torch uses within a call; None means torch's current setting.
        runner: the reference's runner: ``"single"`` processes one image at a time (CPU), and ``"batched"`` processes
            many; None chooses by device.

    Raises:
        TypeError, ValueError: an option is invalid, or cannot be combined with the chain.
        BackendError: the requested backend cannot be used here.
    """
    device, float_dtype, layout = check_stage(chain, device, backend, dtype, memory_format, ragged, pad_to)
    if device.type != "cpu" and device.index is None:  # constants stay on this device, even if another becomes current
        device = devices.current_device()
    reference = TorchBackend(device, runner)
    selected, note, name = reference, None, resolve_backend(backend, device)
    if name != "torch":
        selected, note = _select(name, device, reference, forced=backend != "auto")
    return Stage(
        chain,
        reference=reference,
        backend=selected,
        note=note,
        dtype=float_dtype,
        memory_format=layout,
        ragged=ragged,
        pad_to=pad_to,
        cpu_threads=cpu_threads,
    )


def check_stage(
    chain: Chain,
    device: str | torch.device | None,
    backend: str,
    dtype: Any,
    memory_format: Any,
    ragged: str,
    pad_to: Any = None,
) -> tuple[torch.device, str | None, str]:
    """Check the arguments of `compile_stage`; return the device, and the names of the dtype and the memory format.

    If `device` is None, a CUDA or XPU device is chosen if one is available, else the CPU. The device is not
    initialized, because creating a loader must not create a context on a GPU.

    Raises:
        TypeError, ValueError, BackendError: as for `compile_stage`.
    """
    one_of("backend", backend, ("auto", *BACKENDS))
    layout = str(memory_format).removeprefix("torch.")
    one_of("memory_format", layout, LAYOUTS)
    if dtype is not None:
        if str(dtype).removeprefix("torch.") == "uint8":
            raise ValueError(
                "dtype='uint8' is not a float dtype; to get uint8 images, omit dtype, Normalize and ToDtype"
            )
        dtype = dtype_name("dtype", dtype, FLOAT_DTYPES)
    if ragged != "views":  # only a Loader sets this value, see `compile_stage`
        check_ragged(ragged, pad_to)
    device = torch.device(device or devices.default_device_type())
    if device.type != "cpu" and device.type != devices.default_device_type():
        type_name = device.type.upper()
        raise ValueError(f"device is {str(device)!r}, but torch finds no {type_name} device here; use device='cpu'")
    if chain.modules and ragged in ("list", "pad"):
        is_function = not is_module(chain.modules[-1])
        raise ValueError(
            f"ragged={ragged!r} cannot be combined with {chain.module_names[-1]} at the end of the transforms, which "
            "needs one tensor per batch; omit ragged"
            + (", or use T.Lambda(…, per='image'), which is called for each image" if is_function else "")
        )
    if chain.mixing is not None and ragged in ("list", "pad"):
        raise ValueError(
            f"ragged={ragged!r} cannot be combined with {type(chain.mixing).__name__}, which mixes images of one size; "
            "put a crop or a Resize((height, width)) before it, and omit ragged"
        )
    if backend not in ("auto", "torch") and (message := _backend_class(backend).unmet_requirement(device)):
        raise BackendError(message)
    return device, dtype, layout


def resolve_backend(backend: str, device: torch.device) -> str:
    """Return the name of the backend for a device, which depends on the device if `backend` is ``"auto"``."""
    if backend != "auto":
        return backend
    return "torch" if device.type == "cpu" else "fused"


def explain_backend_change(saved: str, current: str) -> str:
    """Return the text of the warning about a state that was saved with another backend."""
    return (
        f"the state was saved with the backend {saved!r}, but the batches are now made by {current!r}: their random "
        "parameters are the same, but their pixel values can differ; to continue with the same pixel values, set "
        f"backend={saved!r}"
    )


def check_ragged(ragged: str, pad_to: object) -> int | None:
    """Check that `ragged` is a known value, and that `pad_to` is None, or a positive integer with ``ragged="pad"``;
    return `pad_to`."""
    one_of("ragged", ragged, ("error", "list", "pad"))
    if pad_to is None:
        return None
    pad_to = integer("pad_to", pad_to, minimum=1)
    if ragged != "pad":
        raise ValueError(
            f"pad_to={pad_to} requires ragged='pad', which pads the images of a batch, but ragged is {ragged!r}; "
            "set ragged='pad', or omit pad_to"
        )
    return pad_to


def padded_hw(sizes_hw: np.ndarray, pad_to: int | None) -> tuple[int, int]:
    """Return the height and width to which images of these sizes, (N, 2), are padded: the maxima, rounded up to
    multiples of `pad_to`."""
    multiple = int(pad_to or 1)
    height, width = (-(-side // multiple) * multiple for side in sizes_hw.max(axis=0).tolist())
    return height, width


def _select(name: str, device: torch.device, reference: Backend, *, forced: bool) -> tuple[Backend, str | None]:
    """Return the backend with this name, and None. If the backend cannot be used, warn, and return the reference and
    the reason; with `forced`, do so only if the compiler is to blame, and raise all other errors."""
    try:
        if message := _backend_class(name).unmet_requirement(device):
            raise BackendError(message)
        return _backend_class(name)(device), None
    except BackendError as error:
        if forced and not isinstance(error, CompilerError):
            raise
        note = f"{name} cannot be used: {error}"
        # The warning is attributed to this line (stacklevel=1), so it is shown only once for all loaders.
        warnings.warn(f"the backend 'torch' is used on {device}, because {note}", RuntimeWarning, stacklevel=1)
        return reference, note


def _backend_class(name: str) -> type[Backend]:
    module, class_name = BACKENDS[name]
    return getattr(importlib.import_module(module), class_name)
