"""What a forked worker would have of the user's process, and a fresh interpreter is sent; and what changes later.

Gathered in the main process when a job is pickled:

- the *settings of libraries* (`LibrarySettings`), which apply themselves in the worker: once before the dataset is
  unpickled, since its modules may read them, and once more behind it, since these modules may change them;
- the *import path*, whose relative entries meant another folder before the program changed its working directory;
- the *modules that a worker cannot import* by their names (loaded by path; ``__mp_main__``, the script in a process
  that `multiprocessing` spawned): their classes and functions are pickled by value;
- the *values of modules* of the user's own (`module_values`): a worker imports these modules again, so it does not see
  ``config.SIZE = 224``. The worker compares, and says what differs.

Gathered at each `iter()`, since workers outlive an epoch: *changes of the dataset* (`DatasetChanges`), such as
``loader.dataset.mosaic = False``. They go to the workers with each request, as a few bytes, and are applied before the
epoch's first sample.

Values of modules and attributes of a dataset are looked at if they are *simple*: numbers, texts, and small tuples,
lists and dicts of these. A dataset's are its own, those of the datasets in it, and those of its transforms.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import pickle
import reprlib
import sys
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

__all__ = [
    "DatasetChanges",
    "LibrarySettings",
    "apply_changes",
    "differences",
    "import_path",
    "is_simple",
    "module_values",
    "objects_in",
    "pickled_by_value",
]

PILLOWS_PIXELS: Final = 1024**3 // 4 // 3  # its default: a worker need not import Pillow to have it
MAX_FUNCTIONS: Final = 2_000  # that are searched for values of modules
MAX_ENTRIES: Final = 64  # of a list or dict that is compared
MAX_TEXT: Final = 1_000  # characters of a text that is compared
MAX_DEPTH: Final = 4  # a transform in a composition of a dataset in a subset
MAX_OBJECTS: Final = 64  # in a list of datasets or transforms
MAX_CHANGES_BYTES: Final = 32 << 10  # that go with each request
Filter = tuple[str, str, tuple[str, str], str, int]  # as `filterwarnings()` takes them; the category: module and name
# Where an attribute is: the attributes, and the numbers in lists, that lead to its owner; then its name.
Path = tuple[str | int, ...]
_registering = threading.RLock()


# -- settings of libraries --------------------------------------------------------------------------------------------


class LibrarySettings:
    """Settings that libraries keep in their modules, each as the call that makes it; unpickling makes the calls.

    A call refers to a function of its library, so unpickling it imports the library: there is none for a setting that
    has its default, as far as that is known.

    Attributes:
        calls: what to call.
    """

    def __init__(self, calls: list[partial[Any]], filters: list[Filter]) -> None:
        self.calls = calls
        self._filters = filters

    @classmethod
    def here(cls, can_pickle: Callable[[Any], bool]) -> LibrarySettings:
        """Return those of this process; what cannot be pickled stays here."""
        calls: list[partial[Any]] = [partial(np.seterr, **np.geterr())]
        modules = sys.modules
        if (image := modules.get("PIL.Image")) is not None:
            if image.MAX_IMAGE_PIXELS != PILLOWS_PIXELS:
                calls.append(partial(_set_attribute, "PIL.Image", "MAX_IMAGE_PIXELS", image.MAX_IMAGE_PIXELS))
            for name, (factory, accept) in image.OPEN.items():
                extensions = [extension for extension, owner in image.EXTENSION.items() if owner == name]
                opening = partial(image.register_open, name, factory, accept)
                if not _is_pillows(factory) and can_pickle(opening):
                    calls += [opening, partial(image.register_extensions, name, extensions)]
            for name, decoder in image.DECODERS.items():
                if not _is_pillows(decoder) and can_pickle(decoder):
                    calls.append(partial(image.register_decoder, name, decoder))
        if getattr(modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False):
            calls.append(partial(_set_attribute, "PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", True))
        if (torch := modules.get("torch")) is not None and (dtype := torch.get_default_dtype()) != torch.float32:
            calls.append(partial(torch.set_default_dtype, dtype))
        if (logging := modules.get("logging")) is not None:
            loggers = {"": logging.root, **logging.root.manager.loggerDict}
            levels = {name: getattr(logger, "level", 0) for name, logger in loggers.items()}  # placeholders have none
            levels = {name: level for name, level in levels.items() if level}
            calls.append(partial(_set_log_levels, levels, logging.root.manager.disable))
        if (decimal := modules.get("decimal")) is not None:
            calls.append(partial(decimal.setcontext, decimal.getcontext()))
        if (socket := modules.get("socket")) is not None and (timeout_s := socket.getdefaulttimeout()) is not None:
            calls.append(partial(socket.setdefaulttimeout, timeout_s))
        return cls(calls, _warning_filters())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.apply(imported=False)

    def apply(self, *, imported: bool = True) -> None:
        """Make them those of this process. `imported`: the dataset's modules are; before that, warnings are no errors,
        since in the main process these modules may have been imported before the filter was set."""
        for call in self.calls:
            call()
        warnings.resetwarnings()
        for action, message, (module, name), where, line in self._filters:
            category = getattr(sys.modules.get(module), name, None)
            if category is not None and (imported or action != "error"):
                warnings.filterwarnings(action, message, category, where, line, append=True)  # type: ignore[arg-type]


def _set_attribute(module: str, name: str, value: Any) -> None:
    setattr(importlib.import_module(module), name, value)


def _set_log_levels(levels: dict[str, int], disabled: int) -> None:
    import logging  # here: a worker starts sooner without it

    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
    logging.disable(disabled)


def _is_pillows(registered: Any) -> bool:
    return getattr(registered, "__module__", "").startswith("PIL.")


def _warning_filters() -> list[Filter]:
    def text(pattern: Any) -> str:
        return getattr(pattern, "pattern", pattern) or ""

    return [
        (action, text(message), (category.__module__, category.__name__), text(module), line)
        for action, message, category, module, line in warnings.filters
        if isinstance(category, type)
    ]


# -- modules ----------------------------------------------------------------------------------------------------------


def import_path() -> list[str]:
    """Return this process's import path. A relative entry is the folder that it was when it was first searched."""
    entries = []
    for entry in sys.path:
        if isinstance(entry, str):
            if entry and not os.path.isabs(entry):
                entry = getattr(sys.path_importer_cache.get(entry), "path", None) or os.path.abspath(entry)
            entries.append(entry)
    return entries


