"""`gl.Augment` on a GPU gives the batches of a Loader, on the caller's current stream, without a wait of the host."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.augment_batches import (
    CLASSIC,
    GEOMETRY,
    NORMALIZE,
    assert_equal_batches,
    image_batch,
    image_sample,
    ragged_images,
)
from torch.utils._pytree import tree_leaves, tree_map

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda

BACKENDS = ["torch", "kornia", "fused"]
CUDA_0 = torch.device("cuda", 0)
CROPS = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), NORMALIZE]
SLEEP_CYCLES = 20_000_000  # about ten milliseconds
Case = tuple[list[Any], Any, list[Any], dict[str, Any]]  # transforms, a batch, the batch as samples, options


def clips() -> torch.Tensor:
    return torch.stack([image_batch(2, seed=seed) for seed in range(6)])


def make_case(transforms: list[Any], batch: Any, **options: Any) -> Case:
    return transforms, batch, [image_sample(image) for image in batch], options


def with_targets(transforms: list[Any], batch: Any, targets: Any, **options: Any) -> Case:
    samples = [(image_sample(image), target) for image, target in zip(batch, targets, strict=True)]
    return transforms, (batch, targets), samples, options


def cameras_case() -> Case:
    top, wrist = image_batch(seed=1), image_batch(6, (30, 44), seed=2)
    samples = [{"top": image_sample(a), "wrist": image_sample(b)} for a, b in zip(top, wrist, strict=True)]
    return CLASSIC, {"top": top, "wrist": wrist}, samples, {}


def segmentation_case(**options: Any) -> Case:
    batch = ragged_images()
    return with_targets(
        [T.RandomShortestSize([20, 26]), NORMALIZE], batch, [gl.Mask(image[0]) for image in batch], **options
    )


def detection_case() -> Case:
    targets = []
    for row in range(6):
        boxes = np.array([[corner, corner, corner + 30, corner + 20] for corner in range(1 + row % 3)], np.float32)
        masks = gl.Mask(image_batch(len(boxes), channels=1, seed=row)[:, 0] // 128)
        targets.append({"boxes": gl.Boxes(boxes), "labels": torch.arange(len(boxes)), "masks": masks})
    transforms = [T.RandomIoUCrop(), T.Resize((24, 24)), T.SanitizeBoundingBoxes(), NORMALIZE]
    return with_targets(transforms, image_batch(), targets)


CASES = {
    "classic": lambda: make_case(CLASSIC, image_batch()),
    "geometry": lambda: make_case(GEOMETRY, image_batch()),
    "floats": lambda: make_case(CROPS, image_batch() / 255),
    "list": lambda: make_case(CLASSIC, ragged_images()),
    "clips": lambda: make_case(CLASSIC, clips(), dtype="float16", memory_format="channels_last"),
    "cameras": cameras_case,
    "masks": lambda: with_targets(CROPS, image_batch(), [gl.Mask(image[0] // 32) for image in image_batch()]),
    "masks, padded": lambda: segmentation_case(ragged="pad", pad_to=16),
    "masks, lists": lambda: segmentation_case(ragged="list"),
    "boxes": detection_case,
    "mixed": lambda: with_targets([*CROPS, T.MixUp(num_classes=3)], image_batch(), torch.tensor([0, 1, 2, 0, 1, 2])),
    "erased": lambda: make_case([*CROPS, T.RandomErasing(0.8, value="random")], image_batch()),
}


def move_batch(batch: Any) -> Any:
    """Move the images, masks and labels of a batch to the device; boxes stay on the CPU."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, gl.Mask):
            return gl.Mask(torch.as_tensor(leaf.array).to(CUDA_0))
        return leaf.to(CUDA_0) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(move, batch)


def on_host(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)


