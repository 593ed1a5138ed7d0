"""State that a forked worker would inherit but a fresh interpreter has to be sent.

The main process collects the following when it pickles a job:

- *Settings of libraries* (`LibrarySettings`). The worker applies them before the dataset is unpickled, since its
  modules may read the settings, and again afterwards, since these modules may change them.
- The *import path*. It is made absolute, since a relative entry may refer to another folder once the program has
  changed its working directory.
- *Modules that a worker cannot import* by name: modules that were loaded by path, and ``__mp_main__``, which is the
  script in a process that `multiprocessing` spawned. Their classes and functions are pickled by value.
- *Values in the user's modules* (`module_values`). A worker imports these modules again, so it does not see an
  assignment such as ``config.SIZE = 224``. The worker compares the values and reports the differences.
- *Constants and replaced functions of libraries* (`library_values`) that the dataset's code refers to. They are
  compared in the same way, since `LibrarySettings` can never be complete.

Values in modules are considered only if they are *simple*: numbers, strings, and small tuples, lists and dicts of
these.
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
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from gpuload.workers.start import LIBRARIES

__all__ = [
    "LibrarySettings",
    "are_same",
    "describe_differences",
    "import_path",
    "imported_libraries",
    "is_simple",
    "is_users_module",
    "library_values",
    "module_origins",
    "module_values",
    "pickle_by_value",
    "warning_filters",
]

# Settings that are variables of Pillow's modules, with their defaults. A default is not sent, so that workers need not
# import Pillow.
PILLOW_DEFAULTS: Final = {
    ("PIL.Image", "MAX_IMAGE_PIXELS"): 1024**3 // 4 // 3,
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): False,
    ("PIL.ImageFile", "MAXBLOCK"): 65536,
    ("PIL.PngImagePlugin", "MAX_TEXT_CHUNK"): 1 << 20,
    ("PIL.PngImagePlugin", "MAX_TEXT_MEMORY"): 64 << 20,
}
MAX_FUNCTIONS: Final = 2_000  # the maximum number of functions that are searched for values in modules
MAX_ENTRIES: Final = 64  # larger lists and dicts are not compared
MAX_TEXT: Final = 1_000  # longer strings are not compared
Filter = tuple[str, str, tuple[str, str], str, int]  # arguments of `filterwarnings()`; a category is (module, name)
_registry_lock = threading.RLock()


# -- settings of libraries --------------------------------------------------------------------------------------------


@dataclass
class LibrarySettings:
    """Settings that libraries store in their modules, as calls that restore them. Unpickling this object makes the
    calls.

    A call refers to a function of its library, so unpickling the call imports the library. Therefore, a setting that is
    known to have its default value gets no call.

    Attributes:
        calls: the calls that restore the settings.
        filters: the filters of warnings.
    """

    calls: list[partial[Any]]
    filters: list[Filter]

    @classmethod
    def collect(cls, can_pickle: Callable[[Any], bool]) -> LibrarySettings:
        """Return the settings of this process, except the ones that cannot be pickled."""
        calls: list[partial[Any]] = [partial(np.seterr, **np.geterr())]
        calls.append(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
        modules = sys.modules
        print_options = partial(np.set_printoptions, **np.get_printoptions())
        if can_pickle(print_options):  # a formatter can be any function
            calls.append(print_options)
        for (module, name), default in PILLOW_DEFAULTS.items():
            if (value := getattr(modules.get(module), name, default)) != default:
                calls.append(partial(_set_attribute, module, name, value))
        if (image := modules.get("PIL.Image")) is not None:
            for name, (factory, accept) in image.OPEN.items():
                extensions = [extension for extension, owner in image.EXTENSION.items() if owner == name]
                open_call = partial(image.register_open, name, factory, accept)
                if not _is_from_pillow(factory) and can_pickle(open_call):
                    calls += [open_call, partial(image.register_extensions, name, extensions)]
            for name, decoder in image.DECODERS.items():
                if not _is_from_pillow(decoder) and can_pickle(decoder):
                    calls.append(partial(image.register_decoder, name, decoder))
        if (torch := modules.get("torch")) is not None:
            if (dtype := torch.get_default_dtype()) != torch.float32:
                calls.append(partial(torch.set_default_dtype, dtype))
            # Many programs set these for the model, so they are no reason for a worker to import torch.
            if (precision := torch.get_float32_matmul_precision()) != "highest":
                calls.append(partial(_call_if_imported, "torch", "set_float32_matmul_precision", precision))
            if torch.are_deterministic_algorithms_enabled():
                options = {"warn_only": torch.is_deterministic_algorithms_warn_only_enabled()}
                calls.append(partial(_call_if_imported, "torch", "use_deterministic_algorithms", True, **options))
        if (torchvision := modules.get("torchvision")) is not None and hasattr(torchvision, "get_image_backend"):
            backend = torchvision.get_image_backend()
            calls.append(partial(_call_if_imported, "torchvision", "set_image_backend", backend))
        if (logging := modules.get("logging")) is not None:
            loggers = {"": logging.root, **logging.root.manager.loggerDict}
            # Placeholders of loggers have no level.
            log_levels = {name: getattr(logger, "level", 0) for name, logger in loggers.items()}
            log_levels = {name: level for name, level in log_levels.items() if level}
            calls.append(partial(_set_log_levels, log_levels, logging.root.manager.disable))
        if (decimal := modules.get("decimal")) is not None:
            calls.append(partial(decimal.setcontext, decimal.getcontext()))
        if (socket := modules.get("socket")) is not None and (timeout_s := socket.getdefaulttimeout()) is not None:
            calls.append(partial(socket.setdefaulttimeout, timeout_s))
        return cls(calls, warning_filters())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.apply(imported=False)

    def apply(self, *, imported: bool = True) -> None:
        """Apply the settings in this process. `imported` tells whether the dataset's modules are already imported. If
        not, filters that turn warnings into errors are skipped, since the main process may have imported these modules
        before it set the filters."""
        for call in self.calls:
            call()
        warnings.resetwarnings()
        for action, message, (module, name), module_pattern, line in self.filters:
            category = getattr(sys.modules.get(module), name, None)
            if category is not None and (imported or action != "error"):
                warnings.filterwarnings(action, message, category, module_pattern, line, append=True)  # type: ignore[arg-type]


def _set_attribute(module: str, name: str, value: object) -> None:
    setattr(importlib.import_module(module), name, value)


def _call_if_imported(module: str, function: str, *args: object, **options: object) -> None:
    """Call a function of a module unless this process has not imported the module, or is still importing it."""
    if (callable_ := getattr(sys.modules.get(module), function, None)) is not None:
        callable_(*args, **options)


def _set_log_levels(levels: dict[str, int], disabled: int) -> None:
    import logging  # not at the top: workers that do not need it start sooner

    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
    logging.disable(disabled)


def _is_from_pillow(registered: object) -> bool:
    return getattr(registered, "__module__", "").startswith("PIL.")


def warning_filters() -> list[Filter]:
    """Return the filters of this process's warnings, as in `LibrarySettings`."""

    def text(pattern: Any) -> str:
        return getattr(pattern, "pattern", pattern) or ""

    return [
        (action, text(message), (category.__module__, category.__name__), text(module), line)
        for action, message, category, module, line in warnings.filters
        if isinstance(category, type)
    ]


