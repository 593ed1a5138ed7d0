"""ClampKeyPoints and SanitizeKeyPoints, compared with torchvision's; and labels that are dropped with keypoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.peers import torchvision
from targets.samples import image, only_batch

import gpuload as gl
from gpuload import transforms as T

HEIGHT, WIDTH = 40, 50


def random_points(index: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Return points inside the image, outside and on its borders."""
    random = np.random.default_rng(index)
    points = random.choice([-3, -0.5, 0, 7.25, HEIGHT - 1, HEIGHT - 0.5, HEIGHT, WIDTH - 1, WIDTH, 70], shape)
    return points.astype(dtype)


def sample(index: int, shape: tuple[int, ...], dtype: Any = np.float32, **fields: Any) -> Any:
    points = random_points(index, (*shape, 2), dtype)
    labels = np.arange(len(points)) + 10 * index
    return image(HEIGHT, WIDTH), {"points": gl.Keypoints(points), "labels": labels, **fields}


def torchvision_result(transform: Any, index: int, shape: tuple[int, ...], dtype: Any) -> Any:
    tv_tensors = torchvision().tv_tensors
    points = torch.from_numpy(random_points(index, (*shape, 2), dtype))
    targets = {"points": tv_tensors.KeyPoints(points, canvas_size=(HEIGHT, WIDTH)), "labels": torch.arange(len(points))}
    return transform({"image": tv_tensors.Image(torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)), **targets})


@pytest.mark.parametrize("shape", [(12,), (12, 2), (12, 1, 3), (0,)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("name", ["ClampKeyPoints", "SanitizeKeyPoints"])
def test_keypoint_transforms_give_torchvisions_points_and_labels(name, dtype, shape):
    arguments = ["default"] if name == "SanitizeKeyPoints" else []
    original = getattr(torchvision().transforms.v2, name)(*arguments)
    _, targets = only_batch(lambda i: sample(i, shape, dtype), 6, transforms=[getattr(T, name)(*arguments)])
    for index, target in enumerate(targets):
        expected = torchvision_result(original, index, shape, dtype)
        assert torch.equal(target["points"], torch.Tensor(expected["points"]).to(target["points"].dtype))
        assert (target["labels"] - 10 * index).tolist() == expected["labels"].tolist()
        assert target["points"].dtype == getattr(torch, dtype.__name__)


def test_sanitize_keypoints_without_a_labels_getter_retains_labels():
    _, targets = only_batch(lambda i: sample(i, (12,)), 4, transforms=[T.SanitizeKeyPoints()])
    assert [len(target["labels"]) for target in targets] == [12] * 4
    assert min(len(target["points"]) for target in targets) < 12


def test_sanitize_keypoints_drops_entries_of_all_values_that_labels_getter_returns():
    getter = lambda sample: (sample[1]["labels"], sample[1]["names"])  # noqa: E731
    make = lambda i: sample(i, (12, 2), names=torch.arange(12) + 10 * i)  # noqa: E731
    _, targets = only_batch(make, 4, transforms=[T.SanitizeKeyPoints(getter)])
    for target in targets:
        assert target["names"].tolist() == target["labels"].tolist()
        assert len(target["points"]) == len(target["labels"]) < 12


def test_sanitize_keypoints_looks_at_points_before_a_later_crop():
    chain = [T.SanitizeKeyPoints("default"), T.CenterCrop(10)]  # the crop begins at x = 20, y = 15
    make = lambda i: sample(i, (12,), boxes=gl.Boxes([[1, 2, 30, 30]]))  # noqa: E731
    _, targets = only_batch(make, 4, transforms=chain)
    _, uncropped = only_batch(make, 4, transforms=[T.SanitizeKeyPoints("default")])
    for target, uncropped_target in zip(targets, uncropped, strict=True):
        assert torch.equal(target["points"], uncropped_target["points"] - torch.tensor([20.0, 15.0]))
        assert target["labels"].tolist() == uncropped_target["labels"].tolist()
        assert target["boxes"].tolist() == [[0, 0, 10, 10]]


def test_sanitize_keypoints_drops_different_points_in_each_view():
    views = T.MultiView([[T.CenterCrop(10)], [T.CenterCrop(38)]])

    def make(index):
        points = np.random.default_rng(index).uniform(0, 40, (40, 2))
        return image(), {"points": gl.Keypoints(points), "labels": np.arange(40)}

    _, targets = only_batch(make, 3, transforms=[views, T.SanitizeKeyPoints()])
    for target in targets:
        points_of_small_crop, points_of_large_crop = target["points"]
        assert len(points_of_small_crop) < len(points_of_large_crop) < 40
    text = "SanitizeKeyPoints drops different keypoints in each view of a MultiView"
    with pytest.raises(gl.SampleError, match=text):
        only_batch(make, 3, transforms=[views, T.SanitizeKeyPoints("default")])


def test_sanitize_keypoints_after_mosaic_drops_points_outside_it():
    _, targets = only_batch(lambda i: sample(i, (5,)), 4, transforms=[T.Mosaic(30), T.SanitizeKeyPoints()])
    for target in targets:
        assert 0 < len(target["points"]) < 4 * 5  # four images with five points each
        assert ((target["points"] >= 0) & (target["points"] < 30)).all()


@pytest.mark.parametrize(
    ("make", "chain", "text"),
    [
        (lambda i: (image(), gl.Boxes([[1, 2, 3, 4]])), [T.SanitizeKeyPoints()],
         r"needs samples with one set of keypoints, gpuload.Keypoints\(array\), but this sample has 0"),
        (lambda i: (image(), {"points": gl.Keypoints(np.ones((3, 2))), "labels": np.ones(2)}),
         [T.SanitizeKeyPoints("default")],
         r"SanitizeKeyPoints: there are 3 keypoints, but their labels have shape \(2,\)"),
        (lambda i: (image(), {"points": gl.Keypoints(np.ones((3, 2)))}), [T.SanitizeKeyPoints("default")],
         r"no labels were found.*give SanitizeKeyPoints a labels_getter= that returns the labels of the keypoints"),
        (lambda i: (image(), {"b": gl.Boxes([[1, 2, 9, 9]]), "points": gl.Keypoints([[[1, 2]]]), "labels": np.ones(1)}),
         [T.SanitizeBoundingBoxes(), T.SanitizeKeyPoints("default")],
         r"drops entries of value 2 of the sample .*, but this value also has one entry per box"),
    ],
)  # fmt: skip
def test_sanitize_keypoints_refuses_unsuitable_samples(make, chain, text):
    with pytest.raises(gl.SampleError, match=text):
        only_batch(make, 2, transforms=chain)


def test_sanitize_keypoints_accepts_samples_without_targets():
    assert only_batch(lambda i: (image(), 7), 2, transforms=[T.SanitizeKeyPoints()])[1].tolist() == [7, 7]


def test_chain_refuses_sanitize_keypoints_in_invalid_combinations_with_mosaic():
    with pytest.raises(ValueError, match="SanitizeKeyPoints cannot come before Mosaic, which joins the keypoints"):
        T.Chain([T.SanitizeKeyPoints(), T.Mosaic(9)])
    with pytest.raises(ValueError, match=r"SanitizeKeyPoints\(labels_getter=…\) cannot be combined with Mosaic"):
        T.Chain([T.Mosaic(9), T.SanitizeKeyPoints("default")])
