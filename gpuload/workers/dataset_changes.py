"""Changes to the dataset that the workers' copies have to follow.

Workers outlive an epoch, so each `iter()` compares the dataset with what it was at the last one (`DatasetChanges`), and
brings the workers' copies up to date:

- If only *simple* values have changed (`gpuload.workers.inherited.is_simple`), such as ``loader.dataset.mosaic``, the
  new values are sent to each worker once, and are applied before the epoch's first sample.
- If anything else has changed, the complete dataset is sent again, to new workers. The simple values that changed with
  it must not reach the old workers: they would have a state that the program never had.

The compared attributes are those of the dataset, of its inner datasets and transforms, and of the instances of the
user's classes that these hold; of gpuload's own datasets, which keep caches in private attributes, only public ones.

Comparing must be quick, so it has bounds: `Marker` describes what it sees of a large value. It never sees handles,
modules, functions, CUDA tensors, memory-mapped files, and memory that processes share on purpose.
"""

from __future__ import annotations

import contextlib
import copy
import io
import mmap
import pickle
import sys
import types
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from gpuload.workers.inherited import are_same, is_simple, is_users_module

__all__ = ["DatasetChanges", "apply_changes", "find_objects", "name_attribute"]

MAX_DEPTH: Final = 4  # the maximum length of a path; enough for Subset, dataset, Compose, transform
MAX_OBJECTS: Final = 64  # only this many entries of a list of datasets or transforms are searched
MAX_ENTRIES: Final = 64  # all entries of a container of up to this size are compared, by their contents
SAMPLED_ENTRIES: Final = 1_000  # how many evenly spaced entries of larger containers are compared, by identity
EDGE_ENTRIES: Final = 32  # and how many at either end
CHECKSUM_BYTES: Final = 16_000_000  # arrays and tensors of up to this total size are compared completely
BLOCKS, BLOCK_BYTES = 64, 4096  # of others, evenly spaced blocks are compared
# Objects with a length of these packages are compared by identity and length: tables and columns that do not change in
# place (except for pandas, whose columns are compared too), and gpuload's lists of paths.
TABLE_PACKAGES: Final = {"datasets", "gpuload", "pandas", "polars", "pyarrow"}
# The path to an attribute: the attribute names and list indices that lead to its owner, then its name.
Path = tuple[str | int, ...]
LENGTH: Final[Path] = ("__len__",)


