"""What a forked worker would inherit from the user's process, and a fresh interpreter has to be sent.

Four things, all gathered in the main process when a job is pickled:

- the *settings of libraries* (`LibrarySettings`), which apply themselves in the worker: once before the dataset is
  unpickled, since its modules may read them, and once more behind it, since these modules may change them;
- the *import path*, whose relative entries meant another folder before the program changed its working directory;
- the *modules that a worker cannot import* by their names (loaded by path; ``__mp_main__``, the script in a process
  that `multiprocessing` spawned): their classes and functions are pickled by value;
- the *values of modules* of the user's own (`module_values`): a worker imports these modules anew, so it does not see
  ``config.SIZE = 224``. The worker compares, and says what differs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import reprlib
import sys
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

__all__ = ["LibrarySettings", "differences", "import_path", "is_simple", "module_values", "pickled_by_value"]

PILLOWS_PIXELS: Final = 1024**3 // 4 // 3  # its default: a worker need not import Pillow to have it
MAX_FUNCTIONS: Final = 2_000  # that are searched for values of modules
MAX_ENTRIES: Final = 64  # of a list or dict that is compared
MAX_TEXT: Final = 1_000  # characters of a text that is compared
Category = tuple[str, str]  # of a warning: its module and name
_registering = threading.RLock()


# -- settings of libraries --------------------------------------------------------------------------------------------


@dataclass
class LibrarySettings:
    """Settings that libraries keep in their modules, as they are in this process; unpickling applies them.

    Attributes:
        pillow: attributes of Pillow's modules that differ from its defaults, by module.
        plugins: the name, factory, test and file extensions of the formats that were registered with Pillow.
        decoders: the decoders that were registered with Pillow.
        default_dtype: torch's, where it is not float32.
        log_levels: of `logging`, by the logger's name, where one is set.
        log_disabled: the level of ``logging.disable()``.
        filters: of `warnings`, as ``filterwarnings()`` takes them.
        decimal: its context.
        numpy_errors: of ``np.seterr()``.
        socket_timeout_s: of ``socket.setdefaulttimeout()``.
    """

    pillow: dict[str, dict[str, Any]] = field(default_factory=dict)
    plugins: list[tuple[str, Any, Any, list[str]]] = field(default_factory=list)
    decoders: dict[str, Any] = field(default_factory=dict)
    default_dtype: str = "float32"
    log_levels: dict[str, int] = field(default_factory=dict)
    log_disabled: int = 0
    filters: list[tuple[str, str, Category, str, int]] = field(default_factory=list)
    decimal: Any = None
    numpy_errors: dict[str, Any] = field(default_factory=dict)
    socket_timeout_s: float | None = None

    @classmethod
    def here(cls, can_pickle: Callable[[Any], bool]) -> LibrarySettings:
        """Return those of this process; what cannot be pickled stays here."""
        found = cls(filters=_warning_filters(), numpy_errors=dict(np.geterr()))
        modules = sys.modules
        if (image := modules.get("PIL.Image")) is not None:
            if image.MAX_IMAGE_PIXELS != PILLOWS_PIXELS:
                found.pillow["PIL.Image"] = {"MAX_IMAGE_PIXELS": image.MAX_IMAGE_PIXELS}
            for name, (factory, accept) in image.OPEN.items():
                extensions = [extension for extension, owner in image.EXTENSION.items() if owner == name]
                if not _is_pillows(factory) and can_pickle(entry := (name, factory, accept, extensions)):
                    found.plugins.append(entry)
            registered = {name: decoder for name, decoder in image.DECODERS.items() if not _is_pillows(decoder)}
            found.decoders = {name: decoder for name, decoder in registered.items() if can_pickle(decoder)}
        if getattr(modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False):
            found.pillow["PIL.ImageFile"] = {"LOAD_TRUNCATED_IMAGES": True}
        if (torch := modules.get("torch")) is not None:
            found.default_dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        if (logging := modules.get("logging")) is not None:
            loggers = {"": logging.root, **logging.root.manager.loggerDict}
            levels = {name: getattr(logger, "level", 0) for name, logger in loggers.items()}  # placeholders have none
            found.log_levels = {name: level for name, level in levels.items() if level}
            found.log_disabled = logging.root.manager.disable
        if (decimal := modules.get("decimal")) is not None:
            found.decimal = decimal.getcontext()
        if (socket := modules.get("socket")) is not None:
            found.socket_timeout_s = socket.getdefaulttimeout()
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _applied, (dict(vars(self)),)

    def apply(self, *, imported: bool = True) -> None:
        """Make them those of this process. `imported`: the dataset's modules are; before that, warnings are no errors,
        since in the main process these modules may have been imported before the filter was set."""
        for name, attributes in self.pillow.items():
            vars(importlib.import_module(name)).update(attributes)
        if self.plugins or self.decoders:
            from PIL import Image

            for name, factory, accept, extensions in self.plugins:
                Image.register_open(name, factory, accept)
                Image.register_extensions(name, extensions)
            for name, decoder in self.decoders.items():
                Image.register_decoder(name, decoder)
        if self.default_dtype != "float32":
            import torch

            torch.set_default_dtype(getattr(torch, self.default_dtype))
        if self.log_levels or self.log_disabled:
            import logging

            for name, level in self.log_levels.items():
                logging.getLogger(name or None).setLevel(level)
            logging.disable(self.log_disabled)
        if self.decimal is not None:
            import decimal

            decimal.setcontext(self.decimal)
        if self.socket_timeout_s is not None:
            import socket

            socket.setdefaulttimeout(self.socket_timeout_s)
        np.seterr(**self.numpy_errors)
        self._filter_warnings(imported)

    def _filter_warnings(self, imported: bool) -> None:
        warnings.resetwarnings()
        for action, message, (module, name), where, line in self.filters:
            category = getattr(sys.modules.get(module), name, None)
            if category is not None and (imported or action != "error"):
                warnings.filterwarnings(action, message, category, where, line, append=True)  # type: ignore[arg-type]


def _applied(state: dict[str, Any]) -> LibrarySettings:
    settings = LibrarySettings(**state)
    settings.apply(imported=False)
    return settings


def _is_pillows(registered: Any) -> bool:
    return getattr(registered, "__module__", "").startswith("PIL.")


def _warning_filters() -> list[tuple[str, str, Category, str, int]]:
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
    found = []
    for entry in sys.path:
        if isinstance(entry, str):
            if entry and not os.path.isabs(entry):
                entry = getattr(sys.path_importer_cache.get(entry), "path", None) or os.path.abspath(entry)
            found.append(entry)
    return found


def _workers_path() -> tuple[str, ...]:
    return tuple(os.path.abspath(entry) for entry in import_path())


@contextlib.contextmanager
def pickled_by_value() -> Iterator[None]:
    """A context in which cloudpickle sends what is defined in modules that a worker cannot import by value."""
    import cloudpickle

    with _registering:
        path = _workers_path()
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [module for module in _own_modules() if not _is_importable(module, path)]
        modules = [module for module in modules if module.__name__ not in known]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[types.ModuleType]:
    """Return the modules of the user's own that are loaded."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and module.__name__ == name != "__main__" and _is_own(module)
    ]


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
    search = _Search()
    for obj in objects:
        search.add(obj)
    search.run()
    return search.values


