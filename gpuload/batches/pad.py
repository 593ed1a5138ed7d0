"""Collation by padding: arrays of different sizes become one tensor, with their sizes and the share of padding; and by
keeping: metadata of any form become a list.

Runs wherever a loader collates: in the main process, or in a worker of gpuload or of torch's DataLoader. Workers import
this module, so it imports torch only when there is something to collate. It holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.datasets.sample import META, MetaValue, plain_meta
from gpuload.datasets.tree import (
    LEAF,
    Structure,
    assembled,
    describe,
    difference,
    dtype_of,
    flatten,
    is_tensor,
    labels_of,
    names_of,
    unflatten,
)
from gpuload.errors import CollateError

if TYPE_CHECKING:
    import torch

__all__ = ["Padded", "keep", "pad", "pad_collate", "remedy_for"]

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
    """Make a `collate_fn` that pads the leaves of these names alone, and puts all others together as `default_collate`.

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
    _check_names("pad", "leaves that it pads", "pad('caption') or pad(1)", names)
    _check(to, value)
    return partial(pad_collate, only=tuple(map(str, names)), to=to, value=value)


def keep(*names: str | int, collate_fn: Callable[[Sequence[Any]], Any] | None = None) -> Callable[[Sequence[Any]], Any]:
    """Make a `collate_fn` that keeps the fields of these names as they are: a batch has a list of the samples' objects.

    As in ``gl.Loader(dataset, 32, collate_fn=gl.keep("meta"))``, for dicts and lists that differ from sample to sample,
    or are None. Metadata of `TarShards`, `Parquet` and `Coco` come so by themselves.

    Args:
        names: as for `pad`: ``"meta"``, ``"target.meta"``; ``1`` for what stands second in a tuple.
        collate_fn: what puts all other fields together: ``gl.pad("caption")``, say. Default: as `default_collate` does.

    Raises:
        TypeError: no name is given, or `collate_fn` cannot be called.
        ValueError: from what it makes, a sample has no field of that name.

    Example:
        >>> samples = [{"x": 1, "meta": {"who": "Ann"}}, {"x": 2, "meta": None}]
        >>> keep("meta")(samples)
        {'x': tensor([1, 2]), 'meta': [{'who': 'Ann'}, None]}
    """
    _check_names("keep", "fields that it keeps", "keep('meta') or keep(1)", names)
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"keep(collate_fn=…) must be callable or None, got {collate_fn!r}")
    return partial(_keep, names=tuple(map(str, names)), collate_fn=collate_fn or partial(pad_collate, only=()))


def _keep(samples: Sequence[Any], *, names: Collection[str], collate_fn: Callable[[Sequence[Any]], Any]) -> Any:
    folded = []
    for row, sample in enumerate(samples):
        unfolded: list[Any] = []
        structure, leaves = _fold(flatten(sample, unfolded), unfolded, names, MetaValue)
        there = [name for name, leaf in zip(names_of(structure), leaves, strict=True) if type(leaf) is MetaValue]
        if missing := [name for name in names if name not in there]:
            raise ValueError(
                f"keep() names the field {missing[0]!r}, but sample {row} of the batch has none; its fields are "
                f"{', '.join(map(repr, names_of(structure)))}"
            )
        folded.append(unflatten(structure, leaves))
    return collate_fn(folded)


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
        only: the names of the leaves that are padded, which may be lists of numbers too; None means all arrays.
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
        if (only is None or name in only) and any(isinstance(leaf, _Numbers) or _rank(leaf) for leaf in column)
    ]
    if unknown := [name for name in only or () if name not in padded]:
        raise ValueError(
            f"pad() names the leaf {unknown[0]!r}, but these samples have no array there; their leaves are "
            f"{', '.join(map(repr, names))}"
        )
    for option, by_name in (("to", to), ("value", value)):
        if unknown := [name for name in by_name if name not in padded] if isinstance(by_name, Mapping) else []:
            raise ValueError(
                f"{option}= names the leaf {unknown[0]!r}, but the leaves of these samples that are padded are "
                f"{', '.join(map(repr, padded)) or 'none'}"
            )
    leaves = iter(zip(names, columns, strict=True))

    def leaf(within: str) -> Any:
        name, column = next(leaves)
        if name in padded:
            sizes = to.get(name) if isinstance(to, Mapping) else to
            return _pad(column, name, sizes, value.get(name, 0) if isinstance(value, Mapping) else value)
        # default_collate returns strings as they come: in a tuple where it transposes a tuple or list.
        return _collate(column if within in ("tuple", "list") else list(column), name, only)

    return assembled(structure, leaf, keep_tuples=False)


