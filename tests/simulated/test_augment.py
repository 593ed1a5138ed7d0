"""`gl.Augment` on the simulated device: it gives the numbers of the CPU, works on the caller's current stream only,
never makes the host wait, and copies nothing but its input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from bits.running import in_batches
from helpers import lacking
from helpers.matrix import matrix
from helpers.peers import torchvision
from parity.usable import needs
from simulated.machine import HostWait
from simulated.running import assert_equal
from simulated.runtime import simulated
from simulated.samples import LARGE, noise_images
from torch.utils._pytree import tree_leaves, tree_map

import gpuload as gl
from gpuload import transforms as T

BACKENDS = ("torch", "kornia", "fused")
NORMALIZE = T.Normalize((0.5,) * 3, (0.5,) * 3)
CROPS = [T.RandomCrop(8), T.RandomHorizontalFlip(), NORMALIZE]
NOISY = [*CROPS[:2], T.ColorJitter(0.4), NORMALIZE, T.RandomErasing(1.0, value="random")]
RESIZED = [T.RandomShortestSize([8, 10]), NORMALIZE]
LABELS = torch.tensor([0, 1, 2, 1])
CUDA_0 = torch.device("cuda", 0)
Case = tuple[list[Any], Callable[[], Any], dict[str, Any]]


def images_of_four_sizes() -> list[torch.Tensor]:
    return [noise_images(1, (12 + row, 20 - row), seed=row)[0] for row in range(4)]


def sliced() -> torch.Tensor:
    return noise_images(size_hw=(20, 26))[:, :, 3:17, 5:23]


def clips() -> torch.Tensor:
    return noise_images(8).unflatten(0, (4, 2))


def cameras() -> dict[str, Any]:
    state, tasks = torch.arange(12.0).view(4, 3), ["lift"] * 4
    return {"top": noise_images(), "wrist": noise_images(4, (12, 13), seed=2), "state": state, "task": tasks}


def segmentation_batch() -> tuple[torch.Tensor, dict[str, Any]]:
    return noise_images(), {"mask": gl.Mask(noise_images(channels=1, seed=3)[:, 0] // 32)}


def segmentation_lists() -> tuple[list[torch.Tensor], list[gl.Mask]]:
    images = images_of_four_sizes()
    return images, [gl.Mask(image[0] // 32) for image in images]


def detection_batch() -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Make images with boxes, which stay on the CPU, and a different number of masks for each image."""
    targets = []
    for row in range(4):
        boxes = np.array([[corner, corner, corner + 9, corner + 7] for corner in range(1 + row % 3)], np.float32)
        masks = gl.Mask(noise_images(len(boxes), channels=1, seed=row)[:, 0] // 128)
        labels, crowds = torch.arange(len(boxes)), np.arange(len(boxes)) % 2
        targets.append({"boxes": gl.Boxes(boxes), "labels": labels, "iscrowd": crowds, "masks": masks})
    return noise_images(), targets


CASES: dict[str, Case] = {
    "uint8": (CROPS, noise_images, {}),
    "floats": (CROPS, lambda: noise_images().float() / 255, {}),
    "half precision": (CROPS, lambda: (noise_images().float() / 255).half(), {}),
    "channels_last": (CROPS, lambda: noise_images().to(memory_format=torch.channels_last), {}),
    "channels_last floats": (CROPS, lambda: (noise_images() / 255).to(memory_format=torch.channels_last), {}),
    "sliced": (CROPS, sliced, {"memory_format": "channels_last", "dtype": "float16"}),
    "list": (CROPS, images_of_four_sizes, {}),
    "clips": (CROPS, clips, {}),
    "cameras": (CROPS, cameras, {}),
    "masks": (CROPS, segmentation_batch, {}),
    "list of masks": (CROPS, segmentation_lists, {}),
    "boxes": ([T.RandomIoUCrop(), T.Resize((8, 8)), T.SanitizeBoundingBoxes(), NORMALIZE], detection_batch, {}),
    "mosaic": ([T.Mosaic((10, 12)), T.SanitizeBoundingBoxes(), NORMALIZE], detection_batch, {}),
    "MixUp": ([*CROPS, T.MixUp(num_classes=3)], lambda: (noise_images(), LABELS), {}),
    "MixUp of soft labels": ([*CROPS, T.MixUp(num_classes=3)], lambda: (noise_images(), torch.eye(3)[LABELS]), {}),
    "CutMix of clips": ([*CROPS, T.CutMix(num_classes=3)], lambda: {"video": clips(), "labels": LABELS}, {}),
    "ragged list": (RESIZED, images_of_four_sizes, {"ragged": "list"}),
    "ragged pad": (RESIZED, segmentation_lists, {"ragged": "pad", "pad_to": 16}),
    "views": ([T.MultiView([CROPS[:2], [T.CenterCrop(6)]]), NORMALIZE], noise_images, {}),
    "colours and noise": (NOISY, noise_images, {}),
    "a function": ([*CROPS, T.Lambda(torch.abs)], noise_images, {}),
}  # fmt: skip


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to the tensors and masks of a batch, but not to boxes."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, gl.Mask):
            return gl.Mask(function(torch.as_tensor(leaf.array)))
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(change, batch)


def as_list(batch: Any) -> list[Any]:
    """Return a batch in a list, with arrays as tensors."""
    return [tree_map(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)]


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(CUDA_0)


def augmented(case: Case, backend: str) -> Any:
    """Return the second batch on the CPU."""
    transforms, make, options = case
    augment = gl.Augment(transforms, backend=backend, device="cpu", **options)
    with in_batches():
        return [augment(make()) for _ in range(2)][1]


def augmented_on_device(
    case: Case, backend: str, policy: str = "lazy", place: Callable[[torch.Tensor], torch.Tensor] = to_device
) -> tuple[Any, list[HostWait]]:
    """Augment a second batch, which the stream has not computed yet, copy the result on that stream, and drop it. The
    first batch creates the stage.

    Returns:
        The copy, and the waits of the host.
    """
    transforms, make, options = case
    with simulated(policy) as cuda:
        stream = cuda.stream()
        with cuda.on(stream):
            augment = gl.Augment(transforms, backend=backend, device="cuda", **options)
            augment(map_tensors(make(), to_device))
            batch = map_tensors(make(), place)
            batch = map_tensors(batch, lambda tensor: tensor.clone() if tensor.is_cuda else tensor)
            cuda.waits.clear()
            result = augment(batch)
            del batch
            waits = list(cuda.waits)
            assert cuda.current_stream() == stream
            clones = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result)
            del result
        stream.synchronize()  # the operations of other streams do not run, unless this stream waits for an event there
        return tree_map(cuda.on_host, clones), waits


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_augment_on_the_device_equals_the_cpu_without_a_wait(backend, name):
    needs(backend)
    result, waits = augmented_on_device(CASES[name], backend)
    # On CUDA, Kornia resizes with another operator, which rounds differently.
    assert_equal(as_list(result), as_list(augmented(CASES[name], backend)), atol=1e-3 if backend == "kornia" else 0)
    assert waits == []