def _workers_path() -> tuple[str, ...]:
    return tuple(os.path.abspath(entry) for entry in import_path())


@contextlib.contextmanager
def pickled_by_value() -> Iterator[None]:
    """Make a context in which cloudpickle sends by value what is defined in modules that a worker cannot import."""
    import cloudpickle

    with _registering:
        path = _workers_path()
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [
            module
            for name, module in list(sys.modules.items())
            if isinstance(module, types.ModuleType) and module.__name__ == name != "__main__" and name not in known
            if _is_own(module) and not _is_importable(module, path)
        ]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: Any) -> bool:
    """Return whether a module is the user's own: not of Python, of an installed package or of gpuload."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_own_file(file)


@functools.cache
def _is_own_file(file: str) -> bool:
    return not file.startswith(_installed_in()) and os.path.isfile(file)


@functools.cache
def _installed_in() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages and of gpuload."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(folder + os.sep for folder in (*folders, os.path.dirname(os.path.dirname(__file__))))


def _is_importable(module: Any, path: tuple[str, ...]) -> bool:
    """Return whether a worker with this import path gets the same module by its name."""
    parent, _, _ = module.__name__.rpartition(".")
    if parent:
        if (package := sys.modules.get(parent)) is None or (_is_own(package) and not _is_importable(package, path)):
            return False
        path = tuple(getattr(package, "__path__", ()))
    return _found_at(module.__name__, path) == os.path.realpath(module.__file__ or "")


@functools.cache
def _found_at(name: str, path: tuple[str, ...]) -> str | None:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # of a finder that somebody else installed
            if (spec := finder.find_spec(name, path)) is not None:
                return os.path.realpath(spec.origin or "")
    return None


# -- values of modules ------------------------------------------------------------------------------------------------


def is_simple(value: Any, depth: int = 2) -> bool:
    """Return whether a value is a number, a short text, None, or a small tuple, list or dict of these."""
    if value is None or type(value) in (bool, int, float, complex):
        return True
    if type(value) in (str, bytes):
        return len(value) <= MAX_TEXT
    if type(value) in (tuple, list, dict) and depth and len(value) <= MAX_ENTRIES:
        entries = [*value, *value.values()] if type(value) is dict else value
        return all(is_simple(entry, depth - 1) for entry in entries)
    return False


def same(one: Any, other: Any) -> bool:
    """Return whether two simple values are the same: of one type, and equal or both NaN."""
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


def module_values(objects: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the simple values in the user's own modules that the code of these objects refers to: by module, then by
    name, which for an attribute of a class or of an object of the module is ``"name.attribute"``.

    Args:
        objects: functions; classes, and instances of classes, whose methods are meant.
    """
    return _Search(objects).values


