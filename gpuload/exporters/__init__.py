"""Exporters of `Loader.stats` to monitoring systems."""

from gpuload.exporters.prometheus import Prometheus

__all__ = ["Prometheus"]
