"""Regular expressions for `pytest.raises(match=…)` and `pytest.warns(match=…)`, which search in a message."""

from __future__ import annotations

import re


def exactly(text: str) -> str:
    """Match a message that equals `text`."""
    return f"^{re.escape(text)}$"


def starting(text: str) -> str:
    """Match a message that starts with `text`."""
    return f"^{re.escape(text)}"
