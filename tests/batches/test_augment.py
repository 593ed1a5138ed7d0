"""`gl.Augment`: what a Loader makes of the same samples, for batches of any loader."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers.peers import torchvision
from torch.utils._pytree import tree_leaves, tree_structure

import gpuload as gl
from gpuload import transforms as T

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLASSIC = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4), NORMALIZE]
GEOMETRY = [T.RandomResizedCrop(24), T.RandomAffine(20), T.RandomVerticalFlip(), T.GaussianBlur(3)]
BACKENDS = ["torch", "kornia", "fused"]


def image_batch(count: int = 6, size_hw: tuple[int, int] = (40, 56), channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Return smooth images N×C×H×W, uint8."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(count, channels, 6, 7, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(rough, size_hw, mode="bicubic", align_corners=False)
    return smooth.round().clamp(0, 255).to(torch.uint8)


def ragged_images(count: int = 6) -> list[torch.Tensor]:
    return [image_batch(1, (30 + 3 * row, 52 - 2 * row), seed=row)[0] for row in range(count)]


def image_sample(image: torch.Tensor) -> gl.Image:
    """Return a tensor C×H×W, or a clip T×C×H×W, as a sample of a Loader has it."""
    return gl.Image(np.ascontiguousarray(image.movedim(-3, -1).numpy()), layout="HWC")


def load_batch(
    samples: list[Any], transforms: Any, *, epoch: int = 0, batch: int = 0, size: int | None = None, **options: Any
) -> Any:
    """Return a batch of a Loader over these samples, in their order."""
    with gl.Loader(
        samples, size or len(samples), transforms=transforms, num_workers=0, device="cpu", **options
    ) as loader:
        loader.set_epoch(epoch)
        return list(loader)[batch]


def assert_equal_batches(batch: Any, other: Any) -> None:
    leaves, others = tree_leaves(batch), tree_leaves(other)
    assert tree_structure(batch) == tree_structure(other)
    for leaf, expected in zip(leaves, others, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(leaf, expected, rtol=0, atol=0)
        else:
            assert leaf == expected


# -- the bits of a Loader ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transforms", [CLASSIC, GEOMETRY], ids=["classic", "geometry"])
def test_augment_of_images_has_the_bits_of_a_loader(backend, transforms):
    images = image_batch()
    expected = load_batch([image_sample(image) for image in images], transforms, epoch=3, seed=7, backend=backend)
    augment = gl.Augment(transforms, seed=7, backend=backend)
    assert_equal_batches(augment(images, epoch=3), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "flipped", "list"])
def test_augment_accepts_images_in_any_memory_layout(backend, layout):
    images = image_batch()
    canvas = torch.zeros(6, 3, 50, 70, dtype=torch.uint8)
    canvas[:, :, 3:43, 5:61] = images
    images_by_layout = {
        "channels_last": images.to(memory_format=torch.channels_last),
        "sliced": canvas[:, :, 3:43, 5:61],
        "flipped": torch.stack(list(images)[::-1]).flip(0),
        "list": [image.clone() for image in images],
    }
    augment = gl.Augment(CLASSIC, backend=backend)
    expected = augment(images, epoch=0, positions=range(6))
    assert_equal_batches(augment(images_by_layout[layout], positions=range(6)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_augment_of_floats_has_the_bits_of_a_loader(backend):
    transforms = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), NORMALIZE]
    images = image_batch().float() / 255
    expected = load_batch([image_sample(image) for image in images], transforms, backend=backend)
    assert_equal_batches(gl.Augment(transforms, backend=backend)(images), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_augment_converts_other_floats_to_float32(dtype):
    images = (image_batch().float() / 255).to(dtype)
    transforms = [T.RandomResizedCrop(24), NORMALIZE]
    assert_equal_batches(gl.Augment(transforms)(images), gl.Augment(transforms)(images.float()))


def test_augment_of_uint16_has_the_bits_of_a_loader():
    images = (image_batch().int() * 257).to(torch.uint16)
    transforms = [T.RandomResizedCrop(24), NORMALIZE]
    assert_equal_batches(
        gl.Augment(transforms)(images), load_batch([image_sample(image) for image in images], transforms)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_augment_of_a_list_of_sizes_has_the_bits_of_a_loader(backend):
    images = ragged_images()
    expected = load_batch([image_sample(image) for image in images], CLASSIC, backend=backend)
    assert_equal_batches(gl.Augment(CLASSIC, backend=backend)(images), expected)


@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_augment_with_ragged_returns_a_list_or_padded_images(ragged):
    images, transforms = ragged_images(), [T.RandomShortestSize([20, 26])]
    expected = load_batch([image_sample(image) for image in images], transforms, ragged=ragged)
    assert_equal_batches(gl.Augment(transforms, ragged=ragged)(images), expected)


def test_augment_with_pad_to_pads_to_multiples():
    images, transforms = ragged_images(), [T.RandomShortestSize([20, 26])]
    padded, sizes = gl.Augment(transforms, ragged="pad", pad_to=32)(images)
    assert {size % 32 for size in padded.shape[2:]} == {0}
    expected, expected_sizes = gl.Augment(transforms, ragged="pad")(images)
    assert_equal_batches(sizes, expected_sizes)
    height, width = expected.shape[2:]
    assert_equal_batches(padded[:, :, :height, :width], expected)
    assert padded.sum() == expected.sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_augment_draws_once_per_clip(backend):
    clips = torch.stack([image_batch(4, seed=seed) for seed in range(5)])
    expected = load_batch([image_sample(clip) for clip in clips], CLASSIC, backend=backend)
    augmented = gl.Augment(CLASSIC, backend=backend)(clips)
    assert augmented.shape == (5, 4, 3, 24, 24)
    assert_equal_batches(augmented, expected)


@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_augment_of_clips_with_ragged_has_the_bits_of_a_loader(ragged):
    clips, transforms = torch.stack([image_batch(4, seed=seed) for seed in range(5)]), [T.RandomShortestSize([20, 26])]
    expected = load_batch([image_sample(clip) for clip in clips], transforms, ragged=ragged)
    assert_equal_batches(gl.Augment(transforms, ragged=ragged)(clips), expected)


def test_augment_shares_draws_among_the_images_of_a_sample():
    top, wrist = image_batch(seed=1), image_batch(6, (30, 44), seed=2)
    samples = [{"top": image_sample(a), "wrist": image_sample(b)} for a, b in zip(top, wrist, strict=True)]
    expected = load_batch(samples, CLASSIC)
    state = torch.rand(6, 7)
    batch = {"top": top, "wrist": wrist, "state": state, "task": ["lift"] * 6, "index": 4}
    augmented = gl.Augment(CLASSIC)(batch)
    assert_equal_batches(augmented["top"], expected["top"])
    assert_equal_batches(augmented["wrist"], expected["wrist"])
    assert augmented["state"] is state
    assert (augmented["task"], augmented["index"]) == (["lift"] * 6, 4)
    assert list(augmented) == list(batch)
    assert_equal_batches(gl.Augment(CLASSIC)((top, wrist)), (expected["top"], expected["wrist"]))


def test_augment_with_multiview_returns_a_list_of_views():
    images = image_batch()
    transforms = [T.MultiView([[T.RandomResizedCrop(24)], [T.RandomResizedCrop(12)]]), NORMALIZE]
    expected = load_batch([image_sample(image) for image in images], transforms)
    assert_equal_batches(gl.Augment(transforms)(images), list(expected))


@pytest.mark.parametrize("mixing", [T.MixUp, T.CutMix])
def test_augment_with_mixing_makes_labels_soft(mixing):
    images, labels = image_batch(), torch.tensor([0, 1, 2, 0, 1, 2])
    transforms = [T.RandomResizedCrop(24), NORMALIZE, mixing(num_classes=3)]
    samples = [(image_sample(image), int(label)) for image, label in zip(images, labels, strict=True)]
    expected = load_batch(samples, transforms)
    augmented = gl.Augment(transforms)(images, labels)
    assert isinstance(augmented, tuple)
    assert_equal_batches(list(augmented), list(expected))
    assert_equal_batches(gl.Augment(transforms)({"pixel_values": images, "labels": labels})["labels"], expected[1])


def test_augment_mixes_clips_frame_by_frame():
    clips, labels = torch.stack([image_batch(3, seed=seed) for seed in range(4)]), torch.tensor([0, 1, 2, 0])
    transforms = [T.RandomResizedCrop(24), NORMALIZE, T.MixUp(num_classes=3)]
    samples = [(image_sample(clip), int(label)) for clip, label in zip(clips, labels, strict=True)]
    assert_equal_batches(list(gl.Augment(transforms)(clips, labels)), list(load_batch(samples, transforms)))


@pytest.mark.parametrize("clip", [False, True])
def test_augment_seeds_a_module_at_the_end_as_a_loader_does(clip):
    class Noise(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images + torch.rand_like(images)

    images = torch.stack([image_batch(2, seed=seed) for seed in range(4)]) if clip else image_batch(4)
    transforms = [T.RandomResizedCrop(24), NORMALIZE, Noise()]
    expected = load_batch([image_sample(image) for image in images], transforms)
    assert_equal_batches(gl.Augment(transforms)(images), expected)


def test_augment_calls_custom_transforms():
    class Negative(T.Custom):
        def apply(self, images, params):
            return 255 - images

    images = image_batch()
    transforms = [T.RandomResizedCrop(24), Negative(), T.RandomHorizontalFlip(), NORMALIZE]
    expected = load_batch([image_sample(image) for image in images], transforms)
    augment = gl.Augment(transforms)
    assert_equal_batches(augment(images), expected)
    assert_equal_batches(copy.deepcopy(augment)(images, positions=range(6)), expected)


# -- targets -----------------------------------------------------------------------------------------------------------

BOXES = [[[2, 3, 30, 20], [10, 5, 50, 39]], [[0, 0, 12, 39]], np.zeros((0, 4)), [[5, 6, 25, 30]] * 3]
DETECTION = [
    T.RandomHorizontalFlip(), T.RandomIoUCrop(), T.RandomCrop(20, pad_if_needed=True), T.SanitizeBoundingBoxes(),
    NORMALIZE,
]  # fmt: skip


def make_detection_batch() -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Return images, and for each boxes, labels, keypoints, and a mask for each box."""
    images, targets = image_batch(4), []
    for row, boxes in enumerate(BOXES):
        array = np.array(boxes, np.float32)
        masks = np.zeros((len(array), 40, 56), np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, array.astype(int), strict=True):
            mask[top:bottom, left:right] = 1
        labels = torch.arange(len(array)) + 10 * row
        targets.append({"boxes": gl.Boxes(array), "labels": labels, "masks": gl.Mask(masks), "name": f"image {row}"})
    return images, targets


