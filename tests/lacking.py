"""What a machine may lack, for which a test is skipped.

Optional packages are in `OPTIONAL` in conftest.py. Nothing else is a reason to skip a test.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

__all__ = ["backend", "photographs"]


def backend(name: str, reason: str) -> NoReturn:
    """Skip a test where a backend cannot be used; fail it where ``CI`` is set, as it is on GitHub's machines."""
    if os.environ.get("CI"):
        pytest.fail(f"the backend {name!r} cannot be used here, where it must be: {reason}", pytrace=False)
    pytest.skip(reason)


def photographs() -> NoReturn:
    pytest.skip("no photographs: install scikit-image, or set GPULOAD_SHARED to the folder that holds photos/")
