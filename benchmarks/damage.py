"""A copy of a folder of photographs with some files damaged, each in one of the ways that files are in the wild."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["damaged_copy"]

DAMAGES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "cut": lambda data: data[:-100],
    "text": lambda data: b"<html><body>404 Not Found</body></html>",
    "headless": lambda data: data[2:],
}


def damaged_copy(source: Path, target: Path, part: float, seed: int) -> dict[str, str]:
    """Copy the tree `source` to `target` (made anew), with `part` of the files damaged.

    Returns the damaged files, by path, and how.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    files = sorted(target.rglob("*.jpg"))
    chosen = random.Random(seed).sample(files, round(part * len(files)))
    damaged = {}
    for number, path in enumerate(sorted(chosen)):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        path.write_bytes(DAMAGES[kind](path.read_bytes()))
        damaged[str(path)] = kind
    return damaged
