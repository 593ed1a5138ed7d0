"""Samples as bytes: JSON that describes them, then the bytes of their images, arrays, tensors and texts of bytes.

What is read may come from a disk that others write to: nothing is unpickled, and no class is named. Bytes that are no
packed sample raise a ValueError. Runs in workers; torch is imported where a sample has tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from gpuload.datasets.sample import META, Boxes, Encoded, Image, Keypoints, Mask, as_meta, plain_meta
from gpuload.datasets.tree import dtype_of

__all__ = ["pack", "unpack"]

PLAIN: Final = (type(None), bool, int, float, str)
KINDS: Final = "biufcUS"  # of numpy's dtypes
DECLARED: Final[dict[str, type]] = {"image": Image, "mask": Mask, "boxes": Boxes, "keypoints": Keypoints}
SAYS: Final = {"image": ("layout",), "boxes": ("format", "canvas_hw")}  # what they hold in addition to an array


def pack(sample: Any) -> bytes:
    """A sample as bytes.

    Raises:
        TypeError: it holds what is not kept; the message says where.
    """
    blobs: list[Any] = []
    described = _described(sample, "", blobs)
    head = json.dumps([described, [len(blob) for blob in blobs]]).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *blobs])


def unpack(data: memoryview) -> Any:
    """The sample in these bytes; ValueError if they are none."""
    try:
        end = 4 + int.from_bytes(data[:4], "little")
        described, lengths = json.loads(bytes(data[4:end]))
        if sum(lengths) != len(data) - end:
            raise ValueError("its parts are longer or shorter than it says")
        return _made(described, _parts(data, end, lengths))
    except (ValueError, TypeError, LookupError, StopIteration, RecursionError, OverflowError) as error:
        raise ValueError(f"not a packed sample: {error}") from error


def _described(value: Any, where: str, blobs: list[Any]) -> Any:
    """What JSON says of a value: plain ones as they are, others as [kind, …]; their bytes go to `blobs`."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in META:
        return ["meta", _described(plain_meta(value), where, blobs)]
    if kind is tuple or kind is list:
        return [kind.__name__, [_described(part, f"{where}[{i}]", blobs) for i, part in enumerate(value)]]
    if kind is dict:
        for key in value:
            if type(key) not in PLAIN:
                raise TypeError(f"{where or 'the sample'} has the key {key!r}, a {type(key).__name__}; {_KEPT}")
        parts = [_described(part, f"{where}[{key!r}]", blobs) for key, part in value.items()]
        return ["dict", list(value), parts]
    if kind is Encoded:
        blobs.append(value.data)
        return ["encoded", value.mode, value.source]
    if kind is bytes:
        blobs.append(value)
        return ["bytes"]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in KINDS:
        array = np.ascontiguousarray(value)
        blobs.append(array.tobytes())
        return ["array" if isinstance(value, np.ndarray) else "number", value.dtype.str, list(np.shape(value))]
    if (kind.__module__, kind.__name__) == ("torch", "Tensor") and _is_plain(value):
        blobs.append(_bytes_of(value))
        return ["tensor", dtype_of(value), list(value.shape)]
    for name, declared in DECLARED.items():
        if kind is declared:
            inner: Any = value
            more = [getattr(inner, attribute) for attribute in SAYS.get(name, ())]
            return [name, _described(inner.array, where, blobs), *more]
    place = f"{where} of the sample" if where else "the sample"
    raise TypeError(f"{place} is a {kind.__module__}.{kind.__qualname__}, which gpuload.Cached does not keep; {_KEPT}")


_KEPT = (
    "expected tuples, lists and dicts of gpuload.Encoded, images, masks, boxes, keypoints, numbers, str, bytes, None, "
    "numpy arrays of numbers and torch tensors on the CPU"
)


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is numbers in this machine's memory, and no more than that."""
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return not special and tensor.device.type == "cpu" and str(tensor.layout) == "torch.strided"


def _bytes_of(tensor: Any) -> bytes:
    import torch

    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _parts(data: memoryview, at: int, lengths: list[int]) -> Iterator[memoryview]:
    for length in lengths:
        if length < 0:
            raise ValueError("a part of negative length")
        yield data[at : at + length]
        at += length


def _made(described: Any, parts: Iterator[memoryview]) -> Any:
    if not isinstance(described, list):
        return described
    kind, *rest = described
    if kind in ("tuple", "list"):
        made = [_made(part, parts) for part in rest[0]]
        return tuple(made) if kind == "tuple" else made
    if kind == "dict":
        return dict(zip(rest[0], [_made(part, parts) for part in rest[1]], strict=True))
    if kind == "meta":
        return as_meta(_made(rest[0], parts))
    if kind == "encoded":
        return Encoded(bytes(next(parts)), *rest)
    if kind == "bytes":
        return bytes(next(parts))
    if kind in ("array", "number"):
        dtype = np.dtype(rest[0])
        if dtype.kind not in KINDS:
            raise ValueError(f"an array of {dtype}")
        array = np.frombuffer(bytearray(next(parts)), dtype).reshape(rest[1])
        return array if kind == "array" else array[()]
    if kind == "tensor":
        return _tensor(bytearray(next(parts)), *rest)
    return DECLARED[kind](_made(rest[0], parts), *rest[1:])


def _tensor(data: bytearray, name: str, shape: list[int]) -> Any:
    import torch

    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of {name!r}")
    try:
        return torch.from_numpy(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
    except RuntimeError as error:
        raise ValueError(f"a tensor of shape {shape}: {error}") from error
