"""Batches of masks, boxes and keypoints: nesting, padding, dtypes and encoded masks."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from helpers.peers import torchvision
from PIL import Image as PILImage
from targets.samples import boxes, image, only_batch, pixels, png

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.collate import move_merged

# -- nesting ----------------------------------------------------------------------------------------------------------


def test_dicts_with_boxes_are_collated_to_a_list():
    images, targets = only_batch(
        lambda i: (image(), {"boxes": gl.Boxes(boxes(i)), "labels": np.arange(i), "name": f"n{i}", "id": i})
    )
    assert images.shape == (3, 3, 40, 50)
    assert [target["boxes"].shape for target in targets] == [(0, 4), (1, 4), (2, 4)]
    assert [target["labels"].tolist() for target in targets] == [[], [0], [0, 1]]
    assert [(target["name"], target["id"]) for target in targets] == [("n0", 0), ("n1", 1), ("n2", 2)]
    assert [(type(target["boxes"]), target["boxes"].dtype) for target in targets] == [(torch.Tensor, torch.float32)] * 3


def test_samples_that_are_dicts_with_boxes_are_collated_to_a_list():
    batch = only_batch(lambda i: {"image": image(), "boxes": gl.Boxes(boxes(i)), "more": {"a": [1, i]}})
    assert [sample["image"].shape for sample in batch] == [(3, 40, 50)] * 3
    assert [sample["more"]["a"] for sample in batch] == [[1, 0], [1, 1], [1, 2]]


def test_dicts_without_direct_boxes_are_collated_by_key():
    batch = only_batch(
        lambda i: {
            "x": {"image": gl.Image(pixels()), "label": i},
            "boxes": [gl.Boxes(boxes(i)), gl.Keypoints(np.ones((i, 2)))],
        }
    )
    assert batch["x"]["image"].shape == (3, 3, 40, 50)
    assert batch["x"]["label"].tolist() == [0, 1, 2]
    assert [len(tensor) for tensor in batch["boxes"][0]] == [0, 1, 2]
    assert [tensor.dtype for tensor in batch["boxes"][1]] == [torch.float64] * 3


def test_dicts_with_boxes_may_have_different_keys():
    def sample(i):
        target = {"boxes": gl.Boxes(boxes(1))}
        if i == 1:
            target |= {"segmentation": [[1, 2, 3], [4]], "mask": gl.Mask(np.ones((2, 40, 50), np.uint8))}
        return image(), target

    _, targets = only_batch(sample, transforms=[T.CenterCrop(20)])
    assert [sorted(target) for target in targets] == [["boxes"], ["boxes", "mask", "segmentation"], ["boxes"]]
    assert targets[1]["segmentation"] == [[1, 2, 3], [4]]
    assert targets[1]["mask"].shape == (2, 20, 20)


def test_masks_outside_a_dict_with_boxes_are_stacked():
    _, masks = only_batch(lambda i: (image(), gl.Mask(np.full((40, 50), i, np.int64))), transforms=[T.RandomCrop(9)])
    assert (masks.shape, masks.dtype) == ((3, 9, 9), torch.int64)
    assert masks.amax(dim=(1, 2)).tolist() == [0, 1, 2]
    _, masks = only_batch(lambda i: (image(), gl.Mask(np.full((2, 40, 50), i, bool))))
    assert (masks.shape, masks.dtype) == ((3, 2, 40, 50), torch.bool)


def test_masks_of_different_sizes_are_lists_with_ragged_list():
    sample = lambda i: (image(20 + i), gl.Mask(np.ones((20 + i, 50), np.uint8)))  # noqa: E731
    _, masks = only_batch(sample, ragged="list")
    assert [mask.shape for mask in masks] == [(20, 50), (21, 50), (22, 50)]


@pytest.mark.parametrize("pad_to", [1, 8, 32])
@pytest.mark.parametrize("axes", [2, 3])
def test_masks_are_padded_to_multiples_with_their_images(pad_to, axes):
    shape = (2,) * (axes - 2)
    sample = lambda i: (image(20 + i), gl.Mask(np.ones((*shape, 20 + i, 50), np.int32)))  # noqa: E731
    (images, sizes), (masks, mask_sizes) = only_batch(sample, ragged="pad", pad_to=pad_to)
    (unpadded_images, unpadded_sizes), (unpadded_masks, _) = only_batch(sample, ragged="pad")
    size = {1: (22, 50), 8: (24, 56), 32: (32, 64)}[pad_to]
    assert images.shape == (3, 3, *size)
    assert masks.shape == (3, *shape, *size)
    assert sizes.tolist() == unpadded_sizes.tolist() == mask_sizes.tolist() == [[20, 50], [21, 50], [22, 50]]
    for padded, unpadded in ((images, unpadded_images), (masks, unpadded_masks)):
        assert torch.equal(padded[..., :22, :50], unpadded)
        assert not padded[..., 22:, :].any()
        assert not padded[..., 50:].any()


def test_masks_of_views_are_padded_to_multiples_with_their_images():
    chain = [T.MultiView([[T.CenterCrop(20)], [T.CenterCrop((32, 8))]])]
    sample = lambda i: (image(), gl.Mask(np.ones((40, 50), np.uint8)))  # noqa: E731
    images, masks = only_batch(sample, transforms=chain, ragged="pad", pad_to=16)
    for views, channels in ((images, (3,)), (masks, ())):
        assert [tuple(view.shape) for view, _ in views] == [(3, *channels, 32, 32), (3, *channels, 32, 16)]
        assert [sizes.tolist() for _, sizes in views] == [[[20, 20]] * 3, [[32, 8]] * 3]


def test_instance_masks_are_not_padded_with_their_images():
    def sample(i):
        return image(), {"boxes": gl.Boxes(boxes(i)), "masks": gl.Mask(np.ones((i, 40, 50), np.uint8))}

    (images, _), targets = only_batch(sample, ragged="pad", pad_to=32)
    assert images.shape == (3, 3, 64, 64)
    assert [tuple(target["masks"].shape) for target in targets] == [(i, 40, 50) for i in range(3)]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_collate_fn_receives_targets_as_plain_tensors(workers):
    def collate(samples):
        return [(type(b).__name__, tuple(b.shape), type(m).__name__, tuple(m.shape), y) for _, b, m, y in samples]

    def sample(i):
        return image(), gl.Boxes(boxes(i)), gl.Mask(np.ones((40, 50), np.uint8)), i

    batch = only_batch(sample, transforms=[T.CenterCrop(20)], collate_fn=collate, num_workers=workers)
    assert batch == [("Tensor", (i, 4), "Tensor", (20, 20), i) for i in range(3)]


def test_multi_view_moves_targets_separately_for_each_view():
    views = T.MultiView([[T.CenterCrop(20)], [T.Resize((80, 100)), T.RandomHorizontalFlip(p=1)]])
    (first_view, second_view), targets, (first_mask, second_mask) = only_batch(
        lambda i: (image(), {"boxes": gl.Boxes(boxes(1)), "id": i}, gl.Mask(np.ones((40, 50), np.uint8))),
        transforms=[views],
    )
    assert (first_view.shape, second_view.shape) == ((3, 3, 20, 20), (3, 3, 80, 100))
    assert (first_mask.shape, second_mask.shape) == ((3, 20, 20), (3, 80, 100))
    assert [view.tolist() for view in targets[0]["boxes"]] == [[[0, 0, 0, 10]], [[70, 10, 90, 40]]]
    assert targets[2]["id"] == 2


def test_collate_fn_receives_samples_with_and_without_targets():
    sample = lambda i: (image(), gl.Boxes(boxes(2)) if i else np.zeros(3))  # noqa: E731
    batch = only_batch(sample, collate_fn=lambda samples: [tuple(leaf.shape) for _, leaf in samples])
    assert batch == [(3,), (2, 4), (2, 4)]


def test_move_merged_moves_small_tensors_together():
    moved = []

    def place(tensor):
        moved.append(tensor)
        return tensor.clone()

    large = torch.arange(20_000)
    batch = {0: [[torch.ones(2, 4), torch.arange(3)], [torch.zeros(0, 4), torch.tensor(5), "name"]], 2: large}
    result = move_merged(batch, place)
    assert len(moved) <= 4  # a trial, one tensor per dtype, and the large tensor
    assert result[0][0][0].shape == (2, 4)
    assert result[0][1][0].shape == (0, 4)
    assert result[0][0][1].tolist() == [0, 1, 2]
    assert result[0][1][1].item() == 5
    assert result[0][1][2] == "name"
    assert torch.equal(result[2], large)
    assert result[2] is not large


# -- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float32"])
@pytest.mark.parametrize("axes", [2, 3])
def test_moved_masks_have_their_dtype_and_values(dtype, axes):
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


@pytest.mark.parametrize(
    ("mask", "transforms", "shape", "values"),
    [
        (np.full((40, 50), 60000, np.uint16), [], (40, 50), [60000]),  # torch has no uint16
        (np.full((40, 50), 70000, np.int32), [T.CenterCrop(1)], (1, 1), [70000]),
        (np.full((2, 40, 50), 70000, np.int32), [T.CenterCrop(1)], (2, 1, 1), [70000]),
        (np.full((2, 40, 50), 5, np.int32),
         [T.CenterCrop(60), T.RandomRotation((45, 45), fill={gl.Image: 0, gl.Mask: 1000})], (2, 60, 60), [0, 5, 1000]),
    ],
)  # fmt: skip
def test_masks_of_more_than_8_bits_are_int32_with_their_values(mask, transforms, shape, values):
    _, masks = only_batch(lambda i: (image(), gl.Mask(mask)), transforms=transforms)
    assert (masks.dtype, masks.shape) == (torch.int32, (3, *shape))
    assert masks.unique().tolist() == values


def test_to_dtype_converts_images_and_masks_by_type():
    transforms = [T.ToDtype({gl.Image: torch.float32, gl.Mask: torch.int64, "others": None}, scale=True)]
    images, masks = only_batch(lambda i: (image(), gl.Mask(np.full((40, 50), i, np.uint8))), transforms=transforms)
    assert (images.dtype, masks.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_resized_boxes_have_their_dtype(dtype):
    _, moved = only_batch(lambda i: (image(), gl.Boxes(boxes(2).astype(dtype))), transforms=[T.Resize((20, 25))])
    assert [str(box_tensor.dtype) for box_tensor in moved] == [f"torch.{np.dtype(dtype).name}"] * 3
    assert moved[0].tolist() == np.array([[2.5, 2.5, 7.5, 10], [2.5, 2.5, 8, 10]]).astype(dtype).tolist()


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["palette", "grey", "16 bit"])
def test_encoded_masks_are_decoded_to_the_stored_values(kind, workers):
    array = np.random.default_rng(1).integers(0, 250, (40, 50)).astype(np.uint8)
    if kind == "16 bit":
        array = array.astype(np.uint16) * 200
    picture = PILImage.fromarray(array)
    if kind == "palette":
        picture.putpalette(list(range(255, -1, -1)) * 3)  # makes its mode P
    file = io.BytesIO()
    picture.save(file, "PNG")
    mask = gl.Encoded(file.getvalue())
    _, masks = only_batch(lambda i: (image(), gl.Mask(mask)), transforms=[T.CenterCrop(30)], num_workers=workers)
    assert masks.dtype == (torch.int32 if kind == "16 bit" else torch.uint8)
    np.testing.assert_array_equal(masks[0].numpy(), array[5:35, 10:40])


@pytest.mark.parametrize("exif", [False, True])
def test_encoded_masks_are_turned_by_exif_only_if_images_are(exif):
    turned = PILImage.Exif()
    turned[0x0112] = 6  # the tag Orientation: turn by 90° clockwise
    array = np.random.default_rng(1).integers(0, 250, (40, 50)).astype(np.uint8)
    photo, mask = png(pixels(), exif=turned), png(array, exif=turned)
    images, masks = only_batch(lambda i: (photo, gl.Mask(mask)), decode=gl.Decode(exif=exif))
    expected = np.rot90(array, -1) if exif else array
    assert images.shape[2:] == expected.shape
    np.testing.assert_array_equal(masks[0].numpy(), expected)


def test_torchvisions_targets_become_plain_tensors():
    tv_tensors = torchvision().tv_tensors

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


def test_a_sample_with_only_a_torchvision_mask_has_no_image():
    mask = torchvision().tv_tensors.Mask(torch.ones(1, 40, 50, dtype=torch.uint8))
    with pytest.raises(gl.SampleError, match="uint8 tensor 1×40×50}, has no image for the transforms"):
        only_batch(lambda i: {"mask": mask}, transforms=[T.RandomHorizontalFlip()])
