"""What the user changes of a dataset after workers got their copies of it: ``loader.dataset.mosaic = False``.

Workers outlive an epoch, so a copy would stay as it was sent. At each `iter()` the main process compares the simple
attributes of the dataset with those at the previous `iter()`. What changed goes to the workers with each request, as a
few bytes, and they apply it before the epoch's first sample. Simple attributes are numbers, texts, and small tuples,
lists and dicts of these: of the dataset, of the datasets in it, and of its transforms.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from gpuload.workers.inherited import is_simple, same

__all__ = ["DatasetChanges", "apply_changes", "objects_in"]

MAX_DEPTH: Final = 4  # a transform in a composition of a dataset in a subset
MAX_OBJECTS: Final = 64  # in a list of datasets or transforms
MAX_BYTES: Final = 32 << 10  # that go with each request
# Where an attribute is: the attributes, and the numbers in lists, that lead to its owner; then its name.
Path = tuple[str | int, ...]


def objects_in(dataset: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Return the dataset, and the datasets and transforms in it, each with the path to it."""
    yield path, dataset
    if len(path) >= MAX_DEPTH:
        return
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if "transform" not in name and "dataset" not in name:
            continue
        if type(value) in (list, tuple):
            for number, part in enumerate(value[:MAX_OBJECTS]):
                if hasattr(part, "__dict__"):
                    yield from objects_in(part, (*path, name, number))
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
            yield from objects_in(value, (*path, name))


class DatasetChanges:
    """The changes of a dataset since workers got it.

    What changes during each epoch, as a counter in a `collate_fn` of the dataset does, is not the user's doing, and is
    left out from the second epoch on.

    Attributes:
        packed: all of them, pickled; empty if there are none.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._changed: dict[Path, Any] = {}
        self._last = self._now()
        self._epochs = 0  # that came to their ends
        self._restless: set[Path] = set()  # what changed during each of them
        self.packed = b""

    def look(self) -> list[str]:
        """Note what changed since the last call of this or of `skip`. Returns a text for each.

        Raises:
            ValueError: the changes are too large to be sent.
        """
        new = self._new()
        self._last |= new
        if self._epochs > 1:
            new = {path: value for path, value in new.items() if path not in self._restless}
        if new:
            self._changed |= new
            self.packed = pickle.dumps(self._changed, 5)
            if len(self.packed) > MAX_BYTES:
                raise ValueError(
                    f"the attributes of the dataset that changed since its workers started have {len(self.packed):,} "
                    f"bytes, more than {MAX_BYTES:,}; call loader.close(), and the next iter() sends the dataset anew"
                )
        return [f"dataset{_text(path)} = {value!r}" for path, value in new.items()]

    def skip(self) -> None:
        """Take what changed since the last look for no change of the user's."""
        self._last |= self._new()

    def end_epoch(self) -> None:
        """Note what changed during the epoch that has come to its end."""
        changed = self._new().keys()
        self._restless = self._restless & changed if self._epochs else set(changed)
        self._epochs += 1

    def _new(self) -> dict[Path, Any]:
        last = self._last
        return {path: value for path, value in self._now().items() if path not in last or not same(value, last[path])}

    def _now(self) -> dict[Path, Any]:
        return {
            (*path, name): copy.deepcopy(value)
            for path, owner in objects_in(self._dataset)
            for name, value in list(getattr(owner, "__dict__", {}).items())
            if is_simple(value)
        }


def apply_changes(dataset: Any, packed: bytes, applied: dict[Path, Any]) -> None:
    """Apply the changes that are not in `applied` yet, and add them to it. Runs in a worker."""
    for path, value in pickle.loads(packed).items():  # by the main process: simple values
        if path in applied and same(applied[path], value):
            continue  # the dataset may have changed it itself since
        applied[path] = value
        owner = dataset
        for step in path[:-1]:
            owner = owner[step] if isinstance(step, int) else getattr(owner, step)
        vars(owner)[path[-1]] = copy.deepcopy(value)


def _text(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
