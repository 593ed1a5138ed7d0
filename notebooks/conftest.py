"""Notebooks are tests: nbmake collects each and runs its cells in a kernel of this interpreter.

`make notebooks` writes the outputs back into them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TIMEOUT_S = 300  # under a minute alone; on a machine that is busy with other tests several


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give notebooks more time than a test has."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
