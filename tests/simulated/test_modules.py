"""A module of the user's own in the transforms, which the training loop changes while the loader runs ahead."""

from __future__ import annotations

from typing import Any

import lacking
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


class Holder:
    """Has a module among other things, and a method that calls it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules = [{"shift": module}]

    def shift(self, images: torch.Tensor) -> torch.Tensor:
        return self.modules[0]["shift"](images).to(torch.uint8)


class ShiftedFromList(T.Custom):
    """Its module is in a list of its own."""

    works_on = ("uint8",)
    moves_pixels = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules = [module]

    def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
        return self.modules[0](images).to(torch.uint8)


def in_a_closure(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], T.Lambda(lambda images: module(images).to(torch.uint8)), *CHAIN[1:]]


def in_a_method(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], T.Lambda(Holder(module).shift), *CHAIN[1:]]


def in_a_list(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], ShiftedFromList(module), *CHAIN[1:]]


def collated(device: str) -> list[torch.Tensor]:
    """Batches that a `collate_fn` adds a tensor of the device to, which the loop changes after each."""
    amount, read = torch.ones(1).to(device) * 3, []

    def collate_fn(given: list[Any]) -> torch.Tensor:
        return torch.stack([image for image, _ in given]) + amount

    with gl.Loader(**OPTIONS | options(collate_fn=collate_fn, device=device)) as loader:
        for images in loader:
            read.append(images.clone())
            amount.add_(1)
    return read


def with_a_constant(device: str, levels: bool) -> list[torch.Tensor]:
    """Two epochs of batches that a function in mid-chain adds a constant to, which was made just before each."""
    amount, read = torch.zeros(1).to(device), []

    def added(images: torch.Tensor) -> torch.Tensor:
        return (images + amount).to(images.dtype)

    own, ends = T.Lambda(added), CHAIN[-1:]
    chain = [CHAIN[0], own, *ends] if levels else [CHAIN[0], *ends, own, T.RandomErasing(0.0)]
    with gl.Loader(**OPTIONS | options(transforms=chain, device=device)) as loader:
        for _ in range(2):
            amount.copy_(amount * 2 + 1)
            read += [images.clone() for images, _ in loader]
    return read


@pytest.mark.parametrize("policy", DIRECTED)
def test_a_collate_fn_sees_what_the_loop_has_made_of_a_tensor(policy):
    expected = collated("cpu")
    with simulated(policy) as cuda:
        found = [cuda.on_host(tensor) for tensor in collated("cuda:0")]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize("levels", [True, False], ids=["levels", "floats"])
def test_a_function_in_mid_chain_sees_a_constant_that_was_made_before_the_epoch(policy, levels):
    expected = with_a_constant("cpu", levels)
    with simulated(policy) as cuda:
        found = [cuda.on_host(tensor) for tensor in with_a_constant("cuda:0", levels)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("policy", DIRECTED)
def test_a_trainable_module_is_trained_as_on_the_cpu(policy):
    expected = trained("cpu")
    with simulated(policy) as cuda:
        found = [cuda.on_host(tensor) for tensor in trained("cuda:0")]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(found[-1], torch.full((3, 1, 1), 0.5))


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize("transforms", [at_the_end, in_between, in_a_closure, in_a_method, in_a_list])
def test_buffers_that_the_loop_changes_in_place(policy, transforms):
    expected = shifted("cpu", transforms)
    with simulated(policy) as cuda:
        found = [cuda.on_host(tensor) for tensor in shifted("cuda:0", transforms)]
    assert all(map(torch.equal, found, expected))


@lacking.on_a_gpu("the simulated device")
@pytest.mark.parametrize("policy", DIRECTED)
def test_a_function_at_the_end_that_draws_from_torchs_generator(policy):
    def noisy(images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand_like(images)

    given = options(transforms=[*CHAIN, T.Lambda(noisy)])
    expected = on_cpu(given)
    with simulated(policy) as cuda, gl.Loader(**OPTIONS | given | {"device": "cuda"}) as loader:
        found = [cuda.on_host(images) for images, _ in [(images.clone(), labels) for images, labels in loader]]
    assert all(torch.equal(one, other) for one, (other, _) in zip(found, expected, strict=True))
