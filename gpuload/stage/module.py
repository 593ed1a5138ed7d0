"""A torch module at the end of the transforms: applied to the batch as it is, with generators that are seeded for it.

A module such as Kornia's `AugmentationSequential` draws from torch's global generators. They are seeded for the call
and put back behind it, so that what it draws hangs on the loader's seed, the epoch and the batch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["apply_module", "seeded"]


def apply_module(module: Any, batch: torch.Tensor, seed: int | None) -> Any:
    """What a module makes of a batch.

    Args:
        module: an ``nn.Module``.
        batch: N×C×H×W.
        seed: of torch's generators during the call; None leaves them as they are.

    Returns:
        What it returns. It carries gradients of the module's parameters, where there are such as want them.
    """
    wanted = any(parameter.requires_grad for parameter in module.parameters())
    with torch.set_grad_enabled(wanted), seeded(seed, batch.device):
        return module(batch)


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of a device; afterwards they are as they were."""
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
