"""Operations that NumPy arrays and torch's tensors share, so that each formula for targets exists only once.

The formulas use functions that numpy and torch call by the same name, with an axis as the second positional argument.
Torch is imported only if there is a tensor.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["cast", "is_integer", "namespace"]


def namespace(array: Any) -> Any:
    """Return the module of an array's functions: numpy, or torch for a tensor."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


def cast(array: Any, dtype: Any) -> Any:
    """Return a copy of an array in this dtype, or the dtype of this name; return a tensor of this dtype itself."""
    if isinstance(array, np.ndarray | np.generic):
        return array.astype(dtype)
    return array.to(getattr(namespace(array), str(dtype).removeprefix("torch.")))


def is_integer(array: Any) -> bool:
    return str(array.dtype).removeprefix("torch.").startswith(("int", "uint"))
