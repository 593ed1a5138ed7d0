"""Collate functions: `pad` and `pad_collate` combine arrays of different sizes into one padded tensor, and `keep`
collects values of any type and structure in a list.

This module runs wherever a loader collates: in the main process, or in a worker of gpuload or of torch's DataLoader.
Workers import it, so it imports torch only when there is something to collate. It holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.checks import function, integer, is_sequence, number, optional, plain
from gpuload.datasets.sample import META, MetaValue, plain_meta
from gpuload.datasets.tree import (
    LEAF,
    Structure,
    assemble,
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
    """Padded arrays of a batch, as created by `pad_collate`.

    Attributes:
        data: N×…, with one array per row; each array starts at index 0 of every axis, and is followed by the fill
            value.
        sizes: int64 (N, dimensions), the shape of each array.
        padding: the fraction of `data` that is padding, 0 … 1.
    """

    data: torch.Tensor
    sizes: torch.Tensor
    padding: float


def pad(
    *names: str | int, to: Shape | Mapping[str, Shape] | None = None, value: float | Mapping[str, float] = 0
) -> Callable[[Sequence[Any]], Any]:
    """Create a `collate_fn` that pads only the named leaves, and collates all other leaves like `default_collate`.

    For example, ``gl.Loader(dataset, 32, collate_fn=gl.pad("caption"))`` yields images as one tensor, and captions as
    `Padded`. A named leaf may also be a list of numbers, such as the output of a tokenizer.

    Args:
        names: leaf names as in `pad_collate`: ``"caption"``, ``"target.tokens"``, or ``1`` for the second entry of a
            tuple.
        to, value: as for `pad_collate`.

    Raises:
        TypeError, ValueError: names are missing, or an argument is invalid.

    Example:
        >>> samples = [(np.zeros((3, 8, 8)), [5, 6]), (np.zeros((3, 8, 8)), [7, 8, 9])]
        >>> images, captions = pad(1, value=-1)(samples)
        >>> images.shape, captions.data.tolist(), captions.sizes.tolist()
        (torch.Size([2, 3, 8, 8]), [[5, 6, -1], [7, 8, 9]], [[2], [3]])
    """
    _check_names("pad", "leaves that it pads", "pad('caption') or pad(1)", names)
    _check_options(to, value)
    return partial(pad_collate, only=tuple(map(str, names)), to=to, value=value)


def keep(*names: str | int, collate_fn: Callable[[Sequence[Any]], Any] | None = None) -> Callable[[Sequence[Any]], Any]:
    """Create a `collate_fn` that does not collate the named fields; the batch has a list of the samples' objects.

    For example, ``gl.Loader(dataset, 32, collate_fn=gl.keep("meta"))`` keeps dicts and lists that differ between
    samples or are None. Metadata of `TarShards`, `Parquet` and `Coco` is always kept in this way.

    Args:
        names: field names as for `pad`: ``"meta"``, ``"target.meta"``, or ``1`` for the second entry of a tuple.
        collate_fn: collates all other fields, such as ``gl.pad("caption")``. Default: like `default_collate`.

    Raises:
        TypeError: names are missing, or `collate_fn` is not callable.
        ValueError: when called, if a sample lacks a named field.

    Example:
        >>> samples = [{"x": 1, "meta": {"who": "Ann"}}, {"x": 2, "meta": None}]
        >>> keep("meta")(samples)
        {'x': tensor([1, 2]), 'meta': [{'who': 'Ann'}, None]}
    """
    _check_names("keep", "fields that it keeps", "keep('meta') or keep(1)", names)
    optional(function, "keep(collate_fn=…)", collate_fn)
    return partial(_keep, names=tuple(map(str, names)), collate_fn=collate_fn or partial(pad_collate, only=()))


def _keep(samples: Sequence[object], *, names: Collection[str], collate_fn: Callable[[Sequence[Any]], Any]) -> Any:
    folded = []
    for row, sample in enumerate(samples):
        unfolded: list[Any] = []
        structure, leaves = _fold(flatten(sample, unfolded), unfolded, names, MetaValue)
        kept_names = [name for name, leaf in zip(names_of(structure), leaves, strict=True) if type(leaf) is MetaValue]
        if missing_names := [name for name in names if name not in kept_names]:
            raise ValueError(
                f"keep() names the field {missing_names[0]!r}, which sample {row} of the batch lacks; its fields are "
                f"{', '.join(map(repr, names_of(structure)))}"
            )
        folded.append(unflatten(structure, leaves))
    return collate_fn(folded)


def pad_collate(
    samples: Sequence[object],
    *,
    only: Collection[str] | None = None,
    to: Shape | Mapping[str, Shape] | None = None,
    value: float | Mapping[str, float] = 0,
) -> Any:
    """Collate samples into a batch, and pad arrays to the batch's largest size or to a fixed size.

    Pass it as ``collate_fn=gl.pad_collate`` to `Loader` or to torch's DataLoader; for options, write
    ``collate_fn=functools.partial(gl.pad_collate, to=(100, 4))``. Every array or tensor with at least one dimension
    becomes a `Padded`, even if all sizes are equal. All other leaves and the nesting follow torch's
    ``default_collate``. To pad only some leaves, use `pad`.

    Args:
        samples: nested tuples, lists, dicts and dataclasses, all with the same structure. The arrays of a leaf must
            have the same number of dimensions and the same dtype; their sizes may differ on every axis, and may be 0.
        only: the names of the leaves to pad, which may also be lists of numbers; None means all arrays.
        to: the size to pad to, a tuple with one size per axis, or None for the batch's largest size on that axis. A
            dict sets the sizes of leaves by name, such as ``{"boxes": (100, 4)}``; other leaves are padded to the
            batch's largest size. A leaf's name is its path, with keys, fields and indices joined by dots:
            ``"target.boxes"``, ``"1"``.
        value: the fill value, or a dict of fill values by leaf name (0 for other leaves).

    Raises:
        CollateError: samples differ in structure; the arrays of a leaf differ in their number of dimensions or dtype;
            or an array is larger than `to`. The message names the leaf, the samples (by their index in the batch) and
            the shapes.
        TypeError, ValueError: `to` or `value` is invalid, or does not match the dimensions or dtype of a leaf; a named
            leaf is missing; or there are no samples.

    Example:
        >>> samples = [{"boxes": np.ones((2, 4)), "label": 7}, {"boxes": np.ones((3, 4)), "label": 8}]
        >>> batch = pad_collate(samples, to={"boxes": (5, None)}, value=-1)
        >>> batch["boxes"].data.shape, batch["boxes"].sizes.tolist(), batch["boxes"].padding
        (torch.Size([2, 5, 4]), [[2, 4], [3, 4]], 0.5)
        >>> batch["boxes"].data[0, :, 0].tolist(), batch["label"]
        ([1.0, 1.0, -1.0, -1.0, -1.0], tensor([7, 8]))
    """
    _check_options(to, value)
    structure, columns = _collect_columns(samples, only or ())
    names = names_of(structure)
    padded_names = [
        name
        for name, column in zip(names, columns, strict=True)
        if (only is None or name in only) and any(isinstance(leaf, _Numbers) or _count_axes(leaf) for leaf in column)
    ]
    if unknown_names := [name for name in only or () if name not in padded_names]:
        raise ValueError(
            f"pad() names the field {unknown_names[0]!r}, but the samples have no array of that name; their fields are "
            f"{', '.join(map(repr, names))}"
        )
    for option, entries in (("to", to), ("value", value)):
        if unknown := [name for name in entries if name not in padded_names] if isinstance(entries, Mapping) else []:
            raise ValueError(
                f"{option}= names the field {unknown[0]!r}, which is not padded; padded fields are "
                f"{', '.join(map(repr, padded_names)) or 'none'}"
            )
    leaves = iter(zip(names, columns, strict=True))

    def collate_leaf(within: str) -> Any:
        name, column = next(leaves)
        if name in padded_names:
            sizes = to.get(name) if isinstance(to, Mapping) else to
            return _pad(column, name, sizes, plain(value.get(name, 0) if isinstance(value, Mapping) else value))
        # default_collate returns strings as a tuple within a tuple or list, otherwise as a list.
        return _collate(column if within in ("tuple", "list") else list(column), name, only)

    return assemble(structure, collate_leaf, keep_tuples=False)


_keep.takes_meta = pad_collate.takes_meta = True  # pyright: ignore[reportFunctionMemberAccess]  see `takes_meta`


def _check_names(function: str, target: str, example: str, names: Sequence[Any]) -> None:
    if not names or not all(isinstance(name, str | int) and not isinstance(name, bool) for name in names):
        raise TypeError(f"{function}() needs the names of the {target}, as in {example}, got {names}")


def _check_options(to: object, value: object) -> None:
    for label, sizes in _label_entries("to", to):
        if sizes is not None and not is_sequence(sizes):
            raise TypeError(f"{label} must be a tuple with one size (or None) per axis, got {sizes!r}")
        for size in sizes or ():
            optional(integer, label, size, minimum=0)
    for label, fill in _label_entries("value", value):
        number(label, fill)


def _label_entries(option: str, argument: object) -> list[tuple[str, Any]]:
    if isinstance(argument, Mapping):
        return [(f"{option}[{name!r}]", entry) for name, entry in argument.items()]
    return [(option, argument)]


class _Numbers(list[Any]):
    """A list of numbers that is a single leaf."""


def _collect_columns(samples: Sequence[object], lists: Collection[str]) -> tuple[Structure, list[tuple[Any, ...]]]:
    """Return the common structure of the samples, and the values of each leaf. Each list whose name is in `lists` is
    one leaf."""
    if not len(samples):
        raise ValueError("pad_collate() got no samples; a batch must have at least one")
    rows: list[list[Any]] = []
    first_structure: Structure = None
    for row, sample in enumerate(samples):
        leaves: list[Any] = []
        structure = flatten(sample, leaves)
        if lists:
            structure, leaves = _fold(structure, leaves, lists, _Numbers, ("list", "tuple"))
        rows.append(leaves)
        first_structure = first_structure or structure
        if structure != first_structure:
            raise CollateError(
                f"sample 0 of the batch is {describe(first_structure)}, but sample {row} is {describe(structure)}"
                f"{difference(first_structure, structure)}: all samples of a batch must have the same structure; make "
                "the dataset return every sample with the same structure"
            )
    return first_structure, list(zip(*rows, strict=True))


def _fold(
    structure: Structure,
    unfolded: Sequence[object],
    names: Collection[str],
    leaf_of: Callable[[Any], object],
    kinds: Collection[str] | None = None,
) -> tuple[Structure, list[Any]]:
    """Fold each node that has one of these names into one leaf, created by `leaf_of`. Fold only containers of these
    `kinds`; None means any container or leaf. Return the new structure and its leaves."""
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


def _pad(column: Sequence[object], name: str, to: Shape | None, value: float) -> Padded:
    import torch

    tensors = _to_tensors(column, name)
    first_tensor = tensors[0]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    to = (None,) * first_tensor.ndim if to is None else to
    if len(to) != first_tensor.ndim:
        raise ValueError(
            f"to={to} must have one size for each dimension of {_subject(name)}, whose shape is {shapes[0]}; give each "
            f"field its own sizes: to={{name: sizes}}"
        )
    for axis, limit in enumerate(to):
        for row, shape in enumerate(shapes):
            if limit is not None and shape[axis] > limit:
                raise CollateError(
                    f"{_subject(name)} of sample {row} of the batch has shape {shape}, which exceeds to={to} on axis "
                    f"{axis}; increase to=, or truncate arrays in the dataset"
                )
    if not _can_hold(first_tensor.dtype, value):
        raise ValueError(f"value={value!r} cannot be stored in {_subject(name)}, which is {dtype_of(first_tensor)}")
    largest_sizes = map(max, zip(*shapes, strict=True))
    size = tuple(maximum if limit is None else limit for limit, maximum in zip(to, largest_sizes, strict=True))
    if all(shape == size for shape in shapes):  # one copy on the device instead of N, for images after a crop
        data = torch.stack(tensors)
    else:
        data = torch.full((len(tensors), *size), value, dtype=first_tensor.dtype, device=first_tensor.device)
        for row, tensor in enumerate(tensors):
            data[(row, *map(slice, tensor.shape))] = tensor
    padding = (data.numel() - sum(map(math.prod, shapes))) / data.numel() if data.numel() else 0.0
    sizes = torch.tensor(shapes, dtype=torch.int64, device="cpu")
    if first_tensor.device.type != "cpu":  # avoid waiting for the device
        sizes = sizes.pin_memory().to(first_tensor.device, non_blocking=True)
    return Padded(data, sizes, padding)


def _to_tensors(column: Sequence[object], name: str) -> list[torch.Tensor]:
    """Convert the arrays and lists of a leaf to tensors with the same number of axes and the same dtype."""
    tensors = [_to_tensor(leaf, name, row) for row, leaf in enumerate(column)]
    non_empty = next((tensor for tensor in tensors if _count_axes(tensor) and len(tensor)), None)
    for row, leaf in enumerate(column):
        if isinstance(leaf, _Numbers) and not leaf and non_empty is not None:
            tensors[row] = non_empty[:0]  # give an empty list the dtype and number of axes of the others
    first_row = next(row for row, tensor in enumerate(tensors) if _count_axes(tensor))
    for row, tensor in enumerate(tensors):
        if _count_axes(tensor) != tensors[first_row].ndim:
            kind = f"of shape {tuple(tensor.shape)}" if hasattr(tensor, "shape") else f"of type {type(tensor).__name__}"
            raise CollateError(
                f"{_subject(name)} is of shape {tuple(tensors[first_row].shape)} in sample {first_row} of the batch, "
                f"but {kind} in sample {row}; padding does not change the number of dimensions, so return arrays with "
                "the same number of dimensions (for an empty array, use an axis of size 0)"
            )
    for row, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise CollateError(
                f"{_subject(name)} is {dtype_of(tensors[0])} in sample 0 of the batch, but {dtype_of(tensor)} in "
                f"sample {row}; return arrays with the same dtype"
            )
    return tensors


def _to_tensor(leaf: Any, name: str, row: int) -> Any:
    """Convert an array or a list of numbers to a tensor; return anything else unchanged."""
    import torch

    try:
        if isinstance(leaf, _Numbers):
            return torch.tensor(leaf)
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            return leaf
        # torch warns about read-only arrays, and rejects negative strides.
        return torch.from_numpy(leaf if leaf.flags.writeable and min(leaf.strides) >= 0 else leaf.copy())
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(leaf, _Numbers):
            raise CollateError(
                f"{_subject(name)} of sample {row} of the batch is a list that is not an array of numbers ({error}); "
                "return numbers, and give nested lists the same length"
            ) from error
        remedy = remedy_for(leaf) or "return numbers"
        raise CollateError(
            f"{_subject(name)} of sample {row} of the batch is an array of {leaf.dtype}, which torch does not support "
            f"({error}); {remedy}"
        ) from error


def _count_axes(leaf: Any) -> int:
    """Return the number of axes of an array or a tensor; 0 for anything else."""
    return leaf.ndim if isinstance(leaf, np.ndarray) or is_tensor(leaf) else 0


def remedy_for(value: object) -> str | None:
    """Return a remedy for an array whose dtype torch does not support; None for anything else."""
    if not isinstance(value, np.ndarray):
        return None
    dtype = value.dtype
    if dtype.kind in "USO":
        return "return x.tolist(), which keeps strings and objects in a list, or numbers"
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
        type_names = sorted({type(value).__name__ for value in column})
        hint = "" if only is None else f"; to pad it too, name it: gpuload.pad({', '.join(map(repr, (*only, name)))})"
        raise CollateError(
            f"{_subject(name)} ({', '.join(type_names)}) cannot be collated into a batch: {error}{hint}"
        ) from error


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    """Return whether a dtype can hold a value: integers exactly, floats within its range."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bool(low <= value <= high and value == int(value))


def _subject(name: str) -> str:
    return f"field {name!r}" if name else "the sample"