# -- modules ----------------------------------------------------------------------------------------------------------


def import_path() -> list[str]:
    """Return this process's import path. A relative entry is resolved to the folder that it first referred to."""
    entries = []
    for entry in sys.path:
        if isinstance(entry, str):
            if entry and not os.path.isabs(entry):
                entry = getattr(sys.path_importer_cache.get(entry), "path", None) or os.path.abspath(entry)
            entries.append(entry)
    return entries


def module_origins() -> dict[str, str]:
    """Return the file of each top-level module that this process has imported."""
    origins = {}
    for name, module in list(sys.modules.items()):
        if "." not in name and name not in ("__main__", "__mp_main__"):
            file = getattr(module, "__file__", None)
            if isinstance(file, str):
                origins[name] = file
    return origins


def _workers_path() -> tuple[str, ...]:
    return tuple(os.path.abspath(entry) for entry in import_path())


@contextlib.contextmanager
def pickle_by_value() -> Iterator[None]:
    """Within this context, make cloudpickle pickle by value the contents of modules that a worker cannot import."""
    import cloudpickle

    with _registry_lock:
        path = _workers_path()
        registered = cloudpickle.list_registry_pickle_by_value()
        modules = [
            module
            for name, module in list(sys.modules.items())
            if isinstance(module, types.ModuleType) and module.__name__ == name != "__main__" and name not in registered
            if is_users_module(module) and not _is_importable(module, path)
        ]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def is_users_module(module: object) -> bool:
    """Return whether a module belongs to the user, not to Python, an installed package or gpuload."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_users_file(file)


@functools.cache
def _is_users_file(file: str) -> bool:
    is_installed = file.startswith(_installed_folders()) or not LIBRARIES.isdisjoint(file.split("/"))
    return not is_installed and os.path.isfile(file)


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages and of gpuload."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(folder + os.sep for folder in (*folders, os.path.dirname(os.path.dirname(__file__))))


def _is_importable(module: Any, path: tuple[str, ...]) -> bool:
    """Return whether a worker with this import path would import the same module by its name."""
    parent, _, _ = module.__name__.rpartition(".")
    if parent:
        if (package := sys.modules.get(parent)) is None or (
            is_users_module(package) and not _is_importable(package, path)
        ):
            return False
        path = tuple(getattr(package, "__path__", ()))
    return _origin_of(module.__name__, path) == os.path.realpath(module.__file__ or "")


@functools.cache
def _origin_of(name: str, path: tuple[str, ...]) -> str | None:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # raised by a third-party finder
            if (spec := finder.find_spec(name, path)) is not None:
                return os.path.realpath(spec.origin or "")
    return None


# -- values in modules ------------------------------------------------------------------------------------------------


def is_simple(value: Any, depth: int = 2) -> bool:
    """Return whether a value is a number, a short string, None, or a small tuple, list or dict of these."""
    if value is None or type(value) in (bool, int, float, complex):
        return True
    if type(value) in (str, bytes):
        return len(value) <= MAX_TEXT
    if type(value) in (tuple, list, dict) and depth and len(value) <= MAX_ENTRIES:
        entries = [*value, *value.values()] if type(value) is dict else value
        return all(is_simple(entry, depth - 1) for entry in entries)
    return False


def are_same(a: object, b: object) -> bool:
    """Return whether two simple values have the same type and are equal or both NaN."""
    return type(a) is type(b) and (a == b or repr(a) == repr(b))


def module_values(objects: Iterable[object]) -> dict[str, dict[str, Any]]:
    """Return the simple values in the user's modules that the code of these objects refers to, keyed by module and then
    by name. An attribute of a class or object in the module has the name ``"name.attribute"``.

    Args:
        objects: functions, classes and instances. All methods of a class, or of an instance's class, are searched.
    """
    return _GlobalSearch(objects).values


class FunctionOf(str):
    """The name of the module in which a function was defined that another module holds."""


def library_values(objects: Iterable[object]) -> dict[str, dict[str, Any]]:
    """Return values of the installed packages' modules that the code of these objects refers to, keyed by module and
    then by name: public constants, whose names are in capitals, and a `FunctionOf` for each public function that
    another package, or the user's program, has defined.

    Lists and dicts are left out, since libraries change these themselves, such as Pillow its list of formats.
    """
    return {name: _library_values(module) for name, module in _GlobalSearch(objects).libraries.items()}


def imported_libraries(objects: Iterable[object]) -> dict[str, str]:
    """Return the modules of installed packages that a worker imports for these objects, each with the file of its
    package: those that the objects' code refers to, and all that the user's modules have imported with it."""
    objects = list(objects)
    names, searched, path = set(_GlobalSearch(objects).libraries), set[str](), _workers_path()
    modules = {name for name in map(_module_by_reference, objects) if name and _is_importable(sys.modules[name], path)}
    while modules:
        searched.add(module_name := modules.pop())
        for value in list(vars(sys.modules[module_name]).values()):
            name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            module = sys.modules.get(name) if isinstance(name, str) else None
            if _is_library(module):
                names.add(str(name))
            elif is_users_module(module) and name not in searched and name != "__main__":
                modules.add(str(name))
    files = {name: getattr(sys.modules.get(_package(name)), "__file__", None) for name in sorted(names)}
    return {name: file for name, file in files.items() if isinstance(file, str)}


def _module_by_reference(obj: object) -> str:
    """Return the user's module that is imported to unpickle an instance; "" if there is none, or if the contents of the
    module are pickled by value."""
    import cloudpickle

    name, by_value = type(obj).__module__, cloudpickle.list_registry_pickle_by_value()
    is_by_value = name == "__main__" or any(name == other or name.startswith(f"{other}.") for other in by_value)
    is_by_value = is_by_value or "<locals>" in type(obj).__qualname__
    return "" if is_by_value or not is_users_module(sys.modules.get(name)) else name


def _library_values(module: types.ModuleType) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in list(vars(module).items()):
        if name.startswith("_"):
            continue
        if name.isupper() and type(value) not in (list, dict) and is_simple(value):
            values[name] = value
        elif _is_function(value) and _package(owner := _owner_of(value)) not in ("", _package(module.__name__)):
            values[name] = FunctionOf(owner)
    return values


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type | types.ModuleType)


def _owner_of(function: object) -> str:
    """Return the name of the module that defined a function, even if `functools.wraps` has changed `__module__`; "" if
    a function that is written in C does not say."""
    if type(function) is types.MethodType:
        function = function.__func__
    if type(function) is types.FunctionType:
        return str(function.__globals__.get("__name__"))
    return str(
        (function.__module__ or "") if type(function) is types.BuiltinFunctionType else type(function).__module__
    )


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_library(module: Any) -> bool:
    """Return whether a module belongs to an installed package other than gpuload."""
    file = getattr(module, "__file__", None)
    is_installed = isinstance(file, str) and not LIBRARIES.isdisjoint(file.split("/"))
    return is_installed and _package(module.__name__) != "gpuload"


class _GlobalSearch:
    """A search for values in modules that follows references between functions. It finds a value if a function names
    the value, and either names the value's module or is defined there. It finds a library if a function names one of
    the library's modules, functions or classes."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.libraries: dict[str, types.ModuleType] = {}
        self._path = _workers_path()
        self._functions_to_search: list[types.FunctionType] = []
        self._seen_ids: set[int] = set()
        for obj in objects:
            self._add(obj)
        for _ in range(MAX_FUNCTIONS):
            if not self._functions_to_search:
                break
            function = self._functions_to_search.pop()
            namespace, names = function.__globals__, _names_in(function.__code__)
            self._search_namespace(str(namespace.get("__name__")), namespace, names, set())
            for name in names - namespace.keys():  # possibly modules that the function itself imports
                for module in (name, f"{namespace.get('__package__')}.{name}"):
                    if is_users_module(sys.modules.get(module)):
                        self._search_namespace(module, vars(sys.modules[module]), names, set())
                    self._add_library(module, names)

    def _add(self, obj: object) -> None:
        if id(obj) not in self._seen_ids:
            self._seen_ids.add(id(obj))
            self._functions_to_search += _functions_of(obj)
            for base in (obj if isinstance(obj, type) else type(obj)).__mro__:
                self._add_library(base.__module__)
                if base.__module__ in self.libraries:
                    break

    def _add_library(self, name: Any, names: Iterable[str] = ()) -> None:
        """Add a module of a library, and those of its submodules that are among `names`."""
        module = sys.modules.get(name) if isinstance(name, str) else None
        if isinstance(module, types.ModuleType) and _is_library(module) and name not in self.libraries:
            self.libraries[name] = module
            for submodule in names:
                self._add_library(f"{name}.{submodule}", names)

    def _search_namespace(self, module: str, namespace: dict[str, Any], names: set[str], searched: set[str]) -> None:
        searched.add(module)
        loaded_module = sys.modules.get(module)
        is_compared = (
            module != "__main__" and is_users_module(loaded_module) and _is_importable(loaded_module, self._path)
        )
        for name in sorted(names & namespace.keys()):
            value = namespace[name]
            if isinstance(value, types.ModuleType):
                if is_users_module(value) and value.__name__ not in searched:
                    self._search_namespace(value.__name__, vars(value), names, searched)
                self._add_library(value.__name__, names)
                continue
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
                self._add_library(value.__module__)
            if isinstance(value, types.FunctionType | type) and is_users_module(sys.modules.get(value.__module__)):
                self._add(value)
            if not is_compared or name.startswith("__"):
                continue
            candidates = {name: value}
            if _has_settings(value):
                candidates = {f"{name}.{key}": vars(value)[key] for key in sorted(names & vars(value).keys())}
            if simple_values := {path: value for path, value in candidates.items() if is_simple(value)}:
                self.values.setdefault(module, {}).update(simple_values)