def test_augment_moves_one_dict_of_targets_per_image():
    images, targets = make_detection_batch()
    samples = [(image_sample(image), target) for image, target in zip(images, targets, strict=True)]
    expected_images, expected = load_batch(samples, DETECTION)
    found_images, augmented = gl.Augment(DETECTION)(images, targets)
    assert_equal_batches(found_images, expected_images)
    assert sum(len(target["boxes"]) for target in augmented) < 6  # some were left out
    assert_equal_batches(augmented, expected)


def test_augment_moves_lists_of_boxes_labels_and_masks():
    images, targets = make_detection_batch()
    samples = [(image_sample(image), target) for image, target in zip(images, targets, strict=True)]
    _, expected = load_batch(samples, DETECTION)
    batch = {name: [target[name] for target in targets] for name in ("boxes", "labels", "masks")}
    _, augmented = gl.Augment(DETECTION)(images, batch)
    assert_equal_batches(augmented["boxes"], [target["boxes"] for target in expected])
    assert_equal_batches(augmented["labels"], [target["labels"] for target in expected])
    assert_equal_batches(augmented["masks"], [target["masks"] for target in expected])
    _, augmented = gl.Augment(DETECTION)(images, {name: tuple(entries) for name, entries in batch.items()})
    assert_equal_batches(augmented["labels"], tuple([target["labels"] for target in expected]))


