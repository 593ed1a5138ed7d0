"""The benchmark of augmenting: its recipes are chains, and what it measures becomes its table."""

from __future__ import annotations

import importlib.util
import io

import numpy as np
import pytest
from rich.console import Console

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is a peer: make bench installs it", allow_module_level=True)

from benchmarks import augmentation


def test_recipes_run_and_become_a_table():
    arrays = [np.full((40, 50, 3), level, np.uint8) for level in (10, 200)]
    mine, _ = augmentation.recipes()["SimCLR"]
    calls = []
    contenders = {"gpuload": augmentation.ours(mine, arrays), "other": calls.append}
    found = augmentation.measure(contenders, len(arrays), 3)
    assert calls == [0, 1, 2, 3]
    assert [len(times) for times in found.values()] == [3, 3]
    assert contenders["gpuload"](0).shape == (2, 3, 224, 224)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(augmentation.table({"SimCLR": {"gpuload": [1.0, 2.0], "other": [3.0, 4.0]}}))
    text = console.export_text()
    assert "2.50 (2.00 … 3.00)" in text
    assert "1.500" in text
