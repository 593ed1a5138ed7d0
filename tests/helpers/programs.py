"""Python programs run in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_python(code: str, *arguments: object, flags: tuple[str, ...] = (), **options: Any) -> tuple[str, str]:
    """Run a program, check that it succeeds, and return its output and its messages on standard error."""
    command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, **{"timeout": 90, **options})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, result.stderr