def find_objects(dataset: object) -> Iterator[tuple[Path, Any]]:
    """Yield the dataset, and the datasets, transforms and instances of the user's classes in its attributes, each with
    its path."""
    seen_ids: set[int] = set()

    def search(obj: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if id(obj) in seen_ids:
            return
        seen_ids.add(id(obj))
        yield path, obj
        if len(path) >= MAX_DEPTH:
            return
        for name, value in list(getattr(obj, "__dict__", {}).items()):
            is_part = "transform" in name or "dataset" in name
            for step, entry in enumerate(value[:MAX_OBJECTS]) if type(value) in (list, tuple) else [(None, value)]:
                if _has_attributes(entry) and (is_part or _is_users_instance(entry)):
                    yield from search(entry, (*path, name) if step is None else (*path, name, step))

    return search(dataset, ())


def _has_attributes(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | types.FunctionType)


def _is_users_instance(value: object) -> bool:
    module = type(value).__module__
    return module in ("__main__", "__mp_main__") or is_users_module(sys.modules.get(module))


class DatasetChanges:
    """The changes to a dataset that workers do not have yet.

    An attribute that changes during every epoch, such as a counter in a `collate_fn` of the dataset or a cache, is not
    a change by the user, so it is ignored from the second epoch on.

    Attributes:
        pending: the new values, keyed by path. A `Mark` stands for a value that is not simple.
        times_resent: how often the dataset was sent again because of an attribute, keyed by path.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.pending: dict[Path, Any] = {}
        self.times_resent: Counter[Path] = Counter()
        self._last_values = self._read()
        self._ended_epochs = 0
        self._changing_paths: set[Path] = set()  # the attributes that changed during each of the epochs that have ended

    def record(self) -> list[str]:
        """Add the changes since the last call of this method or `ignore` to `pending`; return a description of each
        simple one."""
        new_values = self._find_changes(self._read())
        self._last_values |= new_values
        if self._ended_epochs > 1:
            new_values = {path: value for path, value in new_values.items() if path not in self._changing_paths}
        self.pending |= new_values
        return [
            f"dataset{_format_path(path)} = {value!r}"
            for path, value in new_values.items()
            if not isinstance(value, Mark)
        ]

    def ignore(self, *, only_simple: bool = False) -> None:
        """Ignore the changes since the last `record`. Call this after gpuload itself has caused changes."""
        self._last_values |= self._find_changes(self._read(only_simple=only_simple))

    def end_epoch(self) -> None:
        """Record which attributes changed during the epoch that has just ended."""
        changed_paths = self._find_changes(self._read()).keys()
        self._changing_paths = self._changing_paths & changed_paths if self._ended_epochs else set(changed_paths)
        self._ended_epochs += 1

    @property
    def changed_data(self) -> list[Path]:
        """The paths of the changed attributes that cannot be sent to running workers."""
        return [path for path, value in self.pending.items() if isinstance(value, Mark)]

    def pop(self) -> bytes:
        """Return the pending changes, which are all simple, for `apply_changes`; none are pending then."""
        values, self.pending = self.pending, {}
        return pickle.dumps(values, 5)

    def note_resent(self) -> list[str]:
        """Record that the dataset was sent again, so that no change is pending. Return the names of the attributes for
        which this was the second time."""
        paths = self.changed_data
        self.pending = {}
        self.times_resent.update(paths)
        return [name_attribute(path) for path in paths if self.times_resent[path] == 2]

    def _find_changes(self, values: dict[Path, Any]) -> dict[Path, Any]:
        last_values = self._last_values
        return {
            path: value
            for path, value in values.items()
            if path not in last_values or not _are_same(value, last_values[path])
        }

    def _read(self, *, only_simple: bool = False) -> dict[Path, Any]:
        """Return the values and marks of all attributes, keyed by path."""
        values: dict[Path, Any] = {}
        if self._dataset is None:
            return values
        marker = Marker()
        owners = list(find_objects(self._dataset))
        found_ids = {id(owner) for _, owner in owners}
        if not only_simple:
            values[()] = marker.mark(self._dataset)
            if hasattr(type(self._dataset), "__getitem__"):
                with contextlib.suppress(Exception):  # it has no length
                    values[LENGTH] = Mark(len(self._dataset))
        for path, owner in owners:
            is_ours = type(owner).__module__.startswith("gpuload.")
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if is_simple(value):
                    values[*path, name] = copy.deepcopy(value)
                elif not only_simple and not (is_ours and name.startswith("_")):
                    values[*path, name] = Mark(Same(value)) if id(value) in found_ids else marker.mark(value)
        return values


@dataclass(slots=True, eq=False)
class Mark:
    """What can be seen of a value that is not simple. None stands for a value that is not compared."""

    facts: object


@dataclass(slots=True, eq=False)
class Same:
    """A reference that equals only references to the same object. It keeps the object alive, since another object could
    get its id."""

    obj: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.obj is other.obj


def _are_same(a: Any, b: Any) -> bool:
    if isinstance(a, Mark) and isinstance(b, Mark):
        return a.facts is None or b.facts is None or a.facts == b.facts
    if isinstance(a, Mark) or isinstance(b, Mark):  # a handle that was None until it was opened is no change
        return (a if isinstance(a, Mark) else b).facts is None
    return are_same(a, b)


class Marker:
    """Makes the marks of a dataset's attributes at one moment.

    It sees the identity, type and length of strings, containers and tables; the entries of containers of up to
    `MAX_ENTRIES` entries, and of larger ones the identities of `SAMPLED_ENTRIES` evenly spaced entries and of
    `EDGE_ENTRIES` at either end; of arrays, tensors and the columns of a DataFrame the address, shape, dtype and a
    checksum of all bytes, or of `BLOCKS` blocks once `CHECKSUM_BYTES` have been read.
    """

    def __init__(self) -> None:
        self._bytes_left = CHECKSUM_BYTES

    def mark(self, value: object) -> Mark:
        facts = self._facts_of(value, depth=2)
        return Mark(None if facts is None else (Same(value), facts))

    def _facts_of(self, value: Any, depth: int) -> Any:
        """Return facts that can be compared with ``==``; None if the value is no data."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, bytearray):
            return self._checksum(np.frombuffer(value, np.uint8))
        if isinstance(value, list | tuple | dict):
            return (*self._entries(value, depth),)
        if isinstance(value, set | frozenset):
            return len(value), frozenset(value) if len(value) <= SAMPLED_ENTRIES else None
        if isinstance(value, np.ndarray):
            return None if _is_shared_array(value) else self._array_facts(value)
        if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
            return self._tensor_facts(torch, value)
        if type(value).__module__.partition(".")[0] in TABLE_PACKAGES and hasattr(value, "__len__"):
            return len(value), *self._columns(value)
        return None

    def _entries(self, value: Any, depth: int) -> Iterator[Any]:
        # A subclass may override any method, as a dataset that is a list does.
        kind: Any = next(filter(partial(isinstance, value), (list, tuple, dict, _Flat)))
        count, entries = kind.__len__(value), dict.values(value) if kind is dict else None
        if count <= MAX_ENTRIES and depth:
            if entries is not None:
                yield list(map(Same, dict.__iter__(value)))
            for entry in kind.__iter__(value) if entries is None else entries:
                if is_simple(entry):
                    yield type(entry), repr(entry)
                else:
                    yield Same(entry), self._facts_of(entry, depth - 1)
            return
        yield count
        step = max(1, -(-count // SAMPLED_ENTRIES))
        if entries is not None:
            first, last = islice(entries, EDGE_ENTRIES), islice(reversed(entries), EDGE_ENTRIES)
            sampled = islice(entries, 0, None, step)
        else:
            slices = slice(EDGE_ENTRIES), slice(-EDGE_ENTRIES, None), slice(None, None, step)
            first, last, sampled = (kind.__getitem__(value, rows) for rows in slices)
        yield list(map(Same, chain(first, last, sampled)))

    def _array_facts(self, array: np.ndarray) -> Any:
        facts = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
        if array.dtype.hasobject:
            is_flat = array.dtype == object and array.flags.c_contiguous
            return *facts, *(self._entries(_Flat(array), 0) if is_flat else ())
        return *facts, self._checksum(array)

    def _tensor_facts(self, torch: Any, tensor: Any) -> Any:
        if tensor.device.type != "cpu":
            return None
        facts: list[Any] = [tensor.dtype]
        with contextlib.suppress(NotImplementedError):  # a sparse tensor has no storage
            if tensor.is_shared():
                return None
        with contextlib.suppress(Exception):  # it was made in inference mode
            facts.append(tensor._version)
        with contextlib.suppress(Exception):  # a nested or sparse tensor
            facts += [tensor.shape, tensor.data_ptr(), tensor.stride()]
            facts.append(self._checksum(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))
        return facts

    def _columns(self, table: Any) -> Iterator[Any]:
        """Yield the facts of a pandas object's columns. Other tables cannot be changed in place."""
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(table, pandas.DataFrame | pandas.Series):
            return
        columns = [table] if isinstance(table, pandas.Series) else [table.iloc[:, i] for i in range(table.shape[1])]
        yield Same(table.index)
        for column in columns:
            array = getattr(column.array, "_ndarray", None)  # the memory of most types of columns
            yield column.name, Same(column.array) if array is None else self._array_facts(array)

    def _checksum(self, array: np.ndarray) -> int:
        if not array.size:
            return 0
        if array.nbytes <= self._bytes_left:
            self._bytes_left -= array.nbytes
            return zlib.crc32(np.ascontiguousarray(array).data.cast("B"))
        if not array.flags.c_contiguous:
            array = array.T
        if not array.flags.c_contiguous:
            return 0
        data, total = array.reshape(-1).view(np.uint8), 0
        for start in np.linspace(0, max(0, len(data) - BLOCK_BYTES), BLOCKS).astype(np.int64).tolist():
            total = zlib.crc32(data[start : start + BLOCK_BYTES].tobytes(), total)
        return total


class _Flat:
    """An array of objects, as a sequence."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array.reshape(-1)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: slice) -> list[Any]:
        return self._array[index].tolist()


def _is_shared_array(array: np.ndarray) -> bool:
    """Return whether an array's memory may be shared with other processes, or is that of a file."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    if isinstance(base, mmap.mmap) or hasattr(base, "_wrapper"):  # multiprocessing's ctypes objects have a wrapper
        return True
    is_shared = getattr(base, "is_shared", None)  # of a tensor
    return bool(callable(is_shared) and is_shared())


def apply_changes(dataset: Any, packed: bytes) -> None:
    """Apply packed changes, one after another. Runs in a worker."""
    stream = io.BytesIO(packed)
    while stream.tell() < len(packed):
        for path, value in pickle.load(stream).items():  # simple values, pickled by the main process
            owner = dataset
            for step in path[:-1]:
                owner = owner[step] if isinstance(step, int) else getattr(owner, step)
            vars(owner)[path[-1]] = value


def name_attribute(path: Path) -> str:
    """Return the name of an attribute of the dataset in messages."""
    return "len(dataset)" if path == LENGTH else f"dataset{_format_path(path)}"


def _format_path(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
