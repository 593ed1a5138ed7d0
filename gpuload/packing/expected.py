"""Values of JSON compared with what gpuload writes: files that lie beside data may be anybody's.

What is expected is described by a value of the same form:

- a dict: exactly these names; a dict with one name that is a pattern: any names like it;
- a list with one entry: any number of entries like it;
- a tuple: one of several;
- a type: a value of exactly this type, and if it is a number, 0 or more; `list`: whatever is in it;
- a pattern: a text that it matches from beginning to end;
- anything else: that value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["DIGEST", "TEXT", "differences", "shortened"]

DIGEST: Final = re.compile("[0-9a-f]{64}")
TEXT: Final = re.compile(".*", re.DOTALL)
LARGEST: Final = 1 << 62
SHOWN: Final = 100  # characters of a value


def differences(value: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Yield in what a value differs from what is expected, each in a few words: the place, and what is there."""
    if isinstance(expected, dict):
        yield from _of_a_dict(value, expected, where)
    elif isinstance(expected, list):
        if not isinstance(value, list):
            yield f"{where} is {shortened(value)}, expected a list"
            return
        for number, entry in enumerate(value):
            yield from differences(entry, expected[0], f"{where}[{number}]")
    elif not _fits(value, expected):
        yield f"{where} is {shortened(value)}, expected {_described(expected)}"


def _of_a_dict(value: Any, expected: dict[Any, Any], where: str) -> Iterator[str]:
    place = where or "its content"
    if not isinstance(value, dict):
        yield f"{place} is {shortened(value)}, expected a dict"
        return
    pattern = next((name for name in expected if isinstance(name, re.Pattern)), None)
    for name in value:
        if name not in expected and not (pattern is not None and pattern.fullmatch(name)):
            yield f"{place} has an entry {shortened(name)}, which gpuload does not write"
            return
    for name in expected:
        if name is not pattern and name not in value:
            yield f"{place} has no entry {name!r}"
            return
    for name, entry in value.items():
        yield from differences(entry, expected[name if pattern is None else pattern], f"{where}.{name}".lstrip("."))


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return any(_fits(value, one) for one in expected)
    if isinstance(expected, re.Pattern):
        return isinstance(value, str) and expected.fullmatch(value) is not None
    if isinstance(expected, type):
        return type(value) is expected and (expected is not int or 0 <= value < LARGEST)
    return type(value) is type(expected) and value == expected


def _described(expected: Any) -> str:
    if isinstance(expected, tuple):
        return " or ".join(map(_described, expected))
    if isinstance(expected, re.Pattern):
        return f"text like {expected.pattern}"
    if isinstance(expected, type):
        return {int: "a number", str: "text", bool: "true or false", list: "a list"}[expected]
    return repr(expected)


def shortened(value: Any) -> str:
    """A value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else shown[: SHOWN - 1] + "…"
