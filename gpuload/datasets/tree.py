"""Takes samples apart into their *structure* (nested containers, hashable) and their leaves, and puts them together.

Runs in workers and in the main process; imports no torch, holds no state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from gpuload.datasets.sample import LEAVES

__all__ = [
    "LEAF",
    "Keys",
    "Structure",
    "assembled",
    "describe",
    "dtype_of",
    "flatten",
    "is_tensor",
    "mapping_like",
    "rebuild",
    "unflatten",
]

LEAF = "*"
Structure = Any  # LEAF, or (kind, type or None, keys or None, children): nested tuples, hashable


class Keys(tuple[Any, ...]):
    """A dict's sorted keys, so that samples differing only in their order have one structure; `order` is as given."""

    order: tuple[Any, ...]


def flatten(sample: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of a sample to `leaves`, depth first, and return its structure."""
    if isinstance(sample, tuple):
        cls = type(sample) if hasattr(sample, "_fields") else None
        return ("tuple", cls, None, tuple([flatten(child, leaves) for child in sample]))
    if isinstance(sample, list):
        cls = None if type(sample) is list else type(sample)
        return ("list", cls, None, tuple([flatten(child, leaves) for child in sample]))
    if isinstance(sample, Mapping):
        keys = _sorted_keys(tuple(sample))
        cls = None if type(sample) is dict else type(sample)
        return ("dict", cls, keys, tuple([flatten(sample[key], leaves) for key in keys]))
    if hasattr(type(sample), "__dataclass_fields__") and not isinstance(sample, LEAVES):
        keys = tuple(field.name for field in fields(sample) if field.init)
        return ("dataclass", type(sample), keys, tuple([flatten(getattr(sample, key), leaves) for key in keys]))
    leaves.append(sample)
    return LEAF


def _sorted_keys(order: tuple[Any, ...]) -> tuple[Any, ...]:
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
    """One container of a sample or batch from its parts, a dict's keys in their original order."""
    kind, cls, keys, _ = node
    if kind == "list":
        return parts if cls is None else _list_like(cls, parts)
    if kind == "tuple":
        return tuple(parts) if cls is None else cls(*parts)
    items = dict(zip(keys, parts, strict=True))
    if kind == "dataclass":
        return cls(**items)
    if isinstance(keys, Keys):
        items = {key: items[key] for key in keys.order}
    return items if cls is None else mapping_like(cls, items)


def _list_like(cls: type, parts: list[Any]) -> list[Any]:
    """A list of the user's type, if it can be made from one."""
    try:
        return cls(parts)
    except TypeError:
        return parts


def mapping_like(cls: type, items: dict[Any, Any]) -> Any:
    """A mapping of the user's type, if it can be made from a dict."""
    try:
        return cls(items)
    except TypeError:  # a defaultdict, say
        try:
            made = cls()
            made.update(items)
        except Exception:
            return items
        return made


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """A sample from its structure and its leaves, depth first."""
    rest = iter(leaves)
    return assembled(structure, lambda within: next(rest), keep_tuples=True)


def assembled(node: Structure, leaf: Callable[[str], Any], *, keep_tuples: bool, within: str = "") -> Any:
    """A structure with leaves from `leaf`, called depth first with the kind of the leaf's container. Plain tuples
    become lists unless `keep_tuples`.

    (An inner function that calls itself would be a reference cycle, and hold a batch until it is collected.)
    """
    if node == LEAF:
        return leaf(within)
    kind, cls, _, children = node
    parts = [assembled(child, leaf, keep_tuples=keep_tuples, within=kind) for child in children]
    return parts if kind == "tuple" and cls is None and not keep_tuples else rebuild(node, parts)


def describe(structure: Structure, leaves: Iterable[Any] | None = None) -> str:
    """A structure as text: ``(·, {'label': ·})``; with its leaves: ``(uint8 array 48×64, {'label': int})``."""
    if structure == LEAF:
        return "·" if leaves is None else _kind(next(iter(leaves)))
    kind, cls, keys, children = structure
    leaves = None if leaves is None else iter(leaves)
    parts = [describe(child, leaves) for child in children]
    name = "" if cls is None else cls.__name__
    if kind == "dict":
        return name + "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
    if kind == "dataclass":
        return name + "(" + ", ".join(f"{key}={part}" for key, part in zip(keys, parts, strict=True)) + ")"
    if kind == "list":
        return name + "[" + ", ".join(parts) + "]"
    return name + "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray) or is_tensor(leaf):
        what = "array" if isinstance(leaf, np.ndarray) else "tensor"
        return f"{dtype_of(leaf)} {what} {'×'.join(map(str, leaf.shape)) or 'of no axes'}"
    return "None" if leaf is None else type(leaf).__name__


def dtype_of(leaf: Any) -> str:
    """The name of an array's or a tensor's dtype: ``"uint8"``."""
    return str(leaf.dtype).removeprefix("torch.")


def is_tensor(leaf: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)
