"""Collation by padding: arrays of different sizes become one tensor, with their sizes and the share of padding.

Runs wherever a loader collates: in the main process, or in a worker of gpuload or of torch's DataLoader. Workers import
this module, so it imports torch only when there is something to collate. It holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.datasets.tree import (
    LEAF,
    Structure,
    assembled,
    describe,
    difference,
    flatten,
    labels_of,
    names_of,
    unflatten,
)
from gpuload.errors import CollateError

if TYPE_CHECKING:
    import torch

__all__ = ["Padded", "pad", "pad_collate", "remedy_for"]

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


def pad(
    *names: str | int, to: Shape | Mapping[str, Shape] | None = None, value: float | Mapping[str, float] = 0
) -> Callable[[Sequence[Any]], Any]:
    """A `collate_fn` that pads the leaves of these names alone, and puts all others together as ``default_collate``.

    As in ``gl.Loader(dataset, 32, collate_fn=gl.pad("caption"))``: images come as one tensor, captions as `Padded`. A
    leaf that is named may also be a list of numbers, as tokenizers give it.

    Args:
        names: as in `pad_collate`: ``"caption"``, ``"target.tokens"``; ``1`` for what stands second in a tuple.
        to, value: as for `pad_collate`.

    Raises:
        TypeError, ValueError: no name is given, or an argument is invalid.

    Example:
        >>> samples = [(np.zeros((3, 8, 8)), [5, 6]), (np.zeros((3, 8, 8)), [7, 8, 9])]
        >>> images, captions = pad(1, value=-1)(samples)
        >>> images.shape, captions.data.tolist(), captions.sizes.tolist()
        (torch.Size([2, 3, 8, 8]), [[5, 6, -1], [7, 8, 9]], [[2], [3]])
    """
    if not names or not all(isinstance(name, str | int) and not isinstance(name, bool) for name in names):
        raise TypeError(
            f"pad() takes the names of the leaves that it pads, as in pad('caption') or pad(1), got {names}"
        )
    _check(to, value)
    return partial(pad_collate, only=tuple(map(str, names)), to=to, value=value)


def pad_collate(
    samples: Sequence[Any],
    *,
    only: Collection[str] | None = None,
    to: Shape | Mapping[str, Shape] | None = None,
    value: float | Mapping[str, float] = 0,
) -> Any:
    """Collate samples into a batch, padding arrays of any rank to the batch's largest size or to a fixed one.

    Use it as ``collate_fn=gl.pad_collate`` of `Loader` or of torch's DataLoader, with options as
    ``collate_fn=functools.partial(gl.pad_collate, to=(100, 4))``. Every array or tensor of rank 1 or more becomes a
    `Padded`, even if all sizes are equal; all other leaves, and the nesting, are as in torch's ``default_collate``.
    `pad` pads some leaves alone.

    Args:
        samples: nested tuples, lists, dicts and dataclasses, all of one structure. The arrays of a leaf have one rank
            and one dtype; their sizes may differ on every axis, and may be 0.
        only: the names of the leaves that are padded, which may be lists of numbers too; None: all arrays.
        to: the size that arrays are padded to, a number for each axis, None for the batch's largest on that axis. A
            dict gives the sizes of single leaves, by name: ``{"boxes": (100, 4)}``; others are padded to the batch's
            largest. A leaf's name is the path to it, keys, fields and indices joined by dots: ``"target.boxes"``,
            ``"1"``.
        value: the fill value; or a dict by leaf name, with 0 for other leaves.

    Raises:
        CollateError: samples differ in structure; the arrays of a leaf differ in rank or dtype, or one is larger than
            `to`; the message names the leaf, the samples (by their row in the batch) and the shapes.
        TypeError, ValueError: `to` or `value` is invalid, or does not suit a leaf's rank or dtype; a leaf that is named
            is missing; there are no samples.

    Example:
        >>> samples = [{"boxes": np.ones((2, 4)), "label": 7}, {"boxes": np.ones((3, 4)), "label": 8}]
        >>> batch = pad_collate(samples, to={"boxes": (5, None)}, value=-1)
        >>> batch["boxes"].data.shape, batch["boxes"].sizes.tolist(), batch["boxes"].padding
        (torch.Size([2, 5, 4]), [[2, 4], [3, 4]], 0.5)
        >>> batch["boxes"].data[0, :, 0].tolist(), batch["label"]
        ([1.0, 1.0, -1.0, -1.0, -1.0], tensor([7, 8]))
    """
    _check(to, value)
    structure, columns = _columns(samples, only or ())
    names = names_of(structure)
    padded = [
        name
        for name, column in zip(names, columns, strict=True)
        if (only is None or name in only) and any(map(_is_padded, column))
    ]
    if unknown := [name for name in only or () if name not in padded]:
        raise ValueError(
            f"pad() names the leaf {unknown[0]!r}, but these samples have no array there; their leaves are "
            f"{', '.join(map(repr, names))}"
        )
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
        return _collate(column if within in ("tuple", "list") else list(column), name, only)

    return assembled(structure, leaf, keep_tuples=False)


def _columns(samples: Sequence[Any], whole: Collection[str]) -> tuple[Structure, list[tuple[Any, ...]]]:
    """The structure of all samples, and the values of each leaf; lists named in `whole` are one leaf each."""
    if not len(samples):
        raise ValueError("pad_collate() got no samples; a batch has at least one")
    rows: list[list[Any]] = [[] for _ in samples]
    structures = [flatten(sample, leaves) for sample, leaves in zip(samples, rows, strict=True)]
    for row, leaves in enumerate(rows) if whole else ():
        rows[row] = []
        structures[row] = _folded(structures[row], iter(leaves), whole, (), rows[row])
    for row, structure in enumerate(structures):
        if structure != structures[0]:
            raise CollateError(
                f"sample 0 of the batch is {describe(structures[0])}, but sample {row} is {describe(structure)}"
                f"{difference(structures[0], structure)}: all samples of a batch must have the same structure; let the "
                "dataset return one form"
            )
    return structures[0], list(zip(*rows, strict=True))


def _folded(
    node: Structure, leaves: Iterator[Any], whole: Collection[str], path: tuple[str, ...], found: list[Any]
) -> Structure:
    """A structure in which lists of these names are leaves; `found` takes the leaves."""
    if node == LEAF:
        found.append(next(leaves))
        return LEAF
    if node[0] in ("list", "tuple") and ".".join(path) in whole:
        found.append(_Numbers(unflatten(node, leaves)))
        return LEAF
    kind, cls, keys, children = node
    pairs = zip(labels_of(node), children, strict=True)
    return kind, cls, keys, tuple([_folded(child, leaves, whole, (*path, label), found) for label, child in pairs])


class _Numbers(list[Any]):
    """A list that is one leaf."""


def _is_padded(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, _Numbers) or (isinstance(leaf, np.ndarray | torch.Tensor) and leaf.ndim > 0)


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
    sizes = torch.tensor(shapes, dtype=torch.int64, device="cpu")
    if first.device.type != "cpu":  # without waiting for the device
        sizes = sizes.pin_memory().to(first.device, non_blocking=True)
    return Padded(data, sizes, padding)


def _tensors(column: Sequence[Any], name: str) -> list[torch.Tensor]:
    """The arrays of a leaf as tensors; an error names two that differ in rank or dtype."""
    column = _from_lists(column, name)
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


def _from_lists(column: Sequence[Any], name: str) -> Sequence[Any]:
    """A leaf with its lists as tensors; an empty one has the dtype and the rank of the others."""
    import torch

    found = list(column)
    for row, leaf in enumerate(column):
        if isinstance(leaf, _Numbers):
            try:
                found[row] = torch.tensor(leaf)
            except (TypeError, ValueError, RuntimeError) as error:
                raise CollateError(
                    f"{_leaf(name)} of sample {row} of the batch is a list that is no array of numbers ({error}); "
                    "return numbers, in lists of one length where lists hold lists"
                ) from error
    filled = next((leaf for leaf in found if getattr(leaf, "ndim", 0) and len(leaf)), None)
    for row, leaf in enumerate(column):
        if isinstance(leaf, _Numbers) and not leaf and isinstance(filled, torch.Tensor):
            found[row] = filled[:0]
    return found


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
            f"{remedy_for(leaf.dtype) or 'return numbers'}"
        ) from error


def remedy_for(dtype: np.dtype) -> str | None:
    """What to write for an array that no tensor can hold for its dtype; None for numbers as torch has them."""
    if dtype.kind in "USO":
        return "return x.tolist(), whose texts and objects stay in a list, or numbers"
    if dtype.kind in "mM":
        return "write x.astype('int64')"
    if dtype.fields is not None:
        return "return a dict of its fields: {name: x[name] for name in x.dtype.names}"
    if dtype.kind == "f" and dtype.itemsize > 8:
        return "write x.astype('float64')"
    return None if dtype.isnative else 'write x.astype(x.dtype.newbyteorder("="))'


def _collate(column: Any, name: str, only: Collection[str] | None) -> Any:
    from torch.utils.data import default_collate

    try:
        return default_collate(column)
    except (TypeError, RuntimeError, ValueError) as error:
        kinds = sorted({type(value).__name__ for value in column})
        hint = "" if only is None else f"; to pad it too, name it: gpuload.pad({', '.join(map(repr, (*only, name)))})"
        raise CollateError(
            f"{_leaf(name)} ({', '.join(kinds)}) cannot be put together into a batch: {error}{hint}"
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
