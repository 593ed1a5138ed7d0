"""A module of the user's own in the transforms, which the training loop changes while the loader runs ahead."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from simulated.machine import DIRECTED
from simulated.running import OPTIONS, assert_equal, on_cpu, on_device, run_loop, with_errors
from simulated.runtime import SimulatedCuda, simulated
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
    module, batches_read = Shift(device), []
    with gl.Loader(**OPTIONS | options(transforms=transforms(module), device=device)) as loader:
        for images, _ in loader:
            batches_read.append(images.clone())
            module.amount += 1
    return batches_read


def at_the_end(module: torch.nn.Module) -> list[Any]:
    return [*CHAIN, module]


def before_another_at_the_end(module: torch.nn.Module) -> list[Any]:
    return [*CHAIN, module, torch.nn.Identity()]


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


def in_the_class_of_a_transform(module: torch.nn.Module) -> list[Any]:
    class ShiftedByClass(ShiftedFromList):
        def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
            return module(images).to(torch.uint8)

    return [CHAIN[0], ShiftedByClass(torch.nn.ReLU()), *CHAIN[1:]]


def in_a_list(module: torch.nn.Module) -> list[Any]:
    return [CHAIN[0], ShiftedFromList(module), *CHAIN[1:]]


def collated(device: str) -> list[torch.Tensor]:
    """Batches that a `collate_fn` adds a tensor of the device to, which the loop changes after each."""
    amount, batches_read = torch.ones(1).to(device) * 3, []

    def collate_fn(samples: list[Any]) -> torch.Tensor:
        return torch.stack([image for image, _ in samples]) + amount

    with gl.Loader(**OPTIONS | options(collate_fn=collate_fn, device=device)) as loader:
        for images in loader:
            batches_read.append(images.clone())
            amount.add_(1)
    return batches_read


def with_a_constant(device: str, levels: bool) -> list[torch.Tensor]:
    """Two epochs of batches that a function in mid-chain adds a constant to, which was made just before each."""
    amount, batches_read = torch.zeros(1).to(device), []

    def added(images: torch.Tensor) -> torch.Tensor:
        return (images + amount).to(images.dtype)

    add_constant, normalize = T.Lambda(added), CHAIN[-1:]
    chain = (
        [CHAIN[0], add_constant, *normalize] if levels else [CHAIN[0], *normalize, add_constant, T.RandomErasing(0.0)]
    )
    with gl.Loader(**OPTIONS | options(transforms=chain, device=device)) as loader:
        for _ in range(2):
            amount.copy_(amount * 2 + 1)
            batches_read += [images.clone() for images, _ in loader]
    return batches_read


def collated_numbers(device: str) -> list[torch.Tensor]:
    """The same of samples without images, which are collated in this process, as there are transforms."""
    amount, batches_read = torch.ones(1).to(device) * 3, []

    def collate_fn(samples: list[Any]) -> torch.Tensor:
        return torch.stack(list(map(torch.as_tensor, samples))).to(device) + amount

    numbers = [np.full(5, number, np.float32) for number in range(24)]
    with gl.Loader(**OPTIONS | options(dataset=numbers, collate_fn=collate_fn, device=device)) as loader:
        for batch in loader:
            batches_read.append(batch.clone())
            amount.add_(1)
    return batches_read


class Shared:
    """Holds a tensor where gpuload does not look for it."""

    amount: torch.Tensor


def iterated_by_a_thread(device: str, cuda: SimulatedCuda | None = None) -> list[torch.Tensor]:
    """Batches of a thread with a stream of its own, and a tensor that it writes between `iter()`, which another thread
    called, and its first `next()`."""
    batches_read: list[torch.Tensor] = []
    added = T.Lambda(lambda images: (images + Shared.amount).to(images.dtype))
    with gl.Loader(**OPTIONS | options(transforms=[CHAIN[0], added, *CHAIN[1:]], device=device)) as loader:
        iterator = iter(loader)
        if cuda is not None:
            cuda.synchronize()  # else the thread's stream comes first, for want of anything else to do

        def fetch() -> None:
            with contextlib.ExitStack() as stack:
                if cuda is not None:
                    stack.enter_context(cuda.on(cuda.stream()))
                Shared.amount = torch.full((1,), 7.0, device=device)
                batches_read.extend(images.clone() for images, _ in iterator)

        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join()
    return batches_read


@pytest.mark.parametrize("policy", DIRECTED)
def test_function_sees_a_tensor_written_on_the_stream_of_the_iterating_thread(policy):
    expected = iterated_by_a_thread("cpu")
    with simulated(policy) as cuda:
        on_host = [cuda.on_host(tensor) for tensor in iterated_by_a_thread("cuda:0", cuda)]
    assert len(expected) == 6
    assert all(map(torch.equal, on_host, expected))


@pytest.mark.parametrize("policy", DIRECTED)
def test_error_of_a_collate_fn_comes_with_its_own_batch(policy):
    """The error comes with its own batch, and the batches after it are not lost."""

    def failing(samples: list[Any]) -> Any:
        if any(number == 9 for _, number in samples):
            raise ValueError("no batch with a 9")
        return torch.stack([image for image, _ in samples])

    loader_options = options(collate_fn=failing, chunk_size=1)
    run, expected = on_device(loader_options, policy, with_errors), on_cpu(loader_options, with_errors)
    assert [isinstance(value, str) for value in expected] == [number == 2 for number in range(6)]
    assert_equal(run.values, expected)
    assert run.unexpected_waits == []


def dropping_the_layout() -> dict[str, Any]:
    return options(collate_fn=lambda samples: torch.stack([image for image, _ in samples]).contiguous())


def test_collate_fn_that_drops_the_memory_format_warns_once():
    with pytest.warns(RuntimeWarning, match="no effect: the collate_fn makes") as caught:
        on_device(dropping_the_layout() | {"memory_format": "channels_last"}, "lazy")
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
def test_warning_turned_into_an_error_loses_no_batch_of_a_collate_fn():
    loader_options = dropping_the_layout()
    device_options = OPTIONS | loader_options | {"memory_format": "channels_last", "device": "cuda"}
    with simulated("side first") as cuda, gl.Loader(**device_options) as loader:
        iterator = iter(loader)
        with pytest.raises(RuntimeWarning, match="no effect: the collate_fn makes"):
            next(iterator)
        run = run_loop(iterator, cuda)
    assert_equal(run.values, on_cpu(loader_options))


@pytest.mark.parametrize("run_loop", [collated, collated_numbers])
@pytest.mark.parametrize("policy", DIRECTED)
def test_collate_fn_sees_the_changes_of_the_loop_to_a_tensor(policy, run_loop):
    expected = run_loop("cpu")
    with simulated(policy) as cuda:
        on_host = [cuda.on_host(tensor) for tensor in run_loop("cuda:0")]
    assert all(map(torch.equal, on_host, expected))


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize("levels", [True, False], ids=["levels", "floats"])
def test_function_in_mid_chain_sees_a_constant_written_before_the_epoch(policy, levels):
    expected = with_a_constant("cpu", levels)
    with simulated(policy) as cuda:
        on_host = [cuda.on_host(tensor) for tensor in with_a_constant("cuda:0", levels)]
    assert all(map(torch.equal, on_host, expected))


@pytest.mark.parametrize("policy", DIRECTED)
def test_module_at_the_end_is_trained_as_on_the_cpu(policy):
    expected = trained("cpu")
    with simulated(policy) as cuda:
        on_host = [cuda.on_host(tensor) for tensor in trained("cuda:0")]
    for tensor_, expected_tensor in zip(on_host, expected, strict=True):
        torch.testing.assert_close(tensor_, expected_tensor)
    assert not torch.equal(on_host[-1], torch.full((3, 1, 1), 0.5))


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize(
    "transforms",
    [
        at_the_end,
        before_another_at_the_end,
        in_between,
        in_a_closure,
        in_a_method,
        in_a_list,
        in_the_class_of_a_transform,
    ],
)
def test_module_sees_buffers_that_the_loop_changes_in_place(policy, transforms):
    expected = shifted("cpu", transforms)
    with simulated(policy) as cuda:
        on_host = [cuda.on_host(tensor) for tensor in shifted("cuda:0", transforms)]
    assert all(map(torch.equal, on_host, expected))


@lacking.on_a_gpu("the simulated device")
@pytest.mark.parametrize("policy", DIRECTED)
def test_function_at_the_end_draws_from_torchs_generator_as_on_the_cpu(policy):
    def noisy(images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand_like(images)

    loader_options = options(transforms=[*CHAIN, T.Lambda(noisy)])
    expected = on_cpu(loader_options)
    with simulated(policy) as cuda, gl.Loader(**OPTIONS | loader_options | {"device": "cuda"}) as loader:
        on_host = [cuda.on_host(images) for images, _ in [(images.clone(), labels) for images, labels in loader]]
    assert all(map(torch.equal, on_host, [images for images, _ in expected]))
