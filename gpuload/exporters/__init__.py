"""What `Loader.stats` counts, for systems that watch programs."""

from gpuload.exporters.prometheus import Prometheus

__all__ = ["Prometheus"]
