"""A torch module at the end of the transforms: applied to whole batches, with torch's generators seeded.

A module such as Kornia's `AugmentationSequential` draws from torch's global generators. They are seeded for the call
and restored after it, so what it draws depends on the loader's seed, the epoch and the batch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["apply_module", "seeded"]


def apply_module(module: Any, batch: torch.Tensor, seed: int | None) -> Any:
    """Apply an ``nn.Module`` to a batch N×C×H×W.

    The result carries gradients if a parameter of the module requires them. `seed`: of torch's generators during the
    call; None leaves them as they are.
    """
    wanted = any(parameter.requires_grad for parameter in module.parameters())
    with torch.set_grad_enabled(wanted), seeded(seed, batch.device):
        return module(batch)


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of a device; restore them afterwards."""
    if seed is None:
        yield
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.device(device).index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
