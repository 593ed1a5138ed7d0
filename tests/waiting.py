"""Where the host would wait for a device: the real loader on tensors that say they are on CUDA, and are computed here.

Within `Device` each tensor of the "device" is a wrapper; every function of torch is called at once, on the CPU, and
what would make the host wait is noted: a copy from memory that is not page-locked, or a blocking one; a number that is
read back; a result whose size depends on data. `on_device()` lets a `gpuload.Loader` run there. Kernels of Triton run
in its interpreter, or not at all.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import gpuload as gl
from gpuload.stage.transfer import CpuTransfer, _starts

__all__ = ["Device", "OnDevice", "on_device"]

CUDA = torch.device("cuda:0")
PACKAGE = str(Path(gl.__file__).parent)
# What gives numbers to the host, or a result whose size depends on them.
READS = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "nonzero", "argwhere", "masked_select", "equal", "allclose", "bincount", "unique", "_unique2", "unique_consecutive",
    "is_nonzero",
}  # fmt: skip
TO_HOST = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}  # attributes that are tensors


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device; `held` is on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        shown = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CUDA,
        )
        shown.held = held
        return shown

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the device, outside of its mode")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def record_stream(self, stream: Any) -> None:
        pass


def held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


class Device(TorchFunctionMode):
    """The device, while it is entered.

    Attributes:
        waits: for each wait of the host, what was done and the line of the package that did it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._locked: dict[int, Any] = {}  # page-locked memory, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = any(isinstance(leaf, OnDevice) for leaf in leaves)
        if name == "__get__" and not (there and getattr(func.__self__, "__name__", "") in VIEWS):
            return func(*args, **kwargs)
        if name in ("is_pinned", "pin_memory"):
            return self._is_locked(args[0]) if name == "is_pinned" else self._lock(args[0])
        if name in ("data_ptr", "record_stream", "as_subclass", "__repr__", "get_device", "__hash__"):
            return func(*args, **kwargs)
        wanted, rest = _device_in(name, args, kwargs)
        goes = there if wanted is None else wanted.type != "cpu"
        if name in ("to", "cpu", "cuda", "tensor", "as_tensor", "new_tensor", "copy_", "asarray"):
            source = args[1] if name in ("copy_", "new_tensor") else args[0]
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            self._note_copy(name, source, goes, blocking)
        elif there and (name in READS or (name == "where" and len(args) == 1)):
            self.note(name)
            goes = name not in TO_HOST and name not in ("equal", "allclose", "is_nonzero")
        elif there and name == "repeat_interleave" and isinstance(args[1], torch.Tensor):
            self.note(name)
        elif there:
            for leaf in leaves:
                if not isinstance(leaf, OnDevice) and leaf.dim():
                    self.note(f"{name} with a tensor of the host")
            if name in ("__getitem__", "__setitem__", "index_put_") and any(
                isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
            ):
                self.note(f"{name} by a mask")
        if name == "new_tensor":
            func, rest = torch.tensor, (rest[1],)
            kwargs = {"dtype": args[0].dtype, **kwargs}
        found = func(*tree_map(held, rest), **tree_map(held, kwargs))
        if kwargs.get("out") is not None:
            return kwargs["out"]
        if (
            goes
            and args
            and isinstance(args[0], OnDevice)
            and found is args[0].held
            and name not in ("resize_", "unsqueeze_")
        ):
            return args[0]
        return tree_map(_shown, found) if goes else found

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        place = f"{frames[-1].filename[len(PACKAGE) + 1 :]}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"
        self.waits.append(f"{what}, {place}")

    def _note_copy(self, name: str, source: Any, goes: bool, blocking: bool) -> None:
        was = isinstance(source, OnDevice)
        if was != goes and (not goes or blocking or not self._is_locked(source)):
            self.note(f"{name}() to the device" if goes else f"{name}() from the device")

    def _lock(self, tensor: torch.Tensor) -> torch.Tensor:
        locked = tensor.clone()
        self._locked[locked.untyped_storage()._cdata] = locked.untyped_storage()
        return locked

    def _is_locked(self, tensor: Any) -> bool:
        if isinstance(tensor, OnDevice) or not isinstance(tensor, torch.Tensor):
            return False
        return tensor.untyped_storage()._cdata in self._locked


def _device_in(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, Any]:
    """The device that a call names, and its other arguments; it is taken out of the keywords."""
    kwargs.pop("pin_memory", None)
    if kwargs.get("device") is not None:
        return torch.device(kwargs.pop("device")), args
    if name in ("cpu", "cuda"):
        return torch.device(name), args
    if name == "to" and len(args) > 1 and isinstance(args[1], torch.device | str):
        return torch.device(args[1]), (args[0], *(entry for entry in args[2:] if isinstance(entry, torch.dtype)))
    return None, args


def _shown(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) else value


class Transfer(CpuTransfer):
    """What `CudaTransfer` does, at once."""

    asynchronous = True

    def load(self, batch: Any, release: Callable[[], None]) -> tuple[torch.Tensor, list[int]]:
        self._release, batch.loaded = release, True
        starts = _starts(batch)
        whole = np.empty(starts.pop(), np.uint8)
        for part, start in zip(batch.parts, starts, strict=True):
            if part.data is not None:
                whole[start : start + part.used_bytes] = part.data[: part.used_bytes]
        return OnDevice(torch.from_numpy(whole)), starts

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(CUDA, non_blocking=True)


class Launched:
    """A kernel of Triton, launched on tensors of the device: interpreted, or nothing at all."""

    def __init__(self, kernel: Any, runs: bool, note: Callable[..., None] | None = None) -> None:
        self._kernel, self._runs, self._note = kernel, runs, note

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            if self._note is not None:
                self.note(self._kernel, args, options)
            if self._runs:
                with torch._C.DisableTorchFunction():
                    self._kernel[grid](*map(held, args), **options)

        return launch


KERNELS = (
    ("runner", "one_pass"),
    ("weights", "_weigh"),
    ("statistics", "_count"),
    ("statistics", "_tabulate"),
    ("mixing", "_mix"),
    ("erasing", "_erase_images"),
)


def on_device(monkeypatch: Any, *, runs: bool = False, note: Callable[..., None] | None = None) -> Device:
    """Let gpuload find a CUDA device, which is a `Device`; Triton's kernels are interpreted if `runs`, and `note` is
    told of each launch: the kernel, its arguments and options."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr("gpuload.loader.session.make_transfer", lambda ring, device: Transfer(ring))
    for module, name in KERNELS:
        found = __import__(f"gpuload.stage.fused.{module}", fromlist=[name])
        monkeypatch.setattr(found, name, Launched(getattr(found, name), runs, note))
    return Device()