def test_augment_accepts_torchvisions_boxes_and_masks():
    torchvision()
    from torchvision import tv_tensors

    images, targets = make_detection_batch()
    _, expected = gl.Augment(DETECTION)(images, targets)
    for target in targets:
        boxes, masks = torch.from_numpy(target["boxes"].array), torch.from_numpy(target["masks"].array)
        target["boxes"] = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(40, 56))
        target["masks"] = tv_tensors.Mask(masks)
    _, augmented = gl.Augment(DETECTION)(tv_tensors.Image(images), targets)
    assert_equal_batches(augmented, expected)


@pytest.mark.parametrize("form", ["one", "list", "torchvision"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_augment_moves_masks_in_any_form(backend, form):
    images, masks = image_batch(), image_batch(channels=1, seed=4)[:, 0] // 32
    samples = [(image_sample(image), gl.Mask(mask)) for image, mask in zip(images, masks, strict=True)]
    expected = load_batch(samples, GEOMETRY, backend=backend)
    if form == "torchvision":
        torchvision()
        from torchvision import tv_tensors

        target = tv_tensors.Mask(masks)
    else:
        target = gl.Mask(masks) if form == "one" else [gl.Mask(mask) for mask in masks]
    augmented = gl.Augment(GEOMETRY, backend=backend)(images, {"masks": target})
    assert_equal_batches(augmented[0], expected[0])
    assert_equal_batches(augmented[1]["masks"], expected[1])


@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_augment_returns_masks_in_the_form_of_their_images(ragged):
    images, transforms = ragged_images(4), [T.RandomShortestSize([20, 26])]
    masks = [gl.Mask(image[0] // 32) for image in images]
    samples = [(image_sample(image), mask) for image, mask in zip(images, masks, strict=True)]
    expected = load_batch(samples, transforms, ragged=ragged)
    assert_equal_batches(list(gl.Augment(transforms, ragged=ragged)(images, masks)), list(expected))


def test_augment_returns_keypoints_as_one_tensor():
    images, points = image_batch(), torch.rand(6, 5, 2) * 40
    samples = [(image_sample(image), gl.Keypoints(point)) for image, point in zip(images, points, strict=True)]
    expected = load_batch(samples, GEOMETRY[:3])
    _, augmented = gl.Augment(GEOMETRY[:3])(images, gl.Keypoints(points))
    assert_equal_batches(augmented, torch.stack(expected[1]))


def test_augment_with_multiview_returns_a_list_of_masks():
    images, masks = image_batch(), image_batch(channels=1, seed=4)[:, 0] // 32
    transforms = [T.MultiView([[T.RandomResizedCrop(24)], [T.RandomResizedCrop(12)]]), NORMALIZE]
    samples = [(image_sample(image), gl.Mask(mask)) for image, mask in zip(images, masks, strict=True)]
    assert_equal_batches(list(gl.Augment(transforms)(images, gl.Mask(masks))), list(load_batch(samples, transforms)))


def test_augment_with_multiview_returns_instance_masks_per_view():
    images, targets = make_detection_batch()
    batch = {name: [target[name] for target in targets] for name in ("boxes", "masks")}
    views = T.MultiView([[T.RandomResizedCrop(24)], [T.RandomResizedCrop(12)]])
    _, augmented = gl.Augment([views, NORMALIZE])(images, batch)
    assert [[tuple(mask.shape) for mask in view] for view in augmented["masks"]] == [
        [(len(boxes), size, size) for boxes in BOXES] for size in (24, 12)
    ]


@pytest.mark.parametrize("gathering", [T.Mosaic((40, 56)), T.CopyPaste()], ids=["Mosaic", "CopyPaste"])
def test_augment_combines_samples_as_a_loader_does(gathering):
    images, targets = make_detection_batch()
    transforms = [T.RandomHorizontalFlip(), gathering, T.Resize((24, 32)), NORMALIZE]
    for target in targets:
        del target["name"]
    samples = [(image_sample(image), target) for image, target in zip(images, targets, strict=True)]
    assert_equal_batches(list(gl.Augment(transforms)(images, targets)), list(load_batch(samples, transforms)))


# -- draws -------------------------------------------------------------------------------------------------------------


def test_augment_counts_positions_from_batch_to_batch():
    images = image_batch(12)
    samples = [image_sample(image) for image in images]
    augment = gl.Augment(CLASSIC, seed=5)
    for batch in range(3):
        expected = load_batch(samples, CLASSIC, seed=5, batch=batch, size=4)
        assert_equal_batches(augment(images[4 * batch : 4 * batch + 4]), expected)


def test_augment_on_ranks_uses_separate_positions(monkeypatch):
    images = image_batch(8)
    single = gl.Augment(CLASSIC)
    first, second = single(images), single(images)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        augment, rows = gl.Augment(CLASSIC), slice(4 * rank, 4 * rank + 4)
        assert_equal_batches(augment(images[rows]), first[rows])
        assert_equal_batches(augment(images[rows]), second[rows])


def test_augment_with_positions_does_not_depend_on_the_batch():
    images = image_batch()
    augment = gl.Augment(CLASSIC)
    expected = augment(images, positions=np.arange(10, 16), epoch=2)
    assert_equal_batches(augment(images[3:], positions=torch.arange(13, 16), epoch=2), expected[3:])
    assert_equal_batches(augment(images), augment(images, positions=range(6)))  # they did not count


def test_resumed_augment_draws_the_same():
    images = image_batch()
    network = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten())
    network[0].set_epoch(2)
    network(images)
    state = pickle.loads(pickle.dumps(network.state_dict()))
    expected = network(images)
    resumed = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten())
    resumed.load_state_dict(state)
    resumed[0].set_epoch(2)  # as a loop does before each epoch
    assert resumed[0].epoch == 2
    assert_equal_batches(resumed(images), expected)


@pytest.mark.parametrize("backend", ["torch", "kornia"])
def test_resumed_augment_with_another_backend_warns_at_its_first_batch(backend):
    images, saved = image_batch(), gl.Augment(CLASSIC, backend="torch")
    saved(images)
    resumed = gl.Augment(CLASSIC, backend=backend)
    resumed.load_state_dict(saved.state_dict())
    assert torch.equal(resumed.get_extra_state(), saved.get_extra_state())  # saved again before the first batch
    if backend == "kornia":
        with pytest.warns(
            RuntimeWarning, match="saved with the backend 'torch', but the batches .* by 'kornia'"
        ) as caught:
            resumed(images)
        assert caught[0].filename == __file__
    resumed(images)  # warnings are errors
    assert int(resumed.get_extra_state()[2]) == ("torch", "kornia").index(backend)


@pytest.mark.parametrize("entries", [2, 3])
def test_state_of_an_augment_without_a_backend_loads_silently(entries):
    """From an earlier version, and from before the first batch."""
    augment = gl.Augment(CLASSIC)
    state = augment.get_extra_state()
    assert state.tolist() == [0, 0, -1]
    augment.load_state_dict({"_extra_state": state[:entries]})
    augment(image_batch())


def test_set_epoch_of_a_resumed_augment_keeps_the_position_once():
    images, saved = image_batch(), gl.Augment(CLASSIC)
    saved.set_epoch(2)
    first = saved(images)
    for epochs in ([3], [2, 2], [3, 2]):
        resumed = gl.Augment(CLASSIC)
        resumed.load_state_dict(saved.state_dict())
        for epoch in epochs:
            resumed.set_epoch(epoch)
        expected = first if epochs[-1] == 2 else gl.Augment(CLASSIC)(images, epoch=3, positions=range(6))
        assert_equal_batches(resumed(images), expected)


def test_set_epoch_restarts_at_position_0():
    images, augment = image_batch(), gl.Augment(CLASSIC)
    first = augment(images)
    augment.set_epoch(1)
    assert not torch.equal(augment(images), first)
    augment.set_epoch(0)
    assert_equal_batches(augment(images), first)
    augment.set_epoch(0)
    assert_equal_batches(augment(images), first)


@pytest.mark.parametrize("scalar", [torch.tensor(3), np.array(3)])
def test_augment_passes_scalars_through(scalar):
    images, augment = image_batch(4), gl.Augment(CLASSIC)
    assert augment({"image": images, "step": scalar})["step"] is scalar
    assert augment({"image": images, "step": scalar, "target": gl.Mask(images[:, 0])})["step"] is scalar


def test_augment_in_two_threads_runs_one_batch_at_a_time():
    """Without this, both would write into the memory that stages keep, and results of one would be the other's."""
    images, threads, returned = image_batch(), [], []

    def start_another(batch: torch.Tensor) -> torch.Tensor:
        if not threads:
            threads.append(threading.Thread(target=lambda: returned.append(augment(images))))
            threads[0].start()
            threads[0].join(0.2)
            assert not returned
        return batch

    augment = gl.Augment([*CLASSIC, T.Lambda(start_another)])
    first = augment(images)
    threads[0].join()
    assert_equal_batches(first, augment(images, positions=range(6)))
    assert_equal_batches(returned[0], augment(images, positions=range(6, 12)))


# -- a module among modules --------------------------------------------------------------------------------------------


def test_augment_has_no_parameters_and_ignores_eval():
    augment = gl.Augment(CLASSIC)
    assert not [*augment.parameters(), *augment.buffers()]
    assert "RandomResizedCrop(size=(24, 24))" in repr(augment)
    images = image_batch()
    assert_equal_batches(augment.eval().to(torch.float64)(images), gl.Augment(CLASSIC)(images))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copied_augment_continues_as_the_original(duplicate):
    images, augment = image_batch(), gl.Augment(CLASSIC)
    augment(images)
    assert_equal_batches(duplicate(augment)(images), augment(images))


@pytest.mark.parametrize(
    "context",
    [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference", "autocast"],
)
def test_augment_within_a_torch_context_returns_ordinary_tensors(context):
    images = image_batch()
    expected = gl.Augment(CLASSIC)(images)
    with context:
        augmented = gl.Augment(CLASSIC)(images.clone())
    assert not augmented.is_inference()
    assert_equal_batches(augmented, expected)


def test_module_after_an_augment_receives_gradients():
    network = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Conv2d(3, 2, 3))
    network(image_batch()).sum().backward()
    assert network[1].weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_compiled_augment_equals_eager():
    images = image_batch()
    compiled = torch.compile(torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten()), backend="eager")
    eager = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten())
    for _ in range(3):
        assert_equal_batches(compiled(images), eager(images))


