"""Transforms with torchvision's names, arguments, defaults and semantics, but with random parameters per sample.

This package declares transforms and draws their random parameters; `gpuload.stage` applies them. Workers import it, so
it does not import torch. Each transform is imported on first use, since a worker needs only the transforms of its
chain, and importing all transforms would take longer than all of a worker's other imports. The stub `__init__.pyi`
lists them.
"""

from __future__ import annotations

from gpuload.public_names import lazy_names


def _missing_name_error(name: str) -> AttributeError:
    from gpuload.transforms.names import missing_name_error

    return missing_name_error(__name__, name)


__all__, __getattr__, __dir__ = lazy_names(__name__, _missing_name_error)
