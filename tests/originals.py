"""torchvision and timm for tests that hold gpuload against them; such tests are skipped where one is absent."""

from __future__ import annotations

from types import ModuleType

import lacking


def torchvision() -> ModuleType:
    """torchvision, also beside a torch that its operators were not built for; else the module of tests is skipped."""
    lacking.require("torchvision")
    from benchmarks.peers import torchvision_import

    return torchvision_import.torchvision


def timm() -> ModuleType:
    """timm, which imports torchvision; else the module of tests is skipped."""
    torchvision()
    lacking.require("timm")
    import timm

    return timm