def _has_settings(value: object) -> bool:
    """Return whether a value is a class of the user, an instance of such a class, or a namespace."""
    value_type = value if isinstance(value, type) else type(value)
    is_namespace = value_type.__name__ in ("Namespace", "SimpleNamespace")
    return hasattr(value, "__dict__") and (is_namespace or is_users_module(sys.modules.get(value_type.__module__)))


def _functions_of(obj: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of an object: a function and the functions that it wraps, or the methods of a class."""
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
    owner_type = obj if isinstance(obj, type) else type(obj)
    for base in owner_type.__mro__:
        if base.__module__ == "__main__" or is_users_module(sys.modules.get(base.__module__)):
            for member in vars(base).values():
                for name in ("__func__", "fget", "func"):  # static and class methods, properties, cached properties
                    member = getattr(member, name, member)
                if isinstance(member, types.FunctionType):
                    yield member


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals, attributes and modules in a function and its inner functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def describe_differences(values: dict[str, dict[str, Any]], library_values: dict[str, dict[str, Any]]) -> list[str]:
    """Return a description of each value that differs between this worker's modules and the main process's. The
    arguments are the results of `module_values` and `library_values` in the main process. Modules that cannot be
    imported are skipped, and so are libraries that this worker has not imported."""
    descriptions: list[str] = []

    def compare(path: str, value: object, local: object) -> None:
        if is_simple(local) and not are_same(value, local):
            descriptions.append(f"{path} is {reprlib.repr(value)} here and {reprlib.repr(local)} in workers")

    for name, expected in values.items():
        try:
            module = importlib.import_module(name)
        except Exception:  # the dataset's code will raise the same error, or does not need the module
            continue
        for path, value in expected.items():
            try:
                local = functools.reduce(getattr, path.split("."), module)
            except AttributeError:
                descriptions.append(f"{name}.{path} is {reprlib.repr(value)} here and does not exist in workers")
                continue
            compare(f"{name}.{path}", value, local)
    for library, expected in library_values.items():
        local_values = vars(sys.modules[library]) if library in sys.modules else {}
        for name in sorted(expected.keys() & local_values.keys()):
            value, local = expected[name], local_values[name]
            if not isinstance(value, FunctionOf):
                compare(f"{library}.{name}", value, local)
            elif _is_function(local) and (owner := _owner_of(local)) != value:
                descriptions.append(
                    f"{library}.{name} is a function of {value} here and of {owner or library} in workers"
                )
    return descriptions
