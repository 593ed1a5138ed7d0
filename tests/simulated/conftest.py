"""The simulated device stands in for one that is not there."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a real device here, which tests marked cuda use")
