"""Datasets that hold plain data in memory: read by the batch, with no call for each sample. In workers; no torch.

These are arrays and tensors, whose rows are samples; lists, tuples and dicts of samples; torch's `TensorDataset`, and
its `StackDataset` and `Subset` of such. Only these very classes: one that the user derives may do more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpuload.datasets.tree import LEAF, Structure, is_plain_tensor, sorted_keys, transposed

__all__ = ["NUMBERS", "Picked", "picked"]

NUMBERS: Final = frozenset(np.dtype(code).name for code in "?bhiqBHIQefdFD")  # numpy's types that torch has too

Found = tuple[Structure, Sequence[Sequence[Any]]]


@dataclass(slots=True, frozen=True)
class Picked(Sequence[np.ndarray]):
    """Rows of an array that are still to be copied: `array`, M×…, and `rows`, int64 (N,), each in 0 … M-1."""

    array: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.array[self.rows[number]]


def picked(dataset: Any, keys: np.ndarray | list[Any]) -> Found | None:
    """Return the samples of these keys: their structure, and each leaf of all of them; None means they have to be read
    one by one."""
    if not isinstance(keys, np.ndarray) or keys.dtype.kind not in "iu" or not len(keys):
        return None
    kind = type(dataset)
    if kind is np.ndarray or kind is np.memmap:
        return _of_array(dataset, keys)
    if kind in (list, tuple, dict):
        try:
            samples = [dataset[key] for key in keys.tolist()]
        except LookupError:  # one by one, to find which
            return None
        return transposed(samples)
    if is_plain_tensor(kind):
        return _of_tensor(dataset, keys)
    if kind.__module__ != "torch.utils.data.dataset":
        return None
    name = kind.__name__
    if name in ("TensorDataset", "StackDataset"):
        parts: Any = dataset.tensors if name == "TensorDataset" else dataset.datasets
        names = sorted_keys(parts) if isinstance(parts, dict) else None
        return _together(parts if names is None else [parts[name] for name in names], keys, names)
    if name == "Subset" and keys.min() >= 0 and keys.max() < len(dataset.indices):
        indices = dataset.indices
        return picked(dataset.dataset, np.array([indices[key] for key in keys.tolist()]))
    return None


def _of_array(array: np.ndarray, keys: np.ndarray) -> Found | None:
    usable = array.ndim and array.dtype.name in NUMBERS and array.dtype.isnative
    if not usable or keys.min() < 0 or keys.max() >= len(array):  # a key of another kind is an error of its sample
        return None
    return LEAF, [Picked(array, keys)]


def _of_tensor(tensor: Any, keys: np.ndarray) -> Found | None:
    special = tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    if special or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        return None
    if str(tensor.dtype).removeprefix("torch.") not in NUMBERS:
        return None
    return _of_array(tensor.detach().numpy(), keys)


def _together(parts: Iterable[Any], keys: np.ndarray, names: tuple[Any, ...] | None) -> Found | None:
    """Return the rows of several datasets as a tuple, or as a dict with these names."""
    children: list[Structure] = []
    leaves: list[Sequence[Any]] = []
    for part in parts:
        if (samples := picked(part, keys)) is None:
            return None
        children.append(samples[0])
        leaves += samples[1]
    return ("tuple" if names is None else "dict", None, names, tuple(children)), leaves