@pytest.mark.parametrize("name", ["uint8", "floats", "half precision", "channels_last", "list", "clips", "masks"])
def test_augment_copies_page_locked_memory_asynchronously(name):
    """The copy reads the memory when it runs, so the memory must still be allocated then."""
    result, waits = augmented_on_device(CASES[name], "torch", place=torch.Tensor.pin_memory)
    assert_equal(as_list(result), as_list(augmented(CASES[name], "torch")))
    assert waits == []


def test_augment_of_pageable_memory_waits_only_for_its_copy():
    result, waits = augmented_on_device(CASES["cameras"], "torch", place=lambda tensor: tensor)
    assert_equal([result], [augmented(CASES["cameras"], "torch")])
    assert {wait.function for wait in waits} == {"_to_device"}


def test_copy_paste_waits_only_for_the_numbers_of_remaining_instances():
    case = [T.CopyPaste(), T.RandomHorizontalFlip(), NORMALIZE], detection_batch, {}
    result, waits = augmented_on_device(case, "torch")
    assert_equal(as_list(result), as_list(augmented(case, "torch")))
    assert {wait.where for wait in waits} == {"combined_targets.py"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_augment_works_on_the_current_stream_if_streams_take_turns(backend):
    """Each batch is computed on the current stream, and read there without an event, although no other stream runs."""
    needs(backend)
    images, augment = noise_images(), gl.Augment(CROPS, backend=backend)
    with in_batches():
        expected = [augment(images) for _ in range(4)]
    augment = gl.Augment(CROPS, backend=backend)
    with simulated("lazy") as cuda:
        streams = cuda.stream(), cuda.default_stream()
        with cuda.on(streams[0]):
            batch = images.to(CUDA_0)
            clones = [augment(batch).clone()]
            for step in range(1, 4):
                with cuda.on(streams[step % 2]):
                    images_on_device = images.to(CUDA_0)
                    clones.append(augment(images_on_device).clone())
                    del images_on_device
        augmented_batches = []
        for step, leaf in enumerate(clones):
            streams[step % 2].synchronize()
            augmented_batches.append(cuda.on_host(leaf))
    assert_equal(augmented_batches, expected)


@matrix(backend=BACKENDS, device=[0, 1])
def test_augment_works_on_a_device_that_is_not_the_current_one(backend, device):
    needs(backend)
    images, augment = noise_images(), gl.Augment(CROPS, backend=backend)
    with in_batches():
        expected = augment(images)
    with simulated("lazy") as cuda, cuda.on(cuda.default_stream(1 - device)):
        current = cuda.current_stream()
        result = gl.Augment(CROPS, backend=backend)(images.to(torch.device("cuda", device)))
        assert result.device == torch.device("cuda", device)
        assert cuda.current_stream() == current
        assert_equal([cuda.on_host(result)], [expected])


def test_boxes_of_torchvision_on_a_device_raise():
    """The device is `meta`, which has no memory, since only the boxes' device is checked."""
    torchvision()
    from torchvision import tv_tensors

    boxes = torch.zeros(1, 4, device="meta")
    targets = [tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(14, 18))] * 4  # pyright: ignore
    text = "on meta, where boxes and keypoints have to be those of the entire batch; pass gpuload.Boxes"
    with pytest.raises(ValueError, match=text):
        gl.Augment(CROPS)(noise_images(), targets)


