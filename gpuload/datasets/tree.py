"""Splits samples into their *structure* (nested containers, hashable) and their leaves, names the leaves, and rebuilds
samples.

Runs in workers and in the main process; imports no torch.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from gpuload.datasets.sample import LEAVES, META, plain_meta

__all__ = [
    "LEAF",
    "Keys",
    "Structure",
    "assemble",
    "convert_to_type",
    "describe",
    "describe_leaf",
    "difference",
    "dtype_of",
    "find_sibling",
    "flatten",
    "innermost_names_of",
    "is_plain_tensor",
    "is_tensor",
    "is_tensor_type",
    "join_key_paths",
    "key_paths_of",
    "labels_of",
    "leaf_count",
    "names_of",
    "rebuild",
    "sorted_keys",
    "transpose_samples",
    "unflatten",
    "walk_key_paths",
]

LEAF = "*"
VALUES = frozenset({int, float, bool, str, bytes, type(None), np.ndarray})
PLAIN = frozenset({*VALUES, *LEAVES, *META})  # types whose objects are always leaves
# Either LEAF or (kind, type or None, keys or None, children), as nested, hashable tuples. The kinds are "tuple",
# "list", "dict", "dataclass", and "clip", whose frames are one leaf each and become one tensor.
Structure = Any


class Keys(tuple[Any, ...]):
    """A dict's sorted keys, so that samples whose keys differ only in order have the same structure; `order` has the
    original order."""

    order: tuple[Any, ...]


def flatten(sample: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of a sample to `leaves`, depth first, and return its structure."""
    sample_type = type(sample)
    if sample_type is tuple and PLAIN.issuperset(map(type, sample)):  # fast path: most samples are tuples of leaves
        leaves += sample
        return ("tuple", None, None, (LEAF,) * len(sample))
    if sample_type in PLAIN:
        leaves.append(sample)
        return LEAF
    keys, children = None, sample
    if isinstance(sample, tuple):
        kind, cls = "tuple", sample_type if hasattr(sample, "_fields") else None
    elif isinstance(sample, list):
        kind, cls = "list", None if sample_type is list else sample_type
    elif isinstance(sample, Mapping):
        kind, cls, keys = "dict", None if sample_type is dict else sample_type, sorted_keys(sample)
        children = [sample[key] for key in keys]
    elif hasattr(sample_type, "__dataclass_fields__") and not isinstance(sample, LEAVES):
        kind, cls, keys = "dataclass", sample_type, tuple(field.name for field in fields(sample) if field.init)
        children = [getattr(sample, key) for key in keys]
    else:
        leaves.append(sample)
        return LEAF
    return (kind, cls, keys, tuple([flatten(child, leaves) for child in children]))


def transpose_samples(samples: Sequence[object]) -> tuple[Structure, list[Sequence[Any]]] | None:
    """Return the common structure of samples, and the values of each leaf in all samples. None means that the samples
    must be flattened one by one: they differ in structure, or are not tuples, lists and dicts of plain values."""
    leaves: list[Sequence[Any]] = []
    structure = None if type(None) in set(map(type, samples)) else _transpose(samples, leaves)
    return None if structure is None else (structure, leaves)


def _transpose(samples: Sequence[Any], leaves: list[Sequence[Any]]) -> Structure | None:
    types = set(map(type, samples))
    cls = next(iter(types))
    if types <= VALUES or (len(types) == 1 and (issubclass(cls, np.generic) or is_plain_tensor(cls))):
        leaves.append(samples)
        return LEAF
    if len(types) > 1 or cls not in (tuple, list, dict):
        return None
    keys = None
    if cls is dict:
        order = tuple(samples[0])
        if any(tuple(sample) != order for sample in samples):
            return None
        keys = sorted_keys(order)
        columns = [[sample[key] for sample in samples] for key in keys]
    else:
        if len(set(map(len, samples))) > 1:
            return None
        columns = zip(*samples, strict=True)
    children = [_transpose(column, leaves) for column in columns]
    return None if None in children else (cls.__name__, None, keys, tuple(children))


def sorted_keys(keys: Iterable[Any]) -> tuple[Any, ...]:
    """Return the keys of a dict as stored in its structure: sorted if possible, else in their original order."""
    keys = tuple(keys)
    try:
        sorted_tuple = tuple(sorted(keys))
    except TypeError:  # keys of different types keep their order
        return keys
    if sorted_tuple == keys:
        return keys
    result = Keys(sorted_tuple)
    result.order = keys
    return result


