from __future__ import annotations

import pytest
import torch
from helpers import lacking


@pytest.fixture(autouse=True)
def _without_a_gpu() -> None:
    if torch.cuda.is_available() and not lacking.IS_FAKE:
        lacking.skip("no GPU", "tests marked cuda use it")