def read_late(batch: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(SLEEP_CYCLES)
    return batch.clone()


# -- the batches of a Loader -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CASES)
def test_augment_on_a_gpu_equals_a_loaders_batch_bit_for_bit(kind, backend):
    transforms, batch, samples, options = CASES[kind]()
    options["backend"] = backend
    with gl.Loader(samples, 6, transforms=transforms, num_workers=0, device="cuda", seed=7, **options) as loader:
        expected = next(iter(loader))
    augmented = gl.Augment(transforms, seed=7, **options)(move_batch(batch))
    assert {leaf.device for leaf in tree_leaves(augmented) if isinstance(leaf, torch.Tensor)} == {CUDA_0}
    expected = on_host(expected)
    assert_equal_batches(on_host(augmented), tuple(expected) if isinstance(augmented, tuple) else expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("locked", [False, True])
def test_augment_with_device_cuda_moves_cpu_batches_to_the_device(backend, locked):
    batch = image_batch()
    expected = gl.Augment(CLASSIC, backend=backend)(batch.to(CUDA_0))
    augment = gl.Augment(CLASSIC, backend=backend, device="cuda")
    augmented = augment({"images": batch.pin_memory() if locked else batch, "name": "x"})
    assert augmented["images"].device == CUDA_0
    assert augmented["name"] == "x"
    assert_equal_batches(augmented["images"].cpu(), expected.cpu())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "every second", "H×W×C"])
def test_augment_gives_the_same_batch_for_images_of_any_layout(backend, layout):
    batch = image_batch().to(CUDA_0)
    padded = torch.zeros(6, 3, 50, 140, dtype=torch.uint8, device=CUDA_0)
    padded[:, :, 3:43, 5:61] = batch
    spread = torch.zeros(6, 3, 40, 112, dtype=torch.uint8, device=CUDA_0)
    spread[..., ::2] = batch
    batches_by_layout = {
        "channels_last": batch.to(memory_format=torch.channels_last),
        "sliced": padded[:, :, 3:43, 5:61],
        "every second": spread[..., ::2],
        "H×W×C": batch.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    }
    augment = gl.Augment(CLASSIC, backend=backend)
    expected = augment(batch, positions=range(6))
    assert_equal_batches(augment(batches_by_layout[layout], positions=range(6)).cpu(), expected.cpu())


# -- streams, waits and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_augment_works_on_the_current_stream(backend):
    """The batch is computed late and read late on that stream, without an event."""
    batch, augment = image_batch().to(CUDA_0), gl.Augment(CLASSIC, backend=backend)
    expected = [augment(batch, positions=range(position, position + 6)).cpu() for position in range(2)]
    stream, augmented = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for position in range(2):
            late_batch = read_late(batch)
            augmented.append(read_late(augment(late_batch, positions=range(position, position + 6))))
            del late_batch
            assert torch.cuda.current_stream() == stream
    stream.synchronize()
    for images, expected_images in zip(augmented, expected, strict=True):
        assert_equal_batches(images.cpu(), expected_images)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CASES)
def test_no_batch_of_augment_waits_for_the_device(kind, backend):
    transforms, batch, _, options = CASES[kind]()
    augment, batch = gl.Augment(transforms, backend=backend, **options), move_batch(batch)
    augment(batch)  # creates the stage
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            augment(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_augment_does_not_wait_for_copies_of_page_locked_memory():
    augment, batch = gl.Augment(CLASSIC, device="cuda"), image_batch()
    expected = augment(batch, positions=range(6)).cpu()
    locked = batch.pin_memory()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(SLEEP_CYCLES)
        augmented = augment(locked, positions=range(6))
        del locked  # its memory must not be reused while it is read: the next line would overwrite it
        torch.full_like(batch, 9).pin_memory()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_batches(augmented.cpu(), expected)


def test_augmenting_many_batches_leaves_no_memory_on_the_device():
    augment, batch, allocated_bytes = gl.Augment(CLASSIC), image_batch(2).to(CUDA_0), []
    for _ in range(6):
        augment(batch)
        torch.cuda.synchronize()
        allocated_bytes.append(torch.cuda.memory_allocated())
    assert allocated_bytes[-1] == allocated_bytes[1]  # the first batch also allocates the stage's memory


def test_augment_works_on_two_devices_in_turn():
    if torch.cuda.device_count() < 2:
        lacking.skip("two GPUs")
    devices: list[int] = []

    def note_device(images: torch.Tensor) -> torch.Tensor:
        devices.append(torch.cuda.current_device())
        return images

    batch, augment = image_batch(), gl.Augment([*CLASSIC, T.Lambda(note_device)])
    expected = augment(batch.to(CUDA_0), positions=range(6)).cpu()
    for index in (1, 0, 1, 0):
        augmented = augment(batch.to(torch.device("cuda", index)), positions=range(6))
        assert augmented.device.index == index
        assert torch.cuda.current_device() == 0
        assert_equal_batches(augmented.cpu(), expected)
    assert devices == [0, 1, 0, 1, 0]  # a user's function runs with the device of its images as the current one
    assert "cuda:0" in str(augment.plan())


def test_plan_of_augment_compiles_the_stage_that_batches_need():
    augment = gl.Augment(CROPS, device="cuda")
    plan = augment.plan()
    augment(image_batch())
    assert augment.plan() == plan
    assert list(augment._compiled) == [CUDA_0]


# -- in a network ------------------------------------------------------------------------------------------------------


def test_augment_in_a_network_on_the_device_keeps_its_device_and_position():
    """`Augment` has no parameters, so `to()` changes neither where it works nor its position."""
    batch = image_batch()
    network = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten()).to("cuda")
    network(batch)
    assert network(batch).device.type == "cpu"
    state = network.state_dict()
    expected = network(batch.to(CUDA_0)).cpu()
    resumed = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten()).to("cuda")
    resumed.load_state_dict(tree_map(lambda leaf: leaf.to(CUDA_0), dict(state)))  # as map_location="cuda" makes it
    with pytest.warns(RuntimeWarning, match="the state was saved with the backend 'torch', but"):
        images = resumed(batch.to(CUDA_0))
    assert_equal_batches(images.cpu(), expected)


