"""Which part of an object cannot be pickled, for the error message: ``dataset.reader.lock``.

The pickler's own error names a type ("cannot pickle '_thread.lock' object") but not where it is. So after a failure the
parts of the object are tried, split as the pickler does it, then the parts of the first one that fails by itself, and
so on. References back to objects on the path are left out: they would make every part fail. Runs in the main process,
once, after the failure; bounded in depth and in tries.
"""

from __future__ import annotations

import functools
import reprlib
import types
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

__all__ = ["find_culprit"]

MAX_DEPTH = 32
MAX_TRIES = 400

# Parts of one kind, and the text for the i-th after its owner's name.
_Parts = tuple[Callable[[int], str], Sequence[Any]]


def find_culprit(obj: Any, attempt: Callable[[Any, Set[int]], Exception | None]) -> tuple[str, Any, Exception | None]:
    """The deepest part of `obj` that fails by itself: its path, the part, and its error.

    Args:
        obj: what could not be pickled.
        attempt: pickles something, leaving out the objects with these ids; returns the error, or None.
    """
    path, error = "", None
    ancestors: dict[int, Any] = {}  # by id; kept alive, so that no other object gets the id
    tries = MAX_TRIES

    def failing(values: Any) -> Exception | None:
        nonlocal tries
        tries -= 1
        return attempt(values, ancestors.keys()) if tries >= 0 else None

    for _ in range(MAX_DEPTH):
        ancestors[id(obj)] = obj
        found = None
        for name, values in _parts(obj):
            if (i := _first(values, failing)) is not None and id(values[i]) not in ancestors:
                found = name(i), values[i], failing(values[i])
                break
        if found is None or found[2] is None:
            break
        path, obj, error = path + found[0], *found[1:]
    return path, obj, error


def _first(values: Sequence[Any], failing: Callable[[Any], Exception | None]) -> int | None:
    """The number of the first value that fails, by halving: as much work as pickling all of them twice."""
    if not len(values) or failing(list(values)) is None:
        return None
    start, end = 0, len(values)
    while end - start > 1:
        middle = (start + end) // 2
        if failing(list(values[start:middle])) is not None:
            end = middle
        else:
            start = middle
    return start


def _parts(obj: Any) -> Iterator[_Parts]:
    """The parts of an object as the pickler finds them, attributes first."""
    if type(obj) in (list, tuple):
        yield _item, obj
    elif type(obj) in (set, frozenset):
        yield (lambda i: " (an element)"), list(obj)
    elif type(obj) is dict:
        yield from _entries(obj)
    elif isinstance(obj, types.FunctionType):
        yield from _function(obj)
    elif isinstance(obj, types.MethodType):
        yield _attributes({"__self__": obj.__self__, "__func__": obj.__func__})
    elif isinstance(obj, staticmethod | classmethod):
        yield (lambda i: ""), [obj.__func__]
    elif isinstance(obj, property):
        yield _attributes({"fget": obj.fget, "fset": obj.fset, "fdel": obj.fdel})
    elif isinstance(obj, functools.partial):
        yield _attributes({"func": obj.func, "args": obj.args, "keywords": obj.keywords})
    elif isinstance(obj, type):
        yield _attributes({name: value for name, value in vars(obj).items() if name not in ("__dict__", "__weakref__")})
        yield (lambda i: f".__bases__[{i}]"), obj.__bases__
    elif isinstance(obj, np.ndarray):
        if obj.dtype.hasobject:
            yield _item, obj.reshape(-1).tolist()
    else:
        yield from _reduced(obj)


def _reduced(obj: Any) -> Iterator[_Parts]:
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:  # it has no parts: it is the culprit itself
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, entries, *_ = (*reduced, None, None, None, None)
    if isinstance(state, dict):
        yield _attributes(state)
    elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # with __slots__
        yield _attributes({**(state[0] or {}), **state[1]})
    elif isinstance(state, list) and is_dataclass(obj) and len(fields(obj)) == len(state):
        yield _attributes(dict(zip((field.name for field in fields(obj)), state, strict=True)))
    elif state is not None:
        yield (lambda i: ".__getstate__()"), [state]
    if items is not None:
        yield _item, list(items)
    if entries is not None:
        yield from _entries(dict(entries))
    # Its constructor's arguments: mostly attributes too.
    names = {id(value): f".{name}" for name, value in getattr(obj, "__dict__", {}).items()}
    names[id(type(obj))] = ".__class__"
    values = list(arguments)
    yield (lambda i: names.get(id(values[i]), f".__reduce__()[1][{i}]")), values


def _function(function: types.FunctionType) -> Iterator[_Parts]:
    """A function that is sent by value, with the variables of its closure and the globals that it names."""
    code = function.__code__
    closed = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            closed[name] = cell.cell_contents
        except ValueError:  # still empty
            continue
    yield (lambda i: f".<closure>.{list(closed)[i]}"), list(closed.values())
    yield _attributes({"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__})
    yield _attributes(vars(function))
    used: dict[str, Any] = {}
    codes = [code]
    while codes:  # functions within the function
        inner = codes.pop()
        used |= {name: function.__globals__[name] for name in inner.co_names if name in function.__globals__}
        codes += [const for const in inner.co_consts if isinstance(const, types.CodeType)]
    yield (lambda i: f".<globals>.{list(used)[i]}"), list(used.values())


def _entries(entries: dict[Any, Any]) -> Iterator[_Parts]:
    keys = list(entries)
    yield (lambda i: f"[{reprlib.repr(keys[i])}]"), list(entries.values())
    yield (lambda i: f" (the key {reprlib.repr(keys[i])})"), keys


def _attributes(found: dict[Any, Any]) -> _Parts:
    names = list(found)
    return (lambda i: f".{names[i]}"), list(found.values())


def _item(i: int) -> str:
    return f"[{i}]"