def rebuild(node: Structure, parts: list[Any]) -> Any:
    """Build one container, in a sample or a batch, from its children; a dict's keys keep their original order."""
    kind, cls, keys, _ = node
    if kind == "list":
        return parts if cls is None else convert_to_type(cls, parts)
    if kind == "clip":
        return _clip(parts)
    if kind == "tuple":
        return tuple(parts) if cls is None else cls(*parts)
    items = dict(zip(keys, parts, strict=True))
    if kind == "dataclass":
        return cls(**items)
    if isinstance(keys, Keys):
        items = {key: items[key] for key in keys.order}
    return items if cls is None else convert_to_type(cls, items)


def convert_to_type(cls: type, plain: object) -> Any:
    """Convert a dict or list to the user's type; return `plain` unchanged if that is not possible."""
    try:
        return cls(plain)
    except TypeError:
        with contextlib.suppress(Exception):  # a defaultdict, for example, can be updated
            instance = cls()
            instance.update(plain)
            return instance
        return plain


def _clip(frames: list[Any]) -> Any:
    """Stack C×H×W frames into a T×C×H×W tensor. If each frame is a list of views, return one tensor per view."""
    if isinstance(frames[0], list):
        return [_clip(list(view)) for view in zip(*frames, strict=True)]
    return sys.modules["torch"].stack(frames)


def leaf_count(node: Structure) -> int:
    return 1 if node == LEAF else sum(map(leaf_count, node[3]))


def unflatten(structure: Structure, leaves: Iterable[object]) -> Any:
    """Rebuild a sample from its structure and its leaves in depth-first order."""
    remaining = iter(leaves)
    return assemble(structure, lambda container_kind: next(remaining), keep_tuples=True)


def assemble(node: Structure, leaf: Callable[[str], Any], *, keep_tuples: bool, container_kind: str = "") -> Any:
    """Build an object of this structure. `leaf` is called for each leaf in depth-first order, with the kind of the
    leaf's container, and returns the leaf. Plain tuples become lists unless `keep_tuples`.

    (This is not a recursive inner function, which would be a reference cycle and keep a batch alive until garbage
    collection.)
    """
    if node == LEAF:
        return leaf(container_kind)
    kind, cls, _, children = node
    parts = [assemble(child, leaf, keep_tuples=keep_tuples, container_kind=kind) for child in children]
    return parts if kind == "tuple" and cls is None and not keep_tuples else rebuild(node, parts)


def describe(structure: Structure, leaves: Iterable[Any] | None = None) -> str:
    """Describe a structure as text: ``(·, {'label': ·})``, or with leaves ``(uint8 array 48×64, {'label': int})``."""
    if structure == LEAF:
        return "·" if leaves is None else describe_leaf(next(iter(leaves)))
    kind, cls, keys, children = structure
    leaves = None if leaves is None else iter(leaves)
    parts = [describe(child, leaves) for child in children]
    if kind == "clip":
        return f"clip of {len(children)} frames"
    name = "" if cls is None else cls.__name__
    if kind == "dict":
        return name + "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
    if kind == "dataclass":
        return name + "(" + ", ".join(f"{key}={part}" for key, part in zip(keys, parts, strict=True)) + ")"
    if kind == "list":
        return name + "[" + ", ".join(parts) + "]"
    return name + "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def labels_of(node: Structure) -> list[str]:
    """Return the labels of a container's children: dict keys, field names of a dataclass or named tuple, or
    indices."""
    _, cls, keys, children = node
    return list(map(str, getattr(cls, "_fields", range(len(children))) if keys is None else keys))


def names_of(structure: Structure, path: tuple[str, ...] = ()) -> list[str]:
    """Return the name of each leaf (its path, joined by dots) in depth-first order."""
    if structure == LEAF:
        return [".".join(path)]
    children = zip(labels_of(structure), structure[3], strict=True)
    return [name for label, child in children for name in names_of(child, (*path, label))]


def walk_key_paths(node: Structure, key_path: str = "sample", name: str = "") -> Iterator[tuple[Structure, str, str]]:
    """Yield every container and leaf in depth-first order, with its key path, such as ``sample[1]["masks"]``, and
    the innermost name in that path, here ``masks``. The frames of a clip share one key path."""
    yield node, key_path, name
    if node == LEAF:
        return
    kind, cls, keys, children = node
    fields = getattr(cls, "_fields", None) if kind == "tuple" else None
    for number, child in enumerate(children):
        if kind == "clip":
            yield from walk_key_paths(child, key_path, name)
        elif kind == "dict":
            key = keys[number]
            yield from walk_key_paths(child, f"{key_path}[{_quote(key)}]", key if isinstance(key, str) else name)
        elif kind == "dataclass" or fields:
            field = (keys or fields or ())[number]
            yield from walk_key_paths(child, f"{key_path}.{field}", field)
        else:
            yield from walk_key_paths(child, f"{key_path}[{number}]", name)


