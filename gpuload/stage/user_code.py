"""Calls the user's code: custom transforms within a chain, and modules and functions at the end of the transforms.
Custom transforms get the images or masks of a batch, and their results are checked.

On the CPU, a subclass of `Custom` is called with a few images at a time, so that its intermediate results stay in the
cache.

A module such as Kornia's `AugmentationSequential` draws from torch's global generators. They are seeded for the call
and restored afterwards, so its draws depend only on the loader's seed, the epoch and the batch.

This module runs in the stage's process, and its GPU work on the stage's stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.device import generator_of, upload
from gpuload.stage.finish import Outputs
from gpuload.stage.ragged import rows_by_key
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Call, map_params

__all__ = ["apply_module", "note_input", "run_call", "split_at_calls"]

Write = Callable[[np.ndarray, torch.Tensor], None]
UINT8_REMEDY: Final = (
    ": images are uint8 at that point (0 to 255). Convert the result with .round().clamp(0, 255).to(torch.uint8), set "
    "float_levels = True in a subclass of T.Custom, or put the transform after ToDtype"
)
UINT8_NAMES: Final = ("uint8", "Byte", "unsigned char")  # in the errors of torch and Kornia
INPUT_PHRASES: Final = ("Expected input of", "Input size must have a shape of")  # in Kornia's errors about images
DATA_KEYS_PHRASES: Final = ("data_keys", "ops needs data keys")  # in Kornia's errors about masks, boxes and keypoints
PIECE_BYTES: Final = 1 << 20  # total size, as float32, of the images passed to one call on the CPU


def apply_module(module: Any, batch: torch.Tensor, seed: int) -> Any:
    """Apply an ``nn.Module`` or a function to an N×C×H×W batch.

    The result carries gradients if a parameter of the module requires them. `seed` seeds torch's generators for the
    call.
    """
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    requires_grad = any(parameter.requires_grad for parameter in parameters)
    with torch.set_grad_enabled(requires_grad), _preserved_generators(batch.device) as seed_all:
        seed_all(seed)
        return module(batch)


@contextlib.contextmanager
def _preserved_generators(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch's generators of the CPU and of a device; restore their states afterwards."""
    generators = {torch.default_generator, generator_of(device)}

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    states = [generator.get_state() for generator in generators]
    try:
        yield seed_all
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def note_input(error: Exception, name: str, images: torch.Tensor) -> None:
    """Add to an exception from the user's code the dtype and shape of its input and the remedy, if it is known. This
    text precedes the message of an exception about the input, such as Kornia's; otherwise it is a note."""
    message = str(error)
    note = f"{name} was called with {_dtype(images)} images of shape {tuple(images.shape)}"
    is_about_input = any(phrase in message for phrase in INPUT_PHRASES)
    if any(phrase in message for phrase in DATA_KEYS_PHRASES):
        is_about_input = True
        note = (
            f"{note} and nothing else, since a module in a chain gets only the images; create it with "
            "data_keys=['input'], and move masks, boxes and keypoints with gpuload's transforms"
        )
    elif images.dtype == torch.uint8:
        note = f"{note}; for floats in 0 … 1 put ToDtype('float32', scale=True) before it"
        is_about_input = is_about_input or any(name in message for name in UINT8_NAMES)
    elif is_about_input and images.shape[-3:-2] == (1,):
        note = f"{note}; for three channels put Grayscale(3) before ToDtype"
    if is_about_input and error.args == (message,):
        error.args = (f"{note}: {message}",)
    else:
        error.add_note(note)


def split_at_calls(program: Program) -> list[Program | Call]:
    """Split a program into its calls, and the programs without calls before, between and after the calls."""
    parts: list[Program | Call] = []
    start = 0
    for number, record in enumerate(program.records):
        if isinstance(record, Call):
            parts += [program.part(start, number), record] if number > start else [record]
            start = number + 1
    return [*parts, program.part(start, len(program.records))] if start < len(program.records) else parts


