"""Lists of `bytes` that all workers share: `SharedBytes`.

A list of encoded images is pickled as any other object, and each worker would have a copy of it. So its contents go
into the job's memfd as one array, and a worker gets a list that copies an item out of the mapping when code asks for
it. Everything but reading items turns it into an ordinary list first, with a copy of all contents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

__all__ = ["SharedBytes", "find_lists"]

MIN_BYTES: Final = 1 << 20  # of a list that is shared
MAX_DEPTH: Final = 3  # of containers in the attributes of an object
MAX_ENTRIES: Final = 1_000  # of a container that is searched
# Methods of list that need no other contents, or that the class has itself.
READS: Final = """
__class__ __class_getitem__ __delattr__ __dir__ __doc__ __getattribute__ __getitem__ __getstate__ __hash__ __init__
__init_subclass__ __iter__ __len__ __new__ __reduce__ __setattr__ __sizeof__ __subclasshook__
"""


class SharedBytes(list):
    """A list of bytes whose contents lie in memory that others share.

    Args:
        data: uint8, all items one behind the other.
        ends: int64, where each ends.
    """

    def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
        # What reads a list's memory directly, past these methods, finds the right length, and no bytes: an error.
        super().__init__([None] * len(ends))
        self._data: np.ndarray | None = data
        self._ends = ends

    def __getitem__(self, index: Any) -> Any:
        if self._data is None:
            return super().__getitem__(index)
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self._ends))[index]
        start = int(self._ends[number - 1]) if number else 0
        return self._data[start : int(self._ends[number])].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def __radd__(self, other: list) -> list:
        return other + list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)

    def _load(self) -> SharedBytes:
        if self._data is not None:
            super().__setitem__(slice(None), list(self))
            self._data = None
        return self


def _loaded_first(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: SharedBytes, *args: Any, **options: Any) -> Any:
        args = tuple(value._load() if isinstance(value, SharedBytes) else value for value in args)
        return method(self._load(), *args, **options)

    return call


for _name in dir(list):
    if _name not in READS.split() and _name not in vars(SharedBytes):
        setattr(SharedBytes, _name, _loaded_first(getattr(list, _name)))


def find_lists(obj: Any) -> dict[int, tuple[int, np.ndarray, np.ndarray]]:
    """Return the large lists of bytes in an object's attributes, and in containers and objects there: by `id`, their
    number, and the arguments of a `SharedBytes`."""
    found: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}

    def search(value: Any, depth: int) -> None:
        if type(value) is list and value and type(value[0]) is bytes:
            if id(value) not in found and all(type(item) is bytes for item in value):
                ends = np.cumsum(np.fromiter(map(len, value), np.int64, len(value)))
                if ends[-1] >= MIN_BYTES:
                    found[id(value)] = len(found), np.frombuffer(b"".join(value), np.uint8), ends
        elif depth and type(value) in (list, tuple, dict):
            entries = list(value.values()) if type(value) is dict else value
            for entry in entries[:MAX_ENTRIES]:
                search(entry, depth - 1)
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            for entry in list(vars(value).values()):
                search(entry, depth - 1)

    search(obj, 1 + MAX_DEPTH)
    return found
