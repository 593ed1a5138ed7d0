"""Writes docs/parity.md from a run of all parity cases: ``python tests/parity/report.py``."""

from __future__ import annotations

import os
import platform
import sys
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is declared

from parity.case import RUNS, Case
from parity.compare import Measured, measure, operations, pairs_of, runs_of, sets_of, topics
from parity.images import SETS, image_set
from parity.usable import why_not

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
HEADER = """# Parity

This page compares each transform on each backend with an oracle that is not gpuload: Pillow where it has the
operation, otherwise Kornia, torch or torchvision. All of them get the same draws and the same images on the CPU:
{photographs} real photographs, and {random} random images in {rounds} rounds of draws. The kernels of `fused` run
in Triton's interpreter, which is slow, so they get {small} images of at most 64×64, photographs among them. Every
other backend gets these images too.

Figures are in levels, on a scale of 0 to 255: *mean* is the largest mean difference of any image, and *max* is the
largest difference of any value. *torch* is the reference, which processes images one by one on the CPU; *batches*
is its second runner, which CUDA devices use. A dash (–) means that the backend leaves the transform to torch.
*Apart* is the largest difference between any two of these runs, measured for the first case of each transform (a
dash for the other cases). The bounds (mean / max / apart) hold for each backend whose column gives no bounds of its
own; the difference between two backends is bounded by the sum of their bounds. The tests check all bounds. The
letters refer to the reasons below each table.

This page is written by `python tests/parity/report.py`; it was run with {versions}.
"""
HEAD = f"| transform | oracle | {' | '.join(RUNS)} | apart | bound | why |"
LINE = f"| :-- | :-- |{' --: |' * (len(RUNS) + 2)} :-- |"


def row_start(case: Case) -> str:
    """How the row of a case begins."""
    return f"| {case.name} | {case.against} | "


def row(case: Case, found: dict[str, Measured], notes: dict[str, str]) -> str:
    """The row of a case; `notes` are the letters of reasons, of which there may be more afterwards."""
    cells = []
    for run in RUNS:
        cell = f"{shown(found[run].mean)} / {shown(found[run].max)}" if run in found else "–"
        own = case.backends.get(run)
        if run in found and own is not None:
            bounds = " / ".join(map(shown, (own.mean, own.max, own.apart)))
            cell += f" (≤ {bounds}; {letter(own.reason, notes)})"
        cells.append(cell)
    apart = shown(max(measured.apart for measured in found.values())) if case in operations() else "–"
    bound = " / ".join(map(shown, (case.mean, case.max, case.between)))
    return f"{row_start(case)}{' | '.join(cells)} | {apart} | {bound} | {letter(case.reason, notes)} |"


def shown(number: float) -> str:
    """A figure to two digits; whole where it has more."""
    return f"{number:.2g}" if number < 99.5 else f"{number:.0f}"


def letter(reason: str, notes: dict[str, str]) -> str:
    """The letter of a reason."""
    return notes.setdefault(reason, chr(ord("a") + len(notes)))


def measured(case: Case) -> dict[str, Measured]:
    """What was found for each run that has any of the transforms."""
    found = {run: Measured() for run in runs_of(case)}
    for run in found:
        for images in sorted({*sets_of(run), "small"}):
            found[run] |= measure(case, run, images, beside=())
    for run, other, images in pairs_of(case) if case in operations() else ():
        found[run] |= measure(case, run, images, beside=(other,))
    return found


def section(topic: str, cases: tuple[Case, ...]) -> str:
    """The table of a topic, with its reasons."""
    lines, notes = [], {}
    for case in cases:
        lines.append(row(case, measured(case), notes))
        print(lines[-1], flush=True)
    title = (import_module(f"parity.cases_{topic}").__doc__ or "").splitlines()[0].rstrip(".")
    reasons = "\n".join(f"- {mark}: {reason}" for reason, mark in notes.items())
    return "\n".join([f"\n## {title}\n", HEAD, LINE, *lines, "", reasons, ""])


def document() -> str:
    """The whole page."""
    missing = {run: reason for run in RUNS if (reason := why_not(run))}
    assert not missing, f"backends that cannot be run here: {missing}"
    [dali] = {each.name for each in distributions()} & {"nvidia-dali-cuda120", "nvidia-dali-cuda130"}
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {version(name)}" for name in ("torch", "pillow", "kornia", "triton", "numpy")]
    versions.append(f"DALI {version(dali)}")
    head = HEADER.format(
        photographs=len(image_set("photographs", 3)),
        random=len(image_set("random", 3)),
        rounds=len(SETS["random"]),
        small=len(image_set("small", 3)),
        versions=", ".join(versions),
    )
    return head + "".join(section(topic, cases) for topic, cases in topics().items())


if __name__ == "__main__":
    PAGE.write_text(document())
