"""Writes docs/parity.md from a run of all parity cases: ``python tests/parity/report.py [folder of photographs]``."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.insert(0, str(Path(__file__).parents[2]))

from parity.case import Case
from parity.compare import Measured, all_cases, measure, photographs, random_images

HEADER = """# Parity

What each transform does, held against an oracle that is not ours: Pillow wherever it has the operation, else Kornia.
Both get the same draws and the same images: {count} real photographs and {random} random images, in {epochs} rounds of
draws, on the CPU, through the runner of single images and through that of batches (which also runs on CUDA).

All figures are in levels, of 255. *Mean* is the greatest mean difference of any one image, *max* the greatest
difference of any one number; behind each its bound, which the tests hold. *Runners* is the greatest difference between
both runners.

This page is written by `python tests/parity/report.py`; it was run with {versions}.

| transform | oracle | mean | bound | max | bound | runners | bound | why |
| :-- | :-- | --: | --: | --: | --: | --: | --: | :-- |
"""
EPOCHS = 4


def row_start(case: Case) -> str:
    """How the row of a case begins."""
    return f"| {case.name} | {case.against} | "


def row(case: Case, found: Measured) -> str:
    """The row of a case."""
    numbers = (found.mean, case.mean, found.max, case.max, found.between, case.between)
    return f"{row_start(case)}{' | '.join(f'{number:.3g}' for number in numbers)} | {case.reason} |"


def document(folder: Path | None) -> str:
    """The whole page."""
    pictures, randoms = photographs(sorted(folder.glob("*.jpg")) if folder else []), random_images()
    names = ("torch", "pillow", "kornia", "numpy")
    versions = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])
    lines = []
    for case in all_cases():
        found = measure(case, pictures)
        for epoch in range(EPOCHS):
            found |= measure(case, randoms, key_epoch=epoch)
        lines.append(row(case, found))
        print(lines[-1], flush=True)
    head = HEADER.format(count=len(pictures), random=len(randoms), epochs=EPOCHS, versions=versions)
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = document(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    (Path(__file__).parents[2] / "docs" / "parity.md").write_text(page)
