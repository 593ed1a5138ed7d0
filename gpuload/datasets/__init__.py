"""Datasets that yield encoded images: what workers read. A name's module is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.datasets.folder import ImageFiles, ImageFolder

__all__ = ["ImageFiles", "ImageFolder"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpuload.datasets import folder

    return getattr(folder, name)
