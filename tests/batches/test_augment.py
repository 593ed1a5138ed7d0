"""`gl.Augment` for batches of any loader, compared with a Loader of the same samples."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers.augment_batches import (
    CLASSIC,
    GEOMETRY,
    NORMALIZE,
    assert_equal_batches,
    image_batch,
    image_sample,
    ragged_images,
)
from helpers.peers import torchvision

import gpuload as gl
from gpuload import transforms as T

BACKENDS = ["torch", "kornia", "fused"]


def load_batch(
    samples: list[Any], transforms: Any, *, epoch: int = 0, batch: int = 0, size: int | None = None, **options: Any
) -> Any:
    """Return a batch of a Loader over these samples in their order."""
    options |= {"transforms": transforms, "num_workers": 0, "device": "cpu"}
    with gl.Loader(samples, size or len(samples), **options) as loader:
        loader.set_epoch(epoch)
        return list(loader)[batch]


def make_samples(images: Any, *targets: Any) -> list[Any]:
    """Return samples of an image, or of an image and its entry of each of the targets."""
    rows = zip(images, *targets, strict=True)
    return [(image_sample(image), *row) if row else image_sample(image) for image, *row in rows]


def assert_equals_a_loader(transforms: Any, images: Any, *targets: Any, **options: Any) -> None:
    expected = load_batch(make_samples(images, *targets), transforms, **options)
    augmented = gl.Augment(transforms, **options)(images, *targets)
    pair = [list(batch) if isinstance(batch, tuple) else batch for batch in (augmented, expected)]
    assert_equal_batches(*pair)


# -- equality with a Loader -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transforms", [CLASSIC, GEOMETRY], ids=["classic", "geometry"])
def test_augment_with_a_seed_and_an_epoch_equals_a_loader_bit_for_bit(backend, transforms):
    images = image_batch()
    expected = load_batch(make_samples(images), transforms, epoch=3, seed=7, backend=backend)
    augment = gl.Augment(transforms, seed=7, backend=backend)
    assert_equal_batches(augment(images, epoch=3), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "every second", "list"])
def test_augment_accepts_images_in_any_memory_layout(backend, layout):
    images = image_batch()
    canvas = torch.zeros(6, 3, 50, 70, dtype=torch.uint8)
    canvas[:, :, 3:43, 5:61] = images
    images_by_layout = {
        "channels_last": images.to(memory_format=torch.channels_last),
        "sliced": canvas[:, :, 3:43, 5:61],
        "every second": images.repeat_interleave(2, dim=3)[..., ::2],
        "list": [image.clone() for image in images],
    }
    augment = gl.Augment(CLASSIC, backend=backend)
    expected = augment(images, epoch=0, positions=range(6))
    assert_equal_batches(augment(images_by_layout[layout], positions=range(6)), expected)


CROPS = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), NORMALIZE]
SIZES = [T.RandomShortestSize([20, 26])]
VIEWS = [T.MultiView([[T.RandomResizedCrop(24)], [T.RandomResizedCrop(12)]]), NORMALIZE]


def make_clips(count: int = 5, frames: int = 4) -> torch.Tensor:
    return torch.stack([image_batch(frames, seed=seed) for seed in range(count)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("transforms", "images"),
    [(CROPS, image_batch().float() / 255), (CLASSIC, ragged_images()), (CLASSIC, make_clips())],
    ids=["floats", "list of different sizes", "clips"],
)
def test_augment_equals_a_loader_bit_for_bit_on_each_backend(transforms, images, backend):
    assert_equals_a_loader(transforms, images, backend=backend)


BOXES = [[[2, 3, 30, 20], [10, 5, 50, 39]], [[0, 0, 12, 39]], np.zeros((0, 4)), [[5, 6, 25, 30]] * 3]
DETECTION = [
    T.RandomHorizontalFlip(), T.RandomIoUCrop(), T.RandomCrop(20, pad_if_needed=True), T.SanitizeBoundingBoxes(),
    NORMALIZE,
]  # fmt: skip


def make_detection_batch() -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Return images with boxes, labels and a mask for each box."""
    images, targets = image_batch(4), []
    for row, boxes in enumerate(BOXES):
        array = np.array(boxes, np.float32)
        masks = np.zeros((len(array), 40, 56), np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, array.astype(int), strict=True):
            mask[top:bottom, left:right] = 1
        labels = torch.arange(len(array)) + 10 * row
        targets.append({"boxes": gl.Boxes(array), "labels": labels, "masks": gl.Mask(masks)})
    return images, targets