def run_call(record: Call, images: Outputs, method: str = "apply", *, write: Write | None = None) -> None:
    """Call a method of the user's transform with images or masks, and replace the images or masks with the results.

    Args:
        record: the call's images (`rows`), seeds and random parameters.
        images: all images or masks of the batch, as an N×C×H×W tensor or a list of C×H×W tensors.
        method: ``"apply"`` or ``"apply_masks"``.
        write: called with the indices of images and their results, while the results are in the CPU's cache; the
            results are then not written to `images`. They are uint8, or float32 values from 0 to 255.

    Raises:
        TypeError, ValueError: the method returned another type, shape or dtype, or it takes a batch but the images
            differ in size.
    """
    rows = np.arange(len(images)) if record.rows is None else record.rows
    if not len(rows):
        return
    transform, device = record.transform, images[0].device
    needs_floats = transform.float_levels and method == "apply" and images[0].dtype == torch.uint8
    call = getattr(transform, method)
    params = map_params(
        record.params, lambda array: upload(array.astype(np.float32) if array.dtype == np.float64 else array, device)
    )
    floats = torch.empty(0, dtype=torch.float32, device=device)
    with _preserved_generators(device) as seed_all:
        for piece in _pieces(images, rows, transform):
            batch = _gather(images, rows[piece])
            if needs_floats:  # all pieces reuse the same memory, because new memory costs as much as a call
                floats = floats.resize_(batch.shape).copy_(batch)
                batch = floats
            index = _index(piece, device)
            seed_all(int(record.seeds[piece][0]))
            piece_params = map_params(params, lambda tensor, index=index: tensor[index])
            argument = batch[0] if transform.per == "image" else batch
            try:
                result = call(argument, piece_params)
            except Exception as error:
                if method == "apply":
                    note_input(error, _location(record, method), argument)
                raise
            if transform.per == "image" and isinstance(result, torch.Tensor):
                result = result[None]
            _check(record, method, batch, result)
            if needs_floats:
                result = torch.round(result, out=batch).clamp_(0, 255)
            if write is None:
                _write(images, rows[piece], batch, result)
            else:
                write(rows[piece], result)


def _pieces(images: Outputs, rows: np.ndarray, transform: Any) -> Iterator[np.ndarray]:
    """For each call, yield the indices of its images in `rows`."""
    if transform.per == "image":
        yield from np.arange(len(rows))[:, None]
        return
    if is_dense := isinstance(images, torch.Tensor):
        groups = {tuple(images.shape[1:]): np.arange(len(rows))}
    else:
        groups = rows_by_key(tuple(images[row].shape) for row in rows.tolist())
    if transform.per == "batch" and len(groups) > 1:
        shape1, shape2 = list(groups)[:2]
        raise ValueError(
            f"{transform.display_name} takes a batch, so all images must have the same size, but there are "
            f"{shape1[1]}×{shape1[2]} and {shape2[1]}×{shape2[2]} (height × width); put a crop or a "
            "Resize((height, width)) before it, or use T.Lambda(…, per='image')"
        )
    for shape, indices in groups.items():
        step = len(indices)
        if transform.per == "images" and images[0].device.type == "cpu":
            step = max(1, PIECE_BYTES // max(1, 4 * prod(shape))) if is_dense else 1
        yield from (indices[start : start + step] for start in range(0, len(indices), step))


def _gather(images: Outputs, rows: np.ndarray) -> torch.Tensor:
    """Return the images of some rows as one tensor, a view where possible."""
    if isinstance(images, torch.Tensor):
        return images[_index(rows, images.device)]
    return images[int(rows[0])][None] if len(rows) == 1 else torch.stack([images[row] for row in rows.tolist()])


def _index(rows: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Return an index for rows of a tensor: a slice, which selects a view, if the rows are consecutive."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else upload(rows, device)


def _write(images: Outputs, rows: np.ndarray, batch: torch.Tensor, result: torch.Tensor) -> None:
    if isinstance(images, torch.Tensor):
        if result is batch and result.dtype == images.dtype and batch.data_ptr() == images[int(rows[0])].data_ptr():
            return  # the images were changed in place
        index = _index(rows, images.device)
        images[index] = result if isinstance(index, slice) else result.to(images.dtype)
        return
    for row, image in zip(rows.tolist(), result, strict=True):
        images[row].copy_(image)


def _check(record: Call, method: str, batch: torch.Tensor, result: Any) -> None:
    fits = isinstance(result, torch.Tensor) and result.shape == batch.shape
    if fits and (result.dtype == batch.dtype or (result.is_floating_point() and batch.is_floating_point())):
        if result.device == batch.device:
            return
        raise ValueError(
            f"{_location(record, method)} returned a tensor on {result.device}, but its input is on {batch.device}; "
            "create new tensors with device=images.device"
        )
    shape, got = tuple(batch.shape), "None" if result is None else type(result).__name__
    if record.transform.per == "image":
        shape = shape[1:]
    if isinstance(result, torch.Tensor):
        tensor = result[0] if record.transform.per == "image" else result
        got = f"{_dtype(tensor)} of shape {tuple(tensor.shape)}"
    returned_floats = isinstance(result, torch.Tensor) and batch.dtype == torch.uint8 and result.dtype.is_floating_point
    raise (ValueError if isinstance(result, torch.Tensor) else TypeError)(
        f"{_location(record, method)} was given {_dtype(batch)} of shape {shape} and returned {got}; it must return a "
        "tensor of the same shape and dtype" + (UINT8_REMEDY if returned_floats else "")
    )


def _location(record: Call, method: str) -> str:
    transform = record.transform
    name = transform.display_name if transform.per != "images" else f"{transform.display_name}.{method}"
    return f"{name} (transform number {record.step + 1})"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