def test_network_after_augment_is_trained_and_autocast_does_not_change_augment():
    batch, augment = image_batch().to(CUDA_0), gl.Augment(CLASSIC)
    expected = augment(batch, positions=range(6))
    convolution = torch.nn.Conv2d(3, 2, 3).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        augmented = augment(batch, positions=range(6))
        convolution(augmented).sum().backward()
    assert_equal_batches(augmented.cpu(), expected.cpu())
    assert convolution.weight.grad is not None
    assert float(convolution.weight.grad.abs().sum()) > 0


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_augment_does_not_check_the_range_of_floats_on_the_device():
    out_of_range = torch.full((4, 3, 30, 30), 255.0)
    with pytest.raises(ValueError, match="contains floats from 255 to 255"):
        gl.Augment(CROPS, device="cuda")(out_of_range)
    assert gl.Augment(CROPS)(out_of_range.to(CUDA_0)).isfinite().all()


def test_positions_on_the_device_raise():
    with pytest.raises(ValueError, match="positions are on cuda:0; pass them on the CPU, to avoid waiting"):
        gl.Augment(CROPS)(image_batch().to(CUDA_0), positions=torch.arange(6, device=CUDA_0))


@pytest.mark.parametrize(
    ("device", "devices", "message"),
    [
        ("cpu", ["cuda:0"], "Augment works on cpu; move images and targets to one device, and pass"),
        ("cuda:0", ["cuda:1"], "batch is on cuda:1, but Augment works on cuda:0"),
        ("cuda", ["cuda:1"], "batch is on cuda:1, but Augment works on cuda"),
        (None, ["cuda:0", "cuda:1"], "batch[1] is on cuda:1, but batch[0] is on cuda:0"),
        (None, ["cpu", "cuda:0"], "batch[1] is on cuda:0, but batch[0] is on cpu"),
        (None, ["cuda:0", "cpu"], "batch[1] is on cpu, but batch[0] is on cuda:0"),
    ],
)  # fmt: skip
def test_images_on_another_device_than_augment_raise(device, devices, message):
    if "cuda:1" in devices and torch.cuda.device_count() < 2:
        lacking.skip("two GPUs")
    images = tuple(image_batch().to(device_of_images) for device_of_images in devices)
    with pytest.raises(ValueError, match=re.escape(message)):
        gl.Augment(CROPS, device=device)(*images)


def test_mask_on_the_device_with_images_on_the_cpu_raises():
    batch = image_batch()
    with pytest.raises(ValueError, match=re.escape("batch[1] is on cuda:0, but batch[0] is on cpu")):
        gl.Augment(CROPS)(batch, gl.Mask(batch[:, 0].to(CUDA_0)))
