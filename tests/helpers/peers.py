"""Imports of torchvision and timm for tests that compare gpuload with them; tests are skipped if one is missing."""

from __future__ import annotations

from types import ModuleType

from helpers import lacking


def torchvision() -> ModuleType:
    """Import torchvision, even with a torch that its operators were not built for; skip the test module if missing."""
    lacking.require("torchvision")
    from benchmarks.peers import torchvision_import

    return torchvision_import.torchvision


def timm() -> ModuleType:
    """Import timm, which imports torchvision; skip the test module if either is missing."""
    torchvision()
    lacking.require("timm")
    import timm

    return timm
