"""The layers of gpuload's subpackages, which docs/architecture.md lists and test_architecture.py enforces."""

from __future__ import annotations

from pathlib import Path

import gpuload

__all__ = ["LAYERS", "PACKAGE"]

PACKAGE = Path(gpuload.__file__).parent

# From the top: a subpackage may import its own modules and lower layers, but no other subpackage of its own layer.
LAYERS = (
    ("cli", "exporters"),
    ("inspection", "packing"),
    ("loader",),
    ("batches",),
    ("stage",),
    ("workers",),
    ("ring",),
    ("order",),
    ("decode", "transforms"),
    ("datasets",),
    ("rng",),
    ("checks", "errors", "public_names"),
)
