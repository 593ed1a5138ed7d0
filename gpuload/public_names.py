"""The public names of `gpuload` and `gpuload.transforms`, listed only in the stub of each package, `__init__.pyi`.

Each line `from module import name as name` of a stub, which type checkers and editors read too, is a public name. Its
module is imported when the name is first used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["lazy_names", "modules_of_names"]


def modules_of_names(package: str) -> dict[str, str]:
    """Return the public names of a package, each with the module to import it from."""
    modules = {}
    with open(f"{sys.modules[package].__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        for line in stub:
            match line.split():
                case ["from", module, "import", name, "as", *_]:
                    modules[name] = module
    return modules


def lazy_names(
    package: str, missing_name_error: Callable[[str], AttributeError]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__all__`, `__getattr__` and `__dir__`."""
    modules = modules_of_names(package)

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise missing_name_error(name)
        if modules[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(modules), __getattr__, lambda: sorted(sys.modules[package].__all__)
