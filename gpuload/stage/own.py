"""Calls what is the user's own with the images or masks of a batch, and checks what comes back.

On the CPU a class is called with a few images at a time, so that what it makes on the way stays in the cache. Runs in
the process of the stage, on its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.finished import Outputs
from gpuload.stage.module import generators_kept, note_input, seed_generators
from gpuload.stage.upload import upload
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Call, in_params

__all__ = ["cut_at_calls", "run_call"]

Write = Callable[[np.ndarray, torch.Tensor], None]
LEVELS: Final = (
    ": it gets levels there, 0 … 255. Bring them back with .round().clamp(0, 255).to(torch.uint8), say "
    "float_levels = True in a class of T.Custom, or put it after ToDtype"
)
PIECE_BYTES: Final = 1 << 20  # of images as float32, on the CPU at once


def cut_at_calls(program: Program) -> list[Program | Call]:
    """A program as the calls in it, and programs without any before, between and after them."""
    parts: list[Program | Call] = []
    start = 0
    for number, record in enumerate(program.records):
        if isinstance(record, Call):
            parts += [program.part(start, number), record] if number > start else [record]
            start = number + 1
    return [*parts, program.part(start, len(program.records))] if start < len(program.records) else parts


def run_call(record: Call, images: Outputs, method: str = "apply", *, write: Write | None = None) -> None:
    """Call a method of the user's transform with images or masks, and write what it returns in their place.

    Args:
        record: what was drawn.
        images: N×C×H×W, or a list of C×H×W, of all rows of the batch.
        method: ``"apply"`` or ``"apply_masks"``.
        write: takes the results of some rows instead, while they are in the cache: uint8, or levels as float32.

    Raises:
        TypeError, ValueError: it returned something else, or is to be called with a batch of different sizes.
    """
    rows = np.arange(len(images)) if record.rows is None else record.rows
    if not len(rows):
        return
    own, device = record.own, images[0].device
    widens = own.float_levels and method == "apply" and images[0].dtype == torch.uint8
    call, params = getattr(own, method), in_params(record.params, lambda array: _on_device(array, device))
    wide = torch.empty(0, dtype=torch.float32, device=device)
    with generators_kept(device) as generators:
        for some in _pieces(images, rows, own):
            given = _given(images, rows[some])
            if widens:  # in the same memory for all pieces: fresh memory costs as much as a call
                wide = wide.resize_(given.shape).copy_(given)
                given = wide
            at = some if isinstance(some, slice) else upload(some, device)
            seed_generators(generators, int(record.seeds[some][0]))
            told = in_params(params, lambda tensor, at=at: tensor[at])
            put = given[0] if own.per == "image" else given
            try:
                found = call(put, told)
            except Exception as error:
                if method == "apply":
                    note_input(error, _place(record, method), put)
                raise
            if own.per == "image" and isinstance(found, torch.Tensor):
                found = found[None]
            _check(record, method, given, found)
            if widens:
                found = torch.round(found, out=given).clamp_(0, 255)
            if write is None:
                _write(images, rows[some], given, found)
            else:
                write(rows[some], found)


def _pieces(images: Outputs, rows: np.ndarray, own: Any) -> Iterator[Any]:
    """Which of the rows go together, by their numbers: slices, or int64 arrays."""
    if own.per == "image":
        yield from (slice(number, number + 1) for number in range(len(rows)))
        return
    first = images[int(rows[0])]
    if isinstance(images, torch.Tensor):
        step = len(rows)
        if own.per == "images" and first.device.type == "cpu":
            step = max(1, PIECE_BYTES // max(1, 4 * first.numel()))
        yield from (slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step))
        return
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows.tolist()):
        groups.setdefault(tuple(images[row].shape), []).append(number)
    if own.per == "batch" and len(groups) > 1:
        one, other = list(groups)[:2]
        raise ValueError(
            f"{own.called} is called with a batch, whose images must be of one size, but there are "
            f"{one[1]}×{one[2]} and {other[1]}×{other[2]} (height × width); put a crop or a Resize((height, width)) "
            "before it, or use T.Lambda(…, per='image')"
        )
    for numbers in groups.values():
        if own.per == "images" and first.device.type == "cpu":
            yield from (slice(number, number + 1) for number in numbers)
        else:
            yield np.array(numbers, np.int64)


def _given(images: Outputs, rows: np.ndarray) -> torch.Tensor:
    """The images of some rows as one tensor: a view, if there is one."""
    if isinstance(images, torch.Tensor):
        first, count = int(rows[0]), len(rows)
        together = int(rows[-1]) - first + 1 == count
        return images[first : first + count] if together else images[upload(rows, images.device)]
    return images[int(rows[0])][None] if len(rows) == 1 else torch.stack([images[row] for row in rows.tolist()])


def _write(images: Outputs, rows: np.ndarray, given: torch.Tensor, found: torch.Tensor) -> None:
    if isinstance(images, torch.Tensor):
        if found is given and found.dtype == images.dtype and given.data_ptr() == images[int(rows[0])].data_ptr():
            return  # changed in place
        if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
            images[int(rows[0]) : int(rows[-1]) + 1].copy_(found)
        else:
            images[upload(rows, images.device)] = found.to(images.dtype)
        return
    for row, image in zip(rows.tolist(), found, strict=True):
        images[row].copy_(image)


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return upload(array.astype(np.float32) if array.dtype == np.float64 else array, device)


def _check(record: Call, method: str, given: torch.Tensor, found: Any) -> None:
    fits = isinstance(found, torch.Tensor) and found.shape == given.shape
    if fits and (found.dtype == given.dtype or (found.is_floating_point() and given.is_floating_point())):
        if found.device == given.device:
            return
        raise ValueError(f"{_place(record, method)} returned a tensor on {found.device}, for one on {given.device}")
    shape, got = tuple(given.shape), "None" if found is None else type(found).__name__
    if record.own.per == "image":
        shape = shape[1:]
    if isinstance(found, torch.Tensor):
        own = found[0] if record.own.per == "image" else found
        got = f"{_dtype(own)} of shape {tuple(own.shape)}"
    levels = isinstance(found, torch.Tensor) and given.dtype == torch.uint8 and found.dtype.is_floating_point
    raise (ValueError if isinstance(found, torch.Tensor) else TypeError)(
        f"{_place(record, method)} was given {_dtype(given)} of shape {shape} and returned {got}; it must return a "
        "tensor of the same shape and dtype" + (LEVELS if levels else "")
    )


def _place(record: Call, method: str) -> str:
    own = record.own
    name = own.called if own.per != "images" else f"{own.called}.{method}"
    return f"{name} (number {record.step + 1} of the transforms)"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
