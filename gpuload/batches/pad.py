"""Collation by padding: arrays of different sizes become one tensor, with their sizes and the share of padding.

Runs wherever a loader collates: in the main process, or in a worker of gpuload or of torch's DataLoader. Workers import
this module, so it imports torch only when there is something to collate. It holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.datasets.tree import LEAF, Structure, assembled, describe, flatten
from gpuload.errors import CollateError

if TYPE_CHECKING:
    import torch

__all__ = ["Padded", "pad_collate"]

Shape = tuple[int | None, ...]


class Padded(NamedTuple):
    """Arrays of a batch as one tensor, as `pad_collate` makes it.

    Attributes:
        data: N×…, each array at the start of every axis of its row, the fill value after it.
        sizes: int64 (N, rank), the shape of each array.
        padding: the share of `data` that is padding, 0 … 1.
    """

    data: torch.Tensor
    sizes: torch.Tensor
    padding: float


def pad_collate(
    samples: Sequence[Any],
    *,
    to: Shape | Mapping[str, Shape] | None = None,
    value: float | Mapping[str, float] = 0,
) -> Any:
    """Collate samples into a batch, padding arrays of any rank to the batch's largest size or to a fixed one.

    Use it as ``collate_fn=gl.pad_collate`` of `Loader` or of torch's DataLoader, with options as
    ``collate_fn=functools.partial(gl.pad_collate, to=(100, 4))``. Every array or tensor of rank 1 or more becomes a
    `Padded`, even if all sizes are equal; all other leaves, and the nesting, are as in torch's ``default_collate``.

    Args:
        samples: nested tuples, lists, dicts and dataclasses, all of one structure. The arrays of a leaf have one rank
            and one dtype; their sizes may differ on every axis, and may be 0.
        to: the size that arrays are padded to, a number for each axis, None for the batch's largest on that axis. A
            dict gives the sizes of single leaves, by name: ``{"boxes": (100, 4)}``; others are padded to the batch's
            largest. A leaf's name is the path to it, keys, fields and indices joined by dots: ``"target.boxes"``,
            ``"1"``.
        value: the fill value; or a dict by leaf name, with 0 for other leaves.

    Raises:
        CollateError: samples differ in structure; the arrays of a leaf differ in rank or dtype, or one is larger than
            `to`; the message names the leaf, the samples (by their row in the batch) and the shapes.
        TypeError, ValueError: `to` or `value` is invalid, names a missing leaf, or does not suit a leaf's rank or
            dtype; there are no samples.

    Example:
        >>> samples = [{"boxes": np.ones((2, 4)), "label": 7}, {"boxes": np.ones((3, 4)), "label": 8}]
        >>> batch = pad_collate(samples, to={"boxes": (5, None)}, value=-1)
        >>> batch["boxes"].data.shape, batch["boxes"].sizes.tolist(), batch["boxes"].padding
        (torch.Size([2, 5, 4]), [[2, 4], [3, 4]], 0.5)
        >>> batch["boxes"].data[0, :, 0].tolist(), batch["label"]
        ([1.0, 1.0, -1.0, -1.0, -1.0], tensor([7, 8]))
    """
    _check(to, value)
    structure, columns = _columns(samples)
    names = _names(structure)
    padded = [name for name, column in zip(names, columns, strict=True) if any(map(_is_padded, column))]
    for option, given in (("to", to), ("value", value)):
        unknown = [name for name in given if name not in padded] if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError(
                f"{option}= names the leaf {unknown[0]!r}, but the leaves of these samples that are padded are "
                f"{', '.join(map(repr, padded)) or 'none'}"
            )
    leaves = iter(zip(names, columns, strict=True))

    def leaf(within: str) -> Any:
        name, column = next(leaves)
        if name in padded:
            shape = to.get(name) if isinstance(to, Mapping) else to
            return _pad(column, name, shape, value.get(name, 0) if isinstance(value, Mapping) else value)
        # default_collate returns strings as they come: in a tuple where it transposes a tuple or list.
        return _collate(column if within in ("tuple", "list") else list(column), name)

    return assembled(structure, leaf, keep_tuples=False)


def _columns(samples: Sequence[Any]) -> tuple[Structure, list[tuple[Any, ...]]]:
    """The structure of all samples, and the values of each leaf."""
    if not len(samples):
        raise ValueError("pad_collate() got no samples; a batch has at least one")
    rows: list[list[Any]] = [[] for _ in samples]
    structures = [flatten(sample, leaves) for sample, leaves in zip(samples, rows, strict=True)]
    for row, structure in enumerate(structures):
        if structure != structures[0]:
            raise CollateError(
                f"sample 0 of the batch is {describe(structures[0])}, but sample {row} is {describe(structure)}: all "
                "samples of a batch must have the same structure; let the dataset return one form"
            )
    return structures[0], list(zip(*rows, strict=True))


def _names(structure: Structure, path: tuple[str, ...] = ()) -> list[str]:
    """The name of each leaf, depth first."""
    if structure == LEAF:
        return [".".join(path)]
    _, cls, keys, children = structure
    if keys is None:
        keys = cls._fields if cls is not None else range(len(children))
    pairs = zip(keys, children, strict=True)
    return [name for key, child in pairs for name in _names(child, (*path, str(key)))]


def _is_padded(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, np.ndarray | torch.Tensor) and leaf.ndim > 0


def _pad(column: Sequence[Any], name: str, to: Shape | None, value: float) -> Padded:
    import torch

    tensors = _tensors(column, name)
    first = tensors[0]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    if to is None:
        to = (None,) * first.ndim
    if len(to) != first.ndim:
        raise ValueError(
            f"to={to} is for arrays of rank {len(to)}, but {_leaf(name)} has rank {first.ndim} (shape {shapes[0]}); "
            "give each leaf its own sizes: to={name: sizes}"
        )
    for axis, (limit, size) in enumerate(zip(to, largest, strict=True)):
        if limit is not None and size > limit:
            row = next(row for row, shape in enumerate(shapes) if shape[axis] > limit)
            raise CollateError(
                f"{_leaf(name)} of sample {row} of the batch has shape {shapes[row]}, more than to={to} has on axis "
                f"{axis}; let to= be as large as the largest, or cut arrays in the dataset"
            )
    if not _holds(first.dtype, value):
        raise ValueError(f"value={value!r} cannot be stored in {_leaf(name)}, which is {_dtype(first)}")
    shape = (len(tensors), *(size if limit is None else limit for limit, size in zip(to, largest, strict=True)))
    if all(size == shape[1:] for size in shapes):  # images after a crop, say: one copy on the device, not N
        data = torch.stack(tensors)
    else:
        data = torch.full(shape, value, dtype=first.dtype, device=first.device)
        for row, tensor in enumerate(tensors):
            data[(row, *map(slice, tensor.shape))] = tensor
    filled = sum(map(math.prod, shapes))
    padding = (data.numel() - filled) / data.numel() if data.numel() else 0.0
    return Padded(data, torch.tensor(shapes, dtype=torch.int64, device=first.device), padding)


def _tensors(column: Sequence[Any], name: str) -> list[torch.Tensor]:
    """The arrays of a leaf as tensors; an error names two that differ in rank or dtype."""
    first = next(row for row, leaf in enumerate(column) if _is_padded(leaf))
    shape = tuple(column[first].shape)
    for row, leaf in enumerate(column):
        if not _is_padded(leaf) or leaf.ndim != len(shape):
            what = f"of shape {tuple(leaf.shape)}" if hasattr(leaf, "shape") else f"of type {type(leaf).__name__}"
            raise CollateError(
                f"{_leaf(name)} is of shape {shape} in sample {first} of the batch, but {what} in sample {row}: "
                "padding keeps the number of axes; return arrays of one rank (for none, one with an axis of size 0)"
            )
    tensors = [_tensor(leaf, name, row) for row, leaf in enumerate(column)]
    for row, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise CollateError(
                f"{_leaf(name)} is {_dtype(tensors[0])} in sample 0 of the batch, but {_dtype(tensor)} in sample "
                f"{row}; return arrays of one dtype"
            )
    return tensors


def _tensor(leaf: Any, name: str, row: int) -> torch.Tensor:
    import torch

    if isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.flags.writeable or min(leaf.strides) < 0:  # torch warns of the first, and refuses the second
        leaf = leaf.copy()
    try:
        return torch.from_numpy(leaf)
    except (TypeError, ValueError) as error:
        raise CollateError(
            f"{_leaf(name)} of sample {row} of the batch is an array of {leaf.dtype}, which no tensor holds ({error}); "
            "return numbers in the machine's byte order, or a list"
        ) from error


def _collate(column: Any, name: str) -> Any:
    from torch.utils.data import default_collate

    try:
        return default_collate(column)
    except (TypeError, RuntimeError, ValueError) as error:
        kinds = sorted({type(value).__name__ for value in column})
        raise CollateError(
            f"{_leaf(name)} ({', '.join(kinds)}) cannot be put together into a batch: {error}"
        ) from error


def _check(to: Any, value: Any) -> None:
    sizes = {"to": to} if not isinstance(to, Mapping) else {f"to[{name!r}]": given for name, given in to.items()}
    for option, given in sizes.items():
        if given is None:
            continue
        if not isinstance(given, tuple | list) or not all(size is None or _is_size(size) for size in given):
            raise TypeError(f"{option} must be a tuple of sizes, one for each axis, or None for any, got {given!r}")
    fills = {"value": value} if not isinstance(value, Mapping) else {f"value[{n!r}]": v for n, v in value.items()}
    for option, given in fills.items():
        if not isinstance(given, Real):
            raise TypeError(f"{option} must be a number, got {given!r}")


def _is_size(size: Any) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size >= 0)


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a dtype can hold a value: integers exactly, floats within its range."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bool(low <= value <= high and value == int(value))


def _leaf(name: str) -> str:
    return f"leaf {name!r}" if name else "the sample"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
