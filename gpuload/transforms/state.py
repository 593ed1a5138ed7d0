"""Whether code of the user's own refers to what training may change: then it is called only behind what the training
loop has issued. What is missed here is read too early, or while it is being written; what is taken for state in vain
costs only that no batch is made ahead.

Runs in the main process, once for a chain. Torch is not imported: before somebody else has, there are no modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np

from gpuload.transforms.arguments import is_module

__all__ = ["has_state"]

MOST_REFERRED: Final = 10_000  # objects of the user's own, which are searched for modules
PLAIN: Final = (str, bytes, int, float, complex, type(None), np.ndarray, type, ModuleType)  # refer to no modules
LIBRARIES: Final = ("gpuload", "kornia", "numpy", "timm", "torch", "torchvision")  # their globals are not the user's
CLOSED: Final = ("gpuload", "logging", "numpy")  # nor are the attributes of their objects, which are many


def has_state(entry: Any) -> bool:
    """Whether it is, or refers to, a torch module with parameters or buffers, or a tensor that wants gradients, which
    training may change at any time: in attributes, in collections, and in what a function closes over, is bound to or
    names as a global. So is taken whatever refers to more than `MOST_REFERRED` objects."""
    seen: dict[int, Any] = {}  # keeps what it finds, so that no number comes twice
    waiting = [entry]
    while waiting:
        current = waiting.pop()
        if isinstance(current, PLAIN) or id(current) in seen:
            continue
        seen[id(current)] = current
        if is_module(current) and any(True for held in (current.parameters, current.buffers) for _ in held()):
            return True
        if getattr(current, "requires_grad", False) is True or len(seen) > MOST_REFERRED:
            return True
        waiting += _referred(current)
    return False


def _referred(entry: Any) -> Iterable[Any]:
    """Return the objects that an object refers to by its own code."""
    if isinstance(entry, dict):  # other mappings may read files for their values
        return list(entry.values())
    if isinstance(entry, list | tuple | set | frozenset):
        return list(entry)
    if isinstance(entry, FunctionType):
        cells = [cell.cell_contents for cell in entry.__closure__ or () if cell != CellType()]
        inside = [*cells, *(entry.__defaults__ or ()), *(entry.__kwdefaults__ or {}).values(), entry.__dict__]
        return inside if _package(entry) in LIBRARIES else [*inside, *_globals(entry.__code__, entry.__globals__)]
    if isinstance(entry, MethodType | BuiltinMethodType):
        return [entry.__self__, getattr(entry, "__func__", None)]
    if isinstance(entry, partial):
        return [entry.func, *entry.args, *entry.keywords.values()]
    return [] if _package(type(entry)) in CLOSED else _attributes(entry)


def _globals(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """The globals that a function, or one within it, names. (An attribute of such a name is taken for one.)"""
    yield from (names[name] for name in code.co_names if name in names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner, names)


def _attributes(entry: Any) -> Iterator[Any]:
    """The attributes of an object, and what is called when it is called."""
    yield from list(getattr(entry, "__dict__", {}).values())
    kinds = type(entry).__mro__
    for slots in (vars(kind).get("__slots__", ()) for kind in kinds):
        yield from (getattr(entry, name, None) for name in ((slots,) if isinstance(slots, str) else slots))
    yield next((vars(kind)["__call__"] for kind in kinds if "__call__" in vars(kind)), None)


def _package(entry: Any) -> str:
    """The package of a function or a class."""
    return str(entry.__module__).partition(".")[0]