_keep.takes_meta = pad_collate.takes_meta = True  # pyright: ignore[reportFunctionMemberAccess]  see `takes_meta`


def _check_names(function: str, what: str, example: str, names: Sequence[Any]) -> None:
    if not names or not all(isinstance(name, str | int) and not isinstance(name, bool) for name in names):
        raise TypeError(f"{function}() takes the names of the {what}, as in {example}, got {names}")


def _check(to: Any, value: Any) -> None:
    for what, sizes in _by_name("to", to):
        if sizes is not None and not (isinstance(sizes, tuple | list) and all(map(_is_size, sizes))):
            raise TypeError(f"{what} must be a tuple of sizes, one for each axis, or None for any, got {sizes!r}")
    for what, fill in _by_name("value", value):
        if not isinstance(fill, Real):
            raise TypeError(f"{what} must be a number, got {fill!r}")


def _by_name(option: str, entries_of_option: Any) -> list[tuple[str, Any]]:
    if isinstance(entries_of_option, Mapping):
        return [(f"{option}[{name!r}]", entry) for name, entry in entries_of_option.items()]
    return [(option, entries_of_option)]


def _is_size(size: Any) -> bool:
    return size is None or (isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size >= 0))


class _Numbers(list[Any]):
    """A list that is one leaf."""


def _columns(samples: Sequence[Any], lists: Collection[str]) -> tuple[Structure, list[tuple[Any, ...]]]:
    """Return the structure of all samples, and the values of each leaf; the lists of these names are one leaf each."""
    if not len(samples):
        raise ValueError("pad_collate() got no samples; a batch has at least one")
    rows: list[list[Any]] = []
    first: Structure = None
    for row, sample in enumerate(samples):
        leaves: list[Any] = []
        structure = flatten(sample, leaves)
        if lists:
            structure, leaves = _fold(structure, leaves, lists, _Numbers, ("list", "tuple"))
        rows.append(leaves)
        first = first or structure
        if structure != first:
            raise CollateError(
                f"sample 0 of the batch is {describe(first)}, but sample {row} is {describe(structure)}"
                f"{difference(first, structure)}: all samples of a batch must have the same structure; let the "
                "dataset return one form"
            )
    return first, list(zip(*rows, strict=True))


def _fold(
    structure: Structure,
    unfolded: Sequence[Any],
    names: Collection[str],
    leaf_of: Callable[[Any], Any],
    kinds: Collection[str] | None = None,
) -> tuple[Structure, list[Any]]:
    """Return a structure, and its leaves, in which what has one of these names is one leaf, made by `leaf_of`: if it is
    a container of these kinds; None means anything, a container or a leaf."""
    remaining, leaves = iter(unfolded), []

    def fold(node: Structure, path: tuple[str, ...]) -> Structure:
        if ".".join(path) in names and (kinds is None or (node != LEAF and node[0] in kinds)):
            leaves.append(leaf_of(unflatten(node, remaining)))
            return LEAF
        if node == LEAF:
            leaves.append(next(remaining))
            return LEAF
        kind, cls, keys, children = node
        paths = ((*path, label) for label in labels_of(node))
        return kind, cls, keys, tuple(map(fold, children, paths))

    return fold(structure, ()), leaves


