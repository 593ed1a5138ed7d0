"""From a chain of transforms to the stage that applies it: options checked, a backend chosen, its runners made."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import torch

from gpuload.errors import BackendError, CompilerError
from gpuload.stage import device as devices
from gpuload.stage.backend import Backend
from gpuload.stage.finish import Finish
from gpuload.stage.plan import PlanStep, make_plan
from gpuload.stage.reference.backend import Runner, TorchBackend
from gpuload.stage.segments import SegmentRunner
from gpuload.stage.stage import Stage
from gpuload.transforms import Chain
from gpuload.transforms.arguments import dtype_name, is_module, whole

__all__ = ["BackendName", "MemoryFormat", "Ragged", "check_stage", "compile_stage"]

BackendName = Literal["auto", "torch", "kornia", "dali", "fused"]
MemoryFormat = Literal["contiguous_format", "channels_last"]
Ragged = Literal["error", "list", "pad", "views"]

FLOATS: Final = ("float16", "bfloat16", "float32")
# Imported when asked for: Kornia, DALI and Triton take seconds.
HOMES: Final = {
    "torch": ("gpuload.stage.reference.backend", "TorchBackend"),
    "kornia": ("gpuload.stage.kornia", "KorniaBackend"),
    "dali": ("gpuload.stage.dali", "DaliBackend"),
    "fused": ("gpuload.stage.fused", "FusedBackend"),
}


def compile_stage(
    chain: Chain,
    *,
    device: str | torch.device,
    backend: str = "auto",
    dtype: Any = None,
    memory_format: Any = "contiguous_format",
    ragged: str = "error",
    cpu_threads: int | None = None,
    runner: Runner | None = None,
) -> Stage:
    """Make the stage that applies a chain of transforms to batches.

    Args:
        chain: the transforms, as a `gpuload.transforms.Chain`.
        device: where batches are made: a CPU, a CUDA or an XPU device.
        backend: ``"torch"``, the reference; ``"kornia"``, ``"dali"`` or ``"fused"`` (Triton), with the reference for
            what these lack; ``"auto"``: ``"fused"`` on a GPU, ``"torch"`` on the CPU.
        dtype: of images that `ToDtype` or `Normalize` makes floats of: ``"float32"``, ``"float16"`` or
            ``"bfloat16"``, or torch's objects. None: what `ToDtype` says, float32 without it. Images that stay levels
            are uint8 in any case.
        memory_format: ``"contiguous_format"`` (N×C×H×W) or ``"channels_last"``, or torch's objects.
        ragged: what happens if the sizes of the results differ: ``"error"``. Always a list of tensors: ``"list"``.
            Always padded with zeros on the right and at the bottom, and returned with the sizes: ``"pad"``. A list, of
            views of one tensor if all sizes are equal: ``"views"``.
        cpu_threads: how many threads torch uses within a call, at least 1; None: as many as it is set to.
        runner: of the reference: ``"single"`` takes one image after the other (CPU), ``"batched"`` many at once; None:
            by the device.

    Raises:
        TypeError: `chain` is no Chain, or an option is of the wrong type.
        ValueError: an option is not one of these, or does not go with the chain.
        BackendError: the backend that was asked for cannot be used here.
    """
    device, name, layout = check_stage(chain, device, backend, dtype, memory_format, ragged, cpu_threads)
    if device.type != "cpu" and device.index is None:  # constants stay on it, whichever device is current later
        device = devices.current_device()
    if runner is not None:
        _one_of("runner", runner, get_args(Runner))
    reference = TorchBackend(device, runner)
    chosen, note = reference, None
    if backend != "torch" and (backend != "auto" or device.type != "cpu"):
        chosen, note = _chosen("fused" if backend == "auto" else backend, device, reference, forced=backend != "auto")
    backends = {"torch": reference, chosen.name: chosen}
    plan = make_plan(chain, chosen, note=note)
    finishes = [Finish.of(line.transforms, name) for line in chain.lines]
    runs = [SegmentRunner(steps, finish, backends) for steps, finish in zip(plan.views, finishes, strict=True)]

    def by_reference(view: int, levels: str) -> tuple[Finish, SegmentRunner]:
        transforms = chain.lines[view].transforms
        finish = Finish.of(transforms, name, levels)
        steps = [PlanStep(transform, reference.name) for transform in transforms]
        return finish, SegmentRunner(steps, finish, {reference.name: reference})

    return Stage(
        chain,
        device=device,
        finishes=finishes,
        runs=runs,
        by_reference=by_reference,
        plan=plan,
        backends=backends,
        memory_format=layout,
        ragged=ragged,
        cpu_threads=cpu_threads,
    )


def check_stage(
    chain: Chain,
    device: str | torch.device | None,
    backend: str,
    dtype: Any,
    memory_format: Any,
    ragged: str,
    cpu_threads: int | None,
) -> tuple[torch.device, str | None, str]:
    """Check the arguments of `compile_stage`; returns the device, and the names of the dtype and the memory format.

    `device` None: CUDA or XPU if it is available, else the CPU. It is not initialized: making a loader must not cost a
    context on a GPU.

    Raises:
        TypeError, ValueError, BackendError: as `compile_stage` does.
    """
    if not isinstance(chain, Chain):
        raise TypeError(f"chain must be a transforms.Chain, got {type(chain).__name__}; write T.Chain([…])")
    _one_of("backend", backend, get_args(BackendName))
    _one_of("ragged", ragged, get_args(Ragged))
    layout = str(memory_format).removeprefix("torch.")
    _one_of("memory_format", layout, get_args(MemoryFormat))
    if dtype is not None:
        if str(dtype).removeprefix("torch.") == "uint8":
            raise ValueError(
                "dtype='uint8' is not a dtype of float images; leave Normalize and ToDtype out to get uint8 ones"
            )
        dtype = dtype_name("dtype", dtype, FLOATS)
    if cpu_threads is not None:
        whole("cpu_threads", cpu_threads, least=1)
    if device is None:
        device = devices.usual_type()
    device = torch.device(device)
    if device.type not in ("cpu", *devices.KINDS):
        raise ValueError(f"device must be a CPU, a CUDA or an XPU device, got {device}")
    if device.type != "cpu" and device.type != devices.usual_type():
        kind = device.type.upper()
        raise ValueError(f"device is {str(device)!r}, but torch finds no {kind} device here; use device='cpu'")
    if chain.module is not None and ragged in ("list", "pad"):
        raise ValueError(
            f"ragged={ragged!r} does not go with {chain.last} at the end of the transforms, which needs one tensor for "
            "the batch" + ("" if is_module(chain.module) else "; T.Lambda(…, per='image') is called with each image")
        )
    if chain.mixing is not None and ragged in ("list", "pad"):
        raise ValueError(
            f"ragged={ragged!r} does not go with {type(chain.mixing).__name__}, which mixes images of one size; end "
            "the transforms with a crop or a Resize((height, width)) before it, and leave ragged out"
        )
    if backend not in ("auto", "torch") and (missing := _class_of(backend).missing(device)):
        raise BackendError(missing)
    return device, dtype, layout


def _chosen(name: str, device: torch.device, reference: Backend, *, forced: bool) -> tuple[Backend, str | None]:
    """The backend of this name; or, if it cannot be used and is not `forced`, the reference and why, with a warning."""
    try:
        if missing := _class_of(name).missing(device):
            raise BackendError(missing)
        return _class_of(name)(device), None
    except BackendError as error:
        if forced and not isinstance(error, CompilerError):
            raise
        note = f"{name} cannot be used: {error}"
        # With this line as its origin, it is shown once, however many loaders there are.
        warnings.warn(f"the backend 'torch' is used on {device}, since {note}", RuntimeWarning, stacklevel=1)
        return reference, note


def _class_of(name: str) -> type[Backend]:
    module, kind = HOMES[name]
    return getattr(importlib.import_module(module), kind)


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