class _Search:
    """A search for the values of modules, from function to function. A value counts if a function names it that also
    names its module, or is in it."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self._path = _workers_path()
        self._waiting: list[types.FunctionType] = []
        self._seen: set[int] = set()
        for obj in objects:
            self._add(obj)
        for _ in range(MAX_FUNCTIONS):
            if not self._waiting:
                break
            function = self._waiting.pop()
            namespace, names = function.__globals__, _names(function.__code__)
            self._look(str(namespace.get("__name__")), namespace, names, set())
            for name in names - namespace.keys():  # imported within the function
                for module in (name, f"{namespace.get('__package__')}.{name}"):
                    if _is_own(sys.modules.get(module)):
                        self._look(module, vars(sys.modules[module]), names, set())

    def _add(self, obj: Any) -> None:
        if id(obj) not in self._seen:
            self._seen.add(id(obj))
            self._waiting += _functions(obj)

    def _look(self, module: str, namespace: dict[str, Any], names: set[str], looked: set[str]) -> None:
        looked.add(module)
        known = sys.modules.get(module)
        is_imported = module != "__main__" and _is_own(known) and _is_importable(known, self._path)
        for name in sorted(names & namespace.keys()):
            value = namespace[name]
            if isinstance(value, types.ModuleType):
                if _is_own(value) and value.__name__ not in looked:
                    self._look(value.__name__, vars(value), names, looked)
                continue
            if isinstance(value, types.FunctionType | type) and _is_own(sys.modules.get(value.__module__)):
                self._add(value)
            if not is_imported or name.startswith("__"):
                continue
            inner_values = {name: value}
            if _has_settings(value):
                inner_values = {f"{name}.{inner}": vars(value)[inner] for inner in sorted(names & vars(value).keys())}
            if simple := {path: value for path, value in inner_values.items() if is_simple(value)}:
                self.values.setdefault(module, {}).update(simple)


def _has_settings(value: Any) -> bool:
    """Return whether a value is a class of the user's own, an instance of one, or a namespace."""
    kind = value if isinstance(value, type) else type(value)
    is_namespace = kind.__name__ in ("Namespace", "SimpleNamespace")
    return hasattr(value, "__dict__") and (is_namespace or _is_own(sys.modules.get(kind.__module__)))


def _functions(obj: Any) -> Iterator[types.FunctionType]:
    """Return the functions that an object is made of: itself, what it wraps, or the methods of its class."""
    while isinstance(obj, functools.partial):
        obj = obj.func
    if isinstance(obj, types.MethodType):
        obj = obj.__self__
    if isinstance(obj, types.FunctionType):
        while isinstance(wrapped := getattr(obj, "__wrapped__", None), types.FunctionType):
            yield obj
            obj = wrapped
        yield obj
        return
    kind = obj if isinstance(obj, type) else type(obj)
    for base in kind.__mro__:
        if base.__module__ == "__main__" or _is_own(sys.modules.get(base.__module__)):
            for member in vars(base).values():
                for name in ("__func__", "fget", "func"):  # of static and class methods, properties, cached ones
                    member = getattr(member, name, member)
                if isinstance(member, types.FunctionType):
                    yield member


def _names(code: types.CodeType) -> set[str]:
    """Return the names of globals, attributes and modules in a function and the functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def differences(values: dict[str, dict[str, Any]]) -> list[str]:
    """Return where this worker's modules have other values than `module_values` found, as a text for each. Only
    modules that are imported here, or that the dataset's code will import, can differ."""
    texts = []
    for name, expected in values.items():
        try:
            module = importlib.import_module(name)
        except Exception:  # it is imported when it is needed, or not at all
            continue
        for path, value in expected.items():
            try:
                here = functools.reduce(getattr, path.split("."), module)
            except AttributeError:
                texts.append(f"{name}.{path} is {reprlib.repr(value)} here and does not exist in workers")
                continue
            if is_simple(here) and not same(value, here):
                texts.append(f"{name}.{path} is {reprlib.repr(value)} here and {reprlib.repr(here)} in workers")
    return texts


# -- changes of the dataset --------------------------------------------------------------------------------------------


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
        elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
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
            if len(self.packed) > MAX_CHANGES_BYTES:
                raise ValueError(
                    f"the attributes of the dataset that changed since its workers started have {len(self.packed):,} "
                    f"bytes, more than {MAX_CHANGES_BYTES:,}; call loader.close(), and the next iter() sends the "
                    "dataset again"
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
