"""Runs cases, and makes a short hash of all that a loader gives: what is recorded, and what it is compared with.

Before Triton is imported its interpreter has to be asked for; `record.py` and the tests' conftest.py do that.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bits.cases import Case
from bits.samples import Samples

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.masks import MaskStage

__all__ = ["RECORDED", "difference", "environment", "hash_of", "recorded"]

RECORDED = Path(__file__).parent / "recorded.json"
PACKAGES = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "pillow": ("pillow",),
    "simplejpeg": ("simplejpeg",),
    "nvimgcodec": ("nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13"),
    "kornia": ("kornia",),
    "dali": ("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    "triton": ("triton",),
}
ALL = ("python", "machine", "cpu", "numpy", "torch", "pillow", "simplejpeg", "nvimgcodec")
OF_BACKENDS = {"kornia": ("kornia",), "dali": ("dali",), "fused": ("triton", "interpreter")}


@cache
def environment() -> dict[str, str | None]:
    """What bits may depend on, beside the code."""
    parts: dict[str, str | None] = {name: _version(names) for name, names in PACKAGES.items()}
    parts["python"] = ".".join(platform.python_version_tuple()[:2])
    parts["machine"] = platform.machine()
    parts["cpu"] = torch.backends.cpu.get_cpu_capability()
    parts["interpreter"] = os.environ.get("TRITON_INTERPRET")
    return dict(sorted(parts.items()))


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@cache
def recorded() -> dict[str, Any]:
    """What was recorded: the environment, and the hashes by case and run."""
    return json.loads(RECORDED.read_text())


def difference(run: str) -> str | None:
    """In which parts that a run depends on this environment differs from the recorded one; None where in none."""
    then, now = recorded()["environment"], environment()
    parts = [part for part in (*ALL, *OF_BACKENDS.get(run, ())) if then[part] != now[part]]
    return "; ".join(f"{part} is {now[part]}, recorded with {then[part]}" for part in parts) or None


def hash_of(case: Case, run: str) -> str:
    """16 hexadecimal digits of all batches of a case, and of its errors."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "device": "cpu", "seed": 11, "ragged": "error"}
    options |= {"backend": "torch" if run == "batched" else run, **case.make(Samples(small=run == "fused"))}
    digest, epochs = hashlib.sha256(), 1 if run == "fused" else case.epochs
    with warnings.catch_warnings(), in_batches() if run == "batched" else contextlib.nullcontext():
        if case.warns:
            warnings.simplefilter("ignore", RuntimeWarning)
        for value in case.drive(options) if case.drive is not None else _batches(case, options, epochs):
            _add(digest, value, strides=case.strides)
    return digest.hexdigest()[:16]


def _batches(case: Case, options: dict[str, Any], epochs: int) -> Iterator[Any]:
    with gl.Loader(**options) as loader:
        if case.first_epoch:
            loader.set_epoch(case.first_epoch)
        for _ in range(epochs):
            yield loader.epoch
            yield from loader
        for record in loader.errors:
            yield record.epoch, record.position, record.index, record.replaced_by


@contextlib.contextmanager
def in_batches() -> Iterator[None]:
    """Let the reference do on the CPU as on CUDA: whole batches at once, for all that a loader compiles meanwhile."""
    sample = np.zeros((4, 4, 3), np.uint8), gl.Mask(np.zeros((4, 4), np.uint8))
    with gl.Loader([sample], transforms=[T.CenterCrop(2)], num_workers=0, device="cpu", backend="torch") as loader:
        next(iter(loader))  # all modules that are needed are there now
    modules = [module for path, module in list(sys.modules.items()) if path.partition(".")[0] == "gpuload"]
    changes = [(function, partial(function, runner="batched")) for function in (compile_stage, MaskStage)]
    with contextlib.ExitStack() as stack:
        for old, new in changes:
            for module in modules:
                for name in [name for name, value in vars(module).items() if value is old]:
                    setattr(module, name, new)
                    stack.callback(setattr, module, name, old)
        yield


def _add(digest: Any, value: Any, *, strides: bool) -> None:
    """Types, keys, dtypes, shapes and numbers, whatever the order in memory."""
    add = partial(_add, digest, strides=strides)
    digest.update(f"{type(value).__name__}(".encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} {value.device} ".encode())
        if strides:
            digest.update(f"{value.stride()} ".encode())
        digest.update(_bytes(value))
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key, inner in value.items():
            add(key)
            add(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            add(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            add(field.name)
            add(getattr(value, field.name))
    elif value is None or isinstance(value, str | bytes | int | float):
        digest.update(repr(value).encode())
    else:
        raise TypeError(f"a batch with {type(value).__name__}, which has no hash here")
    digest.update(b")")


def _bytes(tensor: torch.Tensor) -> bytes:
    """The numbers in the order of the axes, whatever the strides."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return flat.view(torch.uint8).numpy().tobytes()
