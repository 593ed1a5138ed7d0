"""A torch module, or a function, at the end of the transforms; and torch's generators, seeded while it is called.

A module such as Kornia's `AugmentationSequential` draws from torch's global generators. They are seeded for the call
and restored after it, so what it draws depends on the loader's seed, the epoch and the batch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpuload.stage.accelerator import generator_of

__all__ = ["apply_module", "generators_kept", "note_input", "seed_generators"]


def apply_module(module: Any, batch: torch.Tensor, seed: int | None) -> Any:
    """Apply an ``nn.Module``, or a function, to a batch N×C×H×W.

    The result carries gradients if a parameter of the module requires them. `seed`: of torch's generators during the
    call; None leaves them as they are.
    """
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    wanted = any(parameter.requires_grad for parameter in parameters)
    with torch.set_grad_enabled(wanted):
        if seed is None:
            return module(batch)
        with generators_kept(batch.device) as generators:
            seed_generators(generators, seed)
            return module(batch)


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[list[torch.Generator]]:
    """torch's generators of the CPU and of a device; afterwards they are as they were."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(generator_of(device))
    states = [generator.get_state() for generator in generators]
    try:
        yield generators
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def seed_generators(generators: Sequence[torch.Generator], seed: int) -> None:
    for generator in generators:
        generator.manual_seed(seed)


def note_input(error: Exception, called: str, images: torch.Tensor) -> None:
    """Add to an exception of the user's own code what it was called with, and for levels how to get floats."""
    got = f"{called} was called with {str(images.dtype).removeprefix('torch.')} images of shape {tuple(images.shape)}"
    levels = images.dtype == torch.uint8
    error.add_note(f"{got}; for floats in 0 … 1 put ToDtype('float32', scale=True) before it" if levels else got)