def _pad(column: Sequence[Any], name: str, to: Shape | None, value: float) -> Padded:
    import torch

    tensors = _tensors(column, name)
    first = tensors[0]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    to = (None,) * first.ndim if to is None else to
    if len(to) != first.ndim:
        raise ValueError(
            f"to={to} is for arrays of rank {len(to)}, but {_leaf(name)} has rank {first.ndim} (shape {shapes[0]}); "
            "give each leaf its own sizes: to={name: sizes}"
        )
    for axis, limit in enumerate(to):
        for row, shape in enumerate(shapes):
            if limit is not None and shape[axis] > limit:
                raise CollateError(
                    f"{_leaf(name)} of sample {row} of the batch has shape {shape}, more than to={to} has on axis "
                    f"{axis}; let to= be as large as the largest, or cut arrays in the dataset"
                )
    if not _holds(first.dtype, value):
        raise ValueError(f"value={value!r} cannot be stored in {_leaf(name)}, which is {dtype_of(first)}")
    largest = map(max, zip(*shapes, strict=True))
    size = tuple(most if limit is None else limit for limit, most in zip(to, largest, strict=True))
    if all(shape == size for shape in shapes):  # images after a crop, say: one copy on the device, not N
        data = torch.stack(tensors)
    else:
        data = torch.full((len(tensors), *size), value, dtype=first.dtype, device=first.device)
        for row, tensor in enumerate(tensors):
            data[(row, *map(slice, tensor.shape))] = tensor
    padding = (data.numel() - sum(map(math.prod, shapes))) / data.numel() if data.numel() else 0.0
    sizes = torch.tensor(shapes, dtype=torch.int64, device="cpu")
    if first.device.type != "cpu":  # without waiting for the device
        sizes = sizes.pin_memory().to(first.device, non_blocking=True)
    return Padded(data, sizes, padding)


def _tensors(column: Sequence[Any], name: str) -> list[torch.Tensor]:
    """Return the arrays and lists of a leaf as tensors of one rank and one dtype."""
    tensors = [_tensor(leaf, name, row) for row, leaf in enumerate(column)]
    filled = next((tensor for tensor in tensors if _rank(tensor) and len(tensor)), None)
    for row, leaf in enumerate(column):
        if isinstance(leaf, _Numbers) and not leaf and filled is not None:
            tensors[row] = filled[:0]  # an empty list has the dtype and the rank of the others
    first = next(row for row, tensor in enumerate(tensors) if _rank(tensor))
    for row, tensor in enumerate(tensors):
        if _rank(tensor) != tensors[first].ndim:
            what = f"of shape {tuple(tensor.shape)}" if hasattr(tensor, "shape") else f"of type {type(tensor).__name__}"
            raise CollateError(
                f"{_leaf(name)} is of shape {tuple(tensors[first].shape)} in sample {first} of the batch, but {what} "
                f"in sample {row}: padding keeps the number of axes; return arrays of one rank (for none, one with an "
                "axis of size 0)"
            )
    for row, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise CollateError(
                f"{_leaf(name)} is {dtype_of(tensors[0])} in sample 0 of the batch, but {dtype_of(tensor)} in sample "
                f"{row}; return arrays of one dtype"
            )
    return tensors


def _tensor(leaf: Any, name: str, row: int) -> Any:
    """Return an array or a list of numbers as a tensor; anything else as it is."""
    import torch

    try:
        if isinstance(leaf, _Numbers):
            return torch.tensor(leaf)
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            return leaf
        # Else torch warns of the first, and refuses the second.
        return torch.from_numpy(leaf if leaf.flags.writeable and min(leaf.strides) >= 0 else leaf.copy())
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(leaf, _Numbers):
            raise CollateError(
                f"{_leaf(name)} of sample {row} of the batch is a list that is no array of numbers ({error}); "
                "return numbers, in lists of one length where lists hold lists"
            ) from error
        remedy = remedy_for(leaf) or "return numbers"
        raise CollateError(
            f"{_leaf(name)} of sample {row} of the batch is an array of {leaf.dtype}, which no tensor holds ({error}); "
            f"{remedy}"
        ) from error


def _rank(leaf: Any) -> int:
    """Return the number of axes of an array or a tensor; 0 for anything else."""
    return leaf.ndim if isinstance(leaf, np.ndarray) or is_tensor(leaf) else 0


def remedy_for(value: Any) -> str | None:
    """Return what to write for an array whose dtype no tensor has; None for anything else."""
    if not isinstance(value, np.ndarray):
        return None
    dtype = value.dtype
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

    if not META.isdisjoint(map(type, column)):
        return list(map(plain_meta, column))
    try:
        return default_collate(column)
    except (TypeError, RuntimeError, ValueError) as error:
        kinds = sorted({type(value).__name__ for value in column})
        hint = "" if only is None else f"; to pad it too, name it: gpuload.pad({', '.join(map(repr, (*only, name)))})"
        raise CollateError(
            f"{_leaf(name)} ({', '.join(kinds)}) cannot be put together into a batch: {error}{hint}"
        ) from error


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Return whether a dtype can hold a value: integers exactly, floats within its range."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bool(low <= value <= high and value == int(value))


def _leaf(name: str) -> str:
    return f"leaf {name!r}" if name else "the sample"
