"""Datasets that yield encoded images: what workers read."""

from __future__ import annotations

from gpuload.datasets.folder import ImageFiles, ImageFolder

__all__ = ["ImageFiles", "ImageFolder"]
