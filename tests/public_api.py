"""The public names and signatures, on which users' code depends, as text.

``python tests/public_api.py`` (or ``make api``) writes the text to ``public_api.txt``, and a test compares the two. Run
it only for an intended change of the public API, and mention the change in the changelog.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import gpuload
from gpuload import transforms
from gpuload.transforms.base import Transform

__all__ = ["RECORDED", "public_api"]

RECORDED = Path(__file__).with_name("public_api.txt")


def public_api() -> str:
    """Return a line for each public name with its signature, followed by the members of a class."""
    return "".join(f"{line}\n" for module in (gpuload, transforms) for line in _of_module(module))


def _of_module(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        qualified_name, value = f"{module.__name__}.{name}", getattr(module, name)
        if inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__mro__[1:] if _is_known(base))
            yield f"class {qualified_name}({bases})" if bases else f"class {qualified_name}"
            yield from (f"    {line}" for line in _of_class(value))
        elif callable(value):
            yield f"def {qualified_name}{_signature(value)}"
        else:
            yield f"{qualified_name}: {type(value).__name__}"


def _is_known(base: type) -> bool:
    """Return whether this base class is public, so that users can depend on it."""
    if base.__module__ == "builtins":
        return base not in (object, Exception, BaseException)
    return base.__name__ in gpuload.__all__


def _of_class(kind: type) -> Iterator[str]:
    """List a class's constructor and the members that gpuload defines. Members of transforms are private to gpuload,
    except for those of `Custom`, which users implement."""
    if not issubclass(kind, BaseException) or "__init__" in vars(kind):
        yield f"__init__{_signature(kind)}"
    if issubclass(kind, Transform) and kind is not transforms.Custom:
        return
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "gpuload" and base is not Transform:
            members |= dict.fromkeys(getattr(base, "__annotations__", {})) | vars(base)
    for name in sorted(member for member in members if not member.startswith("_")):
        value = members[name]
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        yield f"{name}{_signature(function)}" if inspect.isfunction(function) else name


def _signature(value: Any) -> str:
    """Return the signature as written in the source; defaults without a stable text become ``…``."""
    text = re.sub(r"<(?:[^<>]|<\w+>)* at 0x[0-9a-f]+>|<factory>", "…", str(inspect.signature(value)))
    return re.sub(r"ForwardRef\(('[^']*')[^()]*\)", r"\1", text)


if __name__ == "__main__":
    before = set(RECORDED.read_text().splitlines()) if RECORDED.exists() else set()
    RECORDED.write_text(public_api())
    after = set(RECORDED.read_text().splitlines())
    for sign, lines in (("-", before - after), ("+", after - before)):
        for line in sorted(lines):
            print(sign, line)