@functools.lru_cache(64)
def key_paths_of(structure: Structure) -> list[str]:
    """Return the key path of each leaf in its sample, such as ``sample[1]["masks"]``, in depth-first order."""
    return [key_path for node, key_path, _ in walk_key_paths(structure) if node == LEAF]


@functools.lru_cache(64)
def innermost_names_of(structure: Structure) -> list[str]:
    """Return the innermost name in the key path of each leaf, in depth-first order."""
    return [name for node, _, name in walk_key_paths(structure) if node == LEAF]


def find_sibling(node: Structure, leaf: int, name: str) -> tuple[int, Structure] | None:
    """Return the first leaf and the node of the entry called `name` in the innermost container of a leaf; None if there
    is no such entry."""
    first_leaf = 0
    while node != LEAF:
        children, labels = node[3], labels_of(node)
        starts = list(itertools.accumulate(map(leaf_count, children), initial=first_leaf))
        index = bisect.bisect_right(starts, leaf) - 1
        if children[index] == LEAF:
            return next(((starts[i], children[i]) for i, label in enumerate(labels) if label == name), None)
        node, first_leaf = children[index], starts[index]
    return None


def join_key_paths(structure: Structure, leaves: Iterable[int]) -> str:
    """Return the key paths of these leaves, joined with "or", for a message: ``sample[0] or sample[1]``."""
    return " or ".join(dict.fromkeys(key_paths_of(structure)[leaf] for leaf in leaves))


def _quote(key: object) -> str:
    """Return the repr of a key, with double quotes if possible, since the message may be quoted with single quotes."""
    text = repr(key)
    return f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text


def difference(first: Structure, second: Structure, path: tuple[str, ...] = ()) -> str:
    """Describe how the keys or list lengths of two structures differ, as the end of a sentence about both structures;
    return "" if they differ in another way."""
    if LEAF in (first, second) or first[:2] != second[:2]:
        return ""
    name = f"{'.'.join(path)!r}" if path else "the sample"
    first_labels, second_labels = labels_of(first), labels_of(second)
    if set(first_labels) != set(second_labels) and first[0] == "dict":
        parts = [
            f"{', '.join(repr(key) for key in keys if key not in other_keys) or 'none'} in the {position} only"
            for keys, other_keys, position in (
                (first_labels, second_labels, "first"),
                (second_labels, first_labels, "second"),
            )
        ]
        hint = f"; collate_fn=gpuload.keep({name}) keeps dicts with any keys, in a list" if path else ""
        return f" (the keys of {name} differ: {parts[0]}, {parts[1]}{hint})"
    if len(first_labels) != len(second_labels):
        hint = ""
        if path and first[0] == "list":
            hint = f"; collate_fn=gpuload.pad({name}) pads a list of numbers, gpuload.keep({name}) keeps any list"
        return f" ({name} has length {len(first_labels)} in the first, {len(second_labels)} in the second{hint})"
    children = zip(first_labels, first[3], second[3], strict=True)
    return next(filter(None, (difference(left, right, (*path, label)) for label, left, right in children)), "")


def describe_leaf(leaf: Any) -> str:
    """Describe a leaf in words: ``uint8 array 48×64×3``."""
    if isinstance(leaf, np.ndarray) or is_tensor(leaf):
        container = "array" if isinstance(leaf, np.ndarray) else "tensor"
        sizes = "×".join(map(str, leaf.shape))
        return f"{dtype_of(leaf)} {container} {sizes}" if sizes else f"0-d {dtype_of(leaf)} {container}"
    return "None" if leaf is None else type(plain_meta(leaf)).__name__


def dtype_of(leaf: Any) -> str:
    """Return the name of an array's or a tensor's dtype: ``"uint8"``."""
    return str(leaf.dtype).removeprefix("torch.")


def is_plain_tensor(cls: type) -> bool:
    """Return whether a type is torch's Tensor itself, not a subclass."""
    return (cls.__module__, cls.__name__) == ("torch", "Tensor")


def is_tensor(leaf: Any) -> bool:
    return is_tensor_type(type(leaf))


def is_tensor_type(cls: type) -> bool:
    """Return whether a type is torch's Tensor or a subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(cls, torch.Tensor)
