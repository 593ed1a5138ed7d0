"""The leaves of the samples of a batch, put together again: image columns as one tensor, the rest as `default_collate`.

Runs in the main process, after the stage. Nesting is kept the way torch's `default_collate` keeps it: a tuple of a
sample becomes a list of the batch, named tuples and mappings keep their type.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from gpuload.datasets.tree import Structure, assembled, describe
from gpuload.errors import CollateError
from gpuload.ring.chunk import TensorBits

__all__ = ["collate", "common_structure"]


def common_structure(
    structures: Sequence[Structure], places: Sequence[tuple[int, ...]], names: Callable[[int], str]
) -> tuple[Structure, tuple[int, ...]]:
    """The one structure and the one choice of image leaves that all samples of a batch have.

    Raises:
        CollateError: two samples differ; the message names them.
    """
    for row in range(1, len(structures)):
        if structures[row] != structures[0] or places[row] != places[0]:
            raise CollateError(
                f"{names(0)} is {_shown(structures[0], places[0])}, but {names(row)} is "
                f"{_shown(structures[row], places[row])}: all samples of a batch must have the same structure, with "
                "their images in the same places; let the dataset return one form"
            )
    return structures[0], places[0]


def _shown(structure: Structure, places: tuple[int, ...]) -> str:
    return f"{describe(structure)} with its images at leaf {', '.join(map(str, places)) or 'none'}"


def collate(
    structure: Structure,
    ready: Mapping[int, Any],
    values: Sequence[Sequence[Any]],
    place: Callable[[Any], Any],
    names: Callable[[int], str],
) -> Any:
    """Build the batch.

    Args:
        structure: of every sample.
        ready: leaves of the batch that are finished, images among them, by their number depth first.
        values: for each sample its other leaves, in order.
        place: moves a tensor to the device.
        names: how to name the sample of a row in an error.

    Raises:
        CollateError: the values of a leaf cannot be put together; the message names two samples.
    """
    numbers = itertools.count()
    columns = iter(zip(*values, strict=True))

    def leaf(within: str) -> Any:
        number = next(numbers)
        if number in ready:
            return ready[number]
        # Strings stay as they are: default_collate has a tuple of them in the place of a tuple's, else a list.
        column = next(columns)
        return _column(column if within in ("tuple", "list") else list(column), number, place, names)

    return assembled(structure, leaf, keep_tuples=False)  # as default_collate has it


def _column(column: Sequence[Any], number: int, place: Callable[[Any], Any], names: Callable[[int], str]) -> Any:
    if any(isinstance(value, TensorBits) for value in column):
        column = [value.tensor() if isinstance(value, TensorBits) else value for value in column]
    try:
        result = default_collate(column)  # pyright: ignore[reportArgumentType]  a tuple will do
    except (TypeError, RuntimeError, ValueError) as error:
        shapes = [getattr(value, "shape", None) for value in column]
        other = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), None)
        where = (
            f"{names(0)} has shape {tuple(shapes[0] or ())} and {names(other)} has {tuple(shapes[other] or ())}"
            if other is not None
            else f"{names(0)} has a {type(column[0]).__name__}"
        )
        raise CollateError(
            f"leaf {number} of the samples cannot be put together into a batch: {where} ({error}); "
            "return values of one shape, of types that torch's default_collate knows"
        ) from error
    return place(result) if isinstance(result, torch.Tensor) else result
