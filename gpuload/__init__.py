"""gpuload: an image loader for training vision models on GPUs.

Worker processes read files and decode only the region that the first crop needs; everything else runs on the device,
for entire batches. See `Loader`.

Names are imported on first use, because worker processes also import gpuload and must not spend time importing torch.
The stub `__init__.pyi` lists them.
"""

from __future__ import annotations

from gpuload.public_names import lazy_names

__version__ = "0.1.0"


def _missing_name_error(name: str) -> AttributeError:
    from gpuload.transforms.names import missing_name_error

    return missing_name_error(__name__, name)


__all__, __getattr__, __dir__ = lazy_names(__name__, _missing_name_error)
__all__ += ["__version__"]