# -- copies and launches -----------------------------------------------------------------------------------------------

LARGE_BATCHES: dict[str, Callable[[], Any]] = {
    "uint8": lambda: noise_images(*LARGE),
    "floats": lambda: noise_images(*LARGE) / 255,
    "channels_last": lambda: noise_images(*LARGE).to(memory_format=torch.channels_last),
    "list": lambda: [noise_images(1, (120 + row, 160 - row))[0] for row in range(4)],
    "clips": lambda: noise_images(*LARGE).unflatten(0, (2, 2)),
}


def relative_memory(batch: Any, backend: str) -> float:
    """Return the peak memory that augmenting a second batch takes, as a multiple of the batch's size."""
    with simulated("eager") as cuda:
        augment = gl.Augment(CROPS, backend=backend)
        augment(map_tensors(noise_images(), to_device))
        batch_on_device = map_tensors(batch, to_device)
        nbytes = sum(image.nbytes for image in tree_leaves(batch_on_device))
        reserved = cuda.reserved_bytes()
        augment(batch_on_device)
        return (cuda.reserved_bytes() - reserved) / nbytes


@matrix(name=LARGE_BATCHES, backend=BACKENDS)
def test_augment_copies_images_at_most_once(name, backend):
    """Besides the copy, small crops of large images take little memory."""
    needs(backend)
    expected_copies = name != "channels_last" and (backend != "fused" or name == "floats")  # kernels read uint8
    assert expected_copies <= relative_memory(LARGE_BATCHES[name](), backend) < expected_copies + 0.1  # of the batch


CHAINS: dict[str, list[Any]] = {
    "classic": CROPS,
    "resized": [T.RandomResizedCrop(8), T.ColorJitter(0.4), NORMALIZE, T.RandomErasing(1.0)],
    "MixUp": [*CROPS, T.MixUp(num_classes=3)],
    "statistics": [T.RandomEqualize(0.5), T.CenterCrop(8), NORMALIZE],  # of entire images, before the crop
}


def count_operations(drive: Callable[[], None]) -> int:
    """Count the operations on the device, including kernels and copies."""
    with simulated("eager") as cuda, pytest.MonkeyPatch.context() as patch:
        issue, issued = cuda.machine.issue, []
        patch.setattr(cuda.machine, "issue", lambda *arguments: issued.append(arguments) or issue(*arguments))
        drive()
        return len(issued)


def by_loader(chain: str, backend: str, batches: int) -> None:
    images = noise_images(4 * batches).permute(0, 2, 3, 1).numpy()
    samples = [(gl.Image(image, layout="HWC"), 0) for image in images]
    with gl.Loader(samples, 4, transforms=CHAINS[chain], num_workers=0, device="cuda", backend=backend) as loader:
        assert len(list(loader)) == batches


def by_augment(chain: str, backend: str, batches: int) -> None:
    augment = gl.Augment(CHAINS[chain], backend=backend)
    for images in noise_images(4 * batches).to(CUDA_0).split(4):
        augment(images, torch.zeros(4, dtype=torch.int64))


@pytest.mark.slow
@lacking.skip_on_fake_cuda("the simulated device")
@matrix(chain=CHAINS, backend=BACKENDS)
def test_augment_issues_no_more_operations_than_a_loader(chain, backend):
    """A loader copies pixels and labels to the device, where `Augment` copies planes on the device."""
    needs(backend)
    augment_operations, loader_operations = (  # of two batches, without those of the first batch
        count_operations(partial(run, chain, backend, 3)) - count_operations(partial(run, chain, backend, 1))
        for run in (by_augment, by_loader)
    )
    assert 0 < augment_operations <= loader_operations
