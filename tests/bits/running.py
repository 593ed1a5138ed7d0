"""Runs cases and hashes the batches of their loaders, and separately what these batches are made from: the order of the
samples, the decoded pixels and the random parameters, which do not depend on torch.

TRITON_INTERPRET must be set before Triton is imported; `record.py` and the tests' conftest.py set it.
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
import pytest
import torch
from bits.cases import Case
from bits.samples import Samples

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.transform import BatchTransform
from gpuload.ring.columns import ImageColumn
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.masks import MaskStage

__all__ = [
    "INPUTS", "RECORDED", "batch_hash", "decoders_differ", "environment", "environment_difference", "input_hashes",
    "recorded",
]  # fmt: skip

INPUTS = ("order", "regions", "draws")
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
COMMON_PARTS = ("python", "machine", "cpu", "numpy", "torch", "pillow", "simplejpeg", "nvimgcodec")
DECODERS = ("pillow", "simplejpeg", "nvimgcodec")
BACKEND_PARTS = {"kornia": ("kornia",), "dali": ("dali",), "fused": ("triton", "interpreter")}


@cache
def environment() -> dict[str, str | None]:
    """Return the versions and settings that bits may depend on, in addition to the code."""
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
    """Return the recorded environment, the batch hashes by case and run, and the input hashes by case and kind."""
    return json.loads(RECORDED.read_text())


def environment_difference(run: str) -> str | None:
    """Return how this environment differs from the recorded one, in the parts that a run depends on, or None."""
    return _difference((*COMMON_PARTS, *BACKEND_PARTS.get(run, ())))


def decoders_differ() -> bool:
    return _difference(DECODERS) is not None


def _difference(parts: tuple[str, ...]) -> str | None:
    old, new = recorded()["environment"], environment()
    if new["nvimgcodec"] is None:  # simplejpeg then decodes the same pixels
        parts = tuple(part for part in parts if part != "nvimgcodec")
    texts = [f"{part} is {new[part]}, recorded with {old[part]}" for part in parts if old[part] != new[part]]
    return "; ".join(texts) or None


def batch_hash(case: Case, run: str) -> str:
    """Return 16 hexadecimal digits of all batches of a case and of its errors."""
    digest = hashlib.sha256()
    with in_batches() if run == "batched" else contextlib.nullcontext():
        for value in _values(case, run):
            _add(digest, value, strides=case.strides)
    return digest.hexdigest()[:16]


def input_hashes(case: Case) -> dict[str, str]:
    """Hash what the batches of a case are made from, which does not depend on torch.

    Returns:
        16 hexadecimal digits each for the ``"order"`` of samples (positions, labels and other integers of the batches),
        their decoded ``"regions"``, and the ``"draws"``: the random parameters of the transforms, in the order in which
        the transforms store them.
    """
    digests = {name: hashlib.sha256() for name in INPUTS}
    transform_batch, draw_programs = BatchTransform.__call__, BatchTransform._draw_programs

    def transform(self: BatchTransform, epoch: int, columns: Any, numbers: np.ndarray, read: Any) -> Any:
        def read_and_hash(images: ImageColumn) -> RaggedImages:
            ragged = read(images)
            pixels = ragged.pixels.numpy()
            for offset, shape, region in zip(ragged.offsets, ragged.shapes, ragged.regions_tlhw, strict=True):
                _add_numbers(digests["regions"], [shape, region, pixels[offset : offset + shape.prod()]])
            return ragged

        _add_numbers(digests["order"], [epoch, columns.positions])
        return transform_batch(self, epoch, columns, numbers, read_and_hash)

    def draw(self: BatchTransform, epoch: int, columns: Any) -> Any:
        programs = draw_programs(self, epoch, columns)
        _add_numbers(digests["draws"], programs)
        return programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchTransform, "__call__", transform)
        patch.setattr(BatchTransform, "_draw_programs", draw)
        for value in _values(case, "torch"):
            _add_numbers(digests["order"], _integers(value))
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


def _values(case: Case, run: str) -> Iterator[Any]:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "device": "cpu", "seed": 11, "ragged": "error"}
    options |= {"backend": "torch" if run == "batched" else run, **case.make(Samples(small=run == "fused"))}
    with warnings.catch_warnings():
        if case.warns:
            warnings.simplefilter("ignore", RuntimeWarning)
        yield from case.drive(options) if case.drive is not None else _batches(case, options, run)


def _batches(case: Case, options: dict[str, Any], run: str) -> Iterator[Any]:
    epochs = 1 if run == "fused" else case.epochs
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
    """Let the reference process entire batches on the CPU, as on CUDA, in all loaders created within the context."""
    sample = np.zeros((4, 4, 3), np.uint8), gl.Mask(np.zeros((4, 4), np.uint8))
    with gl.Loader([sample], transforms=[T.CenterCrop(2)], num_workers=0, device="cpu", backend="torch") as loader:
        next(iter(loader))  # imports all modules that a loader needs
    modules = [module for path, module in list(sys.modules.items()) if path.partition(".")[0] == "gpuload"]
    replacements = [(function, partial(function, runner="batched")) for function in (compile_stage, MaskStage)]
    with contextlib.ExitStack() as stack:
        for old, new in replacements:
            for module in modules:
                for name in [name for name, value in vars(module).items() if value is old]:
                    setattr(module, name, new)
                    stack.callback(setattr, module, name, old)
        yield


def _add(digest: Any, value: Any, *, strides: bool) -> None:
    """Add types, keys, dtypes, shapes and numbers to a digest, regardless of the order in memory."""
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
        raise TypeError(f"a batch contains {type(value).__name__}, which `_add` cannot hash")
    digest.update(b")")


def _add_numbers(digest: Any, value: Any) -> None:
    """Add arrays, numbers and strings to a digest, without their names and without a user's functions. Floats count as
    float32, because the last bit of float64 depends on the CPU, for which NumPy chooses its functions."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype == object:  # its bytes would be addresses
        value = value.tolist()
    if isinstance(value, np.ndarray | np.generic | float):
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        digest.update(f"{array.dtype} {array.shape} ".encode() + array.tobytes())
    elif isinstance(value, str | bytes | int) or value is None:
        digest.update(f"{value!r} ".encode())
    else:
        for inner in _children(value):
            _add_numbers(digest, inner)


def _integers(value: Any) -> list[Any]:
    """Return the strings, integers and one-dimensional arrays of integers in a batch."""
    if isinstance(value, torch.Tensor | np.ndarray):
        is_integer = "int" in str(value.dtype) or "bool" in str(value.dtype)
        return [value] if is_integer and value.ndim == 1 else []
    if isinstance(value, str | bytes | int):
        return [value]
    return [leaf for part in _children(value) for leaf in _integers(part)]


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the numbers in the order of the axes, regardless of the strides."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return flat.view(torch.uint8).numpy().tobytes()
