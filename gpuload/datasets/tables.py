"""Datasets of plain data in memory, which are read one batch at a time, without a call per sample.

This module runs in workers, without torch. The supported datasets are arrays and tensors, whose rows are samples;
lists, tuples and dicts of samples; torch's `TensorDataset`; and torch's `StackDataset` and `Subset` of supported
datasets. Subclasses are not supported, since they may behave differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpuload.datasets.tree import LEAF, Structure, is_plain_tensor, sorted_keys, transpose_samples

__all__ = ["NUMBERS", "SelectedRows", "select_columns"]

NUMBERS: Final = frozenset(np.dtype(code).name for code in "?bhiqBHIQefdFD")  # numpy's dtypes that torch has too

Columns = tuple[Structure, Sequence[Sequence[Any]]]


@dataclass(slots=True, frozen=True)
class SelectedRows(Sequence[np.ndarray]):
    """Selected rows of an array, not copied yet: `array` is M×…; `rows` are N integers in 0 … M-1."""

    array: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.array[self.rows[number]]


def select_columns(dataset: Any, keys: np.ndarray | list[Any]) -> Columns | None:
    """Return the structure of the samples with these keys, and the values of each leaf in all samples. None means that
    the samples must be read one by one."""
    if not isinstance(keys, np.ndarray) or keys.dtype.kind not in "iu" or not len(keys):
        return None
    kind = type(dataset)
    if kind is np.ndarray or kind is np.memmap:
        return _array_columns(dataset, keys)
    if kind in (list, tuple, dict):
        try:
            samples = [dataset[key] for key in keys.tolist()]
        except LookupError:  # reading one by one finds the invalid key
            return None
        return transpose_samples(samples)
    if is_plain_tensor(kind):
        return _tensor_columns(dataset, keys)
    if kind.__module__ != "torch.utils.data.dataset":
        return None
    name = kind.__name__
    if name in ("TensorDataset", "StackDataset"):
        parts: Any = dataset.tensors if name == "TensorDataset" else dataset.datasets
        names = sorted_keys(parts) if isinstance(parts, dict) else None
        return _combine_columns(parts if names is None else [parts[name] for name in names], keys, names)
    if name == "Subset" and keys.min() >= 0 and keys.max() < len(dataset.indices):
        indices = dataset.indices
        return select_columns(dataset.dataset, np.array([indices[key] for key in keys.tolist()]))
    return None


def _array_columns(array: np.ndarray, keys: np.ndarray) -> Columns | None:
    is_usable = array.ndim and array.dtype.name in NUMBERS and array.dtype.isnative
    if not is_usable or keys.min() < 0 or keys.max() >= len(array):  # reading one by one reports the invalid key
        return None
    return LEAF, [SelectedRows(array, keys)]


def _tensor_columns(tensor: Any, keys: np.ndarray) -> Columns | None:
    is_special = tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    if is_special or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        return None
    if str(tensor.dtype).removeprefix("torch.") not in NUMBERS:
        return None
    return _array_columns(tensor.detach().numpy(), keys)


def _combine_columns(parts: Iterable[Any], keys: np.ndarray, names: tuple[Any, ...] | None) -> Columns | None:
    """Return the columns of samples that combine several datasets in a tuple, or in a dict with these names."""
    children: list[Structure] = []
    leaves: list[Sequence[Any]] = []
    for part in parts:
        if (columns := select_columns(part, keys)) is None:
            return None
        children.append(columns[0])
        leaves += columns[1]
    return ("tuple" if names is None else "dict", None, names, tuple(children)), leaves
