"""torchvision and timm for tests that hold gpuload against them; such tests are skipped where one is absent."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest


def torchvision() -> ModuleType:
    """torchvision, also beside a torch that its operators were not built for; else the module of tests is skipped."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed; it is in the dependency group test", allow_module_level=True)
    from benchmarks.peers import torchvision_import

    return torchvision_import.torchvision


def timm() -> ModuleType:
    """timm, which imports torchvision; else the module of tests is skipped."""
    torchvision()
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed; it is in the dependency group test", allow_module_level=True)
    import timm

    return timm
