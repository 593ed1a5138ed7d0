"""Samples as their *structure* (nested containers, hashable) and their leaves: taken apart, named and put together.

Runs in workers and in the main process; imports no torch.
"""

from __future__ import annotations

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
    "any_of",
    "assembled",
    "describe",
    "difference",
    "dtype_of",
    "flatten",
    "is_plain_tensor",
    "is_tensor",
    "is_tensor_type",
    "kind_of",
    "labels_of",
    "leaf_count",
    "located",
    "made_like",
    "names_of",
    "places_of",
    "rebuild",
    "sorted_keys",
    "transposed",
    "unflatten",
    "unfold",
]

LEAF = "*"
VALUES = frozenset({int, float, bool, str, bytes, type(None), np.ndarray})
PLAIN = frozenset({*VALUES, *LEAVES, *META})  # leaves by their type alone
# LEAF, or (kind, type or None, keys or None, children): nested tuples, hashable. Kinds are "tuple", "list", "dict",
# "dataclass", and "clip": frames, one leaf each, that become one tensor.
Structure = Any


class Keys(tuple[Any, ...]):
    """A dict's sorted keys, so that samples differing only in their order have one structure; `order` is as given."""

    order: tuple[Any, ...]


def flatten(sample: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of a sample to `leaves`, depth first, and return its structure."""
    kind = type(sample)
    if kind is tuple and PLAIN.issuperset(map(type, sample)):  # most samples: nothing has to be asked of their leaves
        leaves += sample
        return ("tuple", None, None, (LEAF,) * len(sample))
    if kind in PLAIN:
        leaves.append(sample)
        return LEAF
    keys, children = None, sample
    if isinstance(sample, tuple):
        name, cls = "tuple", kind if hasattr(sample, "_fields") else None
    elif isinstance(sample, list):
        name, cls = "list", None if kind is list else kind
    elif isinstance(sample, Mapping):
        name, cls, keys = "dict", None if kind is dict else kind, sorted_keys(sample)
        children = [sample[key] for key in keys]
    elif hasattr(kind, "__dataclass_fields__") and not isinstance(sample, LEAVES):
        name, cls, keys = "dataclass", kind, tuple(field.name for field in fields(sample) if field.init)
        children = [getattr(sample, key) for key in keys]
    else:
        leaves.append(sample)
        return LEAF
    return (name, cls, keys, tuple([flatten(child, leaves) for child in children]))


def transposed(samples: Sequence[Any]) -> tuple[Structure, list[Sequence[Any]]] | None:
    """Return the structure that all samples have, and each leaf of all of them, if they are built alike of tuples,
    lists and dicts with plain values as leaves; None means take them apart one by one."""
    leaves: list[Sequence[Any]] = []
    structure = None if type(None) in set(map(type, samples)) else _transposed(samples, leaves)
    return None if structure is None else (structure, leaves)


def _transposed(samples: Sequence[Any], leaves: list[Sequence[Any]]) -> Structure | None:
    kinds = set(map(type, samples))
    kind = next(iter(kinds))
    if kinds <= VALUES or (len(kinds) == 1 and (issubclass(kind, np.generic) or is_plain_tensor(kind))):
        leaves.append(samples)
        return LEAF
    if len(kinds) > 1 or kind not in (tuple, list, dict):
        return None
    keys = None
    if kind is dict:
        order = tuple(samples[0])
        if any(tuple(sample) != order for sample in samples):
            return None
        keys = sorted_keys(order)
        columns = [[sample[key] for sample in samples] for key in keys]
    else:
        if len(set(map(len, samples))) > 1:
            return None
        columns = zip(*samples, strict=True)
    children = [_transposed(column, leaves) for column in columns]
    return None if None in children else (kind.__name__, None, keys, tuple(children))


def unfold(structure: Structure, lengths: Mapping[int, int]) -> Structure:
    """Return a structure in which leaves, by their number, are clips of this many frames, each frame a leaf."""
    return _unfolded(structure, itertools.count(), lengths)


def _unfolded(node: Structure, numbers: Iterator[int], lengths: Mapping[int, int]) -> Structure:
    if node == LEAF:
        length = lengths.get(next(numbers))
        return LEAF if length is None else ("clip", None, None, (LEAF,) * length)
    kind, cls, keys, children = node
    return (kind, cls, keys, tuple([_unfolded(child, numbers, lengths) for child in children]))


def sorted_keys(order: Iterable[Any]) -> tuple[Any, ...]:
    """Return the keys of a dict as its structure has them."""
    order = tuple(order)
    try:
        keys = tuple(sorted(order))
    except TypeError:  # of several types: as given
        return order
    if keys == order:
        return order
    keys = Keys(keys)
    keys.order = order
    return keys


def rebuild(node: Structure, parts: list[Any]) -> Any:
    """Return one container of a sample or batch from its parts, a dict's keys in their original order."""
    kind, cls, keys, _ = node
    if kind == "list":
        return parts if cls is None else made_like(cls, parts)
    if kind == "clip":
        return _clip(parts)
    if kind == "tuple":
        return tuple(parts) if cls is None else cls(*parts)
    items = dict(zip(keys, parts, strict=True))
    if kind == "dataclass":
        return cls(**items)
    if isinstance(keys, Keys):
        items = {key: items[key] for key in keys.order}
    return items if cls is None else made_like(cls, items)


def made_like(cls: type, plain: Any) -> Any:
    """Return a mapping or list of the user's type, if it can be made from a dict or list; else `plain` itself."""
    try:
        return cls(plain)
    except TypeError:
        with contextlib.suppress(Exception):  # a defaultdict can be filled
            instance = cls()
            instance.update(plain)
            return instance
        return plain


def _clip(frames: list[Any]) -> Any:
    """Return finished frames C×H×W as one tensor T×C×H×W; lists of views of each as a list of such tensors."""
    if isinstance(frames[0], list):
        return [_clip(list(view)) for view in zip(*frames, strict=True)]
    return sys.modules["torch"].stack(frames)


def leaf_count(node: Structure) -> int:
    return 1 if node == LEAF else sum(map(leaf_count, node[3]))


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Return a sample from its structure and its leaves, depth first."""
    remaining = iter(leaves)
    return assembled(structure, lambda within: next(remaining), keep_tuples=True)


def assembled(node: Structure, leaf: Callable[[str], Any], *, keep_tuples: bool, within: str = "") -> Any:
    """Return a structure with leaves from `leaf`, called depth first with the kind of the container of each. Plain
    tuples become lists unless `keep_tuples`.

    (An inner function that calls itself would be a reference cycle, and hold a batch until it is collected.)
    """
    if node == LEAF:
        return leaf(within)
    kind, cls, _, children = node
    parts = [assembled(child, leaf, keep_tuples=keep_tuples, within=kind) for child in children]
    return parts if kind == "tuple" and cls is None and not keep_tuples else rebuild(node, parts)


def describe(structure: Structure, leaves: Iterable[Any] | None = None) -> str:
    """Return a structure as text: ``(·, {'label': ·})``; with its leaves: ``(uint8 array 48×64, {'label': int})``."""
    if structure == LEAF:
        return "·" if leaves is None else kind_of(next(iter(leaves)))
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
    """Return what a container calls its children: a dict's keys, fields of a dataclass or named tuple, else numbers."""
    _, cls, keys, children = node
    return list(map(str, getattr(cls, "_fields", range(len(children))) if keys is None else keys))


def names_of(structure: Structure, path: tuple[str, ...] = ()) -> list[str]:
    """Return the name of each leaf, depth first: the path to it, joined by dots."""
    if structure == LEAF:
        return [".".join(path)]
    children = zip(labels_of(structure), structure[3], strict=True)
    return [name for label, child in children for name in names_of(child, (*path, label))]


def located(node: Structure, place: str = "sample", name: str = "") -> Iterator[tuple[Structure, str, str]]:
    """Yield every container and leaf, depth first, with its place, ``sample[1]["masks"]``, and the innermost name
    there. The frames of a clip share one place."""
    yield node, place, name
    if node == LEAF:
        return
    kind, cls, keys, children = node
    fields = getattr(cls, "_fields", None) if kind == "tuple" else None
    for number, child in enumerate(children):
        if kind == "clip":
            yield from located(child, place, name)
        elif kind == "dict":
            key = keys[number]
            yield from located(child, f"{place}[{_quoted(key)}]", key if isinstance(key, str) else name)
        elif kind == "dataclass" or fields:
            field = (keys or fields or ())[number]
            yield from located(child, f"{place}.{field}", field)
        else:
            yield from located(child, f"{place}[{number}]", name)


@functools.lru_cache(64)
def places_of(structure: Structure) -> list[str]:
    """Return the place of each leaf in its sample, depth first: ``sample[1]["masks"]``."""
    return [place for node, place, _ in located(structure) if node == LEAF]


def any_of(structure: Structure, leaves: Iterable[int]) -> str:
    """Return the places of several leaves, one of which is meant: ``sample[0] or sample[1]``."""
    return " or ".join(dict.fromkeys(places_of(structure)[leaf] for leaf in leaves))


def _quoted(key: Any) -> str:
    """Return a key as Python writes it, in double quotes where it has none inside: a message may be in single ones."""
    text = repr(key)
    return f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text


def difference(one: Structure, other: Structure, path: tuple[str, ...] = ()) -> str:
    """Return how two structures differ, if one holds other keys, or a list of another length, as the end of a sentence
    that describes both; else nothing."""
    if LEAF in (one, other) or one[:2] != other[:2]:
        return ""
    name = f"{'.'.join(path)!r}" if path else "the sample"
    ours, theirs = labels_of(one), labels_of(other)
    if set(ours) != set(theirs) and one[0] == "dict":
        parts = [
            f"{', '.join(repr(key) for key in these if key not in those) or 'none'} in the {which} alone"
            for these, those, which in ((ours, theirs, "first"), (theirs, ours, "second"))
        ]
        hint = f"; collate_fn=gpuload.keep({name}) keeps dicts of any form, in a list" if path else ""
        return f" (the keys of {name} differ: {parts[0]}, {parts[1]}{hint})"
    if len(ours) != len(theirs):
        hint = ""
        if path and one[0] == "list":
            hint = f"; collate_fn=gpuload.pad({name}) pads a list of numbers, gpuload.keep({name}) keeps any list"
        return f" ({name} has the length {len(ours)} in the first, {len(theirs)} in the second{hint})"
    children = zip(ours, one[3], other[3], strict=True)
    return next(filter(None, (difference(mine, its, (*path, label)) for label, mine, its in children)), "")


def kind_of(leaf: Any) -> str:
    """Return what a leaf is, in words: ``uint8 array 48×64×3``."""
    if isinstance(leaf, np.ndarray) or is_tensor(leaf):
        what = "array" if isinstance(leaf, np.ndarray) else "tensor"
        return f"{dtype_of(leaf)} {what} {'×'.join(map(str, leaf.shape)) or 'of no axes'}"
    return "None" if leaf is None else type(plain_meta(leaf)).__name__


def dtype_of(leaf: Any) -> str:
    """Return the name of an array's or a tensor's dtype: ``"uint8"``."""
    return str(leaf.dtype).removeprefix("torch.")


def is_plain_tensor(kind: type) -> bool:
    """Return whether a type is torch's Tensor itself, not a subclass."""
    return (kind.__module__, kind.__name__) == ("torch", "Tensor")


def is_tensor(leaf: Any) -> bool:
    return is_tensor_type(type(leaf))


def is_tensor_type(kind: type) -> bool:
    """Return whether a type is torch's Tensor or a subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)
