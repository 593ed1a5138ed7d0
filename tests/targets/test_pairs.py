"""`Keypoints(pairs=…)`: keypoints in a fixed order, whose left and right points are exchanged by mirroring."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.augment_batches import image_batch
from targets.samples import image, only_batch, pixels

import gpuload as gl
from gpuload import transforms as T

PAIRS = [(1, 2), (4, 3)]
ORDER = [0, 2, 1, 4, 3]


def points_of(index: int, *groups: int) -> np.ndarray:
    return np.random.default_rng(index).uniform(0, 40, (*groups, 5, 2)).astype(np.float32)


def pose(index: int, pairs: Any = PAIRS) -> Any:
    return image(), {
        "keypoints": gl.Keypoints(points_of(index), pairs=pairs),
        "visibility": np.arange(5) + 10 * index,
        "image_id": index,
    }


# Chains that mirror every image, and chains that mirror none.
MIRRORING = {
    "flip": [T.RandomHorizontalFlip(1.0)],
    "vertical flip": [T.RandomVerticalFlip(1.0)],
    "transposed": [T.RandomTranspose(p=1.0)],
    "flip and crop": [T.RandomCrop(30), T.RandomHorizontalFlip(1.0), T.RandomRotation(30)],
    "three flips": [T.RandomHorizontalFlip(1.0), T.RandomVerticalFlip(1.0), T.RandomHorizontalFlip(1.0)],
}
NOT_MIRRORING = {
    "two flips": [T.RandomHorizontalFlip(1.0), T.RandomVerticalFlip(1.0)],
    "rotation": [T.RandomRotation((180, 180))],
    "shear": [T.RandomAffine(40, shear=30)],
    "turn": [T.RandomRotate90(p=1.0), T.Resize((40, 50))],
    "perspective": [T.RandomPerspective(p=1.0)],
}


@pytest.mark.parametrize("form", ["loader", "augment", "padded"])
@pytest.mark.parametrize("name", [*MIRRORING, *NOT_MIRRORING])
def test_pairs_and_their_visibility_are_exchanged_if_the_image_is_mirrored(name, form):
    chain, order = (MIRRORING | NOT_MIRRORING)[name], ORDER if name in MIRRORING else [*range(5)]
    _, plain = only_batch(lambda i: pose(i, ()), 3, transforms=chain)
    expected = plain["keypoints"][:, order], plain["visibility"][:, order]
    _, target = only_batch(pose, 3, transforms=chain)
    if form != "loader":
        stacked = np.stack([points_of(index) for index in range(3)])
        valid = np.ones((3, 5), bool) if form == "padded" else None
        batch = {
            "keypoints": gl.Keypoints(stacked, pairs=PAIRS, valid=valid),
            "visibility": torch.stack([torch.arange(5) + 10 * index for index in range(3)]),
        }
        _, target = gl.Augment(chain)(torch.from_numpy(pixels()).permute(2, 0, 1)[None].expand(3, -1, -1, -1), batch)
    keypoints = target["keypoints"].array if form == "padded" else target["keypoints"]
    assert torch.equal(keypoints, expected[0])
    assert torch.equal(target["visibility"], expected[1])
    assert keypoints.shape == (3, 5, 2)


def test_motion_of_a_warp_mirrors_images_that_it_flips_or_transposes():
    from gpuload.transforms.program.ops import Warp
    from gpuload.transforms.program.targets import motion_of

    coefficients = np.array([[-1, 0, 50, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0, 0, 0], [-1, 0, 50, 0, -1, 40, 0, 0]], float)
    sizes = np.array([[40, 50]] * 3)
    record = Warp(coefficients, sizes, np.ones(3, bool), sizes_hw=sizes)
    assert motion_of(record).mirrors.tolist() == [True, True, False]


def test_pairs_are_exchanged_in_the_images_that_are_mirrored():
    _, target = only_batch(pose, 12, transforms=[T.RandomHorizontalFlip()])
    mirrored = [visibility[1] > visibility[2] for visibility in target["visibility"].tolist()]
    assert {True, False} == set(mirrored)
    for row, is_mirrored in enumerate(mirrored):
        x = torch.from_numpy(points_of(row)[:, 0])
        assert torch.equal(target["keypoints"][row, :, 0], (49 - x)[ORDER] if is_mirrored else x)


def test_keypoints_with_empty_pairs_are_stacked_and_their_dict_is_collated_by_key():
    _, target = only_batch(lambda i: pose(i, ()), 3)
    assert target["keypoints"].shape == (3, 5, 2)
    assert target["image_id"].tolist() == [0, 1, 2]
    _, targets = only_batch(lambda i: pose(i, None), 3)
    assert [entry["image_id"] for entry in targets] == [0, 1, 2]


def people(index: int) -> Any:
    count = index % 3
    boxes = np.array([[5, 5, 20 + n, 30] for n in range(count)], np.float32).reshape(count, 4)
    return image(), {
        "boxes": gl.Boxes(boxes),
        "labels": np.arange(count),
        "keypoints": gl.Keypoints(points_of(index, count), pairs=PAIRS),
        "visibility": np.arange(5 * count).reshape(count, 5),
    }


def test_keypoints_next_to_boxes_are_exchanged_in_each_dict():
    chain = [T.RandomHorizontalFlip(1.0), T.SanitizeBoundingBoxes(min_size=16)]
    _, targets = only_batch(people, 3, transforms=chain)
    assert [len(target["boxes"]) for target in targets] == [0, 0, 1]
    assert targets[2]["visibility"].tolist() == [[5, 7, 6, 9, 8]]
    assert targets[2]["keypoints"][0, :, 0].tolist() == (49 - points_of(2, 2)[1, ORDER, 0]).tolist()


def test_mosaic_exchanges_the_pairs_of_each_image_by_its_own_flips():
    chain = [T.RandomHorizontalFlip(), T.Mosaic(60), T.RandomHorizontalFlip()]

    def make(index):
        array = np.tile(np.float32([[10, 10], [5, 10], [15, 10]]), (1, 1, 1))  # the second point is left of the third
        return image(), {"boxes": gl.Boxes([[5, 5, 20, 30]]), "labels": np.array([index]), "keypoints": gl.Keypoints(
            array, pairs=[(1, 2)]), "visibility": np.array([[0, 1, 2]])}  # fmt: skip

    _, targets = only_batch(make, 16, transforms=chain)
    seen = set()
    for target in targets:
        for points, visibility in zip(target["keypoints"], target["visibility"].tolist(), strict=True):
            assert points[1, 0] < points[2, 0]
            seen.add(tuple(visibility))
    assert seen == {(0, 1, 2), (0, 2, 1)}


def test_each_view_exchanges_pairs_by_its_own_flips():
    views = T.MultiView([[T.RandomHorizontalFlip(1.0)], [T.CenterCrop(30)]])
    _, target = only_batch(pose, 3, transforms=[views])
    assert [view[1].tolist() for view in target["visibility"]] == [[10, 12, 11, 14, 13], [10, 11, 12, 13, 14]]
    assert [view.shape for view in target["keypoints"]] == [(3, 5, 2)] * 2


def test_keypoints_retain_their_pairs_in_pickles_and_disk_caches(tmp_path):
    points = gl.Keypoints(points_of(1), pairs=np.array(PAIRS))
    assert points.pairs == pickle.loads(pickle.dumps(points)).pairs == ((1, 2), (4, 3))
    cached = gl.Cached([(image(), points)], 1 << 20, where="disk", path=tmp_path, version="1")
    for _ in range(2):
        assert cached[0][1].pairs == ((1, 2), (4, 3))


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
def test_workers_give_the_batches_of_the_main_process():
    _, expected = only_batch(pose, 8, transforms=[T.RandomHorizontalFlip()])
    _, target = only_batch(pose, 8, transforms=[T.RandomHorizontalFlip()], num_workers=1)
    assert all(torch.equal(target[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form", ["loader", "padded"])
def test_visibility_of_two_sets_of_keypoints_is_exchanged_once(form):
    visibility = np.arange(5)
    targets = {"keypoints": points_of(1), "refined": points_of(2), "visibility": visibility}
    if form == "loader":
        names = ("keypoints", "refined")
        make = lambda i: (image(), {**targets, **{n: gl.Keypoints(targets[n], pairs=PAIRS) for n in names}})  # noqa: E731
        _, target = only_batch(make, 1, transforms=[T.RandomHorizontalFlip(1.0)])
    else:
        batch: Any = {
            name: gl.Keypoints(targets[name][None], pairs=PAIRS, valid=[5]) for name in ("keypoints", "refined")
        }
        batch["visibility"] = torch.from_numpy(visibility)[None]
        _, target = gl.Augment([T.RandomHorizontalFlip(1.0)])(image_batch(1), batch)
    assert target["visibility"].tolist() == [ORDER]


ANY = np.zeros((3, 2))  # three keypoints, whose places do not matter


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: gl.Keypoints(ANY, pairs=[(0, 3)]), ValueError, "must have each index of 0 … 2 at most once, for"),
        (lambda: gl.Keypoints(ANY, pairs=[(0, 1), (1, 2)]), ValueError, "got the index 1 in [(0, 1), (1, 2)]"),
        (
            lambda: gl.Keypoints([], pairs=[(0, 1)]),
            ValueError,
            "for an image without any, pass an array of shape (0,",
        ),
        (lambda: gl.Keypoints([1, 2], pairs=()), ValueError, "needs keypoints of shape (…, K, 2), got one point of"),
        (lambda: gl.Keypoints(ANY, pairs=3), TypeError, "must be a list of pairs of indices, such as [(1, 2), (3, 4)]"),
        (lambda: gl.Keypoints(ANY, pairs=[1]), TypeError, "Keypoints(pairs=…) must be a pair (left, right), got 1"),
    ],
)
def test_keypoints_refuse_invalid_pairs(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("make", "chain", "text"),
    [
        (lambda i: (image(), {"k": gl.Keypoints(points_of(i), pairs=PAIRS), "visibility": np.zeros(4)}), [],
         "must be an array or tensor of shape (5,), so that its entries are exchanged with the points, got float"),
        (lambda i: (image(), {"k": gl.Keypoints(points_of(i), pairs=PAIRS), "visibility": [1] * 5}), [],
         "so that its entries are exchanged with the points, got a list"),
        (lambda i: (image(), {"k": gl.Keypoints(points_of(i), pairs=PAIRS), "visibility": np.zeros(5),
                              "l": gl.Keypoints(points_of(i), pairs=[(1, 2)])}), [],
         "the visibility next to two Keypoints with different pairs= or draws= cannot be exchanged with both"),
        (lambda i: (image(), gl.Image(pixels(), draws=1), {
            "k": gl.Keypoints(points_of(i), pairs=PAIRS), "visibility": np.zeros(5),
            "l": gl.Keypoints(points_of(i), pairs=PAIRS, draws=1)}), [],
         "or draws= cannot be exchanged with both; put each Keypoints into a separate dict"),
        (pose, [T.SanitizeKeyPoints()], "but pairs= gives each point a fixed index; pass keypoints of shape (n, K, 2)"),
        (lambda i: (image(), gl.Keypoints(points_of(i)[i:], pairs=())), [],
         "keypoints with pairs=, are stacked, but sample[1] of sample 0 is float32 tensor 5×2, and sample[1] of"),
        (pose, [T.Mosaic(20)], "Mosaic combines the keypoints of several images, so that keypoints with pairs= must"),
    ],
)  # fmt: skip
def test_keypoints_with_pairs_are_refused_with_a_reason(make, chain, text):
    with pytest.raises((gl.SampleError, gl.CollateError), match=re.escape(text)):
        only_batch(make, 4, transforms=chain)


def test_augment_restacks_the_visibility_of_lists_of_keypoints():
    images = image_batch(3)
    points = [gl.Keypoints(points_of(index), pairs=PAIRS) for index in range(3)]
    batch = {"keypoints": points, "visibility": torch.arange(15).view(3, 5)}
    _, target = gl.Augment([T.RandomHorizontalFlip(1.0)])(images, batch)
    assert target["visibility"].tolist() == torch.arange(15).view(3, 5)[:, ORDER].tolist()
