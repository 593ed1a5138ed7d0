"""A module of the user's own in the transforms, which the training loop changes while the loader runs ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated.machine import DIRECTED
from simulated.running import OPTIONS, on_cpu
from simulated.runtime import simulated
from simulated.test_orders import CHAIN, options

import gpuload as gl
from gpuload import transforms as T


class Scale(torch.nn.Module):
    """Trainable, in two steps, so that its backward pass reads its parameters."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3, 1, 1).to(device))
        self.second = torch.nn.Parameter(torch.full((3, 1, 1), 0.5).to(device))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.first * self.second


class Shift(torch.nn.Module):
    """With a buffer that the loop changes in place."""

    amount: torch.Tensor

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("amount", torch.zeros(1).to(device))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.amount


class Shifted(T.Custom):
    """The same within the transforms, on levels."""

    works_on = ("uint8",)
    moves_pixels = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
        return self.module(images).to(torch.uint8)


def trained(device: str) -> list[torch.Tensor]:
    """The losses of a training loop, and the parameters at its end."""
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
    """Batches of a loop that changes the buffer after each."""
    module, read = Shift(device), []
    with gl.Loader(**OPTIONS | options(transforms=transforms(module), device=device)) as loader:
        for images, _ in loader:
            read.append(images.clone())
            module.amount += 1
    return read


def at_the_end(module: torch.nn.Module) -> list[Any]:
    return [*CHAIN, module]


def in_between(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], Shifted(module), *CHAIN[1:]]


@pytest.mark.parametrize("policy", DIRECTED)
def test_a_trainable_module_is_trained_as_on_the_cpu(policy):
    expected = trained("cpu")
    with simulated(policy) as cuda:
        found = [cuda.on_host(tensor) for tensor in trained("cuda:0")]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(found[-1], torch.full((3, 1, 1), 0.5))


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize("transforms", [at_the_end, in_between])
def test_buffers_that_the_loop_changes_in_place(policy, transforms):
    expected = shifted("cpu", transforms)
    with simulated(policy) as cuda:
        found = [cuda.on_host(tensor) for tensor in shifted("cuda:0", transforms)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("policy", DIRECTED)
def test_a_function_at_the_end_that_draws_from_torchs_generator(policy):
    def noisy(images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand_like(images)

    given = options(transforms=[*CHAIN, T.Lambda(noisy)])
    expected = on_cpu(given)
    with simulated(policy) as cuda, gl.Loader(**OPTIONS | given | {"device": "cuda"}) as loader:
        found = [cuda.on_host(images) for images, _ in [(images.clone(), labels) for images, labels in loader]]
    assert all(torch.equal(one, other) for one, (other, _) in zip(found, expected, strict=True))
