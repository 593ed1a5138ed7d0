"""The stand-ins for CUDA: they keep the order that CUDA guarantees, and break code that relies on more. Tests without
`ON_MODEL` run on the simulated device in `make test`, and on the fake CUDA runtime in `make test-cuda-fake`."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import lacking
from simulated.machine import DIRECTED, POLICIES
from simulated.runtime import simulated

ON_MODEL = lacking.skip_on_fake_cuda("the simulated device")  # marks tests that use the model's internals


def compute_results(device: str) -> list[torch.Tensor]:
    """Compute with views, changes in place, indices, numbers of the host and operations with several results."""
    numbers = torch.arange(12.0).reshape(3, 4).to(device)
    rows, columns = numbers.t()[1:], numbers[:, [0, 2]]
    rows += torch.tensor(1.0)
    numbers[numbers > 10] = 0
    ordered, order = torch.cat([rows @ numbers, columns], 1).sort(dim=1, descending=True)
    image = torch.nn.functional.conv2d(numbers[None, None], torch.ones(1, 1, 2, 2, device=device))
    indices = torch.arange(3, device=device)[:, None]
    return [numbers, columns, ordered.to(torch.int64), order, rows.sum(dim=0), image, numbers.half().double(), indices]


@pytest.mark.parametrize("policy", POLICIES)
def test_operations_give_torchs_results(policy):
    with simulated(policy) as cuda:
        results = compute_results("cuda:1")
        assert {tensor.device for tensor in results} == {torch.device("cuda", 1)}
        results = [cuda.on_host(tensor) for tensor in results]
    for result, expected in zip(results, compute_results("cpu"), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize(("waits", "expected"), [(False, 10 * 0), (True, 10 * 1)])
def test_streams_are_independent_without_an_event_and_in_order_with_one(policy, waits, expected):
    with simulated(policy) as cuda:
        side, consumer = torch.Stream("cuda:0", priority=-1), torch.accelerator.current_stream()
        number = torch.zeros(1, device="cuda:0")
        side.wait_stream(consumer)
        with cuda.on(side):
            number += 1
        if waits:
            consumer.wait_stream(side)
        assert cuda.on_host(number * 10).item() == expected


def test_event_completes_when_all_operations_before_it_have_run():
    with simulated("lazy") as cuda:
        stream = torch.accelerator.current_stream()
        number = torch.zeros(1, device="cuda:0") + 3
        event = stream.record_event()
        assert not event.query()
        event.synchronize()
        assert event.query()
        number += 1
        assert not stream.record_event().query()
        assert [wait.what for wait in cuda.waits] == ["event"]
        assert cuda.on_host(number).item() == 4


@pytest.mark.parametrize("recorded", [False, True])
def test_another_stream_reads_garbage_unless_the_tensor_was_recorded_on_it(recorded):
    with simulated("side first") as cuda:
        side, consumer = torch.Stream("cuda:0", priority=-1), torch.accelerator.current_stream()
        with cuda.on(side):
            tensor = torch.full((1000,), 3, device="cuda:0")
        consumer.wait_stream(side)
        sums = tensor + 1
        if recorded:
            tensor.record_stream(cuda.current_stream())
        del tensor
        with cuda.on(side):
            reused = torch.full((1000,), 5, device="cuda:0")
        assert (cuda.on_host(sums)[0].item() == 4) == recorded
        assert cuda.on_host(reused)[0].item() == 5


def test_freed_memory_is_reused_at_once_in_the_order_of_its_stream():
    with simulated("lazy") as cuda:
        tensor = torch.full((1000,), 3, device="cuda:0")
        address, double = tensor.data_ptr(), tensor * 2
        del tensor
        next_tensor = torch.full((1000,), 4, device="cuda:0")
        assert next_tensor.data_ptr() == address
        assert cuda.on_host(double).unique().tolist() == [6]


def test_view_keeps_its_memory_allocated():
    with simulated("eager") as cuda:
        view = torch.arange(1000, device="cuda:0")[10:12]
        gc.collect()
        torch.zeros(1000, dtype=torch.int64, device="cuda:0")
        assert cuda.on_host(view).tolist() == [10, 11]


# -- the host's memory ------------------------------------------------------------------------------------------------


@ON_MODEL
def test_page_locked_memory_is_read_when_the_copy_runs():
    with simulated("lazy") as cuda:
        pinned = torch.zeros(4).pin_memory()
        copied = pinned.to("cuda:0", non_blocking=True)
        pinned.fill_(7)
        assert cuda.on_host(copied).tolist() == [7.0] * 4
        assert cuda.waits == []


@ON_MODEL
def test_host_waits_for_copies_of_pageable_memory_and_for_values():
    with simulated("lazy") as cuda:
        numbers = torch.arange(3).to("cuda:0", non_blocking=True)
        torch.tensor([1, 2], device="cuda:0")
        numbers[[0, 2]]
        numbers.nonzero()
        numbers[numbers > 0]
        bool(numbers[0] == 0)
        numbers.cpu()
        assert [wait.what for wait in cuda.waits] == [
            "copy of pageable memory",
            "blocking copy",
            "blocking copy",
            "aten.nonzero.default",
            "aten.index.Tensor",
            "aten._local_scalar_dense.default",
            "copy to the host",
        ]
        assert {(wait.where, wait.function) for wait in cuda.waits} == {
            ("test_model.py", "test_host_waits_for_copies_of_pageable_memory_and_for_values")
        }


@ON_MODEL
def test_assigning_a_number_to_one_element_or_a_list_of_indices_waits():
    """The expected waits are those of torch 2.14's CUDA build, counted by a runtime."""
    with simulated("lazy") as cuda:
        numbers, expected = torch.zeros(3, 3, device="cuda:0"), torch.zeros(3, 3)
        mask, index = torch.zeros(3, 3, dtype=torch.bool, device="cuda:0"), torch.tensor([0, 2]).pin_memory()
        index, waits = index.to("cuda:0", non_blocking=True), []
        for change in (
            lambda tensor, indices: tensor.__setitem__((1, 1), 5),
            lambda tensor, indices: tensor[1, 2].fill_(6),
            lambda tensor, indices: tensor.__setitem__((slice(1), slice(2)), 7),
            lambda tensor, indices: tensor.__setitem__(mask if tensor is numbers else mask.inner, 8),
            lambda tensor, indices: tensor.__setitem__((slice(None), indices), 9),
        ):
            wait_count = len(cuda.waits)
            change(numbers, index)
            change(expected, torch.tensor([0, 2]))
            waits.append([wait.what for wait in cuda.waits[wait_count:]])
        assert waits == [["blocking copy"], [], [], [], ["blocking copy"]]
        assert torch.equal(cuda.on_host(numbers), expected)


@ON_MODEL
def test_copy_of_memory_that_was_unlocked_raises():
    with simulated("lazy") as cuda:
        host = torch.zeros(4)
        assert cuda.host.lock(host.data_ptr(), host.nbytes) == 0
        host.to("cuda:0", non_blocking=True)
        cuda.host.unlock(host.data_ptr())
        with pytest.raises(RuntimeError, match="no longer page-locked"):
            cuda.machine.synchronize()


@ON_MODEL
def test_error_of_an_operation_is_raised_by_the_next_wait():
    with simulated("lazy") as cuda:
        numbers = torch.zeros(3, dtype=torch.int64, device="cuda:0")
        torch.arange(3, device="cuda:0")[numbers + 5]
        with pytest.raises(RuntimeError, match="an operation on the device failed"):
            cuda.machine.synchronize()
