"""Modules, functions and a `collate_fn` whose tensors the training loop changes while the loader runs ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import lacking
from simulated.loops import MODULE_LOOPS, with_tensor_of_thread
from simulated.machine import DIRECTED
from simulated.running import OPTIONS, assert_equal, assert_equal_on_device, on_cpu, on_device, run_loop, with_errors
from simulated.runtime import simulated
from simulated.samples import CHAIN, options
from simulated.user_modules import iterated_by_a_thread, trained

import gpuload as gl
from gpuload import transforms as T


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize("name", MODULE_LOOPS)
def test_changes_of_the_loop_reach_the_transforms_and_the_collate_fn(policy, name):
    with simulated(policy) as cuda:
        assert_equal_on_device(MODULE_LOOPS[name], cuda)


@pytest.mark.parametrize("policy", DIRECTED)
def test_function_sees_a_tensor_written_on_the_stream_of_the_iterating_thread(policy):
    assert len(iterated_by_a_thread("cpu")) == 6
    with simulated(policy) as cuda:
        with_tensor_of_thread(cuda)


@pytest.mark.parametrize("policy", DIRECTED)
def test_error_of_a_collate_fn_comes_with_its_own_batch(policy):
    def failing(samples: list[Any]) -> Any:
        if any(number == 9 for _, number in samples):
            raise ValueError("no batch with a 9")
        return torch.stack([image for image, _ in samples])

    loader_options = options(collate_fn=failing, chunk_size=1)
    run, expected = on_device(loader_options, policy, with_errors), on_cpu(loader_options, with_errors)
    assert [isinstance(value, str) for value in expected] == [step == 9 // 4 for step in range(6)]
    assert_equal(run.values, expected)
    assert run.unexpected_waits == []


def options_dropping_the_layout() -> dict[str, Any]:
    return options(collate_fn=lambda samples: torch.stack([image for image, _ in samples]).contiguous())


def test_collate_fn_that_drops_the_memory_format_warns_once():
    with pytest.warns(RuntimeWarning, match="no effect: the collate_fn makes") as caught:
        on_device(options_dropping_the_layout() | {"memory_format": "channels_last"}, "lazy")
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
def test_warning_turned_into_an_error_loses_no_batch_of_a_collate_fn():
    loader_options = options_dropping_the_layout()
    device_options = OPTIONS | loader_options | {"memory_format": "channels_last", "device": "cuda"}
    with simulated("side first") as cuda, gl.Loader(**device_options) as loader:
        iterator = iter(loader)
        with pytest.raises(RuntimeWarning, match="no effect: the collate_fn makes"):
            next(iterator)
        run = run_loop(iterator, cuda)
    assert_equal(run.values, on_cpu(loader_options))


@pytest.mark.parametrize("policy", DIRECTED)
def test_module_at_the_end_is_trained_as_on_the_cpu(policy):
    expected = trained("cpu")
    with simulated(policy) as cuda:
        on_host = [cuda.on_host(tensor) for tensor in trained("cuda:0")]
    for tensor_on_host, expected_tensor in zip(on_host, expected, strict=True):
        torch.testing.assert_close(tensor_on_host, expected_tensor)
    assert not torch.equal(on_host[-1], torch.full((3, 1, 1), 0.5)), "the parameter still has its initial value"


@lacking.skip_on_fake_cuda("the simulated device")
@pytest.mark.parametrize("policy", DIRECTED)
def test_function_at_the_end_draws_from_torchs_generator_as_on_the_cpu(policy):
    def noisy(images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand_like(images)

    loader_options = options(transforms=[*CHAIN, T.Lambda(noisy)])
    expected = on_cpu(loader_options)
    with simulated(policy) as cuda, gl.Loader(**OPTIONS | loader_options | {"device": "cuda"}) as loader:
        on_host = [cuda.on_host(images) for images, _ in [(images.clone(), labels) for images, labels in loader]]
    for images_on_host, (expected_images, _) in zip(on_host, expected, strict=True):
        assert torch.equal(images_on_host, expected_images)
