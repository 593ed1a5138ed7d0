"""Pages opened in Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache


@cache
def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def dump_dom(url: str, *options: str) -> tuple[str, list[str]]:
    """Open a page. Return its DOM, and the messages of its console."""
    program = find_chromium()
    assert program is not None
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    result = subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]
