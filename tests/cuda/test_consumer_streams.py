"""A batch is passed to the stream that is current in `next()`, in any thread, and stays intact there."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from helpers import lacking
from helpers.labelled_images import Pictures
from torch import nn

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda

RECIPE = (T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.25,) * 3))
SLEEP_CYCLES = 20_000_000  # about ten milliseconds


@pytest.fixture
def loader() -> Iterator[gl.Loader]:
    with gl.Loader(Pictures(96), 8, transforms=RECIPE, num_workers=2, device="cuda") as loader_:
        yield loader_


@pytest.fixture
def expected(loader) -> list[float]:
    """Return the sum of each batch of epoch 0."""
    sums = []
    for images, _ in loader:
        sums.append(float(images.double().sum()))
    loader.set_epoch(0)
    return sums


def read_late(images: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(SLEEP_CYCLES)
    return images.double().sum()


def test_batch_stays_intact_while_the_consumers_stream_reads_it(loader, expected):
    """Each batch is read after a long sleep, while the loader reuses memory."""
    stream, sums = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for images, _ in loader:
            sums.append(read_late(images))
            del images
    stream.synchronize()
    assert [float(value) for value in sums] == expected


def test_batches_stay_intact_on_two_streams_that_take_turns(loader, expected):
    streams, sums, batches = [torch.cuda.Stream(), torch.cuda.Stream()], [], iter(loader)
    for step in range(len(loader)):
        with torch.cuda.stream(streams[step % 2]):
            images, _ = next(batches)
            sums.append(read_late(images))
            del images
    torch.cuda.synchronize()
    assert [float(value) for value in sums] == expected


def test_batches_stay_intact_in_another_thread(loader, expected):
    sums: list[torch.Tensor] = []

    def consume():
        with torch.cuda.stream(torch.cuda.Stream()):
            for images, _ in loader:
                sums.append(read_late(images))
                del images

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(timeout=60)
    torch.cuda.synchronize()
    assert [float(value) for value in sums] == expected


def test_next_keeps_the_current_stream_and_device(loader):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in loader:
            assert torch.cuda.current_stream() == stream
            assert torch.cuda.current_device() == stream.device_index


def test_loader_on_a_device_that_is_not_the_current_one_gives_equal_batches(expected):
    if torch.cuda.device_count() < 2:
        lacking.skip("two GPUs")
    assert torch.cuda.current_device() == 0
    with gl.Loader(Pictures(96), 8, transforms=RECIPE, num_workers=2, device="cuda:1") as loader:
        sums = []
        for images, labels in loader:
            assert torch.cuda.current_device() == 0
            assert images.device == labels.device == torch.device("cuda", 1)
            sums.append(float(images.double().sum()))
    assert sums == pytest.approx(expected, rel=1e-6)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).cuda()


def train(batches, module: nn.Module, apply) -> list[float]:
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.05), []
    for images, _ in batches:
        optimizer.zero_grad()
        loss = (apply(images) - 1).square().mean()
        loss.backward()
        torch.cuda._sleep(SLEEP_CYCLES // 4)  # the step lasts longer than the loader needs for the batches after it
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("autocast", [False, True])
def test_module_in_the_transforms_is_trained_like_one_in_the_loop(loader, autocast):
    """If weights change between forward and backward pass, autograd raises; stale weights give other losses."""
    module_in_transforms = network()
    module_in_loop = copy.deepcopy(module_in_transforms)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        expected = train(loader, module_in_loop, module_in_loop)
        transforms = [*RECIPE, module_in_transforms]
        with gl.Loader(Pictures(96), 8, transforms=transforms, num_workers=2, device="cuda") as loader_with_module:
            losses = train(loader_with_module, module_in_transforms, lambda images: images)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert len(set(losses)) == len(losses)


def test_module_in_the_transforms_sees_a_buffer_changed_in_place(loader):
    class Scale(nn.Module):
        factor: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.ones((), device="cuda"))

        def forward(self, images):
            return images * self.factor

    scale, sums = Scale(), []
    unscaled_sums = [float(images.double().sum()) for images, _ in loader]
    with gl.Loader(Pictures(96), 8, transforms=[*RECIPE, scale], num_workers=2, device="cuda") as loader_with_scale:
        for images, _ in loader_with_scale:
            sums.append(read_late(images))
            scale.factor *= 2
    assert [float(value) for value in sums] == [value * 2**step for step, value in enumerate(unscaled_sums)]