class _Search:
    """A search for the values of modules, from function to function. A value counts if a function names it that also
    names its module, or is in it."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self._path = _workers_path()
        self._waiting: list[types.FunctionType] = []
        self._seen: set[int] = set()

    def add(self, obj: Any) -> None:
        if id(obj) not in self._seen:
            self._seen.add(id(obj))
            self._waiting += _functions(obj)

    def run(self) -> None:
        searched = 0
        while self._waiting and searched < MAX_FUNCTIONS:
            searched += 1
            function = self._waiting.pop()
            namespace, names = function.__globals__, _names(function.__code__)
            self._look(str(namespace.get("__name__")), namespace, names, set())
            for name in names - namespace.keys():  # imported within the function
                for module in (name, f"{namespace.get('__package__')}.{name}"):
                    if _is_own(sys.modules.get(module)):
                        self._look(module, vars(sys.modules[module]), names, set())

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
                self.add(value)
            if not is_imported or name.startswith("__"):
                continue
            found = {name: value}
            if _has_settings(value):
                found = {f"{name}.{inner}": vars(value)[inner] for inner in sorted(names & vars(value).keys())}
            if simple := {path: value for path, value in found.items() if is_simple(value)}:
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
    found = []
    for name, expected in values.items():
        try:
            module = importlib.import_module(name)
        except Exception:  # it is imported when it is needed, or not at all
            continue
        for path, value in expected.items():
            try:
                here = functools.reduce(getattr, path.split("."), module)
            except AttributeError:
                found.append(f"{name}.{path} is {reprlib.repr(value)} here and does not exist in workers")
                continue
            if is_simple(here) and not same(value, here):
                found.append(f"{name}.{path} is {reprlib.repr(value)} here and {reprlib.repr(here)} in workers")
    return found
