"""`select_columns`: datasets of plain data in memory, which are read by the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from gpuload.datasets.tables import NUMBERS, select_columns
from gpuload.datasets.tree import unflatten

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)
LABELS = torch.arange(6)
KEYS = np.array([5, 0, 3, 3])

SELECTABLE = {
    "an array": ROWS,
    "one number each": np.arange(6),
    "strides": ROWS[:, ::-2],
    "a tensor": torch.from_numpy(ROWS),
    "a tensor with a gradient": torch.from_numpy(ROWS).requires_grad_(),
    "tensors": TensorDataset(torch.from_numpy(ROWS), LABELS),
    "stacked": StackDataset(ROWS, TensorDataset(LABELS)),
    "stacked by name": StackDataset(y=LABELS, x=ROWS),
    "a part": Subset(TensorDataset(LABELS), [5, 4, 3, 2, 1, 0]),
    "a part by array": Subset(StackDataset(ROWS, LABELS), np.array([5, 4, 3, 2, 1, 0])),
    "a list": list(ROWS),
    "a tuple of samples": tuple(zip(ROWS, range(6), strict=True)),
    "a dict of samples": {key: {"x": ROWS[key], "name": f"n{key}"} for key in range(6)},
    "a list next to an array": StackDataset(list("abcdef"), ROWS),
}


def as_numbers(value):
    """Convert arrays and tensors in a sample to lists of numbers."""
    if isinstance(value, dict):
        return {key: as_numbers(value[key]) for key in sorted(value)}
    if isinstance(value, tuple):
        return tuple(map(as_numbers, value))
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    return value if isinstance(value, int | str) else np.asarray(value).tolist()


@pytest.mark.parametrize("kind", SELECTABLE)
def test_select_columns_returns_the_samples_of_the_keys(kind):
    dataset = SELECTABLE[kind]
    columns = select_columns(dataset, KEYS)
    assert columns is not None
    structure, leaves = columns
    samples = [unflatten(structure, [leaf[row] for leaf in leaves]) for row in range(len(KEYS))]
    assert as_numbers(tuple(samples)) == as_numbers(tuple(dataset[key] for key in KEYS.tolist()))


class SubclassedTensorDataset(TensorDataset):
    pass


NOT_SELECTABLE = {
    "a dataset of the user's own class": (SubclassedTensorDataset(LABELS), KEYS),
    "a part of a dataset of the user's own class": (Subset(SubclassedTensorDataset(LABELS), range(6)), KEYS),
    "an array and a dataset of the user's own class": (StackDataset(ROWS, SubclassedTensorDataset(LABELS)), KEYS),
    "concatenated": (ConcatDataset([TensorDataset(LABELS)]), KEYS),
    "bfloat16": (LABELS.to(torch.bfloat16), KEYS),
    "a conjugate": (torch.zeros(6, dtype=torch.complex64).conj(), KEYS),
    "a tensor with the negative bit": (torch.zeros(6, dtype=torch.complex64).conj().imag, KEYS),
    "sparse": (torch.eye(6).to_sparse(), KEYS),
    "objects": (np.array([None] * 6), KEYS),
    "text": (np.array(list("abcdef")), KEYS),
    "non-native byte order": (ROWS.astype(">f4"), KEYS),
    "a key beyond the end": (ROWS, np.array([6])),
    "a negative key": (ROWS, np.array([-1])),
    "a key beyond the end of a list": ([1, 2], np.array([2])),
    "a key beyond the end of a part": (Subset(ROWS, [0, 1]), np.array([2])),
    "a negative key of a part": (Subset(ROWS, [0, 1]), np.array([-1])),
    "a dict without the key": ({0: 1}, np.array([1])),
    "keys of another kind": (ROWS, ["a"]),
    "no keys": (ROWS, KEYS[:0]),
    "samples of several kinds": ([1, (1,)], np.array([0, 1])),
    "samples that are None": ([None, None], np.array([0, 1])),
}


@pytest.mark.parametrize("kind", NOT_SELECTABLE)
def test_select_columns_of_unsupported_datasets_or_keys_returns_none(kind):
    dataset, keys = NOT_SELECTABLE[kind]
    assert select_columns(dataset, keys) is None


def test_numbers_are_dtypes_that_torch_has():
    for name in NUMBERS:
        assert torch.from_numpy(np.zeros(1, name)).dtype == getattr(torch, name)
