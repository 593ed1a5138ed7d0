"""Checks of arguments: functions that return a valid argument as plain Python objects, and raise an error otherwise.

A check takes the argument's name for messages, such as ``"Resize(size=…)"``, and the user's value. An argument of the
wrong type is a TypeError, a value that is not allowed is a ValueError. Scalars of NumPy, and arrays and tensors without
axes, are numbers, or flags if they are bool; they become an int, a float or a bool, so that pickles stay small. Tensors
are recognised by their attributes: this module does not import torch.

A field of a dataclass declares its check with `argument`, and `check_fields` runs all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, Final, TypeVar

import numpy as np

__all__ = [
    "argument",
    "check_field",
    "check_fields",
    "finite_number",
    "flag",
    "function",
    "instance",
    "integer",
    "interval",
    "is_sequence",
    "keyword_or",
    "mapping",
    "number",
    "numbers",
    "one_of",
    "optional",
    "pair",
    "plain",
    "probability",
    "string",
    "strings",
]

Choice = TypeVar("Choice", bound=str)
T = TypeVar("T")


def argument(
    check: Callable[..., Any],
    *,
    default: Any = MISSING,
    optional: bool = False,
    compare: bool = True,
    kw_only: Any = MISSING,
    by_epoch: bool = False,
    **options: Any,
) -> Any:
    """Declare a field of a dataclass whose value is replaced by the result of `check`, which is called with the
    argument's name for messages, the value, and `options`. None is not checked if it is the default, or if `optional`.
    An argument of a transform can depend on the epoch or the batch if `by_epoch`. By default, `kw_only` is as for the
    class."""
    metadata = {"check": partial(check, **options), "optional": optional or default is None, "by_epoch": by_epoch}
    return field(default=default, compare=compare, kw_only=kw_only, metadata=metadata)


def check_field(declared: Field[Any], name: str, value: object) -> Any:
    """Return the value of a field, checked if the field declares a check."""
    if "check" not in declared.metadata or (value is None and declared.metadata["optional"]):
        return value
    return declared.metadata["check"](name, value)


def check_fields(declaration: Any, owner: str = "") -> None:
    """Replace the values of a dataclass's fields by the results of their checks. `owner` is the name of the class in
    messages; without it, they contain only the name of the argument."""
    for declared in fields(declaration):
        name = f"{owner}({declared.name}=…)" if owner else declared.name
        object.__setattr__(declaration, declared.name, check_field(declared, name, getattr(declaration, declared.name)))


def plain(value: Any) -> Any:
    """Return the Python number or bool of a NumPy scalar, or of an array or tensor without axes."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_sequence(value: object) -> bool:
    """Return whether a value is a list, a tuple, an array or another sequence, but not a string."""
    if getattr(value, "ndim", 1) == 0:  # a scalar array or tensor
        return False
    return isinstance(value, list | tuple | np.ndarray) or (
        hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | dict)
    )


def integer(name: str, value: object, **bounds: float) -> int:
    """Return the value as an int, within bounds as for `finite_number`."""
    result = plain(value)
    if isinstance(result, bool) or not isinstance(result, Integral):
        raise _type_error(name, "an integer", value)
    _check_bounds(name, int(result), **bounds)
    return int(result)


def number(name: str, value: object) -> int | float:
    """Return the value as an int if it is an integer, else as a float, which can be infinite or NaN."""
    plain_value = plain(value)
    if isinstance(plain_value, bool) or not isinstance(plain_value, Real):
        raise _type_error(name, "a number", value)
    return int(plain_value) if isinstance(plain_value, Integral) else float(plain_value)


def finite_number(name: str, value: object, **bounds: float) -> float:
    """Return the value as a float; raise a ValueError unless minimum ≤ value ≤ maximum and above < value < below."""
    result = float(number(name, value))
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, got {result}")
    _check_bounds(name, result, **bounds)
    return result


def _check_bounds(
    name: str,
    number: float,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    if not (minimum <= number <= maximum and above < number < below):
        bounds = {"at least": minimum, "greater than": above, "at most": maximum, "less than": below}
        allowed = " and ".join(f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound))
        raise ValueError(f"{name} must be {allowed}, got {number}")


probability: Final = partial(finite_number, minimum=0, maximum=1)


def flag(name: str, value: object) -> bool:
    """Return the value as a bool. The numbers 0 and 1 are flags too, as for torch; a string is not, since
    bool("no") is True."""
    result = plain(value)
    if not isinstance(result, int) or result not in (0, 1):
        raise _type_error(name, "True or False", value)
    return bool(result)


def numbers(
    name: str,
    value: Any,
    *,
    form: str = "a list of numbers",
    counts: Sequence[int] = (),
    single: bool = False,
    entry: Callable[..., T] = finite_number,
    **bounds: float,
) -> tuple[T, ...]:
    """Return a sequence of numbers as a tuple.

    Args:
        form: the words for the sequence in messages.
        counts: the lengths that the sequence may have; by default, any but 0.
        single: whether the value may be a number instead, which becomes a tuple of length 1.
        entry: the check of each number, with its `bounds`.
    """
    entries = (value,) if single and not is_sequence(value) else value
    if not is_sequence(entries):
        raise _type_error(name, form, value)
    if not len(entries) or len(entries) not in (counts or (len(entries),)):
        raise ValueError(f"{name} must be {'a number or ' * single}{form}, got {value!r}")
    return tuple(entry(name, value, **bounds) for value in entries)


def pair(name: str, value: Any, *, form: str, single: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return two numbers, as `form` names them; if `single`, one number can stand for both. Other options are as for
    `numbers`."""
    ends = numbers(name, value, form=f"a pair {form}", counts=(1, 2) if single else (2,), single=single, **options)
    return ends[0], ends[-1]


def interval(name: str, value: Any, *, start: float | None = None, **options: Any) -> tuple[Any, Any]:
    """Return the value as (low, high), with low ≤ high. If there is a `start`, a number x means (start, x). Other
    options are as for `pair`."""
    ends = value if start is None or is_sequence(value) else (start, value)
    low, high = pair(name, ends, form="(low, high)", **options)
    if low > high:
        raise ValueError(f"{name} must be (low, high) with low ≤ high, got ({low}, {high})")
    return low, high


def string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _type_error(name, "a string", value)
    return value


def strings(name: str, value: object) -> tuple[str, ...]:
    """Return a list of strings, or another collection, as a tuple; a single string is refused."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise _type_error(name, "a list of strings", value)
    return tuple(string(name, entry) for entry in value)


def mapping(name: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _type_error(name, "a dict", value)
    return value


def one_of(name: str, value: Choice, choices: Sequence[str]) -> Choice:
    """Return the value if it is one of the strings in `choices`."""
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def keyword_or(name: str, value: object, *, keyword: str, otherwise: Callable[..., object], **options: object) -> Any:
    """Return the value if it is the string `keyword`, and the result of the check `otherwise` if it is not."""
    if isinstance(value, str) and value == keyword:
        return value
    return otherwise(f"{name}, unless it is {keyword!r},", value, **options)


def function(name: str, value: T) -> T:
    if not callable(value):
        raise _type_error(name, "callable", value)
    return value


def instance(name: str, value: object, cls: type[T]) -> T:
    """Return the value if it is an instance of a class of gpuload."""
    if not isinstance(value, cls):
        raise _type_error(name, f"a gpuload.{cls.__name__}", value)
    return value


def optional(check: Callable[..., T], name: str, value: object, **options: object) -> T | None:
    """Return the result of a check; None is allowed too."""
    return None if value is None else check(name, value, **options)


def _type_error(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
