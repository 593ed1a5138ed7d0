"""Training loops that change a module, or a tensor, which the transforms or the `collate_fn` of their loader use.

Each loop takes the name of a device and returns its batches. Batches that gpuload makes ahead, on its own stream, would
miss the changes.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import torch
from simulated.running import OPTIONS
from simulated.runtime import SimulatedCuda
from simulated.samples import CHAIN, options

import gpuload as gl
from gpuload import transforms as T


class Scale(torch.nn.Module):
    """A module whose backward pass reads its two parameters."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3, 1, 1).to(device))
        self.second = torch.nn.Parameter(torch.full((3, 1, 1), 0.5).to(device))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.first * self.second


class Shift(torch.nn.Module):
    """A module with a buffer that the loop changes in place."""

    amount: torch.Tensor

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("amount", torch.zeros(1).to(device))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.amount


class ModuleTransform(T.Custom):
    """A transform of levels that calls its module."""

    works_on = ("uint8",)
    moves_pixels = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
        return self.module(images).to(torch.uint8)


def trained(device: str) -> list[torch.Tensor]:
    """Train a module at the end of the transforms; return the losses and the final parameters."""
    module, losses = Scale(device), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with gl.Loader(**OPTIONS | options(transforms=[*CHAIN, module], device=device)) as loader:
        for images, _ in loader:
            loss = ((images - 0.1) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
    return [*losses, *(parameter.detach().clone() for parameter in module.parameters())]


def shifted(device: str, transforms: Any) -> list[torch.Tensor]:
    """Return the batches of a loop that changes the module's buffer after each."""
    module, batches = Shift(device), []
    with gl.Loader(**OPTIONS | options(transforms=transforms(module), device=device)) as loader:
        for images, _ in loader:
            batches.append(images.clone())
            module.amount += 1
    return batches


def at_the_end(module: torch.nn.Module) -> list[Any]:
    return [*CHAIN, module]


def before_another_at_the_end(module: torch.nn.Module) -> list[Any]:
    return [*CHAIN, module, torch.nn.Identity()]


def in_mid_chain(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], ModuleTransform(module), *CHAIN[1:]]


class ModuleHolder:
    """An object with a method that calls its module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules = [{"shift": module}]

    def shift(self, images: torch.Tensor) -> torch.Tensor:
        return self.modules[0]["shift"](images).to(torch.uint8)


class ModuleListTransform(T.Custom):
    """A transform whose module is in a list."""

    works_on = ("uint8",)
    moves_pixels = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules = [module]

    def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
        return self.modules[0](images).to(torch.uint8)


def in_a_closure(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], T.Lambda(lambda images: module(images).to(torch.uint8)), *CHAIN[1:]]


def in_a_method(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], T.Lambda(ModuleHolder(module).shift), *CHAIN[1:]]


def in_the_class_of_a_transform(module: torch.nn.Module) -> list[Any]:
    class ModuleInClosure(ModuleListTransform):
        def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
            return module(images).to(torch.uint8)

    return [CHAIN[0], ModuleInClosure(torch.nn.ReLU()), *CHAIN[1:]]


def in_a_list(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], ModuleListTransform(module), *CHAIN[1:]]


MODULES = (
    at_the_end,
    before_another_at_the_end,
    in_mid_chain,
    in_a_closure,
    in_a_method,
    in_a_list,
    in_the_class_of_a_transform,
)


def collated(device: str) -> list[torch.Tensor]:
    """Return batches to which a `collate_fn` adds a tensor that the loop changes after each."""
    amount, batches = torch.ones(1).to(device) * 3, []

    def collate_fn(samples: list[Any]) -> torch.Tensor:
        return torch.stack([image for image, _ in samples]) + amount

    with gl.Loader(**OPTIONS | options(collate_fn=collate_fn, device=device)) as loader:
        for images in loader:
            batches.append(images.clone())
            amount.add_(1)
    return batches


def with_a_constant(device: str, levels: bool) -> list[torch.Tensor]:
    """Return batches of two epochs to which a function in mid-chain adds a tensor, written just before each epoch."""
    amount, batches = torch.zeros(1).to(device), []

    def added(images: torch.Tensor) -> torch.Tensor:
        return (images + amount).to(images.dtype)

    add_constant, normalize = T.Lambda(added), CHAIN[-1:]
    chain = (
        [CHAIN[0], add_constant, *normalize] if levels else [CHAIN[0], *normalize, add_constant, T.RandomErasing(0.0)]
    )
    with gl.Loader(**OPTIONS | options(transforms=chain, device=device)) as loader:
        for _ in range(2):
            amount.copy_(amount * 2 + 1)
            batches += [images.clone() for images, _ in loader]
    return batches


def collated_numbers(device: str) -> list[torch.Tensor]:
    """Return batches like `collated`, of samples without images, which are collated in the main process."""
    amount, batches = torch.ones(1).to(device) * 3, []

    def collate_fn(samples: list[Any]) -> torch.Tensor:
        return torch.stack(list(map(torch.as_tensor, samples))).to(device) + amount

    numbers = [np.full(5, number, np.float32) for number in range(24)]
    with gl.Loader(**OPTIONS | options(dataset=numbers, collate_fn=collate_fn, device=device)) as loader:
        for numbers_read in loader:
            batches.append(numbers_read.clone())
            amount.add_(1)
    return batches


class HiddenTensor:
    """A tensor as an attribute of a class, where gpuload does not look for tensors."""

    amount: torch.Tensor


def iterated_by_a_thread(device: str, cuda: SimulatedCuda | None = None) -> list[torch.Tensor]:
    """Return the batches of a thread with its own stream, which writes a tensor between `iter()`, called by the main
    thread, and its first `next()`."""
    batches: list[torch.Tensor] = []
    added = T.Lambda(lambda images: (images + HiddenTensor.amount).to(images.dtype))
    with gl.Loader(**OPTIONS | options(transforms=[CHAIN[0], added, *CHAIN[1:]], device=device)) as loader:
        iterator = iter(loader)
        if cuda is not None:
            cuda.synchronize()  # otherwise, the thread's stream runs first, since no other stream has work

        def fetch() -> None:
            with contextlib.ExitStack() as stack:
                if cuda is not None:
                    stack.enter_context(cuda.on(cuda.stream()))
                HiddenTensor.amount = torch.full((1,), 7.0, device=device)
                batches.extend(images.clone() for images, _ in iterator)

        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join()
    return batches
