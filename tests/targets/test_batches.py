"""How a batch holds masks, boxes and keypoints, and what belongs to boxes that were left out."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset
from helpers.peers import torchvision
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.collate import move_merged


def only_batch(function, length=3, **options):
    options = {"device": "cpu", "num_workers": 0, "batch_size": length, **options}
    with gl.Loader(MapDataset(function, length), **options) as loader:
        [batch] = list(loader)
    return batch


def image(height=40, width=50) -> gl.Image:
    return gl.Image(pixels(height, width))


def pixels(height=40, width=50) -> np.ndarray:
    return np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)


def boxes(count: int) -> np.ndarray:
    return np.array([[5, 5, 15 + n, 20] for n in range(count)], np.float32).reshape(count, 4)


# -- nesting ----------------------------------------------------------------------------------------------------------


def test_a_dict_with_boxes_comes_as_a_list_one_for_each_image():
    images, targets = only_batch(
        lambda i: (image(), {"boxes": gl.Boxes(boxes(i)), "labels": np.arange(i), "name": f"n{i}", "id": i})
    )
    assert images.shape == (3, 3, 40, 50)
    assert [target["boxes"].shape for target in targets] == [(0, 4), (1, 4), (2, 4)]
    assert [target["labels"].tolist() for target in targets] == [[], [0], [0, 1]]
    assert [(target["name"], target["id"]) for target in targets] == [("n0", 0), ("n1", 1), ("n2", 2)]
    assert all(type(target["boxes"]) is torch.Tensor and target["boxes"].dtype == torch.float32 for target in targets)


def test_the_whole_sample_may_be_such_a_dict():
    batch = only_batch(lambda i: {"image": image(), "boxes": gl.Boxes(boxes(i)), "more": {"a": [1, i]}})
    assert [sample["image"].shape for sample in batch] == [(3, 40, 50)] * 3
    assert [sample["more"]["a"] for sample in batch] == [[1, 0], [1, 1], [1, 2]]


def test_other_dicts_and_bare_leaves_are_nested_as_ever():
    batch = only_batch(
        lambda i: {
            "x": {"image": gl.Image(pixels()), "label": i},
            "boxes": [gl.Boxes(boxes(i)), gl.Keypoints(np.ones((i, 2)))],
        }
    )
    assert batch["x"]["image"].shape == (3, 3, 40, 50)
    assert batch["x"]["label"].tolist() == [0, 1, 2]
    assert [len(found) for found in batch["boxes"][0]] == [0, 1, 2]
    assert [found.dtype for found in batch["boxes"][1]] == [torch.float64] * 3


def test_dicts_with_boxes_need_not_be_alike():
    def sample(i):
        target = {"boxes": gl.Boxes(boxes(1))}
        if i == 1:
            target |= {"segmentation": [[1, 2, 3], [4]], "mask": gl.Mask(np.ones((2, 40, 50), np.uint8))}
        return image(), target

    _, targets = only_batch(sample, transforms=[T.CenterCrop(20)])
    assert [sorted(target) for target in targets] == [["boxes"], ["boxes", "mask", "segmentation"], ["boxes"]]
    assert targets[1]["segmentation"] == [[1, 2, 3], [4]]
    assert targets[1]["mask"].shape == (2, 20, 20)


def test_masks_outside_such_a_dict_are_one_tensor():
    _images, masks = only_batch(
        lambda i: (image(), gl.Mask(np.full((40, 50), i, np.int64))), transforms=[T.RandomCrop(9)]
    )
    assert (masks.shape, masks.dtype) == ((3, 9, 9), torch.int64)
    assert masks.amax(dim=(1, 2)).tolist() == [0, 1, 2]
    _, masks = only_batch(lambda i: (image(), gl.Mask(np.full((2, 40, 50), i, bool))))
    assert (masks.shape, masks.dtype) == ((3, 2, 40, 50), torch.bool)


def test_masks_of_different_sizes_go_as_images_do():
    sample = lambda i: (image(20 + i), gl.Mask(np.ones((20 + i, 50), np.uint8)))  # noqa: E731
    images, masks = only_batch(sample, ragged="list")
    assert [mask.shape for mask in masks] == [(20, 50), (21, 50), (22, 50)]
    (images, sizes), (masks, mask_sizes) = only_batch(sample, ragged="pad")
    assert images.shape == (3, 3, 22, 50)
    assert masks.shape == (3, 22, 50)
    assert torch.equal(sizes, mask_sizes)
    assert masks.sum(dim=(1, 2)).tolist() == [20 * 50, 21 * 50, 22 * 50]


@pytest.mark.parametrize("pad_to", [1, 8, 32])
@pytest.mark.parametrize("axes", [2, 3])
def test_masks_are_padded_to_multiples_with_their_images(pad_to, axes):
    shape = (2,) * (axes - 2)
    sample = lambda i: (image(20 + i), gl.Mask(np.ones((*shape, 20 + i, 50), np.int32)))  # noqa: E731
    (images, sizes), (masks, mask_sizes) = only_batch(sample, ragged="pad", pad_to=pad_to)
    (plain, plain_sizes), (plain_masks, _) = only_batch(sample, ragged="pad")
    size = {1: (22, 50), 8: (24, 56), 32: (32, 64)}[pad_to]
    assert images.shape == (3, 3, *size)
    assert masks.shape == (3, *shape, *size)
    assert sizes.tolist() == plain_sizes.tolist() == mask_sizes.tolist() == [[20, 50], [21, 50], [22, 50]]
    for one, other in ((images, plain), (masks, plain_masks)):
        assert torch.equal(one[..., :22, :50], other)
        assert not one[..., 22:, :].any()
        assert not one[..., 50:].any()


def test_masks_of_one_size_are_padded_to_multiples_too():
    chain = [T.MultiView([[T.CenterCrop(20)], [T.CenterCrop((32, 8))]])]
    sample = lambda i: (image(), gl.Mask(np.ones((40, 50), np.uint8)))  # noqa: E731
    images, masks = only_batch(sample, transforms=chain, ragged="pad", pad_to=16)
    assert [(tuple(view.shape), sizes.tolist()) for view, sizes in images] == [
        ((3, 3, 32, 32), [[20, 20]] * 3),
        ((3, 3, 32, 16), [[32, 8]] * 3),
    ]
    assert [(tuple(view.shape), sizes.tolist()) for view, sizes in masks] == [
        ((3, 32, 32), [[20, 20]] * 3),
        ((3, 32, 16), [[32, 8]] * 3),
    ]


def test_masks_of_instances_keep_their_size_where_images_are_padded_to_multiples():
    def sample(i):
        return image(), {"boxes": gl.Boxes(boxes(i)), "masks": gl.Mask(np.ones((i, 40, 50), np.uint8))}

    (images, _), targets = only_batch(sample, ragged="pad", pad_to=32)
    assert images.shape == (3, 3, 64, 64)
    assert [tuple(target["masks"].shape) for target in targets] == [(i, 40, 50) for i in range(3)]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_gets_plain_tensors(workers):
    def collate(samples):
        return [(type(b).__name__, tuple(b.shape), type(m).__name__, tuple(m.shape), y) for _, b, m, y in samples]

    def sample(i):
        return image(), gl.Boxes(boxes(i)), gl.Mask(np.ones((40, 50), np.uint8)), i

    found = only_batch(sample, transforms=[T.CenterCrop(20)], collate_fn=collate, num_workers=workers)
    assert found == [("Tensor", (i, 4), "Tensor", (20, 20), i) for i in range(3)]


def test_single_samples_carry_plain_tensors():
    with gl.Loader(
        MapDataset(lambda i: (image(), {"boxes": gl.Boxes(boxes(i))}), 3), None, num_workers=0, device="cpu"
    ) as loader:
        assert [tuple(target["boxes"].shape) for _, target in loader] == [(0, 4), (1, 4), (2, 4)]


def test_each_view_has_targets_of_its_own():
    views = T.MultiView([[T.CenterCrop(20)], [T.Resize((80, 100)), T.RandomHorizontalFlip(p=1)]])
    (one, two), targets, (mask_one, mask_two) = only_batch(
        lambda i: (image(), {"boxes": gl.Boxes(boxes(1)), "id": i}, gl.Mask(np.ones((40, 50), np.uint8))),
        transforms=[views],
    )
    assert (one.shape, two.shape) == ((3, 3, 20, 20), (3, 3, 80, 100))
    assert (mask_one.shape, mask_two.shape) == ((3, 20, 20), (3, 80, 100))
    assert [view.tolist() for view in targets[0]["boxes"]] == [[[0, 0, 0, 10]], [[70, 10, 90, 40]]]
    assert targets[2]["id"] == 2


def test_a_collate_fn_may_get_samples_with_and_without_targets():
    sample = lambda i: (image(), gl.Boxes(boxes(2)) if i else np.zeros(3))  # noqa: E731
    found = only_batch(sample, collate_fn=lambda samples: [tuple(leaf.shape) for _, leaf in samples])
    assert found == [(3,), (2, 4), (2, 4)]


@dataclasses.dataclass
class Target:
    boxes: Any
    labels: Any


def test_a_dataclass_with_boxes_is_one_for_each_image():
    _, targets = only_batch(lambda i: (image(), Target(gl.Boxes(boxes(i)), np.arange(i))))
    assert [type(target) for target in targets] == [Target] * 3
    assert [target.boxes.shape for target in targets] == [(0, 4), (1, 4), (2, 4)]
    assert targets[2].labels.tolist() == [0, 1]


def test_tensors_of_a_batch_go_to_the_device_together():
    moved = []

    def place(tensor):  # as if there were a device
        moved.append(tensor)
        return tensor.clone()

    large = torch.arange(20_000)
    given = {0: [[torch.ones(2, 4), torch.arange(3)], [torch.zeros(0, 4), torch.tensor(5), "name"]], 2: large}
    there = move_merged(given, place)
    assert len(moved) <= 4  # one to see whether they move, one for each type, and the large one
    assert there[0][0][0].shape == (2, 4)
    assert there[0][1][0].shape == (0, 4)
    assert there[0][0][1].tolist() == [0, 1, 2]
    assert there[0][1][1].item() == 5
    assert there[0][1][2] == "name"
    assert torch.equal(there[2], large)
    assert there[2] is not large


# -- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float32"])
@pytest.mark.parametrize("axes", [2, 3])
def test_masks_of_any_type_keep_it_and_their_values(dtype, axes):
    random = np.random.default_rng(0)
    low, high = (0, 2) if dtype == "bool" else (0, 120) if dtype in ("uint8", "int8") else (-30000, 30000)
    shape = (40, 50) if axes == 2 else (3, 40, 50)
    arrays = [random.integers(low, high, shape).astype(dtype) for _ in range(3)]
    fill = {gl.Image: 9, gl.Mask: 1 if dtype == "bool" else 77}
    for workers in (0, 1):
        transforms = [T.Pad(2, fill=fill), T.RandomHorizontalFlip(p=1)]
        _, masks = only_batch(lambda i: (image(), gl.Mask(arrays[i])), transforms=transforms, num_workers=workers)
        expected = [
            np.flip(np.pad(a, [(0, 0)] * (axes - 2) + [(2, 2)] * 2, constant_values=fill[gl.Mask]), -1) for a in arrays
        ]
        assert str(masks.dtype) == f"torch.{dtype}"
        np.testing.assert_array_equal(masks.numpy(), np.stack(expected))


def test_wide_unsigned_masks_become_what_torch_has():
    _, masks = only_batch(lambda i: (image(), gl.Mask(np.full((40, 50), 60000, np.uint16))))
    assert masks.dtype == torch.int32
    assert masks.unique().tolist() == [60000]


@pytest.mark.parametrize("axes", [2, 3])
def test_masks_of_one_pixel_keep_their_values(axes):
    numbers = np.full((40, 50) if axes == 2 else (2, 40, 50), 70000, np.int32)
    _, masks = only_batch(lambda i: (image(), gl.Mask(numbers)), transforms=[T.CenterCrop(1)])
    assert masks.shape == (3, *numbers.shape[:-2], 1, 1)
    assert masks.unique().tolist() == [70000]


def test_padding_bytes_of_a_mask_are_a_number_larger_than_a_byte():
    transforms = [T.CenterCrop(60), T.RandomRotation((45, 45), fill={gl.Image: 0, gl.Mask: 1000})]
    _, masks = only_batch(lambda i: (image(), gl.Mask(np.full((2, 40, 50), 5, np.int32))), transforms=transforms)
    assert masks.unique().tolist() == [0, 5, 1000]


def test_to_dtype_says_the_type_of_masks():
    transforms = [T.ToDtype({gl.Image: torch.float32, gl.Mask: torch.int64, "others": None}, scale=True)]
    images, masks = only_batch(lambda i: (image(), gl.Mask(np.full((40, 50), i, np.uint8))), transforms=transforms)
    assert (images.dtype, masks.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_boxes_keep_their_type(dtype):
    _, found = only_batch(lambda i: (image(), gl.Boxes(boxes(2).astype(dtype))), transforms=[T.Resize((20, 25))])
    assert all(str(one.dtype) == f"torch.{np.dtype(dtype).name}" for one in found)
    assert found[0].tolist() == np.array([[2.5, 2.5, 7.5, 10], [2.5, 2.5, 8, 10]]).astype(dtype).tolist()


def png(array: np.ndarray, mode: str | None = None, palette: bool = False, **options) -> gl.Encoded:
    picture = PILImage.fromarray(array)
    if palette:
        picture = PILImage.frombytes("P", array.shape[::-1], array.tobytes())
        picture.putpalette(list(range(255, -1, -1)) * 3)
    file = io.BytesIO()
    (picture if mode is None else picture.convert(mode)).save(file, "PNG", **options)
    return gl.Encoded(file.getvalue(), source="mask.png")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["palette", "grey", "16 bit"])
def test_an_encoded_mask_gives_what_is_stored(kind, workers):
    array = np.random.default_rng(1).integers(0, 250, (40, 50)).astype(np.uint8)
    if kind == "16 bit":
        array = array.astype(np.uint16) * 200
    mask = png(array, palette=kind == "palette")
    _, masks = only_batch(lambda i: (image(), gl.Mask(mask)), transforms=[T.CenterCrop(30)], num_workers=workers)
    assert masks.dtype == (torch.int32 if kind == "16 bit" else torch.uint8)
    np.testing.assert_array_equal(masks[0].numpy(), array[5:35, 10:40])


@pytest.mark.parametrize("exif", [False, True])
def test_an_encoded_mask_is_turned_only_where_images_are(exif):
    turned = PILImage.Exif()
    turned[0x0112] = 6
    array = np.random.default_rng(1).integers(0, 250, (40, 50)).astype(np.uint8)
    file = io.BytesIO()
    PILImage.fromarray(pixels()).save(file, "PNG", exif=turned)
    photo, mask = gl.Encoded(file.getvalue()), png(array, exif=turned)
    images, masks = only_batch(lambda i: (photo, gl.Mask(mask)), decode=gl.Decode(exif=exif))
    expected = np.rot90(array, -1) if exif else array
    assert images.shape[2:] == expected.shape
    np.testing.assert_array_equal(masks[0].numpy(), expected)


# -- what is left out -------------------------------------------------------------------------------------------------


def detection(i):
    found = np.array([[5, 5, 25, 30], [30, 5, 30.5, 30], [1, 1, 45, 38]], np.float32)
    return image(), {
        "boxes": gl.Boxes(found),
        "Labels": torch.tensor([1, 2, 3]),
        "area": np.array([10.0, 20, 30]),
        "iscrowd": np.zeros(3, bool),
        "masks": gl.Mask(np.arange(3, dtype=np.uint8)[:, None, None] * np.ones((40, 50), np.uint8)),
        "semantic": gl.Mask(np.zeros((40, 50), np.uint8)),
        "keypoints": gl.Keypoints(np.zeros((3, 2, 2), np.float32)),
    }


def test_sanitizing_leaves_out_labels_and_instance_masks():
    _, targets = only_batch(detection, transforms=[T.SanitizeBoundingBoxes()])
    for target in targets:
        assert target["boxes"].tolist() == [[5, 5, 25, 30], [1, 1, 45, 38]]
        assert target["Labels"].tolist() == [1, 3]
        assert target["masks"].amax(dim=(1, 2)).tolist() == [0, 2]
        assert target["area"].tolist() == [10, 30]
        assert len(target["iscrowd"]) == len(target["keypoints"]) == 2
        assert target["semantic"].shape == (40, 50)


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_a_labels_getter_names_what_else_is_left_out(workers):
    getter = lambda sample: [sample[1][name] for name in ("Labels", "area", "iscrowd", "keypoints")]  # noqa: E731
    transforms = [T.SanitizeBoundingBoxes(labels_getter=getter)]
    _, targets = only_batch(detection, transforms=transforms, num_workers=workers)
    for target in targets:
        assert target["Labels"].tolist() == [1, 3]
        assert target["area"].tolist() == [10, 30]
        assert target["iscrowd"].shape == (2,)
    _, targets = only_batch(detection, transforms=[T.SanitizeBoundingBoxes(labels_getter=None)])
    assert [len(targets[0][name]) for name in ("boxes", "masks", "Labels")] == [2, 2, 3]


@pytest.mark.parametrize("sanitize", [True, False])
def test_an_iou_crop_leaves_out_as_the_sanitizing_behind_it_says(sanitize):
    getter = lambda sample: (sample[1]["Labels"], sample[1]["area"], sample[1]["keypoints"])  # noqa: E731
    behind = [T.Resize((30, 30)), T.SanitizeBoundingBoxes(labels_getter=getter)] if sanitize else []
    with gl.Loader(
        MapDataset(detection, 40),
        40,
        transforms=[T.RandomIoUCrop(), *behind],
        ragged="list",
        num_workers=0,
        device="cpu",
    ) as loader:
        [(_, targets)] = list(loader)
    counts = [len(target["boxes"]) for target in targets]
    assert 1 <= min(counts) < max(counts)
    for target, count in zip(targets, counts, strict=True):
        assert len(target["Labels"]) == len(target["masks"]) == count
        assert len(target["area"]) == len(target["keypoints"]) == count
        assert (target["masks"].amax(dim=(1, 2)) + 1).tolist() == target["Labels"].tolist()


def test_torchvisions_tensors_are_taken_and_plain_ones_given():
    torchvision()
    from torchvision import tv_tensors

    def sample(i):
        return tv_tensors.Image(torch.zeros(3, 40, 50, dtype=torch.uint8)), {
            "boxes": tv_tensors.BoundingBoxes([[5, 5, 10, 10]], format="XYWH", canvas_size=(40, 50)),
            "labels": torch.tensor([4]),
            "masks": tv_tensors.Mask(torch.ones(1, 40, 50, dtype=torch.bool)),
            "points": tv_tensors.KeyPoints(torch.tensor([[1.0, 2.0]]), canvas_size=(40, 50)),
        }

    transforms = [T.RandomHorizontalFlip(p=1), T.SanitizeBoundingBoxes()]
    images, targets = only_batch(sample, transforms=transforms)
    assert images.shape == (3, 3, 40, 50)
    assert targets[0]["boxes"].tolist() == [[35, 5, 10, 10]]
    assert targets[0]["boxes"].dtype == torch.int64
    assert targets[0]["points"].tolist() == [[48, 2]]
    assert {type(value) for value in targets[0].values()} == {torch.Tensor}


def test_only_a_mask_of_torchvisions_is_no_image():
    torchvision()
    from torchvision import tv_tensors

    mask = tv_tensors.Mask(torch.ones(1, 40, 50, dtype=torch.uint8))
    with pytest.raises(gl.SampleError, match="uint8 tensor 1×40×50}, has no image for the transforms"):
        only_batch(lambda i: {"mask": mask}, transforms=[T.RandomHorizontalFlip()])
