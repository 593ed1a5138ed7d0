"""The simulated device stands in for one that is not there."""

from __future__ import annotations

import os

import lacking
import pytest
import torch


@pytest.fixture(autouse=True)
def _without_a_gpu() -> None:
    if torch.cuda.is_available() and "FAKECUDA" not in os.environ:
        lacking.skip("no GPU", "tests marked cuda use it")
