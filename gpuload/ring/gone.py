"""Calls when an object is gone, in whatever thread lets go of it.

As `weakref.finalize`, but without a registry that the interpreter walks as it ends: there it complains if a daemon
thread, which may iterate a loader, adds to it meanwhile. Nothing is called once the interpreter ends.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

__all__ = ["when_gone"]

_waiting: dict[int, weakref.ref] = {}
atexit.register(_waiting.clear)


def when_gone(thing: object, function: Callable[..., object], *args: object) -> Callable[[], object]:
    """Call ``function(*args)`` when `thing` is gone; returns what calls this off."""

    def call(ref: weakref.ref, waiting: dict[int, weakref.ref] = _waiting) -> None:
        if waiting.pop(id(ref), None) is not None:
            function(*args)

    ref = weakref.ref(thing, call)
    _waiting[id(ref)] = ref  # its own hash is that of what it refers to: arrays have none
    return lambda: _waiting.pop(id(ref), None)