def add_names(images: torch.Tensor, targets: list[dict[str, Any]]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    return images, [{**target, "name": f"image {row}"} for row, target in enumerate(targets)]


def make_combining(transform: T.Transform) -> list[T.Transform]:
    return [T.RandomHorizontalFlip(), transform, T.Resize((24, 32)), NORMALIZE]


class Noise(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand_like(images)


class Negative(T.Custom):
    def apply(self, images, params):
        return 255 - images


NEGATIVE = [T.RandomResizedCrop(24), Negative(), T.RandomHorizontalFlip(), NORMALIZE]
RAGGED_MASKS = [gl.Mask(image[0] // 32) for image in ragged_images()]
CASES = {
    "uint16": (CROPS, [(image_batch().int() * 257).to(torch.uint16)], {}),
    "ragged list": (SIZES, [ragged_images(), RAGGED_MASKS], {"ragged": "list"}),
    "ragged pad": (SIZES, [ragged_images(), RAGGED_MASKS], {"ragged": "pad"}),
    "ragged pad to multiples": (SIZES, [ragged_images()], {"ragged": "pad", "pad_to": 32}),
    "ragged list of clips": (SIZES, [make_clips()], {"ragged": "list"}),
    "ragged pad of clips": (SIZES, [make_clips()], {"ragged": "pad"}),
    "views": (VIEWS, [image_batch()], {}),
    "custom": (NEGATIVE, [image_batch()], {}),
    "module": ([*CROPS, Noise()], [image_batch(4)], {}),
    "module of clips": ([*CROPS, Noise()], [make_clips(4, 2)], {}),
    "mixed clips": ([*CROPS, T.MixUp(num_classes=3)], [make_clips(4, 3), torch.tensor([0, 1, 2, 0])], {}),
    "one dict of targets per image": (DETECTION, add_names(*make_detection_batch()), {}),
    "Mosaic": (make_combining(T.Mosaic((40, 56))), make_detection_batch(), {}),
    "CopyPaste": (make_combining(T.CopyPaste()), make_detection_batch(), {}),
}


@pytest.mark.parametrize(("transforms", "batch", "options"), CASES.values(), ids=CASES)
def test_augment_equals_a_loader_bit_for_bit(transforms, batch, options):
    assert_equals_a_loader(transforms, *batch, **options)


def test_copied_augment_calls_custom_transforms():
    images, augment = image_batch(), gl.Augment(NEGATIVE)
    assert_equal_batches(copy.deepcopy(augment)(images), augment(images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_augment_converts_half_precision_and_float64_to_float32(dtype):
    images = (image_batch().float() / 255).to(dtype)
    transforms = [T.RandomResizedCrop(24), NORMALIZE]
    assert_equal_batches(gl.Augment(transforms)(images), gl.Augment(transforms)(images.float()))


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


@pytest.mark.parametrize("mixing", [T.MixUp, T.CutMix])
def test_augment_with_mixing_makes_labels_soft(mixing):
    images, labels = image_batch(), torch.tensor([0, 1, 2, 0, 1, 2])
    transforms = [T.RandomResizedCrop(24), NORMALIZE, mixing(num_classes=3)]
    expected = load_batch(make_samples(images, labels), transforms)
    augmented = gl.Augment(transforms)(images, labels)
    assert isinstance(augmented, tuple)
    assert_equal_batches(list(augmented), list(expected))
    augmented = gl.Augment(transforms)({"pixel_values": images, "labels": labels})
    assert_equal_batches(augmented["labels"], expected[1])


# -- targets -----------------------------------------------------------------------------------------------------------


def test_augment_moves_lists_of_boxes_labels_and_masks():
    images, targets = make_detection_batch()
    _, expected = load_batch(make_samples(images, targets), DETECTION)
    batch = {name: [target[name] for target in targets] for name in ("boxes", "labels", "masks")}
    _, augmented = gl.Augment(DETECTION)(images, batch)
    assert sum(map(len, augmented["boxes"])) < sum(map(len, BOXES)), "no box was dropped, so dropping was not tested"
    assert_equal_batches(augmented, {name: [target[name] for target in expected] for name in batch})
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
    expected = load_batch(make_samples(images, map(gl.Mask, masks)), GEOMETRY, backend=backend)
    if form == "torchvision":
        torchvision()
        from torchvision import tv_tensors

        target = tv_tensors.Mask(masks)
    else:
        target = gl.Mask(masks) if form == "one" else [gl.Mask(mask) for mask in masks]
    augmented = gl.Augment(GEOMETRY, backend=backend)(images, {"masks": target})
    assert_equal_batches([augmented[0], augmented[1]["masks"]], list(expected))


def test_augment_returns_keypoints_as_one_tensor():
    images, points = image_batch(), torch.rand(6, 5, 2) * 40
    _, expected = load_batch(make_samples(images, map(gl.Keypoints, points)), GEOMETRY[:3])
    _, augmented = gl.Augment(GEOMETRY[:3])(images, gl.Keypoints(points))
    assert_equal_batches(augmented, torch.stack(expected))


def test_augment_with_multiview_returns_a_list_of_masks():
    images, masks = image_batch(), image_batch(channels=1, seed=4)[:, 0] // 32
    expected = load_batch(make_samples(images, map(gl.Mask, masks)), VIEWS)
    assert_equal_batches(list(gl.Augment(VIEWS)(images, gl.Mask(masks))), list(expected))


def test_augment_with_multiview_returns_instance_masks_per_view():
    images, targets = make_detection_batch()
    batch = {name: [target[name] for target in targets] for name in ("boxes", "masks")}
    _, augmented = gl.Augment(VIEWS)(images, batch)
    assert [[tuple(mask.shape) for mask in view] for view in augmented["masks"]] == [
        [(len(boxes), size, size) for boxes in BOXES] for size in (24, 12)
    ]


# -- draws -------------------------------------------------------------------------------------------------------------


def test_augment_counts_positions_from_batch_to_batch():
    images = image_batch(12)
    augment = gl.Augment(CLASSIC, seed=5)
    for batch in range(3):
        expected = load_batch(make_samples(images), CLASSIC, seed=5, batch=batch, size=4)
        assert_equal_batches(augment(images[4 * batch : 4 * batch + 4]), expected)


def test_augment_on_ranks_uses_separate_positions(monkeypatch):
    images = image_batch(8)
    single = gl.Augment(CLASSIC)
    first_batch, second_batch = single(images), single(images)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        augment, rows = gl.Augment(CLASSIC), slice(4 * rank, 4 * rank + 4)
        assert_equal_batches(augment(images[rows]), first_batch[rows])
        assert_equal_batches(augment(images[rows]), second_batch[rows])


def test_augment_with_positions_does_not_depend_on_the_batch():
    images = image_batch()
    augment = gl.Augment(CLASSIC)
    expected = augment(images, positions=np.arange(10, 16), epoch=2)
    assert_equal_batches(augment(images[3:], positions=torch.arange(13, 16), epoch=2), expected[3:])
    # Given positions do not advance the count.
    assert_equal_batches(augment(images), augment(images, positions=range(6)))


def test_resumed_augment_continues_with_the_same_draws():
    images = image_batch()
    network = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten())
    network[0].set_epoch(2)
    network(images)
    state = pickle.loads(pickle.dumps(network.state_dict()))
    expected = network(images)
    resumed = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Flatten())
    resumed.load_state_dict(state)
    resumed[0].set_epoch(2)  # as a loop does before each epoch, including the first
    assert resumed[0].epoch == 2
    assert_equal_batches(resumed(images), expected)


@pytest.mark.parametrize("backend", ["torch", "kornia"])
def test_resumed_augment_warns_at_its_first_batch_if_the_backend_differs(backend):
    images, saved = image_batch(), gl.Augment(CLASSIC, backend="torch")
    saved(images)
    resumed = gl.Augment(CLASSIC, backend=backend)
    resumed.load_state_dict(saved.state_dict())
    assert torch.equal(resumed.get_extra_state(), saved.get_extra_state())  # unchanged before the first batch
    if backend == "kornia":
        message = "saved with the backend 'torch', but the batches .* by 'kornia'"
        with pytest.warns(RuntimeWarning, match=message) as caught:
            resumed(images)
        assert caught[0].filename == __file__
    resumed(images)  # warnings are errors
    _, _, backend_number = resumed.get_extra_state().tolist()
    assert backend_number == ("torch", "kornia").index(backend)


@pytest.mark.parametrize("entries", [2, 3], ids=["earlier version", "before the first batch"])
def test_state_of_an_augment_without_a_backend_loads_silently(entries):
    augment = gl.Augment(CLASSIC)
    state = augment.get_extra_state()
    assert state.tolist() == [0, 0, -1]
    augment.load_state_dict({"_extra_state": state[:entries]})
    augment(image_batch())


def test_second_or_different_set_epoch_of_a_resumed_augment_restarts_at_position_0():
    images, saved = image_batch(), gl.Augment(CLASSIC)
    saved.set_epoch(2)
    first_batch = saved(images)
    for epochs in ([3], [2, 2], [3, 2]):
        resumed = gl.Augment(CLASSIC)
        resumed.load_state_dict(saved.state_dict())
        for epoch in epochs:
            resumed.set_epoch(epoch)
        expected = first_batch if epochs[-1] == 2 else gl.Augment(CLASSIC)(images, epoch=3, positions=range(6))
        assert_equal_batches(resumed(images), expected)


def test_set_epoch_restarts_at_position_0():
    images, augment = image_batch(), gl.Augment(CLASSIC)
    first_batch = augment(images)
    augment.set_epoch(1)
    assert not torch.equal(augment(images), first_batch)
    augment.set_epoch(0)
    assert_equal_batches(augment(images), first_batch)
    augment.set_epoch(0)
    assert_equal_batches(augment(images), first_batch)


@pytest.mark.parametrize("scalar", [torch.tensor(3), np.array(3)])
def test_augment_passes_scalars_through(scalar):
    images, augment = image_batch(4), gl.Augment(CLASSIC)
    assert augment({"image": images, "step": scalar})["step"] is scalar
    assert augment({"image": images, "step": scalar, "target": gl.Mask(images[:, 0])})["step"] is scalar


def test_augment_in_two_threads_runs_one_batch_at_a_time():
    """Otherwise, both threads would write into the memory of the stages, and mix their results."""
    images, threads, batches_of_other_thread = image_batch(), [], []

    def start_another(batch: torch.Tensor) -> torch.Tensor:
        if not threads:
            threads.append(threading.Thread(target=lambda: batches_of_other_thread.append(augment(images))))
            threads[0].start()
            threads[0].join(0.2)
            assert not batches_of_other_thread
        return batch

    augment = gl.Augment([*CLASSIC, T.Lambda(start_another)])
    batch_of_main_thread = augment(images)
    threads[0].join()
    assert_equal_batches(batch_of_main_thread, augment(images, positions=range(6)))
    assert_equal_batches(batches_of_other_thread[0], augment(images, positions=range(6, 12)))


# -- a torch module ----------------------------------------------------------------------------------------------------


def test_augment_has_no_parameters_and_ignores_eval():
    augment = gl.Augment(CLASSIC)
    assert not [*augment.parameters(), *augment.buffers()]
    assert "RandomResizedCrop(size=(24, 24))" in repr(augment)
    images = image_batch()
    assert_equal_batches(augment.eval().to(torch.float64)(images), gl.Augment(CLASSIC)(images))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copied_augment_continues_like_the_original(duplicate):
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
    init_method = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=0, world_size=1)
    try:
        network = torch.nn.Sequential(gl.Augment(CLASSIC), torch.nn.Conv2d(3, 2, 3))
        parallel = torch.nn.parallel.DistributedDataParallel(network)
        parallel(images).sum().backward()
        assert_equal_batches(network[0](images), gl.Augment(CLASSIC)(images, positions=range(6, 12)))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "reading"),
    [("torch", "images: copied once, to N×H×W×C, unless channels_last"), ("fused", "images: read in place, if uint8")],
)
def test_plan_of_an_augment_says_how_images_are_read(backend, reading):
    assert reading in str(gl.Augment(CLASSIC, backend=backend, device="cpu").plan())


# -- errors and warnings -----------------------------------------------------------------------------------------------


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


def test_augment_warns_once_about_a_probable_target_unless_images_are_selected():
    batch = {"image": torch.rand(2, 3, 8, 8), "heat": torch.rand(2, 2, 8, 8)}
    augment = gl.Augment([T.RandomHorizontalFlip(1)])
    message = re.escape('batch["heat"], float32 tensor 2×2×8×8, is transformed')
    with pytest.warns(RuntimeWarning, match=message) as caught:
        augment(batch)
    assert caught[0].filename == __file__
    flipped = augment(batch)
    assert torch.equal(flipped["heat"], batch["heat"].flip(-1))
    by_tuple, by_list = (gl.Augment([T.RandomHorizontalFlip(1)], images=names) for names in (("image",), ["image"]))
    for selected in (by_tuple(batch), pickle.loads(pickle.dumps(by_list))(batch)):
        assert selected["heat"] is batch["heat"]
        assert torch.equal(selected["image"], flipped["image"])


@pytest.mark.parametrize("images", ["image", [0]])
def test_augment_with_images_that_are_not_names_raises(images):
    with pytest.raises(TypeError, match=r"^images must be a (list of strings|string), got"):
        gl.Augment([], images=images)


def test_augment_within_no_grad_accepts_images_that_require_gradients():
    images = torch.zeros(2, 3, 40, 56, requires_grad=True)
    with torch.no_grad():
        assert not gl.Augment([T.RandomResizedCrop(24)])(images).requires_grad


@pytest.mark.parametrize(("transforms", "batch", "message"), [
    (CLASSIC, (image_batch(4), gl.Mask(np.zeros((4, 20, 56)))),
     "image 0 of the batch: a mask must have the size of its image, 40×56 (height × width), but the mask sample[1] has "
     "20×56; return the mask of this image, at the size of the image"),
    ([T.Resize((9, 9)), NORMALIZE, T.CutMix(num_classes=3)], (image_batch(5), torch.zeros(5)),
     "CutMix needs images in groups of 2, but this batch has 5; pass a multiple of 2"),
    ([T.Mosaic((40, 56))], (image_batch(3), make_detection_batch()[1][:3]),
     "Mosaic needs images in groups of 4, but this batch has 3; pass a multiple of 4"),
    ([T.RandomCrop(24)], ([*ragged_images(3), torch.zeros(3, 10, 10, dtype=torch.uint8)],), "image 3 of the batch: "),
    ([T.UniformTemporalSubsample(4)], (image_batch(4),),
     "UniformTemporalSubsample chooses frames before they are decoded"),
], ids=["mask of another size", "CutMix of 5", "Mosaic of 3", "image smaller than the crop", "frames"])  # fmt: skip
def test_augment_with_unsuitable_transforms_raises(transforms, batch, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gl.Augment(transforms)(*batch)


@pytest.mark.parametrize(("transforms", "target", "message"), [
    (GEOMETRY, {"mask": torch.zeros(4, 40, 56, dtype=torch.int64)},
     "stays unchanged while the transforms move the image's pixels"),
    ([Negative()], gl.Mask(np.zeros((4, 40, 56))), "Negative has no apply_masks, so masks are not moved"),
], ids=["plain tensor", "custom transform"])  # fmt: skip
def test_augment_warns_once_about_targets_that_stay_unchanged(transforms, target, message):
    augment = gl.Augment(transforms)
    with pytest.warns(RuntimeWarning, match=message) as warnings:
        augment(image_batch(4), target)
    assert warnings[0].filename == __file__
    augment(image_batch(4), target)  # a second warning would be an error


@pytest.mark.parametrize("positions", [range(3), [0.5] * 4, [-1, 0, 1, 2], [2**63] * 4, [[0, 1, 2, 3]]])
def test_augment_with_wrong_positions_raises(positions):
    with pytest.raises(ValueError, match="positions must be 4 integers of at least 0, one per image, got"):
        gl.Augment(CLASSIC)(image_batch(4), positions=positions)


def test_augment_within_a_worker_of_a_dataloader_needs_positions(monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", object)  # not None, as in a worker
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


def test_load_state_dict_of_an_augment_with_a_wrong_state_raises():
    message = "the state of an Augment must be a tensor of shape (3,), the epoch, the next position and the backend, "
    with pytest.raises(ValueError, match=re.escape(f"{message}got 3")):
        gl.Augment(CLASSIC).load_state_dict({"_extra_state": 3})


def test_augment_moves_masks_with_a_channel_axis():
    """Kornia, torchgeo and segmentation-models-pytorch use such masks."""
    augment, images = gl.Augment([T.RandomHorizontalFlip(1)]), torch.zeros(2, 3, 8, 9, dtype=torch.uint8)
    masks = torch.randint(0, 9, (2, 1, 8, 9))
    assert torch.equal(augment(images, gl.Mask(masks))[1], masks.flip(-1))
    listed = augment(images, [gl.Mask(masks)] * 2)[1]
    in_dicts = [target["mask"] for target in augment(images, [{"mask": gl.Mask(masks)}] * 2)[1]]
    for mask in [*listed, *in_dicts]:
        assert torch.equal(mask, masks[:, 0].flip(-1))