@pytest.mark.slow
def test_augment_within_a_distributed_model_counts_positions(tmp_path):
    images = image_batch()
    place = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        network = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Conv2d(3, 2, 3))
        parallel = torch.nn.parallel.DistributedDataParallel(network)
        parallel(images).sum().backward()
        assert_equal_batches(network[0](images), gl.Augment(CLASSIC)(images, positions=range(6, 12)))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("torch", "images: copied once, to N×H×W×C, unless channels_last"),
        ("fused", "images: read in place, if uint8"),
    ],
)
def test_plan_of_an_augment_says_how_images_are_read(backend, how):
    assert how in str(gl.Augment(CLASSIC, backend=backend, device="cpu").plan())


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.full((4, 3, 40, 56), 255.0), "batch contains floats from 255 to 255, but float images must be in "
         "0 … 1; pass pixel values 0 … 255 as uint8, normalize with T.Normalize in the transforms instead of before"),
        (torch.full((4, 3, 40, 56), torch.nan), "batch contains NaN, but float images must be in 0 … 1; leave out such "
         "samples, or replace NaN with torch.nan_to_num()"),
        ([torch.zeros(1, 1, 2), torch.tensor([[[0.5, torch.nan]]])], "batch[1] contains NaN, but"),
        (torch.zeros(4, 1, 40, 56, dtype=torch.uint8), "Normalize has 3 means and stds, but image 0 has 1 channel"),
        ([torch.zeros(3, 40, 56), torch.zeros(1, 40, 56)], "the images of a batch must have the same dtype and "
         "number of channels, but batch[0] is float32 of shape (3, 40, 56) and batch[1] is float32 of shape "
         "(1, 40, 56) (C×H×W); convert them first"),
        (torch.zeros(4, 3, 40, 56, requires_grad=True), "batch requires gradients, but augmentation is not "
         "differentiable; pass batch.detach(), or call it within torch.no_grad()"),
    ],
)  # fmt: skip
def test_augment_of_unusable_images_raises(images, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gl.Augment([T.RandomResizedCrop(24), NORMALIZE])(images)


def test_augment_warns_once_of_a_probable_target_unless_images_are_selected():
    batch = {"image": torch.rand(2, 3, 8, 8), "heat": torch.rand(2, 2, 8, 8)}
    augment = gl.Augment([T.RandomHorizontalFlip(1)])
    with pytest.warns(
        RuntimeWarning, match=re.escape('batch["heat"], float32 tensor 2×2×8×8, is transformed')
    ) as caught:
        augment(batch)
    assert caught[0].filename == __file__
    flipped = augment(batch)
    assert torch.equal(flipped["heat"], batch["heat"].flip(-1))
    for selecting in (
        gl.Augment([T.RandomHorizontalFlip(1)], images=("image",)),
        pickle.loads(pickle.dumps(augment_with_selected_images())),
    ):
        selected = selecting(batch)
        assert selected["heat"] is batch["heat"]
        assert torch.equal(selected["image"], flipped["image"])


def augment_with_selected_images() -> gl.Augment:
    return gl.Augment([T.RandomHorizontalFlip(1)], images=["image"])


@pytest.mark.parametrize("images", ["image", [0]])
def test_augment_with_images_that_are_not_names_raises(images):
    with pytest.raises(TypeError, match=r"^images must be a (list of strings|string), got"):
        gl.Augment([], images=images)


def test_augment_within_no_grad_accepts_images_that_require_gradients():
    images = torch.zeros(2, 3, 40, 56, requires_grad=True)
    with torch.no_grad():
        assert not gl.Augment([T.RandomResizedCrop(24)])(images).requires_grad


def test_augment_of_a_mask_of_another_size_raises():
    message = (
        "image 0 of the batch: a mask must have the size of its image, 40×56 (height × width), but the mask sample[1] "
        "has 20×56; return the mask of this image, at the size of the image"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        gl.Augment(CLASSIC)(image_batch(4), gl.Mask(np.zeros((4, 20, 56))))


def test_augment_warns_once_of_targets_that_stay_unchanged():
    images, masks = image_batch(4), torch.zeros(4, 40, 56, dtype=torch.int64)
    augment = gl.Augment(GEOMETRY)
    with pytest.warns(RuntimeWarning, match="stays unchanged while the transforms move the image's pixels") as warnings:
        augment(images, {"mask": masks})
    assert warnings[0].filename == __file__
    augment(images, {"mask": masks})  # a second warning would be an error


def test_augment_warns_once_of_a_custom_transform_without_apply_masks():
    class Shift(T.Custom):
        def apply(self, images, params):
            return images

    images, augment = image_batch(4), gl.Augment([Shift()])
    with pytest.warns(RuntimeWarning, match="Shift has no apply_masks, so masks are not moved"):
        augment(images, gl.Mask(images[:, 0]))
    augment(images, gl.Mask(images[:, 0]))  # a second warning would be an error


def test_augment_with_cutmix_of_an_odd_batch_raises():
    message = "CutMix needs images in groups of 2, but this batch has 5; pass a multiple of 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        gl.Augment([T.Resize((9, 9)), NORMALIZE, T.CutMix(num_classes=3)])(image_batch(5), torch.zeros(5))


def test_augment_with_temporal_subsampling_raises():
    with pytest.raises(ValueError, match="UniformTemporalSubsample chooses frames before they are decoded"):
        gl.Augment([T.UniformTemporalSubsample(4)])


@pytest.mark.parametrize("positions", [range(3), [0.5] * 4, [-1, 0, 1, 2], [2**63] * 4, [[0, 1, 2, 3]]])
def test_augment_with_wrong_positions_raises(positions):
    with pytest.raises(ValueError, match="positions must be 4 integers of at least 0, one per image, got"):
        gl.Augment(CLASSIC)(image_batch(4), positions=positions)


def test_augment_of_an_image_smaller_than_the_crop_names_it():
    images = [*ragged_images(3), torch.zeros(3, 10, 10, dtype=torch.uint8)]
    with pytest.raises(ValueError, match=re.escape("image 3 of the batch: ")):
        gl.Augment([T.RandomCrop(24)])(images)


def test_augment_within_a_worker_of_a_dataloader_needs_positions(monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", object)
    images, augment = image_batch(), gl.Augment(CLASSIC)
    message = (
        "Augment counts positions in its own process, so it would draw the same values in each worker of a DataLoader; "
        "call it on the batches in the training loop, or pass positions=…"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        augment(images)
    augment(images, positions=range(6))


def test_augment_without_arguments_raises():
    with pytest.raises(TypeError, match="there are no images in"):
        gl.Augment(CLASSIC)()


def test_augment_with_mosaic_of_three_images_raises():
    images, targets = make_detection_batch()
    message = "Mosaic needs images in groups of 4, but this batch has 3; pass a multiple of 4"
    with pytest.raises(ValueError, match=re.escape(message)):
        gl.Augment([T.Mosaic((40, 56))])(images[:3], targets[:3])


def test_load_state_dict_of_an_augment_with_a_wrong_state_raises():
    message = (
        "the state of an Augment must be a tensor of shape (3,), the epoch, the next position and the backend, got 3"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        gl.Augment(CLASSIC).load_state_dict({"_extra_state": 3})


def test_augment_moves_masks_with_a_channel_axis():
    """Kornia, torchgeo and segmentation-models-pytorch use such masks."""
    augment, images = gl.Augment([T.RandomHorizontalFlip(1)]), torch.zeros(2, 3, 8, 9, dtype=torch.uint8)
    masks = torch.randint(0, 9, (2, 1, 8, 9))
    assert torch.equal(augment(images, gl.Mask(masks))[1], masks.flip(-1))
    for augmented in (
        augment(images, [gl.Mask(masks)] * 2)[1],
        [a["a"] for a in augment(images, [{"a": gl.Mask(masks)}] * 2)[1]],
    ):
        assert all(torch.equal(mask, masks[:, 0].flip(-1)) for mask in augmented)
