"""ClampKeyPoints and SanitizeKeyPoints, held against torchvision's; and what belongs to keypoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.peers import torchvision
from targets.test_batches import image, only_batch

import gpuload as gl
from gpuload import transforms as T

HEIGHT, WIDTH = 40, 50


def spread(index: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Points inside, outside and right on the borders."""
    random = np.random.default_rng(index)
    points = random.choice([-3, -0.5, 0, 7.25, HEIGHT - 1, HEIGHT - 0.5, HEIGHT, WIDTH - 1, WIDTH, 70], shape)
    return points.astype(dtype)


def sample(index: int, shape: tuple[int, ...], dtype: Any = np.float32, **more: Any) -> Any:
    points = spread(index, (*shape, 2), dtype)
    return image(HEIGHT, WIDTH), {"points": gl.Keypoints(points), "labels": np.arange(len(points)) + 10 * index, **more}


def theirs(transform: Any, index: int, shape: tuple[int, ...], dtype: Any) -> Any:
    torchvision()
    from torchvision import tv_tensors

    points = torch.from_numpy(spread(index, (*shape, 2), dtype))
    given = {"points": tv_tensors.KeyPoints(points, canvas_size=(HEIGHT, WIDTH)), "labels": torch.arange(len(points))}
    return transform({"image": tv_tensors.Image(torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)), **given})


@pytest.mark.parametrize("shape", [(12,), (12, 2), (12, 1, 3), (0,)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("name", ["ClampKeyPoints", "SanitizeKeyPoints"])
def test_points_are_torchvisions(name, dtype, shape):
    v2 = torchvision().transforms.v2
    ours, original = [getattr(T, name)()], getattr(v2, name)()
    if name == "SanitizeKeyPoints":
        ours, original = [T.SanitizeKeyPoints("default")], v2.SanitizeKeyPoints("default")
    _, targets = only_batch(lambda i: sample(i, shape, dtype), 6, transforms=ours)
    for index, found in enumerate(targets):
        expected = theirs(original, index, shape, dtype)
        assert torch.equal(found["points"], torch.Tensor(expected["points"]).to(found["points"].dtype))
        assert (found["labels"] - 10 * index).tolist() == expected["labels"].tolist()
        assert found["points"].dtype == torch.from_numpy(spread(0, (1, 2), dtype)).dtype


def test_without_a_getter_labels_stay():
    _, targets = only_batch(lambda i: sample(i, (12,)), 4, transforms=[T.SanitizeKeyPoints()])
    assert [len(found["labels"]) for found in targets] == [12] * 4
    assert min(len(found["points"]) for found in targets) < 12


def test_the_getter_names_any_number_of_leaves():
    getter = lambda sample: (sample[1]["labels"], sample[1]["names"])  # noqa: E731
    make = lambda i: sample(i, (12, 2), names=torch.arange(12) + 10 * i)  # noqa: E731
    _, targets = only_batch(make, 4, transforms=[T.SanitizeKeyPoints(getter)])
    for found in targets:
        assert found["names"].tolist() == found["labels"].tolist()
        assert len(found["points"]) == len(found["labels"]) < 12


def test_points_are_judged_where_they_are_when_their_turn_comes():
    """A crop after it may leave them outside; boxes beside them stay."""
    chain = [T.SanitizeKeyPoints("default"), T.CenterCrop(10)]
    make = lambda i: sample(i, (12,), boxes=gl.Boxes([[1, 2, 30, 30]]))  # noqa: E731
    _, targets = only_batch(make, 4, transforms=chain)
    _, plain = only_batch(make, 4, transforms=[T.SanitizeKeyPoints("default")])
    for found, before in zip(targets, plain, strict=True):
        assert torch.equal(found["points"], before["points"] - torch.tensor([20.0, 15.0]))
        assert found["labels"].tolist() == before["labels"].tolist()
        assert found["boxes"].tolist() == [[0, 0, 10, 10]]


def test_views_have_points_of_their_own():
    views = T.MultiView([[T.CenterCrop(10)], [T.CenterCrop(38)]])

    def make(index):
        points = np.random.default_rng(index).uniform(0, 40, (40, 2))
        return image(), {"points": gl.Keypoints(points), "labels": np.arange(40)}

    _, targets = only_batch(make, 3, transforms=[views, T.SanitizeKeyPoints()])
    for found in targets:
        small, large = found["points"]
        assert len(small) < len(large) < 40
    text = "SanitizeKeyPoints drops different keypoints in each view of a MultiView"
    with pytest.raises(gl.SampleError, match=text):
        only_batch(make, 3, transforms=[views, T.SanitizeKeyPoints("default")])


def test_after_a_mosaic():
    _, targets = only_batch(lambda i: sample(i, (5,)), 4, transforms=[T.Mosaic(30), T.SanitizeKeyPoints()])
    for found in targets:
        assert 0 < len(found["points"]) < 20
        assert ((found["points"] >= 0) & (found["points"] < 30)).all()


@pytest.mark.parametrize(
    ("make", "chain", "text"),
    [
        (
            lambda i: (image(), gl.Boxes([[1, 2, 3, 4]])),
            [T.SanitizeKeyPoints()],
            r"needs samples with one set of keypoints, gpuload.Keypoints\(array\), but this sample has 0",
        ),
        (
            lambda i: (image(), {"points": gl.Keypoints(np.ones((3, 2))), "labels": np.ones(2)}),
            [T.SanitizeKeyPoints("default")],
            r"SanitizeKeyPoints: there are 3 keypoints, but their labels have shape \(2,\)",
        ),
        (
            lambda i: (image(), {"points": gl.Keypoints(np.ones((3, 2)))}),
            [T.SanitizeKeyPoints("default")],
            r"no labels were found.*give SanitizeKeyPoints a labels_getter= that returns the labels of the keypoints",
        ),
        (
            lambda i: (
                image(),
                {"b": gl.Boxes([[1, 2, 9, 9]]), "points": gl.Keypoints([[[1, 2]]]), "labels": np.ones(1)},
            ),
            [T.SanitizeBoundingBoxes(), T.SanitizeKeyPoints("default")],
            r"drops entries of value 2 of the sample .*, but this value also has one entry per box",
        ),
    ],
)
def test_samples_that_do_not_fit(make, chain, text):
    with pytest.raises(gl.SampleError, match=text):
        only_batch(make, 2, transforms=chain)


def test_samples_without_targets_leave_nothing_to_do():
    assert len(only_batch(lambda i: (image(), 7), 2, transforms=[T.SanitizeKeyPoints()])) == 2


def test_what_cannot_be():
    with pytest.raises(ValueError, match="SanitizeKeyPoints cannot come before Mosaic, which joins the keypoints"):
        T.Chain([T.SanitizeKeyPoints(), T.Mosaic(9)])
    with pytest.raises(ValueError, match=r"SanitizeKeyPoints\(labels_getter=…\) cannot be combined with Mosaic"):
        T.Chain([T.Mosaic(9), T.SanitizeKeyPoints("default")])
