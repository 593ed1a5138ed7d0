"""Detects user code that refers to state that training may change, such as a module's parameters.

Such code must run after the training steps that were issued before it; otherwise it could read the state too early, or
while the state is being written. The only effect of a false positive is that batches are not prepared ahead of time.

This module runs in the main process, once per chain. It does not import torch: if no other code has imported torch,
there are no torch modules to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np

from gpuload.transforms.arguments import is_module

__all__ = ["has_state"]

MAX_OBJECTS: Final = 10_000  # the maximum number of objects to search for modules
# Types whose objects cannot refer to modules.
LEAF_TYPES: Final = (str, bytes, int, float, complex, type(None), np.ndarray, type, ModuleType)
LIBRARIES: Final = ("gpuload", "kornia", "numpy", "timm", "torch", "torchvision")  # their globals are not searched
# The attributes of these libraries' objects are not searched either, because there are too many.
OPAQUE: Final = ("gpuload", "logging", "numpy")


def has_state(entry: Any) -> bool:
    """Return whether an object is, or refers to, a torch module with parameters or buffers, or a tensor that requires
    gradients, which training may change at any time. References are attributes, items of collections, and a function's
    closure, bound object and globals. Also return True if the object refers to more than `MAX_OBJECTS` objects."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    pending = [entry]
    while pending:
        current = pending.pop()
        if isinstance(current, LEAF_TYPES) or id(current) in seen:
            continue
        seen[id(current)] = current
        if is_module(current) and any(True for tensors in (current.parameters, current.buffers) for _ in tensors()):
            return True
        if getattr(current, "requires_grad", False) is True or len(seen) > MAX_OBJECTS:
            return True
        pending += _referents(current)
    return False


def _referents(entry: object) -> Iterable[Any]:
    """Return the objects that an object refers to directly."""
    if isinstance(entry, dict):  # other mappings are not searched, since they may read their values from files
        return list(entry.values())
    if isinstance(entry, list | tuple | set | frozenset):
        return list(entry)
    if isinstance(entry, FunctionType):
        cells = [cell.cell_contents for cell in entry.__closure__ or () if cell != CellType()]
        referents = [*cells, *(entry.__defaults__ or ()), *(entry.__kwdefaults__ or {}).values(), entry.__dict__]
        return referents if _package(entry) in LIBRARIES else [*referents, *_globals(entry.__code__, entry.__globals__)]
    if isinstance(entry, MethodType | BuiltinMethodType):
        return [entry.__self__, getattr(entry, "__func__", None)]
    if isinstance(entry, partial):
        return [entry.func, *entry.args, *entry.keywords.values()]
    return [] if _package(type(entry)) in OPAQUE else _attributes(entry)


def _globals(code: CodeType, module_globals: dict[str, Any]) -> Iterator[Any]:
    """Yield the globals used by a function or its nested functions. Also yield globals that have the name of an
    attribute that the code uses, since code objects do not distinguish global names from attribute names."""
    yield from (module_globals[name] for name in code.co_names if name in module_globals)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner, module_globals)


def _attributes(entry: object) -> Iterator[Any]:
    """Yield the attributes of an object, including slots, and its class's ``__call__``."""
    yield from list(getattr(entry, "__dict__", {}).values())
    classes = type(entry).__mro__
    for slots in (vars(cls).get("__slots__", ()) for cls in classes):
        yield from (getattr(entry, name, None) for name in ((slots,) if isinstance(slots, str) else slots))
    yield next((vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)), None)


def _package(entry: object) -> str:
    """Return the name of the top-level package of a function or a class."""
    return str(entry.__module__).partition(".")[0]
