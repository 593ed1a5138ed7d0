"""The state of a user's own sampler or dataset, as JSON that keeps its types. Main process; pure functions.

What JSON has is written as it is. All else becomes a dict with one key, its kind, such as ``{"$tuple": [1, 2]}``: so
both `json` and ``torch.save`` with ``weights_only=True`` carry it, and nothing of it is ever unpickled.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

__all__ = ["from_json", "to_json"]

SEQUENCES: Final[dict[str, type]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
MAPPINGS: Final[dict[str, type]] = {"$dict": dict, "$OrderedDict": OrderedDict}
BYTES: Final[dict[str, type]] = {"$bytes": bytes, "$bytearray": bytearray}
KINDS: Final = {kind: name for table in (SEQUENCES, MAPPINGS, BYTES) for name, kind in table.items()}


def to_json(value: Any, path: str) -> Any:
    """A state as JSON.

    Args:
        value: numbers, strings, None, bytes, arrays, tensors on the CPU, and tuples, lists, sets and dicts of these.
        path: where it is, for the error.

    Raises:
        TypeError: something else is in it; the message says where.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [to_json(entry, f"{path}[{number}]") for number, entry in enumerate(value)]
    if (
        kind is dict
        and all(type(key) is str for key in value)
        and not (len(value) == 1 and next(iter(value))[:1] == "$")
    ):
        return {key: to_json(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    name = KINDS.get(kind, "")
    if name in MAPPINGS:
        pairs = value.items()
        return {
            name: [[to_json(key, f"{path}, key {key!r}"), to_json(entry, f"{path}[{key!r}]")] for key, entry in pairs]
        }
    if name in SEQUENCES:
        entries = value if kind is tuple else sorted(value, key=repr)
        return {name: [to_json(entry, f"{path}[{number}]") for number, entry in enumerate(entries)]}
    if name in BYTES:
        return {name: base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [value.real, value.imag]}
    if kind is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized:
        bits = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(bits)]}
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufcmMSU":
        name = "$array" if kind is np.ndarray else "$scalar"
        return {name: [value.dtype.str, list(value.shape), _text(value)]}
    where = f" on {value.device}" if isinstance(value, torch.Tensor) and value.device.type != "cpu" else ""
    raise TypeError(
        f"{path} is of type {kind.__module__}.{kind.__qualname__}{where}, which a state does not keep; let it hold "
        "numbers, strings, bytes, arrays, tensors on the CPU, and tuples, lists, sets and dicts of these"
    )


def from_json(value: Any, path: str) -> Any:
    """What `to_json` was given.

    Raises:
        ValueError: `to_json` did not write this; the message says where.
    """
    if isinstance(value, list):
        return [from_json(entry, f"{path}[{number}]") for number, entry in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    name = next(iter(value)) if len(value) == 1 else ""
    if not (isinstance(name, str) and name[:1] == "$"):
        return {key: from_json(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    try:
        return _made(name, value[name], lambda entry: from_json(entry, f"{path}[{name!r}]"))
    except Exception as error:
        raise ValueError(f"{path} is not what state_dict() gave: {name} cannot be read ({error})") from None


def _made(name: str, given: Any, inner: Callable[[Any], Any]) -> Any:
    if name in SEQUENCES:
        return SEQUENCES[name](inner(given))
    if name in MAPPINGS:
        return MAPPINGS[name]((inner(key), inner(entry)) for key, entry in given)
    if name in BYTES:
        return BYTES[name](_bytes(given))
    if name == "$complex":
        return complex(*given)
    if name == "$tensor":
        dtype, shape, text = given
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if bits := _bytes(text):
            tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bits, dtype=torch.uint8))
        return tensor
    if name in ("$array", "$scalar"):
        dtype, shape, text = given
        array = np.frombuffer(_bytes(text), np.dtype(dtype)).reshape(shape)
        return array if name == "$array" else array[()]
    raise ValueError("no such kind")


def _text(bits: Any) -> str:
    return base64.b64encode(bits.tobytes()).decode()


def _bytes(text: str) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))
